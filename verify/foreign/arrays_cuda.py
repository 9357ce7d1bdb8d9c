"""CuPy's and Numba's device arrays for `arrays`. Without a GPU, Numba's are those of its own simulator."""

import os
from contextlib import contextmanager
from types import SimpleNamespace

import ml_dtypes
import numpy as np

from verify.foreign.arrays_numpy import BAND, POISON, Arrays

_BF16 = np.dtype(ml_dtypes.bfloat16)


class CupyArrays(Arrays):
    """Arrays of CuPy. Everything that a kernel allocates through CuPy's pool is banded."""

    name, executor = "cupy", "gpu"

    def __init__(self):
        super().__init__()
        import cupy

        self._cupy = cupy

    @property
    def device(self):
        return self._cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()

    def sync(self):
        self._cupy.cuda.runtime.deviceSynchronize()

    @contextmanager
    def watch(self):
        pool, before = self._cupy.cuda.MemoryPool(), self._cupy.cuda.get_allocator()

        def banded(size):
            if not size or self._full():
                return pool.malloc(size)
            memory = pool.malloc(2 * BAND + size)
            memory.memset(POISON, 2 * BAND + size)
            raw = self._cupy.ndarray((2 * BAND + size,), np.uint8, memory)
            self._bands.append(("an output or work array", raw))
            return memory + BAND

        self._cupy.cuda.set_allocator(banded)
        try:
            yield
        finally:
            self._cupy.cuda.set_allocator(before)

    def _buffer(self, raw):
        return self._cupy.asarray(raw)

    def _view(self, buffer, first, shape, strides, dtype):
        return self._cupy.ndarray(shape, dtype, buffer.data + first, strides)

    def _ends(self, buffer):
        return np.concatenate([buffer[:BAND].get(), buffer[-BAND:].get()])


class NumbaArrays(Arrays):
    """Device arrays of numba.cuda. What a kernel's host code makes by `cuda.device_array` is banded."""

    name = "numba"

    def __init__(self):
        super().__init__()
        from numba import cuda

        self._cuda = cuda
        self._simulated = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
        self.executor = "simulated" if self._simulated else "gpu"

    @property
    def device(self):
        if self._simulated:
            return super().device
        name = self._cuda.get_current_device().name
        return name.decode() if isinstance(name, bytes) else name

    def put(self, x, what="an input"):
        if x.dtype == _BF16:
            raise TypeError("numba has no bf16 arrays")
        return super().put(x, what)

    def sync(self):
        self._cuda.synchronize()

    @contextmanager
    def watch(self):
        cuda = self._cuda
        array, like = cuda.device_array, cuda.device_array_like
        cuda.device_array = lambda *args, **kwargs: self._banded(array(*args, **kwargs))
        cuda.device_array_like = lambda *args, **kwargs: self._banded(like(*args, **kwargs))
        try:
            yield
        finally:
            cuda.device_array, cuda.device_array_like = array, like

    def _banded(self, made):
        size = int(np.prod(made.shape)) * made.dtype.itemsize
        if not size or self._full():
            return made
        buffer = self._buffer(np.full(2 * BAND + size, POISON, np.uint8))
        self._bands.append(("an output or work array", buffer))
        return self._view(buffer, BAND, made.shape, made.strides, made.dtype)

    def _buffer(self, raw):
        return raw if self._simulated else self._cuda.to_device(raw)

    def _view(self, buffer, first, shape, strides, dtype):
        if self._simulated:
            from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

            return FakeCUDAArray(super()._view(buffer, first, shape, strides, dtype))
        face = {
            "shape": tuple(shape),
            "strides": tuple(strides),
            "typestr": dtype.str,
            "data": (buffer.__cuda_array_interface__["data"][0] + first, False),
            "version": 3,
        }
        return self._cuda.as_cuda_array(SimpleNamespace(__cuda_array_interface__=face, keep=buffer))

    def _ends(self, buffer):
        if self._simulated:
            return super()._ends(buffer)
        return np.concatenate([buffer[:BAND].copy_to_host(), buffer[-BAND:].copy_to_host()])


MAKERS = {"cupy": CupyArrays, "numba": NumbaArrays}
