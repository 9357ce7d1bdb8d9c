"""The plain formula at the kernel's own precision: the error nobody could blame a kernel for.

Fixed as: inputs in the storage type; S, softmax and l in fp32; P rounded to the storage type; sums in fp32; O rounded.
Sums run over their index in order, one product after another, so that the anchor is the same number on every
machine: a BLAS would add in whatever order its kernels like.

Where the scale comes in is left open by that, and changes what is rounded. Three orders are usual (`ORDERS`):

    scores     scale (q.k)                    as FlashAttention and the ladder do; this one is shown and dumped
    queries    (scale q).k                    Q is scaled once, while it is loaded
    base_2     ln 2 ((scale log2(e) q).k)     the same in front of exp2

A kernel may choose, so the judge allows for the order that errs most. It matters where q.k is exact, as on the grid of
some cases: the first order then rounds a score once, the others round each of its d products. The second alone would
not do, as a scale of 1/sqrt(64) is a power of two and rounds nothing, which log2(e) never is. PyTorch's math
multiplies Q and K each by sqrt(scale): `tests/verify/test_factor.py` shows that this errs no more than the three.

The scaled Q stays in fp32 whatever the storage type, as PyTorch's math does, which widens first. Some kernels round it
back to 16 bits to feed it to tensor cores. No order of fp32 operations loses that much: half an ulp of the storage type
in every factor of a score. So it excuses nobody; it shows where scores are large, and not where the scale is a power
of two.
"""

import math

import numpy as np

from verify.plain_options import F, Options, visible

__all__ = [
    "ORDERS", "F", "add_broadcast", "attention", "attention_backward", "heads", "resolve", "softmax", "visible",
]  # fmt: skip

ORDERS = ("scores", "queries", "base_2")


def resolve(scale, d):
    """The scale that applies: 1/sqrt(d) unless one is given."""
    return 1 / math.sqrt(d) if scale is None else float(scale)


def heads(problem, options=None):
    """Yield, for each batch and query head, (b, h, Q, K, V, seen) with fp32 matrices and a (Nq, Nk) mask."""
    s, options = problem.shape, options or Options(problem)
    Q, K, V = (x.astype(F) for x in (problem.Q, problem.K, problem.V))
    for b in range(s.B):
        for h in range(s.Hq):
            h_k = h // (s.Hq // s.Hk)
            yield b, h, Q[b, h], K[b, h_k], V[b, h_k], options.seen(b, h)


def attention(problem, order=ORDERS[0]):
    """The plain formula, forward.

    Parameters
    ----------
    problem : Problem
        With any options.
    order : str
        Where the scale comes in, one of `ORDERS`.

    Returns
    -------
    O : ndarray (B, Hq, Nq, dv), storage type
    lse : ndarray (B, Hq, Nq), float32, natural logarithm
    """
    s, stored = problem.shape, problem.Q.dtype
    scale, options = F(resolve(problem.options.get("scale"), s.d)), Options(problem)
    O = np.zeros((s.B, s.Hq, s.Nq, s.dv), stored)
    lse = np.full((s.B, s.Hq, s.Nq), -np.inf, F)
    with np.errstate(all="ignore"):  # NaN and inf in the inputs are cases, not accidents
        for b, h, Q, K, V, seen in heads(problem, options):
            Q, factor = _scaled(Q, scale, order)
            P, lse[b, h] = softmax(options.changed(b, h, _scores(Q, K, factor)), seen)
            Z = options.factor(b, h)
            O[b, h] = _product((P * Z).astype(stored).astype(F), V, seen & (Z > 0)).astype(stored)
    return O, lse


def attention_backward(problem, O, lse, dO, order=ORDERS[0]):
    """The plain formula, backward, from the same roundings: P and dS are cast to the storage type for products.

    Parameters
    ----------
    problem : Problem
    O, lse : ndarray
        As `attention` returns them.
    dO : ndarray (B, Hq, Nq, dv), storage type
    order : str
        Where the scale comes in, one of `ORDERS`; dK is a sum of Q's rows as they are scaled.

    Returns
    -------
    dQ, dK, dV : ndarray, storage type, of the shapes of Q, K and V
        A key head's gradient is the fp32 sum over the query heads that share it.
    dbias : ndarray, float32, of the shape of the bias; None without one
        Of dS before it is rounded for products, summed over what the bias was broadcast along.
    """
    s, stored = problem.shape, problem.Q.dtype
    scale, options = F(resolve(problem.options.get("scale"), s.d)), Options(problem)
    dQ = np.zeros(problem.Q.shape, F)
    dK, dV = np.zeros(problem.K.shape, F), np.zeros(problem.V.shape, F)
    bias = problem.options.get("bias")
    dbias = None if bias is None else np.zeros((1,) * (4 - np.ndim(bias)) + np.shape(bias), F)
    with np.errstate(all="ignore"):
        for b, h, Q, K, V, seen in heads(problem, options):
            h_k = h // (s.Hq // s.Hk)
            m = np.where(np.isneginf(lse[b, h]), 0, lse[b, h])[:, None]
            Q, factor = _scaled(Q, scale, order)
            S, Z = _scores(Q, K, factor), options.factor(b, h)
            P = np.where(seen, np.exp(options.changed(b, h, S) - m), 0)
            G = dO[b, h].astype(F)
            D = _row_sum(G * O[b, h].astype(F))
            dP = np.where(Z > 0, Z * _scores(G, V, F(1)), 0)
            dS = np.where(seen, P * (dP - D[:, None]), 0)
            if dbias is not None:
                add_broadcast(dbias, b, h, dS)
            dS = np.where(seen, dS * options.slope(b, h, S), 0).astype(stored).astype(F)
            dV[b, h_k] += _product((P * Z).astype(stored).astype(F).T, G, (seen & (Z > 0)).T)
            dQ[b, h] = scale * _product(dS, K, seen)
            dK[b, h_k] += factor * _product(dS.T, Q, seen.T)
    gradients = dQ.astype(stored), dK.astype(stored), dV.astype(stored)
    return *gradients, None if bias is None else dbias.reshape(np.shape(bias))


def softmax(S, seen):
    """fp32 softmax over the keys a row sees: P (Nq, Nk) and natural-log lse (Nq,). A row without keys: 0 and -inf."""
    S = np.where(seen, S, F(-np.inf))
    m = S.max(axis=1, initial=-np.inf, keepdims=True)
    E = np.where(seen, np.exp(S - np.where(np.isneginf(m), F(0), m)), F(0))
    l = _row_sum(E)
    empty = l == 0
    P = np.where(empty[:, None], F(0), E / np.where(empty, F(1), l)[:, None])
    return P, m[:, 0] + np.log(l)


def _scaled(Q, scale, order):
    """Q as it enters q.k, and what is left to multiply that with."""
    if order == "queries":
        return scale * Q, F(1)
    if order == "base_2":
        return F(float(scale) * math.log2(math.e)) * Q, F(math.log(2))
    return Q, scale


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


def add_broadcast(total, b, h, part):
    """Add a head's (Nq, Nk) to its place in an array in which an axis of 1 stands for all."""
    part = part.sum(axis=0, keepdims=True) if total.shape[2] == 1 else part
    part = part.sum(axis=1, keepdims=True) if total.shape[3] == 1 else part
    total[b if total.shape[0] > 1 else 0, h if total.shape[1] > 1 else 0] += part


def _row_sum(X):
    """Sum along the last axis, in order."""
    total = np.zeros(X.shape[:-1], F)
    for k in range(X.shape[-1]):
        total += X[..., k]
    return total
