"""The GPU executor: compiles a body for the types of its arguments, or finds its cubin in a cache, and launches it.

Host arrays (NumPy) are uploaded with their strides as they are, so that a transposed or expanded view is really
read as one, and results come back as NumPy arrays. Device arrays (anything with ``__cuda_array_interface__``)
stay where they are.
"""

import contextlib
import ctypes
from typing import ClassVar

import ml_dtypes
import numpy as np
from cuda.bindings import driver as binding
from numba import cuda

from flash_cuda.executors import cubin_cache, cubin_key
from flash_cuda.executors.assembler import compile_cubin, device_dtype, is_array, numba_type
from flash_cuda.executors.launcher import DriverError, Kernel, Launch, call, current_device
from flash_cuda.parts import tensor_map

GUARD_BYTES = 4096  # on each side of every output; a multiple of any alignment


class Gpu:
    """Executor that launches on the current CUDA device.

    Parameters
    ----------
    guard : bool
        Surround each output with a band of poison; ``guards_ok`` then tells whether a kernel wrote past an end.
    stream : numba.cuda stream, optional
        The stream of all launches and copies; the default stream if not given.

    Attributes
    ----------
    launches : list of Launch
        Everything launched so far.
    inputs : dict of str to device arrays
        Name -> what kernels were given under it; the last of a name.
    maps : list of (device array, tiles)
        The descriptors made so far, and what of.

    Raises
    ------
    RuntimeError
        There is no usable CUDA device.
    """

    where = "gpu"

    _compiled: ClassVar[dict] = {}  # (body, kinds of arguments, device) -> kernel; a body is made once a tile shape

    def __init__(self, guard=False, stream=0):
        if not cuda.is_available():
            raise RuntimeError("on: no CUDA GPU here; give on=flash_cuda.executors.emulator.Emulator() to run the "
                               "same kernel on the CPU, or use refimpl.oracle for the answer alone")
        self.guard, self.stream = guard, stream
        self._host = True
        self._bands = []
        self.launches, self.inputs, self.maps = [], {}, []

    def input(self, name, array):
        host = isinstance(array, np.ndarray)
        if name == "Q":  # results go back to where the queries came from; arrays of rules may be anywhere
            self._host = host
        sent = upload(array, self.stream) if host else as_stored(cuda.as_cuda_array(array))
        self.inputs[name] = sent
        return sent

    def empty(self, name, shape, dtype):
        """A device array of NaN (0xFF bytes, which are NaN in every float type)."""
        stored = device_dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * stored.itemsize
        band = GUARD_BYTES if self.guard else 0
        buffer = cuda.device_array(nbytes + 2 * band, np.uint8, stream=self.stream)
        if buffer.size:
            cuda.cudadrv.driver.device_memset(buffer, 0xFF, buffer.size, stream=self.stream)
        if band:
            self._bands.append((name, buffer, nbytes))
        view = strided(buffer, band, shape, _c_strides(shape, stored.itemsize), stored)
        view.face = np.dtype(dtype)
        return view

    @property
    def capability(self):
        """Compute capability of the device, (major, minor)."""
        return cuda.get_current_device().compute_capability

    @property
    def multiprocessors(self):
        """Multiprocessors of the device."""
        return cuda.get_current_device().MULTIPROCESSOR_COUNT

    @property
    def shared_limit(self):
        """Bytes of shared memory that a block may have on the device."""
        return cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN

    def tensor_maps(self, *tiles):
        """Descriptors by which the copy engine finds boxes of arrays; ``(array, rows of a box[, length])`` each."""
        maps = upload(tensor_map.encode(*tiles), self.stream)
        self.maps.append((maps, tiles))
        return maps

    def result(self, array):
        if not self._host:
            return array
        return array.copy_to_host(stream=self.stream).view(array.face)

    def guards_ok(self):
        """Whether every guard band is as it was laid; True without bands."""
        return not self.broken_guards()

    def broken_guards(self):
        """Names of the outputs past whose ends something was written."""
        broken = []
        for name, buffer, nbytes in self._bands:
            ends = (buffer[:GUARD_BYTES].copy_to_host(), buffer[GUARD_BYTES + nbytes:].copy_to_host())
            if any((end != 0xFF).any() for end in ends):
                broken.append(name)
        return broken

    def launch(self, body, blocks, threads, args, shared=0):
        launch = Launch(kernel_for(body, args, shared), blocks, threads, args, shared, self.stream)
        launch()
        self.launches.append(launch)

    def replay(self):
        """Launch again everything launched so far, on the same arrays: kernels alone, for timing."""
        for launch in self.launches:
            launch()

    def graph(self):
        """Everything launched so far as one CUDA graph: call it to do it again, on the same arrays."""
        from flash_cuda.executors.graph import Graph

        return Graph(self.launches, self.stream)


