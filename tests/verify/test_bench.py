"""`verify bench` on a simulated GPU: everything but the device's clock is the real thing."""

import json
import os

import numpy as np
import pytest
from helpers_bench import RATES, bench, contenders, gpu_with, truth_of

from verify import document
from verify.__main__ import main
from verify.bench import check as bench_check
from verify.bench import machine, start
from verify.bench import points as bench_points
from verify.bench import record as bench_record
from verify.bench import suite as bench_suite
from verify.bench.limits import Ceiling
from verify.bench.points import Point
from verify.bench.simulated import Device
from verify.bench.stats import paired

ALL = tuple(RATES)
POINT = Point("forward", 2, 2, 64, 16, "fp16", False)
BIG = Point("forward", 1, 4, 8192, 64, "fp16", False)  # runs for milliseconds: rates far above launches


def rows_of(made, point=POINT):
    return {row["name"]: row for row in made.measure(point)}


def test_ratios_are_the_true_ones(monkeypatch):
    """Rates put into the simulation come out of the rows, whatever the device's clock does meanwhile."""
    device = Device(seed=3, scatter=0.02, outliers=0.05, drift=lambda ms: 1.3 + 0.3 * np.sin(ms / 150))
    made = bench(monkeypatch, ALL[:2], ALL[2:], device, rounds=30)
    rows = rows_of(made, Point("forward", 64, 16, 256, 16, "fp16", True))
    found = paired(rows["step6_flash_v3"]["ms"], rows["sdpa_cudnn"]["ms"])
    true = RATES["step6_flash_v3"] / RATES["sdpa_cudnn"]
    assert found.low < true < found.high and found.high - found.low < 0.05 and found.rounds == 30


def test_what_a_row_says(monkeypatch):
    """Times, rates, shares, launch, clocks; all from the runs that are in it."""
    row = rows_of(bench(monkeypatch, ("step6_flash_v3",), ()))["step6_flash_v3"]
    assert len(row["ms"]) == 24 and row["min_ms"] == min(row["ms"])
    assert row["median_ms"] == pytest.approx(np.median(row["ms"]), abs=1e-5)
    assert row["p90_ms"] == pytest.approx(np.percentile(row["ms"], 90), abs=1e-5)
    work = POINT.work
    assert row["tflops"] == pytest.approx(work.flops / row["median_ms"] / 1e9, abs=0.01)
    assert row["gb_per_s"] == pytest.approx((work.read + work.written) / row["median_ms"] / 1e6, abs=0.1)
    assert row["of_measured"]["tflops"] == pytest.approx(row["tflops"] / 700, abs=1e-3)
    assert row["of_datasheet"]["gb_per_s"] == pytest.approx(row["gb_per_s"] / 4800, abs=1e-3)
    assert row["latency_us"] == pytest.approx(4.0) and row["state"]["before"]["sm_mhz"] == 1755.0
    assert row["rmse"] > 0 and row["fingerprint"] == "of step6_flash_v3"


def test_wrong_and_broken_kernels_are_not_timed(monkeypatch):
    """They cost nobody else a time, and say what happened in one line."""
    made = bench(monkeypatch, ALL[:2], ALL[2:], wrong=("step6_flash_v3",), broken=("sdpa_flash",))
    rows = rows_of(made)
    assert rows["step6_flash_v3"]["not_measured"].startswith("wrong: RMSE 1 on sampled rows")
    assert rows["sdpa_flash"]["not_measured"] == "RuntimeError: sdpa_flash: an illegal address"
    assert "ms" in rows["step5_tensor_core"] and "ms" in rows["sdpa_cudnn"]


