"""The words that rules are written in: NumPy here; `flash_cuda.parts.vocabulary` has the same words for a GPU.

A rule uses these, arithmetic, comparisons, `&`, `|`, `abs`, indexing, and a conditional expression on a number of
its `aux`. It does not use `and`, `or`, `not`, NumPy or math, and calls other functions by their plain names. Then
one text serves index arrays, single numbers and a compiler. Integers stay integers until `real` makes a number of
them that scores may meet: an integer meeting a score would turn it to fp64 on a GPU.
"""

import numpy as np


def where(c, a, b):
    """Return a where c, else b."""
    return np.where(c, a, b)


def tanh(x):
    """Return the hyperbolic tangent."""
    return np.tanh(x)


def minimum(a, b):
    """Return the smaller."""
    return np.minimum(a, b)


def maximum(a, b):
    """Return the larger."""
    return np.maximum(a, b)


def real(x):
    """Turn an index into a number to calculate with: fp64 here, fp32 on a GPU."""
    return np.asarray(x, np.float64)


def tile_class(some, every):
    """Return 2 if a tile is seen as a whole, 1 if in part, 0 if not: `TileClass`, from two truths about it.

    Then `minimum` of two masks' classes is a class of both together, and `maximum` of either.
    """
    return 1 * some + 1 * every  # not some + every: NumPy adds booleans to a boolean
