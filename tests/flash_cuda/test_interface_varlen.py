"""flash-attn's packed and cached functions on the emulator, against the oracle sequence by sequence."""

from itertools import pairwise

import numpy as np
import pytest
from helpers_interface import SMALL, assert_close, draw, emulated, true, true_gradients
from numba import cuda

from flash_cuda.executors.assembler import Assembler, numba_type
from flash_cuda.interface import (
    flash_attn_func,
    flash_attn_varlen_backward,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from refimpl.philox import Dropout

CASES = [  # lengths of rows and keys: ragged, no rows, no keys, nothing at all, all alike, no sequence
    ([3, 9, 1], [10, 2, 1]),
    ([3, 0, 2], [2, 2, 2]),
    ([3, 0, 4], [0, 0, 9]),
    ([4, 4], [5, 5]),
    ([], []),
]


def cu(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def parts(lengths):
    ends = cu(lengths).tolist()
    return [slice(a, b) for a, b in pairwise(ends)]


@pytest.mark.parametrize(("lengths_q", "lengths_k"), CASES)
@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({}, {}),
        ({"causal": True, "dropout_p": 0.25, "rng_state": (3, 0)}, {"causal": True, "dropout_p": 0.25}),
        ({"window_size": (2, 1), "softcap": 1.2}, {"window": (2, 1), "softcap": 1.2}),
    ],
    ids=["plain", "causal+dropout", "window+softcap"],
)
def test_each_sequence_is_a_call_of_its_own(lengths_q, lengths_k, given, asked):
    rows, keys, H = sum(lengths_q), sum(lengths_k), 2
    q, k, v, dout, dlse = draw((rows, H, 3), (keys, 1, 3), (keys, 1, 4), (rows, H, 4), (H, rows))
    slopes = np.array([0.2, 0.1], np.float32)
    given, asked = ({**options, "alibi_slopes": slopes} for options in (given, asked))
    packing = cu(lengths_q), cu(lengths_k), max(lengths_q, default=0), max(lengths_k, default=0) + 3
    out, lse, S = flash_attn_varlen_func(q, k, v, *packing, **given, return_attn_probs=True, **emulated())
    grads = flash_attn_varlen_backward(dout, q, k, v, out, lse, *packing, **given, dlse=dlse, **emulated())
    assert out.shape == (rows, H, 4) and lse.shape == (H, rows) and lse.flags.c_contiguous
    assert S.shape == (len(lengths_q), H, max(lengths_q, default=0), max(lengths_k, default=0))
    want = [np.full(x.shape, np.nan) for x in (out, lse, *grads)]
    for b, (at_q, at_k) in enumerate(zip(parts(lengths_q), parts(lengths_k), strict=True)):
        one = [x[None] for x in (q[at_q], k[at_k], v[at_k])]
        if "dropout_p" in given:
            drop = Dropout(given["dropout_p"], *given["rng_state"])
            shape = slice(0, lengths_q[b]), slice(0, lengths_k[b])
            asked["keep"] = np.array([[drop.mask(b, h, *shape) for h in range(H)]])
        O, L = true(*one, **asked)
        want[0][at_q], want[1][:, at_q] = O[0], L[0]
        true_grads = true_gradients(*one, dout[at_q][None], dlse=dlse[:, at_q][None], **asked)
        for whole, at, x in zip(want[2:], (at_q, at_k, at_k), true_grads, strict=True):
            whole[at] = x[0]
        assert not S[b, :, lengths_q[b] :].any() and not S[b, :, :, lengths_k[b] :].any()
    for got, truth in zip((out, lse, *grads), want, strict=True):
        assert_close(got, truth, 1e-5)


def test_equal_lengths_need_no_lengths():
    """Then the batch is dense, and the faster kernel can do it."""
    q, k, v = draw((8, 1, 2), (8, 1, 2), (8, 1, 2))
    said = []
    out = flash_attn_varlen_func(q, k, v, cu([4, 4]), cu([4, 4]), 4, 4, explain=said.append, **emulated())
    assert said[0].startswith("flash_attn_varlen_func: step4_causal")
    flash_attn_varlen_func(q, k, v, cu([3, 5]), cu([4, 4]), 5, 4, explain=said.append, **emulated())
    assert said[1].startswith("flash_attn_varlen_func: general") and "cannot do lengths" in said[1]
    assert_close(out.reshape(2, 4, 1, 2), true(*(x.reshape(2, 4, 1, 2) for x in (q, k, v)))[0])


@pytest.mark.parametrize("axis", ["q", "k"])
def test_rows_of_no_sequence_are_refused(axis):
    """Case A11: seven rows, of which the sequences use five."""
    q, k, v = draw((7, 1, 8), (7, 1, 8), (7, 1, 8))
    seven, five = cu([2, 5]), cu([2, 3])
    packing = (five, seven) if axis == "q" else (seven, five)
    on = emulated()
    with pytest.raises(ValueError, match=rf"cu_seqlens_{axis}: total rows 7 exceed cu_seqlens\[-1\] = 5"):
        flash_attn_varlen_func(q, k, v, *packing, 5, 5, **on)
    assert not on["on"].launches


KEYS = {"plain": {}, "causal": {"causal": True}, "window": {"window_size": (3, 1), "softcap": 1.1}}


