"""Every step against the fp64 oracle: lengths, masks, heads, scales, types, NaN, bad arguments."""

import inspect

import ml_dtypes
import numpy as np
import pytest

from refimpl import oracle
from refimpl.tiling import Tile

TILE = Tile(16, 8)
# Against Br = 16 and Bc = 8: one, a tile less one, a tile, a tile and one, ragged both ways, none.
LENGTHS = [
    (1, 1),
    (15, 7),
    (16, 8),
    (17, 9),
    (113, 203),
    (203, 113),
    (1, 40),
    (40, 1),
    (0, 9),
    (9, 0),
    (0, 0),
]


@pytest.mark.parametrize("causal", [None, "bottom_right", "top_left"])
@pytest.mark.parametrize(("Nq", "Nk"), LENGTHS)
def test_lengths(step, draw, agree, Nq, Nk, causal):
    """Any two lengths, masked or not; with more queries than keys the first rows see nothing."""
    Q, K, V, _ = draw(Nq, Nk, seed=Nq * 1000 + Nk)
    options = {"causal": causal is not None, "align": causal or "bottom_right"}
    got = step.attention(Q, K, V, **options, tile=TILE)
    agree(got, oracle.attention(Q, K, V, **options), 1e-13)
    assert [x.dtype for x in got] == [np.float64] * 2


@pytest.mark.parametrize(("B", "Hq", "Hk"), [(0, 2, 1), (2, 1, 1), (2, 6, 2), (1, 4, 4), (1, 3, 1)])
def test_heads(step, draw, agree, B, Hq, Hk):
    """Batches, grouped heads, a value dim unlike the key dim, odd tiles; an empty batch is an answer."""
    Q, K, V, _ = draw(19, 23, B, Hq, Hk, d=7, dv=3)
    got = step.attention(Q, K, V, causal=True, tile=Tile(5, 6))
    agree(got, oracle.attention(Q, K, V, causal=True), 1e-13)


@pytest.mark.parametrize("shape", [(2, 4, 19, 23), (1, 1, 19, 23), (2, 1, 1, 23), (4, 19, 1), (19, 23)])
@pytest.mark.parametrize("causal", [False, True])
def test_boolean_mask(step, draw, agree, shape, causal):
    """Any shape that broadcasts, alone and with causal; the mask's empty rows give 0 and -inf."""
    rng = np.random.default_rng(5)
    mask = rng.random(shape) < 0.4
    mask[..., :6, :] = False
    Q, K, V, _ = draw(19, 23, 2, 4, 2)
    O, lse = step.attention(Q, K, V, mask=mask, causal=causal, tile=TILE)
    agree((O, lse), oracle.attention(Q, K, V, mask=mask, causal=causal), 1e-13)
    hidden = ~np.broadcast_to(mask, (2, 4, 19, 23)).any(axis=-1)
    assert hidden.any()
    assert (O[hidden] == 0).all()
    assert (lse[hidden] == -np.inf).all()


@pytest.mark.parametrize("scale", [None, -0.7, 0.0, 300.0])
def test_scale(step, draw, agree, scale):
    """Of any sign, or 0; scores in the thousands neither overflow nor vanish."""
    Q, K, V, _ = draw(20, 30)
    got = step.attention(Q, K, V, scale=scale, causal=True, tile=TILE)
    agree(got, oracle.attention(Q, K, V, scale=scale, causal=True), 1e-12)


@pytest.mark.parametrize("name", ["growing", "late", "ties", "very negative"])
def test_score_orders(step, draw, agree, name):
    """Maxima that grow from tile to tile, that come last, that tie, and that are far below 0."""
    Q, K, V, _ = draw(20, 40)
    Q[...] = 1
    heights = {
        "growing": np.arange(40) * 4.0,
        "late": np.where(np.arange(40) == 39, 50.0, -50.0),
        "ties": np.full(40, 3.0),
        "very negative": np.linspace(-900, -800, 40),
    }
    K[...] = heights[name][:, None] / 5
    got = step.attention(Q, K, V, scale=1.0, tile=TILE)
    agree(got, oracle.attention(Q, K, V, scale=1.0), 1e-12)


