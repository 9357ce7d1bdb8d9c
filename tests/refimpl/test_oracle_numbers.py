"""What the oracle's numbers rest on: exponential, exact cases, no influence of chunks, threads and layout."""

import decimal
import math

import ml_dtypes
import numpy as np
import pytest

from refimpl import oracle


def draw(Nq, Nk, B=2, Hq=4, Hk=2, d=5, dv=3, seed=0):
    """Q, K, V, dO."""
    rng = np.random.default_rng(seed)
    shapes = (B, Hq, Nq, d), (B, Hk, Nk, d), (B, Hk, Nk, dv), (B, Hq, Nq, dv)
    return [rng.standard_normal(shape) for shape in shapes]


def both(Q, K, V, dO, **options):
    """O, lse, dQ, dK, dV, dbias."""
    return *oracle.attention(Q, K, V, **options), *oracle.attention_backward(Q, K, V, dO, **options)


def test_exponential_is_within_three_ulp():
    """At random, at both ends, and halfway between the table's entries, where the series is furthest off."""
    steps, rng = oracle._STEPS, np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-64, 64, 2000), (np.arange(-500, 500) + 0.5) / steps, [-64.0, 64.0, 0.0]])
    s = x * steps
    with decimal.localcontext(prec=40):
        ln2 = decimal.Decimal(2).ln()
        want = [(decimal.Decimal(y) * ln2 / 256).exp() for y in s.tolist()]
        oracle._exp_small(s, np.empty_like(s), np.empty_like(s))
        got = [decimal.Decimal(y) for y in s.tolist()]
        ulps = [abs(g - w) / decimal.Decimal(math.ulp(g)) for g, w in zip(got, want, strict=True)]
    assert 0 < max(ulps) <= 3


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"lengths_k": [3, 0]}])
def test_three_ways_to_the_exponentials_agree(options, monkeypatch):
    """Small scores go through the table or, where it is fast, np.exp; with SMALL at -1, through their maximum."""
    arrays = draw(20, 30)
    found = []
    for vector, small in ((False, 64.0), (True, 64.0), (True, -1.0)):
        monkeypatch.setattr(oracle, "_VECTOR_EXP", vector)
        monkeypatch.setattr(oracle, "SMALL", small)
        found.append(both(*arrays, **options)[:5])
    for x, y in ((0, 1), (0, 2), (1, 2)):
        assert any((a != b).any() for a, b in zip(found[x], found[y], strict=True))
        for a, b in zip(found[x], found[y], strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-14)


def test_a_nan_reaches_all_the_weights_of_its_row_and_none_that_is_hidden_or_dropped():
    """Of three keys one is NaN; whichever of the others dropout leaves, its weight is NaN as well."""
    Q, K = np.ones((1, 1, 1, 1)), np.array([np.nan, 1.0, 2.0]).reshape(1, 1, 3, 1)
    V = np.ones((1, 1, 3, 1))
    for keep, lost in (([0, 1, 1], True), ([1, 0, 0], True), ([0, 0, 0], False)):
        O, lse = oracle.attention(Q, K, V, keep=np.array(keep, bool), dropout_p=0.5)
        assert np.isnan(lse).all() and np.isnan(O.item()) == lost and (lost or O.item() == 0)
    O, lse = oracle.attention(Q, K, V, mask=np.array([False, True, True]))
    assert O.item() == 1 and np.isfinite(lse).all()


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e9])
def test_large_scores(scale):
    """Integer scores that differ by 0 or by much more than fp64 resolves: the mean of V over the largest."""
    Q, K = np.ones((1, 1, 1, 1)), np.array([5.0, 3, 5, -7, 5]).reshape(1, 1, 5, 1) * 300
    V = np.array([3.0, 100, 5, 100, 7]).reshape(1, 1, 5, 1)
    O, lse = oracle.attention(Q, K, V, scale=scale)
    assert O.item() == 5.0
    assert lse.item() == 1500 * scale + math.log(3)


