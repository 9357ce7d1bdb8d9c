"""Every option twice: as rules, and as the oracle's own arguments or an array written with plain loops."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from refimpl import backward, masks, oracle, scores, step4_causal
from refimpl.mask_tensor import boolean
from refimpl.standard import standard
from refimpl.tiling import Tile

B, HQ, HK, NQ, NK, D, DV = 2, 4, 2, 17, 25, 6, 4
TILE = Tile(8, 8)
OFFSET = NK - NQ


def table(sees):
    """Write out a mask, bool (B, 1, NQ, NK), from sees(b, r, i, j), pair by pair."""
    pairs = [[[sees(b, r, r + OFFSET, j) for j in range(NK)] for r in range(NQ)] for b in range(B)]
    return np.array(pairs, bool)[:, None]


RNG = np.random.default_rng(7)
MASK = RNG.random((B, 1, NQ, NK)) < 0.6
MASK[0, 0, 16] = False
MASK[0, 0, :8, :8] = MASK[0, 0, 8:16, 8:16] = True
MASK[1, 0, :8, 8:16] = MASK[1, 0, 16:, :8] = False
MASK[1, 0, 8:16, 16:] = True
SLOPES = RNG.random((B, HQ))
BIAS = RNG.normal(0, 2, (1, HQ, NQ, NK))
HOLES = np.where(RNG.random((B, 1, 1, NK)) < 0.3, -np.inf, RNG.normal(0, 1, (B, 1, 1, NK)))
IDS_Q = np.sort(RNG.integers(0, 4, (B, NQ)))
IDS_K = np.sort(RNG.integers(0, 4, (B, NK)))
SHUFFLED = RNG.integers(0, 3, NQ), RNG.integers(0, 3, NK)
PREFIX = np.array([3, 11])
TABLE = RNG.normal(0, 2, (HQ, 9))
LENGTHS = {"lengths_q": np.array([17, 9]), "lengths_k": np.array([14, 25])}


def relative_table(h, i, j):
    """Look TABLE up as its docstring says: distances beyond 4 share the last entry."""
    return TABLE[h, max(-4, min(4, j - i)) + 4]


RELATIVE = np.array(
    [[[relative_table(h, r + OFFSET, j) for j in range(NK)] for r in range(NQ)] for h in range(HQ)]
)[None]


class Option(NamedTuple):
    """`rules()` makes the rules; `same` says it to the oracle; `call` goes to both."""

    rules: Callable
    same: Mapping
    call: Mapping = MappingProxyType({})


def strided_sees(i, j, step):
    """The last `step` keys, and every step-th one before them."""
    return j <= i and (i - j <= step or (i - j) % step == 0)


OPTIONS = {
    "causal": Option(masks.causal, {"causal": True}),
    "causal top-left": Option(masks.causal, {"causal": True}, {"align": "top_left"}),
    "window": Option(lambda: masks.window(3, 2), {"window": (3, 2)}),
    "window top-left": Option(lambda: masks.window(2, 0), {"window": (2, 0)}, {"align": "top_left"}),
    "window left": Option(lambda: masks.window(4, -1), {"window": (4, None)}),
    "window right": Option(lambda: masks.window(None, 5), {"window": (None, 5)}),
    "window wide": Option(lambda: masks.window(9, 7), {"window": (9, 7)}),
    "window none": Option(masks.window, {}),
    "padding": Option(masks.padding, {}, LENGTHS),
    "document": Option(
        lambda: masks.document(IDS_Q, IDS_K), {"mask": table(lambda b, r, i, j: IDS_Q[b, r] == IDS_K[b, j])}
    ),
    "document shuffled": Option(
        lambda: masks.document(*SHUFFLED), {"mask": table(lambda b, r, i, j: SHUFFLED[0][r] == SHUFFLED[1][j])}
    ),
    "prefix": Option(
        lambda: masks.prefix_lm(PREFIX), {"mask": table(lambda b, r, i, j: j <= i or j < PREFIX[b])}
    ),
    "dilated": Option(lambda: masks.dilated(3), {"mask": table(lambda b, r, i, j: (i - j) % 3 == 0)}),
    "dilated by 2": Option(lambda: masks.dilated(2), {"mask": table(lambda b, r, i, j: (i - j) % 2 == 0)}),
    "dilated by 1": Option(lambda: masks.dilated(1), {}),
    "strided": Option(lambda: masks.strided(4), {"mask": table(lambda b, r, i, j: strided_sees(i, j, 4))}),
    "boolean": Option(lambda: boolean(MASK), {"mask": MASK}),
    "softcap": Option(lambda: scores.softcap(1.5), {"softcap": 1.5}),
    "alibi": Option(lambda: scores.alibi(SLOPES), {"alibi_slopes": SLOPES}),
    "alibi of heads": Option(lambda: scores.alibi(SLOPES[0]), {"alibi_slopes": SLOPES[0]}),
    "alibi top-left": Option(lambda: scores.alibi(SLOPES), {"alibi_slopes": SLOPES}, {"align": "top_left"}),
    "relative": Option(lambda: scores.relative(TABLE), {"bias": RELATIVE}),
    "bias": Option(lambda: scores.bias(BIAS), {"bias": BIAS}),
    "bias of keys": Option(lambda: scores.bias(HOLES), {"bias": HOLES}),
    "standard": Option(
        lambda: standard(causal=True, window=(6, 3), mask=MASK, softcap=2.0, alibi_slopes=SLOPES, bias=BIAS),
        {"causal": True, "window": (6, 3), "mask": MASK, "softcap": 2.0, "alibi_slopes": SLOPES, "bias": BIAS},
        LENGTHS,
    ),
    "standard left": Option(
        lambda: standard(window=(6, -1), softcap=0.5, bias=HOLES),
        {"window": (6, None), "softcap": 0.5, "bias": HOLES},
    ),
    "standard right": Option(lambda: standard(window=(-1, 2)), {"window": (None, 2)}, LENGTHS),
    "standard nothing": Option(standard, {}),
    "standard alibi": Option(lambda: standard(alibi_slopes=SLOPES[0]), {"alibi_slopes": SLOPES[0]}, LENGTHS),
}


def arrays(seed=0):
    """Q, K, V, dO, dlse of the sizes above."""
    rng = np.random.default_rng(seed)
    shapes = (B, HQ, NQ, D), (B, HK, NK, D), (B, HK, NK, DV), (B, HQ, NQ, DV), (B, HQ, NQ)
    return [rng.standard_normal(shape) * 1.5 for shape in shapes]


def by_rules(given, rules, call, *, order="v2", step=step4_causal, with_bias=False):
    """O, lse, and the gradients, by tiles."""
    Q, K, V, dO, dlse = given
    options = {"rules": rules, "tile": TILE, **call}
    O, lse = step.attention(Q, K, V, **options)
    back = {"dlse": dlse, "dbias": with_bias, "order": order, **options}
    return O, lse, *backward.attention_backward(Q, K, V, O, lse, dO, **back)


def by_oracle(given, same, call):
    """The same without tiles or rules."""
    Q, K, V, dO, dlse = given
    *gradients, dbias = oracle.attention_backward(Q, K, V, dO, dlse=dlse, threads=1, **same, **call)
    found = *oracle.attention(Q, K, V, threads=1, **same, **call), *gradients
    return found if dbias is None else (*found, dbias)


def distance(got, want):
    """The largest error over max(1, largest value); inf where infinities differ, NaN where a NaN is."""
    worst = 0.0
    for x, y in zip(got, want, strict=True):
        if x.shape != y.shape:
            return np.inf
        finite = np.isfinite(y)
        if not np.array_equal(np.where(finite, 0, x), np.where(finite, 0, y)):
            return np.inf
        size = max(1, np.abs(y[finite]).max(initial=0))
        worst = np.maximum(worst, np.abs(x[finite] - y[finite]).max(initial=0) / size)  # max() would lose a NaN
    return worst

