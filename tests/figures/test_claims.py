"""What the figures about the chapter's claims draw: against the ledger, counts made by hand, and brute force."""

import numpy as np
import pytest

from figures import claims, error_claims, mask_claims, rate_claims
from refimpl import step3_flash_v2
from refimpl.observe import Tally
from refimpl.tiling import Tile
from verify.claims.hardware import A100, H100
from verify.claims.ledger import VERDICTS, load
from verify.claims.s18_6_fp8 import TABLE


def test_verdicts_are_those_of_the_recomputations():
    """Every entry is counted once, under the verdict that follows from its recomputation."""
    data = claims.data_verdicts()
    assert sum(tally.total() for tally in data.values()) == len(load())
    for verdict in VERDICTS:
        wanted = sum(claim.recompute().verdict == verdict for claim in load().values())
        assert sum(tally[verdict] for tally in data.values()) == wanted


def test_intensities():
    """Fills below the compulsory minimum's N / 2, about the tile height, and both far from what is stated."""
    standard, *tiled = claims.data_intensity()
    assert standard.fills == pytest.approx(4 * 2048**2 * 64 / (8 * 2048**2 + 8 * 2048 * 64))
    assert [row.compulsory for row in tiled] == [1024, 8192, 8192, 4096]
    for row, height in zip(tiled, (128, 192, 256, 128), strict=True):
        assert 0.9 * height < row.fills < height < row.compulsory
    assert [row.stated for row in claims.data_intensity()] == [8, 65536, 104_000, 171_900, 32]


def test_traffic():
    """The line of fills is what the reference moves; the stated one is impossible from N = 4096 on."""
    data = claims.data_traffic()
    tally = Tally()
    step3_flash_v2.attention(*np.zeros((3, 1, 1, 512, 64)), tile=Tile(128, 64), observe=tally)
    lse = 4 * 512  # bytes that the table does not count
    assert data.fills[data.N == 512][0] * 1e6 == pytest.approx(tally.hbm_bytes(e=2) - lse)
    assert (data.compulsory * 1e6 == pytest.approx(8 * data.N * 64)) and (data.fills > data.compulsory).all()
    assert ((data.stated < data.compulsory) == (data.N >= 4096)).all()
    assert data.reduction[1] == pytest.approx(data.standard[-1] / data.fills[-1])
    assert data.reduction[0] == pytest.approx(data.standard[-1] / data.stated[-1], rel=0.01)


def test_rates():
    """Operations over time; what is drawn as impossible is above a limit."""
    data = rate_claims.data_rates()
    assert (data.best, data.peak) == (230, 312)
    row = next(row for row in data.rows if row.label == "B=2, N=8192, H=32, d=128")
    assert row.full == pytest.approx(4 * 2 * 32 * 8192**2 * 128 / 4.18e-3 / 1e12)
    assert row.causal == pytest.approx(row.full / 2, rel=1e-3)
    assert [r.label for r in data.rows if r.causal > data.best] == [row.label]


def test_utilisation():
    """The implied peak is rate over share; the limit is intensity times bandwidth over the peak."""
    data = rate_claims.data_utilisation()
    for d, N, bf16, share, fp8, share8, _ in TABLE:
        assert data.peaks[f"d={d}, N={N}, BF16"][0] == pytest.approx(100 * bf16 / share)
        assert data.peaks[f"d={d}, N={N}, FP8"][0] == pytest.approx(100 * fp8 / share8)
    for d, limit in data.limit.items():
        intensity = int(d.removeprefix("d = ")) / 2
        assert limit == pytest.approx(100 * intensity * H100.gb_per_s / 1e3 / H100.fp16)
        assert all(share > limit for share in data.stated[d].values())


def test_splits():
    """The gain that is drawn is the ledger's, and HBM ends it before every SM has a block."""
    data = rate_claims.data_splits()
    assert data.bound[0] == data.stated[0] and data.bound[-1] == data.hbm
    assert data.bound[0] / data.hbm == pytest.approx(data.gain[1])
    assert data.gain[1] < A100.sms < data.gain[0]


def test_rowsum():
    """D of a tile is right with one key tile and wrong with more, except in dV."""
    data = error_claims.data_rowsum()
    assert data.tiles[0] == 1
    for name in ("dQ", "dK"):
        assert data.per_tile[name][0] <= 1e-12 and all(0.1 < error < data.largest for error in data.per_tile[name][1:])
    assert all(error <= 1e-12 for errors in [data.per_tile["dV"], *data.per_row.values()] for error in errors)


def test_storage():
    """Three bits of mantissa are a factor of eight, and the chapter has a half."""
    data = error_claims.data_storage()
    for name in ("O", "dQ", "dK", "dV"):
        assert 7 <= data["bf16"][name] / data["fp16"][name] <= 9
        assert data["stated"][name] == data["fp16"][name] / 2


def test_padding():
    """Left padding makes the rows before the first real key NaN, and the next layer all of them."""
    right, left, later = mask_claims.data_padding(N=9, padding=4)
    assert (right.classes == np.where(right.wanted, mask_claims.SEEN, mask_claims.HIDDEN)).all()
    assert ((left.classes == mask_claims.NAN).all(axis=1) == (np.arange(9) < 4)).all()
    assert (left.classes[4:] == np.where(left.wanted[4:], mask_claims.SEEN, mask_claims.HIDDEN)).all()
    assert (later.classes == mask_claims.NAN).all()


def test_leak():
    """Element by element: a future key is seen iff it is in a visited tile that is not the last one."""
    for panel in mask_claims.data_leak(N=24):
        Br, Bc = panel.tile.Br, panel.tile.Bc
        for i, j in np.ndindex(24, 24):
            last = min(-(-24 // Bc), -(-((i // Br + 1) * Br) // Bc)) - 1
            wanted = mask_claims.SEEN if j <= i else mask_claims.LEAKED if j // Bc < last else mask_claims.HIDDEN
            assert panel.classes[i, j] == wanted
    counts = [(panel.classes == mask_claims.LEAKED).sum() for panel in mask_claims.data_leak()]
    assert counts[0] == 0 and min(counts[1:]) > 0


def test_handed():
    """The inverted mask shows exactly what it should hide; the open window hides nothing of the past."""
    inverted, opposite, window = mask_claims.data_handed()
    assert (inverted.missing == inverted.wanted).all()
    assert ((inverted.classes == mask_claims.LEAKED) == ~inverted.wanted).all()
    assert not opposite.missing.any() and (opposite.classes != mask_claims.LEAKED).all()
    assert ((window.weights > 0) == np.tri(12, dtype=bool)).all()
    assert ((window.classes == mask_claims.LEAKED) == np.tri(12, 12, -4, dtype=bool)).all()


def test_crosses_are_what_is_missing():
    """A key that a row should see and does not is drawn as one cross."""
    panels = mask_claims.data_handed()
    figure = mask_claims.fig_handed(panels)
    drawn = [len(ax.collections[1].get_offsets()) for ax in figure.axes]
    assert drawn == [int(panel.missing.sum()) for panel in panels] and drawn[0] > 0


def test_impossible_rates_are_red():
    """Only ends beyond their limit have the colour of what is stated and wrong."""
    data = rate_claims.data_rates()
    (ax,) = rate_claims.fig_rates(data).axes
    red = [line.get_xdata()[0] for line in ax.lines if line.get_color() == claims.STATED]
    wanted = [r.causal for r in data.rows if r.causal > data.best] + [r.full for r in data.rows if r.full > data.peak]
    assert sorted(red) == sorted(wanted)
