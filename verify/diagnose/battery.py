"""The probes: forward, options, precision and backward, each in a full size and in one that can be emulated.

Full sizes leave room for tiles of up to 256 keys; emulated ones for tiles of 8 and 16. Scores are three times as large
as usual, so that rows have few important keys and a wrong weight shows in every storage type.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from zlib import crc32

import numpy as np

from verify.case import Shape
from verify.diagnose.probe import Probe
from verify.dtypes import DTYPES
from verify.layouts import LAYOUTS
from verify.recipes import RECIPES, normal


@dataclass(frozen=True)
class Row:
    """One probe of the list: lengths (full, small), heads, recipe, and options as a function of (shape, rng)."""

    id: str
    about: str
    full: tuple
    small: tuple
    heads: tuple = (1, 1, 1)
    recipe: str = "sharp"
    options: object = dict
    wide: float = 1.0  # dv over d
    layout: str = "contiguous"
    backward: bool = False
    exact: bool = False


def sharp(rng, shape):
    """N(0, 1), and Q three times as large."""
    Q, K, V = normal(rng, shape)
    return 3 * Q, K, V


def steep(rng, shape):
    """As `sharp`; in every second row, the later a key the higher its score, and in the others the lower."""
    Q, K, V = sharp(rng, shape)
    Q[..., 0] = np.where(np.arange(shape.Nq) % 2, 4.0, -4.0)
    K[..., 0] = np.linspace(-2, 2, shape.Nk) * math.sqrt(shape.d)
    return Q, K, V


def swamped_O(rng, shape):
    """Equal weights; column c sums 2^c, then one 1, then -2^c: a short accumulator has forgotten the 1."""
    Q, K, V = (np.zeros(s) for s in ((shape.B, shape.Hq, shape.Nq, shape.d), (shape.B, shape.Hk, shape.Nk, shape.d),
                                     (shape.B, shape.Hk, shape.Nk, shape.dv)))  # fmt: skip
    c = np.arange(shape.dv) % 8 + 6
    V[:, :, 0], V[:, :, shape.Nk // 2], V[:, :, -1] = 2.0**c, 1.0, -(2.0**c)
    return Q, K, V


def swamped_l(rng, shape):
    """Row r weighs one key 1, one 2^-c with c = 2 ... 17, and the rest nothing; in log2 units."""
    Q = np.zeros((shape.B, shape.Hq, shape.Nq, shape.d))
    K = np.zeros((shape.B, shape.Hk, shape.Nk, shape.d))
    Q[..., 0], Q[..., 1] = -96.0, -(2.0 + np.arange(shape.Nq) % 16)
    K[..., 0] = 1.0
    K[:, :, 0, 0] = K[:, :, shape.Nk // 2, 0] = 0.0
    K[:, :, shape.Nk // 2, 1] = 1.0
    return Q, K, normal(rng, shape)[2]


def faint(rng, shape):
    """Scores near zero: weights near 1, of which rounding to fewer bits leaves little."""
    Q, K, V = normal(rng, shape)
    return 0.05 * Q, K, V + 2


def low(rng, shape):
    """Every score below -200: a maximum that starts at 0 leaves nothing of the weights."""
    Q = np.full((shape.B, shape.Hq, shape.Nq, shape.d), -9.0)
    K = np.full((shape.B, shape.Hk, shape.Nk, shape.d), 9.0)
    K[:, :, ::2, 0] = 8.0
    return Q, K, normal(rng, shape)[2]


MAKERS = RECIPES | {fn.__name__: fn for fn in (sharp, steep, swamped_O, swamped_l, faint, low)}


def _given(**fixed):
    return lambda shape, rng: fixed


def _slopes(shape, rng):
    return {"alibi_slopes": 2.0 ** -(1.0 + np.arange(shape.Hq))}


def _mask(shape, rng):
    mask = rng.random((shape.B, shape.Hq, shape.Nq, shape.Nk)) < 0.7
    mask[:, :, shape.Nq // 3] = False
    return {"mask": mask}


def _bias(shape, rng):
    return {"bias": 2 * rng.standard_normal((shape.B, shape.Hq, shape.Nq, shape.Nk))}


def _lengths(shape, rng):
    return {"lengths_q": np.array([shape.Nq - 5, shape.Nq]), "lengths_k": np.array([shape.Nk, shape.Nk - 11])}


def _dropout(shape, rng):
    return {"keep": rng.random((shape.B, shape.Hq, shape.Nq, shape.Nk)) < 0.75, "dropout_p": 0.25}


def _both(*parts):
    return lambda shape, rng: {k: v for part in parts for k, v in part(shape, rng).items()}


CAUSAL, TOP_LEFT = _given(causal=True), _given(causal=True, align="top_left")
SCALE = _given(scale=0.3)
NONE = _given()

FORWARD = [
    Row("square", "whole tiles", (64, 512), (32, 48), options=NONE),
    Row("steep", "rows whose maximum grows, and rows whose does not", (32, 512), (32, 48), (1, 2, 2), "steep", NONE),
    Row("ragged", "ragged tiles", (101, 333), (29, 45), options=NONE),
    Row("short", "fewer keys than rows, ragged", (150, 101), (45, 21), options=NONE),
    Row("heads", "batch and heads", (40, 56), (17, 19), (2, 3, 3), options=NONE),
    Row("scale", "a given scale", (64, 96), (16, 20), options=SCALE),
    Row("negative_scale", "a negative scale", (24, 300), (16, 40), options=_given(scale=-0.3)),
    Row("negative_scale_far", "a negative scale on scores far apart", (24, 300), (16, 40), recipe="all_negative",
        options=_given(scale=-0.3)),
    Row("odd_d", "an odd head dim", (40, 300), (16, 20), options=NONE, wide=0),
    Row("wide_v", "values wider than keys", (40, 300), (16, 20), options=NONE, wide=1.5),
    Row("one_key", "a single key", (40, 1), (20, 1), options=NONE),
    Row("no_keys", "no key at all", (40, 0), (20, 0), options=NONE),
    Row("fused", "slices of one fused buffer", (40, 40), (17, 17), (2, 3, 3), options=NONE, layout="fused"),
    Row("offset", "every second row of a buffer", (40, 40), (17, 17), (2, 2, 2), options=NONE, layout="offset"),
    Row("growing_max", "every tile raises the maximum", (24, 512), (20, 48), recipe="growing_max", options=NONE),
    Row("late_max", "the last key outweighs all", (24, 512), (20, 48), recipe="late_max", options=NONE),
    Row("large_scores", "scores beyond 100", (24, 300), (20, 40), recipe="logits_x10", options=_given(scale=0.6)),
    Row("all_negative", "scores below any finite start", (24, 300), (20, 40), recipe="all_negative", options=NONE),
    Row("low", "scores below -200", (24, 300), (20, 40), recipe="low", options=NONE),
    Row("causal", "causal, square", (260, 260), (40, 40), options=CAUSAL),
    Row("causal_ragged", "causal, fewer queries than keys", (141, 333), (29, 45), options=CAUSAL),
    Row("empty_rows", "causal, rows without keys", (260, 150), (50, 29), options=CAUSAL),
    Row("causal_edges", "causal, diagonals near tile edges", (257, 256), (33, 32), options=CAUSAL),
    Row("causal_hides_one", "causal, a tile's first row misses its last key", (258, 256), (34, 32), options=CAUSAL),
    Row("causal_shows_one", "causal, a tile's last row sees one key of the next", (256, 257), (32, 33), options=CAUSAL),
    Row("causal_negative", "causal, all scores very low", (128, 128), (40, 40), recipe="all_negative", options=CAUSAL),
    Row("top_left", "causal, starts aligned", (101, 203), (29, 45), options=TOP_LEFT),
    Row("nan_hidden", "NaN and inf where no row sees them", (40, 90), (13, 20), recipe="nan_hidden", options=TOP_LEFT),
    Row("gqa", "three query heads to a key head", (40, 56), (17, 19), (2, 6, 2), options=NONE),
    Row("mqa", "one key head for all", (40, 56), (17, 19), (2, 3, 1), options=NONE),
]  # fmt: skip

OPTIONS = [
    Row("mask", "a boolean mask with an empty row", (130, 150), (20, 24), (2, 2, 2), options=_mask),
    Row("mask_causal", "a mask and causal", (130, 150), (20, 24), (2, 2, 2), options=_both(_mask, CAUSAL)),
    Row("window", "a window either way", (101, 203), (29, 45), options=_given(window=(37, 11))),
    Row("window_causal", "a window to the left, causal", (101, 203), (29, 45),
        options=_given(window=(20, 0), causal=True)),
    Row("window_open", "a window with no left bound", (101, 203), (29, 45), options=_given(window=(None, 7))),
    Row("alibi", "ALiBi on grouped heads, fewer queries", (70, 130), (17, 29), (2, 4, 2), options=_slopes),
    Row("alibi_causal", "ALiBi and causal", (70, 130), (17, 29), (1, 2, 2), options=_both(_slopes, CAUSAL)),
    Row("softcap", "softcap", (70, 130), (17, 29), options=_given(softcap=2.0)),
    Row("softcap_causal", "softcap and causal", (70, 130), (17, 29), options=_given(softcap=2.0, causal=True)),
    Row("softcap_alibi", "softcap, ALiBi and a scale", (70, 130), (17, 29), (1, 2, 2),
        options=_both(_slopes, _given(softcap=2.0), SCALE)),
    Row("bias", "an additive bias", (70, 130), (17, 29), (2, 2, 2), options=_bias),
    Row("bias_scale", "a bias and a scale", (70, 130), (17, 29), (2, 2, 2), options=_both(_bias, SCALE)),
    Row("lengths", "rows and keys in use", (70, 130), (17, 29), (2, 2, 2), options=_lengths),
    Row("lengths_causal", "rows and keys in use, causal", (70, 130), (17, 29), (2, 2, 2),
        options=_both(_lengths, CAUSAL)),
    Row("dropout", "dropout with a given mask", (70, 130), (17, 29), (2, 2, 2), options=_dropout),
]  # fmt: skip

PRECISION = [
    Row("swamped_O", "a 1 between 2^c and -2^c", (8, 528), (8, 48), recipe="swamped_O", options=NONE, exact=True),
    Row("swamped_l", "a weight of 2^-c beside 1", (16, 528), (16, 48), recipe="swamped_l",
        options=_given(scale=math.log(2)), exact=True),
    Row("large_values", "values near 3000", (24, 520), (20, 40), recipe="large_values", options=NONE),
    Row("faint", "nearly equal weights", (24, 520), (20, 48), recipe="faint", options=NONE),
]  # fmt: skip

BACKWARD = [
    Row("d_square", "gradients", (96, 128), (16, 32), options=NONE, backward=True),
    Row("d_ragged", "gradients, ragged", (203, 149), (21, 27), options=NONE, backward=True),
    Row("d_heads", "gradients, batch and heads", (40, 56), (13, 15), (2, 3, 3), options=NONE, backward=True),
    Row("d_scale", "gradients, a given scale", (64, 96), (16, 20), options=SCALE, backward=True),
    Row("d_causal", "gradients, causal, fewer queries", (149, 203), (21, 27), options=CAUSAL, backward=True),
    Row("d_empty_rows", "gradients, causal, rows without keys", (203, 149), (27, 21), options=CAUSAL, backward=True),
    Row("d_gqa", "gradients, grouped heads", (40, 56), (13, 15), (2, 6, 2), options=NONE, backward=True),
    Row("d_mask", "gradients, a mask", (70, 80), (16, 20), (2, 2, 2), options=_mask, backward=True),
    Row("d_window", "gradients, a window", (149, 203), (21, 27), options=_given(window=(19, 5)), backward=True),
    Row("d_softcap", "gradients, softcap", (70, 80), (16, 20), options=_given(softcap=2.0), backward=True),
    Row("d_alibi", "gradients, ALiBi", (70, 80), (16, 20), (1, 4, 2), options=_slopes, backward=True),
    Row("d_bias", "gradients, a bias", (70, 80), (16, 20), (2, 2, 2), options=_bias, backward=True),
    Row("d_lengths", "gradients, rows and keys in use", (70, 80), (16, 20), (2, 2, 2), options=_lengths, backward=True),
    Row("d_dropout", "gradients, dropout", (70, 80), (16, 20), (2, 2, 2), options=_dropout, backward=True),
]  # fmt: skip

ROWS = FORWARD + OPTIONS + PRECISION + BACKWARD


@cache
def battery(dtype="fp32", small=False, d=None, whole=1, square=False) -> tuple:
    """All probes in a storage type.

    Parameters
    ----------
    dtype : str
    small : bool
        The sizes that can be emulated.
    d : int, optional
        Head dim, if the kernel takes no other; 32, or 8 if small.
    whole : int
        Lengths are rounded up to multiples of this, for kernels that take no others.
    square : bool
        As many keys as queries, for kernels that take nothing else.
    """
    rows = [_fitted(row, small, whole, square) for row in ROWS]
    return tuple(_build(row, dtype, small, d or (8 if small else 32)) for row in rows)


def _fitted(row, small, whole, square):
    """A row of the list, with the lengths that a kernel takes; a length of 0 or 1 is its own point and stays."""
    lengths = [n if n < 2 else -(-n // whole) * whole for n in (row.small if small else row.full)]
    if square and min(lengths) > 1:
        lengths = [max(lengths)] * 2
    return replace(row, **{"small" if small else "full": tuple(lengths)})


def _build(row, dtype, small, d):
    Nq, Nk = row.small if small else row.full
    B, Hq, Hk = row.heads
    if row.wide == 0:
        d = d + 5
    shape = Shape(B, Hq, Hk, Nq, Nk, d, int(d * (row.wide or 1)))
    rng = np.random.default_rng(crc32(row.id.encode()))
    kind = DTYPES[dtype].numpy
    arrays = LAYOUTS[row.layout](*(x.astype(kind) for x in MAKERS[row.recipe](rng, shape)))
    options = row.options(shape, rng)
    if "bias" in options:  # kernels take it in fp32
        options = options | {"bias": options["bias"].astype(np.float32)}
    dO = rng.standard_normal((B, Hq, Nq, shape.dv)).astype(kind) if row.backward else None
    return Probe(row.id, row.about, *arrays, options, dtype, dO, row.exact)
