"""Rules on a GPU, without one: every text compiles to fp32 and integers, and runs in the emulator as in NumPy."""

import re

import numpy as np
import pytest
from numba import cuda

from flash_cuda.executors.assembler import Assembler, assemble, numba_type, resources
from flash_cuda.executors.emulator import Emulator
from flash_cuda.parts import vocabulary
from flash_cuda.parts.vocabulary import arguments, device, narrow
from refimpl import masks, scores
from refimpl import vocabulary as numpy_vocabulary
from refimpl.frame import Frame, scored, slope, visible
from refimpl.mask_tensor import boolean
from refimpl.philox import Dropout, kept
from refimpl.rule import Rule, and_, or_, then, undecided
from refimpl.standard import standard

RNG = np.random.default_rng(0)
FRAME = Frame(2, 4, 12, 16, [12, 7], [9, 16])
MASK = RNG.random((2, 1, 12, 16)) < 0.6
SLOPES, BIAS = RNG.random((2, 4)), RNG.normal(0, 1, (4, 12, 16))
IDS = np.repeat(np.arange(4), 4)
RULES = {
    "causal": masks.causal(),
    "window": masks.window(3, 1),
    "padding": masks.padding(),
    "document": masks.document(IDS[:12], IDS),
    "document unsorted": masks.document(IDS[11::-1], IDS),
    "prefix": masks.prefix_lm([3, 9]),
    "dilated": masks.dilated(3),
    "strided": masks.strided(3),
    "boolean": boolean(MASK),
    "finite": scores.finite(np.where(MASK, 0.0, -np.inf)),
    "nested": or_(and_(masks.window(3, 1), boolean(MASK)), and_(masks.prefix_lm(2), masks.padding())),
    "standard mask": standard(causal=True, window=(5, None), mask=MASK)[0],
    "softcap": scores.softcap(2.0),
    "alibi": scores.alibi(SLOPES),
    "relative": scores.relative(RNG.standard_normal((4, 7))),
    "bias": scores.bias(BIAS),
    "chain": then(scores.softcap(2.0), scores.alibi(SLOPES), scores.bias(BIAS), scores.softcap(3.0)),
    "standard score": standard(softcap=2.0, alibi_slopes=SLOPES, bias=BIAS)[1],
    "standard nothing": standard()[1],
}


class AsItIs:
    """An executor that keeps arrays as they are."""

    def input(self, name, array):
        return array


def instructions(body, *args):
    """PTX and resources for sm_80."""
    cubin, ptx = assemble(body, tuple(numba_type(a) for a in args), {"sm_80": (8, 0)})["sm_80"]
    return ptx, resources(cubin)


def kernel_of(rule):
    """A body that evaluates a rule at every element, one thread a row, and its tile class or its derivative.

    Made in a module of the package's name, as all kernels are: the emulator descends into those alone.
    """
    text = MASK_BODY if rule.kind == "mask" else SCORE_BODY
    second = rule.tiles or undecided if rule.kind == "mask" else rule.grad
    scope = {"__name__": "flash_cuda.trial", "cuda": cuda, "fn": device(rule.fn), "second": device(second)}
    exec(text, scope)
    return scope["body"]


MASK_BODY = """
def body(out, S, offsets, b, h, aux):
    row = cuda.threadIdx.x
    for j in range(out.shape[1]):
        i = row + offsets[b]
        if fn(b, h, i, j, *aux):
            out[row, j, 0] = 1
        else:
            out[row, j, 0] = 0
        out[row, j, 1] = second(b, h, i, i + 1, j, j + 1, *aux)
"""
SCORE_BODY = """
def body(out, S, offsets, b, h, aux):
    row = cuda.threadIdx.x
    for j in range(out.shape[1]):
        i = row + offsets[b]
        out[row, j, 0] = fn(S[row, j], b, h, i, j, *aux)
        out[row, j, 1] = S[row, j] * second(S[row, j], b, h, i, j, *aux)
"""


@pytest.mark.parametrize("name", RULES)
def test_compiles_clean(name):
    """No fp64 instruction, no call, no local memory, in the rule's text as it is, aux one (nested) argument."""
    pytest.importorskip("cuda.bindings.nvvm", reason="no NVVM: install the dev extra")
    rule = RULES[name].at(FRAME)
    out, S = np.zeros((12, 16, 2), np.float32), np.zeros((12, 16), np.float32)
    aux = arguments(AsItIs(), rule.aux)
    ptx, found = instructions(kernel_of(rule), out, S, narrow(rule.offset), 0, 0, aux)
    assert not re.findall(r"\.f64\b", ptx)
    assert "call" not in ptx
    assert found["stack_bytes"] == 0


def test_a_rule_in_fp64_is_seen():
    """The same test fails a rule that lets an integer meet a score, as `real` is there to prevent."""
    pytest.importorskip("cuda.bindings.nvvm", reason="no NVVM: install the dev extra")
    rule = Rule(lambda s, b, h, i, j: s - (i - j), kind="score", grad=lambda s, b, h, i, j: s)
    out, S = np.zeros((12, 16, 2), np.float32), np.zeros((12, 16), np.float32)
    ptx, _ = instructions(kernel_of(rule), out, S, narrow(FRAME.offsets), 0, 0, ())
    assert re.findall(r"\.f64\b", ptx)


