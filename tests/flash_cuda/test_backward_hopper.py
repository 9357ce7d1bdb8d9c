"""The backward kernels on Hopper thread by thread: right on edges, in any order, and with bugs planted seen as such."""

import ml_dtypes
import numpy as np
import pytest
from helpers_mutate import edit, full_name, source
from numba.cuda.extending import _Intrinsic

from flash_cuda import backward_hopper
from flash_cuda.executors.emulator import STAND_INS, Deadlock, Emulator
from flash_cuda.executors.memory import Race, UninitialisedRead
from flash_cuda.executors.memory_bytes import PhaseFault
from flash_cuda.ptx import hopper_backward as ptx_hopper_backward
from flash_cuda.ptx.hopper_standins import InFlight
from refimpl import oracle
from verify import judge
from verify.case import Problem

NAMES = "dQ", "dK", "dV"
BF16 = ml_dtypes.bfloat16


def draw(B=1, Hq=1, Hk=1, Nq=70, Nk=90, d=128, dv=None, dtype=np.float16):
    """Q, K, V and dO."""
    rng, dv = np.random.default_rng(0), dv or d
    shapes = (B, Hq, Nq, d), (B, Hk, Nk, d), (B, Hk, Nk, dv), (B, Hq, Nq, dv)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def backward(Q, K, V, dO, *, seed=1, dlse=None, deterministic=False, watch=True, **options):
    """The gradients on the emulator, after a forward pass in fp64."""
    O, lse = oracle.attention(*(x.astype(np.float64) for x in (Q, K, V)), **options)
    return backward_hopper.attention_backward(
        Q, K, V, O.astype(Q.dtype), lse.astype(np.float32), dO, dlse=dlse, deterministic=deterministic,
        on=Emulator(seed, watch), **options)[:3]  # fmt: skip


def assert_right(Q, K, V, dO, **how):
    """Each gradient within twice the plain formula's error and what `verify.gradient_tolerance` derives."""
    options = {k: v for k, v in how.items() if k in ("scale", "causal", "align")}
    dtype = "fp16" if Q.dtype == np.float16 else "bf16"
    problem = Problem(Q, K, V, {"scale": None, "causal": False, "align": "bottom_right"} | options, dtype=dtype)
    known = judge.reference(problem, dO)
    for name, x in zip(NAMES, backward(Q, K, V, dO, **how), strict=True):
        assert x.shape == known.anchors[name].truth.shape and x.dtype == Q.dtype
        found = judge.measure(name, x, known, dtype)
        assert found.ok, judge.explain("this", {name: found})


