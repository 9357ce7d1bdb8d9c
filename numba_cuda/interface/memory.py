"""The two kinds of arrays that are always there: NumPy's, and numba's on a GPU; what a kind of array has to offer.

A kernel wants NumPy arrays or something with ``__cuda_array_interface__`` and a dtype; a caller wants back what was
given. A kind is that way there and back, and the few operations on whole arrays that padding needs.
"""

import contextlib
import sys

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)


class DeviceView:
    """Device memory by pointer, shape and strides in bytes; bf16 shows as the uint16 that kernels take for it."""

    def __init__(self, owner, pointer, shape, strides, dtype):
        self.owner, self.pointer, self.shape, self.strides = owner, pointer, tuple(shape), tuple(strides)
        self.dtype = np.dtype(dtype)

    @property
    def __cuda_array_interface__(self):
        stored = np.dtype(np.uint16) if self.dtype == BF16 else self.dtype
        return {"shape": self.shape, "strides": self.strides, "typestr": stored.str, "data": (self.pointer, False),
                "version": 3}  # fmt: skip

    def transpose(self, *axes):
        """The same memory with its axes in another order."""
        shape, strides = ([x[a] for a in axes] for x in (self.shape, self.strides))
        return DeviceView(self.owner, self.pointer, shape, strides, self.dtype)


class NumPy:
    """Arrays in host memory; the other kinds change what differs."""

    name, host, numpy = "a NumPy array", True, np

    def __init__(self, like):
        self.like = like

    @staticmethod
    def holds(x):
        return isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray)

    def place(self, x):
        """Where the array lives, in words; None for the one place there is."""

    def dtype(self, x):
        """The NumPy dtype of the elements, or whatever else they are."""
        return x.dtype

    def wants_gradient(self, x):
        return False

    def random(self):
        """A seed for dropout, from the generator that `np.random.seed` or its like sets."""
        return int(np.random.randint(0, 2**63, dtype=np.int64))

    def layout(self, x):
        """Shape, strides and dtype, in this kind's own terms: to be compared with another array's."""
        return x.shape, x.strides, x.dtype

    def enter(self, x):
        """The array as an executor takes it; nothing is copied."""
        return x

    def leave(self, result, *axes):
        """An executor's result as this kind, its axes reordered and contiguous."""
        return np.ascontiguousarray(result.transpose(*axes) if axes else result)

    def to_host(self, x):
        """A NumPy array of the same elements."""
        return x

    def from_host(self, x):
        return x

    def index(self, at):
        """Row numbers as this kind indexes with them."""
        return at

    def permuted(self, x, *axes):
        return x.transpose(*axes)

    def contiguous(self, x, *axes):
        """A copy where need be, its axes reordered."""
        return self.numpy.ascontiguousarray(self.permuted(x, *axes) if axes else x)

    def pad(self, x, at, size):
        """(size, ...) of zeros, with the rows of x at the places ``at``."""
        padded = self.numpy.zeros((size, *x.shape[1:]), x.dtype)
        padded[self.index(at)] = x
        return padded

    def take(self, x, at):
        return x[self.index(at)]

    def device(self):
        """A context in which the arrays' device is the current one."""
        return contextlib.nullcontext()

    def gpu(self):
        """The executor for arrays of this kind: their own device and stream."""
        from flash_cuda.executors.gpu import Gpu

        with self.device():
            return Gpu(stream=_stream(self.stream()))

    def stream(self):
        """Pointer of the stream on which the arrays are being worked on; 0 is the default one."""
        return 0


class Numba(NumPy):
    """numba.cuda device arrays. What is no plain view of memory goes through the host."""

    name, host = "a numba device array", False

    @staticmethod
    def holds(x):
        module = sys.modules.get("numba.cuda.cudadrv.devicearray")
        return module is not None and isinstance(x, module.DeviceNDArray)

    def address(self, x):
        """Where the array starts on its device, as a number."""
        return x.device_ctypes_pointer.value or 0

    def enter(self, x):
        return DeviceView(x, int(x.__cuda_array_interface__["data"][0]), x.shape, x.strides, x.dtype)

    def leave(self, result, *axes):
        view = self.enter(result).transpose(*(axes or range(result.ndim)))
        return self._array(view, getattr(result, "face", result.dtype))

    def to_host(self, x):
        return x.copy_to_host()

    def from_host(self, x):
        from flash_cuda.executors.gpu import upload

        return self._array(self.enter(upload(np.ascontiguousarray(x))), x.dtype)

    def contiguous(self, x, *axes):
        whole = self.to_host(self.permuted(x, *axes) if axes else x)
        return self.from_host(whole)

    def permuted(self, x, *axes):
        return self._array(self.enter(x).transpose(*axes), x.dtype)

    def pad(self, x, at, size):
        return self.from_host(NumPy.pad(self, self.to_host(x), at, size))

    def take(self, x, at):
        return self.from_host(self.to_host(x)[at])

    @staticmethod
    def _array(view, dtype):
        """A device array on the memory of a view."""
        from numba.cuda.cudadrv.devicearray import DeviceNDArray

        return DeviceNDArray(view.shape, view.strides, dtype, gpu_data=view.owner.gpu_data)


def _stream(pointer):
    """A stream by its pointer, as numba takes it."""
    if not pointer:
        return 0
    from numba import cuda

    return cuda.external_stream(pointer)
