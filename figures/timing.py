"""Timing done wrong and right, on a device whose times are known: what each way of measuring makes of one ratio."""

from dataclasses import dataclass

import numpy as np

from figures.style import INK, MUTED, STEP_COLOUR, Picture, picture, styled
from verify.bench.simulated import Device
from verify.bench.stats import Ratio, paired
from verify.timing import Clock, Contender, interleaved

# Two works on the simulated device: cold and warm times in ms, and how long the host takes to launch them.
OURS = {"cold_ms": 0.100, "warm_ms": 0.060, "host_ms": 0.090}
THEIRS = {"cold_ms": 0.110, "warm_ms": 0.108, "host_ms": 0.015}
TRUE = THEIRS["cold_ms"] / OURS["cold_ms"]
RUNS = 24


def slowing(ms: float) -> float:
    """The clock of a device that has to slow down as it warms up: 30 % in the first 20 ms of work, and no more then."""
    return 1 + 0.3 * min(1.0, ms / 20)


@dataclass(frozen=True)
class Outcome:
    """What one way of timing says of how much faster ours is.

    Attributes
    ----------
    way : str
    why : str
        What is wrong with it, in a few words; empty for the right one.
    ratio : Ratio
    """

    way: str
    why: str
    ratio: Ratio


def _two(seed):
    """A fresh device, a clock on it, and the two works."""
    device = Device(seed=seed, scatter=0.01, outliers=0.03, drift=slowing)
    return device, Clock(device), device.work("ours", **OURS), device.work("theirs", **THEIRS)


def host_clock(seed: int) -> Outcome:
    """The host's clock around launches that have not run when it is read."""
    device, _, *works = _two(seed)
    times = []
    for work in works:
        taken = []
        for _ in range(RUNS):
            begin = device.host_ms()
            work()
            taken.append(device.host_ms() - begin)
        device.wait()
        times.append(taken)
    return Outcome("host's clock, no wait", "times the launch", paired(*times))


def no_head_start(seed: int) -> Outcome:
    """Events on an idle device: the first one passes while the host is still busy launching."""
    device, _, *works = _two(seed)
    times = [[], []]
    for _ in range(RUNS):
        for work, taken in zip(works, times, strict=True):
            device.flush()
            device.wait()
            start = device.mark()
            work()
            stop = device.mark()
            device.wait()
            taken.append(device.elapsed_ms(start, stop))
    return Outcome("events, idle device", "waits for the host", paired(*times))


def warm_cache(seed: int) -> Outcome:
    """Runs straight after one another: all inputs are in the cache that a model would have filled otherwise."""
    _, clock, *works = _two(seed)
    clock.give_start(0.1)
    times = [[], []]
    for _ in range(RUNS):
        for work, taken in zip(works, times, strict=True):
            taken.append(clock.warm(work))
    return Outcome("warm cache, not said", "inputs in the L2", paired(*times))


def one_after_the_other(seed: int) -> Outcome:
    """All runs of ours, then all of theirs, by when the device has slowed down."""
    _, clock, *works = _two(seed)
    clock.give_start(0.1)
    times = [[clock.cold(work) for _ in range(RUNS)] for work in works]
    return Outcome("one after the other", "drift of the clock", paired(*times))


def in_turns(seed: int) -> Outcome:
    """The protocol of `verify.timing`."""
    _, clock, ours, theirs = _two(seed)
    found = interleaved(clock, [Contender("ours", ours), Contender("theirs", theirs)], RUNS)
    return Outcome("in turns, cold, events", "", paired(found["ours"].ms, found["theirs"].ms))


WAYS = (host_clock, no_head_start, warm_cache, one_after_the_other, in_turns)


def data_ways(seed: int = 2) -> list[Outcome]:
    """Every way on the same kind of device."""
    return [way(seed) for way in WAYS]


def held(devices: int = 100) -> list[int]:
    """On how many devices each way's 95 % interval holds the true ratio."""
    found = [[way(seed).ratio for seed in range(devices)] for way in WAYS]
    return [sum(ratio.low <= TRUE <= ratio.high for ratio in ratios) for ratios in found]


@styled
def fig_ways(data: list) -> Picture:
    """Draw each way's ratio with its 95 % interval, against the true one."""
    figure = picture("strip")
    ax = figure.subplots()
    for y, outcome in enumerate(data):
        colour = STEP_COLOUR["step4_causal"] if not outcome.why else STEP_COLOUR["step6_flash_v3"]
        low, high = outcome.ratio.low, outcome.ratio.high
        ax.plot([low, high], [y, y], color=colour, linewidth=3, solid_capstyle="butt")
        ax.plot(outcome.ratio.value, y, "o", color=colour)
        words = f"{outcome.ratio.value:.2f}" + (f": {outcome.why}" if outcome.why else "")
        ax.annotate(words, (high, y), xytext=(7, 0), textcoords="offset points", va="center", fontsize=8, color=INK)
    ax.axvline(TRUE, color=MUTED, linestyle="--", linewidth=1)
    ax.annotate(f"true {TRUE:.2f}", (TRUE, -0.72), xytext=(4, 0), textcoords="offset points", fontsize=8, color=MUTED)
    ax.set_yticks(range(len(data)), [outcome.way for outcome in data])
    ax.set(xlim=(0, 2.4), ylim=(len(data) - 0.4, -0.9), ylabel="way of timing")
    ax.set_xlabel("how many times as fast ours seems, with 95 % interval")
    ax.set_xticks(np.arange(0, 2.5, 0.5))
    ax.set_title("One ratio, five ways to time it (simulated device)")
    ax.grid(axis="y", visible=False)
    return figure
