"""The kinds of arrays that callers bring: NumPy, numba device arrays, CuPy, torch.

torch and CuPy are never imported here: whoever has such an array has imported them.
"""

import contextlib
import sys

import numpy as np

from flash_cuda.interface.memory import BF16, DeviceView, Numba, NumPy


class CuPy(NumPy):
    """CuPy arrays, on CuPy's current stream."""

    name, host = "a CuPy array", False

    @staticmethod
    def holds(x):
        return "cupy" in sys.modules and isinstance(x, sys.modules["cupy"].ndarray)

    @property
    def numpy(self):
        return sys.modules["cupy"]

    def place(self, x):
        return f"device {x.device.id}"

    def address(self, x):
        return x.data.ptr

    def enter(self, x):
        return DeviceView(x, x.data.ptr, x.shape, x.strides, x.dtype)

    def leave(self, result, *axes):
        whole = self.numpy.asarray(result).view(getattr(result, "face", result.dtype))
        return self.numpy.ascontiguousarray(whole.transpose(*axes) if axes else whole)

    def to_host(self, x):
        return self.numpy.asnumpy(x)

    def from_host(self, x):
        return self.numpy.asarray(x)

    def index(self, at):
        return self.numpy.asarray(at)

    def device(self):
        from numba import cuda

        return cuda.gpus[self.like.device.id]

    def stream(self):
        return self.numpy.cuda.get_current_stream().ptr


class Torch(NumPy):
    """torch tensors, of the CPU or of a GPU; there on torch's current stream."""

    name = "a torch tensor"

    def __init__(self, like):
        super().__init__(like)
        self.host = like.device.type == "cpu"

    @property
    def torch(self):
        return sys.modules["torch"]

    @staticmethod
    def holds(x):
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(x, torch.Tensor) and x.layout is torch.strided

    def place(self, x):
        return str(x.device)

    def dtype(self, x):
        names = {"torch.float32": np.float32, "torch.float16": np.float16, "torch.bfloat16": BF16,
                 "torch.int32": np.int32}  # fmt: skip
        named = names.get(str(x.dtype))
        return x.dtype if named is None else np.dtype(named)

    def wants_gradient(self, x):
        return self.torch.is_grad_enabled() and x.requires_grad

    def random(self):
        return int(self.torch.randint(0, 2**63 - 1, ()))

    def layout(self, x):
        return x.shape, x.stride(), x.dtype

    def address(self, x):
        return x.data_ptr()

    def enter(self, x):
        if self.host:
            return self.to_host(x)
        x = x.detach()
        face = self.dtype(x)
        strides = [n * x.element_size() for n in x.stride()]
        return DeviceView(x, x.data_ptr(), x.shape, strides, face)

    def leave(self, result, *axes):
        if self.host:
            return self.from_host(NumPy.leave(self, result, *axes))
        whole = self.torch.as_tensor(_as_int16(result), device=self.like.device)
        whole = whole.view(self.torch.bfloat16) if result.dtype == np.uint16 else whole
        return (whole.permute(axes) if axes else whole).contiguous()

    def to_host(self, x):
        x = x.detach().cpu()
        return x.view(self.torch.int16).numpy().view(BF16) if self.dtype(x) == BF16 else x.numpy()

    def from_host(self, x):
        bits = self.torch.from_numpy(np.ascontiguousarray(x.view(np.int16) if x.dtype == BF16 else x))
        return (bits.view(self.torch.bfloat16) if x.dtype == BF16 else bits).to(self.like.device)

    def index(self, at):
        return self.torch.from_numpy(at).to(self.like.device)

    def permuted(self, x, *axes):
        return x.permute(axes)

    def contiguous(self, x, *axes):
        return (x.permute(axes) if axes else x).contiguous()

    def pad(self, x, at, size):
        padded = x.new_zeros((size, *x.shape[1:]))
        padded[self.index(at)] = x.detach()
        return padded

    def device(self):
        if self.host:
            return contextlib.nullcontext()
        from numba import cuda

        return cuda.gpus[self.like.device.index]

    def stream(self):
        return 0 if self.host else self.torch.cuda.current_stream(self.like.device).cuda_stream


KINDS = NumPy, Torch, CuPy, Numba


def kind_of(name, x):
    """The kind of an array, or TypeError that names the argument."""
    for kind in KINDS:
        if kind.holds(x):
            if kind is Torch and x.device.type not in ("cpu", "cuda"):
                raise TypeError(f"{name}: expected a tensor of the CPU or a CUDA device, got one of {x.device}")
            return kind(x)
    raise TypeError(f"{name}: expected a plain NumPy, numba device, CuPy or torch array, got {type(x).__name__}")


def _as_int16(result):
    """A device array whose two-byte integers are signed: not every torch has unsigned ones."""
    if result.dtype != np.uint16:
        return result
    view = Numba(result).enter(result)
    view.dtype = np.dtype(np.int16)
    return view
