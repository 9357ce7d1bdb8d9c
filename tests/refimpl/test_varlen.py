"""Packed sequences: each as if it were alone, none at all, and what is wrong with cumulative lengths."""

import numpy as np
import pytest

from refimpl import masks, oracle, scores, varlen
from refimpl.philox import Dropout
from refimpl.tiling import Tile

TILE = Tile(5, 4)
LENGTHS_Q, LENGTHS_K = [7, 0, 1, 12, 3, 0], [9, 4, 0, 6, 3, 0]
CU_Q, CU_K = (np.cumsum([0, *lengths]) for lengths in (LENGTHS_Q, LENGTHS_K))


def packed(seed=0, extra=0, Hq=4, Hk=2, d=5, dv=3):
    """Q, K, V, dO, dlse of all sequences; `extra` rows and keys belong to none."""
    rng = np.random.default_rng(seed)
    rows, keys = CU_Q[-1] + extra, CU_K[-1] + extra
    shapes = (rows, Hq, d), (keys, Hk, d), (keys, Hk, dv), (rows, Hq, dv), (Hq, rows)
    return [rng.standard_normal(shape) for shape in shapes]


def both_ways(arrays, order="v2", with_bias=False, **options):
    """O, lse and gradients of packed arrays."""
    Q, K, V, dO, dlse = arrays
    options["tile"] = TILE
    O, lse = varlen.attention(Q, K, V, CU_Q, CU_K, **options)
    back = {"dlse": dlse, "order": order, "dbias": with_bias, **options}
    return O, lse, *varlen.attention_backward(Q, K, V, O, lse, dO, CU_Q, CU_K, **back)


def one_by_one(arrays, same):
    """The oracle's answer, a sequence at a time; `same(b)` gives its options."""
    Q, K, V, dO, dlse = arrays
    O, lse = np.zeros(dO.shape), np.full(dlse.shape, -np.inf)
    dQ, dK, dV = (np.zeros(x.shape) for x in (Q, K, V))
    for b in range(len(LENGTHS_Q)):
        rows, keys = slice(*CU_Q[b : b + 2]), slice(*CU_K[b : b + 2])
        q, k, v, do = (np.moveaxis(x, 0, 1)[None] for x in (Q[rows], K[keys], V[keys], dO[rows]))
        o, lse_b = oracle.attention(q, k, v, **same(b))
        O[rows], lse[:, rows] = np.moveaxis(o[0], 0, 1), lse_b[0]
        gradients = oracle.attention_backward(q, k, v, do, dlse=dlse[None, :, rows], **same(b))[:3]
        for total, at, part in zip((dQ, dK, dV), (rows, keys, keys), gradients, strict=True):
            total[at] = np.moveaxis(part[0], 0, 1)
    return O, lse, dQ, dK, dV


@pytest.mark.parametrize("order", ["v1", "v2"])
@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("align", [None, "bottom_right", "top_left"])
def test_each_sequence_as_if_alone(agree, order, extra, align):
    """Causal in both alignments, zero-length sequences, rows past the last one: 0, -inf, gradients 0."""
    options = {"causal": align is not None, "align": align or "bottom_right"}
    arrays = packed(extra=extra)
    agree(both_ways(arrays, order, **options), one_by_one(arrays, lambda b: options), 1e-12)


def test_rules_count_from_the_start_of_a_sequence(agree):
    """ALiBi of each batch entry, a window, a prefix each, dropout: `b` is the sequence, positions are its own."""
    slopes = np.random.default_rng(1).random((6, 4))
    dropout, prefix = Dropout(0.3, seed=5), np.array([2, 1, 0, 4, 3, 0])
    arrays = packed()

    def same(b):
        Nq, Nk = LENGTHS_Q[b], LENGTHS_K[b]
        i, j = np.arange(Nq)[:, None] + Nk - Nq, np.arange(Nk)
        keep = np.array([dropout.mask(b, h, slice(0, Nq), slice(0, Nk)) for h in range(4)])
        mask = (j <= i) | (j < prefix[b])
        return {"alibi_slopes": slopes[b], "window": (6, 4), "mask": mask, "keep": keep, "dropout_p": 0.3}

    rules = [masks.window(6, 4), masks.prefix_lm(prefix), scores.alibi(slopes)]
    agree(both_ways(arrays, rules=rules, dropout=dropout), one_by_one(arrays, same), 1e-11)


