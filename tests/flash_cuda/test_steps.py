"""The SIMT steps against the oracle at the edges of their contract; the default cases are ``verify``'s own work."""

import importlib

import ml_dtypes
import numpy as np
import pytest

from flash_cuda.executors.emulator import Emulator
from flash_cuda.launch import THREADS, TILES, tile_for
from flash_cuda.parts.elements import bf16_bits
from refimpl import oracle
from refimpl.tiling import Tile

STEPS = ["step0_standard", "step1_fused", "step2_flash_v1", "step3_flash_v2", "step4_causal"]


SMALL = Tile(16, 16)  # four tiles each way at the sizes used here, on 16 threads


def call(step, Q, K, V, tile=SMALL, threads=(4, 4), **options):
    attention = importlib.import_module(f"flash_cuda.{step}").attention
    return attention(Q, K, V, on=Emulator(), tile=tile, threads=threads, **options)


def draw(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def assert_true(step, Q, K, V, tol=2e-6, **options):
    O, lse = call(step, Q, K, V, **options)
    options = {k: v for k, v in options.items() if k in ("scale", "causal", "align")}
    O_true, lse_true = oracle.attention(*(x.astype(np.float64) for x in (Q, K, V)), **options)
    assert O.shape == O_true.shape and O.dtype == Q.dtype
    assert lse.shape == lse_true.shape and lse.dtype == np.float32
    np.testing.assert_allclose(O.astype(np.float64), O_true, rtol=0, atol=tol, equal_nan=False)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(lse_true))
    seen = np.isfinite(lse_true)
    np.testing.assert_allclose(lse[seen], lse_true[seen], rtol=0, atol=2e-6, equal_nan=False)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("B, Hq, Hk, Nq, Nk, d, dv", [
    (0, 1, 1, 3, 3, 4, 4), (1, 1, 1, 0, 3, 4, 4), (1, 2, 1, 3, 0, 4, 4),  # nothing to do, nothing to see
    (1, 1, 1, 1, 1, 1, 1),
    (2, 4, 2, 17, 15, 3, 16), (1, 1, 1, 16, 33, 16, 5),  # GQA, dv != d both ways
])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "align": "top_left"}],
                         ids=["full", "causal", "top_left"])
def test_edges_of_the_shapes(step, B, Hq, Hk, Nq, Nk, d, dv, options):
    assert_true(step, *draw((B, Hq, Nq, d), (B, Hk, Nk, d), (B, Hk, Nk, dv)), **options)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("scale", [-0.7, 0.0, 3.0])
def test_any_scale(step, scale):
    assert_true(step, *draw((1, 1, 5, 8), (1, 1, 19, 8), (1, 1, 19, 8)), scale=scale, tol=5e-6)


@pytest.mark.parametrize("step", STEPS)
def test_a_hidden_nan_stays_hidden_and_a_visible_one_shows(step):
    """Key 7 holds NaN; under the causal mask rows 7 and later see it."""
    Q, K, V = draw((1, 1, 20, 4), (1, 1, 20, 4), (1, 1, 20, 4))
    clean, _ = call(step, Q, K, V, causal=True)
    for x in (K, V):
        x[0, 0, 7] = np.nan
        O, _ = call(step, Q, K, V, causal=True)
        np.testing.assert_array_equal(O[0, 0, :7], clean[0, 0, :7])
        assert np.isnan(O[0, 0, 7:]).all()
        x[0, 0, 7] = 0


@pytest.mark.parametrize("step", STEPS)
def test_any_strides(step):
    """Transposed, offset, reversed and expanded (stride 0) views are read as what they are."""
    (base,) = draw((1, 21, 2, 24))
    Q, K, V = (base[..., 8 * k : 8 * k + 8].transpose(0, 2, 1, 3) for k in range(3))  # one fused QKV buffer
    for arrays in ((Q, K, V), (Q[:, :, ::-1], K[:, :, 3:], V[:, :, 3:]),
                   (Q, np.broadcast_to(K[:, :1], K.shape), np.broadcast_to(V[:, :, :1], V.shape))):
        assert_true(step, *arrays, causal=True)


@pytest.mark.parametrize("step", STEPS[2:])
def test_tile_shapes_and_threads(step):
    """Br != Bc, one thread a row and many, one thread a block: the answer is the same."""
    arrays = draw((1, 1, 19, 6), (1, 1, 22, 6), (1, 1, 22, 6))
    for tile, threads in ((Tile(8, 24), (4, 8)), (Tile(24, 8), (8, 2)), (Tile(4, 4), (1, 1)), (Tile(16, 1), (16, 1))):
        assert_true(step, *arrays, causal=True, tile=tile, threads=threads)


def test_the_shipped_tile_is_emulated_too():
    """The configuration that a GPU gets at d = 64, with all its 128 threads."""
    arrays = draw((1, 1, 65, 64), (1, 1, 33, 64), (1, 1, 33, 64))
    assert_true("step4_causal", *arrays, tile=tile_for(64), threads=THREADS, causal=True)


def test_steps_2_to_4_agree_to_the_bit():
    """They do the same operations in the same order; only where the state is kept differs."""
    arrays = draw((1, 2, 37, 9), (1, 1, 41, 9), (1, 1, 41, 9))
    results = [call(step, *arrays, causal=True, trace=True) for step in STEPS[2:]]
    for O, lse, _ in results[1:]:
        np.testing.assert_array_equal(O, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])
    np.testing.assert_array_equal(results[0][2], results[1][2])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("step", STEPS)
