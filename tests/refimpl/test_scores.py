"""Score rules: values written out by hand, and derivatives against central differences."""

import math

import numpy as np
import pytest

from refimpl import scores
from refimpl.frame import Frame, scored, slope
from refimpl.rule import stages, then
from refimpl.standard import standard

RNG = np.random.default_rng(4)


def changed(rule, S, h=0, **frame):
    """Scores S (Nq, Nk) of batch 0 and head h, after a rule."""
    S = np.array(S, float)
    rule = rule.at(Frame(1, 2, *S.shape, **frame))
    return scored(rule, S, 0, h, slice(0, len(S)), slice(0, S.shape[1]))


def test_alibi():
    """flash-attn's: minus slope times |i + Nk - Nq - j|, each query head its own slope, both sides of the diagonal."""
    got = changed(scores.alibi([0.5, 0.25]), np.zeros((2, 4)))
    assert np.array_equal(got, [[-1, -0.5, 0, -0.5], [-1.5, -1, -0.5, 0]])
    got = changed(scores.alibi([[0.5, 0.25]]), np.ones((2, 2)), h=1)
    assert np.array_equal(got, [[1, 0.75], [0.75, 1]])
    got = changed(scores.alibi([0.5, 0.25]), np.zeros((2, 3)), align="top_left")
    assert np.array_equal(got, [[0, -0.5, -1], [-0.5, 0, -0.5]])
    got = changed(scores.alibi([2.0, 0.0]), np.zeros((3, 1)))
    assert np.array_equal(got, [[-4], [-2], [0]])


def test_softcap():
    """c tanh(s / c): odd, near s for small s, within the cap for large s, half the cap at atanh(1/2)."""
    got = changed(scores.softcap(2.0), [[0.0, 2 * math.atanh(0.5), -2 * math.atanh(0.5), 1e9, -1e9, 1e-6]])
    assert np.abs(got - [[0, 1, -1, 2, -2, 1e-6]]).max() <= 1e-15


def test_relative():
    """The middle entry is the query's own position, the first ones lie before it; beyond the radius the ends repeat."""
    table = [[10, 20, 30, 40, 50], [1, 2, 3, 4, 5]]
    assert np.array_equal(changed(scores.relative(table), np.zeros((2, 6)))[1], [10, 10, 10, 10, 20, 30])
    got = changed(scores.relative(table), np.zeros((3, 6)), h=1, align="top_left")
    assert np.array_equal(got, [[3, 4, 5, 5, 5, 5], [2, 3, 4, 5, 5, 5], [1, 2, 3, 4, 5, 5]])
    assert np.array_equal(changed(scores.relative([7, 8, 9]), np.zeros((2, 2)), h=1), [[8, 9], [7, 8]])


def test_bias():
    """By row, whatever the alignment; broadcast like NumPy; -inf stays -inf."""
    bias = np.array([[1, 2, -np.inf], [4, 5, 6]])
    for align in ("bottom_right", "top_left"):
        assert np.array_equal(changed(scores.bias(bias), np.ones((2, 3)), align=align), bias + 1)
    assert np.array_equal(changed(scores.bias([1, 2, 3]), np.zeros((2, 3))), [[1, 2, 3], [1, 2, 3]])
    assert np.array_equal(changed(scores.bias(bias[:, None, :1]), np.zeros((2, 1)), h=1), [[4], [4]])


def test_order():
    """Rules of a chain apply from the first to the last: softcap, then bias, is not bias, then softcap."""
    cap, bias = scores.softcap(1.0), scores.bias(3.0)
    assert changed(then(cap, bias), [[0.0]])[0, 0] == 3
    assert changed(then(bias, cap), [[0.0]])[0, 0] == math.tanh(3)
    chain = then(cap, bias, scores.alibi([1, 1]))
    assert changed(chain, [[0.0, 0.0]])[0].tolist() == [2, 3]
    assert stages(chain)[:2] == [cap, bias]
    assert stages(cap) == [cap]
    assert then(cap, bias).fn is then(scores.softcap(2.0), scores.bias(0.0)).fn


RULES = {
    "softcap": scores.softcap(1.5),
    "alibi": scores.alibi([0.5, 2.0]),
    "relative": scores.relative(RNG.standard_normal((2, 5))),
    "bias": scores.bias(RNG.standard_normal((7, 9))),
    "chain": then(scores.softcap(4.0), scores.bias(RNG.standard_normal((7, 9))), scores.softcap(1.5)),
    "standard": standard(softcap=1.5, alibi_slopes=[0.5, 2.0], bias=RNG.standard_normal(9))[1],
    "standard without softcap": standard(alibi_slopes=[0.5, 2.0])[1],
    "standard nothing": standard()[1],
}


@pytest.mark.parametrize("name", RULES)
def test_derivatives(name):
    """`grad` equals central differences at scores of every size, for both heads."""
    rule, tile = RULES[name].at(Frame(1, 2, 7, 9)), (slice(2, 7), slice(1, 9))
    S = RNG.normal(0, 3, (5, 8))
    for h in range(2):
        up, down = (scored(rule, S + step, 0, h, *tile) for step in (1e-5, -1e-5))
        assert np.abs(slope(rule, S, 0, h, *tile) - (up - down) / 2e-5).max() <= 1e-9


def test_dtype():
    """The arithmetic type of the scores stays, whatever the rule's arrays are of."""
    for rule in RULES.values():
        rule = rule.at(Frame(1, 2, 7, 9))
        for change in (scored, slope):
            assert change(rule, np.ones((7, 9), np.float32), 0, 1, slice(0, 7), slice(0, 9)).dtype == np.float32


def test_standard_is_its_parts():
    """Softcap, ALiBi, bias, in this order; the functions and the types of aux do not depend on what was given."""
    bias, S = RNG.standard_normal((7, 9)), RNG.standard_normal((7, 9)) * 3
    parts = then(scores.softcap(1.5), scores.alibi([0.5, 2.0]), scores.bias(bias))
    whole = standard(softcap=1.5, alibi_slopes=[0.5, 2.0], bias=bias)
    assert np.array_equal(changed(whole[1], S, h=1), changed(parts, S, h=1))
    frame, everything = Frame(1, 2, 7, 9), standard(mask=bias > 0, softcap=1.5, alibi_slopes=[0, 1], bias=bias)
    for full, none in zip(everything, standard(), strict=True):
        assert (full.fn, full.grad, full.tiles) == (none.fn, none.grad, none.tiles)
        for x, y in zip(full.at(frame).aux, none.at(frame).aux, strict=True):
            assert type(x) is type(y)
            assert np.ndim(x) == np.ndim(y)
            assert np.asarray(x).dtype == np.asarray(y).dtype


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda: scores.softcap(0), ValueError, "softcap must be positive"),
        (lambda: scores.softcap(np.nan), ValueError, "softcap must be positive"),
        (lambda: scores.softcap(np.inf), ValueError, "softcap must be positive"),
        (lambda: scores.softcap("a"), TypeError, "softcap must be a number"),
        (lambda: scores.alibi(["a"]), TypeError, "alibi_slopes must be real"),
        (lambda: scores.alibi([True]), TypeError, "alibi_slopes must be real"),
        (lambda: scores.bias([1j]), TypeError, "bias must be real"),
        (lambda: scores.relative([1, 2]), ValueError, "table must be"),
        (lambda: scores.relative(np.ones((1, 1, 3))), ValueError, "table must be"),
    ],
)
def test_refuses(call, kind, says):
    """Each misuse is named when the rule is made."""
    with pytest.raises(kind, match=says):
        call()
