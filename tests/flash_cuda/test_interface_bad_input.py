"""Every argument wrong in turn: one line that names it and what was expected, and nothing launched."""

import math

import numpy as np
import pytest
from helpers_interface import emulated

from flash_cuda import interface

F32, F16, F64, I32, I64 = np.float32, np.float16, np.float64, np.int32, np.int64


def z(*shape, dtype=F32):
    return np.zeros(shape, dtype)


def ints(*values, dtype=I32):
    return np.array(values, dtype)


DENSE = {"q": z(2, 3, 4, 8), "k": z(2, 5, 2, 8), "v": z(2, 5, 2, 6)}
VARLEN = {
    "q": z(5, 4, 8), "k": z(7, 2, 8), "v": z(7, 2, 6), "cu_seqlens_q": ints(0, 2, 5), "cu_seqlens_k": ints(0, 4, 7),
    "max_seqlen_q": 3, "max_seqlen_k": 4,
}  # fmt: skip
GOOD = {
    "flash_attn_func": DENSE,
    "flash_attn_qkvpacked_func": {"qkv": z(2, 3, 3, 2, 8)},
    "flash_attn_varlen_func": VARLEN,
    "flash_attn_backward": DENSE | {"dout": z(2, 3, 4, 6), "out": z(2, 3, 4, 6), "softmax_lse": z(2, 4, 3)},
    "flash_attn_varlen_backward": VARLEN | {"dout": z(5, 4, 6), "out": z(5, 4, 6), "softmax_lse": z(4, 5)},
    "flash_attn_with_kvcache": {
        "q": z(2, 1, 4, 8), "k_cache": z(2, 9, 2, 8), "v_cache": z(2, 9, 2, 6), "k": z(2, 1, 2, 8), "v": z(2, 1, 2, 6),
        "cache_seqlens": ints(3, 8),
    },
}  # fmt: skip

