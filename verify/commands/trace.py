"""Find the first (row, key tile, quantity) at which a kernel's running state leaves fp64."""

from difflib import get_close_matches

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flash_cuda.executors.memory import KernelFault
from refimpl.tiling import Tile
from verify import executors, judge, options
from verify import trace as tracing
from verify.case import SMALL_TILE
from verify.cases import DEFAULT
from verify.misuse import Misuse, pick
from verify.registry import ALL


def add_arguments(parser):
    """Declare the options."""
    parser.add_argument("--kernel", metavar="NAME", help=f"one of {', '.join(tracing.TRACED)}")
    parser.add_argument("--case", metavar="NAME", default="square", help="a default case; square if left out")
    parser.add_argument("--mutant", metavar="NAME", help="plant this bug of `verify mutants` first")
    options.add_dtype(parser)
    options.add_on(parser)


def run(args) -> int:
    """Trace, print, and return 0 if nothing leaves its bound."""
    mutant, name = _chosen(args)
    dtype = options.dtypes(args, default=("fp32",))
    if len(dtype) > 1:
        raise Misuse(f"--dtype: expected one storage type, got {', '.join(dtype)}")
    case = DEFAULT[pick("--case", args.case, DEFAULT, what="case")[0]]
    kernel = ALL[name]
    if reason := kernel.refuses(case, dtype[0]):
        raise Misuse(f"--case {case.id}: {name} {reason}")
    executor = options.executor(args) if mutant is None else "emulated"
    small = executor != "gpu" or kernel.runs != "cuda"
    problem = case.build(dtype[0], small)
    if problem.layout == "packed":
        raise Misuse(f"--case {case.id}: packed sequences go through the interface, which has no trace")
    tile = mutant.tile if mutant and mutant.tile else Tile(SMALL_TILE, SMALL_TILE)
    load = {} if mutant is None else {"load": _graft(mutant).load}
    console = Console(highlight=False, soft_wrap=True, markup=False)
    how = executors.device_name(executor) if kernel.runs == "cuda" else "NumPy"
    console.print(f"{name}{f' with {mutant.name} ({mutant.about})' if mutant else ''}, case {case.id}, {dtype[0]}, "
                  f"tile {tile.Br} x {tile.Bc}, {executor if kernel.runs == 'cuda' else ''} on {how}")  # fmt: skip
    faulted = False
    try:
        with np.errstate(all="ignore"):
            found, outputs = tracing.trace(name, problem, executor, tile, **load)
    except KernelFault as fault:
        faulted = True
        console.print(f"the emulator saw it: {type(fault).__name__}: {str(fault).splitlines()[0]}")
        with np.errstate(all="ignore"):
            found, outputs = tracing.trace(name, problem, executor, tile, watch=False, **load)
    return _report(console, problem, found, outputs) or int(faulted)


def _report(console, problem, found, outputs) -> int:
    """Print worst errors by key tile, and what leaves first."""
    table = Table(box=SIMPLE_HEAD, title="worst error over bound, after each key tile")
    for column in ("key tile", "keys", "m", "l", "O_acc"):
        table.add_column(column, justify="right")
    ratios = found.ratios
    for j in range(ratios.shape[2]):
        part = ratios[:, :, j]
        worst = (x.max(initial=0) for x in (part[..., 0], part[..., 1], part[..., 2:]))
        keys = f"{j * found.Bc} - {min((j + 1) * found.Bc, found.Nk) - 1}"
        table.add_row(str(j), keys, *(f"{x:.2g}" for x in worst))
    console.print(table)
    if first := found.first():
        console.print(f"first to leave: {first}")
        return 1
    with np.errstate(all="ignore"):
        wrong = judge.explain(problem.case, judge.judge(problem, **outputs))
    if wrong:
        console.print(f"nothing leaves on the way; the write does: {wrong}")
        return 1
    console.print("nothing leaves: m, l and O_acc are within their bounds after every tile, O and lse at the end")
    return 0


def _chosen(args):
    """(mutant or None, kernel's name)."""
    if args.mutant is None:
        if args.kernel is None:
            raise Misuse(f"--kernel: expected one of {', '.join(tracing.TRACED)}")
        return None, pick("--kernel", args.kernel, tracing.TRACED, what="kernel with a trace")[0]
    from verify.mutants import MUTANTS

    if args.mutant not in MUTANTS:
        near = get_close_matches(args.mutant, MUTANTS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else "`verify mutants --list` has them"
        raise Misuse(f"--mutant: there is no mutant {args.mutant!r}; {hint}")
    if args.on == "gpu":
        raise Misuse("--on gpu: a mutant is emulated")
    mutant = MUTANTS[args.mutant]
    name = args.kernel or mutant.through
    if name not in tracing.TRACED:
        raise Misuse(f"--mutant {args.mutant}: is run in {name}, which has no trace; expected --kernel as well")
    return mutant, pick("--kernel", name, tracing.TRACED, what="kernel with a trace")[0]


def _graft(mutant):
    from verify.mutants import Graft

    return Graft(mutant.edits)
