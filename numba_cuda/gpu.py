"""The GPU executor: compiles a body for the types of its arguments and launches it.

Host arrays (NumPy) are uploaded with their strides as they are, so that a transposed or expanded view is really
read as one, and results come back as NumPy arrays. Device arrays (anything with ``__cuda_array_interface__``)
stay where they are.
"""

import ctypes
from typing import ClassVar

import ml_dtypes
import numpy as np
from cuda.bindings import driver as binding
from numba import cuda
from numba.cuda.cudadrv.driver import driver

from flash_cuda import tensor_map
from flash_cuda.assembler import device_dtype, numba_type

GUARD_BYTES = 4096  # on each side of every output; a multiple of any alignment


class Gpu:
    """Executor that launches on the current CUDA device.

    Parameters
    ----------
    guard : bool
        Surround each output with a band of poison; ``guards_ok`` then tells whether a kernel wrote past an end.
    stream : numba.cuda stream, optional
        The stream of all launches and copies; the default stream if not given.

    Raises
    ------
    RuntimeError
        There is no usable CUDA device.
    """

    where = "gpu"

    _compiled: ClassVar[dict] = {}  # (body, signature) -> kernel; a body is made once for each tile shape

    def __init__(self, guard=False, stream=0):
        if not cuda.is_available():
            raise RuntimeError("on: no CUDA GPU here; give on=flash_cuda.emulator.Emulator() to run the same kernel "
                               "on the CPU, or use refimpl.oracle for the answer alone")
        self.guard, self.stream = guard, stream
        self._host = True
        self._bands = []
        self._launches = []

    def input(self, name, array):
        host = isinstance(array, np.ndarray)
        if name == "Q":  # results go back to where the queries came from; arrays of rules may be anywhere
            self._host = host
        if host:
            return upload(array, self.stream)
        return as_stored(cuda.as_cuda_array(array))

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
        return upload(tensor_map.encode(*tiles), self.stream)

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
        configured = kernel_for(body, args, shared)[blocks, threads, self.stream, shared]
        configured(*args)
        self._launches.append((configured, args))

    def replay(self):
        """Launch again everything launched so far, on the same arrays: kernels alone, for timing."""
        for configured, args in self._launches:
            configured(*args)


def kernel_for(body, args, shared=0):
    """The compiled kernel for these argument types; arrays of any strides share one.

    ``body.jit_options``, if there, are passed to the compiler; ``shared`` bytes of dynamic shared memory are allowed.
    """
    signature = tuple(numba_type(a) for a in args)
    key = body, signature
    if key not in Gpu._compiled:
        kernel = cuda.jit(signature, **getattr(body, "jit_options", {}))(body)
        if shared:  # what a kernel has besides counts towards the default limit too
            _allow_shared(kernel, shared)
        Gpu._compiled[key] = kernel
    return Gpu._compiled[key]


def _allow_shared(kernel, nbytes):
    """Let a compiled kernel have more dynamic shared memory than any has by default; Numba has no word for it."""
    (overload,) = kernel.overloads.values()
    attribute = binding.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    driver.cuKernelSetAttribute(attribute, nbytes, overload._codelibrary.get_cufunc().handle, 0)


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
