"""A program per block of rows, scores in base 2, as the Triton tutorial has it."""

import math

import numpy as np

BLOCK_M, BLOCK_N = 48, 32
LOG2_E = np.float32(1.4426950408889634)


def attn(q, k, v, scale=None, causal=False, window=None, softcap=None, alibi_slopes=None):
    """q (Z, H, M, D), k and v (Z, HK, N, D); returns (o, lse)."""
    z, heads, m_ctx, dim = q.shape
    heads_kv, n_ctx = k.shape[1], k.shape[2]
    sm_scale = np.float32(1.0 / math.sqrt(dim) if scale is None else scale)
    o = np.zeros((z, heads, m_ctx, v.shape[3]), q.dtype)
    lse = np.full((z, heads, m_ctx), -np.inf, np.float32)
    shift = n_ctx - m_ctx
    for off_hz in range(z * heads):
        off_z, off_h = off_hz // heads, off_hz % heads
        off_kv = off_h // (heads // heads_kv)
        slope = None if alibi_slopes is None else np.float32(alibi_slopes[off_h])
        for start_m in range(-(-m_ctx // BLOCK_M)):
            offs_m = start_m * BLOCK_M + np.arange(BLOCK_M)
            offs_m = offs_m[offs_m < m_ctx]
            q_blk = q[off_z, off_h, offs_m].astype(np.float32)
            m_i = np.full(len(offs_m), -np.inf, np.float32)
            l_i = np.zeros(len(offs_m), np.float32)
            acc = np.zeros((len(offs_m), v.shape[3]), np.float32)
            hi = min(n_ctx, offs_m[-1] + shift + 1) if causal else n_ctx
            lo = 0
            if window is not None and window[0] is not None:
                lo = max(0, (offs_m[0] + shift - window[0]) // BLOCK_N * BLOCK_N)
            for start_n in range(lo, max(hi, lo), BLOCK_N):
                offs_n = start_n + np.arange(BLOCK_N)
                inside = offs_n < n_ctx
                k_blk = np.where(inside[:, None], k[off_z, off_kv, np.minimum(offs_n, n_ctx - 1)].astype(np.float32), 0)
                v_blk = np.where(inside[:, None], v[off_z, off_kv, np.minimum(offs_n, n_ctx - 1)].astype(np.float32), 0)
                qk = q_blk @ k_blk.T
                qk = qk * sm_scale
                if softcap is not None:
                    qk = np.float32(softcap) * np.tanh(qk / np.float32(softcap))
                rel = offs_m[:, None] + shift - offs_n[None, :]
                if slope is not None:
                    qk = qk - slope * np.abs(rel).astype(np.float32)
                qk = qk * LOG2_E
                valid = np.broadcast_to(inside, qk.shape)
                if causal:
                    valid = valid & (rel >= 0)
                if window is not None:
                    if window[0] is not None:
                        valid = valid & (rel <= window[0])
                    if window[1] is not None:
                        valid = valid & (rel >= -window[1])
                qk = np.where(valid, qk, -np.inf)
                m_ij = np.maximum(m_i, qk.max(axis=1))
                safe = np.where(np.isneginf(m_ij), np.float32(0), m_ij)
                p = np.exp2(qk - safe[:, None])
                alpha = np.exp2(m_i - safe)
                l_i = l_i * alpha + p.sum(axis=1)
                acc = acc * alpha[:, None]
                acc = acc + p.astype(v.dtype).astype(np.float32) @ v_blk
                m_i = m_ij
            some = l_i > 0
            acc = acc / np.where(some, l_i, np.float32(1))[:, None]
            o[off_z, off_h, offs_m] = acc.astype(q.dtype)
            total = (m_i + np.log2(np.where(some, l_i, np.float32(1)))) / LOG2_E
            lse[off_z, off_h, offs_m] = np.where(some, total, -np.inf)
    return o, lse
