"""The fp64 truth: attention and its gradients by definition, untiled, sharing no code with what it judges.

    s_ij  = scale q_i . k_j, then softcap c tanh(s / c), then + bias - slope |i - j|
    p_ij  = exp(s_ij) / sum_j exp(s_ij), over the visible keys
    O_i   = sum_j p_ij v_j,    lse_i = log sum_j exp(s_ij)

Each option is restated here as a formula on index arrays. Query rows come in chunks, each with all its keys:
memory grows with N, not N^2, and there is no running maximum and no rescaling that could be wrong.

Source: Vaswani et al. 2017, section 3.2.1; gradients: Dao et al. 2022 (FlashAttention), appendix B.2; ALiBi:
Press et al. 2022, section 3; softcap: Gemma 2 report 2024, section 2.
"""

import math
import os
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from threading import Lock, local

import numpy as np

try:
    from threadpoolctl import threadpool_limits
except ImportError:  # then BLAS shares each product among its threads, and we start none
    threadpool_limits = None

CHUNK = 1 << 22  # most scores in a chunk: 32 MiB for each thread
ROWS = 512  # most rows in a chunk: the products gain little from more
BLOCK = 1 << 17  # scores that go through the softmax at a time: 1 MiB, which a cache holds, in few calls
SMALL = 64.0  # scores up to this size need no maximum subtracted
LARGE = 1e250  # from this size on V meets weights that are normalised already: exp(SMALL) times it may overflow


def attention(Q, K, V, *, scale=None, causal=False, align="bottom_right", mask=None, bias=None, window=None,
              softcap=None, alibi_slopes=None, lengths_q=None, lengths_k=None, keep=None, dropout_p=0.0,
              rows=None, threads=None):
    """Attention in fp64.

    NaN and inf travel by IEEE arithmetic over the visible keys: a hidden key reaches nothing, and a visible
    V of NaN reaches the row even where its weight is so small that it is 0. A score of -inf hides its key.

    Parameters
    ----------
    Q, K, V : array_like (B, Hq, Nq, d), (B, Hk, Nk, d), (B, Hk, Nk, dv)
        Of any real dtype. Query head h reads K/V head h // (Hq // Hk). B, Nq and Nk may be 0.
    scale : float, optional
        Finite, of any sign; 1/sqrt(d) if None.
    causal : bool
        The row at position i sees key j iff j <= i.
    align : "bottom_right" or "top_left"
        What position i is, for causal, window and ALiBi: row + Nk - Nq (with lengths, row + lengths_k -
        lengths_q), or the row itself.
    mask, bias, keep : array_like, broadcast to (B, Hq, Nq, Nk), optional
        mask: bool, true = attend. bias: added to the scores; -inf hides a key. keep: bool, see dropout_p.
    window : (left, right), optional
        Visible are i - left <= j <= i + right, both ends included; None for a number is no bound.
    softcap, alibi_slopes : positive float, array_like (Hq,) or (B, Hq), optional
    lengths_q, lengths_k : array_like of int (B,), optional
        How many rows and keys of a batch entry exist; rows beyond see nothing, keys beyond are hidden.
    dropout_p : float in [0, 1]
        Weights become p keep / (1 - dropout_p); lse is unaffected.
    rows : array_like of int (R,), optional
        Compute these query rows alone.
    threads : int, optional
        Threads that share the rows; one for each core, at most 16, if None.

    Returns
    -------
    O : ndarray of float64 (B, Hq, Nq or R, dv)
        0 in a row that sees no key.
    lse : ndarray of float64 (B, Hq, Nq or R)
        Natural logarithm; -inf in such a row.

    Raises
    ------
    ValueError, TypeError
        An argument has a wrong shape, range or type: one line that names it and says what was expected.
    """
    case = _Case(**locals())
    O = np.zeros((case.B, case.Hq, len(case.rows), case.dv))
    lse = np.full(O.shape[:3], -np.inf)

    def work(b, h, at):
        w = case.weights(b, h, case.rows[at], late=True)
        if w is not None:
            O[b, h, at] = _product(case.drop(w.P, w.kept), w.V, w.kept) / w.l
            lse[b, h, at] = w.lse

    case.run(work, case.threads)
    return O, lse


