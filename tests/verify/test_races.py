"""Looking for races: each check sees the race that it is for, and a kernel without one passes."""

import json
import os
import stat

import ml_dtypes
import numpy as np
import pytest

from verify import barriers, executors, races, sanitizer
from verify.__main__ import main

STEP = "flash_cuda.step3_flash_v2"
HERE = pytest.mark.skipif(executors.gpu_missing() is None, reason="a GPU answers: what cannot run without one can here")


def test_bits_are_compared_not_values():
    x = {"O": np.array([[0.0, np.nan, 1.0]], np.float16)}
    assert races.difference(x, {"O": x["O"].copy()}) is None
    y = {"O": np.array([[-0.0, np.nan, 1.0]], np.float16)}
    assert races.difference(x, y) == "O[0, 0] is -0.0, was 0.0; 1 of 3 differ"
    y = {"O": np.array([[0.0, np.nan, 1.001]], np.float16)}
    assert races.difference(x, y).startswith("O[0, 2] is 1.0009765625")
    bits = np.array([1, 2], np.uint16).view(ml_dtypes.bfloat16)
    assert races.difference({"lse": bits}, {"lse": bits[::-1].copy()})
    assert races.difference({"lse": bits}, {"lse": bits}) is None
    assert races.difference({"O": np.zeros((0, 3))}, {"O": np.zeros((0, 3))}) is None


def test_every_order_gives_the_same_bits():
    assert races.orders("step3_flash_v2", "causal_113x203", "fp16") is None


@pytest.mark.parametrize("k", range(barriers.barriers(STEP)))
def test_a_missing_barrier_is_seen_and_changes_bits(k):
    """Both by the watch and by the numbers of other orders: the orders are other orders."""
    seen = races.seen_without("step3_flash_v2", ["causal_113x203"], "fp16", STEP, k, "emulated")
    assert seen["watched"].split(":")[0] in ("Race", "UninitialisedRead")
    assert seen["bits, emulated"].startswith("run ")


@pytest.mark.parametrize("kernel, module, k, case", [
    ("step5_tensor_core", "step5_tensor_core", 1, "one_tile"), ("general", "general", 0, "dead_keys"),
    ("step5_tensor_core", "parts.tensor_rule_ops", 0, "dead_keys"),
])  # fmt: skip
def test_a_barrier_that_is_seldom_the_only_one_has_its_case(kernel, module, k, case):
    """No ordinary case needs it; the first of the tight ones that does says so."""
    cases = [c for c in races.cases_of(kernel, "fp16", tight=True) if not races.case_of(c).backward]
    seen = races.seen_without(kernel, cases, "fp16", f"flash_cuda.{module}", k, "emulated")
    assert seen["case"] == case and seen["watched"].startswith("Race")


def test_only_the_asked_barrier_is_gone():
    from inspect import getsource

    import flash_cuda.step3_flash_v2 as shipped

    assert barriers.barriers(STEP) == getsource(shipped).count("cuda.syncthreads()") == 4
    with pytest.raises(IndexError):
        barriers.without(STEP, 4)
    assert barriers.without(STEP, 0).load(STEP).make_kernel is not shipped.make_kernel
    assert barriers.barriers(STEP) == 4  # the module itself is as it was


def test_a_delayed_kernel_stalls_at_both_sides_of_every_barrier_and_computes_the_same():
    places = []
    copies = barriers.delayed([STEP], 0, stall=lambda module, site: places.append(site))
    shipped = races._run("step3_flash_v2", "causal_113x203", "fp16", "emulated")
    slow = races._run("step3_flash_v2", "causal_113x203", "fp16", "emulated", load=copies.load)
    assert races.difference(shipped, slow) is None
    assert set(places) == set(range(8)) and places.count(0) == places.count(1)


def test_a_delayed_kernel_sleeps_wherever_its_barriers_were_written():
    """Also in the modules that its own import: the Hopper backward, rules on tensor cores."""
    places = set()
    modules = races.modules_of("step5_tensor_core")
    copies = barriers.delayed(modules, 0, stall=lambda module, site: places.add((modules[module], site)))
    for case in ("window_both", "back_window_softcap"):
        wanted = races._run("step5_tensor_core", case, "fp16", "emulated")
        slow = races._run("step5_tensor_core", case, "fp16", "emulated", load=copies.load)
        assert races.difference(wanted, slow) is None
    slept = {module for module, _ in places}
    assert slept == races.launched("step5_tensor_core", "back_window_softcap", "fp16") & set(modules)
    assert "flash_cuda.backward_hopper_kernels" in races.modules_of("step6_flash_v3")


