"""Step 5 lane by lane: the stand-ins of its instructions, its edges, and the mistakes that tensor cores invite."""

import inspect
from types import FunctionType

import ml_dtypes
import numpy as np
import pytest
from helpers_mutate import step_with
from numba import cuda
from numba.cuda.types import float32, uint16, uint32

from flash_cuda import ptx, step5_tensor_core
from flash_cuda.executors.emulator import Deadlock, DivergentWarp, Emulator
from flash_cuda.executors.memory import KernelFault, OutOfBounds, Race
from flash_cuda.ptx import copy_in, ldmatrix_x4, ldmatrix_x4_trans, mma_bf16, mma_f16, shfl_xor
from flash_cuda.ptx import global_memory as ptx_global
from flash_cuda.ptx import standins as ptx_standins
from flash_cuda.step5_tensor_core import Shape, attention
from refimpl import oracle
from refimpl import step5_tensor_core as twin
from refimpl.tiling import Tile

SMALL = Tile(16, 16)


def draw(*shapes, dtype=np.float16, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def truth(Q, K, V, **options):
    return oracle.attention(*(x.astype(np.float64) for x in (Q, K, V)), **options)


def assert_right(Q, K, V, attention=attention, tile=SMALL, shape=None, **options):
    """O within half an ulp of its type, plus what rounding the weights does, of the truth; lse within fp32."""
    O, lse = attention(Q, K, V, tile=None if shape else tile, shape=shape, on=Emulator(seed=1), **options)
    O_true, lse_true = truth(Q, K, V, **options)
    ulp = float(ml_dtypes.finfo(Q.dtype).eps)
    assert O.shape == O_true.shape and O.dtype == Q.dtype and lse.dtype == np.float32
    assert (np.abs(O.astype(np.float64) - O_true) <= ulp * np.abs(V.astype(np.float64)).max(initial=0)).all()
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(lse_true))
    seen = np.isfinite(lse_true)
    np.testing.assert_allclose(lse[seen], lse_true[seen], rtol=0, atol=2e-6, equal_nan=False)


def ours(body):
    """A kernel of this file, made one of ours, so that the emulator looks into it."""
    scope = body.__globals__ | {"__name__": "flash_cuda.test"}
    return FunctionType(body.__code__, scope, body.__name__, body.__defaults__, body.__closure__)


def launch(body, *arrays, out=(16, 16)):
    """Run a body on one warp with these inputs and an fp32 output; returns the output."""
    on = Emulator(seed=3)
    result = on.empty("out", out, np.dtype(np.float32))
    on.launch(ours(body), 1, 32, (*(on.input(f"x{k}", x) for k, x in enumerate(arrays)), result))
    return on.result(result)


# ---- instructions


def test_every_instruction_has_a_stand_in_with_its_parameters():
    assert len(ptx_standins.TABLE) > 15
    for instruction in ptx_standins.TABLE:
        name = instruction._name
        assert getattr(ptx, name, None) is instruction or getattr(ptx_global, name) is instruction
        theirs = list(inspect.signature(ptx_standins.TABLE[instruction]).parameters)
        assert ["typingctx", *theirs[1:]] == list(inspect.signature(instruction._defn).parameters), name
        assert "PTX:" in instruction._defn.__doc__, name


