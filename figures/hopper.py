"""How step 6 shares out its work and its shared memory: query tiles to blocks, stages to tiles, chunks to banks."""

from dataclasses import dataclass

import numpy as np

from figures.devices import H200
from figures.style import EDGE, INK, LIVE, MUTED, STEP_COLOUR, Picture, picture, styled
from figures.tensor_core import Layout, fig_swizzle, laid_out
from flash_cuda.executors.memory_bytes import CHUNK, START, Mbarrier, swizzled
from flash_cuda.parts.schedule import SEAM, group_size, tiles_in_order, unevenness

__all__ = ["data_balance", "data_ring", "data_swizzle", "fig_balance", "fig_ring", "fig_swizzle"]


def data_swizzle() -> list[Layout]:
    """The 128-byte swizzle of TMA and wgmma, by the emulator's own function of addresses, beside plain order."""
    slab = 1024 * START  # an address on a boundary of the pattern

    def place(r, c):
        return (int(swizzled(np.array(slab + 128 * r + CHUNK * c))) - slab) // CHUNK

    return [laid_out("64 columns, plain order", 8, lambda r, c: 8 * r + c), laid_out("128-byte swizzle", 8, place)]


@dataclass(frozen=True)
class Stay:
    """What happens to one key tile in a ring of buffers, in units of one product's time.

    Attributes
    ----------
    j, stage : int
    load, full, use, free : float
        The copy starts; it has come; the first product reads it; all have read it.
    waits_for, signals : int
        Parity that the producer waits for on "empty", and that consumers wait for on "full".
    """

    j: int
    stage: int
    load: float
    full: float
    use: float
    free: float
    waits_for: int
    signals: int


@dataclass(frozen=True)
class Ring:
    """The stays of all key tiles in a ring of so many stages."""

    stages: int
    stays: list[Stay]


def run_ring(stages: int, tiles: int = 7, load: float = 0.8, use: float = 1.0) -> Ring:
    """Follow a producer and a consumer round a ring, on the emulator's own barriers.

    Parameters
    ----------
    stages, tiles : int
    load, use : float
        How long a copy takes, and the work on a tile: made up. The order of events is the kernel's.

    Raises
    ------
    RuntimeError
        A wait that the protocol says is over is not.
    """
    full = [Mbarrier(s, 8 * s, 1, None) for s in range(stages)]
    empty = [Mbarrier(stages + s, 8 * (stages + s), 1, None) for s in range(stages)]
    stage, phase, stays = 0, 0, []
    producer = consumer = 0.0
    freed = [0.0] * stages
    for j in range(tiles):
        _over(empty[stage], phase ^ 1)  # a new ring counts as released once
        start = max(producer, freed[stage])
        full[stage].arrive(full[stage].clock)
        come = producer = start + load
        _over(full[stage], phase)
        begin = max(consumer, come)
        freed[stage] = consumer = begin + use
        empty[stage].arrive(empty[stage].clock)
        stays.append(Stay(j, stage, start, come, begin, consumer, phase ^ 1, phase))
        stage, phase = (0, phase ^ 1) if stage + 1 == stages else (stage + 1, phase)
    return Ring(stages, stays)


def _over(barrier, parity):
    """The phase of that parity is complete."""
    if not barrier.passed(parity):
        raise RuntimeError(f"{barrier}: expected the phase of parity {parity} to be complete")


def data_ring() -> list[Ring]:
    """Rings of one, two and three stages."""
    return [run_ring(stages) for stages in (1, 2, 3)]


@styled
def fig_ring(data: list) -> Picture:
    """Draw each stage's copies (pale) and uses (full), with the phase bit that each waits for."""
    figure = picture("tall")
    figure.set_size_inches(7.6, 4.6)
    panels = figure.subplots(len(data), 1, sharex=True, height_ratios=[ring.stages for ring in data])
    for ax, ring in zip(panels, data, strict=True):
        for stay in ring.stays:
            _box(ax, stay.load, stay.full, stay.stage - 0.2, LIVE, f"K{stay.j} in\nempty: {stay.waits_for}")
            _box(ax, stay.use, stay.free, stay.stage + 0.2, EDGE, f"K{stay.j} used\nfull: {stay.signals}")
        ax.set(ylim=(ring.stages - 0.5, -0.5), yticks=range(ring.stages), ylabel="stage")
        end = ring.stays[-1].free
        busy = sum(stay.free - stay.use for stay in ring.stays) / end
        ax.set_title(f"{ring.stages} stage{'s' * (ring.stages > 1)}: busy {busy:.0%} of the time", fontsize=9)
        ax.grid(axis="y", visible=False)
    panels[-1].set_xlabel("time, in units of the work on a tile (a model: copies take 0.8)")
    return figure


