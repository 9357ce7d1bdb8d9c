"""Scan a kernel's tiles: which do not fit a chip and why, from formula and assembler; on a GPU, times of the rest."""

import json

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from verify import document, executors, options, sweep, timing
from verify.bench import points as bench_points
from verify.bench.limits import FORWARD
from verify.misuse import Misuse, pick
from verify.pool import each
from verify.progress import bar
from verify.registry import CUDA

TILES = "16,32,64,128"
LIMIT = 300.0  # seconds for assembling one candidate
MAX_SIDE = 1024


def add_arguments(parser):
    """Declare the options."""
    parser.add_argument("--kernel", metavar="NAME", default="step4_causal", help="step4_causal if left out")
    parser.add_argument("--d", metavar="DIMS", default="64", help="comma-separated head dims; 64")
    parser.add_argument("--Br", metavar="ROWS", default=TILES, help=f"rows of the query tile; {TILES}")
    parser.add_argument("--Bc", metavar="ROWS", default=TILES, help=f"rows of the key tile; {TILES}")
    parser.add_argument("--threads", metavar="TYxTX", help="comma-separated shapes of a block, such as 16x8,8x8; the "
                        "kernel's own if left out")  # fmt: skip
    parser.add_argument("--dtype", metavar="NAME", help="storage type; fp16 if left out")
    parser.add_argument("--arch", choices=sweep.CHIPS, default="sm_90a", help="chip to fit; sm_90a")
    parser.add_argument("--N", default="4096", help="tokens, where times are taken; 4096")
    parser.add_argument("--mask", choices=("full", "causal"), default="full", help="where times are taken; full")
    parser.add_argument("--rounds", default="12", help="timed runs of each, in turns; 12")
    parser.add_argument("--json", metavar="FILE", help="write a record that `python -m figures tile_map` can draw")


def run(args) -> int:
    """Examine every candidate, time those that fit if there is a GPU, print the map; 1 if none fits."""
    (kernel,) = _one(pick("--kernel", args.kernel, CUDA, what="kernel"), "--kernel")
    (dtype,) = _one(options.dtypes(args, ("fp16",)), "--dtype")
    dims, Brs, Bcs = (options.positive(name, getattr(args, name[2:])) for name in ("--d", "--Br", "--Bc"))
    N, rounds = options.one("--N", args.N), options.one("--rounds", args.rounds)
    if max(*Brs, *Bcs, *dims) > MAX_SIDE:
        raise Misuse(f"--Br, --Bc, --d: expected numbers up to {MAX_SIDE}")
    for d in dims:
        if reason := CUDA[kernel].lacks(set(), dtype, d, d):
            raise Misuse(f"--kernel: {kernel} {reason}")
    if args.threads and CUDA[kernel].tile_units != (1, 1):
        raise Misuse(f"--threads: a block of {kernel} follows from its tile; leave it out")
    target, threads = options.writable("--json", args.json), _threads(args.threads)
    wanted = sweep.candidates(kernel, dims, dtype, Brs, Bcs, threads)
    unassembled = sweep.can_assemble()
    with bar("sweep") as update:
        calls = [(c, args.arch, not unassembled) for c in wanted]
        answers = each("verify.sweep:examine", calls, limit=LIMIT, progress=update)
    fits = {c: fit or sweep.Fit(reason=failure) for c, (fit, failure) in zip(wanted, answers, strict=True)}
    not_timed = timing.missing()
    if not not_timed:
        _time(fits, dims, N, args.mask == "causal", rounds)
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 160
    _print(console, fits, args, unassembled, not_timed, N)
    if target:
        head = document.head("sweep", "emulated" if not_timed else "gpu")
        where = {"kernel": kernel, "arch": args.arch, "N": N, "mask": args.mask, "heads": bench_points.SWEEP_HEADS}
        rows = [sweep.as_row(c, fit) for c, fit in fits.items()]
        target.write_text(json.dumps({**head, **where, "rows": rows}, indent=1) + "\n")
    return 0 if any(fit.reason is None for fit in fits.values()) else 1


