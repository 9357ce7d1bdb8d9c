"""Step 6: one warp only loads, the others only compute, and softmax of one tile hides under the product of the next.

**Idea**: on Hopper a product is started, not executed: `wgmma` runs while the warps that issued it go on. So S of the
next tile and the product of the present one with V are started together, and the exponentials are taken meanwhile.

**Changed from step5_tensor_core**: `wgmma` reads K and V from shared memory directly, and a producer warp fills it
by TMA; `mbarrier` phases take the place of `__syncthreads`. A block stays on its multiprocessor and walks over query
tiles as one unbroken chain of key tiles: the first product of a query tile is started with the last one of the tile
before, so that the tensor cores see no seam.

A block is WG consumer warpgroups, 64 query rows each, and a producer warpgroup that gives its registers away:

    shared memory    rings of tiles: Q [D/64][Br][64], K and V [D/64][Bc][64], 128-byte swizzled; their mbarriers
    registers        S: Bc/2, P: Bc/4, O_acc: D/2 a thread, and m and l of its two rows

    producer, one thread                     consumer, at key tile j of the chain
    --------------------------------------   ------------------------------------------------------------
    wait until K's stage is empty; load K_j  wait until K_j is full; start S = Q K_j^T
    wait until V's stage is empty; load V_j  O_acc *= alpha; or, if it is done, write it and begin anew
    at a query tile's first key tile: Q_i    wait until V_{j-1} is full; start O_acc += P V_{j-1}
                                             wait for S, release K_j; mask, softmax: P's next values, alpha
                                             wait for O_acc, release V_{j-1}; P = those values in 16 bits

Which query tiles a block takes, and when: `schedule`.

**Traffic**: as step 4: each query tile brings in Q_i and the K and V tiles it can see, once; a query tile that sees no
key still brings in one. What a box has beyond an end of its tensor costs nothing.

    requested = B*Hq*(f*Nq+e*(d+dv)*(Nq+sum(max(0,min(Nk,Nq+diag,Bc*max(1,cdiv(i*Br+Br+diag,Bc)))) for i in range(Tr))))

**Numerics**: fp16 or bf16 operands, fp32 sums; P is rounded to the storage type, l sums it unrounded, and O_acc is
divided once at the end.

**Speed**: what was tried on an H200 (fp16, 16 heads, 16K tokens), as shares of cuDNN's rate beside it in the same run;
8 to 12 runs a number, so a percent is noise. Two versions of the kernel in one run:

    O_acc rescaled and written under the next S, or before it   d = 128, N = 4096: 0.97, 0.90
    K and V with stages of their own and two of Q, or 3, 3, 1   d = 128, N = 1024: 0.96, 0.93
    three stages of K and V, or two                             d = 64, N = 1024: 0.91, 0.86
    the warpgroups take turns, or not                           d = 64, N = 1024: 0.96, 0.93; d = 128: no difference
    176 keys a tile, or 128 and a stage more                    d = 128, N = 1024: 0.85, 0.92; 16384: 1.02, 0.99

Between runs, so that other changes are in it. At d = 64, N = 4096: a product's addresses in uniform registers, shorter
chains in the softmax and a clock that leaves the launch out, 0.83 to 0.96, 1.00 with a third stage; a table for the
schedule, and the late factor, 0.94; skipping key tiles that only later rows see, and the early factor again, 0.85. Both
took the addresses out of the uniform registers. Without them, the late factor and turns: 1.05. Even shares of causal
tiles, with the late factor: 0.87 to 1.09 (d = 128, N = 16384).

**Source**: Shah et al., "FlashAttention-3" (2024), sections 3.1 and 3.2 (algorithms 1 and 2).
"""

import math
from functools import cache

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int32, uint32, uint64

from flash_cuda import step4_causal
from flash_cuda.launch import prepare, storage
from flash_cuda.parts.hopper_ops import hopper_ops
from flash_cuda.parts.hopper_shapes import BARRIER, Shape, shape_for
from flash_cuda.parts.schedule import group_size, key_tiles_of
from flash_cuda.parts.tensor_map import as_copied
from flash_cuda.ptx import hopper as ptx
from refimpl.masks import ends
from refimpl.tiling import Tile

