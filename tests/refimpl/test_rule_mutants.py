"""Put any rule off by one, or its sign or comparison wrong: a case disagrees with the oracle or with brute force.

Each shipped expression is edited in its source, one operator, number or comparison at a time, and put back in its
module. An expression is judged by attention with it, forward and backward, against the oracle; a tile formula by the
class of every tile.
"""

import inspect
from itertools import product

import numpy as np
import pytest
from helpers_edits import mutants
from helpers_options import NK, NQ, OPTIONS, arrays, by_oracle, by_rules, distance

from refimpl import mask_tensor, masks, scores, standard
from refimpl.frame import Frame, visible
from refimpl.rule import TileClass
from refimpl.tiling import spans


def cases_of(module, name):
    """Names of the cases in which a function of a module takes part."""
    stem = name.rsplit("_", 1)[0]
    stem = {"finite": "bias of keys"}.get(stem, stem)
    if module is standard:
        return [case for case in OPTIONS if case.startswith("standard")]
    return [case for case in OPTIONS if case.startswith(stem)]


def plain(kind):
    """Every function of the shipped modules whose name ends so, with its module."""
    return [
        (module, name)
        for module in (masks, mask_tensor, scores, standard)
        for name, fn in vars(module).items()
        if name.endswith(kind) and inspect.isfunction(fn) and fn.__module__ == module.__name__
    ]


@pytest.mark.parametrize(("module", "name"), plain("_mask") + plain("_score") + plain("_slope"))
def test_a_wrong_rule_is_seen(monkeypatch, module, name):
    """By the oracle: some case of the rule is off by more than 1e-6, or has a NaN or an infinity out of place."""
    given = arrays()
    wanted = {case: by_oracle(given, OPTIONS[case].same, OPTIONS[case].call)[:5] for case in cases_of(module, name)}
    assert wanted
    for source, mutant in mutants(getattr(module, name)):
        monkeypatch.setattr(module, name, mutant)
        assert not all(agrees(case, given, want) for case, want in wanted.items()), source
    monkeypatch.undo()
    assert all(agrees(case, given, want) for case, want in wanted.items())


def agrees(case, given, want):
    """Whether attention by rules is right in a case; an index out of range is not."""
    try:
        return distance(by_rules(given, OPTIONS[case].rules(), OPTIONS[case].call), want) <= 1e-6
    except (IndexError, TypeError, ZeroDivisionError):
        return False


@pytest.mark.parametrize(("module", "name"), plain("_tiles"))
def test_a_wrong_tile_class_is_seen(monkeypatch, module, name):
    """By a look at every element of every tile, in multiples of 8 and odd ones."""
    cases = [case for case in cases_of(module, name) if case != "document shuffled"]
    for source, mutant in mutants(getattr(module, name)):
        monkeypatch.setattr(module, name, mutant)
        assert not all(classes_are_right(case) for case in cases), source
    monkeypatch.undo()
    assert all(classes_are_right(case) for case in cases)


def classes_are_right(case):
    """Whether the formula equals brute force on every tile that it has to know."""
    option = OPTIONS[case]
    rule = option.rules()
    rule = (rule[0] if isinstance(rule, tuple) else rule).at(Frame(2, 4, NQ, NK, **option.call))
    looks = case in ("boolean", "standard")
    for b in range(2):
        shown = visible(rule, b, 1, slice(0, NQ), slice(0, NK))
        for Br, Bc in ((8, 8),) if looks else ((8, 8), (1, 1), (5, 7), (3, 4)):
            for rows, cols in product(spans(NQ, Br), spans(NK, Bc)):
                i0, i1 = rows.start + rule.offset[b], rows.stop + rule.offset[b]
                try:
                    kind = rule.tiles(b, 1, i0, i1, cols.start, cols.stop, *rule.aux)
                except (IndexError, ZeroDivisionError):
                    return False
                tile = shown[rows, cols]
                want = TileClass.FULL if tile.all() else TileClass.PARTIAL if tile.any() else TileClass.EMPTY
                if kind != want:
                    return False
    return True


def test_mutants_are_made():
    """The editor edits: each place once, one at a time."""
    sources = [source for source, _ in mutants(masks.window_mask)]
    assert len(sources) == len(set(sources)) == 5
    assert any("i - j < left" in source for source in sources)
    assert any("i + j <= left" in source for source in sources)
    assert any("| (j - i <= right)" in source for source in sources)
    assert not np.array_equal(masks.window_mask(0, 0, 3, 2, 1, 0), mutants(masks.window_mask)[1][1](0, 0, 3, 1, 1, 0))