@pytest.mark.parametrize("d, dtype", [(128, np.float16), (64, BF16)])
def test_right_on_a_ragged_causal_problem(d, dtype):
    # The first rows see no key; two key tiles; of the last only some rows see anything.
    assert_right(*draw(Nq=150, Nk=140, d=d, dv=d // 2, dtype=dtype), causal=True)


def test_heads_of_a_group_are_summed():
    assert_right(*draw(Hq=2, Nq=130, Nk=40, d=64), scale=-0.2, causal=True, align="top_left")


@pytest.mark.parametrize("Nq, Nk", [(0, 5), (5, 0), (1, 1), (64, 128)])
def test_edges_of_the_shapes(Nq, Nk):
    assert_right(*draw(Nq=Nq, Nk=Nk, d=8, dv=16))


def test_the_same_bits_in_any_order():
    arrays = draw(Nq=70, Nk=130, d=64)
    (first, *rest) = [backward(*arrays, seed=seed, causal=True, deterministic=True) for seed in (None, 2)]
    for again in rest:
        for x, y in zip(first, again, strict=True):
            assert x.tobytes() == y.tobytes()
    added = backward(*arrays, causal=True)
    for x, y in zip(first[1:], added[1:], strict=True):  # how dQ is summed has no part in dK and dV
        assert x.tobytes() == y.tobytes()


def test_a_gradient_of_lse():
    Q, K, V, dO = draw(Nq=20, Nk=30, d=64)
    dlse = np.random.default_rng(3).standard_normal(Q.shape[:3]).astype(np.float32)
    got = backward(Q, K, V, dO, dlse=dlse)
    truth = oracle.attention_backward(*(x.astype(np.float64) for x in (Q, K, V, dO)), dlse=dlse.astype(np.float64))
    without = oracle.attention_backward(*(x.astype(np.float64) for x in (Q, K, V, dO)))
    for x, true in zip(got, truth, strict=False):
        assert np.abs(x - true).max() <= 4e-3
    for true, other in zip(truth[:2], without, strict=False):  # of dQ and dK it is a part that this would see
        assert np.abs(true - other).max() > 0.1


def test_keys_that_no_query_sees_are_not_touched():
    Q, K, V, dO = draw(Nq=20, Nk=150, d=64)
    K[..., 20:, :], V[..., 20:, :] = np.nan, np.nan
    for x in backward(Q, K, V, dO, causal=True, align="top_left"):
        assert np.isfinite(x).all()


@pytest.mark.parametrize("change, error, says", [
    ({"Q": np.zeros((1, 1, 4, 20), np.float16)}, ValueError, "Q: expected a head dim that is a multiple of 8"),
    ({"Q": np.zeros((1, 1, 4, 136), np.float16), "K": np.zeros((1, 1, 4, 136), np.float16)}, ValueError,
     "Q: .*up to 128 for backward_hopper, got 136; backward_tensor_core takes it"),
    ({"Q": np.zeros((1, 1, 4, 64), np.float32)}, TypeError, "Q: expected dtype fp16 or bf16"),
    ({"dO": np.zeros((1, 1, 4, 32), np.float16)}, ValueError, "dO: expected shape"),
    ({"lse": np.zeros((1, 1, 4))}, TypeError, "lse: expected dtype fp32"),
    ({"O": np.zeros((1, 1, 4, 64), np.float32)}, TypeError, "O: expected dtype fp16"),
])  # fmt: skip
def test_bad_input(change, error, says):
    given = {name: np.zeros((1, 1, 4, 64), np.float16) for name in ("Q", "K", "V", "O")}
    given |= {"lse": np.zeros((1, 1, 4), np.float32), "dO": given["O"]} | change
    if given["K"].shape[-1] != given["Q"].shape[-1] and "20" not in says:
        given["K"] = np.zeros_like(given["Q"])
    with pytest.raises(error, match=says):
        backward_hopper.attention_backward(*given.values(), on=Emulator())


def test_every_instruction_has_a_stand_in():
    instructions = [x for x in vars(ptx_hopper_backward).values() if isinstance(x, _Intrinsic)]
    assert len(instructions) > 5 and all(x in STAND_INS for x in instructions)


# ---- with a bug planted: (module, pattern, what takes its place, the faults one of which must come, or None: numbers)

KERNELS, OPS = "backward_hopper_kernels", "hopper_gradient_ops"
RACES = (Race, PhaseFault, Deadlock, UninitialisedRead)
BUGS = {
    "no_fence_before_dS_is_read": (KERNELS, r"^( +)proxy_fence\(\)\n( +wait_dV)", r"\1pass\n\2", Race),
    "dS_of_the_other_warpgroup_not_waited_for": (
        KERNELS, r"ptx\.mbarrier_wait\(uint32\(W_bars \+ w_before.*\n( +ptx\.wgmma_fence)", r"pass\n\1", Race
    ),
    "the_warpgroup_does_not_meet_before_it_tells_of_dS": (
        KERNELS, r"ptx\.barrier_sync\(uint32\(1 \+ wg\).*", "pass", Race
    ),
    "two_buffers_of_dS": (KERNELS, r"STAGES, BUFFERS = 2, 3", "STAGES, BUFFERS = 2, 2", RACES),
    "Q_released_under_dK": (
        KERNELS, r"^( +)wait_dK\(dK_acc\)\n((?: +.*\n){2})", r"\2\1wait_dK(dK_acc)\n", (Race, InFlight)
    ),
    "dO_released_under_dV": (KERNELS, r"wait_dV\(dV_acc\)", "pass", (Race, InFlight)),
    "dP_read_in_flight": (KERNELS, r"wait_dP\(dP\)", "pass", InFlight),
    "phase_of_dS_not_flipped": (KERNELS, r"w_phase \^= uint32\(1\)", "pass", RACES),
    "the_zeros_before_the_first_dS_left_out": (KERNELS, r"if adding and tid < 128 \* WG:", "if False:", RACES),
    "V_not_waited_for": (KERNELS, r"ptx\.mbarrier_wait\(V_bar, uint32\(0\)\)", "pass", Race),
    "bytes_of_lse_not_expected": (KERNELS, r"Q_BYTES \+ S_BYTES\)\)", "Q_BYTES))", (PhaseFault, Deadlock)),
    "maps_not_fenced": (KERNELS, r"ptx\.tensor_map_fence\(G_map\)", "pass", Race),
    "dQ_by_the_panel_of_the_other": (
        KERNELS, r"K_part = uint32\(K_at \+ \(panel", "K_part = uint32(K_at + (mine * uint32(0)", None
    ),
    "dQ_one_tile_off": (
        KERNELS, r"add_tile\(dQ, sums_at, tile_before\)(  # add)", r"add_tile(dQ, sums_at, tile)\1", None
    ),
    "dS_unswizzled": (OPS, r" \+ \(\(row_in_tile & 7\) << 4\)", "", None),
    "P_packed_in_the_wrong_order": (OPS, r"packed\((S\[32 \* half \+ 2 \* n\]), (.*)\)$", r"packed(\2, \1)", None),
    "diagonal_off_by_one": (OPS, r"int32\(key \+ 8 \* r - first\)", "int32(key + 8 * r - first + 1)", None),
    "D_left_out": (OPS, r"\(dP\[4 \* n\] - pair\[0\]\)", "dP[4 * n]", None),
    "lse_of_the_neighbour": (OPS, r"(S\[4 \* n \+ 1\] \* scale_log2 - pair)\[1\]", r"\1[0]", None),
    "keys_past_the_end_count": (OPS, r" if key \+ 8 \* r < end else int32\(Br\)", "", None),
    "scale_left_out_of_dK": (KERNELS, r"grad\.multiply\(dK_acc, scale, NO\)", "pass", None),
}  # fmt: skip


def error(monkeypatch, *change):
    """How far gradients are from the truth, infinity where they are not finite; faults come through."""
    if change:
        name, pattern, new = change
        scopes = {}
        for module in (OPS, KERNELS):
            text = edit(module, pattern, new)[1] if module == name else source(module)
            scopes[module] = {"__name__": full_name(module)}
            exec(compile(text, f"<edited {module}>", "exec"), scopes[module])
        scopes[KERNELS][OPS] = scopes[OPS][OPS]
        monkeypatch.setattr(backward_hopper, "make_kernel", scopes[KERNELS]["make_kernel"])
        if "STAGES, BUFFERS" in new:
            monkeypatch.setattr(backward_hopper, "SHAPES", {D: scopes[KERNELS]["Shape"](*x)
                                                            for D, x in backward_hopper.SHAPES.items()})  # fmt: skip
    arrays = draw(Nq=300, Nk=90, d=80)  # five query tiles, so that each buffer is used again
    arrays[0][...] += 3
    arrays[1][...] -= 4  # scores far below 0: a key past the end would have an infinite weight
    options = {"causal": True, "align": "top_left"}
    truth = oracle.attention_backward(*(x.astype(np.float64) for x in arrays), **options)
    far = max(np.abs(x - true).max() for x, true in zip(backward(*arrays, **options), truth, strict=False))
    return far if np.isfinite(far) else np.inf


def test_unchanged_it_is_right(monkeypatch):
    assert error(monkeypatch) <= 0.02
    assert error(monkeypatch, KERNELS, r"\Z", "\n") <= 0.02


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_seen(monkeypatch, name):
    module, pattern, new, faults = BUGS[name]
    if faults is None:
        assert not error(monkeypatch, module, pattern, new) <= 0.05
    else:
        with pytest.raises(faults):
            error(monkeypatch, module, pattern, new)




def test_what_reaches_lse_of_a_row_without_keys_goes_nowhere():
    """The gradient of lse**2 is -inf there."""
    Q, K, V, dO = draw(Nq=20, Nk=12, d=64)
    found = []
    for fill in (0.0, -np.inf):
        dlse = np.ones((1, 1, 20), np.float32)
        dlse[..., :8] = fill  # causal, aligned bottom right: the first eight rows see no key
        found.append(backward(Q, K, V, dO, dlse=dlse, causal=True))
    for x, y in zip(*found, strict=True):
        np.testing.assert_array_equal(x, y)
        assert np.isfinite(x.astype(np.float32)).all()
