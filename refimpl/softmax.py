"""Softmax of a row: in three sweeps, at once, in two sweeps, and as a merge of parts in any order.

Scores S are (..., Nk). m (maximum), l (sum of exponentials) and lse are columns (..., 1), so that they
broadcast against scores and outputs as the papers' diag(.) does. A score of -inf is a key that is not
there.
"""

from typing import NamedTuple

import numpy as np

from refimpl.tiling import spans


class State(NamedTuple):
    """What is known of a row after some of its keys: maximum, sum of exp(s - m), and O = sum of exp(s - m) v.

    `m` and `l` are (..., 1), `O` is (..., dv) and not yet divided by l. With `merge` and `identity` the
    states form a commutative monoid, which is why keys may be visited in tiles, in any order, on any
    machine.
    """

    m: np.ndarray
    l: np.ndarray
    O: np.ndarray


def identity(shape, dtype=np.float64):
    """Return the state of rows that have seen no key: m = -inf, l = 0, O = 0 of the given shape (..., dv)."""
    column = (*shape[:-1], 1)
    return State(np.full(column, -np.inf, dtype), np.zeros(column, dtype), np.zeros(shape, dtype))


def pivot(m):
    """Return what to subtract before exp: m, or 0 for a row with no key yet, as -inf - (-inf) is NaN."""
    return np.where(m == -np.inf, 0, m)


def rowmax(S):
    """Return the maximum of each row as a column (..., 1): -inf if there are no keys, NaN if one is NaN."""
    return S.max(axis=-1, keepdims=True, initial=-np.inf)


def rowsum(P):
    """Return the sum of each row as a column (..., 1)."""
    return P.sum(axis=-1, keepdims=True)


def merge(a, b):
    """Join what two disjoint sets of keys say about the same rows.

    Parameters
    ----------
    a, b : State
        Of equal shapes and dtype. The O of a part without keys (m = -inf) is not read: it may hold anything.

    Returns
    -------
    State
        m = max(a.m, b.m); l and O are the sums of both, each rescaled by exp(its m - m), which is at most 1.

    Source
    ------
    Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", section 3.1, equation 4, where it
    joins (m, l); Dao et al. 2022, "FlashAttention", section 3.1, where O goes along.
    """
    m = np.maximum(a.m, b.m)
    with np.errstate(over="ignore", invalid="ignore"):  # maxima further apart than a float reaches: weight 0
        alpha, beta = np.exp(a.m - pivot(m)), np.exp(b.m - pivot(m))
        O_a = np.where(a.m == -np.inf, 0, alpha * a.O)
        O_b = np.where(b.m == -np.inf, 0, beta * b.O)
        return State(m, alpha * a.l + beta * b.l, O_a + O_b)


def from_output(O, lse):
    """Return the state of a finished part, from O (..., dv) and natural-log lse (..., 1): m = lse, l = 1.

    An empty part (lse = -inf) has l = 0.
    """
    return State(lse, np.where(lse == -np.inf, 0, np.ones_like(lse)), O)


def finish(state):
    """Divide once: return O (..., dv) and natural-log lse (..., 1). A row without keys gives 0 and -inf."""
    m, l, O_acc = state
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(l == 0, 0, O_acc / l), m + np.log(l)


def weigh(P, V, seen, Z=1.0):
    """Return (Z * P) V, summed over the keys that a row sees.

    A weight of 0 does not hide a value: 0 x NaN is NaN. So the keys whose V is not finite are left out of the
    product and added row by row, to those rows alone that see them.

    Parameters
    ----------
    P : ndarray (n, k)
        Weights, 0 where hidden.
    V : ndarray (k, dv)
        Values, NaN and inf allowed.
    seen : ndarray of bool (n, k), or True
        Which row sees which key.
    Z : ndarray, broadcast to (n, k)
        Factors of dropout; a key of factor 0 counts as not seen.

    Returns
    -------
    ndarray (n, dv)
    """
    P = Z * P
    wild = ~np.isfinite(V).all(axis=1)
    if not wild.any():
        return P @ V
    seen = np.broadcast_to(seen & (Z != 0), P.shape)
    out = P @ np.where(wild[:, None], 0, V)
    for k in np.flatnonzero(wild):
        out = out + np.where(seen[:, k, None], P[:, k, None] * V[k], 0)
    return out


def safe(S):
    """Softmax of whole rows: the definition, with the maximum taken out so that exp cannot overflow.

    Parameters
    ----------
    S : ndarray (..., Nk)
        Scores in natural-log units.

    Returns
    -------
    P : ndarray (..., Nk)
        Rows sum to 1; a row without keys is all 0.
    lse : ndarray (..., 1)
        log of the sum of exp(S); -inf for a row without keys.
    """
    m = rowmax(S)
    E = np.exp(S - pivot(m))
    return finish(State(m, rowsum(E), E))


def three_pass(S, Bc):
    """Softmax in tiles of Bc keys as a memory-bound kernel would do it: S is read three times.

    Parameters, returns: as `safe`, and the tile width Bc.
    """
    m, l, _ = identity(S.shape, S.dtype)
    P = np.empty_like(S)
    for cols in spans(S.shape[-1], Bc):
        m = np.maximum(m, rowmax(S[..., cols]))
    for cols in spans(S.shape[-1], Bc):
        l = l + rowsum(np.exp(S[..., cols] - pivot(m)))
    for cols in spans(S.shape[-1], Bc):
        P[..., cols] = np.exp(S[..., cols] - pivot(m)) / np.where(l == 0, 1, l)
    with np.errstate(divide="ignore"):
        return P, m + np.log(l)


def online(S, Bc):
    """Softmax in tiles of Bc keys with maximum and sum in one sweep: S is read twice.

    Parameters, returns: as `three_pass`.

    Source
    ------
    Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3.
    """
    m, l, _ = identity(S.shape, S.dtype)
    P = np.empty_like(S)
    for cols in spans(S.shape[-1], Bc):
        m_new = np.maximum(m, rowmax(S[..., cols]))
        alpha = np.exp(m - pivot(m_new))
        l = alpha * l + rowsum(np.exp(S[..., cols] - pivot(m_new)))
        m = m_new
    for cols in spans(S.shape[-1], Bc):
        P[..., cols] = np.exp(S[..., cols] - pivot(m)) / np.where(l == 0, 1, l)
    with np.errstate(divide="ignore"):
        return P, m + np.log(l)
