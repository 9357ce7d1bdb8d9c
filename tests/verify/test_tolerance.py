"""The limits: floors as their docstrings say, and an a-priori bound that nothing correct exceeds."""

from dataclasses import replace

import numpy as np
import pytest

from verify import plain, tolerance
from verify.cases import DEFAULT, DENSE, Problem
from verify.dtypes import DTYPES
from verify.testing import check


def tiny(dtype="fp16"):
    """Two keys whose sizes are easy to work out: scores 2 and -4, values up to 5."""
    make = DTYPES[dtype].numpy.type
    Q = np.array([[[[2, 0]]]]).astype(make)
    K = np.array([[[[1, 7], [-2, 9]]]]).astype(make)
    V = np.array([[[[5.0], [-3.0]]]]).astype(make)
    return Problem(Q, K, V, {"scale": 1.0}, dtype=dtype)


def test_magnitudes_by_hand():
    lse = np.array([[[-7.5]]])
    assert tolerance.magnitudes(tiny(), lse) == tolerance.Magnitudes(s=4.0, s_abs=4.0, v=5.0, lse=7.5)


def test_magnitudes_pass_over_hidden_scores_and_what_is_not_finite():
    problem = DEFAULT["nan_hidden"].build("fp32")
    size = tolerance.magnitudes(problem, np.array([-np.inf, 2.0]))
    assert size.lse == 2.0 and 0 < size.s < 10 and 0 < size.v < 10


@pytest.mark.parametrize("dtype, ulp", (("fp32", 2**-23), ("fp16", 2**-10), ("bf16", 2**-7)))
def test_floors_by_hand(dtype, ulp):
    size = tolerance.Magnitudes(s=4.0, s_abs=6.0, v=5.0, lse=7.5)
    assert tolerance.floor_O(dtype, size) == 2 * ulp * 5
    assert tolerance.floor_lse(dtype, size) == 4 * 2**-23 * 7.5
    # Dropout at p = 1/2 doubles what it keeps.
    assert tolerance.floor_O(dtype, replace(size, kept=2.0)) == 2 * ulp * 10


@pytest.mark.parametrize("dtype", ("fp32", "fp16", "bf16"))
def test_nothing_correct_exceeds_the_apriori_bound(dtype, faulty):
    """The plain formula and a tiled kernel, on every case: the bound is a bound."""
    correct = faulty.kernel()
    for case in DENSE:
        for name, m in check(correct, case, dtype=dtype).outputs.items():
            assert m.max_abs <= m.apriori, (case, name)
            assert m.plain <= m.apriori, (case, name)


def test_apriori_bound_is_not_idle():
    """It grows with what it names, and on plain inputs it is within a few thousand times of what is seen."""
    size = tolerance.Magnitudes(s=4.0, s_abs=6.0, v=5.0, lse=7.5)
    at = tolerance.apriori_O("fp32", size, d=64, N=512)
    assert at < tolerance.apriori_O("fp32", size, d=128, N=512)
    assert at < tolerance.apriori_O("fp32", size, d=64, N=1024)
    assert at < tolerance.apriori_O("fp16", size, d=64, N=512)
    m = check(lambda *a, **k: plain.attention(Problem(*a, k)), "square").outputs["O"]
    assert m.plain < m.apriori < 3000 * m.plain


def test_the_blogs_limits_are_shown_for_O_alone():
    outputs = check(lambda *a, **k: plain.attention(Problem(*a, k, dtype="fp16")), "square", dtype="fp16")
    assert outputs.outputs["O"].fixed == 1e-3 and outputs.outputs["lse"].fixed is None
