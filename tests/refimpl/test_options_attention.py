"""Every option, alone and with others, forward and backward by tiles, against the oracle."""

import numpy as np
import pytest
from helpers_options import HOLES, NK, NQ, OPTIONS, arrays, by_oracle, by_rules, distance
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl import masks, oracle, scores, step3_flash_v2, step4_causal
from refimpl.backward import attention_backward
from refimpl.heads import gather
from refimpl.mask_tensor import boolean
from refimpl.philox import Dropout
from refimpl.rule import Rule
from refimpl.standard import standard
from refimpl.tiling import Tile
from refimpl.vocabulary import real, tanh

WITH_BIAS = [name for name, option in OPTIONS.items() if "bias" in option.same and name != "relative"]


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option(agree, name):
    """Forward within 1e-12, gradients within 1e-11, with a gradient through lse, and dbias in the bias's shape."""
    option, given, with_bias = OPTIONS[name], arrays(), name in WITH_BIAS
    want = by_oracle(given, option.same, option.call)[: 6 if with_bias else 5]
    for step, order in ((step3_flash_v2, "v1"), (step4_causal, "v2")):
        got = by_rules(given, option.rules(), option.call, order=order, step=step, with_bias=with_bias)
        agree(got[:2], want[:2], 1e-12)
        agree(got[2:], want[2:], 1e-11)


def test_every_step_takes_options(step, agree):
    """The ladder is one algorithm: what step 3 does with options, all do."""
    option, (Q, K, V, *_) = OPTIONS["standard"], arrays()
    got = step.attention(Q, K, V, rules=option.rules(), **option.call, tile=Tile(8, 6))
    agree(got, oracle.attention(Q, K, V, **option.same, **option.call), 1e-12)


def test_empty_rows(step):
    """Four queries, two keys, causal: the first two rows see nothing and are 0, with lse = -inf."""
    Q, K, V = np.zeros((1, 1, 4, 1)), np.ones((1, 1, 2, 1)), np.array([1.0, 3.0]).reshape(1, 1, 2, 1)
    O, lse = step.attention(Q, K, V, causal=True)
    assert O.ravel().tolist() == [0, 0, 1, 2]
    assert lse.ravel().tolist() == [-np.inf, -np.inf, 0, np.log(2)]
    dQ, dK, dV = attention_backward(Q + 1, K, V, O, lse, np.ones((1, 1, 4, 1)), causal=True)
    assert dQ.ravel().tolist()[:2] == [0, 0]
    assert np.isfinite(dK).all()
    assert dV.sum() == pytest.approx(np.exp(1) * 2)


def test_head_order(step):
    """Six query heads, two key heads: 0, 1, 2 read the first, 3, 4, 5 the second, and their gradients add up there."""
    Q, K = np.zeros((1, 6, 1, 1)), np.zeros((1, 2, 1, 1))
    V, dO = np.array([5.0, 7.0]).reshape(1, 2, 1, 1), np.array([1.0, 2, 4, 8, 16, 32]).reshape(1, 6, 1, 1)
    O, lse = step.attention(Q, K, V)
    assert O.ravel().tolist() == [5, 5, 5, 7, 7, 7]
    assert attention_backward(Q, K, V, O, lse, dO)[2].ravel().tolist() == [7, 56]