def check(name, b, on):
    """Evaluate a rule on an executor: masks and classes equal NumPy's, scores and derivatives to fp32's precision."""
    rule, h = RULES[name].at(FRAME), 3
    S = np.random.default_rng(b).normal(0, 2, (12, 16)).astype(np.float32)
    out = on.empty("out", (12, 16, 2), np.float32)
    aux, offsets = arguments(on, rule.aux), on.input("offsets", narrow(rule.offset))
    on.launch(kernel_of(rule), 1, 12, (out, on.input("S", S), offsets, b, h, aux))
    first, second = np.moveaxis(on.result(out), -1, 0)
    whole = slice(0, 12), slice(0, 16)
    if rule.kind == "score":
        assert np.abs(first - scored(rule, S.astype(float), b, h, *whole)).max() <= 4e-6
        assert np.abs(second - S * slope(rule, S.astype(float), b, h, *whole)).max() <= 4e-6
        return
    want = visible(rule, b, h, *whole)
    assert np.array_equal(first, want)
    assert ((second == 1) | (second == 2 * want)).all()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("b", [0, 1])
def test_emulated(name, b):
    """Thread by thread, in plain Python."""
    check(name, b, Emulator(seed=None))


@pytest.mark.gpu
@pytest.mark.parametrize("name", RULES)
def test_on_a_gpu(name):
    """Nested tuples of arrays and numbers arrive, and the compiled text does what NumPy does."""
    from flash_cuda.executors.gpu import Gpu

    check(name, 1, Gpu())


def drawn(on):
    """A kernel that draws dropout's mask for each element, its result on an executor, and what it should be."""
    dropout = Dropout(0.3, seed=2**64 - 5, offset=3)
    scope = {"__name__": "flash_cuda.trial", "cuda": cuda, "kept": device(kept)}
    exec(DROPOUT_BODY, scope)
    out = on.empty("out", (9, 23), np.float32)
    on.launch(scope["body"], 1, 9, (out, 1, 2, *dropout.arguments))
    return on.result(out), dropout.mask(1, 2, slice(0, 9), slice(0, 23))


def test_dropout_is_emulated():
    """Every draw as in NumPy, with keys that have the sign bit set."""
    assert np.array_equal(*drawn(Emulator(seed=None)))


def test_dropout_compiles_clean():
    """Integers alone: no fp64, no division, no local memory."""
    pytest.importorskip("cuda.bindings.nvvm", reason="no NVVM: install the dev extra")
    on = Assembler("sm_80")
    drawn(on)
    assert on.reports[0].f64 == on.reports[0].stack_bytes == 0


@pytest.mark.gpu
def test_dropout_on_a_gpu():
    """Equal to the bit."""
    from flash_cuda.executors.gpu import Gpu

    assert np.array_equal(*drawn(Gpu()))


DROPOUT_BODY = """
def body(out, b, h, key0, key1, threshold):
    row = cuda.threadIdx.x
    for col in range(out.shape[1]):
        if kept(b, h, row, col, key0, key1, threshold):
            out[row, col] = 1
        else:
            out[row, col] = 0
"""


def test_words_are_the_same_words():
    """Every word of the NumPy vocabulary has its namesake here, and they agree on numbers."""
    names = [name for name, word in vars(numpy_vocabulary).items() if callable(word)]
    assert {word.__name__ for word in vocabulary.WORDS.values()} == set(names)
    places = {"where": (True, 2, 3), "tanh": (0.5,), "real": (7,), "tile_class": (True, False)}
    for name in names:
        args = places.get(name, (2, -3))
        assert abs(getattr(vocabulary, name)(*args) - getattr(numpy_vocabulary, name)(*args)) <= 1e-7


def test_a_function_is_made_once():
    """For one rule function, one device function: kernels compiled for it are found again."""
    assert device(masks.window_mask) is device(masks.window(1, 2).fn)
    pair = and_(masks.causal(), masks.window(1, 2))
    assert device(pair.fn) is device(and_(masks.causal(), masks.window(7, 8)).fn)


def test_narrow():
    """32-bit elements; an array that is spread out stays so; what does not fit is refused."""
    spread = np.broadcast_to(np.arange(3.0), (5, 4, 3))
    assert narrow(spread).dtype == np.float32
    assert narrow(spread).strides[:2] == (0, 0)
    assert np.array_equal(narrow(spread), spread)
    assert narrow(np.arange(3)).dtype == np.int32
    assert narrow(MASK) is MASK
    assert arguments(AsItIs(), (1, (2.5, ()), np.bool_(True))) == (1, (2.5, ()), 1)
    with pytest.raises(OverflowError, match="32 bits"):
        narrow(np.array([2**31]))
    with pytest.raises(OverflowError):
        arguments(AsItIs(), (2**31,))
