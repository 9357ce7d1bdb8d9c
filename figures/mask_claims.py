"""Who attends to whom where the chapter's masks go wrong: padding, the causal tile mask, masks handed to a library.

What a query sees is not drawn from a mask but read off a run: V is the identity, so that O is the weights.
"""

from dataclasses import dataclass

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from figures.error_matrix import WRONG
from figures.style import DEAD, EDGE, INK, LIVE, MUTED, Picture, picture, styled
from refimpl import oracle
from refimpl.tiling import Tile, cdiv
from verify.claims.listings_18_5 import last_tile_masked, tiled
from verify.claims.s18_2 import softmax

HIDDEN, SEEN, LEAKED, NAN = range(4)
SHADES = {HIDDEN: DEAD, SEEN: LIVE, LEAKED: WRONG, NAN: EDGE}
NAMES = {
    SEEN: "sees the key",
    HIDDEN: "does not see it",
    LEAKED: "sees it and should not",
    NAN: "NaN",
}


@dataclass(frozen=True)
class Panel:
    """One S, as a run sees it and as it should be.

    Attributes
    ----------
    title, below : str
    weights : ndarray (Nq, Nk)
        What the run gave each key; NaN where it gave no number.
    wanted : bool ndarray (Nq, Nk)
        Which keys each row should see.
    tile : Tile or None
        Whose borders are drawn.
    """

    title: str
    below: str
    weights: np.ndarray
    wanted: np.ndarray
    tile: Tile | None = None

    @property
    def classes(self) -> np.ndarray:
        """HIDDEN, SEEN, LEAKED or NAN for each query and key."""
        seen = self.weights > 0
        found = np.where(seen, np.where(self.wanted, SEEN, LEAKED), HIDDEN)
        return np.where(np.isnan(self.weights), NAN, found)

    @property
    def missing(self) -> np.ndarray:
        """True where a row should see the key and does not."""
        return self.wanted & (self.classes == HIDDEN)


def data_padding(N: int = 8, padding: int = 3) -> list[Panel]:
    """Causal and padding mask added up: padding on the right, on the left, and the layer after that."""
    scores, values = np.random.default_rng(1802).standard_normal((2, N, N))
    lower, at = np.tri(N, dtype=bool), np.arange(N)
    panels = []
    for side, real in (("right", at < N - padding), ("left", at >= padding)):
        wanted = lower & real
        bias = np.where(lower, 0, -np.inf) + np.where(real, 0, -np.inf)
        with np.errstate(invalid="ignore"):
            weights = softmax(scores + bias)
        below = f"{int(np.isnan(weights).any(axis=1).sum())} of {N} rows NaN"
        panels.append(Panel(f"Padding on the {side}", below, weights, wanted))
    # The next layer's keys and values come out of these rows.
    with np.errstate(invalid="ignore"):
        out = weights @ values
        weights = softmax(out @ out.T / np.sqrt(N) + bias)
    below = f"{int(np.isnan(weights).any(axis=1).sum())} of {N} rows NaN"
    panels.append(Panel("... and one layer on", below, weights, wanted))
    return panels


def data_leak(N: int = 24) -> list[Panel]:
    """The unified causal kernel, as it is printed, at three tile shapes."""
    panels = []
    for tile in (Tile(8, 8), Tile(8, 4), Tile(6, 8)):
        Q, K = np.random.default_rng(1805).standard_normal((2, N, N))

        def steps(q_start, tile=tile):
            return min(cdiv(N, tile.Bc), cdiv(q_start + tile.Br, tile.Bc))

        weights = tiled(Q, K, np.eye(N), Br=tile.Br, Bc=tile.Bc, steps=steps, hidden=last_tile_masked, bounds=True)
        wanted = np.tri(N, dtype=bool)
        leaked = int(((weights > 0) & ~wanted).sum())
        panels.append(Panel(f"Br = {tile.Br}, Bc = {tile.Bc}", f"{leaked} pairs leak", weights, wanted, tile))
    return panels


def data_handed(N: int = 12, window: int = 3) -> list[Panel]:
    """A causal reference from a boolean triu, and a sliding window with its left side open."""
    Q, K = np.random.default_rng(1807).standard_normal((2, 1, 1, N, N))
    lower, distance = np.tri(N, dtype=bool), np.subtract.outer(np.arange(N), np.arange(N))

    def weights(**options):
        return oracle.attention(Q, K, np.eye(N)[None, None], **options)[0][0, 0]

    triu = np.triu(np.ones((N, N), bool), 1)
    windowed = lower & (distance <= window)
    passed = weights(causal=True, window=(None, window))
    return [
        Panel("Causal, by a boolean\ntriu(diagonal=1)", "True means: attend", weights(mask=triu), lower),
        Panel("... by its opposite", "the reference it should be", weights(mask=~triu), lower),
        Panel(f"Causal, window (−1, {window})", f"wanted: the last {window + 1} keys", passed, windowed),
    ]


@styled
def fig_padding(data: list[Panel]) -> Picture:
    """Draw what each row sees, and which rows are NaN."""
    return _drawn(data, (SEEN, HIDDEN, NAN))


@styled
def fig_leak(data: list[Panel]) -> Picture:
    """Draw which keys of their future rows attend to, with the tiles' borders."""
    return _drawn(data, (SEEN, HIDDEN, LEAKED))


@styled
def fig_handed(data: list[Panel]) -> Picture:
    """Draw what the masks make visible, and cross what they should have."""
    return _drawn(data, (SEEN, HIDDEN, LEAKED))


def _drawn(panels: list[Panel], shown: tuple) -> Picture:
    """Panels side by side, and what their colours mean."""
    figure = picture("strip")
    figure.set_size_inches(7.6, 3.2)
    for ax, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        Nq, Nk = panel.weights.shape
        edge = {"edgecolor": "white", "linewidth": 9 / Nk}
        ax.pcolormesh(panel.classes, cmap=ListedColormap(list(SHADES.values())), vmin=0, vmax=NAN, **edge)
        i, j = np.nonzero(panel.missing)
        ax.scatter(j + 0.5, i + 0.5, marker="x", s=14, linewidths=1.1, color=WRONG)
        if panel.tile:
            ax.hlines(np.arange(0, Nq + 1, panel.tile.Br), 0, Nk, color=INK, linewidth=0.8)
            ax.vlines(np.arange(0, Nk + 1, panel.tile.Bc), 0, Nq, color=INK, linewidth=0.8)
        ax.set_title(panel.title)
        ax.text(0, Nq * 1.03, f"key →\n{panel.below}", va="top", fontsize=8.5, color=INK)
        ax.text(-Nk * 0.03, 0, "← query row", rotation=90, ha="right", va="top", fontsize=8.5, color=INK)
        ax.set(xlim=(-Nk * 0.1, Nk), ylim=(Nq * 1.22, 0), aspect="equal", anchor="NW")
        ax.axis("off")
    handles = [Patch(facecolor=SHADES[k], edgecolor=MUTED, linewidth=0.4, label=NAMES[k]) for k in shown]
    if any(panel.missing.any() for panel in panels):
        handles.append(
            figure.axes[0].plot([], [], "x", color=WRONG, markersize=4, label="should see it and does not")[0]
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8.5)
    return figure
