"""Is a contender right? Some rows of its output against fp64, before any of its times is believed."""

from importlib import import_module

import numpy as np

from refimpl import oracle
from verify.bench.limits import FORWARD
from verify.dtypes import DTYPES

PAIRS = 1 << 20  # (query, key) pairs of each of two heads that are held against fp64
LEAST_ROWS, MOST_ROWS = 32, 128
# As the judge's: at most twice the RMSE of the plain formula at the same precision, and half an ulp of O's own RMS.
FACTOR = 2.0


def sample(point):
    """The heads and rows that are checked: first and last head, first and last rows and some between."""
    rng = np.random.default_rng([point.N, point.d])
    n = min(point.N, MOST_ROWS, max(LEAST_ROWS, PAIRS // point.N))
    rows = np.unique(np.r_[0, point.N - 1, rng.choice(point.N, n, replace=False)])[:n]
    return [(0, 0), (point.B - 1, point.H - 1)], rows


def rows_of(point):
    """A function from an output (B, H, N, d), on a device or a tensor, to the sampled rows as float64."""
    heads, rows = sample(point)

    def take(x):
        return np.stack([_to_host(x[b, h], point.dtype)[rows] for b, h in heads]).astype(np.float64)

    return take


def _to_host(x, dtype):
    """One head of an output as a NumPy array of its storage type."""
    if hasattr(x, "copy_to_host"):
        x = x.copy_to_host()
    elif hasattr(x, "detach"):
        x = x.detach()
        x = (x.view(import_module("torch").int16) if dtype == "bf16" else x).cpu().numpy()
    return np.asarray(x).view(DTYPES[dtype].numpy)


class Truth:
    """The sampled rows of a point in fp64, and how far the plain formula at the storage type's precision is from them.

    Parameters
    ----------
    point : Point
    host : dict of str to ndarray
        As `Inputs.host` returns them.
    """

    def __init__(self, point, host):
        heads, rows = sample(point)
        exact, plain = [], []
        for b, h in heads:
            Q, K, V, dO = (host[name][b : b + 1, h : h + 1] for name in ("Q", "K", "V", "dO"))
            if point.direction == FORWARD:
                exact.append(oracle.attention(Q, K, V, causal=point.causal, rows=rows)[0][0, 0])
            else:
                dQ, *_ = oracle.attention_backward(Q, K, V, dO[:, :, rows], causal=point.causal, rows=rows)
                exact.append(dQ[0, 0])
            plain.append(_plain_rows(*(x[0, 0] for x in (Q, K, V, dO)), rows, point))
        self.exact = np.stack(exact)
        self.rmse_plain = _rms(np.stack(plain) - self.exact)
        self.bound = FACTOR * self.rmse_plain + DTYPES[point.dtype].ulp / 2 * _rms(self.exact)

    def rmse(self, outputs) -> float:
        """Root mean square error of sampled rows, as `Contender.outputs` gives them."""
        return _rms(outputs - self.exact)

    def wrong(self, rmse) -> str | None:
        """Why a result with this error is not worth timing; None if it is."""
        if rmse <= self.bound:  # NaN fails this
            return None
        return f"wrong: RMSE {rmse:.2g} on sampled rows, {self.bound:.2g} allowed"


def _plain_rows(Q, K, V, dO, rows, point):
    """O, or dQ, of some rows by the plain formula: fp32, with P, dS and the result rounded to the storage type."""
    stored, wide = DTYPES[point.dtype].numpy, np.float32
    scale = wide(1 / np.sqrt(point.d))
    Q, K, V, dO = (x.astype(wide) for x in (Q[rows], K, V, dO[rows]))
    S = scale * (Q @ K.T)
    if point.causal:
        S = np.where(np.arange(point.N) <= rows[:, None], S, wide(-np.inf))
    P = np.exp(S - S.max(axis=1, keepdims=True))
    P /= P.sum(axis=1, keepdims=True)
    O = (P.astype(stored).astype(wide) @ V).astype(stored).astype(wide)
    if point.direction == FORWARD:
        return O
    dS = (P * (dO @ V.T - (dO * O).sum(axis=1, keepdims=True))).astype(stored).astype(wide)
    return (scale * (dS @ K)).astype(stored)


def _rms(x) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0