def attention_backward(Q, K, V, dO, *, scale=None, causal=False, align="bottom_right", mask=None, bias=None,
                       window=None, softcap=None, alibi_slopes=None, lengths_q=None, lengths_k=None,
                       keep=None, dropout_p=0.0, rows=None, threads=None, dlse=None):
    """Gradients of sum(O dO) + sum(lse dlse) in fp64.

    Parameters
    ----------
    Q, K, V and the options
        As for `attention`, with the same errors; `threads` is left to BLAS. With `rows`, the sums run over
        those rows alone.
    dO, dlse : array_like (B, Hq, Nq or R, dv), (B, Hq, Nq or R)
        dlse None is 0.

    Returns
    -------
    dQ, dK, dV : ndarray of float64 (B, Hq, Nq or R, d), shape of K, shape of V
        dK and dV are summed over the query heads that read a head. A row without keys gets 0 and adds 0.
    dbias : ndarray of float64, shape of bias; None without a bias
        Summed over the axes along which the bias was broadcast.
    """
    case = _Case(**{name: x for name, x in locals().items() if name not in ("dO", "dlse")})
    per_row = (case.B, case.Hq, len(case.rows))
    dO = _real("dO", dO, (*per_row, case.dv))
    dlse = _real("dlse", np.zeros(per_row) if dlse is None else dlse, per_row).astype(np.float64)
    dQ, dK, dV = np.zeros((*per_row, case.d)), np.zeros(case.K.shape), np.zeros(case.V.shape)
    dbias = None if bias is None else np.zeros((1,) * (4 - np.ndim(bias)) + np.shape(bias))

    def work(b, h, at):
        rows, hk = case.rows[at], h // case.group
        w = case.weights(b, h, rows)
        if w is None:
            return
        dO_i = dO[b, h, at].astype(np.float64)
        dV[b, hk, w.keys] += _product(_T(case.drop(w.P, w.kept)), dO_i, _T(w.kept))
        dS = _hide(case.drop(dO_i @ _T(w.V), w.kept), w.see)  # dP, so far
        D = np.einsum("brn,brn->br", w.P, dS)
        dS -= (D - dlse[b, h, at])[..., None]  # d lse_i / d s_ij = p_ij: dlse enters beside the row sums D
        dS *= w.P
        if dbias is not None:
            _add_broadcast(dbias, b, h, rows, w.keys, _hide(dS, w.see))
        dS = _hide(dS * (case.scale * w.cap_slope), w.see)
        dQ[b, h, at] = _product(dS, w.K, w.see)
        dK[b, hk, w.keys] += _product(_T(dS), w.Q, _T(w.see))

    case.run(work, 1)  # threads would add to dK, dV and dbias in any order
    return dQ, dK, dV, None if dbias is None else dbias.reshape(np.shape(bias))


# Of a chunk: P (batch, r, n), 0 where hidden; l (batch, r, 1), which O is still to be divided by; lse (batch, r);
# see, bool like P, or None if all is visible; kept, see less what dropout drops; keys, the slice of P's n keys;
# cap_slope, d softcap / ds; its Q, K, V.
_Weights = namedtuple("_Weights", "P l lse see kept keys cap_slope Q K V")


