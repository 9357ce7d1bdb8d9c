"""Which tiles of S a causal mask leaves alive: what step4 visits, and what it masks."""

from dataclasses import dataclass

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from figures.style import DEAD, EDGE, INK, LIVE, MUTED, Picture, picture, styled
from refimpl.options import TileClass, causal, classify, visible
from refimpl.tiling import Tile, spans

FILL = {TileClass.FULL: LIVE, TileClass.PARTIAL: EDGE, TileClass.EMPTY: DEAD}


@dataclass(frozen=True)
class Grid:
    """One masked S, cut into tiles."""

    Nq: int
    Nk: int
    tile: Tile
    align: str
    seen: np.ndarray  # bool (Nq, Nk)
    classes: list[tuple[slice, slice, TileClass]]

    def count(self, kind: TileClass) -> int:
        """How many tiles are of this class."""
        return sum(found is kind for *_, found in self.classes)


def grid(Nq: int, Nk: int, tile: Tile, align: str = "bottom_right") -> Grid:
    """Classify every tile of a causal S (Nq, Nk)."""
    rule = causal(Nq, Nk, align)
    classes = [
        (rows, cols, classify(rule, 0, 0, rows, cols))
        for rows in spans(Nq, tile.Br)
        for cols in spans(Nk, tile.Bc)
    ]
    seen = np.broadcast_to(visible(rule, 0, 0, slice(0, Nq), slice(0, Nk)), (Nq, Nk))
    return Grid(Nq, Nk, tile, align, seen, classes)


def data_causal() -> list[Grid]:
    """Equal lengths, fewer queries, more queries; ragged ends, Br != Bc, and the other alignment."""
    return [
        grid(24, 24, Tile(4, 4)),
        grid(13, 24, Tile(4, 4)),
        grid(24, 13, Tile(4, 4)),
        grid(24, 24, Tile(8, 3)),
        grid(13, 24, Tile(4, 4), "top_left"),
        grid(24, 13, Tile(4, 4), "top_left"),
    ]


@styled
def fig_causal(data: list[Grid]) -> Picture:
    """Draw each grid: full, edge and dead tiles, the keys each query sees, and the counts.

    Parameters
    ----------
    data : list of Grid
        Six of them.
    """
    figure = picture("tall")
    figure.set_size_inches(7.6, 6.0)
    largest = max(max(g.Nq, g.Nk) for g in data)
    for ax, g in zip(figure.subplots(2, 3).flat, data, strict=True):
        for rows, cols, kind in g.classes:
            box = (cols.start, rows.start), cols.stop - cols.start, rows.stop - rows.start
            ax.add_patch(Rectangle(*box, facecolor=FILL[kind], edgecolor="white", linewidth=1.2))
        i, j = np.nonzero(g.seen)
        ax.scatter(j + 0.5, i + 0.5, s=1.8, color=INK, linewidths=0, zorder=3)
        masked = g.count(TileClass.PARTIAL)
        live = masked + g.count(TileClass.FULL)
        ax.set_title(f"{g.Nq} queries, {g.Nk} keys,\ntiles of {g.tile.Br}×{g.tile.Bc}, {g.align}", fontsize=9)
        below = f"key j →\n{live} of {len(g.classes)} tiles visited, {masked} masked"
        ax.text(0, g.Nq + 0.7, below, va="top", fontsize=8, color=INK)
        ax.text(-0.7, 0, "← query row", rotation=90, ha="right", va="top", fontsize=8, color=INK)
        ax.set(xlim=(-2.4, largest), ylim=(largest + 4, 0), aspect="equal", anchor="NW")
        ax.axis("off")
    keys = [("visited, no mask needed", LIVE), ("visited, masked", EDGE), ("not visited", DEAD)]
    handles = [Patch(facecolor=colour, edgecolor=MUTED, linewidth=0.4, label=text) for text, colour in keys]
    handles.append(
        Line2D([], [], color=INK, marker=".", markersize=4, linestyle="", label="the query sees the key")
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8.5)
    return figure
