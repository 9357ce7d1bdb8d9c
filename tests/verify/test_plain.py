"""The plain formula at the same precision: right, in the order it says, and gradients too."""

import numpy as np
import pytest

from refimpl import oracle
from verify import plain
from verify.cases import DEFAULT, Problem


@pytest.mark.parametrize("dtype, limit", (("fp32", 2e-6), ("fp16", 3e-3), ("bf16", 3e-2)))
@pytest.mark.parametrize("name", ("square", "gqa", "causal_113x203", "empty_rows", "causal_top_left", "dv_not_d"))
def test_plain_formula_is_near_truth(name, dtype, limit):
    problem = DEFAULT[name].build(dtype)
    O, lse = plain.attention(problem)
    O_true, lse_true = oracle.attention(problem.Q, problem.K, problem.V, **problem.options)
    assert O.dtype == problem.Q.dtype and lse.dtype == np.float32
    np.testing.assert_allclose(O.astype(float), O_true, rtol=0, atol=limit, equal_nan=False, strict=True)
    np.testing.assert_allclose(lse.astype(float), lse_true, rtol=0, atol=2e-6, equal_nan=False, strict=True)


@pytest.mark.parametrize("dtype, limit", (("fp32", 3e-6), ("fp16", 2e-2), ("bf16", 0.15)))
@pytest.mark.parametrize("name", ("square", "gqa", "empty_rows"))
def test_plain_gradients_are_near_truth(name, dtype, limit):
    problem = DEFAULT[name].build(dtype)
    dO = problem.dO()
    got = plain.attention_backward(problem, *plain.attention(problem), dO)
    want = oracle.attention_backward(problem.Q, problem.K, problem.V, dO, **problem.options)
    for g, w in zip(got[:3], want[:3], strict=True):
        np.testing.assert_allclose(g.astype(float), w, rtol=0, atol=limit, equal_nan=False, strict=True)


def test_weights_are_rounded_to_the_storage_type():
    """Equal weights of 1/3 become 0.33325 in fp16: the mean 1024.67 then rounds down, not up."""
    third = np.float32(np.float16(1 / 3))
    assert 3 * third < 1
    Q, K = np.zeros((1, 1, 1, 8), np.float16), np.zeros((1, 1, 3, 8), np.float16)
    V = np.array([1024, 1025, 1025], np.float16).reshape(1, 1, 3, 1)
    O, _ = plain.attention(Problem(Q, K, V, {}, dtype="fp16"))
    assert O.item() == 1024


def test_sums_run_in_order():
    """1 + 2^-24 + 2^-24 is 1 from the left and more from the right."""
    Q = np.array([[[[1, 2**-24, 2**-24]]]], np.float32)
    K = np.ones((1, 1, 1, 3), np.float32)
    made = Problem(Q, K, np.ones((1, 1, 1, 1), np.float32), {"scale": 1.0})
    assert plain.attention(made)[1][0, 0, 0] == 1.0


def test_hidden_nan_stays_hidden():
    problem = DEFAULT["nan_hidden"].build("bf16")
    O, lse = plain.attention(problem)
    assert np.isfinite(O.astype(float)).all() and np.isfinite(lse).all()


@pytest.mark.parametrize("order", plain.ORDERS)
@pytest.mark.parametrize("name", ("square", "back_gqa", "back_softcap_alibi", "back_dropout"))
def test_every_order_of_the_scale_is_the_same_formula(name, order):
    """Forward and backward, options included, and never the same bits as the first."""
    problem = DEFAULT[name].build("fp32")
    dO, arrays = problem.dO(), (problem.Q, problem.K, problem.V)
    O, lse = plain.attention(problem, order)
    got = O, lse, *plain.attention_backward(problem, O, lse, dO, order)[:3]
    want = *oracle.attention(*arrays, **problem.options), *oracle.attention_backward(*arrays, dO, **problem.options)[:3]
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g.astype(float), w, rtol=0, atol=3e-6, equal_nan=False, strict=True)
    assert (order == plain.ORDERS[0]) == np.array_equal(O, plain.attention(problem)[0])


def test_a_scale_of_a_power_of_two_rounds_only_what_is_not_scaled_in_base_2():
    """d = 64: q and k are on a grid, so scale (q.k) and (scale q).k are both exact, and a third order is needed."""
    problem = DEFAULT["growing_max"].build("fp32", small=False)
    (scores, _), (queries, _), (base_2, _) = (plain.attention(problem, order) for order in plain.ORDERS)
    assert np.array_equal(scores, queries) and not np.array_equal(scores, base_2)
