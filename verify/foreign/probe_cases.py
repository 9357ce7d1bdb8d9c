"""The calls by which a stranger's kernel is asked what it takes: the friendliest case, and one change for each word."""

from dataclasses import replace

from verify.case import Case, Shape
from verify.foreign.facts import usual
from verify.option_recipes import OPTION_RECIPES

PROBE = "probe"
FURTHER_DIMS = (16, 32, 64, 128)  # tried in turn, where the usual head dim is not taken


def base(small, d=0, dv=0):
    """The friendliest case: whole tiles, several batch entries and heads, no options; of the usual head dim if 0."""
    N, d = 32 if small else 128, d or usual(small)
    shape = Shape(2, 2, 2, N, N, d, dv or d)
    return Case(PROBE, "", PROBE, shape, shape)


def _sized(case, **changes):
    shape = case.full._replace(**changes)
    return replace(case, full=shape, small=shape)


def _with_option(word):
    """A case with the first recipe that needs this word alone."""
    name = next((name for name, recipe in OPTION_RECIPES.items() if recipe.needs == {word}), None)
    return lambda case: replace(case, having=(name,))


PROBES = {
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


def largest(cases, base):
    """How much more the largest case computes than a base call."""

    def work(s):
        return s.B * s.Hq * s.Nq * s.Nk * (s.d + s.dv)

    return max((work(case.full) for case in cases), default=0) / work(base.full)
