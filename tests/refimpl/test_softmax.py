"""The row softmaxes are one function, and merging partial results is a commutative monoid."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.softmax import (
    State,
    finish,
    from_output,
    identity,
    merge,
    online,
    pivot,
    safe,
    three_pass,
    weigh,
)

INF = np.inf


def state_of(S, V):
    """The state after the keys with scores S (n, k) and values V (k, dv), from the definition."""
    m = S.max(axis=1, keepdims=True, initial=-INF)
    P = np.where(S == -INF, 0, np.exp(S - np.where(m == -INF, 0, m)))
    return State(m, P.sum(axis=1, keepdims=True), P @ V)


def same(a, b, tol=1e-12):
    """Whether two states stand for the same O and lse."""
    for x, y in zip(finish(a), finish(b), strict=True):
        finite = np.isfinite(y)
        assert np.array_equal(x[~finite], y[~finite])
        error = np.abs(x[finite] - y[finite])
        assert error.size == 0 or (error <= tol * np.maximum(1, np.abs(y[finite]))).all()
    return True


score = st.one_of(st.floats(-40, 40), st.sampled_from([-INF, -1e300, -1e4, 0.0, 1e4, 1e300]))


@st.composite
def parts(draw, count):
    """Some states of three rows, any of them without keys, empty for a row, or huge."""
    states = []
    for _ in range(count):
        k = draw(st.integers(0, 3))
        S = np.array(draw(st.lists(score, min_size=3 * k, max_size=3 * k)), float).reshape(3, k)
        V = np.array(draw(st.lists(st.floats(-8, 8), min_size=2 * k, max_size=2 * k)), float).reshape(k, 2)
        states.append(state_of(S, V))
    return states


@given(parts(3))
@settings(max_examples=150, deadline=None)
def test_merge_is_associative(abc):
    """(a b) c = a (b c): tiles may be joined in any grouping."""
    a, b, c = abc
    assert same(merge(merge(a, b), c), merge(a, merge(b, c)))


@given(parts(2))
@settings(max_examples=100, deadline=None)
def test_merge_is_commutative(ab):
    """a b = b a, to the bit: tiles may come in any order."""
    a, b = ab
    for x, y in zip(merge(a, b), merge(b, a), strict=True):
        assert np.array_equal(x, y)


@given(parts(1))
@settings(max_examples=60, deadline=None)
def test_identity_changes_nothing(one):
    """e a = a e = a, to the bit, and e e = e."""
    (a,) = one
    e = identity(a.O.shape)
    for joined in (merge(e, a), merge(a, e)):
        assert all(np.array_equal(x, y) for x, y in zip(joined, a, strict=True))
    assert all(np.array_equal(x, y) for x, y in zip(merge(e, e), e, strict=True))


@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_merge_of_split_is_whole(k, cut, seed):
    """Splitting the keys anywhere and joining the parts gives the softmax over all of them."""
    rng = np.random.default_rng(seed)
    S, V = rng.normal(0, 20, (4, k)), rng.standard_normal((k, 3))
    S[0] = -INF
    assert same(merge(state_of(S[:, :cut], V[:cut]), state_of(S[:, cut:], V[cut:])), state_of(S, V))


def merged(O_1, lse_1, O_2, lse_2, dtype):
    """Merge two finished parts and finish again; lse is (n,)."""
    O_1, lse_1, O_2, lse_2 = (np.array(x, dtype) for x in (O_1, lse_1, O_2, lse_2))
    O, lse = finish(merge(from_output(O_1, lse_1[:, None]), from_output(O_2, lse_2[:, None])))
    assert O.dtype == lse.dtype == dtype
    return O, lse[:, 0]


@pytest.mark.parametrize(("dtype", "tol"), [(np.float64, 1e-12), (np.float32, 1e-5)])
def test_merge_of_empty_parts(dtype, tol):
    """Both halves of a chunked prefix empty, either one, none; a merge that divides 0 by 0 gives NaN here."""
    lse_1, lse_2 = [-INF, -INF, 2, 0], [-INF, 1.5, -INF, 0]
    O_1 = [[0, 0, 0, 0], [np.nan, INF, 0, 9], [1, 2, 3, 4], [4, 4, 4, 4]]  # an empty part may hold anything
    O_2 = [[np.nan, 0, 7, 0], [5, 6, 7, 8], [0, 0, np.nan, 0], [8, 8, 8, 8]]
    O, lse = merged(O_1, lse_1, O_2, lse_2, dtype)
    assert np.array_equal(O[:3], [[0, 0, 0, 0], [5, 6, 7, 8], [1, 2, 3, 4]])
    assert np.array_equal(lse[:3], np.array([-INF, 1.5, 2], dtype))
    assert np.abs(O[3] - 6).max() <= tol
    assert abs(lse[3] - np.log(2)) <= tol


def test_finish_undoes_from_output():
    """To the bit; an empty part comes back as 0 and -inf, whatever its output held."""
    O, lse = np.array([[1.5, -2], [np.nan, 7]]), np.array([[300.25], [-INF]])
    O_again, lse_again = finish(from_output(O, lse))
    assert np.array_equal(O_again, [[1.5, -2], [0, 0]])
    assert np.array_equal(lse_again, lse)


@pytest.mark.parametrize(("dtype", "tol"), [(np.float64, 1e-12), (np.float32, 1e-5)])
def test_merge_of_distant_parts(dtype, tol):
    """Ring merge: differences of +200, -200, 0, 89 (past exp's fp32 range), and an empty running state."""
    lse_1, lse_2 = [-100, 100, 0, -88, -INF], [100, -100, 0, 1, -5]
    O_1 = [[1, 2], [1, 2], [1, 2], [1, 2], [0, 0]]
    O, lse = merged(O_1, lse_1, [[3, 4]] * 5, lse_2, dtype)
    assert np.abs(O - [[3, 4], [1, 2], [2, 3], [3, 4], [3, 4]]).max() <= tol * 4
    assert np.abs(lse - [100, 100, np.log(2), 1, -5]).max() <= tol * 100


def scores(seed=3):
    """Rows with spread, huge, equal, partly hidden and wholly hidden scores."""
    S = np.random.default_rng(seed).normal(0, 3, (6, 11))
    S[1] *= 1e4
    S[2] = 7.5
    S[3, ::2] = -INF
    S[4] = -INF
    S[5, :8] = -INF
    return S


@pytest.mark.parametrize("Bc", [1, 2, 4, 11, 64])
@pytest.mark.parametrize("tiled", [three_pass, online])
def test_row_softmaxes_agree(tiled, Bc):
    """Three sweeps or two, whatever the tile, the softmax is the one of `safe`."""
    S = scores()
    for x, y in zip(tiled(S, Bc), safe(S), strict=True):
        assert np.array_equal(np.isinf(x), np.isinf(y))
        finite = np.isfinite(y)
        assert np.abs(x[finite] - y[finite]).max() <= 1e-13 * np.abs(y[finite]).max()


def test_safe_is_the_definition():
    """exp(s) / sum exp(s) on scores small enough to write it like that; rows sum to 1 or to 0."""
    S = scores()
    P, lse = safe(S)
    assert np.abs(P.sum(axis=1) - [1, 1, 1, 1, 0, 1]).max() <= 1e-14
    rows = [0, 2, 3, 5]
    total = np.exp(S[rows]).sum(axis=1, keepdims=True)
    assert np.abs(P[rows] - np.exp(S[rows]) / total).max() <= 1e-14
    assert np.abs(lse[rows] - np.log(total)).max() <= 1e-13
    assert lse[4] == -INF


@pytest.mark.parametrize("softmax", [safe, lambda S: three_pass(S, 4), lambda S: online(S, 4)])
def test_softmax_of_no_keys(softmax):
    """Rows of length 0: nothing, with lse -inf."""
    P, lse = softmax(np.empty((3, 0)))
    assert P.shape == (3, 0)
    assert np.array_equal(lse, np.full((3, 1), -INF))


def test_pivot_replaces_only_minus_infinity():
    """NaN and +inf stay: they must reach the row."""
    m = np.array([-INF, INF, np.nan, -3.0])
    assert np.array_equal(pivot(m), [0, INF, np.nan, -3], equal_nan=True)


def test_weigh_lets_a_value_reach_only_those_who_see_it():
    """0 x NaN is NaN, so a weight of 0 is not enough to hide a key, and must not hide a visible one."""
    P = np.array([[0.5, 0.5, 0], [0, 0, 1], [0, 1, 0]])
    V = np.array([[1, 2], [np.nan, INF], [3, 4.0]])
    seen = np.array([[1, 1, 0], [1, 0, 1], [1, 1, 1]], bool)
    with np.errstate(invalid="ignore"):
        out = weigh(P, V, seen)
    assert np.array_equal(out, [[np.nan, INF], [3, 4], [np.nan, INF]], equal_nan=True)
    underflowed = weigh(np.zeros((1, 1)), np.array([[np.nan]]), True)
    assert np.isnan(underflowed).all()
