"""Step 0: standard attention. Three kernels, one for each line of the formula; S and P live in HBM.

**Idea**: S = scale Q K^T, P = softmax(S) row by row, O = P V, each as its own kernel, as an eager framework does it.

**Changed from**: nothing; this is where the ladder starts.

**Traffic**: S and P, Nq x Nk in fp32, are written once and read again: P by the last kernel, S twice by the
softmax, since a long row does not fit on chip (a framework that keeps the row on chip reads it once). The products
load their operands once for each tile of the result.

    requested = B*Hq*(e*d*(Tc*Nq + Tr*Nk) + 5*f*Nq*Nk + e*dv*(Tr*Nk + Nq) + f*Nq)

**Numerics**: fp32 throughout, S and P stored as fp32, scores in log2 units so that exp2 needs no further
multiplication. A masked score is stored as -inf, a masked probability as MASKED. P is divided by l before it is stored.

**Source**: Vaswani et al., "Attention Is All You Need" (2017), equation 1; as Algorithm 0 in Dao et al.,
"FlashAttention" (2022), section 2.2.
"""

import math
from functools import cache

from numba import cuda
from numba.cuda.types import float32

from flash_cuda.launch import prepare
from flash_cuda.parts.elements import MASKED, exp2, log2
from flash_cuda.parts.tile_ops import tile_ops


@cache
def make_kernels(Br, Bc, D, TY, TX):
    """The three kernels for one tile shape; grids (B * Hq * Tr * Tc), (B * Hq * Nq), (B * Hq * Tr)."""
    tile = tile_ops(Br, Bc, D, TY, TX)
    T, RY, CX, VX = TY * TX, Br // TY, Bc // TX, D // TX
    D_pad, Bc_pad = D + 1, Bc + 1
    NEG_INF, LN2 = -math.inf, math.log(2.0)

    def step0_scores(Q, K, S, scale_log2, diag):
        Q_s = cuda.shared.array((Br, D_pad), float32)
        K_s = cuda.shared.array((Bc, D_pad), float32)
        s = cuda.local.array((RY, CX), float32)

        Hq, Nq = Q.shape[1], Q.shape[2]
        Hk, Nk = K.shape[1], K.shape[2]
        Tr, Tc = (Nq + Br - 1) // Br, (Nk + Bc - 1) // Bc
        j = cuda.blockIdx.x % Tc
        i = cuda.blockIdx.x // Tc % Tr
        h = cuda.blockIdx.x // (Tc * Tr) % Hq
        b = cuda.blockIdx.x // (Tc * Tr * Hq)
        h_k = h // (Hq // Hk)

        # load: Q_i and K_j, Br x d and Bc x d elements
        tile.load(Q_s, Q[b, h], i * Br, 0)
        tile.load(K_s, K[b, h_k], j * Bc, 0)
        cuda.syncthreads()  # Q_i and K_j are whole before anyone reads them

        # scores
        tile.scores(Q_s, K_s, scale_log2, s)
        tile.mask(s, i * Br, j * Bc, Nk, diag)

        # write: S_ij, Br x Bc elements
        tile.write_scores(s, S[b, h], i * Br, j * Bc)

    def step0_softmax(S, P, lse):
        m_s = cuda.shared.array(T, float32)
        l_s = cuda.shared.array(T, float32)

        Hq, Nq, Nk = S.shape[1], S.shape[2], S.shape[3]
        t = cuda.threadIdx.x
        row = cuda.blockIdx.x % Nq
        h = cuda.blockIdx.x // Nq % Hq
        b = cuda.blockIdx.x // (Nq * Hq)

        # softmax: each thread the maximum and sum of every T-th score of the row
        m, l = float32(NEG_INF), float32(0.0)
        for k in range(t, Nk, T):
            s = S[b, h, row, k]  # load: one element of S
            if s != float32(NEG_INF):  # guard: a masked score; -inf - (-inf) would be NaN
                m_new = max(m, s)
                l = l * exp2(m - m_new) + exp2(s - m_new)
                m = m_new
        m_s[t] = m
        cuda.syncthreads()  # the partial maxima of all threads are there

        # softmax: the row's maximum, and each partial sum scaled to it
        m_row = float32(NEG_INF)
        for k in range(T):
            m_row = max(m_row, m_s[k])
        l_s[t] = float32(0.0) if l == float32(0.0) else l * exp2(m - m_row)  # guard: a thread that has seen no key
        cuda.syncthreads()  # the partial sums of all threads are there
        l_row = float32(0.0)
        for k in range(T):
            l_row += l_s[k]

        # write: P, one element a step, and the row's lse
        for k in range(t, Nk, T):
            s = S[b, h, row, k]  # load: the same element of S again
            P[b, h, row, k] = float32(MASKED) if s == float32(NEG_INF) else exp2(s - m_row) / l_row
        if t == 0:
            lse[b, h, row] = float32(NEG_INF) if l_row == float32(0.0) else float32(LN2) * (m_row + log2(l_row))

    def step0_output(P, V, O):
        P_s = cuda.shared.array((Br, Bc_pad), float32)
        V_s = cuda.shared.array((Bc, D_pad), float32)
        O_acc = cuda.local.array((RY, VX), float32)

        Hq, Nq, Nk, Hk = P.shape[1], P.shape[2], P.shape[3], V.shape[1]
        Tr, Tc = (Nq + Br - 1) // Br, (Nk + Bc - 1) // Bc
        i = cuda.blockIdx.x % Tr
        h = cuda.blockIdx.x // Tr % Hq
        b = cuda.blockIdx.x // (Tr * Hq)
        h_k = h // (Hq // Hk)

        tile.zero(O_acc)
        for j in range(Tc):
            # load: P_ij and V_j, Br x Bc and Bc x dv elements
            tile.load(P_s, P[b, h], i * Br, j * Bc)
            tile.load(V_s, V[b, h_k], j * Bc, 0)
            cuda.syncthreads()  # P_ij and V_j are whole before anyone reads them

            # accumulate
            tile.accumulate(P_s, V_s, O_acc)
            cuda.syncthreads()  # P_ij and V_j have been read: the next tiles may take their place

        # write: O_i, once
        tile.write_output(O_acc, O[b, h], i * Br)

    return step0_scores, step0_softmax, step0_output


def attention(Q, K, V, *, scale=None, causal=False, align="bottom_right", tile=None, threads=None, on=None):
    """softmax(scale Q K^T) V on the executor ``on``; arguments, shapes and errors as ``flash_cuda.launch.prepare``.

    Returns
    -------
    O : (B, Hq, Nq, dv), dtype of Q
    lse : (B, Hq, Nq), float32, natural logarithm
    """
    p = prepare(Q, K, V, scale, causal, align, tile, threads, on)
    scores, softmax, output = make_kernels(*p.constants)
    S, P = p.empty("S", p.B, p.Hq, p.Nq, p.Nk), p.empty("P", p.B, p.Hq, p.Nq, p.Nk)
    p.launch(scores, p.B * p.Hq * p.Tr * p.Tc, p.Q, p.K, S, p.scale_log2, p.diag)
    p.launch(softmax, p.B * p.Hq * p.Nq, S, P, p.lse)
    p.launch(output, p.B * p.Hq * p.Tr, P, p.V, p.O)
    return p.results()
