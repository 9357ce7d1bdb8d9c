"""The backward kernels on tensor cores lane by lane: their edges, that they repeat, and the mistakes they invite."""

import ml_dtypes
import numpy as np
import pytest
from helpers_clean import unclean
from helpers_mutate import step_with

from flash_cuda import backward_hopper, backward_tensor_core
from flash_cuda.backward_tensor_core import attention_backward
from flash_cuda.executors.assembler import Assembler, assemble, numba_type, parse_arch, resources
from flash_cuda.executors.emulator import Emulator
from flash_cuda.executors.memory import KernelFault
from flash_cuda.launch import storage
from flash_cuda.parts.backward_tensor_shapes import (
    KEYS,
    KEYS_ALONE,
    KEYS_BEFORE_90,
    KEYS_FROM_100,
    QUERIES,
    Shape,
    fitting,
    usable,
)
from flash_cuda.parts.tensor_gradient_ops import sharing
from refimpl import oracle
from refimpl.tiling import Tile
from verify import judge
from verify.case import Problem

SMALL = {"keys": Shape(32, 16), "queries": Shape(32, 16)}
NAMES = "dQ", "dK", "dV"
BF16 = ml_dtypes.bfloat16


def draw(B=1, Hq=1, Hk=1, Nq=19, Nk=35, d=16, dv=None, dtype=np.float16, seed=0):
    """Q, K, V and dO."""
    rng, dv = np.random.default_rng(seed), dv or d
    shapes = (B, Hq, Nq, d), (B, Hk, Nk, d), (B, Hk, Nk, dv), (B, Hq, Nq, dv)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def backward(Q, K, V, dO, *, module=None, vector=False, seed=1, dlse=None, deterministic=True, shapes=SMALL, **options):
    """The gradients on the emulator, after a forward pass in fp64; ``vector`` as on an sm_90."""
    O, lse = oracle.attention(*(x.astype(np.float64) for x in (Q, K, V)), **options)
    on = Emulator(seed)
    if vector:
        on.capability = (9, 0)
    *gradients, dbias = (module or backward_tensor_core).attention_backward(
        Q, K, V, O.astype(Q.dtype), lse.astype(np.float32), dO, dlse=dlse, deterministic=deterministic, on=on, **shapes,
        **options)  # fmt: skip
    assert dbias is None
    return gradients


def assert_right(Q, K, V, dO, *, module=None, vector=False, deterministic=True, shapes=SMALL, **options):
    """Each gradient within twice the plain formula's error and what `verify.gradient_tolerance` derives."""
    problem = Problem(Q, K, V, {"scale": None, "causal": False, "align": "bottom_right"} | options,
                      dtype=storage("Q", Q))
    known = judge.reference(problem, dO)
    got = backward(Q, K, V, dO, module=module, vector=vector, deterministic=deterministic, shapes=shapes, **options)
    for name, x in zip(NAMES, got, strict=True):
        assert x.shape == known.anchors[name].truth.shape and x.dtype == Q.dtype
        found = judge.measure(name, x, known, problem.dtype)
        assert found.ok, judge.explain("this", {name: found})


EITHER = pytest.mark.parametrize("deterministic", [True, False])


@EITHER
@pytest.mark.parametrize("B, Hq, Hk, Nq, Nk, d, dv", [
    (0, 1, 1, 3, 3, 8, 8), (1, 1, 1, 0, 3, 8, 8), (1, 2, 1, 3, 0, 8, 8),  # nothing to do, nothing to see
    (1, 1, 1, 1, 1, 1, 1), (2, 2, 1, 17, 33, 16, 16), (1, 1, 1, 16, 32, 8, 16), (1, 1, 1, 5, 20, 3, 40),
])  # fmt: skip
def test_edges_of_the_shapes(B, Hq, Hk, Nq, Nk, d, dv, deterministic):
    for options in {}, {"causal": True}, {"causal": True, "align": "top_left"}:
        assert_right(*draw(B, Hq, Hk, Nq, Nk, d, dv), deterministic=deterministic, **options)


