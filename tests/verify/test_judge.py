"""The judge is judged: every seeded fault is rejected by the default small cases, and correct kernels are not."""

import numpy as np
import pytest

from refimpl import backward, oracle, step3_flash_v2
from refimpl.tiling import Tile
from verify import assert_attention_close, check, plain
from verify.cases import DEFAULT, DENSE
from verify.judge import judge, reference

# Faults that a storage type hides: what they do is below its own rounding.
ONLY_IN = {
    "log2e_truncated": ("fp32",),
    "exp2_of_degree_4": ("fp32",),
    "one_element": ("fp32", "fp16"),
}
# Faults that would go unseen without the cases named: they are what those cases are for.
ONLY_BY = {
    "aligned_top_left": {
        "causal_113x203", "empty_rows", "edge_hides_one", "edge_shows_one", "edge_hides_one_far", "edge_shows_one_far",
        "large_values_gqa",
    },
    "scale_of_dv": {"dv_not_d"},
    "dv_cut_to_d": {"dv_not_d"},
    "heads_tiled": {"gqa", "all_negative_gqa"},
    "max_starts_at_0": {"all_negative", "all_negative_gqa"},
    "max_starts_at_-5e4": {"all_negative", "all_negative_gqa"},
    "max_starts_at_-65504": {"all_negative", "all_negative_gqa"},
    "mask_is_-1e4": {"empty_rows", "all_negative"},
    "max_of_unscaled": {"negative_scale"},
    "empty_row_is_nan": {"empty_rows", "no_keys"},
    "empty_row_is_mean": {"empty_rows"},
    "strides_ignored": {"offset_view", "fused_qkv", "stride_0"},
    "nan_leaks": {"nan_hidden", "nan_hidden_gqa", "nan_seen"},
    "nan_swallowed": {"nan_seen"},
    "head_dim_tail_dropped": {"hand", "odd_head_dim"},
}


@pytest.mark.parametrize("dtype", ("fp32", "fp16", "bf16"))
@pytest.mark.parametrize("tile", (16, 7))
def test_a_correct_kernel_passes_every_case(faulty, dtype, tile):
    assert [case for case in DENSE if faulty.fails(faulty.kernel(tile=tile), case, dtype)] == []


@pytest.mark.parametrize("dtype", ("fp32", "fp16", "bf16"))
def test_every_seeded_fault_is_rejected(faulty, dtype):
    """On small shapes, except where the storage type's own rounding covers the fault."""
    for bug in faulty.BUGS:
        if dtype in ONLY_IN.get(bug, (dtype,)):
            assert any(faulty.fails(faulty.kernel(bug), case, dtype) for case in DENSE), bug


@pytest.mark.parametrize("bug", ONLY_BY)
def test_some_faults_are_seen_by_few_cases(faulty, bug):
    assert {case for case in DENSE if faulty.fails(faulty.kernel(bug), case)} == ONLY_BY[bug]


def test_every_stress_case_rejects_something_that_the_square_case_lets_through(faulty):
    """A case nobody needs would only cost time."""
    survivors = [bug for bug in faulty.BUGS if not faulty.fails(faulty.kernel(bug), "square")]
    for case in ("all_negative", "negative_scale", "empty_rows", "nan_hidden", "nan_seen", "gqa"):
        assert any(faulty.fails(faulty.kernel(bug), case) for bug in survivors), case
    assert not faulty.fails(faulty.kernel("half_sums"), "square", "fp16")
    assert faulty.fails(faulty.kernel("half_sums"), "large_values", "fp16")


def test_a_failure_names_case_index_values_error_bound_and_share(faulty):
    result = check(faulty.kernel("one_element"), "gqa")
    m = result.outputs["O"]
    assert result.verdict == "fail" and m.worst_index == (0, 2, 9, 4)
    for part in (
        "O of case gqa at [0, 2, 9, 4]",
        f"got {m.got:.9g}",
        f"wanted {m.wanted:.9g}",
        "error",
        "bound",
        "0.2%",
    ):
        assert part in result.reason
    assert abs(m.got - m.wanted) == pytest.approx(m.max_abs)


def test_shape_and_type_come_first(faulty):
    correct = faulty.kernel()

    def changed(change):
        return check(lambda *arrays, **options: change(*correct(*arrays, **options)), "square", dtype="fp16")

    assert changed(lambda O, lse: (O[..., :-1], lse)).reason == "O has shape (1, 1, 48, 7), expected (1, 1, 48, 8)"
    assert changed(lambda O, lse: (O.astype("f4"), lse)).reason == "O has dtype float32, expected float16"
    assert changed(lambda O, lse: (O, lse.astype("f2"))).reason == "lse has dtype float16, expected float32"
    assert changed(lambda O, lse: (O, lse[..., None])).verdict == "fail"
    assert changed(lambda O, lse: (O.tolist(), lse)).reason == "O is a list, expected a NumPy array"
    assert changed(lambda O, lse: (O, lse)).verdict == "pass"


def test_a_modified_input_fails_though_the_answer_is_right(faulty):
    result = check(faulty.kernel("modifies_input"), "square")
    assert result.verdict == "fail" and "input V was modified" in result.reason


