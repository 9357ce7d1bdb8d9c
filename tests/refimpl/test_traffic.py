"""What crosses between HBM and SRAM, counted, equals the docstring's formula exactly, ragged or not."""

import numpy as np
import pytest

from refimpl import backward
from refimpl.observe import Tally
from refimpl.tiling import Tile

# B, Hq, Hk, Nq, Nk, d, dv, tile: square, ragged, one row, one key, grouped heads, nothing at all.
SIZES = [
    (1, 1, 1, 32, 32, 8, 8, Tile(16, 16)),
    (2, 4, 2, 113, 203, 5, 3, Tile(16, 40)),
    (1, 2, 1, 203, 113, 4, 6, Tile(40, 16)),
    (1, 1, 1, 1, 17, 3, 3, Tile(16, 4)),
    (1, 1, 1, 17, 1, 3, 3, Tile(4, 16)),
    (1, 3, 3, 16, 17, 3, 3, Tile(16, 16)),
    (1, 3, 1, 17, 15, 3, 3, Tile(16, 16)),
    (1, 2, 2, 0, 9, 3, 3, Tile(4, 4)),
    (1, 2, 2, 9, 0, 3, 3, Tile(4, 4)),
    (0, 2, 2, 9, 9, 3, 3, Tile(4, 4)),
]


def diagonal(Nq, Nk, causal):
    """`diag` of the formulas: row r sees key j iff j <= r + diag."""
    return {None: Nk, "bottom_right": Nk - Nq, "top_left": 0}[causal]


@pytest.mark.parametrize("causal", [None, "bottom_right", "top_left"])
@pytest.mark.parametrize("size", SIZES)
def test_forward(step, draw, fills, size, causal):
    """Bytes tallied = bytes by formula, for two element sizes."""
    B, Hq, Hk, Nq, Nk, d, dv, tile = size
    Q, K, V, _ = draw(Nq, Nk, B, Hq, Hk, d, dv)
    tally = Tally()
    options = {"causal": causal is not None, "align": causal or "bottom_right"}
    step.attention(Q, K, V, **options, tile=tile, observe=tally)
    for e in (2, 4):
        assert tally.hbm_bytes(e) == fills(step, *size, diag=diagonal(Nq, Nk, causal), e=e)


@pytest.mark.parametrize("order", ["v1", "v2"])
@pytest.mark.parametrize("size", SIZES)
def test_backward(draw, fills, size, order):
    """Bytes tallied = those of D and those of the order."""
    B, Hq, Hk, Nq, Nk, d, dv, tile = size
    Q, K, V, dO = draw(Nq, Nk, B, Hq, Hk, d, dv)
    tally = Tally()
    O, lse = np.zeros_like(dO), np.zeros(dO.shape[:3])
    backward.attention_backward(Q, K, V, O, lse, dO, order=order, tile=tile, observe=tally)
    for e in (2, 4):
        parts = [fills(backward, *size, e=e, name=name) for name in ("fills_D", f"fills_{order}")]
        assert tally.hbm_bytes(e) == sum(parts)


def test_names(ladder, draw):
    """Which array crosses how often, at 4 x 3 tiles of one head: the table a learner would write by hand."""
    Q, K, V, _ = draw(16, 12, d=5, dv=7)
    q, k, v, o, s, n = 16 * 5, 12 * 5, 12 * 7, 16 * 7, 16 * 12, 16
    expected = {
        "step0_standard": (
            {"Q": 3 * q, "K": 4 * k, "S": s, "P": s, "V": 4 * v},
            {"S": s, "P": s, "lse": n, "O": o},
        ),
        "step1_fused": ({"Q": q, "K": 8 * k, "V": 4 * v}, {"O": o, "lse": n}),
        "step2_flash_v1": (
            {"Q": 3 * q, "K": k, "V": v, "m": 2 * n, "l": 2 * n, "O_acc": 2 * o},
            {"m": 2 * n, "l": 2 * n, "O_acc": 2 * o, "O": o, "lse": n},
        ),
        "step3_flash_v2": ({"Q": q, "K": 4 * k, "V": 4 * v}, {"O": o, "lse": n}),
        "step4_causal": ({"Q": q, "K": 4 * k, "V": 4 * v}, {"O": o, "lse": n}),
        "step5_tensor_core": ({"Q": q, "K": 4 * k, "V": 4 * v}, {"O": o, "lse": n}),
        "step6_flash_v3": ({"Q": q, "K": 4 * k, "V": 4 * v}, {"O": o, "lse": n}),
    }
    for name, (loads, stores) in expected.items():
        tally = Tally()
        ladder[name].attention(Q, K, V, tile=Tile(4, 4), observe=tally)
        assert tally.loads == loads
        assert tally.stores == stores


def test_masked_tiles_cost_nothing(ladder, draw):
    """Step 4 with a boolean mask loads the keys of live tiles, per head; Q, O and lse in any case."""
    Q, K, V, _ = draw(16, 12, Hq=2, Hk=2)
    mask = np.zeros((1, 2, 16, 12), bool)
    mask[0, 0, 0, 11] = mask[0, 1, 5, 3] = mask[0, 1, 6, 9] = True
    tally = Tally()
    ladder["step4_causal"].attention(Q, K, V, mask=mask, tile=Tile(4, 4), observe=tally)
    assert tally.loads == {"Q": 2 * 16 * 5, "K": 3 * 4 * 5, "V": 3 * 4 * 5}
    assert tally.stores == {"O": 2 * 16 * 5, "lse": 2 * 16}