def _time(fits, dims, N, causal, rounds):
    """Time what fits, a head dim at a time."""
    clock, inputs = timing.Clock(), bench_points.Inputs()
    for d in dims:
        mine = {c: fit for c, fit in fits.items() if c.d == d}
        dtype = next(iter(mine)).dtype
        point = bench_points.Point(FORWARD, 1, bench_points.SWEEP_HEADS, N, d, dtype, causal)
        sweep.timed(mine, clock, point, inputs, rounds, seconds=2.0 * len(mine))


def _print(console, fits, args, unassembled, not_timed, N):
    """A map for each head dim and shape of a block, and the reasons in words."""
    for d, threads in dict.fromkeys((c.d, c.threads) for c in fits):
        mine = {c: fit for c, fit in fits.items() if (c.d, c.threads) == (d, threads)}
        block = f", {threads[0]} x {threads[1]} threads" if threads else ""
        title = f"{args.kernel}, d = {d}{block}, {args.arch}"
        console.print(_map(mine, title, N, args.mask == "causal"))
        formula = next((fit.formula for fit in mine.values() if fit.formula), None)
        if formula:
            console.print(f"shared memory in bytes: {formula}", markup=False)
        for candidate, fit in mine.items():
            if fit.reason:
                console.print(f"  {candidate.Br} x {candidate.Bc}: {fit.reason}", markup=False, style="dim")
    if unassembled:
        console.print(f"registers not known: {unassembled}; pip install -e '.[dev]'", markup=False)
    console.print(f"not timed: {not_timed}" if not_timed else f"timed on {executors.device_name('gpu')}, N = {N}")


def _map(fits, title, N, causal):
    """Br down, Bc across. Cells: rate where timed; what it needs where it fits; what is lacking where it does not."""
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("Br \\ Bc", justify="right")
    columns = list(dict.fromkeys(c.Bc for c in fits))
    for Bc in columns:
        table.add_column(str(Bc), justify="right")
    best = min((float(np.median(fit.ms)) for fit in fits.values() if fit.ms), default=None)
    for Br in dict.fromkeys(c.Br for c in fits):
        cells = [_cell(c, fit, N, causal, best) for c, fit in fits.items() if c.Br == Br]
        table.add_row(str(Br), *cells)
    return table


def _cell(candidate, fit, N, causal, best):
    if fit.reason:
        return Text(f"no: {fit.reason.split(':')[0]}", style="red")
    needs = f"{fit.shared / 1024:.0f} KiB" + ("" if fit.registers is None else f", {fit.registers} regs")
    needs += f", {fit.blocks}/SM" + (f", {fit.stack} B in memory" if fit.stack else "")
    colour = "yellow" if fit.stack else "green"
    if not fit.ms:
        return Text(needs, style=colour)
    ms = float(np.median(fit.ms))
    shape = bench_points.Point(FORWARD, 1, bench_points.SWEEP_HEADS, N, candidate.d, candidate.dtype, causal)
    return Text(f"{shape.work.tflops(ms):.1f} TFLOP/s\n{needs}", style=f"bold {colour}" if ms == best else colour)


def _threads(text):
    """[(TY, TX), ...] of "16x8,8x8"; [None] if left out."""
    if text is None:
        return [None]
    shapes = []
    for part in text.split(","):
        numbers = part.split("x")
        if len(numbers) != 2 or not all(n.isdigit() and 0 < int(n) <= MAX_SIDE for n in numbers):
            raise Misuse(f"--threads: expected shapes such as 16x8, got {part!r}")
        shapes.append(tuple(map(int, numbers)))
    return shapes


def _one(found, option):
    """A list of exactly one name."""
    if len(found) != 1:
        raise Misuse(f"{option}: expected one name, got {', '.join(found)}")
    return found
