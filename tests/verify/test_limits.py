"""Work and ceilings: counted pair by pair, and times that nothing can reach are refused."""

import math

import pytest

from verify.bench import limits, machine
from verify.bench.limits import Ceiling, too_fast, visible_pairs, work
from verify.bytes import Setting, compulsory
from verify.cases import Shape

H200 = limits.speed_of_light("NVIDIA H200", 1980)
BIG = work(Shape(1, 16, 16, 16384, 16384, 128, 128), False, "fp16")
SMALL = work(Shape(1, 16, 16, 1024, 1024, 64, 64), False, "fp16")


@pytest.mark.parametrize(("Nq", "Nk"), [(7, 7), (3, 9), (9, 3), (1, 5), (5, 1), (4, 0), (0, 4)])
def test_visible_pairs_are_counted(Nq, Nk):
    shape = Shape(1, 1, 1, Nq, Nk, 8, 8)
    assert visible_pairs(shape, True) == sum(j <= i + Nk - Nq for i in range(Nq) for j in range(Nk))
    assert visible_pairs(shape, False) == Nq * Nk


def test_work_by_hand():
    """Two products forward, five backward; every input and output once."""
    shape = Shape(2, 4, 2, 10, 10, 8, 16)
    forward, backward = (work(shape, True, "fp16", way) for way in ("forward", "backward"))
    pairs = 2 * 4 * 55
    assert forward.flops == forward.least_flops == 2 * pairs * (8 + 16)
    assert backward.flops == 2 * pairs * (8 + 16 + 16 + 8 + 8)
    assert backward.least_flops == backward.flops - 2 * pairs * 8
    assert forward.read + forward.written == compulsory(Setting(shape, True, dtype="fp16"))
    assert backward.read == forward.read + forward.written and backward.written == forward.read
    square = [work(Shape(1, 1, 1, 64, 64, 32, 32), False, "bf16", way).flops for way in ("forward", "backward")]
    assert square[1] == 2.5 * square[0]


def test_rates():
    assert BIG.tflops(1.0) == pytest.approx(4 * 16 * 16384**2 * 128 / 1e9)
    assert SMALL.gb_per_s(1.0) == pytest.approx(4 * 16 * 1024 * 64 * 2 / 1e6)
    shares = Ceiling(700.0, None, 0, "").shares(BIG, 10.0)
    assert shares["tflops"] == pytest.approx(BIG.tflops(10.0) / 700) and shares["gb_per_s"] is None


def test_the_sheet_is_found_by_the_drivers_name():
    assert limits.datasheet("NVIDIA H200").gb_per_s == 4800
    assert limits.datasheet("NVIDIA A100-SXM4-80GB").tflops == 312
    assert limits.datasheet("NVIDIA H100 80GB HBM3").gb_per_s == 3350
    for other in ("NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA A100-SXM4-40GB", "NVIDIA GeForce RTX 4090"):
        assert limits.datasheet(other) is None, other


def test_the_speed_of_light_of_a_board():
    """Scaled to the highest clock it has; twice what was measured where there is no sheet."""
    assert H200.tflops == pytest.approx(989.4 * 1980 / 1830) and "1980 MHz" in H200.source
    assert limits.speed_of_light("NVIDIA H200").tflops == 989.4
    assert limits.speed_of_light("NVIDIA H200", 1200).tflops == 989.4
    measured = Ceiling(150.0, 900.0, 0, "measured here")
    assert limits.speed_of_light("NVIDIA L40S", 2500, measured).tflops == 300.0
    assert limits.speed_of_light("NVIDIA L40S", 2500, Ceiling(None, 900.0, 0, "")) is None


def test_times_that_no_machine_reaches_are_refused():
    """On either side of both limits."""
    by_flops = BIG.flops / H200.tflops / 1e9
    assert "TFLOP/s; the machine has 1,070" in too_fast(0.999 * by_flops, BIG, H200)
    assert too_fast(1.001 * by_flops, BIG, H200) is None
    thin = work(Shape(64, 32, 32, 1, 16384, 128, 128), False, "fp16")  # decoding: bytes decide
    by_bytes = thin.read / 4800e6
    assert "GB/s; the machine has 4,800" in too_fast(0.999 * by_bytes, thin, H200)
    assert too_fast(1.001 * by_bytes, thin, H200) is None
    assert too_fast(0.9 * by_bytes, thin, H200, cold=False) is None  # a warm cache may hold the inputs


def test_what_is_written_may_still_be_in_the_cache():
    light = Ceiling(1e9, 1.0, 1000, "slow memory")  # 1 GB/s is 1e6 bytes a millisecond
    assert too_fast(1.0, limits.Work(1, 1, 1_000_000, 1000), light) is None
    assert too_fast(1.0, limits.Work(1, 1, 1_000_000, 1002), light)


@pytest.mark.parametrize("ms", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_is_refused_even_of_an_unknown_machine(ms):
    assert "is not a time" in too_fast(ms, SMALL, None)
    assert too_fast(1.0, SMALL, None) is None


def test_the_drivers_table():
    line = "1755, 3201, 1980, 612.34, 700.00, 61, 0x0000000000000004\n"
    state = machine.parse(line)
    assert state["sm_mhz"] == 1755 and state["power_w"] == 612.34 and state["throttle"] == ["power_cap"]
    assert machine.parse(line.replace("61,", "[N/A],"))["temperature_c"] is None
    assert machine.parse("No devices were found") == {} and machine.throttle(0x48) == ["hw_slowdown", "hw_thermal"]


def test_no_driver_is_an_empty_state(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert machine.state() == {}
