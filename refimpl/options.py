"""Masks and score changes as rules: one plain expression each, run on index arrays here and inlined on a GPU.

A mask rule is `fn(b, h, i, j, *aux)`, true where query i attends to key j. A score rule is `fn(s, b, h, i,
j, *aux)`, the new score. `i` is the query's position on the keys' axis, `j` the key's position. Numbers and
arrays that a rule needs travel in `aux`, so that a compiled kernel takes them as arguments. In a rule use
the words below instead of NumPy or math: the GPU side gives the same words its own bodies.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from enum import Enum

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


class TileClass(Enum):
    """What a mask leaves of a tile: nothing (not visited), all (no masking needed), or some of it."""

    EMPTY = "empty"
    PARTIAL = "partial"
    FULL = "full"


@dataclass(frozen=True, eq=False)
class Rule:
    """A mask or a change of scores, written once.

    Parameters
    ----------
    fn : callable
        The expression, as the module docstring says.
    kind : "mask" or "score"
    grad : callable, optional
        For a score rule: the derivative d fn / d s, with fn's arguments.
    aux : tuple
        Further arguments of fn: numbers and arrays.
    tiles : callable, optional
        For a mask rule: `tiles(i0, i1, j0, j1, *aux) -> TileClass`, the class of the tile i0 <= i < i1,
        j0 <= j < j1, without looking at its elements. Where it is missing, `classify` looks.
    offset : int
        Row r is at position i = r + offset: Nk - Nq for bottom_right, 0 for top_left.

    Raises
    ------
    TypeError
        fn, grad or tiles cannot be called.
    ValueError
        kind is neither "mask" nor "score", or grad or tiles was given to the wrong kind.
    """

    fn: Callable
    _: KW_ONLY
    kind: str = "mask"
    grad: Callable | None = None
    aux: tuple = ()
    tiles: Callable | None = None
    offset: int = 0

    def __post_init__(self):
        if self.kind not in ("mask", "score"):
            raise ValueError(f'kind must be "mask" or "score", got {self.kind!r}')
        for name in ("fn", "grad", "tiles"):
            given = getattr(self, name)
            if not callable(given) and (name == "fn" or given is not None):
                raise TypeError(f"{name} must be callable, got {given!r}")
        if self.kind == "mask" and self.grad is not None:
            raise ValueError("grad belongs to a score rule, and this one is a mask")
        if self.kind == "score" and self.tiles is not None:
            raise ValueError("tiles belongs to a mask rule, and this one changes scores")


def row_offset(Nq, Nk, align="bottom_right"):
    """Return i - row: where row 0 of Nq queries stands on the axis of Nk keys.

    Raises
    ------
    ValueError
        align is neither "bottom_right" nor "top_left".
    """
    if align not in ("bottom_right", "top_left"):
        raise ValueError(f'align must be "bottom_right" or "top_left", got {align!r}')
    return Nk - Nq if align == "bottom_right" else 0


def causal_mask(b, h, i, j):
    """No query sees a later key."""
    return j <= i


def causal_tiles(i0, i1, j0, j1):
    """Tell the class of a tile from its two extreme corners."""
    if j0 > i1 - 1:  # even the last query precedes the first key
        return TileClass.EMPTY
    return TileClass.FULL if j1 - 1 <= i0 else TileClass.PARTIAL


def causal(Nq, Nk, align="bottom_right"):
    """Make the rule that query i sees key j iff j <= i.

    Parameters
    ----------
    Nq, Nk : int
        Lengths; they fix `offset`.
    align : "bottom_right" or "top_left"
        Whether the last query stands at the last key, or the first at the first.

    Returns
    -------
    Rule
    """
    return Rule(causal_mask, tiles=causal_tiles, offset=row_offset(Nq, Nk, align))


def boolean_mask(b, h, i, j, mask, offset):
    """Look the pair up, by row and not by position."""
    return mask[b, h, i - offset, j]


def boolean(mask, align="bottom_right"):
    """Make the rule that row r sees key j iff mask[b, h, r, j].

    Parameters
    ----------
    mask : ndarray of bool (B, Hq, Nq, Nk)
        True = attend. Broadcast views are fine.
    align : "bottom_right" or "top_left"
        What `i` means beside other rules. The outcome does not depend on it.

    Returns
    -------
    Rule

    Raises
    ------
    TypeError
        mask is not boolean.
    ValueError
        mask is not 4-dimensional.
    """
    mask = np.asarray(mask)
    if mask.dtype != bool:
        raise TypeError(f"mask must be boolean (true = attend), got {mask.dtype}")
    if mask.ndim != 4:
        raise ValueError(f"mask must be (B, Hq, Nq, Nk), got shape {mask.shape}")
    offset = row_offset(*mask.shape[2:], align)
    return Rule(boolean_mask, aux=(mask, offset), offset=offset)


def positions(rule, rows, cols):
    """Return index arrays i (rows, 1) and j (1, cols) of the tile rows x cols."""
    return np.ogrid[rows.start + rule.offset : rows.stop + rule.offset, cols.start : cols.stop]


def visible(rule, b, h, rows, cols):
    """Evaluate a mask rule on a tile.

    Parameters
    ----------
    rule : Rule
    b, h : int
        Batch and query head.
    rows, cols : slice
        Query rows and keys, with start and stop.

    Returns
    -------
    ndarray of bool (rows, cols)

    Raises
    ------
    TypeError
        The rule is not a mask, or its expression is not boolean.
    """
    if rule.kind != "mask":
        raise TypeError("rule must be a mask, got a score rule")
    i, j = positions(rule, rows, cols)
    seen = np.asarray(rule.fn(b, h, i, j, *rule.aux))
    if seen.dtype != bool:
        raise TypeError(f"a mask rule must give booleans, {rule.fn.__name__} gave {seen.dtype}")
    return np.broadcast_to(seen, (i.size, j.size))


def scored(rule, S, b, h, rows, cols):
    """Apply a score rule to the tile S (rows, cols) and return the new scores in S's dtype.

    Raises
    ------
    TypeError
        The rule is a mask.
    """
    if rule.kind != "score":
        raise TypeError("rule must be a score rule, got a mask")
    i, j = positions(rule, rows, cols)
    return np.broadcast_to(rule.fn(S, b, h, i, j, *rule.aux), S.shape).astype(S.dtype)


def classify(rule, b, h, rows, cols):
    """Tell whether a mask rule leaves none, all or some of a tile. Parameters as `visible`.

    Returns
    -------
    TileClass
        A tile without rows or without keys is EMPTY.
    """
    if rows.stop <= rows.start or cols.stop <= cols.start:
        return TileClass.EMPTY
    if rule.tiles is not None:
        i0, i1 = rows.start + rule.offset, rows.stop + rule.offset
        return rule.tiles(i0, i1, cols.start, cols.stop, *rule.aux)
    seen = visible(rule, b, h, rows, cols)
    if not seen.any():
        return TileClass.EMPTY
    return TileClass.FULL if seen.all() else TileClass.PARTIAL
