"""The suite's figure: the bars alone without a record, and with one every point and the means."""

from matplotlib.colors import to_hex

from figures import suite
from figures.style import STEP_COLOUR
from verify.bench.record import KEY
from verify.bench.suite import BARS, H200


def record():
    """Step 6 forward, 1.25 times as fast as cuDNN everywhere."""
    rows = []
    for point in H200.points(("forward",)):
        where = {name: getattr(point, name) for name in KEY}
        rows.append({**where, "name": "step6_flash_v3", "ms": [1.0] * 24})
        rows.append({**where, "name": "sdpa_cudnn", "ms": [1.25] * 24})
    return {"kind": "suite", "device": "NVIDIA H200", "made": "2026-12-01T00:00:00+00:00", "rows": rows}


def test_points_and_mean_of_the_record(monkeypatch):
    monkeypatch.setattr(suite.records, "newest", lambda kind: record())
    data = suite.data_bars()
    first = data.standings[0]
    assert first.met and first.mean.value == 1.25 and len(first.ratios) == 20 and "NVIDIA H200" in data.note
    assert [at.met for at in data.standings] == [True] + [False] * (len(BARS) - 1)
    (ax,) = suite.fig_bars(data).axes
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    assert len(dots) == 20 and {float(line.get_xdata()[0]) for line in dots} == {1.25}
    assert to_hex(dots[0].get_color()).upper() == STEP_COLOUR["step6_flash_v3"]


def test_bars_alone(monkeypatch):
    monkeypatch.setattr(suite.records, "newest", lambda kind: None)
    data = suite.data_bars()
    (ax,) = suite.fig_bars(data).axes
    assert "no record" in data.note and not [line for line in ax.lines if line.get_marker() == "o"]
    assert {bar.mean for bar in BARS} <= {float(line.get_xdata()[0]) for line in ax.lines}
    assert [text.get_text() for text in ax.texts] == ["no record"] * len(BARS)
