"""Peers where they are not, and with stand-ins for what they are made of: names, layouts, back ends."""

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from refimpl import oracle
from verify.bench import peers
from verify.bench.points import Inputs, Point


class Tensor(np.ndarray):
    """A NumPy array with the few methods of a tensor that are called."""

    def transpose(self, a, b):
        return np.swapaxes(self, a, b)


def stored(x, dtype):
    return np.asarray(x).view(Tensor)


@pytest.fixture
def torch(monkeypatch):
    """A torch that computes with the oracle and says which back end was asked for, and a flash-attn of that kind."""
    asked = []

    @contextmanager
    def sdpa_kernel(backend):
        asked.append(backend)
        yield
        asked.append("left")

    def attention(Q, K, V, is_causal):
        assert asked[-1] != "left", "outside of the chosen back end"
        return oracle.attention(Q, K, V, causal=is_causal)[0].astype(Q.dtype).view(Tensor)

    def flash_attn_func(q, k, v, causal):
        O, lse = oracle.attention(*(x.swapaxes(1, 2) for x in (q, k, v)), causal=causal)
        return O.swapaxes(1, 2).astype(q.dtype).view(Tensor), lse

    made = ModuleType("torch")
    made.__version__, made.cuda = "0.0", SimpleNamespace(is_available=lambda: True)
    made.no_grad = contextmanager(lambda: (yield))
    backends = SimpleNamespace(FLASH_ATTENTION="flash", CUDNN_ATTENTION="cudnn", MATH="math")
    modules = {
        "torch": made,
        "torch.nn.attention": SimpleNamespace(SDPBackend=backends, sdpa_kernel=sdpa_kernel),
        "torch.nn.functional": SimpleNamespace(scaled_dot_product_attention=attention),
        "flash_attn_interface": SimpleNamespace(flash_attn_func=flash_attn_func, __version__="3.0"),
        "flash_attn": None,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(peers, "tensor", stored)
    peers.absent.cache_clear()
    yield asked
    peers.absent.cache_clear()


def test_without_torch_every_peer_has_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    peers.absent.cache_clear()
    try:
        for name in peers.PEERS:
            assert peers.absent(name).startswith("torch does not import (") and peers.version_of(name) is None
    finally:
        peers.absent.cache_clear()


def test_what_is_missing_is_named(torch):
    assert peers.absent("sdpa_cudnn") is None and peers.absent("flash_attn_3") is None
    assert peers.absent("sdpa_efficient") == "torch 0.0 has no back end EFFICIENT_ATTENTION"
    assert peers.absent("flash_attn_2").startswith("flash_attn does not import (")
    assert peers.version_of("flash_attn_3") == "flash_attn_interface 3.0"


def test_torch_without_a_gpu(torch, monkeypatch):
    monkeypatch.setattr(sys.modules["torch"].cuda, "is_available", lambda: False)
    assert peers.absent("sdpa_math") == "torch sees no GPU"


@pytest.mark.parametrize("name", ["sdpa_math", "flash_attn_3"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_peer_gets_the_arrays_in_its_own_order(torch, name, causal):
    point = Point("forward", 2, 3, 16, 8, "fp16", causal)
    inputs = Inputs(upload=lambda host, kept: host)
    made = peers.contender(name, point, inputs.device(point), rows=np.asarray)
    with made.within():
        made.work()
        O = made.outputs()["O"]
    host = inputs.host(point)
    truth, _ = oracle.attention(host["Q"], host["K"], host["V"], causal=causal)
    assert O.shape == truth.shape and np.abs(O - truth).max() <= 1e-3
    assert torch == ([] if name == "flash_attn_3" else ["math", "left"]) and made.name == name


def test_bf16_goes_to_torch_as_signed_integers():
    """The interface has no bf16, and not every torch has unsigned integers of two bytes."""
    interface = {"typestr": "<u2", "shape": (2, 3), "strides": (6, 2), "data": (1, False)}
    bits = peers._Bits(SimpleNamespace(__cuda_array_interface__=interface)).__cuda_array_interface__
    assert bits == {**interface, "typestr": "<i2"}
    assert np.dtype(bits["typestr"]).itemsize == np.dtype(ml_dtypes.bfloat16).itemsize
