"""The judge as a test author meets it: `check` runs a kernel on a case, `assert_attention_close` judges arrays."""

from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from refimpl import oracle
from verify import tolerance
from verify.cases import DEFAULT, Case, Problem
from verify.dtypes import DTYPES, name_of
from verify.foreign.arrays import KINDS
from verify.foreign.as_numpy import to_numpy
from verify.foreign.call import Malformed, call
from verify.foreign.facts import fitted
from verify.foreign.imports import unsimulated
from verify.foreign.refusal import refusal
from verify.foreign.signature import backward_signature, signature
from verify.foreign.spec import LAYOUTS, Loaded
from verify.judge import explain, malformed, measure, reference, verdict
from verify.misuse import suggest
from verify.result import Result

CLOSE = 0.05  # of max|V|: far above rounding, far below what another layout gives
# The options of `assert_attention_close`, in the oracle's words.
KNOWN = ("scale", "causal", "align", "mask", "bias", "window", "softcap", "alibi_slopes", "lengths_q", "lengths_k",
         "keep", "dropout_p")  # fmt: skip


def check(
    fn,
    case,
    *,
    dtype="fp32",
    small=True,
    d=None,
    seed=None,
    backward=None,
    arrays="numpy",
    layout="bhsd",
    factor=tolerance.FACTOR,
    **kwargs,
) -> Result:
    """Run a function on a case and judge it.

    Parameters
    ----------
    fn : callable
        ``fn(Q, K, V, *, scale, causal, ..., **kwargs) -> O or (O, lse)``. It is given the options that its signature
        names, or all that there are if it takes ``**options``.
    case : str or Case
        A default case by name, or one's own.
    dtype : str
        Storage type.
    small : bool
        The emulated shape instead of the full one.
    d : int, optional
        Head dim instead of the usual one, 8 or 64. A case that is about head dims keeps its own.
    seed : int, optional
        Instead of the case's own.
    backward : callable, optional
        ``backward(q, k, v, do, ...) -> (dQ, dK, dV)``, judged too; it is also given o and lse if it names them.
        Without one, a case about gradients takes them from the autograd of torch or JAX.
    arrays : str
        What `fn` takes and returns: "numpy", "torch", "cupy", "jax" or "numba".
    layout : "bhsd" or "bshd"
        Of its arrays.
    factor : float
        How many times the plain formula's error is allowed.
    kwargs
        Passed to `fn`.

    Returns
    -------
    Result
        With verdict "pass" or "fail". Exceptions of `fn` come through; those that mean that a GPU is missing with what
        to set for a simulator.

    Raises
    ------
    ValueError
        For an unknown case, dtype or kind of arrays; or if the case has an option that `fn` does not name.
    """
    case = find_case(case)
    for name, value, known in (("dtype", dtype, DTYPES), ("arrays", arrays, KINDS), ("layout", layout, LAYOUTS)):
        if value not in known:
            raise ValueError(f"{name}: there is no {value!r}; {suggest(value, known)}")
    problem = fitted(case, d or 0, small).build(dtype, small, seed)
    problem = replace(problem, backward=problem.backward or backward is not None)
    loaded = _loaded(fn, backward, arrays, kwargs)
    given = {name for name, value in problem.options.items() if value is not None and value is not False}
    if unnamed := given - {"align"} - loaded.parameters.keys():
        raise ValueError(f"case: {case.id} has {', '.join(sorted(unnamed))}, which the function does not name")
    before = [x.tobytes() for x in (problem.Q, problem.K, problem.V)]
    facts = {"kernel": getattr(fn, "__module__", "") or "function", "executor": "numpy", "device": "CPU", "tile": None}
    try:
        answer = call(loaded, problem, layout, watch=False)
    except Malformed as error:
        facts |= {"case": case.id, "dtype": dtype, "size": problem.shape._asdict(), "seed": problem.seed}
        return Result(verdict="fail", reason=str(error), **facts)
    except Exception as error:
        if hint := unsimulated(error):
            raise RuntimeError(f"{' '.join(str(error).split())} ({hint})") from error
        if d is None and refusal(error):
            error.add_note(f"The case has head dim {problem.shape.d}; check(..., d=32) runs it at another.")
        raise
    facts |= {} if arrays == "numpy" else {"executor": answer.executor, "device": answer.device}
    result = verdict(
        replace(problem, **dict(zip("QKV", answer.inputs, strict=True))),
        answer.outputs,
        known=reference(problem, problem.dO() if problem.backward else None),
        factor=factor,
        before=before,
        seconds=answer.seconds,
        **facts,
    )
    if result.verdict == "fail":
        result = replace(result, reason=result.reason + _layout_hint(answer.outputs["O"], problem, layout))
    if answer.broken:
        told = f"wrote outside {' and '.join(answer.broken)}: its guard band changed"
        result = replace(result, verdict="fail", reason="; ".join(filter(None, (told, result.reason))))
    return result