SHARED = [  # argument, error, wrong values: for every function that has it
    ("softmax_scale", ValueError, (math.nan, math.inf)),
    ("softmax_scale", TypeError, ("1", 1j, True, [0.5])),
    ("causal", TypeError, (1, None, "yes")),
    ("window_size", ValueError, ((-2, 0), (0, -2))),
    ("window_size", TypeError, (3, (1,), (1, 2, 3), (1.5, 2), (None, 1), "ab")),
    ("softcap", ValueError, (-1.0, math.nan, math.inf)),
    ("softcap", TypeError, (None, "1")),
    ("alibi_slopes", ValueError, (z(3), z(3, 4), z(1, 2, 4), z())),
    ("alibi_slopes", TypeError, (z(4, dtype=F64), z(4, dtype=F16), [0.1, 0.2, 0.3, 0.4], 0.5)),
    ("on", TypeError, ("gpu", 0)),
    ("tile", TypeError, ((16, 16), 16)),
    ("threads", TypeError, (4, (4,), (4.0, 4))),
    ("threads", ValueError, ((0, 2),)),
    ("explain", TypeError, ("yes", 1)),
]
DROPPING = [
    ("dropout_p", ValueError, (-0.1, 1.0, 1.5, math.nan)),
    ("dropout_p", TypeError, (None, "0.1", True)),
    ("deterministic", TypeError, (1, None)),
]
FORWARD = [
    ("return_attn_probs", TypeError, (1, "yes")),
    ("rng_state", TypeError, (5, (1,), (1.0, 2), "12")),
    ("rng_state", ValueError, ((-1, 0), (0, 2**64))),
]
OWN = {
    "flash_attn_func": [
        ("q", ValueError, (z(3, 4, 8), z(2, 3, 4, 0), z(2, 3, 4, 257), z(2, 3, 0, 8), z(2, 3, 3, 8))),
        ("q", TypeError, (None, [[1.0]], z(2, 3, 4, 8, dtype=F64), z(2, 3, 4, 8, dtype=I32), z(2, 3, 4, 8, dtype=">f4"),
                          np.ma.masked_array(z(2, 3, 4, 8)))),
        ("k", ValueError, (z(2, 5, 8), z(1, 5, 2, 8), z(2, 5, 2, 7), z(2, 5, 0, 8))),
        ("k", TypeError, (None, z(2, 5, 2, 8, dtype=F16), z(2, 5, 2, 8).tolist())),
        ("v", ValueError, (z(5, 2, 6), z(1, 5, 2, 6), z(2, 4, 2, 6), z(2, 5, 1, 6), z(2, 5, 2, 0), z(2, 5, 2, 257))),
        ("v", TypeError, (None, z(2, 5, 2, 6, dtype=F16))),
    ],
    "flash_attn_qkvpacked_func": [
        ("qkv", ValueError, (z(2, 3, 2, 2, 8), z(2, 3, 3, 8), z(2, 3, 3, 0, 8), z(2, 3, 3, 2, 0), z(1, 1, 3, 1, 257))),
        ("qkv", TypeError, (None, z(2, 3, 3, 2, 8, dtype=F64))),
    ],
    "flash_attn_varlen_func": [
        ("q", ValueError, (z(1, 5, 4, 8), z(5, 3, 8))),
        ("k", ValueError, (z(7, 2, 7), z(7, 0, 8))),
        ("cu_seqlens_q", ValueError, (ints(0, 3, 2, 5), ints(0, 2, 6), ints(1, 2, 5), ints(0, 2, 4), ints(),
                                      ints(0, 2, 5)[None], ints(0, 2, 9, 5))),
        ("cu_seqlens_q", TypeError, (None, [0, 2, 5], ints(0, 2, 5, dtype=I64), z(3))),
        ("cu_seqlens_k", ValueError, (ints(0, 7), ints(0, 4, 6), ints(0, 4, 8), ints(0, 9, 7), ints(-1, 4, 7))),
        ("cu_seqlens_k", TypeError, ((0, 4, 7), ints(0, 4, 7, dtype=I64))),
        ("max_seqlen_q", ValueError, (2, -1)),
        ("max_seqlen_q", TypeError, (None, 3.0, True)),
        ("max_seqlen_k", ValueError, (3,)),
        ("max_seqlen_k", TypeError, ("4",)),
        ("block_table", ValueError, (ints(0, 1),)),
    ],
    "flash_attn_backward": [
        ("dout", ValueError, (z(2, 3, 4, 8), z(2, 4, 3, 6))),
        ("dout", TypeError, (None, z(2, 3, 4, 6, dtype=F16))),
        ("out", ValueError, (z(2, 3, 2, 6),)),
        ("out", TypeError, (z(2, 3, 4, 6, dtype=F64),)),
        ("softmax_lse", ValueError, (z(2, 3, 4), z(2, 4))),
        ("softmax_lse", TypeError, (None, z(2, 4, 3, dtype=F64))),
        ("dlse", ValueError, (z(2, 3, 4),)),
        ("dlse", TypeError, (z(2, 4, 3, dtype=F16), 1.0)),
    ],
    "flash_attn_varlen_backward": [
        ("dout", ValueError, (z(6, 4, 6),)),
        ("softmax_lse", ValueError, (z(5, 4),)),
        ("dlse", ValueError, (z(5, 4),)),
        ("cu_seqlens_q", ValueError, (ints(0, 2, 4),)),
    ],
    "flash_attn_with_kvcache": [
        ("q", ValueError, (z(2, 4, 8), z(2, 1, 3, 8))),
        ("k_cache", ValueError, (z(9, 2, 8), z(2, 9, 2, 7))),
        ("k_cache", TypeError, (None, z(2, 9, 2, 8, dtype=F16))),
        ("v_cache", ValueError, (z(2, 8, 2, 6), z(2, 9, 1, 6), z(3, 9, 2, 6))),
        ("k", ValueError, (None, z(2, 1, 1, 8), z(1, 1, 2, 8))),
        ("k", TypeError, (z(2, 1, 2, 8, dtype=F16),)),
        ("v", ValueError, (None, z(2, 2, 2, 6), z(2, 1, 2, 8))),
        ("cache_seqlens", ValueError, (None, 9, -1, ints(3, 9), ints(-1, 3), ints(3))),
        ("cache_seqlens", TypeError, (3.0, [3, 8], ints(3, 8, dtype=I64))),
        ("cache_batch_idx", ValueError, (ints(0, 2), ints(-1, 0), ints(0))),
        ("cache_batch_idx", TypeError, ([0, 1], ints(0, 1, dtype=I64))),
        ("rotary_cos", ValueError, (z(9, 4),)),
        ("rotary_sin", ValueError, (z(9, 4),)),
        ("cache_leftpad", ValueError, (ints(0, 0),)),
        ("block_table", ValueError, (ints(0, 1),)),
        ("rotary_interleaved", TypeError, (1,)),
        ("num_splits", ValueError, (-1,)),
        ("num_splits", TypeError, (1.5,)),
        ("return_softmax_lse", TypeError, (1,)),
    ],
}  # fmt: skip
PAIRS = [  # two arguments that do not fit: the later one is named
    ("flash_attn_func", "q", z(1, 3, 4, 8), "k"),
    ("flash_attn_func", "k", z(2, 4, 2, 8), "v"),
    ("flash_attn_func", "k", z(2, 5, 4, 8), "v"),
    ("flash_attn_varlen_func", "k", z(6, 2, 8), "v"),
    ("flash_attn_backward", "v", z(2, 5, 2, 7), "dout"),
    ("flash_attn_with_kvcache", "k_cache", z(3, 9, 2, 8), "v_cache"),
    ("flash_attn_with_kvcache", "q", z(3, 1, 4, 8), "k"),
]


