"""Step 6, thread by thread on the emulator, against the oracle and against its twin in refimpl."""

import ml_dtypes
import numpy as np
import pytest

from flash_cuda.executors.emulator import Emulator
from flash_cuda.step6_flash_v3 import Shape, attention
from refimpl import oracle
from refimpl import step6_flash_v3 as twin
from refimpl.options import window
from refimpl.tiling import Tile
from verify.bytes import Setting, count_requested, evaluate, formula
from verify.cases import dense

FP16, BF16 = np.float16, ml_dtypes.bfloat16
BOUNDS = {FP16: 1e-3, BF16: 1e-2}  # of O, on N(0, 1); of lse 2e-6
ONE, TWO = Shape(64, 16, 64), Shape(128, 16, 64)  # one consumer warpgroup, and two


def draw(Nq, Nk, Hq=1, Hk=1, d=64, dv=None, kind=FP16, B=1):
    rng = np.random.default_rng([Nq, Nk, d])
    shapes = (B, Hq, Nq, d), (B, Hk, Nk, d), (B, Hk, Nk, dv or d)
    return [rng.standard_normal(shape).astype(kind) for shape in shapes]


def run(arrays, shape=ONE, seed=0, blocks=2, **options):
    on = Emulator(seed)
    on.multiprocessors = blocks
    return attention(*arrays, shape=shape, on=on, **options)


def assert_true(arrays, shape=ONE, blocks=2, **options):
    O, lse = run(arrays, shape, blocks=blocks, **options)
    O_true, lse_true = oracle.attention(*(x.astype(np.float64) for x in arrays), **options)
    kind = arrays[0].dtype
    assert (O.shape, O.dtype, lse.shape, lse.dtype) == (O_true.shape, kind, lse_true.shape, np.float32)
    np.testing.assert_allclose(O.astype(np.float64), O_true, rtol=0, atol=BOUNDS[kind.type], equal_nan=False)
    empty = np.isneginf(lse_true)
    assert (np.isneginf(lse) == empty).all() and (O[empty] == 0).all()
    np.testing.assert_allclose(lse[~empty], lse_true[~empty], rtol=0, atol=2e-6, equal_nan=False)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "align": "top_left"}],
                         ids=["full", "causal", "top_left"])
@pytest.mark.parametrize("sizes, shape, blocks", [
    ((70, 40, 2, 1), ONE, 2),  # two heads of two query tiles: seams within a block, grouped heads
    ((70, 110), TWO, 1),  # fewer queries than keys; the second warpgroup's rows end early
    ((150, 40), ONE, 1),  # more: with causal, two query tiles see no key at all
    ((1, 1), ONE, 2),
])
def test_lengths_and_heads(sizes, shape, blocks, options):
    assert_true(draw(*sizes), shape, blocks, **options)


@pytest.mark.parametrize("arrays, options", [
    (draw(80, 50, 2, 1, kind=BF16), {"causal": True}),
    (draw(90, 90), {"window": (20, 5)}),
    (draw(70, 50), {"window": (None, 3), "align": "top_left"}),
    (draw(40, 70), {"window": (12, None), "causal": True}),
    (draw(40, 30, kind=BF16), {"scale": -0.3}),
    (draw(40, 50), {"scale": 0.0, "causal": True}),
    (draw(20, 40, d=8, dv=16), {}),
    (draw(30, 40, 2, d=72, dv=128), {"causal": True}),
    (draw(33, 20, 2, 1, d=64, B=2), {"causal": True}),
], ids=lambda x: " ".join(map(str, x.items())) if isinstance(x, dict) else f"{x[0].shape}-{x[2].shape[3]}")
def test_options(arrays, options):
    D = 64 if max(x.shape[3] for x in arrays) <= 64 else 128
    assert_true(arrays, ONE._replace(D=D), **options)


@pytest.mark.parametrize("shape", [
    ONE._replace(k_stages=1, v_stages=1, q_stages=1), ONE._replace(k_stages=2, v_stages=3, q_stages=1),
    TWO._replace(turns=True), Shape(192, 16, 64, 3, 3, turns=True), Shape(64, 80, 64),
], ids=str)
def test_shapes(shape):
    """Buffers by number, warpgroups that take turns, a tile of K that is no power of two."""
    assert_true(draw(shape.Br + 9, 50), shape, 1, causal=True)