def test_a_time_that_cannot_be_true_is_refused(monkeypatch):
    """Faster than the tensor cores: no time, no rate, no ratio; the others keep theirs."""
    made = bench(monkeypatch, ALL[:2], (), rates={**RATES, "step6_flash_v3": 1200e9}, slow=1)
    rows = rows_of(made, BIG)
    assert "TFLOP/s; the machine has 1,070" in rows["step6_flash_v3"]["refused"]
    assert not {"ms", "median_ms", "tflops"} & rows["step6_flash_v3"].keys() and "ms" in rows["step5_tensor_core"]
    honest = bench(monkeypatch, ALL[:2], (), rates={**RATES, "step6_flash_v3": 900e9}, slow=1)
    assert "ms" in rows_of(honest, BIG)["step6_flash_v3"]


def test_a_slow_contender_takes_part_in_fewer_rounds(monkeypatch):
    """It cannot eat up the others' time, and its ratio is from the rounds that both took part in."""
    rates = {"step6_flash_v3": 600e9, "sdpa_math": 2e9}
    made = bench(monkeypatch, ("step6_flash_v3",), ("sdpa_math",), rates=rates, slow=1, seconds=1)
    rows = rows_of(made, Point("forward", 1, 16, 4096, 64, "fp16", False))
    assert len(rows["step6_flash_v3"]["ms"]) == 24 and 6 <= len(rows["sdpa_math"]["ms"]) < 24
    assert paired(rows["step6_flash_v3"]["ms"], rows["sdpa_math"]["ms"]).rounds == len(rows["sdpa_math"]["ms"])
    assert rows["sdpa_math"]["warm_ms"] is None and rows["step6_flash_v3"]["warm_ms"] > 0


def test_a_record_is_json_with_a_row_a_line(monkeypatch):
    made = bench(monkeypatch, ALL[:2], ALL[2:])
    record = made.record("times", made.measure(POINT))
    text = document.lines(record, "rows")
    assert json.loads(text) == json.loads(json.dumps(record))
    assert len([line for line in text.splitlines() if '"median_ms"' in line]) == 4
    assert json.loads(document.lines({**record, "rows": []}, "rows"))["rows"] == []
    assert record["peers"]["flash_attn_3"].startswith("not measured: ")
    assert record["ceilings"]["datasheet"]["tflops"] == 989.4 and record["protocol"]["rounds"] == 24


def test_merging_replaces_whole_points_of_one_machine_only():
    def record(device, ms, **points):
        rows = [{**dict(zip(bench_record.KEY, ("forward", "fp16", False, 64, N, 1, 1), strict=True)), "name": name,
                 "ms": ms} for N, names in points.items() for name in names]  # fmt: skip
        return {"device": device, "rows": rows}

    older = record("H200", [1.0], a=("ours", "theirs"), b=("ours", "theirs"))
    both = bench_record.merged(record("H200", [2.0], b=("ours",)), older)
    assert {(r["N"], r["name"], r["ms"][0]) for r in both["rows"]} == {
        ("a", "ours", 1.0), ("a", "theirs", 1.0), ("b", "ours", 2.0)}  # fmt: skip
    assert bench_record.merged(record("A100", [2.0], b=("ours",)), older)["rows"][0]["N"] == "b"
    assert len(bench_record.merged(record("A100", [2.0], b=("ours",)), older)["rows"]) == 1