@pytest.mark.parametrize("mma, dtype", [(mma_f16, np.float16), (mma_bf16, ml_dtypes.bfloat16)])
def test_products_follow_the_published_lane_maps(mma, dtype):
    """A and C element by element, B^T by ldmatrix: the product of the matrices comes out."""

    def body(A, B, C, out):
        tile = cuda.shared.array(256, uint16)
        a, b, c = cuda.local.array(4, uint32), cuda.local.array(4, uint32), cuda.local.array(8, float32)
        t = cuda.threadIdx.x
        for k in range(8):
            copy_in(tile, 8 * t + k, B, t // 2, 8 * (t % 2) + k)
        cuda.syncthreads()
        # Rows of B are columns of the operand: keys 0-7 at two times 8 columns, then keys 8-15.
        ldmatrix_x4(b, 0, tile, 2 * (16 * (t % 8 + 8 * (t // 16)) + 8 * (t // 8 % 2)))
        for r in range(4):
            row, column = t // 4 + 8 * (r % 2), 2 * (t % 4) + 8 * (r // 2)
            a[r] = A[row, column] + 65536 * A[row, column + 1]
        for k in range(8):
            c[k] = C[t // 4 + 8 * (k // 2 % 2), 8 * (k // 4) + 2 * (t % 4) + k % 2]
        mma(c, 0, a, 0, b, 0)
        for k in range(8):
            out[t // 4 + 8 * (k // 2 % 2), 8 * (k // 4) + 2 * (t % 4) + k % 2] = c[k]

    A, B = draw((16, 16), (16, 16), dtype=dtype)
    (C,) = draw((16, 16), dtype=np.float32, seed=1)
    got = launch(body, A.view(np.uint16).astype(np.int64), B, C)
    np.testing.assert_allclose(got, C + A.astype(np.float64) @ B.astype(np.float64).T, rtol=1e-6, atol=1e-6)


def test_transposed_loads_give_columns():
    """Lane 4 g + t holds elements 2t and 2t + 1 of column g of each matrix; without .trans, of row g."""

    def body(X, out):
        tile = cuda.shared.array(256, uint16)
        r, t = cuda.local.array(8, uint32), cuda.threadIdx.x
        for k in range(8):
            copy_in(tile, 8 * t + k, X, t // 2, 8 * (t % 2) + k)
        cuda.syncthreads()
        ldmatrix_x4(r, 0, tile, 16 * t)  # matrix q: "rows" 8 q ... 8 q + 7 of 8 elements each
        ldmatrix_x4_trans(r, 4, tile, 16 * t)
        for k in range(8):
            out[t, 2 * k], out[t, 2 * k + 1] = r[k] % 65536, r[k] // 65536

    X = np.arange(256, dtype=np.uint16).reshape(16, 16)
    got = launch(body, X, out=(32, 16)).astype(int)
    matrices = X.reshape(4, 8, 8)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for q in range(4):
            assert list(got[lane, 2 * q : 2 * q + 2]) == list(matrices[q, g, 2 * t : 2 * t + 2])
            assert list(got[lane, 8 + 2 * q : 10 + 2 * q]) == list(matrices[q, 2 * t : 2 * t + 2, g])


def test_a_lane_that_stays_away_is_found():
    def alone(out):
        if cuda.threadIdx.x != 5:
            out[0, 0] = shfl_xor(float32(1.0), 1)

    def elsewhere(out):
        if cuda.threadIdx.x != 5:
            shfl_xor(float32(1.0), 1)
        else:
            shfl_xor(float32(1.0), 1)

    with pytest.raises(Deadlock, match=r"31 threads wait .* the rest of 32 threads at shfl"):
        launch(alone)
    with pytest.raises(DivergentWarp, match="comes to shfl"):
        launch(elsewhere)


# ---- the kernel


@pytest.mark.parametrize("B, Hq, Hk, Nq, Nk, d, dv", [
    (0, 1, 1, 3, 3, 8, 8), (1, 1, 1, 0, 3, 8, 8), (1, 2, 1, 3, 0, 8, 8),  # nothing to do, nothing to see
    (1, 1, 1, 1, 1, 1, 1), (2, 4, 2, 17, 15, 16, 16), (1, 1, 1, 16, 33, 8, 16), (1, 1, 1, 5, 20, 3, 40),
])  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "align": "top_left"}], ids=str)
def test_edges_of_the_shapes(B, Hq, Hk, Nq, Nk, d, dv, options):
    assert_right(*draw((B, Hq, Nq, d), (B, Hk, Nk, d), (B, Hk, Nk, dv)), **options)


@pytest.mark.parametrize("d, shape", [
    (64, Shape(64, 32, 32, True)), (128, Shape(32, 32, 16, False, True)), (96, Shape(32, 16, 32)),
    (32, Shape(48, 16, 16)), (192, Shape(16, 16, 16)), (256, Shape(16, 16, 16)), (32, Shape(32, 64, 32, True)),
])  # fmt: skip
def test_every_head_room_and_kind_of_block(d, shape):
    """One warp and more, a band of 16 rows each and two, Q in registers and not."""
    assert_right(*draw((1, 1, 35, d), (1, 1, 41, d), (1, 1, 41, d)), shape=shape, causal=True)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 3.0])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_any_scale(scale, dtype):
    assert_right(*draw((1, 1, 5, 16), (1, 1, 19, 16), (1, 1, 19, 16), dtype=dtype), scale=scale, causal=True)


def test_any_strides():
    """Rows by 16 bytes where they can be, padded or not, and by elements where not: the same answer, to the bit."""
    (base,) = draw((1, 21, 2, 48))
    Q, K, V = (base[..., 16 * k : 16 * k + 16].transpose(0, 2, 1, 3) for k in range(3))  # one fused QKV buffer
    want = attention(Q.copy(), K.copy(), V.copy(), tile=SMALL, on=Emulator())[0]
    turned = [x.transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2) for x in (Q, K, V)]
    off = np.empty((3, 1, 2, 21, 17), np.float16)[..., 1:]
    off[:] = Q, K, V
    for arrays in ((Q, K, V), turned, list(off)):
        np.testing.assert_array_equal(attention(*arrays, tile=SMALL, on=Emulator())[0], want)
    for arrays in ((Q[:, :, ::-1], K[:, :, 3:], V[:, :, 3:]),
                   (Q, np.broadcast_to(K[:, :1], K.shape), np.broadcast_to(V[:, :, :1], V.shape))):
        assert_right(*arrays, causal=True)


@pytest.mark.parametrize("change, fill", [
    (lambda x: x, "whole"), (lambda x: x[..., :8], "padded"), (lambda x: x[..., ::2], "single"),
    (lambda x: x[..., 1:9], "single"), (lambda x: x[:, :, ::-1], "whole"), (lambda x: x[..., :5], "single"),
])  # fmt: skip
def test_how_rows_are_copied(monkeypatch, change, fill):
    made = []
    original = step5_tensor_core.make_kernel
    monkeypatch.setattr(step5_tensor_core, "make_kernel", lambda *args: made.append(args) or original(*args))
    assert_right(*(change(x) for x in draw((1, 1, 9, 16), (1, 1, 9, 16), (1, 1, 9, 16))))
    assert [args[3] for args in made] == [fill]


def test_a_nan_past_what_a_tile_sees_is_not_touched():
    """Key 16 is in a tile that only the second query tile visits, key 33 in one that none does."""
    Q, K, V = draw((1, 1, 32, 16), (1, 1, 40, 16), (1, 1, 40, 16))
    clean, _ = attention(Q, K, V, causal=True, align="top_left", tile=SMALL, on=Emulator())
    for x in (K, V):
        x[0, 0, 16] = x[0, 0, 33] = np.nan
    O, _ = attention(Q, K, V, causal=True, align="top_left", tile=SMALL, on=Emulator())
    np.testing.assert_array_equal(O[0, 0, :16], clean[0, 0, :16])
    assert np.isnan(O[0, 0, 16:]).all()


def test_rounds_as_its_twin_does():
    """The weights' rounding to 16 bits is most of the error, and refimpl makes the same."""
    arrays = draw((1, 1, 32, 16), (1, 1, 64, 16), (1, 1, 64, 16), dtype=ml_dtypes.bfloat16)
    trace = attention(*arrays, tile=SMALL, on=Emulator(), trace=True)[2]
    got = trace[0, 0, -1, :, 2:] / trace[0, 0, -1, :, 1:2]
    same, _ = twin.attention(*arrays, tile=SMALL, dtype=np.float32)
    exact, _ = truth(*arrays)
    error = np.sqrt(np.mean((got - exact[0, 0]) ** 2))
    assert np.sqrt(np.mean((got - same[0, 0]) ** 2)) <= 0.1 * error and error > 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_the_kernel_of_later_gpus_has_the_same_bits(dtype):
    """From sm_100 on the compiler is handed registers in another way; here, that kernel on the GPU there is."""
    from flash_cuda.executors.gpu import Gpu

    class Later(Gpu):
        capability = 10, 0

    given = draw((1, 4, 200, 128), (1, 2, 300, 128), (1, 2, 300, 128), dtype=dtype)
    (O, lse), (O_later, lse_later) = (attention(*given, causal=True, on=on) for on in (Gpu(), Later()))
    assert np.array_equal(np.asarray(O).view(np.uint16), np.asarray(O_later).view(np.uint16))
    assert np.array_equal(np.asarray(lse), np.asarray(lse_later)) and np.isfinite(lse).all()


@pytest.mark.parametrize("change, error, says", [
    ({"dtype": np.float32}, TypeError, "expected dtype fp16 or bf16 for tensor cores, got fp32; step4_causal takes it"),
    ({"tile": Tile(16, 24)}, ValueError, r"tile: expected Br, Bc multiples of 16, got \(16, 24\)"),
    ({"tile": Tile(8, 16)}, ValueError, "tile: expected Br, Bc multiples of 16"),
    ({"d": 257}, ValueError, "Q: expected head dim 1 .. 256, got 257"),
])  # fmt: skip
def test_bad_input(change, error, says):
    d, dtype, tile = change.get("d", 8), change.get("dtype", np.float16), change.get("tile", SMALL)
    with pytest.raises(error, match=says):
        attention(*draw((1, 1, 3, d), (1, 1, 3, d), (1, 1, 3, d), dtype=dtype), tile=tile, on=Emulator())


@pytest.mark.parametrize("shape", [Shape(48, 16, 32), Shape(16, 16, 32), Shape(64, 16, 64)], ids=str)
def test_a_shape_whose_bands_do_not_fill_it_is_refused(shape):
    with pytest.raises(ValueError, match="shape: expected Br a multiple of a band of 16 or 32, got Br"):
        attention(*draw((1, 1, 3, 8), (1, 1, 3, 8), (1, 1, 3, 8)), shape=shape, on=Emulator())


def test_a_gpu_without_the_instructions_is_refused():
    class Older(Emulator):
        capability = 7, 5

    with pytest.raises(RuntimeError, match=r"compute capability 8\.0 or more, got 7\.5; step4_causal runs there"):
        attention(*draw((1, 1, 3, 8), (1, 1, 3, 8), (1, 1, 3, 8)), on=Older())


# ---- mistakes

WAIT = "            cp_async_wait()\n"
BARRIER = "            cuda.syncthreads()  # K_j and V_j are whole, and K_j-1 and V_j-1 have been read\n"
OPS = {
    "lanes of K in Q's order": ("place((t & 7) + ((t & 16) >> 1), (t >> 3) & 1)", "place(t & 15, (t & 31) >> 4)"),
    "V not transposed": ("ldmatrix_x4_trans(b, 0", "ldmatrix_x4(b, 0"),
    "swizzle added, not or-ed": ("tiles, (k_at ^ 32 * w)", "tiles, (k_at + 32 * w)"),
    "copied without swizzle": (
        "first = address_of(tile, at + place(r, chunk))", "first = address_of(tile, at + r * D + chunk * 8)"),
    "halves of P exchanged": ("= pack(p0, p1)", "= pack(p1, p0)"),
    "P's fragment of the other rows": ("p[2 * (a * NB + n) + r % 2]", "p[2 * (a * NB + n) + 1 - r % 2]"),
    "rescaled by the other row's alpha": ("alpha[2 * a + e // 2]", "alpha[2 * a + e % 2]"),
    "maximum of half the quad": ("            top = fmax(top, shfl_xor(top, 2))\n", ""),
    "sum of half the quad": ("return part + shfl_xor(part, 2)", "return part"),
    "mask of the row eight below": ("+ 8 * (e // 2), end)", ", end)"),
    "last row of the keys not repeated": ("+ a), int32(end - 1))", "+ a), int32(end))"),
}
STEP = {
    "copies not waited for": (WAIT, ""),
    "no barrier before the tiles are read": (BARRIER, ""),
    "the other stage is read": ("int32((j & 1) * STAGE)", "int32((1 - (j & 1)) * STAGE)"),
    "copied into the stage that is read": ("int32(V_AT + STAGE - at)", "int32(V_AT + at)"),
    "a warp leaves out a tile too many": ("row_w + 16 * M + reach", "row_w + 16 * M - 1 + reach"),
    "scale folded although negative": ("setting.fill, p.scale > 0", "setting.fill, p.scale != 0"),
}


def survives(module):
    """Whether a changed step gives right answers, without a fault, in all of a few small calls."""
    arrays = draw((1, 1, 32, 64), (1, 1, 49, 64), (1, 1, 49, 64), seed=2)
    calls = {"causal": True}, {}, {"causal": True, "align": "top_left", "scale": -0.2}
    try:
        for options in calls:
            assert_right(*arrays, attention=module.attention, shape=Shape(32, 16, 16, True), **options)
    except (KernelFault, AssertionError):
        return False
    return True


def test_the_step_itself_survives():
    assert survives(step_with("step5_tensor_core"))


@pytest.mark.parametrize("name", [*OPS, *STEP])
def test_a_mistake_is_seen(name):
    edits = ([STEP[name]], []) if name in STEP else ([], [OPS[name]])
    assert not survives(step_with("step5_tensor_core", *edits[0], tensor_ops=edits[1]))


def test_what_a_mistake_is_called():
    """A missing barrier is a race, a row past the end is out of bounds, a missing wait reads as NaN."""
    arrays = draw((1, 1, 16, 16), (1, 1, 40, 16), (1, 1, 40, 16))
    with pytest.raises(Race):
        step_with("step5_tensor_core", (BARRIER, "")).attention(*arrays, tile=Tile(48, 16), on=Emulator())
    with pytest.raises(OutOfBounds):
        step_with("step5_tensor_core", tensor_ops=[OPS["last row of the keys not repeated"]]).attention(
            *arrays, tile=SMALL, on=Emulator())
    late = ("        cp_async_wait()\n        cuda.syncthreads()  # Q_i", "        cuda.syncthreads()  # Q_i")
    O, lse = step_with("step5_tensor_core", (WAIT, ""), late).attention(*arrays, tile=SMALL, on=Emulator())
    assert np.isnan(O).all() and np.isnan(lse).all()
