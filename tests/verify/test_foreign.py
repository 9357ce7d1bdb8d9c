"""Anyone's kernel is judged: what it says of itself, what is found out by trying, whatever it does to its process."""

import re
from collections import Counter

import numpy as np
import pytest
from helpers_foreign import Here, probe, run, writer

from verify.__main__ import main
from verify.cases import DEFAULT
from verify.foreign import probe as foreign_probe
from verify.foreign import run as foreign_run
from verify.foreign import spec as foreign
from verify.foreign.spec import Spec


@pytest.fixture
def kernel(tmp_path):
    """`kernel(source)`: a Spec of a file with that text, its function `attn`; `plain` can be called in it."""
    return writer(tmp_path)


# What a file does wrong for N = 15 alone, and the line that says so. The case before and the one after still pass.
FATAL = {
    "raise RuntimeError('not today')": ("error", "RuntimeError: not today"),
    "return plain(q, k, v)[0][:, :, [99]]": ("error", "IndexError: index 99 is out of bounds"),
    "time.sleep(100)": ("error", "no answer within 4 s"),
    "os.abort()": ("error", "the worker process died (SIGABRT)"),
    "os._exit(3)": ("error", "the worker process died (exit status 3)"),
    "O = np.empty_like(q); O[...] = plain(q, k, v)[0]; ctypes.memset(O.ctypes.data + O.nbytes, 7, 4); return O": (
        "fail",
        "wrote outside an output or work array: its guard band changed",
    ),
    "O = np.empty_like(q); O[:, :, 1:] = plain(q, k, v)[0][:, :, 1:]; return O": ("fail", "got nan, wanted"),
}
WRONG = {
    "return plain(q, k, v)[0][:, :, 1:]": "O has shape (1, 2, 14, 8), expected (1, 2, 15, 8)",
    "return plain(q, k, v)[0].astype('f8')": "O has dtype float64, expected float32",
    "return 'O'": "O is a str, expected a NumPy array",
    "return None": "O is None, expected a NumPy array",
    "return plain(q, k, v)[0], q[..., :2]": "lse has shape (1, 2, 15, 2), expected (1, 2, 15)",
    "return plain(q, k, v)[0] * np.where(np.arange(8) == 3, np.nan, 1).astype('f4')": "got nan, wanted",
    "O = plain(q, k, v)[0]; k *= 2; return O": "input K was modified",
    "ctypes.memset(v.ctypes.data - 4, 7, 4)": "wrote outside input V: its guard band changed",
}
AT_15 = "import ctypes, os, time\ndef attn(q, k, v):\n    if q.shape[2] == 15:\n        {}\n    return plain(q, k, v)"


@pytest.mark.parametrize("line", FATAL)
def test_a_fault_in_one_case_is_told_in_one_line_and_the_rest_runs(kernel, line):
    before, fault, after = run(kernel(AT_15.format(line)), ("tile", "tile_less_1", "tile_plus_1"), limit=4.0)
    assert (before.verdict, after.verdict) == ("pass", "pass")
    assert fault.verdict == FATAL[line][0] and FATAL[line][1] in fault.reason and "\n" not in fault.reason


def test_an_exception_is_told_with_its_line(kernel):
    """That of the file, wherever below it was raised; one that merely passes through has none."""
    bad = "def attn(q, k, v):\n    if q.shape[2] == 15:\n        np.zeros(2)[[7]]\n    return plain(q, k, v)"
    spec = kernel(bad)
    (fault,) = run(spec, ("tile_less_1",))
    (at,) = (n for n, line in enumerate(spec.path.read_text().splitlines(), 1) if "[[7]]" in line)
    assert fault.reason.endswith(f"out of bounds for axis 0 with size 2 ({spec.path.name}:{at})")