class _Case:
    """The checked arguments of a call; weights of a chunk: a slice b of the batch, one head h, some rows."""

    def __init__(self, Q, K, V, scale, causal, align, mask, bias, window, softcap, alibi_slopes, lengths_q,
                 lengths_k, keep, dropout_p, rows, threads):
        self.Q, self.K, self.V = (_real(name, x) for name, x in (("Q", Q), ("K", K), ("V", V)))
        for name, x in (("Q", self.Q), ("K", self.K), ("V", self.V)):
            if x.ndim != 4 or x.shape[1] == 0 or x.shape[3] == 0:
                raise ValueError(f"{name}: expected shape (B, H, N, d), H and d positive, got {x.shape}")
        self.B, self.Hq, self.Nq, self.d = self.Q.shape
        self.Hk, self.Nk, self.dv = self.V.shape[1:]
        _real("K", self.K, (self.B, *self.K.shape[1:3], self.d))
        _real("V", self.V, (*self.K.shape[:3], self.dv))
        self.group, rest = divmod(self.Hq, self.Hk)
        if rest:
            raise ValueError(f"Q: expected a multiple of K's {self.Hk} heads, got {self.Hq}")
        self.scale = 1 / math.sqrt(self.d) if scale is None else _number("scale", scale)
        self.softcap = None if softcap is None else _number("softcap", softcap, "above 0", lambda c: c > 0)
        if align not in ("bottom_right", "top_left"):
            raise ValueError(f"align: expected 'bottom_right' or 'top_left', got {align!r}")
        if window is not None and not (isinstance(window, tuple | list) and len(window) == 2):
            raise TypeError(f"window: expected (left, right) or None, got {window!r}")
        _integers("window", [bound for bound in window or () if bound is not None], None, np.inf)
        far = self.Nq + self.Nk  # as good as no bound
        self.left, right = (far if bound is None else min(bound, far) for bound in window or (None, None))
        self.right = 0 if causal else right  # a window never ends before causal does
        self.lengths_q, self.lengths_k = (
            np.full(self.B, N) if x is None else _integers(name, x, self.B, N)
            for name, x, N in (("lengths_q", lengths_q, self.Nq), ("lengths_k", lengths_k, self.Nk)))
        self.offset = (self.lengths_k - self.lengths_q) * (align == "bottom_right")
        scores = (self.B, self.Hq, self.Nq, self.Nk)
        self.mask, self.bias, self.keep = (
            None if x is None else _like_scores(name, x, kind, scores)
            for name, x, kind in (("mask", mask, bool), ("bias", bias, float), ("keep", keep, bool)))
        per_head = scores[:2] if np.ndim(alibi_slopes) == 2 else scores[1:2]
        self.slopes = None if alibi_slopes is None else np.broadcast_to(
            _real("alibi_slopes", alibi_slopes, per_head).astype(np.float64), scores[:2])
        p = _number("dropout_p", dropout_p, "from 0 to 1", lambda p: 0 <= p <= 1)
        if p > 0 and keep is None:
            raise ValueError(f"keep: expected an array of booleans, since dropout_p is {p}")
        self.keep_factor = 1 / (1 - p) if p < 1 else 0.0
        self.rows = np.arange(self.Nq) if rows is None else _integers("rows", rows, None, self.Nq - 1)
        threads = min(16, os.cpu_count() or 1) if threads is None else threads
        self.threads = int(_number("threads", threads, "of at least 1", lambda n: n >= 1))
        self.keys_of = lru_cache(maxsize=2)(partial(_keys_of, self.K, self.V))
        self.lock, self.own = Lock(), local()

    def run(self, work, threads):
        """Call work(b, h, at) for all chunks, `at` a slice of self.rows; threads have BLAS to themselves."""
        # Single batch entries, or many small ones that share the cost of a call.
        step = max(1, CHUNK // 4 // max(1, len(self.rows) * max(self.Nk, self.d, self.dv)))
        slabs = [slice(b, min(b + step, self.B)) for b in range(0, self.B, step)]
        if threadpool_limits is None or self.B * self.Hq * len(self.rows) * self.Nk <= CHUNK // 4:
            threads = 1  # more would not pay
        share = len(slabs) * self.Hq * len(self.rows) // threads
        step = max(16, min(ROWS, CHUNK // max(1, self.Nk), share))
        chunks = [slice(r, r + step) for r in range(0, len(self.rows), step)]
        jobs = [(b, h, at) for b in slabs for h in range(self.Hq) for at in chunks]

        def quiet(job):
            with np.errstate(all="ignore"):  # NaN and inf are data here; each thread has its own setting
                work(*job)

        if threads > 1:
            with threadpool_limits(1, "blas"), ThreadPoolExecutor(threads) as pool:
                list(pool.map(quiet, jobs))  # a list, so that an error in a thread is raised here
        else:
            list(map(quiet, jobs))

    def weights(self, b, h, rows, late=False):
        """The _Weights of some rows of head h, with `late` times l if that may be; None if no key is in reach."""
        i = rows[:, None] + self.offset[b][:, None, None]
        first, end = max(0, i.min() - self.left), min(self.lengths_k[b].max(), i.max() + self.right + 1)
        if end <= first:
            return None
        keys, j = slice(first, end), np.arange(first, end)
        with self.lock:  # so that threads that start together don't all convert the same keys
            K, V, K_norm, V_most = self.keys_of(b.start, b.stop, h // self.group)
        Q, K, V = self.Q[b, h][:, rows].astype(np.float64), K[:, keys], V[:, keys]
        bias = None if self.bias is None else self.bias[b, h][:, rows, keys].astype(np.float64)
        shape = (len(Q), len(rows), len(j))

        see = None
        for test in (  # each an array, or False if all in reach would pass
            i.min() + self.right < j[-1] and j <= i + self.right,
            i.max() - self.left > j[0] and j >= i - self.left,
            self.lengths_k[b].min() <= j[-1] and j < self.lengths_k[b][:, None, None],
            self.lengths_q[b].min() <= rows.max() and rows[:, None] < self.lengths_q[b][:, None, None],
            self.mask is not None and self.mask[b, h][:, rows, keys],
            bias is not None and bias != -np.inf,
        ):
            if np.ndim(test):
                see = np.broadcast_to(test, shape) if see is None else see & test

        # By Cauchy and Schwarz no |scale q.k| is larger than the left side; a NaN there makes it False.
        small = abs(self.scale) * np.sqrt((Q * Q).sum(axis=-1).max()) * K_norm <= SMALL
        small = small and self.softcap is None and self.slopes is None and bias is None
        unit = 1.0 if _VECTOR_EXP else _STEPS  # of small scores
        S = np.matmul(Q * (self.scale * unit) if small else Q, _T(K), out=self.reused("scores", shape))
        if not small:
            S *= self.scale  # not Q, whose rounding would grow with the scores
        cap_slope = 1.0
        if self.softcap is not None:
            np.tanh(S / self.softcap, out=S)
            cap_slope = 1 - S * S
            S *= self.softcap
        if self.slopes is not None:
            S -= self.slopes[b, h][:, None, None] * np.abs(i - j)
        if bias is not None:
            S += bias
        if not small:
            _hide(S, see, -np.inf)
            see = np.not_equal(S, -np.inf)  # a score of -inf hides its key
            see = None if see.all() else see
        # A row of one key gives its value exactly; a weight that is NaN reaches neither hidden nor dropped keys.
        late = late and see is None and self.keep is None and len(j) > 1 and V_most < LARGE
        l, lse = _softmax(S, see, small, late, self.reused("scratch", (2, max(1, BLOCK // len(j)), len(j))))
        kept = see
        if self.keep is not None:  # at p = 1 nothing is
            kept = self.keep[b, h][:, rows, keys] & (self.keep_factor > 0) & (True if see is None else see)
        return _Weights(S, l, lse, see, kept, keys, cap_slope, Q, K, V)

    def reused(self, name, shape):
        """Return this thread's memory by name; new pages for each chunk would take a tenth of the time."""
        size = math.prod(shape)
        if getattr(self.own, name, np.empty(0)).size < size:
            setattr(self.own, name, np.empty(1 << (size - 1).bit_length()))  # room, for chunks may grow
        return getattr(self.own, name)[:size].reshape(shape)

    def drop(self, X, kept):
        """X keep / (1 - p); what is dropped becomes 0 whatever it was."""
        return X if self.keep is None else np.where(kept, X * self.keep_factor, 0.0)


def _keys_of(K, V, start, stop, hk):
    """Return K, V, the greatest norm of a key and V's greatest size, in fp64."""
    K, V = (x[start:stop, hk].astype(np.float64, order="C", copy=False) for x in (K, V))
    K_norm = np.sqrt(np.einsum("bnd,bnd->bn", K, K).max(initial=0.0))
    return K, V, K_norm, max(V.max(initial=0.0), -V.min(initial=0.0))


def _softmax(S, see, small, late, scratch):
    """Turn scores (batch, r, n) into weights, 0 where hidden; return l and lse.

    With `late` the weights are left times l, and l is 1 otherwise: fewer divisions, and no pass over the scores.
    """
    l, lse = np.ones((*S.shape[:-1], 1)), np.empty(S.shape[:-1])
    S_rows, l_rows, lse_rows = S.reshape(-1, S.shape[-1]), l.reshape(-1, 1), lse.reshape(-1, 1)
    hidden = None if see is None else ~see.reshape(S_rows.shape)
    step = scratch.shape[1]
    for at in (slice(r, r + step) for r in range(0, len(S_rows), step)):
        s, m = S_rows[at], 0.0
        if small and not _VECTOR_EXP:
            _exp_small(s, *scratch[:, : len(s)])
        else:
            if not small:
                m = s.max(axis=1, keepdims=True)
                s -= m  # NaN in a row without keys, all of which is hidden
            np.exp(s, out=s)
        if hidden is not None:
            s[hidden[at]] = 0.0
        total = s.sum(axis=1, keepdims=True)
        lse_rows[at] = m + np.log(total)
        if late:
            l_rows[at] = total
        else:
            s /= total
            if hidden is not None and not (total > 0).all():
                s[hidden[at]] = 0.0  # where neither a NaN in the row nor 0 / 0 must reach
    return l, lse


# NumPy takes np.exp eight numbers at a time with AVX-512 and one at a time elsewhere, which would be a quarter of
# the whole time. There small scores come in steps of ln 2 / 256: exp is 2^(n / 256), n the nearest integer, from a
# table, times exp of the rest by its series, of which 4e-17 is left out, scaled so that its first coefficient is 1.
_STEPS = 256 / math.log(2)
_EXP = np.lib.introspect.opt_func_info("^exp$", "float64").get("exp", {}).get("dd", {}).get("current", "")
_VECTOR_EXP = "AVX512" in _EXP or "V4" in _EXP  # its name before NumPy 2.4, and since
_TOP = math.ceil(SMALL * _STEPS) + 1
_SERIES = [_STEPS**k * math.factorial(4) / math.factorial(4 - k) for k in range(1, 5)]
_TABLE = np.exp2(np.arange(-_TOP, _TOP + 1) / 256) / _SERIES[3]
_ROUND = 1.5 * 2**52  # a double plus this has its nearest integer in the low bits


def _exp_small(s, n, p):
    """Replace s by exp(s / _STEPS), |s| <= SMALL * _STEPS, to within 3 ulp; n and p are scratch like s."""
    np.add(s, _ROUND, out=n)
    s -= np.subtract(n, _ROUND, out=p)
    index = n.view(np.int64)
    index -= int(np.float64(_ROUND - _TOP).view(np.int64))
    np.add(s, _SERIES[0], out=p)
    for c in _SERIES[1:]:
        p *= s
        p += c
    np.multiply(_TABLE.take(index, out=s, mode="wrap"), p, out=s)


def _product(W, X, see):
    """W @ X, (batch, m, k) by (batch, k, n), in which what is not seen adds nothing, not even 0 * NaN."""
    bad = None if see is None else ~np.isfinite(X).all(axis=-1)
    if bad is None or not bad.any():
        return _T(_T(X) @ _T(W))  # the transposed is faster where W is wide and X narrow
    out = W @ np.where(bad[..., None], 0.0, X)
    for b, k in np.argwhere(bad):
        rows = see[b, :, k]
        out[b, rows] += W[b, rows, k, None] * X[b, k]
    return out


def _hide(X, see, value=0.0):
    """Put the value where nothing is seen; return X."""
    if see is not None:
        X[~see] = value
    return X


def _T(X):
    """Exchange the last two axes; None stays None."""
    return None if X is None else np.swapaxes(X, -1, -2)


def _add_broadcast(total, b, h, rows, keys, part):
    """Add a chunk (batch, r, n) to its place in total (4 axes), summed over the axes of length 1 there."""
    part = part.sum(axis=tuple(k for k in range(3) if total.shape[(0, 2, 3)[k]] == 1), keepdims=True)
    place = total[b if total.shape[0] > 1 else slice(None), h if total.shape[1] > 1 else 0]
    place = place[..., keys] if total.shape[3] > 1 else place
    for r, row in enumerate(rows if total.shape[2] > 1 else [0]):  # one by one: `rows` may repeat a row
        place[:, row] += part[:, r]


def _real(name, x, shape=None):
    """Return an array of real numbers, of that shape if given."""
    x = np.asarray(x)
    if x.dtype.kind in "bcOSUmM" or x.dtype.names:
        raise TypeError(f"{name}: expected real numbers, got dtype {x.dtype}")
    if shape not in (None, x.shape):
        raise ValueError(f"{name}: expected shape {shape}, got {x.shape}")
    return x


def _number(name, x, where="of any sign", fits=lambda x: True):
    """Return a finite float that fits."""
    try:
        number = float(x)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number, got {x!r}") from None
    if not (math.isfinite(number) and fits(number)):
        raise ValueError(f"{name}: expected a finite number {where}, got {number}")
    return number


def _integers(name, x, length, most):
    """Return a 1-d array of integers."""
    x = np.asarray(x)
    if x.size and x.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got {x.dtype}")
    if x.ndim != 1 or length not in (None, len(x)):
        raise ValueError(f"{name}: expected shape ({'R' if length is None else length},), got {x.shape}")
    if x.size and not 0 <= x.min() <= x.max() <= most:
        raise ValueError(f"{name}: expected integers from 0 to {most}, got {x.min()} to {x.max()}")
    return x.astype(np.int64)


def _like_scores(name, x, kind, shape):
    """Return a view of the scores' shape of an array of booleans or of real numbers."""
    x = _real(name, x) if kind is float else np.asarray(x)
    if kind is bool and x.dtype != bool:
        raise TypeError(f"{name}: expected booleans (numbers to add to the scores are bias), got {x.dtype}")
    try:
        return np.broadcast_to(x, shape)
    except ValueError:
        raise ValueError(f"{name}: expected a shape that broadcasts to {shape}, got {x.shape}") from None
