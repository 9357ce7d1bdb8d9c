"""Step 6 with a bug planted in its source: the emulator sees each of them, by a fault or in the numbers."""

from contextlib import suppress

import numpy as np
import pytest
from helpers_mutate import edit, step_with
from numba.cuda.extending import _Intrinsic

from flash_cuda.executors.emulator import STAND_INS, Deadlock, Emulator
from flash_cuda.executors.memory import KernelFault, Race
from flash_cuda.executors.memory_bytes import PhaseFault
from flash_cuda.ptx import hopper as ptx_hopper
from flash_cuda.ptx.hopper_standins import InFlight, made
from refimpl import oracle

STEP = "step6_flash_v3"
BOUND = 2e-3  # of O in fp16 on N(0, 1)
ARRIVE_K = r"ptx\.mbarrier_arrive\(uint32\(K_bar \+ uint32\(K_EMPTY\)\)\)"
ARRIVE_V = r"ptx\.mbarrier_arrive\(uint32\(V_bar \+ uint32\(V_EMPTY\)\)\)"


def problem():
    """Three query tiles a block, ragged, of three key tiles each; d is below the head room."""
    rng = np.random.default_rng(2)
    return [rng.standard_normal((1, heads, n, 40)).astype(np.float16) for heads, n in ((3, 40), (1, 45), (1, 45))]


def error(module, WG=1, Bc=16, k=2, v=2, q=2, causal=True, **shape):
    """How far outputs are from the truth, infinity where they are not finite; faults come through."""
    on = Emulator(seed=3)
    on.multiprocessors = 1
    Q, K, V = problem()
    shape = module.Shape(64 * WG, Bc, 64, k_stages=k, v_stages=v, q_stages=q, **shape)
    O, lse = module.attention(Q, K, V, shape=shape, on=on, causal=causal)
    O_true, lse_true = oracle.attention(*(x.astype(np.float64) for x in (Q, K, V)), causal=causal)
    far = max(np.abs(O - O_true).max(), np.abs(lse - lse_true).max())
    return far if np.isfinite(far) else np.inf


@pytest.mark.parametrize("how", [{}, {"k": 1, "v": 1, "q": 1}, {"k": 3, "v": 2}, {"WG": 2}, {"Bc": 32}], ids=str)
def test_unchanged_it_is_right(how):
    assert error(step_with(STEP), **how) <= BOUND / 3


IN_ORDERS = {
    "K_released_before_it_is_read": (
        rf"^( +)wait_S\(S\)\n +if leader:\n( +{ARRIVE_K}\n)",
        r"\1if leader:\n\2\1wait_S(S)\n\1if leader:\n\1    pass\n",
        {"k": 1}, Race,
    ),
    "V_released_before_it_is_read": (
        rf"^( +wait_O\(O_acc, S\)\n)( +if leader:\n +{ARRIVE_V}\n)", r"\2\1", {"v": 1}, Race
    ),
    "Q_released_a_tile_too_early": (
        r"j \+ 1 == end(:\n +ptx\.mbarrier_arrive\(uint32\(Q_bars \+ uint32\(Q_EMPTY\) \+)", r"j + 2 == end\1",
        {"q": 1, "k": 3, "v": 3}, Race,
    ),
    "K_released_by_one_warpgroup_for_both": (
        r"(K_EMPTY \+ BARRIER \* s\)\), uint32\()WG", r"\g<1>1", {"WG": 2}, (Race, PhaseFault, Deadlock)
    ),
    "K_never_released": (rf"{ARRIVE_K}", "pass", {}, Deadlock),
    "phase_bit_not_flipped": (r"uint32\(phase \^ 1\)", "phase", {}, (Race, Deadlock, PhaseFault)),
    "V_full_not_waited_for": (r"ptx\.mbarrier_wait\(V_bar, V_phase\)", "pass", {}, Race),
    "K_full_not_waited_for": (r"ptx\.mbarrier_wait\(K_bar, k_phase\)", "pass", {}, Race),
    "Q_full_not_waited_for": (r"ptx\.mbarrier_wait\(uint32\(Q_bars.*, q_phase\)$", "pass", {}, Race),
    "barriers_not_synchronised": (r"cuda\.syncthreads\(\)", "pass", {}, (Race, PhaseFault)),
    "barriers_not_announced": (r"ptx\.mbarrier_fence\(\)", "pass", {}, PhaseFault),
    "fewer_bytes_expected": (r"2 \* rows \* D", "rows * D", {}, (PhaseFault, Deadlock)),
    "more_bytes_expected": (r"2 \* rows \* D", "4 * rows * D", {}, Deadlock),
    "registers_released_by_one_thread": (
        r"^( +)release_registers\(\)\n( +if tid == 128 \* WG:\n)", r"\2\1    release_registers()\n", {}, Deadlock
    ),
    "S_read_in_flight": (r"wait_S\(S\)$", "pass", {}, InFlight),
    "O_read_in_flight": (r"wait_O\(O_acc, S\)(\n +if leader)", r"pass\1", {}, InFlight),
    "P_packed_in_flight": (
        r"^( +wait_O\(O_acc, S\)\n +if leader:\n.*\n)( +ops\.pack_weights\(S, P\)\n)", r"\2\1", {}, InFlight
    ),
    "no_fence_before_scores": (r"ptx\.wgmma_fence\(\)(\n +start_scores\(S, Q_now)", r"pass\1", {}, InFlight),
    "no_fence_before_values": (r"ptx\.wgmma_fence\(\)(\n +start_values)", r"pass\1", {}, InFlight),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_ORDERS)
