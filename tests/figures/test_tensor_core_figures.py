"""The lane map drawn is the one that the emulator computes by, and the layouts are those that the steps copy into."""

import numpy as np
import pytest

from figures import tensor_core
from flash_cuda.parts.tensor_ops import swizzling
from flash_cuda.ptx import standins as ptx_standins


def test_lanes_are_those_of_the_emulators_product():
    """Every element of A, B and C is in the drawn lane and register, and in no other."""
    A, B, C = tensor_core.data_lanes()
    here = ptx_standins
    # The emulator's product is 16 columns wide, two fragments side by side; drawn is the first.
    for part, row, column, per_register in (
        (A, here._A_ROW, here._A_COLUMN, 2), (B, here._B_ROW[:, :4], here._B_COLUMN[:, :4], 2),
        (C, here._C_ROW[:, :4], here._C_COLUMN[:, :4], 1),
    ):  # fmt: skip
        lane, k = np.indices(row.shape)
        assert (part.lane[row, column] == lane).all()
        assert (part.register[row, column] == k // per_register).all()
        assert part.lane.size == row.size


@pytest.mark.parametrize("D", [16, 32, 64, 96, 128, 192, 256])
def test_swizzled_rows_are_read_in_one_turn(D):
    """Any chunk of eight neighbouring rows, at every head room that step 5 has; nothing is lost on the way."""
    shift, mask = swizzling(D)
    chunks = D // tensor_core.CHUNK
    kept = tensor_core.laid_out("", chunks, lambda r, c: chunks * r + (c ^ (r >> shift & mask)))
    plain = tensor_core.laid_out("", chunks, lambda r, c: chunks * r + c)
    assert {(int(r), int(c)) for r, c in zip(kept.row.flat, kept.chunk.flat, strict=True)} == set(np.ndindex(8, chunks))
    assert {kept.conflict(c) for c in range(chunks)} == {1}
    assert plain.conflict(0) == min(8, np.gcd(chunks, 8))


def test_drawn_layouts_say_what_a_read_costs():
    figure = tensor_core.fig_swizzle(tensor_core.data_swizzle())
    titles = [ax.get_title(loc="left") or ax.get_title() for ax in figure.axes]
    assert [title.split("\n")[1].split()[0] for title in titles] == ["8", "1", "1"]
