"""A driver that notes what it is told, and arrays that are somewhere on no device: for launching without a GPU."""

import ctypes
from types import SimpleNamespace

import numpy as np
from cuda.bindings import driver as real
from numba.cuda.cudadrv.devicearray import DeviceNDArray

from flash_cuda.executors import gpu, launcher
from flash_cuda.parts import tensor_map


class Driver:
    """Takes the place of cuda.bindings.driver; code that starts with "bad" is refused."""

    CUresult, CUstream, CUfunction = real.CUresult, real.CUstream, real.CUfunction
    CUfunction_attribute = real.CUfunction_attribute

    def __init__(self):
        self.launches, self.attributes, self.loaded = [], [], []
        self.status = real.CUresult.CUDA_SUCCESS

    def cuCtxGetDevice(self):
        return real.CUresult.CUDA_SUCCESS, 0

    def cuDriverGetVersion(self):
        return real.CUresult.CUDA_SUCCESS, 13000

    def cuLibraryLoadData(self, code, *_):
        if code.startswith(b"bad"):
            return real.CUresult.CUDA_ERROR_INVALID_IMAGE, None
        self.loaded.append(code)
        return real.CUresult.CUDA_SUCCESS, 11

    def cuLibraryGetKernel(self, library, name):
        return real.CUresult.CUDA_SUCCESS, 12

    def cuKernelSetAttribute(self, attribute, value, kernel, device):
        self.attributes.append((attribute, value))
        return (real.CUresult.CUDA_SUCCESS,)

    def cuLaunchKernel(self, function, *rest):
        *sizes, shared, stream, params, _ = rest
        self.launches.append(SimpleNamespace(
            function=int(function), sizes=tuple(sizes), shared=shared, stream=int(stream), params=params))  # fmt: skip
        return (self.status,)


def words(params, count):
    """The first ``count`` parameters behind a pointer to their addresses, as signed integers of 8 bytes."""
    addresses = (ctypes.c_void_p * count).from_address(params)
    return [ctypes.c_int64.from_address(address).value for address in addresses]


def array(address, shape, dtype=np.float16, strides=None):
    """A numba device array at an address that nothing ever looks at."""
    strides = strides or np.empty(shape, dtype).strides
    pointer = ctypes.c_void_p(address)
    return DeviceNDArray(shape, strides, dtype, gpu_data=SimpleNamespace(device_ctypes_pointer=pointer))


class FakeGpu(gpu.Gpu):
    """The GPU executor with everything that needs one taken out; `pretend` does the rest."""

    def __init__(self):
        self.guard, self.stream, self._host, self._bands = False, 0, True, []
        self.launches, self.inputs, self.maps = [], {}, []
        self._next = 1 << 40

    def empty(self, name, shape, dtype):
        self._next += 1 << 30
        return array(self._next, shape, gpu.device_dtype(dtype)) if np.prod(shape) else no_array(shape, dtype)


def no_array(shape, dtype):
    """A device array without elements."""
    at_zero = SimpleNamespace(device_ctypes_pointer=ctypes.c_void_p(None))
    found = array(16, (1,) * len(shape), dtype)
    found.shape, found.size, found.gpu_data = tuple(shape), 0, at_zero
    return found


def pretend(monkeypatch, capability=(9, 0)):
    """Put the fake driver in the place of the real one; it is returned."""
    driver, device = Driver(), SimpleNamespace(compute_capability=capability, MULTIPROCESSOR_COUNT=132)
    for module in (gpu, launcher):
        monkeypatch.setattr(module, "binding", driver)
    monkeypatch.setattr(gpu.cuda, "get_current_device", lambda: device)
    monkeypatch.setattr(gpu.Gpu, "_compiled", {})
    monkeypatch.setattr(gpu.cuda, "as_cuda_array", lambda x: array(tensor_map.address_of(x), x.shape,
                                                                   np.dtype(x.__cuda_array_interface__["typestr"]),
                                                                   x.strides))  # fmt: skip
    maps = iter(range(1 << 50, 1 << 51, 1 << 12))
    monkeypatch.setattr(tensor_map, "encode", lambda *tiles: np.zeros(16 * len(tiles), np.uint64))
    monkeypatch.setattr(gpu, "upload", lambda host, stream=0: array(next(maps), host.shape, host.dtype))
    return driver
