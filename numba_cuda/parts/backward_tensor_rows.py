"""What comes before and after the backward kernels on tensor cores: D and lse of each query, and sums made dQ.

Both kernels pass over memory once, with tiles of C queries, and are bound by it.
"""

import math
from functools import cache

from numba import cuda
from numba.cuda.types import float32, int32, uint32

from flash_cuda.parts.elements import narrow, widen
from flash_cuda.parts.tensor_gradient_ops import tensor_gradient_ops
from flash_cuda.ptx import dot_bf16, dot_f16, shfl_xor
from flash_cuda.ptx.global_memory import store_global_4

ROWS_THREADS = 128
EACH_ROW = 8  # threads for each row of O and dO
LOG2E = math.log2(math.e)
INF = math.inf


@cache
def make_rows_kernel(C, dtype, whole):
    """The kernel for D and lse of C queries, which clears their sums; grid (B * Hq * Tr), `ROWS_THREADS` threads.

    ``stats`` has room for Nq rows or for whole tiles of them.

    With ``whole``, O and dO are read by 16 bytes, else element by element.
    """
    dot = dot_f16 if dtype == "fp16" else dot_bf16

    def backward_rows(O, dO, lse, dlse, stats, sums):
        Hq, Nq = int32(O.shape[1]), int32(O.shape[2])
        Tr = int32(uint32(Nq + C - 1) // uint32(C))
        i = int32(uint32(cuda.blockIdx.x) % uint32(Tr))
        head = int32(uint32(cuda.blockIdx.x) // uint32(Tr))
        b, h = int32(uint32(head) // uint32(Hq)), int32(uint32(head) % uint32(Hq))
        t = int32(cuda.threadIdx.x)

        for r in range(t // EACH_ROW, C, ROWS_THREADS // EACH_ROW):
            row = int32(i * C + r)
            total = float32(0.0)
            if row < Nq:  # guard: the last query tile is ragged
                # load: O and dO, dv elements each
                if whole:
                    for c in range(8 * (t % EACH_ROW), O.shape[3], 8 * EACH_ROW):
                        total = dot(O[b, h], dO[b, h], row, int32(c), total)
                else:
                    for c in range(t % EACH_ROW, O.shape[3], EACH_ROW):
                        total += widen(dO[b, h, row, c]) * widen(O[b, h, row, c])
            total += shfl_xor(total, 1)
            total += shfl_xor(total, 2)
            total += shfl_xor(total, 4)
            if row < stats.shape[3] and t % EACH_ROW == 0:
                # write: lse and D, one number each; weights of 0 where a row is not or sees no key
                hidden = row >= Nq or lse[b, h, row] == float32(-INF)
                stats[b, h, 0, row] = float32(INF) if hidden else lse[b, h, row] * float32(LOG2E)
                # Nothing of such a row goes anywhere, be its dlse what it may: that of a square of lse is -inf.
                stats[b, h, 1, row] = float32(0.0) if hidden else total - dlse[b, h, row]
        for e in range(t, sums.shape[3], ROWS_THREADS):
            sums[b, h, i, e] = float32(0.0)  # clear: C x D sums with atomics, none without

    return backward_rows


@cache
def make_round_kernel(shape, D, dtype, vector, fours):
    """The kernel that rounds the sums of dQ; grid (B * Hq * Tr), `ROWS_THREADS` threads. As `make_keys_kernel`.

    With ``fours``, d is a multiple of 4, so that dQ is written 4 elements at a time, else element by element.
    """
    C = shape.columns
    grad = tensor_gradient_ops(shape.rows, C, D, shape.rows // shape.band, dtype, shape.hold, shape.fresh, vector)

    def backward_round(sums, dQ, scale):
        x = cuda.local.array(16, float32)
        Hq, Nq, d = int32(dQ.shape[1]), int32(dQ.shape[2]), int32(dQ.shape[3])
        Tr = int32(uint32(Nq + C - 1) // uint32(C))
        i = int32(uint32(cuda.blockIdx.x) % uint32(Tr))
        head = int32(uint32(cuda.blockIdx.x) // uint32(Tr))
        b, h = int32(uint32(head) // uint32(Hq)), int32(uint32(head) % uint32(Hq))
        for u in range(cuda.threadIdx.x, C * D // 16, ROWS_THREADS):
            r, c, at = grad.sums_of(int32(u))
            grad.gather(sums[b, h], i, at, scale, x)  # load: 16 sums, 4 at a time
            for k in range(4):
                row, column = int32(i * C + r + 8 * (k // 2)), int32(c + 4 * (k % 2))
                # write: 4 elements of dQ; guard: ragged rows, and d need not fill D
                if fours:
                    if row < Nq and column < d:
                        store_global_4(dQ[b, h], row, column, x, 4 * k)
                else:
                    for e in range(4):
                        if row < Nq and column + e < d:
                            dQ[b, h, row, column + e] = narrow(x[4 * k + e], dQ)

    return backward_round
