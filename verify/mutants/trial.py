"""One mutant on one case: does the judge fail it, and by what?"""

from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache

import numpy as np

from flash_cuda.executors import emulator, memory
from refimpl.tiling import Tile
from verify import calls, judge
from verify.cases import DEFAULT, SMALL_THREADS, SMALL_TILE
from verify.mutants.graft import Graft
from verify.registry import ALL

# What a trial ends with. The first three are seen by whoever looks at numbers; the emulator sees the others first.
KILLS = {
    "number": "an output is out of bound",
    "nan": "an output is NaN or inf where it should not be",
    "modified": "an input was modified",
    "race": "two threads meet at an element with no barrier between",
    "uninitialised": "shared memory is read before it is written",
    "bounds": "an index is outside its array",
    "barrier": "threads wait at different barriers",
    "deadlock": "threads wait for what never comes",
    "fault": "another fault that the emulator raises on",
    "error": "an exception",
}
FAULTS = {
    memory.Race: "race",
    memory.UninitialisedRead: "uninitialised",
    memory.OutOfBounds: "bounds",
    memory.ReadOnly: "modified",
    emulator.DivergentBarrier: "barrier",
    emulator.DivergentWarp: "barrier",
    emulator.Deadlock: "deadlock",
}


@dataclass(frozen=True)
class Trial:
    """What came of a run.

    Attributes
    ----------
    case, dtype : str
    seed : int
    kill : str
        One of `KILLS`, or "" if the run passed.
    numbers : bool or None
        Whether its numbers alone fail it: for a fault of the emulator, those of a run in which it looks away; None if
        there are none.
    detail : str
        One line on what was wrong.
    ratio : float or None
        Worst error over bound.
    seconds : float
    """

    case: str
    dtype: str
    seed: int
    kill: str
    numbers: bool | None
    detail: str = ""
    ratio: float | None = None

    def to_dict(self) -> dict:
        """Plain data for JSON."""
        return asdict(self)


def cases_for(mutant) -> list[str]:
    """The default cases that a mutant's kernel takes, its own first ones first."""
    kernel = ALL[mutant.through]
    taken = [name for name, case in DEFAULT.items() if not kernel.refuses(case, mutant.dtypes[0], small=True)]
    first = [name for name in mutant.first if name in taken]
    return first + [name for name in taken if name not in first]


def attempt(graft, kernel, case, dtype, seed=None, tile=None) -> Trial:
    """Run a kernel out of a graft on a case at its small shape, and judge it.

    Parameters
    ----------
    graft : Graft
    kernel, case, dtype : str
    seed : int, optional
        Instead of the case's own.
    tile : Tile, optional
    """
    problem, known = posed(case, dtype, seed)
    try:
        return _worst(problem, known, *produced(graft, kernel, problem, tile))
    except memory.KernelFault as fault:
        kill = next((word for kind, word in FAULTS.items() if isinstance(fault, kind)), "fault")
        return Trial(case, dtype, problem.seed, kill, _by_numbers(graft, kernel, problem, known, tile), _line(fault))
    except Exception as error:
        return Trial(case, dtype, problem.seed, "error", None, _line(error))


def produced(graft, kernel, problem, tile=None, watch=True) -> tuple:
    """Run a kernel out of a graft on inputs of its own.

    One of flash_cuda's kernels is emulated, with the race detector or without.

    Returns
    -------
    list of dict
        Outputs by name, for each way to the gradients.
    Problem
        With those inputs.
    """
    arrays = {name: getattr(problem, name) for name in "QKV"}
    # A view keeps the layout that it is there for; the emulator lets nobody write to it.
    problem = replace(problem, **{n: x.copy() if x.flags.c_contiguous else x for n, x in arrays.items()})
    size = tile or ALL[kernel].tile(Tile(SMALL_TILE, SMALL_TILE))
    where = {"tile": graft.load("refimpl.tiling").Tile(size.Br, size.Bc)}
    if ALL[kernel].runs == "cuda":
        where |= {"on": emulator.Emulator(problem.seed, watch=watch), "threads": SMALL_THREADS}
    return list(calls.runs(ALL[kernel], problem, where, graft.load, ALL[kernel].judged_ways(emulated=True))), problem


def changed(graft, kernel, case, dtype, tile=None) -> bool:
    """Whether any bit of any output is another than without the edit; a fault counts."""
    problem, _ = posed(case, dtype, None)
    try:
        found, _ = produced(graft, kernel, problem, tile)
    except Exception:
        return True
    shipped = _shipped(kernel, case, dtype, tile)
    return any(x[name].tobytes() != y[name].tobytes() for x, y in zip(found, shipped, strict=True) for name in y)


@lru_cache(maxsize=256)
def posed(case, dtype, seed):
    """A problem and its anchors; kept, as one case meets many mutants."""
    problem = DEFAULT[case].build(dtype, small=True, seed=seed)
    return problem, judge.reference(problem, problem.dO() if problem.backward else None)


@cache
def _shipped(kernel, case, dtype, tile):
    return produced(Graft(()), kernel, posed(case, dtype, None)[0], tile)[0]


def _worst(given, known, found, used):
    """The trial of the first way that is killed, or of the last."""
    for outputs in found:
        trial = _judged(given, known, outputs, used)
        if trial.kill:
            break
    return trial


def _judged(given, known, outputs, used):
    """The trial of a run that came to its end; ``used`` has the inputs as the run left them."""
    before = [x.tobytes() for x in (given.Q, given.K, given.V)]
    facts = {"kernel": "", "executor": "", "device": "", "tile": None}
    result = judge.verdict(used, outputs, known=known, before=before, **facts)
    ratio = result.ratio
    finite = None if ratio is None or not np.isfinite(ratio) else float(ratio)
    if result.verdict == "pass":
        return Trial(given.case, given.dtype, given.seed, "", False, "", finite)
    if "was modified" in result.reason and all(m.ok for m in result.outputs.values()):
        kill = "modified"
    else:
        kill = "nan" if any(not m.ok and not np.isfinite(m.max_abs) for m in result.outputs.values()) else "number"
    return Trial(given.case, given.dtype, given.seed, kill, True, result.reason, finite)


def _by_numbers(graft, kernel, problem, known, tile):
    """Whether the numbers of a run with no race detector fail it; None if it gives none."""
    try:
        return bool(_worst(problem, known, *produced(graft, kernel, problem, tile, watch=False)).kill)
    except Exception:
        return None


def _line(error):
    return f"{type(error).__name__}: {error}".splitlines()[0]
