"""What the chapter states, beside what a recomputation gives: numbers of the claims ledger, drawn."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from figures.error_matrix import WRONG
from figures.style import EDGE, FAINT, INK, LIVE, MUTED, Picture, label_ends, picture, styled
from verify.claims.account import compulsory_elements, flash_forward_elements, forward_flops
from verify.claims.hardware import A100, H100
from verify.claims.inventory import TITLES
from verify.claims.ledger import VERDICTS, load

STATED, RIGHT = WRONG, "#33568C"
SHADES = dict(zip(VERDICTS, (WRONG, EDGE, "#8C8C8C", "#B8B8B8", "#DDDDDD", LIVE), strict=True))


def entry(id: str) -> tuple:
    """What the text states and what the ledger finds, of one entry."""
    claim = load()[id]
    return claim.stated, claim.recompute().value


def data_verdicts() -> dict[str, Counter]:
    """How many entries of each section were declared what; a test holds each to its recomputation."""
    return {group: Counter(c.verdict for c in load().values() if c.group == group) for group in TITLES}


@styled
def fig_verdicts(data: dict[str, Counter]) -> Picture:
    """Draw a bar a section, cut up by verdict, with the counts inside."""
    figure = picture("strip")
    figure.set_size_inches(7.6, 3.4)
    ax = figure.subplots()
    for y, tally in enumerate(data.values()):
        left = 0
        for verdict in (v for v in VERDICTS if tally[v]):
            ax.barh(y, tally[verdict], left=left, color=SHADES[verdict], edgecolor="white", height=0.78)
            if tally[verdict] > 2:
                ink = "white" if verdict == "wrong" else INK
                middle = left + tally[verdict] / 2
                ax.text(middle, y, str(tally[verdict]), ha="center", va="center", fontsize=7.5, color=ink)
            left += tally[verdict]
    ax.set_yticks(range(len(data)), [f"{group}  {TITLES[group][0]}" for group in data])
    ax.set(ylim=(len(data) - 0.5, -0.5), xlabel="entries of the ledger", ylabel="section")
    ax.grid(axis="y", visible=False)
    handles = [ax.barh(0, 0, color=SHADES[verdict], label=verdict) for verdict in VERDICTS]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(VERDICTS), fontsize=8)
    return figure


@dataclass(frozen=True)
class Intensity:
    """FLOP a byte in one place of the chapter: as stated, and recomputed by ledger (NaN: not asked)."""

    label: str
    stated: float
    fills: float
    compulsory: float


def data_intensity() -> list[Intensity]:
    """The standard kernel, then four statements about the tiled one, all at d = 64."""
    N, d = 2048, 64
    fills = forward_flops(N, d) / (2 * flash_forward_elements(N, d, 128))
    standard, flash, tiled = (entry(id) for id in ("18.1-005", "18.3-031", "18.3-051"))
    heads, cases = entry("18.6-067")
    least = forward_flops(1 << 14, d) / (2 * compulsory_elements(1 << 14, d))
    by_case = [cases[case]["d = 64"] for case in ("flash, tile fills, Br = 128", "flash, compulsory")]
    return [
        Intensity("18.1-005  standard", standard[0], standard[1], np.nan),
        Intensity("18.3-031  tiled, N d / 2", flash[0], fills, flash[1]),
        Intensity("18.3-051  tiled, M / 3d, A100", tiled[0]["A100"], tiled[1]["A100"], least),
        Intensity("18.3-051  tiled, M / 3d, H100", tiled[0]["H100"], tiled[1]["H100"], least),
        Intensity("18.6-067  tiled, d / 2", heads["d = 64"], *by_case),
    ]


@styled
def fig_intensity(data: list[Intensity]) -> Picture:
    """Draw each statement on one logarithmic axis, with the ridges of two GPUs."""
    figure = picture("strip")
    ax = figure.subplots()
    ax.set(xscale="log", xlim=(4, 6e5), ylim=(len(data) - 0.4, -0.9))
    for device, side in ((A100, "right"), (H100, "left")):
        ax.axvline(device.ridge, color=INK, linewidth=0.9, linestyle="--")
        place = {"ha": side, "va": "center", "fontsize": 8, "color": INK}
        text = f"ridge {device.name.split()[0]}"
        ax.text(device.ridge * (0.93 if side == "right" else 1.08), -0.65, text, **place)
    for y, row in enumerate(data):
        ax.hlines(y, min(row.stated, row.fills), max(row.stated, row.fills), color=MUTED, linewidth=0.8)
        below = row.stated < row.fills
        place = {"xytext": (-8 if below else 8, 0), "ha": "right" if below else "left", "va": "center"}
        text = f"{row.stated:,.0f}"
        ax.annotate(text, (row.stated, y), textcoords="offset points", color=STATED, fontsize=8.5, **place)
    y = range(len(data))
    ax.plot([r.stated for r in data], y, "x", color=STATED, markeredgewidth=1.8, label="stated")
    ax.plot([r.fills for r in data], y, "o", color=RIGHT, label="bytes of the tile fills")
    look = {"color": RIGHT, "markerfacecolor": "white", "label": "of the compulsory minimum"}
    ax.plot([r.compulsory for r in data], y, "o", **look)
    ax.set_yticks(y, [r.label for r in data])
    ax.set_xticks([10, 100, 1000, 10000, 100000], ["10", "100", "1,000", "10,000", "100,000"])
    ax.minorticks_off()
    ax.set(xlabel="intensity, FLOP a byte (d = 64, fp16)", ylabel="entry")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8.5)
    return figure


@dataclass(frozen=True)
class Lengths:
    """Megabytes of one head by length, and how many times less than standard attention they are said to be."""

    N: np.ndarray
    stated: np.ndarray
    standard: np.ndarray
    fills: np.ndarray
    compulsory: np.ndarray
    reduction: tuple[float, float]  # stated and recomputed, at the last length


def data_traffic() -> Lengths:
    """Table 18-10 of the chapter."""
    stated, cases = entry("18.3-045")
    standard = entry("18.3-044")[1]["8 N^2 + 8 N d"]
    said, found = (list(side.values())[-1] for side in entry("18.3-046"))
    lines = (stated, standard, cases["fills, Br = 128"], cases["compulsory, 8 N d"])
    N = np.array([int(row.split("=")[1]) for row in stated])
    return Lengths(N, *(np.array(list(line.values())) for line in lines), (said, found))


@styled
def fig_traffic(data: Lengths) -> Picture:
    """Draw megabytes against the length, both logarithmic, and shade what no method can reach."""
    figure = picture()
    figure.set_size_inches(7.6, 3.6)
    ax = figure.subplots()
    ax.set(xscale="log", yscale="log", xlim=(data.N[0] * 0.93, data.N[-1]), ylim=(0.15, 4000))
    ax.set_xscale("log", base=2)
    ax.fill_between(data.N, 0.1, data.compulsory, color=FAINT, linewidth=0)
    ax.text(data.N[-1] * 0.85, 0.3, "less than Q, K, V and O", ha="right", fontsize=8.5, color=MUTED)
    lines = (
        (data.standard, MUTED, "-", "", "standard"),
        (data.fills, RIGHT, "-", "", f"tile fills, Br = 128:\n{data.reduction[1]:.1f} times less"),
        (data.compulsory, INK, "--", "", "compulsory minimum"),
        (data.stated, STATED, ":", "x", f"stated:\n{data.reduction[0]:.0f} times less"),
    )
    for moved, colour, dashes, marker, _ in lines:
        ax.plot(data.N, moved, color=colour, linestyle=dashes, marker=marker, markeredgewidth=1.8)
    label_ends(ax, [(data.N[-1], moved[-1], text, colour) for moved, colour, *_, text in lines], gap=0.14)
    ax.set_xticks(data.N, [str(n) for n in data.N])
    ax.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    ax.minorticks_off()
    ax.set(xlabel="sequence length N", ylabel="MB a head (d = 64, fp16)")
    return figure
