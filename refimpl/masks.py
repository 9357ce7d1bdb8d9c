"""The masks we ship: which query attends to which key, each one line, its class of a tile, and how to make the rule.

Names: `x_mask` is the expression, `x_tiles` the class of the tile i0 <= i < i1, j0 <= j < j1, `x(...)` makes the rule.
`i` is the query's position on the keys' axis, `i - offsets[b]` its row. In `x_tiles`, the last query of the tile is
i1 - 1 and the last key j1 - 1.
"""

from operator import index

import numpy as np

from refimpl.frame import row_offset
from refimpl.rule import Rule, and_, or_
from refimpl.vocabulary import maximum, tile_class

UNBOUNDED = 2**30  # a window bound that no length reaches, and that a length added to it keeps within 32 bits


def whole(name, x):
    """Return x as an int, or refuse it by name."""
    try:
        return index(x)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {x!r}") from None


def integers(name, x):
    """Return x as an array of integers, or refuse it by name."""
    x = np.asarray(x)
    if x.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {x.dtype}")
    return x


def causal_mask(b, h, i, j):
    """No query sees a later key."""
    return j <= i


def causal_tiles(b, h, i0, i1, j0, j1):
    """Some: the last query sees the first key. Every: the first query sees the last key."""
    return tile_class(j0 <= i1 - 1, j1 - 1 <= i0)


def causal(Nq=0, Nk=0, align="bottom_right"):
    """Make the rule that query i sees key j iff j <= i.

    Parameters
    ----------
    Nq, Nk, align : int, int, "bottom_right" or "top_left"
        To look at the rule on its own: whether the last query stands at the last key, or the first at the first.
        A call that is given the rule knows its lengths and sets this itself.

    Returns
    -------
    Rule
    """
    return Rule(causal_mask, tiles=causal_tiles, offset=row_offset(Nq, Nk, align))


def window_mask(b, h, i, j, left, right):
    """A query sees `left` keys before its position and `right` after it, both ends included."""
    return (i - j <= left) & (j - i <= right)


def window_tiles(b, h, i0, i1, j0, j1, left, right):
    """i - j takes every value from i0 - (j1 - 1) to (i1 - 1) - j0; -right ... left are the visible ones."""
    nearest, furthest = i0 - (j1 - 1), (i1 - 1) - j0
    return tile_class((nearest <= left) & (-furthest <= right), (furthest <= left) & (-nearest <= right))


def bound(name, x):
    """Return a window bound as a number: None and -1 are `UNBOUNDED`."""
    x = UNBOUNDED if x is None else whole(name, x)
    if x < -1:
        raise ValueError(f"{name} must be at least 0, or -1 or None for no bound, got {x}")
    return UNBOUNDED if x == -1 else min(x, UNBOUNDED)


def ends(window):
    """Return both bounds of a window (left, right) as numbers; None is no window."""
    try:
        left, right = (None, None) if window is None else window
    except (TypeError, ValueError):
        raise ValueError(f"window must be a pair (left, right), got {window!r}") from None
    return bound("window left", left), bound("window right", right)


def window(left=None, right=None):
    """Make the rule that query i sees keys i - left ... i + right.

    Parameters
    ----------
    left, right : int or None
        At least 0; None or -1 is no bound. window(None, 0) is causal, window(0, 0) each key for itself.

    Raises
    ------
    TypeError, ValueError
        A bound is no integer, or below -1.
    """
    return Rule(window_mask, tiles=window_tiles, aux=(bound("left", left), bound("right", right)))


def padding_mask(b, h, i, j, lengths_q, lengths_k, offsets):
    """Rows and keys past the length of their batch entry do not exist."""
    return (i - offsets[b] < lengths_q[b]) & (j < lengths_k[b])


def padding_tiles(b, h, i0, i1, j0, j1, lengths_q, lengths_k, offsets):
    """Some: the first row and key exist. Every: the last ones do."""
    rows, keys = offsets[b] + lengths_q[b], lengths_k[b]
    return tile_class((i0 < rows) & (j0 < keys), (i1 <= rows) & (j1 <= keys))