@st.composite
def problems(draw):
    """Draw Q, K, V, dO, dlse, how to call us, and how to say the same to the oracle."""
    B, Hk, group, Nq, Nk = (draw(st.integers(1, n)) for n in (2, 2, 3, 21, 21))
    Hq, rng = Hk * group, np.random.default_rng(draw(st.integers(0, 2**32)))
    d, dv = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    shapes = (B, Hq, Nq, d), (B, Hk, Nk, d), (B, Hk, Nk, dv), (B, Hq, Nq, dv), (B, Hq, Nq)
    arrays = [rng.standard_normal(shape) for shape in shapes]

    def scorelike():
        return [draw(st.sampled_from((1, n))) for n in (B, Hq, Nq, Nk)]

    chosen = draw(st.sets(st.sampled_from(("lengths", "mask", "softcap", "alibi", "bias", "dropout", "sparse"))))
    ours = {"align": draw(st.sampled_from(("bottom_right", "top_left"))), "causal": draw(st.booleans())}
    ours["scale"] = draw(st.sampled_from((None, -0.8, 2.0)))
    same, given = dict(ours), {}
    if "lengths" in chosen:
        lengths = {"lengths_q": rng.integers(0, Nq + 1, B), "lengths_k": rng.integers(0, Nk + 1, B)}
        ours |= lengths
        same |= lengths
    if "mask" in chosen:
        given["mask"] = rng.random(scorelike()) < 0.7
    if "softcap" in chosen:
        given["softcap"] = 1.5
    if "alibi" in chosen:
        given["alibi_slopes"] = rng.random((B, Hq) if draw(st.booleans()) else Hq)
    if "bias" in chosen:
        shape = scorelike()
        given["bias"] = np.where(rng.random(shape) < 0.2, -np.inf, rng.standard_normal(shape))
    window = [draw(st.sampled_from((None, 0, 1, 4, 40))) for _ in range(2)]
    same |= given | {"window": window}
    if draw(st.booleans()):
        ours["rules"] = list(standard(window=window, **given))
    else:
        makers = {"mask": boolean, "softcap": scores.softcap, "alibi_slopes": scores.alibi, "bias": scores.bias}
        ours["rules"] = [masks.window(*window), *(makers[name](x) for name, x in given.items())]
    if "sparse" in chosen:
        step = draw(st.integers(1, 4))
        ours["rules"].append(masks.dilated(step))
        offset = ours.get("lengths_k", np.full(B, Nk)) - ours.get("lengths_q", np.full(B, Nq))
        offset = offset * (ours["align"] == "bottom_right")
        r, j = np.ogrid[:Nq, :Nk]
        comb = (r + offset[:, None, None, None] - j) % step == 0
        same["mask"] = comb & same.get("mask", True)
    if "dropout" in chosen:
        dropout = Dropout(draw(st.sampled_from((0.0, 0.4, 1.0))), seed=draw(st.integers(0, 2**64 - 1)), offset=3)
        ours["dropout"] = dropout
        keep = [[dropout.mask(b, h, slice(0, Nq), slice(0, Nk)) for h in range(Hq)] for b in range(B)]
        same |= {"keep": np.array(keep), "dropout_p": dropout.p}
    return arrays, ours, same, "bias" in given, Tile(*(draw(st.sampled_from((4, 7, 16, 24))) for _ in "rc"))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems())
def test_combinations(problem):
    """Options together, in shapes and tiles at random: still the oracle's answer, forward and backward."""
    (Q, K, V, dO, dlse), ours, same, with_bias, tile = problem
    want = oracle.attention(Q, K, V, threads=1, **same)
    gradients = oracle.attention_backward(Q, K, V, dO, dlse=dlse, threads=1, **same)
    for step, order in ((step3_flash_v2, "v1"), (step4_causal, "v2")):
        O, lse = step.attention(Q, K, V, tile=tile, **ours)
        assert distance((O, lse), want) <= 1e-12
        back = {"dlse": dlse, "dbias": with_bias, "order": order, "tile": tile, **ours}
        got = attention_backward(Q, K, V, O, lse, dO, **back)
        assert distance(got, gradients[: 4 if with_bias else 3]) <= 1e-11


def test_central_differences_of_a_bias(agree):
    """dbias and dlse against the forward pass itself, the bias between a softcap and a rule of one's own."""

    def halve(s, b, h, i, j):
        return s / 2 + tanh(s)

    def halve_slope(s, b, h, i, j):
        return real(1.5) - tanh(s) * tanh(s)

    Q, K, V, dO, dlse = (x[:1, :2, :4, ..., :3] if x.ndim == 4 else x[:1, :2, :4] for x in arrays())
    K, V = K[:, :1, :3], V[:, :1, :3]
    bias = np.random.default_rng(3).standard_normal((2, 1, 3))

    def call(bias):
        own = Rule(halve, kind="score", grad=halve_slope)
        options = {"rules": [scores.softcap(3.0), scores.bias(bias), own], "causal": True}
        return options, step3_flash_v2.attention(Q, K, V, **options)

    options, (O, lse) = call(bias)
    got = attention_backward(Q, K, V, O, lse, dO, dlse=dlse, dbias=True, **options)[3]
    want = np.zeros_like(bias)
    for at in np.ndindex(bias.shape):
        ends = []
        for step in (1e-5, -1e-5):
            moved = bias.copy()
            moved[at] += step
            O, lse = call(moved)[1]
            seen = lse > -np.inf
            ends.append((O * dO).sum() + (lse * dlse)[seen].sum())
        want[at] = (ends[0] - ends[1]) / 2e-5
    agree((got,), (want,), 1e-8)


@pytest.mark.parametrize("capped", [False, True])
def test_what_a_bias_hides_may_hold_anything(capped):
    """A key under a bias of -inf, even before a softcap: a NaN in it is not seen, and its dbias is 0."""
    given, hidden = arrays(), np.isneginf(HOLES)[:, 0, 0]
    rules = [scores.bias(HOLES), scores.softcap(3.0)] if capped else scores.bias(HOLES)
    assert len(gather(rules, causal=False, mask=None, lengths=False)[0]) == capped
    clean = by_rules(given, rules, {}, with_bias=True)
    for b in range(2):
        for x in given[1:3]:
            x[b][:, hidden[b]] = np.nan
    dirty = by_rules(given, rules, {}, with_bias=True)
    for x, y in zip(dirty, clean, strict=True):
        assert np.array_equal(x, y)
    assert (dirty[5][np.isneginf(HOLES)] == 0).all()


