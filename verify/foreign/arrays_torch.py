"""PyTorch tensors for `arrays`: on the GPU if there is one, else in the CPU's memory, shared with NumPy."""

from contextlib import contextmanager

import ml_dtypes
import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from verify.foreign.arrays_numpy import BAND, POISON, Arrays

TYPES = {
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float16): torch.float16,
    np.dtype(ml_dtypes.bfloat16): torch.bfloat16,
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
}
_MAKES = {
    torch.empty, torch.empty_like, torch.Tensor.new_empty, torch.empty_strided,
    torch.zeros, torch.zeros_like, torch.Tensor.new_zeros,
    torch.full, torch.full_like, torch.Tensor.new_full,
    torch.ones, torch.ones_like, torch.Tensor.new_ones,
}  # fmt: skip
_EMPTY = {torch.empty, torch.empty_like, torch.Tensor.new_empty, torch.empty_strided}


class TorchArrays(Arrays):
    """Tensors."""

    name = "torch"

    def __init__(self):
        super().__init__()
        self._on = "cuda" if torch.cuda.is_available() else "cpu"
        self.executor = "gpu" if self._on == "cuda" else "cpu"

    @property
    def device(self):
        return torch.cuda.get_device_name() if self._on == "cuda" else super().device

    def sync(self):
        if self._on == "cuda":
            torch.cuda.synchronize()

    @contextmanager
    def watch(self):
        with _Watch(self):
            yield

    def _buffer(self, raw):
        return torch.from_numpy(raw).to(self._on)

    def _view(self, buffer, first, shape, strides, dtype):
        size = dtype.itemsize
        steps = [step // size for step in strides]
        if min(steps, default=0) < 0:
            raise ValueError("torch has no negative strides")
        return buffer.view(TYPES[dtype]).as_strided(shape, steps, first // size)

    def _ends(self, buffer):
        return torch.cat([buffer[:BAND], buffer[-BAND:]]).cpu().numpy()

    def banded(self, made, poison):
        """A tensor like `made` with bands around it; `made` itself where it cannot be."""
        if type(made) is not torch.Tensor or made.layout != torch.strided or made.requires_grad or not made.numel():
            return made
        extent = 1 + sum((n - 1) * step for n, step in zip(made.shape, made.stride(), strict=True))
        if made.device.type not in ("cpu", "cuda") or self._full():
            return made
        size = extent * made.element_size()
        # The type's size divides the band, but a buffer of any type has to start and end on one.
        raw = torch.empty(2 * BAND + size, dtype=torch.uint8, device=made.device).fill_(POISON)
        self._bands.append(("an output or work array", raw))
        view = raw[BAND : BAND + size].view(made.dtype).as_strided(made.shape, made.stride())
        return view if poison else view.copy_(made)


class _Watch(TorchFunctionMode):
    """Puts bands around what the factory functions of PyTorch return."""

    def __init__(self, arrays):
        super().__init__()
        self._arrays = arrays

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return self._arrays.banded(made, func in _EMPTY) if func in _MAKES else made


MAKERS = {"torch": TorchArrays}
