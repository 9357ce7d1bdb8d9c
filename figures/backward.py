"""The backward pass on tensor cores: which lane holds what, and which products are in flight while what is done."""

import re
from dataclasses import dataclass, field
from inspect import getsource

import numpy as np
from matplotlib.patches import Rectangle

from figures import tensor_core
from figures.style import EDGE, INK, LIVE, MUTED, Picture, picture, styled
from figures.tensor_core import LANE, REGISTERS
from flash_cuda import backward_hopper_kernels

COLOUR = {"S": REGISTERS[0], "dP": REGISTERS[2], "dV": REGISTERS[3], "dK": REGISTERS[1], "dQ": "#DCC3DE"}
PRODUCTS = tuple(COLOUR)


@dataclass(frozen=True)
class Held:
    """Who holds the elements of a matrix with a row a key and a column a query.

    Attributes
    ----------
    title : str
    lane : ndarray of int (16, 8)
    """

    title: str
    lane: np.ndarray

    def in_place(self, other: "Held") -> int:
        """How many elements are in the same lane there."""
        return int((self.lane == other.lane).sum())


def data_lanes() -> list[Held]:
    """P and dS as the product S^T leaves them, as the sums over queries take them, and as the one over keys does.

    A product leaves 16 x 8 fragments C and takes a 16 x 16 fragment A, whose rows are rows of the result. Of A these
    are the first eight queries; the others are as in a second C.
    """
    A, _, C = tensor_core.data_lanes()
    return [
        Held("Sᵀ = K Qᵀ and dPᵀ = V dOᵀ\nleave it", C.lane),
        Held("dV += Pᵀ dO and dK += dSᵀ Q\ntake it", A.lane[:, :8]),
        Held("dQ = dS K takes it\n(and S = Q Kᵀ would leave it)", A.lane.T[:, :8]),
    ]


@styled
def fig_lanes(data: list) -> Picture:
    """Draw each element with its lane, pale where that is another than in the first panel; one lane's are framed."""
    figure = picture("wide")
    panels = figure.subplots(1, len(data))
    for ax, part in zip(panels, data, strict=True):
        for (key, query), lane in np.ndenumerate(part.lane):
            colour = LIVE if lane == data[0].lane[key, query] else EDGE
            mine = {"edgecolor": INK, "linewidth": 1.8, "zorder": 3} if lane == LANE else {"edgecolor": "white"}
            ax.add_patch(Rectangle((query - 0.5, key - 0.5), 1, 1, facecolor=colour, **mine))
            weight = "bold" if lane == LANE else "normal"
            ax.text(query, key, lane, ha="center", va="center", fontsize=6.5, fontweight=weight, zorder=4)
        rows, columns = part.lane.shape
        ax.set(xlim=(-0.7, columns - 0.3), ylim=(rows - 0.3, -0.7), aspect="equal", xlabel="query")
        ax.set_xticks(range(0, columns, 2))
        ax.set_yticks(range(0, rows, 2))
        ax.tick_params(labelsize=7)
        ax.grid(visible=False)
        ax.set_title(part.title, fontsize=9, loc="center")
        if part is not data[0]:
            ax.set_xlabel(f"query\n{part.in_place(data[0])} of {part.lane.size} in place")
    panels[0].set_ylabel("key")
    figure.suptitle(f"Which lane holds an element of P or dS; lane {LANE} framed", fontsize=10)
    return figure


@dataclass(frozen=True)
class Moment:
    """One thing that a consumer warpgroup does.

    Attributes
    ----------
    kind : "start", "wait" or "work"
        Of a product, or something of its own.
    what : str
        The product, or what is done.
    late : int
        The product's tile, counted from the loop's.
    """

    kind: str
    what: str
    late: int = 0


@dataclass(frozen=True)
class Flight:
    """What a warpgroup does in one turn of its loop, in order."""

    moments: list[Moment]
    rounds: int = 2
    in_flight: list = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "in_flight", self._stretches())

    def _stretches(self):
        """(product, tile, first moment, last moment) of every product in ``rounds`` turns, moments numbered through."""
        found, begun, n = [], {}, len(self.moments)
        for turn in range(-1, self.rounds + 1):
            for k, moment in enumerate(self.moments):
                if moment.kind == "start":
                    begun.setdefault(moment.what, (turn + moment.late, turn * n + k))
                elif moment.kind == "wait" and moment.what in begun:
                    tile, first = begun.pop(moment.what)
                    found.append((moment.what, tile, first, turn * n + k))
        return found

    def waits(self) -> list[tuple[str, set]]:
        """Each wait of a turn: the product that it ends, and those that are in flight then."""
        ends = [(k, moment.what) for k, moment in enumerate(self.moments) if moment.kind == "wait"]
        return [(what, {name for name, _, first, last in self.in_flight if first < k < last}) for k, what in ends]


