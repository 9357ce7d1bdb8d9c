"""What a bias's gradient is made of: sums of dS over all pairs to which one number of it was added, in order.

dS here is P (dP - D), the gradient of what was added to the score last; the kernels of `backward` leave it in global
memory, (B, Hq, Nq, Nk), if it is asked for.
"""

from numba import cuda
from numba.cuda.types import float32


def backward_dbias(dS, dbias):
    """dbias, with axes of 1 where the bias was broadcast: sums of dS (B, Hq, Nq, Nk), a thread an element, in order."""
    B, H, N, M = dbias.shape
    at = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if at < B * H * N * M:  # guard: the last block is ragged
        b, h, r, c = at // (M * N * H), at // (M * N) % H, at // M % N, at % M
        total = float32(0.0)
        for b1 in range(b, dS.shape[0] if B == 1 else b + 1):
            for h1 in range(h, dS.shape[1] if H == 1 else h + 1):
                for r1 in range(r, dS.shape[2] if N == 1 else r + 1):
                    for c1 in range(c, dS.shape[3] if M == 1 else c + 1):
                        total += dS[b1, h1, r1, c1]
        dbias[b, h, r, c] = total


def backward_dtable(dS, offsets, dtable):
    """dtable (Hq, 2 R + 1) of `refimpl.scores.relative`: sums of dS along diagonals, a thread an element, in order."""
    H, bins = dtable.shape
    R = bins // 2
    at = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if at < H * bins:  # guard: the last block is ragged
        h, n = at // bins, at % bins
        total = float32(0.0)
        for b in range(dS.shape[0]):
            for r in range(dS.shape[2]):
                j = r + offsets[b] + n - R  # the key at this distance; those further out share the first and the last
                first = 0 if n == 0 else max(j, 0)
                last = dS.shape[3] - 1 if n == bins - 1 else min(j, dS.shape[3] - 1)
                for c in range(first, last + 1):
                    total += dS[b, h, r, c]
        dtable[h, n] = total
