"""Which block works on which query tile: each once, in even shares, and as the kernel's own arithmetic has it."""

import numpy as np
import pytest

from flash_cuda.executors import emulator
from flash_cuda.parts.schedule import SHARERS, group_size, tiles_in_order, unevenness
from flash_cuda.ptx import hopper as ptx_hopper
from flash_cuda.step6_flash_v3 import Shape, attention


def causal(N, Br, Bc):
    """Key tiles that each query tile sees."""
    return tuple(-(-min(i * Br + Br, N) // Bc) for i in range(-(-N // Br)))


@pytest.mark.parametrize("Tr, heads, group", [(1, 1, 1), (5, 7, 3), (8, 4, 4), (3, 9, 1), (6, 5, 4), (2, 3, 3)])
def test_every_tile_of_every_head_once(Tr, heads, group):
    tile, head = tiles_in_order(tuple(range(Tr)), heads, group)
    assert sorted(zip(tile, head, strict=True)) == [(i, h) for i in range(Tr) for h in range(heads)]


def test_groups_of_heads_follow_each_other_and_the_last_ends_short():
    """Heads of a group at a time, from long to short and back, so that the shortest tiles come last of all."""
    tile, head = tiles_in_order((1, 2, 3), 5, 2)
    assert (head // 2).tolist() == [0] * 6 + [1] * 6 + [2] * 3
    assert tile.tolist() == [2, 2, 1, 1, 0, 0, 0, 0, 1, 1, 2, 2, 2, 1, 0]


@pytest.mark.parametrize("Br, Bc, d", [(192, 128, 64), (128, 192, 64), (128, 128, 128)])
@pytest.mark.parametrize("N", [1024, 2048, 4096, 8192, 16384])
def test_shares_are_even(N, Br, Bc, d):
    """16 heads, 16 K tokens in all, causal, on the 132 multiprocessors of an H200: within 2 % of the mean."""
    lengths, heads = causal(N, Br, Bc), 16 * (16384 // N)
    group = group_size(lengths, heads, 4 * N * d, 132)
    assert 1 <= group <= heads
    assert 1 <= unevenness(lengths, heads, group, 132) <= 1.02


def test_unevenness_is_that_of_a_deal_by_hand():
    """Tiles of 4, 3, 2, 1 keys, and a seam each: 5 + 2 and 4 + 3 are even; three blocks have 5, 4, and 3 + 2."""
    assert unevenness((1, 2, 3, 4), 1, 1, 2) == 1
    assert unevenness((1, 2, 3, 4), 1, 1, 3) == 5 / (14 / 3)


def test_groups():
    """Nothing to even out: one head at a time. Blocks enough for each: all at once. Else what L2 holds, or less."""
    assert group_size((4, 4, 4), 16, 1 << 20, 132) == 1
    assert group_size((1, 2, 3), 8, 1 << 30, 8 * SHARERS) == 8
    most = 24
    assert most // 2 < group_size((1, 2, 3), 64, 1 << 20, 132) <= most
    assert group_size((1, 2, 3), 64, 1 << 40, 132) == 1


@pytest.mark.parametrize("blocks", [1, 3])
def test_the_kernel_goes_in_this_order(monkeypatch, blocks):
    """The query tiles that each block copies, under causal masking, in groups of two heads."""
    seen, copy = [], emulator.STAND_INS[ptx_hopper.tma_load]

    def note(machine, to, tensor_map, bar, column, row, head, batch):
        if not tensor_map.offset:
            seen.append((machine.thread.block.index, row // 64, head))
        copy(machine, to, tensor_map, bar, column, row, head, batch)

    monkeypatch.setitem(emulator.STAND_INS, ptx_hopper.tma_load, note)
    monkeypatch.setattr("flash_cuda.step6_flash_v3.group_size", lambda *sizes: 2)
    on = emulator.Emulator()
    on.multiprocessors = blocks
    Q = np.zeros((1, 3, 70, 8), np.float16)
    attention(Q, Q, Q, causal=True, shape=Shape(64, 64, 64), on=on)
    order = list(zip(*tiles_in_order((1, 2), 3, 2), strict=True))
    want = {block: [] for block in range(blocks)}
    for turn, start in enumerate(range(0, len(order), blocks)):
        for k, tile in enumerate(order[start : start + blocks]):
            want[k if turn % 2 == 0 else blocks - 1 - k].append(tile)
    assert {block: [tile[1:] for tile in seen if tile[0] == block] for block in range(blocks)} == want
