"""Runs kernels x cases x dtypes in worker processes and returns a result for every one of them."""

import os
import pickle
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from refimpl.tiling import Tile
from verify import calls, executors, judge
from verify.cases import DEFAULT, SMALL_THREADS, SMALL_TILE
from verify.pool import cores, each
from verify.registry import Kernel
from verify.result import Result


@dataclass(frozen=True)
class Plan:
    """What to run and how.

    Attributes
    ----------
    kernels : tuple of Kernel
    cases, dtypes : tuple of str
        Names. Every combination of the three is run or skipped with a reason.
    executor : "gpu" or "emulated"
        For the kernels of flash_cuda. Emulated ones run the small shapes.
    small : bool
        The cases' small shapes.
    seed : int or None
        Instead of the cases' own.
    limit : float
        Seconds for one run, compilation included.
    jobs : int
        Worker processes at a time.
    dump : str or None
        Folder to which the arrays of every run are written.
    """

    kernels: tuple
    cases: tuple
    dtypes: tuple
    executor: str = "emulated"
    small: bool = True
    seed: int | None = None
    limit: float = 120.0
    jobs: int = field(default_factory=cores)
    dump: str | None = None

    @property
    def keys(self):
        """Every (kernel, case, dtype), by name, in the order of the report."""
        return [(k.name, c, t) for k in self.kernels for t in self.dtypes for c in self.cases]

    def kernel(self, name) -> Kernel:
        """A kernel of the plan by name."""
        return next(kernel for kernel in self.kernels if kernel.name == name)

    def executor_of(self, name) -> str:
        """Where a kernel of the plan runs: on `executor`, or "numpy"."""
        return self.executor if self.kernel(name).runs == "cuda" else "numpy"

    def tile_of(self, name):
        """[Br, Bc] that the plan asks a kernel for; None where the kernel chooses."""
        if name == "oracle" or self.executor_of(name) == "gpu":
            return None
        size = SMALL_TILE if self.small else 64
        tile = self.kernel(name).tile(Tile(size, size))
        return [tile.Br, tile.Bc]


def run(plan: Plan, progress=lambda done, total: None) -> list[Result]:
    """Run a plan.

    Parameters
    ----------
    plan : Plan
    progress : callable
        ``progress(done, total)`` after each run, from any thread.

    Returns
    -------
    list of Result
        One for each of `plan.keys`, in their order: skipped ones too, and those that never came back.
    """
    results, calls = {}, []
    for turn, kernel in enumerate(plan.kernels):
        taken = []
        for key in (key for key in plan.keys if key[0] == kernel.name):
            if reason := kernel.refuses(DEFAULT[key[1]], key[2], plan.small):
                results[key] = _unjudged(plan, key, "skip", reason)
            else:
                taken.append(key)
        # Kernels start at different places of the list, so that workers do not compute the same truth at once.
        shift = turn * len(taken) // len(plan.kernels)
        calls += taken[shift:] + taken[:shift]
    skipped, total = len(results), len(plan.keys)
    progress(skipped, total)
    with tempfile.TemporaryDirectory(prefix="verify-") as store:
        answers = each(
            "verify.runner:run_one",
            [(plan, key, store) for key in calls],
            limit=plan.limit,
            jobs=plan.jobs,
            groups=[_group(plan, key) for key in calls],
            fresh=plan.executor == "gpu",
            progress=lambda done, _: progress(skipped + done, total),
        )
    for key, (result, failure) in zip(calls, answers, strict=True):
        results[key] = result or _unjudged(plan, key, "error", failure)
    assert results.keys() == set(plan.keys), "every combination has a result"
    return [results[key] for key in plan.keys]


def _group(plan, key):
    """What shares a process: a kernel's runs, and on a GPU those of one type, as each compiles kernels of its own."""
    name, _, dtype = key
    return (name, dtype) if plan.executor_of(name) == "gpu" else name


