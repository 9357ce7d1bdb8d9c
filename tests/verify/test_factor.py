"""Why the factor is 2: half of it still passes what is correct, and four times it lets a named fault live."""

from functools import cache

import numpy as np
import pytest

from refimpl.tiling import Tile
from verify import calls, check, document, judge
from verify.cases import DEFAULT, DENSE
from verify.registry import REFERENCES
from verify.tolerance import FACTOR

SEEDS = (0, 1, 2)


@cache
def anchored(case, dtype, seed):
    """A problem and its reference, once for all implementations."""
    problem = DEFAULT[case].build(dtype, seed=seed)
    return problem, judge.reference(problem, problem.dO() if problem.backward else None)


@pytest.mark.parametrize("dtype", ("fp32", "fp16", "bf16"))
@pytest.mark.parametrize("name", [name for name in REFERENCES if name != "oracle"])
def test_half_the_factor_passes_every_correct_implementation(name, dtype):
    for seed in SEEDS:
        for case in DEFAULT:
            if not REFERENCES[name].refuses(DEFAULT[case], dtype):
                problem, known = anchored(case, dtype, seed)
                outputs = calls.outputs(REFERENCES[name], problem, {"tile": Tile(16, 16)})
                judged = judge.judge(problem, **outputs, known=known, factor=FACTOR / 2)
                assert all(m.ok for m in judged.values()), judge.explain(case, judged)


def test_half_the_factor_passes_what_was_recorded_on_a_gpu():
    """The same of real kernels at full size, where products are fused and exp2 is the hardware's."""
    record = document.newest_gpu()
    assert record, "a GPU run is committed under verify/records"
    for result in document.results_of(record):
        for name, m in result.outputs.items():
            floor = m.bound - FACTOR * m.plain
            assert m.max_abs <= FACTOR / 2 * m.plain + floor, (result.kernel, result.case, result.dtype, name)


@pytest.mark.parametrize("bug", ("log2e_truncated", "exp2_of_degree_4"))
def test_four_times_the_factor_lets_a_fault_live(faulty, bug):
    """Errors of a few fp32 ulp, which a wrong constant or too short a polynomial makes, are the first to get away."""
    kernel = faulty.kernel(bug)
    assert any(faulty.fails(kernel, case, factor=FACTOR) for case in DENSE)
    assert not any(faulty.fails(kernel, case, factor=4 * FACTOR) for case in DENSE)


@pytest.mark.parametrize("name", ("logits_x10", "growing_max", "1023x1024"))
def test_the_rule_holds_at_full_size_too(name):
    """Sums of a thousand terms, in fp32 and fp16."""
    for dtype in ("fp32", "fp16"):
        result = check(REFERENCES["refimpl.step3_flash_v2"].attention(), name, dtype=dtype, small=False)
        assert result.verdict == "pass" and np.isfinite(result.ratio), result.reason
