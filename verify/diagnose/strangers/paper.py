"""Algorithm 1 of the first paper: keys outside, O normalised at every visit, P against the tile's maximum."""

import numpy as np

CAPABILITIES = {"gqa": False}
Br, Bc = 64, 80


def attn(q, k, v, scale=None, causal=False, mask=None):
    """One head after the other; returns (O, L)."""
    B, H, N, d = q.shape
    M = k.shape[2]
    tau = np.float32(d**-0.5 if scale is None else scale)
    O = np.zeros((B, H, N, v.shape[-1]), np.float32)
    l = np.zeros((B, H, N), np.float32)
    m = np.full((B, H, N), -np.inf, np.float32)
    for b in range(B):
        for h in range(H):
            for j in range(0, M, Bc):
                Kj, Vj = (x[b, h, j : j + Bc].astype(np.float32) for x in (k, v))
                for i in range(0, N, Br):
                    Qi, Oi, li, mi = (
                        q[b, h, i : i + Br].astype(np.float32),
                        O[b, h, i : i + Br],
                        l[b, h, i : i + Br],
                        m[b, h, i : i + Br],
                    )
                    S = tau * (Qi @ Kj.T)
                    rows, cols = np.arange(i, min(i + Br, N))[:, None], np.arange(j, min(j + Bc, M))
                    if causal:
                        S[cols > rows + M - N] = -np.inf
                    if mask is not None:
                        S[~mask[b, h, i : i + Br, j : j + Bc]] = -np.inf
                    m_t = S.max(axis=1)
                    m_t[np.isneginf(m_t)] = -1e30
                    P = np.exp(S - m_t[:, None])
                    l_t = P.sum(axis=1)
                    m_new = np.maximum(mi, m_t)
                    a, c = np.exp(mi - m_new), np.exp(m_t - m_new)
                    l_new = a * li + c * l_t
                    div = np.where(l_new > 0, l_new, 1)[:, None]
                    PV = P.astype(v.dtype).astype(np.float32) @ Vj
                    O[b, h, i : i + Br] = ((a * li)[:, None] * Oi + c[:, None] * PV) / div
                    l[b, h, i : i + Br] = l_new
                    m[b, h, i : i + Br] = m_new
    L = np.where(l > 0, m + np.log(np.where(l > 0, l, 1)), -np.inf)
    return O.astype(q.dtype), L.astype(np.float32)
