"""The floors of gradients: by hand, as large as what they stand for, and small beside the gradients themselves."""

import numpy as np
import pytest

from refimpl import oracle
from verify import gradient_tolerance, judge
from verify.cases import DEFAULT, Problem
from verify.dtypes import DTYPES

BACKWARD = [case.id for case in DEFAULT.values() if case.backward]


def even():
    """Two keys of equal weight: P = 1/2, O = 1, dP = 2.5 and -1.5, D = 1/2, dS = 1 and -1."""
    Q, K = np.zeros((1, 1, 1, 2)), np.array([[[[1.0, 7.0], [-2.0, 9.0]]]])
    V = np.array([[[[5.0], [-3.0]]]])
    return Problem(*(x.astype(np.float16) for x in (Q, K, V)), {"scale": -3.0}, dtype="fp16")


def test_sizes_by_hand():
    problem, dO = even(), np.full((1, 1, 1, 1), 0.5)
    O, lse = oracle.attention(problem.Q, problem.K, problem.V, **problem.options)
    found, half_ulp = gradient_tolerance.sizes(problem, O, lse, dO), 2.0**-11
    # The second column of K has the larger elements, 7 and 9; |scale| is 3.
    assert found.dQ["storage"] == pytest.approx(3 * (1 * 7 + 1 * 9))
    assert found.dQ["sums"] == pytest.approx(3 * (0.5 * (2.5 + 0.5) * 7 + 0.5 * (1.5 + 0.5) * 9))
    assert found.dQ["D"] == pytest.approx(3 * 0.5 * half_ulp * 0.5 * (7 + 9))
    assert found.dK == dict.fromkeys(gradient_tolerance.PARTS, 0.0)  # Q is 0
    assert found.dV == {"storage": 0.25, "sums": 0.25, "D": 0.0}
    floors = gradient_tolerance.floors(problem, O, lse, dO, ("dQ", "dV"))
    assert floors["dV"] == pytest.approx(2 * 2**-10 * 0.25 + 2 * 2**-23 * 0.25)
    assert floors.keys() == {"dQ", "dV"}


@pytest.mark.parametrize("name", BACKWARD)
def test_the_part_of_D_is_what_rounding_O_can_do(name):
    """Exact gradients but for D, which is off by half an ulp of every |O dO|: the error stays below, and is near it."""
    problem = DEFAULT[name].build("bf16")
    dO, options = problem.dO(), problem.options
    O, lse = oracle.attention(problem.Q, problem.K, problem.V, **options)
    found = gradient_tolerance.sizes(problem, O, lse, dO)
    off = DTYPES["bf16"].ulp / 2 * np.nan_to_num(np.abs(dO.astype(float) * O)).sum(axis=-1)
    # A gradient that reaches lse enters where D does, with the other sign.
    change = oracle.attention_backward(problem.Q, problem.K, problem.V, 0 * np.nan_to_num(dO.astype(float)),
                                       **options, dlse=off)  # fmt: skip
    for output, got in zip(("dQ", "dK", "dbias"), (*change[:2], change[3]), strict=True):
        if got is not None:
            bound = getattr(found, output)["D"]
            assert np.abs(got).max() <= bound * (1 + 1e-9), output
            assert bound <= 8 * np.abs(got).max(), output


@pytest.mark.parametrize("dtype, share", (("fp32", 1e-5), ("fp16", 0.02), ("bf16", 0.12)))
@pytest.mark.parametrize("name", BACKWARD)
def test_a_floor_is_small_beside_the_gradient(name, dtype, share):
    problem = DEFAULT[name].build(dtype)
    known = judge.reference(problem, problem.dO())
    for output, anchor in known.anchors.items():
        if output.startswith("d"):
            assert 0 < anchor.floor <= share * np.abs(anchor.truth).max(), output
