"""How far an output lies from truth, in the measures that a verdict and a report need."""

import math

import numpy as np

from verify.result import Metrics

BOTH_NAN = "not a pass: report that both are NaN"


def within(wanted, got, limit, *, spread=False, lse=False):
    """Which elements are right.

    A finite element is right if |got - wanted| <= limit: written so that NaN, with which every comparison is false,
    is wrong. An infinity is right if it is the same one. NaN is never right, unless `spread`.

    Parameters
    ----------
    wanted, got : ndarray, equal shapes
        fp64 truth, and the output in any type.
    limit : float
    spread : bool
        The inputs hold NaN or inf: then an element whose truth is not finite must not be finite, and no more is
        asked, as inf x 0 is NaN in one order of operations and inf in another.
    lse : bool
        A wanted -inf says that the row sees no key, which no spreading NaN may blur: it has to be -inf.

    Returns
    -------
    ndarray of bool
    """
    wanted, got = np.asarray(wanted, np.float64), np.asarray(got).astype(np.float64)
    with np.errstate(invalid="ignore"):
        right = np.abs(got - wanted) <= limit
    right |= np.isinf(wanted) & (got == wanted)
    if spread:
        loose = ~np.isfinite(wanted) & ~(lse & np.isneginf(wanted))
        right = np.where(loose, ~np.isfinite(got) & ~(lse & np.isneginf(got)), right)
    return right


def compare(wanted, got, limit=0.0):
    """One word for two arrays: "match", "mismatch", or that both hold NaN in the same places and agree otherwise."""
    wanted, got = np.asarray(wanted, np.float64), np.asarray(got).astype(np.float64)
    right = within(wanted, got, limit)
    if right.all():
        return "match"
    return BOTH_NAN if (right | (np.isnan(wanted) & np.isnan(got))).all() else "mismatch"


def measure(wanted, got, *, limit, plain, apriori, fixed, spread=False, lse=False):
    """All metrics of one output.

    Parameters
    ----------
    wanted, got : ndarray, equal shapes
        fp64 truth, and the output in any type.
    limit : float
        The bound on |got - wanted|.
    plain : ndarray
        The plain formula's output.
    apriori : float
        A-priori bound, passed through.
    fixed : float or None
        The blog's limit, passed through.
    spread, lse : bool
        As for `within`.

    Returns
    -------
    Metrics
    """
    wanted, got = np.asarray(wanted, np.float64), np.asarray(got).astype(np.float64)
    right = within(wanted, got, limit, spread=spread, lse=lse)
    error = distance(wanted, got, right)
    error_plain = distance(wanted, plain, within(wanted, plain, math.inf, spread=spread, lse=lse))
    worst = np.unravel_index(np.argmax(error), error.shape) if error.size else ()
    rmse, rmse_plain = _rms(error), _rms(error_plain)
    return Metrics(
        max_abs=float(error.max(initial=0)),
        max_rel=_relative(wanted, error),
        rmse=rmse,
        rmse_plain=rmse_plain,
        rmse_ratio=_ratio(rmse, rmse_plain),
        cosine=_cosine(wanted, got),
        nan=int(np.isnan(got).sum()),
        inf=int(np.isinf(got).sum()),
        share_out=float(1 - right.mean()) if right.size else 0.0,
        worst_index=tuple(int(i) for i in worst),
        got=float(got[worst]) if error.size else 0.0,
        wanted=float(wanted[worst]) if error.size else 0.0,
        plain=float(error_plain.max(initial=0)),
        apriori=apriori,
        bound=limit,
        fixed=fixed,
        ok=bool(right.all()),
    )


def distance(wanted, got, right):
    """|got - wanted| for each element; 0 where a value that is not finite is right, inf where it is wrong."""
    wanted, got = np.asarray(wanted, np.float64), np.asarray(got).astype(np.float64)
    both = np.isfinite(wanted) & np.isfinite(got)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(both, np.abs(got - wanted), np.where(right, 0.0, np.inf))


def _rms(error):
    return float(np.sqrt(np.mean(np.square(error)))) if error.size else 0.0


def _ratio(a, b):
    """a / b, where nothing over nothing is 1: the two are equally right."""
    if b == 0:
        return 1.0 if a == 0 else math.inf
    return a / b if math.isfinite(b) else 0.0


def _relative(wanted, error):
    """Largest relative error, over elements above 1 % of the largest: a near-zero has no meaningful one."""
    size = np.where(np.isfinite(wanted), np.abs(wanted), 0)
    large = size > 0.01 * size.max(initial=0)
    return float((error[large] / size[large]).max(initial=0))


def _cosine(wanted, got):
    """Cosine of the angle between two outputs, over the elements finite in both."""
    both = np.isfinite(wanted) & np.isfinite(got)
    a, b = wanted[both], got[both]
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    if norms == 0:
        return 1.0 if not a.any() and not b.any() else 0.0
    return float(a @ b) / norms
