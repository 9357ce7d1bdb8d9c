"""The default cases: named, seeded recipes, each with the shape a GPU runs and the shape that is emulated."""

import math
from fractions import Fraction

from verify.case import SMALL_THREADS, SMALL_TILE, Case, Problem, Shape, dense
from verify.option_cases import OPTION_CASES

__all__ = ["DEFAULT", "DENSE", "SMALL_THREADS", "SMALL_TILE", "Case", "Problem", "Shape", "dense"]

# Full tiles are 64 or 32, so 63, 64, 65 stand around an edge of either.
_LIST = [
    Case("hand", "integers, N = 4, d = 2: the answer is known as fractions", "hand",
          dense(4, d=2), dense(4, d=2), recipe="hand", scale=math.log(2)),
    Case("square", "several whole tiles each way", "shape",
          dense(512, B=2, H=2, d=64), dense(48, d=8)),
    Case("batch_heads", "batch and heads each above one", "shape",
          dense(256, B=3, H=5, d=64), dense(17, B=2, H=3, d=8)),
    Case("batch_heads_cross", "batch and heads, and a third as many queries as keys", "shape",
          dense(100, 300, B=2, H=3, d=64), dense(17, 33, B=2, H=2, d=8)),
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
    Case("edge_hides_one_far", "the same a tile further on, two heads", "causal",
          dense(300, 362, H=2, d=64), dense(17, 47, H=2, d=8), causal=True),
    Case("edge_shows_one_far", "the same a tile further on, two heads", "causal",
          dense(320, 385, H=2, d=64), dense(18, 35, H=2, d=8), causal=True),
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
    Case("all_negative_gqa", "all scores as low, shared key heads, fewer queries than keys", "stress",
          dense(200, 330, H=4, Hk=2, d=64), dense(9, 20, H=4, Hk=2, d=8), recipe="all_negative"),
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
    Case("large_values_gqa", "values as large, causal, shared key heads", "stress",
          dense(300, 400, H=4, Hk=2, d=64), dense(17, 40, H=2, Hk=1, d=8), recipe="large_values", causal=True),
    Case("negative_scale", "a negative scale turns a row's smallest product into its largest score", "stress",
          dense(256, H=2, d=64), dense(40, d=8), recipe="all_negative", scale=-0.3),
    Case("one_key", "one key: every row of O is that value", "special",
          dense(512, 1, H=2, d=64), dense(40, 1, d=8)),
    Case("no_keys", "no key at all: O is 0 and lse is -inf", "special",
          dense(70, 0, H=2, d=64), dense(20, 0, d=8)),
    Case("nan_hidden", "NaN and inf beyond what any query sees stay there", "special",
          dense(113, 203, H=2, d=64), dense(29, 45, d=8), recipe="nan_hidden", causal=True, align="top_left"),
    Case("nan_hidden_gqa", "the same with shared key heads, two tiles of keys behind the diagonal", "special",
          dense(70, 210, B=2, H=4, Hk=2, d=64), dense(9, 39, B=2, H=2, Hk=1, d=8), recipe="nan_hidden", causal=True,
          align="top_left"),
    Case("nan_seen", "one NaN in V reaches the rows that see it, in its column, and no others", "special",
          dense(203, H=2, d=64), dense(40, d=8), recipe="nan_seen", causal=True),
]  # fmt: skip

# What every kernel of the ladder takes: forward, with no option but causal.
DENSE: dict[str, Case] = {case.id: case for case in _LIST}
DEFAULT: dict[str, Case] = DENSE | {case.id: case for case in OPTION_CASES}

# The hand case by hand: O (N, d) and l = exp(lse), the sums of powers of two of `recipes.hand`.
HAND_L = [Fraction(8), Fraction(9, 2), Fraction(7), Fraction(75, 2)]
HAND_O = [
    [Fraction(-27, 8), Fraction(1, 2)],
    [Fraction(10, 9), Fraction(-11, 9)],
    [Fraction(-1), Fraction(-2, 7)],
    [Fraction(-506, 75), Fraction(76, 75)],
]
