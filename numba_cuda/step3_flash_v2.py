"""Step 3: FlashAttention-2's order. O, m and l never leave the chip.

**Idea**: let the query tile be the outer loop, one block each; K and V stream past it while O_acc, m and l stay
in registers, and one division at the end replaces every trip of O through HBM.

**Changed from step2_flash_v1**: the loops change places; O_acc, m, l are not loaded or stored between tiles;
a block belongs to a query tile, so the grid has Tr times as many blocks.

**Traffic**: Q, O and lse move once, K and V once for each query tile; every element is asked for once a visit.

    requested = B*Hq*(e*Nq*d + Tr*e*Nk*(d + dv) + e*Nq*dv + f*Nq)

**Numerics**: fp32 throughout, scores in log2 units so that exp2 needs no further multiplication; rounding on
the way in none, on the way out one (O to its storage type).

**Source**: Dao, "FlashAttention-2" (2023), section 3.1, Algorithm 1.
"""

from functools import cache

from numba import cuda
from numba.cuda.types import float32

from flash_cuda.launch import prepare
from flash_cuda.parts.tile_ops import tile_ops


@cache
def make_kernel(Br, Bc, D, TY, TX, tracing=False):
    """The kernel for one tile shape; grid (B * Hq * Tr), TY * TX threads."""
    tile = tile_ops(Br, Bc, D, TY, TX)
    RY, CX, VX = Br // TY, Bc // TX, D // TX
    D_pad, Bc_pad = D + 1, Bc + 1

    def step3_flash_v2(Q, K, V, O, lse, scale_log2, diag, trace):
        Q_s = cuda.shared.array((Br, D_pad), float32)
        KV_s = cuda.shared.array((Bc, D_pad), float32)
        P_s = cuda.shared.array((Br, Bc_pad), float32)
        max_s = cuda.shared.array((Br, TX), float32)
        sum_s = cuda.shared.array((Br, TX), float32)
        s = cuda.local.array((RY, CX), float32)
        O_acc = cuda.local.array((RY, VX), float32)
        m = cuda.local.array(RY, float32)
        l = cuda.local.array(RY, float32)
        alpha = cuda.local.array(RY, float32)

        Hq, Nq = Q.shape[1], Q.shape[2]
        Hk, Nk = K.shape[1], K.shape[2]
        Tr, Tc = (Nq + Br - 1) // Br, (Nk + Bc - 1) // Bc
        i = cuda.blockIdx.x % Tr
        h = cuda.blockIdx.x // Tr % Hq
        b = cuda.blockIdx.x // (Tr * Hq)
        h_k = h // (Hq // Hk)

        # load: Q_i, Br x d elements, once
        tile.load(Q_s, Q[b, h], i * Br, 0)
        tile.start(m, l, O_acc)

        for j in range(Tc):
            # load: K_j, Bc x d elements
            tile.load(KV_s, K[b, h_k], j * Bc, 0)
            cuda.syncthreads()  # Q_i and K_j are whole before anyone reads them

            # scores
            tile.scores(Q_s, KV_s, scale_log2, s)
            tile.mask(s, i * Br, j * Bc, Nk, diag)

            # softmax
            tile.share_row_max(s, max_s)
            cuda.syncthreads()  # the partial maxima are there, and K_j has been read
            tile.update_max(max_s, m, alpha)
            tile.share_exp(s, m, P_s, sum_s)
            tile.load(KV_s, V[b, h_k], j * Bc, 0)  # load: V_j, Bc x dv elements, into K_j's place
            cuda.syncthreads()  # P_ij, its partial sums and V_j are whole

            # accumulate
            tile.update_sum(sum_s, alpha, l)
            tile.rescale(O_acc, alpha)
            tile.accumulate(P_s, KV_s, O_acc)
            if tracing:
                tile.record(trace[b, h, j], m, l, O_acc, i * Br)
            cuda.syncthreads()  # V_j has been read: the next tile may take its place

        # write: O_i and lse_i, once
        tile.write(O_acc, l, m, O[b, h], lse[b, h], i * Br)

    return step3_flash_v2


def attention(Q, K, V, *, scale=None, causal=False, align="bottom_right", tile=None, threads=None, on=None, trace=None):
    """softmax(scale Q K^T) V on the executor ``on``; arguments, shapes and errors as ``flash_cuda.launch.prepare``.

    Returns
    -------
    O : (B, Hq, Nq, dv), dtype of Q
    lse : (B, Hq, Nq), float32, natural logarithm
    """
    p = prepare(Q, K, V, scale, causal, align, tile, threads, on, trace)
    kernel = make_kernel(*p.constants, tracing=p.tracing)
    p.launch(kernel, p.B * p.Hq * p.Tr, p.Q, p.K, p.V, p.O, p.lse, p.scale_log2, p.diag, p.trace)
    return p.results()
