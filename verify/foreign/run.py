"""Runs a stranger's kernel on cases, in worker processes, and returns a result for every one of them."""

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from verify import judge, runner
from verify.card.place import Place, place
from verify.case import Case
from verify.executors import device_name
from verify.foreign.call import Malformed, call
from verify.foreign.facts import Facts, words
from verify.foreign.refusal import line_of, one_line, refusal
from verify.foreign.spec import WORDS, Spec, load
from verify.pool import cores, each
from verify.result import Result

HIDES_NAN = ("nan_hidden", "nan_seen")
# Words of a case that are not options, and so are nothing to refuse together.
NO_OPTIONS = {"cross", "ragged", "wide_v", "bottom_right", "top_left", "causal_cross", *HIDES_NAN}


@dataclass(frozen=True)
class Plan:
    """What to run and how.

    Attributes
    ----------
    spec : Spec
    facts : Facts
    cases : tuple of Case
    dtypes : tuple of str
    seed : int or None
        Instead of the cases' own.
    limit : float
        Seconds for one run.
    jobs : int
        Worker processes at a time.
    dump : str or None
        Folder to which the arrays of every run are written.
    """

    spec: Spec
    facts: Facts
    cases: tuple
    dtypes: tuple
    seed: int | None = None
    limit: float = 120.0
    jobs: int = field(default_factory=cores)
    dump: str | None = None

    @property
    def keys(self):
        """Every (case, dtype), in the order of the report."""
        return [(case, dtype) for dtype in self.dtypes for case in self.cases]


@dataclass(frozen=True)
class Run:
    """One judged run: its result, where its error lies, and what was noted of the call."""

    result: Result
    place: Place | None = None
    notes: tuple = ()


def run(plan: Plan, progress=lambda done, total: None) -> list[Run]:
    """Run a plan.

    Parameters
    ----------
    plan : Plan
    progress : callable
        ``progress(done, total)`` after each run, from any thread.

    Returns
    -------
    list of Run
        One for each of `plan.keys`, in their order: skipped ones too, and those that never came back.
    """
    runs, calls = {}, []
    for key in plan.keys:
        if plan.facts.failure:
            runs[key] = Run(_unjudged(plan, key, "error", plan.facts.failure))
        elif reason := plan.facts.refuses(*key):
            runs[key] = Run(_unjudged(plan, key, "skip", reason))
        else:
            calls.append(key)
    progress(len(runs), len(plan.keys))
    answers = each(
        "verify.foreign.run:run_one",
        [(plan, *key) for key in calls],
        limit=plan.limit,
        jobs=plan.jobs,
        fresh=plan.facts.executor == "gpu",
        progress=lambda done, _: progress(len(plan.keys) - len(calls) + done, len(plan.keys)),
    )
    for key, (found, failure) in zip(calls, answers, strict=True):
        runs[key] = found or Run(_unjudged(plan, key, "error", failure))
    return [runs[key] for key in plan.keys]


