"""Finds out by small calls what a stranger's kernel takes, where neither its signature nor its CAPABILITIES say."""

from dataclasses import replace

import numpy as np

from refimpl import oracle
from verify.case import Case, Shape
from verify.foreign.call import Malformed, call
from verify.foreign.facts import Facts, words
from verify.foreign.imports import simulated
from verify.foreign.refusal import fatal, one_line, refusal
from verify.foreign.signature import NAMES, NEEDS
from verify.foreign.spec import WORDS, Spec, load
from verify.option_recipes import OPTION_RECIPES
from verify.worker import Worker, WorkerDied

PATIENCE = 60.0  # seconds for a probe, if the limit of a run is not less
CLOSE = 0.05  # of max|V|: far above rounding, far below what another convention gives
PROBE = "probe"


def probe(spec: Spec, cases, dtypes, *, small=None, limit=120.0, progress=lambda done, total: None) -> Facts:
    """Learn how to call a kernel and what it takes. Runs it in a worker process.

    Parameters
    ----------
    spec : Spec
    cases : list of Case
        What it is to be judged on: nothing else is probed.
    dtypes : list of str
    small : bool, optional
        The small shapes; by how long a call takes if not given.
    limit : float
        Seconds of one run.
    """
    with Worker() as worker:
        return _Prober(spec, worker, min(limit, PATIENCE), progress).facts(cases, dtypes, small, limit)


def describe(spec: Spec) -> dict:
    """What the file says by itself. Runs in the worker."""
    from verify.foreign.arrays import open_arrays

    loaded = load(spec)
    arrays = open_arrays(loaded.arrays)
    gradients = getattr(loaded.backward, "__name__", "") or {"torch": "autograd", "jax": "jax.vjp"}.get(
        loaded.arrays, ""
    )
    return {
        "arrays": loaded.arrays,
        "why_arrays": loaded.why_arrays,
        "says": loaded.says,
        "options": tuple(name for meaning, name in loaded.parameters.items() if meaning in NAMES),
        "meanings": frozenset(loaded.parameters),
        "gradients": gradients if spec.backward else "",
        "executor": "simulated" if simulated() else arrays.executor,
        "device": arrays.device,
        "strided": arrays.strided,
    }


def attempt(spec: Spec, layout: str, case: Case, dtype: str, small: bool) -> dict:
    """One small call. Runs in the worker; what the kernel raises is part of the answer.

    Returns
    -------
    dict
        seconds, lse, notes and agrees (names of conventions whose truth O is near); or error, and whether it was
        raised, and raised as a refusal.
    """
    problem = case.build(dtype, small)
    try:
        answer = call(load(spec), problem, layout)
    except Malformed as error:
        return {"error": str(error), "refused": False}
    except Exception as error:
        return {"error": one_line(error), "refused": refusal(error), "raised": not fatal(error)}
    agrees = []
    for causal in (False, True):
        for align in ("bottom_right", "top_left"):
            options = problem.options | {"causal": causal, "align": align}
            truth, _ = oracle.attention(problem.Q, problem.K, problem.V, **options)
            far = np.abs(answer.outputs["O"].astype(np.float64) - truth).max(initial=0)
            if far <= CLOSE * np.abs(problem.V.astype(np.float64)).max(initial=0):
                agrees.append(f"causal {align}" if causal else "plain")
    return {"seconds": answer.seconds, "lse": "lse" in answer.outputs, "notes": answer.notes, "agrees": agrees}


