"""Rules: what they let through, by hand and by brute force, and the classes they give tiles."""

from itertools import product

import numpy as np
import pytest

from refimpl import options
from refimpl.options import (
    Frame,
    Rule,
    TileClass,
    and_,
    boolean,
    causal,
    classify,
    scored,
    slope,
    then,
    visible,
    window,
)
from refimpl.tiling import spans

SIZES = [(1, 1), (5, 5), (5, 9), (9, 5), (16, 16), (17, 23), (23, 17), (1, 8), (8, 1)]


def by_brute_force(seen):
    """Class of a tile from its elements."""
    if not seen.any():
        return TileClass.EMPTY
    return TileClass.FULL if seen.all() else TileClass.PARTIAL


@pytest.mark.parametrize(
    ("Nq", "Nk", "align", "rows"),
    [
        (3, 3, "bottom_right", ["100", "110", "111"]),
        (2, 4, "bottom_right", ["1110", "1111"]),
        (2, 4, "top_left", ["1000", "1100"]),
        (4, 2, "bottom_right", ["00", "00", "10", "11"]),
        (4, 2, "top_left", ["10", "11", "11", "11"]),
        (1, 3, "bottom_right", ["111"]),
    ],
)
def test_causal_by_hand(Nq, Nk, align, rows):
    """Written out: which key each row sees."""
    table = np.array([[c == "1" for c in row] for row in rows])
    seen = visible(causal(Nq, Nk, align), 0, 0, slice(0, Nq), slice(0, Nk))
    assert np.array_equal(seen, table)


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize(("Nq", "Nk"), SIZES)
def test_causal_classes(Nq, Nk, align):
    """The closed form equals brute force on every tile of ragged cuttings, and all three classes occur."""
    met = set()
    for Br, Bc in product((1, 2, 4, 5, 16), repeat=2):
        for rows, cols in product(spans(Nq, Br), spans(Nk, Bc)):
            r, j = np.ogrid[rows, cols]
            want = by_brute_force(j <= r + (Nk - Nq if align == "bottom_right" else 0))
            assert classify(causal(Nq, Nk, align), 0, 0, rows, cols) is want
            met.add(want)
    assert len(met) == 3 or min(Nq, Nk) == 1


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize(("Nq", "Nk"), SIZES)
def test_boolean_classes(Nq, Nk, align):
    """Looked up by row, whatever `i` means; a broadcast head axis costs nothing; classes by brute force."""
    rng = np.random.default_rng(Nq * 100 + Nk)
    mask = np.broadcast_to(rng.random((2, 1, Nq, Nk)) < 0.5, (2, 3, Nq, Nk)).copy()
    mask[1, 2, : Nq // 2] = False
    mask[0, 1, :, Nk // 2 :] = True
    rule = boolean(mask).at(Frame(2, 3, Nq, Nk, align=align))
    met = set()
    for b, h, rows, cols in product(range(2), range(3), spans(Nq, 4), spans(Nk, 3)):
        assert np.array_equal(visible(rule, b, h, rows, cols), mask[b, h, rows, cols])
        kind = classify(rule, b, h, rows, cols)
        assert kind is by_brute_force(mask[b, h, rows, cols])
        met.add(kind)
    assert len(met) == 3 or Nq * Nk <= 25


def test_a_rule_of_ones_own():
    """A window, in the vocabulary, with its numbers as aux: positions are aligned to the keys."""

    def near(b, h, i, j, left, right):
        return (i - j <= left) & (j - i <= right)

    rule = Rule(near, aux=(1, 0)).at(Frame(1, 1, 2, 4))
    seen = visible(rule, 0, 0, slice(0, 2), slice(0, 4))
    assert np.array_equal(seen, [[0, 1, 1, 0], [0, 0, 1, 1]])
    assert classify(rule, 0, 0, slice(0, 2), slice(0, 1)) is TileClass.EMPTY
    assert classify(rule, 0, 0, slice(0, 2), slice(2, 3)) is TileClass.FULL
    assert classify(rule, 0, 0, slice(0, 2), slice(1, 3)) is TileClass.PARTIAL


def test_an_empty_tile_is_empty():
    """No rows or no keys: nothing to visit."""
    for rows, cols in [(slice(0, 0), slice(0, 3)), (slice(0, 3), slice(0, 0))]:
        assert classify(causal(3, 3), 0, 0, rows, cols) is TileClass.EMPTY


def test_score_rule_and_its_derivative():
    """A softcapped, ALiBi-like score: value by hand, `grad` against central differences, the dtype kept."""

    def fn(s, b, h, i, j, cap, slopes):
        return cap * options.tanh(s / cap) - slopes[h] * options.real(abs(i - j))

    def grad(s, b, h, i, j, cap, slopes):
        return 1 - options.tanh(s / cap) ** 2

    rule = Rule(fn, kind="score", grad=grad, aux=(3.0, np.array([0.5, 0.25])), offset=np.array([1]))
    S = np.random.default_rng(0).normal(0, 4, (2, 3))
    rows, cols = slice(4, 6), slice(2, 5)
    got = scored(rule, S, 0, 1, rows, cols)
    want = 3 * np.tanh(S / 3) - 0.25 * np.array([[3, 2, 1], [4, 3, 2]])
    assert np.abs(got - want).max() <= 1e-15
    assert scored(rule, S.astype(np.float32), 0, 1, rows, cols).dtype == np.float32
    h = 1e-5
    steepness = (scored(rule, S + h, 0, 1, rows, cols) - scored(rule, S - h, 0, 1, rows, cols)) / (2 * h)
    assert np.abs(slope(rule, S, 0, 1, rows, cols) - steepness).max() <= 1e-9


def test_vocabulary():
    """The words mean what NumPy means, elementwise; `real` gives fp64."""
    x, y = np.array([1, -2, 3]), np.array([0, 5, 3])
    assert np.array_equal(options.where(x > y, x, y), [1, 5, 3])
    assert np.array_equal(options.minimum(x, y), [0, -2, 3])
    assert np.array_equal(options.maximum(x, y), [1, 5, 3])
    assert np.array_equal(options.tanh(y), np.tanh(y))
    assert options.real(x).dtype == np.float64


@pytest.mark.parametrize("some", [False, True])
def test_tile_class(some):
    """0, 1, 2 also where NumPy would add two booleans to one."""
    assert options.tile_class(some, False) == int(some)
    assert options.tile_class(np.bool_(True), np.bool_(True)) == TileClass.FULL
    assert options.tile_class(np.bool_(some), np.bool_(False)) == int(some)


def test_binding():
    """A rule keeps no trace of a call; a frame knows where the rows of each batch entry stand."""
    rule = boolean(np.ones((1, 1, 3, 1), bool))
    bound = rule.at(Frame(2, 1, 3, 7, [3, 2], [7, 1]))
    assert callable(rule.aux)
    assert bound.aux[0].shape == (2, 1, 3, 7)
    assert np.array_equal(bound.offset, [4, -1])
    assert np.array_equal(Frame(2, 1, 3, 7, align="top_left").offsets, [0, 0])
    assert np.array_equal(Frame(0, 1, 3, 7).offsets, [])


def number(b, h, i, j):
    """Not a mask: gives integers."""
    return i + j


HERE = slice(0, 2)


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda: Rule(3), TypeError, "fn"),
        (lambda: Rule(number, tiles=3), TypeError, "tiles"),
        (lambda: Rule(number, aux=[3]), TypeError, "aux"),
        (lambda: Rule(number, kind="bias"), ValueError, "kind"),
        (lambda: Rule(number, grad=number), ValueError, "grad"),
        (lambda: Rule(number, bias=np.ones(3)), ValueError, "bias"),
        (lambda: Rule(number, kind="score", tiles=number), ValueError, "tiles"),
        (lambda: causal(3, 3, "centre"), ValueError, "align"),
        (lambda: Frame(1, 1, 2, 2, align="centre"), ValueError, "align"),
        (lambda: boolean(np.ones((1, 1, 2, 2))), TypeError, "mask"),
        (lambda: visible(Rule(number), 0, 0, HERE, HERE), TypeError, "number"),
        (lambda: visible(Rule(number, kind="score"), 0, 0, HERE, HERE), TypeError, "rule must be a mask"),
        (lambda: visible(boolean(np.ones(2, bool)), 0, 0, HERE, HERE), TypeError, "rule must be bound"),
        (lambda: classify(Rule(number, kind="score"), 0, 0, HERE, HERE), TypeError, "rule must be a mask"),
        (lambda: scored(causal(2, 2), np.ones((2, 2)), 0, 0, HERE, HERE), TypeError, "rule must be a score"),
        (lambda: slope(Rule(number, kind="score"), np.ones((2, 2)), 0, 0, HERE, HERE), TypeError, "grad"),
        (lambda: and_(), ValueError, "at least one mask rule"),
        (lambda: and_(causal(), Rule(number, kind="score")), TypeError, "must be mask rules"),
        (lambda: then(window(1, 0)), TypeError, "must be score rules"),
        (lambda: then(3), TypeError, "must be score rules"),
    ],
)
def test_refuses(call, kind, says):
    """Each misuse is named."""
    with pytest.raises(kind, match=says):
        call()
