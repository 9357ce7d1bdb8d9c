"""The suite that the tensor-core kernels are held to, its bars, and whether a record meets them."""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from verify.bench.limits import BACKWARD, FORWARD
from verify.bench.points import Point, fingerprint_of
from verify.bench.record import by_point, in_type, key
from verify.bench.stats import Ratio, geometric_mean, paired
from verify.misuse import Misuse
from verify.registry import CUDA


@dataclass(frozen=True)
class Suite:
    """A set of points, who is timed there, and on what.

    Attributes
    ----------
    device : str
        What the driver's name of the GPU has in it.
    heads, tokens : int
        Tokens of all sequences together.
    other, other_lengths : str, tuple of int
        A second storage type, and the lengths at which our kernels are timed in it against themselves in the first.
    """

    name: str
    device: str
    kernels: tuple
    peers: tuple
    dtype: str
    heads: int
    tokens: int
    dims: tuple
    masks: tuple
    lengths: tuple
    other: str
    other_lengths: tuple

    def points(self, directions=(FORWARD, BACKWARD), dims=None, masks=None, lengths=None) -> list[Point]:
        """Its points, or those that are chosen out of them.

        Raises
        ------
        Misuse
            For a size that is not in the suite.
        """
        chosen = []
        for argument, wanted, has in (("--d", dims, self.dims), ("--N", lengths, self.lengths)):
            wanted = has if wanted is None else wanted
            if other := [n for n in wanted if n not in has]:
                raise Misuse(f"{argument}: the suite has {', '.join(map(str, has))}, not {other[0]}")
            chosen.append(wanted)
        dims, lengths = chosen
        return [
            Point(way, max(1, self.tokens // N), self.heads, N, d, self.dtype, causal)
            for way, d, causal, N in product(directions, dims, self.masks if masks is None else masks, lengths)
        ]

    def other_points(self, directions=(FORWARD, BACKWARD), dims=None, masks=None, lengths=None) -> list[Point]:
        """Those of `points` that are timed in both storage types, in turns: in the second."""
        points = self.points(directions, dims, masks, lengths)
        return [replace(point, dtype=self.other) for point in points if point.N in self.other_lengths]


H200 = Suite(
    "h200", "H200", ("step5_tensor_core", "step6_flash_v3", "standard_tensor_core"),
    ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient"), "fp16",
    heads=16, tokens=16384, dims=(64, 128), masks=(False, True), lengths=(1024, 2048, 4096, 8192, 16384),
    other="bf16", other_lengths=(4096,),
)  # fmt: skip
SUITES = {"h200": H200}
ITSELF = "itself"


@dataclass(frozen=True)
class Bar:
    """How fast a kernel has to be.

    Attributes
    ----------
    direction, kernel, peer : str
        The peer may be the kernel `ITSELF`, and is then held to its speed in the suite's first storage type.
    mean : float
        The geometric mean over the suite's points of peer's time over kernel's.
    single : float or None
        No point below this.
    """

    direction: str
    kernel: str
    peer: str
    mean: float
    single: float | None = None

    def __str__(self):
        if self.peer == ITSELF:
            return f"{self.kernel} {self.direction} in {H200.other} against {H200.dtype}"
        return f"{self.kernel} {self.direction} against {self.peer}"


BARS = (
    Bar(FORWARD, "step6_flash_v3", "sdpa_cudnn", 1.00, 0.85),
    Bar(FORWARD, "step6_flash_v3", "sdpa_flash", 1.6, 1.2),
    Bar(FORWARD, "step5_tensor_core", "sdpa_flash", 0.95, 0.80),
    Bar(BACKWARD, "step6_flash_v3", "sdpa_flash", 1.3, 1.0),
    Bar(BACKWARD, "step6_flash_v3", "sdpa_cudnn", 0.75),
    Bar(BACKWARD, "step5_tensor_core", "sdpa_flash", 0.85),
)
# Each kernel and direction against itself: its speed in the suite's second storage type over that in its first.
OWN_BARS = tuple(
    Bar(way, kernel, ITSELF, 1 / 1.03, 1 / 1.03)
    for kernel, way in product(("step6_flash_v3", "step5_tensor_core"), (FORWARD, BACKWARD))
)
# Of the kernel's RMSE over the peer's.
ERROR_BAR = 1.05
LATENCY_BAR_US = 20  # of the host, for the launches of a call whose arguments are prepared
# Seconds of a kernel's first call: with its compilation, and in a process that finds it compiled.
FIRST_CALL_BAR_S, RESTART_BAR_S = 10, 1


@dataclass(frozen=True)
class Standing:
    """Where a record stands against a bar.

    Attributes
    ----------
    bar : Bar
    mean : Ratio or None
        Over the points where both were timed; None if there is none.
    ratios : dict of tuple to Ratio
        Each of these points, by its key.
    problems : tuple of str
        Why it does not count, or is not met; empty if it is met.
    """

    bar: Bar
    mean: Ratio | None
    ratios: dict
    problems: tuple

    @property
    def met(self) -> bool:
        """Every point was measured, nothing is stale, and the intervals reach the bar."""
        return not self.problems

    @property
    def worst(self) -> tuple | None:
        """(key, Ratio) of the point where the kernel does worst; None if there is none."""
        return min(self.ratios.items(), key=lambda item: item[1].value, default=None)


def standing(bar: Bar, record: dict, suite: Suite = H200) -> Standing:
    """Hold a record against one bar.

    A bar is met when the 95 % interval reaches it: of the geometric mean over all the suite's points, and of every
    single one of them. Against itself a kernel is held at the points of the suite's second storage type.
    """
    own = bar.peer == ITSELF
    points = (suite.other_points if own else suite.points)((bar.direction,))
    peer = in_type(bar.kernel, suite.dtype) if own else bar.peer
    wanted, found, pairs, problems = [_key(point) for point in points], by_point(record["rows"]), {}, []
    for at in wanted:
        ours, theirs = (found.get(at, {}).get(name, {}) for name in (bar.kernel, peer))
        if "ms" in ours and "ms" in theirs:
            pairs[at] = ours["ms"], theirs["ms"]
    if len(pairs) < len(wanted):
        problems.append(f"{len(wanted) - len(pairs)} of {len(wanted)} points not measured{_why(record, bar, wanted)}")
    if not pairs:
        return Standing(bar, None, {}, tuple(problems))
    ratios = {at: paired(*pair) for at, pair in pairs.items()}
    mean = geometric_mean(list(pairs.values()))
    if not mean.reaches(bar.mean):
        problems.append(f"mean {mean} misses {bar.mean:g}")
    below = [at for at, ratio in ratios.items() if bar.single is not None and not ratio.reaches(bar.single)]
    if below:
        problems.append(f"{len(below)} of {len(ratios)} points below {bar.single:g}")
    return Standing(bar, mean, ratios, tuple(problems))


def _key(point):
    """The key that the point's rows have."""
    return key(vars(point))


def _why(record, bar, wanted):
    """The commonest reason that a record gives for a missing time, in words to append."""
    reasons = [
        f"{row['name']}: {row.get('not_measured') or row['refused']}"
        for row in record["rows"]
        if row["name"] in (bar.kernel, bar.peer) and key(row) in wanted and ("not_measured" in row or "refused" in row)
    ]
    return f" ({max(set(reasons), key=reasons.count)})" if reasons else ""


def stale(record) -> dict[str, str]:
    """Kernels with rows in a record whose code has changed since, with what changed."""
    found = {}
    for row in record["rows"]:
        name, made = row["name"], row.get("fingerprint")
        if made is None:
            continue
        if name not in CUDA:
            found[f"{name} {row['direction']}"] = "no longer registered"
        elif (now := fingerprint_of(name, row["direction"])) != made:
            found[f"{name} {row['direction']}"] = f"measured as {made}, is {now}"
    return found


@dataclass(frozen=True)
class Accuracy:
    """A kernel's RMSE against fp64 over a peer's on the same rows of the same inputs: geometric mean over points."""

    bar: Bar
    ratio: float
    points: int

    @property
    def met(self) -> bool:
        """No worse than `ERROR_BAR` times the peer's."""
        return self.ratio <= ERROR_BAR


def accuracy(bar: Bar, record: dict) -> Accuracy | None:
    """Hold a record against the bar on errors; None if no point has both."""
    rows = [row for row in record["rows"] if row["direction"] == bar.direction]
    both = [(found[bar.kernel]["rmse"], found[bar.peer]["rmse"]) for found in by_point(rows).values()
            if all("rmse" in found.get(name, {}) for name in (bar.kernel, bar.peer))]  # fmt: skip
    if not both:
        return None
    ours, theirs = np.array(both).T
    return Accuracy(bar, float(np.exp(np.mean(np.log(ours / theirs)))), len(both))


def latency_us(kernel: str, record: dict, way: str, usual=False) -> float | None:
    """The host's time for a call at the worst point; None if the record has none.

    Parameters
    ----------
    way : str
        The row's entry: "queued_us" of launches one by one or "graph_queued_us" of one CUDA graph, for calls in a row;
        "latency_us" or "graph_us" for calls after a wait; "plain_queued_us" or "plain_us" of no call at all, see
        `timing.Times`.
    usual : bool
        Of the usual batch at each point, whatever else went on, instead of the least.
    """
    rows = [row.get("usual_us", {}) if usual else row for row in record["rows"] if row["name"] == kernel]
    return max((row[way] for row in rows if way in row), default=None)


def first_call_s(kernel: str, record: dict) -> float | None:
    """Seconds of the longest first call of a kernel, its compilation included; None if the record has none."""
    taken = [row["first_call_s"] for row in record["rows"] if row["name"] == kernel and "first_call_s" in row]
    return max(taken, default=None)


def restart_s(kernel: str, record: dict) -> float | None:
    """Seconds of the longest first call in a process that found the kernel compiled; None if one was not measured."""
    taken = [row.get("first_call_s") for row in record.get("restarts", ()) if row["name"] == kernel]
    return None if None in taken else max(taken, default=None)
