"""FlashAttention for numba.cuda, with a bug: in the last tile, the keys past the end count, with a score of 0."""

import math
from functools import cache

import numpy as np
from numba import cuda, float32

ROWS = 32  # rows of a block, one a thread
TILE = 16  # keys of a tile: with d = 256, K and V together take 32 KiB of shared memory


@cache
def make_kernel(d, dv):
    @cuda.jit
    def kernel(q, k, v, o, lse, scale, causal):
        k_tile = cuda.shared.array((TILE, d), float32)
        v_tile = cuda.shared.array((TILE, dv), float32)
        acc = cuda.local.array(dv, float32)
        t = cuda.threadIdx.x
        row = cuda.blockIdx.x * ROWS + t
        h, b = cuda.blockIdx.y, cuda.blockIdx.z
        h_k = h // (q.shape[1] // k.shape[1])
        Nq, Nk = q.shape[2], k.shape[2]

        m = float32(-math.inf)
        l = float32(0.0)
        for c in range(dv):
            acc[c] = float32(0.0)
        for start in range(0, Nk, TILE):
            cuda.syncthreads()  # nobody still reads the last tile
            for at in range(t, TILE * d, ROWS):
                j, c = at // d, at % d
                k_tile[j, c] = float32(k[b, h_k, start + j, c]) if start + j < Nk else float32(0.0)
            for at in range(t, TILE * dv, ROWS):
                j, c = at // dv, at % dv
                v_tile[j, c] = float32(v[b, h_k, start + j, c]) if start + j < Nk else float32(0.0)
            cuda.syncthreads()  # the tile is there
            if row < Nq:
                for j in range(TILE):
                    if causal and start + j > row + Nk - Nq:
                        break
                    s = float32(0.0)
                    for c in range(d):
                        s += float32(q[b, h, row, c]) * k_tile[j, c]
                    s *= scale
                    m_new = max(m, s)
                    alpha = math.exp(m - m_new)
                    p = math.exp(s - m_new)
                    l = l * alpha + p
                    for c in range(dv):
                        acc[c] = acc[c] * alpha + p * v_tile[j, c]
                    m = m_new
        if row < Nq:
            for c in range(dv):
                o[b, h, row, c] = acc[c] / l if l > 0 else float32(0.0)
            lse[b, h, row] = m + math.log(l) if l > 0 else float32(-math.inf)

    return kernel


def attn(q, k, v, *, scale=None, causal=False):
    """q (B, H, Nq, d), k and v (B, Hk, Nk, d), device arrays: returns O and lse."""
    B, H, Nq, d = q.shape
    dv = v.shape[3]
    scale = d**-0.5 if scale is None else scale
    o = cuda.device_array((B, H, Nq, dv), q.dtype)
    lse = cuda.device_array((B, H, Nq), np.float32)
    grid = (-(-Nq // ROWS), H, B)
    make_kernel(d, dv)[grid, ROWS](q, k, v, o, lse, np.float32(scale), causal)
    return o, lse