def _unjudged(plan, key, verdict, reason):
    """The result of a run that has no output."""
    name, case, dtype = key
    size = DEFAULT[case].shape(plan.small)._asdict()
    kind = plan.executor_of(name)
    seed = DEFAULT[case].seed if plan.seed is None else plan.seed
    device = executors.device_name(kind)
    return Result(name, case, dtype, kind, device, size, plan.tile_of(name), verdict, reason, {}, 0.0, seed)


def run_one(plan: Plan, key: tuple, store: str) -> Result:
    """Build the case, run the kernel on it, judge it. Runs in the worker; exceptions of the kernel come through."""
    name, case_id, dtype = key
    kernel, kind = plan.kernel(name), plan.executor_of(name)
    kernel.attention()  # its import is not part of the time
    problem = DEFAULT[case_id].build(dtype, plan.small, plan.seed)
    known = reference(problem, store)
    before = [x.tobytes() for x in (problem.Q, problem.K, problem.V)]
    where = placed(kind, plan.tile_of(name), problem.seed)
    start = time.perf_counter()
    ways = kernel.judged_ways(kind == "emulated")
    found = list(calls.runs(kernel, problem, where, ways=ways))
    seconds = time.perf_counter() - start
    results = [
        judge.verdict(
            problem,
            outputs,
            known=known,
            before=before,
            # The emulator has no bands: it raises at the access itself.
            guards_ok=where["on"].guards_ok() if kind == "gpu" else True,
            kernel=name,
            executor=kind,
            device=executors.device_name(kind),
            tile=plan.tile_of(name),
            seconds=seconds,
        )
        for outputs in found
    ]
    result, outputs = worst(ways, results, found)
    if plan.dump:
        dump(Path(plan.dump), key, problem, outputs, known)
    return result


def worst(ways, results, found) -> tuple:
    """Of the ways to the gradients the first that fails, or the one nearest to its bounds: its result and outputs."""
    for way, result, outputs in zip(ways, results, found, strict=False):
        if result.verdict != "pass":
            said = ", ".join(f"{name}={value}" for name, value in way.items())
            return replace(result, reason=f"{result.reason} ({said})" if said else result.reason), outputs
    return max(zip(results, found, strict=True), key=lambda pair: pair[0].ratio or 0)


def placed(kind, tile, seed) -> dict:
    """Arguments that say where a kernel runs, in what tile, and in what order of threads.

    Parameters
    ----------
    kind : "gpu", "emulated" or "numpy"
    tile : [Br, Bc] or None
        None leaves it to the kernel.
    seed : int
    """
    where = {"tile": Tile(*tile)} if tile else {}
    if kind != "numpy":
        where["on"] = executors.open_executor(kind, seed)
    if kind == "emulated":
        where["threads"] = SMALL_THREADS
    return where


def reference(problem, store):
    """Truth and anchors of a problem, from whichever worker came to this case first; `store` is their folder."""
    path = Path(store, f"{problem.case}-{problem.dtype}.pickle")
    if path.exists():
        return pickle.loads(path.read_bytes())
    known = judge.reference(problem, problem.dO() if problem.backward else None)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(pickle.dumps(known))
    os.replace(part, path)  # in one step, as another worker may be looking
    return known


def dump(folder, key, problem, outputs, known):
    """All arrays of a run, bf16 widened to fp32 (exactly), as NumPy files go without it."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {"Q": problem.Q, "K": problem.K, "V": problem.V} | outputs
    arrays |= {"dO": problem.dO()} if problem.backward else {}
    arrays |= {name: x for name, x in problem.options.items() if isinstance(x, np.ndarray)}
    arrays |= {f"{name}_truth": anchor.truth for name, anchor in known.anchors.items()}
    arrays |= {f"{name}_plain": anchor.plain for name, anchor in known.anchors.items()}
    arrays = {n: x.astype(np.float32) if x.dtype.name == "bfloat16" else x for n, x in arrays.items()}
    np.savez(folder / f"{'-'.join(key)}.npz", **arrays)
