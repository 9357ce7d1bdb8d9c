"""The fixed part of every step: checks, the loop over heads, and the chip on which a head runs."""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from refimpl import options
from refimpl.observe import Observer
from refimpl.options import TileClass
from refimpl.tiling import Tile


@dataclass(frozen=True)
class Head:
    """What the core of a step needs besides the arrays of its head: a chip with an HBM beside it.

    `load` and `store` are the only way between the two, so their sum is the *tile fills* ledger. It counts
    neither the mask (one byte an element where a boolean mask is read) nor index arithmetic.
    """

    b: int
    h: int
    scale: float
    tile: Tile
    rules: tuple
    dtype: type
    observer: Observer

    def load(self, name, block):
        """Bring a block from HBM, converted to the arithmetic type."""
        self.observer.load(name, block.size)
        return block.astype(self.dtype)

    def store(self, name, block, value):
        """Write a value to its block of HBM."""
        self.observer.store(name, block.size)
        block[...] = value

    def scratch(self, *shape):
        """Allocate a work array in HBM, full of NaN: reading what was never written shows."""
        return np.full(shape, np.nan, self.dtype)

    def visible(self, rows, cols):
        """Return which of the rows sees which of the keys, bool (rows, cols)."""
        seen = np.ones((rows.stop - rows.start, cols.stop - cols.start), bool)
        for rule in self.rules:
            seen = seen & options.visible(rule, self.b, self.h, rows, cols)
        return seen

    def classify(self, rows, cols):
        """Return the tile's class under all rules together."""
        classes = {options.classify(rule, self.b, self.h, rows, cols) for rule in self.rules}
        if TileClass.EMPTY in classes:
            return TileClass.EMPTY
        if TileClass.PARTIAL not in classes:
            return TileClass.FULL
        # Two rules may each leave something and have nothing in common.
        alone = len(self.rules) == 1
        return TileClass.PARTIAL if alone or self.visible(rows, cols).any() else TileClass.EMPTY

    def visit(self, rows, cols, m, l, O_acc):
        """Report the state after a tile; m and l are columns (rows, 1), or None."""
        i, j = rows.start // self.tile.Br, cols.start // self.tile.Bc
        m, l = (None if x is None else x[:, 0] for x in (m, l))
        self.observer.visit(self.b, self.h, i, j, m, l, O_acc)


def check(arrays, like=None):
    """Return Q, K, V (and more) as arrays that fit together, and the six sizes.

    Parameters
    ----------
    arrays : dict of str to array_like
        Q, K and V first.
    like : dict of str to tuple, optional
        Shape that each further array must have, in letters: {"O": "B Hq Nq dv", ...}.

    Returns
    -------
    arrays : dict of str to ndarray
    sizes : dict of str to int
        B, Hq, Hk, Nq, Nk, d, dv.

    Raises
    ------
    TypeError
        An array is not of a floating-point type, or Q, K and V differ in type.
    ValueError
        Shapes do not fit, Hq is not a multiple of Hk, or a head count or head dim is 0.
    """
    arrays = {name: np.asarray(x) for name, x in arrays.items()}
    for name, x in arrays.items():
        if x.dtype.kind != "f" and x.dtype.name != "bfloat16":
            raise TypeError(f"{name} must be of a floating-point type, got {x.dtype}")
    sizes = {}
    letters = {"Q": "B Hq Nq d", "K": "B Hk Nk d", "V": "B Hk Nk dv"} | (like or {})
    for name, shape in letters.items():
        got, shape = arrays[name].shape, shape.split()
        if len(got) != len(shape):
            raise ValueError(f"{name} must be ({', '.join(shape)}), got shape {got}")
        for letter, n in zip(shape, got, strict=True):
            if sizes.setdefault(letter, n) != n:
                raise ValueError(f"{name} must have {letter} = {sizes[letter]}, got shape {got}")
            if n == 0 and letter in ("Hq", "Hk", "d", "dv"):
                raise ValueError(f"{name} must have {letter} of at least 1, got shape {got}")
    if sizes["Hq"] % sizes["Hk"]:
        Hq, Hk = sizes["Hq"], sizes["Hk"]
        raise ValueError(f"Q must have a multiple of {Hk} heads, the number of K's, got {Hq}")
    for name in ("K", "V"):
        if arrays[name].dtype != arrays["Q"].dtype:
            raise TypeError(f"{name} must be of Q's type {arrays['Q'].dtype}, got {arrays[name].dtype}")
    return arrays, sizes


