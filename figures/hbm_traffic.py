"""How many bytes cross between HBM and the chip, by step: against the length, and against the tile.

Drawn is the *tile fills* ledger, by the formulas in the docstrings of refimpl's steps: each tile counts once
for each visit. Caches may serve part of it; what a record has measured is drawn as points.
"""

from dataclasses import dataclass, field

import numpy as np

from figures import records
from figures.style import INK, MUTED, STEP_COLOUR, Picture, label_ends, picture, styled
from refimpl.tiling import DEFAULT_TILE, Tile
from verify.bytes import Setting, compulsory, evaluate, formula
from verify.cases import dense

D, E = 64, 2  # head dimension, and bytes an element: fp16
LABELS = {
    "step0_standard": "step0: standard, S and P in HBM",
    "step1_fused": "step1: fused, K twice",
    "step2_flash_v1": "step2: FlashAttention v1",
    "step3_flash_v2": "step3: FlashAttention v2",
}


@dataclass(frozen=True)
class Traffic:
    """Lines over one abscissa.

    Attributes
    ----------
    x : ndarray
        Lengths N or tile sizes.
    steps : dict of str to ndarray
        Bytes a head, tile fills, by step.
    idealised : ndarray
        The chapter's account of standard attention: S and P in 16 bits, written once and read once each, and
        Q, K, V, O once.
    compulsory : ndarray
        Q, K, V read once, O written once: the least any method can move.
    note : str
        What is held fixed.
    measured : list of (x, bytes, step, device)
        DRAM bytes from hardware counters.
    """

    x: np.ndarray
    steps: dict
    idealised: np.ndarray
    compulsory: np.ndarray
    note: str
    measured: list = field(default_factory=list)


def fills(step: str, N: int, tile: Tile, Nk: int | None = None, d: int = D, causal: bool = False) -> int:
    """Bytes in fp16 that one head moves, N queries and Nk keys (N if left out), by this step's docstring."""
    return evaluate(formula(step, "fills"), Setting(dense(N, Nk, d=d), causal, tile, dtype="fp16"))


def least(N: int, d: int = D) -> int:
    """Bytes in fp16 that any method moves for one head: the compulsory minimum."""
    return compulsory(Setting(dense(N, d=d), dtype="fp16"))


def idealised(N):
    """The chapter's 8 N² + 8 N d bytes, with its element of two bytes."""
    return E * (4 * N * N + 4 * N * D)


def data_by_length() -> Traffic:
    """N from 256 to 64 K at the default tile."""
    N = 2 ** np.arange(8, 17)
    steps = {step: np.array([fills(step, int(n), DEFAULT_TILE) for n in N], float) for step in LABELS}
    note = f"one head, d = {D}, fp16, tile {DEFAULT_TILE.Br}×{DEFAULT_TILE.Bc}"
    measured = [
        (p.size["Nq"], p.dram_bytes / (p.size["B"] * p.size["Hq"]), p.kernel, p.device)
        for p in records.times()
        if p.dram_bytes and p.dtype == "fp16" and not p.causal and p.size["d"] == D and p.kernel in LABELS
    ]
    return Traffic(N, steps, idealised(N.astype(float)), np.array([least(int(n)) for n in N]), note, measured)


def data_by_tile() -> Traffic:
    """Square tiles from 16 to 256 at N = 8192."""
    N, size = 8192, 2 ** np.arange(4, 9)
    steps = {step: np.array([fills(step, N, Tile(int(b), int(b))) for b in size], float) for step in LABELS}
    flat = np.ones(len(size))
    return Traffic(
        size, steps, idealised(N) * flat, 4.0 * N * D * E * flat, f"one head, N = {N}, d = {D}, fp16"
    )


@styled
def fig_by_length(data: Traffic) -> Picture:
    """Draw bytes against N, both logarithmic."""
    figure = picture()
    ax = figure.subplots()
    _lines(ax, data)
    ax.set(xlabel="sequence length N", title=f"HBM traffic: {data.note}")
    ax.set_xticks(data.x, [f"{n}" if n < 1024 else f"{n // 1024}K" for n in data.x])
    return figure


@styled
def fig_by_tile(data: Traffic) -> Picture:
    """Draw bytes against the side of a square tile, both logarithmic."""
    figure = picture()
    ax = figure.subplots()
    _lines(ax, data)
    ax.set(xlabel="tile Br = Bc", title=f"HBM traffic by tile: {data.note}")
    ax.set_xticks(data.x, [str(b) for b in data.x])
    return figure


def _lines(ax, data: Traffic) -> None:
    """Draw the lines, the points, and the labels beside them."""
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ends = []
    for step, moved in data.steps.items():
        ax.plot(data.x, moved, color=STEP_COLOUR[step], label=step)
        ends.append((data.x[-1], moved[-1], LABELS[step], STEP_COLOUR[step]))
    models = (
        (data.idealised, "chapter's idealised standard", MUTED, ":"),
        (data.compulsory, "compulsory minimum", INK, "--"),
    )
    for moved, text, colour, dashes in models:
        ax.plot(data.x, moved, color=colour, linestyle=dashes, linewidth=1.4)
        ends.append((data.x[-1], moved[-1], text, colour))
    for x, moved, step, device in data.measured:
        ax.plot(x, moved, "o", color=STEP_COLOUR[step])
        ax.annotate(device, (x, moved), textcoords="offset points", xytext=(5, -9), fontsize=7.5)
    ax.minorticks_off()
    ax.set_xlim(data.x[0], data.x[-1])
    ax.set_ylabel("bytes a head (tile fills, by formula)")
    _byte_ticks(ax)
    label_ends(ax, ends)


def _byte_ticks(ax) -> None:
    """Write bytes in decimal units, which is how bandwidth is stated."""
    units = {0: "B", 3: "kB", 6: "MB", 9: "GB", 12: "TB"}
    low, high = np.log10(ax.get_ylim())
    powers = range(int(np.ceil(low)), int(np.floor(high)) + 1)
    ax.set_yticks([10.0**p for p in powers], [f"{10 ** (p % 3)} {units[p - p % 3]}" for p in powers])
