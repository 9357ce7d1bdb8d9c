"""Speeds that the chapter prints, judged by what they imply: rates, shares of a peak, and gains from splitting."""

from dataclasses import dataclass

import numpy as np

from figures.claims import RIGHT, STATED, entry
from figures.style import INK, MUTED, Picture, label_ends, picture, styled
from verify.claims.hardware import A100, H100
from verify.claims.s18_5_tables import FORWARD, forward_work, name


@dataclass(frozen=True)
class Rate:
    """TFLOP/s that a printed time implies, with a causal mask and without."""

    label: str
    ms: float
    causal: float
    full: float


@dataclass(frozen=True)
class Rates:
    """Rows of a table of times, and the limits in TFLOP/s: v2's best by the same section, and the GPU's peak."""

    rows: list[Rate]
    best: float
    peak: float


def data_rates() -> Rates:
    """Table 18-17, version 2 on an A100."""
    stated, _ = entry("18.5-061")
    best, _ = entry("18.5-060")
    rows = [(name(row), [forward_work(row, causal) for causal in (True, False)]) for row in FORWARD]
    rates = [Rate(label, stated[label], *(w / stated[label] / 1e9 for w in work)) for label, work in rows]
    return Rates(rates, best["TFLOP/s"], A100.fp16)


@styled
def fig_rates(data: Rates) -> Picture:
    """Draw the implied rates against v2's best and the GPU's peak; red where a limit is passed."""
    figure = picture("strip")
    figure.set_size_inches(7.6, 3.5)
    ax = figure.subplots()
    for y, row in enumerate(data.rows):
        colour = STATED if row.causal > data.best else RIGHT
        ax.hlines(y, row.causal, row.full, color=colour, linewidth=2)
        ax.plot(row.causal, y, "o", color=colour, markerfacecolor="white")
        end = STATED if row.full > data.peak else RIGHT
        ax.plot(row.full, y, "o", color=end)
        place = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "fontsize": 8.5}
        back = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        ax.annotate(f"{row.full:.0f}", (row.full, y), color=end, bbox=back, **place)
    for limit, text, side in ((data.best, "v2's best", "right"), (data.peak, "peak of an A100", "left")):
        ax.axvline(limit, color=INK, linewidth=0.9, linestyle="--")
        place = {"ha": side, "va": "center", "fontsize": 8.5, "color": INK}
        ax.text(limit + (6 if side == "left" else -6), -0.85, f"{text}: {limit}", **place)
    ax.set_yticks(range(len(data.rows)), [f"{row.label}: {row.ms:.2f} ms" for row in data.rows], fontsize=8.5)
    ax.set(xlim=(0, 570), ylim=(len(data.rows) - 0.4, -1.3), ylabel="row of table 18-17")
    ax.set_xlabel("TFLOP/s that the time implies: ○ if the mask is causal, ● if there is none")
    return figure


@dataclass(frozen=True)
class Shares:
    """Two tables of utilisation.

    Attributes
    ----------
    peaks : dict of str to (float, str)
        TFLOP/s that rate and share of a row of table 18-21 imply for the peak, and the type.
    stated : dict of str to dict of str to float
        Percent of the peak in table 18-24, by head dimension and version.
    limit : dict of str to float
        Percent that HBM allows at the intensity which table 18-24 gives.
    """

    peaks: dict
    stated: dict
    limit: dict


def data_utilisation() -> Shares:
    """Tables 18-21 and 18-24 of the chapter, for an H100."""
    said, found = entry("18.6-029")
    true_peak = {"BF16": H100.fp16, "FP8": H100.fp8}
    peaks = {
        f"{row}, {kind}": (true_peak[kind] * found[row][kind] / share, kind)
        for kind in true_peak
        for row, share in ((row, said[row][kind]) for row in said)
    }
    stated, bound = entry("18.6-068")
    return Shares(peaks, stated, {d: both["v3"] for d, both in bound["hi"].items()})


