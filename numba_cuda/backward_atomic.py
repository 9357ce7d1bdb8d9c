"""The gradients in one pass over the key tiles: dK and dV as in `backward`, dQ by atomic additions.

**Idea**: a block that has P_ij and dS_ij in shared memory for dK_j and dV_j also has all that dQ_i needs of it; it adds
dS_ij K_j to sums in global memory, where all blocks add.

**Changed from backward**: one kernel in the place of the two with loops either way: P and dP are computed once, not
twice. Additions of fp32 come in no order, so dQ is not the same in its last bits from run to run. A last kernel rounds
the sums to dQ.

**Traffic**: K, V, dK and dV once, Q and dO once a live tile; Br x d fp32 additions a live tile; the sums of dQ once
written (cleared, by the kernel for D), once read, and dQ written once.

**Numerics**: as backward, but for the order of dQ's sum.

**Source**: Dao, "FlashAttention-2" (2023), section 3.1.2 and Algorithm 2 (dQ by atomic adds).
"""

from functools import cache

from numba import cuda
from numba.cuda.types import float32, int32, uint32

from flash_cuda.parts.elements import narrow
from flash_cuda.parts.gradient_ops import gradient_ops
from flash_cuda.parts.rule_ops import rule_ops
from flash_cuda.parts.tile_ops import tile_ops


@cache
def make_kernel(Br, Bc, D, TY, TX, rules, dropping=False):
    """The kernel for the sums of dQ, for dK and dV, and dS if it has elements; grid (B * Hk * Tc)."""
    tile = tile_ops(Br, Bc, D, TY, TX)
    grad = gradient_ops(Br, Bc, D, TY, TX)
    rule = rule_ops(Br, Bc, TY, TX, *rules)
    RY, CX, CY, VX, T = Br // TY, Bc // TX, Bc // TY, D // TX, TY * TX
    D_pad, Bc_pad = D + 1, Bc + 1

    def backward_atomic(
        Q, K, V, dO, lse, D_hbm, dQ_sum, dS_hbm, dK, dV, scale, offsets, mask_aux, score_aux, drop_aux
    ):  # fmt: skip
        Q_s = cuda.shared.array((Br, D_pad), float32)
        dO_s = cuda.shared.array((Br, D_pad), float32)
        K_s = cuda.shared.array((Bc, D_pad), float32)
        V_s = cuda.shared.array((Bc, D_pad), float32)
        P_s = cuda.shared.array((Br, Bc_pad), float32)
        dS_s = cuda.shared.array((Br, Bc_pad), float32)
        kind_s = cuda.shared.array(T, int32)
        step_s = cuda.shared.array(T, int32)
        s = cuda.local.array((RY, CX), float32)
        slope = cuda.local.array((RY, CX), float32)
        dK_acc = cuda.local.array((CY, VX), float32)
        dV_acc = cuda.local.array((CY, VX), float32)

        Hq, Nq = Q.shape[1], Q.shape[2]
        Hk, Nk = K.shape[1], K.shape[2]
        Tr, Tc = (Nq + Br - 1) // Br, (Nk + Bc - 1) // Bc
        j = cuda.blockIdx.x % Tc
        h_k = cuda.blockIdx.x // Tc % Hk
        b = cuda.blockIdx.x // (Tc * Hk)
        group = Hq // Hk

        # load: K_j and V_j, Bc x d and Bc x dv elements, once
        tile.load(K_s, K[b, h_k], j * Bc, 0)
        tile.load(V_s, V[b, h_k], j * Bc, 0)
        grad.zero_columns(dK_acc)
        grad.zero_columns(dV_acc)

        for h in range(h_k * group, (h_k + 1) * group):
            i = int32(0)
            while i < Tr:
                t = uint32(i) % uint32(T)
                if t == 0:  # the block's threads look at the next T query tiles, one each
                    cuda.syncthreads()  # what was known of the last T is not needed any more
                    rule.share_kinds(kind_s, b, h, i, j, 1, 0, Nq, Nk, offsets[b], mask_aux)
                    cuda.syncthreads()  # their classes are there
                    rule.share_steps(kind_s, step_s)
                    if dS_hbm.size:
                        rule.write_no_gradient(kind_s, i, j, 1, 0, Nq, Nk, dS_hbm[b, h])
                    cuda.syncthreads()  # and the way from each live one to the next
                kind = kind_s[t]
                if kind > 0:  # the same for all threads of the block: not an EMPTY tile
                    # load: Q_i and dO_i, Br x d and Br x dv elements
                    tile.load(Q_s, Q[b, h], i * Br, 0)
                    tile.load(dO_s, dO[b, h], i * Br, 0)
                    cuda.syncthreads()  # all four tiles are whole before anyone reads them

                    # scores, and the weights they had
                    tile.scores(Q_s, K_s, scale, s)
                    rule.share_weights(s, slope, b, h, i * Br, j * Bc, Nq, Nk, offsets[b], kind == 2, lse[b, h],
                                       mask_aux, score_aux, P_s)  # fmt: skip

                    # gradient of the scores
                    tile.scores(dO_s, V_s, float32(1.0), s)
                    if dropping:
                        rule.drop_products(s, P_s, b, h, i * Br, j * Bc, drop_aux)
                    rule.share_gradient(s, slope, P_s, D_hbm[b, h], i * Br, Nq, dS_s)
                    if dS_hbm.size:
                        rule.write_bias_gradient(s, P_s, D_hbm[b, h], i * Br, j * Bc, Nq, Nk, dS_hbm[b, h])
                    if dropping:  # only now: dS takes the whole weight, dV the dropped one
                        rule.drop(P_s, b, h, i * Br, j * Bc, drop_aux, float32(0.0))
                    cuda.syncthreads()  # P_ij and dS_ij are whole

                    # accumulate
                    grad.accumulate_columns(P_s, P_s, dO_s, dV_acc)
                    grad.accumulate_columns(P_s, dS_s, Q_s, dK_acc)
                    grad.add_rows(P_s, dS_s, K_s, dQ_sum[b, h], i * Br)  # add: Br x d elements of dQ
                    cuda.syncthreads()  # Q_i, dO_i, P_ij and dS_ij have been read: the next may take their place
                i += step_s[t]

        # write: dK_j and dV_j, Bc x d and Bc x dv elements, once
        grad.write_columns(dK_acc, scale, dK[b, h_k], j * Bc)
        grad.write_columns(dV_acc, float32(1.0), dV[b, h_k], j * Bc)

    return backward_atomic


def round_sums(sums, scale, dQ):
    """dQ = scale * sums in its storage type, a thread an element."""
    _, H, N, d = dQ.shape
    at = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if at < dQ.size:  # guard: the last block is ragged
        b, h, r, c = at // (d * N * H), at // (d * N) % H, at // d % N, at % d
        dQ[b, h, r, c] = narrow(scale * sums[b, h, r, c], dQ)