def _loaded(fn, backward, arrays, kwargs):
    """A function as a kernel that was loaded."""
    fn = partial(fn, **kwargs) if kwargs else fn
    parameters, needed = signature(fn, everything=True)
    back = backward_signature(backward, everything=True) if backward else ({}, frozenset())
    return Loaded(fn, parameters, needed, arrays, "asked for", {}, backward, *back)


def find_case(case) -> Case:
    """A default case by name, or the case itself.

    Raises
    ------
    ValueError
        For an unknown name, with the nearest one.
    """
    if isinstance(case, Case):
        return case
    if case not in DEFAULT:
        raise ValueError(f"case: there is no {case!r}; {suggest(case, DEFAULT)}")
    return DEFAULT[case]


def assert_attention_close(O, lse, Q, K, V, *, layout="bhsd", factor=tolerance.FACTOR, **options):
    """Fail unless (O, lse) is attention of (Q, K, V) as closely as the plain formula gets at this precision.

    Parameters
    ----------
    O : array (B, Hq, Nq, dv), dtype of Q
        Of NumPy, PyTorch, CuPy, JAX or Numba, as are the others.
    lse : array (B, Hq, Nq), float32, or None if there is none to judge
    Q, K, V : array (B, Hq, Nq, d), (B, Hk, Nk, d), (B, Hk, Nk, dv)
        float64, float32, float16 or bfloat16.
    layout : "bhsd" or "bshd"
        Of Q, K, V and O: with "bshd", heads come after the length.
    factor : float
        How many times the plain formula's error is allowed.
    options
        As `refimpl.oracle.attention`: scale, causal, align, mask, bias, window, softcap, alibi_slopes, lengths_q,
        lengths_k, keep and dropout_p.

    Raises
    ------
    AssertionError
        With the worst index, both values, error, bound and the share of elements out of bound.
    TypeError
        For an option or dtype that the judge does not know.
    """
    if unknown := options.keys() - set(KNOWN):
        raise TypeError(f"options: {', '.join(sorted(unknown))} not known; expected {', '.join(KNOWN)}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout: there is no {layout!r}; {suggest(layout, LAYOUTS)}")
    O, lse, Q, K, V = (_known(x) for x in (O, lse, Q, K, V))
    wrong = _wrong(O, lse, Q, K, V, layout, factor, options)
    if wrong:
        other = _other(layout)
        with suppress(ValueError):  # arrays that do not fit together in the other layout
            right = not _wrong(O, lse, Q, K, V, other, factor, options)
            wrong += f" (with layout={other!r} it is right)" if right else ""
        raise AssertionError(wrong)


def _wrong(O, lse, Q, K, V, layout, factor, options) -> str:
    """What is wrong with (O, lse), in one line; empty if nothing is."""
    if layout == "bshd":
        O, Q, K, V = (np.swapaxes(x, 1, 2) if np.ndim(x) == 4 else x for x in (O, Q, K, V))
    problem = Problem(Q, K, V, options, dtype=name_of(Q.dtype))
    outputs = {"O": O} if lse is None else {"O": O, "lse": lse}
    if complaint := malformed(problem, outputs):
        return complaint
    known = reference(problem)
    judged = {name: measure(name, got, known, problem.dtype, factor) for name, got in outputs.items()}
    return explain(problem.case, judged).replace(f" of case {problem.case}", "")


def _other(layout):
    return next(name for name in LAYOUTS if name != layout)


def _layout_hint(O, problem, layout) -> str:
    """What to say of an output that is wrong, but attention of its inputs in the other layout; else empty."""
    O, Q, K, V = (np.swapaxes(x, 1, 2) for x in (O, problem.Q, problem.K, problem.V))
    # With other lengths, or options of a shape, the other layout has no meaning.
    if Q.shape[1] != K.shape[1] or any(isinstance(value, np.ndarray) for value in problem.options.values()):
        return ""
    truth, _ = oracle.attention(Q, K, V, **problem.options)
    with np.errstate(invalid="ignore"):
        near = np.abs(O.astype(np.float64) - truth) <= CLOSE * np.abs(V.astype(np.float64)).max(initial=0)
    return f" (in layout={_other(layout)!r} it is attention)" if near.all() else ""


def _known(x):
    """An array of any library as NumPy has it; what is no array stays what it is."""
    try:
        return to_numpy(x)
    except TypeError:
        return x
