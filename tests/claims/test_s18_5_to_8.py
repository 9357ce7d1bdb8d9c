"""What the entries of 18.5 to 18.8 and of the blog rest on: the listings' faults, one at a time, and the emulations."""

import numpy as np
import pytest

from verify.claims import listings_18_5, listings_18_6, listings_18_7, listings_18_8, s18_5_causal, s18_6_fp8
from verify.claims.ledger import load
from verify.claims.trial import TRIALS, judge_forward

GROUPS = ("18.5", "18.6", "18.7", "18.8", "blog")
MINE = {id: claim for id, claim in load().items() if claim.group in GROUPS}


def test_every_section_is_judged():
    sections = {claim.section for claim in MINE.values()}
    assert {f"18.{a}.{b}" for a, n in ((5, 3), (6, 4), (7, 4), (8, 4)) for b in range(1, n + 1)} <= sections
    assert sum(claim.group == "blog" for claim in MINE.values()) >= 25


@pytest.mark.parametrize("id", [id for id, claim in MINE.items() if claim.mended])
def test_a_mended_listing_passes_where_the_printed_one_fails(id):
    claim = MINE[id]
    printed = claim.recompute()
    assert printed.verdict in ("wrong", "depends")
    assert claim.mended() == claim.stated


# Which trials can see a fault of the v2 skeleton when the other three are repaired.
VISIBLE = {
    "scale": set(TRIALS),
    "row state": set(TRIALS),
    "head offset": {"several heads", "ragged both, Br != Bc"},
    "bounds": {"ragged keys", "ragged both, Br != Bc"},
}


@pytest.mark.parametrize("fault", listings_18_5.REPAIRS)
def test_each_fault_of_the_skeleton_is_enough_alone(fault):
    flags = {flag: name != fault for name, flag in listings_18_5.REPAIRS.items()}
    verdicts, _ = judge_forward(lambda *a: listings_18_5.skeleton(*a, **flags))
    assert {name for name, ok in verdicts.items() if not ok} == VISIBLE[fault]


def test_the_unified_kernel_leaks_the_future_only_where_several_tiles_straddle_the_diagonal():
    claim = MINE["18.5-094"]
    wrong = {name for name, ok in claim.recompute().value.items() if not ok}
    assert wrong == {"Br > Bc", "ragged both, Br != Bc"}


@pytest.mark.parametrize(
    ("q", "k", "kind"),
    [
        ((64, 128), (0, 64), "full"),
        ((64, 128), (0, 65), "full"),
        ((64, 128), (0, 66), "partial"),
        ((64, 128), (127, 200), "partial"),
        ((64, 128), (128, 200), "dead"),
    ],
)
def test_tile_classes_at_their_edges(q, k, kind):
    assert s18_5_causal.tile_class(q, k) == kind


def test_a_producer_without_an_empty_barrier_overwrites_a_tile():
    free, _ = listings_18_6._judged(lambda tile, consumed: True)
    held, _ = listings_18_6._judged(listings_18_6.waits_for_slot)
    assert free == {name: name == "one tile" for name in TRIALS}
    assert all(held.values())


def test_fp8_backward_fails_for_its_formula_and_not_for_its_rounding():
    t = listings_18_6.make(5, Nq=64, d=16)
    exact = listings_18_6.batched(listings_18_6.mended)(t.Q, t.K, t.V, t.dO, 16, 16)
    rounded = listings_18_6.batched(listings_18_6.mended, quantise=True)(t.Q, t.K, t.V, t.dO, 16, 16)
    printed = listings_18_6.batched(listings_18_6.kindly)(t.Q, t.K, t.V, t.dO, 16, 16)

    def off(got):
        return [np.sqrt(np.mean((g - e) ** 2) / np.mean(e**2)) for g, e in zip(got, exact, strict=True)]

    assert max(off(rounded)) < 0.1
    assert min(off(printed)) > 0.5


def test_block_quantisation_is_exact_on_its_own_codes():
    codes = np.float32([[448, -2, 0.5, 0.015625], [8, 16, -448, 0]])
    assert np.array_equal(s18_6_fp8.block_quantised(codes), codes)


def test_fp8_error_is_that_of_three_significant_bits():
    assert 0.03 < s18_6_fp8.fp8_error(64, 512)[1] < 0.08


def test_the_installation_check_of_the_chapter_sees_the_future_only():
    assert not listings_18_7.installation_check(lambda n: np.triu(np.ones((n, n)), 1))[0]["a right kernel passes"]
    assert listings_18_7.installation_check(np.tri)[0]["a right kernel passes"]


def test_the_sparse_loop_fails_inside_tiles_and_on_empty_rows_only():
    verdicts, _ = listings_18_8.judge_sparse(scaled=True, element_mask=False, guarded=False)
    assert {name for name, ok in verdicts.items() if ok} == {"whole tiles"}


def test_normalised_partial_outputs_do_not_merge_by_the_printed_formula():
    raw, _ = listings_18_8.judge_decode(scaled=True, bounded=True)
    norm, _ = listings_18_8.judge_decode(scaled=True, bounded=True, normalised=True)
    assert all(raw.values())
    assert not norm["four splits"]
    assert norm["one split"] is False  # a single normalised split is divided by l twice
