"""Scanning tiles: the formula against the assembler, each kind of reason, and times on a simulated device."""

import json

import numpy as np
import pytest
from helpers_bench import SLOW

from verify import executors, sweep
from verify.__main__ import main
from verify.bench import check as bench_check
from verify.bench import points as bench_points
from verify.bench.points import Point
from verify.bench.simulated import Device
from verify.sweep import CHIPS, Candidate, Fit, examine, resident
from verify.timing import Clock, Contender


@pytest.mark.parametrize("kernel", ["step0_standard", "step2_flash_v1", "step4_causal"])
@pytest.mark.parametrize(("Br", "Bc", "D"), [(32, 16, 64), (64, 24, 128)])
def test_shared_memory_by_the_formula(kernel, Br, Bc, D):
    """The body's arrays, counted by hand: tiles one word wider than their data, as in `tile_ops`."""
    found = examine(Candidate(kernel, D, "fp16", Br, Bc), "sm_90a", assemble=False)
    Q, K, P, partial = 4 * Br * (D + 1), 4 * Bc * (D + 1), 4 * Br * (Bc + 1), 2 * 4 * Br * 8
    by_hand = {
        "step0_standard": max(Q + K, P + K),
        "step2_flash_v1": Q + 2 * K + P + partial,
        "step4_causal": Q + K + P + partial,
    }
    assert found.shared == by_hand[kernel] and found.block == 128
    assert found.reason is None


def test_the_assembler_agrees_and_knows_registers():
    pytest.importorskip("cuda.bindings.nvvm", reason="no NVVM: install the dev extra")
    from flash_cuda import step3_flash_v2
    from flash_cuda.executors.assembler import Assembler
    from refimpl.tiling import Tile

    on, x = Assembler("sm_80"), np.zeros((1, 1, 100, 32), np.float16)
    step3_flash_v2.attention(x, x, x, tile=Tile(16, 16), on=on)
    found = examine(Candidate("step3_flash_v2", 32, "fp16", 16, 16), "sm_80")
    (report,) = on.reports
    assert (found.shared, found.registers, found.stack) == (report.shared_bytes, report.registers, 0)
    assert found.reason is None and "Br x D_pad" in found.formula


def test_reasons():
    """The kernel's own, shared memory's, and that of registers."""
    assert examine(Candidate("step4_causal", 64, "fp16", 24, 24), "sm_90a").reason.startswith("tile: expected Br, Bc")
    found = examine(Candidate("step4_causal", 64, "fp16", 128, 64), "sm_75")
    assert found.reason == "shared memory: 91,392 bytes a block, sm_75 has 65,536" and found.registers is None
    wide = Candidate("step4_causal", 64, "fp16", 32, 16, threads=(32, 8))
    assert examine(wide, "sm_90a", assemble=False).block == 256
    spilt, greedy = Fit(registers=255, stack=40, block=128), Fit(registers=129, stack=0, block=512)
    assert sweep._too_many_registers(spilt, CHIPS["sm_90a"]) is None  # it runs, from memory
    assert "129 x 512 threads" in sweep._too_many_registers(greedy, CHIPS["sm_90a"])
    assert sweep._too_many_registers(Fit(registers=128, stack=0, block=512), CHIPS["sm_90a"]) is None


def test_what_registers_do_not_hold_is_shown():
    from verify.commands.sweep import _cell

    tile = Candidate("step4_causal", 64, "fp16", 64, 32)
    cell = _cell(tile, Fit(shared=1024, registers=255, stack=40, block=128, blocks=2), 64, False, None)
    assert cell.plain == "1 KiB, 255 regs, 2/SM, 40 B in memory" and cell.style == "yellow"


def test_dynamic_shared_memory_counts(monkeypatch):
    """What a launch asks for comes on top, up to what the chip gives a block."""

    def body(x):
        """Nothing."""

    def attention(Q, K, V, *, causal, on, tile):
        on.launch(body, 1, 128, (), shared=tile.Br * 1024)

    monkeypatch.setattr(sweep.CUDA["general"].__class__, "attention", lambda self: attention)
    fits = [examine(Candidate("general", 64, "fp16", Br, 16), "sm_90a", assemble=False) for Br in (227, 228)]
    assert fits[0].reason is None and fits[0].blocks == 1 and fits[0].formula == "232448 at launch"
    assert fits[1].reason == "shared memory: 233,472 bytes a block, sm_90a has 232,448"
    fits = [examine(Candidate("general", 64, "fp16", Br, 16), "sm_80", assemble=False) for Br in (163, 164)]
    assert fits[0].reason is None and fits[1].reason.endswith("sm_80 has 166,912")


@pytest.mark.parametrize(
    ("fit", "blocks"),
    [
        (Fit(shared=0, registers=32, block=128), 16),  # threads: 2048 / 128
        (Fit(shared=0, registers=32, block=32), 32),  # blocks
        (Fit(shared=(75 << 10) + 512, registers=32, block=128), 2),  # shared memory, 1 KiB a block for the system
        (Fit(shared=0, registers=97, block=128), 4),  # registers: 104 x 128 each
        (Fit(shared=0, registers=None, block=100), 16),  # ragged: four warps
    ],
)
def test_resident_blocks(fit, blocks):
    assert resident(fit, CHIPS["sm_90a"]) == blocks