def test_bias_of_the_longest(agree):
    """An array of a rule has room for the longest sequence; its gradient is summed over all of them."""
    bias = np.random.default_rng(2).standard_normal((4, 12, 9))
    arrays = packed()

    def same(b):
        return {"bias": bias[:, : LENGTHS_Q[b], : LENGTHS_K[b]]}

    *got, dbias = both_ways(arrays, rules=scores.bias(bias), with_bias=True)
    agree(got, one_by_one(arrays, same), 1e-12)
    Q, K, V, dO, dlse = arrays
    want = np.zeros_like(bias)
    for b in range(6):
        rows, keys = slice(*CU_Q[b : b + 2]), slice(*CU_K[b : b + 2])
        q, k, v, do = (np.moveaxis(x, 0, 1)[None] for x in (Q[rows], K[keys], V[keys], dO[rows]))
        part = oracle.attention_backward(q, k, v, do, dlse=dlse[None, :, rows], **same(b))[3]
        want[:, : LENGTHS_Q[b], : LENGTHS_K[b]] += part
    agree((dbias,), (want,), 1e-12)


def test_no_sequences():
    """cu_seqlens of one entry: every row is past the last sequence."""
    Q, K, V, dO, _ = packed()
    O, lse = varlen.attention(Q, K, V, [0], [0])
    gradients = varlen.attention_backward(Q, K, V, O, lse, dO, [0], [0])
    assert (lse == -np.inf).all()
    for x in (O, *gradients):
        assert (x == 0).all()


def test_contents_past_the_end_do_not_matter():
    """NaN in rows and keys of no sequence."""
    arrays = packed(extra=2)
    clean = both_ways(arrays, causal=True)
    for x in arrays[:4]:
        x[-2:] = np.nan
    for x, y in zip(both_ways(arrays, causal=True), clean, strict=True):
        assert np.array_equal(x, y)


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"cu_seqlens_q": [0, 5, 3, 23]}, ValueError, "cu_seqlens_q must never fall"),
        ({"cu_seqlens_k": [0, 5, 99]}, ValueError, "cu_seqlens_k must end within the 22 rows"),
        ({"cu_seqlens_q": [1, 5]}, ValueError, "cu_seqlens_q must be a 1-d array that starts at 0"),
        ({"cu_seqlens_q": []}, (ValueError, TypeError), "cu_seqlens_q must be"),
        ({"cu_seqlens_q": [[0, 1]]}, ValueError, "cu_seqlens_q must be a 1-d array"),
        ({"cu_seqlens_k": [0.0, 1.0]}, TypeError, "cu_seqlens_k must be integers"),
        ({"cu_seqlens_k": [0, 1]}, ValueError, "cu_seqlens_k must hold 6 sequences"),
        ({"K": np.ones((22, 3, 5))}, ValueError, "Q must have a multiple of 3 heads|V must have Hk"),
        ({"Q": np.ones((23, 4))}, ValueError, r"Q must be \(rows, Hq, d\)"),
        ({"align": "middle"}, ValueError, "align"),
    ],
)
def test_refuses(change, kind, says):
    """Each wrong argument is named."""
    Q, K, V, *_ = packed()
    given = {"Q": Q, "K": K, "V": V, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K} | change
    with pytest.raises(kind, match=says):
        varlen.attention(**given)


def test_backward_refuses():
    """The order, and what the forward pass refuses."""
    Q, K, V, dO, dlse = packed()
    with pytest.raises(ValueError, match="order must be"):
        varlen.attention_backward(Q, K, V, dO, dlse, dO, CU_Q, CU_K, order="v3")
    with pytest.raises(ValueError, match="lse must have"):
        varlen.attention_backward(Q, K, V, dO, dlse[:, 1:], dO, CU_Q, CU_K)
