"""Where rules meet a call: the index space of its scores, and rules evaluated on tiles of it."""

from dataclasses import dataclass

import numpy as np

from refimpl.rule import TileClass


def row_offset(Nq, Nk, align="bottom_right"):
    """Return i - row: where row 0 of Nq queries stands on the axis of Nk keys. Lengths may be arrays.

    Raises
    ------
    ValueError
        align is neither "bottom_right" nor "top_left".
    """
    if align not in ("bottom_right", "top_left"):
        raise ValueError(f'align must be "bottom_right" or "top_left", got {align!r}')
    return Nk - Nq if align == "bottom_right" else 0 * Nq


@dataclass(frozen=True, eq=False)
class Frame:
    """The index space of one call: how many batches, heads, rows and keys, and where rows stand.

    Parameters
    ----------
    B, Hq, Nq, Nk : int
    lengths_q, lengths_k : array_like of int (B,), optional
        Rows and keys in use of each batch entry; all of them if left out.
    align : "bottom_right" or "top_left"
        Whether the last row in use stands at the last key in use, or the first row at the first key.

    Attributes
    ----------
    offsets : ndarray of int (B,)
        Row r of batch b is at position r + offsets[b].

    Raises
    ------
    TypeError, ValueError
        align is unknown; lengths are not B integers in 0 ... Nq or 0 ... Nk.
    """

    B: int
    Hq: int
    Nq: int
    Nk: int
    lengths_q: np.ndarray = None
    lengths_k: np.ndarray = None
    align: str = "bottom_right"

    def __post_init__(self):
        for name, N in (("lengths_q", self.Nq), ("lengths_k", self.Nk)):
            given = getattr(self, name)
            lengths = np.full(self.B, N) if given is None else np.asarray(given)
            if lengths.size and lengths.dtype.kind not in "iu":
                raise TypeError(f"{name} must be integers, got {lengths.dtype}")
            if lengths.shape != (self.B,):
                raise ValueError(f"{name} must have shape {(self.B,)}, got {lengths.shape}")
            if lengths.size and not 0 <= lengths.min() <= lengths.max() <= N:
                raise ValueError(f"{name} must be in 0 ... {N}, got {lengths.min()} ... {lengths.max()}")
            object.__setattr__(self, name, lengths.astype(np.int64))
        offsets = row_offset(self.lengths_q, self.lengths_k, self.align)
        object.__setattr__(self, "offsets", offsets)

    def spread(self, name, x, axes):
        """Broadcast an argument of a rule to some of the frame's axes, e.g. "B Hq"; a view, nothing is copied.

        Raises
        ------
        ValueError
            It does not broadcast; the message gives `name` and the shape.
        """
        shape = tuple(getattr(self, axis) for axis in axes.split())
        try:
            return np.broadcast_to(x, shape)
        except ValueError:
            raise ValueError(f"{name} must broadcast to {shape}, got shape {np.shape(x)}") from None


def positions(rule, b, rows, cols):
    """Return index arrays i (rows, 1) and j (1, cols) of the tile rows x cols."""
    offset = rule.offset[b] if np.ndim(rule.offset) else rule.offset
    return np.ogrid[rows.start + offset : rows.stop + offset, cols.start : cols.stop]


def _needs(rule, kind):
    """Refuse a rule of the other kind, and one that still waits for its frame."""
    if rule.kind != kind:
        raise TypeError(f"rule must be a {kind} rule, got a {rule.kind} rule")
    if callable(rule.aux):
        raise TypeError("rule must be bound to a call's frame, as rule.at(frame) does")


def visible(rule, b, h, rows, cols):
    """Evaluate a mask rule on a tile.

    Parameters
    ----------
    rule : Rule
        Bound, if it is one whose aux depends on the call.
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
        The rule is not a mask, is not bound, or its expression is not boolean.
    """
    _needs(rule, "mask")
    i, j = positions(rule, b, rows, cols)
    seen = np.asarray(rule.fn(b, h, i, j, *rule.aux))
    if seen.dtype != bool:
        raise TypeError(f"a mask rule must give booleans, {rule.fn.__name__} gave {seen.dtype}")
    return np.broadcast_to(seen, (i.size, j.size))


def scored(rule, S, b, h, rows, cols):
    """Apply a score rule to the tile S (rows, cols) and return the new scores in S's dtype.

    Raises
    ------
    TypeError
        The rule is a mask, or is not bound.
    """
    _needs(rule, "score")
    i, j = positions(rule, b, rows, cols)
    return np.broadcast_to(rule.fn(S, b, h, i, j, *rule.aux), S.shape).astype(S.dtype)


def slope(rule, S, b, h, rows, cols):
    """Return the derivative of a score rule at the scores S (rows, cols) before the change, in S's dtype.

    Raises
    ------
    TypeError
        The rule is a mask, is not bound, or has no `grad`.
    """
    _needs(rule, "score")
    if rule.grad is None:
        raise TypeError(f"rule must have a grad for the backward pass, {rule.fn.__name__} has none")
    i, j = positions(rule, b, rows, cols)
    return np.broadcast_to(rule.grad(S, b, h, i, j, *rule.aux), S.shape).astype(S.dtype)


def classify(rule, b, h, rows, cols):
    """Tell whether a mask rule leaves none, all or some of a tile. Parameters as `visible`.

    Where `tiles` cannot tell, or there is none, the elements are looked at: the answer is exact.

    Returns
    -------
    TileClass
        A tile without rows or without keys is EMPTY.
    """
    _needs(rule, "mask")
    if rows.stop <= rows.start or cols.stop <= cols.start:
        return TileClass.EMPTY
    if rule.tiles is not None:
        offset = rule.offset[b] if np.ndim(rule.offset) else rule.offset
        kind = rule.tiles(b, h, rows.start + offset, rows.stop + offset, cols.start, cols.stop, *rule.aux)
        if kind != TileClass.PARTIAL:
            return TileClass(int(kind))
    seen = visible(rule, b, h, rows, cols)
    if not seen.any():
        return TileClass.EMPTY
    return TileClass.FULL if seen.all() else TileClass.PARTIAL
