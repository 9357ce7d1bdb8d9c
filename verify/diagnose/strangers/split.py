"""Split keys, each part by itself, and a merge by the logarithms of their sums: decoding with grouped heads."""

import numpy as np

CHUNK = 96


def attn(query, key, value, softmax_scale=None, is_causal=False, lengths_q=None, lengths_k=None, align="bottom_right"):
    """query (B, Hq, Sq, D); key, value (B, Hk, Sk, D); returns (out, lse)."""
    B, Hq, Sq, D = query.shape
    Hk, Sk = key.shape[1:3]
    g = Hq // Hk
    softmax_scale = D**-0.5 if softmax_scale is None else softmax_scale
    out = np.zeros((B, Hq, Sq, value.shape[-1]), query.dtype)
    lse = np.full((B, Hq, Sq), -np.inf, np.float32)
    for b in range(B):
        n_q = Sq if lengths_q is None else int(lengths_q[b])
        n_k = Sk if lengths_k is None else int(lengths_k[b])
        for kv in range(Hk):
            qs = query[b, kv * g : (kv + 1) * g, :n_q].astype(np.float32)
            parts = []
            for start in range(0, n_k, CHUNK):
                end = min(start + CHUNK, n_k)
                shift = n_k - n_q if align == "bottom_right" else 0
                keys, values = key[b, kv, start:end], value[b, kv, start:end]
                parts.append(one_part(qs, keys, values, np.float32(softmax_scale), start, shift, is_causal))
            if parts:
                o, s = merge(*(np.stack(x) for x in zip(*parts, strict=True)))
                out[b, kv * g : (kv + 1) * g, :n_q] = o.astype(query.dtype)
                lse[b, kv * g : (kv + 1) * g, :n_q] = s
    return out, lse


def one_part(qs, k, v, scale, start, shift, is_causal):
    """Attention to one chunk, divided by its own sum; that sum, and the maximum it is counted from."""
    scores = np.einsum("gqd,kd->gqk", qs, k.astype(np.float32)) * scale
    if is_causal:
        q_pos, k_pos = np.arange(qs.shape[1])[:, None] + shift, np.arange(len(k)) + start
        scores = np.where(k_pos <= q_pos, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    e = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = e.sum(axis=-1, keepdims=True)
    weights = e / np.where(total == 0, 1, total)
    return (
        np.einsum("gqk,kd->gqd", weights.astype(v.dtype).astype(np.float32), v.astype(np.float32)),
        total[..., 0],
        top[..., 0],
    )


def merge(parts, totals, tops):
    """Parts (n, g, q, d) weighed by their share of the sum."""
    top = tops.max(axis=0)
    base = np.where(np.isfinite(top), top, 0)
    share = totals * np.exp(tops - base)
    total = share.sum(axis=0)
    weight = share / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        return (parts * weight[..., None]).sum(axis=0), base + np.log(total)
