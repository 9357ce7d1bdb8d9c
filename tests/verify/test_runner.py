"""Whatever a kernel does to its process, the run goes on, and every combination gets a result with a reason."""

import itertools
import json

import numpy as np
import pytest

from verify import calls, document, runner
from verify.pool import each
from verify.registry import KERNELS, REFERENCES, Kernel
from verify.worker import Worker, WorkerDied

MISBEHAVING = """
import os, signal, sys, time
import numpy as np
from refimpl import step3_flash_v2

def correct(Q, K, V, dtype=None, **options):
    return step3_flash_v2.attention(Q, K, V, **options, dtype=dtype)

def attention(Q, K, V, **options):
    N = Q.shape[2]
    if N == 4:  # the hand case
        print("about to die", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if N == 1:
        time.sleep(60)
    if N == 15:
        raise ValueError("scale: not today\\nsecond line")
    if N == 16:
        options["scale"] = -1 / np.sqrt(Q.shape[3])  # one wrong sign
    return correct(Q, K, V, **options)

def end(status):
    sys.exit(status)

def add(a, b):
    return a + b

def fail(a, b):
    raise KeyError("no such thing")
"""
CASES = ("hand", "square", "one_token", "tile_less_1", "tile", "gqa")


@pytest.fixture
def misbehaving(tmp_path, monkeypatch):
    """A module that the worker processes can import, too: they are given this process's sys.path."""
    (tmp_path / "misbehaving.py").write_text(MISBEHAVING)
    monkeypatch.syspath_prepend(str(tmp_path))
    return Kernel("bad", "-", "-", "misbehaving", runs="numpy", dtypes=("fp32",))


def test_a_run_outlives_its_kernels_and_lists_every_combination(misbehaving):
    good = REFERENCES["refimpl.step3_flash_v2"]
    plan = runner.Plan((misbehaving, good), CASES, ("fp32", "fp16"), limit=3.0, jobs=2)
    seen = []
    results = runner.run(plan, lambda done, total: seen.append((done, total)))
    assert [(r.kernel, r.case, r.dtype) for r in results] == [
        (k, c, t) for k, t, c in itertools.product(("bad", good.name), ("fp32", "fp16"), CASES)
    ]
    assert all(r.verdict == "pass" and not r.reason for r in results if r.kernel == good.name)
    bad = {r.case: r for r in results if r.kernel == "bad" and r.dtype == "fp32"}
    assert bad["hand"].verdict == "error"
    assert bad["hand"].reason == "the worker process died (SIGSEGV): about to die"
    assert bad["one_token"].verdict == "error" and bad["one_token"].reason == "no answer within 3 s"
    assert bad["tile_less_1"].verdict == "error" and bad["tile_less_1"].reason == "ValueError: scale: not today"
    assert bad["tile"].verdict == "fail" and "O of case tile at [0, " in bad["tile"].reason
    assert bad["square"].verdict == bad["gqa"].verdict == "pass"
    skipped = [r for r in results if r.kernel == "bad" and r.dtype == "fp16"]
    assert all(r.verdict == "skip" and r.reason == "stores fp32, not fp16" and not r.outputs for r in skipped)
    assert seen[0] == (len(CASES), 24) and seen[-1] == (24, 24)


def test_a_wrong_sign_in_a_kernel_fails_and_is_named(misbehaving):
    (result,) = runner.run(runner.Plan((misbehaving,), ("tile",), ("fp32",)))
    m = result.outputs["O"]
    assert result.verdict == "fail" and str(list(m.worst_index)) in result.reason and m.share_out > 0.9


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_a_kernel_of_the_ladder_runs_emulated(dtype, tmp_path):
    """One small case through the whole path, with its arrays dumped."""
    kernel = KERNELS["step4_causal"]
    plan = runner.Plan((kernel,), ("tile_plus_1",), (dtype,), seed=7, dump=str(tmp_path / "out"))
    (result,) = runner.run(plan)
    assert result.verdict == "pass", result.reason
    assert (result.executor, result.tile, result.seed) == ("emulated", [16, 16], 7)
    assert result.size == {"B": 1, "Hq": 2, "Hk": 2, "Nq": 17, "Nk": 17, "d": 8, "dv": 8}
    (path,) = (tmp_path / "out").iterdir()
    with np.load(path) as arrays:
        assert path.name == f"step4_causal-tile_plus_1-{dtype}.npz"
        assert set(arrays) == {"Q", "K", "V", "O", "lse", "O_truth", "lse_truth", "O_plain", "lse_plain"}
        assert np.abs(arrays["O"] - arrays["O_truth"]).max() == result.outputs["O"].max_abs


@pytest.mark.parametrize("wrong", [None, 0, 1])
def test_every_way_to_the_gradients_is_judged(monkeypatch, tmp_path, wrong):
    """One way that is wrong fails the run, and is named; its dK is what is dumped."""
    kernel, original = KERNELS["step5_tensor_core"], calls.runs

    def runs(*given, ways):
        for k, outputs in enumerate(original(*given, ways=ways)):
            yield outputs | {"dK": outputs["dK"] * np.float16(1 + (k == wrong))}

    monkeypatch.setattr(calls, "runs", runs)
    plan = runner.Plan((kernel,), ("back_gqa",), ("fp16",), dump=str(tmp_path / "out"))
    result = runner.run_one(plan, plan.keys[0], str(tmp_path))
    assert set(result.outputs) == {"O", "lse", "dQ", "dK", "dV"} and result.tile == [16, 16]
    assert result.verdict == ("pass" if wrong is None else "fail")
    if wrong is not None:
        assert result.reason.startswith("dK of case") and result.reason.endswith(f"(deterministic={bool(wrong)})")
    (path,) = (tmp_path / "out").iterdir()
    with np.load(path) as arrays:
        assert np.abs(arrays["dK"] - arrays["dK_truth"]).max() == result.outputs["dK"].max_abs


def test_results_of_a_document_are_the_results(misbehaving):
    results = runner.run(runner.Plan((misbehaving,), ("tile", "square"), ("fp32", "fp16")))
    made = json.loads(json.dumps(document.build(results, "emulated"), allow_nan=False))
    assert document.results_of(made) == results
    assert made["counts"] == {"pass": 1, "fail": 1, "error": 0, "skip": 2}
    assert made["kind"] == "verify" and made["packages"]["numpy"] == np.__version__


def test_worker_starts_again_after_death(misbehaving):
    with Worker() as worker:
        assert worker.call("misbehaving:add", 1, 2, limit=10) == 3
        with pytest.raises(WorkerDied, match=r"the worker process died \(exit status 3\)"):
            worker.call("misbehaving:end", 3, limit=10)
        assert worker.call("misbehaving:add", 3, 4, limit=10) == 7
        with pytest.raises(RuntimeError, match="KeyError: 'no such thing'") as caught:
            worker.call("misbehaving:fail", 1, 2, limit=10)
        assert "Traceback" in caught.value.__notes__[0]
        assert worker.call("misbehaving:add", 5, 6, limit=10) == 11


def test_each_answers_in_order_and_a_process_serves_one_group(misbehaving):
    calls = [(k, k) for k in range(7)]
    answers = each("misbehaving:add", calls, limit=10, jobs=2)
    assert answers == [(2 * k, None) for k in range(7)]
    groups = ["a", "b"] * 4
    pids = each("os:getpid", [()] * 8, limit=10, jobs=2, groups=groups)
    assert not {pid for (pid, _), g in zip(pids, groups, strict=True) if g == "a"} & {
        pid for (pid, _), g in zip(pids, groups, strict=True) if g == "b"
    }
