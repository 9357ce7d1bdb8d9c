"""Does a kernel need luck? Run it in many orders, on spoilt memory and with warps held up: the bits may not change.

A right answer says nothing about a race, as one order of threads hides it. So nothing here looks at answers; each
check changes something that the result must not depend on and compares every bit with the first run's.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module

import numpy as np

from verify import barriers, calls, runner
from verify.cases import DEFAULT, Case, dense
from verify.foreign.refusal import fatal
from verify.registry import CUDA

# Ragged both ways, shared key heads, a maximum that grows, a mask by rule; gradients of such, and those of a bias.
CASES = ("causal_113x203", "gqa", "growing_max", "window_both", "back_causal", "back_gqa", "back_window_softcap",
         "back_bias")  # fmt: skip
# Small shapes for the self-test, in which some barrier is the only one between two threads, as in none of these.
TIGHT = {case.id: case for case in (
    Case(name, about, "races", shape, shape, having=having, backward=name.startswith("back_"))
    for shape, name, having, about in (
        (dense(20, 16, d=8), "one_tile", (), "one key tile: between reading Q and writing O there is one barrier"),
        (dense(20, 16, d=8), "one_tile_by_rule", ("window_beyond",), "the same, with a rule"),
        (dense(16, 16, d=8), "back_one_tile", (), "one tile each way, with gradients"),
        (dense(16, 16, d=8), "back_one_tile_by_rule", ("window_beyond",), "the same, with a rule"),
        (dense(5, 640, d=8), "dead_keys", ("window_narrow",), "more dead key tiles than a block looks ahead"),
        (dense(5, 640, d=8), "back_dead_keys", ("window_narrow",), "the same, with gradients"),
        (dense(640, 5, d=8), "back_dead_queries", ("window_narrow",), "more dead query tiles than a block looks ahead"),
    )
)}  # fmt: skip
SEEDS = 5
REPEATS = 20
POISON_SHARED = 224 << 10  # more than any block of ours uses; what a Hopper block may have is 227 KiB


@dataclass(frozen=True)
class Check:
    """One way of changing what must not matter.

    Attributes
    ----------
    name : str
        The function of this module that does it.
    about : str
    where : "emulated" or "gpu"
    """

    name: str
    about: str
    where: str


CHECKS = (
    Check("orders", f"{SEEDS} orders of threads and blocks, and the natural one; accesses watched", "emulated"),
    Check("repeats", f"{REPEATS} runs on the same inputs", "gpu"),
    Check("poisoned", "shared memory full of NaN before each run", "gpu"),
    Check("delays", f"warps asleep at barriers, {SEEDS} choices of them", "gpu"),
)


def orders(kernel, case, dtype) -> str | None:
    """The first difference between thread orders, or what the emulator raises; None if there is neither.

    Of a way to the gradients that adds up in whatever order only what the emulator raises counts.
    """
    told = _compare(_run(kernel, case, dtype, "emulated", seed) for seed in (None, *range(1, SEEDS + 1)))
    return told or _watched(kernel, case, dtype)


def repeats(kernel, case, dtype) -> str | None:
    """The first difference between runs on a GPU."""
    return _compare(_run(kernel, case, dtype, "gpu") for _ in range(REPEATS))


def poisoned(kernel, case, dtype) -> str | None:
    """The first difference between a run and runs that find NaN in shared memory."""

    def runs():
        yield _run(kernel, case, dtype, "gpu")
        for _ in range(SEEDS):
            poison_shared()
            yield _run(kernel, case, dtype, "gpu")

    return _compare(runs())


def delays(kernel, case, dtype) -> str | None:
    """The first difference between a run and runs in which some warps sleep at barriers."""

    def runs():
        yield _run(kernel, case, dtype, "gpu")
        for seed in range(SEEDS):
            yield _run(kernel, case, dtype, "gpu", load=_slowed(tuple(modules_of(kernel)), seed).load)

    return _compare(runs())


@cache
def _slowed(modules, seed):
    """The copies of a kernel's modules for a choice of warps; each compiles what it launches once for all cases."""
    return barriers.delayed(modules, seed)


def modules_of(kernel) -> list[str]:
    """The modules with barriers that a kernel may run, forward and backward if it has that."""
    return barriers.modules(*_roots(CUDA[kernel]))


def own_modules_of(kernel) -> list[str]:
    """Those that are no other kernel's: what a kernel borrows is looked at there."""
    others = {root for entry in CUDA.values() if entry.name != kernel for root in _roots(entry)}
    return [module for module in modules_of(kernel) if module not in others]


def _roots(entry) -> list[str]:
    return [entry.module, entry.gradients.module] if "backward" in entry.options else [entry.module]


def cases_of(kernel, dtype, tight=False) -> list[str]:
    """Those of `CASES` that a kernel takes, and of `TIGHT` if asked for."""
    return [case for case in (*CASES, *(TIGHT if tight else ())) if not CUDA[kernel].refuses(case_of(case), dtype)]


def case_of(name) -> Case:
    """A case by name, out of the default ones or `TIGHT`."""
    return TIGHT.get(name) or DEFAULT[name]


