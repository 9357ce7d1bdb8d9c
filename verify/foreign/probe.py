"""Finds out by small calls what a stranger's kernel takes, where neither its signature nor its CAPABILITIES say."""

from dataclasses import replace

from verify.foreign.facts import Facts, fitted, usual, words
from verify.foreign.probe_cases import FURTHER_DIMS, PROBES, base, largest
from verify.foreign.signature import NAMES, NEEDS
from verify.foreign.spec import WORDS, Spec
from verify.worker import Worker, WorkerDied


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
        return _Prober(spec, worker, limit, progress).facts(cases, dtypes, small, limit)


class _Prober:
    """The calls that make up a kernel's facts, in one worker."""

    def __init__(self, spec, worker, patience, progress):
        self._spec, self._worker, self._patience, self._progress = spec, worker, patience, progress
        self._layout, self._small, self._dtype, self._d = spec.layout or "bhsd", False, "fp32", 0
        self._hints, self._died, self._bf16 = [], [], ""

    def facts(self, cases, dtypes, small, limit):
        try:
            found = self._worker.call("verify.foreign.attempt:describe", self._spec, limit=self._patience)
        except (WorkerDied, RuntimeError) as error:
            return Facts(failure=str(error))
        names = "meanings", "strided", "bf16", "unasked"
        meanings, strided, self._bf16, unasked = (found.pop(name) for name in names)
        facts = Facts(**found)
        says = facts.says
        self._small = facts.executor == "simulated" if small is None else small
        why = ""
        if small is None and self._small:
            why = "no GPU: a simulator stands in, a thread or a block at a time"
        first, refused, placed, why_d = self._fitted(dtypes, says)
        if "error" not in first and small is None and not self._small:
            slow = first["seconds"] * largest(cases, self._base())
            if slow > limit / 2:
                self._small, why = True, f"at the full shapes a call would take about {slow:.0f} s"
                first, refused, placed, why_d = self._fitted(dtypes, says)
        if "error" in first:
            told = "; ".join([f"in a first call, {self._said()}: {first['error']}", *self._hints])
            return replace(facts, small=self._small, failure=told)
        cases = [fitted(case, self._d, self._small) for case in cases]
        refused |= self._types(dtypes, says, refused)
        always = "causal" not in meanings and first["agrees"] and "plain" not in first["agrees"]
        refused |= self._words(cases, says, meanings, strided, facts.gradients, always)
        facts = replace(facts, layout=self._layout, why_layout=placed, d=self._d, why_d=why_d, refused=refused)
        facts = replace(facts, small=self._small, why_small=why, lse=first["lse"], notes=tuple(first["notes"]))
        hints = [*self._hints, *([f"{unasked} beside it is not looked at: --backward does"] if unasked else [])]
        return replace(
            facts, always_causal=bool(always), hints=tuple(hints), died=tuple(dict.fromkeys(self._died)),
            gradients="" if "backward" in refused else facts.gradients,
        )  # fmt: skip

    def _fitted(self, dtypes, says):
        """(first answer, types refused, who said the layout, why its head dim is not the usual one)."""
        said = sorted(says.get("head_dims", ()), key=lambda d: abs(d - usual(self._small)))
        dims = said or [usual(self._small), *(d for d in FURTHER_DIMS if d != usual(self._small))]
        tried = {}
        for d in dims:
            self._d = 0 if d == usual(self._small) else d
            first, refused, placed = tried[d] = self._placed(dtypes, says)
            if not first.get("raised"):  # it works, or is wrong in a way that another head dim does not mend
                why = "said by CAPABILITIES" if said else f"probed: {tried[dims[0]][0].get('error')}"
                return first, refused, placed, why if self._d else ""
        self._d = 0 if dims[0] == usual(self._small) else dims[0]
        return *tried[dims[0]], ""

    def _placed(self, dtypes, says):
        """(first answer, types refused, who said the layout): as asked, as said, or as the output is attention."""
        self._layout = asked = self._spec.layout or says.get("layout") or "bhsd"
        self._hints, self._died = [], []
        first, refused = self._first(dtypes, says)
        dtype = self._dtype
        who = "asked for" if self._spec.layout else "said by CAPABILITIES" if "layout" in says else ""
        if not first.get("agrees") and not first.get("died"):
            self._layout = "bshd" if asked == "bhsd" else "bhsd"
            other, others = self._first(dtypes, says)
            if other.get("agrees") and not who:
                return other, others, "probed: only so its output is attention"
            if other.get("agrees"):
                self._hints.append(f"its output is attention in layout {self._layout}, though {asked} was {who}")
            self._layout, self._dtype = asked, dtype
        self._died = []  # in the wrong layout anything may happen
        return first, refused, who or "the default"

    def _first(self, dtypes, says):
        """(the answer in the first type that works, types that were refused on the way)."""
        failed, refused = {"error": f"takes none of {', '.join(dtypes)}"}, {}
        for dtype in dtypes:
            if "dtypes" in says and dtype not in says["dtypes"]:
                refused["dtype", dtype] = f"stores {', '.join(says['dtypes'])}, not {dtype} (said by CAPABILITIES)"
                continue
            first = self._try(self._base(), dtype)
            if "error" not in first and not self._excused(dtype, first):
                self._dtype = dtype
                # The first call compiles; the second says how long one takes.
                again = self._try(self._base(), dtype)
                if "error" in again:
                    return {"error": f"at the same call a second time: {again['error']}", "died": True}, refused
                return first | {"seconds": again["seconds"]}, refused
            if "error" not in first:
                refused["dtype", dtype] = self._bf16
                continue
            failed = failed if "raised" in failed else first
            if not first.get("raised"):
                break
            refused["dtype", dtype] = f"does not take {dtype} (probed: {first['error']})"
        return failed, refused

    def _excused(self, dtype, told):
        """Whether an output that is no attention is the simulator's doing."""
        return dtype == "bf16" and self._bf16 and not told["agrees"]

    def _types(self, dtypes, says, known):
        """Storage types that it refuses, beside those that are known."""
        refused = {}
        for dtype in dtypes:
            if dtype == self._dtype or ("dtype", dtype) in known:
                continue
            if "dtypes" in says and dtype not in says["dtypes"]:
                refused["dtype", dtype] = f"stores {', '.join(says['dtypes'])}, not {dtype} (said by CAPABILITIES)"
                continue
            if "dtypes" in says and not (dtype == "bf16" and self._bf16):
                continue
            told = self._try(self._base(), dtype)
            if "error" not in told and self._excused(dtype, told):
                refused["dtype", dtype] = self._bf16
            elif told.get("raised") and "dtypes" not in says:
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
                what = f"head dim {d}" + (f" with {dv} for V" if dv != d else "")
                told = self._refusal(what, self._base(d, dv))
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
        if word not in PROBES:  # alignment is found out apart, and NaN by the run itself
            return None
        missing = [NAMES[meaning][0] for meaning in NEEDS.get(word, ()) if meaning not in meanings]
        if missing and not (word == "causal" and always):
            return f"does not take {WORDS[word]}: its signature has no {' and no '.join(missing)}"
        # An option that the signature names is promised: then only a refusal on purpose is one.
        return self._refusal(WORDS[word], PROBES[word](self._base()), promised=word in NEEDS)

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
        agrees = self._try(PROBES["causal_cross"](self._base()), self._dtype).get("agrees", ())
        if "causal top_left" in agrees:
            if not self._spec.adapter:  # what others ship aligns as they say
                self._hints.append("causal is aligned top left (probed); if you meant bottom right, this is your bug")
            return {"bottom_right": "aligns causal top left (probed, at fewer queries than keys)"}
        return {"top_left": "takes no alignment, and is judged as bottom right"}

    def _try(self, case, dtype):
        """One attempt in the worker; a death or a hang is an error that is no refusal."""
        try:
            call = ("verify.foreign.attempt:attempt", self._spec, self._layout, case, dtype, self._small)
            return self._worker.call(*call, limit=self._patience)
        except (WorkerDied, RuntimeError) as error:
            self._died.append(f"in a probe, {self._said(case, dtype)}: {error}")
            return {"error": str(error), "refused": False, "died": True}

    def _base(self, d=0, dv=0):
        """The friendliest case, of a head dim that it takes."""
        return base(self._small, d or self._d, dv)

    def _said(self, case=None, dtype=None):
        """A call in a few words."""
        s = (case or self._base()).shape(self._small)
        N = f"N = {s.Nq}" if s.Nq == s.Nk else f"N = {s.Nq} and {s.Nk}"
        having = (*["causal"] * case.causal, *case.having) if case else ()
        return ", ".join([f"B = {s.B}, H = {s.Hq}, {N}, d = {s.d}, {dtype or self._dtype}", *having])
