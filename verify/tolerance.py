"""Where the limits come from: error <= 2 x the plain formula's error + a floor, and the bound known before any run.

Notation: u = 2^-24, half an fp32 ulp: one fp32 operation errs by at most u, relatively. e = half an ulp of the
storage type. `ulp` is one ulp of it.
"""

import math
from dataclasses import dataclass

import numpy as np

from verify import plain
from verify.dtypes import DTYPES
from verify.plain_options import F, Options

# A correct kernel makes the plain formula's roundings in another order; those that change their size are in
# `plain.ORDERS`. Two independent errors of one size differ in their maxima by less than two;
# `tests/verify/test_factor.py` shows what half and four times this do.
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
        max |score|, before options change it and after.
    s_abs : float
        max |scale| sum_k |q_k k_k| + |what options add|: what rounds in a score, whatever cancels in it.
    v : float
        max |V|.
    lse : float
        max |lse| of truth.
    changes : int
        Roundings that options add to a score at most.
    kept : float
        What dropout multiplies a weight with that it keeps, and at least 1.
    """

    s: float
    s_abs: float
    v: float
    lse: float
    changes: int = 0
    kept: float = 1.0


def magnitudes(problem, lse) -> Magnitudes:
    """Measure a problem, given the fp64 lse."""
    s, options = problem.shape, Options(problem)
    scale = plain.resolve(problem.options.get("scale"), s.d)
    top = top_abs = 0.0
    with np.errstate(all="ignore"):
        for b, h, Q, K, _V, seen in plain.heads(problem, options):
            if s.Nq and s.Nk:
                S = F(scale) * (Q @ K.T)
                top = max(top, largest(np.where(seen, S, 0)), largest(np.where(seen, options.changed(b, h, S), 0)))
                rounds = abs(scale) * (np.abs(Q) @ np.abs(K).T) + options.size(b, h)
                top_abs = max(top_abs, largest(np.where(seen, rounds, 0)))
    kept = max(1.0, options.kept_factor)
    return Magnitudes(top, top_abs, largest(problem.V), largest(lse), options.count, kept)


def floor_O(dtype, size: Magnitudes) -> float:
    """2 ulp of the storage type x max |V|, and x 1 / (1 - p) under dropout.

    O is an average of rows of V, so max |V| is its scale; dropout multiplies the weights that it keeps. Its last
    rounding costs half an ulp and the rounding of P, where a kernel does it, another half in plain and kernel alike;
    the rest leaves room for a division that is not correctly rounded and for exp2 (2 ulp of fp32 on NVIDIA GPUs),
    which the plain formula may have had for nothing, for instance when all weights are equal.
    """
    return 2 * DTYPES[dtype].ulp * size.v * size.kept


def floor_lse(dtype, size: Magnitudes) -> float:
    """4 ulp of fp32 x max(1, max |s|, max |lse|), in any storage type, as lse is always fp32.

    lse = m + log l. A kernel that works in base 2 rounds the constant scale x log2(e), its product with q.k, the
    product of m and ln 2, and the sum: four halves of an ulp at |s| or |lse|, of which the plain formula makes two.
    log2(l) has an absolute error of 2 ulp at 1 where l is near 1, hence the 1.
    """
    return 4 * FP32_ULP * max(1.0, size.s, size.lse)


def apriori_O(dtype, size: Magnitudes, d, N) -> float:
    """What the error of O cannot exceed, known from d, N, the types and the magnitudes.

    A score errs by at most ds = (d + 6) u s_abs: d operations of the dot product, then the scale, log2(e) and their
    product, wherever they come in, and the subtraction of m, which is itself at most 2 s_abs; options add `changes` to
    the d + 6, their own roundings, and pass earlier ones on with a slope of at most 1. So a weight errs relatively by
    at most w = exp(ds) - 1 + (N + 8) u: exp and the rescales by alpha, of which there are at most N, telescope in their
    exponents and add a rounding each. Numerator and denominator each carry w and N u of summation, and the division
    and the rounding of P and O add 2 u + 2 e. With subnormals of the storage type, N of them may vanish from P.

        |dO| <= max|V| 1 / (1 - p) (2 w + 2 N u + 2 u + 2 e + N subnormal / 2)
    """
    kind = DTYPES[dtype]
    N = max(N, 1)
    w = _weight_error(size, d, N)
    return size.v * size.kept * (2 * w + 2 * N * U + 2 * U + kind.ulp + N * kind.subnormal / 2)


def apriori_lse(dtype, size: Magnitudes, d, N) -> float:
    """What the error of lse cannot exceed: log turns the relative error w + N u of l into an absolute one.

    |dlse| <= w + N u + 4 u max(1, s, |lse|)
    """
    N = max(N, 1)
    return _weight_error(size, d, N) + N * U + 4 * U * max(1.0, size.s, size.lse)


def _weight_error(size, d, N):
    ds = (d + 6 + size.changes) * U * size.s_abs
    return (math.expm1(ds) if ds < 700 else math.inf) + (N + 8) * U


def largest(x):
    """max |x| over finite elements; 0 if there are none."""
    x = np.abs(np.asarray(x).astype(np.float64))
    return float(x[np.isfinite(x)].max(initial=0))