def test_an_order_that_is_not_enforced_is_a_fault(name):
    """Whatever the numbers look like, and in whatever order the threads happened to run."""
    pattern, new, how, fault = IN_ORDERS[name]
    with pytest.raises(fault):
        error(step_with(STEP, edit(STEP, pattern, new)), **how)


IN_NUMBERS = {
    "K_steps_too_long": (STEP, r"(\(Bc \* 128 >> 4\) \+ \(k % 4\) \* )2", r"\g<1>4", {}),
    "V_steps_too_short": (STEP, r"k \* 2048", "k * 1024", {"Bc": 32}),
    "stale_O_kept_at_a_seam": (STEP, r"int32\(0\) if fresh else int32\(1\)", "int32(1)", {}),
    "keys_past_the_end_count": ("hopper_ops", r"min\((row \+ 8 \* r \+ high), Nk - 1\)", r"(\1)", {"causal": False}),
    "P_packed_in_the_wrong_order": ("hopper_ops", r"packed\((S.*), (S.*)\)$", r"packed(\2, \1)", {}),
    "columns_of_another_lane": ("hopper_ops", r"2 \* \(lane & 3\)\)(  # the thread's first key)", r"(lane & 3))\1", {}),
    "rows_of_O_traded_wrongly": ("hopper_ops", r"trade\(a0 if upper else b0", "trade(b0 if upper else a0", {}),
    "maximum_of_half_a_quad": ("hopper_ops", r"(across0, across1 = .*new0), 2\)", r"\1, 0)", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_NUMBERS)
def test_a_wrong_layout_shows_in_the_numbers(name):
    module, pattern, new, how = IN_NUMBERS[name]
    change = edit(module, pattern, new)
    changed = step_with(STEP, change) if module == STEP else step_with(STEP, **{module: [change]})
    with suppress(KernelFault):  # some of them read what is not there
        assert not error(changed, **how) <= BOUND


def test_a_tile_without_its_swizzle_is_refused():
    change = edit(STEP, r"= ptx\.k_major\(Bc\)", "= ptx.k_major(Bc) & ((1 << 62) - 1)")
    with pytest.raises(Exception, match="expected the 128-byte swizzle"):
        error(step_with(STEP, change))


def test_every_instruction_has_a_stand_in():
    instructions = [x for x in vars(ptx_hopper).values() if isinstance(x, _Intrinsic)]
    assert len(instructions) > 15 and all(x in STAND_INS for x in instructions)
    assert all(made(instruction) for instruction in ptx_hopper.MADE)


def test_a_deadlock_says_who_waits_for_what():
    says = r"129 threads wait without end: .*thread 128 for the end of phase 0 of mbarrier \d+ .*: 1 of 1 arrivals"
    with pytest.raises(Deadlock, match=says):
        error(step_with(STEP, edit(STEP, ARRIVE_K, "pass")))
