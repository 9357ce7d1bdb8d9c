"""Dropout by a counter-based generator: whether a weight is kept depends on its place alone.

A generator with a state would make the mask depend on who asks first. Philox has none: it scrambles a counter under a
key, and here the counter is the place (b, h, row, col) and the key comes from the seed. So forward, backward, NumPy and
a GPU draw the same mask, whatever their tiles.

Written in the vocabulary of rules, on integers: signed 64-bit ones will do, since every product is cut to its low and
its high 32 bits at once. Arguments may be negative where an unsigned 32-bit word was passed as a signed one.

Source: Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3", section 3.3, Philox4x32-10.
"""

from dataclasses import dataclass, replace

import numpy as np

from refimpl.vocabulary import where

WORD = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57  # of the paper, as are the key's increments, from the golden ratio and sqrt(3)
INCREMENTS = 0x9E3779B9, 0xBB67AE85
RESOLUTION = 30  # bits of a draw that are compared: p = 1 still fits a signed 32-bit argument


def philox(c0, c1, c2, c3, key0, key1):
    """Scramble four 32-bit words under two: four words that look random."""
    c0, c1, c2, c3, key0, key1 = c0 & WORD, c1 & WORD, c2 & WORD, c3 & WORD, key0 & WORD, key1 & WORD
    for _ in range(ROUNDS):
        p0, p1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        high0, high1 = (p0 >> 32) & WORD, (p1 >> 32) & WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, p1 & WORD, high0 ^ c3 ^ key1, p0 & WORD
        key0, key1 = (key0 + INCREMENTS[0]) & WORD, (key1 + INCREMENTS[1]) & WORD
    return c0, c1, c2, c3


def draw(b, h, row, col, key0, key1):
    """Return the 32-bit word that belongs to an element: four neighbouring columns share one run of `philox`."""
    w0, w1, w2, w3 = philox(col >> 2, row, b, h, key0, key1)
    return where((col & 2) == 0, where((col & 1) == 0, w0, w1), where((col & 1) == 0, w2, w3))


def kept(b, h, row, col, key0, key1, threshold):
    """Tell whether an element's weight is kept: with probability 1 - threshold / 2^30."""
    return (draw(b, h, row, col, key0, key1) >> (32 - RESOLUTION)) >= threshold


def signed(word):
    """Return the signed integer with the same 32 bits."""
    return word - 2**32 if word >= 2**31 else word


@dataclass(frozen=True)
class Dropout:
    """Weights are set to 0 with probability p, the others multiplied by 1 / (1 - p).

    Parameters
    ----------
    p : float
        In 0 ... 1, taken to a multiple of 2^-30. 1 drops all, and 1 / (1 - p) is not used.
    seed, offset : int
        In 0 ... 2^64 - 1. Calls that differ in one of them draw independently.
    keep : ndarray of bool, broadcast to (B, Hq, Nq, Nk), optional
        The mask itself, true = kept, in place of a drawn one.

    Raises
    ------
    TypeError, ValueError
        An argument is of another type or out of its range.
    """

    p: float
    seed: int = 0
    offset: int = 0
    keep: np.ndarray | None = None

    def __post_init__(self):
        if not isinstance(self.p, (int, float, np.floating)):
            raise TypeError(f"dropout p must be a number, got {self.p!r}")
        if not 0 <= self.p <= 1:
            raise ValueError(f"dropout p must be in 0 ... 1, got {self.p}")
        for name in ("seed", "offset"):
            n = getattr(self, name)
            if not isinstance(n, (int, np.integer)):
                raise TypeError(f"dropout {name} must be an integer, got {n!r}")
            if not 0 <= n < 2**64:
                raise ValueError(f"dropout {name} must be in 0 ... 2^64 - 1, got {n}")
        if self.keep is not None and np.asarray(self.keep).dtype != bool:
            raise TypeError(f"dropout keep must be boolean (true = kept), got {np.asarray(self.keep).dtype}")

    @property
    def arguments(self):
        """(key0, key1, threshold): what `kept` takes besides the place, as integers that fit 32 signed bits."""
        # An odd factor maps offsets one to one, so no two offsets of a seed share a key.
        key = (int(self.seed) + 0x9E3779B97F4A7C15 * int(self.offset)) % 2**64
        return *(signed(word) for word in (key & WORD, key >> 32)), round(self.p * 2**RESOLUTION)

    @property
    def scale(self):
        """1 / (1 - p), the factor of a weight that is kept; 0 if none is."""
        return 1 / (1 - self.p) if self.p < 1 else 0.0

    def at(self, frame):
        """Return the dropout of one call: a mask that was given, in full shape."""
        if self.keep is None:
            return self
        return replace(self, keep=frame.spread("dropout keep", self.keep, "B Hq Nq Nk"))

    def mask(self, b, h, rows, cols):
        """Return which weights of the tile rows x cols (slices) are kept, bool (rows, cols)."""
        if self.keep is not None:
            return self.keep[b, h, rows, cols]
        # As `kept` says, but with one run of philox for the four columns that share it.
        key0, key1, threshold = self.arguments
        row, four = np.ogrid[rows, cols.start >> 2 : (cols.stop + 3) >> 2]
        words = np.stack(philox(four, row, b, h, key0, key1), axis=-1).reshape(row.size, 4 * four.size)
        here = words[:, cols.start & 3 :][:, : cols.stop - cols.start]
        return here >> (32 - RESOLUTION) >= threshold

    def factor(self, b, h, rows, cols):
        """Return the factor of each weight, float64 (rows, cols): 0 or `scale`."""
        return np.where(self.mask(b, h, rows, cols), self.scale, 0.0)
