"""The README's table of speeds says what the record says."""

import json

from figures import readme_speed
from verify.bench.suite import H200


def record(**changes):
    """A suite's record of one point: step 6 twice as fast as cuDNN, four times as fast as FlashAttention-2."""
    point = {"direction": "forward", "dtype": "fp16", "causal": True, "d": 128, "N": 2048, "B": 8, "H": 16}
    rows = [
        point | {"name": name, "ms": [ms] * 8, "tflops": 1000 / ms, "rmse": 1.0, "fingerprint": None}
        for name, ms in (("step6_flash_v3", 2.0), ("sdpa_cudnn", 4.0), ("sdpa_flash", 8.0))
    ]
    head = {"kind": "suite", "device": "Test GPU", "made": "2026-01-02T00:00:00+00:00", "rows": rows}
    return head | {"peers": {"sdpa_cudnn": "one", "sdpa_flash": "two"}} | changes


def test_cells_are_rates_and_ratios(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(record()))
    text = readme_speed.table(tmp_path)
    row = next(line for line in text.splitlines() if line.startswith("| `step6_flash_v3`, d = 128, causal |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")][1:]
    assert cells == ["500 · 2.00 · 4.00" if N == 2048 else "-" for N in H200.lengths]
    assert "Test GPU, 2026-01-02" in text and "cuDNN: one" in text


def test_without_a_record_it_says_so(tmp_path):
    assert "No run of the suite" in readme_speed.table(tmp_path)


def test_what_was_not_timed_has_no_number(tmp_path):
    """A refused peer leaves its ratio out; a refused kernel leaves the cell empty."""
    lame = record()
    del lame["rows"][1]["ms"]
    (tmp_path / "a.json").write_text(json.dumps(lame))
    assert "| 500 · 4.00 |" in readme_speed.table(tmp_path)
    del lame["rows"][0]["ms"]
    (tmp_path / "a.json").write_text(json.dumps(lame))
    assert "500" not in readme_speed.table(tmp_path)


def test_backward_has_a_table_of_its_own_once_it_was_timed(tmp_path):
    """Rows that only say why there is no time are not enough."""
    two = record()
    forward = list(two["rows"])
    two["rows"] += [{k: x for k, x in row.items() if k != "ms"} | {"direction": "backward"} for row in forward]
    (tmp_path / "a.json").write_text(json.dumps(two))
    assert "backward" not in readme_speed.table(tmp_path)
    backward = [row | {"direction": "backward", "ms": [4 * ms for ms in row["ms"]], "tflops": 77} for row in forward]
    two["rows"] = forward + backward
    (tmp_path / "a.json").write_text(json.dumps(two))
    first, second = readme_speed.table(tmp_path).split("| backward, fp16 |")
    assert "| 500 · 2.00 · 4.00 |" in first and "| 77 · 2.00 · 4.00 |" in second
    assert "`step6_flash_v3` backward 4.000" in second and "500" not in second


def test_what_else_has_bars_is_told_where_it_was_measured(tmp_path):
    """The worst of all points, of each kernel; bf16 against fp16 where the two ran in turns."""
    made = record()
    made["rows"][0] |= {"queued_us": 9.0, "latency_us": 12.0, "first_call_s": 3.0}
    (tmp_path / "a.json").write_text(json.dumps(made))
    text = readme_speed.table(tmp_path)
    assert "host's time for a call, launch by launch; after a wait | 9.0 µs; 12.0 µs | - |" in text
    assert "CUDA graph" not in text and "first call" not in text
    made["rows"].append(made["rows"][0] | {"N": 4096, "queued_us": 10.0, "latency_us": 11.0, "first_call_s": 4.0})
    made["restarts"] = [{"name": "step6_flash_v3", "direction": "forward", "first_call_s": 0.25}]
    point = {"direction": "forward", "dtype": "bf16", "causal": True, "d": 128, "N": 4096, "B": 4, "H": 16}
    both = ("step6_flash_v3", 2.0), ("step6_flash_v3 in fp16", 2.5)
    made["rows"] += [point | {"name": name, "ms": [ms] * 8} for name, ms in both]
    (tmp_path / "a.json").write_text(json.dumps(made))
    text = readme_speed.table(tmp_path)
    assert "| 10.0 µs; 12.0 µs | - |" in text and "| 4.00 s; 0.25 s | - |" in text
    assert "forward, times as fast in bf16 as in fp16, N = 4096 | 1.250 [1.250, 1.250] | - |" in text
