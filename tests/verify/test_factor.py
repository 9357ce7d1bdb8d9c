"""Why the factor is 2: half of it still passes what is correct, and four times it lets a named fault live."""

from functools import cache

import numpy as np
import pytest

from refimpl import step3_flash_v2
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


@cache
def full_size(case):
    """The same at full size, in fp32."""
    problem = DENSE[case].build("fp32", small=False)
    return problem, judge.reference(problem)


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


def scaled_first(Q, K, V, *, scale=None, how="queries", rounded=False, **options):
    """The NumPy v2 step on a scaled Q, or Q and K: what the step does to scores of scale 1 rounds nothing more.

    `rounded` takes the scaled Q back to its storage type.
    """
    F, stored = np.float32, Q.dtype
    scale = 1 / np.sqrt(Q.shape[-1]) if scale is None else scale
    root = F(np.sqrt(abs(scale)))
    q, k, left = {
        "queries": (F(scale), F(1), 1.0),
        "keys": (F(1), F(scale), 1.0),
        "both": (np.copysign(root, F(scale)), root, 1.0),
        "base 2": (F(scale * np.log2(np.e)), F(1), np.log(2)),
    }[how]
    Q_scaled, K_scaled, wide = Q.astype(F) * q, K.astype(F) * k, V.astype(F)
    if rounded:
        Q_scaled = Q_scaled.astype(stored).astype(F)
    O, lse = step3_flash_v2.attention(Q_scaled, K_scaled, wide, scale=left, **options, tile=Tile(16, 16), dtype=F)
    return O.astype(stored), lse


@pytest.mark.parametrize("dtype", ("fp32", "fp16", "bf16"))
@pytest.mark.parametrize("how", ("queries", "keys", "both", "base 2"))
def test_half_the_factor_passes_kernels_that_scale_before_the_product(how, dtype):
    """As PyTorch's math does, and kernels that scale Q while they load it."""
    for case in DENSE:
        for seed in SEEDS:
            problem, known = anchored(case, dtype, seed)
            O, lse = scaled_first(problem.Q, problem.K, problem.V, how=how, **problem.options)
            judged = judge.judge(problem, O, lse, known=known, factor=FACTOR / 2)
            assert all(m.ok for m in judged.values()), judge.explain(case, judged)


@pytest.mark.parametrize("dtype", ("fp16", "bf16"))
def test_a_scaled_Q_of_16_bits_is_rejected(dtype):
    """Its rounding is no matter of order: where scores are large, it changes weights by more than their own type."""
    failed = set()
    for case in DENSE:
        problem, known = anchored(case, dtype, 0)
        O, lse = scaled_first(problem.Q, problem.K, problem.V, rounded=True, **problem.options)
        if not all(m.ok for m in judge.judge(problem, O, lse, known=known).values()):
            failed.add(case)
    assert {"logits_x10", "growing_max"} <= failed, failed


@pytest.mark.parametrize("name", ("growing_max", "logits_x10", "late_max"))
@pytest.mark.parametrize("how", ("queries", "both", "base 2"))
def test_full_sizes_pass_kernels_that_scale_before_the_product(name, how):
    """Sixty-four products a score, of a scale that is a power of two."""
    problem, known = full_size(name)
    O, lse = scaled_first(problem.Q, problem.K, problem.V, how=how, **problem.options)
    judged = judge.judge(problem, O, lse, known=known)
    assert all(m.ok for m in judged.values()), judge.explain(name, judged)


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
