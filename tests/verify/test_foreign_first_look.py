"""What somebody meets who brings a first kernel: guards on head dims, hangs, layouts, gradients that are not there."""

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from helpers_foreign import Here, probe, run, writer

from refimpl import oracle
from verify import assert_attention_close, check, progress
from verify.__main__ import main
from verify.card.card import build
from verify.card.verdict import FAIL
from verify.cases import DEFAULT
from verify.foreign import attempt, imports
from verify.foreign import probe as foreign_probe
from verify.foreign import run as foreign_run
from verify.foreign.facts import fitted
from verify.foreign.spec import WORDS, Spec

GUARD = """
def attn(q, k, v, causal=False):
    assert q.shape[-1] in {dims}, "head dim"
    return plain(q, k, v, None, causal)
"""


@pytest.fixture
def kernel(tmp_path):
    """`kernel(source)`: a Spec of a file with that text, its function `attn`; `plain` can be called in it."""
    return writer(tmp_path)


@pytest.fixture
def here(monkeypatch):
    """Probes run in this process."""
    monkeypatch.setattr(foreign_probe, "Worker", Here)


def test_the_first_call_has_a_head_dim_that_the_kernel_takes(kernel, here):
    """Probed or said; cases about other things follow it, and those about head dims do not."""
    cases = ("square", "causal", "odd_head_dim", "dv_not_d")
    guarded = probe(kernel(GUARD.format(dims="(16, 32, 64, 128)")), cases)
    assert (guarded.failure, guarded.d, guarded.why_d) == ("", 16, "probed: AssertionError: head dim")
    said = probe(kernel("CAPABILITIES = {'head_dims': range(32, 257, 32)}" + GUARD.format(dims="(32,)")), cases)
    assert (said.failure, said.d, said.why_d) == ("", 32, "said by CAPABILITIES")
    for facts in (guarded, said):
        fits = {name: fitted(DEFAULT[name], facts.d, True) for name in cases}
        assert fits["square"].small.d == fits["square"].small.dv == facts.d and fits["odd_head_dim"].small.d == 13
        taken = [name for name in cases if facts.refuses(fits[name], "fp32") is None]
        assert taken == ["square", "causal"] + ["dv_not_d"] * (facts is guarded)
    free = probe(kernel("attn = plain"), cases)
    assert free.d == 0 and fitted(DEFAULT["square"], 0, True) is DEFAULT["square"]
    never = probe(kernel(GUARD.format(dims="()")), cases)
    assert "d = 8, fp32: AssertionError: head dim" in never.failure
    spec, square = kernel(GUARD.format(dims="(128,)")), [DEFAULT["square"]]
    assert foreign_probe.probe(spec, square, ["fp32"], small=False).d == 128


def test_the_header_says_at_which_head_dim(kernel, capsys):
    options = ["--small", "--dtype", "fp32", "--cases", "square,gqa,growth_2,hand"]
    assert main(["--kernel", kernel(GUARD.format(dims="(16,)")).text, *options]) == 0
    out, err = capsys.readouterr()
    assert "PASS. 3 of 3 runs passed, 1 skipped" in out
    assert "Cases of head dim 8 are run at 16, as it does not take 8 (probed: AssertionError: head dim)." in out
    assert "attn: what it takes ..." in err and "attn: 4 runs ..." in err


def test_head_dims_that_are_none_are_said(kernel, here):
    for value in ("64", "[]", "['64']", "[0]"):
        told = probe(kernel(f"attn = plain\nCAPABILITIES = {{'head_dims': {value}}}")).failure
        assert "CAPABILITIES['head_dims']: expected a list of positive integers" in told


def test_bf16_is_excused_only_where_the_simulator_is_wrong_in_it(kernel, here, monkeypatch):
    wrong = "def attn(q, k, v): return plain(q, k, v)[0] * (2 if q.dtype.itemsize == 2 else 1)"
    monkeypatch.setattr(attempt, "bf16_excuse", lambda: "so")
    facts = probe(kernel(wrong.replace("itemsize == 2", "name == 'bfloat16'")), dtypes=("fp32", "fp16", "bf16"))
    assert facts.refused[("dtype", "bf16")] == "so" and ("dtype", "fp16") not in facts.refused
    assert "takes none of bf16" in probe(kernel(wrong), dtypes=("bf16",)).failure
    assert ("dtype", "bf16") not in probe(kernel("attn = plain"), dtypes=("fp32", "bf16")).refused
    monkeypatch.setattr(attempt, "bf16_excuse", lambda: "")
    assert ("dtype", "bf16") not in probe(kernel(wrong), dtypes=("fp32", "bf16")).refused