def test_16_bit_storage_rounds_once(step, dtype):
    """O is the fp32 answer rounded once: within half a unit in the last place and fp32 noise of the truth."""
    Q, K, V = draw((1, 1, 9, 8), (1, 1, 20, 8), (1, 1, 20, 8), dtype=dtype)
    half_ulp = float(ml_dtypes.finfo(dtype).eps) / 2
    O_true, _ = oracle.attention(*(x.astype(np.float64) for x in (Q, K, V)))
    O, _ = call(step, Q, K, V)
    assert (np.abs(O.astype(np.float64) - O_true) <= half_ulp * np.abs(O_true) + 2e-6).all()


def test_bf16_rounding_in_integers():
    """The kernel's rounding of bits equals ml_dtypes' on random, tied, huge, tiny and non-finite numbers."""
    rng = np.random.default_rng(3)
    bits = np.concatenate([
        rng.integers(0, 2**32, 4000, dtype=np.uint64), np.arange(0x3F80_0000, 0x3F84_0000, 0x4000, dtype=np.uint64),
        np.array([0, 1, 0x8000_0000, 0x7F7F_FFFF, 0x7F80_0000, 0xFF80_0000, 0x7F80_0001, 0x7FFF_FFFF], np.uint64)])
    x = bits.astype(np.uint32).view(np.float32)
    got = np.array([int(bf16_bits(int(b))) for b in bits], np.uint16).view(ml_dtypes.bfloat16)
    with np.errstate(all="ignore"):
        want = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got[~np.isnan(got)].view(np.uint16), want[~np.isnan(want)].view(np.uint16))


def test_tiles_fit_their_threads():
    TY, TX = THREADS
    assert all(tile.Br % TY == 0 and tile.Bc % TX == 0 and D % TX == 0 for D, tile in TILES.items())


F32 = np.float32
GOOD = {"Q": (1, 2, 3, 4), "K": (1, 2, 5, 4), "V": (1, 2, 5, 4)}


@pytest.mark.parametrize("change, options, error, says", [
    ({"Q": (2, 3, 4)}, {}, ValueError, "Q: expected an array of shape"),
    ({"K": (2, 2, 5, 4)}, {}, ValueError, "K: expected batch 1, got 2"),
    ({"V": (2, 2, 5, 4)}, {}, ValueError, "V: expected batch 1, got 2"),
    ({"K": (1, 2, 5, 3)}, {}, ValueError, "K: expected head dim 4, got 3"),
    ({"V": (1, 2, 6, 4)}, {}, ValueError, "V: expected length 5, got 6"),
    ({"V": (1, 1, 5, 4)}, {}, ValueError, "V: expected heads 2, got 1"),
    ({"Q": (1, 3, 3, 4)}, {}, ValueError, "Q: expected a positive multiple of K's 2 heads, got 3"),
    ({"Q": (1, 0, 3, 4)}, {}, ValueError, "Q: expected a positive multiple"),
    ({"K": (1, 0, 5, 4), "V": (1, 0, 5, 4)}, {}, ValueError, "K's 0 heads"),
    ({"Q": (1, 2, 3, 0), "K": (1, 2, 5, 0)}, {}, ValueError, "Q: expected head dim 1 .. 256, got 0"),
    ({"Q": (1, 2, 3, 257), "K": (1, 2, 5, 257)}, {}, ValueError, "Q: expected head dim 1 .. 256, got 257"),
    ({"V": (1, 2, 5, 300)}, {}, ValueError, "V: expected head dim 1 .. 256, got 300"),
    ({"Q": np.zeros((1, 2, 3, 4), np.int8)}, {}, TypeError, "Q: expected dtype fp32, fp16, bf16, got int8"),
    ({"Q": np.zeros((1, 2, 3, 4))}, {}, TypeError, "Q: expected dtype fp32, fp16, bf16, got float64"),
    ({"K": np.zeros((1, 2, 5, 4), np.float16)}, {}, TypeError, "K: expected dtype fp32 like Q, got fp16"),
    ({"V": [1.0, 2.0]}, {}, ValueError, "V: expected an array"),
    ({}, {"scale": float("nan")}, ValueError, "scale: expected a finite number"),
    ({}, {"scale": float("inf")}, ValueError, "scale: expected a finite number"),
    ({}, {"scale": "small"}, TypeError, "scale: expected a number, got 'small'"),
    ({}, {"causal": True, "align": "left"}, ValueError, "align: expected"),
    ({}, {"tile": Tile(10, 16)}, ValueError, "tile: expected Br, Bc multiples of the threads"),
])
@pytest.mark.parametrize("step", STEPS[:1] + STEPS[3:4])
def test_bad_input_is_named_before_anything_runs(step, change, options, error, says):
    arrays = {name: np.zeros(x, F32) if isinstance(x, tuple) else x for name, x in (GOOD | change).items()}
    with pytest.raises(error, match=says.replace("(", r"\(")) as caught:
        call(step, **arrays, **options)
    assert "\n" not in str(caught.value)


def test_without_a_gpu_the_error_names_the_other_ways():
    from numba import cuda

    if cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(RuntimeError, match=r"emulator.*oracle"):
        importlib.import_module("flash_cuda.step3_flash_v2").attention(*draw(*GOOD.values()))
