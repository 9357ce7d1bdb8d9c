"""The backward pass on tensor cores: which lane holds what, what is in flight meanwhile, and how fast it is."""

import re
from dataclasses import dataclass, field
from inspect import getsource
from pathlib import Path

import numpy as np
from matplotlib.patches import Rectangle

from figures import records, tensor_core
from figures.style import EDGE, INK, LIVE, MUTED, STEP_COLOUR, Picture, label_ends, picture, styled
from figures.tensor_core import LANE, REGISTERS
from flash_cuda import backward_hopper_kernels
from verify.bench.limits import BACKWARD
from verify.bench.suite import H200, stale
from verify.document import RECORDS

OURS = ("step6_flash_v3", "step5_tensor_core")
PEERS = {"sdpa_cudnn": ("cuDNN", INK), "sdpa_flash": ("FlashAttention-2", MUTED)}  # as PyTorch carries them
COLOUR = {"S": REGISTERS[0], "dP": REGISTERS[2], "dV": REGISTERS[3], "dK": REGISTERS[1], "dQ": "#DCC3DE"}
PRODUCTS = tuple(COLOUR)


@dataclass(frozen=True)
class Held:
    """Who holds the elements of a matrix with a row a key and a column a query.

    Attributes
    ----------
    title : str
    lane : ndarray of int (16, 16)
    """

    title: str
    lane: np.ndarray

    def in_place(self, other: "Held") -> int:
        """How many elements are in the same lane there."""
        return int((self.lane == other.lane).sum())


def data_lanes() -> list[Held]:
    """P and dS as the product S^T leaves them, as the sums over queries take them, and as the one over keys does.

    A product leaves 16 x 8 fragments C and takes a 16 x 16 fragment A, whose rows are rows of the result.
    """
    A, _, C = tensor_core.data_lanes()
    return [
        Held("Sᵀ = K Qᵀ, dPᵀ = V dOᵀ\nleave it", np.concatenate([C.lane, C.lane], axis=1)),
        Held("dV += Pᵀ dO, dK += dSᵀ Q\ntake it", A.lane),
        Held("dQ = dS K takes it\n(and S = Q Kᵀ would leave it)", A.lane.T),
    ]


@styled
def fig_lanes(data: list) -> Picture:
    """Draw each element with its lane, pale where that is another than in the first panel; one lane's are framed."""
    figure = picture("strip")
    figure.set_size_inches(7.6, 3.6)
    panels = figure.subplots(1, len(data))
    for ax, part in zip(panels, data, strict=True):
        for (key, query), lane in np.ndenumerate(part.lane):
            colour = LIVE if lane == data[0].lane[key, query] else EDGE
            mine = {"edgecolor": INK, "linewidth": 1.8, "zorder": 3} if lane == LANE else {"edgecolor": "white"}
            ax.add_patch(Rectangle((query - 0.5, key - 0.5), 1, 1, facecolor=colour, **mine))
            weight = "bold" if lane == LANE else "normal"
            ax.text(query, key, lane, ha="center", va="center", fontsize=5, fontweight=weight, zorder=4)
        rows, columns = part.lane.shape
        ax.set(xlim=(-0.7, columns - 0.3), ylim=(rows - 0.3, -0.7), aspect="equal", xlabel="query")
        ax.set_xticks(range(0, columns, 4))
        ax.set_yticks(range(0, rows, 4))
        ax.tick_params(labelsize=7)
        ax.grid(visible=False)
        ax.set_title(part.title, fontsize=9)
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


@dataclass(frozen=True)
class Rates:
    """Backward passes on record.

    Attributes
    ----------
    lines : dict of (name, d, causal) to list of (N, TFLOP/s)
        Sorted by length. Five products counted, half of each when causal.
    reached : float or None
        What large products reach there, measured, in TFLOP/s.
    stale : tuple of str
        Kernels that were changed since.
    note : str
        Where and when, or that there is none.
    """

    lines: dict
    reached: float | None
    stale: tuple
    note: str


def data_rates(folder: Path = RECORDS) -> Rates:
    """The newest record of the suite; it may have no backward passes yet."""
    record = records.newest("suite", folder)
    if record is None:
        return Rates({}, None, (), "no record of the suite yet")
    lines = {}
    for row in record["rows"]:
        if row["direction"] == BACKWARD and row["name"] in (*OURS, *PEERS) and "tflops" in row:
            lines.setdefault((row["name"], row["d"], row["causal"]), []).append((row["N"], row["tflops"]))
    note = f"{record['device']}, {record['made'][:10]}"
    if not lines:
        return Rates({}, None, (), f"no backward pass on record yet ({note})")
    old = tuple(name for name in OURS if f"{name} {BACKWARD}" in stale(record))
    reached = record["ceilings"]["measured"].get("tflops")
    return Rates({key: sorted(points) for key, points in lines.items()}, reached, old, note)


@styled
def fig_rates(data: Rates) -> Picture:
    """Draw rate against length, a panel a head dim and mask."""
    figure = picture("tall")
    figure.set_size_inches(7.6, 5.2)
    panels = figure.subplots(len(H200.dims), len(H200.masks), sharex=True, sharey=True)
    top = max([rate for points in data.lines.values() for _, rate in points] + [data.reached or 100]) * 1.08
    for (r, c), ax in np.ndenumerate(panels):
        d, causal = H200.dims[r], H200.masks[c]
        ax.set_xscale("log", base=2)
        ax.set(xlim=(H200.lengths[0] / 1.15, H200.lengths[-1] * 1.15), ylim=(0, top))
        ax.set_xticks(H200.lengths, [f"{N // 1024}K" for N in H200.lengths])
        ax.set_title(f"d = {d}, {'causal' if causal else 'no mask'}", fontsize=9)
        if data.reached:
            ax.axhline(data.reached, color=MUTED, linewidth=0.9)
        ends = [_line(ax, data, name, d, causal) for name in (*OURS, *PEERS) if (name, d, causal) in data.lines]
        if not ends:
            ax.text(0.5, 0.5, "no record", transform=ax.transAxes, ha="center", color=MUTED)
        elif c == len(H200.masks) - 1:
            if data.reached:
                ends.append((H200.lengths[-1], data.reached, f"large products\n{data.reached:.0f}", MUTED))
            label_ends(ax, ends, gap=0.13)
    for ax in panels[-1]:
        ax.set_xlabel("sequence length N")
    for ax in panels[:, 0]:
        ax.set_ylabel("TFLOP/s")
    old = f"\nChanged since: {', '.join(data.stale)}" if data.stale else ""
    size = f"{H200.dtype}, {H200.heads} heads, {H200.tokens // 1024}K tokens"
    figure.suptitle(f"Backward passes: {data.note}; {size}{old}", fontsize=10)
    return figure


def _line(ax, data, name, d, causal):
    """One kernel's line; returns its end with its name, for `label_ends`."""
    words, colour = PEERS.get(name, (name.split("_")[0].replace("step", "step "), STEP_COLOUR.get(name)))
    N, rate = zip(*data.lines[name, d, causal], strict=True)
    ax.plot(N, rate, "--" if name in PEERS else "-", marker="o", markersize=3.5, color=colour)
    return N[-1], rate[-1], words, colour