@pytest.mark.parametrize("line", WRONG)
def test_an_output_that_is_wrong_fails_with_what_was_expected(kernel, line):
    plan = foreign_run.Plan(kernel(AT_15.format(line)), foreign_probe.Facts(arrays="numpy", small=True), (), ())
    assert foreign_run.run_one(plan, DEFAULT["tile"], "fp32").result.verdict == "pass"
    fault = foreign_run.run_one(plan, DEFAULT["tile_less_1"], "fp32").result
    assert fault.verdict == "fail" and WRONG[line] in fault.reason and "\n" not in fault.reason


UNUSABLE = {
    "def attn(q, k, v:": "SyntaxError: '(' was never closed",
    "import no_such_package": "ModuleNotFoundError: No module named 'no_such_package'",
    "def attm(q, k, v): return plain(q, k, v)": "has no function 'attn'; did you mean 'attm'?",
    "def attn(q, k): return q": "attn takes 2 arguments, expected q, k, v and options",
    "def attn(q, k, v, block): return q": "attn must be given 'block', which is none of scale, causal",
    "def attn(q, k, v): return q\ndef attn_backward(x): return x": "attn_backward: expected parameters q, k, v, do",
    "attn = plain\nCAPABILITIES = {'dtype': ['fp32']}": "CAPABILITIES: there is no 'dtype'; did you mean 'dtypes'?",
    "attn = plain\nCAPABILITIES = {'dtypes': ['float']}": "CAPABILITIES['dtypes']: there is no 'float'",
    "attn = plain\nCAPABILITIES = {'gqa': 'no'}": "CAPABILITIES['gqa']: expected True or False, got 'no'",
    "def attn(q, k, v): return q[0]": "in a first call, B = 2, H = 2, N = 32, d = 8, fp32: O has shape (2, 32, 8)",
    "def attn(q, k, v): raise OSError('no space')": "fp32: OSError: no space",
}


@pytest.fixture
def here(monkeypatch):
    """Probes run in this process."""
    monkeypatch.setattr(foreign_probe, "Worker", Here)


@pytest.mark.parametrize("source", UNUSABLE)
def test_what_cannot_be_judged_at_all_says_why(kernel, here, source):
    assert UNUSABLE[source] in probe(kernel(source)).failure


def test_a_kernel_that_hangs_always_is_not_run_on(kernel):
    spec = kernel("import time\ndef attn(q, k, v): time.sleep(100)")
    facts = probe(spec, limit=2.0)
    assert facts.failure.endswith("no answer within 2 s")
    results = run(spec, ("square", "gqa"), facts=facts)
    assert [r.verdict for r in results] == ["error", "error"] and "no answer" in results[0].reason


def test_options_are_those_that_the_signature_names(kernel, here):
    cases = ("square", "causal", "softcap", "window_left", "negative_scale", "mask")
    facts = probe(
        kernel(
            "def attn(q, k, v, softmax_scale=None, is_causal=False): return plain(q, k, v, softmax_scale, is_causal)"
        ),
        cases,
    )
    assert facts.options == ("softmax_scale", "is_causal") and facts.lse
    taken = [name for name in cases if facts.refuses(DEFAULT[name], "fp32") is None]
    assert taken == ["square", "causal", "negative_scale"]
    assert facts.refuses(DEFAULT["softcap"], "fp32") == "does not take softcap: its signature has no softcap"