@pytest.mark.skipif(not (find_spec("triton") and find_spec("torch")), reason="Triton or PyTorch is not installed")
@pytest.mark.skipif(imports.gpu_answers(), reason="nothing is simulated where a GPU answers")
def test_a_right_triton_kernel_passes_or_is_excused_in_bf16():
    """In its own process, as Triton decides on its interpreter when it comes up."""
    spec = Spec(str(Path(__file__).parents[2] / "examples" / "triton_attention.py"))
    facts = probe(spec, dtypes=("fp32", "bf16"))
    assert facts.failure == "" and facts.executor == "simulated"
    if ("dtype", "bf16") in facts.refused:
        assert "interpreter multiplies bf16 tiles wrongly" in facts.refused["dtype", "bf16"]
    else:
        assert [r.verdict for r in run(spec, ("square",), ("bf16",), facts=facts, limit=60.0)] == ["pass"]


def test_a_call_that_never_answers_is_no_pass(kernel):
    """Neither in a probe, though every run passes, nor the second time."""
    spec = kernel("""
    import time
    def attn(q, k, v):
        if q.shape[2] == 17: time.sleep(100)
        return plain(q, k, v)
    """)
    cases = ("square", "tile_less_1")
    facts = probe(spec, cases, limit=5.0)
    assert facts.died == ("in a probe, B = 2, H = 2, N = 17, d = 8, fp32: no answer within 5 s",)
    plan = foreign_run.Plan(spec, facts, tuple(DEFAULT[name] for name in cases), ("fp32",), limit=10.0, jobs=1)
    made = build(plan, foreign_run.run(plan))
    assert made.verdict == FAIL and made.headline() == f"2 of 2 runs passed; {facts.died[0]}"
    once = kernel("""
    import time
    seen = []
    def attn(q, k, v):
        if seen: time.sleep(100)
        seen.append(1)
        return plain(q, k, v)
    """)
    assert probe(once, limit=5.0).failure.endswith("at the same call a second time: no answer within 5 s")


def test_a_pass_at_small_shapes_alone_says_so(kernel, here):
    """Where a call at the full ones would take too long."""
    spec = kernel("import time\ndef attn(q, k, v):\n    time.sleep(0.05)\n    return plain(q, k, v)")
    square = DEFAULT["square"]
    facts = foreign_probe.probe(spec, [square], ["fp32"], limit=0.1)
    plan = foreign_run.Plan(spec, facts, (square,), ("fp32",))
    made = build(plan, [foreign_run.run_one(plan, square, "fp32")])
    assert made.headline().startswith("1 of 1 runs passed; small shapes alone, as at the full shapes a call would take")


def test_causal_aligned_top_left_is_in_the_headline(kernel, here):
    left = kernel("def attn(q, k, v, causal=False): return plain(q, k, v, None, causal, 0)")
    facts = probe(left, ("square", "causal_113x203"))
    (told,) = facts.hints
    assert told == "causal is aligned top left (probed); if you meant bottom right, this is your bug"
    plan = foreign_run.Plan(left, facts, (DEFAULT["square"],), ("fp32",))
    assert told in build(plan, [foreign_run.run_one(plan, DEFAULT["square"], "fp32")]).headline()
    right = kernel("def attn(q, k, v, causal=False): return plain(q, k, v, None, causal)")
    assert probe(right, ("square", "causal_113x203")).hints == ()


def test_the_layout_that_was_asked_for_and_is_not_its_own(kernel, here):
    bshd = "def attn(q, k, v): return plain(*(x.swapaxes(1, 2) for x in (q, k, v)))[0].swapaxes(1, 2)"
    facts = probe(kernel(bshd, layout="bhsd"))
    assert facts.hints == ("its output is attention in layout bshd, though bhsd was asked for",)
    assert facts.layout == "bhsd" and probe(kernel(bshd)).hints == ()
    half = kernel("def attn(q, k, v): return plain(q, k, v)[0].swapaxes(1, 2)", layout="bhsd")
    assert "(it looks transposed: inputs are in layout bhsd, and so must the output be)" in probe(half).failure


def test_a_kernel_for_one_head_dim_is_told_how_to_say_so(kernel, here):
    like_q = "def attn(q, k, v): return np.concatenate([plain(q, k, v)[0]] * 2, -1)[..., :q.shape[-1]]"
    (told,) = run(kernel(like_q), ("dv_not_d",))
    assert told.verdict == "fail" and "(V has head dim 12; if the kernel is not for that, raise NotImpl" in told.reason
    facts = probe(kernel("CAPABILITIES = {'wide_v': False}\n" + like_q), ("square", "dv_not_d"))
    assert f"does not take {WORDS['wide_v']} (said" in facts.refuses(DEFAULT["dv_not_d"], "fp32")


