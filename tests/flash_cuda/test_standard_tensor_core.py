"""Standard attention on tensor cores, lane by lane in the emulator: right at any size, and what barriers are for."""

import ml_dtypes
import numpy as np
import pytest
from helpers_clean import unclean
from helpers_mutate import step_with

from flash_cuda import standard_tensor_core
from flash_cuda.executors.assembler import Assembler, parse_arch
from flash_cuda.executors.emulator import Emulator
from flash_cuda.executors.memory import KernelFault
from flash_cuda.standard_tensor_core import attention
from refimpl import oracle
from refimpl import standard_tensor_core as twin
from refimpl.tiling import Tile
from verify import check
from verify.cases import DEFAULT

SMALL = Tile(16, 16)
# (Hq, Hk, Nq, Nk, d, dv), tile, dtype, options: ragged, grouped, padded and odd head dims, several warps, no keys.
SIZES = [
    ((1, 1, 33, 33, 16, 16), SMALL, np.float16, {"causal": True}),
    ((2, 1, 20, 45, 8, 24), Tile(32, 32), np.float16, {}),
    ((1, 1, 45, 17, 40, 5), SMALL, ml_dtypes.bfloat16, {"causal": True}),
    ((1, 1, 17, 40, 7, 16), Tile(64, 16), np.float16, {"causal": True, "align": "top_left"}),
    ((1, 1, 50, 29, 96, 8), Tile(64, 48), ml_dtypes.bfloat16, {"scale": -0.2}),
    ((1, 1, 3, 700, 16, 16), Tile(16, 64), np.float16, {"scale": 0.0}),
    ((1, 1, 20, 0, 8, 8), SMALL, np.float16, {}),
    ((1, 1, 0, 20, 8, 8), SMALL, np.float16, {}),
]


def draw(*shapes, dtype=np.float16, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def inputs(size, dtype=np.float16, B=1):
    Hq, Hk, Nq, Nk, d, dv = size
    return draw((B, Hq, Nq, d), (B, Hk, Nk, d), (B, Hk, Nk, dv), dtype=dtype)


def assert_right(arrays, O, lse, **options):
    """O within an ulp of its type at the largest value, lse within fp32, empty rows 0 and -inf."""
    O_true, lse_true = oracle.attention(*(x.astype(np.float64) for x in arrays), **options)
    assert O.shape == O_true.shape and O.dtype == arrays[0].dtype and lse.dtype == np.float32
    ulp = float(ml_dtypes.finfo(O.dtype).eps)
    assert (np.abs(O.astype(np.float64) - O_true) <= ulp * np.abs(arrays[2].astype(np.float64)).max(initial=0)).all()
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(lse_true))
    seen = np.isfinite(lse_true)
    np.testing.assert_allclose(lse[seen], lse_true[seen], rtol=0, atol=2e-6, equal_nan=False)


@pytest.mark.parametrize(("size", "tile", "dtype", "options"), SIZES)
def test_sizes(size, tile, dtype, options):
    arrays = inputs(size, dtype)
    assert_right(arrays, *attention(*arrays, tile=tile, on=Emulator(seed=1), **options), **options)


def test_any_strides():
    """Transposed, expanded and reversed views, element by element where rows cannot be copied by 16 bytes."""
    arrays = [np.swapaxes(x, 1, 2) for x in draw((1, 33, 1, 16), (1, 20, 1, 16), (1, 20, 1, 16))]
    arrays[1] = arrays[1][..., ::-1]
    arrays[2] = np.broadcast_to(arrays[2][:, :, :1], arrays[2].shape)
    assert_right(arrays, *attention(*arrays, tile=SMALL, on=Emulator()))


def test_what_no_row_sees_is_not_touched():
    Q, K, V = inputs((1, 1, 20, 60, 16, 16))
    hidden = K.copy(), V.copy()
    for x in hidden:
        x[:, :, 20:] = np.nan
    options = {"causal": True, "align": "top_left", "tile": SMALL}
    for x, y in zip(attention(Q, *hidden, on=Emulator(), **options), attention(Q, K, V, on=Emulator(), **options),
                    strict=True):  # fmt: skip
        np.testing.assert_array_equal(x, y)


