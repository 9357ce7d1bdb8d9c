"""Step 6's pictures: the swizzle, the ring and its phases, the shares of blocks, and the model of overlap."""

from itertools import pairwise

import numpy as np
import pytest

from figures import hopper, overlap
from figures.devices import H200


def test_hardware_swizzle_is_step_5s_at_64_columns():
    """Two sources, one layout: the emulator's addresses and step 5's own exclusive or."""
    plain, hardware = hopper.data_swizzle()
    ours = hopper.laid_out("", 8, lambda r, c: 8 * r + (c ^ r))
    assert (hardware.chunk == ours.chunk).all() and (hardware.row == ours.row).all()
    assert (plain.conflict(2), hardware.conflict(2)) == (8, 1)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_ring_keeps_its_order(stages):
    """No tile is used before it has come or overwritten before it was read, and phases turn once a round."""
    ring = hopper.run_ring(stages, tiles=9)
    for stay in ring.stays:
        assert stay.load < stay.full <= stay.use < stay.free
        assert stay.signals == stay.j // stages % 2 == 1 - stay.waits_for
        assert stay.load >= max((old.free for old in ring.stays[: stay.j] if old.stage == stay.stage), default=0)
    starts = [stay.load for stay in ring.stays]
    assert starts == sorted(starts)


def test_two_stages_hide_a_copy_that_is_shorter_than_the_work():
    ends = [hopper.run_ring(stages, tiles=9, load=0.8).stays[-1].free for stages in (1, 2)]
    assert ends == pytest.approx([9 * 1.8, 9 + 0.8])


def test_shares():
    """All the work is given out; back and forth is no worse than one way, and a table can be better."""
    data = hopper.data_balance()
    shares = list(data.work.values())
    assert all(len(w) == H200.sms and w.sum() == pytest.approx(H200.sms) for w in shares)
    come, longest, back, ours, table = (w[0] for w in shares)
    assert come > longest >= back > ours > table >= 1


def test_greedy_is_greedy():
    assert list(hopper.to_the_first_free(np.array([3, 2, 2, 1]), 2)) == [4, 4]
    assert list(hopper.dealt(np.array([3, 2, 1]), 2, snake=False)) == [4, 2]
    assert list(hopper.dealt(np.array([3, 2, 1]), 2, snake=True)) == [3, 3]


# ---- the model


def test_budget_is_arithmetic():
    """At d = 64 exponentials take as long as both products, at d = 128 half of it (FlashAttention-3, section 3.1)."""
    for d, ratio in ((64, 1), (128, 1 / 2), (256, 1 / 4)):
        cost = overlap.budget(d)
        assert cost.exponentials / (2 * cost.product) == ratio


@pytest.mark.parametrize("way", overlap.WAYS)
@pytest.mark.parametrize("d", [64, 128])
def test_no_unit_does_two_things_and_nothing_comes_before_what_it_needs(way, d):
    line = overlap.run(way, overlap.budget(d), tiles=6)
    at = {(s.what, s.wg, s.j): s for s in line.stretches}
    assert len(at) == len(line.stretches) == 2 * 6 * 3
    for unit in ("product", "softmax"):
        mine = sorted((s.start, s.stop) for s in line.stretches if s.unit == unit)
        assert all(b[0] >= a[1] for a, b in pairwise(mine))
    for wg in (0, 1):
        for j in range(6):
            S, P, O = (at[what, wg, j] for what in "SPO")
            assert S.stop <= P.start and P.stop <= O.start
            assert j == 0 or at["O", wg, j - 1].stop <= O.start


def test_overlap_pays():
    """In the model: waiting for each other's softmax costs most; what has turns has no gap where softmax is short."""
    busy = {(way, d): overlap.run(way, overlap.budget(d)).busy for way in overlap.WAYS for d in (64, 128)}
    step, turns, under, both = overlap.WAYS
    cost = {d: overlap.budget(d) for d in (64, 128)}
    for d in (64, 128):
        alone = 2 * cost[d].product / (2 * cost[d].product + cost[d].softmax)
        assert busy[step, d] == pytest.approx(alone)
        assert busy[both, d] == pytest.approx(min(1, 2 * cost[d].product / cost[d].softmax))
        assert busy[step, d] < busy[under, d] < busy[both, d] == pytest.approx(busy[turns, d])


def test_timelines_are_drawn():
    figure = overlap.fig_timeline(overlap.data_timeline(64))
    assert len(figure.axes) == len(overlap.WAYS) and "44%" in figure.axes[0].get_title(loc="left")
