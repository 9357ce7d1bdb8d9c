"""torch tensors through the interface: a tensor comes back as one, and gradients flow; CPU tensors, on the emulator."""

import numpy as np
import pytest
from helpers_interface import assert_close, draw, emulated, true

from flash_cuda.interface import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

torch = pytest.importorskip("torch", reason="torch is not installed")


def tensors(*shapes, dtype=torch.float32, grad=False):
    return [torch.from_numpy(x).to(dtype).requires_grad_(grad) for x in draw(*shapes)]


def plain(q, k, v, scale=None, seen=None):
    """Attention by torch's own operators, (out, lse), for autograd to differentiate."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if seen is None else s.masked_fill(~seen, -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v), s.logsumexp(-1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_tensor_comes_back_as_one(dtype):
    q, k, v = tensors((1, 9, 2, 4), (1, 7, 1, 4), (1, 7, 1, 3), dtype=getattr(torch, dtype))
    out, lse, S = flash_attn_func(q, k, v, return_attn_probs=True, **emulated())
    assert out.dtype == S.dtype == q.dtype and lse.dtype == torch.float32
    assert out.shape == (1, 9, 2, 3) and out.is_contiguous() and not out.requires_grad
    O, L = true(*(x.double().numpy() for x in (q, k, v)))
    assert_close(out.double().numpy(), O, {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype])
    assert_close(lse.numpy(), L, 5e-6)


def test_gradients_of_q_k_v_are_torchs():
    """With a window, grouped heads, and a gradient that comes through lse as well."""
    shapes = (2, 9, 2, 4), (2, 9, 1, 4), (2, 9, 1, 4)
    ours, theirs = tensors(*shapes, grad=True), tensors(*shapes, grad=True)
    dout, dlse = tensors((2, 9, 2, 4), (2, 2, 9))
    i, j = torch.arange(9)[:, None], torch.arange(9)
    out, lse, S = flash_attn_func(*ours, window_size=(4, 1), return_attn_probs=True, **emulated())
    assert not S.requires_grad
    want = plain(*theirs, seen=(i - j <= 4) & (j - i <= 1))
    for results in ((out, lse), want):
        ((results[0] * dout).sum() + (results[1] * dlse).sum()).backward()
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad.dtype == a.dtype
        assert_close(a.grad.numpy(), b.grad.numpy(), 1e-5)


def test_gradients_with_dropout_are_of_what_was_drawn():
    """torch.manual_seed repeats the mask; S_dmask tells it; autograd through that mask gives the same gradients."""
    shapes = (1, 9, 1, 4), (1, 9, 1, 4), (1, 9, 1, 4)
    ours, theirs = tensors(*shapes, grad=True), tensors(*shapes, grad=True)
    torch.manual_seed(4)
    out, _, S = flash_attn_func(*ours, 0.3, causal=True, return_attn_probs=True, **emulated())
    out.square().sum().backward()
    torch.manual_seed(4)
    torch.testing.assert_close(flash_attn_func(*ours, 0.3, causal=True, **emulated()), out, rtol=0, atol=0)
    assert (flash_attn_func(*ours, 0.3, causal=True, **emulated()) != out).any()
    q, k, v = theirs
    s = torch.einsum("bihd,bjhd->bhij", q, k) / 2
    p = s.masked_fill(~torch.ones(9, 9).tril().bool(), -torch.inf).softmax(-1)
    want = torch.einsum("bhij,bjhd->bihd", p * ~torch.signbit(S) / 0.7, v)
    assert_close(out.detach().numpy(), want.detach().numpy())
    want.square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a.grad.numpy(), b.grad.numpy(), 1e-5)


def test_gradients_of_packed_qkv():
    qkv, same = tensors((1, 9, 3, 2, 4), grad=True) + tensors((1, 9, 3, 2, 4), grad=True)
    flash_attn_qkvpacked_func(qkv, softmax_scale=-0.4, **emulated()).square().sum().backward()
    plain(*same.unbind(2), scale=-0.4)[0].square().sum().backward()
    assert_close(qkv.grad.numpy(), same.grad.numpy(), 1e-5)


def test_gradients_of_packed_sequences():
    """A sequence without rows: its keys get gradients of 0."""
    shapes = (7, 2, 4), (8, 1, 4), (8, 1, 3)
    ours, theirs = tensors(*shapes, grad=True), tensors(*shapes, grad=True)
    cu_q, cu_k = torch.tensor([0, 3, 3, 7], dtype=torch.int32), torch.tensor([0, 2, 4, 8], dtype=torch.int32)
    out, lse, _ = flash_attn_varlen_func(*ours, cu_q, cu_k, 4, 4, return_attn_probs=True, **emulated())
    assert lse.shape == (2, 7)
    (out.square().sum() + lse.sum()).backward()
    q, k, v = theirs
    for rows, keys in ((slice(0, 3), slice(0, 2)), (slice(3, 7), slice(4, 8))):
        want, want_lse = plain(q[None, rows], k[None, keys], v[None, keys])
        assert_close(out[rows].detach().numpy(), want[0].detach().numpy())
        (want.square().sum() + want_lse.sum()).backward()
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a.grad.numpy(), b.grad.numpy(), 1e-5)
    assert not ours[1].grad[2:4].any()


def test_a_cache_is_updated_in_place():
    q, k, v = tensors((1, 2, 1, 4), (1, 2, 1, 4), (1, 2, 1, 4), dtype=torch.bfloat16)
    caches = [torch.zeros(1, 9, 1, 4, dtype=torch.bfloat16) for _ in range(2)]
    n = torch.tensor([3], dtype=torch.int32)
    out = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=n, causal=True, **emulated())
    assert torch.equal(caches[0][:, 3:5], k) and torch.equal(caches[1][:, 3:5], v) and not caches[0][:, 5:].any()
    want = flash_attn_func(q, caches[0][:, :5], caches[1][:, :5], causal=True, **emulated())
    assert torch.equal(out, want)


def test_what_has_no_gradient_says_so():
    q, k, v = tensors((1, 2, 1, 4), (1, 2, 1, 4), (1, 2, 1, 4), grad=True)
    slopes = torch.ones(1, requires_grad=True)
    on = emulated()
    with pytest.raises(ValueError, match=r"^alibi_slopes: .*requires_grad"):
        flash_attn_func(q, k, v, alibi_slopes=slopes, **on)
    with pytest.raises(ValueError, match=r"^q: .*no backward pass with a cache"):
        flash_attn_with_kvcache(q, k.detach(), v.detach(), **on)
    assert not on["on"].launches
    with torch.no_grad():
        flash_attn_func(q, k, v, alibi_slopes=slopes, **on)
        flash_attn_with_kvcache(q, k, v, **on)


@pytest.mark.parametrize(
    ("error", "name", "make"),
    [
        (TypeError, "q", lambda x: (x.double(), x, x)),
        (TypeError, "k", lambda x: (x, x.half(), x)),
        (TypeError, "v", lambda x: (x, x, x.numpy())),
        (TypeError, "q", lambda x: (x.to("meta"), x, x)),
        (ValueError, "k", lambda x: (x, x.to("meta"), x)),
        (TypeError, "q", lambda x: (x.to_sparse(), x, x)),
    ],
)
def test_tensors_that_cannot_be_taken(error, name, make):
    on = emulated()
    with pytest.raises(error, match=f"^{name}: expected .*, got ") as raised:
        flash_attn_func(*make(torch.zeros(1, 2, 1, 4)), **on)
    assert "\n" not in str(raised.value) and not on["on"].launches


def test_numpy_slopes_and_lengths_serve_tensors():
    q, k, v = tensors((5, 1, 4), (5, 1, 4), (5, 1, 4))
    cu, slopes = np.array([0, 2, 5], np.int32), np.array([0.5], np.float32)
    got = flash_attn_varlen_func(q, k, v, cu, cu, 3, 3, alibi_slopes=slopes, **emulated())
    same = torch.from_numpy(cu), torch.from_numpy(cu)
    want = flash_attn_varlen_func(q, k, v, *same, 3, 3, alibi_slopes=torch.from_numpy(slopes), **emulated())
    assert torch.equal(got, want)