def test_fp32(step, draw, agree):
    """fp32 arithmetic: results are fp32, near the truth by fp32's precision, and not secretly fp64."""
    Q, K, V, _ = (x.astype(np.float32) for x in draw(70, 90, 1, 2, 2, d=16))
    got = step.attention(Q, K, V, causal=True, tile=TILE, dtype=np.float32)
    want = oracle.attention(Q, K, V, causal=True)
    assert [x.dtype for x in got] == [np.float32] * 2
    agree(got, want, 2e-6)
    assert np.abs(got[0] - want[0]).max() > 1e-9


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_inputs(step, draw, agree, dtype):
    """16-bit storage is read as it is and calculated with in the arithmetic type."""
    Q, K, V, _ = (x.astype(dtype) for x in draw(20, 30))
    want = oracle.attention(*(x.astype(np.float64) for x in (Q, K, V)))
    got = step.attention(Q, K, V, tile=TILE)
    if "operand(" in inspect.getsource(step.one_head):  # the weights are rounded to that type, and nothing else is
        agree(got, want, float(ml_dtypes.finfo(dtype).eps))
        assert np.abs(got[0] - want[0]).max() > 1e-5
        agree(got[1:], want[1:], 1e-13)
    else:
        agree(got, want, 1e-13)


def test_views_and_inputs_untouched(step, draw, agree):
    """Strided, stride-0 and read-only arrays are taken, and none is written to."""
    X = np.random.default_rng(1).standard_normal((2, 20, 3, 5))
    Q, K = X.transpose(0, 2, 1, 3), X[:, ::-1].transpose(0, 2, 1, 3)
    V = np.broadcast_to(X[:, :1, :1], (2, 3, 20, 5))
    X.flags.writeable = False
    want = oracle.attention(*(np.ascontiguousarray(x) for x in (Q, K, V)))
    before = X.copy()
    agree(step.attention(Q, K, V, tile=TILE), want, 1e-13)
    assert np.array_equal(X, before)


def nan_where(step, draw, wild, **options):
    """Put wild values into one array, and return where O and lse of 20 rows by 30 keys are not finite."""
    Q, K, V, _ = draw(20, 30)
    for name, at, value in wild:
        {"Q": Q, "K": K, "V": V}[name][0, 0][at] = value
    O, lse = step.attention(Q, K, V, tile=TILE, **options)
    return ~np.isfinite(O[0, 0]), ~np.isfinite(lse[0, 0])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_reach_those_who_see_them(step, draw, value):
    """A wild V: its column, in the rows that see its key, and nothing else. lse knows nothing of V."""
    O, lse = nan_where(step, draw, [("V", (13, 2), value)], causal=True, align="top_left")
    want = np.zeros((20, 5), bool)
    want[13:, 2] = True
    assert np.array_equal(O, want)
    assert not lse.any()


def test_keys_reach_those_who_see_them(step, draw):
    """A NaN in K: all of the rows that see its key, O and lse, also where a full tile is not masked."""
    O, lse = nan_where(step, draw, [("K", (3, 1), np.nan)], causal=True, align="top_left")
    assert np.array_equal(lse, np.arange(20) >= 3)
    assert np.array_equal(O, np.broadcast_to(lse[:, None], (20, 5)))


def test_a_query_reaches_its_row(step, draw):
    """A NaN in Q: its row, and no neighbour in the tile."""
    O, lse = nan_where(step, draw, [("Q", (7, 0), np.nan)], causal=True)
    assert np.array_equal(lse, np.arange(20) == 7)
    assert np.array_equal(O, np.broadcast_to(lse[:, None], (20, 5)))


