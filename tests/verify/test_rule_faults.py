"""Put any shipped rule off by one, or its sign or comparison wrong: a default case fails.

Each fault is planted in `refimpl`, and the kernel with rules runs the cases that are about the rule, emulated, in fp32.
Functions that this kernel has no use for, as it takes flash-attn's options as one pair of rules, are judged through the
NumPy step that does. A fault in the class of a tile that can only call it PARTIAL costs time and no accuracy: these
are told apart by brute force, on frames of all kinds.
"""

from functools import cache

import numpy as np
import pytest
from helpers_rules import functions, mutants, planted

from refimpl import options
from refimpl.frame import Frame, visible
from refimpl.rule import TileClass
from refimpl.tiling import spans
from verify import calls, judge, runner
from verify.cases import DEFAULT
from verify.registry import ALL

# Which default cases are about a rule, the ones that see most first.
ABOUT = {
    "causal": ("edge_hides_one", "edge_shows_one", "strided"),
    "window": ("window_both", "window_left", "window_left_short", "window_right", "window_self"),
    "padding": ("lengths", "lengths_causal"),
    "document": ("document", "document_shuffled"),
    "prefix": ("prefix_lm",),
    "dilated": ("dilated", "dilated_wide"),
    "boolean": ("mask", "mask_keys"),
    "softcap": ("softcap", "back_window_softcap"),
    "alibi": ("alibi", "alibi_batch"),
    "relative": ("relative",),
    "bias": ("bias", "bias_keys"),
    "finite": ("bias",),
    "standard": ("lengths", "mask", "window_both", "softcap_causal", "alibi", "bias"),
    "softcap_slope": ("back_softcap_alibi",),
    "standard_slope": ("back_alibi", "back_softcap_alibi"),
}
# What `general` does not reach: the option is in `standard`, or the derivative of an addition, or a mask in a score.
ONLY_NUMPY = ("causal_mask", "causal_tiles", "padding_tiles", "finite_mask")
FUNCTIONS = functions("_mask", "_score", "_slope", "_tiles")


@cache
def problem(case):
    """Inputs and anchors, once for all faults."""
    made = DEFAULT[case].build("fp32")
    return made, judge.reference(made, made.dO() if made.backward else None)


def about(name):
    """The default cases about a function."""
    return ABOUT.get(name) or ABOUT[name.rsplit("_", 1)[0]]


def fails(case, by_numpy):
    """Whether a default case rejects a kernel as it is now; an exception does too."""
    made, known = problem(case)
    kernel, kind = ("refimpl.step4_causal", "numpy") if by_numpy else ("general", "emulated")
    try:
        outputs = calls.outputs(ALL[kernel], made, runner.placed(kind, [16, 16], made.seed))
    except (IndexError, TypeError, ZeroDivisionError, RuntimeError):
        return True
    return any(not m.ok for m in judge.judge(made, **outputs, known=known).values())


fails_as_shipped = cache(fails)


@pytest.mark.parametrize(("name", "module"), FUNCTIONS, ids=[name for name, _ in FUNCTIONS])
def test_a_wrong_rule_fails_a_default_case(name, module):
    cases = about(name)
    assert not any(fails_as_shipped(case, name in ONLY_NUMPY) for case in cases)
    found = [(source, mutant) for source, mutant in mutants(getattr(module, name)) if not harmless(name, mutant)]
    assert found
    for source, mutant in found:
        with planted(name, mutant):
            assert any(fails(case, name in ONLY_NUMPY) for case in cases), source


def harmless(name, mutant):
    """Whether a formula for tiles calls none EMPTY that has a visible pair, nor FULL one that has a hidden pair."""
    if not name.endswith("_tiles"):
        return False
    for place, some, every in tiles(name.removesuffix("_tiles")):
        try:
            kind = mutant(*place)
        except (IndexError, ZeroDivisionError):
            return False
        if (kind == TileClass.EMPTY and some) or (kind == TileClass.FULL and not every):
            return False
    return True


@cache
def tiles(stem):
    """[(arguments of a formula for tiles, some pair is visible, every pair is)] of 60 random frames."""
    rng, found = np.random.default_rng(5), []
    for _ in range(60):
        Nq, Nk = rng.integers(1, 50, 2)
        ends = {"lengths_q": rng.integers(0, Nq + 1, 1), "lengths_k": rng.integers(0, Nk + 1, 1)}
        frame = Frame(1, 1, Nq, Nk, align=str(rng.choice(["bottom_right", "top_left"])),
                      **ends if stem in ("padding", "standard") else {})  # fmt: skip
        rule = random_rule(stem, rng, Nq, Nk).at(frame)
        shown = visible(rule, 0, 0, slice(0, Nq), slice(0, Nk))
        for rows in spans(Nq, 16):
            for cols in spans(Nk, 16):
                i0, i1 = rows.start + frame.offsets[0], rows.stop + frame.offsets[0]
                tile = shown[rows, cols]
                found.append(((0, 0, i0, i1, cols.start, cols.stop, *rule.aux), tile.any(), tile.all()))
    return found


def random_rule(stem, rng, Nq, Nk):
    """A shipped mask with data of its own."""
    window = tuple(int(n) for n in rng.integers(-1, 40, 2))
    blocks = rng.random((Nq + 7, Nk + 7)) < rng.choice([0.02, 0.5, 0.98])
    mask = np.kron(blocks, np.ones((8, 8), bool))[:Nq, :Nk] ^ (rng.random((Nq, Nk)) < rng.choice([0, 0.01]))
    return {
        "causal": options.causal,
        "window": lambda: options.window(*window),
        "padding": options.padding,
        "document": lambda: options.document(*(np.sort(rng.integers(0, 5, N)) for N in (Nq, Nk))),
        "prefix": lambda: options.prefix_lm(rng.integers(0, 40)),
        "dilated": lambda: options.dilated(int(rng.integers(1, 50))),
        "boolean": lambda: options.boolean(mask),
        "standard": lambda: options.standard(
            causal=bool(rng.integers(2)), window=window, mask=mask if rng.integers(2) else None
        )[0],
    }[stem]()


def test_every_rule_has_its_cases():
    """A rule that is added comes with a default case."""
    assert all(about(name) for name, _ in FUNCTIONS)
    assert {case for cases in ABOUT.values() for case in cases} <= DEFAULT.keys()