@pytest.mark.parametrize(("Br", "band"), [(16, 16), (48, 16), (32, 32), (128, 32)])
def test_a_warp_has_as_many_rows_as_divide_the_tile(Br, band):
    """As where the kernel is given a tile: no size is left out, and none is let in, for a band that does not fit it."""
    (candidate,) = sweep.candidates("step5_tensor_core", [64], "fp16", [Br], [32])
    assert candidate.options["shape"].band == band
    assert sweep.examine(candidate, "sm_90a", assemble=False).block == Br // band * 32


def test_a_chip_that_reserves_nothing_holds_a_block_of_all_it_has():
    assert resident(Fit(shared=64 << 10, block=128), CHIPS["sm_75"]) == 1
    assert resident(Fit(shared=99 << 10, block=128), CHIPS["sm_86"]) == 1


def test_those_that_fit_are_timed_and_wrong_ones_are_not(monkeypatch):
    device, point = Device(scatter=0.01), Point("forward", 1, 2, 64, 16, "fp16", False)
    truth = bench_check.Truth(point, bench_points.Inputs(upload=lambda host, kept: host).host(point))

    def kernel(name, point, arrays, rows, options):
        tile = options["tile"]
        if tile.Br == 64:
            raise RuntimeError("too many resources requested for launch\nmore")
        off = 1.0 if tile.Bc == 32 else 0.0
        work = device.work(str(tile), SLOW * point.work.flops / 1e9 / tile.Br)
        return Contender(name, work, outputs=lambda: {"O": truth.exact["O"] + off})

    monkeypatch.setattr(bench_points, "kernel", kernel)
    fits = {c: Fit() for c in sweep.candidates("step4_causal", [16], "fp16", (16, 32, 64), (16, 32))}
    unfit = next(iter(fits.values()))
    unfit.reason = "shared memory: all of it"
    inputs = bench_points.Inputs(upload=lambda host, kept: host)
    sweep.timed(fits, Clock(device), point, inputs, rounds=8, seconds=9.0)
    by = {(c.Br, c.Bc): fit for c, fit in fits.items()}
    assert by[16, 16].ms is None and len(by[32, 16].ms) == 8
    assert by[16, 32].reason.startswith("wrong: RMSE 1") and by[16, 32].ms is None
    assert by[64, 16].reason == "RuntimeError: too many resources requested for launch"


HERE = pytest.mark.skipif(executors.gpu_missing() is None, reason="a GPU answers: this is about what is said without")


@HERE
def test_the_command_draws_the_map(monkeypatch, capsys, tmp_path):
    """The record that it writes is the one that the figure reads."""
    from figures import tile_map

    def each(function, calls, **how):
        return [(examine(c, arch, assemble=False), None) for c, arch, _ in calls]

    monkeypatch.setattr("verify.commands.sweep.each", each)
    target = tmp_path / "sweep.json"
    tiles = ["--Br", "32,64,128", "--Bc", "32,64", "--arch", "sm_75"]
    assert main(["sweep", "--kernel", "step3_flash_v2", *tiles, "--json", str(target)]) == 0
    out = capsys.readouterr().out
    assert "no: shared memory" in out and "128 x 32: shared memory: 66,688 bytes" in out and "37 KiB, 1/SM" in out
    assert "shared memory in bytes: 4 Br x D_pad" in out and "not timed: " in out
    record = json.loads(target.read_text())
    assert record["kind"] == "sweep" and len(record["rows"]) == 6
    data = tile_map.of_record(record)
    assert data.Br == [32, 64, 128] and data.reason[128, 64] == "shared memory" and not data.tflops
    assert main(["sweep", "--kernel", "step3_flash_v2", "--Br", "256", "--Bc", "256"]) == 1  # none fits


MISUSE = {
    "--kernel oracle": "--kernel: there is no kernel 'oracle'",
    "--kernel step3_flash_v2,step4_causal": "--kernel: expected one name, got step3_flash_v2, step4_causal",
    "--Br 0": "--Br: expected positive integers, got '0'",
    "--Bc 2000": "--Br, --Bc, --d: expected numbers up to 1024",
    "--d 300": "--kernel: step4_causal head dim 300 is outside 1 ... 256",
    "--N 1024,2048": "--N: expected one number, got '1024,2048'",
    "--kernel step6_flash_v3 --threads 8x8": "--threads: a block of step6_flash_v3 follows from its tile; leave it out",
    "--threads 16": "--threads: expected shapes such as 16x8, got '16'",
    "--arch sm_99": "argument --arch: invalid choice: 'sm_99'",
}


@pytest.mark.parametrize("line", MISUSE)
def test_misuse(line, capsys):
    assert main(["sweep", *line.split()]) == 2
    assert capsys.readouterr().err.startswith(f"verify: {MISUSE[line]}")
