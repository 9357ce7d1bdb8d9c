"""The default cases: seeded, exactly representable, small enough to emulate, and about what they say they are."""

import numpy as np
import pytest

from refimpl import oracle
from verify import plain
from verify.cases import DEFAULT, HAND_L, HAND_O, SMALL_TILE
from verify.dtypes import DTYPES

KERNEL_DTYPES = ("fp32", "fp16", "bf16")


def scores(problem):
    """fp64 scores, -inf where hidden, for each head."""
    scale = plain.resolve(problem.options["scale"], problem.shape.d)
    for *_, Q, K, _V, seen in plain.heads(problem):
        yield np.where(seen, scale * (Q.astype(float) @ K.T.astype(float)), -np.inf)


def row_maxima_by_tile(S, tile=SMALL_TILE):
    """Largest score of each row in each tile of keys, (rows, tiles)."""
    return np.stack([S[:, c : c + tile].max(axis=1) for c in range(0, S.shape[1], tile)], axis=1)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("case", DEFAULT.values(), ids=lambda case: case.id)
def test_case_builds_what_it_announces(case, dtype):
    """Shapes and storage type are as declared, and the same recipe gives the same arrays."""
    problem, again = case.build(dtype), case.build(dtype)
    assert problem.shape == case.small
    for x, y in zip((problem.Q, problem.K, problem.V), (again.Q, again.K, again.V), strict=True):
        assert x.dtype == DTYPES[dtype].numpy
        assert x.tobytes() == y.tobytes()
        assert np.abs(x.astype(float)[np.isfinite(x.astype(float))]).max(initial=0) < 65504


@pytest.mark.parametrize("case", DEFAULT.values(), ids=lambda case: case.id)
def test_case_is_small_enough_to_emulate(case):
    """Pure Python takes a microsecond or more a product, so a small shape has fewer than 50,000 of them."""
    s = case.small
    assert s.B * s.Hq * s.Nq * s.Nk * (s.d + s.dv) < 50_000


def test_a_seed_changes_the_values_and_ids_do_not_share_them():
    square = DEFAULT["square"]
    assert not np.array_equal(square.build("fp32", seed=0).Q, square.build("fp32", seed=1).Q)
    assert not np.array_equal(square.build("fp32").Q, DEFAULT["causal"].build("fp32").Q)


def test_types_hold_the_same_values_rounded():
    """fp16 inputs are the fp32 ones, rounded: results of the types can be compared."""
    wide, narrow = DEFAULT["square"].build("fp32"), DEFAULT["square"].build("fp16")
    assert np.array_equal(wide.Q.astype(np.float16), narrow.Q)


def test_hand_case_gives_the_fractions_worked_out_by_hand():
    problem = DEFAULT["hand"].build("fp64")
    O, lse = oracle.attention(problem.Q, problem.K, problem.V, **problem.options)
    np.testing.assert_allclose(O[0, 0], np.array(HAND_O, float), rtol=1e-15, atol=1e-15, strict=True)
    np.testing.assert_allclose(lse[0, 0], np.log(np.array(HAND_L, float)), rtol=1e-15, strict=True)


def test_ragged_cases_leave_a_ragged_tile_at_both_sizes():
    for case in DEFAULT.values():
        if case.id in ("113x203", "1023x1024", "1024x1023", "causal_113x203", "tile_less_1", "tile_plus_1"):
            assert any(n % SMALL_TILE for n in (case.small.Nq, case.small.Nk)), case.id
            assert any(n % 64 for n in (case.full.Nq, case.full.Nk)), case.id


def test_small_shapes_have_several_tiles_where_the_case_is_about_tiles():
    for name in ("square", "causal", "growing_max", "late_max", "ties", "logits_x10", "outliers", "head_dim_256"):
        assert DEFAULT[name].small.Nk > SMALL_TILE, name


def test_empty_rows_fill_a_whole_query_tile_and_part_of_another():
    case = DEFAULT["empty_rows"]
    empty = ~plain.visible(case.small.Nq, case.small.Nk, causal=True).any(axis=1)
    assert empty[:SMALL_TILE].all() and empty[SMALL_TILE] and not empty[2 * SMALL_TILE - 1]


def test_views_are_views():
    offset, fused, zero = (DEFAULT[name].build("fp16") for name in ("offset_view", "fused_qkv", "stride_0"))
    assert not offset.K.flags.c_contiguous and np.isnan(offset.K.base.astype(float)).any()
    assert fused.Q.base is fused.K.base is fused.V.base
    assert zero.Q.strides[0] == 0 and zero.K.strides[1] == 0


@pytest.mark.parametrize("small", (True, False))
def test_all_negative_scores_lie_below_every_stand_in_for_minus_infinity(small):
    for S in scores(DEFAULT["all_negative"].build("fp16", small)):
        top = S.max(axis=1)
        assert top.max() < -65504 - 200
        # Several keys share the maximum to the bit, in early tiles and late ones.
        assert (S[-1] == top[-1]).sum() > 3


@pytest.mark.parametrize("small", (True, False))
def test_growing_max_grows_from_tile_to_tile(small):
    for S in scores(DEFAULT["growing_max"].build("fp16", small)):
        grown = np.diff(row_maxima_by_tile(S, SMALL_TILE if small else 64), axis=1) > 0
        assert grown.mean() > 0.9


def test_late_max_is_the_last_key():
    for S in scores(DEFAULT["late_max"].build("fp16")):
        assert (S.argmax(axis=1) == S.shape[1] - 1).all()


def test_ties_repeat_the_maximum_with_other_values():
    problem = DEFAULT["ties"].build("fp16")
    for S in scores(problem):
        assert ((S.max(axis=1, keepdims=True) == S).sum(axis=1) == 3).all()
    assert len(np.unique(problem.V[0, 0, :, 0])) > 20


def test_large_values_overflow_fp16_before_the_division():
    problem = DEFAULT["large_values"].build("fp16")
    for S in scores(problem):
        sums = np.exp(S - S.max(axis=1, keepdims=True)) @ problem.V[0, 0].astype(float)
        assert sums.max() > 65504


def test_nan_hidden_stays_hidden_and_nan_seen_is_seen():
    hidden, seen = DEFAULT["nan_hidden"].build("fp16"), DEFAULT["nan_seen"].build("fp16")
    assert not hidden.finite and not seen.finite
    assert np.isfinite(oracle.attention(hidden.Q, hidden.K, hidden.V, **hidden.options)[0]).all()
    O, lse = oracle.attention(seen.Q, seen.K, seen.V, **seen.options)
    assert np.isnan(O).any(axis=-1).sum() == seen.shape.Nq // 2 and np.isnan(O).any(axis=(0, 1, 2)).sum() == 1
    assert np.isfinite(lse).all()
