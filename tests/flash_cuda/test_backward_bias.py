"""Gradients of what is added to scores: the table of a relative rule, and what a rule after a bias may not do."""

import numpy as np
import pytest

from flash_cuda import backward, general
from flash_cuda.executors.emulator import Emulator
from refimpl import options, oracle
from refimpl.tiling import Tile

SMALL = {"tile": Tile(8, 8), "threads": (4, 4)}
RNG = np.random.default_rng(3)
Q, K, V, dO = (RNG.standard_normal((2, H, n, 3)).astype(np.float32) for H, n in ((2, 11), (1, 17), (1, 17), (2, 11)))


def gradients(given, **asked):
    O, lse = general.attention(Q, K, V, on=Emulator(), **SMALL, **given)
    return backward.attention_backward(Q, K, V, O, lse, dO, on=Emulator(), **SMALL, **given, **asked)


@pytest.mark.parametrize("R, align, deterministic", [
    (0, "bottom_right", True), (3, "top_left", True), (3, "bottom_right", False), (30, "bottom_right", True)
])  # fmt: skip
def test_the_table_of_a_relative_rule(R, align, deterministic):
    """The oracle's gradient of the same numbers written out as a bias, summed over all pairs that share one."""
    table = RNG.standard_normal((2, 2 * R + 1))
    given = {"causal": True, "align": align, "window": (9, 0)}
    i, j = np.ogrid[0:11, 0:17]
    i = i + (6 if align == "bottom_right" else 0)
    bins = np.clip(j - i, -R, R) + R
    *want, dense = oracle.attention_backward(Q, K, V, dO, bias=table[:, bins][None], **given)
    dense = np.broadcast_to(dense, (1, 2, 11, 17))[0]
    want += [None, np.stack([[head[bins == n].sum() for n in range(2 * R + 1)] for head in dense])]
    got = gradients(given | {"rules": options.relative(table)}, dtable=True, deterministic=deterministic)
    assert len(got) == 5 and got[3] is None and got[4].dtype == np.float32
    for x, true in zip(got, want, strict=True):
        if true is not None:
            np.testing.assert_allclose(x, true, rtol=0, atol=2e-5)


def square(s, b, h, i, j):
    return s * s


def twice(s, b, h, i, j):
    return s + s


SQUARE = options.Rule(square, kind="score", grad=twice)
RELATIVE = options.relative(np.zeros(3))


def test_a_rule_before_the_table_may_do_anything():
    table = RNG.standard_normal(3)
    *_, dtable = gradients({"rules": (SQUARE, options.relative(table))}, dtable=True)
    step, i = 1e-3, np.eye(3)

    def loss(table):
        O, _ = general.attention(Q, K, V, on=Emulator(), **SMALL, rules=(SQUARE, options.relative(table)))
        return (O.astype(np.float64) * dO).sum()

    slopes = [(loss(table + step * e) - loss(table - step * e)) / (2 * step) for e in i]
    np.testing.assert_allclose(dtable.sum(axis=0), slopes, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("given, asked, says", [
    ({"bias": np.zeros((11, 17)), "rules": SQUARE}, {}, "bias: expected no rule after it"),
    ({"bias": np.zeros((11, 17)), "rules": options.then(RELATIVE, SQUARE)}, {}, "bias: expected no rule after it"),
    ({"rules": (RELATIVE, SQUARE)}, {"dtable": True}, "dtable: expected no rule after it"),
    ({"rules": SQUARE}, {"dtable": True}, "dtable: expected False unless there is one relative rule, there are 0"),
    ({"rules": (RELATIVE, RELATIVE)}, {"dtable": True}, "dtable: .*, there are 2"),
])  # fmt: skip
def test_gradients_that_cannot_be_had(given, asked, says):
    lse = np.zeros((2, 2, 11), np.float32)
    on = Emulator()
    with pytest.raises(ValueError, match=says):
        backward.attention_backward(Q, K, V, dO, lse, dO, on=on, **SMALL, **given, **asked)
    assert on.launches == 0
