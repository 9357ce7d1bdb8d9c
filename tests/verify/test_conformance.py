"""The conformance file: read as its format says, right for what is right, wrong for what is wrong."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from verify import conformance, suite_file
from verify.__main__ import main
from verify.commands.conformance import dtypes_of
from verify.registry import ALL, KERNELS

PATH = str(Path(__file__).parents[1] / "data" / "conformance.json")
SUITE = suite_file.load(PATH)
CORE = [case for case in SUITE if SUITE[case]["tier"] == "core"]
# What the oracle has no option for: pages and 8-bit storage.
NOT_OF_THE_ORACLE = {"A13", "A33"}
# What the CUDA steps take, as the reading of the kinds goes; A36 on a GPU only.
OF_THE_STEPS = {"A06", "A07", "A08", "A09", "A18", "A19", "A20", "A27", "A28", "A29", "A30", "A31", "A32", "A37", "A38"}
# What comes on top with every option; in A12 a mask hides a NaN beside keys that are seen.
WITH_OPTIONS = {"A01", "A03", "A04", "A14", "A15", "A16", "A17", "A21", "A22", "A23", "A24", "A25", "A26"}


def outcomes(name, dtype):
    """{case: outcome} of everything that is not refused."""
    return {
        case: conformance.run_case(PATH, case, name, dtype, "emulated")
        for case in SUITE
        if name in conformance.subjects(SUITE[case]) and not conformance.refusal(SUITE[case], name, dtype, "emulated")
    }


def test_the_oracle_is_right_in_every_case_whose_options_it_has():
    found = outcomes("oracle", "fp64")
    dense = {case for case in SUITE if "oracle" in conformance.subjects(SUITE[case])}
    assert found.keys() == dense - NOT_OF_THE_ORACLE
    assert [o for o in found.values() if o.verdict != "right"] == []
    assert all(o.checked for o in found.values())


@pytest.mark.parametrize("dtype", ("fp64", "fp32"))
@pytest.mark.parametrize("name", [name for name in ALL if name.startswith("refimpl")])
def test_the_numpy_steps_are_right(name, dtype):
    found = outcomes(name, dtype)
    assert len(found) == 31 and [o for o in found.values() if o.verdict != "right"] == []


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_takes_the_cases_within_its_capabilities(name):
    taken = {c for c in SUITE if name in conformance.subjects(SUITE[c])}
    dtype = KERNELS[name].dtypes[0]
    taken = {c for c in taken if not conformance.refusal(SUITE[c], name, dtype, "emulated")}
    wanted = OF_THE_STEPS
    if name == "step5_tensor_core":  # it has every option
        wanted = OF_THE_STEPS | WITH_OPTIONS
    if name == "step6_flash_v3":  # it has softcap and windows, and no head dim of 20
        wanted = OF_THE_STEPS - {"A29"} | {"A14", "A15", "A17"}
    assert taken == wanted
    assert "needs a GPU" in conformance.refusal(SUITE["A36"], name, dtype, "emulated")
    assert conformance.refusal(SUITE["A36"], name, dtype, "gpu") is None


@pytest.mark.parametrize("name, case, dtype", [
    ("step0_standard", "A09", "fp16"), ("step1_fused", "A31", "fp16"), ("step2_flash_v1", "A37", "bf16"),
    ("step3_flash_v2", "A08", "bf16"), ("step4_causal", "A09", "fp32"), ("step4_causal", "A20", "fp32"),
    ("step3_flash_v2", "A38", "fp16"), ("step0_standard", "A18", "fp32"), ("step5_tensor_core", "A09", "bf16"),
    ("step5_tensor_core", "A31", "fp16"), ("step6_flash_v3", "A09", "bf16"), ("step6_flash_v3", "A15", "fp16"),
    ("step5_tensor_core", "A22", "fp16"), ("step5_tensor_core", "A23", "bf16"),
])  # fmt: skip
def test_a_kernel_is_right_in_a_case(name, case, dtype):
    """A sample; `verify conformance` runs them all."""
    found = conformance.run_case(PATH, case, name, dtype, "emulated")
    assert found.verdict == "right" and found.checked, found.reason


def test_merges_and_comparisons_are_run_against_ours():
    assert conformance.subjects(SUITE["A02"]) == [conformance.COMPARISON]
    assert conformance.run_case(PATH, "A02", conformance.COMPARISON, "fp64", "emulated").checked == 8
    for case in ("A05", "A39"):
        assert conformance.subjects(SUITE[case]) == [conformance.MERGE]
        for dtype in dtypes_of(conformance.MERGE):
            found = conformance.run_case(PATH, case, conformance.MERGE, dtype, "emulated")
            assert found.verdict == "right" and found.checked == 2, found.reason


def wrong(monkeypatch, change):
    """Replace the oracle's O or lse by what a fault makes of it."""
    from refimpl import oracle

    true = oracle.attention
    broken = lambda *a, **k: change(*true(*a, **k))  # noqa: E731
    broken.__module__ = true.__module__
    monkeypatch.setattr(oracle, "attention", broken)


