"""The score matrix whole, (batch, length, heads, dim) inside, every option as an additive term; and its gradients."""

import numpy as np

F = np.float32


def additive(q, k, causal, window, mask, bias, alibi_slopes, lengths_q, lengths_k):
    """What is added to the scores, (b, h, i, j): -inf hides."""
    nb, nq, nh, _ = q.shape
    nk = k.shape[1]
    q_len = np.full(nb, nq) if lengths_q is None else lengths_q
    k_len = np.full(nb, nk) if lengths_k is None else lengths_k
    i = np.arange(nq)[None, None, :, None] + (k_len - q_len)[:, None, None, None]
    j = np.arange(nk)[None, None, None, :]
    term = np.zeros((nb, nh, nq, nk), F)
    if alibi_slopes is not None:
        term = term - np.asarray(alibi_slopes, F)[None, :, None, None] * np.abs(i - j)
    if bias is not None:
        term = term + bias
    hidden = np.zeros(term.shape, bool)
    if causal:
        hidden |= j > i
    if window is not None:
        left, right = window
        if left is not None:
            hidden |= j < i - left
        if right is not None:
            hidden |= j > i + right
    if mask is not None:
        hidden |= ~mask
    hidden |= (j >= k_len[:, None, None, None]) | (np.arange(nq)[None, None, :, None] >= q_len[:, None, None, None])
    return np.where(hidden, F(-np.inf), term)


def probabilities(q, k, scale, softcap, term):
    """Weights and the logarithm of their sum."""
    rep = q.shape[2] // k.shape[2]
    raw = np.einsum("bihd,bjhd->bhij", q, np.repeat(k, rep, axis=2)) * scale
    s = raw if softcap is None else softcap * np.tanh(raw / softcap)
    s = s + term
    big = s.max(axis=-1, keepdims=True, initial=-np.inf)
    big = np.where(np.isneginf(big), F(0), big)
    w = np.exp(s - big)
    z = w.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return w / np.where(z == 0, F(1), z), (big + np.log(z))[..., 0], raw


def attn(
    q,
    k,
    v,
    scale=None,
    causal=False,
    window=None,
    softcap=None,
    alibi_slopes=None,
    mask=None,
    bias=None,
    lengths_q=None,
    lengths_k=None,
    keep=None,
    dropout_p=0.0,
):
    """Arrays as (batch, heads, length, dim); returns (o, lse)."""
    store = q.dtype
    q, k, v = (x.transpose(0, 2, 1, 3).astype(F) for x in (q, k, v))
    scale = F(q.shape[-1] ** -0.5 if scale is None else scale)
    term = additive(q, k, causal, window, mask, bias, alibi_slopes, lengths_q, lengths_k)
    p, lse, _ = probabilities(q, k, scale, None if softcap is None else F(softcap), term)
    if keep is not None:
        p = np.where(keep, p / F(1 - dropout_p), F(0))
    v = np.repeat(v, q.shape[2] // v.shape[2], axis=2)
    o = np.einsum("bhij,bjhd->bihd", p.astype(store).astype(F), v)
    return o.transpose(0, 2, 1, 3).astype(store), lse.astype(F)


def attn_backward(
    q,
    k,
    v,
    do,
    scale=None,
    causal=False,
    window=None,
    softcap=None,
    alibi_slopes=None,
    mask=None,
    bias=None,
    lengths_q=None,
    lengths_k=None,
    keep=None,
    dropout_p=0.0,
):
    """(dq, dk, dv), everything computed again."""
    store = q.dtype
    q, k, v, do = (x.transpose(0, 2, 1, 3).astype(F) for x in (q, k, v, do))
    scale = F(q.shape[-1] ** -0.5 if scale is None else scale)
    cap = None if softcap is None else F(softcap)
    term = additive(q, k, causal, window, mask, bias, alibi_slopes, lengths_q, lengths_k)
    p, _, raw = probabilities(q, k, scale, cap, term)
    rep = q.shape[2] // k.shape[2]
    kr, vr = np.repeat(k, rep, axis=2), np.repeat(v, rep, axis=2)
    drop = F(1) if keep is None else np.where(keep, F(1) / F(1 - dropout_p), F(0))
    dp = np.einsum("bihd,bjhd->bhij", do, vr) * drop
    dv = np.einsum("bhij,bihd->bjhd", p * drop, do)
    delta = (p * dp).sum(axis=-1, keepdims=True)
    ds = p * (dp - delta)
    if cap is not None:
        ds = ds * (1 - np.tanh(raw / cap) ** 2)
    dq = np.einsum("bhij,bjhd->bihd", ds, kr) * scale
    dk = np.einsum("bhij,bihd->bjhd", ds, q) * scale
    nb, nk, nh, _ = dk.shape
    dk = dk.reshape(nb, nk, nh // rep, rep, -1).sum(axis=3)
    dv = dv.reshape(nb, nk, nh // rep, rep, -1).sum(axis=3)
    return tuple(x.transpose(0, 2, 1, 3).astype(store) for x in (dq, dk, dv))
