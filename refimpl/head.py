"""The chip on which one head runs: what crosses to it, and what the options do to a tile of scores."""

from dataclasses import dataclass

import numpy as np

from refimpl.frame import classify, scored, slope, visible
from refimpl.observe import Observer
from refimpl.philox import Dropout
from refimpl.rule import Rule, TileClass
from refimpl.tiling import Tile


@dataclass(frozen=True)
class Head:
    """What the core of a step needs besides the arrays of its head: a chip with an HBM beside it.

    `load` and `store` are the only way between the two, so their sum is the *tile fills* ledger. It counts
    neither index arithmetic nor what the rules look up, a boolean mask or a bias.
    """

    b: int
    h: int
    scale: float
    tile: Tile
    mask: Rule | None
    scores: tuple
    drop: Dropout | None
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

    def operand(self, value, stored):
        """Round a value to the type of a stored array if that has 16 bits: what a tensor core takes beside it."""
        return value.astype(stored.dtype).astype(self.dtype) if stored.dtype.itemsize == 2 else value

    def scratch(self, *shape):
        """Allocate a work array in HBM, full of NaN: reading what was never written shows."""
        return np.full(shape, np.nan, self.dtype)

    def visible(self, rows, cols):
        """Return which of the rows sees which of the keys, bool (rows, cols)."""
        if self.mask is None:
            return np.ones((rows.stop - rows.start, cols.stop - cols.start), bool)
        return visible(self.mask, self.b, self.h, rows, cols)

    def classify(self, rows, cols):
        """Return the tile's class under all masks together."""
        return TileClass.FULL if self.mask is None else classify(self.mask, self.b, self.h, rows, cols)

    def states(self, S, rows, cols):
        """Return the scores of a tile before the first score rule, after it, ..., after the last one."""
        states = [S]
        for rule in self.scores:
            states.append(scored(rule, states[-1], self.b, self.h, rows, cols))
        return states

    def score(self, S, rows, cols):
        """Change the scores S = scale q.k of a tile by the score rules, each in turn."""
        return self.states(S, rows, cols)[-1]

    def unscore(self, states, dS, rows, cols, dbias=None):
        """Turn the gradient of the last of the states into that of the first; add to dbias on the way."""
        for rule, S in zip(self.scores[::-1], states[-2::-1], strict=True):
            if rule.bias is not None and dbias is not None:
                add_broadcast(dbias, dS, self.b, self.h, rows, cols)
            # A hidden pair has dS = 0, and may have a NaN for a score and a slope.
            dS = np.where(dS == 0, 0, dS * slope(rule, S, self.b, self.h, rows, cols))
        return dS

    def dropout(self, rows, cols):
        """Return Z, the factor of each weight: 0 where dropped, 1 / (1 - p) where kept; one 1 without dropout."""
        if self.drop is None:
            return np.ones((1, 1), self.dtype)
        return self.drop.factor(self.b, self.h, rows, cols).astype(self.dtype)

    def visit(self, rows, cols, m, l, O_acc):
        """Report the state after a tile; m and l are columns (rows, 1), or None."""
        i, j = rows.start // self.tile.Br, cols.start // self.tile.Bc
        m, l = (None if x is None else x[:, 0] for x in (m, l))
        self.observer.visit(self.b, self.h, i, j, m, l, O_acc)


def add_broadcast(total, part, b, h, rows, cols):
    """Add a tile (rows, cols) to its place in a 4-d array, summing over the axes that have length 1 there."""
    B, Hq, Nq, Nk = total.shape
    if Nq == 1:
        rows, part = slice(0, 1), part.sum(axis=0, keepdims=True)
    if Nk == 1:
        cols, part = slice(0, 1), part.sum(axis=1, keepdims=True)
    total[b if B > 1 else 0, h if Hq > 1 else 0, rows, cols] += part
