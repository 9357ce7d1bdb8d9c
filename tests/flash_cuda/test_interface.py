"""flash-attn's dense functions on the emulator: published semantics written out, every option against the oracle."""

import inspect
import math
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from helpers_interface import SMALL, assert_close, draw, emulated, true, true_gradients
from numba import cuda

from flash_cuda import interface
from flash_cuda.executors.emulator import Emulator
from flash_cuda.interface import flash_attn_backward, flash_attn_func, flash_attn_qkvpacked_func
from flash_cuda.interface.call import Call
from flash_cuda.interface.memory import DeviceView
from flash_cuda.interface.steps import BACKWARD, Asked, choose
from refimpl.philox import Dropout


def weights(q, k, **options):
    """(Nq, Nk): the weights of the only batch entry and head, by values that are one-hot."""
    v = np.eye(k.shape[1], dtype=np.float32)[None, :, None]
    return flash_attn_func(q, k, v, **options, **emulated())[0, :, 0]


def equal_weights(Nq, Nk, **options):
    """(Nq, Nk): which keys a row sees, all scores being 0."""
    got = weights(np.zeros((1, Nq, 1, 2), np.float32), np.zeros((1, Nk, 1, 2), np.float32), **options)
    counts = np.rint(1 / np.where(got > 0, got, np.inf).min(axis=1))
    return got * counts[:, None]