def padding():
    """Make the rule that rows and keys exist up to the call's lengths_q and lengths_k."""

    def aux(at):
        return at.lengths_q, at.lengths_k, at.offsets

    return Rule(padding_mask, tiles=padding_tiles, aux=aux, pads=True)


def document_mask(b, h, i, j, ids_q, ids_k, offsets):
    """A query sees the keys of its own document."""
    return ids_q[b, i - offsets[b]] == ids_k[b, j]


def document_tiles(b, h, i0, i1, j0, j1, ids_q, ids_k, offsets):
    """For ids in ascending order: some if the two ranges of ids overlap, every if both are one and the same id."""
    first_q, last_q = ids_q[b, i0 - offsets[b]], ids_q[b, i1 - 1 - offsets[b]]
    first_k, last_k = ids_k[b, j0], ids_k[b, j1 - 1]
    return tile_class((first_q <= last_k) & (first_k <= last_q), (first_q == last_k) & (first_k == last_q))


def document(ids_q, ids_k=None):
    """Make the rule that a query sees the keys of its own document: sequences packed into one.

    Parameters
    ----------
    ids_q : array_like of int (Nq,) or (B, Nq)
        Document of each row.
    ids_k : array_like of int (Nk,) or (B, Nk), optional
        Document of each key; ids_q if left out. Where both ascend, tiles are told apart without a look inside.

    Raises
    ------
    TypeError
        Ids are not integers.
    """
    ids_q = integers("ids_q", ids_q)
    ids_k = ids_q if ids_k is None else integers("ids_k", ids_k)
    ascending = all((np.diff(ids.astype(np.int64), axis=-1) >= 0).all() for ids in (ids_q, ids_k))

    def aux(at):
        return at.spread("ids_q", ids_q, "B Nq"), at.spread("ids_k", ids_k, "B Nk"), at.offsets

    return Rule(document_mask, tiles=document_tiles if ascending else None, aux=aux)


def prefix_mask(b, h, i, j, prefix):
    """Causal, but the first keys are seen by all."""
    return j < maximum(i + 1, prefix[b])


def prefix_tiles(b, h, i0, i1, j0, j1, prefix):
    """As causal, with the last key that a query sees in place of its position."""
    return tile_class(j0 < maximum(i1, prefix[b]), j1 <= maximum(i0 + 1, prefix[b]))


def prefix_lm(prefix):
    """Make the rule of a prefix language model: key j is seen from i >= j, and from everywhere if j < prefix.

    Parameters
    ----------
    prefix : int, or array_like of int (B,)
        Length of the prefix, of each batch entry.

    Raises
    ------
    TypeError
        prefix is not of integers.
    """
    prefix = integers("prefix", prefix)
    return Rule(prefix_mask, tiles=prefix_tiles, aux=lambda at: (at.spread("prefix", prefix, "B"),))


def dilated_mask(b, h, i, j, step):
    """A query sees every step-th key, counted from its own position both ways."""
    return (i - j) % step == 0


def dilated_tiles(b, h, i0, i1, j0, j1, step):
    """Some: a multiple of step lies between the least and the largest i - j. Every: there is no other value."""
    nearest, furthest = i0 - (j1 - 1), (i1 - 1) - j0
    some = furthest // step * step >= nearest
    return tile_class(some, some & ((step == 1) | (nearest == furthest)))


def dilated(step):
    """Make the rule that query i sees keys i, i - step, i + step, i - 2 step, ...; with a window, a dilated window.

    Raises
    ------
    TypeError, ValueError
        step is no integer, or below 1.
    """
    if whole("step", step) < 1:
        raise ValueError(f"step must be at least 1, got {step}")
    return Rule(dilated_mask, tiles=dilated_tiles, aux=(whole("step", step),))


def strided(step):
    """Make the strided pattern of sparse transformers: causal, the last `step` keys and every step-th one before.

    Raises as `dilated`.

    Source
    ------
    Child et al. 2019, "Generating Long Sequences with Sparse Transformers", section 4.3.
    """
    return and_(causal(), or_(window(step, 0), dilated(step)))