@styled
def fig_utilisation(data: Shares) -> Picture:
    """Draw the peaks that the shares imply beside an H100's, and shares beside the limit by intensity."""
    figure = picture("strip")
    figure.set_size_inches(7.6, 3.5)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    for y, (peak, kind) in enumerate(data.peaks.values()):
        truth = {"BF16": H100.fp16, "FP8": H100.fp8}[kind]
        left.hlines(y, peak, truth, color=MUTED, linewidth=0.8)
        left.plot(peak, y, "x", color=STATED, markeredgewidth=1.8)
        left.plot(truth, y, "o", color=RIGHT)
        place = {"xytext": (-8, 0), "textcoords": "offset points", "va": "center", "ha": "right"}
        left.annotate(f"{peak:,.0f}", (peak, y), color=STATED, fontsize=8.5, **place)
    left.set_yticks(range(len(data.peaks)), list(data.peaks), fontsize=8)
    left.set(xlim=(0, 2200), ylim=(len(data.peaks) - 0.5, -0.5), xlabel="peak, TFLOP/s", ylabel="row")
    left.set_title("Table 18-21", fontsize=9.5)
    for at, (d, shares) in enumerate(data.stated.items()):
        right.hlines(data.limit[d], at - 0.38, at + 0.38, color=RIGHT, linewidth=2)
        for version, dx in (("v2", -0.17), ("v3", 0.17)):
            right.plot(at + dx, shares[version], "x", color=STATED, markeredgewidth=1.8)
            right.text(at + dx, shares[version] + 3, version, ha="center", fontsize=8, color=STATED)
    right.set_xticks(range(len(data.stated)), [d.removeprefix("d = ") for d in data.stated])
    right.set(ylim=(0, 100), xlabel="head dimension d", ylabel="% of the tensor cores' peak")
    right.set_title("Table 18-24", fontsize=9.5)
    marks = (
        ({"marker": "x", "color": STATED, "markeredgewidth": 1.8}, "by the table"),
        ({"marker": "o", "color": RIGHT}, "H100 SXM5, dense"),
        ({"color": RIGHT, "linestyle": "-"}, "limit at the table's own intensity"),
    )
    handles = [left.plot([], [], **({"linestyle": ""} | look), label=text)[0] for look, text in marks]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8.5)
    return figure


@dataclass(frozen=True)
class Splits:
    """Microseconds that one head's K and V of 128,000 tokens take, by number of blocks that share them.

    Attributes
    ----------
    blocks, stated, bound : ndarray
        `stated` falls as 1 / blocks; `bound` is the larger of SM and HBM time.
    hbm : float
        What HBM needs, however they are split.
    gain : tuple of float
        Stated and recomputed.
    """

    blocks: np.ndarray
    stated: np.ndarray
    bound: np.ndarray
    hbm: float
    gain: tuple[float, float]


def data_splits(N: int = 128_000, d: int = 128) -> Splits:
    """An A100, each block on an SM of its own that reads 64 bytes a clock."""
    moved = 2 * 2 * N * d
    alone, hbm = moved / (64 * A100.boost_ghz * 1e3), moved / (A100.gb_per_s * 1e3)
    blocks = np.geomspace(1, 1000, 61)
    return Splits(blocks, alone / blocks, np.maximum(alone / blocks, hbm), hbm, entry("18.8-026"))


@styled
def fig_splits(data: Splits) -> Picture:
    """Draw time against blocks, both logarithmic."""
    figure = picture("strip")
    ax = figure.subplots()
    ax.set(xscale="log", yscale="log", xlim=(1, data.blocks[-1]), ylim=(0.4, 1500))
    ax.axhline(data.hbm, color=INK, linestyle="--", linewidth=0.9)
    ax.text(1.15, data.hbm * 0.86, "HBM, however split", va="top", fontsize=8.5, color=INK)
    ax.plot(data.blocks, data.stated, color=STATED, linestyle=":")
    ax.plot(data.blocks, data.bound, color=RIGHT)
    said, found = data.gain
    ends = [
        (data.blocks[-1], data.stated[-1], f"stated:\n{said:,.0f} times as fast", STATED),
        (data.blocks[-1], data.bound[-1], f"at most\n{found:.0f} times as fast", RIGHT),
    ]
    label_ends(ax, ends, gap=0.2)
    ax.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    ax.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    ax.minorticks_off()
    ax.set(xlabel="blocks that share one head's keys (A100)", ylabel="time, µs")
    return figure