def test_gradients_that_were_asked_for_and_are_not_there(kernel, capsys):
    """Not status 0; a file that has them is judged on them."""
    forward = "def attn(q, k, v, causal=False, scale=None): return plain(q, k, v, scale, causal)\n"
    backward = """
from refimpl import oracle
def attn_backward(q, k, v, do, causal=False, scale=None):
    return [x.astype(q.dtype) for x in oracle.attention_backward(q, k, v, do, causal=causal, scale=scale)[:3]]
"""
    options = ["--small", "--dtype", "fp32", "--cases", "square,back_gqa", "--backward"]
    assert main(["--kernel", kernel(forward).text, *options]) == 2
    out = capsys.readouterr().out
    assert "GRADIENTS NOT JUDGED. 1 of 1 runs passed, 1 skipped; no gradients were judged, though --backward" in out
    assert "there is no attn_backward(q, k, v, do, ...) beside it, and numpy arrays have no autograd" in out
    assert main(["--kernel", kernel(forward + backward).text, *options]) == 0
    capsys.readouterr()
    assert main(["--kernel", kernel(forward + backward).text, *options[:-1]]) == 0
    assert "; attn_backward beside it is not looked at: --backward does" in capsys.readouterr().out
    assert main(["--kernel", kernel(forward + backward).text, *options[:4], "square", "--backward"]) == 2
    assert "none of the cases judges them" in capsys.readouterr().out


def test_an_input_that_was_written_to_is_not_excused(kernel):
    writes = kernel("def attn(q, k, v):\n    O = plain(q, k, v)[0]\n    q *= 2\n    return O")
    (told,) = run(writes, ("offset_view",))
    assert (told.verdict, told.reason) == ("fail", "input Q was modified")


def test_the_words_of_capabilities_and_the_cases_can_be_listed(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    said = capsys.readouterr().out
    assert all(f"  {word:15}" in said for word in ("head_dims", "gqa", "wide_v", "ragged")) and "2 nothing was" in said
    assert main(["--cases", "list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(DEFAULT)
    assert main(["--kernel", "examples/numpy_attention.py:attn", "--cases", "gqq"]) == 2
    assert "did you mean 'gqa'? (--cases list lists them)" in capsys.readouterr().err


def test_logs_get_a_line_now_and_then(capsys, monkeypatch):
    clock = iter([0.0, 1.0, 16.0, 20.0])
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    with progress.bar("k", log=True) as update:
        for done in range(3):
            update(done, 3)
    assert capsys.readouterr().err == "k ...\nk: 1 of 3, 16 s\n"
    with progress.bar("k") as update:
        update(1, 3)
    assert capsys.readouterr().err == ""


def _bshd(q, k, v, causal=False):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return oracle.attention(q, k, v, causal=causal)[0].swapaxes(1, 2).astype(q.dtype)


def test_arrays_in_the_other_layout_are_recognised():
    """And nothing else is; a case has no name where there is none."""
    rng = np.random.default_rng(0)
    Q, K, V = (rng.standard_normal((1, 40, 2, 16)).astype(np.float32) for _ in range(3))
    for causal, hint in ((True, True), (False, False)):
        with pytest.raises(AssertionError) as told:
            assert_attention_close(_bshd(Q, K, V, causal), None, Q, K, V, causal=True)
        assert ("(with layout='bshd' it is right)" in str(told.value)) is hint
        assert "case" not in str(told.value)
    with pytest.raises(AssertionError, match=r"lse has shape .* \(with layout='bshd' it is right\)"):
        lse = oracle.attention(*(x.swapaxes(1, 2) for x in (Q, K, V)))[1].astype(np.float32)
        assert_attention_close(_bshd(Q, K, V), lse, Q, K, V)
    assert check(_bshd, "square").reason.endswith("(in layout='bshd' it is attention)")
    assert "(in layout" not in check(lambda q, k, v: 2 * q, "square").reason


def test_a_missing_gpu_is_said_with_what_to_set(monkeypatch):
    """Only where it is missing, and for the library that says so."""

    def no_driver(q, k, v):
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    monkeypatch.setattr(imports, "gpu_answers", lambda: False)
    with pytest.raises(RuntimeError, match=r"0 active drivers.*set TRITON_INTERPRET=1 before triton is first imported"):
        check(no_driver, "square")
    driver = type("CudaSupportError", (RuntimeError,), {})("no driver")
    assert "NUMBA_ENABLE_CUDASIM=1" in imports.unsimulated(driver)
    assert imports.unsimulated(RuntimeError("so")) == ""
    monkeypatch.setattr(imports, "gpu_answers", lambda: True)
    assert imports.unsimulated(driver) == ""


def test_check_runs_a_case_at_a_head_dim_that_is_asked_for():
    """And says so to a kernel that refuses the usual one."""
    seen = []

    def guarded(q, k, v):
        seen.append(q.shape[-1])
        assert q.shape[-1] in (32, 64), "head dim"
        return oracle.attention(q, k, v)[0].astype(q.dtype)

    with pytest.raises(AssertionError) as told:
        check(guarded, "square")
    assert told.value.__notes__ == ["The case has head dim 8; check(..., d=32) runs it at another."]
    assert check(guarded, "square", d=32).verdict == check(guarded, "square", small=False).verdict == "pass"
    assert seen == [8, 32, 64]
    with pytest.raises(AssertionError):
        check(guarded, "odd_head_dim", d=32)


def test_no_excuse_for_bf16_without_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert imports.bf16_excuse() == ""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert imports.bf16_excuse() == ""