def test_what_is_not_said_is_probed(kernel, here):
    """A refusal is a skip with the probe's message; what a signature promises and slips over is left to fail."""
    facts = probe(
        kernel("""
        def attn(q, k, v, causal=False, softcap=None, window=None):
            if q.dtype != np.float32: raise TypeError("only fp32")
            if q.shape[1] != k.shape[1]: raise ValueError("no shared heads")
            if q.shape[3] % 8: raise ValueError("head dims are multiples of 8")
            if window: raise NotImplementedError("some day")
            if softcap: return undefined
            return plain(q, k, v, causal=causal)
        """),
        ("square", "gqa", "odd_head_dim", "causal", "softcap", "window_left"),
        ("fp16", "fp32"),
    )
    square, odd = DEFAULT["square"], DEFAULT["odd_head_dim"]
    assert facts.refuses(square, "fp16") == "does not take fp16 (probed: TypeError: only fp32)"
    assert facts.refuses(DEFAULT["gqa"], "fp32").endswith("(probed: ValueError: no shared heads)")
    assert facts.refuses(odd, "fp32") == "does not take head dim 13 (probed: ValueError: head dims are multiples of 8)"
    assert facts.refuses(DEFAULT["window_left"], "fp32").endswith("(probed: NotImplementedError: some day)")
    assert facts.refuses(square, "fp32") is None and facts.refuses(DEFAULT["softcap"], "fp32") is None


def test_what_is_said_is_believed(kernel, here):
    facts = probe(
        kernel("attn = plain\nCAPABILITIES = {'dtypes': ['fp16'], 'gqa': False, 'head_dims': [8], 'causal': True}"),
        ("square", "gqa", "odd_head_dim", "causal"),
        ("fp32", "fp16"),
    )
    told = {name: facts.refuses(DEFAULT[name], "fp16") for name in ("square", "gqa", "odd_head_dim", "causal")}
    assert told["square"] is None and told["causal"] is None
    assert told["gqa"] == "does not take fewer key heads than query heads (said by CAPABILITIES)"
    assert told["odd_head_dim"] == "does not take head dim 13 (said by CAPABILITIES)"
    assert facts.refuses(DEFAULT["square"], "fp32") == "stores fp16, not fp32 (said by CAPABILITIES)"


def test_causal_without_an_option_and_alignment_are_found_out(kernel, here):
    cases = ("square", "causal", "causal_113x203", "causal_top_left")
    always = probe(kernel("def attn(q, k, v): return plain(q, k, v, causal=True)"), cases)
    assert always.always_causal and "always causal" in always.refuses(DEFAULT["square"], "fp32")
    assert always.refuses(DEFAULT["causal"], "fp32") is None
    left = probe(kernel("def attn(q, k, v, causal): return plain(q, k, v, causal=causal, shift=0)"), cases)
    assert "aligns causal top left (probed" in left.refuses(DEFAULT["causal_113x203"], "fp32")
    assert left.refuses(DEFAULT["causal_top_left"], "fp32") is None
    right = probe(kernel("def attn(q, k, v, causal): return plain(q, k, v, causal=causal)"), cases)
    assert right.refuses(DEFAULT["causal_113x203"], "fp32") is None and right.refuses(
        DEFAULT["causal_top_left"], "fp32"
    )
    # One that does neither is not excused.
    wrong = probe(kernel("def attn(q, k, v, causal): return plain(q, k, v, causal=causal, shift=3)"), cases)
    assert wrong.refuses(DEFAULT["causal_113x203"], "fp32") is None


def test_the_layout_is_found_out(kernel, here):
    bshd = "def attn(q, k, v): return plain(*(x.swapaxes(1, 2) for x in (q, k, v)))[0].swapaxes(1, 2)"
    facts = probe(kernel(bshd))
    assert facts.layout == "bshd" and "probed" in facts.why_layout
    assert probe(kernel(bshd, layout="bhsd")).layout == "bhsd"
    # With lse, whose shape is (B, H, N) in either, the wrong layout does not even fit.
    with_lse = """
    def attn(q, k, v):
        O, lse = plain(*(x.swapaxes(1, 2) for x in (q, k, v)))
        return O.swapaxes(1, 2), lse
    """
    facts = probe(kernel(with_lse))
    assert facts.layout == "bshd" and facts.lse and not facts.failure
    assert "lse has shape" in probe(kernel(with_lse, layout="bhsd")).failure
    assert probe(kernel("attn = plain")).layout == "bhsd"
    results = run(kernel(bshd), ("batch_heads", "gqa", "offset_view"), facts=facts)
    assert [r.verdict for r in results] == ["pass"] * 3, [r.reason for r in results]