@pytest.mark.parametrize("d, options", [(64, {"softcap": 5.0}), (256, {"causal": True})], ids=str)
def test_the_shapes_for_what_takes_most_registers(d, options):
    assert_true(draw(70, 100, d=d), None, **options)


@pytest.mark.parametrize("kind", [FP16, BF16])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (30, 0)}], ids=str)
def test_it_rounds_where_its_twin_does(kind, options):
    """Nearly every bit of O is the twin's. The oracle, which rounds once, has two thirds of them."""
    arrays = draw(60, 60, kind=kind)
    O, lse = run(arrays, **options)
    rules = {"rules": window(*options["window"])} if "window" in options else options
    O_twin, lse_twin = twin.attention(*arrays, **rules, tile=Tile(64, 16), dtype=np.float32)
    O_true, _ = oracle.attention(*(x.astype(np.float64) for x in arrays), **options)
    same, same_as_truth = ((x.astype(kind) == O).mean() for x in (O_twin, O_true))
    assert same >= 0.99 and same_as_truth < 0.8
    assert np.abs(lse - lse_twin).max() <= 2e-6


def test_any_order_of_threads_gives_the_same_bits():
    arrays = draw(70, 40, 2, 1)
    results = [run(arrays, ONE, seed, causal=True) for seed in (None, 1, 2)]
    for O, lse in results[1:]:
        np.testing.assert_array_equal(O, results[0][0], strict=True)
        np.testing.assert_array_equal(lse, results[0][1], strict=True)


def test_blocks_and_buffers_change_no_bit():
    """Which block works on what, and how far ahead the copies run, is not arithmetic."""
    arrays = draw(70, 40, 2, 1)
    O, lse = run(arrays, causal=True, blocks=1)
    for shape, blocks in ((ONE, 4), (TWO._replace(k_stages=3, v_stages=1, q_stages=1), 3)):
        other = run(arrays, shape, blocks=blocks, causal=True)
        np.testing.assert_array_equal(other[0], O, strict=True)
        np.testing.assert_array_equal(other[1], lse, strict=True)


def test_views_that_the_copy_engine_takes():
    """Slices of one fused buffer, heads interleaved."""
    base = np.random.default_rng(0).standard_normal((2, 40, 3, 2, 16)).astype(FP16)
    assert_true([base[:, :, k].transpose(0, 2, 1, 3) for k in range(3)], causal=True)


@pytest.mark.parametrize("Nq, Nk", [(3, 0), (0, 5)])
def test_nothing_to_see_or_to_do(Nq, Nk):
    O, lse = run(draw(Nq, Nk))
    assert O.shape == (1, 1, Nq, 64) and not O.any() and (lse == -np.inf).all()


@pytest.mark.parametrize("setting", [
    Setting(dense(150, 40, d=8), causal=True, tile=Tile(64, 16)),
    Setting(dense(70, 50, H=2, Hk=1, d=8, dv=72), tile=Tile(64, 32)),
])
def test_requested_bytes(setting):
    """With several query tiles, one of which sees nothing and copies a tile all the same."""
    assert count_requested("step6_flash_v3", setting) == evaluate(formula("step6_flash_v3", "requested"), setting)


def test_a_bound_of_minus_one_is_none():
    """As everywhere; any other negative number is refused, and so is half a window."""
    arrays = draw(40, 50)
    for bounds, same in (((-1, -1), None), ((-1, 3), (None, 3)), ((5, -1), (5, None))):
        for one, other in zip(run(arrays, window=bounds), run(arrays, window=same), strict=True):
            np.testing.assert_array_equal(one, other, strict=True)
    for wrong, error in (((-2, 0), ValueError), ((1.5, 2), TypeError), (5, ValueError), ((1, 2, 3), ValueError)):
        with pytest.raises(error, match="window"):
            run(arrays, window=wrong)


@pytest.mark.parametrize("at", range(3))
def test_arrays_of_other_ranks_are_named(at):
    arrays = list(draw(5, 5))
    arrays[at] = arrays[at][0, 0]
    with pytest.raises(ValueError, match=f"{'QKV'[at]}: expected an array of shape"):
        run(arrays, None)


def test_bad_input_names_a_step_that_can():
    with pytest.raises(ValueError, match=r"V: expected a head dim that is a multiple of 8 .* got 12; step"):
        run(draw(5, 5, d=8, dv=12))
    with pytest.raises(TypeError, match=r"Q: expected dtype fp16 or bf16 .* got fp32; step4_causal"):
        run(draw(5, 5, kind=np.float32))