class _Prober:
    """The calls that make up a kernel's facts, in one worker."""

    def __init__(self, spec, worker, patience, progress):
        self._spec, self._worker, self._patience, self._progress = spec, worker, patience, progress
        self._layout, self._small, self._dtype = spec.layout or "bhsd", False, "fp32"

    def facts(self, cases, dtypes, small, limit):
        try:
            found = self._worker.call("verify.foreign.probe:describe", self._spec, limit=self._patience)
        except (WorkerDied, RuntimeError) as error:
            return Facts(failure=str(error))
        meanings, strided = found.pop("meanings"), found.pop("strided")
        facts = Facts(**found)
        says = facts.says
        self._small = facts.executor == "simulated" if small is None else small
        why = ""
        if small is None and self._small:
            why = "no GPU: a simulator stands in, a thread or a block at a time"
        first, refused, placed = self._placed(dtypes, says)
        if "error" in first:
            return replace(facts, small=self._small, failure=f"in a first call, {self._said()}: {first['error']}")
        facts = replace(facts, layout=self._layout, why_layout=placed)
        if small is None and not self._small:
            slow = first["seconds"] * _largest(cases, _base(False))
            if slow > limit / 2:
                self._small, why = True, f"at the full shapes a call would take about {slow:.0f} s"
        facts = replace(facts, small=self._small, why_small=why, lse=first["lse"], notes=tuple(first["notes"]))
        refused |= self._types(dtypes, says, refused)
        always = "causal" not in meanings and first["agrees"] and "plain" not in first["agrees"]
        refused |= self._words(cases, says, meanings, strided, facts.gradients, always)
        return replace(facts, refused=refused, always_causal=bool(always))

    def _first(self, dtypes, says):
        """(the answer in the first type that works, types that were refused on the way)."""
        failed, refused = {"error": f"takes none of {', '.join(dtypes)}"}, {}
        for dtype in dtypes:
            if "dtypes" in says and dtype not in says["dtypes"]:
                refused["dtype", dtype] = f"stores {', '.join(says['dtypes'])}, not {dtype} (said by CAPABILITIES)"
                continue
            first = self._try(_base(self._small), dtype)
            if "error" not in first:
                self._dtype = dtype
                # The first call compiles; the second says how long one takes.
                again = self._try(_base(self._small), dtype)
                return first | {"seconds": again.get("seconds", first["seconds"])}, refused
            failed = failed if "raised" in failed else first
            if not first.get("raised"):
                break
            refused["dtype", dtype] = f"does not take {dtype} (probed: {first['error']})"
        return failed, refused

    def _placed(self, dtypes, says):
        """(first answer, types refused, who said the layout): as asked, as said, or as the output is attention."""
        self._layout = self._spec.layout or says.get("layout") or "bhsd"
        first, refused = self._first(dtypes, says)
        if self._spec.layout or "layout" in says:
            return first, refused, "asked for" if self._spec.layout else "said by CAPABILITIES"
        if not first.get("agrees") and not first.get("died"):
            self._layout = "bshd"
            other, others = self._first(dtypes, says)
            if other.get("agrees"):
                return other, others, "probed: only so its output is attention"
            self._layout = "bhsd"
        return first, refused, "the default"

    def _types(self, dtypes, says, known):
        """Storage types that it refuses, beside those that are known."""
        refused = {}
        for dtype in dtypes:
            if dtype == self._dtype or ("dtype", dtype) in known:
                continue
            if "dtypes" in says:
                if dtype not in says["dtypes"]:
                    refused["dtype", dtype] = f"stores {', '.join(says['dtypes'])}, not {dtype} (said by CAPABILITIES)"
                continue
            told = self._try(_base(self._small), dtype)
            if told.get("raised"):
                refused["dtype", dtype] = f"does not take {dtype} (probed: {told['error']})"
        return refused

    def _words(self, cases, says, meanings, strided, gradients, always):
        """Everything else that the cases ask for and it refuses."""
        refused = {}
        asked = sorted(set().union(*(words(case, self._small) for case in cases)))
        dims = sorted({(case.shape(self._small).d, case.shape(self._small).dv) for case in cases})
        self._progress(0, total := len(asked) + len(dims))
        for done, word in enumerate(asked, 1):
            if reason := self._word(word, says, meanings, strided, gradients, always):
                refused[word] = reason
            self._progress(done, total)
        if "causal_cross" not in refused and {"top_left", "bottom_right"} & set(asked) and "align" not in meanings:
            refused |= self._alignment(says)
        for done, (d, dv) in enumerate(dims, len(asked) + 1):
            if "head_dims" in says:
                odd = [n for n in (d, dv) if n not in says["head_dims"]]
                told = f"does not take head dim {odd[0]} (said by CAPABILITIES)" if odd else None
            else:
                told = self._refusal(
                    f"head dim {d}" + (f" with {dv} for V" if dv != d else ""), _base(self._small, d=d, dv=dv)
                )
            if told:
                refused["head dim", d, dv] = told
            self._progress(done, total)
        return refused

    def _word(self, word, says, meanings, strided, gradients, always):
        """Why it does not take what a word says, or None."""
        if says.get(word) is not None:
            return None if says[word] else f"does not take {WORDS[word]} (said by CAPABILITIES)"
        if word == "strides" and not strided:
            return "its arrays have no strides"
        if word == "varlen":
            return f"is not asked for {WORDS[word]}"
        if word == "backward" and not gradients:
            return "no backward function beside it, and no autograd"
        if word not in _PROBES:  # alignment is found out apart, and NaN by the run itself
            return None
        missing = [NAMES[meaning][0] for meaning in NEEDS.get(word, ()) if meaning not in meanings]
        if missing and not (word == "causal" and always):
            return f"does not take {WORDS[word]}: its signature has no {' and no '.join(missing)}"
        # An option that the signature names is promised: then only a refusal on purpose is one.
        return self._refusal(WORDS[word], _PROBES[word](_base(self._small)), promised=word in NEEDS)

    def _refusal(self, what, case, promised=False):
        """Why a probe shows that it does not take something, or None."""
        told = self._try(case, self._dtype)
        raised = told.get("refused" if promised else "raised")
        return f"does not take {what} (probed: {told['error']})" if raised else None

    def _alignment(self, says):
        """Of the two conventions for causal with Nq != Nk, the one it does not follow, if it follows the other."""
        for mine, other in (("top_left", "bottom_right"), ("bottom_right", "top_left")):
            if says.get(mine):
                return {other: f"aligns {mine.replace('_', ' ')} (said by CAPABILITIES)"}
        agrees = self._try(_PROBES["causal_cross"](_base(self._small)), self._dtype).get("agrees", ())
        if "causal top_left" in agrees:
            return {"bottom_right": "aligns causal top left (probed, at fewer queries than keys)"}
        return {"top_left": "takes no alignment, and is judged as bottom right"}

    def _try(self, case, dtype):
        """One attempt in the worker; a death or a hang is an error that is no refusal."""
        try:
            call = ("verify.foreign.probe:attempt", self._spec, self._layout, case, dtype, self._small)
            return self._worker.call(*call, limit=self._patience)
        except (WorkerDied, RuntimeError) as error:
            return {"error": str(error), "refused": False, "died": True}

    def _said(self):
        s = _base(self._small).shape(self._small)
        return f"B = {s.B}, H = {s.Hq}, N = {s.Nq}, d = {s.d}, {self._dtype}"


