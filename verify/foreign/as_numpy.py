"""Any library's array as a NumPy array."""

from importlib import import_module

import ml_dtypes
import numpy as np


def to_numpy(x):
    """Any library's array as a NumPy array, shared where it can be; bf16 as ml_dtypes has it.

    Raises
    ------
    TypeError
        If it is no array.
    """
    if isinstance(x, np.ndarray):
        return np.asarray(x)  # of a kind of its own, as masked arrays are, the numbers alone
    library = type(x).__module__.split(".")[0]
    if library == "torch":
        return from_torch(x)
    if hasattr(x, "copy_to_host"):
        return x.copy_to_host()
    if library == "cupy":
        return x.get()
    if hasattr(x, "__array__") and hasattr(x, "shape"):
        return np.asarray(x)
    if hasattr(x, "__cuda_array_interface__"):
        return from_interface(x)
    if hasattr(x, "__dlpack__"):
        return np.from_dlpack(x)
    raise TypeError(f"expected an array, got {type(x).__module__}.{type(x).__qualname__}".replace("builtins.", ""))


def from_torch(x):
    """A tensor as a NumPy array; bf16, which NumPy does not know, by its bits."""
    x = x.detach().cpu()
    if str(x.dtype) == "torch.bfloat16":
        return x.contiguous().view(import_module("torch").int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def from_interface(x):
    """An object with the CUDA array interface as a NumPy array."""
    from numba import cuda

    return cuda.as_cuda_array(x).copy_to_host()
