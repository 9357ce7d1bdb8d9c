"""What each shipped mask leaves of the tiles of S: skipped, masked, or computed whole, as its `tiles` formula tells."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from figures.style import DEAD, EDGE, INK, LIVE, MUTED, Picture, picture, styled
from refimpl import options
from refimpl.frame import Frame, visible
from refimpl.rule import Rule, TileClass
from refimpl.tiling import Tile, spans

NQ, NK, TILE = 44, 52, Tile(8, 8)  # neither is a multiple of the tile
SEEN = "#C8502E"  # a visible pair of an edge tile, the tiles' own colour made dark


@dataclass(frozen=True)
class Panel:
    """One mask on S.

    Attributes
    ----------
    title : str
        How the rule is written.
    seen : ndarray of bool (NQ, NK)
    classes : ndarray of int
        TileClass of each tile, (row tiles, key tiles).
    """

    title: str
    seen: np.ndarray
    classes: np.ndarray

    @property
    def visited(self) -> int:
        """Tiles that are not EMPTY."""
        return int((self.classes != TileClass.EMPTY).sum())

    @property
    def masked(self) -> int:
        """Tiles that are PARTIAL."""
        return int((self.classes == TileClass.PARTIAL).sum())


def panel(title: str, rule: Rule, **frame) -> Panel:
    """Ask a rule for the class of every tile: its formula alone, no look at an element."""
    frame = Frame(1, 1, NQ, NK, **frame)
    rule, offset = rule.at(frame), frame.offsets[0]
    classes = [
        [
            rule.tiles(0, 0, rows.start + offset, rows.stop + offset, cols.start, cols.stop, *rule.aux)
            for cols in spans(NK, TILE.Bc)
        ]
        for rows in spans(NQ, TILE.Br)
    ]
    return Panel(title, visible(rule, 0, 0, slice(0, NQ), slice(0, NK)), np.array(classes, int))


def data_classes() -> list[Panel]:
    """Every mask of `refimpl.options`, once at least."""
    ids_q, ids_k = (np.searchsorted([N // 4, 5 * N // 8], np.arange(N), side="right") for N in (NQ, NK))
    rng = np.random.default_rng(1807)
    blocks = np.kron(rng.random((6, 7)) < 0.55, np.ones((8, 8), bool))[:NQ, :NK]
    blocks &= np.ogrid[:NQ, :NK][0] % 24 != 21
    lengths = {"lengths_q": np.array([34]), "lengths_k": np.array([39])}
    document = options.document(ids_q, ids_k)
    return [
        panel("causal()", options.causal()),
        panel('causal(), align="top_left"', options.causal(), align="top_left"),
        panel("window(20, 0)", options.window(20, 0)),
        panel("window(6, 6)", options.window(6, 6)),
        panel("padding(), lengths 34, 39", options.padding(), **lengths),
        panel("document(ids)", document),
        panel("and_(causal(), document(ids))", options.and_(options.causal(), document)),
        panel("prefix_lm(20)", options.prefix_lm(20)),
        panel("dilated(19)", options.dilated(19)),
        panel("dilated(3)", options.dilated(3)),
        panel("strided(9)", options.strided(9)),
        panel("boolean(mask)", options.boolean(blocks)),
    ]


@styled
def fig_classes(data: Sequence[Panel]) -> Picture:
    """Draw each mask: tiles in the colour of their class, the visible pairs of masked ones, and the counts.

    Parameters
    ----------
    data : list of Panel
        Twelve of them.
    """
    figure = picture("tall")
    figure.set_size_inches(7.6, 6.5)
    shades = ListedColormap([DEAD, EDGE, LIVE, SEEN])
    for ax, drawn in zip(figure.subplots(3, 4).flat, data, strict=True):
        of_pair = np.kron(drawn.classes, np.ones((TILE.Br, TILE.Bc), int))[:NQ, :NK]
        pairs = np.where((of_pair == TileClass.PARTIAL) & drawn.seen, 3, of_pair)
        # An image: an svg with every pair as a shape of its own would be some megabytes.
        ax.imshow(pairs, cmap=shades, vmin=0, vmax=3, extent=(0, NK, NQ, 0), interpolation="nearest")
        ax.hlines([*range(0, NQ, TILE.Br), NQ], 0, NK, color="white", linewidth=1.1)
        ax.vlines([*range(0, NK, TILE.Bc), NK], 0, NQ, color="white", linewidth=1.1)
        ax.set_title(drawn.title, fontsize=7.5, pad=4)
        told = f"visited {drawn.visited} of {drawn.classes.size}, masked {drawn.masked}"
        ax.text(0, NQ + 1.5, told, va="top", fontsize=8, color=INK)
        ax.set(xlim=(-0.1, NK), ylim=(NQ + 6, -0.1), aspect="equal", anchor="NW")
        ax.axis("off")
    first = figure.axes[0]
    first.text(-1.5, 0, "← query row", rotation=90, ha="right", va="top", fontsize=8, color=INK)
    first.text(0, NQ + 6.5, "key →", va="top", fontsize=8, color=INK)
    keys = [
        ("full: no masking", LIVE), ("partial: masked pair by pair", EDGE), ("a visible pair in it", SEEN),
        ("empty: not visited", DEAD),
    ]  # fmt: skip
    handles = [Patch(facecolor=colour, edgecolor=MUTED, linewidth=0.4, label=text) for text, colour in keys]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(
        f"What masks leave of S, {NQ} queries by {NK} keys in tiles of {TILE.Br} × {TILE.Bc}",
        x=0.01, ha="left", fontsize=10.5, weight="bold",
    )  # fmt: skip
    return figure
