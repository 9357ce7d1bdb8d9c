"""The default cases: named, seeded recipes, each with the shape a GPU runs and the shape that is emulated."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple
from zlib import crc32

import numpy as np

from verify.dtypes import DTYPES
from verify.layouts import LAYOUTS
from verify.recipes import RECIPES

# How small shapes are emulated: three or so tiles of 16 and eight threads a block are few enough for pure Python.
SMALL_TILE = 16
SMALL_THREADS = (4, 2)


class Shape(NamedTuple):
    """Batch, query heads, key heads, query length, key length, head dim of Q and K, head dim of V."""

    B: int
    Hq: int
    Hk: int
    Nq: int
    Nk: int
    d: int
    dv: int


def dense(N, Nk=None, *, B=1, H=1, Hk=None, d, dv=None):
    """Shape from what differs: keys as many as queries, as many key heads as heads, dv = d."""
    return Shape(B, H, Hk or H, N, N if Nk is None else Nk, d, dv or d)


@dataclass(frozen=True, eq=False)
class Problem:
    """The inputs of one run.

    Attributes
    ----------
    Q, K, V : ndarray (B, Hq, Nq, d), (B, Hk, Nk, d), (B, Hk, Nk, dv)
        In the storage type, in the layout of the case.
    options : dict
        Keyword arguments of attention: scale, causal, align, and mask if there is one.
    case, dtype, layout : str
    seed : int
    """

    Q: np.ndarray
    K: np.ndarray
    V: np.ndarray
    options: dict
    case: str = "unnamed"
    dtype: str = "fp32"
    layout: str = "contiguous"
    seed: int = 0

    @property
    def shape(self) -> Shape:
        """Sizes, read off the arrays."""
        B, Hq, Nq, d = self.Q.shape
        return Shape(B, Hq, self.K.shape[1], Nq, self.K.shape[2], d, self.V.shape[3])

    @property
    def finite(self) -> bool:
        """No input holds NaN or inf, so no output may hold NaN."""
        return all(bool(np.isfinite(x.astype(np.float64)).all()) for x in (self.Q, self.K, self.V))

    def dO(self) -> np.ndarray:
        """A gradient of O to go back from: N(0, 1) in the storage type, (B, Hq, Nq, dv)."""
        s = self.shape
        rng = np.random.default_rng([self.seed, crc32(self.case.encode()), 1])
        return rng.standard_normal((s.B, s.Hq, s.Nq, s.dv)).astype(self.Q.dtype)


@dataclass(frozen=True)
class Case:
    """One way in which attention kernels have been wrong, as a recipe.

    Attributes
    ----------
    id, about, kind : str
        Name; what it is there for, in one line; the group that reports sort by.
    full, small : Shape
        What a GPU runs; what is emulated. The small one still reaches what the case is about.
    recipe, layout : str
        How values are made (`recipes`) and laid out (`layouts`).
    causal, align, scale
        Options of attention.
    seed : int
        The generator is seeded with this and the id, so that no two cases share a stream.
    """

    id: str
    about: str
    kind: str
    full: Shape
    small: Shape
    recipe: str = "normal"
    layout: str = "contiguous"
    causal: bool = False
    align: str = "bottom_right"
    scale: float | None = None
    seed: int = 0

    @property
    def options(self) -> dict:
        """Keyword arguments of attention."""
        return {"scale": self.scale, "causal": self.causal, "align": self.align}

    @property
    def needs(self) -> set[str]:
        """Capabilities that a kernel must have, in the registry's words."""
        s = self.full
        wanted = {
            "causal": self.causal,
            "top_left": self.causal and self.align == "top_left",
            "gqa": s.Hq != s.Hk,
            "strides": self.layout != "contiguous",
        }
        return {name for name, needed in wanted.items() if needed}

    def shape(self, small: bool) -> Shape:
        """The emulated shape, or the full one."""
        return self.small if small else self.full

    def build(self, dtype: str, small: bool = True, seed: int | None = None) -> Problem:
        """Make the inputs.

        Parameters
        ----------
        dtype : str
            Storage type. The values are rounded to it, and truth is computed from the rounded ones.
        small : bool
            The emulated shape instead of the full one.
        seed : int, optional
            Instead of the case's own.

        Raises
        ------
        KeyError
            For an unknown dtype.
        """
        seed = self.seed if seed is None else seed
        rng = np.random.default_rng([seed, crc32(self.id.encode())])
        arrays = RECIPES[self.recipe](rng, self.shape(small))
        stored = LAYOUTS[self.layout](*(x.astype(DTYPES[dtype].numpy) for x in arrays))
        return Problem(*stored, self.options, self.id, dtype, self.layout, seed)


