"""What the oracle refuses, in one line that names the argument, and the empty problems that it accepts."""

import re

import numpy as np
import pytest

from refimpl import oracle

GOOD = {"Q": (1, 4, 3, 2), "K": (1, 2, 5, 2), "V": (1, 2, 5, 6)}


def problem(**change):
    """Q, K, V of the shapes of GOOD, with some changed."""
    return {name: np.zeros(shape) for name, shape in (GOOD | change).items()}


BAD_SHAPES = [
    ({"Q": (4, 3, 2)}, "Q: expected shape (B, H, N, d), H and d positive, got (4, 3, 2)"),
    ({"Q": (1, 0, 3, 2)}, "Q: expected shape (B, H, N, d), H and d positive, got (1, 0, 3, 2)"),
    ({"K": (1, 0, 5, 2), "V": (1, 0, 5, 6)}, "K: expected shape (B, H, N, d), H and d positive"),
    ({"Q": (1, 4, 3, 0), "K": (1, 2, 5, 0)}, "Q: expected shape (B, H, N, d), H and d positive"),
    ({"V": (1, 2, 5, 0)}, "V: expected shape (B, H, N, d), H and d positive"),
    ({"K": (1, 2, 5, 3)}, "K: expected shape (1, 2, 5, 2), got (1, 2, 5, 3)"),
    ({"K": (2, 2, 5, 2), "V": (2, 2, 5, 6)}, "K: expected shape (1, 2, 5, 2), got (2, 2, 5, 2)"),
    ({"V": (2, 2, 5, 6)}, "V: expected shape (1, 2, 5, 6), got (2, 2, 5, 6)"),
    ({"V": (1, 4, 5, 6)}, "V: expected shape (1, 2, 5, 6), got (1, 4, 5, 6)"),
    ({"V": (1, 2, 6, 6)}, "V: expected shape (1, 2, 5, 6), got (1, 2, 6, 6)"),
    ({"Q": (1, 3, 3, 2)}, "Q: expected a multiple of K's 2 heads, got 3"),
]
BAD_OPTIONS = [
    ({"Q": np.zeros((1, 4, 3, 2), complex)}, TypeError, "Q: expected real numbers, got dtype complex128"),
    ({"K": np.zeros((1, 2, 5, 2), bool)}, TypeError, "K: expected real numbers, got dtype bool"),
    ({"V": np.full((1, 2, 5, 6), "1")}, TypeError, "V: expected real numbers, got dtype <U1"),
    ({"scale": np.nan}, ValueError, "scale: expected a finite number of any sign, got nan"),
    ({"scale": np.inf}, ValueError, "scale: expected a finite number of any sign, got inf"),
    ({"scale": "big"}, TypeError, "scale: expected a number, got 'big'"),
    ({"softcap": 0.0}, ValueError, "softcap: expected a finite number above 0, got 0.0"),
    ({"softcap": np.nan}, ValueError, "softcap: expected a finite number above 0, got nan"),
    ({"align": "right"}, ValueError, "align: expected 'bottom_right' or 'top_left', got 'right'"),
    ({"mask": np.ones((3, 5))}, TypeError, "mask: expected booleans"),
    ({"mask": np.ones((3, 4), bool)}, ValueError, "mask: expected a shape that broadcasts to (1, 4, 3, 5)"),
    ({"mask": np.ones((2, 1, 4, 3, 5), bool)}, ValueError, "mask: expected a shape that broadcasts"),
    ({"bias": np.zeros((2, 1, 3, 5))}, ValueError, "bias: expected a shape that broadcasts to (1, 4, 3, 5)"),
    ({"bias": np.ones((3, 5), bool)}, TypeError, "bias: expected real numbers, got dtype bool"),
    ({"keep": np.ones((3, 5)), "dropout_p": 0.5}, TypeError, "keep: expected booleans"),
    ({"keep": np.ones(4, bool), "dropout_p": 0.5}, ValueError, "keep: expected a shape that broadcasts"),
    ({"dropout_p": 0.5}, ValueError, "keep: expected an array of booleans, since dropout_p is 0.5"),
    ({"dropout_p": 1.5}, ValueError, "dropout_p: expected a finite number from 0 to 1, got 1.5"),
    ({"dropout_p": -0.1}, ValueError, "dropout_p: expected a finite number from 0 to 1, got -0.1"),
    ({"window": (-1, 2)}, ValueError, "window: expected integers from 0 to inf, got -1 to 2"),
    ({"window": (None, 0.5)}, TypeError, "window: expected integers, got float64"),
    ({"window": 3}, TypeError, "window: expected (left, right) or None, got 3"),
    ({"window": (1, 2, 3)}, TypeError, "window: expected (left, right) or None, got (1, 2, 3)"),
    ({"alibi_slopes": np.ones(3)}, ValueError, "alibi_slopes: expected shape (4,), got (3,)"),
    ({"alibi_slopes": np.ones((2, 4))}, ValueError, "alibi_slopes: expected shape (1, 4), got (2, 4)"),
    ({"alibi_slopes": 0.5}, ValueError, "alibi_slopes: expected shape (4,), got ()"),
    ({"lengths_k": [6]}, ValueError, "lengths_k: expected integers from 0 to 5, got 6 to 6"),
    ({"lengths_q": [-1]}, ValueError, "lengths_q: expected integers from 0 to 3, got -1 to -1"),
    ({"lengths_q": [1.0]}, TypeError, "lengths_q: expected integers, got float64"),
    ({"lengths_q": [1, 2]}, ValueError, "lengths_q: expected shape (1,), got (2,)"),
    ({"rows": [3]}, ValueError, "rows: expected integers from 0 to 2, got 3 to 3"),
    ({"rows": [-1]}, ValueError, "rows: expected integers from 0 to 2, got -1 to -1"),
    ({"rows": [0.5]}, TypeError, "rows: expected integers, got float64"),
    ({"rows": [[0]]}, ValueError, "rows: expected shape (R,), got (1, 1)"),
    ({"threads": 0}, ValueError, "threads: expected a finite number of at least 1, got 0"),
]


