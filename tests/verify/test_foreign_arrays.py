"""Arrays of other libraries: the same values and strides, bands that notice, and outputs that come back."""

import sys

import ml_dtypes
import numpy as np
import pytest

from verify.cases import DEFAULT
from verify.foreign import arrays
from verify.foreign.arrays import open_arrays
from verify.foreign.arrays_numpy import BAND, Arrays
from verify.foreign.as_numpy import to_numpy
from verify.testing import assert_attention_close, check

LAYOUTS = ("square", "offset_view", "fused_qkv", "stride_0", "ties", "no_keys")


def attention(q, k, v, *, scale=None, causal=False, xp=np):
    """Plain attention, in any library with NumPy's names."""
    shift = k.shape[2] - q.shape[2]
    s = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ xp.swapaxes(k, -1, -2)
    if causal:
        s = xp.where(xp.tril(xp.ones(s.shape[-2:]), shift) > 0, s, -xp.inf)
    e = xp.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_numpy_arrays_keep_values_and_strides(case, dtype):
    desk = Arrays()
    for x in (getattr(DEFAULT[case].build(dtype), name) for name in "QKV"):
        put = desk.put(x)
        assert put.tobytes() == x.tobytes() and put.strides == x.strides and put.dtype == x.dtype
        assert not np.shares_memory(put, x)
    assert desk.broken() == []


def test_bands_notice_a_byte_on_either_side():
    x = np.ones((3, 5), np.float32)
    for at in (-1, x.nbytes):
        desk = Arrays()
        desk.put(x, "input Q")
        put = desk.put(x, "input K")
        np.ndarray((1,), np.uint8, put.base, BAND + at)[0] = 0
        assert desk.broken() == ["input K"]
    desk = Arrays()
    desk.put(x)[...] = 7
    assert desk.broken() == []


def test_what_lies_past_an_input_is_nan():
    for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16):
        put = Arrays().put(np.ones(4, dtype))
        beyond = np.lib.stride_tricks.as_strided(put, (6,))[4:]
        assert np.isnan(beyond.astype(np.float64)).all()


def test_buffers_made_meanwhile_are_poisoned(monkeypatch):
    monkeypatch.delitem(sys.modules, "numba", raising=False)  # its presence leaves NumPy alone
    desk, empty = Arrays(), np.empty
    with desk.watch():
        made = np.empty((4, 4), np.float32), np.zeros(3), np.full((2, 2), 5, np.int32), np.empty_like(np.ones((2, 3)).T)
    assert np.empty is empty and np.isnan(made[0]).all() and not made[1].any() and (made[2] == 5).all()
    assert made[3].shape == (3, 2) and np.isnan(made[3]).all() and desk.broken() == []
    np.lib.stride_tricks.as_strided(made[0], (17,), (4,))[16] = 0
    assert desk.broken() == ["an output or work array"]


def test_what_is_no_array_is_said():
    for x, name in ((3, "int"), ("O", "str"), ([1.0], "list")):
        with pytest.raises(TypeError, match=f"expected an array, got {name}"):
            to_numpy(x)


def test_libraries_that_are_missing_have_a_reason(monkeypatch):
    assert arrays.missing("numpy") is None
    monkeypatch.setattr(arrays, "find_spec", lambda name: None)
    assert arrays.missing("cupy") == "cupy is not installed"


@pytest.mark.parametrize("case", ("square", "causal_113x203", "negative_scale", "offset_view"))
@pytest.mark.parametrize("layout", ("bhsd", "bshd"))
def test_check_takes_o_alone_and_either_layout(case, layout):
    def attn(q, k, v, *, softmax_scale=None, causal=False):
        if layout == "bshd":
            q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        O = attention(q, k, v, scale=softmax_scale, causal=causal)
        return O.swapaxes(1, 2) if layout == "bshd" else O

    result = check(attn, case, layout=layout)
    assert result.verdict == "pass" and set(result.outputs) == {"O"}, result.reason
    if case == "square":
        assert check(attn, case, layout="bshd" if layout == "bhsd" else "bhsd").verdict == "fail"


def test_check_refuses_what_the_function_cannot_be_told():
    with pytest.raises(ValueError, match="case: softcap has softcap, which the function does not name"):
        check(attention, "softcap")
    with pytest.raises(ValueError, match="arrays: there is no 'pytorch'; did you mean 'torch'"):
        check(attention, "square", arrays="pytorch")
    with pytest.raises(ValueError, match="no backward function, and numpy arrays have no autograd"):
        check(attention, "back_square")


