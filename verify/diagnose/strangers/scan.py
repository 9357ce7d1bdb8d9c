"""All heads and rows at once, a scan over padded chunks of keys from the last to the first."""

import numpy as np

CHUNK = 128


def attn(q, k, v, scale=None, causal=False, align="bottom_right", window=None, lengths_q=None, lengths_k=None):
    """q (b, h, t, d), k and v (b, h, s, d) after the heads of k and v are repeated; returns (out, lse)."""
    b, h, t, d = q.shape
    s = k.shape[2]
    scale = np.float32(1 / np.sqrt(d) if scale is None else scale)
    k, v = (np.repeat(x, h // x.shape[1], axis=1) for x in (k, v))
    n_chunks = (s + CHUNK - 1) // CHUNK
    pad = n_chunks * CHUNK - s
    k, v = (np.pad(x.astype(np.float32), ((0, 0), (0, 0), (0, pad), (0, 0))) for x in (k, v))
    q_len = np.full(b, t) if lengths_q is None else np.asarray(lengths_q)
    k_len = np.full(b, s) if lengths_k is None else np.asarray(lengths_k)
    offset = (k_len - q_len if align == "bottom_right" else 0 * k_len)[:, None, None, None]
    q_pos = np.arange(t)[None, None, :, None] + offset
    alive = np.arange(t)[None, None, :, None] < q_len[:, None, None, None]
    queries = q.astype(np.float32)

    def step(carry, c):
        acc, m, den = carry
        at = slice(c * CHUNK, (c + 1) * CHUNK)
        logits = queries @ k[:, :, at].swapaxes(-1, -2) * scale
        k_pos = np.arange(c * CHUNK, (c + 1) * CHUNK)[None, None, None, :]
        ok = (k_pos < k_len[:, None, None, None]) & alive
        if causal:
            ok = ok & (k_pos <= q_pos)
        if window is not None:
            lo, hi = window
            if lo is not None:
                ok = ok & (q_pos - k_pos <= lo)
            if hi is not None:
                ok = ok & (k_pos - q_pos <= hi)
        logits = np.where(ok, logits, -np.inf)
        m_new = np.maximum(m, logits.max(axis=-1))
        base = np.where(np.isneginf(m_new), 0, m_new)
        corr = np.exp(m - base)
        w = np.exp(logits - base[..., None])
        den = den * corr + w.sum(axis=-1)
        acc = acc * corr[..., None] + w.astype(q.dtype).astype(np.float32) @ v[:, :, at]
        return acc, m_new, den

    carry = (
        np.zeros((b, h, t, v.shape[-1]), np.float32),
        np.full((b, h, t), -np.inf, np.float32),
        np.zeros((b, h, t), np.float32),
    )
    for c in reversed(range(n_chunks)):
        carry = step(carry, c)
    acc, m, den = carry
    live = den > 0
    out = np.where(live[..., None], acc / np.where(live, den, 1)[..., None], 0)
    lse = np.where(live, m + np.log(np.where(live, den, 1)), -np.inf)
    return out.astype(q.dtype), lse.astype(np.float32)