FAR = 1 << 29  # further than any key from any row
LOG2E = math.log2(math.e)
TINY = np.float32(2.0**-100)  # in the place of a scale of 0: all weights are 1, and a hidden -inf does not become NaN


@cache
def make_kernel(shape, dtype, negate=False, capped=False, tracing=False):
    """The kernel for one shape and storage type; any number of blocks, ``shape.threads`` threads.

    ``negate`` is for a negative scale: the maximum must be that of scale S, and a product can turn its own sign.
    ``capped``: scores are softcapped; ``slope`` and ``cap`` as `hopper_ops.cap_scores` takes them, else unused.
    """
    Br, Bc, D, k_stages, v_stages, q_stages, turns = shape
    WG = shape.consumers
    ops = hopper_ops(Bc, D, dtype)
    slabs, k_steps, v_steps = D // 64, D // 16, Bc // 16
    Q_BYTES, T_BYTES = 2 * Br * D, 2 * Bc * D  # of a tile of Q, and of K or V
    NS, NP, NO = Bc // 2, Bc // 4, D // 2
    NEG_INF = float("-inf")
    K_DESCRIPTOR, V_DESCRIPTOR = ptx.k_major(Bc), ptx.mn_major(Bc)
    multiply_k = ptx.wgmma_shared(Bc, dtype, negate)
    multiply_v = ptx.wgmma_registers(D, dtype)
    wait_first, wait_S, wait_O = ptx.wgmma_wait(0, NS), ptx.wgmma_wait(1, NS), ptx.wgmma_wait(0, NO, NS)
    give, take = {1: (40, 232), 2: (40, 232), 3: (32, 160)}[WG]
    release_registers, claim_registers = ptx.set_registers("dec", give), ptx.set_registers("inc", take)
    # In bytes from a ring's first barrier: those that say "empty", and from Q's ring those of K and of V.
    Q_EMPTY, K_EMPTY, V_EMPTY = BARRIER * q_stages, BARRIER * k_stages, BARRIER * v_stages
    K_RING = 2 * Q_EMPTY
    V_RING = K_RING + 2 * K_EMPTY

    @cuda.jit(device=True, forceinline=True)
    def locate(turn, Tr, heads, group):
        """(query tile, head of all batches) of the block's turn, as `schedule.tiles_in_order`; tile -1: no more."""
        block = int32(cuda.blockIdx.x if turn % 2 == 0 else cuda.gridDim.x - 1 - cuda.blockIdx.x)
        place = int32(turn * cuda.gridDim.x + block)
        per_group = int32(group * Tr)
        g = ptx.quotient(place, per_group)
        u, first = int32(place - g * per_group), int32(g * group)
        members = int32(max(min(group, heads - first), 1))  # past the last tile there are none
        i = ptx.quotient(u, members)
        h = int32(first + u - i * members)
        if (ptx.quotient(int32(heads - 1), group) - g) % 2 == 0:
            i = int32(Tr - 1 - i)
        return (i if place < Tr * heads else int32(-1)), h

    @cuda.jit(device=True, forceinline=True)
    def key_tiles(i, Nq, Nk, low, high):
        """(first, end) of the key tiles that query tile i sees; one at least, for rows that see none."""
        row = int32(i * Br)
        seen_by_last = int32(min(max(min(row + Br, Nq) + high, 0), Nk))
        end = int32(max(ptx.quotient(int32(seen_by_last + Bc - 1), int32(Bc)), 1))
        return int32(min(ptx.quotient(int32(max(row + low, 0)), int32(Bc)), end - 1)), end

    @cuda.jit(device=True, forceinline=True)
    def step(stage, phase, stages):
        """A ring's next (stage, phase)."""
        stage = uint32(stage + 1)
        return (uint32(0), uint32(phase ^ 1)) if stage == uint32(stages) else (stage, phase)

    @cuda.jit(device=True, forceinline=True)
    def load(to, tensor, bar, rows, row, h, b):
        """Start the copy of a tile, slab by slab of 64 columns, announced to its barrier."""
        ptx.mbarrier_expect(bar, uint32(2 * rows * D))
        for s in range(slabs):
            ptx.tma_load(uint32(to + uint32(s * rows * 128)), tensor, bar, int32(64 * s), row, h, b)

    @cuda.jit(device=True, forceinline=True)
    def start_scores(S, Q_at, K_at):
        """S = Q K^T; addresses in units of 16 bytes, 32 bits wide so that they stay in uniform registers."""
        for k in range(k_steps):
            Q_k = uint32(Q_at + uint32((k // 4) * (Br * 128 >> 4) + (k % 4) * 2))
            K_k = uint32(K_at + uint32((k // 4) * (Bc * 128 >> 4) + (k % 4) * 2))
            multiply_k(S, uint64(K_DESCRIPTOR) | uint64(Q_k), uint64(K_DESCRIPTOR) | uint64(K_k), int32(k > 0))
        ptx.wgmma_commit()

    @cuda.jit(device=True, forceinline=True)
    def start_values(O_acc, P, V_at, keep):
        """O_acc += P V, or = P V where there is nothing to keep."""
        V = uint64(V_DESCRIPTOR) | uint64(V_at)
        for k in range(v_steps):
            multiply_v(O_acc, P, k, V + uint64(k * 2048 >> 4), keep if k == 0 else int32(1))
        ptx.wgmma_commit()

    @cuda.jit(device=True, forceinline=True)
    def mask(S, i, wg, row_in_tile, j, Nk, low, high, lane):
        """Hide what the rows do not see, in tiles that at least one of the warpgroup's rows does not see all of."""
        row0, row = int32(i * Br + 64 * wg), int32(i * Br + row_in_tile)
        if (j + 1) * Bc > min(Nk, row0 + high + 1):
            ops.mask_above(S, row, j, Nk, high, lane)
        if j * Bc < row0 + 63 + low:
            ops.mask_below(S, row, j, low, lane)

    @cuda.jit(device=True, forceinline=True)
    def write_tile(O_acc, O, row, bh, Nq, dv, lane):
        """Store the thread's two rows of O."""
        place = int32(bh * Nq + row)
        ops.write(O_acc, 0, O, place, row < Nq, dv, lane)
        ops.write(O_acc, 1, O, place + 8, row + 8 < Nq, dv, lane)

    @cuda.jit(device=True, forceinline=True)
    def record_tile(trace, O_acc, row, bh, j, l0, l1, m0, m1, scale_log2, Hq, Nq, dv, lane):
        """Trace of the thread's two rows after key tile j."""
        at = trace[bh // Hq, bh % Hq, j]
        ops.record(at, O_acc, 0, l0, m0, scale_log2, row < Nq, row, dv, lane)
        ops.record(at, O_acc, 1, l1, m1, scale_log2, row + 8 < Nq, row + 8, dv, lane)

    def step6_flash_v3(maps, O, lse, scale_log2, slope, cap, low, high, heads, group, Hq, share, Nq, Nk, dv, trace):
        base = (ptx.smem_address(cuda.shared.array(0, uint32)) + uint32(1023)) & uint32(0xFFFFFC00)
        Q_s = uint32(base)
        K_s = uint32(Q_s + uint32(q_stages * Q_BYTES))
        V_s = uint32(K_s + uint32(k_stages * T_BYTES))
        Q_bars = uint32(V_s + uint32(v_stages * T_BYTES))
        K_bars, V_bars = uint32(Q_bars + uint32(K_RING)), uint32(Q_bars + uint32(V_RING))
        tid = int32(cuda.threadIdx.x)
        Tr = int32((Nq + Br - 1) // Br)

        if tid == 0:
            for s in range(q_stages):
                ptx.mbarrier_init(uint32(Q_bars + uint32(BARRIER * s)), uint32(1))
                ptx.mbarrier_init(uint32(Q_bars + uint32(Q_EMPTY + BARRIER * s)), uint32(WG))
            for s in range(k_stages):
                ptx.mbarrier_init(uint32(K_bars + uint32(BARRIER * s)), uint32(1))
                ptx.mbarrier_init(uint32(K_bars + uint32(K_EMPTY + BARRIER * s)), uint32(WG))
            for s in range(v_stages):
                ptx.mbarrier_init(uint32(V_bars + uint32(BARRIER * s)), uint32(1))
                ptx.mbarrier_init(uint32(V_bars + uint32(V_EMPTY + BARRIER * s)), uint32(WG))
            ptx.mbarrier_fence()
        cuda.syncthreads()

        if tid >= 128 * WG:  # the producer: one thread
            release_registers()
            if tid == 128 * WG:
                Q_map = ptx.gmem_address(maps)
                K_map, V_map = Q_map + uint64(128), Q_map + uint64(256)
                ptx.tensor_map_fence(Q_map)
                ptx.tensor_map_fence(K_map)
                ptx.tensor_map_fence(V_map)
                # A new ring counts as released, once round: its "empty" barriers are waited for with the other parity.
                q, q_phase, k, k_phase, v, v_phase = uint32(0), uint32(1), uint32(0), uint32(1), uint32(0), uint32(1)
                turn = int32(0)
                i, bh = locate(turn, Tr, heads, group)
                while i >= 0:
                    b = ptx.quotient(bh, Hq)
                    h = int32(bh - b * Hq)
                    h_k = ptx.quotient(h, share)
                    j, end = key_tiles(i, Nq, Nk, low, high)
                    bar = uint32(Q_bars + uint32(BARRIER) * q)
                    ptx.mbarrier_wait(uint32(bar + uint32(Q_EMPTY)), q_phase)
                    load(uint32(Q_s + q * uint32(Q_BYTES)), Q_map, bar, Br, int32(i * Br), h, b)  # load: Q_i
                    q, q_phase = step(q, q_phase, q_stages)
                    while j < end:
                        bar = uint32(K_bars + uint32(BARRIER) * k)
                        ptx.mbarrier_wait(uint32(bar + uint32(K_EMPTY)), k_phase)
                        load(uint32(K_s + k * uint32(T_BYTES)), K_map, bar, Bc, int32(j * Bc), h_k, b)  # load: K_j
                        k, k_phase = step(k, k_phase, k_stages)
                        bar = uint32(V_bars + uint32(BARRIER) * v)
                        ptx.mbarrier_wait(uint32(bar + uint32(V_EMPTY)), v_phase)
                        load(uint32(V_s + v * uint32(T_BYTES)), V_map, bar, Bc, int32(j * Bc), h_k, b)  # load: V_j
                        v, v_phase = step(v, v_phase, v_stages)
                        j = int32(j + 1)
                    turn = int32(turn + 1)
                    i, bh = locate(turn, Tr, heads, group)
        else:  # a consumer
            claim_registers()
            S = cuda.local.array(NS, float32)
            O_acc = cuda.local.array(NO, float32)
            P = cuda.local.array(NP, uint32)
            for n in range(NS):
                S[n] = float32(0.0)
            for n in range(NO):
                O_acc[n] = float32(0.0)
            wg, lane = ptx.uniform(int32(tid // 128)), tid & 31
            row_in_tile = int32(64 * wg + 16 * (tid // 32 % 4) + lane // 4)
            leader = tid % 128 == 0
            Q_at = uint32((Q_s + uint32(wg * 64 * 128)) >> uint32(4))
            K_at, V_at = uint32(K_s >> uint32(4)), uint32(V_s >> uint32(4))
            O_address = ptx.gmem_address(O)
            my_turn, next_turn = uint32(2 + wg), uint32(2 + (wg + 1 if wg + 1 < WG else 0))
            if turns and wg == WG - 1:
                ptx.barrier_arrive(next_turn, uint32(256))  # the first warpgroup may start

            q, q_phase, k, k_phase, v, v_phase = uint32(0), uint32(0), uint32(0), uint32(0), uint32(0), uint32(0)
            if q_stages == 1:  # registers are few then, and what the compiler makes of known phases takes some
                zero = uint32(ptx.uniform(int32(0)))
                q, q_phase, k, k_phase, v, v_phase = zero, zero, zero, zero, zero, zero
            turn = int32(0)
            i, bh = locate(turn, Tr, heads, group)
            j, end = key_tiles(i, Nq, Nk, low, high)

            # The chain's first link: S of the first key tile, with nothing to hide under.
            ptx.mbarrier_wait(Q_bars, q_phase)
            ptx.mbarrier_wait(K_bars, k_phase)
            ptx.wgmma_fence()
            start_scores(S, Q_at, K_at)
            wait_first(S)
            if leader:
                ptx.mbarrier_arrive(uint32(K_bars + uint32(K_EMPTY)))
                if j + 1 == end:
                    ptx.mbarrier_arrive(uint32(Q_bars + uint32(Q_EMPTY)))
            k, k_phase = step(k, k_phase, k_stages)
            if capped:
                ops.cap_scores(S, slope, cap)
            mask(S, i, wg, row_in_tile, j, Nk, low, high, lane)
            m0, m1, l0, l1 = float32(NEG_INF), float32(NEG_INF), float32(0.0), float32(0.0)
            m0, m1, l0, l1, alpha0, alpha1 = ops.softmax(S, m0, m1, l0, l1, scale_log2)
            ops.pack_weights(S, P)
            keep = int32(0)  # whether O_acc holds something to add to
            sealed = False  # whether O_acc belongs to a query tile that is done, and is to be written
            O_i, O_bh = i, bh

            while True:
                # The next link: the next key tile, or the first of the block's next query tile.
                done_i, done_bh, done_j = i, bh, j
                V_bar = uint32(V_bars + uint32(BARRIER) * v)
                V_now, V_phase = uint32(V_at + v * uint32(T_BYTES >> 4)), v_phase
                v, v_phase = step(v, v_phase, v_stages)
                j = int32(j + 1)
                fresh = j == end
                if fresh:
                    turn = int32(turn + 1)
                    i, bh = locate(turn, Tr, heads, group)
                    if i < 0:
                        break
                    j, end = key_tiles(i, Nq, Nk, low, high)
                    q, q_phase = step(q, q_phase, q_stages)
                    ptx.mbarrier_wait(uint32(Q_bars + uint32(BARRIER) * q), q_phase)
                Q_now = uint32(Q_at + q * uint32(Q_BYTES >> 4))
                K_now = uint32(K_at + k * uint32(T_BYTES >> 4))
                K_bar = uint32(K_bars + uint32(BARRIER) * k)

                # products: S of this link; under it O_acc's factor, or its way out; then O_acc of the last link
                ptx.mbarrier_wait(K_bar, k_phase)
                if turns:
                    ptx.barrier_sync(my_turn, uint32(256))
                ptx.wgmma_fence()
                start_scores(S, Q_now, K_now)
                ops.rescale(O_acc, alpha0, alpha1)
                if sealed:
                    write_tile(O_acc, O_address, int32(O_i * Br + row_in_tile), O_bh, Nq, dv, lane)
                ptx.mbarrier_wait(V_bar, V_phase)
                ptx.wgmma_fence()
                start_values(O_acc, P, V_now, keep)
                if turns:
                    ptx.barrier_arrive(next_turn, uint32(256))

                # softmax, while the second product runs
                wait_S(S)
                if leader:
                    ptx.mbarrier_arrive(uint32(K_bar + uint32(K_EMPTY)))
                    if j + 1 == end:
                        ptx.mbarrier_arrive(uint32(Q_bars + uint32(Q_EMPTY) + uint32(BARRIER) * q))
                k, k_phase = step(k, k_phase, k_stages)
                if capped:
                    ops.cap_scores(S, slope, cap)
                mask(S, i, wg, row_in_tile, j, Nk, low, high, lane)
                done_m0, done_m1, done_l0, done_l1 = m0, m1, l0, l1
                if fresh:
                    row = int32(done_i * Br + row_in_tile)
                    place = int32(done_bh * Nq + row)
                    inverse0 = ops.finish(l0, m0, scale_log2, lse, place, row < Nq, lane)
                    inverse1 = ops.finish(l1, m1, scale_log2, lse, place + 8, row + 8 < Nq, lane)
                    m0, m1, l0, l1 = float32(NEG_INF), float32(NEG_INF), float32(0.0), float32(0.0)
                m0, m1, l0, l1, alpha0, alpha1 = ops.softmax(S, m0, m1, l0, l1, scale_log2)
                if fresh:  # at a seam the last factor of the O that is done takes alpha's place
                    alpha0, alpha1 = inverse0, inverse1

                # accumulate
                wait_O(O_acc, S)
                if leader:
                    ptx.mbarrier_arrive(uint32(V_bar + uint32(V_EMPTY)))
                ops.pack_weights(S, P)
                if tracing:
                    row = int32(done_i * Br + row_in_tile)
                    record_tile(trace, O_acc, row, done_bh, done_j, done_l0, done_l1, done_m0, done_m1, scale_log2,
                                Hq, Nq, dv, lane)  # fmt: skip
                keep, sealed, O_i, O_bh = int32(0) if fresh else int32(1), fresh, done_i, done_bh

            # The chain's last link: O_acc of the last key tile.
            ops.rescale(O_acc, alpha0, alpha1)
            if sealed:
                write_tile(O_acc, O_address, int32(O_i * Br + row_in_tile), O_bh, Nq, dv, lane)
            ptx.mbarrier_wait(V_bar, V_phase)
            ptx.wgmma_fence()
            start_values(O_acc, P, V_now, keep)
            wait_O(O_acc, S)
            row = int32(done_i * Br + row_in_tile)
            if tracing:
                record_tile(trace, O_acc, row, done_bh, done_j, l0, l1, m0, m1, scale_log2, Hq, Nq, dv, lane)
            place = int32(done_bh * Nq + row)
            alpha0 = ops.finish(l0, m0, scale_log2, lse, place, row < Nq, lane)
            alpha1 = ops.finish(l1, m1, scale_log2, lse, place + 8, row + 8 < Nq, lane)
            ops.rescale(O_acc, alpha0, alpha1)
            write_tile(O_acc, O_address, row, done_bh, Nq, dv, lane)

    step6_flash_v3.jit_options = {"launch_bounds": (shape.threads, 1)}
    return step6_flash_v3


def attention(
    Q, K, V, *, scale=None, causal=False, align="bottom_right", window=None, softcap=None, tile=None, threads=None,
    shape=None, on=None, trace=None,
):  # fmt: skip
    """softmax(scale Q K^T) V on the executor ``on``.

    Parameters
    ----------
    Q, K, V, scale, causal, align, on, trace
        As `flash_cuda.launch.prepare`, but fp16 or bf16 only; d and dv multiples of 8. Arrays on a device must lie as
        the copy engine can read them: the last axis contiguous, other strides multiples of 16 bytes. NumPy arrays that
        do not are copied on their way.
    window : (left, right), optional
        Query i sees keys i - left ... i + right, both included; None or -1 for no bound.
    softcap : float, optional
        Scores s become softcap tanh(s / softcap), before masks.
    tile : refimpl.tiling.Tile, optional
        Br = 64, 128 or 192, Bc a multiple of 16; by `shape_for` if not given.
    threads
        Taken as every step does, and of no effect: a block has 128 for each 64 rows, and 128 to load.
    shape : Shape, optional
        In the place of ``tile``: everything that was chosen for speed.

    Returns
    -------
    O : (B, Hq, Nq, dv), dtype of Q
    lse : (B, Hq, Nq), float32, natural logarithm

    Raises
    ------
    ValueError, TypeError
        As `prepare`; and for what the copy engine or the tensor cores cannot take, with a step that can.
    """
    kind = storage("Q", Q)
    if kind not in ptx.PTX_TYPE:
        raise TypeError(f"Q: expected dtype fp16 or bf16 for step6_flash_v3, got {kind}; step4_causal takes fp32")
    whole = len(Q.shape) == len(V.shape) == 4  # `prepare` refuses others
    d, dv = (Q.shape[-1], V.shape[-1]) if whole else (8, 8)
    if shape is None:
        shape = shape_for(max(d, dv), Q.shape[2] if whole else 0, causal, bool(softcap))
        if tile:
            shape = Shape(tile.Br, tile.Bc, shape.D)
    p = prepare(Q, K, V, scale, causal, align, Tile(shape.Br, shape.Bc), (1, 1), on, trace)
    _check(p, shape, softcap)
    low, high = _band(p, causal, align, window)
    seen = min(p.Nk, max(p.Nq + high, 0))  # keys past these no row sees: they are left out, whatever they hold
    if not seen:  # no tensor map is made for nothing
        options = {"scale": scale, "causal": causal, "align": align}
        return step4_causal.attention(Q, K, V, **options, on=p.on, trace=trace)
    tiles, heads = p.B * p.Hq * p.Tr, p.B * p.Hq
    if not tiles:
        return p.results()
    q, k, v = (as_copied(p.on, *named) for named in (("Q", Q, p.Q), ("K", K, p.K), ("V", V, p.V)))
    maps = p.on.tensor_maps((q, shape.Br), (k, shape.Bc, seen), (v, shape.Bc, seen))
    blocks = min(tiles, p.on.multiprocessors)
    group = group_size(key_tiles_of(p, low, high), heads, 2 * p.Nk * (d + dv) * p.Hk // p.Hq, blocks)
    scale_log2, slope = abs(p.scale_log2) or TINY, np.float32(0)
    if softcap:  # it turns the scores to their own sign, and to natural units
        scale_log2, slope = np.float32(LOG2E), np.float32(2 * LOG2E * float(p.scale) / softcap)
    kernel = make_kernel(shape, kind, p.scale < 0 and not softcap, bool(softcap), p.tracing)
    args = (
        maps, p.O, p.lse.reshape(heads * p.Nq), scale_log2, slope, np.float32(softcap or 0), low, high, heads, group,
        p.Hq, p.Hq // p.Hk, p.Nq, p.Nk, p.dv, p.trace,
    )  # fmt: skip
    p.on.launch(kernel, blocks, shape.threads, args, shared=shape.shared_bytes)
    return p.results()


def _check(p, shape, softcap):
    """Refuse what this step cannot do, and say which can."""
    for name, n in (("Q", p.d), ("V", p.dv)):
        if n % 8:
            raise ValueError(f"{name}: expected a head dim that is a multiple of 8 for step6_flash_v3, got {n}; "
                             "step5_tensor_core takes any")  # fmt: skip
    if softcap is not None and not 0 < softcap < np.inf:
        raise ValueError(f"softcap: expected a positive number, got {softcap}")
    if shape.Br not in (64, 128, 192) or shape.Bc % 16 or not 16 <= shape.Bc <= 256:
        raise ValueError(f"shape: expected Br 64, 128 or 192 and Bc a multiple of 16 up to 256, got {shape}")
    if shape.D % 64 or not max(p.d, p.dv) <= shape.D <= 256:
        raise ValueError(f"shape: expected D a multiple of 64, {max(p.d, p.dv)} ... 256, got {shape}")


def _band(p, causal, align, window):
    """(low, high): row r sees keys r + low ... r + high."""
    left, right = ends(window)
    offset = p.Nk - p.Nq if align == "bottom_right" else 0
    return max(offset - left, -FAR), min(offset + (min(right, 0) if causal else right), FAR)