LEAKY = """
def attn(q, k, v, causal=False, align=None):
    return plain(q, k, v, {scale}, causal, 0 if align == "top_left" else None)
"""


def test_hidden_nan_that_leaks_is_reported_and_not_failed(kernel):
    leaky = kernel(LEAKY.format(scale=None))
    (result,) = run(leaky, ("nan_hidden",))
    assert result.verdict == "skip" and "lets NaN through" in result.reason
    strict = foreign_probe.Facts(arrays="numpy", small=True, says={"nan_hidden": True})
    assert run(leaky, ("nan_hidden",), facts=strict)[0].verdict == "fail"
    # A finite number where NaN has to be is no leak, nor is a wrong number.
    swallows = kernel(
        "def attn(q, k, v, causal=False):\n    return tuple(map(np.nan_to_num, plain(q, k, v, None, causal)))"
    )
    assert run(swallows, ("nan_seen",))[0].verdict == "fail"


def test_options_refused_together_are_skipped(kernel):
    refusing = kernel("""
    def attn(q, k, v, causal=False, softcap=None):
        if causal and softcap: raise NotImplementedError("not both")
        return plain(q, k, v, None, causal)
    """)
    (result,) = run(refusing, ("softcap_causal",))
    assert (
        result.verdict == "skip" and result.reason == "refuses these options together (NotImplementedError: not both)"
    )


def test_gradients_of_a_function_beside_it(kernel):
    """By names, whatever their order; a wrong one fails, and so does one of a wrong shape."""
    source = """
    from refimpl import oracle
    def attn(q, k, v, causal=False, scale=None): return plain(q, k, v, scale, causal)
    def attn_backward({names}, causal=False, scale=None):
        dq, dk, dv, _ = oracle.attention_backward(q, k, v, do, causal=causal, scale=scale)
        return tuple(x.astype(q.dtype) for x in {returned})
    """
    cases = ("back_causal", "back_empty_rows", "back_gqa")
    right = kernel(source.format(names="do, q, k, v, out, softmax_lse", returned="(dq, dk, dv)"), backward=True)
    results = run(right, cases, ("fp32", "bf16"))
    assert [r.verdict for r in results] == ["pass"] * 6, [r.reason for r in results]
    assert all(set(r.outputs) == {"O", "lse", "dQ", "dK", "dV"} for r in results)
    wrong = kernel(source.format(names="q, k, v, do", returned="(dq, -dk, dv)"), backward=True)
    assert all("dK of case" in r.reason for r in run(wrong, cases))
    short = kernel(source.format(names="q, k, v, do", returned="(dq, dk)"), backward=True)
    assert "expected (dq, dk, dv)" in run(short, cases[:1])[0].reason


def test_arguments_that_go_by_position_alone(kernel):
    """Options among them too, and what is left out before one keeps its default."""
    source = """
    def attn(q, k, v, scale=None, causal=False, /):
        return plain(q, k, v, scale, causal)
    """
    assert [result.verdict for result in run(kernel(source), ("square", "causal"))] == ["pass", "pass"]


@pytest.mark.parametrize("factor, verdict", [("1.0", "pass"), ("1.1", "fail")])
def test_a_bias_gradient_in_the_shape_that_the_kernel_was_given(kernel, factor, verdict):
    """The bias is spread to (B, H, Nq, Nk) for it: its gradient is summed over what it was spread along."""
    source = f"""
    from refimpl import oracle

    def attn(q, k, v, bias=None):
        O, lse = oracle.attention(*(x.astype(float) for x in (q, k, v)), bias=bias)
        return O.astype(q.dtype), lse.astype(np.float32)

    def attn_backward(q, k, v, o, lse, do, /, bias=None):
        *grads, dbias = oracle.attention_backward(*(x.astype(float) for x in (q, k, v, do)), bias=bias)
        assert dbias.shape == bias.shape == (*q.shape[:3], k.shape[2])
        return *(g.astype(q.dtype) for g in grads), np.float32({factor} * dbias)
    """
    for result in run(kernel(source, backward=True), ("back_bias", "back_bias_keys")):
        assert result.verdict == verdict and result.outputs["dQ"].ok
        assert result.outputs["dbias"].ok == (verdict == "pass")