WORK = {
    "grad.weigh(": "P = 2^(S − lse)", "grad.hide(": "hide", "grad.pack_weights(": "round P",
    "grad.gradient(": "dS = P (dP − D)", "grad.share_gradient(": "share dS", "ptx.barrier_sync(": "meet",
    "add_tile(": "add dQ",
    "ptx.mbarrier_wait(uint32(W_bars": "other's dS there?", "ptx.mbarrier_wait(uint32(Q_bars": "Q there?",
    "ptx.mbarrier_wait(uint32(G_bars": "dO there?",
}  # fmt: skip


def data_flight() -> Flight:
    """Read the order off the kernel's own loop, as it is for d = 128.

    Raises
    ------
    RuntimeError
        A product of the loop is never waited for.
    """
    lines = getsource(backward_hopper_kernels.make_kernel).splitlines()
    begin = next(k for k, line in enumerate(lines) if line.strip() == "while True:")
    end = next(k for k in range(begin, len(lines)) if "dQ of the last two tiles" in lines[k])
    moments, hidden = [], None
    for line in lines[begin + 1 : end]:
        indent = len(line) - len(line.lstrip())
        hidden = None if hidden is not None and line.strip() and indent <= hidden else hidden
        if line.strip() == "if Br > 64:":  # the second half of a tile at d = 64
            hidden = indent
        elif hidden is None:
            moments += _read(line.strip())
    flight = Flight(moments)
    if {name for name, *_ in flight.in_flight} != set(PRODUCTS):
        raise RuntimeError(f"expected products {', '.join(PRODUCTS)} in the loop of the kernel")
    return flight


def _read(line):
    """What a line of the loop does, if anything that is drawn."""
    if found := re.match(r"start_\w+\((\w+)", line):
        # Which tile: by the buffer that it reads.
        late = 1 if "after" in line else -1 if "before" in line else 0
        return [Moment("start", found[1].removesuffix("_acc"), late)]
    if found := re.match(r"wait_\w+\((\w+)", line):
        return [Moment("wait", found[1].removesuffix("_acc"))]
    return [Moment("work", words) for code, words in WORK.items() if line.startswith(code)]


@styled
def fig_flight(data: Flight) -> Picture:
    """Draw each product from its start to the wait that ends it, over what the warpgroup does meanwhile."""
    figure = picture("wide")
    ax = figure.subplots()
    n = len(data.moments)
    for name, tile, first, last in data.in_flight:
        first, last = max(first, -0.5), min(last, data.rounds * n - 0.5)
        if last <= first:
            continue
        y = PRODUCTS.index(name)
        ax.barh(y, last - first, 0.7, left=first, color=COLOUR[name], edgecolor="white")
        index = "i" if tile == 0 else f"i {'+' if tile > 0 else '−'} {abs(tile)}"
        if last - first > 2:
            ax.text((first + last) / 2, y, f"{name}, {index}", ha="center", va="center", fontsize=7, color=INK)
    ax.axvline(n - 0.5, color=MUTED, linewidth=0.8, linestyle="--", zorder=0.5)
    labels = [m.what if m.kind == "work" else f"{m.kind} {m.what}" for m in data.moments] * data.rounds
    ax.set_xticks(range(len(labels)), labels, rotation=90, fontsize=6.5)
    for label, moment in zip(ax.get_xticklabels(), data.moments * data.rounds, strict=True):
        label.set_color(INK if moment.kind == "work" else MUTED)
    ax.set(xlim=(-0.5, len(labels) - 0.5), ylim=(len(PRODUCTS) - 0.5, -0.5), xlabel="what the warpgroup does, in order")
    ax.set_yticks(range(len(PRODUCTS)), PRODUCTS)
    ax.set_ylabel("product in flight")
    ax.grid(axis="y", visible=False)
    ax.set_title("A consumer warpgroup at query tiles i and i + 1, read off the kernel; no time scale", fontsize=10)
    return figure
