"""Where the limits on gradients come from: what a correct kernel may add to the plain formula's error.

Notation as in `tolerance`. With P_ij the weights, dP = dO V^T and D_i = sum_j P_ij dP_ij = dO_i . O_i:

    dS = P (dP - D) slope        dQ = scale dS K        dK = scale dS^T Q        dV = P^T dO        dbias = P (dP - D)

where dropout multiplies dP, and P in dV, by 0 or 1 / (1 - p), and the slope of a softcap is at most 1. Each floor is a
sum of three parts, each taken at the size of a gradient before anything in that part cancels:

- *storage*: rounding P, dS and the result costs 2 ulp of the storage type, relative to sum |dS| |K|, and its like;
- *sums*: dP and D are sums in fp32, which differ little where dS cancels, and the slope is a difference; 2 ulp of fp32,
  relative to sum P (|dO| |V|^T + |dO| . |O|) |K|;
- *D*: it is computed from the O that the forward pass stored, so half an ulp of each |O_ik| enters D_i with |dO_ik|.
  The plain formula starts from its own O, whose rounding may be kinder, as where O is exact.
"""

from dataclasses import dataclass

import numpy as np

from verify import plain
from verify.dtypes import DTYPES
from verify.plain_options import Options
from verify.tolerance import FP32_ULP

# Errors of one dS, by where they come from, and how many ulp of which type they amount to.
PARTS = ("storage", "sums", "D")


@dataclass(frozen=True)
class Sizes:
    """The sizes of errors before they cancel: the largest element of each gradient, for each part of its floor.

    Attributes
    ----------
    dQ, dK, dV, dbias : dict of str to float
        By part; a part that a gradient does not have is 0. "D" is an error already, the others are to be multiplied
        by ulps.
    """

    dQ: dict
    dK: dict
    dV: dict
    dbias: dict


def floors(problem, O, lse, dO, gradients) -> dict[str, float]:
    """The floor of each gradient.

    Parameters
    ----------
    problem : Problem
    O, lse : ndarray
        fp64 truth.
    dO : ndarray (B, Hq, Nq, dv)
    gradients : iterable of str
        Out of dQ, dK, dV and dbias.
    """
    found, ulp = sizes(problem, O, lse, dO), DTYPES[problem.dtype].ulp
    return {name: floor(getattr(found, name), ulp, stored=name != "dbias") for name in gradients}


def floor(parts, ulp, stored=True) -> float:
    """2 ulp of what is stored + 2 fp32 ulp of what is summed + D's error. dbias is fp32 in any storage type."""
    fp32 = min(ulp, FP32_ULP)  # a kernel for fp64, if there is one, sums in fp64
    return 2 * (ulp if stored else fp32) * parts["storage"] + 2 * fp32 * parts["sums"] + parts["D"]


def sizes(problem, O, lse, dO) -> Sizes:
    """Measure a problem, given truth and dO. What is not finite counts for nothing."""
    s, options = problem.shape, Options(problem)
    scale, half_ulp = plain.resolve(problem.options.get("scale"), s.d), DTYPES[problem.dtype].ulp / 2
    dQ = dict.fromkeys(PARTS, 0.0)
    dK = {part: np.zeros(problem.K.shape) for part in PARTS}
    dV = np.zeros(problem.V.shape)
    bias = problem.options.get("bias")
    dbias = {part: np.zeros((1,) * (4 - np.ndim(bias)) + np.shape(bias)) for part in PARTS}
    for b, h, Q, K, V, seen in plain.heads(problem, options):
        h_k = h // (s.Hq // s.Hk)
        with np.errstate(all="ignore"):  # NaN past a length is no accident
            S = scale * (Q.astype(np.float64) @ K.T.astype(np.float64))
            P = np.where(seen, np.exp(options.changed(b, h, S) - lse[b, h, :, None]), 0)
        P[~np.isfinite(P)] = 0
        Q, K, V, G, O_i = (np.where(np.isfinite(x), x, 0).astype(np.float64) for x in (Q, K, V, dO[b, h], O[b, h]))
        Z, D = options.factor(b, h), (G * O_i).sum(axis=1, keepdims=True)
        D_abs = np.abs(G * O_i).sum(axis=1, keepdims=True)
        slope = np.where(seen, options.slope(b, h, np.where(np.isfinite(S), S, 0)), 0)
        of_dS = {
            "storage": P * np.abs(Z * (G @ V.T) - D) * slope,
            "sums": P * (Z * (np.abs(G) @ np.abs(V).T) + D_abs),
            "D": P * half_ulp * D_abs,
        }
        for part, X in of_dS.items():
            dQ[part] = max(dQ[part], (X @ np.abs(K)).max(initial=0))
            dK[part][b, h_k] += X.T @ np.abs(Q)
            if bias is not None:
                plain.add_broadcast(dbias[part], b, h, X)
        dV[b, h_k] += (P * Z).T @ np.abs(G)
    weight = abs(scale)
    return Sizes(
        dQ={part: weight * float(x) for part, x in dQ.items()},
        dK={part: weight * float(x.max(initial=0)) for part, x in dK.items()},
        dV=dict(zip(PARTS, (float(dV.max(initial=0)),) * 2 + (0.0,), strict=True)),
        dbias={part: float(x.max(initial=0)) for part, x in dbias.items()},
    )
