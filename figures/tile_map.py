"""Which tiles of a kernel fit a chip: a map over Br and Bc, with the rate of each tile that was timed.

Drawn from the newest record of `verify sweep`; without one, from the formula for shared memory alone.
"""

from dataclasses import dataclass, field

import numpy as np
from matplotlib.patches import Rectangle

from figures import records
from figures.style import DEAD, EDGE, INK, LIVE, MUTED, Picture, picture, styled
from verify import sweep
from verify.bench.limits import FORWARD
from verify.bench.points import Point

SIDES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Map:
    """Candidates of one kernel at one head dim and block.

    Attributes
    ----------
    title : str
    Br, Bc : list of int
    reason : dict of (Br, Bc) to str
        One word or two, for those that do not fit.
    needs : dict of (Br, Bc) to str
        What a tile takes, for those that fit.
    tflops : dict of (Br, Bc) to float
        Median rate, for those that were timed.
    """

    title: str
    Br: list
    Bc: list
    reason: dict
    needs: dict
    tflops: dict = field(default_factory=dict)


def data_fits() -> Map:
    """The first map of the newest record, or shared memory by the formula for step 3 at d = 64."""
    record = records.newest("sweep")
    if record is not None:
        return of_record(record)
    fits = {c: sweep.examine(c, "sm_90a", assemble=False)
            for c in sweep.candidates("step3_flash_v2", [64], "fp16", SIDES, SIDES)}  # fmt: skip
    rows = [sweep.as_row(candidate, fit) for candidate, fit in fits.items()]
    return of_rows(rows, "step3_flash_v2, d = 64, shared memory by its formula")


def of_record(record: dict) -> Map:
    """The map of a record's first head dim and shape of a block."""
    first = record["rows"][0]
    rows = [row for row in record["rows"] if (row["d"], row["threads"]) == (first["d"], first["threads"])]
    where = f"{record['device']}, N = {record['N']}" if any(row["ms"] for row in rows) else record["arch"]
    title = f"{record['kernel']}, d = {first['d']}, {where}"
    return of_rows(rows, title, record["N"], record["heads"], record["mask"] == "causal")


def of_rows(rows: list, title: str, N: int = 0, heads: int = 0, causal: bool = False) -> Map:
    """The map of rows as `sweep.as_row` makes them; N, heads and mask are those at which they were timed."""
    at = {(row["Br"], row["Bc"]): row for row in rows}
    needs = {
        key: f"{row['shared'] / 1024:.0f} KiB" + (f"\n{row['registers']} regs" if row["registers"] else "")
        + (f"\n{row['stack']} B in memory" if row["stack"] else "")
        for key, row in at.items()
        if not row["reason"]
    }
    rates = {
        key: Point(FORWARD, 1, heads, N, row["d"], row["dtype"], causal).work.tflops(float(np.median(row["ms"])))
        for key, row in at.items()
        if row["ms"]
    }
    reason = {key: row["reason"].split(":")[0] for key, row in at.items() if row["reason"]}
    Br, Bc = (list(dict.fromkeys(key[k] for key in at)) for k in (0, 1))
    return Map(title, Br, Bc, reason, needs, rates)


@styled
def fig_fits(data: Map) -> Picture:
    """Draw a cell a tile: what does not fit is grey with the reason, the fastest has a frame."""
    figure = picture("square")
    ax = figure.subplots()
    best = max(data.tflops, key=data.tflops.get, default=None)
    top = data.tflops[best] if best else 1.0
    for i, Br in enumerate(data.Br):
        for j, Bc in enumerate(data.Bc):
            at = Br, Bc
            if at not in data.reason | data.needs:  # a record need not hold every pair
                continue
            rate = data.tflops.get(at)
            shade = DEAD if at in data.reason else LIVE if rate is None or rate > top / 2 else EDGE
            ax.add_patch(_cell(i, j, shade, at == best))
            words = data.reason.get(at) or (f"{rate:.1f}\n" if rate else "") + data.needs[at]
            colour = MUTED if at in data.reason else INK
            ax.text(j, i, words, zorder=3, ha="center", va="center", fontsize=8, color=colour)
    ax.set(xlim=(-0.5, len(data.Bc) - 0.5), ylim=(len(data.Br) - 0.5, -0.5), xlabel="Bc", ylabel="Br")
    ax.set_xticks(range(len(data.Bc)), map(str, data.Bc))
    ax.set_yticks(range(len(data.Br)), map(str, data.Br))
    ax.grid(False)
    ax.set_title(data.title + (", TFLOP/s" if data.tflops else ""), fontsize=9)
    return figure


def _cell(i, j, colour, framed):
    """The rectangle of one tile."""
    edge = {"edgecolor": INK, "linewidth": 2} if framed else {"edgecolor": "white", "linewidth": 1}
    return Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor=colour, zorder=2 if framed else 1, **edge)
