"""The kernels with rules, forward and backward, on random combinations of everything they take."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_options import draw, judge

from flash_cuda import backward, general
from flash_cuda.executors.assembler import Assembler, numba_type
from flash_cuda.executors.emulator import Emulator
from flash_cuda.parts.rule_ops import is_kept
from refimpl import options
from refimpl.philox import Dropout
from refimpl.tiling import Tile

SMALL = {"tile": Tile(8, 8), "threads": (4, 4), "on": Emulator}


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 10**6))
def test_random_combinations_emulated(seed):
    made = draw(seed, longest=14, dims=(1, 8))
    told = judge(made, **SMALL)
    assert told is None, told


@pytest.mark.gpu
def test_random_combinations_on_a_gpu():
    """2,000 of them; run-time arguments keep this within 40 compiled kernels."""
    from flash_cuda.executors.gpu import Gpu

    before = len(Gpu._compiled)
    wrong = [told for seed in range(2000) if (told := judge(draw(seed, longest=150, dims=(33, 64)), on=Gpu))]
    assert not wrong, f"{len(wrong)} wrong, the first: {wrong[0]}"
    assert len(Gpu._compiled) - before <= 40


class Signatures(Assembler):
    """An executor that runs nothing and notes what would be compiled: a body for types of arguments."""

    def __init__(self):
        self.seen = set()

    def launch(self, body, blocks, threads, args):
        self.seen.add((body, tuple(numba_type(a) for a in args)))


def test_random_combinations_share_their_kernels():
    """After these hundred all kernels of the 2,000 have been asked for: another option is another argument."""
    on = Signatures()
    for seed in range(100):
        made = draw(seed, longest=150, dims=(33, 64))
        Q, K, V, dO = made.arrays.values()
        O, lse = general.attention(Q, K, V, on=on, **made.options)
        backward.attention_backward(Q, K, V, O, lse, dO, on=on, deterministic=seed % 2 == 0, **made.options)
    assert len(on.seen) <= 40
    assert {body.__name__ for body, _ in on.seen} == {
        "general", "backward_rows", "backward_dq", "backward_dkv", "backward_dbias", "backward_atomic", "round_sums"
    }  # fmt: skip


def arrays(Nq=19, Nk=21, d=5, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((1, 2, n, d)).astype(np.float32) for n in (Nq, Nk, Nk, Nq)]


def test_the_same_bits_in_any_thread_order():
    Q, K, V, dO = arrays()
    runs = []
    for seed in (None, 0, 1):
        on = {"tile": Tile(8, 8), "threads": (4, 4), "causal": True, "softcap": 2.0}
        O, lse = general.attention(Q, K, V, on=Emulator(seed), **on)
        runs.append((O, lse, *backward.attention_backward(Q, K, V, O, lse, dO, on=Emulator(seed), **on)[:3]))
    for other in runs[1:]:
        for x, y in zip(runs[0], other, strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_rule_of_ones_own_joins_the_options():
    """A mask that no option offers: keys of the query's own parity; equal to the mask tensor of the same."""
    Q, K, V, _ = arrays()
    rule = options.Rule(lambda b, h, i, j: (i - j) % 2 == 0)
    i, j = np.ogrid[2:21, 0:21]
    on = {"tile": Tile(8, 8), "threads": (4, 4)}
    mine, _ = general.attention(Q, K, V, rules=rule, causal=True, on=Emulator(), **on)
    table, _ = general.attention(Q, K, V, mask=(i - j) % 2 == 0, causal=True, on=Emulator(), **on)
    np.testing.assert_array_equal(mine, table)


def test_empty_tiles_are_not_loaded():
    """A window of 4 keys in 64: the count of loaded keys falls to the tiles that it touches."""
    Q, K, V, _ = arrays(64, 64)
    on = {"tile": Tile(8, 8), "threads": (4, 4)}
    loads = []
    for window in (None, (3, 0)):
        machine = Emulator()
        general.attention(Q, K, V, window=window, on=machine, **on)
        loads.append(machine.counts["K"][0])
    # 8 query tiles: the first touches one key tile, each other one two.
    assert loads == [2 * 8 * 64 * 5, 2 * (1 + 7 * 2) * 8 * 5]


def test_dropout_draws_what_numpy_draws():
    drop = Dropout(0.3, seed=2**40 + 7, offset=3)
    mask = drop.mask(1, 2, slice(0, 9), slice(0, 11))
    empty = np.empty((0,) * 4, bool)
    drawn = [[bool(is_kept(1, 2, r, c, *drop.arguments, empty)) for c in range(11)] for r in range(9)]
    np.testing.assert_array_equal(drawn, mask)


@pytest.mark.parametrize("change, error, says", [
    ({"rules": [3]}, TypeError, "rules: expected Rule objects"),
    ({"window": (-2, 0)}, ValueError, "window left"),
    ({"window": 3}, ValueError, "window must be a pair"),
    ({"softcap": -1.0}, ValueError, "softcap"),
    ({"mask": np.ones((19, 20), bool)}, ValueError, "mask"),
    ({"mask": np.ones((19, 21))}, TypeError, "mask"),
    ({"bias": np.ones((19, 20))}, ValueError, "bias"),
    ({"alibi_slopes": np.ones(3)}, ValueError, "slopes"),
    ({"lengths_k": np.array([22])}, ValueError, "lengths_k"),
    ({"dropout": 0.5}, TypeError, "dropout: expected a Dropout"),
    ({"bogus": 1}, TypeError, "bogus"),
])  # fmt: skip
def test_bad_options_are_named(change, error, says):
    Q, K, V, _ = arrays()
    with pytest.raises(error, match=says):
        general.attention(Q, K, V, on=Emulator(), **change)


@pytest.mark.parametrize("name, x, error, says", [
    ("O", np.zeros((1, 2, 19, 4), np.float32), ValueError, "O: expected shape"),
    ("dO", np.zeros((1, 2, 19, 5), np.float16), TypeError, "dO: expected dtype fp32"),
    ("lse", np.zeros((1, 2, 19)), TypeError, "lse: expected dtype fp32"),
    ("dlse", np.zeros((1, 2, 18), np.float32), ValueError, "dlse: expected shape"),
])  # fmt: skip
def test_bad_gradients_are_named(name, x, error, says):
    Q, K, V, dO = arrays()
    given = {"O": dO, "lse": np.zeros((1, 2, 19), np.float32), "dO": dO} | {name: x}
    with pytest.raises(error, match=says):
        backward.attention_backward(Q, K, V, on=Emulator(), **given)


def test_a_score_rule_without_a_derivative_has_no_backward():
    Q, K, V, dO = arrays()
    rule = options.Rule(lambda s, b, h, i, j: s * s, kind="score")
    with pytest.raises(ValueError, match="derivative"):
        backward.attention_backward(Q, K, V, dO, np.zeros((1, 2, 19), np.float32), dO, rules=rule, on=Emulator())
