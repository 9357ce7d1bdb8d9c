"""Is a contender right? Some rows of its output against fp64, before any of its times is believed."""

from importlib import import_module

import numpy as np

from refimpl import oracle
from verify.bench.limits import FORWARD
from verify.dtypes import DTYPES

PAIRS = 1 << 20  # (query, key) pairs of each of two heads that are held against fp64
LEAST_ROWS, MOST_ROWS = 32, 128
WHOLE = 1024  # up to so many rows, dK and dV are checked too: each of theirs is a sum over all queries
GRADIENTS = "dQ", "dK", "dV"
# As the judge's: at most twice the RMSE of the plain formula at the same precision, and half an ulp of O's own RMS.
FACTOR = 2.0


def sample(point):
    """The heads and rows that are checked: first and last head, first and last rows and some between."""
    rng = np.random.default_rng([point.N, point.d])
    n = min(point.N, MOST_ROWS, max(LEAST_ROWS, PAIRS // point.N))
    between = 1 + rng.choice(max(point.N - 2, 0), max(n - 2, 0), replace=False)
    return [(0, 0), (point.B - 1, point.H - 1)], np.unique(np.r_[0, point.N - 1, between])


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

    Attributes
    ----------
    exact : dict of str to ndarray
        What is checked: O; or dQ, and dK and dV up to `WHOLE` rows.
    rmse_plain : dict of str to float
    bound : dict of str to float
        On a contender's RMSE.
    """

    def __init__(self, point, host):
        heads, rows = sample(point)
        exact, plain = [], []
        for b, h in heads:
            arrays = {name: host[name][b : b + 1, h : h + 1] for name in ("Q", "K", "V", "dO")}
            exact.append(_exact(arrays, rows, point))
            plain.append(_plain(*(x[0, 0] for x in arrays.values()), rows, point))
        self.exact = {name: np.stack([found[name] for found in exact]) for name in exact[0]}
        self.rmse_plain = {
            name: _rms(np.stack([found[name] for found in plain]) - x) for name, x in self.exact.items()
        }
        half = DTYPES[point.dtype].ulp / 2
        self.bound = {name: FACTOR * self.rmse_plain[name] + half * _rms(x) for name, x in self.exact.items()}

    def rmse(self, outputs) -> dict:
        """Root mean square error of what is checked, by name, in sampled rows as `Contender.outputs` gives them."""
        return {name: _rms(outputs[name] - x) for name, x in self.exact.items()}

    def wrong(self, rmse) -> str | None:
        """Why a result with these errors is not worth timing; None if it is."""
        for name, error in rmse.items():
            if not error <= self.bound[name]:  # NaN, too
                return f"wrong: RMSE {error:.2g} on sampled rows of {name}, {self.bound[name]:.2g} allowed"
        return None


def _exact(arrays, rows, point):
    """One head's sampled rows in fp64, by name."""
    Q, K, V, dO = arrays.values()
    if point.direction == FORWARD:
        return {"O": oracle.attention(Q, K, V, causal=point.causal, rows=rows)[0][0, 0]}
    if point.N > WHOLE:
        dQ, *_ = oracle.attention_backward(Q, K, V, dO[:, :, rows], causal=point.causal, rows=rows)
        return {"dQ": dQ[0, 0]}
    found = oracle.attention_backward(Q, K, V, dO, causal=point.causal)
    return {name: x[0, 0][rows] for name, x in zip(GRADIENTS, found[:3], strict=True)}


def _plain(Q, K, V, dO, rows, point):
    """The same by the plain formula: fp32, with P, dS and the result rounded to the storage type."""
    stored, wide = DTYPES[point.dtype].numpy, np.float32

    def rounded(x):
        return x.astype(stored).astype(wide)

    scale, whole = wide(1 / np.sqrt(point.d)), point.direction != FORWARD and point.N <= WHOLE
    at = np.arange(point.N) if whole else rows
    Q, K, V, dO = (x.astype(wide) for x in (Q[at], K, V, dO[at]))
    S = scale * (Q @ K.T)
    if point.causal:
        S = np.where(np.arange(point.N) <= at[:, None], S, wide(-np.inf))
    P = np.exp(S - S.max(axis=1, keepdims=True))
    P /= P.sum(axis=1, keepdims=True)
    O = rounded(rounded(P) @ V)
    if point.direction == FORWARD:
        return {"O": O}
    dS = rounded(P * (dO @ V.T - (dO * O).sum(axis=1, keepdims=True)))
    found = {"dQ": rounded(scale * (dS @ K))}
    if whole:
        found |= {"dK": rounded(scale * (dS.T @ Q)), "dV": rounded(rounded(P).T @ dO)}
        found = {name: x[rows] for name, x in found.items()}
    return found


def _rms(x) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0
