"""The truth: attention and its gradients in fp64, by the formula, with no tiling and nothing of ours imported.

Everything else in this project is judged by this file, so it shares no code with what it judges. Each option is
restated here as a formula on index arrays. Query rows are worked through in chunks, each against all the keys it can
see at once: memory grows with N, not N^2, and no running maximum or rescaling exists that could be wrong.

    s_ij = scale q_i . k_j,  then softcap: c tanh(s / c),  then + bias - slope |i - j|,  then masks
    O_i  = sum_j p_ij v_j,   p_ij = exp(s_ij - lse_i),     lse_i = log sum_j exp(s_ij)

Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.2.1; gradients as in Dao et al.,
"FlashAttention" (2022), appendix B.2; ALiBi: Press et al. (2022), section 3; softcap: Gemma 2 report (2024), section 2.
"""

import contextlib
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

CHUNK_BYTES = 8 << 20  # of one thread's score matrix: small enough for a cache, large enough for the products


def attention(
    Q, K, V, *, scale=None, causal=False, align="bottom_right", mask=None, bias=None, window=None, softcap=None,
    alibi_slopes=None, lengths_q=None, lengths_k=None, keep=None, dropout_p=0.0, rows=None, threads=None,
):  # fmt: skip
    """Attention in fp64.

    Parameters
    ----------
    Q : (B, Hq, Nq, d), K : (B, Hk, Nk, d), V : (B, Hk, Nk, dv)
        Any real dtype; Hq a multiple of Hk; query head h reads key head h // (Hq // Hk).
    scale : float, optional
        Factor of the scores, any finite number; 1/sqrt(d) if not given.
    causal : bool
        Query i sees keys j <= i. ``align`` says what i is: the row counted from the end of the keys
        ("bottom_right", row + Nk - Nq) or the row itself ("top_left"); window and ALiBi use the same i.
    mask : bool, broadcastable to (B, Hq, Nq, Nk), optional
        True where a key is seen.
    bias : real, broadcastable to (B, Hq, Nq, Nk), optional
        Added to the scores; -inf hides a key.
    window : (left, right), optional
        Query i sees keys i - left ... i + right, both included; None in a place is no bound.
    softcap : float > 0, optional
        Scores become softcap * tanh(s / softcap).
    alibi_slopes : (Hq,) or (B, Hq), optional
    lengths_q, lengths_k : (B,) of int, optional
        Rows and keys in use of each batch entry; later ones do not exist, and "bottom_right" counts from these.
    keep, dropout_p : bool broadcastable to (B, Hq, Nq, Nk), float in [0, 1]
        Weights are multiplied by keep / (1 - dropout_p); lse is not affected.
    rows : 1-d int array, optional
        Compute these query rows only.
    threads : int, optional
        Rows are shared among so many threads; one for each core if not given.

    Returns
    -------
    O : (B, Hq, Nq, dv), lse : (B, Hq, Nq)
        float64, lse the natural logarithm. A row that sees no key: O = 0, lse = -inf. With ``rows``, len(rows) rows.

    Raises
    ------
    ValueError, TypeError
        One line that names the argument and what was expected.
    """
    p = _Problem(Q, K, V, scale, causal, align, mask, bias, window, softcap, alibi_slopes, lengths_q, lengths_k,
                 keep, dropout_p)  # fmt: skip
    rows = np.arange(p.Nq) if rows is None else _row_numbers(rows, p.Nq)
    O = np.zeros((p.B, p.Hq, len(rows), p.dv))
    lse = np.full((p.B, p.Hq, len(rows)), -np.inf)

    def work(b, h, at):
        c = _Chunk(p, b, h, rows[at])
        O[b, h, at], lse[b, h, at] = c.O, c.lse

    _for_each_chunk(p, len(rows), work, threads)
    return O, lse


