"""Records of times in both forms: the first one, and that of `verify bench`, which holds more than kernels' times."""

import json

import pytest

from figures import records

HEAD = {"kind": "times", "device": "Test GPU", "made": "2026-12-01T00:00:00+00:00"}
TIME = {"dtype": "fp16", "causal": True, "tile": [64, 32], "median_ms": 2.0, "p90_ms": 2.5, "fingerprint": "f"}
NEW = {**TIME, "direction": "forward", "B": 2, "H": 4, "N": 512, "d": 64}


def test_both_forms_give_the_same_points(tmp_path):
    size = {"B": 2, "Hq": 4, "Hk": 4, "Nq": 512, "Nk": 512, "d": 64, "dv": 64}
    old = {**HEAD, "copy_gb_per_s": 4000.0, "rows": [{**TIME, "kernel": "step3_flash_v2", "size": size}]}
    new = {**HEAD, "ceilings": {"measured": {"gb_per_s": 4000.0}}, "rows": [{**NEW, "name": "step3_flash_v2"}]}
    found = []
    for record in (old, new):
        (tmp_path / "times.json").write_text(json.dumps(record))
        found.append(records.times(tmp_path))
    assert found[0] == found[1] and len(found[0]) == 1
    assert found[0][0].size == size and found[0][0].copy_gb_per_s == 4000.0
    assert found[0][0].tflops == pytest.approx(4 * 2 * 4 * 512**2 * 64 / 2 / 2.0 / 1e9)


def test_only_forward_times_of_kernels_are_points(tmp_path):
    rows = [
        {**NEW, "name": "step3_flash_v2"},
        {**NEW, "name": "general", "direction": "backward"},
        {key: value for key, value in NEW.items() if key != "fingerprint"} | {"name": "sdpa_flash"},
        {"name": "step5_tensor_core", "not_measured": "wrong", "direction": "forward"},
    ]
    record = {**HEAD, "ceilings": {"measured": {"gb_per_s": None}}, "rows": rows}
    (tmp_path / "times.json").write_text(json.dumps(record))
    assert [point.kernel for point in records.times(tmp_path)] == ["step3_flash_v2"]
