"""What an observer sees: the online softmax of steps 2 to 4 is one and the same, tile by tile."""

import numpy as np
import pytest

from refimpl.observe import Observer, Tally, Trace
from refimpl.tiling import Tile, cdiv

TILE = Tile(6, 5)


def traced(module, draw, **options):
    """Run a step on 2 x 4 heads of 20 rows by 23 keys; return its visits by tile, and O and lse."""
    Q, K, V, _ = draw(20, 23, 2, 4, 2, d=7, dv=3)
    trace = Trace()
    O, lse = module.attention(Q, K, V, tile=TILE, observe=trace, **options)
    visits = {(v.b, v.h, v.i, v.j): v for v in trace.visits}
    assert len(visits) == len(trace.visits)
    return visits, O, lse


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("causal", [False, True])
def test_states_are_equal(ladder, draw, causal, dtype):
    """m, l, O_acc after every tile: equal to the bit in steps 2, 3 and 4, whatever the loop order."""
    v1, v2, v4 = (
        traced(ladder[name], draw, causal=causal, dtype=dtype)[0]
        for name in ("step2_flash_v1", "step3_flash_v2", "step4_causal")
    )
    assert len(v1) == 2 * 4 * cdiv(20, 6) * cdiv(23, 5)
    assert v1.keys() == v2.keys()
    assert v4.keys() <= v2.keys()
    assert (len(v4) < len(v2)) == causal
    for other in (v1, v4):
        for tile, visit in other.items():
            for x, y in zip(visit[4:], v2[tile][4:], strict=True):
                assert x.dtype == dtype
                assert np.array_equal(x, y)


def test_a_product_that_is_added_later_changes_no_bit(ladder, draw):
    """Step 6 adds P V one tile later than step 5, and rescales before and after just as often."""
    arrays = [x.astype(np.float16) for x in draw(20, 23, 2, 4, 2, d=7, dv=3)[:3]]
    runs = []
    for name in ("step5_tensor_core", "step6_flash_v3"):
        trace = Trace()
        outputs = ladder[name].attention(*arrays, causal=True, tile=TILE, observe=trace, dtype=np.float32)
        runs.append((outputs, sorted(trace.visits, key=lambda visit: visit[:4])))
    for x, y in zip(runs[0][0], runs[1][0], strict=True):
        assert np.array_equal(x, y)
    for before, after in zip(runs[0][1], runs[1][1], strict=True):
        assert before[:4] == after[:4]
        assert all(np.array_equal(x, y) for x, y in zip(before[4:], after[4:], strict=True))


def test_state_is_what_it_says(ladder, draw):
    """m is the largest score so far, l and O_acc are the sums of exp(s - m) and exp(s - m) v."""
    visits, _, _ = traced(ladder["step3_flash_v2"], draw, scale=0.5)
    Q, K, V, _ = draw(20, 23, 2, 4, 2, d=7, dv=3)
    for (b, h, i, j), visit in visits.items():
        keys = slice(0, min(23, 5 * j + 5))
        S = 0.5 * Q[b, h, 6 * i : 6 * i + 6] @ K[b, h // 2, keys].T
        P = np.exp(S - S.max(axis=1, keepdims=True))
        assert visit.m.shape == visit.l.shape == (len(S),)
        assert np.abs(visit.m - S.max(axis=1)).max() <= 1e-14
        assert np.abs(visit.l - P.sum(axis=1)).max() <= 1e-13
        assert np.abs(visit.O_acc - P @ V[b, h // 2, keys]).max() <= 1e-13


def test_last_state_is_the_answer(step, draw):
    """O = O_acc / l and lse = m + log l on the last visit of a row; step 0 holds neither m nor l by then."""
    visits, O, lse = traced(step, draw)
    last = cdiv(23, 5) - 1
    for b, h, i in np.ndindex(2, 4, cdiv(20, 6)):
        visit, rows = visits[b, h, i, last], slice(6 * i, 6 * i + 6)
        if visit.m is None:
            assert step.__name__.endswith("step0_standard")
            assert np.array_equal(visit.O_acc, O[b, h, rows])
            continue
        assert np.abs(visit.O_acc / visit.l[:, None] - O[b, h, rows]).max() <= 1e-15
        assert np.abs(visit.m + np.log(visit.l) - lse[b, h, rows]).max() <= 1e-15


def order_of(module, draw):
    """The tiles of the first head, as they come."""
    Q, K, V, _ = draw(12, 15)
    trace = Trace()
    module.attention(Q, K, V, tile=TILE, observe=trace)
    return [(v.i, v.j) for v in trace.visits]


def test_loop_orders(ladder, draw):
    """Step 2 has K and V outside, step 3 has Q outside."""
    assert order_of(ladder["step2_flash_v1"], draw) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert order_of(ladder["step3_flash_v2"], draw) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_only_live_tiles(ladder, draw):
    """Step 4 visits the tiles in which a row sees a key, no more, under causal and a mask together."""
    rng = np.random.default_rng(2)
    mask = np.repeat(np.repeat(rng.random((4, 5)) < 0.6, 6, axis=0), 5, axis=1)[:20, :23]
    mask[7, 1] = ~mask[7, 1]
    # One tile on the diagonal in which the mask leaves only what causal takes away.
    mask[6:12, 10:15] = False
    mask[6, 10:15] = [False, False, False, False, True]
    visits, _, _ = traced(ladder["step4_causal"], draw, causal=True, mask=mask)
    seen = mask & (np.arange(23) <= np.arange(20)[:, None] + 3)
    live = {(i, j) for i in range(4) for j in range(5) if seen[6 * i : 6 * i + 6, 5 * j : 5 * j + 5].any()}
    assert {(i, j) for _, _, i, j in visits} == live
    assert 0 < len(live) < 20


def test_full_tiles_are_not_masked(ladder, draw, monkeypatch):
    """Step 4 evaluates the mask on edge tiles alone; step 3 on all."""
    from refimpl.heads import Head

    asked = []
    monkeypatch.setattr(Head, "visible", lambda self, rows, cols: asked.append((rows, cols)) or True)
    Q, K, V, _ = draw(12, 12)
    for name, count in (("step3_flash_v2", 9), ("step4_causal", 3)):
        asked.clear()
        ladder[name].attention(Q, K, V, causal=True, tile=Tile(4, 4))
        assert len(asked) == count
    assert all(rows == cols for rows, cols in asked)


def test_a_trace_keeps_copies():
    """What a step does to its arrays after a visit does not change the visit."""
    trace, m = Trace(), np.zeros(2)
    trace.visit(0, 0, 0, 0, m, m, m[:, None])
    m[:] = 1
    assert not trace.visits[0].m.any()
    assert not trace.visits[0].O_acc.any()


def test_observers_combine(ladder, draw):
    """A class may trace and tally at once; the plain Observer hears all and keeps nothing."""

    class Both(Trace, Tally):
        pass

    Q, K, V, _ = draw(12, 15)
    both = Both()
    ladder["step3_flash_v2"].attention(Q, K, V, tile=TILE, observe=both)
    assert len(both.visits) == 6
    assert both.loads["Q"] == 12 * 5
    ladder["step3_flash_v2"].attention(Q, K, V, observe=Observer())