class CudaAPIError(RuntimeError):
    """As numba's, after which a process launches nothing more."""


def test_a_fault_of_the_device_ends_its_process(monkeypatch):
    """In words it would fail every later case of the kernel: the worker has to go, and the pool sees to that."""
    def runs(error):
        yield {"O": np.zeros(2)}
        raise error

    assert races._compare(runs(ValueError("no\nmore"))) == "ValueError: no"
    with pytest.raises(CudaAPIError):
        races._compare(runs(CudaAPIError("[700] an illegal address")))
    assert races._compare(runs(CudaAPIError("[700]")), survives=True) == "CudaAPIError: [700]"
    whole = {"O": np.ones(2)}
    assert races._compare([{"O": np.zeros(2)}], whole) == "run 1: O[0] is 0.0, was 1.0; 2 of 2 differ"
    monkeypatch.setattr(races, "_run", lambda *call, **how: next(runs(None)) if how else _fails())
    with pytest.raises(ValueError, match="whole"):  # the kernel itself: no barrier's absence is seen in that
        races._seen_on_gpu("step4_causal", "gqa", "fp16", "flash_cuda.step4_causal", 0)


def _fails():
    raise ValueError("the whole kernel fails")


def test_a_fault_without_a_barrier_is_seen_and_ends_the_looking(monkeypatch):
    def run(kernel, case, dtype, kind, load=None):
        if load:
            raise CudaAPIError("[700] an illegal address")
        return {"O": np.zeros(2)}

    monkeypatch.setattr(races, "_run", run)
    seen = races._seen_on_gpu("step4_causal", "gqa", "fp16", STEP, 0)
    assert seen == {"repeats": "CudaAPIError: [700] an illegal address", "delays": None}


def test_every_barrier_belongs_to_a_kernel_that_a_case_launches():
    """A module whose barriers no case comes by would never be looked at."""
    waiting = set().union(*map(races.modules_of, races.CUDA))
    seen = {module for kernel in races.CUDA for case in races.cases_of(kernel, "fp16")
            for module in races.launched(kernel, case, "fp16")}  # fmt: skip
    assert waiting - seen == set()


@pytest.mark.slow
def test_a_delayed_kernel_sleeps_on_a_gpu():
    """In the PTX, once at each place."""
    pytest.importorskip("cuda.bindings.nvvm", reason="no NVVM: install the dev extra")
    from flash_cuda.executors import assembler
    from refimpl.tiling import Tile

    class Kept(assembler.Assembler):
        def launch(self, body, blocks, threads, args, **more):
            types = tuple(assembler.numba_type(a) for a in args)
            ((_, self.ptx),) = assembler.assemble(body, types, self.ccs).values()

    on, x = Kept("sm_80"), np.zeros((1, 1, 32, 16), np.float16)
    barriers.delayed([STEP], 1).load(STEP).attention(x, x, x, on=on, tile=Tile(16, 16), threads=(4, 8))
    assert on.ptx.count("nanosleep.u32") == 2 * barriers.barriers(STEP)


def test_what_waits():
    """Barriers, and waits for copies; what merely is asynchronous or waits inside one thread does not."""
    yes = ("syncthreads", "cp_async_wait", "mbarrier_arrive", "barrier_wait", "named_barrier_sync", "wait")
    no = ("cp_async_16", "cp_async_commit", "await_nothing", "sync_weights")
    assert all(barriers.WAITS.search(name) for name in yes) and not any(barriers.WAITS.search(name) for name in no)


CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
HAZARD = "========= Error: Race reported between Write access at x\n========= RACECHECK SUMMARY: 1 hazard displayed\n"