def test_half_the_plain_error_is_asked_when_the_factor_is_half():
    """The bound is factor x plain + floor, and the floor does not depend on the factor."""
    problem = DEFAULT["logits_x10"].build("fp32")
    O, lse = oracle.attention(problem.Q, problem.K, problem.V, **problem.options)
    outputs = O.astype(np.float32), lse.astype(np.float32)
    once, twice, four = (judge(problem, *outputs, factor=f)["O"] for f in (1, 2, 4))
    assert twice.bound - once.bound == pytest.approx(once.plain) and twice.plain > 0
    assert four.bound - twice.bound == pytest.approx(2 * once.plain)


def test_the_plain_formula_is_allowed_its_worst_order():
    """What is shown as the plain formula's error is the largest over the orders, and its output is the first's."""
    problem = DEFAULT["growing_max"].build("fp32")
    known = reference(problem)
    outputs = [plain.attention(problem, order) for order in plain.ORDERS]
    errors = [float(np.abs(O - known.anchors["O"].truth).max()) for O, _ in outputs]
    assert errors[0] < max(errors[1:]) and known.anchors["O"].error == max(errors)
    np.testing.assert_array_equal(known.anchors["O"].plain, outputs[0][0])
    m = judge(problem, *outputs[0], known=known)["O"]
    assert m.plain == max(errors) and m.max_abs == errors[0]
    assert m.bound == 2 * m.plain + known.anchors["O"].floor


def flash(Q, K, V, **options):
    """The NumPy v2 step as a kernel: fp32 arithmetic, storage types in and out."""
    O, lse = step3_flash_v2.attention(Q, K, V, **options, tile=Tile(16, 16), dtype=np.float32)
    return O.astype(Q.dtype), lse


def gradients(Q, K, V, O, lse, dO, **options):
    """Their gradients, likewise."""
    found = backward.attention_backward(Q, K, V, O, lse, dO, **options, tile=Tile(16, 16), dtype=np.float32)
    return tuple(x.astype(Q.dtype) for x in found)


@pytest.mark.parametrize("dtype", ("fp32", "fp16", "bf16"))
@pytest.mark.parametrize("case", ("square", "gqa", "mqa", "empty_rows", "causal_top_left", "dv_not_d", "logits_x10"))
def test_correct_gradients_pass(case, dtype):
    result = check(flash, case, dtype=dtype, backward=gradients)
    assert result.verdict == "pass", result.reason
    assert set(result.outputs) == {"O", "lse", "dQ", "dK", "dV"}


WRONG = {
    "D left out": lambda q, k, v, o, lse, do, **opt: gradients(q, k, v, 0 * o, lse, do, **opt),
    "scale left out": lambda *a, scale, **opt: (2 * gradients(*a, scale=scale, **opt)[0], *gradients(*a, **opt)[1:]),
    "mask left out": lambda *a, causal, **opt: gradients(*a, causal=False, **opt),
    "dK and dV exchanged": lambda *a, **opt: tuple(gradients(*a, **opt)[k] for k in (0, 2, 1)),
    "one NaN column": lambda *a, **opt: (
        gradients(*a, **opt)[0] * np.where(np.arange(8) == 3, np.nan, 1).astype("f4"),
        *gradients(*a, **opt)[1:],
    ),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_gradients_fail(wrong):
    assert check(flash, "causal", backward=wrong).verdict == "fail"


@pytest.mark.parametrize("dtype", ("fp32", "fp16", "bf16"))
def test_assert_attention_close(dtype):
    """Passes what is right, with lse or without it, and says what is wrong."""
    problem = DEFAULT["causal_113x203"].build(dtype)
    arrays = problem.Q, problem.K, problem.V
    O, lse = flash(*arrays, **problem.options)
    assert_attention_close(O, lse, *arrays, causal=True)
    assert_attention_close(O, None, *arrays, causal=True)
    with pytest.raises(AssertionError, match=r"O at \[0, 0, .* got .*, wanted .*, error .*, bound"):
        assert_attention_close(O, lse, *arrays)
    with pytest.raises(AssertionError, match="lse at "):
        assert_attention_close(O, lse + np.float32(0.01), *arrays, causal=True)
    with pytest.raises(AssertionError, match="O has shape"):
        assert_attention_close(O[:, :, 1:], lse, *arrays, causal=True)


@pytest.mark.parametrize("case", ("window_both", "bias", "lengths", "dropout", "all_options"))
def test_assert_attention_close_knows_every_option(case):
    """The oracle's own arguments; leaving one out fails."""
    problem = DEFAULT[case].build("fp32")
    arrays = problem.Q, problem.K, problem.V
    O, lse = (x.astype(np.float32) for x in oracle.attention(*arrays, **problem.options))
    assert_attention_close(O, lse, *arrays, **problem.options)
    with pytest.raises(AssertionError, match=" at "):
        assert_attention_close(O, lse, *arrays, causal=problem.options["causal"])


def test_misuse_of_the_python_face_names_what_was_expected(faulty):
    with pytest.raises(ValueError, match="case: there is no 'gqq'; did you mean 'gqa'"):
        check(faulty.kernel(), "gqq")
    with pytest.raises(ValueError, match="dtype: there is no 'int8'; expected one of fp64, fp32"):
        check(faulty.kernel(), "gqa", dtype="int8")
    x = np.zeros((1, 1, 2, 4), np.float32)
    with pytest.raises(TypeError, match="options: dropout not known; expected scale, causal, align, mask, bias"):
        assert_attention_close(x, None, x, x, x, dropout=0.1)
    with pytest.raises(TypeError, match="dtype must be one of fp64, fp32, fp16, bf16, got int64"):
        assert_attention_close(x, None, x.astype(int), x, x)