def test_masked_keys_may_hold_anything(step, draw):
    """NaN, inf and -inf in keys that the mask takes from everybody: no trace of them."""
    mask = np.ones(30, bool)
    mask[[2, 11, 29]] = False
    values = ((2, np.nan), (11, np.inf), (29, -np.inf))
    wild = [(name, (key,), value) for name in "KV" for key, value in values]
    O, lse = nan_where(step, draw, wild, mask=mask)
    assert not O.any()
    assert not lse.any()


def test_scores_of_minus_infinity(step, draw):
    """A row all of whose visible scores are -inf is an empty row."""
    Q, K, V, _ = draw(20, 30)
    Q[...], K[...] = 1, 1
    K[0, 0, :10] = -np.inf
    O, lse = step.attention(Q, K, V, causal=True, align="top_left", tile=TILE)
    assert (O[0, 0, :10] == 0).all()
    assert (lse[0, 0, :10] == -np.inf).all()
    assert np.isfinite(O[0, 0, 10:]).all()
    assert np.isfinite(lse[0, 0, 10:]).all()


def test_default_tile(step, draw, agree):
    """Without a tile: lengths below, at and above 64."""
    Q, K, V, _ = draw(65, 130)
    agree(step.attention(Q, K, V), oracle.attention(Q, K, V), 1e-13)


def arrays(q=(1, 2, 3, 4), k=(1, 2, 5, 4), v=(1, 2, 5, 4), types="ddd"):
    """Ones of three shapes and types."""
    return [np.ones(shape, kind) for shape, kind in zip((q, k, v), types, strict=True)]


@pytest.mark.parametrize(
    ("given", "options", "kind", "says"),
    [
        (arrays(q=(2, 3, 4)), {}, ValueError, r"Q must be \(B, Hq, Nq, d\)"),
        (arrays(k=(2, 2, 5, 4)), {}, ValueError, "K must have B = 1"),
        (arrays(k=(1, 2, 5, 3)), {}, ValueError, "K must have d = 4"),
        (arrays(v=(1, 2, 6, 4)), {}, ValueError, "V must have Nk = 5"),
        (arrays(v=(1, 1, 5, 4)), {}, ValueError, "V must have Hk = 2"),
        (arrays(q=(1, 3, 3, 4)), {}, ValueError, "Q must have a multiple of 2 heads"),
        (arrays(q=(1, 0, 3, 4)), {}, ValueError, "Q must have Hq of at least 1"),
        (arrays(k=(1, 0, 5, 4), v=(1, 0, 5, 4)), {}, ValueError, "K must have Hk of at least 1"),
        (arrays(q=(1, 2, 3, 0), k=(1, 2, 5, 0)), {}, ValueError, "Q must have d of at least 1"),
        (arrays(v=(1, 2, 5, 0)), {}, ValueError, "V must have dv of at least 1"),
        (arrays(types="iii"), {}, TypeError, "Q must be of a floating-point type, got int32"),
        (arrays(types="dfd"), {}, TypeError, "K must be of Q's type float64, got float32"),
        (arrays(), {"scale": "big"}, TypeError, "scale must be a number or None, got 'big'"),
        (arrays(), {"scale": np.nan}, ValueError, "scale must be finite"),
        (arrays(), {"align": "middle"}, ValueError, "align must be"),
        (arrays(), {"mask": np.ones((3, 5))}, TypeError, "mask must be boolean"),
        (arrays(), {"mask": np.ones((3, 4), bool)}, ValueError, r"mask must broadcast to \(1, 2, 3, 5\)"),
        (arrays(), {"tile": (16, 16)}, TypeError, "tile must be a Tile"),
        (arrays(), {"observe": print}, TypeError, "observe must be an Observer"),
        (arrays(), {"dtype": np.float16}, TypeError, "dtype must be float64 or float32"),
    ],
)
def test_refuses(step, given, options, kind, says):
    """Each wrong argument: its name and what was expected, in one line."""
    with pytest.raises(kind, match=says) as caught:
        step.attention(*given, **options)
    assert "\n" not in str(caught.value)
