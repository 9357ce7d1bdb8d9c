"""Which tiles of a kernel fit a chip and why the others do not: offline, from its body and its cubin, before any run.

A tile is refused by the kernel itself, by shared memory, or by registers. Shared memory is a formula that stands in the
body: its `cuda.shared.array` shapes, evaluated with the tile's numbers, and what the launch adds to it. Registers are
the assembler's decision: more than a multiprocessor has for the block's threads cannot be launched. What one thread's
255 do not hold goes to memory: that runs, and is shown, as it may cost more than the tile gains.
"""

import math
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import product

import numpy as np

from refimpl.tiling import Tile
from verify.bench import check as bench_check
from verify.bench import points as bench_points
from verify.dtypes import DTYPES
from verify.registry import CUDA
from verify.sweep_shared import shared_arrays
from verify.timing import interleaved


@dataclass(frozen=True)
class Chip:
    """What the blocks of a multiprocessor share, by architecture.

    A block may have `block_shared` bytes. Every GPU grants 48 KiB of that unasked: the ladder's own tiles stay below.

    Source: CUDA C++ Programming Guide, technical specifications per compute capability.
    """

    block_shared: int
    sm_shared: int
    sm_threads: int
    sm_blocks: int
    sm_registers: int = 65536
    reserved: int = 1 << 10  # bytes of shared memory that the system takes of each block, from sm_80 on


CHIPS = {
    "sm_75": Chip(64 << 10, 64 << 10, 1024, 16, reserved=0),
    "sm_80": Chip(163 << 10, 164 << 10, 2048, 32),
    "sm_86": Chip(99 << 10, 100 << 10, 1536, 16),
    "sm_89": Chip(99 << 10, 100 << 10, 1536, 24),
    "sm_90a": Chip(227 << 10, 228 << 10, 2048, 32),
    "sm_100a": Chip(227 << 10, 228 << 10, 2048, 32),
    "sm_120a": Chip(99 << 10, 100 << 10, 1536, 24),
}


@dataclass(frozen=True)
class Candidate:
    """A kernel at one tile.

    Attributes
    ----------
    threads : tuple of int or None
        (TY, TX); the kernel's own choice if None.
    """

    kernel: str
    d: int
    dtype: str
    Br: int
    Bc: int
    threads: tuple | None = None

    @property
    def options(self) -> dict:
        """Arguments of attention. A kernel whose tile comes with more than that is given its usual one, changed."""
        module = import_module(CUDA[self.kernel].module)
        if shapes := getattr(module, "SHAPES", None):
            usual = shapes[min(room for room in shapes if self.d <= room)]
            band = getattr(usual, "band", 0)  # rows of a warp, where the shape says: as many as divide the tile
            narrower = {"band": 16} if band and self.Br % band else {}
            return {"shape": usual._replace(Br=self.Br, Bc=self.Bc, **narrower)}
        return {"tile": Tile(self.Br, self.Bc)} | ({"threads": self.threads} if self.threads else {})


@dataclass
class Fit:
    """What a candidate needs, and why it does not fit; kernels of one call are taken together, the worst of each.

    Attributes
    ----------
    reason : str or None
        None if it fits.
    shared : int
        Bytes a block.
    formula : str
        How they come about.
    registers, stack : int or None
        Of a thread, and its bytes of memory for what registers do not hold; None where nothing was assembled.
    block : int
        Threads.
    blocks : int or None
        How many a multiprocessor holds at a time.
    ms : list of float or None
        Times, where the candidate was timed.
    """

    reason: str | None = None
    shared: int = 0
    formula: str = ""
    registers: int | None = None
    stack: int | None = None
    block: int = 0
    blocks: int | None = None
    ms: list | None = None


def candidates(kernel, dims, dtype, Brs, Bcs, threads=(None,)) -> list[Candidate]:
    """All combinations."""
    return [
        Candidate(kernel, d, dtype, Br, Bc, block) for d, block, Br, Bc in product(dims, threads, Brs, Bcs)
    ]