@EITHER
@pytest.mark.parametrize("seed", range(5))
def test_random_shapes(seed, deterministic):
    rng = np.random.default_rng([seed, 5])
    Hk, (Nq, Nk), (d, dv) = int(rng.integers(1, 3)), rng.integers(1, 40, 2), rng.integers(1, 33, 2)
    options = {"causal": bool(rng.integers(2)), "align": ("bottom_right", "top_left")[rng.integers(2)]}
    options["scale"] = [None, -0.4, 0.0, 1.5][rng.integers(4)]
    arrays = draw(1, Hk * int(rng.integers(1, 3)), Hk, Nq, Nk, d, dv, (np.float16, BF16)[seed % 2], seed)
    shape = Shape(*((16, 16), (32, 32, 32), (64, 16, 32, True), (48, 32))[rng.integers(4)])
    assert_right(*arrays, deterministic=deterministic, vector=bool(rng.integers(2)),
                 shapes={"keys": shape, "queries": shape}, **options)  # fmt: skip


@EITHER
@pytest.mark.parametrize("d, shape", [
    (64, Shape(64, 32, 32, True)), (128, Shape(32, 32, 16, False, True)), (96, Shape(32, 16, 32)), (192, Shape(16, 16)),
    (256, Shape(16, 16)),
])  # fmt: skip
def test_every_head_room_and_kind_of_block(d, shape, deterministic):
    """Bands of 16 rows and of 32, fragments in registers and not; above d = 128 dK and dV apart."""
    arrays = draw(Nq=35, Nk=17, d=d, dtype=(np.float16, BF16)[deterministic])
    assert_right(*arrays, causal=True, deterministic=deterministic, shapes={"keys": shape, "queries": shape})


@EITHER
def test_a_gradient_of_lse(deterministic):
    """It adds P dlse to dS. The limits are those of `verify.gradient_tolerance`, of a dS with that in it."""
    arrays = draw(dtype=BF16)
    dlse = np.random.default_rng(2).standard_normal((1, 1, 19)).astype(np.float32)
    Q, K, V, dO = (x[0, 0].astype(np.float64) for x in arrays)
    true = oracle.attention_backward(*(x.astype(np.float64) for x in arrays), dlse=dlse.astype(np.float64))
    got = backward(*arrays, dlse=dlse, deterministic=deterministic)
    P, ulp = np.exp(Q @ K.T / 4), 2.0**-7
    P /= P.sum(1, keepdims=True)
    O, dP = P @ V, dO @ V.T
    dS = P * np.abs(dP - (dO * O).sum(1, keepdims=True) + dlse[0, 0, :, None])
    dS = 2 * ulp * dS + P * ulp / 2 * np.abs(dO * O).sum(1, keepdims=True)  # rounded; and D from a rounded O
    limits = (dS @ np.abs(K) / 4).max(), (dS.T @ np.abs(Q) / 4).max(), 2 * ulp * (P.T @ np.abs(dO)).max()
    for x, want, limit in zip(got, true, limits, strict=False):
        assert (np.abs(x.astype(np.float64) - want) <= limit).all()
    assert np.abs(true[0][0, 0] - oracle.attention_backward(*arrays)[0]).max() > 3 * limits[0]


def test_the_same_bits_in_any_order():
    """Of threads and blocks: all gradients if asked for, else dK and dV, and dQ within the order of fp32 sums."""
    arrays, options = draw(Hq=2, Nq=17, Nk=35), {"causal": True}
    first, *others = [backward(*arrays, seed=seed, **options) for seed in (None, 1)]
    for other in others:
        for x, y in zip(first, other, strict=True):
            np.testing.assert_array_equal(x.view(np.uint16), y.view(np.uint16))
    for vector in (False, True):
        dQ, *rest = backward(*arrays, seed=3, deterministic=False, vector=vector, **options)
        for x, y in zip(first[1:], rest, strict=True):
            np.testing.assert_array_equal(x.view(np.uint16), y.view(np.uint16))
        np.testing.assert_allclose(dQ.astype(float), first[0].astype(float), rtol=2.0**-10, atol=1e-6)