def table():
    """(function, argument, error, wrong value, argument to be named), one a call."""
    for function, argument, value, blamed in PAIRS:
        yield function, argument, ValueError, value, blamed
    for function in GOOD:
        own = OWN[function]
        if function != "flash_attn_with_kvcache":
            own = own + DROPPING
        if function in ("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func"):
            own = own + FORWARD
        shared = SHARED if function in ("flash_attn_func", "flash_attn_with_kvcache") else SHARED[::3]
        for argument, error, values in own + shared:
            for value in values:
                if function != "flash_attn_qkvpacked_func" or argument != "alibi_slopes":
                    yield function, argument, error, value, argument


CALLS = list(table())


def test_there_are_enough_of_them():
    assert len(CALLS) >= 60 and len({(f, a) for f, a, *_ in CALLS}) >= 60


@pytest.mark.parametrize("function", GOOD)
def test_the_calls_are_right_but_for_what_is_put_wrong(function):
    getattr(interface, function)(**GOOD[function], **emulated())


@pytest.mark.parametrize("function", GOOD)
def test_each_wrong_argument_is_named(function):
    call = getattr(interface, function)
    for _, argument, error, value, blamed in (c for c in CALLS if c[0] == function):
        given = {name: x.copy() if isinstance(x, np.ndarray) else x for name, x in GOOD[function].items()}
        on = emulated()["on"]
        arguments = {**given, "on": on, argument: value}
        said = f"{function}({argument}={value if np.ndim(value) < 2 else np.shape(value)})"
        with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
            call(**arguments)
        message = str(raised.value)
        assert raised.type is error, f"{said}: {raised.type.__name__}: {message}"
        assert message.startswith(f"{blamed}: ") and "\n" not in message, f"{said}: {message}"
        assert "expected" in message or "exceed" in message, f"{said}: {message}"
        assert not on.launches, said
        for name, x in GOOD[function].items():
            if isinstance(x, np.ndarray) and name != argument:
                np.testing.assert_array_equal(given[name], x)


def test_gradients_of_dropout_need_its_state():
    on = emulated()["on"]
    for function in ("flash_attn_backward", "flash_attn_varlen_backward"):
        with pytest.raises(ValueError, match=r"^rng_state: expected the \(seed, offset\) of the forward call"):
            getattr(interface, function)(**GOOD[function], dropout_p=0.5, on=on)
    assert not on.launches


def test_a_tile_that_the_threads_do_not_divide():
    on = emulated()["on"]
    with pytest.raises(ValueError, match=r"^tile: expected Br, Bc multiples of the threads"):
        interface.flash_attn_func(**DENSE, on=on, threads=(7, 2))
    assert not on.launches