def _base(small, d=None, dv=None):
    """The friendliest case: whole tiles, several batch entries and heads, no options."""
    N, usual = (32, 8) if small else (128, 64)
    shape = Shape(2, 2, 2, N, N, d or usual, dv or d or usual)
    return Case(PROBE, "", PROBE, shape, shape)


def _sized(case, **changes):
    shape = case.full._replace(**changes)
    return replace(case, full=shape, small=shape)


def _with_option(word):
    """A case with the first recipe that needs this word alone."""
    name = next((name for name, recipe in OPTION_RECIPES.items() if recipe.needs == {word}), None)
    return lambda case: replace(case, having=(name,))


_PROBES = {
    "causal": lambda case: replace(case, causal=True),
    "causal_cross": lambda case: replace(_sized(case, Nq=case.full.Nq // 2), causal=True),
    "cross": lambda case: _sized(case, Nq=case.full.Nq // 2),
    "gqa": lambda case: _sized(case, Hq=4),
    "ragged": lambda case: _sized(case, Nq=case.full.Nq - 15, Nk=case.full.Nk - 15),
    "no_keys": lambda case: _sized(case, Nk=0),
    "strides": lambda case: replace(case, layout="fused"),
    "unaligned": lambda case: replace(case, layout="offset"),
    "scale": lambda case: replace(case, scale=0.3),
    "backward": lambda case: replace(case, backward=True),
    **{word: _with_option(word) for word in ("window", "softcap", "alibi", "mask", "bias", "lengths", "dropout")},
}


def _largest(cases, base):
    """How much more the largest case computes than a base call."""

    def work(s):
        return s.B * s.Hq * s.Nq * s.Nk * (s.d + s.dv)

    return max((work(case.full) for case in cases), default=0) / work(base.full)
