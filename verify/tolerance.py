"""Where the limits come from: error <= 2 x the plain formula's error + a floor, and the bound known before any run.

Notation: u = 2^-24, half an fp32 ulp: one fp32 operation errs by at most u, relatively. e = half an ulp of the
storage type. `ulp` is one ulp of it.
"""

import math
from dataclasses import dataclass

import numpy as np

from verify import plain
from verify.dtypes import DTYPES

# A correct kernel makes the plain formula's roundings in another order. Two independent errors of one size differ in
# their maxima by less than two; `tests/verify/test_factor.py` shows what half and four times this do.
FACTOR = 2.0
FP32_ULP = DTYPES["fp32"].ulp
U = FP32_ULP / 2
# The blog's limits on the absolute error of O. It gives none for bf16.
FIXED = {"fp32": 1e-5, "fp16": 1e-3}


@dataclass(frozen=True)
class Magnitudes:
    """The sizes that error bounds scale with. Maxima are over finite values; scores over visible pairs.

    Attributes
    ----------
    s : float
        max |scale q.k|.
    s_abs : float
        max |scale| sum_k |q_k k_k|: what rounds in a dot product, whatever cancels in it.
    v : float
        max |V|.
    lse : float
        max |lse| of truth.
    """

    s: float
    s_abs: float
    v: float
    lse: float


def magnitudes(problem, lse) -> Magnitudes:
    """Measure a problem, given the fp64 lse."""
    s, scale = problem.shape, abs(plain.resolve(problem.options.get("scale"), problem.shape.d))
    top = top_abs = 0.0
    with np.errstate(all="ignore"):
        for *_, Q, K, _V, seen in plain.heads(problem):
            if s.Nq and s.Nk:
                top = max(top, scale * _largest(np.where(seen, Q @ K.T, 0)))
                top_abs = max(top_abs, scale * _largest(np.where(seen, np.abs(Q) @ np.abs(K).T, 0)))
    return Magnitudes(top, top_abs, _largest(problem.V), _largest(lse))


def floor_O(dtype, size: Magnitudes) -> float:
    """2 ulp of the storage type x max |V|.

    O is an average of rows of V, so max |V| is its scale. Its last rounding costs half an ulp and the rounding of P,
    where a kernel does it, another half in plain and kernel alike; the rest leaves room for a division that is not
    correctly rounded and for exp2 (2 ulp of fp32 on NVIDIA GPUs), which the plain formula may have had for nothing,
    for instance when all weights are equal.
    """
    return 2 * DTYPES[dtype].ulp * size.v


def floor_lse(dtype, size: Magnitudes) -> float:
    """4 ulp of fp32 x max(1, max |s|, max |lse|), in any storage type, as lse is always fp32.

    lse = m + log l. A kernel that works in base 2 rounds the constant scale x log2(e), its product with q.k, the
    product of m and ln 2, and the sum: four halves of an ulp at |s| or |lse|, of which the plain formula makes two.
    log2(l) has an absolute error of 2 ulp at 1 where l is near 1, hence the 1.
    """
    return 4 * FP32_ULP * max(1.0, size.s, size.lse)


def floor_dV(dtype, size: Magnitudes, truth, dO) -> float:
    """2 ulp of the storage type x max(|dO|, |dV|): dV sums rows of dO with weights that may add to more than 1."""
    return 2 * DTYPES[dtype].ulp * max(_largest(dO), _largest(truth))


def floor_dQ(dtype, size: Magnitudes, truth, dO, problem) -> float:
    """2 ulp of the storage type x |scale| max|K| max|dO.v|.

    dQ = scale dS K and dS = P (dP - D): the weights of a row add to 1 and |dP - D| is at most 2 max|dP|, so this is
    the scale of a row of dQ before anything cancels, as max |V| is for O.
    """
    return 2 * DTYPES[dtype].ulp * _scale(problem) * _largest(problem.K) * _largest_dP(problem, dO)


def floor_dK(dtype, size: Magnitudes, truth, dO, problem) -> float:
    """2 ulp of the storage type x max(|dK|, |scale| max|Q| max|dO.v|): as dQ, but a key's weights may exceed 1."""
    reach = _scale(problem) * _largest(problem.Q) * _largest_dP(problem, dO)
    return 2 * DTYPES[dtype].ulp * max(reach, _largest(truth))


def apriori_O(dtype, size: Magnitudes, d, N) -> float:
    """What the error of O cannot exceed, known from d, N, the types and the magnitudes.

    A score errs by at most ds = (d + 6) u s_abs: d operations of the dot product, then the scale, log2(e) and their
    product, and the subtraction of m, which is itself at most 2 s_abs. So a weight errs relatively by at most
    w = exp(ds) - 1 + (N + 8) u: exp and the rescales by alpha, of which there are at most N, telescope in their
    exponents and add a rounding each. Numerator and denominator each carry w and N u of summation, and the division
    and the rounding of P and O add 2 u + 2 e. With subnormals of the storage type, N of them may vanish from P.

        |dO| <= max|V| (2 w + 2 N u + 2 u + 2 e + N subnormal / 2)
    """
    kind = DTYPES[dtype]
    N = max(N, 1)
    w = _weight_error(size, d, N)
    return size.v * (2 * w + 2 * N * U + 2 * U + kind.ulp + N * kind.subnormal / 2)


def apriori_lse(dtype, size: Magnitudes, d, N) -> float:
    """What the error of lse cannot exceed: log turns the relative error w + N u of l into an absolute one.

    |dlse| <= w + N u + 4 u max(1, s, |lse|)
    """
    N = max(N, 1)
    return _weight_error(size, d, N) + N * U + 4 * U * max(1.0, size.s, size.lse)


def _weight_error(size, d, N):
    ds = (d + 6) * U * size.s_abs
    return (math.expm1(ds) if ds < 700 else math.inf) + (N + 8) * U


def _scale(problem):
    return abs(plain.resolve(problem.options.get("scale"), problem.shape.d))


def _largest_dP(problem, dO):
    """max |dO_i . v_j| over visible pairs."""
    top = 0.0
    for b, h, _Q, _K, V, seen in plain.heads(problem):
        if seen.size:
            top = max(top, _largest(np.where(seen, dO[b, h].astype(np.float32) @ V.T, 0)))
    return top


def _largest(x):
    """max |x| over finite elements; 0 if there are none."""
    x = np.abs(np.asarray(x).astype(np.float64))
    return float(x[np.isfinite(x)].max(initial=0))
