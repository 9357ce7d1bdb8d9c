"""The part that every backward pass on tensor cores has in common: its arguments checked and sent, its launches."""

from typing import NamedTuple

import numpy as np

from flash_cuda.launch import prepare, storage
from refimpl.tiling import Tile


class Given(NamedTuple):
    """What a backward pass is given besides Q, K and V, on the executor."""

    O: object
    dO: object
    lse: object
    dlse: object


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
        if tuple(x.shape) != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")
        if name in ("O", "dO") and storage(name, x) != dtype:
            raise TypeError(f"{name}: expected dtype {dtype}, got {storage(name, x)}")
        if name not in ("O", "dO") and x.dtype != np.float32:
            raise TypeError(f"{name}: expected dtype fp32, got {x.dtype}")
    dlse = np.broadcast_to(np.zeros((), np.float32), rows) if dlse is None else dlse
    return p, dtype, Given(*(p.on.input(n, x) for n, x in (("O", O), ("dO", dO), ("lse", lse), ("dlse", dlse))))


def outputs(p, Q, K, V):
    """dQ, dK and dV on the executor, not yet written."""
    return tuple(p.on.empty(name, x.shape, x.dtype) for name, x in (("dQ", Q), ("dK", K), ("dV", V)))


def launch(p, kernel, blocks, threads, *arguments, shared=0):
    """Launch with as many threads as the kernel has."""
    p.threads = threads, 1
    p.launch(kernel, blocks, *arguments, shared=shared)


def results(p, *gradients):
    """(dQ, dK, dV, None), as `backward.attention_backward` returns them: these kernels take no bias."""
    return *(p.on.result(x) for x in gradients), None
