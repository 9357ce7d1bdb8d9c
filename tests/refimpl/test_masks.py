"""Masks: what each lets through, written out by hand, and the classes of tiles against a look at every element."""

from itertools import product

import numpy as np
import pytest
from helpers_options import NK, NQ, OPTIONS

from refimpl import masks
from refimpl.frame import Frame, classify, visible
from refimpl.mask_tensor import boolean
from refimpl.rule import Rule, TileClass, and_, or_, undecided
from refimpl.standard import standard
from refimpl.tiling import spans


def seen(rule, Nq, Nk, *, b=0, B=1, align="bottom_right", **lengths):
    """What the rows of one batch entry see, one string of 0 and 1 a row."""
    rule = rule.at(Frame(B, 1, Nq, Nk, align=align, **lengths))
    return ["".join(str(int(x)) for x in row) for row in visible(rule, b, 0, slice(0, Nq), slice(0, Nk))]


def test_alignment():
    """The two examples of flash-attn's documentation, 2 x 5 and 5 x 2; top-left, as its versions before 2.1."""
    assert seen(masks.causal(), 2, 5) == ["11110", "11111"]
    assert seen(masks.causal(), 5, 2) == ["00", "00", "00", "10", "11"]
    assert seen(masks.causal(), 2, 5, align="top_left") == ["10000", "11000"]
    assert seen(masks.causal(), 3, 2, align="top_left") == ["10", "11", "11"]


def test_window_bounds():
    """Both ends are inside: (left, right) keys before and after, of the aligned position; -1 and None: no end."""
    assert seen(masks.window(1, 0), 4, 4) == ["1000", "1100", "0110", "0011"]
    assert seen(masks.window(1, 1), 4, 4) == ["1100", "1110", "0111", "0011"]
    assert seen(masks.window(0, 0), 3, 3) == ["100", "010", "001"]
    assert seen(masks.window(0, 2), 3, 4) == ["0111", "0011", "0001"]
    assert seen(masks.window(1, 0), 2, 5) == ["00110", "00011"]
    assert seen(masks.window(2, 0), 4, 2) == ["00", "00", "10", "11"]
    assert seen(masks.window(1, 0), 2, 5, align="top_left") == ["10000", "11000"]
    for unbounded in (-1, None, 2**40):
        assert seen(masks.window(unbounded, 0), 3, 3) == seen(masks.causal(), 3, 3)
        assert seen(masks.window(0, unbounded), 3, 3) == ["111", "011", "001"]
        assert seen(masks.window(unbounded, unbounded), 2, 3) == ["111", "111"]


def test_padding():
    """Rows and keys end with their length, and bottom-right counts from there; an empty entry sees nothing."""
    lengths = {"B": 3, "lengths_q": [2, 3, 0], "lengths_k": [3, 1, 2]}
    assert seen(masks.padding(), 3, 4, **lengths) == ["1110", "1110", "0000"]
    assert seen(masks.padding(), 3, 4, b=1, **lengths) == ["1000", "1000", "1000"]
    assert seen(masks.padding(), 3, 4, b=2, **lengths) == ["0000", "0000", "0000"]
    both = and_(masks.causal(), masks.padding())
    assert seen(both, 3, 4, **lengths) == ["1100", "1110", "0000"]
    assert seen(both, 3, 4, b=1, **lengths) == ["0000", "0000", "1000"]
    assert seen(both, 3, 4, align="top_left", **lengths) == ["1000", "1100", "0000"]


def test_document():
    """Packed sequences: each sees itself; with ids of its own for each batch entry, and for keys."""
    assert seen(masks.document([0, 0, 1, 1, 1]), 5, 5) == ["11000", "11000", "00111", "00111", "00111"]
    assert seen(masks.document([[5, 7], [7, 7]]), 2, 2, B=2) == ["10", "01"]
    assert seen(masks.document([[5, 7], [7, 7]]), 2, 2, B=2, b=1) == ["11", "11"]
    assert seen(masks.document([0, 2], [0, 0, 1, 2]), 2, 4) == ["1100", "0001"]
    assert seen(masks.document([1, 0, 1]), 3, 3) == ["101", "010", "101"]
    causal = and_(masks.causal(), masks.document([0, 0, 1, 1, 1]))
    assert seen(causal, 5, 5) == ["10000", "11000", "00100", "00110", "00111"]


def test_prefix():
    """The first keys are seen by all, the others as causal says; a prefix of 0 is causal."""
    assert seen(masks.prefix_lm(2), 4, 4) == ["1100", "1100", "1110", "1111"]
    assert seen(masks.prefix_lm([0, 3]), 3, 3, B=2) == ["100", "110", "111"]
    assert seen(masks.prefix_lm([0, 3]), 3, 3, B=2, b=1) == ["111", "111", "111"]
    assert seen(masks.prefix_lm(1), 4, 2) == ["10", "10", "10", "11"]


