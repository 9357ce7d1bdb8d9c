"""The oracle against the definition in other words, central differences, and PyTorch where installed."""

import itertools

import numpy as np
import pytest

from refimpl import oracle

SHAPE = {"B": 2, "Hq": 4, "Hk": 2, "Nq": 7, "Nk": 9, "d": 5, "dv": 3}


def draw(seed=0, **change):
    """Q, K, V, dO, dlse for SHAPE with some sizes changed."""
    n = SHAPE | change
    rng = np.random.default_rng(seed)
    shapes = ("B Hq Nq d", "B Hk Nk d", "B Hk Nk dv", "B Hq Nq dv", "B Hq Nq")
    return [rng.standard_normal([n[letter] for letter in shape.split()]) for shape in shapes]


def options_by_name(seed=1, **change):
    """One set of arguments for each option, and all of them together."""
    n = SHAPE | change
    rng = np.random.default_rng(seed)
    B, Hq, Nq, Nk = scores = tuple(n[letter] for letter in ("B", "Hq", "Nq", "Nk"))
    lengths = {"lengths_q": rng.integers(1, Nq + 1, B), "lengths_k": rng.integers(0, Nk + 1, B)}
    dropout = {"keep": rng.random(scores) < 0.7, "dropout_p": 0.3}
    mask = rng.random(scores) < 0.6
    return {
        "plain": {},
        "scale": {"scale": -0.4},
        "scale 0": {"scale": 0.0},
        "causal": {"causal": True},
        "top left": {"causal": True, "align": "top_left"},
        "mask": {"mask": mask},
        "mask of keys": {"mask": rng.random((B, 1, 1, Nk)) < 0.6},
        "bias": {"bias": rng.standard_normal((1, Hq, Nq, Nk))},
        "bias of keys": {"bias": rng.standard_normal(Nk), "scale": -0.7},
        "bias of rows": {"bias": rng.standard_normal((B, 1, Nq, 1))},
        "bias that hides": {"bias": np.where(rng.random((Nq, Nk)) < 0.3, -np.inf, 0.5)},
        "window": {"window": (2, 1)},
        "window, top left": {"window": (2, 1), "align": "top_left"},
        "window to the left": {"window": (2, None)},
        "window to the right": {"window": (None, 1)},
        "window of all": {"window": (2**63 - 1, 2**63 - 1)},
        "causal window": {"causal": True, "window": (1, 3)},
        "softcap": {"softcap": 1.5},
        "alibi": {"alibi_slopes": rng.random(Hq)},
        "alibi of each batch entry": {"alibi_slopes": rng.random((B, Hq)), "align": "top_left"},
        "lengths": lengths,
        "lengths, causal": lengths | {"causal": True},
        "dropout": dropout,
        "dropout of all": {"keep": np.array(True), "dropout_p": 1.0},
        "all": {
            "causal": True, "mask": mask, "window": (4, None), "softcap": 2.0, "scale": 0.9,
            "alibi_slopes": rng.random((B, Hq)), "bias": rng.standard_normal((Nq, 1)), **lengths, **dropout,
        },
    }


OPTIONS = options_by_name()


def close(got, want, atol):
    """Equal shapes, None for None, within atol, no NaN."""
    for x, y in zip(got, want, strict=True):
        if y is None:
            assert x is None
        else:
            np.testing.assert_allclose(x, y, rtol=0, atol=atol, equal_nan=False, strict=True)


