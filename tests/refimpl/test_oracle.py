"""The oracle against formulas written in another way, central differences, and PyTorch where it is installed."""

import itertools

import numpy as np
import pytest

from refimpl import oracle

SHAPE = {"B": 2, "Hq": 4, "Hk": 2, "Nq": 7, "Nk": 9, "d": 5, "dv": 3}


def draw(seed=0, **change):
    """Q, K, V, dO, dlse for SHAPE with some sizes changed."""
    n = SHAPE | change
    rng = np.random.default_rng(seed)
    shapes = [(n["B"], n[h], n[m], n[w]) for h, m, w in
              (("Hq", "Nq", "d"), ("Hk", "Nk", "d"), ("Hk", "Nk", "dv"), ("Hq", "Nq", "dv"))]  # fmt: skip
    return [rng.standard_normal(s) for s in [*shapes, shapes[0][:3]]]


def options_by_name(seed=1, **change):
    """One set of arguments for each option, and all of them together."""
    n = SHAPE | change
    rng = np.random.default_rng(seed)
    scores = (n["B"], n["Hq"], n["Nq"], n["Nk"])
    single = {
        "plain": {},
        "scale": {"scale": -0.4},
        "causal": {"causal": True},
        "top_left": {"causal": True, "align": "top_left"},
        "mask": {"mask": rng.random(scores) < 0.6},
        "mask_of_keys": {"mask": rng.random((n["B"], 1, 1, n["Nk"])) < 0.6},
        "bias": {"bias": rng.standard_normal((1, n["Hq"], n["Nq"], n["Nk"]))},
        "bias_hides": {"bias": np.where(rng.random((n["Nq"], n["Nk"])) < 0.3, -np.inf, 0.5)},
        "window": {"window": (2, 1)},
        "window_open": {"window": (None, 1)},
        "softcap": {"softcap": 1.5},
        "alibi": {"alibi_slopes": rng.random(n["Hq"])},
        "lengths": {"lengths_q": np.array([7, 3]), "lengths_k": np.array([4, 9])},
        "dropout": {"keep": rng.random(scores) < 0.7, "dropout_p": 0.3},
    }
    every = {"causal": True, "mask": single["mask"]["mask"], "window": (4, None), "softcap": 2.0, "scale": 0.9,
             "alibi_slopes": rng.random((n["B"], n["Hq"])), "bias": rng.standard_normal((n["Nq"], 1)),
             **single["lengths"], **single["dropout"]}  # fmt: skip
    return single | {"all": every}


