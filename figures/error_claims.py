"""How large an error is that the chapter does not see, or sees the wrong way round: D per tile, and bf16."""

from dataclasses import dataclass

import numpy as np

from figures.claims import RIGHT, STATED, entry
from figures.style import INK, MUTED, Picture, label_ends, picture, styled
from refimpl import oracle
from verify.claims.listings_18_4 import tiled_backward, tiled_forward
from verify.claims.s18_4_numerics import backward_error, forward_error

GRADIENTS = ("dQ", "dK", "dV")
N, D = 64, 8  # length and head dimension of the gradients' run


@dataclass(frozen=True)
class Rowsum:
    """Largest errors of the gradients against the oracle, by number of key tiles.

    Attributes
    ----------
    tiles : list of int
    per_tile, per_row : dict of str to list of float
        With D summed over one tile, as printed, and over the row; by gradient.
    largest : float
        Largest element of the true dQ, dK and dV.
    """

    tiles: list
    per_tile: dict
    per_row: dict
    largest: float


def data_rowsum() -> Rowsum:
    """Run the backward listing on one head of 64 keys, in 1 to 16 tiles."""
    Q, K, V, dO = np.random.default_rng(1804).standard_normal((4, N, D))
    wanted = [g[0, 0] for g in oracle.attention_backward(*(x[None, None] for x in (Q, K, V, dO)))[:3]]
    scale, tiles = 1 / np.sqrt(D), [1, 2, 4, 8, 16]
    found = {}
    for kind in ("tile", "row"):
        found[kind] = {name: [] for name in GRADIENTS}
        for Bc in (N // count for count in tiles):
            saved = tiled_forward(Q, K, V, 16, Bc, scale, with_statistics=True)
            got = tiled_backward(Q, K, V, dO, saved, 16, Bc, scale, D=kind)
            for name, a, b in zip(GRADIENTS, got, wanted, strict=True):
                found[kind][name].append(float(np.abs(a - b).max()))
    return Rowsum(tiles, found["tile"], found["row"], max(float(np.abs(g).max()) for g in wanted))


@styled
def fig_rowsum(data: Rowsum) -> Picture:
    """Draw the errors against the number of key tiles, logarithmic.

    Parameters
    ----------
    data : Rowsum
    """
    figure = picture("strip")
    figure.set_size_inches(7.6, 3.4)
    ax = figure.subplots()
    ax.set(xscale="log", yscale="log", xlim=(0.94, data.tiles[-1]), ylim=(1e-17, 30))
    ax.set_xscale("log", base=2)
    ends = []
    for name, dashes in zip(GRADIENTS, ("-", "--", ":"), strict=True):
        wrong = data.per_tile[name] != data.per_row[name]
        for errors, colour, text in (
            (data.per_tile[name], STATED, f"{name}, D of each tile"),
            (data.per_row[name], RIGHT, f"{name}, D of the row" if wrong else f"{name}, which needs no D"),
        ):
            if colour is RIGHT or wrong:
                ax.plot(data.tiles, errors, color=colour, linestyle=dashes, marker="o", markersize=4)
                ends.append((data.tiles[-1], errors[-1], text, colour))
    ax.axhline(data.largest, color=INK, linewidth=0.9)
    ends.append((data.tiles[-1], data.largest, "largest true gradient", INK))
    ax.set_xticks(data.tiles, [str(count) for count in data.tiles])
    ax.set_yticks([1e-15, 1e-10, 1e-5, 1])
    ax.minorticks_off()
    ax.set(xlabel=f"number of key tiles ({N} keys)", ylabel="largest error")
    ax.set_title("Gradients of the tiled backward listing, against fp64")
    label_ends(ax, ends, gap=0.085)
    return figure


def data_storage() -> dict:
    """Relative errors in fp16 and bf16, by output, and what the chapter says that bf16's should be."""
    stated, _ = entry("18.4-075")
    errors = {dtype: {"O": forward_error(dtype)} | backward_error(dtype) for dtype in ("fp16", "bf16")}
    found = {dtype: {name: e["normwise"] for name, e in by.items()} for dtype, by in errors.items()}
    return found | {"stated": {name: stated[name] * error for name, error in found["fp16"].items()}}


@styled
def fig_storage(data: dict) -> Picture:
    """Draw the errors of each output on one logarithmic axis.

    Parameters
    ----------
    data : dict of str to dict of str to float
        "fp16", "bf16" and "stated", by output.
    """
    figure = picture("strip")
    figure.set_size_inches(7.6, 2.5)
    ax = figure.subplots()
    looks = {
        "fp16": {"marker": "o", "color": MUTED, "label": "fp16"},
        "bf16": {"marker": "o", "color": RIGHT, "label": "bf16"},
        "stated": {"marker": "x", "color": STATED, "label": "bf16, by the chapter"},
    }
    y = np.arange(len(data["fp16"]))
    ax.hlines(y, list(data["stated"].values()), list(data["bf16"].values()), color=MUTED, linewidth=0.8)
    for kind, look in looks.items():
        ax.plot(list(data[kind].values()), y, linestyle="", zorder=3, markeredgewidth=1.8, **look)
    for at, name in enumerate(data["fp16"]):
        ratio = data["bf16"][name] / data["fp16"][name]
        place = {"xytext": (9, 0), "textcoords": "offset points", "va": "center", "fontsize": 8.5}
        ax.annotate(f"{ratio:.1f} × fp16", (data["bf16"][name], at), color=RIGHT, **place)
    ax.set_yticks(y, list(data["fp16"]))
    ax.set(xscale="log", xlim=(8e-5, 8e-3), ylim=(len(y) - 0.4, -0.6), ylabel="output")
    ax.set_xlabel("error relative to the output's norm, against fp64 on the same rounded inputs")
    ax.set_title("What storing in bf16 costs")
    figure.legend(loc="outside right upper", fontsize=8.5)
    return figure