def scores_of_head(b, h, Q, K, scale=None, causal=False, align="bottom_right", mask=None, bias=None,
                   window=None, softcap=None, alibi_slopes=None, lengths_q=None, lengths_k=None, **_):
    """Scores, slopes of the softcap and visibility of one head, from loops over rows and keys."""
    (B, Hq, Nq, d), (_, Hk, Nk, _) = Q.shape, K.shape
    scale = d**-0.5 if scale is None else scale
    mask = np.broadcast_to(True if mask is None else mask, (B, Hq, Nq, Nk))[b, h]
    bias = np.broadcast_to(0.0 if bias is None else bias, (B, Hq, Nq, Nk))[b, h]
    slopes = np.broadcast_to(0.0 if alibi_slopes is None else alibi_slopes, (B, Hq))
    left, right = (np.inf if bound is None else bound for bound in window or (None, None))
    n_q, n_k = (n if x is None else int(x[b]) for n, x in ((Nq, lengths_q), (Nk, lengths_k)))
    S, slope, sees = np.full((Nq, Nk), -np.inf), np.ones((Nq, Nk)), np.zeros((Nq, Nk), bool)
    for r, j in itertools.product(range(n_q), range(n_k)):
        i = r if align == "top_left" else n_k - n_q + r
        if causal and j > i:
            continue
        if j < i - left or j > i + right or not mask[r, j] or bias[r, j] == -np.inf:
            continue
        x = scale * sum(q * k for q, k in zip(Q[b, h, r], K[b, h // (Hq // Hk), j], strict=True))
        if softcap is not None:
            slope[r, j] = np.cosh(x / softcap) ** -2
            x = softcap * np.tanh(x / softcap)
        S[r, j] = x + bias[r, j] - slopes[b, h] * abs(i - j)
        sees[r, j] = True
    return S, slope, sees


def by_the_jacobian(Q, K, V, dO, dlse, keep=True, dropout_p=0.0, **options):
    """O, lse, dQ, dK, dV, dbias with every softmax's full Jacobian, in einsums over whole heads."""
    (B, Hq, Nq, d), (_, Hk, Nk, dv) = Q.shape, V.shape
    scale = d**-0.5 if options.get("scale") is None else options["scale"]
    Z = np.broadcast_to(keep, (B, Hq, Nq, Nk)) * (0.0 if dropout_p == 1 else 1 / (1 - dropout_p))
    O, lse = np.zeros((B, Hq, Nq, dv)), np.full((B, Hq, Nq), -np.inf)
    dQ, dK, dV, dS = np.zeros(Q.shape), np.zeros(K.shape), np.zeros(V.shape), np.zeros((B, Hq, Nq, Nk))
    for b, h in itertools.product(range(B), range(Hq)):
        g = h * Hk // Hq
        S, slope, sees = scores_of_head(b, h, Q, K, **options)
        P = np.zeros((Nq, Nk))
        for r in range(Nq):
            if sees[r].any():
                lse[b, h, r] = np.logaddexp.reduce(S[r, sees[r]])
                P[r] = np.exp(S[r] - lse[b, h, r])
        J = np.einsum("rj,jk->rjk", P, np.eye(Nk)) - np.einsum("rj,rk->rjk", P, P)
        O[b, h] = np.einsum("rj,rj,jv->rv", P, Z[b, h], V[b, g])
        dS[b, h] = np.einsum("rk,rk,rjk->rj", np.einsum("rv,kv->rk", dO[b, h], V[b, g]), Z[b, h], J)
        dS[b, h] += np.einsum("r,rj->rj", dlse[b, h], P)
        dV[b, g] += np.einsum("rj,rj,rv->jv", P, Z[b, h], dO[b, h])
        dQ[b, h] = scale * np.einsum("rj,rj,jd->rd", dS[b, h], slope, K[b, g])
        dK[b, g] += scale * np.einsum("rj,rj,rd->jd", dS[b, h], slope, Q[b, h])
    if (bias := options.get("bias")) is None:
        return O, lse, dQ, dK, dV, None
    full = (1,) * (4 - bias.ndim) + bias.shape
    axes = tuple(k for k in range(4) if full[k] == 1)
    return O, lse, dQ, dK, dV, dS.sum(axis=axes, keepdims=True).reshape(bias.shape)


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_definition_written_in_another_way(name):
    Q, K, V, dO, dlse = draw()
    options = OPTIONS[name]
    got = *oracle.attention(Q, K, V, **options), *oracle.attention_backward(Q, K, V, dO, dlse=dlse, **options)
    close(got, by_the_jacobian(Q, K, V, dO, dlse, **options), 1e-13)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_equal_central_differences(name):
    """Of sum(O dO) + sum(lse dlse), at random entries of every input and of the bias."""
    Q, K, V, dO, dlse = draw(2)
    options = OPTIONS[name]
    inputs = [Q, K, V, options.get("bias")]

    def loss(Q, K, V, bias):
        O, lse = oracle.attention(Q, K, V, **options | ({} if bias is None else {"bias": bias}))
        return (O * dO).sum() + (np.where(np.isfinite(lse), lse, 0) * dlse).sum()

    gradients = oracle.attention_backward(Q, K, V, dO, dlse=dlse, **options)
    rng = np.random.default_rng(3)
    for k, (x, gradient) in enumerate(zip(inputs, gradients, strict=True)):
        for at in [] if x is None else rng.integers(0, x.size, 12):
            if not np.isfinite(x.flat[at]):
                assert gradient.flat[at] == 0  # an entry that hides a key stays hiding it
                continue
            moved = []
            for step in (1e-5, -1e-5):
                changed = [None if y is None else y.copy() for y in inputs]
                changed[k].flat[at] += step
                moved.append(loss(*changed))
            assert abs((moved[0] - moved[1]) / 2e-5 - gradient.flat[at]) <= 1e-7


@pytest.mark.parametrize(
    "name", ["plain", "scale", "causal", "mask of keys", "bias", "softcap", "alibi", "dropout"])
def test_equals_pytorch_in_float64(name):
    """SDPA for what it has, autograd through the formula for the rest and for lse."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed; with it, its results are compared")
    Q, K, V, dO, dlse = draw(4, Nk=7)  # equal lengths: SDPA's causal mask is aligned top left
    options = options_by_name(5, Nk=7)[name]
    tensors = {n: torch.tensor(x) for n, x in options.items() if isinstance(x, np.ndarray)}
    leaves = [torch.tensor(x, requires_grad=True) for x in (Q, K, V)]
    q, k, v = leaves[0], *(x.repeat_interleave(2, 1) for x in leaves[1:])
    if "bias" in tensors:
        leaves.append(tensors["bias"].requires_grad_())
    if name in ("softcap", "alibi", "dropout"):
        S = q @ k.mT / 5**0.5
        if name == "softcap":
            S = options["softcap"] * torch.tanh(S / options["softcap"])
        if name == "alibi":
            i = torch.arange(7)
            S = S - tensors["alibi_slopes"][:, None, None] * (i[:, None] - i).abs()
        O, lse = torch.softmax(S, -1), torch.logsumexp(S, -1)
        O = (O * tensors["keep"] / (1 - options["dropout_p"]) if name == "dropout" else O) @ v
        ((O * torch.tensor(dO)).sum() + (lse * torch.tensor(dlse)).sum()).backward()
        close([oracle.attention(Q, K, V, **options)[1]], [lse.detach().numpy()], 1e-13)
    else:
        dlse = None
        mask = tensors.get("mask", tensors.get("bias"))
        O = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=name == "causal", scale=options.get("scale"))
        O.backward(torch.tensor(dO))
    close([oracle.attention(Q, K, V, **options)[0]], [O.detach().numpy()], 1e-13)
    gradients = oracle.attention_backward(Q, K, V, dO, dlse=dlse, **options)
    close(gradients[: len(leaves)], [x.grad.numpy() for x in leaves], 1e-13)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["Q", "K", "V", "dO"])
def test_what_is_not_finite_reaches_what_depends_on_it_alone(where, value, name):
    """Put it into one row of an input: rows of outputs that depend on it change, the others do not."""
    options, arrays = OPTIONS[name], draw(6, B=1, Hq=1, Hk=1)
    options = {n: x[:1] if n.startswith("lengths") else x for n, x in options.items()}
    for n, axes in (("mask", 4), ("bias", 4), ("keep", 4), ("alibi_slopes", 2)):
        if n in options and options[n].ndim:
            options[n] = options[n][tuple([slice(1)] * (options[n].ndim - axes + 2))]
    Q, K, V, dO, dlse = arrays

    def outputs():
        gradients = oracle.attention_backward(Q, K, V, dO, dlse=dlse, **options)
        return *oracle.attention(Q, K, V, **options), *gradients

    clean = outputs()
    sees = scores_of_head(0, 0, Q, K, **options)[2]
    at = {"Q": 4, "K": 3, "V": 3, "dO": 4}[where]
    arrays[("Q", "K", "V", "dO").index(where)][0, 0, at] = value
    got = outputs()

    keep = np.broadcast_to(options.get("keep", True), (1, 1, *sees.shape))[0, 0]
    kept = sees & keep & (options.get("dropout_p") != 1)
    rows = np.zeros(len(sees), bool)  # whose weights, output and gradient of scores depend on it
    if where in ("K", "V"):
        rows[(sees if where == "K" else kept)[:, at]] = True
    else:
        rows[at] = (sees if where == "Q" else kept)[at].any()
    weights = rows & (where in ("Q", "K"))
    touched = [
        weights & kept.any(axis=1) | rows & (where == "V"),  # O
        weights,  # lse
        rows,  # dQ
        (sees & rows[:, None]).any(axis=0),  # dK
        (kept & (weights | (where == "dO") & rows)[:, None]).any(axis=0),  # dV
    ]
    for x, y, touch in zip(got[:5], clean[:5], touched, strict=True):
        x, y = x[0, 0].reshape(len(touch), -1), y[0, 0].reshape(len(touch), -1)
        assert (np.isfinite(x[~touch]) == np.isfinite(y[~touch])).all()
        np.testing.assert_allclose(x[~touch], y[~touch], rtol=0, atol=1e-14)
        if np.isnan(value):
            assert np.isnan(x[touch]).all()
    if name == "bias that hides":
        touched = sees & rows[:, None]
        np.testing.assert_allclose(got[5][~touched], clean[5][~touched], rtol=0, atol=1e-14)
        assert np.isinf(value) or np.isnan(got[5][touched]).all()