def test_dilated():
    """Every step-th key from the query's own, both ways; with a window, a dilated window; strided: the sum of both."""
    assert seen(masks.dilated(2), 4, 5) == ["01010", "10101", "01010", "10101"]
    assert seen(masks.dilated(3), 4, 4) == ["1001", "0100", "0010", "1001"]
    assert seen(masks.dilated(1), 2, 2) == ["11", "11"]
    dilated_window = and_(masks.window(4, 0), masks.dilated(2))
    assert seen(dilated_window, 6, 6) == ["100000", "010000", "101000", "010100", "101010", "010101"]
    assert seen(masks.strided(2), 6, 6) == ["100000", "110000", "111000", "011100", "101110", "010111"]
    assert seen(masks.strided(3), 7, 7)[6] == "1001111"


def test_boolean_means_attend():
    """True = attend, looked up by row whatever the alignment; broadcast over batch, heads and rows."""
    mask = np.array([[1, 0, 1], [0, 0, 0]], bool)
    for align in ("bottom_right", "top_left"):
        assert seen(boolean(mask), 2, 3, align=align) == ["101", "000"]
    assert seen(boolean(np.array([True, False, True])), 2, 3) == ["101", "101"]
    per_batch = np.array([[True, False], [False, True]])[:, None, None]
    assert seen(boolean(per_batch), 2, 2, B=2, b=1) == ["01", "01"]


def test_combinations():
    """And is the intersection, or the union; they nest, and their tuples of aux nest likewise."""
    near, comb = masks.window(1, 0), masks.dilated(3)
    assert seen(or_(near, comb), 5, 5) == ["10010", "11001", "01100", "10110", "01011"]
    assert seen(and_(masks.causal(), or_(near, comb)), 5, 5) == ["10000", "11000", "01100", "10110", "01011"]
    rule = and_(masks.causal(), or_(near, comb)).at(Frame(1, 1, 5, 5))
    assert rule.aux == ((), ((1, 0), (3,)))
    assert and_(near) is near


def test_one_function_for_one_pair():
    """Combining the same rules again gives the same functions, so that a compiled kernel is found again."""
    one, two = (and_(masks.causal(), or_(masks.window(n, 0), masks.dilated(2))) for n in (3, 4))
    assert one.fn is two.fn
    assert one.tiles is two.tiles


ROWS_COLS = [(1, 1), (5, 5), (5, 9), (9, 5), (16, 16), (17, 23), (23, 17), (1, 8), (8, 1)]
RNG = np.random.default_rng(3)


def cases(Nq, Nk):
    """Rules whose `tiles` are exact, for tiles of any size."""
    ids = np.sort(RNG.integers(0, 4, (2, max(Nq, Nk))))
    yield from (masks.window(left, right) for left in (0, 1, 4, None) for right in (0, 2, None))
    yield from (masks.causal(), masks.padding(), masks.prefix_lm([1, 4]), masks.prefix_lm(0))
    yield masks.document(ids[:, :Nq], ids[:, :Nk])
    yield from (masks.dilated(step) for step in (1, 2, 3, 5, 40))
    yield from (standard(window=window)[0] for window in ((None, None), (3, 0), (0, 2), (None, 1)))


def class_of(shown):
    """Class of a tile from its elements."""
    return TileClass.FULL if shown.all() else TileClass.PARTIAL if shown.any() else TileClass.EMPTY


def brute(rule, b, h, rows, cols):
    """Class of a rule's tile, by looking."""
    return class_of(visible(rule, b, h, rows, cols))