@pytest.mark.parametrize("options", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("entries", [None, [2, 0]])
@pytest.mark.parametrize("new", [0, 3])
def test_a_cache_is_the_keys_it_holds(options, entries, new):
    """Appended in place at cache_seqlens; the rest of the cache stays, and a NaN past the end is not read."""
    q, k, v = draw((2, 3, 2, 4), (2, 3, 1, 4), (2, 3, 1, 5), seed=1)
    k_cache, v_cache = draw((2 if entries is None else 3, 14, 1, 4), (2 if entries is None else 3, 14, 1, 5))
    before = np.array([4, 9], np.int32)
    at = entries or [0, 1]
    for b in range(2):
        k_cache[at[b], before[b] + new :] = v_cache[at[b], before[b] + new :] = np.nan
    wanted = k_cache.copy(), v_cache.copy()
    for cache, x in zip(wanted, (k, v), strict=True):
        for b in range(2 if new else 0):
            cache[at[b], before[b] : before[b] + new] = x[b]
    given = {} if not new else {"k": k, "v": v}
    given["cache_batch_idx"] = None if entries is None else np.array(entries, np.int32)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, **given, cache_seqlens=before, return_softmax_lse=True, **options, **emulated()
    )
    for got, want in zip((k_cache, v_cache), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    for b in range(2):
        keys, values = (cache[at[b], : before[b] + new][None] for cache in wanted)
        asked = {"window" if name == "window_size" else name: x for name, x in options.items()}
        O, L = true(q[b : b + 1], keys, values, **asked)
        assert_close(out[b : b + 1], O)
        assert_close(lse[b : b + 1], L)


def test_a_whole_cache_and_one_length_for_all():
    q, k, v = draw((2, 2, 1, 4), (2, 9, 1, 4), (2, 9, 1, 4))
    slopes = np.array([0.3], np.float32)
    whole = flash_attn_with_kvcache(q, k, v, alibi_slopes=slopes, causal=True, **emulated())
    np.testing.assert_array_equal(whole, flash_attn_func(q, k, v, alibi_slopes=slopes, causal=True, **emulated()))
    part = flash_attn_with_kvcache(q, k, v, cache_seqlens=5, **emulated())
    np.testing.assert_array_equal(part, flash_attn_func(q, k[:, :5], v[:, :5], **emulated()))


class Signatures(Assembler):
    """An executor that runs nothing and notes what would be compiled: a body for types of arguments."""

    def __init__(self):
        self.seen = set()

    def launch(self, body, blocks, threads, args):
        self.seen.add((body, tuple(numba_type(a) for a in args)))


@pytest.mark.parametrize("ragged", [False, True])
def test_decoding_compiles_once(ragged):
    on = Signatures()
    k_cache, v_cache = np.zeros((2, 300, 1, 8), np.float16), np.zeros((2, 300, 1, 8), np.float16)
    q, k, v = (np.zeros((2, 1, 1, 8), np.float16) for _ in range(3))
    for n in range(0, 290, 7):
        lengths = np.array([n, n + 1 if ragged else n], np.int32)
        flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True, on=on)
    assert len(on.seen) == 1


def test_a_refused_call_leaves_the_cache_alone():
    """Even where only the kernel's own check would object."""
    q, k, v = draw((1, 1, 1, 4), (1, 2, 1, 4), (1, 2, 1, 4))
    k_cache, v_cache = np.zeros((1, 9, 1, 4), np.float32), np.zeros((1, 9, 1, 4), np.float32)
    on = emulated()["on"]
    for wrong in ({"cache_seqlens": 8}, {"cache_seqlens": 0, "threads": (3, 2)}, {"cache_seqlens": 0, "softcap": -1.0}):
        with pytest.raises(ValueError, match=r"^(cache_seqlens|tile|softcap): "):
            flash_attn_with_kvcache(q, k_cache, v_cache, k, v, on=on, **{**SMALL, **wrong})
    assert not k_cache.any() and not v_cache.any() and not on.launches


@pytest.mark.gpu
def test_packed_device_arrays_and_a_cache_on_the_device():
    q, k, v, dout = draw((50, 2, 8), (60, 1, 8), (60, 1, 8), (50, 2, 8))
    packing = cu([20, 0, 30]), cu([25, 5, 30]), 30, 30
    host = flash_attn_varlen_func(q, k, v, *packing, causal=True, return_attn_probs=True)
    host += flash_attn_varlen_backward(dout, q, k, v, *host[:2], *packing, causal=True, deterministic=True)
    d_q, d_k, d_v, d_dout = (cuda.to_device(x) for x in (q, k, v, dout))
    got = flash_attn_varlen_func(d_q, d_k, d_v, *packing, causal=True, return_attn_probs=True)
    got += flash_attn_varlen_backward(d_dout, d_q, d_k, d_v, *got[:2], *packing, causal=True, deterministic=True)
    for a, b in zip(got, host, strict=True):
        np.testing.assert_array_equal(a.copy_to_host(), b)
    q, k_cache, v_cache, k, v = draw((2, 1, 2, 8), (2, 40, 1, 8), (2, 40, 1, 8), (2, 1, 1, 8), (2, 1, 1, 8))
    d_q, d_k_cache, d_v_cache, d_k, d_v = (cuda.to_device(x) for x in (q, k_cache, v_cache, k, v))
    lengths = np.array([7, 39], np.int32)
    out = flash_attn_with_kvcache(d_q, d_k_cache, d_v_cache, d_k, d_v, cache_seqlens=lengths)
    want = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
    for a, b in ((out, want), (d_k_cache, k_cache), (d_v_cache, v_cache)):
        np.testing.assert_array_equal(a.copy_to_host(), b)