def run_one(plan: Plan, case: Case, dtype: str) -> Run:
    """Build the case, run the kernel on it, judge it. Runs in the worker; exceptions of the kernel come through."""
    loaded, facts = load(plan.spec), plan.facts
    problem = case.build(dtype, facts.small, plan.seed)
    before = [x.tobytes() for x in (problem.Q, problem.K, problem.V)]
    start = time.perf_counter()
    try:
        answer = call(loaded, problem, facts.layout)
    except Malformed as error:
        made = _unjudged(plan, (case, dtype), "fail", str(error))
        return Run(replace(made, seconds=time.perf_counter() - start))
    except Exception as error:
        # Each option was taken by itself. A refusal of several together is one, too; of none, it is an accident.
        several = len(words(case, facts.small) - NO_OPTIONS) > 1
        if several and refusal(error):
            return Run(_unjudged(plan, (case, dtype), "skip", f"refuses these options together ({one_line(error)})"))
        if isinstance(error, NotImplementedError):  # whatever it took elsewhere, this is said on purpose
            return Run(_unjudged(plan, (case, dtype), "skip", f"refuses this ({one_line(error)})"))
        error.place = line_of(error, plan.spec.path)
        raise
    known = judge.reference(problem, problem.dO() if problem.backward else None)

    def judged(outputs):
        return judge.verdict(
            replace(problem, **dict(zip("QKV", answer.inputs, strict=True))),
            outputs,
            known=known,
            before=before,
            kernel=plan.spec.name,
            executor=answer.executor,
            device=answer.device,
            tile=None,
            seconds=answer.seconds,
        )

    outputs, empty = answer.outputs, np.isneginf(known.anchors["lse"].truth)
    if empty.any() and facts.says.get("empty_rows") is False:
        if problem.backward:
            told = f"has {WORDS['empty_rows']}, and what they hand back is in all gradients (said by CAPABILITIES)"
            return Run(_unjudged(plan, (case, dtype), "skip", told))
        if empty.all():
            told = f"has {WORDS['empty_rows']} and no others (said by CAPABILITIES)"
            return Run(_unjudged(plan, (case, dtype), "skip", told))
        outputs = _with_truth(outputs, known, empty)
        answer.notes.append(f"{WORDS['empty_rows']} are not judged, as CAPABILITIES says")
    result = judged(outputs)
    if answer.broken:
        told = f"wrote outside {' and '.join(answer.broken)}: its guard band changed"
        result = replace(result, verdict="fail", reason="; ".join(filter(None, (told, result.reason))))
    elif result.verdict == "fail":
        result = _explained(result, problem, case.recipe, answer, known, facts, judged)
    if plan.dump:
        runner.dump(Path(plan.dump), (plan.spec.name.replace(":", "-"), case.id, dtype), problem, answer.outputs, known)
    return Run(result, place(outputs, known, result.outputs), tuple(answer.notes))


def _explained(result, problem, recipe, answer, known, facts, judged):
    """A failed result with what its kernel may have meant, or skipped where that is no failure."""
    empty = np.isneginf(known.anchors["lse"].truth)
    if recipe in HIDES_NAN and not facts.says.get(recipe) and _leak(result, known, answer):
        told = f"lets NaN through that should stay hidden, as 0 x NaN is NaN; say {recipe!r}: True to be judged on it"
        return replace(result, verdict="skip", reason=told, outputs={})
    told = ""
    if all(m.ok for m in result.outputs.values()):  # inputs were written to: no word of CAPABILITIES excuses that
        return result
    if problem.layout != "contiguous":
        told = "its inputs are views; if it is for contiguous arrays, refuse others or say 'strides': False"
    elif (problem.options.get("scale") or 0) < 0:
        told = "its scale is negative; if it is for positive ones, refuse others or say 'negative_scale': False"
    elif empty.any() and not problem.backward and judged(_with_truth(answer.outputs, known, empty)).verdict == "pass":
        told = f"all of it in {WORDS['empty_rows']}, where O is 0; if yours are undefined, say 'empty_rows': False"
    return replace(result, reason=f"{result.reason} ({told})") if told else result


def _with_truth(outputs, known, rows):
    """Outputs that are right in some rows (B, Hq, Nq), and otherwise as they were."""
    filled = {name: got.copy() for name, got in outputs.items()}
    for name in filled.keys() & {"O", "lse"}:
        filled[name][rows] = known.anchors[name].truth[rows]
    return filled


def _leak(result, known, answer):
    """All that is wrong is NaN or inf where truth is finite."""
    for name, metrics in result.outputs.items():
        truth, got = known.anchors[name].truth, answer.outputs[name].astype(np.float64)
        off = np.isfinite(truth) & np.isfinite(got) & ~(np.abs(got - truth) <= metrics.bound)
        if off.any() or (~np.isfinite(truth) & np.isfinite(got)).any():
            return False
    return True


def _unjudged(plan, key, verdict, reason):
    """The result of a run that has no output to judge."""
    case, dtype = key
    facts = plan.facts
    seed = case.seed if plan.seed is None else plan.seed
    size = case.shape(facts.small)._asdict()
    kind, device = facts.executor, facts.device or device_name("cpu")
    return Result(plan.spec.name, case.id, dtype, kind, device, size, None, verdict, reason, {}, 0.0, seed)
