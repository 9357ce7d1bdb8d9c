"""The backward pass with atomic additions, and the emulator's atomics that it is tried on."""

from types import FunctionType

import numpy as np
import pytest
from numba import cuda
from numba.cuda.types import float32

from flash_cuda import backward, general
from flash_cuda.executors.emulator import Emulator
from flash_cuda.executors.memory import OutOfBounds, Race, ReadOnly
from flash_cuda.interface import flash_attn_backward, flash_attn_func
from refimpl import oracle
from refimpl.tiling import Tile

SMALL = {"tile": Tile(8, 8), "threads": (4, 4)}


def arrays(Hq=2, Hk=1, Nq=11, Nk=19, d=3):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, H, n, d), np.float32) for H, n in ((Hq, Nq), (Hk, Nk), (Hk, Nk), (Hq, Nq))]


def gradients(seed, deterministic, **options):
    Q, K, V, dO = arrays()
    O, lse = general.attention(Q, K, V, on=Emulator(0), **SMALL, **options)
    return backward.attention_backward(
        Q, K, V, O, lse, dO, on=Emulator(seed), deterministic=deterministic, **SMALL, **options
    )


def test_deterministic_or_not_is_the_order_of_dQ_alone():
    """In other thread and block orders: equal bits if asked for; else those of dK, dV, and dQ within fp32 rounding."""
    options = {"causal": True, "softcap": 3.0, "bias": np.random.default_rng(1).standard_normal((2, 1, 19))}
    first, *others = [gradients(seed, True, **options) for seed in (None, 1, 2)]
    for other in others:
        for x, y in zip(first, other, strict=True):
            np.testing.assert_array_equal(x, y)
    added = [gradients(seed, False, **options) for seed in (None, 1, 2)]
    for dQ, *rest in added:
        for x, y in zip(first[1:], rest, strict=True):
            np.testing.assert_array_equal(x, y)
        np.testing.assert_allclose(dQ, first[0], rtol=0, atol=1e-6 * np.abs(first[0]).max())
    assert any((dQ != added[0][0]).any() for dQ, *_ in added[1:])


def test_scores_and_weights_are_computed_once():
    """K and V are loaded once, not once a query tile, and dQ's sums are added to once a live tile."""
    Q, K, V, dO = arrays(Nq=16, Nk=24)
    O, lse = general.attention(Q, K, V, on=Emulator(), **SMALL)
    machine = Emulator()
    backward.attention_backward(Q, K, V, O, lse, dO, on=machine, deterministic=False, **SMALL)
    assert machine.counts["K"] == (2 * 1 * 24 * 3, 0) and machine.counts["V"] == machine.counts["K"]
    assert machine.counts["Q"] == (2 * 2 * 3 * 16 * 3, 0)
    assert machine.counts["dQ_sum"] == (2 * 2 * 16 * 3, 2 * 2 * 16 * 3 * (1 + 3))


@pytest.mark.parametrize("Nq, Nk, d", [(0, 9, 3), (9, 0, 3), (1, 1, 3), (2, 9, 40)])
def test_sizes_at_the_edges(Nq, Nk, d):
    """Nothing to add to, nothing to add, one pair, and more columns than a thread adds up at once."""
    Q, K, V, dO = arrays(Nq=Nq, Nk=Nk, d=d)
    O, lse = general.attention(Q, K, V, on=Emulator(), **SMALL)
    got = backward.attention_backward(Q, K, V, O, lse, dO, on=Emulator(), deterministic=False, **SMALL)
    for x, true in zip(got[:3], oracle.attention_backward(Q, K, V, dO)[:3], strict=True):
        np.testing.assert_allclose(x, true, rtol=0, atol=1e-5)


def test_the_interface_takes_the_kernel_that_was_asked_for():
    q, k, v, dout = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in arrays())
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, on=Emulator(), **SMALL)
    said = []
    for given in ({}, {"deterministic": False}, {"deterministic": True}):
        flash_attn_backward(dout, q, k, v, out, lse, on=Emulator(), explain=said.append, **SMALL, **given)
    assert ["backward_atomic (" in line for line in said] == [True, True, False]
    assert ["; not deterministic" in line for line in said] == [True, True, False]


def ours(body):
    """The body as the emulator knows one of ours, by its module's name."""
    return FunctionType(
        body.__code__, body.__globals__ | {"__name__": "flash_cuda.test"}, body.__name__, None, body.__closure__
    )


def meeting(first, second):
    """A kernel whose first thread does one thing with x[0] and the others another."""

    def body(x, y):
        me = cuda.blockIdx.x + cuda.threadIdx.x
        for what in first if me == 0 else second:
            if what == "read":
                y[me] = x[0]
            elif what == "write":
                x[0] = float32(me)
            else:
                cuda.atomic.add(x, 0, float32(me + 1))

    return ours(body)


def meet(first, second, blocks, threads):
    machine = Emulator(None)
    x, y = (machine.empty(name, (n,), np.dtype(np.float32)) for name, n in (("x", 1), ("y", 4)))
    x.data[:] = 5
    machine.launch(meeting(first, second), blocks, threads, (x, y))
    return machine, x.data[0]


@pytest.mark.parametrize("blocks, threads", [(3, 1), (1, 3)])
def test_additions_meet_without_a_race(blocks, threads):
    machine, total = meet(["add", "add"], ["add", "add"], blocks, threads)
    assert total == 5 + 2 * (1 + 2 + 3) and machine.counts["x"] == (0, 6)


@pytest.mark.parametrize("blocks, threads", [(2, 1), (1, 2)])
@pytest.mark.parametrize("first, second, says", [
    (["read"], ["add"], "adds to what it read"), (["write"], ["add"], "adds to what it wrote"),
    (["add"], ["read"], "reads what it added to"), (["add"], ["write"], "overwrites what it added to"),
    (["add"], ["add", "read"], "reads what it added to"), (["add"], ["add", "write"], "overwrites what it added to"),
])  # fmt: skip
def test_additions_beside_plain_accesses_are_a_race(first, second, says, blocks, threads):
    with pytest.raises(Race, match=says):
        meet(first, second, blocks, threads)
    meet(first + second, [], blocks, threads)  # one thread alone may do both


def test_additions_stay_inside_and_off_inputs():
    machine = Emulator(0)

    def body(x, at):
        cuda.atomic.add(x, at, float32(1.0))

    x = machine.empty("x", (1,), np.dtype(np.float32))
    with pytest.raises(OutOfBounds, match="x of shape"):
        machine.launch(ours(body), 1, 1, (x, 1))
    with pytest.raises(ReadOnly, match="may not write"):
        machine.launch(ours(body), 1, 1, (machine.input("x", np.zeros(1, np.float32)), 0))
