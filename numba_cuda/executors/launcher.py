"""Kernels as the driver knows them: a cubin loaded, its parameters packed, and a launch that costs the host little.

Numba takes each argument apart at each launch, 50 us for a dozen arrays. Here that is done once: a `Launch` holds its
parameters as the driver wants them, so that launching again is a single call of the driver, and launching on other
arrays of the same shapes and strides is that and a few pointers.

An array is 5 + 2 ndim parameters of 8 bytes: two that are of no use here, the number of elements, the bytes of one, the
pointer, then shape and strides in bytes. A number is one of 4 bytes. (numba-cuda 0.30, _Kernel._prepare_args in its
module dispatcher; a test holds it against the parameters that compiled kernels have.)

**Source**: CUDA Driver API, "Library Management" (cuLibraryLoadData) and "Execution Control" (cuLaunchKernel).
"""

import ctypes
import struct

import numpy as np
from cuda.bindings import driver as binding

from flash_cuda.executors.assembler import is_array

SLOT = 8  # bytes between one parameter and the next; the widest has as many
POINTER = 4  # which of an array's parameters says where it is


class DriverError(RuntimeError):
    """The driver refuses; its error is named."""


def call(function, *args):
    """What a function of the driver returns besides its status; `DriverError` if that is not success."""
    status, *found = function(*args)
    if status != binding.CUresult.CUDA_SUCCESS:
        raise DriverError(f"{function.__name__}: {getattr(status, 'name', status)}")
    return found[0] if found else None


def current_device():
    """Number of the device whose context is this thread's; a context is made if there is none."""
    status, device = binding.cuCtxGetDevice()
    if status != binding.CUresult.CUDA_SUCCESS:
        from numba import cuda

        cuda.current_context()
        device = call(binding.cuCtxGetDevice)
    return int(device)


class Kernel:
    """A linked kernel, loaded; the driver brings it to a device when it is first launched there.

    Parameters
    ----------
    cubin : cubin_cache.Cubin
    device : int

    Attributes
    ----------
    handle, function : CUkernel, CUfunction
        The same kernel, as attributes and as launches want it.

    Raises
    ------
    DriverError
        The driver does not take the cubin.
    """

    def __init__(self, cubin, device=0):
        self.entry, self.device = cubin.entry, device
        self._library = call(binding.cuLibraryLoadData, cubin.code, [], [], 0, [], [], 0)
        self.handle = call(binding.cuLibraryGetKernel, self._library, cubin.entry.encode())
        self.function = binding.CUfunction(int(self.handle))  # the launch takes either
        self._shared = 0

    def allow_shared(self, nbytes):
        """Let a block have so much dynamic shared memory, more than any has by default."""
        if nbytes > self._shared:
            attribute = binding.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(binding.cuKernelSetAttribute, attribute, nbytes, self.handle, self.device)
            self._shared = nbytes

    @property
    def registers(self):
        """Registers a thread."""
        return self._attribute("CU_FUNC_ATTRIBUTE_NUM_REGS")

    @property
    def local_bytes(self):
        """Local memory a thread: stack and spilled registers."""
        return self._attribute("CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES")

    def _attribute(self, name):
        attribute = getattr(binding.CUfunction_attribute, name)
        return call(binding.cuKernelGetAttribute, attribute, self.handle, self.device)


class Launch:
    """One launch, ready: call it to queue it, again and again.

    Parameters
    ----------
    kernel : Kernel
    blocks, threads : int or tuple of int
        Of the grid, and of a block.
    args : tuple
        Numba device arrays, numbers and tuples of these, as the kernel's signature has them.
    shared : int
        Bytes of dynamic shared memory.
    stream : numba.cuda stream, optional

    Attributes
    ----------
    arrays : list of (array, int)
        The arrays among the arguments, and which parameter is the pointer of each, for `move`.
    """

    def __init__(self, kernel, blocks, threads, args, shared=0, stream=0):
        self.kernel, self.args, self.arrays = kernel, args, []
        form, values = [], []  # as `struct` wants them, an entry a parameter
        for value in _leaves(args):
            if is_array(value):
                self.arrays.append((value, len(form) + POINTER))
                address = value.device_ctypes_pointer.value or 0  # of no elements: None
                words = (0, 0, value.size, value.dtype.itemsize, address, *value.shape, *value.strides)
                form += ["q"] * len(words)
                values += words
            else:
                form.append("f4x" if isinstance(value, (float, np.floating)) else "i4x")
                values.append(value)
        self.parameters = len(form)
        self._words = (ctypes.c_int64 * len(form))()
        struct.pack_into("<" + "".join(form), self._words, 0, *values)
        first = ctypes.addressof(self._words)
        self._addresses = (ctypes.c_void_p * len(form))(*range(first, first + SLOT * len(form), SLOT))
        queue = binding.CUstream(int(getattr(stream, "handle", stream) or 0))
        self._call = (
            kernel.function, *_three(blocks), *_three(threads), shared, queue, ctypes.addressof(self._addresses), 0,
        )  # fmt: skip

    def __call__(self):
        (status,) = binding.cuLaunchKernel(*self._call)
        if status:
            raise DriverError(f"cuLaunchKernel: {getattr(status, 'name', status)} for {self.kernel.entry}")

    def into(self, queue):
        """Queue it in another stream, a CUstream."""
        *sizes, _, parameters, extra = self._call
        call(binding.cuLaunchKernel, *sizes, queue, parameters, extra)

    def move(self, place, address):
        """Let an array be at another address, by its place in ``arrays``; shape and strides stay."""
        self._words[place] = address


def _leaves(args):
    """The arguments with tuples opened, as a kernel has them."""
    for value in args:
        if isinstance(value, tuple):
            yield from _leaves(value)
        else:
            yield value


def _three(sizes):
    """A size of a grid or a block along three axes."""
    sizes = sizes if isinstance(sizes, tuple) else (sizes,)
    return (*map(int, sizes), 1, 1)[:3]
