"""The judge: shape, type and finiteness first, then error <= 2 x plain + floor, for every output."""

from dataclasses import dataclass, replace

import numpy as np

from refimpl import oracle
from verify import errors, gradient_tolerance, plain, tolerance
from verify.case import Problem
from verify.result import Metrics, Result

GRADIENTS = ("dQ", "dK", "dV", "dbias")


@dataclass(frozen=True)
class Anchor:
    """What one output is judged by.

    Attributes
    ----------
    truth : ndarray
        In fp64.
    plain : ndarray
        The plain formula's output, the scale applied to scores.
    error : float
        Largest error of the plain formula, over the orders of `plain.ORDERS`. Where it is not finite itself (fp16
        overflows), it excuses nothing.
    floor, apriori : float
        As `tolerance` has them.
    """

    truth: np.ndarray
    plain: np.ndarray
    error: float
    floor: float
    apriori: float


@dataclass(frozen=True)
class Reference:
    """The anchors of a problem, by output name, and whether NaN may spread from its inputs."""

    anchors: dict
    spread: bool


def reference(problem: Problem, dO=None) -> Reference:
    """Compute truth, plain formula and bounds of a problem.

    Parameters
    ----------
    problem : Problem
    dO : ndarray (B, Hq, Nq, dv), optional
        With it, dQ, dK and dV are there too, and dbias where the options hold a bias.
    """
    dtype, s = problem.dtype, problem.shape
    O, lse = oracle.attention(problem.Q, problem.K, problem.V, **problem.options)
    truths, spread = {"O": O, "lse": lse}, not problem.finite
    size = tolerance.magnitudes(problem, lse)
    floors = {"O": tolerance.floor_O(dtype, size), "lse": tolerance.floor_lse(dtype, size)}
    bounds = {name: getattr(tolerance, f"apriori_{name}")(dtype, size, s.d, s.Nk) for name in truths}
    if dO is not None:
        gradients = oracle.attention_backward(problem.Q, problem.K, problem.V, dO, **problem.options)
        gradients = {name: x for name, x in zip(GRADIENTS, gradients, strict=True) if x is not None}
        floors |= gradient_tolerance.floors(problem, O, lse, dO, gradients)
        # No a-priori bound is derived for gradients: infinity says so.
        bounds |= dict.fromkeys(gradients, np.inf)
        truths |= gradients
    rough = [_plain(problem, dO, order) for order in plain.ORDERS]
    anchors = {}
    for name, truth in truths.items():
        error = max(_largest_error(truth, outputs[name], spread, name == "lse") for outputs in rough)
        anchors[name] = Anchor(truth, rough[0][name], error, floors[name], bounds[name])
    return Reference(anchors, spread)


def _plain(problem, dO, order):
    """Outputs of the plain formula by name."""
    O, lse = plain.attention(problem, order)
    found = {"O": O, "lse": lse}
    if dO is not None:
        found |= zip(GRADIENTS, plain.attention_backward(problem, O, lse, dO, order), strict=True)
    return found


def _largest_error(truth, got, spread, is_lse):
    """Largest finite |got - truth|."""
    fine = errors.within(truth, got, np.inf, spread=spread, lse=is_lse)
    error = errors.distance(truth, got, fine)
    return float(error[np.isfinite(error)].max(initial=0))


def malformed(problem: Problem, outputs: dict) -> str | None:
    """Why the outputs cannot be judged: a wrong type, shape or dtype. None if they can."""
    s = problem.shape
    shapes = {
        "O": (s.B, s.Hq, s.Nq, s.dv),
        "lse": (s.B, s.Hq, s.Nq),
        "dQ": problem.Q.shape,
        "dK": problem.K.shape,
        "dV": problem.V.shape,
        "dbias": np.shape(problem.options.get("bias")),
    }
    for name, got in outputs.items():
        if not isinstance(got, np.ndarray):
            return f"{name} is a {type(got).__name__}, expected a NumPy array"
        if got.shape != shapes[name]:
            return f"{name} has shape {got.shape}, expected {shapes[name]}"
        wanted = problem.Q.dtype
        if name in ("lse", "dbias"):  # fp32 in any storage type
            wanted = np.dtype(np.float64 if problem.dtype == "fp64" else np.float32)
        if got.dtype != wanted:
            return f"{name} has dtype {got.dtype}, expected {wanted}"
    return None


