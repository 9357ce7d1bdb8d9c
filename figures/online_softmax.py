"""How the running maximum, the running sum and the output grow tile by tile, on a real run of step3."""

from dataclasses import dataclass

import numpy as np

from figures.style import INK, MUTED, STEP_COLOUR, Picture, picture, styled
from refimpl import step3_flash_v2
from refimpl.observe import Trace
from refimpl.tiling import Tile, spans
from verify.cases import DEFAULT

TILE = Tile(16, 8)
ROW = 5  # any query row shows it


@dataclass(frozen=True)
class Growth:
    """One query row of one case, tile by tile.

    Attributes
    ----------
    title : str
    scores : ndarray (Nk,)
        Natural-log units.
    m, l, O_acc : ndarray (Tc,)
        After each tile; O_acc is one column of the unnormalised output.
    O : float
        That column of the finished output.
    Bc : int
    """

    title: str
    scores: np.ndarray
    m: np.ndarray
    l: np.ndarray
    O_acc: np.ndarray
    O: float
    Bc: int

    @property
    def alpha(self) -> np.ndarray:
        """exp(m_old - m_new): what each tile multiplies l and O_acc by; 0 for the first."""
        return np.exp(np.concatenate([[-np.inf], self.m[:-1]]) - self.m)


def growth(case: str, title: str) -> Growth:
    """Run step3 on a case's small inputs in fp64 and keep what query ROW of head 0 saw."""
    problem = DEFAULT[case].build("fp64")
    trace = Trace()
    O, _ = step3_flash_v2.attention(problem.Q, problem.K, problem.V, tile=TILE, observe=trace)
    i, r = divmod(ROW, TILE.Br)
    visits = [v for v in trace.visits if (v.b, v.h, v.i) == (0, 0, i)]
    scores = problem.K[0, 0] @ problem.Q[0, 0, ROW] / np.sqrt(problem.shape.d)
    m, l, O_acc = (np.array([getattr(v, name)[r] for v in visits]) for name in ("m", "l", "O_acc"))
    return Growth(title, scores, m, l, O_acc[:, 0], O[0, 0, ROW, 0], TILE.Bc)


def data_state() -> list[Growth]:
    """An ordinary row, one whose maximum keeps growing, and one whose maximum comes last."""
    return [
        growth("square", "Ordinary scores"),
        growth("growing_max", "Growing maximum"),
        growth("late_max", "Late maximum"),
    ]


@styled
def fig_state(data: list[Growth]) -> Picture:
    """Draw scores with m, then l, then O_acc and O_acc / l, one column a case.

    Parameters
    ----------
    data : list of Growth
        Three of them.
    """
    figure = picture("tall")
    colour = STEP_COLOUR["step3_flash_v2"]
    axes = figure.subplots(3, 3, sharex="col")
    for column, g in zip(axes.T, data, strict=True):
        tiles = np.arange(len(g.m))
        top, middle, bottom = column
        top.set_title(g.title)
        for j, cols in enumerate(spans(len(g.scores), g.Bc)):
            keys = g.scores[cols]
            top.plot(j + (np.arange(len(keys)) + 0.5) / len(keys), keys, ".", color=MUTED, markersize=4)
        top.hlines(g.m, tiles, tiles + 1, color=colour, linewidth=2)
        middle.bar(tiles, g.l, 1, align="edge", color=colour, alpha=0.55, edgecolor="white")
        for j, alpha in enumerate(g.alpha):
            if 0 < alpha < 1:
                text = f"α = {alpha:.2g}"
                middle.text(j + 0.5, 0.15, text, rotation=90, ha="center", va="bottom", fontsize=8, color=INK)
        bottom.hlines(g.O_acc, tiles, tiles + 1, color=colour, linewidth=2, alpha=0.35)
        bottom.hlines(g.O_acc / g.l, tiles, tiles + 1, color=colour, linewidth=2)
        bottom.axhline(g.O, color=INK, linewidth=0.8, linestyle="--")
        bottom.set_xticks(tiles + 0.5, [str(j) for j in tiles])
        bottom.set_xlabel(f"key tile j ({len(g.scores)} keys, tiles of {g.Bc})", fontsize=8.5)
    first = axes[:, 0]
    first[0].set_ylabel("score s and maximum m\n(natural log)")
    first[1].set_ylabel("l = Σ exp(s − m)\nα where m grew")
    first[2].set_ylabel("one column of O")
    handles = [
        axes[0, 0].plot([], [], color=colour, label="state after each tile: m, l, O_acc / l")[0],
        axes[0, 0].plot([], [], color=colour, alpha=0.35, label="O_acc, unnormalised")[0],
        axes[0, 0].plot([], [], color=INK, linewidth=0.8, linestyle="--", label="O of the whole row")[0],
        axes[0, 0].plot([], [], ".", color=MUTED, markersize=4, label="score of a key")[0],
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8.5)
    return figure