@pytest.mark.parametrize(
    "arguments, error, says",
    [(problem(**shapes), ValueError, says) for shapes, says in BAD_SHAPES] + BAD_OPTIONS,
    ids=[says for *_, says in BAD_SHAPES + BAD_OPTIONS],
)
def test_bad_input_is_named(arguments, error, says):
    arguments = problem() | arguments
    dO = {"dO": np.zeros((*arguments["Q"].shape[:3], arguments["V"].shape[-1]))}
    for call, more in ((oracle.attention, {}), (oracle.attention_backward, dO)):
        with pytest.raises(error, match="^" + re.escape(says)) as caught:
            call(**arguments, **more)
        assert "\n" not in str(caught.value)


def test_bad_gradients_are_named():
    good = problem()
    with pytest.raises(ValueError, match=re.escape("dO: expected shape (1, 4, 3, 6), got (1, 4, 3, 2)")):
        oracle.attention_backward(**good, dO=np.zeros((1, 4, 3, 2)))
    with pytest.raises(ValueError, match=re.escape("dlse: expected shape (1, 4, 3), got (1, 4)")):
        oracle.attention_backward(**good, dO=np.zeros((1, 4, 3, 6)), dlse=np.zeros((1, 4)))
    with pytest.raises(TypeError, match="colour"):
        oracle.attention_backward(**good, dO=np.zeros((1, 4, 3, 6)), colour="red")


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1, 1), "alibi_slopes": np.ones(4)}])
@pytest.mark.parametrize("B, Nq, Nk", [(0, 3, 5), (1, 0, 5), (1, 3, 0), (0, 0, 0)])
def test_empty_problems_have_an_answer(B, Nq, Nk, options):
    Q, K, V = problem(Q=(B, 4, Nq, 2), K=(B, 2, Nk, 2), V=(B, 2, Nk, 6)).values()
    O, lse = oracle.attention(Q, K, V, **options)
    assert O.shape == (*Q.shape[:3], 6) and lse.shape == Q.shape[:3]
    assert not O.any() and (lse == -np.inf).all()
    dQ, dK, dV, dbias = oracle.attention_backward(Q, K, V, O, dlse=np.ones(lse.shape), **options)
    assert dbias is None
    for gradient, x in ((dQ, Q), (dK, K), (dV, V)):
        assert gradient.shape == x.shape and not gradient.any()


def test_no_rows_and_no_bias():
    Q, K, V = problem().values()
    O, lse = oracle.attention(Q, K, V, rows=[])
    assert O.shape == (1, 4, 0, 6) and lse.shape == (1, 4, 0)
    Q, K, V = problem(K=(1, 2, 0, 2), V=(1, 2, 0, 6)).values()
    *_, dbias = oracle.attention_backward(Q, K, V, np.zeros((1, 4, 3, 6)), bias=np.zeros((3, 0)))
    assert dbias.shape == (3, 0)