def test_windows_and_lengths_reach_a_kernel_in_its_own_words():
    seen = {}

    def attn(q, k, v, *, window_size=(-1, -1), alibi_slopes=None, lengths_q=None, lengths_k=None, causal):
        seen.update(window=window_size, slopes=alibi_slopes, lengths=(lengths_q, lengths_k), causal=causal)
        return q

    check(attn, "window_left")
    assert seen["window"][0] >= 0 and seen["window"][1] == -1 and seen["slopes"] is None and seen["causal"] is False
    check(attn, "alibi")
    assert seen["slopes"].dtype == np.float32 and seen["window"] == (-1, -1)
    check(attn, "lengths")
    assert all(n.dtype == np.int32 for n in seen["lengths"])


class TestTorch:
    """PyTorch, on its GPU or in the CPU's memory."""

    @pytest.fixture(autouse=True)
    def torch(self):
        self.torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    @pytest.mark.parametrize("case", LAYOUTS)
    @pytest.mark.parametrize("dtype", ("fp64", "fp32", "fp16", "bf16"))
    def test_values_and_strides(self, case, dtype):
        desk = open_arrays("torch")
        for x in (getattr(DEFAULT[case].build(dtype), name) for name in "QKV"):
            put = desk.put(x)
            assert desk.get(put).tobytes() == x.tobytes() and desk.get(put).dtype == x.dtype
            assert tuple(step * x.itemsize for step in put.stride()) == x.strides or not x.size
        assert desk.broken() == []

    def test_buffers_made_meanwhile_are_banded(self):
        torch, desk = self.torch, open_arrays("torch")
        with desk.watch():
            q = torch.ones(3, 5, dtype=torch.bfloat16, device=desk._on)
            made = torch.empty_like(q), q.new_zeros(4), torch.full((2,), 5.0)
        assert made[0].isnan().all() and not made[1].any() and (made[2] == 5).all() and desk.broken() == []
        made[1].as_strided((5,), (1,))[4] = 1
        assert desk.broken() == ["an output or work array"]

    @pytest.mark.parametrize("dtype", ("fp32", "bf16"))
    def test_gradients_by_autograd(self, dtype):
        call = self.torch.nn.functional.scaled_dot_product_attention

        def attn(q, k, v, scale=None, is_causal=False):
            return call(q, k, v, is_causal=is_causal, scale=scale)

        result = check(attn, "back_square", dtype=dtype, arrays="torch")
        assert result.verdict == "pass" and {"dQ", "dK", "dV"} <= result.outputs.keys(), result.reason
        detached = check(lambda q, k, v: attn(q, k, v).detach(), "back_square", dtype=dtype, arrays="torch")
        assert detached.verdict == "fail" and "O does not require gradients" in detached.reason

    def test_assert_attention_close(self):
        torch = self.torch
        Q, K, V = (torch.randn(2, 9, 3, 8, dtype=torch.bfloat16) for _ in range(3))
        O = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (Q, K, V))).transpose(1, 2)
        assert_attention_close(O, None, Q, K, V, layout="bshd")
        with pytest.raises(AssertionError, match="O at "):
            assert_attention_close(O * 1.1, None, Q, K, V, layout="bshd")


class TestJax:
    """JAX, on its default device."""

    @pytest.fixture(autouse=True)
    def jax(self):
        self.jax = pytest.importorskip("jax", reason="JAX is not installed")

    @pytest.mark.parametrize("dtype", ("fp32", "fp16", "bf16"))
    def test_forward_and_gradients(self, dtype):
        def attn(q, k, v, *, scale=None, causal=False):
            f = self.jax.numpy.float32
            O = attention(q.astype(f), k.astype(f), v.astype(f), scale=scale, causal=causal, xp=self.jax.numpy)
            return O.astype(q.dtype)

        for case in ("causal_113x203", "back_square"):
            result = check(attn, case, dtype=dtype, arrays="jax")
            assert result.verdict == "pass", result.reason
        assert {"dQ", "dK", "dV"} <= result.outputs.keys()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ("cupy", "numba", "torch"))
@pytest.mark.parametrize("case", LAYOUTS)
def test_device_arrays_keep_values(kind, case):
    if reason := arrays.missing(kind):
        pytest.skip(reason)
    desk = open_arrays(kind)
    for x in (getattr(DEFAULT[case].build("fp16"), name) for name in "QKV"):
        assert desk.get(desk.put(x)).tobytes() == x.tobytes()
    assert desk.executor == "gpu" and desk.broken() == []
