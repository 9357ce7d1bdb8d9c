"""The ladder: rates of both records side by side, what is missing said, nothing of another device mixed in."""

import json

import pytest

from figures import ladder
from figures.devices import H200

WHERE = {"direction": "forward", "dtype": "fp16", "B": 1, "H": 16, "N": 16384, "p90_ms": 9.0, "tile": [64, 64]}


def row(name, ms, d=64, causal=False, **more):
    ours = {"fingerprint": "other"} if name.startswith("step") else {}
    return {**WHERE, "name": name, "median_ms": ms, "d": d, "causal": causal, **ours, **more}


def record(folder, kind, rows, device="NVIDIA H200", made="2026-12-01"):
    ceilings = {"measured": {"tflops": 700.0 if kind == "suite" else None, "gb_per_s": 4000.0}}
    head = {"kind": kind, "device": device, "made": f"{made}T00:00:00+00:00", "ceilings": ceilings}
    (folder / f"{kind}.json").write_text(json.dumps({**head, "rows": rows}))


@pytest.fixture
def both(tmp_path):
    record(tmp_path, "times", [row(step, 10.0 * 2 ** -k) for k, step in enumerate(ladder.STEPS[:6])])
    suite = [row("standard_tensor_core", 30.0, fingerprint="other"), row("step5_tensor_core", 4.0),
             row("step6_flash_v3", 2.0, d=128, causal=True), row("sdpa_cudnn", 2.5),
             row("step6_flash_v3", 9.0, N=1024), row("step6_flash_v3", 9.0, direction="backward"),
             {**WHERE, "name": "sdpa_flash", "d": 64, "causal": False, "not_measured": "no torch"}]  # fmt: skip
    record(tmp_path, "suite", suite, made="2026-12-02")
    return tmp_path


def test_two_records_make_one_ladder(both):
    data = ladder.data_rungs(both)
    assert {(r.name, r.d, r.causal, r.ms) for r in data.rungs if r.name not in ladder.STEPS[:5]} == {
        ("standard_tensor_core", 64, False, 30.0), ("step5_tensor_core", 64, False, 4.0),
        ("step6_flash_v3", 128, True, 2.0), ("sdpa_cudnn", 64, False, 2.5),
    }  # fmt: skip
    assert data.missing == () and data.device is H200 and data.reached == 700.0
    assert "2026-12-01 and 2026-12-02" in data.note and all(r.stale for r in data.rungs if r.name in ladder.STEPS)


def test_rate_is_by_the_convention(both):
    data = ladder.data_rungs(both)
    flops = 4 * 16 * 16384**2 * 64
    assert data.best("step0_standard", 64, False).tflops == pytest.approx(flops / 0.010 / 1e12)
    assert data.best("step6_flash_v3", 128, True).tflops == pytest.approx(flops / 0.002 / 1e12)  # 2 x d, half of it


def test_every_rung_is_drawn_at_its_rate_under_the_ceilings(both):
    data = ladder.data_rungs(both)
    for ax, d in zip(ladder.fig_rungs(data).axes, ladder.DIMS, strict=True):
        dots = [line for line in ax.lines if line.get_marker() == "o" and len(line.get_xdata())]
        assert sorted(float(x) for line in dots for x in line.get_xdata()) == pytest.approx(
            sorted(rung.tflops for rung in data.rungs if rung.d == d)
        )
        across = {float(x) for line in ax.lines if line.get_marker() == "None" for x in line.get_xdata()[:1]}
        assert {H200.fp32_tflops, H200.fp16_tflops, 700.0} <= across


def test_what_is_not_on_record_is_said(tmp_path):
    record(tmp_path, "times", [row("step0_standard", 10.0)])
    data = ladder.data_rungs(tmp_path)
    assert data.missing == (*ladder.RUNGS[1:], "peers") and data.reached is None
    figure = ladder.fig_rungs(data)
    assert "No time on record: step1_fused" in figure.get_suptitle()
    texts = [text.get_text() for text in figure.axes[1].texts]
    assert texts.count("no record") == len(ladder.RUNGS) + len(ladder.PEERS)


def test_no_record_at_all(tmp_path):
    data = ladder.data_rungs(tmp_path)
    assert not data.rungs and "no record" in data.note and ladder.fig_rungs(data)


def test_other_devices_are_left_out(both):
    record(both, "times", [row("step0_standard", 1.0)], device="NVIDIA A100-SXM4-80GB", made="2026-11-30")
    data = ladder.data_rungs(both)
    assert "step0_standard" in data.missing and "H200" in data.note