@pytest.mark.parametrize("s", [0.0, -63.9, 40.0, -2000.0, 900.0])
def test_one_key_gives_its_value_exactly(s):
    V = np.array([1 / 3, -1e300, 5e-324]).reshape(1, 1, 1, 3)
    O, lse = oracle.attention(np.full((1, 1, 1, 1), s), np.ones((1, 1, 1, 1)), V)
    assert (O == V).all()
    assert abs(lse.item() - s) <= np.spacing(abs(s))


def test_large_values_do_not_overflow():
    """Weights are normalised before they meet V, so the mean of huge values is one of them."""
    V = np.full((1, 1, 9, 1), 1e308)
    O, _ = oracle.attention(np.full((1, 1, 1, 1), 60.0), np.ones((1, 1, 9, 1)), V)
    assert abs(O.item() / 1e308 - 1) <= 1e-15


def test_a_score_of_minus_infinity_hides_its_key():
    """As a mask would: a row with no other score is empty, and V behind it reaches nothing, NaN or not."""
    Q, K, V = np.ones((1, 1, 1, 1)), np.full((1, 1, 3, 1), -np.inf), np.full((1, 1, 3, 1), np.nan)
    O, lse, dQ, dK, dV, _ = both(Q, K, V, Q, scale=1.0)
    assert lse.item() == -np.inf and not (O.any() or dQ.any() or dK.any() or dV.any())
    K[0, 0, 1], V[0, 0, 1] = 2.0, 7.0
    O, lse, dQ, dK, dV, _ = both(Q, K, V, Q, scale=1.0)
    assert O.item() == 7 and lse.item() == 2
    assert not dQ.any() and not dK.any() and (dV.ravel() == [0, 1, 0]).all()


def test_rows_that_see_no_key():
    """Causal with more queries than keys: rows 0 and 1 see nothing, whatever they and their dO hold."""
    Q, K, V, dO = draw(5, 3)
    clean = both(Q[:, :, 2:], K, V, dO[:, :, 2:], causal=True)
    Q[:, :, :2] = dO[:, :, :2] = np.nan
    O, lse, dQ, dK, dV, _ = both(Q, K, V, dO, causal=True)
    assert not O[:, :, :2].any() and not dQ[:, :, :2].any() and (lse[:, :, :2] == -np.inf).all()
    for x, y in zip((O[:, :, 2:], lse[:, :, 2:], dQ[:, :, 2:], dK, dV), clean[:5], strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-14)


CAUSAL = {"causal": True, "window": (9, None)}
MASKED = {"mask": np.random.default_rng(1).random((40, 33)) < 0.5, "bias": np.linspace(-1, 1, 33) ** 2}


@pytest.mark.parametrize("options", [{}, CAUSAL, MASKED], ids=["plain", "causal", "mask and bias"])
def test_chunks_slabs_and_threads_change_nothing(options, monkeypatch):
    """Seven rows and one batch entry at a time, on three threads."""
    arrays = draw(40, 33, B=3)
    whole = both(*arrays, threads=1, **options)
    monkeypatch.setattr(oracle, "CHUNK", 33 * 7)
    monkeypatch.setattr(oracle, "ROWS", 7)
    monkeypatch.setattr(oracle, "BLOCK", 50)
    one, three = both(*arrays, threads=1, **options), both(*arrays, threads=3, **options)
    for w, x, y in zip(whole, one, three, strict=True):
        assert w is x is y is None or np.allclose(w, x, rtol=0, atol=1e-14)
        assert x is y is None or (x == y).all()


@pytest.mark.parametrize("N, threads, chunks", [(200, 16, 1), (1100, 1, 3), (1100, 4, 4)])
def test_rows_are_shared_out_only_where_threads_pay(N, threads, chunks, monkeypatch):
    """A chunk is a call of the softmax; below a million scores one thread takes all."""
    calls, softmax = [], oracle._softmax
    monkeypatch.setattr(oracle, "_softmax", lambda *args: calls.append(1) or softmax(*args))
    oracle.attention(*(np.ones((1, 1, N, 4)) for _ in range(3)), threads=threads)
    assert len(calls) == chunks