# Full tiles are 64 or 32, so 63, 64, 65 stand around an edge of either.
_LIST = [
    Case("hand", "integers, N = 4, d = 2: the answer is known as fractions", "hand",
          dense(4, d=2), dense(4, d=2), recipe="hand", scale=math.log(2)),
    Case("square", "several whole tiles each way", "shape",
          dense(512, B=2, H=2, d=64), dense(48, d=8)),
    Case("batch_heads", "batch and heads each above one", "shape",
          dense(256, B=3, H=5, d=64), dense(17, B=2, H=3, d=8)),
    Case("one_token", "one query, one key: O is V", "ragged",
          dense(1, B=2, H=2, d=64), dense(1, B=2, H=2, d=8)),
    Case("tile_less_1", "one row and key short of a tile", "ragged",
          dense(63, H=2, d=64), dense(SMALL_TILE - 1, H=2, d=8)),
    Case("tile", "exactly one tile", "ragged",
          dense(64, H=2, d=64), dense(SMALL_TILE, H=2, d=8)),
    Case("tile_plus_1", "a tile and a tile of one", "ragged",
          dense(65, H=2, d=64), dense(SMALL_TILE + 1, H=2, d=8)),
    Case("113x203", "both lengths ragged, fewer queries than keys", "ragged",
          dense(113, 203, H=2, d=64), dense(29, 45, d=8)),
    Case("1023x1024", "the last query tile is one row short", "ragged",
          dense(1023, 1024, H=2, d=64), dense(31, 32, d=8)),
    Case("1024x1023", "the last key tile is one key short", "ragged",
          dense(1024, 1023, H=2, d=64), dense(32, 31, d=8)),
    Case("causal", "the diagonal cuts tiles, and half of them are dead", "causal",
          dense(512, B=2, H=2, d=64), dense(48, d=8), causal=True),
    Case("causal_113x203", "causal, fewer queries than keys, ends aligned", "causal",
          dense(113, 203, H=2, d=64), dense(29, 45, d=8), causal=True),
    Case("empty_rows", "causal, more queries than keys: the first rows, a whole tile of them, see no key", "causal",
          dense(203, 113, H=2, d=64), dense(50, 29, d=8), causal=True),
    Case("causal_top_left", "causal, fewer queries than keys, starts aligned", "causal",
          dense(113, 203, H=2, d=64), dense(29, 45, d=8), causal=True, align="top_left"),
    Case("edge_hides_one", "causal, the first row of a query tile misses only the last key of a key tile", "causal",
          dense(300, 330, H=2, d=64), dense(20, 34, d=8), causal=True),
    Case("edge_shows_one", "causal, the last row of a query tile sees only the first key of a key tile", "causal",
          dense(320, 321, H=2, d=64), dense(32, 33, d=8), causal=True),
    Case("gqa", "two query heads to a key head", "heads",
          dense(256, H=8, Hk=4, d=64), dense(19, 20, H=4, Hk=2, d=8)),
    Case("mqa", "all query heads share one key head, causal", "heads",
          dense(256, B=2, H=6, Hk=1, d=64), dense(17, B=2, H=3, Hk=1, d=8), causal=True),
    Case("odd_head_dim", "a head dim that no vector width divides", "head dim",
          dense(256, H=2, d=113), dense(33, d=13)),
    Case("head_dim_256", "the largest head dim", "head dim",
          dense(256, H=2, d=256), dense(3, 17, d=256)),
    Case("dv_not_d", "values wider than keys", "head dim",
          dense(256, H=2, d=64, dv=96), dense(33, d=8, dv=12)),
    Case("offset_view", "every second row of a wider buffer, NaN in between", "strides",
          dense(200, B=2, H=2, d=64), dense(19, B=2, d=8), layout="offset"),
    Case("fused_qkv", "slices of one fused QKV buffer, heads interleaved", "strides",
          dense(200, B=2, H=3, d=64), dense(17, B=2, H=2, d=8), layout="fused", causal=True),
    Case("stride_0", "inputs expanded over batch and heads without a copy", "strides",
          dense(200, B=2, H=3, d=64), dense(17, B=2, H=2, d=8), layout="expanded"),
    Case("logits_x10", "scores ten times as large", "stress",
          dense(512, H=2, d=64), dense(40, d=8), recipe="logits_x10"),
    Case("all_negative", "all scores below any finite stand-in for -inf, causal", "stress",
          dense(512, H=2, d=64), dense(40, d=8), recipe="all_negative", causal=True),
    Case("outliers", "one element in fifty is ten times as large", "stress",
          dense(512, H=2, d=64), dense(40, d=8), recipe="outliers"),
    Case("growing_max", "every key tile raises the maximum", "stress",
          dense(512, H=2, d=64), dense(33, 50, d=8), recipe="growing_max"),
    Case("late_max", "the last key outweighs all others", "stress",
          dense(512, H=2, d=64), dense(33, 49, d=8), recipe="late_max"),
    Case("ties", "every key three times, with different values", "stress",
          dense(512, H=2, d=64), dense(33, 48, d=8), recipe="ties"),
    Case("identical_queries", "all queries the same vector", "stress",
          dense(512, H=2, d=64), dense(40, d=8), recipe="identical_queries"),
    Case("large_values", "values near 3000: sums before the division leave fp16's range", "stress",
          dense(512, H=2, d=64), dense(40, d=8), recipe="large_values"),
    Case("negative_scale", "a negative scale turns a row's smallest product into its largest score", "stress",
          dense(256, H=2, d=64), dense(40, d=8), recipe="all_negative", scale=-0.3),
    Case("one_key", "one key: every row of O is that value", "special",
          dense(512, 1, H=2, d=64), dense(40, 1, d=8)),
    Case("no_keys", "no key at all: O is 0 and lse is -inf", "special",
          dense(70, 0, H=2, d=64), dense(20, 0, d=8)),
    Case("nan_hidden", "NaN and inf beyond what any query sees stay there", "special",
          dense(113, 203, H=2, d=64), dense(29, 45, d=8), recipe="nan_hidden", causal=True, align="top_left"),
    Case("nan_seen", "one NaN in V reaches the rows that see it, in its column, and no others", "special",
          dense(203, H=2, d=64), dense(40, d=8), recipe="nan_seen", causal=True),
]  # fmt: skip

DEFAULT: dict[str, Case] = {case.id: case for case in _LIST}

# The hand case by hand: O (N, d) and l = exp(lse), the sums of powers of two of `recipes.hand`.
HAND_L = [Fraction(8), Fraction(9, 2), Fraction(7), Fraction(75, 2)]
HAND_O = [
    [Fraction(-27, 8), Fraction(1, 2)],
    [Fraction(10, 9), Fraction(-11, 9)],
    [Fraction(-1), Fraction(-2, 7)],
    [Fraction(-506, 75), Fraction(76, 75)],
]
