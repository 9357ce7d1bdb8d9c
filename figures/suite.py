"""Where the tensor-core kernels stand against the bars of their suite: every point, the mean, and the bar."""

from dataclasses import dataclass

from matplotlib.lines import Line2D

from figures import records
from figures.style import INK, MUTED, STEP_COLOUR, Picture, picture, styled
from verify.bench.suite import BARS, Standing, standing

PEERS = {"sdpa_cudnn": "cuDNN", "sdpa_flash": "FlashAttention-2"}  # as PyTorch carries them


@dataclass(frozen=True)
class Bars:
    """Standings in the order of the bars.

    Attributes
    ----------
    standings : list of Standing
    note : str
        Where and when it was measured.
    """

    standings: list[Standing]
    note: str


def data_bars() -> Bars:
    """The newest record of the suite; without one, the bars alone."""
    record = records.newest("suite")
    if record is None:
        return Bars([Standing(bar, None, {}, ("no record",)) for bar in BARS], "no record of the suite yet")
    return Bars([standing(bar, record) for bar in BARS], f"{record['device']}, {record['made'][:10]}, fp16, 16 heads")


@styled
def fig_bars(data: Bars) -> Picture:
    """Draw a line a bar: points by size, filled at long N, the mean with its interval, and the bar itself."""
    figure = picture("wide")
    figure.set_size_inches(7.6, 4.6)
    ax = figure.subplots()
    ax.set_xscale("log")
    for y, at in enumerate(data.standings):
        colour = STEP_COLOUR[at.bar.kernel]
        for (_, _, causal, _, N, *_), ratio in at.ratios.items():
            face = "white" if causal else colour
            ax.plot(ratio.value, y + 0.18, "o", color=colour, markerfacecolor=face, markersize=2 + N / 4096, alpha=0.7)
        if at.mean:
            low, high = (at.mean.low, at.mean.high) if at.mean.low else (at.mean.value, at.mean.value)
            ax.plot([low, high], [y - 0.12] * 2, color=colour, linewidth=5, solid_capstyle="butt")
            ax.plot(at.mean.value, y - 0.12, "|", color=colour, markersize=12, markeredgewidth=3)
        else:
            ax.text(0.52, y, "no record", va="center", fontsize=8, color=MUTED)
        ax.plot([at.bar.mean] * 2, [y - 0.35, y + 0.05], color=INK, linewidth=1.6)
        if at.bar.single:
            ax.plot([at.bar.single] * 2, [y + 0.05, y + 0.35], color=MUTED, linewidth=1.2, linestyle=":")
    ax.axvline(1, color=MUTED, linewidth=0.8)
    ax.set_yticks(range(len(data.standings)), [_name(at.bar) for at in data.standings], fontsize=8)
    ax.set(xlim=(0.5, 3), ylim=(len(data.standings) - 0.4, -0.6), ylabel="kernel and peer")
    ax.set_xlabel("times as fast as the peer")
    ax.set_xticks([0.5, 0.75, 1, 1.5, 2, 3], ["0.5", "0.75", "1", "1.5", "2", "3"])
    ax.minorticks_off()
    ax.set_title(f"Against the bars: {data.note}")
    ax.grid(axis="y", visible=False)
    figure.legend(handles=_key(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _key():
    """What the marks mean."""
    tick = {"marker": "|", "linestyle": ""}
    dot = {"marker": "o", "linestyle": "", "color": MUTED, "markersize": 5}
    return [
        Line2D([], [], **tick, color=MUTED, markersize=10, markeredgewidth=3, label="mean over sizes"),
        Line2D([], [], **tick, color=INK, markersize=12, markeredgewidth=1.6, label="the mean's bar"),
        Line2D([], [], color=MUTED, linewidth=1.2, linestyle=":", label="the bar of every size"),
        Line2D([], [], **dot, label="a size, no mask; larger: longer"),
        Line2D([], [], **dot, markerfacecolor="white", label="a size, causal"),
    ]


def _name(bar) -> str:
    return f"{bar.kernel.split('_')[0]} {bar.direction}\nagainst {PEERS.get(bar.peer, bar.peer)}"