def test_without_threadpoolctl(monkeypatch):
    arrays = draw(9, 9)
    with_it = both(*arrays)
    monkeypatch.setattr(oracle, "threadpool_limits", None)
    monkeypatch.setattr(oracle, "CHUNK", 16)
    for x, y in zip(with_it[:5], both(*arrays)[:5], strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-14)


@pytest.mark.parametrize("options", [{}, CAUSAL, MASKED], ids=["plain", "causal", "mask and bias"])
def test_chosen_rows_are_those_of_the_whole(options):
    Q, K, V, _ = draw(40, 33)
    rows = [39, 0, 3, 3]
    some, all_of_them = oracle.attention(Q, K, V, rows=rows, **options), oracle.attention(Q, K, V, **options)
    for x, y in zip(some, all_of_them, strict=True):
        np.testing.assert_allclose(x, y[:, :, rows], rtol=0, atol=1e-14)


def test_gradient_of_chosen_rows():
    """A row that is chosen twice counts twice."""
    Q, K, V, dO = draw(40, 33)
    rows = [39, 0, 3, 3]
    times = np.zeros((40, 1))
    np.add.at(times, rows, 1)
    chosen = oracle.attention_backward(Q, K, V, dO[:, :, rows], rows=rows, **MASKED)
    dO[:, :, 3] = dO[:, :, rows[2]]
    whole = oracle.attention_backward(Q, K, V, dO * times, **MASKED)
    np.testing.assert_allclose(2 * chosen[0][:, :, 2], whole[0][:, :, 3], rtol=0, atol=1e-13)
    for x, y in zip(chosen[1:], whole[1:], strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-13)


def test_many_batch_entries_at_once():
    """65537 of them, above a grid's limit; the last is computed right."""
    Q, K, V, dO = draw(2, 3, B=65_537, Hq=1, Hk=1)
    all_of_them = both(Q, K, V, dO)
    for b in (0, 1, 65_535, 65_536):
        for x, y in zip(all_of_them[:5], both(Q[b:][:1], K[b:][:1], V[b:][:1], dO[b:][:1])[:5], strict=True):
            np.testing.assert_allclose(x[b], y[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, ml_dtypes.float8_e4m3fn])
def test_any_real_dtype_means_its_values(dtype):
    arrays = [(4 * x).astype(dtype) for x in draw(6, 7)]
    want = both(*(x.astype(np.float64) for x in arrays), bias=arrays[1][0, 0, :, 0].astype(np.float64))
    got = both(*arrays, bias=arrays[1][0, 0, :, 0])
    for x, y in zip(got, want, strict=True):
        assert x.dtype == np.float64
        np.testing.assert_array_equal(x, y)


def test_any_strides():
    """(B, N, H, d) in memory, every other column, a head broadcast with stride 0, read-only."""
    Q, K, V, dO = draw(6, 7, Hk=4)
    V[...] = V[:, :1]
    strided = [np.ascontiguousarray(Q.swapaxes(1, 2)).swapaxes(1, 2), np.repeat(K, 2, axis=3)[..., ::2],
               np.broadcast_to(V[:, :1], V.shape), dO[:, :, ::-1].copy()[:, :, ::-1]]
    for x in strided:
        x.flags.writeable = False
    for x, y in zip(both(*strided)[:5], both(Q, K, V, dO)[:5], strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-14)


def test_inputs_are_not_modified():
    arrays, options = draw(40, 33), {name: x.copy() for name, x in MASKED.items()}
    before = [x.copy() for x in arrays]
    both(*arrays, softcap=2.0, keep=options["mask"], dropout_p=0.5, alibi_slopes=np.ones(4), **options)
    for x, y in zip([*arrays, *options.values()], [*before, *MASKED.values()], strict=True):
        np.testing.assert_array_equal(x, y)