@pytest.mark.parametrize("case, change, said", [
    ("A06", lambda O, lse: (O, lse / np.log(2)), "lse[0, 0, 0] is 3, expected 2.0794415 within"),
    ("A01", lambda O, lse: (np.where(O == 0, np.nan, O), lse), "out[0, 0, 1, 7] is nan, expected 0 within"),
    ("A09", lambda O, lse: (O, np.where(np.isinf(lse), -1e30, lse)), "lse[0, 0, 0] is -1e+30, expected -inf within"),
    ("A08", lambda O, lse: (O[..., :1], lse), "bottom_right: out has shape (1, 1, 2, 1), expected (1, 1, 2, 8)"),
    ("A07", lambda O, lse: (O, -lse), "lse[0, 0, 0] is inf, expected -inf"),
    ("A19", None, None),
])  # fmt: skip
def test_a_wrong_implementation_is_called_wrong(monkeypatch, case, change, said):
    if change is None:  # accepts what it should refuse
        change, said = (lambda O, lse: (O, lse)), "accepted, expected an error that says: k has 5 positions, v has 6"
        monkeypatch.setattr("refimpl.oracle.attention", lambda Q, *a, **k: (Q, Q[..., 0]))
        monkeypatch.setattr("refimpl.oracle.attention.__module__", "refimpl.oracle")
    else:
        wrong(monkeypatch, change)
    found = conformance.run_case(PATH, case, "oracle", "fp64", "emulated")
    assert found.verdict == "wrong" and said in found.reason


def test_an_exact_claim_is_held_to_the_bit():
    arrays = {"out": np.array([[1.0, 0.0], [1.0, 2.0]]), "lse": np.array([-np.inf, 0.5]), "v": np.array([[1.0, 2.0]])}
    assert conformance.holds("out[0,1] == 0", arrays) and conformance.holds("lse[0] == -inf", arrays)
    assert conformance.holds("out[1] == v[0]", arrays) and conformance.holds("out[1] == out[1] == [1, 2]", arrays)
    assert conformance.holds("out[0:2,0] == 1", arrays) and conformance.holds("out[..., 0] == 1", arrays)
    assert conformance.holds("out[0,0] == 0", arrays) is False
    assert conformance.holds("no NaN anywhere", arrays)
    assert conformance.holds("no NaN", arrays | {"dq": np.array([np.nan])}) is False
    assert conformance.holds("max |out| < 3 (page 5 not visible)", arrays) is None
    assert conformance.holds("dq[0] == 0", arrays) is None


def test_the_generator_of_the_format():
    """Against a plain Python reading of the format's text."""

    def reference(n, seed):
        for k in range(1, n + 1):
            x = (k + seed * 0x9E3779B9) % 2**32
            x ^= x >> 16
            x = x * 0x85EBCA6B % 2**32
            x ^= x >> 13
            x = x * 0xC2B2AE35 % 2**32
            x ^= x >> 16
            yield ((x >> 26) - 32) / 16

    assert suite_file.mix32((2, 50), 101).ravel().tolist() == list(reference(100, 101))


def test_the_rule_of_the_large_mask():
    def allowed(i, j):
        x = (i * 2654435761 + j * 40503 + 12345) % 2**32
        x ^= x >> 16
        x = x * 0x85EBCA6B % 2**32
        x ^= x >> 13
        return x >> 29 == 0

    rows = (0, 46341)
    assert suite_file.rule_mask(rows, 300).tolist() == [[allowed(i, j) for j in range(300)] for i in rows]


def test_the_tolerances_are_the_formats():
    case = SUITE["A01"]
    assert suite_file.tolerance(case, "out", "bf16", np.array([5.0, -np.inf])) == 0.15
    assert suite_file.tolerance(case, "lse", "bf16", np.array([5.0, -np.inf])) == 5e-4
    assert suite_file.tolerance(case, "out", "fp64", np.array([0.5])) == 1e-12


def test_the_verb_counts_refuses_and_fails(monkeypatch, tmp_path, capsys):
    path = tmp_path / "out.json"
    few = ["--cases", "A02,A05,A06,A13,A34", "--kernels", "oracle,refimpl.step1_fused", "--json", str(path)]
    assert main(["conformance", PATH, *few]) == 0
    out = capsys.readouterr().out
    assert "refused  oracle: does not take paged keys and values (A13)" in out
    assert "refused  -: nothing here has such a function yet (A34)" in out
    counts = Counter(outcome["verdict"] for outcome in json.loads(path.read_text()))
    assert counts == {"right": 1 + 2 + 3, "refused": 3 + 1}
    broken = json.loads(Path(PATH).read_text())
    broken[5]["expected"]["lse"]["values"][0] += 1
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    assert main(["conformance", str(tmp_path / "broken.json"), "--cases", "A06", "--kernels", "oracle"]) == 1
    assert "WRONG oracle A06 fp64: lse[0, 0, 0] is 2.0794415, expected 3.0794415" in capsys.readouterr().out
