"""Rates of the backward pass on record, beside the peers that they are held against."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from figures import records
from figures.style import INK, MUTED, STEP_COLOUR, Picture, label_ends, picture, styled
from figures.suite import PEERS as NAMES
from verify.bench.limits import BACKWARD
from verify.bench.suite import H200, stale
from verify.document import RECORDS

OURS = ("step6_flash_v3", "step5_tensor_core")
PEERS = {"sdpa_cudnn": INK, "sdpa_flash": MUTED}


@dataclass(frozen=True)
class Rates:
    """Backward passes on record.

    Attributes
    ----------
    lines : dict of (name, d, causal) to list of (N, TFLOP/s)
        Sorted by length. Five products counted, half of each when causal.
    reached : float or None
        What large products reach there, measured, in TFLOP/s.
    stale : tuple of str
        Kernels that were changed since.
    note : str
        Where and when, or that there is none.
    """

    lines: dict
    reached: float | None
    stale: tuple
    note: str


def data_by_length(folder: Path = RECORDS) -> Rates:
    """The newest record of the suite; it may have no backward passes yet."""
    record = records.newest("suite", folder)
    if record is None:
        return Rates({}, None, (), "no record of the suite yet")
    lines = {}
    for row in record["rows"]:
        if _shown(row):
            lines.setdefault((row["name"], row["d"], row["causal"]), []).append((row["N"], row["tflops"]))
    note = f"{record['device']}, {record['made'][:10]}"
    if not lines:
        return Rates({}, None, (), f"no backward pass on record yet ({note})")
    old = tuple(name for name in OURS if f"{name} {BACKWARD}" in stale(record))
    reached = record["ceilings"]["measured"].get("tflops")
    return Rates({key: sorted(points) for key, points in lines.items()}, reached, old, note)


def _shown(row):
    """Whether it is a rate of somebody's backward pass in the suite's first storage type."""
    ours = row["direction"] == BACKWARD and row["dtype"] == H200.dtype
    return ours and row["name"] in (*OURS, *PEERS) and "tflops" in row


@styled
def fig_by_length(data: Rates) -> Picture:
    """Draw rate against length, a panel a head dim and mask."""
    figure = picture("tall")
    figure.set_size_inches(7.6, 5.2)
    panels = figure.subplots(len(H200.dims), len(H200.masks), sharex=True, sharey=True)
    top = max([rate for points in data.lines.values() for _, rate in points] + [data.reached or 100]) * 1.08
    for (r, c), ax in np.ndenumerate(panels):
        d, causal = H200.dims[r], H200.masks[c]
        ax.set_xscale("log", base=2)
        ax.set(xlim=(H200.lengths[0] / 1.15, H200.lengths[-1] * 1.15), ylim=(0, top))
        ax.set_xticks(H200.lengths, [f"{N // 1024}K" for N in H200.lengths])
        ax.set_title(f"d = {d}, {'causal' if causal else 'no mask'}", fontsize=9)
        if data.reached:
            ax.axhline(data.reached, color=MUTED, linewidth=0.9)
        ends = [_line(ax, data, name, d, causal) for name in (*OURS, *PEERS) if (name, d, causal) in data.lines]
        if not ends:
            ax.text(0.5, 0.5, "no record", transform=ax.transAxes, ha="center", color=MUTED)
        elif c == len(H200.masks) - 1:
            if data.reached:
                ends.append((H200.lengths[-1], data.reached, f"large products\n{data.reached:.0f}", MUTED))
            label_ends(ax, ends, gap=0.13)
    for ax in panels[-1]:
        ax.set_xlabel("sequence length N")
    for ax in panels[:, 0]:
        ax.set_ylabel("TFLOP/s")
    old = f"\nChanged since: {', '.join(data.stale)}" if data.stale else ""
    size = f"{H200.dtype}, {H200.heads} heads, {H200.tokens // 1024}K tokens"
    figure.suptitle(f"Backward passes: {data.note}; {size}{old}", fontsize=10)
    return figure


def _line(ax, data, name, d, causal):
    """One kernel's line; returns its end with its name, for `label_ends`."""
    words, colour = NAMES.get(name, name.split("_")[0].replace("step", "step ")), (PEERS | STEP_COLOUR)[name]
    N, rate = zip(*data.lines[name, d, causal], strict=True)
    ax.plot(N, rate, "--" if name in PEERS else "-", marker="o", markersize=3.5, color=colour)
    return N[-1], rate[-1], words, colour