@pytest.mark.parametrize(
    ("Nq", "Nk", "options", "seen"),
    [
        (2, 5, {"causal": True}, [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),  # both from flash-attn's docstring
        (5, 2, {"causal": True}, [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]),
        (2, 5, {}, [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]),
        (3, 5, {"window_size": (1, 1)}, [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]),
        (3, 5, {"window_size": (0, 0)}, [[0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]),
        (3, 5, {"window_size": (-1, 1)}, [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]),
        (3, 5, {"window_size": (1, -1)}, [[0, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]),
        (3, 5, {"window_size": (1, 2), "causal": True}, [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]),
        (3, 5, {"window_size": (-1, 0)}, [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        (4, 2, {"window_size": (0, 1)}, [[0, 0], [1, 0], [1, 1], [0, 1]]),
    ],
)
def test_who_sees_whom(Nq, Nk, options, seen):
    np.testing.assert_allclose(equal_weights(Nq, Nk, **options), seen, rtol=0, atol=1e-6)


def test_alibi_counts_from_the_last_key():
    """-slope |i + Nk - Nq - j| with slope ln 2: weights are powers of two of the distance."""
    zeros = np.zeros((1, 2, 1, 2), np.float32), np.zeros((1, 4, 1, 2), np.float32)
    want = np.array([[0.25, 0.5, 1, 0.5], [0.125, 0.25, 0.5, 1]])
    for slopes in ([math.log(2)], [[math.log(2)]]):
        got = weights(*zeros, alibi_slopes=np.array(slopes, np.float32))
        assert_close(got, want / want.sum(axis=1, keepdims=True))


def test_softcap_comes_after_the_scale_and_before_alibi():
    q, k = np.ones((1, 1, 1, 1), np.float32), np.array([3.0, -2.0], np.float32).reshape(1, 2, 1, 1)
    s = 1.5 * np.tanh(0.5 * np.array([3.0, -2.0]) / 1.5) - 0.25 * np.array([1, 0])
    got = weights(q, k, softmax_scale=0.5, softcap=1.5, alibi_slopes=np.array([0.25], np.float32))
    assert_close(got[0], np.exp(s) / np.exp(s).sum())


def test_query_heads_share_key_heads_in_order():
    """Six query heads, two key heads: 0, 1, 2 read head 0, and 3, 4, 5 read head 1."""
    v = np.array([10.0, 20.0], np.float32).reshape(1, 1, 2, 1)
    q, k = np.ones((1, 1, 6, 1), np.float32), np.ones((1, 1, 2, 1), np.float32)
    assert flash_attn_func(q, k, v, **emulated()).ravel().tolist() == [10, 10, 10, 20, 20, 20]


def test_a_row_without_keys_is_zero():
    q, k, v = draw((1, 4, 1, 3), (1, 2, 1, 3), (1, 2, 1, 3))
    out, lse, S = flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **emulated())
    assert (out[0, :2] == 0).all() and (out[0, 2:] != 0).all()
    assert np.isneginf(lse[0, 0, :2]).all() and np.isfinite(lse[0, 0, 2:]).all()
    assert S[0, 0].tolist() == [[0, 0], [0, 0], [1, 0], S[0, 0, 3].tolist()]
    for x in flash_attn_backward(out, q, k, v, out, lse, causal=True, **emulated()):
        assert np.isfinite(x).all()


def test_the_natural_logarithm():
    """Two scores of ln 3 and 0: lse = ln 4."""
    q, k = np.ones((1, 1, 1, 1), np.float32), np.array([math.log(3), 0], np.float32).reshape(1, 2, 1, 1)
    out, lse, S = flash_attn_func(q, k, k, softmax_scale=1.0, return_attn_probs=True, **emulated())
    assert lse.dtype == np.float32 and lse.shape == (1, 1, 1)
    assert_close(lse.ravel(), [math.log(4)])
    assert_close(S.ravel(), [0.75, 0.25])
    assert_close(out.ravel(), [0.75 * math.log(3)])


SLOPES = np.array([[0.3, -0.1], [0.05, 0.2]], np.float32)
ALIKE = [  # what a call is given, and the oracle
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"softmax_scale": -0.7}, {"scale": -0.7}),
    ({"softmax_scale": 0.0}, {"scale": 0.0}),
    ({"window_size": (4, 2)}, {"window": (4, 2)}),
    ({"window_size": (3, -1), "causal": True}, {"window": (3, None), "causal": True}),
    ({"softcap": 0.8}, {"softcap": 0.8}),
    ({"alibi_slopes": SLOPES[0]}, {"alibi_slopes": SLOPES[0]}),
    ({"alibi_slopes": SLOPES, "softcap": 2.0}, {"alibi_slopes": SLOPES, "softcap": 2.0}),
    ({"dropout_p": 0.3, "rng_state": (5, 1)}, {"dropout_p": 0.3}),
    (
        {"dropout_p": 0.5, "rng_state": (7, 0), "causal": True, "softcap": 1.5, "window_size": (6, -1),
         "alibi_slopes": SLOPES, "softmax_scale": 0.9, "deterministic": True},
        {"dropout_p": 0.5, "causal": True, "softcap": 1.5, "window": (6, None), "alibi_slopes": SLOPES, "scale": 0.9},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("given", "asked"), ALIKE, ids=["+".join(given) or "plain" for given, _ in ALIKE])
def test_options_forward_and_backward(given, asked):
    q, k, v, dout, dlse = draw((2, 9, 2, 3), (2, 11, 1, 3), (2, 11, 1, 5), (2, 9, 2, 5), (2, 2, 9))
    if "dropout_p" in given:
        drop = Dropout(given["dropout_p"], *given["rng_state"])
        keep = [[drop.mask(b, h, slice(0, 9), slice(0, 11)) for h in range(2)] for b in range(2)]
        asked = asked | {"keep": np.array(keep)}
    out, lse, _ = flash_attn_func(q, k, v, **given, return_attn_probs=True, **emulated())
    assert out.flags.c_contiguous and out.dtype == q.dtype
    for got, want in zip((out, lse), true(q, k, v, **asked), strict=True):
        assert_close(got, want)
    grads = flash_attn_backward(dout, q, k, v, out, lse, **given, dlse=dlse, **emulated())
    for got, want in zip(grads, true_gradients(q, k, v, dout, dlse=dlse, **asked), strict=True):
        assert got.flags.c_contiguous and got.dtype == q.dtype
        assert_close(got, want, 1e-5)


@pytest.mark.parametrize("shape", [(0, 3, 1, 4), (1, 0, 2, 4), (2, 3, 1, 1)])
def test_sizes_of_nothing(shape):
    B, N, H, d = shape
    q, k, v = draw(shape, (B, 2, H, d), (B, 2, H, d))
    out, lse, S = flash_attn_func(q, k, v, return_attn_probs=True, **emulated())
    assert (out.shape, lse.shape, S.shape) == (shape, (B, H, N), (B, H, N, 2))
    grads = flash_attn_backward(out, q, k, v, out, lse, **emulated())
    for got, want in zip(grads, true_gradients(q, k, v, out), strict=True):
        assert_close(got, want)
    assert_close(flash_attn_func(q, k[:, :0], v[:, :0], **emulated()), np.zeros(shape))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_kept(dtype):
    q, k, v, dout = draw((1, 9, 2, 4), (1, 9, 2, 4), (1, 9, 2, 4), (1, 9, 2, 4), dtype=dtype)
    tol = {np.float16: 2e-3, ml_dtypes.bfloat16: 2e-2}[dtype]
    out, lse, S = flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **emulated())
    assert out.dtype == S.dtype == dtype and lse.dtype == np.float32
    assert_close(out, true(q, k, v, causal=True)[0], tol)
    grads = flash_attn_backward(dout, q, k, v, out, lse, causal=True, **emulated())
    for got, want in zip(grads, true_gradients(q, k, v, dout, causal=True), strict=True):
        assert got.dtype == dtype
        assert_close(got, want, 3 * tol)


def test_any_strides():
    """A (B, H, N, d) array seen as (B, N, H, d), a reversed one, an expanded one."""
    q, k = draw((1, 2, 9, 4), (1, 9, 2, 4))
    q, k, v = q.transpose(0, 2, 1, 3), k[:, ::-1], np.broadcast_to(k[:, :, :1], k.shape)
    assert_close(flash_attn_func(q, k, v, **emulated()), true(q, k, v)[0])


def test_packed_qkv_is_read_where_it_is():
    (qkv,) = draw((2, 9, 3, 2, 4))
    for options in ({"causal": True}, {"window_size": (2, 2), "softcap": 1.0}):
        got = flash_attn_qkvpacked_func(qkv, **options, return_attn_probs=True, **emulated())
        want = flash_attn_func(*(qkv[:, :, n] for n in range(3)), **options, return_attn_probs=True, **emulated())
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_s_dmask_tells_what_dropout_did():
    """The softmax, negative where dropped: with it and V, out can be computed."""
    q, k, v = draw((1, 9, 2, 4), (1, 19, 2, 4), (1, 19, 2, 4))
    options = {"dropout_p": 0.4, "rng_state": (11, 3), "softcap": 2.0}
    out, lse, S = flash_attn_func(q, k, v, **options, return_attn_probs=True, **emulated())
    assert_close(np.abs(S).sum(axis=-1), np.ones((1, 2, 9)))
    assert 0.2 < np.signbit(S).mean() < 0.6
    assert_close(np.einsum("bhij,bjhd->bihd", np.where(np.signbit(S), 0, S) / 0.6, v), out)
    whole, lse_whole, _ = flash_attn_func(q, k, v, softcap=2.0, return_attn_probs=True, **emulated())
    np.testing.assert_array_equal(lse, lse_whole)  # dropout does not touch the softmax
    assert np.abs(out - whole).max() > 0.01


def test_dropout_draws_by_numpys_seed():
    q, k, v = draw((1, 8, 1, 4), (1, 8, 1, 4), (1, 8, 1, 4))

    def drop():
        return flash_attn_func(q, k, v, 0.5, **emulated())

    state = np.random.get_state()
    try:
        np.random.seed(1)
        first, second = drop(), drop()
        np.random.seed(1)
        np.testing.assert_array_equal(drop(), first)
        assert (first != second).any()
    finally:
        np.random.set_state(state)


@pytest.mark.parametrize(
    ("options", "chosen", "reason"),
    [
        ({}, "step4_causal", "fastest"),
        ({"causal": True}, "step4_causal", "fastest"),
        ({"window_size": (-1, 0)}, "step4_causal", "fastest"),
        ({"window_size": (4, 4)}, "step4_causal", "fastest"),  # out of reach with five rows and keys
        ({"window_size": (3, 3)}, "general", "step4_causal cannot do window_size"),
        ({"softcap": 1.0, "causal": True}, "general", "step4_causal cannot do softcap"),
        ({"dropout_p": 0.1}, "general", "step4_causal cannot do dropout_p"),
        ({"alibi_slopes": np.ones(1, np.float32)}, "general", "step4_causal cannot do alibi_slopes"),
    ],
)
def test_explain_says_which_kernel_and_why(options, chosen, reason, capsys):
    q, k, v = draw((1, 5, 1, 2), (1, 5, 1, 2), (1, 5, 1, 2))
    said = []
    out = flash_attn_func(q, k, v, **options, explain=said.append, **emulated())
    assert len(said) == 1 and said[0].startswith(f"flash_attn_func: {chosen} (emulated): ") and reason in said[0]
    assert "deterministic" in said[0] and not capsys.readouterr().out
    if "dropout_p" not in options:
        np.testing.assert_array_equal(flash_attn_func(q, k, v, **options, explain=True, **emulated()), out)
        assert capsys.readouterr().out == said[0] + "\n"


def test_a_bound_out_of_reach_is_none():
    """Bounds that are left out show and hide the same keys, for all lengths that a padded batch may hold."""
    for Nq, Nk, left, right in product(range(5), range(5), range(-1, 6), range(-1, 6)):
        window = tuple(None if n < 0 else n for n in (left, right))
        reduced = Call("", None, {"Nq": Nq, "Nk": Nk}, window=window).bounds
        for rows, keys in product(range(Nq + 1), range(Nk + 1)):
            ahead = np.arange(keys) - (np.arange(rows)[:, None] + keys - rows)  # j - i
            masks = [
                (ahead >= (-np.inf if a is None else -a)) & (ahead <= (np.inf if b is None else b))
                for a, b in (window, reduced)
            ]
            np.testing.assert_array_equal(*masks)


def test_without_a_gpu_the_error_names_what_there_is(monkeypatch):
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    q, k, v = draw((1, 5, 1, 2), (1, 5, 1, 2), (1, 5, 1, 2))
    with pytest.raises(RuntimeError, match=r"Emulator\(\).*refimpl\.oracle"):
        flash_attn_func(q, k, v)


def test_signatures_are_flash_attns():
    """Names, order and defaults of flash-attn 2.8, then our keyword-only ones."""
    tail = (
        ("dropout_p", 0.0), ("softmax_scale", None), ("causal", False), ("window_size", (-1, -1)), ("softcap", 0.0),
        ("alibi_slopes", None), ("deterministic", False), ("return_attn_probs", False),
    )  # fmt: skip
    cached = (
        ("k", None), ("v", None), ("rotary_cos", None), ("rotary_sin", None), ("cache_seqlens", None),
        ("cache_batch_idx", None), ("cache_leftpad", None), ("block_table", None), ("softmax_scale", None),
        ("causal", False), ("window_size", (-1, -1)), ("softcap", 0.0), ("rotary_interleaved", True),
        ("alibi_slopes", None), ("num_splits", 0), ("return_softmax_lse", False),
    )  # fmt: skip
    lengths = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    none = inspect.Parameter.empty
    want = {
        "flash_attn_func": (*((n, none) for n in "qkv"), *tail),
        "flash_attn_qkvpacked_func": (("qkv", none), *tail),
        "flash_attn_varlen_func": (*((n, none) for n in (*"qkv", *lengths)), *tail, ("block_table", None)),
        "flash_attn_with_kvcache": (*((n, none) for n in ("q", "k_cache", "v_cache")), *cached),
    }
    for name, parameters in want.items():
        found = inspect.signature(getattr(interface, name)).parameters.values()
        assert tuple((p.name, p.default) for p in found if p.kind is p.POSITIONAL_OR_KEYWORD) == parameters


def test_a_device_view_is_the_memory_it_names():
    """Read as NumPy would read it: pointer, shape and strides of a view are right after a change of axes."""
    (x,) = draw((2, 3, 4, 5), dtype=ml_dtypes.bfloat16)
    x = x[:, ::2]
    view = DeviceView(x, x.__array_interface__["data"][0], x.shape, x.strides, x.dtype).transpose(0, 2, 1, 3)
    face = type("Host", (), {"__array_interface__": view.__cuda_array_interface__})()
    np.testing.assert_array_equal(np.asarray(face).view(x.dtype), x.transpose(0, 2, 1, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_device_arrays_stay_on_the_device(dtype):
    q, k, v, dout = draw(*[(2, 40, 2, 16)] * 4, dtype=dtype)
    options = {"window_size": (9, 9), "softcap": 2.0, "deterministic": True}
    d_q, d_k, d_v, d_dout = (cuda.to_device(x) for x in (q, k, v, dout))
    out, lse, S = flash_attn_func(d_q, d_k, d_v, **options, return_attn_probs=True)
    grads = flash_attn_backward(d_dout, d_q, d_k, d_v, out, lse, **options)
    host = flash_attn_func(q, k, v, **options, return_attn_probs=True)
    host_grads = flash_attn_backward(dout, q, k, v, *host[:2], **options)
    for got, want in zip((out, lse, S, *grads), (*host, *host_grads), strict=True):
        assert cuda.is_cuda_array(got) and got.dtype == want.dtype
        np.testing.assert_array_equal(got.copy_to_host(), want)


@pytest.mark.parametrize(
    "change, needs, chosen, said",
    [
        ({}, (), "step6_flash_v3", "the fastest there is"),
        ({}, ("causal", "window_size", "softcap"), "step6_flash_v3", "the fastest there is"),
        ({"capability": (8, 6)}, ("causal",), "step5_tensor_core", "step6_flash_v3 is made for compute capability 9"),
        ({"capability": (10, 0)}, (), "step5_tensor_core", "step6_flash_v3 is made for compute capability 9"),
        ({"capability": (7, 5)}, (), "step4_causal", "step5_tensor_core is made for compute capability 8 or later"),
        ({"capability": (8, 0)}, ("window_size",), "step5_tensor_core", "step6_flash_v3 is made for compute"),
        ({"capability": (7, 5)}, ("dropout_p",), "general", "step5_tensor_core is made for compute capability 8"),
        ({}, ("alibi_slopes", "dropout_p", "lengths"), "step5_tensor_core",
         "step6_flash_v3 cannot do alibi_slopes, dropout_p, lengths"),
        ({"d": 20}, (), "step5_tensor_core", "step6_flash_v3 takes head dims that are multiples of 8"),
        ({"dv": 100}, (), "step5_tensor_core", "step6_flash_v3 takes head dims that are multiples of 8"),
        ({"obstacle": "k: it starts wrong"}, (), "step5_tensor_core", "step6_flash_v3 cannot copy k: it starts wrong"),
        ({"dtype": np.dtype(np.float32)}, (), "step4_causal", "step6_flash_v3 takes fp16 and bf16"),
        ({}, ("alibi_slopes", "causal"), "step5_tensor_core", "step6_flash_v3 cannot do alibi_slopes"),
    ],
)
def test_fastest_step_of_a_device(change, needs, chosen, said):
    """What a GPU of some capability is given, and why nothing faster."""
    asked = Asked((9, 0), np.dtype(np.float16), 64, 64)._replace(**change)
    step, reason = choose(frozenset(needs), asked)
    assert step.module == chosen and said in reason


@pytest.mark.parametrize(
    "change, needs, chosen, said",
    [
        ({}, ("causal",), "backward_hopper", "the fastest there is"),
        ({"d": 192}, (), "backward_tensor_core", "backward_hopper takes head dims up to 128"),
        ({"dv": 20}, (), "backward_tensor_core", "backward_hopper takes head dims that are multiples of 8"),
        ({"obstacle": "dout: it stands still"}, (), "backward_tensor_core", "cannot copy dout: it stands still"),
        ({"capability": (8, 0)}, ("causal",), "backward_tensor_core", "backward_hopper is made for"),
        ({"capability": (7, 5)}, (), "backward", "backward_tensor_core is made for compute capability 8 or later"),
        ({"dtype": np.dtype(np.float32)}, (), "backward", "backward_tensor_core takes fp16 and bf16"),
        ({}, ("softcap", "lengths"), "backward_tensor_core", "backward_hopper cannot do lengths, softcap"),
        (None, ("causal",), "backward", "one for all options"),
    ],
)
def test_fastest_gradients_of_a_device(change, needs, chosen, said):
    asked = None if change is None else Asked((9, 0), np.dtype(np.float16), 64, 64)._replace(**change)
    step, reason = choose(frozenset(needs), asked, BACKWARD)
    assert step.module == chosen and said in reason


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_gradients_on_tensor_cores(dtype):
    """They are taken where the device has them, with or without atomics or options; for a tile the others are."""
    q, k, v, dout = draw((1, 21, 2, 8), (1, 37, 1, 8), (1, 37, 1, 16), (1, 21, 2, 16), dtype=dtype)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **emulated())
    on, said = Emulator(), []
    on.capability = (8, 0)
    exact = true_gradients(q, k, v, dout, causal=True)
    for deterministic in (True, False):
        got = flash_attn_backward(dout, q, k, v, out, lse, causal=True, deterministic=deterministic, on=on,
                                  explain=said.append)  # fmt: skip
        for x, want in zip(got, exact, strict=True):
            assert x.dtype == dtype
            assert_close(x.astype(float), want, 0.02)
    order = "; deterministic: no atomics", "; not deterministic: dq by atomic additions"
    for line, words in zip(said, order, strict=True):
        assert line.startswith("flash_attn_backward: backward_tensor_core (emulated): backward_hopper is made for")
        assert line.endswith(words)
    for options in ({"softcap": 1.0}, SMALL):
        flash_attn_backward(dout, q, k, v, out, lse, causal=True, on=on, explain=said.append, **options)
    assert "flash_attn_backward: backward_tensor_core (" in said[2]
    assert "flash_attn_backward: backward_atomic (" in said[3] and len(said) == 4
