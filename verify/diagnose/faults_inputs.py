"""Faults of what goes in: scale, base of the exponential, head dims, heads, batches, strides, stale tiles."""

import math

import numpy as np

from verify.diagnose.fault import fault
from verify.diagnose.reference import Reference

SCALE = "the scale of the scores"
SCORES = "18.2.1"
HEADS = "18.2.2"

LOG2E = math.log2(math.e)
BASE_SECTION, BASE_LOOK = "18.4.2", "log2(e) in the scale, and which exp is called"


def _next_power(d):
    return 1 << (d - 1).bit_length()


_SCALES = {
    "scale_missing": ("the scale missing", lambda s, r: 1.0),
    "scale_squared": ("the scale applied twice", lambda s, r: s * s),
    "scale_ignored": ("1/sqrt(d) in the place of the given scale", lambda s, r: 1 / math.sqrt(r.d)),
    "scale_by_d": ("the scale 1/d instead of 1/sqrt(d)", lambda s, r: s if r.option("scale") else 1 / r.d),
    "scale_of_padded_d": ("the scale of d rounded up to a power of two",
                          lambda s, r: s if r.option("scale") else 1 / math.sqrt(_next_power(r.d))),
    "scale_of_padded_d#16": ("the scale of d rounded up to a multiple of 16",
                             lambda s, r: s if r.option("scale") else 1 / math.sqrt(-(-r.d // 16) * 16)),
    "scale_of_dv": ("the scale 1/sqrt(dv)", lambda s, r: s if r.option("scale") else 1 / math.sqrt(r.dv)),
    "scale_inverted": ("the scores divided by the scale", lambda s, r: 1 / s if s else 0.0),
    "scale_sign": ("the sign of the scale lost", lambda s, r: abs(s)),
    "scale_as_divisor": ("a given scale applied beside 1/sqrt(d)",
                         lambda s, r: s / math.sqrt(r.d) if r.option("scale") else s),
}  # fmt: skip

for _key, (_what, _rule) in _SCALES.items():

    @fault(_key.split("#")[0], _what, SCORES, SCALE)
    class _(Reference):
        RULE = staticmethod(_rule)

        def scale(self):
            return self.RULE(super().scale(), self)


# Name, what happens, and what the exponent is multiplied by as seen from e^x.
_BASES = (
    ("exp_base_2", "2^x taken of natural scores", math.log(2)),
    ("exp_base_e_of_log2", "e^x taken of scores in log2 units", LOG2E),
    ("exp_base_10", "10^x in the place of e^x", math.log(10)),
)
for _name, _what, _factor in _BASES:

    @fault(_name, _what, BASE_SECTION, BASE_LOOK)
    class _Scores(Reference):
        """All scores in the other base, and lse of them."""

        FACTOR = _factor

        def scores(self, Q, K):
            return self.FACTOR * super().scores(Q, K)

    @fault(_name, f"{_what}, before softcap and bias", BASE_SECTION, BASE_LOOK)
    class _(Reference):
        FACTOR = _factor

        def scale(self):
            return self.FACTOR * super().scale()

    @fault(_name, f"{_what}, beside a natural logarithm", BASE_SECTION, BASE_LOOK)
    class _(Reference):
        """The weights and alpha alone: m stays in the units of the scores."""

        FACTOR, tiled = _factor, "Bc order"

        def exp(self, x):
            return super().exp(self.FACTOR * x)

    @fault(_name, f"{_what}, lse converted from base 2", BASE_SECTION, BASE_LOOK)
    class _(_Scores):
        tiled = "Bc order"

        def log_sum(self, m, l):
            return np.where(l == 0, -np.inf, math.log(2) * (np.where(l == 0, 0, m) + np.log2(np.where(l == 0, 1, l))))


for _width in (4, 8, 16):

    @fault(
        "head_dim_tail_dropped", f"only whole groups of {_width} channels in q.k", SCORES, "the loop over the head dim"
    )
    class _(Reference):
        WIDTH = _width

        def product(self, Q, K):
            d = self.d // self.WIDTH * self.WIDTH
            return Q[..., :d] @ K[..., :d].swapaxes(-1, -2)


@fault("head_dim_tail_dropped", "only the first 16 channels in q.k", SCORES, "the loop over the head dim")
class _(Reference):
    def product(self, Q, K):
        return Q[..., :16] @ K[..., :16].swapaxes(-1, -2)


@fault("head_dim_tail_dropped", "the last channel left out of q.k", SCORES, "the loop over the head dim")
class _(Reference):
    def product(self, Q, K):
        return Q[..., : self.d - 1] @ K[..., : self.d - 1].swapaxes(-1, -2)


_COLUMNS = {
    "columns of O past d": lambda r: r.d,
    **{f"columns of O past the first {n}": lambda r, n=n: n for n in (8, 16, 32, 64, 128)},
    **{f"columns of O past whole groups of {n}": lambda r, n=n: r.dv // n * n for n in (4, 8, 16)},
    "the last column of O": lambda r: r.dv - 1,
}
for _what, _count in _COLUMNS.items():

    @fault("O_columns_dropped", f"{_what} not computed", "18.4.3", "the loop over the columns of V: dv, not d")
    class _(Reference):
        COUNT = staticmethod(_count)

        def forward(self):
            out = super().forward()
            out["O"][..., self.COUNT(self) :] = 0
            return out


class _Heads(Reference):
    def key_head(self):
        h = np.arange(self.Hq)
        return self.choose(h) % self.Hk


@fault("heads_modulo", "key head h % Hk instead of h // (Hq / Hk)", HEADS, "which key head a query head reads", "gqa")
class _(_Heads):
    def choose(self, h):
        return h % self.Hk


@fault("heads_first", "key head 0 for all query heads", HEADS, "which key head a query head reads")
class _(_Heads):
    def choose(self, h):
        return 0 * h


@fault("heads_clipped", "key head min(h, Hk - 1)", HEADS, "which key head a query head reads", "gqa")
class _(_Heads):
    def choose(self, h):
        return np.minimum(h, self.Hk - 1)


@fault("heads_by_count", "key head h // Hk", HEADS, "which key head a query head reads: h // (Hq / Hk)", "gqa")
class _(_Heads):
    def choose(self, h):
        return np.minimum(h // self.Hk, self.Hk - 1)


@fault("heads_modulo_values", "keys of the right head and values of head h % Hk", HEADS, "the head index of V", "gqa")
class _(Reference):
    def inputs(self):
        return *super().inputs()[:2], self.probe.wide[2][:, np.arange(self.Hq) % self.Hk]


for _at, _name in enumerate("QKV"):

    @fault(f"batch_0_of_{_name}", f"{_name} of batch entry 0 read for all", HEADS, f"the batch stride of {_name}")
    class _(Reference):
        AT = _at

        def inputs(self):
            arrays = list(super().inputs())
            arrays[self.AT] = np.broadcast_to(arrays[self.AT][:1], arrays[self.AT].shape)
            return arrays

    @fault(f"wrong_head_of_{_name}", f"{_name} of the next head read", HEADS, f"the head index of {_name}")
    class _(Reference):
        AT = _at

        def inputs(self):
            arrays = list(super().inputs())
            arrays[self.AT] = np.roll(arrays[self.AT], -1, axis=1)
            return arrays

    @fault(
        f"strides_of_{_name}",
        f"{_name} read as (B, N, H, d), though it is (B, H, N, d)",
        "18.7.1",
        f"the strides of {_name}",
    )
    class _(Reference):
        AT = _at

        def inputs(self):
            arrays = list(super().inputs())
            x = (self.probe.Q, self.probe.K, self.probe.V)[self.AT].astype(np.float64)
            B, H, N, d = x.shape
            x = np.ascontiguousarray(x).reshape(B, N, H, d).swapaxes(1, 2)
            arrays[self.AT] = x if self.AT == 0 else x[:, self.key_head()]
            return arrays


@fault("strides_ignored", "views read as if they were contiguous", "18.7.1", "strides taken from the shape")
class _(Reference):
    CUT = 0, 1, 2

    def inputs(self):
        arrays = []
        for at, x in enumerate((self.probe.Q, self.probe.K, self.probe.V)):
            flat = x
            while not flat.flags.c_contiguous and isinstance(flat.base, np.ndarray):
                flat = flat.base
            ahead = (x.__array_interface__["data"][0] - flat.__array_interface__["data"][0]) // x.itemsize
            read = np.resize(flat.ravel()[ahead:], x.size).reshape(x.shape).astype(np.float64)
            arrays.append(read if at == 0 else read[:, self.key_head()])
        return arrays


class _Stale(Reference):
    """A tile of the wrong place, zeros past its end."""

    tiled = "Bc order"

    def shifted(self, x, source):
        """An array over keys, tile j replaced by tile source(j) of it."""
        out, tiles = x.copy(), self.key_tiles()
        for at, cols in enumerate(tiles):
            there = tiles[source(at) if 0 <= source(at) < len(tiles) else at]
            n = min(cols.stop - cols.start, there.stop - there.start)
            out[:, :, cols] = 0
            out[:, :, cols.start : cols.start + n] = x[:, :, there.start : there.start + n]
        return out


_TILES = {
    "stale_tile": ("the tile before it read", lambda at: max(at - 1, 0)),
    "tile_too_new": ("the next tile read", lambda at: at + 1),
    "first_tile_only": ("the first tile read every time", lambda at: 0),
}
for _name, (_what, _source) in _TILES.items():
    for _arrays, _of in (((1,), "K"), ((2,), "V"), ((1, 2), "K and V")):

        @fault(f"{_name}_of_{_of.replace(' and ', '')}", f"{_what} in the place of a tile of {_of}", "18.4.3",
               f"barriers and buffer indices around the load of {_of}")  # fmt: skip
        class _(_Stale):
            ARRAYS, SOURCE = _arrays, staticmethod(_source)

            def inputs(self):
                arrays = list(super().inputs())
                for at in self.ARRAYS:
                    arrays[at] = self.shifted(arrays[at], self.SOURCE)
                return arrays


@fault(
    "tile_of_K_shifted", "the first key of each tile taken from the tile before", "18.4.3", "the first row of K's load"
)
class _(_Stale):
    def inputs(self):
        Q, right, V = super().inputs()
        K = right.copy()
        for cols in self.key_tiles():
            if cols.start:
                K[:, :, cols.start] = right[:, :, cols.start - 1]
        return Q, K, V


@fault("values_of_keys", "K in the place of V", "18.4.3", "which array is multiplied with P")
class _(Reference):
    def inputs(self):
        Q, K, V = super().inputs()
        return (Q, K, K) if self.d == self.dv else (Q, K, V)


@fault("scores_sign", "the sign of one channel of q.k lost", SCORES, "the loop over the head dim")
class _(Reference):
    def product(self, Q, K):
        return Q @ K.swapaxes(-1, -2) - 2 * Q[..., :1] @ K[..., :1].swapaxes(-1, -2)


@fault("O_transposed_heads", "O written as (B, N, H, d), though it is (B, H, N, d)", "18.7.1", "the strides of O")
class _(Reference):
    def forward(self):
        out = super().forward()
        out["O"] = np.ascontiguousarray(out["O"].swapaxes(1, 2)).reshape(out["O"].shape)
        return out