def test_a_nan_in_a_bias_reaches_its_row_alone():
    """A bias of NaN is not a bias of -inf."""
    Q, K, V, dO, dlse = arrays()
    bias = np.zeros((NQ, NK))
    bias[6, 4], bias[2, 3] = np.nan, -np.inf
    O, lse, dQ, *_ = by_rules((Q, K, V, dO, dlse), scores.bias(bias), {})
    for x in (O, lse, dQ):
        assert np.array_equal(np.isnan(x).reshape(2, 4, NQ, -1).all(axis=(0, 1, 3)), np.arange(NQ) == 6)
        assert np.array_equal(np.isnan(x).reshape(2, 4, NQ, -1).any(axis=(0, 1, 3)), np.arange(NQ) == 6)


def test_fp32(agree):
    """Rules keep the arithmetic type."""
    option, given = OPTIONS["standard"], [x.astype(np.float32) for x in arrays()]
    Q, K, V, dO, dlse = given
    call = {"rules": option.rules(), "dtype": np.float32, **option.call}
    O, lse = step4_causal.attention(Q, K, V, **call)
    got = O, lse, *attention_backward(Q, K, V, O, lse, dO, dlse=dlse, dbias=True, **call)
    assert {x.dtype for x in got} == {np.dtype(np.float32)}
    agree(got, by_oracle(given, option.same, option.call), 2e-5)


def test_lengths_are_hidden_once():
    """By padding, unless a rule does it already: `standard` with lengths is still one rule."""
    pair = standard(window=(3, 0))
    assert gather(pair, causal=False, mask=None, lengths=True) == ([pair[0]], [pair[1]])
    hidden, _ = gather(masks.window(3, 0), causal=True, mask=None, lengths=True)
    assert [rule.fn for rule in hidden] == [masks.causal_mask, masks.window_mask, masks.padding_mask]


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"rules": [3]}, TypeError, "rules must be Rule objects"),
        ({"rules": masks.padding, "causal": True}, TypeError, "rules must be Rule objects"),
        ({"rules": scores.alibi([1, 2, 3])}, ValueError, r"alibi_slopes must broadcast to \(2, 4\)"),
        ({"rules": scores.bias(np.ones((NQ - 1, NK)))}, ValueError, r"bias must broadcast to \(2, 4, 17, 25\)"),
        ({"rules": boolean(np.ones((3, 1, NQ, NK), bool))}, ValueError, r"mask must broadcast to \(2, 4, 17, 25\)"),
        ({"rules": scores.relative(np.ones((3, 5)))}, ValueError, "table must have 4 heads"),
        ({"rules": masks.document(np.arange(NQ))}, ValueError, r"ids_k must broadcast to \(2, 25\)"),
        ({"rules": masks.document(np.arange(NQ - 1), np.arange(NK))}, ValueError, r"ids_q must broadcast to \(2, 17\)"),
        ({"rules": masks.prefix_lm([1, 2, 3])}, ValueError, r"prefix must broadcast to \(2,\)"),
        ({"lengths_q": [1, 20]}, ValueError, "lengths_q must be in 0 ... 17"),
        ({"lengths_k": [-1, 20]}, ValueError, "lengths_k must be in 0 ... 25"),
        ({"lengths_k": [1, 2, 3]}, ValueError, "lengths_k must have shape"),
        ({"lengths_q": [1.0, 2.0]}, TypeError, "lengths_q must be integers"),
        ({"dropout": 0.1}, TypeError, "dropout must be a Dropout"),
        ({"dropout": Dropout(0.1, keep=np.ones((NQ - 1, NK), bool))}, ValueError, "dropout keep must broadcast"),
    ],
)
def test_refuses(step, options, kind, says):
    """Each wrong option: its name and what was expected, in one line."""
    Q, K, V, *_ = arrays()
    with pytest.raises(kind, match=says) as caught:
        step.attention(Q, K, V, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"dbias": True}, ValueError, "they hold 0"),
        ({"dbias": True, "rules": [scores.bias(0.0), scores.bias(1.0)]}, ValueError, "they hold 2"),
        ({"rules": Rule(lambda s, b, h, i, j: s, kind="score")}, TypeError, "rule must have a grad"),
        ({"dlse": np.ones(3)}, ValueError, "dlse must be"),
    ],
)
def test_backward_refuses(options, kind, says):
    """What the backward pass cannot do, it says."""
    Q, K, V, dO, dlse = arrays()
    with pytest.raises(kind, match=says):
        attention_backward(Q, K, V, dO, dlse, dO, **options)