def test_inputs_of_equal_size_share_their_memory():
    made = []

    def upload(host, kept):
        if "memory" not in kept:
            kept["memory"] = host.reshape(-1)
            made.append(host.size)
        return kept["memory"].reshape(host.shape)

    inputs = bench_points.Inputs(upload)
    short, long = (Point("forward", 8 // n, 2, n * 16, 16, "bf16", False) for n in (1, 4))
    first, second = inputs.device(short), inputs.device(long)
    assert len(made) == 3 and second["Q"].shape == (2, 2, 64, 16) and "dO" not in first
    assert (first["Q"].reshape(-1) == second["Q"].reshape(-1)).all()
    assert not (first["Q"] == first["K"]).all() and inputs.host(short)["Q"].dtype == "bfloat16"


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_kernel_is_checked_and_launched_again(monkeypatch, direction, causal, dtype):
    """`bench_points.kernel` with the emulator in the GPU's place: what is replayed is one pass and nothing else."""
    from flash_cuda.executors import gpu
    from flash_cuda.executors.emulator import Emulator

    class Replaying(Emulator):
        def __init__(self):
            super().__init__()
            self.launched = []

        def launch(self, body, blocks, threads, args, **more):
            super().launch(body, blocks, threads, args, **more)
            self.launched.append((body.__name__, blocks, threads, args))

        def replay(self):
            replayed.extend(name for name, *_ in self.launched)

    replayed = []
    monkeypatch.setattr(gpu, "Gpu", Replaying)
    monkeypatch.setattr(bench_points, "_faced", lambda array, dtype: array)
    point = Point(direction, 1, 1, 16, 4, dtype, causal)
    inputs = bench_points.Inputs(upload=lambda host, kept: host)
    truth = bench_check.Truth(point, inputs.host(point))
    found, _ = bench_points.contenders(point, ["general", "step3_flash_v2"], [], inputs.device(point))
    general = found[0]
    general.work()
    outputs = general.outputs()
    assert truth.wrong(truth.rmse(outputs)) is None
    assert list(truth.exact) == (["O"] if direction == "forward" else ["dQ", "dK", "dV"])
    for name in truth.exact:
        for off in (1.05 * outputs[name], np.full_like(outputs[name], np.nan)):
            assert f"on sampled rows of {name}, " in truth.wrong(truth.rmse(outputs | {name: off}))
    general.work()
    assert replayed == (["general"] if direction == "forward" else ["backward_rows", "backward_atomic", "round_sums"])
    assert len(general.facts["fingerprint"]) == 12 and general.facts["tile"] == [64, 32]


@pytest.mark.parametrize("N", [1, 2, 3, 32, 33, 1024, 16384])
def test_first_and_last_row_are_checked(N):
    _, rows = bench_check.sample(Point("forward", 1, 1, N, 16, "fp16", True))
    wanted = min(N, bench_check.MOST_ROWS, max(bench_check.LEAST_ROWS, bench_check.PAIRS // N))
    assert rows[0] == 0 and rows[-1] == N - 1 and len(rows) == len(set(rows)) == wanted


def test_of_many_rows_only_dQ_is_checked(monkeypatch):
    """dK and dV take all pairs of a head: they are checked where those are few."""
    monkeypatch.setattr(bench_check, "WHOLE", 16)
    inputs = bench_points.Inputs(upload=lambda host, kept: host)
    for N, checked in ((16, ["dQ", "dK", "dV"]), (17, ["dQ"])):
        point = Point("backward", 1, 1, N, 16, "fp16", True)
        truth = bench_check.Truth(point, inputs.host(point))
        assert list(truth.exact) == list(truth.bound) == checked
        assert all(0 < x < 1e-2 for x in truth.rmse_plain.values())


def test_what_goes_wrong_while_it_is_timed_has_no_times(monkeypatch):
    """The first run is right, a later one is not."""
    device, runs = Device(), []
    made = bench(monkeypatch, ALL[:2], ALL[2:], device)
    real = bench_points.contenders

    def spoilt(*given):
        found, reasons = real(*given)
        for c in found:
            if c.name == "step6_flash_v3":
                right = c.outputs()["O"]
                c.outputs = lambda right=right: {"O": right + (len(runs) > 1)}
                c.work = lambda work=c.work: (runs.append(0), work())
        return found, reasons

    monkeypatch.setattr(bench_points, "contenders", spoilt)
    rows = rows_of(made)
    assert "ms" not in rows["step6_flash_v3"] and rows["step6_flash_v3"]["failed"]
    assert "wrong: RMSE" in rows["step6_flash_v3"]["not_measured"] and "ms" in rows["step5_tensor_core"]


def test_gradients_on_tensor_cores_are_timed_with_atomics(monkeypatch):
    """All that adds up to dQ is in what is replayed, the clearing of the sums included."""
    from flash_cuda.executors import gpu
    from flash_cuda.executors.emulator import Emulator

    class Noting(Emulator):
        def launch(self, body, *given, **more):
            super().launch(body, *given, **more)
            launched.append(body.__name__)

    launched = []
    monkeypatch.setattr(gpu, "Gpu", Noting)
    monkeypatch.setattr(bench_points, "_faced", lambda array, dtype: array)
    point = Point("backward", 1, 1, 24, 16, "fp16", True)
    inputs = bench_points.Inputs(upload=lambda host, kept: host)
    (step5,), reasons = bench_points.contenders(point, ["step5_tensor_core", "step4_causal"], [], inputs.device(point))
    step5.work()
    assert launched == ["step5_tensor_core", "backward_rows", "backward_keys", "backward_round"]
    truth = bench_check.Truth(point, inputs.host(point))
    assert truth.wrong(truth.rmse(step5.outputs())) is None and step5.facts["tile"] == [64, 64]
    assert reasons == {"step4_causal": "does not take a backward pass"}
    wide = Point("backward", 1, 1, 24, 256, "fp16", True)
    _, reasons = bench_points.contenders(wide, ["step6_flash_v3"], [], {})
    assert reasons == {"step6_flash_v3": "head dim 256 is outside 8 ... 128 for gradients"}


def test_what_a_kernel_cannot_do_is_a_reason():
    point = Point("backward", 1, 1, 16, 300, "fp16", False)
    _, reasons = bench_points.contenders(point, ["general"], ["sdpa_flash"], {})
    assert reasons["general"] == "head dim 300 is outside 1 ... 256"
    point = Point("forward", 1, 1, 16, 16, "fp64", False)
    assert bench_points.contenders(point, ["general"], [], {})[1] == {"general": "stores fp32, fp16, bf16, not fp64"}


@pytest.fixture
def simulated(monkeypatch, tmp_path):
    """The command on a simulated H200 with an empty folder of records; returns a function that sets the rates."""
    device = Device(seed=5, scatter=0.01)
    gpu_with(monkeypatch, device)
    monkeypatch.setattr(document, "RECORDS", tmp_path)
    monkeypatch.setattr(machine, "measured", lambda clock: Ceiling(700.0, 4200.0, 0, "made up"))
    monkeypatch.setattr(machine, "state", lambda: {"max_sm_mhz": 1980.0})
    monkeypatch.setattr("verify.executors.device_name", lambda kind: "NVIDIA H200")
    monkeypatch.setattr(bench_suite, "fingerprint_of", lambda name, direction: f"of {name}")
    names = {name: bench_suite.CUDA["general"] for name in ("step5_tensor_core", "step6_flash_v3")}
    for module in ("verify.commands.bench", "verify.bench.suite"):
        monkeypatch.setattr(f"{module}.CUDA", bench_suite.CUDA | names)
    small = bench_suite.Suite("h200", "H200", tuple(names), ALL[2:], "fp16", 1, 256, (16, 32), (False, True), (64, 128),
                              "bf16", (64,))  # fmt: skip
    for module in ("verify.commands.bench", "verify.bench.suite"):
        monkeypatch.setattr(f"{module}.SUITES", {"h200": small})
    monkeypatch.setattr(bench_suite, "H200", small)
    monkeypatch.setattr(bench_suite.standing, "__defaults__", (small,))

    class Hosted(bench_points.Inputs):
        def __init__(self):
            super().__init__(upload=lambda host, kept: host)
            self.device = self.host

    monkeypatch.setattr(bench_points, "Inputs", Hosted)
    monkeypatch.setattr(bench_check, "Truth", truth_of)
    monkeypatch.setattr(start.Worker, "call", lambda self, function, name, where, limit: 0.25)

    def at(rates, **who):
        monkeypatch.setattr(bench_points, "contenders", contenders(device, rates, **who))

    at({**RATES, "step6_flash_v3": 700e9})
    return at


def test_the_suite_writes_its_record_and_meets_its_bars(simulated, capsys, tmp_path):
    assert main(["bench", "--suite", "h200"]) == 0
    out = capsys.readouterr().out
    record = json.loads((tmp_path / "h200_suite.json").read_text())
    both = [row for row in record["rows"] if row["dtype"] == "bf16"]
    assert record["kind"] == "suite" and len(record["rows"]) == 2 * 8 * 4 + 2 * 4 * 4 and len(both) == 2 * 4 * 4
    names = ["step5_tensor_core", "step6_flash_v3"]
    twins = [f"{name} in fp16" for name in names]
    assert sorted({row["name"] for row in both}) == sorted(names + twins)
    assert {row["name"] for row in record["rows"] if "fingerprint" not in row} >= set(twins)
    assert len(record["restarts"]) == 4 and list(record)[-1] == "rows"
    # The host's two times, and two first calls, for both kernels.
    assert out.count(" met") == len(bench_suite.BARS) + len(bench_suite.OWN_BARS) + 4 + 4
    assert "measured ceilings: product 700 TFLOP/s" in out
    assert main(["bench", "--check"]) == 0


def test_a_missed_bar_is_exit_1(simulated, capsys):
    simulated({**RATES, "step6_flash_v3": 550e9})
    assert main(["bench", "--suite", "h200"]) == 1
    assert main(["bench", "--suite", "h200", "--check"]) == 1
    out = capsys.readouterr().out
    assert out.count("misses 1") == out.count("misses") == 2  # step6 forward against cuDNN, said twice


def test_a_bar_that_the_interval_reaches_is_met(simulated):
    """Not quite as fast on runs that scatter: the interval holds 1."""
    simulated({**RATES, "step6_flash_v3": 0.9999 * RATES["sdpa_cudnn"]})
    assert main(["bench", "--suite", "h200"]) == 0


def test_a_stale_record_is_exit_1(simulated, monkeypatch, capsys):
    assert main(["bench", "--suite", "h200"]) == 0
    monkeypatch.setattr(bench_suite, "fingerprint_of", lambda name, direction: "of another day")
    capsys.readouterr()
    assert main(["bench", "--check"]) == 1
    out = capsys.readouterr().out
    assert "stale: step5_tensor_core forward was changed since" in out and "is of another day" in out


def test_no_record_and_half_a_record_are_exit_1(simulated, capsys):
    assert main(["bench", "--check"]) == 1
    assert "no record of the suite h200" in capsys.readouterr().out
    assert main(["bench", "--suite", "h200", "--direction", "forward", "--N", "64", "--d", "16"]) == 1
    assert main(["bench", "--check"]) == 1
    assert "6 of 8 points not measured" in capsys.readouterr().out
    assert main(["bench", "--suite", "h200", "--direction", "forward"]) == 1  # still no backward pass
    assert "step5_tensor_core, first call, restarted" in capsys.readouterr().out
    assert main(["bench", "--suite", "h200", "--direction", "backward"]) == 0  # the forward rows are kept


def test_a_restart_that_fails_is_said_and_is_exit_1(simulated, monkeypatch, capsys, tmp_path):
    def dies(self, function, name, where, limit):
        raise start.WorkerDied("the process ended by itself")

    monkeypatch.setattr(start.Worker, "call", dies)
    assert main(["bench", "--suite", "h200"]) == 1
    assert capsys.readouterr().out.count("restarted") == 2
    made = json.loads((tmp_path / "h200_suite.json").read_text())["restarts"]
    assert {row["not_measured"] for row in made} == {"WorkerDied: the process ended by itself"}


def test_the_suite_compiles_into_a_cache_of_its_own(monkeypatch):
    for kept in (None, "/somewhere"):
        monkeypatch.delenv(start.CACHE, raising=False)
        if kept:
            monkeypatch.setenv(start.CACHE, kept)
        with start.empty_cache():
            inside = os.environ[start.CACHE]
            assert os.listdir(inside) == [] and inside != kept
        assert os.environ.get(start.CACHE) == kept and not os.path.exists(inside)


def test_a_record_of_another_machine_is_not_overwritten(simulated, monkeypatch, capsys, tmp_path):
    assert main(["bench", "--suite", "h200"]) == 0
    kept = (tmp_path / "h200_suite.json").read_text()
    monkeypatch.setattr("verify.document.driver", lambda: "of another day")
    assert main(["bench", "--suite", "h200", "--N", "64"]) == 2
    assert "is of another machine, other versions or another protocol" in capsys.readouterr().err
    assert (tmp_path / "h200_suite.json").read_text() == kept
    assert main(["bench", "--suite", "h200", "--json", str(tmp_path / "mine.json")]) == 0


def test_a_kernel_that_is_not_registered_is_said(simulated, monkeypatch, capsys):
    monkeypatch.setattr("verify.commands.bench.CUDA", {})
    assert main(["bench", "--suite", "h200", "--direction", "forward"]) == 1
    out = capsys.readouterr().out
    assert "8 of 8 points not measured" in out and "sdpa_cudnn" in out


ASKED = ["--kernels", "step6_flash_v3", "--d", "16", "--dtype", "fp16", "--heads", "1"]


def test_without_a_suite_it_is_a_record_of_times(simulated, capsys, tmp_path):
    """Of the points asked for, with every peer, in the form that the figures read."""
    from figures import records

    target = tmp_path / "times.json"
    assert main(["bench", *ASKED, "--N", "64,128", "--mask", "causal", "--rounds", "8", "--json", str(target)]) == 0
    out = capsys.readouterr().out
    assert "sdpa_cudnn" in out and f"written: {target}" in out and "not measured: not here" in out
    record = json.loads(target.read_text())
    assert record["kind"] == "times" and {len(row["ms"]) for row in record["rows"] if "ms" in row} == {8}
    found = records.times(tmp_path)
    assert [(p.kernel, p.size["Nq"], p.causal) for p in found] == [("step6_flash_v3", N, True) for N in (64, 128)]


def test_a_kernel_that_fails_is_exit_1_and_a_peer_that_fails_is_not(simulated, capsys):
    for broken, status in (("step6_flash_v3", 1), ("sdpa_flash", 0)):
        simulated(RATES, broken=(broken,))
        assert main(["bench", *ASKED, "--N", "64", "--mask", "full"]) == status
        assert f"not measured: RuntimeError: {broken}" in capsys.readouterr().out


MISUSE = {
    "--suite h200 --dtype fp32": "--dtype: a suite has its own, leave it out",
    "--suite h200 --N 1000": "--N: the suite has 1024, 2048, 4096, 8192, 16384, not 1000",
    "--suite h100": "argument --suite: invalid choice: 'h100'",
    "--rounds 5": "--rounds: expected at least 6",
    "--peers xformers": "--peers: there is no peer 'xformers'",
    "--rounds 8,9": "--rounds: expected one number, got '8,9'",
    "--suite h200 --rounds 8": "--rounds: a suite has 24, leave it out",
    "--check --json x.json": "--json: has no effect beside --check; leave it out",
    "--heads 0": "--heads: expected positive integers, got '0'",
}


@pytest.mark.parametrize("line", MISUSE)
def test_misuse(line, capsys):
    assert main(["bench", *line.split()]) == 2
    assert capsys.readouterr().err.startswith(f"verify: {MISUSE[line]}")


def test_another_gpu_does_not_get_the_suites_bars(simulated, monkeypatch, capsys):
    monkeypatch.setattr("verify.executors.device_name", lambda kind: "NVIDIA A100-SXM4-80GB")
    assert main(["bench", "--suite", "h200"]) == 2
    assert "--suite: its bars are for an H200" in capsys.readouterr().err
