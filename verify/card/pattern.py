"""What the failing runs of a kernel have in common and the passing ones have not."""

from verify.foreign.facts import words
from verify.foreign.signature import NEEDS
from verify.foreign.spec import WORDS

FEWEST = 2  # failing runs that make a pattern
STRAY = 1 / 2  # share of the passing runs that may have it, too; the sentence says how many do


def pattern(card) -> str:
    """One sentence, or "" where nothing sets the failing runs apart.

    Parameters
    ----------
    card : verify.card.card.Card
    """
    judged = [
        (_traits(card, case, dtype), run.result.verdict != "pass")
        for (case, dtype), run in zip(card.plan.keys, card.runs, strict=True)
        if run.result.verdict != "skip"
    ]
    failing = [traits for traits, bad in judged if bad]
    passing = [traits for traits, bad in judged if not bad]
    if min(len(failing), len(passing)) < FEWEST:
        return ""
    shared = set.intersection(*failing)
    told = [(sum(trait in traits for traits in passing), trait) for trait in shared]
    told = sorted(t for t in told if t[0] <= STRAY * len(passing))
    if not told:
        return ""
    also, trait = told[0]
    others = f"{also} of the {len(passing)} that pass" if also else f"none of the {len(passing)} that pass"
    verb = "have" if also > 1 else "has"
    said = f"What all {len(failing)} failing runs have in common is {trait}; so {verb} {others}"
    # Gradients are judged only where they are asked for: nobody has to say that a kernel is not for them.
    word = next((word for word, phrase in WORDS.items() if phrase == trait and word not in {*NEEDS, "backward"}), None)
    if word and also == 0:
        said += f". If it is not for that, say so in the file: CAPABILITIES = {{{word!r}: False}}"
    return said


def _traits(card, case, dtype):
    """What can be said of a run, as phrases."""
    facts = card.plan.facts
    s = case.shape(facts.small)
    named = {WORDS[word] for word in words(case, facts.small) if word in WORDS}
    sizes = {
        "more than one head": s.Hq > 1,
        "more than one batch entry": s.B > 1,
        "more keys than a tile of 16": s.Nk > 16,
        "more keys than a tile of 32": s.Nk > 32,
        "more keys than a tile of 64": s.Nk > 64,
        "more keys than a tile of 128": s.Nk > 128,
        "rows that see no key": case.causal and s.Nq > s.Nk and case.align == "bottom_right",
        "a head dim that is no multiple of 8": bool(s.d % 8),
        f"{dtype}": True,
        f"inputs of the class {case.recipe}": case.recipe != "normal",
    }
    return named | {phrase for phrase, holds in sizes.items() if holds}
