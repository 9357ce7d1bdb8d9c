"""Options in the plain formula, from definitions: who sees whom, what a score becomes, which weights are kept."""

import numpy as np

F = np.float32


def visible(
    Nq, Nk, causal=False, align="bottom_right", mask=None, window=None, bias=None, lengths_q=None, lengths_k=None
):  # fmt: skip
    """Which query sees which key, from the definition.

    Parameters
    ----------
    Nq, Nk : int
    causal : bool
    align : "bottom_right" or "top_left"
        Query r is at position r + Nk - Nq, or r, on the keys' axis, and sees keys up to there.
    mask : ndarray of bool, broadcastable to (..., Nq, Nk), optional
        True: attend.
    window : (left, right), optional
        Keys from position - left to position + right; None is no bound.
    bias : ndarray, broadcastable to (..., Nq, Nk), optional
        -inf hides a key.
    lengths_q, lengths_k : ndarray of int (B,), optional
        Rows and keys in use; the last row in use is at the last key in use, with bottom_right.

    Returns
    -------
    ndarray of bool (Nq, Nk), or (..., Nq, Nk) of mask, bias and lengths
    """
    position, j = positions(Nq, Nk, align, lengths_q, lengths_k), np.arange(Nk)
    seen = np.ones((Nq, Nk), bool)
    if causal:
        seen = seen & (j <= position)
    left, right = window or (None, None)
    if left is not None:
        seen = seen & (j >= position - left)
    if right is not None:
        seen = seen & (j <= position + right)
    if lengths_q is not None:
        seen = seen & (np.arange(Nq)[:, None] < _column(lengths_q))
    if lengths_k is not None:
        seen = seen & (j < _column(lengths_k))
    if bias is not None:
        seen = seen & ~np.isneginf(bias)
    return seen if mask is None else seen & np.asarray(mask, bool)


def positions(Nq, Nk, align="bottom_right", lengths_q=None, lengths_k=None):
    """Where each query stands on the keys' axis, (Nq, 1), or (B, 1, Nq, 1) with lengths."""
    rows = np.arange(Nq)[:, None]
    if align == "top_left":
        return rows
    return rows + (Nk if lengths_k is None else _column(lengths_k)) - (Nq if lengths_q is None else _column(lengths_q))


class Options:
    """The options of a problem, as arrays of a head.

    Attributes
    ----------
    count : int
        Roundings that they add to a score at most.
    kept_factor : float
        What dropout multiplies a weight with that it keeps, 1 / (1 - p); 1 without dropout.
    """

    def __init__(self, problem):
        s, given = problem.shape, problem.options
        full = s.B, s.Hq, s.Nq, s.Nk
        words = ("causal", "align", "mask", "window", "bias", "lengths_q", "lengths_k")
        told = {name: given[name] for name in words if given.get(name) is not None}
        self._seen = np.broadcast_to(visible(s.Nq, s.Nk, **told), full)
        where = {name: told[name] for name in ("align", "lengths_q", "lengths_k") if name in told}
        distance = np.abs(positions(s.Nq, s.Nk, **where) - np.arange(s.Nk))
        self._distance = np.broadcast_to(distance, (s.B, 1, s.Nq, s.Nk))
        slopes, bias, keep = (given.get(name) for name in ("alibi_slopes", "bias", "keep"))
        self._cap = given.get("softcap")
        self._slopes = None if slopes is None else np.broadcast_to(slopes, full[:2]).astype(F)
        self._bias = None if bias is None else np.broadcast_to(bias, full).astype(F)
        p = given.get("dropout_p") or 0.0
        self.kept_factor = 1.0 if p == 0 else 1 / (1 - p) if p < 1 else 0.0
        self._keep = None if keep is None or p == 0 else np.broadcast_to(keep, full)
        self.count = 5 * (self._cap is not None) + 2 * (self._slopes is not None) + (self._bias is not None)

    def seen(self, b, h):
        """Which query of a head sees which key, bool (Nq, Nk)."""
        return self._seen[b, h]

    def changed(self, b, h, S):
        """Scores after softcap, ALiBi and bias, in the type of S (Nq, Nk)."""
        kind = S.dtype.type
        if self._cap is not None:
            S = kind(self._cap) * np.tanh(S / kind(self._cap))
        if self._slopes is not None:
            S = S - kind(self._slopes[b, h]) * self._distance[b, 0].astype(kind)
        return S if self._bias is None else S + self._bias[b, h].astype(kind)

    def slope(self, b, h, S):
        """The derivative of `changed` at S: that of the softcap."""
        if self._cap is None:
            return S.dtype.type(1)
        return 1 - np.square(np.tanh(S / S.dtype.type(self._cap)))

    def size(self, b, h):
        """What is added to the scores, in magnitude, (Nq, Nk); -inf, which hides, counts for nothing."""
        penalty = 0 if self._slopes is None else np.abs(self._slopes[b, h]) * self._distance[b, 0]
        bias = 0 if self._bias is None else np.abs(self._bias[b, h])
        return penalty + np.where(np.isfinite(bias), bias, 0)

    def factor(self, b, h):
        """What dropout multiplies the weights with, fp32 (Nq, Nk), or 1."""
        return F(1) if self._keep is None else np.where(self._keep[b, h], F(self.kept_factor), F(0))


def _column(lengths):
    """(B,) as (B, 1, 1, 1)."""
    return np.asarray(lengths)[:, None, None, None]
