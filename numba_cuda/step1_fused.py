"""Step 1: one kernel. S and P never reach HBM, at the price of computing S twice.

**Idea**: the softmax needs each row's maximum and sum before it can weigh a single value; so go over the keys
once for those two numbers, and once more for the product with V. Each score lives and dies on chip.

**Changed from step0_standard**: the three kernels become one; its first loop over key tiles keeps only m and l, its
second computes the scores anew, and P_ij goes straight into O_acc.

**Traffic**: Q, O and lse move once; K twice and V once for each query tile.

    requested = B*Hq*(e*Nq*d + Tr*e*Nk*(2*d + dv) + e*Nq*dv + f*Nq)

**Numerics**: fp32 throughout, scores in log2 units. Both loops compute the same scores to the bit, so no
probability exceeds 1. O is divided by l once, as it is written.

**Source**: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), Algorithm 3 for m and l;
tiling as Dao et al., "FlashAttention" (2022), section 3.1.
"""

from functools import cache

from numba import cuda
from numba.cuda.types import float32

from flash_cuda.launch import prepare
from flash_cuda.parts.tile_ops import tile_ops


@cache
def make_kernel(Br, Bc, D, TY, TX):
    """The kernel for one tile shape; grid (B * Hq * Tr), TY * TX threads."""
    tile = tile_ops(Br, Bc, D, TY, TX)
    RY, CX, VX = Br // TY, Bc // TX, D // TX
    D_pad, Bc_pad = D + 1, Bc + 1

    def step1_fused(Q, K, V, O, lse, scale_log2, diag):
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
            cuda.syncthreads()  # the partial sums are there
            tile.update_sum(sum_s, alpha, l)

        for j in range(Tc):
            # load: K_j again, Bc x d elements
            tile.load(KV_s, K[b, h_k], j * Bc, 0)
            cuda.syncthreads()  # K_j is whole, and the sums of the row before have been read

            # scores
            tile.scores(Q_s, KV_s, scale_log2, s)
            tile.mask(s, i * Br, j * Bc, Nk, diag)
            cuda.syncthreads()  # K_j has been read

            # softmax
            tile.share_exp(s, m, P_s, sum_s)
            tile.load(KV_s, V[b, h_k], j * Bc, 0)  # load: V_j, Bc x dv elements, into K_j's place
            cuda.syncthreads()  # P_ij and V_j are whole

            # accumulate
            tile.accumulate(P_s, KV_s, O_acc)
            cuda.syncthreads()  # V_j has been read: the next tile may take its place

        # write: O_i and lse_i, once
        tile.write(O_acc, l, m, O[b, h], lse[b, h], i * Br)

    return step1_fused


def attention(Q, K, V, *, scale=None, causal=False, align="bottom_right", tile=None, threads=None, on=None):
    """softmax(scale Q K^T) V on the executor ``on``; arguments, shapes and errors as ``flash_cuda.launch.prepare``.

    Returns
    -------
    O : (B, Hq, Nq, dv), dtype of Q
    lse : (B, Hq, Nq), float32, natural logarithm
    """
    p = prepare(Q, K, V, scale, causal, align, tile, threads, on)
    kernel = make_kernel(*p.constants)
    p.launch(kernel, p.B * p.Hq * p.Tr, p.Q, p.K, p.V, p.O, p.lse, p.scale_log2, p.diag)
    return p.results()
