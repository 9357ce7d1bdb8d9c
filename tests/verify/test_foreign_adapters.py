"""Adapters: attention as others ship it is judged under its own conventions, where it is installed."""

import pytest

from verify.cases import DEFAULT
from verify.foreign import adapters
from verify.foreign import probe as foreign_probe
from verify.foreign import run as foreign_run
from verify.foreign import spec as foreign
from verify.foreign.spec import Spec
from verify.misuse import Misuse

CASES = ("square", "gqa", "causal", "causal_top_left", "dv_not_d", "negative_scale", "mask", "bias", "back_square")
TUTORIAL = """
import torch

class _attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, sm_scale{extra}):
        {check}
        assert causal in (True, False) and q.shape[1] == k.shape[1]
        s = q.float() @ k.float().transpose(-1, -2) * sm_scale
        if causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
        return (s.softmax(-1) @ v.float()).to(q.dtype)

attention = _attention.apply
"""


def results(spec, cases, dtypes=("fp32", "bf16")):
    """Facts, and verdicts by (case, dtype), run in this process."""
    chosen = [DEFAULT[name] for name in cases]
    facts = foreign_probe.probe(spec, chosen, dtypes, small=True)
    assert not facts.failure, facts.failure
    plan = foreign_run.Plan(spec, facts, tuple(chosen), dtypes, jobs=1)
    return facts, {(r.result.case, r.result.dtype): r.result for r in foreign_run.run(plan)}


def test_names_are_checked_before_anything_runs(monkeypatch):
    for text, said in {
        "sdpa": "expected sdpa:math|flash|cudnn|efficient, got 'sdpa'",
        "flash-attn:2": "expected flash-attn alone, got 'flash-attn:2'",
        "triton-tutorial": "there is no file ''",
    }.items():
        with pytest.raises(Misuse, match=said.replace("|", r"\|")):
            foreign.parse(text)
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    with pytest.raises(Misuse, match="sdpa needs torch, which is not installed"):
        foreign.parse("sdpa:math")


def test_sdpa_passes_and_is_judged_as_it_aligns():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    facts, judged = results(foreign.parse("sdpa:math", backward=True), CASES)
    assert facts.gradients == "autograd" and "bottom_right" in facts.refused
    assert {key: r.verdict for key, r in judged.items() if r.verdict != "pass"} == {}
    assert {"dQ", "dK", "dV"} <= judged["back_square", "fp32"].outputs.keys()


def test_a_back_end_that_is_not_there_says_so():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if torch.cuda.is_available():
        pytest.skip("cuDNN's back end is there")
    facts = foreign_probe.probe(foreign.parse("sdpa:cudnn"), [DEFAULT["square"]], ("fp16",), small=True)
    assert "RuntimeError" in facts.failure


@pytest.mark.parametrize("extra", ("", ", warp_specialize"))
def test_tritons_tutorial_signature(tmp_path, extra):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    check = "assert warp_specialize is False" if extra else "pass"
    path = tmp_path / "06-fused-attention.py"
    path.write_text(TUTORIAL.format(extra=extra, check=check))
    facts, judged = results(Spec(f"triton-tutorial:{path}"), ("square", "causal", "negative_scale", "gqa"))
    assert facts.options == ("causal", "sm_scale") and judged["gqa", "fp32"].verdict == "skip"
    assert all(r.verdict == "pass" for (case, _), r in judged.items() if case != "gqa")


def test_a_tutorial_without_attention_says_so(tmp_path):
    path = tmp_path / "other.py"
    path.write_text("x = 1")
    with pytest.raises(ValueError, match=r"other\.py has no function 'attention', which Triton's tutorial has"):
        foreign.load(Spec(f"triton-tutorial:{path}"))
