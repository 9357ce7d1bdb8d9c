"""The gradients on Hopper: five products a tile in flight behind one another, dQ a tile late.

**Idea**: as ``backward_tensor_core``, with keys as rows: a block keeps one tile of keys and walks over the tiles of
queries that see it; P^T and dS^T come out of one product in just the lanes from which the next takes them, and dK and
dV stay in registers. As in step 6 a product is only started, and what lies between two products is done while others
run: the exponentials under dP, dS under dV, the additions to dQ under the next S.

**Changed from step6_flash_v3**: two warpgroups need each other's work. dQ_i = dS K sums over all keys of the tile, half
of which each warpgroup has; so dS goes through shared memory, and each computes one 64 x 64 part of dQ_i. Waiting for
the other there would make both do the same thing at the same time. So dQ is computed one tile late, when what it needs
has long been written, and three buffers of dS let the warpgroups be almost a tile apart.

A block is two consumer warpgroups, 64 keys each, and a producer warpgroup that gives its registers away:

    shared memory    K_j and V_j [D/64][128][64]; two each of Q_i and dO_i [D/64][Br][64], lse_i and D_i [Br]; three of
                     dS^T [Br/64][128][64]; all tiles 128-byte swizzled; mbarriers
    registers        S^T and dP^T: Br/2 a thread each; P^T and dS^T in 16 bits: Br/4 each; dK and dV: D/2 each; dQ: 32

    consumer, at query tile i                                in flight meanwhile
    -------------------------------------------------------  -----------------------------
    P^T = 2**(scale S^T - lse), hide, round                  dP^T = V dO^T
    start dV += P^T dO; dS^T = P^T (dP^T - D), round, store  dV
    start dQ_{i-1} = dS_{i-1} K; start dK += dS^T Q;
    start S^T = K Q_{i+1}^T; wait for dQ_{i-1} and add it    dK, S
    start dP^T = V dO_{i+1}^T; wait for S                    dK, S, dP

D at most 128: a warpgroup has 64 keys, so that dK and dV alone are D registers a thread. Br = 64 at D = 128, and 128 at
D = 64: 2 x 64 x 64 is what a tile of dQ is.

D = rowsum(dO O) - dlse, lse in log2 units and the cleared sums come from a first kernel, `backward_tensor_rows`; a last
one rounds the sums. These lie as the lanes hold them, so that a warp adds to 512 neighbouring bytes at once.

**Traffic**: K, V, dK and dV once, Q and dO once a live tile of 128 keys, with atomics Br x D fp32 additions a live
tile. Without them (`deterministic`) dQ is what step 5's kernel computes, with S and dP once more.

**Numerics**: as ``backward_tensor_core``, but that D is subtracted from the finished sum dP.

**Speed**: what was tried on an H200 (fp16, 16 heads, 16K tokens, d = 128, N = 16384), each line one run, 6 rounds, as
shares of cuDNN's rate in that run; schedules that the assembler makes of the same program differ by some percent:

    dS stored to places that the thread keeps, or by its number read anew   full 1.06, 1.02; causal 1.12, 1.06
    dQ added to places by the thread's number read anew, or kept            full 1.02, 0.99; causal 1.06, 1.07
    dS told to the other warpgroup once written, or after dQ of the last    full 1.00, 0.97; causal 1.02, 1.01
    each block begins at another query tile, or all at the first            full 0.98, 0.98; causal 1.05, 1.06

With a branch out of the loop between the start of a product and its wait, or with products of dQ under an `if`, the
assembler runs all products one by one. A product that is not to add must not name what its registers held: as an
operand it would keep them occupied (`ptx.hopper_backward.wgmma_rows`).

**Source**: Shah et al., "FlashAttention-3" (2024), section 3.4 and appendix B.1 (algorithm 3); Dao, "FlashAttention-2"
(2023), section 3.1.2 and Algorithm 2.
"""

from functools import cache
from typing import NamedTuple

from numba import cuda
from numba.cuda.types import float32, int32, uint32, uint64