def test_a_sanitizers_words():
    assert sanitizer.verdict_of(0, CLEAN) is None
    assert sanitizer.verdict_of(0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n") is None
    assert sanitizer.verdict_of(9, HAZARD).startswith("Error: Race reported between Write access at x; RACECHECK SUMM")
    assert sanitizer.verdict_of(0, "nothing of the kind") == "no summary (exit status 0)"
    assert "exit status 1" in sanitizer.verdict_of(1, CLEAN)  # the program under it failed
    assert sanitizer.verdict_of(9, "========= ERROR SUMMARY: 10 errors\n")


@pytest.mark.skipif(os.name != "posix", reason="the stand-in is a shell script")
def test_a_sanitizer_is_found_and_asked(monkeypatch, tmp_path):
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "words").write_text(HAZARD)
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat {tmp_path}/words\nexit 9\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert sanitizer.program() == str(program)
    assert "1 hazard" in sanitizer.sanitize("step4_causal", "gqa", "fp16", "racecheck")
    asked = (tmp_path / "asked").read_text()
    assert "--tool racecheck --error-exitcode 9" in asked and "sanitizer.small('step4_causal', 'gqa', 'fp16')" in asked


@pytest.fixture
def in_process(monkeypatch):
    """The command with its workers' work done here, so that tests can change it."""
    from importlib import import_module

    def each(function, calls, **how):
        module, name = function.split(":")
        return [(getattr(import_module(module), name)(*arguments), None) for arguments in calls]

    monkeypatch.setattr("verify.commands.races.each", each)


@HERE
def test_the_command_says_what_it_could_not_run(in_process, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(races, "CASES", ("gqa",))
    monkeypatch.setattr(races, "SEEDS", 1)
    target = tmp_path / "found.json"
    assert main(["races", "--kernels", "step4_causal", "--json", str(target)]) == 0
    out = capsys.readouterr().out
    assert "1/1" in out and "not run: delays (warps asleep at barriers" in out and "not run: compute-sanitizer" in out
    rows = json.loads(target.read_text())
    assert [row["check"] for row in rows if not row["skipped"]] == ["orders"] and len(rows) == 4 + len(sanitizer.TOOLS)


@HERE
def test_a_difference_is_exit_1(in_process, monkeypatch, capsys):
    monkeypatch.setattr(races, "CASES", ("gqa",))
    monkeypatch.setattr(races, "orders", lambda *call: "run 3: O[0] is 1.0, was 2.0")
    assert main(["races", "--kernels", "step4_causal"]) == 1
    assert "FAIL  step4_causal fp16 gqa orders: run 3: O[0] is 1.0, was 2.0" in capsys.readouterr().out


@HERE
def test_the_self_test_fails_if_nobody_sees_that_a_barrier_is_gone(in_process, monkeypatch, capsys):
    seen = {"watched": None, "bits, emulated": None, "case": "gqa"}
    first = {"watched": None, "bits, emulated": "run 1: O", "case": "gqa"}
    monkeypatch.setattr(races, "seen_without", lambda *call: dict(seen if call[4] else first))
    assert main(["races", "--kernels", "step4_causal", "--self-test"]) == 1
    out = capsys.readouterr().out
    assert out.count("no check sees that this barrier is gone") == 3 and "other bits" in out
    watched = {"watched": "Race: x", "bits, emulated": None, "case": "gqa"}
    monkeypatch.setattr(races, "seen_without", lambda *call: dict(watched))
    assert main(["races", "--kernels", "step4_causal", "--self-test"]) == 0


def test_misuse(capsys):
    assert main(["races", "--kernels", "oracle"]) == 2
    assert "--kernels: there is no kernel 'oracle'" in capsys.readouterr().err
    assert main(["races", "--kernels", "step4_causal", "--self-test", "--dtype", "fp16,bf16"]) == 2
    assert "--dtype: the self-test takes one" in capsys.readouterr().err
    assert main(["races", "--kernels", "step4_causal", "--dtype", "fp64"]) == 2
    assert "--dtype: none of these kernels stores fp64" in capsys.readouterr().err


def test_small_shapes_are_fitted_to_the_kernel():
    """Every case that a kernel takes at full size runs emulated, whatever its small head dims are."""
    for kernel in (name for name in races.CUDA if name.startswith("step")):
        entry = races.CUDA[kernel]
        for case in races.cases_of(kernel, "fp16"):
            s = entry.fitted(races.DEFAULT[case]).small
            assert entry.lacks(races.DEFAULT[case].needs, "fp16", s.d, s.dv) is None, (kernel, case)


def test_a_program_that_fails_under_the_sanitizer_is_quoted():
    told = sanitizer.verdict_of(1, CLEAN + "Traceback:\nValueError: V: expected a head dim\n")
    assert told.startswith("ValueError: V: expected a head dim")
