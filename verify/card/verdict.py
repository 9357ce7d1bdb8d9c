"""The verdict on a kernel, and the line that says it: what was skipped, or never answered, is no pass."""

from verify import document

PASS, FAIL, NOTHING, NO_GRADIENTS = "pass", "fail", "nothing judged", "gradients not judged"


def verdict(plan, results) -> str:
    """PASS, FAIL, NOTHING, or NO_GRADIENTS: they were asked for, and all that was judged was something else.

    Parameters
    ----------
    plan : verify.foreign.run.Plan
    results : list of Result
        One for each of its keys.
    """
    n = document.counts(results)
    if plan.facts.failure:
        return NOTHING
    if n["fail"] + n["error"] or plan.facts.died:
        return FAIL
    if not n["pass"]:
        return NOTHING
    return NO_GRADIENTS if without_gradients(plan, results) else PASS


def headline(plan, results) -> str:
    """The counts in one line, and whatever else belongs beside a verdict."""
    n, facts = document.counts(results), plan.facts
    if facts.failure:
        return f"could not be judged: {facts.failure}"
    parts = [f"{n['pass']} of {sum(n.values()) - n['skip']} runs passed"]
    parts += [f"{n[word]} {label}" for word, label in (("fail", "failed"), ("error", "raised or died")) if n[word]]
    parts += [f"{n['skip']} skipped"] if n["skip"] else []
    # A simulator says so itself.
    small = [f"small shapes alone, as {facts.why_small}"] if facts.why_small and facts.executor == "cpu" else []
    why = without_gradients(plan, results)
    missing = [f"no gradients were judged, though --backward asked for them: {why}"] if why else []
    return "; ".join([", ".join(parts), *small, *missing, *facts.died, *facts.hints])


def without_gradients(plan, results) -> str:
    """Why there are no gradients, though they were asked for; empty if there are, or were not."""
    if not plan.spec.backward or any("dQ" in result.outputs for result in results):
        return ""
    judging = [result for (case, _), result in zip(plan.keys, results, strict=True) if case.backward]
    if not judging:
        return "none of the cases judges them"
    if "(" in (why := plan.facts.refused.get("backward", "")):  # it says who said so, or what a probe showed
        return why
    if plan.facts.gradients:
        return judging[0].reason or "they were not returned"
    name = f"{plan.spec.function or 'attn'}_backward"
    return f"there is no {name}(q, k, v, do, ...) beside it, and {plan.facts.arrays} arrays have no autograd"
