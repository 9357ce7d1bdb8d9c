"""Step 2: FlashAttention's first order. One pass with the online softmax; O, m and l go round through HBM.

**Idea**: keep a running maximum and sum for each row, so that one pass over the keys is enough: when a larger
score turns up, what was summed before is scaled down.

**Changed from step1_fused**: one loop over key tiles instead of two; that loop is outside, so K_j and V_j stay on
chip while all query tiles pass by, each fetching and returning its O_acc, m and l; one block for each head.

**Traffic**: K and V once for each query head; Q, O_acc, m and l at every visit, except that the first visit finds
nothing to load and the last stores O and lse instead. m and l are asked for by all TX threads of a row and stored
by one. (Tc counts as 1 where there are no keys: O and lse must still be written.)

    requested = B*Hq*(e*Nk*(d + dv) + max(Tc, 1)*e*Nq*d + (max(Tc, 1) - 1)*f*Nq*(2*dv + 2*TX + 2) + e*Nq*dv + f*Nq)

**Numerics**: as step 3, to the bit: the same operations in the same order. The paper divides O by l at every
visit; we divide once, at the last, so that (m, l, O_acc) stay exact on exact inputs and step 3 changes the order alone.

**Source**: Dao et al., "FlashAttention" (2022), section 3.1, Algorithm 1.
"""

from functools import cache

from numba import cuda
from numba.cuda.types import float32

from flash_cuda.launch import prepare
from flash_cuda.parts.tile_ops import tile_ops


@cache
def make_kernel(Br, Bc, D, TY, TX, tracing=False):
    """The kernel for one tile shape; grid (B * Hq), TY * TX threads."""
    tile = tile_ops(Br, Bc, D, TY, TX)
    RY, CX, VX = Br // TY, Bc // TX, D // TX
    D_pad, Bc_pad = D + 1, Bc + 1

    def step2_flash_v1(Q, K, V, O, lse, O_hbm, m_hbm, l_hbm, scale_log2, diag, trace):
        Q_s = cuda.shared.array((Br, D_pad), float32)
        K_s = cuda.shared.array((Bc, D_pad), float32)
        V_s = cuda.shared.array((Bc, D_pad), float32)
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
        h = cuda.blockIdx.x % Hq
        b = cuda.blockIdx.x // Hq
        h_k = h // (Hq // Hk)

        for j in range(max(Tc, 1)):
            # load: K_j and V_j, Bc x d and Bc x dv elements, once
            tile.load(K_s, K[b, h_k], j * Bc, 0)
            tile.load(V_s, V[b, h_k], j * Bc, 0)

            for i in range(Tr):
                # load: Q_i, Br x d elements, and what is known of its rows so far
                tile.load(Q_s, Q[b, h], i * Br, 0)
                if j == 0:
                    tile.start(m, l, O_acc)
                else:
                    tile.fetch(O_hbm[b, h], m_hbm[b, h], l_hbm[b, h], m, l, O_acc, i * Br)
                cuda.syncthreads()  # Q_i, K_j and V_j are whole before anyone reads them

                # scores
                tile.scores(Q_s, K_s, scale_log2, s)
                tile.mask(s, i * Br, j * Bc, Nk, diag)

                # softmax
                tile.share_row_max(s, max_s)
                cuda.syncthreads()  # the partial maxima are there, and Q_i has been read
                tile.update_max(max_s, m, alpha)
                tile.share_exp(s, m, P_s, sum_s)
                cuda.syncthreads()  # P_ij and its partial sums are whole

                # accumulate
                tile.update_sum(sum_s, alpha, l)
                tile.rescale(O_acc, alpha)
                tile.accumulate(P_s, V_s, O_acc)
                if tracing and j < Tc:
                    tile.record(trace[b, h, j], m, l, O_acc, i * Br)

                # write: O_acc_i, m_i, l_i for the next visit, or O_i and lse_i at the last
                if j < Tc - 1:
                    tile.keep(O_acc, m, l, O_hbm[b, h], m_hbm[b, h], l_hbm[b, h], i * Br)
                else:
                    tile.write(O_acc, l, m, O[b, h], lse[b, h], i * Br)
                cuda.syncthreads()  # P_ij, K_j, V_j have been read, and m, l stored by one thread are seen by all

    return step2_flash_v1


def attention(Q, K, V, *, scale=None, causal=False, align="bottom_right", tile=None, threads=None, on=None, trace=None):
    """softmax(scale Q K^T) V on the executor ``on``; arguments, shapes and errors as ``flash_cuda.launch.prepare``.

    Returns
    -------
    O : (B, Hq, Nq, dv), dtype of Q
    lse : (B, Hq, Nq), float32, natural logarithm
    """
    p = prepare(Q, K, V, scale, causal, align, tile, threads, on, trace)
    kernel = make_kernel(*p.constants, tracing=p.tracing)
    O_hbm = p.empty("O_acc", p.B, p.Hq, p.Nq, p.dv)
    m_hbm, l_hbm = p.empty("m", p.B, p.Hq, p.Nq), p.empty("l", p.B, p.Hq, p.Nq)
    p.launch(kernel, p.B * p.Hq, p.Q, p.K, p.V, p.O, p.lse, O_hbm, m_hbm, l_hbm, p.scale_log2, p.diag, p.trace)
    return p.results()