from flash_cuda.parts.hopper_gradient_ops import hopper_gradient_ops
from flash_cuda.parts.hopper_ops import hopper_ops
from flash_cuda.ptx import hopper as ptx
from flash_cuda.ptx import thread_index
from flash_cuda.ptx.hopper_backward import bulk_load, proxy_fence, store_word, wgmma_across, wgmma_rows

BARRIER = 8  # bytes of an mbarrier
Bc, WG = 128, 2  # keys of a tile, consumer warpgroups
STAGES, BUFFERS = 2, 3  # of Q_i and dO_i; of dS
UNIT = 64  # rows and columns of the part of dQ that a warpgroup computes
THREADS = 128 * (WG + 1)


class Shape(NamedTuple):
    """Br: queries of a tile. D: head room. Br D = 2 x 64 x 64."""

    Br: int
    D: int

    @property
    def shared_bytes(self):
        """Dynamic shared memory: tiles, lse and D, barriers, and what aligning to a swizzle atom may skip."""
        tiles = 2 * (2 * Bc * self.D + 2 * STAGES * self.Br * self.D + BUFFERS * Bc * self.Br)
        return tiles + 2 * STAGES * 4 * self.Br + BARRIER * (2 + 4 * STAGES + BUFFERS) + ptx.SWIZZLE_ATOM


SHAPES = {64: Shape(128, 64), 128: Shape(64, 128)}