def _run(kernel, case, dtype, kind, seed=0, load=import_module, watch=True, way=-1, on=None) -> dict:
    """Outputs of one run on a fresh executor, by name.

    seed : of the emulated order of threads, or None for the natural one
    watch : whether the emulator raises on races, or lets them do to the numbers what they do
    way : of the kernel's `ways` to the gradients; the last gives the same bits every run
    on : executor to take in the place of one of that kind
    """
    entry = CUDA[kernel]
    plan = runner.Plan((entry,), (case,), (dtype,), executor=kind, small=kind != "gpu")
    problem = entry.fitted(case_of(case)).build(dtype, plan.small)
    where = runner.placed(kind, plan.tile_of(kernel), seed)
    if not watch:
        where["on"] = import_module("flash_cuda.executors.emulator").Emulator(seed, watch=False)
    if on is not None:
        where["on"] = on
    return calls.outputs(entry, problem, where, load, way=way)


def _watched(kernel, case, dtype, load=import_module) -> str | None:
    """What the emulator raises in two orders of threads, whichever way to the gradients; None if nothing."""
    for way in _ways(kernel, case):
        for seed in (None, 1):
            if told := _compare(_run(kernel, case, dtype, "emulated", seed, load, way=way) for _ in range(1)):
                return told
    return None


def _ways(kernel, case) -> range:
    """The ways to the gradients that a case goes: numbers of `Kernel.ways`."""
    return range(len(CUDA[kernel].ways) if case_of(case).backward else 1)


def launched(kernel, case, dtype) -> set[str]:
    """The modules that the kernels of a case are made of, whichever way to the gradients. Nothing is run."""
    from verify.launched import Witness

    witness = Witness()
    for way in _ways(kernel, case):
        _run(kernel, case, dtype, "emulated", way=way, on=witness)
    return witness.modules


def _compare(runs, first=None, survives=False) -> str | None:
    """The first difference of any run from the first; a fault in words.

    Parameters
    ----------
    runs : iterable of dict
    first : dict, optional
        What to compare with, if not the first of them.
    survives : bool
        Put a fault that a process does not survive into words, too; who calls must be alone in its process.
    """
    try:
        for k, outputs in enumerate(runs, first is not None):
            if first is None:
                first = outputs
            elif told := difference(first, outputs):
                return f"run {k}: {told}"
    except Exception as error:
        if fatal(error) and not survives:
            raise
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def difference(one, other) -> str | None:
    """Where two sets of outputs differ in any bit, in words; NaN of the same bits are equal."""
    for name, x in one.items():
        y = other[name]
        if not x.size:
            continue
        a, b = (np.ascontiguousarray(array).view(np.uint8).reshape(*array.shape, -1) for array in (x, y))
        differ = (a != b).any(axis=-1)
        if differ.any():
            at = tuple(int(k) for k in np.argwhere(differ)[0])
            return f"{name}{list(at)} is {float(y[at])!r}, was {float(x[at])!r}; {differ.sum()} of {x.size} differ"
    return None


@cache
def poison_kernel(nbytes):
    """A kernel that writes NaN over so many bytes of dynamic shared memory."""
    from numba import cuda
    from numba.cuda.types import uint32

    words = nbytes // 4

    def poison(out):
        memory = cuda.shared.array(0, uint32)
        for k in range(cuda.threadIdx.x, words, cuda.blockDim.x):
            memory[k] = uint32(0xFFFFFFFF)
        cuda.syncthreads()
        # A store that depends on it keeps the compiler from dropping the loop.
        if memory[cuda.threadIdx.x] == uint32(0):
            out[0] = out[0] + out[0]

    return poison


def poison_shared():
    """Leave NaN in the shared memory of every multiprocessor, as far as one kernel can reach it."""
    from numba import cuda

    from flash_cuda.executors.gpu import Gpu

    on, device = Gpu(), cuda.get_current_device()
    nbytes = min(POISON_SHARED, device.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN // 4 * 4)
    out = on.empty("out", (1,), np.dtype(np.float32))
    on.launch(poison_kernel(nbytes), 4 * device.MULTIPROCESSOR_COUNT, 1024, (out,), shared=nbytes)


# Taking barriers out: which check sees it.


def seen_without(kernel, cases, dtype, module, k, where) -> dict[str, str | None]:
    """What each check says once the k-th barrier of a module is gone, in the first of several cases that shows it.

    Parameters
    ----------
    where : "emulated" or "gpu"

    Returns
    -------
    dict of str to (str or None)
        By check, None where it sees nothing; and the case, as "case".
    """
    look, seen = {"emulated": _seen_emulated, "gpu": _seen_on_gpu}[where], {}
    for case in cases:
        seen = look(kernel, case, dtype, module, k)
        if any(seen.values()):
            break
    return {**seen, "case": case}


def _seen_emulated(kernel, case, dtype, module, k):
    copies, whole = barriers.without(module, k), _run(kernel, case, dtype, "emulated", None)

    def unwatched():
        for seed in (None, *range(1, SEEDS + 1)):
            yield _run(kernel, case, dtype, "emulated", seed, copies.load, watch=False)

    return {"watched": _watched(kernel, case, dtype, copies.load), "bits, emulated": _compare(unwatched(), whole)}


def _seen_on_gpu(kernel, case, dtype, module, k):
    copies, whole = barriers.without(module, k), _run(kernel, case, dtype, "gpu")

    def differs(copies_of_seed, n):
        runs = (_run(kernel, case, dtype, "gpu", load=copies_of_seed(seed).load) for seed in range(n))
        return _compare(runs, whole, survives=True)

    repeats = differs(lambda seed: copies, REPEATS)
    if repeats and not repeats.startswith("run "):  # a fault, after which nothing runs in this process
        return {"repeats": repeats, "delays": None}
    return {
        "repeats": repeats,
        "delays": differs(lambda seed: barriers.delayed(modules_of(kernel), seed, gone=(module, k)), SEEDS),
    }