def prepare(sizes, *, scale, causal, align, mask, tile, observe, dtype):
    """Check the options and return a function (b, h) -> Head.

    Parameters
    ----------
    sizes : dict
        From `check`.
    scale : float or None
        Factor of q.k, of any sign; None is 1/sqrt(d).
    causal, align
        As `options.causal`.
    mask : ndarray of bool or None
        True = attend; broadcast to (B, Hq, Nq, Nk).
    tile : Tile
    observe : Observer or None
    dtype : np.float64 or np.float32
        Arithmetic type.

    Raises
    ------
    TypeError
        mask is not boolean; scale is not a number; tile, observe or dtype is of another type.
    ValueError
        scale is not finite, align is unknown, or mask cannot be broadcast.
    """
    B, Hq, Nq, Nk = (sizes[n] for n in ("B", "Hq", "Nq", "Nk"))
    try:
        scale = 1 / math.sqrt(sizes["d"]) if scale is None else float(scale)
    except (TypeError, ValueError):
        raise TypeError(f"scale must be a number or None, got {scale!r}") from None
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    if not isinstance(tile, Tile):
        raise TypeError(f"tile must be a Tile(Br, Bc), got {tile!r}")
    if observe is not None and not isinstance(observe, Observer):
        raise TypeError(f"observe must be an Observer or None, got {observe!r}")
    if dtype not in (np.float64, np.float32):
        raise TypeError(f"dtype must be float64 or float32, got {dtype!r}")
    options.row_offset(Nq, Nk, align)  # refuses an unknown alignment, causal or not
    rules = [options.causal(Nq, Nk, align)] if causal else []
    if mask is not None:
        mask = np.asarray(mask)
        try:
            mask = np.broadcast_to(mask, (B, Hq, Nq, Nk))
        except ValueError:
            raise ValueError(f"mask must broadcast to {(B, Hq, Nq, Nk)}, got shape {mask.shape}") from None
        rules.append(options.boolean(mask, align))
    observer = Observer() if observe is None else observe
    dtype = np.dtype(dtype).type
    return partial(Head, scale=scale, tile=tile, rules=tuple(rules), dtype=dtype, observer=observer)


def run(one_head, Q, K, V, **given):
    """Compute attention head by head with a step's core.

    Parameters
    ----------
    one_head : callable
        `one_head(Q, K, V, O, lse, head)`, on arrays (N, d) of one head and lse (Nq, 1); fills O and lse.
    Q, K, V : array_like (B, Hq, Nq, d), (B, Hk, Nk, d), (B, Hk, Nk, dv)
        Query head h uses K/V head h // (Hq // Hk). They are not modified.
    **given
        The options of `prepare`.

    Returns
    -------
    O : ndarray (B, Hq, Nq, dv)
        0 in a row that sees no key.
    lse : ndarray (B, Hq, Nq)
        Natural logarithm of the sum of exp(s); -inf in a row that sees no key. Both of the arithmetic type.

    Raises
    ------
    TypeError, ValueError
        As `check` and `prepare`.
    """
    arrays, sizes = check({"Q": Q, "K": K, "V": V})
    make_head = prepare(sizes, **given)
    Q, K, V = arrays.values()
    B, Hq, Nq, _ = Q.shape
    group = Hq // sizes["Hk"]
    # NaN to begin with, so that a row the core forgets cannot look like an answer.
    O = np.full((B, Hq, Nq, sizes["dv"]), np.nan, given["dtype"])
    lse = np.full((B, Hq, Nq), np.nan, given["dtype"])
    with np.errstate(all="ignore"):  # log 0 = -inf is wanted, and NaN in an input must travel on in silence
        for b, h in np.ndindex(B, Hq):
            k = h // group
            one_head(Q[b, h], K[b, k], V[b, k], O[b, h], lse[b, h, :, None], make_head(b, h))
    return O, lse