@cache
def make_kernel(shape, dtype, adding):
    """The kernel for dK and dV, and with ``adding`` the sums of dQ; grid (B * Hk * Tc), `THREADS` threads."""
    Br, D = shape
    grad, ops = hopper_gradient_ops(Br, Bc, dtype), hopper_ops(Bc, D, dtype)
    slabs, d_steps, k_steps = D // 64, D // 16, Bc // 16
    T_BYTES, Q_BYTES, W_BYTES, S_BYTES = 2 * Bc * D, 2 * Br * D, 2 * Bc * Br, 4 * Br  # K or V; Q or dO; dS; lse or D
    NS, NP, NO, NQ = Br // 2, Br // 4, D // 2, UNIT // 2
    BY_ROWS, Q_ACROSS, W_ACROSS = ptx.k_major(0), ptx.mn_major(Br), ptx.mn_major(Bc)
    begin_rows, multiply_rows = wgmma_rows(Br, dtype, True), wgmma_rows(Br, dtype, False)
    multiply_sums = ptx.wgmma_registers(D, dtype)
    begin_across, multiply_across = wgmma_across(UNIT, dtype, True), wgmma_across(UNIT, dtype, False)
    wait_S, wait_dP, wait_dV = ptx.wgmma_wait(1, NS), ptx.wgmma_wait(1, NS), ptx.wgmma_wait(0, NO)
    wait_dQ, wait_dK = ptx.wgmma_wait(2, NQ), ptx.wgmma_wait(1, NO)
    wait_before_last, wait_last = ptx.wgmma_wait(1, NQ), ptx.wgmma_wait(0, NO, NQ)
    release_registers, claim_registers = ptx.set_registers("dec", 24), ptx.set_registers("inc", 240)
    EMPTY = BARRIER * STAGES  # from a ring's barriers that say "full" to those that say "empty"

    @cuda.jit(device=True, forceinline=True)
    def load(to, tensor, bar, rows, row, h, b):
        """Start the copy of a tile, slab by slab of 64 columns."""
        for s in range(slabs):
            ptx.tma_load(uint32(to + uint32(s * rows * 128)), tensor, bar, int32(64 * s), row, h, b)

    @cuda.jit(device=True, forceinline=True)
    def start_rows(S, rows_at, columns_at):
        """S = A B^T over the head dim: A the warpgroup's keys, B the tile's queries; addresses in units of 16 bytes."""
        for k in range(d_steps):
            A = uint32(rows_at + uint32((k // 4) * (Bc * 128 >> 4) + (k % 4) * 2))
            B = uint32(columns_at + uint32((k // 4) * (Br * 128 >> 4) + (k % 4) * 2))
            if k == 0:
                begin_rows(S, uint64(BY_ROWS) | uint64(A), uint64(BY_ROWS) | uint64(B))
            else:
                multiply_rows(S, uint64(BY_ROWS) | uint64(A), uint64(BY_ROWS) | uint64(B))
        ptx.wgmma_commit()

    @cuda.jit(device=True, forceinline=True)
    def start_sums(acc, P, half, at):
        """acc += P B over 64 of the tile's queries."""
        B = uint64(Q_ACROSS) | uint64(at)
        for k in range(4):
            multiply_sums(acc, P, 4 * half + k, B + uint64((4 * half + k) * 2048 >> 4), int32(1))

    @cuda.jit(device=True, forceinline=True)
    def start_queries(dQ, W_at, K_at):
        """dQ = dS K over the tile's keys, 64 queries and 64 columns of K."""
        A, B = uint64(W_ACROSS) | uint64(W_at), uint64(W_ACROSS) | uint64(K_at)
        begin_across(dQ, A, B)
        for k in range(1, k_steps):
            multiply_across(dQ, A + uint64(k * 2048 >> 4), B + uint64(k * 2048 >> 4))
        ptx.wgmma_commit()

    @cuda.jit(device=True, forceinline=True)
    def add_tile(dQ, sums_at, tile):
        """Add this thread's part of a tile of dQ to the sums. What lies where is the thread's number, read anew."""
        grad.add_queries(dQ, sums_at + uint64(4 * Br * D) * uint64(uint32(tile)) + uint64(uint32(16 * thread_index())))

    def backward_hopper(maps, stats, sums, dK, dV, scale, scale_log2, diag, Hk, members, Nq, end, Nk, d, dv):
        base = (ptx.smem_address(cuda.shared.array(0, uint32)) + uint32(1023)) & uint32(0xFFFFFC00)
        K_s = uint32(base)
        V_s = uint32(K_s + uint32(T_BYTES))
        Q_s = uint32(V_s + uint32(T_BYTES))
        G_s = uint32(Q_s + uint32(STAGES * Q_BYTES))
        W_s = uint32(G_s + uint32(STAGES * Q_BYTES))
        lse_s = uint32(W_s + uint32(BUFFERS * W_BYTES))
        D_s = uint32(lse_s + uint32(STAGES * S_BYTES))
        K_bar = uint32(D_s + uint32(STAGES * S_BYTES))
        V_bar = uint32(K_bar + uint32(BARRIER))
        Q_bars = uint32(V_bar + uint32(BARRIER))
        G_bars = uint32(Q_bars + uint32(2 * EMPTY))
        W_bars = uint32(G_bars + uint32(2 * EMPTY))
        tid = int32(cuda.threadIdx.x)

        Tr, Tc = ptx.quotient(int32(Nq + Br - 1), int32(Br)), ptx.quotient(int32(Nk + Bc - 1), int32(Bc))
        bh_k = ptx.quotient(int32(cuda.blockIdx.x), Tc)
        j = int32(cuda.blockIdx.x - bh_k * Tc)
        b = ptx.quotient(bh_k, Hk)
        h_k = int32(bh_k - b * Hk)
        # Key j is seen by row i iff j <= i + diag; no row sees keys from ``end`` on.
        col0 = int32(j * Bc)
        i_first = ptx.quotient(int32(max(col0 - diag, 0)), int32(Br))
        live = int32(max(Tr - i_first, 0) * members) if col0 < end else int32(0)

        if tid == 0:
            ptx.mbarrier_init(K_bar, uint32(1))
            ptx.mbarrier_init(V_bar, uint32(1))
            for s in range(STAGES):
                ptx.mbarrier_init(uint32(Q_bars + uint32(BARRIER * s)), uint32(1))
                ptx.mbarrier_init(uint32(Q_bars + uint32(EMPTY + BARRIER * s)), uint32(WG))
                ptx.mbarrier_init(uint32(G_bars + uint32(BARRIER * s)), uint32(1))
                ptx.mbarrier_init(uint32(G_bars + uint32(EMPTY + BARRIER * s)), uint32(WG))
            for s in range(BUFFERS):
                ptx.mbarrier_init(uint32(W_bars + uint32(BARRIER * s)), uint32(WG))
            ptx.mbarrier_fence()
        if adding and tid < 128 * WG:  # before the first dS there is one of zeros
            for k in range(W_BYTES // (4 * 128 * WG)):
                store_word(uint32(W_s + uint32((BUFFERS - 1) * W_BYTES) + uint32(4 * (128 * WG * k + tid))), uint32(0))
            proxy_fence()
        cuda.syncthreads()

        if tid >= 128 * WG:  # the producer: one thread
            release_registers()
            if tid == 128 * WG and live > 0:
                Q_map = ptx.gmem_address(maps)
                K_map, V_map, G_map = Q_map + uint64(128), Q_map + uint64(256), Q_map + uint64(384)
                ptx.tensor_map_fence(Q_map)
                ptx.tensor_map_fence(K_map)
                ptx.tensor_map_fence(V_map)
                ptx.tensor_map_fence(G_map)
                stats_g = ptx.gmem_address(stats)
                i, h = i_first, int32(h_k * members)
                ptx.mbarrier_expect(K_bar, uint32(T_BYTES))
                load(K_s, K_map, K_bar, Bc, col0, h_k, b)  # load: K_j
                for n in range(live):
                    stage = uint32(n & 1)
                    empty = uint32((n >> 1 & 1) ^ 1)
                    bh = int32(b * Hk * members + h)
                    at = uint64(8) * uint64(uint32(bh) * uint32(Tr * Br)) + uint64(uint32(4 * i * Br))
                    bar = uint32(Q_bars + stage * uint32(BARRIER))
                    ptx.mbarrier_wait(uint32(bar + uint32(EMPTY)), empty)
                    ptx.mbarrier_expect(bar, uint32(Q_BYTES + S_BYTES))
                    load(uint32(Q_s + stage * uint32(Q_BYTES)), Q_map, bar, Br, int32(i * Br), h, b)  # load: Q_i
                    bulk_load(uint32(lse_s + stage * uint32(S_BYTES)), stats_g + at, uint32(S_BYTES), bar)
                    if n == 0:
                        ptx.mbarrier_expect(V_bar, uint32(T_BYTES))
                        load(V_s, V_map, V_bar, Bc, col0, h_k, b)  # load: V_j
                    bar = uint32(G_bars + stage * uint32(BARRIER))
                    ptx.mbarrier_wait(uint32(bar + uint32(EMPTY)), empty)
                    ptx.mbarrier_expect(bar, uint32(Q_BYTES + S_BYTES))
                    load(uint32(G_s + stage * uint32(Q_BYTES)), G_map, bar, Br, int32(i * Br), h, b)  # load: dO_i
                    at += uint64(uint32(4 * Tr * Br))
                    bulk_load(uint32(D_s + stage * uint32(S_BYTES)), stats_g + at, uint32(S_BYTES), bar)
                    i = int32(i + 1)
                    if i == Tr:
                        i, h = i_first, int32(h + 1)
        else:  # a consumer
            claim_registers()
            S = cuda.local.array(NS, float32)
            dP = cuda.local.array(NS, float32)
            P = cuda.local.array(NP, uint32)
            W = cuda.local.array(NP, uint32)
            dQ = cuda.local.array(NQ, float32)
            dK_acc = cuda.local.array(NO, float32)
            dV_acc = cuda.local.array(NO, float32)
            pair = cuda.local.array(2, float32)
            for n in range(NS):
                S[n], dP[n] = float32(0.0), float32(0.0)
            for n in range(NQ):
                dQ[n] = float32(0.0)
            for n in range(NO):
                dK_acc[n], dV_acc[n] = float32(0.0), float32(0.0)
            wg, lane = ptx.uniform(int32(tid // 128)), tid & 31
            thread = int32(tid & 127)
            row_in_tile = int32(64 * wg + 16 * (thread // 32) + lane // 4)
            leader = thread == 0
            K_at, V_at = uint32(K_s >> uint32(4)), uint32(V_s >> uint32(4))
            Q_at, G_at, W_at = uint32(Q_s >> uint32(4)), uint32(G_s >> uint32(4)), uint32(W_s >> uint32(4))
            mine = uint32(wg * (64 * 128 >> 4))  # to this warpgroup's 64 keys

            # In each part of dQ 8 x 128 threads' fours; the thread's number, and so its warpgroup's, is added later.
            sums_at = ptx.gmem_address(sums) + uint64(uint32(wg * (8 - 1) * 128 * 16))

            if live > 0:
                i = i_first
                tile = int32((b * Hk + h_k) * members * Tr + i_first)  # number of dQ's tile in the sums
                tile_before = tile
                w, w_before, w_phase = uint32(0), uint32(BUFFERS - 1), uint32(1)
                n = int32(0)
                ptx.mbarrier_wait(K_bar, uint32(0))
                ptx.mbarrier_wait(Q_bars, uint32(0))
                ptx.wgmma_fence()
                start_rows(S, uint32(K_at + mine), Q_at)
                ptx.mbarrier_wait(V_bar, uint32(0))
                ptx.mbarrier_wait(G_bars, uint32(0))
                ptx.wgmma_fence()
                start_rows(dP, uint32(V_at + mine), G_at)
                wait_S(S)

                # This warpgroup's part of dQ: of two panels of 64 queries one, or of two of 64 columns of K.
                panel = uint32(wg * (Bc * 128 >> 4))
                W_part = uint32(W_at + (panel if Br > UNIT else uint32(0)))
                K_part = uint32(K_at + (panel if D > UNIT else uint32(0)))

                while True:
                    stage = uint32(n & 1)
                    # weights, while dP is computed
                    grad.weigh(S, pair, scale_log2, uint32(lse_s + stage * uint32(S_BYTES)), lane)
                    row0 = int32(i * Br)
                    if col0 + Bc > min(row0 + 1 + diag, end):  # an edge tile: the first row does not see all of it
                        grad.hide(S, int32(col0 + row_in_tile), row0, end, diag, lane)
                    dO_at, D_at = uint32(G_at + stage * uint32(Q_BYTES >> 4)), uint32(D_s + stage * uint32(S_BYTES))
                    grad.pack_weights(S, P, 0)
                    ptx.wgmma_fence()
                    start_sums(dV_acc, P, 0, dO_at)
                    ptx.wgmma_commit()

                    # gradient of the scores, while dV is
                    wait_dP(dP)
                    grad.gradient(S, dP, pair, W, 0, D_at, lane)
                    if Br > 64:
                        grad.pack_weights(S, P, 1)
                        ptx.wgmma_fence()
                        start_sums(dV_acc, P, 1, dO_at)
                        ptx.wgmma_commit()
                        grad.gradient(S, dP, pair, W, 1, D_at, lane)
                    if adding:
                        grad.share_gradient(W, uint32(W_s + w * uint32(W_BYTES)), row_in_tile, lane)
                        proxy_fence()
                    wait_dV(dV_acc)
                    ptx.barrier_sync(uint32(1 + wg), uint32(128))  # all have read lse and D, and written dS
                    if leader:
                        ptx.mbarrier_arrive(uint32(G_bars + uint32(EMPTY) + stage * uint32(BARRIER)))
                        # That a buffer of dS has been read needs no telling: the next Q but one, without which nobody
                        # writes to it again, comes after both warpgroups released Q_i, and so after this.
                        if adding:
                            ptx.mbarrier_arrive(uint32(W_bars + w * uint32(BARRIER)))

                    n = int32(n + 1)
                    if n == live:
                        break

                    # products: dQ of the tile before, dK, and S of the next tile
                    if adding:
                        ptx.mbarrier_wait(uint32(W_bars + w_before * uint32(BARRIER)), w_phase)
                    ptx.wgmma_fence()
                    if adding:
                        start_queries(dQ, uint32(W_part + w_before * uint32(W_BYTES >> 4)), K_part)
                    start_sums(dK_acc, W, 0, uint32(Q_at + stage * uint32(Q_BYTES >> 4)))
                    if Br > 64:
                        start_sums(dK_acc, W, 1, uint32(Q_at + stage * uint32(Q_BYTES >> 4)))
                    ptx.wgmma_commit()
                    after = uint32(n & 1)
                    phase = uint32(n >> 1 & 1)
                    ptx.mbarrier_wait(uint32(Q_bars + after * uint32(BARRIER)), phase)
                    ptx.wgmma_fence()
                    start_rows(S, uint32(K_at + mine), uint32(Q_at + after * uint32(Q_BYTES >> 4)))
                    wait_dQ(dQ)
                    if adding and n > 1:
                        add_tile(dQ, sums_at, tile_before)  # add: Br x D elements of dQ
                    ptx.mbarrier_wait(uint32(G_bars + after * uint32(BARRIER)), phase)
                    wait_dK(dK_acc)
                    if leader:
                        ptx.mbarrier_arrive(uint32(Q_bars + uint32(EMPTY) + stage * uint32(BARRIER)))
                    ptx.wgmma_fence()
                    start_rows(dP, uint32(V_at + mine), uint32(G_at + after * uint32(Q_BYTES >> 4)))
                    wait_S(S)
                    if w_before == uint32(BUFFERS - 1):
                        w_phase ^= uint32(1)
                    tile_before, w_before = tile, w
                    w = uint32(w + 1) if w < uint32(BUFFERS - 1) else uint32(0)
                    i, tile = int32(i + 1), int32(tile + 1)
                    if i == Tr:
                        i, tile = i_first, int32(tile + i_first)

                # dQ of the last two tiles, dK of the last
                if adding:
                    ptx.mbarrier_wait(uint32(W_bars + w_before * uint32(BARRIER)), w_phase)
                ptx.wgmma_fence()
                if adding:
                    start_queries(dQ, uint32(W_part + w_before * uint32(W_BYTES >> 4)), K_part)
                    if w_before == uint32(BUFFERS - 1):
                        w_phase ^= uint32(1)
                start_sums(dK_acc, W, 0, uint32(Q_at + stage * uint32(Q_BYTES >> 4)))
                if Br > 64:
                    start_sums(dK_acc, W, 1, uint32(Q_at + stage * uint32(Q_BYTES >> 4)))
                ptx.wgmma_commit()
                wait_before_last(dQ)
                if adding:
                    if n > 1:
                        add_tile(dQ, sums_at, tile_before)
                    ptx.mbarrier_wait(uint32(W_bars + w * uint32(BARRIER)), w_phase)
                    ptx.wgmma_fence()
                    start_queries(dQ, uint32(W_part + w * uint32(W_BYTES >> 4)), K_part)
                wait_last(dK_acc, dQ)
                if adding:
                    add_tile(dQ, sums_at, tile)

            # write: dK_j and dV_j, once
            grad.multiply(dK_acc, scale, NO)
            K_address, V_address = ptx.gmem_address(dK), ptx.gmem_address(dV)
            row = int32(col0 + row_in_tile)
            place = int32(bh_k * Nk + row)
            ops.write(dK_acc, 0, K_address, place, row < Nk, d, lane)
            ops.write(dK_acc, 1, K_address, place + 8, row + 8 < Nk, d, lane)
            ops.write(dV_acc, 0, V_address, place, row < Nk, dv, lane)
            ops.write(dV_acc, 1, V_address, place + 8, row + 8 < Nk, dv, lane)

    backward_hopper.jit_options = {"launch_bounds": (THREADS, 1)}
    return backward_hopper
