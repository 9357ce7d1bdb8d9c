"""How every figure looks: style file, one colour a step, fixed sizes, labels beside the lines they name."""

import io
from functools import wraps
from pathlib import Path

from matplotlib import style
from matplotlib.figure import Figure

STYLE = Path(__file__).with_name("flashproof.mplstyle")

# One colour a step, the same in every figure; Okabe and Ito's set, which colour-blind readers can tell apart.
STEP_COLOUR = {
    "step0_standard": "#555555",
    "step1_fused": "#E69F00",
    "step2_flash_v1": "#56B4E9",
    "step3_flash_v2": "#0072B2",
    "step4_causal": "#009E73",
    "step5_tensor_core": "#CC79A7",
    "step6_flash_v3": "#D55E00",
    "step7_fp8": "#7B3FA0",
}
INK, MUTED, FAINT = "#222222", "#888888", "#E9E9E9"

# The three classes of a tile. Pale, and none of the steps' colours.
LIVE, EDGE, DEAD = "#A9BCD6", "#F4B6A0", "#F1F1F1"

# Inches. A figure is one of these, so that type has the same size wherever two stand side by side.
SIZE = {"wide": (7.6, 4.2), "tall": (7.6, 6.4), "square": (5.2, 5.0), "strip": (7.6, 3.0)}


class Picture(Figure):
    """A figure that a notebook shows as it is, without pyplot and its global state."""

    def _repr_png_(self) -> bytes:
        return render(self, "png")


def picture(size: str = "wide") -> Picture:
    """Return an empty figure of one of the fixed sizes."""
    return Picture(figsize=SIZE[size], layout="constrained")


def styled(draw):
    """Make a fig_* function draw under the style file, whatever the caller's settings are."""

    @wraps(draw)
    def drawn(*args, **kwargs):
        with style.context(STYLE):
            return draw(*args, **kwargs)

    return drawn


def render(figure: Figure, form: str) -> bytes:
    """Return the figure as the bytes of an svg or png file, equal on every run."""
    out = io.BytesIO()
    with style.context(STYLE):
        figure.savefig(out, format=form, metadata={"Date": None} if form == "svg" else None)
    return out.getvalue()


def spread(wanted: list[float], gap: float) -> list[float]:
    """Move positions apart until neighbours are `gap` apart, keeping their order and their common centre.

    Parameters
    ----------
    wanted : list of float
        Where each label would like to be.
    gap : float
        Least distance between two labels, in the same unit.

    Returns
    -------
    list of float
        In the order of `wanted`.
    """
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    # Least squares under "at least gap apart": pool the neighbours whose wanted - rank * gap goes down.
    pools: list[tuple[float, int]] = []
    for rank, index in enumerate(order):
        pools.append((wanted[index] - rank * gap, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, n), (high, k) = pools[-2:]
            pools[-2:] = [((low * n + high * k) / (n + k), n + k)]
    levels = [level for level, members in pools for _ in range(members)]
    placed = [0.0] * len(wanted)
    for rank, index in enumerate(order):
        placed[index] = levels[rank] + rank * gap
    return placed


def label_ends(ax, ends: list[tuple[float, float, str, str]], gap: float = 0.062) -> None:
    """Write each line's name to the right of the axes, at the height where the line ends.

    Call it once the limits and scales are set.

    Parameters
    ----------
    ends : list of (x, y, text, colour)
        The last point of a line, in data units, and its label.
    gap : float
        Least distance of two labels, as a share of the axes' height.
    """
    to_axes = ax.transData + ax.transAxes.inverted()
    heights = [to_axes.transform((x, y))[1] for x, y, *_ in ends]
    for (x, y, text, colour), height in zip(ends, spread(heights, gap), strict=True):
        ax.annotate(
            text,
            xy=(x, y),
            xytext=(1.045, height),
            textcoords="axes fraction",
            color=colour,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.8,
                "shrinkA": 0,
                "relpos": (0, 0.5),
            },
            annotation_clip=False,
        )
