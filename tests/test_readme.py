"""The README: its table is the one that the records give, its commands exist, its links lead somewhere."""

import json
import re
from pathlib import Path

from figures import readme, readme_peers
from verify.fingerprint import fingerprint
from verify.registry import KERNELS

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_table_is_in_step():
    """`make figures` was run after the registry or a record changed."""
    assert readme.update(check=True) == 0


def test_check_notices_a_number_typed_by_hand(tmp_path, capsys):
    """A changed cell is found, and writing the table anew mends it."""
    copy = tmp_path / "README.md"
    copy.write_text(TEXT.replace("| 18.4 |", "| 18.9 |"))
    assert copy.read_text() != TEXT
    assert readme.update(check=True, readme=copy) == 1
    assert "out of step" in capsys.readouterr().err
    assert readme.update(readme=copy) == 0
    assert copy.read_text() == TEXT


def test_cards_of_others_make_a_table(tmp_path):
    """The newest of each, GPUs' only; a type that was not taken is no row of noughts."""
    assert "has been recorded yet" in readme_peers.table(tmp_path)
    card = json.loads((ROOT / "verify/records/h200_sdpa_flash.json").read_text())
    for name, change in (("new", {}), ("emulated", {"kernel": "a", "executor": "emulated"}),
                         ("old", {"made": "2020-01-01T00:00:00+00:00", "verdict": "fail"})):  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(card | change))
    told = readme_peers.table(tmp_path)
    assert re.search(r"^\| `sdpa:flash` \| pass \| not taken \| 66/66, 0.14 \| 66/66, 0.16 \|$", told, re.M)
    assert told.count("`") == 2 and "NVIDIA H200, 2026-11-30, torch 2.11.0" in told


def test_every_step_is_in_the_table():
    """One row a registered step, in the ladder's order, with its two files."""
    rows = re.findall(r"^\| `(\w+)` \(\[NumPy\]\((\S+)\), \[kernel\]\((\S+)\)\)", TEXT, re.M)
    assert [name for name, *_ in rows] == list(KERNELS)
    assert all((ROOT / path).is_file() for _, *paths in rows for path in paths)


def test_table_from_a_record(tmp_path):
    """Counts, worst ratio, times and rates are those of the record."""
    head = {"schema": 1, "made": "2026-01-02T00:00:00+00:00", "executor": "gpu", "device": "Test GPU"}
    metrics = dict.fromkeys(
        ("max_rel", "rmse", "rmse_plain", "rmse_ratio", "cosine", "got", "wanted", "plain"), 0.0
    )
    metrics |= {"max_abs": 0.25, "bound": 0.5, "apriori": 1.0, "fixed": None, "ok": True}
    metrics |= {"nan": 0, "inf": 0, "share_out": 0.0, "worst_index": [0]}
    size = {"B": 1, "Hq": 16, "Hk": 16, "Nq": 4096, "Nk": 4096, "d": 64, "dv": 64}
    result = {
        "kernel": "step3_flash_v2",
        "case": "square",
        "dtype": "fp16",
        "executor": "gpu",
        "device": "Test GPU",
    }
    result |= {"size": size, "tile": None, "verdict": "pass", "outputs": {"O": metrics}}
    prints = {"fingerprints": {"step3_flash_v2": "0" * 12}}
    (tmp_path / "a.json").write_text(json.dumps(head | prints | {"kind": "verify", "results": [result]}))
    row = {"kernel": "step3_flash_v2", "dtype": "fp16", "causal": False, "tile": [32, 24], "size": size}
    row |= {"median_ms": 10.0, "p90_ms": 11.0, "runs": 50, "warmups": 20}
    fresh = row | {"fingerprint": fingerprint("step3_flash_v2")}
    old = row | {"fingerprint": "0" * 12, "kernel": "step1_fused"}
    (tmp_path / "b.json").write_text(json.dumps(head | {"kind": "times", "rows": [fresh, old]}))
    text = readme.table(tmp_path)
    assert "TFLOP/s (stale)" in next(line for line in text.splitlines() if "step1" in line)
    step3 = next(line for line in text.splitlines() if "step3" in line)
    assert "| fp16 1/1, 0.50 (stale) |" in step3
    assert "10.00 ms, 6.9 TFLOP/s |" in step3  # 4 x 16 x 4096² x 64 / 10 ms
    assert "Test GPU, 2026-01-02" in text
    assert next(line for line in text.splitlines() if "step0" in line).count("no record") == 3


def test_commands_are_real():
    """The two commands of the first screen are targets, and every `python -m` names a package here."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^make ([\w-]+)", TEXT, re.M))
    assert {"verify", "test"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
    packages = set(re.findall(r"python -m (\w+)", TEXT))
    assert packages and all((ROOT / package / "__main__.py").is_file() for package in packages)


def test_links_lead_somewhere():
    """Every relative link and picture is a file or folder of the repository."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