def test_any_strides():
    """Rows by 16 bytes where they can be and by elements where not: the same answer, to the bit."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal((1, 21, 2, 64)).astype(np.float16)
    arrays = [base[..., 16 * k : 16 * k + 16].transpose(0, 2, 1, 3) for k in range(4)]  # one fused buffer
    want = backward(*(x.copy() for x in arrays))
    turned = [x.transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2) for x in arrays]
    off = np.empty((4, 1, 2, 21, 17), np.float16)[..., 1:]
    off[:] = arrays
    for given in (arrays, turned, list(off)):
        for x, y in zip(backward(*given), want, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("change, fill", [
    (lambda x: x, "whole"), (lambda x: x[..., :8], "padded"), (lambda x: x[..., ::2], "single"),
    (lambda x: x[..., 1:9], "single"), (lambda x: x[..., :5], "single"),
])  # fmt: skip
def test_how_rows_are_copied(monkeypatch, change, fill):
    made = []
    original = backward_tensor_core.make_keys_kernel
    monkeypatch.setattr(backward_tensor_core, "make_keys_kernel", lambda *args: made.append(args) or original(*args))
    assert_right(*map(change, draw(Nq=9, Nk=9)), deterministic=False)
    assert [args[3] for args in made] == [fill]


@EITHER
def test_keys_that_no_query_sees_are_not_touched(deterministic):
    """Keys 20 ... of 40 are past the last query; what they hold reaches nothing, and their gradients are 0."""
    Q, K, V, dO = draw(Nq=20, Nk=40)
    options = {"causal": True, "align": "top_left", "deterministic": deterministic}
    want = backward(Q, K, V, dO, **options)
    K[0, 0, 20:], V[0, 0, 20:] = np.nan, np.inf
    for x, y in zip(backward_of_clean(Q, K, V, dO, **options), want, strict=True):
        np.testing.assert_array_equal(x, y)
    assert not want[1][0, 0, 20:].any() and not want[2][0, 0, 20:].any()


def backward_of_clean(Q, K, V, dO, deterministic, **options):
    """As `backward`, the forward pass with zeros in the place of what is not finite."""
    clean = [np.nan_to_num(x.astype(np.float64), nan=0, posinf=0) for x in (Q, K, V)]
    O, lse = oracle.attention(*clean, **options)
    return attention_backward(Q, K, V, O.astype(Q.dtype), lse.astype(np.float32), dO, on=Emulator(1),
                              deterministic=deterministic, **SMALL, **options)[:3]  # fmt: skip


@pytest.mark.parametrize("change, error, says", [
    ({"Q": np.float32, "K": np.float32, "V": np.float32}, TypeError,
     "Q: expected dtype fp16 or bf16 for tensor cores, got fp32; backward takes it"),
    ({"dO": BF16}, TypeError, "dO: expected dtype fp16, got bf16"),
    ({"lse": np.float64}, TypeError, "lse: expected dtype fp32, got float64"),
    ({"keys": Shape(24, 16)}, ValueError, r"keys: expected rows a multiple .* got \(24, 16, 16\)"),
    ({"queries": Shape(32, 48)}, ValueError, r"queries: expected .* a power of two from 16 on, got \(32, 48, 16\)"),
    ({"tile": Tile(48, 16)}, ValueError, r"keys: expected .* a power of two from 16 on, got \(16, 48, 16\)"),
    ({"O": (1, 1, 19, 8)}, ValueError, r"O: expected shape \(1, 1, 19, 16\), got \(1, 1, 19, 8\)"),
    ({"dlse": (1, 19)}, ValueError, r"dlse: expected shape \(1, 1, 19\), got \(1, 19\)"),
])  # fmt: skip
def test_bad_input(change, error, says):
    Q, K, V, dO = draw()
    arrays = {"Q": Q, "K": K, "V": V, "O": dO, "lse": np.zeros(Q.shape[:3], np.float32), "dO": dO}
    for name, new in change.items():
        if isinstance(new, Shape | Tile):
            arrays[name] = new
        else:
            arrays[name] = np.zeros(new, np.float32 if name == "dlse" else np.float16) if isinstance(new, tuple) else (
                arrays[name].astype(new))  # fmt: skip
    with pytest.raises(error, match=says):
        attention_backward(**arrays, on=Emulator())


@pytest.mark.parametrize("options", [{}, {"window": (2, 0)}], ids=["plain", "rules"])
def test_queries_that_are_no_array_are_named(options):
    Q, K, V, dO = draw(Nq=3, Nk=3)
    with pytest.raises(TypeError, match="Q: expected dtype fp32, fp16, bf16, got list"):
        attention_backward(Q.tolist(), K, V, dO, np.zeros((1, 1, 3), np.float32), dO, on=Emulator(), **options)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window": (5, 0)}], ids=["plain", "rules"])
def test_what_reaches_lse_of_a_row_without_keys_goes_nowhere(options, deterministic):
    """The gradient of lse**2 is -inf there, and that of a merge of two such rows NaN."""
    Q, K, V, dO = draw(Nq=20, Nk=12)
    O, lse = oracle.attention(*(x.astype(float) for x in (Q, K, V)), **options)
    found = []
    for fill in (0.0, -np.inf, np.nan):
        dlse = np.where(np.isneginf(lse), fill, 1.0).astype(np.float32)
        more = options | {"dlse": dlse, "deterministic": deterministic, "on": Emulator()}
        found.append(attention_backward(Q, K, V, O.astype(Q.dtype), lse.astype(np.float32), dO, **more)[:3])
    for other in found[1:]:
        for x, y in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_gpu_of_another_generation_is_sent_to_what_runs_there():
    on, (Q, K, V, dO) = Emulator(), draw(Nq=1, Nk=1)
    on.capability = (7, 5)
    with pytest.raises(RuntimeError, match=r"on: expected .* 8.0 or more, got 7.5; backward runs there"):
        attention_backward(Q, K, V, dO, np.zeros((1, 1, 1), np.float32), dO, on=on)
    on.capability = (10, 0)
    with pytest.raises(RuntimeError, match=r"on: expected .* 9.x, got 10.0; backward_tensor_core runs there"):
        backward_hopper.attention_backward(Q, K, V, dO, np.zeros((1, 1, 1), np.float32), dO, on=on)


def test_tiles_of_the_callers_choice(monkeypatch):
    """Keys are the rows of one kernel, queries of the other."""
    made = []
    for name in ("make_keys_kernel", "make_queries_kernel"):
        original = getattr(backward_tensor_core, name)
        monkeypatch.setattr(
            backward_tensor_core, name, lambda *args, original=original: made.append(args[0][:3]) or original(*args))
    assert_right(*draw(), shapes={"tile": Tile(32, 64)})
    assert made == [(64, 32, 16), (32, 64, 16)]


@pytest.mark.parametrize("C, D, warps", [(16, 16, 8), (64, 96, 8), (64, 128, 8), (32, 256, 4), (128, 64, 8)])
def test_warps_share_a_product(C, D, warps):
    """Every 16 queries by 16 columns of dQ belong to one warp."""
    WQ, WC = sharing(C, D, warps)
    assert C // 16 % WQ == 0 and D // 16 % WC == 0 and 1 <= WQ * WC <= warps


@pytest.mark.parametrize("D", KEYS)
@pytest.mark.parametrize("limit", [227, 163, 99])
def test_blocks_fit_the_shared_memory_that_there_is(D, limit):
    """On an H200 as chosen; with less, the tiles walked over shrink first."""
    for table in (KEYS, KEYS_ALONE, KEYS_BEFORE_90, KEYS_FROM_100, QUERIES):
        keys = table is not QUERIES
        shape = fitting(table[D], D, keys, 1024 * limit)
        assert shape.shared_bytes(D, keys) + 16 * shape.columns <= 1024 * limit
        assert (shape == table[D]) == (table[D].shared_bytes(D, keys) + 16 * table[D].columns <= 1024 * limit)
        assert usable("keys", shape) == shape and (limit < 227 or shape == table[D])


def test_a_smaller_gpu_gets_smaller_tiles(monkeypatch):
    made = []
    original = backward_tensor_core.make_keys_kernel
    monkeypatch.setattr(backward_tensor_core, "make_keys_kernel", lambda *args: made.append(args[0]) or original(*args))
    on, (Q, K, V, dO) = Emulator(), draw(Nq=1, Nk=1)
    on.shared_limit = 20 * 1024
    attention_backward(Q, K, V, dO, np.zeros((1, 1, 1), np.float32), dO, on=on)
    assert made == [Shape(64, 64, hold=True)._replace(columns=32)]


# ---- mistakes

OPS = {
    "lanes of Q as of K": ("place((t & 7) + ((t & 16) >> 1), (t >> 3) & 1)", "place(t & 15, (t & 31) >> 4)"),
    "lanes of dS not transposed": (
        "place_w((t & 7) + ((t & 16) >> 1), 2 * band + ((t >> 3) & 1))", "place_w(t & 15, 2 * band + ((t & 31) >> 4))"),
    "dS written without swizzle": ("(first ^ c) + beyond", "first + c + beyond"),
    "sums of the other lane": ("(32 * PART) + lane * LANE)", "(32 * PART) + (lane ^ 1) * LANE)"),
    "lse of the neighbouring query": ("ex2(fma(s[at + 1], scale, -lse1))", "ex2(fma(s[at + 1], scale, -lse0))"),
    "dP without D": ("s[at + 2], s[at + 3] = -D0, -D1, -D0, -D1", "s[at + 2], s[at + 3] = -D0, -D1, -D0, D1"),
    "mask one query off": ("int32(8 * n) < first", "int32(8 * n) <= first"),
    "mask of the rows one key off": ("int32(8 * n) > last", "int32(8 * n) >= last"),
    "keys past the end have weights": ("if k >= Nk or int32(8 * n) < first", "if int32(8 * n) < first"),
    "rows past the end have weights": ("float32(0.0) if what else float32(INF)", "float32(0.0)"),
}  # fmt: skip
BARRIER = "            cuda.syncthreads()  # Q_i, dO_i, lse_i, D_i are there; those before and their dS are done with\n"
STEP = {
    "copies not waited for": ("            cp_async_wait()\n" + BARRIER, BARRIER),
    "no barrier before dS is read": ("                cuda.syncthreads()  # dS is whole\n", ""),
    "no barrier before the tiles are read": (BARRIER, ""),
    "dK without scale": ("grad.stage(dK_acc, scale, tiles)", "grad.stage(dK_acc, float32(1.0), tiles)"),
    "dV in the place of K before it is read": (
        "            cuda.syncthreads()  # K_j has been read: dV_j may take its place\n", ""),
    "one head of the group": ("int32((Tr - i_first) * members)", "int32(Tr - i_first)"),
    "a query tile too late": ("int32(max(col0 - diag, 0) // Br)", "int32((max(col0 - diag, 0) + Br - 1) // Br)"),
    "the other lse": ("grad.share_stats(kept, stats_s, int32(1 - stage))", "grad.share_stats(kept, stats_s, stage)"),
}  # fmt: skip


def survives(module):
    """Whether changed kernels give right gradients, without a fault, in all of a few small calls."""
    shapes = {"keys": Shape(32, 32), "queries": Shape(32, 32)}
    calls = (2, 41, 35, True, False), (1, 20, 20, False, False), (1, 20, 20, False, True)
    try:
        for Hq, Nq, Nk, causal, deterministic in calls:
            arrays = draw(1, Hq, 1, Nq, Nk, 32, seed=2)
            assert_right(*arrays, module=module, causal=causal, deterministic=deterministic, shapes=shapes)
    except (KernelFault, AssertionError):
        return False
    return True


def test_the_kernels_themselves_survive():
    assert survives(step_with("backward_tensor_core"))


@pytest.mark.parametrize("name", [*OPS, *STEP])
def test_a_mistake_is_seen(name):
    edits = ([STEP[name]], []) if name in STEP else ([], [OPS[name]])
    assert not survives(step_with("backward_tensor_core", *edits[0], tensor_gradient_ops=edits[1]))


# ---- what a GPU would load

nvvm = pytest.importorskip("cuda.bindings.nvvm", reason="no NVVM: install the dev extra")


def assembled(d, dtype, archs):
    """Reports of all kernels for a head dim, in either mode, as each architecture has them."""
    Q, K, V, dO = draw(d=d, dtype=dtype)
    lse, reports = np.zeros(Q.shape[:3], np.float32), []
    for arch in archs:
        on = Assembler(arch)
        on.capability = parse_arch(arch)[:2]
        for deterministic in (False, True):
            attention_backward(Q, K, V, dO, lse, dO, causal=True, on=on, deterministic=deterministic)
        reports += on.reports
    return reports


def test_tensor_cores_do_the_work():
    """The linked PTX of the kernel with five products: each instruction as often as the tile's arithmetic says."""
    D, (R, C) = 32, (64, 32)
    half, single = np.zeros((1, 1, 1, 1), np.float16), np.zeros((1, 1, 1, 1), np.float32)
    args = half, half, half, half, single, single, half, half, np.float32(1), np.float32(1), 0, 0
    kernel = backward_tensor_core.make_keys_kernel(Shape(R, C), D, "bf16", "whole", adding=True)
    cubin, ptx = assemble(kernel, tuple(map(numba_type, args)), {"sm_80": (8, 0)})["sm_80"]
    warps, pairs = R // 16, C * D // 256  # pairs: 16 x 16 blocks of a tile of queries
    of_warp = R // 16 * (1 + 1)  # its 16 queries of dS and its 16 columns of K, for each 16 keys
    expected = {
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": 2 * (4 * pairs + R // 16 * pairs // warps),
        "ldmatrix.sync.aligned.m8n8.x4.shared": 2 * (pairs + D // 16),
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared": 2 * pairs + of_warp,
        "cp.async.cg.shared.global": (2 * R + 2 * 2 * C) * D // (8 * 32 * warps),  # K, V, two Q and two dO tiles
        "ex2.approx.ftz.f32": C // 2,
        "cvt.rn.bf16x2.f32": 2 * C // 4 + 2 * D // 4,  # P and dS, dV and dK
        "red.global.add.f32": C * D // (32 * warps),
        "bar.sync": 6,
        "ld.local": 0,
        ".f64": 0,
    }
    assert {name: ptx.count(name) for name in expected} == expected
    assert resources(cubin)["stack_bytes"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("d", [*KEYS, 80, 113])
def test_every_head_room_assembles_clean(d):
    """All kernels, in either mode, with sums added one by one and four at a time, and with the LLVM of sm_100 on."""
    archs = ("sm_80", "sm_90a", "sm_120", *(["sm_100"] if d == 128 else []))
    reports = assembled(d, (np.float16, BF16)[d % 3 > 0], archs)
    assert {r.kernel for r in reports} == {"backward_rows", "backward_keys", "backward_queries", "backward_round"}
    assert not unclean(reports)