def test_an_array_of_a_kind_of_its_own_is_read_as_its_numbers(kernel, here):
    """Masked arrays have other reductions; a probe looks at the numbers."""
    source = "def attn(q, k, v): return np.ma.masked_less(plain(q, k, v)[0], 0)"
    assert probe(kernel(source)).failure == ""


def test_command_line(tmp_path, capsys, kernel):
    """Right: 0. Wrong: 1, and the report of the right one beside it is whole. Nothing run, or not even called: 2."""
    right = kernel("def attn(q, k, v, causal=False): return plain(q, k, v, None, causal)").text
    wrong = kernel("def attn(q, k, v, causal=False): return plain(q, k, v, None, causal, 1)").text
    options = ["--small", "--dtype", "fp32", "--cases", "square,causal,gqa,softcap,growth_3,one_tile-causal-normal"]
    assert main(["--kernel", right, *options]) == 0
    out = capsys.readouterr().out
    assert "attn: PASS. 5 of 5 runs passed, 1 skipped" in out
    assert "skip  does not take softcap: its signature has no softcap" in out
    assert main(["--kernel", wrong, "--kernel", right, *options, "--md", str(tmp_path / "card.md")]) == 1
    out = capsys.readouterr().out
    assert "attn: FAIL. 3 of 5 runs passed, 2 failed" in out and "attn: PASS. 5 of 5" in out
    assert "What all 2 failing runs have in common is causal masking" in out
    (place,) = re.findall(r"^Where, in ([\w-]+), fp32: ", out, re.MULTILINE)  # what is looked at is what is repeated
    again = f"again: python -m verify --kernel {wrong} --cases {place} --dtype fp32 --small --seed 0 --dump failing"
    assert again in out
    assert main(["--kernel", right, "--cases", "softcap", "--small"]) == 2
    assert "every run was skipped" in capsys.readouterr().err
    unread = kernel("def attn(q, k, v: pass").text
    assert main(["--kernel", unread, *options]) == main(["--kernel", right, "--kernel", unread, *options]) == 2
    assert main(["--kernel", wrong, "--kernel", unread, *options]) == 1
    assert "could not be judged: SyntaxError" in capsys.readouterr().out.lower().replace("syntaxerror", "SyntaxError")


def test_refused_runs_are_never_passes(kernel, here):
    facts = probe(kernel("def attn(q, k, v): return plain(q, k, v)"), tuple(DEFAULT), ("fp32",))
    results = run(kernel("def attn(q, k, v): return plain(q, k, v)"), tuple(DEFAULT), facts=facts)
    counts = Counter(r.verdict for r in results)
    assert counts["skip"] == sum(facts.refuses(case, "fp32") is not None for case in DEFAULT.values()) + _leaks(results)
    assert counts["fail"] == counts["error"] == 0 and counts["pass"] > 15


def _leaks(results):
    return sum("lets NaN through" in r.reason for r in results)


def test_imports_decide_the_kind_of_arrays(tmp_path):
    for text, kind in {
        "import numpy": "numpy",
        "from numba import njit": "numpy",
        "from numba import cuda": "numba",
        "import numba.cuda as nc": "numba",
        "import cupy as cp": "cupy",
        "def f():\n  import torch.nn": "torch",
        "import jax.numpy as jnp": "jax",
        "import torch, numba": "torch",
    }.items():
        path = tmp_path / "k.py"
        path.write_text(text)
        assert foreign._arrays(Spec(str(path)), {})[0] == kind, text
    assert foreign._arrays(Spec(str(path), arrays="numpy"), {}) == ("numpy", "asked for")


