"""The judge as a test author meets it: `check` runs a kernel on a case, `assert_attention_close` judges arrays."""

import time

from verify import tolerance
from verify.cases import DEFAULT, Case, Problem
from verify.dtypes import DTYPES, name_of
from verify.judge import explain, malformed, measure, reference, verdict
from verify.misuse import suggest
from verify.result import Result


def check(fn, case, *, dtype="fp32", small=True, seed=None, backward=None, factor=tolerance.FACTOR, **kwargs) -> Result:
    """Run a function on a case and judge it.

    Parameters
    ----------
    fn : callable
        ``fn(Q, K, V, *, scale, causal, align, **kwargs) -> (O, lse)`` on NumPy arrays.
    case : str or Case
        A default case by name, or one's own.
    dtype : str
        Storage type.
    small : bool
        The emulated shape instead of the full one.
    seed : int, optional
        Instead of the case's own.
    backward : callable, optional
        ``backward(Q, K, V, O, lse, dO, *, scale, causal, align) -> (dQ, dK, dV)``, judged too.
    factor : float
        How many times the plain formula's error is allowed.
    kwargs
        Passed to `fn`.

    Returns
    -------
    Result
        With verdict "pass" or "fail". Exceptions of `fn` come through.

    Raises
    ------
    ValueError
        For an unknown case or dtype.
    """
    case = find_case(case)
    if dtype not in DTYPES:
        raise ValueError(f"dtype: there is no {dtype!r}; {suggest(dtype, DTYPES)}")
    problem = case.build(dtype, small, seed)
    dO = problem.dO() if backward else None
    before = [x.tobytes() for x in (problem.Q, problem.K, problem.V)]
    start = time.perf_counter()
    outputs = dict(zip(("O", "lse"), fn(problem.Q, problem.K, problem.V, **problem.options, **kwargs), strict=True))
    if backward:
        back = backward(problem.Q, problem.K, problem.V, outputs["O"], outputs["lse"], dO, **problem.options)
        outputs.update(zip(("dQ", "dK", "dV"), back, strict=True))
    seconds = time.perf_counter() - start
    return verdict(
        problem,
        outputs,
        known=reference(problem, dO),
        factor=factor,
        before=before,
        kernel=getattr(fn, "__module__", "") or "function",
        executor="numpy",
        device="CPU",
        tile=None,
        seconds=seconds,
    )


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


def assert_attention_close(O, lse, Q, K, V, *, factor=tolerance.FACTOR, **options):
    """Fail unless (O, lse) is attention of (Q, K, V) as closely as the plain formula gets at this precision.

    Parameters
    ----------
    O : ndarray (B, Hq, Nq, dv), dtype of Q
    lse : ndarray (B, Hq, Nq), float32, or None if there is none to judge
    Q, K, V : ndarray (B, Hq, Nq, d), (B, Hk, Nk, d), (B, Hk, Nk, dv)
        float64, float32, float16 or bfloat16.
    factor : float
        How many times the plain formula's error is allowed.
    options
        scale, causal, align, mask.

    Raises
    ------
    AssertionError
        With the worst index, both values, error, bound and the share of elements out of bound.
    TypeError
        For an option or dtype that the judge does not know.
    """
    unknown = options.keys() - {"scale", "causal", "align", "mask"}
    if unknown:
        raise TypeError(f"options: {', '.join(sorted(unknown))} not known; expected scale, causal, align, mask")
    problem = Problem(Q, K, V, options, dtype=name_of(Q.dtype))
    outputs = {"O": O} if lse is None else {"O": O, "lse": lse}
    if complaint := malformed(problem, outputs):
        raise AssertionError(complaint)
    known = reference(problem)
    judged = {name: measure(name, got, known, problem.dtype, factor) for name, got in outputs.items()}
    if wrong := explain(problem.case, judged):
        raise AssertionError(wrong)
