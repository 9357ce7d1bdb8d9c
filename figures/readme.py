"""The README's tables, written from the registry and the newest records: nothing is typed."""

import re
import sys
from pathlib import Path

from figures import readme_peers, readme_speed, records
from figures.readme_peers import NONE
from verify import document, summary
from verify.registry import JUDGED

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCK = re.compile(r"(<!-- (steps|speed|peers):begin[^>]*-->\n)(.*?)(<!-- \2:end -->)", re.S)
DTYPES = ("fp32", "fp16", "bf16")
# The size at which times are quoted, if it was measured.
QUOTED = {"Nq": 4096, "Nk": 4096, "d": 64}


def table(folder: Path = document.RECORDS) -> str:
    """Return the table as Markdown, with a line on where its numbers are from.

    Parameters
    ----------
    folder : Path
        Of records.
    """
    run = document.newest_gpu(folder)
    verified = summary.recorded(run)
    points = quoted(records.times(folder, "suite")) | quoted(records.times(folder))
    rows = [
        "| kernel | chapter | idea | verified | time | time, causal |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, kernel in JUDGED.items():
        sources = {"NumPy": kernel.reference and f"refimpl/{name}.py", "kernel": f"numba_cuda/{name}.py"}
        links = ", ".join(f"[{word}]({path})" for word, path in sources.items() if path)
        cells = [f"`{name}` ({links})", kernel.chapter, kernel.idea, _verified(verified, name)]
        cells += [_rate(points.get((name, causal))) for causal in (False, True)]
        rows.append(f"| {' | '.join(cells)} |")
    old = [" Stale: the kernel was changed since."] if any("(stale)" in row for row in rows) else []
    return "\n".join(["", *rows, "", "\n".join(_legend(run, points)) + "".join(old), ""])


def quoted(points: list) -> dict:
    """The fp16 points at the quoted size, by (kernel, causal)."""
    return {(p.kernel, p.causal): p for p in points if p.dtype == "fp16" and p.has(**QUOTED)}


def _verified(verified: dict, name: str) -> str:
    """What the record says of a kernel, by storage type."""
    found = {dtype: verified[name, dtype] for dtype in DTYPES
             if not verified.get((name, dtype), NONE).startswith(NONE)}  # fmt: skip
    said = "; ".join(f"{dtype} {text.removesuffix(' stale')}" for dtype, text in found.items())
    old = " (stale)" if any(text.endswith(" stale") for text in found.values()) else ""
    return said + old or "no record"


def _rate(point) -> str:
    """Median time and rate."""
    if point is None:
        return "no record"
    batch = "" if point.size["B"] == 1 else f" for a batch of {point.size['B']}"
    return f"{point.median_ms:.2f} ms{batch}, {point.tflops:.1f} TFLOP/s{' (stale)' if point.stale else ''}"


def _legend(run: dict | None, points: dict) -> list[str]:
    """What the columns mean, and on what they were measured."""
    lines = []
    if run:
        where = f"{run['device']}, {run['made'][:10]}"
        lines.append(
            f"Verified: cases passed of cases run on {where}, and the worst error over its bound."
            + (" Cases or bounds were changed since: the counts are of the older ones."
               if document.judged_otherwise(run) else "")
        )  # fmt: skip
    else:
        lines.append(
            "Verified: no GPU run has been recorded yet; `make verify` shows what the emulator says."
        )
    if points:
        p = next(iter(points.values()))
        s = p.size
        lines.append(
            f"Times: median on {p.device}, fp16, {s['Hq']} heads, N = {s['Nq']}, d = {s['d']}, batch 1 if no other is "
            "named; operations counted as 4 B H N² d, half of it when causal."
        )
    return lines


def update(check: bool = False, readme: Path = README) -> int:
    """Write the tables into the README, or with `check` say whether they are there already.

    Returns
    -------
    int
        0, or 1 if `check` found it out of step.
    """
    text = readme.read_text()
    tables = {"steps": table, "speed": readme_speed.table, "peers": readme_peers.table}
    fresh = BLOCK.sub(lambda match: match[1] + tables[match[2]]() + match[4], text)
    if check:
        if fresh != text:
            print("figures: a table in the README is out of step; run `make figures`", file=sys.stderr)
        return int(fresh != text)
    readme.write_text(fresh)
    print(readme)
    return 0
