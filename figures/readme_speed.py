"""The README's table of speeds: the tensor-core kernels beside the peers they are held against, by their record."""

from pathlib import Path

from figures import records
from verify import document
from verify.bench.limits import BACKWARD, FORWARD
from verify.bench.record import by_point
from verify.bench.stats import paired
from verify.bench.suite import (
    BARS,
    H200,
    OWN_BARS,
    first_call_s,
    latency_us,
    restart_s,
    stale,
    standing,
)

SHOWN = {"step6_flash_v3": ("sdpa_cudnn", "sdpa_flash"), "step5_tensor_core": ("sdpa_flash",)}
PEERS = {"sdpa_cudnn": "cuDNN", "sdpa_flash": "FlashAttention-2"}  # as PyTorch carries them


def table(folder: Path = document.RECORDS) -> str:
    """Return the table as Markdown, with what it says and where it is from; a line of excuse without a record.

    Parameters
    ----------
    folder : Path
        Of records.
    """
    record = records.newest("suite", folder)
    if record is None:
        return "\nNo run of the suite has been recorded yet.\n"
    tables = _rates(record, FORWARD), _rates(record, BACKWARD) if _timed(record, BACKWARD) else []
    shown = (line for lines in tables if lines for line in (*lines, ""))
    return "\n".join(["", *shown, *_besides(record), *_legend(record), ""])


def _timed(record, direction):
    """Whether one of ours was timed there."""
    return any(row["direction"] == direction and row["name"] in SHOWN and "ms" in row for row in record["rows"])


def _rates(record, direction):
    """The lines of one direction's table."""
    found = by_point(row for row in record["rows"] if (row["direction"], row["dtype"]) == (direction, H200.dtype))
    names = [f"{length // 1024}K" for length in H200.lengths]
    lines = [f"| {direction}, fp16 | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    for kernel, peers in SHOWN.items():
        for d in H200.dims:
            for causal in H200.masks:
                cells = [_cell(found, kernel, peers, d, causal, N) for N in H200.lengths]
                mask = ", causal" if causal else ""
                lines.append(f"| `{kernel}`, d = {d}{mask} | {' | '.join(cells)} |")
    return lines


def _cell(found, kernel, peers, d, causal, N):
    """Rate, and how many times as fast as each peer."""
    rows = next((r for r in found.values() if _is(next(iter(r.values())), d, causal, N)), {})
    ours = rows.get(kernel, {})
    if "ms" not in ours:
        return "-"
    ratios = [f"{paired(ours['ms'], rows[peer]['ms']).value:.2f}" for peer in peers if "ms" in rows.get(peer, {})]
    return " · ".join([f"{ours['tflops']:.0f}", *ratios])


def _is(row, d, causal, N):
    return (row["d"], row["causal"], row["N"]) == (d, causal, N)


def _legend(record):
    """What a cell says, the means with their intervals, where and how it was measured."""
    means = []
    for bar in BARS:
        held = standing(bar, record)
        if held.mean:
            way = "" if bar.direction == FORWARD else f" {bar.direction}"
            means.append(f"`{bar.kernel}`{way} {held.mean} × {PEERS[bar.peer]}")
    versions = "; ".join(f"{PEERS[name]}: {record['peers'][name]}" for name in PEERS)
    old = ", ".join(stale(record))
    return [
        f"Cells: TFLOP/s · times as fast as {' · as '.join(PEERS[p] for p in SHOWN['step6_flash_v3'])} "
        "(step 5: as FlashAttention-2 alone), medians of paired runs in turns, cold L2."
        + (" Backward: five products counted, dQ added up atomically." if _timed(record, BACKWARD) else ""),
        f"Geometric means with 95 % intervals: {', '.join(means)}.",
        f"{record['device']}, {record['made'][:10]}, {H200.heads} heads, {H200.tokens // 1024}K tokens; {versions}."
        + (f" Stale: {old}." if old else ""),
    ]


def _besides(record):
    """The lines of a table of what is held to bars besides: the other storage type, the host's time, first calls."""
    rows = {
        f"{way}, times as fast in {H200.other} as in {H200.dtype}, N = {H200.other_lengths[0]}":
            [next((held.mean for bar in OWN_BARS if (bar.kernel, bar.direction) == (kernel, way)
                   and (held := standing(bar, record)).mean), None) for kernel in SHOWN]
        for way in (FORWARD, BACKWARD)
    }  # fmt: skip
    for what, row, waited in (("launch by launch", "queued_us", "latency_us"),
                              ("as a CUDA graph", "graph_queued_us", "graph_us")):  # fmt: skip
        rows[f"host's time for a call, {what}; after a wait"] = [
            _both("{:.1f} µs", *(latency_us(kernel, record, entry) for entry in (row, waited))) for kernel in SHOWN
        ]
    rows["first call, compiled; found compiled by another process"] = [
        _both("{:.2f} s", first_call_s(kernel, record), restart_s(kernel, record)) for kernel in SHOWN
    ]
    lines = [f"| {what} | {' | '.join(str(cell or '-') for cell in cells)} |" for what, cells in rows.items()
             if any(cells)]  # fmt: skip
    if not lines:
        return []
    head = [f"| means, and worst points | {' | '.join(f'`{kernel}`' for kernel in SHOWN)} |"]
    return [*head, f"| --- |{' --- |' * len(SHOWN)}", *lines, ""]


def _both(form, *numbers):
    """Two numbers in one cell; None if one was not measured."""
    return None if None in numbers else "; ".join(form.format(number) for number in numbers)
