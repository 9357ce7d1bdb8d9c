"""The plain formula at the kernel's own precision: the error nobody could blame a kernel for.

Fixed as: inputs in the storage type; S, softmax and l in fp32; P rounded to the storage type; sums in fp32; O rounded.
Sums run over their index in order, one product after another, so that the anchor is the same number on every
machine: a BLAS would add in whatever order its kernels like.
"""

import math

import numpy as np

F = np.float32


def visible(Nq, Nk, causal=False, align="bottom_right", mask=None):
    """Which query sees which key, from the definition.

    Parameters
    ----------
    Nq, Nk : int
    causal : bool
    align : "bottom_right" or "top_left"
        Query r is at position r + Nk - Nq, or r, on the keys' axis, and sees keys up to there.
    mask : ndarray of bool, broadcastable to (..., Nq, Nk), optional
        True: attend.

    Returns
    -------
    ndarray of bool (Nq, Nk), or (..., Nq, Nk) of the mask
    """
    i, j = np.arange(Nq)[:, None], np.arange(Nk)
    shift = Nk - Nq if align == "bottom_right" else 0
    seen = j <= i + shift if causal else np.ones((Nq, Nk), bool)
    return seen if mask is None else seen & np.asarray(mask, bool)


def resolve(scale, d):
    """The scale that applies: 1/sqrt(d) unless one is given."""
    return 1 / math.sqrt(d) if scale is None else float(scale)


def heads(problem):
    """Yield, for each batch and query head, (b, h, Q, K, V, seen) with fp32 matrices and a (Nq, Nk) mask."""
    s = problem.shape
    options = {name: problem.options.get(name) for name in ("causal", "align", "mask")}
    options["align"] = options["align"] or "bottom_right"
    seen = np.broadcast_to(visible(s.Nq, s.Nk, **options), (s.B, s.Hq, s.Nq, s.Nk))
    Q, K, V = (x.astype(F) for x in (problem.Q, problem.K, problem.V))
    for b in range(s.B):
        for h in range(s.Hq):
            h_k = h // (s.Hq // s.Hk)
            yield b, h, Q[b, h], K[b, h_k], V[b, h_k], seen[b, h]


def attention(problem):
    """The plain formula, forward.

    Parameters
    ----------
    problem : Problem
        Options scale, causal, align and mask.

    Returns
    -------
    O : ndarray (B, Hq, Nq, dv), storage type
    lse : ndarray (B, Hq, Nq), float32, natural logarithm
    """
    s, stored = problem.shape, problem.Q.dtype
    scale = F(resolve(problem.options.get("scale"), s.d))
    O = np.zeros((s.B, s.Hq, s.Nq, s.dv), stored)
    lse = np.full((s.B, s.Hq, s.Nq), -np.inf, F)
    with np.errstate(all="ignore"):  # NaN and inf in the inputs are cases, not accidents
        for b, h, Q, K, V, seen in heads(problem):
            P, lse[b, h] = softmax(_scores(Q, K, scale), seen)
            O[b, h] = _product(P.astype(stored).astype(F), V, seen).astype(stored)
    return O, lse


def attention_backward(problem, O, lse, dO):
    """The plain formula, backward, from the same roundings: P and dS are cast to the storage type for products.

    Parameters
    ----------
    problem : Problem
    O, lse : ndarray
        As `attention` returns them.
    dO : ndarray (B, Hq, Nq, dv), storage type

    Returns
    -------
    dQ, dK, dV : ndarray, storage type, of the shapes of Q, K and V
        A key head's gradient is the fp32 sum over the query heads that share it.
    """
    s, stored = problem.shape, problem.Q.dtype
    scale = F(resolve(problem.options.get("scale"), s.d))
    dQ = np.zeros(problem.Q.shape, F)
    dK, dV = np.zeros(problem.K.shape, F), np.zeros(problem.V.shape, F)
    with np.errstate(all="ignore"):
        for b, h, Q, K, V, seen in heads(problem):
            h_k = h // (s.Hq // s.Hk)
            m = np.where(np.isneginf(lse[b, h]), 0, lse[b, h])[:, None]
            P = np.where(seen, np.exp(_scores(Q, K, scale) - m), 0)
            G = dO[b, h].astype(F)
            D = _row_sum(G * O[b, h].astype(F))
            dS = np.where(seen, P * (_scores(G, V, F(1)) - D[:, None]), 0).astype(stored).astype(F)
            dV[b, h_k] += _product(P.astype(stored).astype(F).T, G, seen.T)
            dQ[b, h] = scale * _product(dS, K, seen)
            dK[b, h_k] += scale * _product(dS.T, Q, seen.T)
    return dQ.astype(stored), dK.astype(stored), dV.astype(stored)


def softmax(S, seen):
    """fp32 softmax over the keys a row sees: P (Nq, Nk) and natural-log lse (Nq,). A row without keys: 0 and -inf."""
    S = np.where(seen, S, F(-np.inf))
    m = S.max(axis=1, initial=-np.inf, keepdims=True)
    E = np.where(seen, np.exp(S - np.where(np.isneginf(m), F(0), m)), F(0))
    l = _row_sum(E)
    empty = l == 0
    P = np.where(empty[:, None], F(0), E / np.where(empty, F(1), l)[:, None])
    return P, m[:, 0] + np.log(l)


def _scores(Q, K, scale):
    """scale Q K^T, the products of a pair added in order."""
    S = np.zeros((Q.shape[0], K.shape[0]), F)
    for k in range(Q.shape[1]):
        S += Q[:, k, None] * K[None, :, k]
    return S * scale


def _product(P, V, seen):
    """P V over the keys that are seen, added in order: a weight of 0 would not stop a NaN."""
    O = np.zeros((P.shape[0], V.shape[1]), F)
    wild = ~np.isfinite(V).all(axis=1)
    for j in range(V.shape[0]):
        term = P[:, j, None] * V[j]
        O += np.where(seen[:, j, None], term, F(0)) if wild[j] else term
    return O


def _row_sum(X):
    """Sum along the last axis, in order."""
    total = np.zeros(X.shape[:-1], F)
    for k in range(X.shape[-1]):
        total += X[..., k]
    return total
