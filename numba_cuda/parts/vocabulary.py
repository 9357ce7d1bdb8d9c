"""Rules on a GPU: the words of ``refimpl.vocabulary`` in fp32, and rules as device functions and kernel arguments.

A rule's text is not translated. ``device`` takes the very function that NumPy runs, puts these words in the place of
NumPy's and device functions in the place of the functions it calls, and leaves the rest to the compiler. A kernel body
then has one line for any rule:

    seen = mask(b, h, i, j, *mask_aux)
    kind = tiles(b, h, i0, i1, j0, j1, *mask_aux)
    s = score(s, b, h, i, j, *score_aux)

with ``mask = device(rule.fn)`` from its closure and ``mask_aux`` among its arguments. The emulator runs the same text
on single numbers, with the Python bodies below.
"""

import math
from functools import cache
from types import CellType, FunctionType

import numpy as np
from numba import cuda
from numba.cuda.extending import overload
from numba.cuda.types import float32, int32

from refimpl import vocabulary


def where(c, a, b):
    """a where c, else b; both are computed."""
    return a if c else b


def tanh(x):
    """Hyperbolic tangent in fp32."""
    return np.tanh(np.float32(x))


def minimum(a, b):
    """The smaller."""
    return a if a < b else b


def maximum(a, b):
    """The larger."""
    return a if a > b else b


def real(x):
    """An index as fp32."""
    return np.float32(x)


def tile_class(some, every):
    """0, 1 or 2 for a tile that is seen not at all, in part, as a whole."""
    return int(some) + int(every)


@overload(where)
def _where(c, a, b):
    return lambda c, a, b: a if c else b


@overload(tanh)
def _tanh(x):
    return lambda x: math.tanh(float32(x))


@overload(minimum)
def _minimum(a, b):
    return lambda a, b: a if a < b else b


@overload(maximum)
def _maximum(a, b):
    return lambda a, b: a if a > b else b


@overload(real)
def _real(x):
    return lambda x: float32(x)


@overload(tile_class)
def _tile_class(some, every):
    return lambda some, every: int32(some) + int32(every)


WORDS = {getattr(vocabulary, word.__name__): word for word in (where, tanh, minimum, maximum, real, tile_class)}


@cache  # a rule is compiled once, and kernels made for it are found again
def device(fn):
    """A rule's function as a device function; so are the functions that it names, in its module or its closure."""
    names = {name: fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__}
    # Under this module's name the emulator knows the copy for one of ours.
    scope = {name: _on_device(value) for name, value in names.items()} | {"__name__": __name__}
    cells = tuple(CellType(_on_device(cell.cell_contents)) for cell in fn.__closure__ or ())
    return cuda.jit(device=True)(FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, cells))


def _on_device(value):
    if not isinstance(value, FunctionType):
        return value
    return WORDS[value] if value in WORDS else device(value)


def arguments(on, aux, name="aux"):
    """A rule's aux as kernel arguments of the executor ``on``: fp32 for real arrays, int32 for whole ones.

    Parameters
    ----------
    on : executor
        Its ``input`` is given each array, under ``name`` and its place, so that what a rule loads is counted.
    aux : tuple
        Numbers, arrays and tuples of them, from ``Rule.at``.

    Raises
    ------
    OverflowError
        An integer does not fit 32 bits.
    """
    if isinstance(aux, tuple):
        return tuple(arguments(on, value, f"{name}.{k}") for k, value in enumerate(aux))
    if np.ndim(aux):
        return on.input(name, narrow(aux))
    return float(aux) if isinstance(aux, (float, np.floating)) else int(np.int32(aux))


def narrow(array):
    """An array of a rule with 32-bit elements; axes of stride 0 stay so, and are not copied out."""
    array = np.asarray(array)
    dtype = {"f": np.float32, "i": np.int32, "u": np.int32, "b": np.bool_}[array.dtype.kind]
    if array.dtype == dtype:
        return array
    one = array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]
    if one.size and dtype == np.int32 and max(-int(one.min()), int(one.max())) >= 2**31:
        raise OverflowError(f"expected integers of 32 bits, got {one.min()} ... {one.max()}")
    return np.broadcast_to(one.astype(dtype), array.shape)
