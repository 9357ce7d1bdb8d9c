"""Gradients by the kernels for Hopper: dQ added up atomically, or by step 5's kernel in the same bits every time.

**Source**: as ``backward_hopper_kernels``.
"""

from flash_cuda.backward_hopper_kernels import SHAPES, THREADS, Bc, make_kernel
from flash_cuda.backward_tensor_core import launch_queries
from flash_cuda.parts.backward_hopper_round import make_round_kernel
from flash_cuda.parts.backward_tensor_call import begin, launch, outputs, results
from flash_cuda.parts.backward_tensor_rows import ROWS_THREADS, make_rows_kernel
from flash_cuda.parts.backward_tensor_shapes import QUERIES, SHARED_LIMIT, fitting
from flash_cuda.parts.tensor_layout import aligned, filling
from flash_cuda.parts.tensor_map import as_copied
from refimpl.tiling import Tile, cdiv


def attention_backward(
    Q, K, V, O, lse, dO, *, scale=None, causal=False, align="bottom_right", dlse=None, deterministic=True, tile=None,
    threads=None, on=None,
):  # fmt: skip
    """Gradients of attention on the executor ``on``.

    Parameters
    ----------
    Q, K, V : as given to the forward pass, fp16 or bf16
        d and dv multiples of 8, up to 128. Arrays on a device must lie as the copy engine can read them, as for
        `step6_flash_v3.attention`; NumPy arrays that do not are copied on their way.
    O : (B, Hq, Nq, dv), dtype of Q
        What the forward pass returned.
    lse : (B, Hq, Nq), float32, natural logarithm
        Likewise; -inf for a row that sees no key.
    dO : (B, Hq, Nq, dv), dtype of Q
    scale, causal, align, on
        As `flash_cuda.launch.prepare`.
    dlse : (B, Hq, Nq), float32, optional
        The gradient that reaches lse; 0 if not given.
    deterministic : bool
        The same bits every run, or dQ by atomic additions; dK and dV are the same every run.
    tile, threads
        Taken as every backward pass does, and of no effect.

    Returns
    -------
    dQ, dK, dV : shapes and dtype of Q, K, V
        K's and V's summed over the query heads that read them. 0 for a row that sees no key, and for a key that no row
        sees.
    None
        Where `backward.attention_backward` has the gradient of a bias.

    Raises
    ------
    TypeError, ValueError
        As `prepare`; fp32 inputs; O, lse, dO or dlse of another shape or type; a head dim or strides that the copy
        engine or the registers cannot take, with what can.
    RuntimeError
        As `prepare`; a GPU of another generation.
    """
    p, dtype, given = begin(Q, K, V, O, lse, dO, dlse, scale, causal, align, on, generation="9")
    for name, n in (("Q", p.d), ("V", p.dv)):
        if n % 8 or n > max(SHAPES):
            raise ValueError(f"{name}: expected a head dim that is a multiple of 8 up to {max(SHAPES)} for "
                             f"backward_hopper, got {n}; backward_tensor_core takes it")  # fmt: skip
    shape = next(SHAPES[D] for D in SHAPES if max(p.d, p.dv) <= D)
    Br, D = shape
    Tr, Tc = cdiv(p.Nq, Br), cdiv(p.Nk, Bc)
    dQ, dK, dV = outputs(p, Q, K, V)
    stats = p.empty("stats", p.B, p.Hq, 2, Tr * Br)
    sums = p.empty("dQ_sum", p.B, p.Hq, Tr, 0 if deterministic else Br * D)
    whole = p.dv % 8 == 0 and aligned(given.O) and aligned(given.dO)
    blocks = p.B * p.Hq * Tr
    launch(p, make_rows_kernel(Br, dtype, whole), blocks, ROWS_THREADS, *given, stats, sums)

    end = min(p.Nk, max(p.Nq + p.diag, 0))  # keys past these no row sees: they are left out, whatever they hold
    q, k, v, do = (
        as_copied(p.on, *named)
        for named in (("Q", Q, p.Q), ("K", K, p.K), ("V", V, p.V), ("dO", dO, given.dO))
    )
    if p.Nk:
        if not p.Nq:  # no map is made for nothing, and none is used
            q, do = k, v
        maps = p.on.tensor_maps((q, Br), (k, Bc, max(end, 1)), (v, Bc, max(end, 1)), (do, Br))
        launch(
            p, make_kernel(shape, dtype, not deterministic), p.B * p.Hk * Tc, THREADS, maps, stats,
            sums, dK, dV, p.scale, p.scale_log2, p.diag, p.Hk, p.Hq // p.Hk, p.Nq, end, p.Nk, p.d, p.dv,
            shared=shape.shared_bytes,
        )  # fmt: skip
    if deterministic:
        queries = fitting(QUERIES[D], D, False, getattr(p.on, "shared_limit", SHARED_LIMIT))
        fill = filling(D, (p.d, p.dv), (p.Q, p.K, p.V, given.dO), written=(p.d, p.dv))
        launch_queries(p, queries, D, dtype, fill, given.dO, stats, dQ, causal)
    else:
        launch(p, make_round_kernel(shape, dtype), blocks * Br // 64, 128, sums, dQ, p.scale, p.Nq, p.d)
    return results(p, dQ, dK, dV)


def tile_for(d, causal=False):
    """The tile for a head dim where d = dv."""
    return Tile(next(shape.Br for D, shape in SHAPES.items() if d <= D), Bc)