def test_a_path_with_a_drive_and_one_without_a_function():
    assert Spec(r"C:\k.py:attn").path.name.endswith("k.py") and Spec(r"C:\k.py:attn").function == "attn"
    assert Spec("a/k.py").function is None and Spec("a/k.py").name == "k.py"
    assert Spec("sdpa:math").adapter and Spec("sdpa:math").name == "sdpa:math"


def test_what_it_returns_beside_lse_is_ignored_with_a_note(kernel):
    spec = kernel("def attn(q, k, v): return plain(q, k, v)[0], None, 5")
    facts = foreign_probe.Facts(arrays="numpy", small=True)
    plan = foreign_run.Plan(spec, facts, (DEFAULT["square"],), ("fp32",))
    (one,) = foreign_run.run(plan)
    assert one.result.verdict == "pass" and set(one.result.outputs) == {"O"}
    assert one.notes == (
        "O alone is returned: lse is not judged",
        "of 3 things returned, those after (O, lse) are ignored",
    )
    assert np.isfinite(one.result.ratio)



MEANS = """
def attn(q, k, v, causal=False, scale=None):
    O, lse = plain(q, k, v, scale, causal)
    return np.where(np.isneginf(lse)[..., None], v.mean(2, keepdims=True), O * {factor}).astype(q.dtype)
def attn_backward(q, k, v, do, causal=False, scale=None): return q, k, v
"""


def test_rows_without_keys_are_left_out_if_the_kernel_says_so(kernel):
    """Not without its word; other rows are judged as ever; gradients hold what these rows hand back."""
    facts = foreign_probe.Facts(arrays="numpy", small=True, says={"empty_rows": False})
    right, wrong = (kernel(MEANS.format(factor=factor)) for factor in ("np.float32(1)", "np.float32(1.01)"))
    (told,) = run(right, ("empty_rows",))
    assert told.verdict == "fail" and "say 'empty_rows': False" in told.reason
    assert [r.verdict for r in run(right, ("empty_rows", "causal"), facts=facts)] == ["pass", "pass"]
    (told,) = run(wrong, ("empty_rows",), facts=facts)
    assert told.verdict == "fail" and "empty_rows'" not in told.reason
    backward = kernel(MEANS.format(factor="np.float32(1)"), backward=True)
    assert [r.verdict for r in run(backward, ("back_empty_rows",), facts=facts)] == ["skip"]
    assert [r.verdict for r in run(right, ("no_keys",), facts=facts)] == ["skip"]  # no row would be judged


def test_a_refusal_of_one_case_is_no_accident(kernel):
    """NotImplementedError says so; another exception has no excuse there."""
    for error, verdict in {"NotImplementedError": "skip", "RuntimeError": "error"}.items():
        refusing = kernel(f"""
        def attn(q, k, v):
            if k.shape[2] == 1: raise {error}("one key")
            return plain(q, k, v)
        """)
        assert [r.verdict for r in run(refusing, ("one_key", "square"))] == [verdict, "pass"]


def test_negative_scales_and_odd_addresses_may_be_refused(kernel):
    """A word in CAPABILITIES each; without it a failure says which."""
    naive = "def attn(q, k, v, scale=None): return plain(q, k, v, abs(scale or q.shape[-1] ** -0.5))"
    cases = ("negative_scale", "offset_view", "square")
    (told,) = run(kernel(naive), ("negative_scale",))
    assert told.verdict == "fail" and "say 'negative_scale': False" in told.reason
    says = "CAPABILITIES = {'negative_scale': False, 'unaligned': False}\n"
    facts = probe(kernel(says + naive), cases)
    assert [bool(facts.refuses(DEFAULT[name], "fp32")) for name in cases] == [True, True, False]
