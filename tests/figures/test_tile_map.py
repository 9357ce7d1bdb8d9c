"""The map of tiles: what fits, what does not, and the fastest of those that were timed."""

import pytest
from matplotlib.colors import to_hex

from figures import tile_map
from figures.style import DEAD
from verify.bench.points import Point

ROW = {"kernel": "step3_flash_v2", "d": 64, "dtype": "fp16", "threads": None, "shared": 20480, "registers": 96,
       "stack": 0}  # fmt: skip


def record(times):
    """A record of a sweep with these times in ms by (Br, Bc), None where a tile does not fit."""
    rows = [
        {**ROW, "Br": Br, "Bc": Bc, "reason": None if ms else "registers: too many", "ms": [ms] * 3 if ms else None}
        for (Br, Bc), ms in times.items()
    ]
    head = {"kind": "sweep", "device": "Test GPU", "arch": "sm_90a", "kernel": "step3_flash_v2", "N": 1024, "heads": 4}
    return {**head, "mask": "causal", "rows": rows}


def test_rates_are_of_the_point_that_was_timed():
    data = tile_map.of_record(record({(16, 16): 0.5, (16, 32): None}))
    work = Point("forward", 1, 4, 1024, 64, "fp16", True).work
    assert data.tflops == {(16, 16): pytest.approx(work.tflops(0.5))}
    assert data.reason == {(16, 32): "registers"} and data.needs == {(16, 16): "20 KiB\n96 regs"}
    assert "Test GPU" in data.title and "N = 1024" in data.title


def test_what_does_not_fit_is_grey_and_the_fastest_is_framed():
    (ax,) = tile_map.fig_fits(tile_map.of_record(record({(16, 16): 0.5, (16, 32): 0.4, (32, 16): None}))).axes
    assert [to_hex(p.get_facecolor()).upper() for p in ax.patches].count(DEAD.upper()) == 1
    framed = [p.get_xy() for p in ax.patches if p.get_linewidth() == 2]
    assert framed == [(0.5, -0.5)]
    assert "registers" in [text.get_text() for text in ax.texts]


def test_without_a_record_it_is_the_formula(monkeypatch):
    monkeypatch.setattr(tile_map.records, "newest", lambda kind: None)
    data = tile_map.data_fits()
    assert data.reason[256, 128] == "shared memory" and data.needs[64, 32] == "37 KiB" and not data.tflops
