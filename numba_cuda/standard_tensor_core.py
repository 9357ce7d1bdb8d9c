"""Standard attention at tensor-core speed: what FlashAttention is to be measured against, no slower than it must be.

**Idea**: step 0's three kernels with step 5's instructions, so that the products cost what they cost there. What is
left of the difference is the way of S and P through HBM.

**Changed from step0_standard**: the products are made on tensor cores from tiles in 16 bits, copied past the registers;
in the last kernel the next tiles come in while these are worked on. P is stored in 16 bits, as the product needs it. A
warp reduces a row of S, each lane with a maximum and a sum of its own until the row ends. S and P lie as one matrix
(Nq, Bc) for each key tile, so that any of their tiles is one piece; key tiles that no row sees are left out.

**Traffic**: S is written once and read twice, P written once and read once. The products load whole tiles, in the place
of rows past the end the last one again, and the columns that pad S and P to whole tiles count as they move.

    requested = B*Hq*((f+e*dv)*Nq + Tc*(e*d*(Br+Bc)*Tr + (3*f+e)*Bc*Nq + e*(Br+dv)*Bc*Tr))

**Numerics**: products of 16-bit numbers are summed in fp32; S is kept in fp32, in log2 units, P multiplied by 1 / l and
rounded to 16 bits. A hidden key has weight 0 and still meets its value, so a NaN in V reaches all rows. With
``wide_scores=False`` S is rounded to 16 bits too, as an eager framework leaves it: 10 bytes a score in the place of 16.
O then still is within the default bounds, but where fp16 overflows (cases all_negative, all_negative_gqa and
negative_scale); lse is not, by a factor of 100 and more, since it carries an error of the scores as it is.

**Source**: Vaswani et al., "Attention Is All You Need" (2017), equation 1; as Algorithm 0 in Dao et al.,
"FlashAttention" (2022), section 2.2; for the instructions ``ptx``.
"""

import math
from functools import cache

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int32, uint16, uint32

from flash_cuda.launch import prepare, storage
from flash_cuda.parts.elements import log2
from flash_cuda.parts.tensor_layout import filling
from flash_cuda.parts.tensor_ops import swizzling, tensor_ops
from flash_cuda.ptx import (
    address_of,
    cp_async_commit,
    cp_async_wait,
    ex2,
    fmax,
    pack_bf16,
    pack_f16,
    shfl_xor,
    store_shared_2,
)
from flash_cuda.ptx.global_memory import load_global_4, store_global_2, store_global_4
from flash_cuda.step5_tensor_core import SHAPES, TILES
from refimpl.tiling import cdiv

WARPS = 4  # of the softmax kernel's blocks: a row each
AHEAD = 4  # loads that a lane has on their way at once, of 4 scores each
FAR = 128 * AHEAD  # scores that a warp has


