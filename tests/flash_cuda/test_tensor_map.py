"""What the copy engine takes: an obstacle is named, and the emulator refuses the same arrays."""

import numpy as np
import pytest

from flash_cuda.executors.emulator import Emulator
from flash_cuda.parts.tensor_map import encode, obstacle

BASE = np.zeros((3, 4, 50, 64), np.float16)
ODD = np.zeros((2, 2, 10, 12), np.float16)


def told(x):
    return obstacle(x.shape, x.strides, x.__array_interface__["data"][0], x.itemsize)


@pytest.mark.parametrize("x", [
    BASE, BASE[:, ::2], BASE[1:, 1:, 3:, 8:24], BASE.transpose(1, 0, 2, 3), BASE[:1, :1, :1, :8], BASE[:, :, 5:5],
    np.lib.stride_tricks.as_strided(ODD[:, :, :1], ODD[:, :, :1].shape, (480, 240, 6, 2)),  # one row
], ids=lambda x: f"{x.shape} {x.strides}")
def test_taken(x):
    assert told(x) is None


@pytest.mark.parametrize("x, reason", [
    (BASE[..., ::2], "its last axis is not contiguous"),
    (BASE.transpose(0, 1, 3, 2), "its last axis is not contiguous"),
    (BASE[..., 4:], "it does not start at a multiple of 16 bytes"),
    (ODD, "its row stride of 24 bytes is not a positive multiple of 16"),
    (BASE[:, :, ::-1], "its row stride of -128 bytes is not a positive multiple of 16"),
    (np.broadcast_to(BASE[:, :1], BASE.shape), "its head stride of 0 bytes is not a positive multiple of 16"),
    (np.broadcast_to(BASE[:1], BASE.shape), "its batch stride of 0 bytes is not a positive multiple of 16"),
], ids=lambda x: x if isinstance(x, str) else "")
def test_obstacles(x, reason):
    assert told(x) == reason
    on = Emulator()
    with pytest.raises(ValueError, match=f"K: expected an array that the copy engine can read, but {reason}"):
        on.tensor_maps((on.input("Q", BASE), 16), (on.input("K", x), 16))


@pytest.mark.parametrize("corner, inside", [
    ((0, 0), (16, 64)), ((45, 0), (5, 64)), ((-3, -60), (13, 4)), ((60, 0), (0, 0)),
])
def test_a_box_has_zeros_where_the_array_is_not(corner, inside):
    """Past either end, and what is there is counted, not what is not."""
    x = Emulator().input("K", np.ones_like(BASE))
    box = x.box(16, 64, *corner, 3, 2)
    assert box.shape == (16, 64) and box.sum() == x.count.loads == inside[0] * inside[1]
    assert not x.box(16, 64, 0, 0, 4, 0).any() and not x.box(16, 64, 0, 0, 0, -1).any()
    assert x.box(16, 64, 0, 0, 0, 0, length=7).sum() == 7 * 64


@pytest.mark.gpu
def test_the_driver_takes_what_has_no_obstacle():
    from numba import cuda

    maps = encode((cuda.to_device(BASE), 64), (cuda.to_device(BASE), 16, 20))
    assert maps.shape == (32,) and maps.dtype == np.uint64 and maps.any()