def element_by_element(
    Q, K, V, scale=None, causal=False, align="bottom_right", mask=None, bias=None, window=None, softcap=None,
    alibi_slopes=None, lengths_q=None, lengths_k=None, keep=None, dropout_p=0.0,
):  # fmt: skip
    """The same function written over single scores in Python numbers: slow, and unlike the oracle in every line."""
    (B, Hq, Nq, d), (_, Hk, Nk, dv) = Q.shape, V.shape
    scale = d**-0.5 if scale is None else scale
    full = {name: None if x is None else np.broadcast_to(x, (B, Hq, Nq, Nk))
            for name, x in (("mask", mask), ("bias", bias), ("keep", keep))}  # fmt: skip
    O, lse = np.zeros((B, Hq, Nq, dv)), np.full((B, Hq, Nq), -np.inf)
    for b, h, r in itertools.product(range(B), range(Hq), range(Nq)):
        n_q, n_k = (n if x is None else int(x[b]) for n, x in ((Nq, lengths_q), (Nk, lengths_k)))
        i = r + n_k - n_q if align == "bottom_right" else r
        s = {}
        for j in range(n_k if r < n_q else 0):
            left, right = window or (None, None)
            out = causal and j > i
            out |= left is not None and j < i - left
            out |= right is not None and j > i + right
            out |= full["mask"] is not None and not full["mask"][b, h, r, j]
            x = scale * float(np.dot(Q[b, h, r], K[b, h * Hk // Hq, j]))
            x = x if softcap is None else softcap * np.tanh(x / softcap)
            x -= 0 if alibi_slopes is None else np.broadcast_to(alibi_slopes, (B, Hq))[b, h] * abs(i - j)
            x += 0 if full["bias"] is None else full["bias"][b, h, r, j]
            if not out and x > -np.inf:
                s[j] = x
        if s:
            lse[b, h, r] = np.logaddexp.reduce(list(s.values()))
            for j, x in s.items():
                kept = 1.0 if keep is None else full["keep"][b, h, r, j] / (1 - dropout_p)
                O[b, h, r] += np.exp(x - lse[b, h, r]) * kept * V[b, h * Hk // Hq, j]
    return O, lse


OPTIONS = options_by_name()


@pytest.mark.parametrize("name", OPTIONS)
def test_forward_equals_another_formula(name):
    Q, K, V, _, _ = draw()
    for got, want in zip(oracle.attention(Q, K, V, **OPTIONS[name]),
                         element_by_element(Q, K, V, **OPTIONS[name]), strict=True):  # fmt: skip
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-13, equal_nan=False)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_equal_central_differences(name):
    """Of sum(O dO) + sum(lse dlse), at random entries of every input and of the bias."""
    Q, K, V, dO, dlse = draw(2)
    options = OPTIONS[name]

    def loss(Q, K, V, bias):
        O, lse = oracle.attention(Q, K, V, **options | ({} if bias is None else {"bias": bias}))
        return float((O * dO).sum() + (np.where(np.isfinite(lse), lse, 0) * dlse).sum())

    inputs = [Q, K, V, options.get("bias")]
    gradients = oracle.attention_backward(Q, K, V, dO, dlse=dlse, **options)
    assert [None if g is None else g.shape for g in gradients] == [None if x is None else np.shape(x) for x in inputs]
    rng = np.random.default_rng(3)
    for k, x in enumerate(inputs):
        for at in [] if x is None else rng.integers(0, x.size, 12):
            if not np.isfinite(x.flat[at]):
                assert gradients[k].flat[at] == 0  # an entry that hides a key has no influence
                continue
            moved = []
            for step in (1e-5, -1e-5):
                changed = [None if y is None else y.copy() for y in inputs]
                changed[k].flat[at] += step
                moved.append(loss(*changed))
            assert abs((moved[0] - moved[1]) / 2e-5 - gradients[k].flat[at]) <= 1e-7


@pytest.mark.parametrize("name", ["plain", "causal", "mask", "bias", "scale"])
def test_equals_pytorch_in_float64(name):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    Q, K, V, dO, _ = draw(4, Nk=7)  # equal lengths: SDPA's causal mask is aligned top left
    options = options_by_name(5, Nk=7)[name]
    q, k, v = (torch.tensor(x, requires_grad=True) for x in (Q, K, V))
    extra = {key: torch.tensor(options[key]) for key in ("mask", "bias") if key in options}
    O = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=extra.get("mask", extra.get("bias")), is_causal=options.get("causal", False),
        scale=options.get("scale"), enable_gqa=True)  # fmt: skip
    O.backward(torch.tensor(dO))
    got = [oracle.attention(Q, K, V, **options)[0], *oracle.attention_backward(Q, K, V, dO, **options)[:3]]
    for mine, theirs in zip(got, (O.detach(), q.grad, k.grad, v.grad), strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=0, atol=1e-13, equal_nan=False)


@pytest.mark.parametrize("change", [{"B": 0}, {"Nq": 0}, {"Nk": 0}, {"Nq": 1, "Nk": 1}])
def test_nothing_to_attend_to(change):
    Q, K, V, dO, dlse = draw(**change)
    O, lse = oracle.attention(Q, K, V)
    assert O.shape == dO.shape and lse.shape == dlse.shape
    if not Q.size or not K.size:
        assert not O.any() and np.isneginf(lse).all()
    assert [g.shape for g in oracle.attention_backward(Q, K, V, dO, dlse=dlse)[:3]] == [Q.shape, K.shape, V.shape]


def test_rows_that_see_no_key():
    """Causal, more queries than keys: rows 0 and 1 see nothing."""
    Q, K, V, dO, dlse = draw(Nq=5, Nk=3)
    O, lse = oracle.attention(Q, K, V, causal=True)
    assert not O[:, :, :2].any() and np.isneginf(lse[:, :, :2]).all() and np.isfinite(lse[:, :, 2:]).all()
    dQ, dK, dV, _ = oracle.attention_backward(Q, K, V, dO, dlse=dlse, causal=True)
    assert not dQ[:, :, :2].any() and np.isfinite(dK).all() and np.isfinite(dV).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["K", "V"])
def test_what_is_not_finite_reaches_those_who_see_it_alone(which, value):
    """Key 4 under the causal mask: rows 0 - 3 must not change by a bit, forward or backward."""
    Q, K, V, dO, _ = draw(6, Nq=8, Nk=8, Hq=2, Hk=2)
    clean, grads = oracle.attention(Q, K, V, causal=True), oracle.attention_backward(Q, K, V, dO, causal=True)
    (K if which == "K" else V)[:, :, 4] = value
    O, lse = oracle.attention(Q, K, V, causal=True)
    np.testing.assert_array_equal(O[:, :, :4], clean[0][:, :, :4])
    np.testing.assert_array_equal(lse[:, :, :4], clean[1][:, :, :4])
    np.testing.assert_array_equal(oracle.attention_backward(Q, K, V, dO, causal=True)[0][:, :, :4], grads[0][:, :, :4])
    if which == "V" or np.isnan(value):
        assert not np.isfinite(O[:, :, 4:]).any()


def test_minus_infinite_scores_hide_a_key():
    Q, K, V = np.ones((1, 1, 1, 1)), np.full((1, 1, 3, 1), -np.inf), np.full((1, 1, 3, 1), np.nan)
    O, lse = oracle.attention(Q, K, V, scale=1.0)
    assert O[0, 0, 0, 0] == 0 and np.isneginf(lse[0, 0, 0])
    K[0, 0, 1], V[0, 0, 1] = 2.0, 7.0
    O, lse = oracle.attention(Q, K, V, scale=1.0)
    assert O[0, 0, 0, 0] == 7 and lse[0, 0, 0] == 2


def test_chosen_rows_are_those_of_the_whole():
    Q, K, V, _, _ = draw(7)
    rows = np.array([6, 0, 3])
    for name, options in OPTIONS.items():
        whole, part = oracle.attention(Q, K, V, **options), oracle.attention(Q, K, V, rows=rows, **options)
        for w, p in zip(whole, part, strict=True):
            np.testing.assert_allclose(p, w[:, :, rows], rtol=0, atol=1e-14, err_msg=name)


def test_chunks_and_threads_change_nothing(monkeypatch):
    Q, K, V, dO, _ = draw(8, Nq=40, Nk=33)
    options = {"causal": True, "window": (9, None)}
    both = (oracle.attention, (Q, K, V)), (oracle.attention_backward, (Q, K, V, dO))
    whole = [f(*x, threads=1, **options) for f, x in both]
    monkeypatch.setattr(oracle, "CHUNK_BYTES", 8 * 33 * 7)  # seven rows at a time
    parts = [f(*x, threads=3, **options) for f, x in both]
    for w, p in zip(itertools.chain(*whole), itertools.chain(*parts), strict=True):
        assert w is p is None or np.allclose(w, p, rtol=0, atol=1e-14)


def test_inputs_are_not_modified():
    arrays = draw(9)
    before = [x.copy() for x in arrays]
    oracle.attention_backward(*arrays[:4], dlse=arrays[4], **OPTIONS["all"])
    for x, y in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(x, y)


GOOD = {"Q": (1, 4, 3, 2), "K": (1, 2, 5, 2), "V": (1, 2, 5, 2)}


@pytest.mark.parametrize("arrays, options, error, says", [
    ({"Q": (4, 3, 2)}, {}, ValueError, "Q: expected shape (B, H, N, d)"),
    ({"K": (1, 2, 5, 3)}, {}, ValueError, "K: expected shape (1, 2, 5, 2)"),
    ({"V": (1, 2, 6, 2)}, {}, ValueError, "K: expected shape (1, 2, 6, 2)"),
    ({"K": (2, 2, 5, 2), "V": (2, 2, 5, 2)}, {}, ValueError, "K: expected shape (1, 2, 5, 2)"),
    ({"V": (2, 2, 5, 2)}, {}, ValueError, "V: expected batch 1"),
    ({"Q": (1, 3, 3, 2)}, {}, ValueError, "Q: expected a positive multiple of K's 2 heads, got 3"),
    ({"Q": (1, 0, 3, 2)}, {}, ValueError, "Q: expected a positive multiple"),
    ({"Q": (1, 4, 3, 0), "K": (1, 2, 5, 0)}, {}, ValueError, "Q: expected a head dim of at least 1"),
    ({"V": (1, 2, 5, 0)}, {}, ValueError, "V: expected a head dim of at least 1"),
    ({}, {"scale": np.nan}, ValueError, "scale: expected a finite number"),
    ({}, {"scale": "big"}, TypeError, "scale: expected a number"),
    ({}, {"align": "right"}, ValueError, "align: expected"),
    ({}, {"mask": np.ones((3, 5))}, TypeError, "mask: expected booleans"),
    ({}, {"mask": np.ones((3, 4), bool)}, ValueError, "mask: expected a shape that broadcasts to (1, 4, 3, 5)"),
    ({}, {"bias": np.zeros((2, 1, 3, 5))}, ValueError, "bias: expected a shape that broadcasts"),
    ({}, {"window": (-1, 2)}, ValueError, "window: expected non-negative integers or None"),
    ({}, {"window": 3}, ValueError, "window: expected (left, right)"),
    ({}, {"softcap": 0.0}, ValueError, "softcap: expected a positive number"),
    ({}, {"alibi_slopes": np.ones(3)}, ValueError, "alibi_slopes: expected shape (4,) or (1, 4)"),
    ({}, {"lengths_k": np.array([6])}, ValueError, "lengths_k: expected lengths in 0 ... 5"),
    ({}, {"lengths_q": np.array([1.0])}, ValueError, "lengths_q: expected 1 integers"),
    ({}, {"dropout_p": 1.5, "keep": np.ones(5, bool)}, ValueError, "dropout_p: expected a number in [0, 1]"),
    ({}, {"dropout_p": 0.5}, ValueError, "keep: expected the mask"),
    ({}, {"rows": np.array([3])}, ValueError, "rows: expected row numbers in 0 ... 2"),
    ({}, {"rows": np.array([0.5])}, ValueError, "rows: expected a 1-d array of integers"),
])  # fmt: skip
def test_bad_input_is_named(arrays, options, error, says):
    import re

    with pytest.raises(error, match=re.escape(says)) as caught:
        oracle.attention(*(np.zeros(shape) for shape in (GOOD | arrays).values()), **options)
    assert "\n" not in str(caught.value)


def test_bad_gradients_are_named():
    Q, K, V, dO, dlse = draw()
    with pytest.raises(ValueError, match="dO: expected shape"):
        oracle.attention_backward(Q, K, V, dO[:, :, 1:])
    with pytest.raises(ValueError, match="dlse: expected shape"):
        oracle.attention_backward(Q, K, V, dO, dlse=dlse[..., 1:])
