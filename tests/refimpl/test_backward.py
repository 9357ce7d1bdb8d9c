"""Both orders of the backward pass against the oracle's gradients."""

import numpy as np
import pytest

from refimpl import oracle, step3_flash_v2
from refimpl.backward import attention_backward
from refimpl.tiling import Tile

TILE = Tile(8, 6)
LENGTHS = [(1, 1), (7, 5), (8, 6), (9, 7), (23, 41), (41, 23), (1, 20), (20, 1), (0, 5), (5, 0)]


@pytest.fixture(params=["v1", "v2"])
def order(request):
    """Each order in turn."""
    return request.param


def gradients(Q, K, V, dO, order, dtype=np.float64, **options):
    """Forward by step 3, then backward from its O and lse."""
    O, lse = step3_flash_v2.attention(Q, K, V, tile=TILE, dtype=dtype, **options)
    return attention_backward(Q, K, V, O, lse, dO, tile=TILE, order=order, dtype=dtype, **options)


@pytest.mark.parametrize("causal", [None, "bottom_right", "top_left"])
@pytest.mark.parametrize(("Nq", "Nk"), LENGTHS)
def test_lengths(draw, agree, order, Nq, Nk, causal):
    """Any two lengths; rows without keys and keys without rows get 0."""
    Q, K, V, dO = draw(Nq, Nk, seed=Nq * 100 + Nk)
    options = {"causal": causal is not None, "align": causal or "bottom_right"}
    got = gradients(Q, K, V, dO, order, **options)
    agree(got, oracle.attention_backward(Q, K, V, dO, **options)[:3], 1e-12)


@pytest.mark.parametrize(("B", "Hq", "Hk"), [(0, 2, 1), (2, 6, 2), (1, 4, 1), (2, 2, 2)])
def test_heads_with_a_mask(draw, agree, order, B, Hq, Hk):
    """Grouped heads add up in dK and dV, each under its own mask; dv differs from d; empty rows get 0."""
    Q, K, V, dO = draw(19, 23, B, Hq, Hk, d=7, dv=3)
    mask = np.random.default_rng(1).random((B, Hq, 19, 23)) < 0.5
    mask[:, :, 4:9] = False
    mask[..., 11] = False
    dQ, dK, dV = got = gradients(Q, K, V, dO, order, mask=mask, causal=True)
    agree(got, oracle.attention_backward(Q, K, V, dO, mask=mask, causal=True)[:3], 1e-12)
    assert (dQ[:, :, 4:9] == 0).all()
    assert (dK[:, :, 11] == 0).all()
    assert (dV[:, :, 11] == 0).all()


@pytest.mark.parametrize("scale", [-0.7, 0.0, 40.0])
def test_scale(draw, agree, order, scale):
    """Any sign, 0 (dQ and dK vanish, dV does not), and large: P is all but a one-hot row."""
    Q, K, V, dO = draw(20, 30)
    got = gradients(Q, K, V, dO, order, scale=scale)
    want = oracle.attention_backward(Q, K, V, dO, scale=scale)[:3]
    agree(got, want, 1e-11)
    assert (np.abs(want[0]).max() == 0) == (scale == 0)


def test_central_differences(draw, order):
    """Against the forward pass itself, which no formula of the gradient can have misled."""
    Q, K, V, dO = draw(5, 7, 1, 2, 1, d=3, dv=2)
    got = gradients(Q, K, V, dO, order, causal=True)
    for k, x in enumerate((Q, K, V)):
        for at in np.ndindex(x.shape):
            ends = []
            for h in (1e-5, -1e-5):
                moved = [Q.copy(), K.copy(), V.copy()]
                moved[k][at] += h
                ends.append((step3_flash_v2.attention(*moved, causal=True)[0] * dO).sum())
            assert abs((ends[0] - ends[1]) / 2e-5 - got[k][at]) <= 1e-7


def test_fp32(draw, agree, order):
    """fp32 arithmetic: fp32 results, near the truth by fp32's precision."""
    Q, K, V, dO = (x.astype(np.float32) for x in draw(40, 50, d=16, dv=16))
    got = gradients(Q, K, V, dO, order, np.float32, causal=True)
    assert [x.dtype for x in got] == [np.float32] * 3
    agree(got, oracle.attention_backward(Q, K, V, dO, causal=True)[:3], 5e-6)


