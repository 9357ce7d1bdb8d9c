"""A backward pass in two loops over tiles: keys outside for dk and dv, and dq added up on the way."""

import numpy as np

TM, TN = 32, 48


def attn(q, k, v, scale=None, causal=False, window=None, softcap=None):
    """The forward pass, whole; returns (o, lse)."""
    f = np.float32
    rep = q.shape[1] // k.shape[1]
    s, hide, _ = scores(
        q.astype(f), np.repeat(k, rep, 1).astype(f), 0, 0, scale, causal, window, softcap, q.shape[2], k.shape[2]
    )
    s = np.where(hide, f(-np.inf), s)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isneginf(top), f(0), top)
    e = np.exp(s - top)
    tot = e.sum(-1, keepdims=True)
    p = e / np.where(tot == 0, f(1), tot)
    with np.errstate(divide="ignore"):
        return (p.astype(q.dtype).astype(f) @ np.repeat(v, rep, 1).astype(f)).astype(q.dtype), (top + np.log(tot))[
            ..., 0
        ].astype(f)


def scores(q, k, r0, c0, scale, causal, window, softcap, nq, nk):
    """Scores of a tile, what is hidden in it, and the softcap's slope."""
    f = np.float32
    raw = q @ k.swapaxes(-1, -2) * f(q.shape[-1] ** -0.5 if scale is None else scale)
    slope = f(1)
    if softcap is not None:
        t = np.tanh(raw / f(softcap))
        raw, slope = f(softcap) * t, 1 - t * t
    diff = np.arange(r0, r0 + q.shape[-2])[:, None] + (nk - nq) - np.arange(c0, c0 + k.shape[-2])
    hide = np.zeros(diff.shape, bool)
    if causal:
        hide |= diff < 0
    if window is not None:
        left, right = window
        if left is not None:
            hide |= diff > left
        if right is not None:
            hide |= diff < -right
    return raw, hide, slope


def attn_backward(q, k, v, do, o, lse, scale=None, causal=False, window=None, softcap=None):
    """(dq, dk, dv) from o and lse of the forward pass."""
    f, kind = np.float32, q.dtype
    B, Hq, nq, d = q.shape
    Hk, nk = k.shape[1:3]
    sm = f(d**-0.5 if scale is None else scale)
    q, k, v, do, o = (x.astype(f) for x in (q, k, v, do, o))
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    rowsum = (do * o).sum(-1)
    for b in range(B):
        for hk in range(Hk):
            for hq in range(hk * (Hq // Hk), (hk + 1) * (Hq // Hk)):
                for c in range(0, nk, TN):
                    kt, vt = k[b, hk, c : c + TN], v[b, hk, c : c + TN]
                    for r in range(0, nq, TM):
                        qt, dot = q[b, hq, r : r + TM], do[b, hq, r : r + TM]
                        s, hide, slope = scores(qt, kt, r, c, scale, causal, window, softcap, nq, nk)
                        L = lse[b, hq, r : r + TM][:, None]
                        p = np.exp(np.where(hide, f(-np.inf), s) - np.where(np.isneginf(L), f(0), L))
                        dp = dot @ vt.T
                        ds = p * (dp - rowsum[b, hq, r : r + TM][:, None])
                        ds = ds * slope
                        pk, dsk = p.astype(kind).astype(f), ds.astype(kind).astype(f)
                        dv[b, hk, c : c + TN] += pk.T @ dot
                        dk[b, hk, c : c + TN] += sm * (dsk.T @ qt)
                        dq[b, hq, r : r + TM] += sm * (dsk @ kt)
    return dq.astype(kind), dk.astype(kind), dv.astype(kind)
