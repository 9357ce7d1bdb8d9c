"""Why products and softmax have to overlap: a model of one multiprocessor's tensor cores and exponential units."""

from dataclasses import dataclass

from figures.style import INK, STEP_COLOUR, Picture, picture, styled

# Of one multiprocessor, a clock. Products: the data sheet's rate over clock and multiprocessors gives the same 4096.
PRODUCT_FLOPS = 4096  # fp16 operands, dense: 4 tensor cores of 1024
EXPONENTIALS = 16  # CUDA C++ Programming Guide, "Arithmetic Instructions": results of rcp, exp2, ... per clock
FP32_LANES = 128
ROWS = 64  # of a warpgroup
WAYS = ("in step", "in turns", "in step, softmax under a product", "in turns, softmax under a product")
TILES = 40  # key tiles of a run
SHOWN = 9000  # cycles of it that are drawn


@dataclass(frozen=True)
class Budget:
    """Cycles that one warpgroup's key tile costs.

    Attributes
    ----------
    product : float
        Of each of the two products.
    exponentials, softmax : float
        2**x of every score alone; and with what stands in its way: a maximum before and a rounding after.
    """

    d: int
    Bc: int
    product: float
    exponentials: float
    softmax: float


def budget(d: int, Bc: int = 128) -> Budget:
    """By arithmetic alone, for 64 rows of a warpgroup and Bc keys."""
    scores = ROWS * Bc
    exponentials = scores / EXPONENTIALS
    return Budget(d, Bc, 2 * scores * d / PRODUCT_FLOPS, exponentials, exponentials + 2 * scores / FP32_LANES)


@dataclass(frozen=True)
class Stretch:
    """A unit at work: ``unit`` "product" or "softmax", for warpgroup ``wg`` and key tile ``j``."""

    unit: str
    wg: int
    j: int
    what: str
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """What two warpgroups do in one way of working together."""

    way: str
    budget: Budget
    stretches: list[Stretch]

    @property
    def busy(self) -> float:
        """Share of the time that the tensor cores work, away from both ends."""
        starts = {s.j: s.start for s in self.stretches if (s.what, s.wg) == ("S", 0)}
        begin, end = starts[len(starts) // 4], starts[3 * len(starts) // 4]
        work = sum(max(0, min(s.stop, end) - max(s.start, begin)) for s in self.stretches if s.unit == "product")
        return work / (end - begin)


def run(way: str, cost: Budget, tiles: int = TILES) -> Timeline:
    """Play one way: each unit does one thing at a time, in the order in which it was asked.

    "In step", both warpgroups do the same at the same time and share each unit; a wait of one is a wait of both.
    """
    free, found = {"product": 0.0, "softmax": 0.0}, []

    def do(unit, wg, j, what, ready):
        length = cost.product if unit == "product" else cost.softmax
        start = max(ready, free[unit])
        free[unit] = start + length
        found.append(Stretch(unit, wg, j, what, start, free[unit]))
        return free[unit]

    under = way.endswith("product")
    if way.startswith("in step"):
        _together(do, tiles, under)
        return Timeline(way, cost, found)
    waiting = {wg: (_under if under else _alone)(do, wg, tiles) for wg in (0, 1)}
    asked = {wg: (next(chain), wg) for wg, chain in waiting.items()}
    while asked:  # whoever has been ready for longest
        _, wg = min(asked.values())
        ready = next(waiting[wg], None)
        if ready is None:
            del asked[wg]
        else:
            asked[wg] = ready, wg
    return Timeline(way, cost, found)


def _together(do, tiles, under):
    """Both warpgroups at once; each thing begins when both have finished what it needs."""

    def both(unit, j, what, ready):
        return max(do(unit, wg, j, what, ready) for wg in (0, 1))

    now = both("softmax", 0, "P", both("product", 0, "S", 0.0))
    for j in range(1, tiles):
        if under:
            scores = both("product", j, "S", now)
            now = max(both("product", j - 1, "O", scores), both("softmax", j, "P", scores))
        else:
            now = both("softmax", j, "P", both("product", j, "S", both("product", j - 1, "O", now)))
    both("product", tiles - 1, "O", now)


def _alone(do, wg, tiles):
    """A warpgroup that waits for each thing it starts; yields when it will be ready for the next."""
    now = 0.0
    for j in range(tiles):
        yield now
        now = do("product", wg, j, "S", now)
        yield now
        now = do("softmax", wg, j, "P", now)
        yield now
        now = do("product", wg, j, "O", now)


def _under(do, wg, tiles):
    """Step 6: S of a tile and O of the tile before are started together; softmax runs under the latter."""
    yield 0.0
    scores = do("product", wg, 0, "S", 0.0)
    yield scores
    now = do("softmax", wg, 0, "P", scores)
    for j in range(1, tiles):
        yield now
        scores = do("product", wg, j, "S", now)
        summed = do("product", wg, j - 1, "O", scores)
        yield scores
        now = max(summed, do("softmax", wg, j, "P", scores))
    yield now
    do("product", wg, tiles - 1, "O", now)


def data_timeline(d: int = 128) -> list[Timeline]:
    """Two warpgroups, all ways."""
    return [run(way, budget(d)) for way in WAYS]


@styled
def fig_timeline(data: list) -> Picture:
    """Draw what the two units do, a colour a warpgroup."""
    figure = picture("tall")
    figure.set_size_inches(7.6, 5.4)
    colours = STEP_COLOUR["step6_flash_v3"], STEP_COLOUR["step2_flash_v1"]
    panels = figure.subplots(len(data), 1, sharex=True)
    for ax, line in zip(panels, data, strict=True):
        for s in (s for s in line.stretches if s.start < SHOWN):
            y = 0 if s.unit == "product" else 1
            ax.barh(y, s.stop - s.start, 0.8, left=s.start, color=colours[s.wg], edgecolor="white", linewidth=1)
            if s.stop <= SHOWN:
                words = f"{s.what}{s.j}"
                ax.text((s.start + s.stop) / 2, y, words, ha="center", va="center", fontsize=6.5, color=INK)
        ax.set(ylim=(1.5, -0.5), yticks=[0, 1], yticklabels=["tensor cores", "softmax"])
        ax.set_title(f"{line.way}: tensor cores busy {line.busy:.0%}", fontsize=9)
        ax.grid(axis="y", visible=False)
    cost = data[0].budget
    panels[0].set_ylabel("unit")
    panels[-1].set(xlabel="cycles of one multiprocessor", xlim=(0, SHOWN))
    for wg, colour in enumerate(colours):
        panels[0].bar([0], [0], color=colour, label=f"warpgroup {wg}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    told = f"A model, d = {cost.d}: {cost.product:.0f} cycles a product, {cost.softmax:.0f} a softmax"
    figure.suptitle(told, fontsize=10)
    return figure
