"""The part that every backward pass on tensor cores has in common: its arguments checked and sent, its launches."""

from typing import NamedTuple

import numpy as np

from flash_cuda.launch import prepare, storage
from flash_cuda.parts.backward_tensor_rows import ROWS_THREADS, make_round_kernel, make_rows_kernel
from flash_cuda.parts.backward_tensor_shapes import KEYS, SHARED_LIMIT, chosen
from flash_cuda.parts.tensor_layout import aligned, filling
from refimpl.tiling import Tile, cdiv


class Given(NamedTuple):
    """What a backward pass is given besides Q, K and V, on the executor."""

    O: object
    dO: object
    lse: object
    dlse: object


class Setting(NamedTuple):
    """What kernels are made for besides their shapes."""

    D: int
    dtype: str
    fill: str
    vector: bool
    tile: Tile | None
    limit: int  # bytes of shared memory
    later: bool  # the compiler is that of sm_100 and later

    @property
    def passes(self):
        """(of_k, of_v) of each launch of the kernel with keys as rows."""
        apart = self.D > 128 or (self.D == 128 and self.fill == "single")  # no registers for the sums of both
        return ((True, False), (False, True)) if apart else ((True, True),)

    def shapes(self, keys, queries, usual_keys, usual_queries):
        """The shapes of both kernels: as given, or the usual ones as far as the tile and shared memory allow."""
        tile = self.tile
        return (chosen("keys", keys, usual_keys, tile and (tile.Bc, tile.Br), self.D, True, self.limit),
                chosen("queries", queries, usual_queries, tile and (tile.Br, tile.Bc), self.D, False, self.limit))


def given_options(options):
    """Those of a call's options that are given: None, False and no rules are none."""
    return {name: x for name, x in options.items()
            if x is not None and x is not False and not (name == "rules" and x in ((), []))}  # fmt: skip


def begin(Q, K, V, O, lse, dO, dlse, scale, causal, align, on, generation=""):
    """Check a call and send its arrays.

    Parameters
    ----------
    Q, K, V, O, lse, dO, dlse, scale, causal, align, on
        As `backward_tensor_core.attention_backward`.
    generation : str
        The one GPU generation that has the instructions, as "9"; if not given, any from 8 on.

    Returns
    -------
    p : launch.Problem
        Without tiles of its own: the kernels have theirs.
    dtype : "fp16" or "bf16"
    given : Given

    Raises
    ------
    TypeError, ValueError
        As `prepare`; fp32 inputs; O, lse, dO or dlse of another shape or type.
    RuntimeError
        As `prepare`; a GPU without these instructions.
    """
    dtype = storage("Q", Q)
    if dtype == "fp32":
        raise TypeError("Q: expected dtype fp16 or bf16 for tensor cores, got fp32; backward takes it")
    p = prepare(Q, K, V, scale, causal, align, Tile(16, 16), (1, 1), on)
    major, minor = getattr(p.on, "capability", (int(generation or 8), 0))
    if major != int(generation) if generation else major < 8:
        expected, other = (f"{generation}.x", "backward_tensor_core") if generation else ("8.0 or more", "backward")
        raise RuntimeError(f"on: expected a GPU of compute capability {expected}, got {major}.{minor}; {other} runs "
                           "there")
    rows = p.B, p.Hq, p.Nq
    output = *rows, p.dv
    for name, x, shape in (("O", O, output), ("dO", dO, output), ("lse", lse, rows), ("dlse", dlse, rows)):
        if x is None and name == "dlse":
            continue
        if tuple(getattr(x, "shape", ())) != shape:
            got = tuple(x.shape) if hasattr(x, "shape") else type(x).__name__
            raise ValueError(f"{name}: expected shape {shape}, got {got}")
        if name in ("O", "dO") and storage(name, x) != dtype:
            raise TypeError(f"{name}: expected dtype {dtype}, got {storage(name, x)}")
        if name not in ("O", "dO") and x.dtype != np.float32:
            raise TypeError(f"{name}: expected dtype fp32, got {x.dtype}")
    dlse = np.broadcast_to(np.zeros((), np.float32), rows) if dlse is None else dlse
    return p, dtype, Given(*(p.on.input(n, x) for n, x in (("O", O), ("dO", dO), ("lse", lse), ("dlse", dlse))))


def set_up(Q, K, V, O, lse, dO, dlse, scale, causal, align, on, tile):
    """`begin`, with what the kernels of ``mma.sync`` are made for: (launch.Problem, Given, Setting)."""
    p, dtype, given = begin(Q, K, V, O, lse, dO, dlse, scale, causal, align, on)
    D = next(room for room in KEYS if max(p.d, p.dv) <= room)
    fill = filling(D, (p.d, p.dv), (p.Q, p.K, p.V, given.dO), written=(p.d, p.dv))
    capability, limit = getattr(p.on, "capability", (8, 0)), getattr(p.on, "shared_limit", SHARED_LIMIT)
    return p, given, Setting(D, dtype, fill, capability >= (9, 0), tile, limit, capability >= (10, 0))


def outputs(p, Q, K, V):
    """dQ, dK and dV on the executor, not yet written."""
    return tuple(p.on.empty(name, x.shape, x.dtype) for name, x in (("dQ", Q), ("dK", K), ("dV", V)))


def launch(p, kernel, blocks, threads, *arguments, shared=0):
    """Launch with as many threads as the kernel has."""
    p.threads = threads, 1
    p.launch(kernel, blocks, *arguments, shared=shared)


def launch_rows(p, given, setting, keys, deterministic):
    """D and lse of each query, and sums of dQ, cleared, as (stats, sums)."""
    C, Tr = keys.columns, cdiv(p.Nq, keys.columns)
    stats = p.empty("stats", p.B, p.Hq, 2, p.Nq)
    sums = p.empty("dQ_sum", p.B, p.Hq, Tr, 0 if deterministic else C * setting.D)
    whole = p.dv % 8 == 0 and aligned(given.O) and aligned(given.dO)
    launch(p, make_rows_kernel(C, setting.dtype, whole), p.B * p.Hq * Tr, ROWS_THREADS, *given, stats, sums)
    return stats, sums


def launch_round(p, setting, keys, sums, dQ):
    """The sums rounded to dQ."""
    kernel = make_round_kernel(keys, setting.D, setting.dtype, setting.vector, p.d % 4 == 0)
    launch(p, kernel, p.B * p.Hq * cdiv(p.Nq, keys.columns), ROWS_THREADS, sums, dQ, p.scale)


def results(p, *gradients):
    """(dQ, dK, dV, None), as `backward.attention_backward` returns them without a bias."""
    return *(p.on.result(x) for x in gradients), None