def examine(candidate: Candidate, arch: str, assemble: bool = True) -> Fit:
    """Whether a candidate fits, without a GPU.

    Parameters
    ----------
    candidate : Candidate
    arch : str
        Of `CHIPS`.
    assemble : bool
        Whether to ask the assembler for registers: seconds, and only if shared memory suffices.
    """
    from flash_cuda.executors.assembler import Assembler, numba_type, parse_arch, resources
    from flash_cuda.executors.assembler import assemble as assembled

    chip, fit = CHIPS[arch], Fit()

    class Looking(Assembler):
        """Takes launches apart instead of running them."""

        def launch(self, body, blocks, threads, args, shared=0):
            static, formula = shared_arrays(body)
            if static + shared >= fit.shared:
                at_launch = f"{shared} at launch" if shared else ""
                fit.shared, fit.formula = static + shared, " + ".join(filter(None, (formula, at_launch)))
            fit.block = max(fit.block, threads)
            if static + shared > chip.block_shared:
                fit.reason = f"shared memory: {static + shared:,} bytes a block, {arch} has {chip.block_shared:,}"
            if fit.reason or not assemble:
                return
            types = tuple(numba_type(a) for a in args)
            ((cubin, _),) = assembled(body, types, {arch: parse_arch(arch)}).values()
            found = resources(cubin)
            fit.registers = max(fit.registers or 0, found["registers"])
            fit.stack = max(fit.stack or 0, found["stack_bytes"])

    x = np.broadcast_to(np.zeros((), DTYPES[candidate.dtype].numpy), (1, 1, 1024, candidate.d))
    try:
        CUDA[candidate.kernel].attention()(x, x, x, causal=True, on=Looking(arch), **candidate.options)
    except ValueError as error:  # the kernel's own refusal of a tile
        fit.reason = str(error).splitlines()[0]
    if fit.reason is None and fit.registers is not None:
        fit.reason = _too_many_registers(fit, chip)
    if fit.reason is None:
        fit.blocks = resident(fit, chip)
    return fit


def _too_many_registers(fit, chip):
    """Why a block's threads cannot have their registers at all; None if they can."""
    if allocated(fit.registers) * fit.block > chip.sm_registers:
        return f"registers: {fit.registers} x {fit.block} threads, a multiprocessor has {chip.sm_registers:,}"
    return None


def allocated(registers: int) -> int:
    """Registers that a thread takes: a warp is given them in units of 256, 8 a thread."""
    return -(-registers // 8) * 8


def resident(fit: Fit, chip: Chip) -> int:
    """Blocks that fit a multiprocessor at a time, by threads, shared memory and, where known, registers."""
    warps = math.ceil(fit.block / 32)
    bounds = [chip.sm_blocks, chip.sm_threads // (32 * warps), chip.sm_shared // max(1, fit.shared + chip.reserved)]
    if fit.registers:
        bounds.append(chip.sm_registers // (allocated(fit.registers) * 32 * warps))
    return min(bounds)


def timed(fits: dict, clock, point, inputs, rounds: int, seconds: float) -> None:
    """Time the candidates that fit, in turns, and put the times into their fits; a wrong result is a reason instead.

    Parameters
    ----------
    fits : dict of Candidate to Fit
        Of one kernel and head dim.
    clock : verify.timing.Clock
    point : verify.bench.points.Point
    inputs : verify.bench.points.Inputs
    rounds, seconds
        As `timing.interleaved`.
    """
    arrays, truth = inputs.device(point), bench_check.Truth(point, inputs.host(point))
    ready = {}
    for candidate, fit in fits.items():
        if fit.reason:
            continue
        rows = bench_check.rows_of(point)
        try:
            contender = bench_points.kernel(candidate.kernel, point, arrays, rows, candidate.options)
            contender.work()
            fit.reason = truth.wrong(truth.rmse(contender.outputs()))
        except Exception as error:  # a launch that the device refuses, too
            fit.reason = bench_points.brief(error)
        if not fit.reason:
            contender.name = str(candidate)
            ready[contender.name] = fit, contender
    found = interleaved(clock, [contender for _, contender in ready.values()], rounds, seconds) if ready else {}
    for name, times in found.items():
        ready[name][0].ms = [float(ms) for ms in times.ms]


def as_row(candidate: Candidate, fit: Fit) -> dict:
    """Both in one row of a record."""
    return {**asdict(candidate), **asdict(fit)}


def can_assemble() -> str | None:
    """Why nothing can be assembled here; None if it can."""
    try:
        import_module("cuda.bindings.nvvm")
        import_module("numba.cuda.cudadrv.nvvm").NVVM()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None
