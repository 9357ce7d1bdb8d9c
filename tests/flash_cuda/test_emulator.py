"""The emulator fails where a GPU might not: barriers, divergence, tails, inputs."""

import numpy as np
import pytest
from helpers_mutate import source, step_with, without_line
from numba import cuda
from numba.cuda.types import float32

from flash_cuda.executors.emulator import DivergentBarrier, Emulator
from flash_cuda.executors.memory import KernelFault, OutOfBounds, Race, ReadOnly, UninitialisedRead
from refimpl.tiling import Tile

STEPS = ["step0_standard", "step1_fused", "step2_flash_v1", "step3_flash_v2", "step4_causal"]
BARRIER = "cuda.syncthreads()"


def inputs(Nq=35, Nk=37, d=5, dv=7, dtype=np.float32):
    rng = np.random.default_rng(1)
    return [rng.standard_normal((1, 1, n, w)).astype(dtype) for n, w in ((Nq, d), (Nk, d), (Nk, dv))]


def run(module, on=None, **options):
    return module.attention(*inputs(), on=on or Emulator(), tile=Tile(16, 16), threads=(4, 4), **options)


@pytest.mark.parametrize("step", STEPS)
def test_unchanged_steps_are_clean(step):
    O, lse = run(step_with(step))
    assert np.isfinite(O).all() and np.isfinite(lse).all()


@pytest.mark.parametrize("step, n", [(s, n) for s in STEPS for n in range(source(s).count(BARRIER))])
def test_every_barrier_is_needed(step, n):
    """A barrier taken away is found as a race, whatever the numbers look like."""
    with pytest.raises((Race, UninitialisedRead)):
        run(step_with(step, without_line(step, BARRIER, n)))


@pytest.mark.parametrize("step", STEPS)
def test_threads_that_diverge_at_a_barrier_are_found(step):
    old, _ = without_line(step, BARRIER, 0)
    line = next(text for text in old.splitlines() if BARRIER in text)
    indent = line[: len(line) - len(line.lstrip())]
    new = old.replace(line, f"{line}\n{indent}if cuda.threadIdx.x != 3:\n{indent}    {BARRIER}")
    with pytest.raises(DivergentBarrier, match="diverge"):
        run(step_with(step, (old, new)))


@pytest.mark.parametrize("guard, steps", [
    ("row0 + r < X.shape[0] and ", STEPS),
    (" and col0 + c < X.shape[1]", STEPS),
    ("if row < O.shape[0]:  # guard: the last query tile is ragged\n", STEPS[1:]),
    ("if row < m_hbm.shape[0]:  # guard: the last query tile is ragged\n", ["step2_flash_v1"]),
    ("row < S.shape[0] and ", ["step0_standard"]),
    ("row < O.shape[0] and ", ["step0_standard"]),
])
def test_a_dropped_tail_guard_is_found(guard, steps):
    for step in steps:
        with pytest.raises(OutOfBounds):
            run(step_with(step, tile_ops=[(guard, "if True:\n" if guard.endswith("\n") else "")]))


def test_a_dropped_key_mask_changes_the_answer():
    """A tail guard inside the arithmetic is no fault of memory; the numbers must show it."""
    good, _ = run(step_with("step3_flash_v2"))
    bad, _ = run(step_with("step3_flash_v2", ("tile.mask(s, i * Br, j * Bc, Nk, diag)", "pass")))
    assert np.abs(good - bad).max() > 1e-2


@pytest.mark.parametrize("step", STEPS)
def test_thread_order_does_not_matter(step):
    results = [run(step_with(step), on=Emulator(seed)) for seed in (None, 0, 1)]
    for O, lse in results[1:]:
        np.testing.assert_array_equal(O, results[0][0], strict=True)
        np.testing.assert_array_equal(lse, results[0][1], strict=True)


def launch(body, *arrays, threads=4, blocks=1, seed=None):
    """Run a small body written in the test; its module stands in for one of ours."""
    body.__globals__["__name__"] = "flash_cuda.test"
    on = Emulator(seed)
    handles = [on.empty(name, shape, np.dtype(np.float32)) for name, shape in arrays]
    on.launch(body, blocks, threads, handles)
    return [on.result(h) for h in handles]


def test_shared_memory_does_not_outlive_its_block():
    """Case A38: what the block before left behind must not be readable."""

    def body(out):
        s = cuda.shared.array(4, float32)
        if cuda.blockIdx.x == 0:
            s[cuda.threadIdx.x] = float32(1.0)
        cuda.syncthreads()
        out[cuda.blockIdx.x, cuda.threadIdx.x] = s[cuda.threadIdx.x]

    with pytest.raises(UninitialisedRead):
        launch(body, ("out", (2, 4)), blocks=2)


def test_a_read_before_another_threads_write_is_a_race():
    """Whichever thread goes first, it is the barrier that is missing, not the write."""

    def body(out):
        s = cuda.shared.array(4, float32)
        s[cuda.threadIdx.x] = float32(1.0)
        out[cuda.threadIdx.x] = s[3 - cuda.threadIdx.x]

    with pytest.raises(Race, match="since the last barrier"):
        launch(body, ("out", (4,)))


def test_an_element_that_nobody_writes_is_said_to_be_read_too_early():
    def body(out):
        s = cuda.shared.array(5, float32)
        s[cuda.threadIdx.x] = float32(1.0)
        cuda.syncthreads()
        out[cuda.threadIdx.x] = s[cuda.threadIdx.x + 1]

    with pytest.raises(UninitialisedRead, match="thread 3 reads it before any write"):
        launch(body, ("out", (4,)))


def test_negative_indices_are_out_of_bounds():
    def body(out):
        out[cuda.threadIdx.x - 1] = float32(0.0)

    with pytest.raises(OutOfBounds, match="out of shape"):
        launch(body, ("out", (4,)))


def test_two_writers_of_one_element_are_a_race():
    def body(out):
        out[0] = float32(1.0)

    with pytest.raises(Race, match="out"):
        launch(body, ("out", (4,)))


def test_blocks_cannot_talk_through_global_memory():
    def body(out):
        if cuda.blockIdx.x == 0:
            out[0] = float32(1.0)
        else:
            out[1] = out[0]

    with pytest.raises(Race):
        launch(body, ("out", (4,)), threads=1, blocks=2)


@pytest.mark.parametrize("last", [0, 1, 2])
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_what_several_blocks_have_read_none_may_write(last, seed):
    """Whichever of them writes, and in whatever order they come."""

    def body(out):
        b = cuda.blockIdx.x
        value = out[3]
        if b == last:
            out[3] = value + float32(1.0)

    with pytest.raises(Race):
        launch(body, ("out", (4,)), threads=1, blocks=3, seed=seed)


def test_a_barrier_orders_global_memory_within_a_block():
    def body(out):
        t = cuda.threadIdx.x
        out[t] = float32(t)
        cuda.syncthreads()
        value = out[3 - t]
        cuda.syncthreads()
        out[t] = value

    assert launch(body, ("out", (4,)))[0].tolist() == [3, 2, 1, 0]


def test_inputs_are_read_only():
    on = Emulator()

    def body(x):
        x[0] = float32(1.0)

    body.__globals__["__name__"] = "flash_cuda.test"
    with pytest.raises(ReadOnly, match="x"):
        on.launch(body, 1, 1, [on.input("x", np.zeros(3, np.float32))])


def test_faults_have_one_base():
    assert all(issubclass(f, KernelFault) for f in (Race, OutOfBounds, UninitialisedRead, ReadOnly, DivergentBarrier))
