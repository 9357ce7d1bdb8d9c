"""A card: everything that is known of one kernel after it was judged, as plain data that every report is made of."""

import math
import shlex
from dataclasses import asdict, dataclass
from statistics import median

from verify import document, summary, tolerance
from verify.card import cases as card_cases
from verify.card import verdict as card_verdict
from verify.card.worst import worst_run
from verify.foreign import facts as foreign_facts
from verify.foreign.run import Plan, Run
from verify.result import Result, encode

# What is said of a kernel in JSON, of all that is known.
FACTS = ("arrays", "layout", "executor", "device", "options", "small", "d", "always_causal", "gradients")
# An error of fewer bounds than this may be rounding after all, where a kernel rounds what the plain formula does not.
FEW = 4
NEAR = "about a rounding more than the plain formula makes, such as that of q times scale before the product"


@dataclass(frozen=True)
class Card:
    """One kernel, judged.

    Attributes
    ----------
    plan : Plan
        What was asked for; `plan.facts` says how the kernel was called.
    runs : tuple of Run
    """

    plan: Plan
    runs: tuple

    @property
    def name(self) -> str:
        return self.plan.spec.name

    @property
    def results(self) -> list[Result]:
        return [run.result for run in self.runs]

    @property
    def counts(self) -> dict:
        return document.counts(self.results)

    @property
    def verdict(self) -> str:
        """One of those of `card.verdict`."""
        return card_verdict.verdict(self.plan, self.results)

    @property
    def worst(self) -> Run | None:
        """The run whose error is to be looked at."""
        return worst_run(self.plan, self.runs)

    def headline(self) -> str:
        """The verdict in one line."""
        return card_verdict.headline(self.plan, self.results)

    def of_kind(self, kind) -> list[tuple]:
        """(case, run) of one kind: "matrix", "growth", or None for the default cases."""
        kinds = {card_cases.MATRIX, card_cases.GROWTH}
        pairs = [(case, run) for (case, _), run in zip(self.plan.keys, self.runs, strict=True)]
        return [(c, r) for c, r in pairs if (c.kind == kind if kind else c.kind not in kinds)]

    def call(self) -> list[str]:
        """How the kernel was called, and what was learnt by trying."""
        facts = self.plan.facts
        if facts.failure and not facts.device:
            return []
        options = ", ".join(facts.options) or "none"
        said = [
            f"Called with {facts.arrays} arrays ({facts.why_arrays}), layout {facts.layout} ({facts.why_layout}); "
            f"options that its signature names: {options}.",
        ]
        if not facts.failure:
            said.append(summary.what_ran(self.results) + (f" ({facts.why_small})" if facts.why_small else "") + ".")
        if self.plan.spec.backward and facts.gradients:
            said.append(f"Gradients by {facts.gradients}.")
        if facts.d and not facts.failure:
            usual = foreign_facts.usual(facts.small)
            said.append(f"Cases of head dim {usual} are run at {facts.d}, as it does not take {usual} ({facts.why_d}).")
        if facts.small and not facts.failure:
            most = max(max(r.size["Nq"], r.size["Nk"]) for r in self.results)
            said.append(f"Small shapes have at most {most} keys: a tile that is larger is never followed by another.")
        if facts.always_causal:
            said.append(
                "It takes no causal option and its output is that of causal attention, so it is judged as such."
            )
        return [line[0].upper() + line[1:] for line in said + [f"{note}." for note in self.notes()]]

    def notes(self) -> list[str]:
        """What was left aside in what it returned."""
        return list(dict.fromkeys(note for run in self.runs for note in run.notes))

    def anchors(self) -> list[dict]:
        """For each type and output, the anchors of the run that comes nearest to its limit or beyond."""
        found = {}
        for run in self.runs:
            for name, m in run.result.outputs.items():
                key = run.result.dtype, name
                # An error that is not finite has no place on an axis; it is shown if there is no other.
                if key not in found or _rank(m.ratio) > _rank(found[key]["ratio"]):
                    found[key] = _anchor(run.result, name, m)
        return list(found.values())

    def growth(self) -> list[dict]:
        """Error of O against N: one entry a type and length."""
        return [
            {"N": case.shape(self.plan.facts.small).Nq} | _anchor(run.result, "O", run.result.outputs["O"])
            for case, run in self.of_kind(card_cases.GROWTH)
            if "O" in run.result.outputs
        ]

    def why(self) -> list[str]:
        """Why it is not equal to the truth: what is normal, and in each type how this kernel compares."""
        said = []
        for dtype in self.plan.dtypes:
            judged = [r.outputs["O"] for r in self.results if r.dtype == dtype and "O" in r.outputs]
            rounding = [m for m in judged if math.isfinite(m.max_abs) and m.plain > 0]
            if not rounding:
                continue
            out = sum(not m.ok for m in judged)
            beyond = [m.ratio for m in judged if not m.ok]
            lost = any(not math.isfinite(ratio) for ratio in beyond)
            worst = math.inf if lost else max(beyond or [m.ratio for m in judged])
            ratio = median(m.max_abs / m.plain for m in rounding)
            line = (
                f"{dtype}: yours is off by {_times(ratio)} what the plain formula is (median of {len(rounding)} runs). "
            )
            if out:
                size = f"{times(worst)} its bound" if math.isfinite(worst) else "not finite"
                meaning = NEAR if worst < FEW else "that is not rounding"
                line += (
                    f"{out} of {len(judged)} {'is' if out == 1 else 'are'} out of bound, the worst {size}: {meaning}."
                )
            else:
                line += f"The worst run uses {worst:.0%} of its bound: normal."
            said.append(line)
        lead = (
            "Rounding alone takes a correct kernel away from fp64. Allowed is "
            f"{tolerance.FACTOR:g} times the error of the plain formula at the same precision, and a floor."
        )
        return [lead, *said] if said else []

    def skipped(self) -> dict[str, list[Result]]:
        """Skipped runs by reason."""
        groups = {}
        for result in self.results:
            if result.verdict == "skip":
                groups.setdefault(result.reason, []).append(result)
        return groups

    def failed(self) -> dict[str, list[Run]]:
        """Failing runs by reason, those that are alike together."""
        groups = {}
        for run in self.runs:
            if run.result.verdict in ("fail", "error"):
                groups.setdefault(f"{run.result.verdict} {run.result.reason}", []).append(run)
        return groups

    def again(self) -> str:
        """The command that repeats the failing run that is looked at, or the first, and keeps its arrays."""
        plan, worst = self.plan, self.worst
        pairs = zip(self.plan.keys, self.runs, strict=True)
        failing = [(case, run) for (case, _), run in pairs if run.result.verdict in ("fail", "error")]
        if not failing:
            return ""
        case, run = next((pair for pair in failing if pair[1] is worst), failing[0])
        result = run.result
        words = ["python -m verify --kernel", shlex.quote(plan.spec.text), f"--cases {case.id} --dtype {result.dtype}"]
        words += [f"--arrays {plan.spec.arrays}"] if plan.spec.arrays else []
        words += [f"--layout {plan.spec.layout}"] if plan.spec.layout else []
        words += ["--backward"] if case.backward else []
        words += ["--small"] if plan.facts.small else []
        return " ".join([*words, f"--seed {result.seed} --dump failing"])

    def to_dict(self) -> dict:
        """The card as data for JSON."""
        facts, worst = self.plan.facts, self.worst
        cases = {case.id: case for case in self.plan.cases}
        made = {
            "kernel": self.name,
            "source": self.plan.spec.text,
            "fingerprint": document.file_fingerprint(self.plan.spec.path),
            "verdict": self.verdict,
            "headline": self.headline(),
            "call": self.call(),
            "facts": {name: getattr(facts, name) for name in FACTS},
            "refused": {_key(word): reason for word, reason in facts.refused.items()},
            "factor": tolerance.FACTOR,
            "counts": self.counts,
            "why": self.why(),
            "anchors": self.anchors(),
            "growth": self.growth(),
            "worst": worst and {"case": worst.result.case, "dtype": worst.result.dtype, "place": asdict(worst.place)},
            "cases": {
                name: {"about": c.about, "kind": c.kind, "recipe": c.recipe, "needs": sorted(c.needs)}
                for name, c in cases.items()
            },
            "results": [result.to_dict() for result in self.results],
        }
        head = document.head("card", facts.executor, device=facts.device)
        head["packages"] |= {name: v for name, v in document.packages(document.FURTHER).items() if v}
        return encode(head | made)


def build(plan: Plan, runs) -> Card:
    """A card of a plan that was run."""
    return Card(plan, tuple(runs))


def _anchor(result, name, m):
    """What a picture of the anchors needs."""
    return {
        "dtype": result.dtype,
        "output": name,
        "case": result.case,
        "error": m.max_abs,
        "plain": m.plain,
        "bound": m.bound,
        "apriori": m.apriori,
        "fixed": m.fixed,
        "ratio": m.ratio,
        "ok": m.ok,
    }


def times(ratio):
    """An error over its bound as people say it."""
    return f"{summary.shown(ratio)} times" if ratio < 1e9 else f"{ratio:.0e} times"


def _times(ratio):
    """A factor as people say it."""
    return f"{ratio:.2g} times" if ratio < 1000 else f"{ratio:.0e} times"


def _rank(ratio):
    return ratio if math.isfinite(ratio) else -1.0


def _key(word):
    return word if isinstance(word, str) else " ".join(str(part) for part in word)
