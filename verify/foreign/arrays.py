"""Arrays of other libraries, by kind: how inputs reach a stranger's kernel in place, and how its outputs come back."""

from importlib import import_module
from importlib.util import find_spec

# Kind -> the package it needs and the module here that knows it.
KINDS = {
    "numpy": ("numpy", "verify.foreign.arrays_numpy"),
    "torch": ("torch", "verify.foreign.arrays_torch"),
    "cupy": ("cupy", "verify.foreign.arrays_cuda"),
    "jax": ("jax", "verify.foreign.arrays_jax"),
    "numba": ("numba", "verify.foreign.arrays_cuda"),
}


def missing(kind) -> str | None:
    """Why arrays of a kind cannot be made here; None if they can."""
    package = KINDS[kind][0]
    return None if find_spec(package) else f"{package} is not installed"


def open_arrays(kind):
    """The arrays of one call, by kind.

    Parameters
    ----------
    kind : str
        One of `KINDS`.

    Returns
    -------
    Arrays

    Raises
    ------
    ImportError
        If the library is not there.
    """
    return import_module(KINDS[kind][1]).MAKERS[kind]()