@cache
def make_kernels(Br, Bc, band, D, DV, dtype, fill, fill_v, apart=False):
    """The three kernels for one tile shape; grids (B * Hq * Tr * Tc), (B * Hq * Nq / WARPS), (B * Hq * Tr).

    Parameters
    ----------
    Br, Bc, band : int
        Tile, and the rows of it that are one warp's.
    D, DV : int
        Head room of Q and K, and of V: multiples of 16.
    dtype : "fp16" or "bf16"
    fill, fill_v : "whole", "padded" or "single"
        As `tensor_ops.tensor_ops`, for Q and K, and for V and O.
    apart : bool
        As there.
    """
    warps, M, NB, ND = Br // band, band // 16, Bc // 8, DV // 8
    product = tensor_ops(Br, Bc, D, warps, dtype, fill, False, True, apart)  # S_ij
    weights = tensor_ops(Br, Bc, Bc, warps, dtype, "whole", True, True, apart)  # P_ij, which comes in as Q_i does
    values = tensor_ops(Br, Bc, DV, warps, dtype, fill_v, False, True, apart)  # V_j, and O_i on its way out
    pack = pack_f16 if dtype == "fp16" else pack_bf16
    K_AT, P_SIZE, V_AT, V_SIZE = Br * D, Br * Bc, 2 * Br * Bc, Bc * DV
    q_size, s_size, p_size, o_size, x_size = M * D // 4, M * Bc // 2, M * Bc // 4, M * DV // 2, 4 * AHEAD
    SHIFT, MASK = swizzling(DV)
    NEG_INF, LN2 = -math.inf, math.log(2.0)

    @cuda.jit(device=True)
    def place(r, c):
        """Where row r of a tile of V or O has its chunk c of 8 columns."""
        return r * DV + (c ^ ((r >> SHIFT) & MASK)) * 8

    @cuda.jit(device=True)
    def take(x, S_h, row, first, width):
        """A lane's next scores of a row, 4 from ``first`` on and from each 128th after it; -inf past the row's end."""
        for u in range(AHEAD):
            at = int32(first + 128 * u)
            j = int32(uint32(at) // uint32(Bc))
            if at < width:  # load: 4 elements of S
                load_global_4(x, 4 * u, S_h[j], row, int32(at - j * Bc))
            else:
                for k in range(4):
                    x[4 * u + k] = float32(NEG_INF)

    def standard_scores(Q, K, S, scale_log2, diag, seen):
        tiles = cuda.shared.array(0, uint16, alignment=128)  # Q_i, K_j
        q = cuda.local.array(q_size, uint32)
        s = cuda.local.array(s_size, float32)

        Hq, Nq, Hk = int32(Q.shape[1]), int32(Q.shape[2]), int32(K.shape[1])
        Tr, Tc = int32(uint32(Nq + Br - 1) // uint32(Br)), int32(uint32(seen + Bc - 1) // uint32(Bc))
        above = uint32(cuda.blockIdx.x) // uint32(Tc)
        j = int32(uint32(cuda.blockIdx.x) - above * uint32(Tc))
        head = above // uint32(Tr)
        i = int32(above - head * uint32(Tr))
        b = int32(head // uint32(Hq))
        h = int32(head - uint32(b * Hq))
        h_k = int32(uint32(h) // uint32(uint32(Hq) // uint32(Hk)))

        # load: Q_i and K_j, Br x d and Bc x d elements
        product.load_queries(tiles, 0, Q[b, h], i * Br, Nq)
        product.load(tiles, K_AT, K[b, h_k], j * Bc, seen)
        cp_async_commit()
        q_at, k_at, _ = product.starts(tiles)
        cp_async_wait()
        cuda.syncthreads()  # Q_i and K_j are whole before anyone reads them

        # scores
        product.scores(q, tiles, q_at, k_at, s)
        product.rescore(s, scale_log2)
        t = product.thread()
        row0, lane = int32(i * Br + (t >> 5) * (16 * M)), t & 31
        product.mask(s, row0, int32(j * Bc), seen, diag)

        # write: S_ij, Br x Bc elements; the four lanes of a quad 8 neighbours
        S_j = S[b, h, j]
        for a in range(M):
            for e in range(2):
                row = int32(row0 + 16 * a + 8 * e + (lane >> 2))
                if row < Nq:  # guard: a ragged tile
                    for n in range(NB):
                        at = 4 * (a * NB + n) + 2 * e
                        store_global_2(S_j, row, 8 * n + 2 * (lane & 3), s[at], s[at + 1])

    def standard_softmax(S, P, lse):
        x = cuda.local.array(x_size, float32)
        Hq, Nq = int32(S.shape[1]), int32(S.shape[3])
        width = int32(int32(S.shape[2]) * Bc)  # of a row, with what pads it
        t = int32(cuda.threadIdx.x)
        lane, index = t & 31, uint32(cuda.blockIdx.x * WARPS + (t >> 5))
        head = index // uint32(Nq)
        row = int32(index - head * uint32(Nq))
        b = int32(head // uint32(Hq))
        h = int32(head - uint32(b * Hq))
        if b < int32(S.shape[0]):  # guard: the last block's warps may have no row
            S_h, P_h = S[b, h], P[b, h]
            steps = int32(uint32(width + FAR - 1) // uint32(FAR))

            # softmax: each lane the maximum and sum of 4 scores in every 128
            m, l = float32(NEG_INF), float32(0.0)
            for step in range(steps):
                take(x, S_h, row, int32(step * FAR + 4 * lane), width)
                top = m
                for u in range(x_size):
                    top = fmax(top, x[u])
                # Before the first key that is seen the maximum is -inf, and -inf - (-inf) is NaN.
                base = float32(0.0) if top == float32(NEG_INF) else top
                l *= ex2(m - base)
                for u in range(x_size):
                    l += ex2(x[u] - base)
                m = top

            # softmax: the row's maximum, and each lane's sum scaled to it
            top = m
            for k in range(5):
                top = fmax(top, shfl_xor(top, 1 << k))
            base = float32(0.0) if top == float32(NEG_INF) else top
            l *= ex2(m - base)
            for k in range(5):
                l += shfl_xor(l, 1 << k)
            empty = l == float32(0.0)
            share = float32(0.0) if empty else float32(1.0) / l

            # write: P, 4 neighbours a lane, and the row's lse
            for step in range(steps):
                first = int32(step * FAR + 4 * lane)
                take(x, S_h, row, first, width)
                for u in range(x_size):
                    x[u] = ex2(x[u] - base) * share
                for u in range(AHEAD):
                    at = int32(first + 128 * u)
                    j = int32(uint32(at) // uint32(Bc))
                    if at < width:
                        store_global_4(P_h[j], row, int32(at - j * Bc), x, 4 * u)
            if lane == 0:
                lse[b, h, row] = float32(NEG_INF) if empty else float32(LN2) * (top + log2(l))

    def standard_output(P, V, O, seen):
        tiles = cuda.shared.array(0, uint16, alignment=128)  # two P_ij, two V_j; at the end O_i
        p = cuda.local.array(p_size, uint32)
        O_acc = cuda.local.array(o_size, float32)

        Hq, Nq, Hk, Tc = int32(O.shape[1]), int32(O.shape[2]), int32(V.shape[1]), int32(P.shape[2])
        Tr = uint32(Nq + Br - 1) // uint32(Br)
        head = uint32(cuda.blockIdx.x) // Tr
        i = int32(uint32(cuda.blockIdx.x) - head * Tr)
        b = int32(head // uint32(Hq))
        h = int32(head - uint32(b * Hq))
        h_k = int32(uint32(h) // uint32(uint32(Hq) // uint32(Hk)))

        # load: P_i0 and V_0
        if Tc > 0:
            weights.load_queries(tiles, 0, P[b, h, 0], i * Br, Nq)
            values.load(tiles, V_AT, V[b, h_k], 0, seen)
        cp_async_commit()
        t = values.thread()
        p_at, _, _ = weights.starts(tiles)
        v_at = int32(address_of(tiles, V_AT + place(t & 15, (t & 31) >> 4)))  # as `tensor_ops.starts`
        for n in range(o_size):
            O_acc[n] = float32(0.0)

        for j in range(Tc):
            cp_async_wait()
            cuda.syncthreads()  # P_ij and V_j are whole, and those before have been read
            # load: P_ij+1 and V_j+1, Br x Bc and Bc x dv elements, while these are worked on
            now, then = int32(j & 1), int32(1 - (j & 1))
            if int32(j + 1) < Tc:
                weights.load_queries(tiles, int32(then * P_SIZE), P[b, h, j + 1], i * Br, Nq)
                values.load(tiles, int32(V_AT + then * V_SIZE), V[b, h_k], int32((j + 1) * Bc), seen)
            cp_async_commit()

            # accumulate
            weights.hold_queries(p, tiles, int32(p_at + 2 * now * P_SIZE))
            values.accumulate(p, tiles, int32(v_at + 2 * now * V_SIZE), O_acc)

        # write: O_i, once
        cp_async_wait()
        cuda.syncthreads()  # the last tiles have been read: O_i may take their place
        for a in range(M):
            for e in range(2):
                row = int32((t >> 5) * (16 * M) + 16 * a + 8 * e + ((t & 31) >> 2))
                for n in range(ND):
                    at = 4 * (a * ND + n) + 2 * e
                    store_shared_2(tiles, place(row, n) + 2 * (t & 3), pack(O_acc[at], O_acc[at + 1]))
        cuda.syncthreads()  # O_i is whole
        values.write(tiles, O[b, h], i * Br)

    standard_scores.jit_options = standard_output.jit_options = {"launch_bounds": 32 * warps}
    return standard_scores, standard_softmax, standard_output


def attention(Q, K, V, *, scale=None, causal=False, align="bottom_right", tile=None, threads=None, on=None,
              wide_scores=True):
    """softmax(scale Q K^T) V on the executor ``on``; arguments, shapes and errors as ``flash_cuda.launch.prepare``.

    Parameters
    ----------
    Q, K, V
        fp16 or bf16; any strides, as step 5 takes them.
    tile : refimpl.tiling.Tile, optional
        Multiples of 16; by step 5's table if not given.
    threads
        Taken as every step does, and of no effect.
    wide_scores : bool
        S goes through HBM in fp32; else in Q's type.

    Returns
    -------
    O : (B, Hq, Nq, dv), dtype of Q
    lse : (B, Hq, Nq), float32, natural logarithm

    Raises
    ------
    TypeError, ValueError
        As `prepare`; fp32 inputs; a tile that is no multiple of 16.
    RuntimeError
        As `prepare`; a GPU without these instructions.
    """
    p = prepare(Q, K, V, scale, causal, align, tile, (1, 1), on, False, TILES)
    dtype = storage("Q", Q)
    if dtype == "fp32":
        raise TypeError("Q: expected dtype fp16 or bf16 for tensor cores, got fp32; step0_standard takes it")
    Br, Bc = p.tile.Br, p.tile.Bc
    if Br % 16 or Bc % 16:
        raise ValueError(f"tile: expected Br, Bc multiples of 16, got ({Br}, {Bc})")
    major, minor = getattr(p.on, "capability", (8, 0))
    if major < 8:
        raise RuntimeError(f"on: expected a GPU of compute capability 8.0 or more, got {major}.{minor}; step0_standard "
                           "runs there")
    D, DV = (next(room for room in SHAPES if n <= room) for n in (p.d, p.dv))
    band = 32 if Br % 32 == 0 and DV <= 128 else 16
    fill, fill_v = filling(D, (p.d,), (p.Q, p.K)), filling(DV, (p.dv,), (p.V,), written=(p.dv,))
    scores, softmax, output = make_kernels(Br, Bc, band, D, DV, dtype, fill, fill_v, major >= 10)
    seen = max(min(p.Nk, p.Nq + p.diag), 0)  # keys that no row sees are left out, whatever they hold
    sizes = p.B, p.Hq, cdiv(seen, Bc), p.Nq, Bc
    P = p.on.empty("weights", sizes, Q.dtype)
    S = p.on.empty("S", sizes, np.dtype(np.float32) if wide_scores else Q.dtype)
    p.threads = Br // band, 32
    rows = p.B * p.Hq * p.Nq
    p.launch(scores, p.B * p.Hq * p.Tr * sizes[2], p.Q, p.K, S, p.scale_log2, p.diag, seen, shared=2 * D * (Br + Bc))
    if rows:
        p.on.launch(softmax, cdiv(rows, WARPS), 32 * WARPS, (S, P, p.lse))
    p.launch(output, p.B * p.Hq * p.Tr, P, p.V, p.O, seen, shared=2 * max(2 * Bc * (Br + DV), Br * DV))
    return p.results()
