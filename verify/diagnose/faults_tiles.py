"""Faults of what a loop over key tiles makes of keys that no row sees: hidden ones, and the padding past the end."""

import math

import numpy as np

from verify.diagnose.fault import fault
from verify.diagnose.faults_masks import CAUSAL, RAGGED, Tiles


class Padded(Tiles):
    """Key tiles are whole: zeros fill the last one."""

    rows_matter = ()

    def padded_keys(self):
        return -(-self.Nk // self.tiling.Bc) * self.tiling.Bc

    def reach(self):
        """What turns a row into the last key that the diagonal shows: without a mask, one that is Nk keys away."""
        return self.offset() if self.option("causal") else self.Nk


@fault(
    "ragged_tile_not_masked",
    "keys past the end counted with score 0 up to the diagonal, which lies Nk keys off without a mask",
    RAGGED,
    "the bound of the last key tile: the smaller of diagonal and Nk",
)
class _(Padded):
    tiled = "Bc"

    def visible(self):
        shown = self.key() <= np.arange(self.Nq)[:, None] + self.reach()
        return shown & self.window() & self.mask() & self.in_length()


@fault(
    "ragged_tile_not_masked",
    "keys past the end counted with score 0 in tiles that lie below the diagonal, which is Nk keys off without a mask",
    CAUSAL,
    "the comparison that calls a tile full: it must not end past Nk",
)
class _(Padded):
    def visible(self):
        first = np.arange(self.Nq)[:, None] // self.tiling.Br * self.tiling.Br
        end = (self.key() // self.tiling.Bc + 1) * self.tiling.Bc
        return super().visible() | (end <= first + self.reach() + 1)


@fault(
    "live_tile_skipped",
    "the last live key tile skipped unless it is seen to its end, ragged ones too",
    CAUSAL,
    "rounding of the last key tile to visit",
)
class _(Padded):
    rows_matter = Tiles.rows_matter

    def visible(self):
        last = (np.arange(self.Nq)[:, None] // self.tiling.Br + 1) * self.tiling.Br
        seen = np.minimum(np.minimum(last, self.Nq) + self.reach(), self.Nk)
        return super().visible() & (self.key() < seen // self.tiling.Bc * self.tiling.Bc)


class _Hidden(Padded):
    """Hidden keys have a finite score in the tiles that are visited, and padding has it too."""

    VALUE, rows_matter = 0.0, Tiles.rows_matter

    def visited(self):
        """Keys of the tiles up to the last that any row of a query tile sees."""
        if not self.option("causal"):
            return np.True_
        return self.key() // self.tiling.Bc * self.tiling.Bc <= self.tile_rows()[1]

    def hidden(self):
        return np.where(self.visited(), self.VALUE, -np.inf)

    def next_O(self, O, alpha, PV, l, l_new):
        # A weight of 0 does not hide NaN or inf.
        out = super().next_O(O, alpha, PV, l, l_new)
        V = self.probe.wide[2][:, self.key_head()]
        if np.isfinite(V).all():
            return out
        wild = np.pad(~np.isfinite(V), ((0, 0), (0, 0), (0, self.padded_keys() - self.Nk), (0, 0)))
        visited = np.broadcast_to(self.visited(), self.full_shape())
        return np.where(visited.astype(np.float64) @ wild > 0, np.nan, out)


for _value in (-1e4, -5e4, -65504.0, -1e9):
    for _unit, _says in ((1.0, ""), (math.log(2), " in log2 units")):

        @fault(
            "mask_value_too_small",
            f"hidden keys and padding given the score {_value:g}{_says} in the tiles that are visited",
            "18.2.2",
            "the score of a hidden key: it has to be -inf",
            empty=True,
        )
        class _(_Hidden):
            VALUE = _value * _unit

            def forward(self):
                truth = self.probe.truth
                finite = np.isfinite(truth["lse"]).all() and np.isfinite(self.probe.wide[2]).all()
                # No row's maximum is below lse - log Nk; from 104 below it on, a weight is 0 in fp32.
                if finite and self.Nk and truth["lse"].min() - math.log(self.Nk) - 104 > self.VALUE:
                    return dict(truth)
                return super().forward()


@fault(
    "mask_multiplied",
    "hidden scores multiplied by 0, padding among them, in the tiles that are visited",
    "18.2.2",
    "the score of a hidden key: it has to be -inf",
    empty=True,
)
class _(_Hidden):
    def scores(self, Q, K):
        S = super().scores(Q, K)
        return np.where(super().visible(), S, 0 * S)

    def visible(self):
        return super().visible() | self.visited()