def test_orders_agree_in_dk_and_dv(draw):
    """Both orders sum dK and dV the same way: equal to the bit."""
    Q, K, V, dO = draw(41, 23, 1, 4, 2)
    v1, v2 = (gradients(Q, K, V, dO, order, causal=True) for order in ("v1", "v2"))
    for x, y in zip(v1[1:], v2[1:], strict=True):
        assert np.array_equal(x, y)


def test_a_nan_stays_behind_the_mask(draw, order):
    """NaN in a key that nobody sees, and in a row that sees nothing: all gradients stay finite and right."""
    Q, K, V, dO = draw(20, 30)
    mask = np.ones((20, 30), bool)
    mask[:, 13] = mask[6] = False
    clean = gradients(Q, K, V, dO, order, mask=mask)
    K[..., 13, :] = V[..., 13, 0] = np.nan
    Q[..., 6, :] = dO[..., 6, 1] = np.nan
    dirty = gradients(Q, K, V, dO, order, mask=mask)
    for x, y in zip(dirty, clean, strict=True):
        assert np.array_equal(x, y)


def test_a_nan_reaches_those_who_see_it(draw, order):
    """A NaN in one row's dO: that row's dQ, and dK and dV of the keys it sees; no other."""
    Q, K, V, dO = draw(20, 20)
    dO[0, 0, 7, 2] = np.nan
    dQ, dK, dV = (np.isnan(x[0, 0]) for x in gradients(Q, K, V, dO, order, causal=True))
    assert np.array_equal(dQ.any(axis=1), np.arange(20) == 7)
    assert np.array_equal(dK.all(axis=1), np.arange(20) <= 7)
    assert np.array_equal(dK.any(axis=1), np.arange(20) <= 7)
    assert np.array_equal(dV[:, 2], np.arange(20) <= 7)
    assert not dV[:, [0, 1, 3, 4]].any()


def test_a_nan_row_does_not_reach_hidden_keys(draw, order):
    """A NaN in one row's Q makes its lse NaN; the keys after it never see that."""
    Q, K, V, dO = draw(20, 20)
    Q[0, 0, 7, 2] = np.nan
    dQ, dK, dV = (np.isnan(x[0, 0]) for x in gradients(Q, K, V, dO, order, causal=True))
    assert np.array_equal(dQ, np.broadcast_to(np.arange(20)[:, None] == 7, (20, 5)))
    for x in (dK, dV):
        assert np.array_equal(x, np.broadcast_to(np.arange(20)[:, None] <= 7, (20, 5)))


def test_a_row_empty_by_its_scores(draw, order):
    """Where every visible score is -inf the row is empty: its dQ is 0, although 0 x inf is NaN."""
    Q, K, V, dO = draw(20, 30)
    Q[...], K[...] = 1, 1
    K[0, 0, :10] = -np.inf
    dQ, _, dV = gradients(Q, K, V, dO, order, causal=True, align="top_left")
    assert (dQ[0, 0, :10] == 0).all()
    assert (dV[0, 0, :10] == 0).all()


def test_inputs_untouched(draw, order):
    """Read-only arrays are enough."""
    arrays = draw(9, 9)
    for x in arrays:
        x.flags.writeable = False
    gradients(*arrays, order)


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"order": "v3"}, ValueError, "order must be"),
        ({"O": np.ones((1, 1, 9, 4))}, ValueError, "O must have dv = 5"),
        ({"lse": np.ones((1, 1, 8))}, ValueError, "lse must have Nq = 9"),
        ({"dO": np.ones((1, 2, 9, 5))}, ValueError, "dO must have Hq = 1"),
        ({"dO": np.ones((1, 1, 9, 5), int)}, TypeError, "dO must be of a floating-point type"),
        ({"scale": np.inf}, ValueError, "scale must be finite"),
    ],
)
def test_refuses(draw, change, kind, says):
    """Each wrong argument is named."""
    Q, K, V, dO = draw(9, 9)
    with pytest.raises(kind, match=says):
        attention_backward(**{"Q": Q, "K": K, "V": V, "O": dO, "lse": dO[..., 0], "dO": dO} | change)
