"""FlashAttention as a CuPy RawKernel, with a bug: query head h reads key head h % Hk, not h / (H / Hk)."""

import cupy

SOURCE = r"""
#include <cuda_fp16.h>
#define INFINITY __int_as_float(0x7f800000)  // NVRTC brings no math.h
extern "C" __global__ void attention(
    const STORED* q, const STORED* k, const STORED* v, STORED* o, float* lse, float scale, int causal,
    int H, int Hk, int Nq, int Nk, int d, int dv)
{
    int row = blockIdx.x * blockDim.y + threadIdx.y, h = blockIdx.y, b = blockIdx.z, lane = threadIdx.x;
    if (row >= Nq) return;
    int h_k = h % Hk;
    const STORED* q_row = q + ((size_t)(b * H + h) * Nq + row) * d;
    const STORED* k_head = k + (size_t)(b * Hk + h_k) * Nk * d;
    const STORED* v_head = v + (size_t)(b * Hk + h_k) * Nk * dv;

    float m = -INFINITY, l = 0.0f, acc[8] = {};  // head dims up to 256: eight columns a lane
    int end = causal ? min(Nk, row + Nk - Nq + 1) : Nk;
    for (int j = 0; j < end; ++j) {
        float s = 0.0f;
        for (int c = lane; c < d; c += 32) s += (float)q_row[c] * (float)k_head[(size_t)j * d + c];
        for (int step = 16; step > 0; step >>= 1) s += __shfl_xor_sync(0xffffffff, s, step);
        s *= scale;
        float m_new = fmaxf(m, s), alpha = expf(m - m_new), p = expf(s - m_new);
        l = l * alpha + p;
        for (int i = 0; i < 8; ++i) {
            int c = lane + 32 * i;
            if (c < dv) acc[i] = acc[i] * alpha + p * (float)v_head[(size_t)j * dv + c];
        }
        m = m_new;
    }
    STORED* o_row = o + ((size_t)(b * H + h) * Nq + row) * dv;
    for (int i = 0; i < 8; ++i) {
        int c = lane + 32 * i;
        if (c < dv) o_row[c] = (STORED)(l > 0.0f ? acc[i] / l : 0.0f);
    }
    if (lane == 0) lse[(size_t)(b * H + h) * Nq + row] = l > 0.0f ? m + logf(l) : -INFINITY;
}
"""
TYPES = {"float32": "float", "float16": "__half"}
ROWS = 4  # of a block, a warp each


def attn(q, k, v, *, scale=None, causal=False):
    """q (B, H, Nq, d), k (B, Hk, Nk, d), v (B, Hk, Nk, dv), fp32 or fp16: returns O and lse."""
    if q.dtype.name not in TYPES:
        raise TypeError(f"q: expected float32 or float16, got {q.dtype}")
    (B, H, Nq, d), (Hk, Nk, dv) = q.shape, v.shape[1:]
    if max(d, dv) > 256:
        raise ValueError(f"q, v: expected head dims up to 256, got {d} and {dv}")
    q, k, v = (cupy.ascontiguousarray(x) for x in (q, k, v))
    scale = d**-0.5 if scale is None else scale
    o = cupy.empty((B, H, Nq, dv), q.dtype)
    lse = cupy.empty((B, H, Nq), cupy.float32)
    kernel = cupy.RawKernel(SOURCE, "attention", options=(f"-DSTORED={TYPES[q.dtype.name]}",))
    grid = (-(-Nq // ROWS), H, B)
    sizes = (H, Hk, Nq, Nk, d, dv)
    kernel(grid, (32, ROWS), (q, k, v, o, lse, cupy.float32(scale), cupy.int32(causal), *map(cupy.int32, sizes)))
    return o, lse
