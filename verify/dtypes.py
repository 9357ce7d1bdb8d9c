"""The element types that a kernel may store, with the constants that error bounds are made of."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class DType:
    """One storage type.

    Attributes
    ----------
    name : str
        "fp64", "fp32", "fp16" or "bf16".
    numpy : np.dtype
        What arrays of it are made of.
    ulp : float
        Distance from 1 to the next number. Rounding to nearest errs by at most `ulp / 2`, relatively.
    subnormal : float
        Smallest positive number: below the normal range errors are absolute, at most half of this.
    """

    name: str
    numpy: np.dtype
    ulp: float
    subnormal: float

    @property
    def bytes(self) -> int:
        """Size of an element."""
        return self.numpy.itemsize


DTYPES = {
    "fp64": DType("fp64", np.dtype(np.float64), 2.0**-52, 2.0**-1074),
    "fp32": DType("fp32", np.dtype(np.float32), 2.0**-23, 2.0**-149),
    "fp16": DType("fp16", np.dtype(np.float16), 2.0**-10, 2.0**-24),
    "bf16": DType("bf16", np.dtype(ml_dtypes.bfloat16), 2.0**-7, 2.0**-133),
}


def name_of(dtype) -> str:
    """Our name of a NumPy dtype.

    Raises
    ------
    TypeError
        If kernels do not store this type.
    """
    for entry in DTYPES.values():
        if entry.numpy == np.dtype(dtype):
            return entry.name
    raise TypeError(f"dtype must be one of {', '.join(DTYPES)}, got {np.dtype(dtype)}")