def _box(ax, start, stop, y, colour, words) -> None:
    """A stretch of time with words in it."""
    ax.barh(y, stop - start, 0.38, left=start, color=colour, edgecolor="white", linewidth=1)
    ax.text((start + stop) / 2, y, words, ha="center", va="center", fontsize=5.5, color=INK)


@dataclass(frozen=True)
class Balance:
    """Work of every block, in key tiles and seams, by how query tiles are dealt out.

    Attributes
    ----------
    work : dict of str to ndarray (blocks,)
        Sorted, in shares of the mean.
    note : str
    """

    work: dict
    note: str


def dealt(cost: np.ndarray, blocks: int, snake: bool) -> np.ndarray:
    """What each block gets of tasks dealt out in rounds, every second round backwards if ``snake``."""
    rounds = -(-len(cost) // blocks)
    work = np.zeros((rounds, blocks))
    work.flat[: len(cost)] = cost
    if snake:
        work[1::2] = work[1::2, ::-1]
    return work.sum(axis=0)


def to_the_first_free(cost: np.ndarray, blocks: int) -> np.ndarray:
    """What each block gets if the next task goes to whoever has least so far: what a table could say."""
    work = np.zeros(blocks)
    for task in cost:
        work[work.argmin()] += task
    return work


def data_balance(N: int = 2048, heads: int = 128, tile: int = 128, d: int = 128) -> Balance:
    """A causal mask on as many blocks as an H200 has multiprocessors; query tiles as long as key tiles."""
    Tr, blocks = N // tile, H200.sms
    lengths = tuple(range(1, Tr + 1))
    group = group_size(lengths, heads, 4 * N * d, blocks)
    cost = np.array(lengths) + SEAM
    ascending, falling = np.tile(cost, heads), np.repeat(cost[::-1], heads)
    chosen = cost[tiles_in_order(lengths, heads, group)[0]]
    work = {
        "as they come": dealt(ascending, blocks, snake=False),
        "longest first": dealt(falling, blocks, snake=False),
        "longest first, back and forth": dealt(falling, blocks, snake=True),
        f"step 6: so in groups of {group}": dealt(chosen, blocks, snake=True),
        "longest first, by a table": to_the_first_free(falling, blocks),
    }
    if not np.isclose(work[f"step 6: so in groups of {group}"].max() * blocks / chosen.sum(),
                      unevenness(lengths, heads, group, blocks)):  # fmt: skip
        raise RuntimeError("the schedule drawn is not the kernel's")
    shares = {name: np.sort(w)[::-1] / w.mean() for name, w in work.items()}
    return Balance(shares, f"causal, N = {N:,}, {heads} heads in all: {len(falling):,} tiles on {blocks} blocks")


@styled
def fig_balance(data: Balance) -> Picture:
    """Draw every block's share, the busiest first, which all others wait for."""
    figure = picture("wide")
    ax = figure.subplots()
    middle = [STEP_COLOUR[step] for step in ("step3_flash_v2", "step5_tensor_core", "step6_flash_v3")]
    for (name, work), colour in zip(data.work.items(), [MUTED, *middle, INK], strict=True):
        dashes = "--" if name.endswith("table") else "-"
        words = f"{name}: busiest {work[0]:.3f}"
        ax.plot(np.arange(1, len(work) + 1), work, color=colour, linestyle=dashes, label=words)
    ax.axhline(1, color=MUTED, linewidth=0.8)
    ax.set(xlabel="block, busiest first", ylabel="work over the mean", xlim=(0, len(work) + 1))
    ax.legend(fontsize=8)
    ax.set_title(f"Shares of blocks: {data.note}", fontsize=10)
    return figure
