"""What a step lets one watch while it runs: its tile visits, and what crosses between HBM and SRAM."""

from collections import Counter
from typing import NamedTuple

import numpy as np


class Observer:
    """Hears of every event and does nothing. Override what you need; combine by inheriting from several."""

    def visit(self, b, h, i, j, m, l, O_acc):
        """Hear that tile (i, j) of batch b, head h has been accumulated.

        `m` and `l` are (rows,), `O_acc` is (rows, dv), unnormalised, `m` in natural-log units of the
        scores. `m` and `l` are None where a step does not hold them at that point. The arrays may be
        reused: copy to keep.
        """

    def load(self, name, elements):
        """Hear that `elements` elements of array `name` came from HBM into SRAM."""

    def store(self, name, elements):
        """Hear that `elements` elements of array `name` went from SRAM to HBM."""


class Visit(NamedTuple):
    """One accumulated tile, as `Observer.visit` describes it."""

    b: int
    h: int
    i: int
    j: int
    m: np.ndarray | None
    l: np.ndarray | None
    O_acc: np.ndarray


class Trace(Observer):
    """Keeps a copy of every visit, in order, in `visits`."""

    def __init__(self):
        super().__init__()
        self.visits: list[Visit] = []

    def visit(self, b, h, i, j, m, l, O_acc):
        state = (None if x is None else np.array(x) for x in (m, l, O_acc))
        self.visits.append(Visit(b, h, i, j, *state))


class Tally(Observer):
    """Counts the elements that cross, per array name, in `loads` and `stores`: the tile-fills ledger."""

    WORK = frozenset({"S", "P", "m", "l", "lse", "D", "O_acc", "dQ_acc"})

    def __init__(self):
        super().__init__()
        self.loads: Counter[str] = Counter()
        self.stores: Counter[str] = Counter()

    def load(self, name, elements):
        self.loads[name] += elements

    def store(self, name, elements):
        self.stores[name] += elements

    def hbm_bytes(self, e, f=4):
        """Return all traffic in bytes: e an element of inputs and outputs, f an element of `WORK` arrays."""
        both = self.loads + self.stores
        return sum(n * (f if name in self.WORK else e) for name, n in both.items())
