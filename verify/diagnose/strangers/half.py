"""Operands in 16 bits, sums in 32, by 16 keys at a time as a tensor core takes them."""

import numpy as np

CAPABILITIES = {"dtypes": ("fp16", "bf16")}
ROWS, KEYS, DEPTH = 128, 64, 16


def mma(a, b, acc):
    """acc + a b, DEPTH products at a time, the sum in the type of acc."""
    for s in range(0, a.shape[1], DEPTH):
        acc = (acc + a[:, s : s + DEPTH].astype(np.float32) @ b[s : s + DEPTH].astype(np.float32)).astype(acc.dtype)
    return acc


def attn(q, k, v, scale=None, causal=False):
    """Half-precision q, k, v; returns (o, lse)."""
    kind, (B, H, N, d), M = q.dtype, q.shape, k.shape[2]
    group, factor = H // k.shape[1], np.float32((d**-0.5 if scale is None else scale) * np.log2(np.e))
    o = np.zeros((B, H, N, v.shape[-1]), kind)
    lse = np.full((B, H, N), -np.inf, np.float32)
    for b, h in np.ndindex(B, H):
        K, V = k[b, h // group], v[b, h // group]
        for r in range(0, N, ROWS):
            Q = q[b, h, r : r + ROWS]
            n = len(Q)
            row = np.arange(r, r + n) + M - N
            acc = np.zeros((n, V.shape[1]), np.float32)
            high, total = np.full(n, -np.inf, np.float32), np.zeros(n, np.float32)
            for c in range(0, M, KEYS):
                s = mma(Q, K[c : c + KEYS].T, np.zeros((n, len(K[c : c + KEYS])), np.float32)) * factor
                if causal:
                    s = np.where(np.arange(c, c + s.shape[1]) <= row[:, None], s, -np.inf)
                new = np.maximum(high, s.max(1))
                ref = np.where(np.isneginf(new), np.float32(0), new)
                p, keep = np.exp2(s - ref[:, None]), np.exp2(high - ref)
                total = keep * total + p.sum(1)
                acc = mma(p.astype(kind), V[c : c + KEYS], keep[:, None] * acc)
                high = new
            some = total > 0
            o[b, h, r : r + n] = np.where(some[:, None], acc / np.where(some, total, 1)[:, None], 0)
            lse[b, h, r : r + n] = np.where(
                some, (high + np.log2(np.where(some, total, 1))) * np.float32(np.log(2)), -np.inf
            )
    return o, lse
