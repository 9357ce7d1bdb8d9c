"""What a consumer warpgroup of step 6 does between two products, all of it in registers: mask, softmax, pack, write.

The lane map is that of `ptx.hopper`: a thread has two rows, ``row`` and ``row + 8``, and in each of them pairs of
neighbouring columns; the four threads of a *quad* share these rows.
"""

import math

from numba import cuda
from numba.cuda.types import float32, int32, uint64

from flash_cuda.parts.elements import log2
from flash_cuda.parts.tile_ops import as_module
from flash_cuda.ptx.hopper import ex2, fmax, pack, reciprocal, store_16, trade

QUAD = 0xFFFFFFFF  # all lanes take part; each exchanges with its quad


def hopper_ops(Bc, D, dtype):
    """The routines for one tile shape and storage type, as device functions.

    Parameters
    ----------
    Bc, D : int
        Keys of a tile; head room.
    dtype : "fp16" or "bf16"
        What P and O are rounded to.
    """
    NS, NO = Bc // 2, D // 2  # registers of S and of O a thread
    NEG_INF, LN2 = -math.inf, math.log(2.0)
    packed = pack(dtype)

    @cuda.jit(device=True, forceinline=True)
    def cap_scores(S, slope, cap):
        """S = cap tanh(scale S / cap), as cap (1 - 2 / (1 + 2**(slope S))) with slope = 2 log2(e) scale / cap."""
        for n in range(NS):
            S[n] = cap * (float32(1.0) - float32(2.0) * reciprocal(float32(1.0) + ex2(S[n] * slope)))

    @cuda.jit(device=True, forceinline=True)
    def mask_above(S, row, j, Nk, high, lane):
        """-inf where key > row + high or key >= Nk; for both rows of the thread."""
        first = int32(j * Bc + 2 * (lane & 3))  # the thread's first key
        for r in range(2):
            last_seen = int32(min(row + 8 * r + high, Nk - 1) - first)
            for n in range(NS // 4):
                for e in range(2):
                    if int32(8 * n + e) > last_seen:
                        S[4 * n + 2 * r + e] = float32(NEG_INF)

    @cuda.jit(device=True, forceinline=True)
    def mask_below(S, row, j, low, lane):
        """-inf where key < row + low."""
        first = int32(j * Bc + 2 * (lane & 3))
        for r in range(2):
            first_seen = int32(row + 8 * r + low - first)
            for n in range(NS // 4):
                for e in range(2):
                    if int32(8 * n + e) < first_seen:
                        S[4 * n + 2 * r + e] = float32(NEG_INF)

    @cuda.jit(device=True, forceinline=True)
    def softmax(S, m0, m1, l0, l1, scale_log2):
        """A step of the online softmax for both rows: S becomes 2**(scale_log2 S - the row's new maximum).

        ``m`` is a row's running maximum of S itself; ``l`` this thread's share of its running sum. Returns the new m, l
        and the factors alpha of what was summed before. Chains are kept short: few warps are there to hide latency.
        """
        even0, odd0, even1, odd1 = m0, S[1], m1, S[3]
        for n in range(NS // 4):
            even0, odd0 = fmax(even0, S[4 * n]), fmax(odd0, S[4 * n + 1])
            even1, odd1 = fmax(even1, S[4 * n + 2]), fmax(odd1, S[4 * n + 3])
        new0, new1 = fmax(even0, odd0), fmax(even1, odd1)
        across0, across1 = cuda.shfl_xor_sync(QUAD, new0, 1), cuda.shfl_xor_sync(QUAD, new1, 1)
        new0, new1 = fmax(new0, across0), fmax(new1, across1)
        across0, across1 = cuda.shfl_xor_sync(QUAD, new0, 2), cuda.shfl_xor_sync(QUAD, new1, 2)
        new0, new1 = fmax(new0, across0), fmax(new1, across1)
        # Guard: a row that has seen no key yet; (-inf) - (-inf) would be NaN.
        top0 = float32(0.0) if new0 == float32(NEG_INF) else new0 * scale_log2
        top1 = float32(0.0) if new1 == float32(NEG_INF) else new1 * scale_log2
        alpha0, alpha1 = ex2(m0 * scale_log2 - top0), ex2(m1 * scale_log2 - top1)
        even0, odd0, even1, odd1 = l0 * alpha0, float32(0.0), l1 * alpha1, float32(0.0)
        for n in range(NS // 4):
            S[4 * n] = ex2(S[4 * n] * scale_log2 - top0)
            S[4 * n + 1] = ex2(S[4 * n + 1] * scale_log2 - top0)
            S[4 * n + 2] = ex2(S[4 * n + 2] * scale_log2 - top1)
            S[4 * n + 3] = ex2(S[4 * n + 3] * scale_log2 - top1)
            even0, odd0 = even0 + S[4 * n], odd0 + S[4 * n + 1]
            even1, odd1 = even1 + S[4 * n + 2], odd1 + S[4 * n + 3]
        return new0, new1, even0 + odd0, even1 + odd1, alpha0, alpha1

    @cuda.jit(device=True, forceinline=True)
    def pack_weights(S, P):
        """P = S rounded to the storage type, two columns in a register: operand A of the product with V."""
        for n in range(NS // 2):
            P[n] = packed(S[2 * n], S[2 * n + 1])

    @cuda.jit(device=True, forceinline=True)
    def rescale(O_acc, alpha0, alpha1):
        """Both rows of O_acc to their new maxima."""
        for n in range(NO // 4):
            O_acc[4 * n] *= alpha0
            O_acc[4 * n + 1] *= alpha0
            O_acc[4 * n + 2] *= alpha1
            O_acc[4 * n + 3] *= alpha1

    @cuda.jit(device=True, forceinline=True)
    def quad_sum(x):
        """Sum over the four threads that share a row."""
        x += cuda.shfl_xor_sync(QUAD, x, 1)
        return x + cuda.shfl_xor_sync(QUAD, x, 2)

    @cuda.jit(device=True, forceinline=True)
    def finish(l, m, scale_log2, lse, place, exists, lane):
        """Store a row's lse and return 1 / l, the last factor of its O; a row that saw no key has 0 and -inf."""
        l = quad_sum(l)
        if exists and lane & 3 == 0:
            lse[place] = (m * scale_log2 + log2(l)) * float32(LN2) if l > float32(0.0) else l + float32(NEG_INF)
        return float32(0.0) if l == float32(0.0) else float32(1.0) / l

    @cuda.jit(device=True, forceinline=True)
    def write(O_acc, r, O, place, exists, dv, lane):
        """Store one row of O; ``place`` is its number in all of O's rows, ``exists`` is false past Nq.

        A quad's threads hold 4 bytes each of every 16. They trade, so that each stores 16 bytes at once.
        """
        odd, upper = lane & 1, lane & 2
        for g in range(NO // 16):
            w0 = packed(O_acc[16 * g + 2 * r], O_acc[16 * g + 2 * r + 1])
            w1 = packed(O_acc[16 * g + 4 + 2 * r], O_acc[16 * g + 4 + 2 * r + 1])
            w2 = packed(O_acc[16 * g + 8 + 2 * r], O_acc[16 * g + 8 + 2 * r + 1])
            w3 = packed(O_acc[16 * g + 12 + 2 * r], O_acc[16 * g + 12 + 2 * r + 1])
            # Lanes 2k and 2k + 1 trade words of blocks n, n + 1: the even lane keeps block n, the odd one n + 1.
            got = trade(w0 if odd else w1, int32(1))
            a0, a1 = (got, w1) if odd else (w0, got)
            got = trade(w2 if odd else w3, int32(1))
            b0, b1 = (got, w3) if odd else (w2, got)
            # Lanes k and k + 2 trade pairs: the lower two keep blocks 0 and 1, the upper two blocks 2 and 3.
            c0 = trade(a0 if upper else b0, int32(2))
            c1 = trade(a1 if upper else b1, int32(2))
            column = int32(32 * g + 8 * (lane & 3))
            if exists and column < dv:
                at = O + uint64(2) * uint64(place * dv + column)
                if upper:
                    store_16(at, c0, c1, b0, b1)
                else:
                    store_16(at, a0, a1, c0, c1)

    @cuda.jit(device=True, forceinline=True)
    def record(trace, O_acc, r, l, m, scale_log2, exists, row, dv, lane):
        """Trace of one row: m in log2 units, l, O_acc."""
        l = quad_sum(l)
        if exists and lane & 3 == 0:  # once for the quad
            trace[row, 0] = m * scale_log2
            trace[row, 1] = l
        if exists:
            for n in range(NO // 4):
                for e in range(2):
                    column = 8 * n + 2 * (lane & 3) + e
                    if column < dv:
                        trace[row, 2 + column] = O_acc[4 * n + 2 * r + e]

    return as_module(cap_scores, mask_above, mask_below, softmax, pack_weights, rescale, finish, write, record)