def kernel_for(body, args, shared=0):
    """The loaded kernel for these types of arguments; arrays of any strides share one.

    ``body.jit_options``, if there, are passed to the compiler; ``shared`` bytes of dynamic shared memory are allowed.
    """
    key = body, _kinds(args), current_device()
    kernel = Gpu._compiled.get(key)
    if kernel is None:
        kernel = Gpu._compiled[key] = _kernel(body, tuple(numba_type(a) for a in args), key[-1])
    if shared:  # what a kernel has besides counts towards the default limit too
        kernel.allow_shared(shared)
    return kernel


def _kinds(args):
    """What a kernel's signature depends on, without the cost of Numba's types."""
    return tuple(
        _kinds(a) if isinstance(a, tuple) else (a.dtype, a.ndim) if is_array(a) else isinstance(a, (float, np.floating))
        for a in args
    )


def _kernel(body, signature, device):
    """The kernel out of the cache, or compiled and put there."""
    cc = tuple(cuda.get_current_device().compute_capability)
    cc = (*cc, "a") if cc >= (9, 0) else cc  # everything that this very GPU has, as Numba would
    name = None
    if cubin_cache.folder():
        with contextlib.suppress(cubin_key.NoName):
            name = cubin_key.name_of(body, signature, cc, call(binding.cuDriverGetVersion))
    cubin = name and cubin_cache.load(name)
    if cubin:
        with contextlib.suppress(DriverError):  # then it is not what it was: compiled anew
            return Kernel(cubin, device)
    cubin = compile_cubin(body, signature, cc)
    if name:
        cubin_cache.store(name, cubin)
    return Kernel(cubin, device)


def upload(array, stream=0):
    """A device copy of a NumPy array with the same strides: the span of memory it touches is copied, no more."""
    stored = array.view(device_dtype(array.dtype)) if array.dtype == ml_dtypes.bfloat16 else array
    if not stored.size:
        return cuda.device_array(stored.shape, stored.dtype)
    low, high = np.lib.array_utils.byte_bounds(stored)
    start = stored.__array_interface__["data"][0] - low
    span = np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
    return strided(cuda.to_device(span, stream=stream), start, stored.shape, stored.strides, stored.dtype)


def strided(buffer, offset, shape, strides, dtype):
    """A view of a byte buffer on the device with any shape and strides."""
    if not int(np.prod(shape, dtype=np.int64)):
        return cuda.device_array(shape, dtype)
    return cuda.cudadrv.devicearray.DeviceNDArray(
        shape, strides, dtype, gpu_data=buffer.gpu_data.view(offset), stream=buffer.stream)


def as_stored(array):
    """A device array as its kernel sees it; bf16 arrives as two-byte elements of another name."""
    stored = device_dtype(array.dtype)
    return array if stored == array.dtype else array.view(stored)


def _c_strides(shape, itemsize):
    strides = [itemsize]
    for n in shape[:0:-1]:
        strides.insert(0, strides[0] * max(n, 1))
    return tuple(strides)