def formula(rule, b, h, rows, cols):
    """Class of a tile from the rule's formula alone."""
    offset = rule.offset[b]
    kind = rule.tiles(b, h, rows.start + offset, rows.stop + offset, cols.start, cols.stop, *rule.aux)
    assert kind in (0, 1, 2)
    return kind


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize(("Nq", "Nk"), ROWS_COLS)
def test_classes_are_exact(Nq, Nk, align):
    """The formula of each rule equals brute force on every tile of ragged cuttings, with lengths of their own."""
    frame = Frame(2, 1, Nq, Nk, [Nq, (Nq + 1) // 2], [Nk // 2, Nk], align)
    met = set()
    for rule in cases(Nq, Nk):
        rule = rule.at(frame)
        shown = [visible(rule, b, 0, slice(0, Nq), slice(0, Nk)) for b in range(2)]
        for Br, Bc in ((1, 1), (4, 5), (5, 16), (16, 4)):
            for b, rows, cols in product(range(2), spans(Nq, Br), spans(Nk, Bc)):
                kind = formula(rule, b, 0, rows, cols)
                assert kind == class_of(shown[b][rows, cols]), (rule.fn.__name__, rule.aux, b, rows, cols)
                met.add(int(kind))
    assert met == {0, 1, 2} or Nq == Nk == 1


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize(("Nq", "Nk"), ROWS_COLS)
def test_classes_of_a_mask(Nq, Nk, align):
    """A boolean mask: exact on tiles of multiples of 8, ragged ends included; never wrong on others."""
    mask = RNG.random((2, 1, Nq, Nk)) < 0.5
    mask[0, 0, : Nq // 2] = False
    mask[1, 0, :, Nk // 2 :] = True
    mask[1, 0, Nq // 2 :, : Nk // 3] = False
    frame = Frame(2, 2, Nq, Nk, align=align)
    for rule in (boolean(mask), standard(mask=mask)[0]):
        rule = rule.at(frame)
        for Br, Bc in ((8, 8), (16, 8), (8, 24)):
            for b, rows, cols in product(range(2), spans(Nq, Br), spans(Nk, Bc)):
                assert formula(rule, b, 1, rows, cols) == brute(rule, b, 1, rows, cols)
        for Br, Bc in ((3, 5), (12, 7)):
            for b, rows, cols in product(range(2), spans(Nq, Br), spans(Nk, Bc)):
                assert formula(rule, b, 1, rows, cols) in (brute(rule, b, 1, rows, cols), TileClass.PARTIAL)


@pytest.mark.parametrize("shape", [(1, 1, 1, 23), (2, 3, 17, 1), (17, 23), (1,), (2, 1, 17, 23), (1, 3, 1, 1)])
def test_cells_of_a_broadcast_mask(shape):
    """What is broadcast is summed up once, and classes come out the same."""
    mask = RNG.random(shape) < 0.6
    full = boolean(np.broadcast_to(mask, (2, 3, 17, 23)).copy()).at(Frame(2, 3, 17, 23))
    rule = boolean(mask).at(Frame(2, 3, 17, 23))
    assert np.array_equal(rule.aux[1], full.aux[1])
    for axis in range(2):
        assert (rule.aux[1].strides[axis] == 0) == (len(shape) < 4 - axis or shape[axis] == 1)


@pytest.mark.parametrize("name", OPTIONS)
def test_classes_of_options(name):
    """Every option, combined or not: the formula never contradicts the elements, and `classify` is exact."""
    option = OPTIONS[name]
    rules = option.rules()
    rule = rules[0] if isinstance(rules, tuple) else rules
    if rule.kind == "score":
        return
    rule = rule.at(Frame(2, 4, NQ, NK, **option.call))
    for Br, Bc in ((4, 8), (7, 5), (1, 3)):
        for b, rows, cols in product(range(2), spans(NQ, Br), spans(NK, Bc)):
            want = brute(rule, b, 3, rows, cols)
            assert classify(rule, b, 3, rows, cols) is want
            assert rule.tiles is None or formula(rule, b, 3, rows, cols) in (want, TileClass.PARTIAL)


@pytest.mark.parametrize("join", [and_, or_])
def test_classes_of_pairs(join):
    """Of two rules, every pair: never wrong, and for most tiles as sharp as the elements allow."""
    frame = Frame(2, 1, 17, 23)
    alone = list(cases(17, 23))[::2]
    right, tiles = 0, 0
    for f, g in product(alone, repeat=2):
        rule = join(f, g).at(frame)
        for b, rows, cols in product(range(2), spans(17, 8), spans(23, 8)):
            kind, want = formula(rule, b, 0, rows, cols), brute(rule, b, 0, rows, cols)
            assert kind in (want, TileClass.PARTIAL)
            right, tiles = right + (kind == want), tiles + 1
    assert right / tiles >= 0.9


def test_and_is_derived_from_its_parts():
    """And: EMPTY if either is, FULL if both are, else PARTIAL; or dually; without a formula, PARTIAL."""
    for f, g in product(range(3), repeat=2):
        pair = [Rule(masks.causal_mask, tiles=lambda *place, kind=kind: kind) for kind in (f, g)]
        both, either = (join(*pair).at(Frame(1, 1, 2, 2)) for join in (and_, or_))
        assert both.tiles(0, 0, 0, 1, 0, 1, *both.aux) == (0 if 0 in (f, g) else 2 if f == g == 2 else 1)
        assert either.tiles(0, 0, 0, 1, 0, 1, *either.aux) == (2 if 2 in (f, g) else 0 if f == g == 0 else 1)
    unknown = Rule(masks.causal_mask)
    assert and_(unknown, unknown).tiles(0, 0, 0, 1, 5, 6, (), ()) == undecided(0, 0, 0, 1, 5, 6) == 1


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda: masks.window(-2, 0), ValueError, "left must be at least 0, or -1"),
        (lambda: masks.window(0, 1.5), TypeError, "right must be an integer"),
        (lambda: masks.document([0.0, 1.0]), TypeError, "ids_q must be integers"),
        (lambda: masks.document([0], [0.5]), TypeError, "ids_k must be integers"),
        (lambda: masks.prefix_lm(1.5), TypeError, "prefix must be integers"),
        (lambda: masks.dilated(0), ValueError, "step must be at least 1"),
        (lambda: masks.strided(1.5), TypeError, "right|step|left"),
        (lambda: boolean(np.ones((2, 2))), TypeError, "mask must be boolean"),
        (lambda: standard(window=3), ValueError, "window must be a pair"),
        (lambda: standard(window=(-2, 0)), ValueError, "window left"),
        (lambda: standard(softcap=-1.0), ValueError, "softcap must be positive"),
        (lambda: standard(mask=np.ones(3)), TypeError, "mask must be boolean"),
        (lambda: standard(bias=["a"]), TypeError, "bias must be real"),
    ],
)
def test_refuses(call, kind, says):
    """Each misuse is named when the rule is made."""
    with pytest.raises(kind, match=says):
        call()
