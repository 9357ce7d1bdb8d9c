"""Tile skipping of the kernels with rules: right over many rounds of T tiles, and each class told once a block."""

import numpy as np
import pytest
from helpers_clean import unclean
from random_options import Combination, judge

from flash_cuda import backward, general
from flash_cuda.executors.emulator import Emulator
from refimpl import options
from refimpl.tiling import Tile

T = 4  # threads of a block here, and so tiles a round
ROUNDS = {"tile": Tile(8, 8), "threads": (2, 2)}
IDS = np.repeat(np.arange(6), [3, 20, 1, 9, 37, 7])  # 77 keys; a query stands at the same place as its key
BIAS = np.random.default_rng(1).standard_normal((45, 77)).astype(np.float32)
HOLES = np.kron(np.random.default_rng(2).random((3, 10)) < 0.2, np.ones((16, 8))).astype(bool)[:45, :77]


def arrays(Nq=45, Nk=77, d=3):
    rng = np.random.default_rng(0)
    Q, K, V, dO = (rng.standard_normal((1, H, n, d), np.float32) for H, n in ((2, Nq), (1, Nk), (1, Nk), (2, Nq)))
    return {"Q": Q, "K": K, "V": V, "dO": dO}


@pytest.mark.parametrize("given, truth", [
    ({"rules": options.document(IDS[32:], IDS)}, {"mask": IDS[32:, None] == IDS}),
    ({"window": (9, 1)}, {"window": (9, 1)}),
    ({"mask": HOLES, "bias": BIAS}, {"mask": HOLES, "bias": BIAS}),
    ({"causal": True, "align": "top_left"}, {"causal": True, "align": "top_left"}),
], ids=["documents", "window", "holes", "causal"])  # fmt: skip
@pytest.mark.parametrize("seed", [0, 1], ids=["deterministic", "atomic"])
def test_many_rounds(seed, given, truth):
    """6 x 10 tiles are two rounds down and three across: empty ones at their ends, between, and whole rounds.

    The window's tiles are live by a single pair in a corner, on either side.
    """
    told = judge(Combination(seed, "fp32", arrays(), given, truth), **ROUNDS, on=Emulator)
    assert told is None, told


def test_the_class_of_a_tile_is_told_once_a_block():
    """Documents of whole tiles: no mask is evaluated, so each look at a key's id is one at a tile's first or last."""
    ids = np.repeat(np.arange(4), 24)
    on = {**ROUNDS, "rules": options.document(ids)}
    Q, K, V, dO = arrays(96, 96).values()
    machine = Emulator()
    O, lse = general.attention(Q, K, V, on=machine, **on)
    blocks, tiles = 2 * 12, 12
    assert machine.counts["mask_aux.1.1"] == (blocks * tiles * 2, 0)
    assert machine.counts["K"] == (2 * 4 * 3 * 3 * 8 * 3, 0)  # heads, documents, their 3 x 3 tiles, elements of each
    machine = Emulator()
    backward.attention_backward(Q, K, V, O, lse, dO, on=machine, **on)
    assert machine.counts["mask_aux.1.1"] == (2 * blocks * tiles * 2, 0)  # the kernel for dQ, and that for dK and dV


def test_a_tile_of_too_many_scores_is_named():
    Q, K, V, _ = arrays().values()
    with pytest.raises(ValueError, match="tile: expected at most 32 scores a thread"):
        general.attention(Q, K, V, on=Emulator(), tile=Tile(16, 16), threads=(2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 256])
def test_a_further_rule_assembles_clean(d):
    """Evaluating more rules costs neither stack nor fp64, forward or backward."""
    pytest.importorskip("cuda.bindings.nvvm", reason="no NVVM: install the dev extra")
    from flash_cuda.executors.assembler import Assembler

    on = Assembler("sm_75", "sm_90a")
    Q, lse = np.zeros((1, 1, 100, d), np.float16), np.zeros((1, 1, 100), np.float32)
    rules = options.document(np.zeros(100, int))
    general.attention(Q, Q, Q, rules=rules, on=on)
    for deterministic in (True, False):
        backward.attention_backward(Q, Q, Q, Q, lse, Q, rules=rules, on=on, deterministic=deterministic)
    assert len(on.reports) == 2 * (1 + 3 + 3)
    assert not unclean(on.reports, shared=48 * 1024)