def attention_backward(Q, K, V, dO, *, dlse=None, threads=None, bias=None, **options):
    """Gradients of sum(O * dO) + sum(lse * dlse) in fp64; options as for `attention`, without ``rows``.

    Parameters
    ----------
    dO : (B, Hq, Nq, dv)
    dlse : (B, Hq, Nq), optional
        Gradient that reaches lse; 0 if not given.

    Returns
    -------
    dQ, dK, dV : shapes of Q, K, V
        K and V summed over the query heads that read them. A row without keys contributes nothing.
    dbias : shape of bias, or None
        Summed over the axes along which the bias was broadcast.
    """
    p = _Problem(Q, K, V, bias=bias, **options)
    dO = _real("dO", dO)
    dlse = np.zeros((p.B, p.Hq, p.Nq)) if dlse is None else _real("dlse", dlse)
    for name, x, shape in (("dO", dO, (p.B, p.Hq, p.Nq, p.dv)), ("dlse", dlse, (p.B, p.Hq, p.Nq))):
        if x.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {x.shape}")
    dQ, dK, dV = np.zeros_like(p.Q), np.zeros_like(p.K), np.zeros_like(p.V)
    dbias = None if p.bias is None else np.zeros(p.bias.shape)
    lock = threading.Lock()  # several rows add to one dK, dV, dbias

    def work(b, h, at):
        c = _Chunk(p, b, h, np.arange(p.Nq)[at], gradients=True)
        dO_i = dO[b, h, at]
        dP = np.where(np.equal(c.dropped, 0), 0.0, dO_i @ c.V.T * c.dropped)  # V behind a dropped weight may be NaN
        D = (dO_i * c.O).sum(axis=1, keepdims=True)
        # d lse_i / d s_ij = p_ij, so a gradient of lse enters beside D.
        dS = np.where(c.seen, c.P * (dP - D + dlse[b, h, at][:, None]), 0.0)
        dV_j = _weigh((c.P * c.dropped).T, dO_i, c.seen.T)
        dT = dS * c.slope  # through the softcap, to the scaled product
        dQ[b, h, at] = p.scale * _weigh(dT, c.K, c.seen)
        dK_j = p.scale * _weigh(dT.T, c.Q, c.seen.T)
        with lock:
            dK[b, h // p.group, c.cols] += dK_j
            dV[b, h // p.group, c.cols] += dV_j
            if dbias is not None:
                _add_broadcast(dbias, b, h, at, c.cols, dS)

    _for_each_chunk(p, p.Nq, work, threads)
    return dQ, dK, dV, None if dbias is None else dbias.reshape(np.shape(bias))


class _Problem:
    """The checked arguments of one call."""

    def __init__(
        self, Q, K, V, scale=None, causal=False, align="bottom_right", mask=None, bias=None, window=None, softcap=None,
        alibi_slopes=None, lengths_q=None, lengths_k=None, keep=None, dropout_p=0.0,
    ):  # fmt: skip
        self.Q, self.K, self.V = _real("Q", Q), _real("K", K), _real("V", V)
        for name, x in (("Q", self.Q), ("K", self.K), ("V", self.V)):
            if x.ndim != 4:
                raise ValueError(f"{name}: expected shape (B, H, N, d), got {x.shape}")
        self.B, self.Hq, self.Nq, self.d = self.Q.shape
        _, self.Hk, self.Nk, self.dv = self.V.shape
        if self.K.shape != (self.B, self.Hk, self.Nk, self.d):
            want = (self.B, self.Hk, self.Nk, self.d)
            raise ValueError(f"K: expected shape {want}, by Q's batch and head dim and V's rest, got {self.K.shape}")
        if self.V.shape[0] != self.B:
            raise ValueError(f"V: expected batch {self.B}, got {self.V.shape[0]}")
        if self.d < 1 or self.dv < 1:
            raise ValueError(f"{'Q' if self.d < 1 else 'V'}: expected a head dim of at least 1, got 0")
        if self.Hk < 1 or self.Hq < 1 or self.Hq % self.Hk:
            raise ValueError(f"Q: expected a positive multiple of K's {self.Hk} heads, got {self.Hq}")
        self.group = self.Hq // self.Hk
        self.finite = all(np.isfinite(x).all() for x in (self.Q, self.K, self.V))
        self.scale = 1.0 / math.sqrt(self.d) if scale is None else _number("scale", scale)
        if align not in ("bottom_right", "top_left"):
            raise ValueError(f'align: expected "bottom_right" or "top_left", got {align!r}')
        self.lengths_q = _lengths("lengths_q", lengths_q, self.B, self.Nq)
        self.lengths_k = _lengths("lengths_k", lengths_k, self.B, self.Nk)
        self.offset = self.lengths_k - self.lengths_q if align == "bottom_right" else np.zeros(self.B, np.int64)
        left, right = _window(window)
        self.left, self.right = left, 0 if causal and (right is None or right > 0) else right
        if causal and right is not None and right < 0:
            raise ValueError(f"window: expected non-negative bounds, got {window}")
        self.softcap = None if softcap is None else _number("softcap", softcap)
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap: expected a positive number, got {softcap}")
        self.slopes = None
        if alibi_slopes is not None:
            slopes = _real("alibi_slopes", alibi_slopes)
            if slopes.shape not in ((self.Hq,), (self.B, self.Hq)):
                want = f"({self.Hq},) or ({self.B}, {self.Hq})"
                raise ValueError(f"alibi_slopes: expected shape {want}, got {slopes.shape}")
            self.slopes = np.broadcast_to(slopes, (self.B, self.Hq))
        self.mask, self.keep = self._scorelike("mask", mask, bool), self._scorelike("keep", keep, bool)
        self.bias = self._scorelike("bias", bias, np.float64)
        self.dropout_p = _number("dropout_p", dropout_p)
        if not 0 <= self.dropout_p <= 1:
            raise ValueError(f"dropout_p: expected a number in [0, 1], got {dropout_p}")
        if self.dropout_p and keep is None:
            raise ValueError("keep: expected the mask of weights to keep, since dropout_p is not 0")

    def _scorelike(self, name, x, dtype):
        """An option with the shape of the scores, as a 4-d array that still has its broadcast axes of length 1."""
        if x is None:
            return None
        x = np.asarray(x)
        if dtype is bool and x.dtype != bool:
            raise TypeError(f"{name}: expected booleans (true = attend), got {x.dtype}")
        x = x.astype(np.float64) if dtype is np.float64 else x
        want = (self.B, self.Hq, self.Nq, self.Nk)
        full = (1,) * (4 - x.ndim) + x.shape
        if len(full) != 4 or any(n not in (1, m) for n, m in zip(full, want, strict=True)):
            raise ValueError(f"{name}: expected a shape that broadcasts to {want}, got {x.shape}")
        return x.reshape(full)

    def part(self, x, b, h, rows, cols):
        """The part of an option that belongs to some rows and keys of one head; broadcast axes stay of length 1."""
        B, H, N, M = x.shape
        x = x[b if B > 1 else 0, h if H > 1 else 0]
        x = x[rows] if N > 1 else x
        return x[:, cols] if M > 1 else x


class _Chunk:
    """Some query rows of one head against every key they can see: weights, output, and what gradients need.

    Q (r, d), K (c, d), V (c, dv); seen (r, c) bool; P (r, c), the softmax; dropped (r, c) or a number, the factor of
    dropout; slope (r, c) or a number, the derivative of the softcap; O (r, dv); lse (r,); cols, a slice of the keys.
    """

    def __init__(self, p, b, h, rows, gradients=False):
        i = rows + p.offset[b]  # positions, aligned to the keys
        first = 0 if p.left is None or not len(i) else max(0, int(i.min()) - p.left)
        end = int(p.lengths_k[b])
        if p.right is not None and len(i):
            end = min(end, int(i.max()) + p.right + 1)
        self.cols = slice(min(first, max(end, 0)), max(end, 0))
        j = np.arange(self.cols.start, self.cols.stop)
        self.Q, self.K, self.V = p.Q[b, h, rows], p.K[b, h // p.group, self.cols], p.V[b, h // p.group, self.cols]

        S = np.matmul(p.scale * self.Q, self.K.T, out=_scratch(len(i), len(j)))
        self.slope = 1.0
        if p.softcap is not None:
            t = np.tanh(S / p.softcap)
            S, self.slope = p.softcap * t, 1.0 - t * t
        if p.slopes is not None:
            S -= p.slopes[b, h] * np.abs(i[:, None] - j)
        if p.bias is not None:
            S += p.part(p.bias, b, h, rows, self.cols)
        hidden = self._hidden(p, b, h, rows, i, j)
        if hidden is not None:
            S[hidden] = -np.inf  # whatever was there, NaN included
        m = S.max(axis=1, keepdims=True, initial=-np.inf)
        # Who sees what matters to gradients, and to products with something that is not finite.
        self.seen = None if p.finite and not gradients else ~np.isneginf(S)
        # A row without keys has m = -inf; any finite pivot gives it weights exp(-inf) = 0.
        S -= np.where(np.isneginf(m), 0.0, m)
        P = np.exp(S, out=S)
        l = P.sum(axis=1, keepdims=True)
        some = l != 0
        self._weights, self._sums = P, np.where(some, l, 1.0)
        self.dropped = 1.0
        weights, seen = P, self.seen
        if p.keep is not None:
            kept = p.part(p.keep, b, h, rows, self.cols)
            self.dropped = np.where(kept, 0.0 if p.dropout_p == 1 else 1.0 / (1.0 - p.dropout_p), 0.0)
            weights, seen = P * self.dropped, kept if seen is None else seen & kept
        self.O = (weights @ self.V if p.finite else _weigh(weights, self.V, seen)) / self._sums
        self.lse = np.where(some, m + np.log(self._sums), -np.inf)[:, 0]

    @property
    def P(self):
        """(r, c): the softmax."""
        return self._weights / self._sums

    def _hidden(self, p, b, h, rows, i, j):
        """(r, c): keys that no option lets through; None if every row sees every key of the chunk."""
        tests = []
        if p.right is not None and len(i) and len(j) and j[-1] > i.min() + p.right:
            tests.append(j > i[:, None] + p.right)
        if p.left is not None and len(i) and len(j) and j[0] < i.max() - p.left:
            tests.append(j < i[:, None] - p.left)
        if p.mask is not None:
            tests.append(~p.part(p.mask, b, h, rows, self.cols))
        if len(rows) and rows.max() >= p.lengths_q[b]:
            tests.append((rows >= p.lengths_q[b])[:, None])
        if not tests:
            return None
        hidden = np.zeros((len(i), len(j)), bool)
        for test in tests:
            hidden |= test
        return hidden


class _Own(threading.local):
    """What a thread keeps for itself."""

    buffer = np.empty(0)


_own = _Own()


def _scratch(rows, cols):
    """(rows, cols) of float64 that this thread uses again and again: fresh pages cost more than a pass over them."""
    if _own.buffer.size < rows * cols:
        _own.buffer = np.empty(rows * cols)
    return _own.buffer[: rows * cols].reshape(rows, cols)


def _weigh(W, X, seen):
    """W @ X in which an entry that is not seen contributes nothing, even where X holds inf or NaN (0 * NaN is NaN)."""
    bad = ~np.isfinite(X).all(axis=1)
    if not bad.any():
        return W @ X
    out = W[:, ~bad] @ X[~bad]
    for k in np.flatnonzero(bad):
        rows = slice(None) if seen is None else np.broadcast_to(seen, W.shape)[:, k]
        out[rows] += W[rows, k, None] * X[k]
    return out


def _add_broadcast(total, b, h, rows, cols, part):
    """Add (r, c) to its place in a 4-d array, summing over the axes that have length 1 there."""
    B, H, N, M = total.shape
    target = total[b if B > 1 else 0, h if H > 1 else 0]
    if N == 1:
        part, rows = part.sum(axis=0, keepdims=True), slice(None)
    if M == 1:
        part, cols = part.sum(axis=1, keepdims=True), slice(None)
    target[rows, cols] += part


def _for_each_chunk(p, n_rows, work, threads):
    """Call work(b, h, slice of the rows) for all of them, each thread's BLAS on one core."""
    step = max(1, min(512, CHUNK_BYTES // (8 * max(p.Nk, 1))))
    parts = [slice(r, min(r + step, n_rows)) for r in range(0, n_rows, step)]
    jobs = [(b, h, at) for b in range(p.B) for h in range(p.Hq) for at in parts]
    threads = min(threads or os.cpu_count() or 1, max(len(jobs), 1))

    def quietly(job):
        with np.errstate(all="ignore"):  # inf and NaN are data here
            work(*job)

    with _one_blas_thread() if threads > 1 else contextlib.nullcontext(), ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(quietly, job) for job in jobs]:
            done.result()


def _one_blas_thread():
    """BLAS on one thread while ours share the cores; without threadpoolctl, as it is."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        return contextlib.nullcontext()
    return threadpool_limits(1, "blas")


def _real(name, x):
    """``x`` as float64."""
    x = np.asarray(x)
    try:
        return x.astype(np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected real numbers, got {x.dtype}") from None


def _number(name, x):
    """``x`` as a finite float."""
    try:
        value = float(x)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number, got {x!r}") from None
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {x}")
    return value


def _window(window):
    """(left, right), each a non-negative int or None."""
    if window is None:
        return None, None
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window: expected (left, right), got {window!r}") from None
    for bound in (left, right):
        if bound is not None and (int(bound) != bound or bound < 0):
            raise ValueError(f"window: expected non-negative integers or None, got {window}")
    return left, right


def _lengths(name, lengths, B, N):
    """(B,) of int64; N everywhere if not given."""
    if lengths is None:
        return np.full(B, N, np.int64)
    lengths = np.asarray(lengths)
    if lengths.shape != (B,) or lengths.dtype.kind not in "iu":
        raise ValueError(f"{name}: expected {B} integers, got {lengths.dtype} of shape {lengths.shape}")
    if len(lengths) and (lengths.min() < 0 or lengths.max() > N):
        raise ValueError(f"{name}: expected lengths in 0 ... {N}, got {lengths.min()} ... {lengths.max()}")
    return lengths.astype(np.int64)


def _row_numbers(rows, Nq):
    """1-d int64 array of rows."""
    rows = np.asarray(rows)
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        raise ValueError(f"rows: expected a 1-d array of integers, got {rows.dtype} of shape {rows.shape}")
    if rows.size and (rows.min() < 0 or rows.max() >= Nq):
        raise ValueError(f"rows: expected row numbers in 0 ... {Nq - 1}, got {rows.min()} ... {rows.max()}")
    return rows.astype(np.int64)