def judge(problem, O, lse=None, dtype=None, *, known=None, factor=tolerance.FACTOR, **gradients) -> dict[str, Metrics]:
    """Compare outputs with truth.

    Parameters
    ----------
    problem : Problem
    O : ndarray (B, Hq, Nq, dv), storage type
    lse : ndarray (B, Hq, Nq), float32, natural logarithm, or None
        None where the kernel returns none: then it is not judged.
    dtype : str, optional
        The storage type, if not the problem's own.
    known : Reference, optional
        The anchors, if they were computed before.
    factor : float
        How many times the plain formula's error is allowed.
    dQ, dK, dV, dbias : ndarray
        Gradients, if `known` has them.

    Returns
    -------
    dict of str to Metrics
        By output; it passes if every `ok` holds.

    Raises
    ------
    ValueError
        If an output has the wrong type, shape or dtype.
    """
    outputs = {"O": O} | ({} if lse is None else {"lse": lse}) | gradients
    if complaint := malformed(problem, outputs):
        raise ValueError(complaint)
    known = known or reference(problem)
    return {name: measure(name, got, known, dtype or problem.dtype, factor) for name, got in outputs.items()}


def measure(name, got, known, dtype, factor=tolerance.FACTOR) -> Metrics:
    """Metrics of one output by name, of a shape and type that were looked at before."""
    anchor = known.anchors[name]
    measured = errors.measure(
        anchor.truth,
        got,
        limit=factor * anchor.error + anchor.floor,
        plain=anchor.plain,
        apriori=anchor.apriori,
        fixed=tolerance.FIXED.get(dtype) if name == "O" else None,
        spread=known.spread,
        lse=name == "lse",
    )
    return replace(measured, plain=max(measured.plain, anchor.error))


def explain(case, outputs: dict[str, Metrics]) -> str:
    """One line on what is wrong with a failing case, or "" if nothing is."""
    return "; ".join(
        f"{name} of case {case} at {list(m.worst_index)}: got {m.got:.9g}, wanted {m.wanted:.9g}, "
        f"error {m.max_abs:.3g}, bound {m.bound:.3g} ({m.share_out:.1%} of elements out)"
        for name, m in outputs.items()
        if not m.ok
    )


def verdict(problem, outputs, *, known, before, factor=tolerance.FACTOR, guards_ok=True, **facts) -> Result:
    """Everything that makes a run pass or fail, as a Result.

    Parameters
    ----------
    problem : Problem
    outputs : dict
        Arrays by name.
    known : Reference
    before : list of bytes
        Q, K, V as they were: inputs must not change.
    guards_ok : bool
        The bands around the outputs were left alone.
    facts
        Fields of Result: kernel, executor, device, tile, seconds.
    """
    facts |= {"case": problem.case, "dtype": problem.dtype, "size": problem.shape._asdict(), "seed": problem.seed}
    if complaint := malformed(problem, outputs):
        return Result(verdict="fail", reason=complaint, **facts)
    judged = judge(problem, **outputs, known=known, factor=factor)
    reasons = []
    for name, array, was in zip("QKV", (problem.Q, problem.K, problem.V), before, strict=True):
        if array.tobytes() != was:
            reasons.append(f"input {name} was modified")
    if not guards_ok:
        reasons.append("wrote outside an output: its guard band changed")
    if wrong := explain(problem.case, judged):
        reasons.append(wrong)
    return Result(verdict="fail" if reasons else "pass", reason="; ".join(reasons), outputs=judged, **facts)
