"""FlashAttention in NumPy, with a bug: what was summed before the maximum grew is not rescaled."""

import numpy as np

TILE = 64


def attn(q, k, v, *, scale=None, causal=False, softcap=None):
    """q (B, H, Nq, d), k and v (B, Hk, Nk, d): returns O in q's type and lse in fp32."""
    B, H, Nq, d = q.shape
    Hk, Nk = k.shape[1:3]
    scale = d**-0.5 if scale is None else scale
    q, k, v, stored = q.astype(np.float32), k.astype(np.float32), v.astype(np.float32), q.dtype
    # Query heads that share a key head stand together.
    q = q.reshape(B, Hk, H // Hk, Nq, d)
    k, v = k[:, :, None], v[:, :, None]
    rows = np.arange(Nq)[:, None] + Nk - Nq

    m = np.full((*q.shape[:4], 1), -np.inf, np.float32)
    l = np.zeros_like(m)
    acc = np.zeros((*q.shape[:4], v.shape[-1]), np.float32)
    for start in range(0, Nk, TILE):
        keys = np.arange(start, min(start + TILE, Nk))
        s = q @ k[..., keys, :].swapaxes(-1, -2) * np.float32(scale)
        if softcap is not None:
            s = softcap * np.tanh(s / softcap)
        if causal:
            s = np.where(keys <= rows, s, -np.inf)
        m_new = np.maximum(m, s.max(axis=-1, keepdims=True))
        safe = np.where(np.isneginf(m_new), 0, m_new)
        p = np.exp(s - safe, dtype=np.float32)
        alpha = np.exp(m - safe, dtype=np.float32)
        l = alpha * l + p.sum(axis=-1, keepdims=True)
        acc = acc + p @ v[..., keys, :]
        m = m_new
    o = np.divide(acc, l, out=np.zeros_like(acc), where=l > 0)
    with np.errstate(divide="ignore"):
        lse = m + np.log(l)
    return o.reshape(B, H, Nq, -1).astype(stored), lse.reshape(B, H, Nq)


def attn_backward(q, k, v, do, o, lse, *, scale=None, causal=False, softcap=None):
    """Gradients of attn, tile by tile over the keys, from o and lse."""
    B, H, Nq, d = q.shape
    Hk, Nk = k.shape[1:3]
    scale = d**-0.5 if scale is None else scale
    stored = q.dtype
    q, do, o = (x.astype(np.float32).reshape(B, Hk, H // Hk, Nq, -1) for x in (q, do, o))
    k, v = (x.astype(np.float32)[:, :, None] for x in (k, v))
    lse = lse.reshape(B, Hk, H // Hk, Nq, 1)
    safe = np.where(np.isneginf(lse), 0, lse)
    delta = (do * o).sum(axis=-1, keepdims=True)
    rows = np.arange(Nq)[:, None] + Nk - Nq

    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for start in range(0, Nk, TILE):
        keys = np.arange(start, min(start + TILE, Nk))
        k_j, v_j = k[..., keys, :], v[..., keys, :]
        s = q @ k_j.swapaxes(-1, -2) * np.float32(scale)
        slope = 1.0
        if softcap is not None:
            t = np.tanh(s / softcap)
            s, slope = softcap * t, 1 - t * t
        if causal:
            s = np.where(keys <= rows, s, -np.inf)
        p = np.exp(s - safe, dtype=np.float32)
        ds = p * (do @ v_j.swapaxes(-1, -2) - delta) * slope * np.float32(scale)
        dq += ds @ k_j
        # One key head's gradient is the sum over the query heads that read it.
        dk[..., keys, :] = (ds.swapaxes(-1, -2) @ q).sum(axis=2, keepdims=True)
        dv[..., keys, :] = (p.swapaxes(-1, -2) @ do).sum(axis=2, keepdims=True)
    return dq.reshape(B, H, Nq, d).astype(stored), dk[:, :, 0].astype(stored), dv[:, :, 0].astype(stored)