def test_a_weight_of_every_row_is_rounded_once():
    """The twin in NumPy with fp32 sums gives the same O but for one rounding of sums in another order."""
    arrays = inputs((2, 1, 33, 45, 16, 16))
    O, lse = attention(*arrays, tile=SMALL, on=Emulator(), causal=True)
    O_twin, lse_twin = twin.attention(*arrays, tile=SMALL, causal=True, dtype=np.float32)
    assert (np.abs(O - O_twin) <= np.spacing(np.abs(O_twin).astype(np.float16))).all()
    np.testing.assert_allclose(lse, lse_twin, rtol=0, atol=2e-6, equal_nan=False)
    half = np.float32(0.5) * np.spacing(np.abs(O_twin).max().astype(np.float16))
    full, _ = twin.attention(*(x.astype(np.float32) for x in arrays), tile=SMALL, causal=True, dtype=np.float32)
    assert 0 < np.abs(O_twin - full).max() <= 8 * half  # the weights were rounded, and by little


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_narrow_scores_cost_the_lse_its_accuracy(dtype):
    """S in 16 bits: O within the default bounds, lse not; with S in fp32 both."""
    for wide in (True, False):

        def run(Q, K, V, wide=wide, **options):
            return attention(Q, K, V, tile=SMALL, on=Emulator(), wide_scores=wide, **options)

        found = check(run, DEFAULT["square"], dtype=dtype, small=True)
        assert found.outputs["O"].ok and found.outputs["lse"].ok == wide


def test_traffic_of_scores_in_16_bits():
    """Each array crosses as often, and S has half the bytes: counts do not change."""
    counts = []
    for wide in (True, False):
        on = Emulator()
        attention(*inputs((1, 1, 33, 45, 16, 16)), tile=SMALL, on=on, wide_scores=wide)
        counts.append(on.counts)
    assert counts[0] == counts[1] and counts[0]["S"] == (2 * 33 * 48, 33 * 48)
    assert counts[0]["weights"] == (3 * 3 * 16 * 16, 33 * 48)


@pytest.mark.parametrize("line", [
    "cuda.syncthreads()  # Q_i and K_j are whole before anyone reads them",
    "cuda.syncthreads()  # P_ij and V_j are whole, and those before have been read",
    "cuda.syncthreads()  # the last tiles have been read: O_i may take their place",
    "cuda.syncthreads()  # O_i is whole",
])  # fmt: skip
def test_every_barrier_is_needed(line):
    arrays = inputs((1, 1, 32, 48, 16, 16))
    broken = step_with("standard_tensor_core", (line, ""))
    with pytest.raises(KernelFault):
        broken.attention(*arrays, tile=Tile(32, 16), on=Emulator(seed=2))


@pytest.mark.parametrize("edit", [
    ("product.mask(s, row0, int32(j * Bc), seen, diag)", ""),
    ("l *= ex2(m - base)\n                for u", "for u"),
    ("range(5):\n                top =", "range(4):\n                top ="),
    ("ex2(x[u] - base) * share", "ex2(x[u] - base)"),
    ("p_at + 2 * now * P_SIZE", "p_at"),
    ("4 * (a * NB + n) + 2 * e", "4 * (a * NB + n) + 2 * (1 - e)"),
])  # fmt: skip
def test_faults_are_seen(edit):
    arrays = inputs((1, 1, 16, 600, 16, 16))
    with pytest.raises((AssertionError, KernelFault)):
        assert_right(arrays, *step_with("standard_tensor_core", edit).attention(
            *arrays, tile=Tile(16, 32), on=Emulator(), causal=True), causal=True)  # fmt: skip


def test_bad_input():
    Q, K, V = inputs((1, 1, 16, 16, 16, 16))
    with pytest.raises(TypeError, match=r"Q: expected dtype fp16 or bf16 .* step0_standard takes it"):
        attention(*(x.astype(np.float32) for x in (Q, K, V)), on=Emulator())
    with pytest.raises(ValueError, match="tile: expected Br, Bc multiples of 16"):
        attention(Q, K, V, tile=Tile(16, 24), on=Emulator())
    old = Emulator()
    old.capability = 7, 5
    with pytest.raises(RuntimeError, match=r"compute capability 8.0 or more, got 7.5; step0_standard runs there"):
        attention(Q, K, V, on=old)


def assembles_clean(d, dtype, *archs, **options):
    on, X = Assembler(*archs), np.zeros((1, 2, 100, d), dtype)
    on.capability = min(parse_arch(arch)[:2] for arch in archs)
    standard_tensor_core.attention(X, X, X, causal=True, on=on, **options)
    assert len(on.reports) == 3 * len(archs)
    assert not unclean(on.reports)


def test_it_assembles_clean():
    assembles_clean(64, np.float16, "sm_90a")


@pytest.mark.slow
@pytest.mark.parametrize("d", [8, 32, 80, 96, 113, 128, 192, 256])
def test_it_assembles_clean_at_every_head_dim(d):
    assembles_clean(d, ml_dtypes.bfloat16 if d % 64 else np.float16, "sm_80", "sm_86", "sm_90a", wide_scores=d != 128)
    if d % 64 == 0:
        assembles_clean(d, np.float16, "sm_100", "sm_120")
