"""Bit-exact proofs: they hold where they should, and one bit, one order or one tile too many breaks them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from refimpl import oracle
from refimpl.tiling import Tile, cdiv
from verify import exact
from verify.__main__ import main
from verify.cases import dense
from verify.exact import Setting, bits_needed, dead, first_difference, problem, states
from verify.registry import KERNELS

SMALL = Setting(dense(19, 21, H=2, Hk=1, d=4, dv=3), True, Tile(8, 8), (4, 2), "fp16")
MORE_KEYS = Setting(dense(9, 20, d=5), False, Tile(8, 16), (4, 2), "bf16")


def run(step, setting, seed=1):
    """A step on an exact problem, emulated: the problem and (O, lse, trace)."""
    from flash_cuda.executors.emulator import Emulator

    made = problem(setting)
    arrays = made.Q, made.K, made.V
    where = {"tile": setting.tile, "threads": setting.threads, "on": Emulator(seed=seed)}
    return made, KERNELS[step].attention()(*arrays, **made.options, **where, trace=True)


@pytest.mark.parametrize("step", exact.STEPS)
@pytest.mark.parametrize("setting", (SMALL, MORE_KEYS), ids=str)
@pytest.mark.parametrize("seed", (1, 2))
def test_state_is_exact_in_any_order(step, setting, seed):
    kernel = KERNELS[step]
    d, dv = (kernel.d_unit * cdiv(n, kernel.d_unit) for n in (setting.shape.d, setting.shape.dv))
    tile = Tile(16, 16) if kernel.tile_units == (16, 16) else kernel.tile(setting.tile)
    setting = replace(setting, shape=setting.shape._replace(d=d, dv=dv), tile=tile)
    assert exact.prove(step, setting, "emulated", seed) is None


def test_states_end_where_the_oracle_does():
    """The last state gives fp64's O and lse, so the proofs are about attention."""
    made = problem(SMALL)
    O, lse = oracle.attention(made.Q, made.K, made.V, **made.options)
    m, l, O_acc = np.split(states(made, 8)[:, :, -1], [1, 2], axis=-1)
    np.testing.assert_allclose(np.where(l == 0, 0, O_acc / np.where(l == 0, 1, l)), O, rtol=1e-13, atol=1e-13)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose((m * math.log(2) + np.log(l))[..., 0], lse, rtol=1e-13)


def test_inputs_are_what_makes_it_exact():
    """Integer scores in log2 units, small integer values, all within 24 bits."""
    for executor in ("gpu", "emulated"):
        for setting in exact.settings(executor):
            made = problem(setting)
            assert bits_needed(made) <= 24
            for x in (made.Q, made.K, made.V):
                assert np.array_equal(x.astype(float), np.rint(x.astype(float)))
            assert np.float32(made.options["scale"] * math.log2(math.e)) == 1
    kinds = {(s.shape, s.causal): set() for s in exact.settings("emulated")}
    for setting in exact.settings("emulated"):
        kinds[setting.shape, setting.causal].add(setting.dtype)
    assert all(len(found) == 3 for found in kinds.values())


def test_too_long_a_problem_is_refused():
    with pytest.raises(ValueError, match=r"shape: .* bits, expected at most 24"):
        problem(Setting(dense(2, 5000, d=8), False, Tile(16, 16), None, "fp32"))


@pytest.mark.parametrize(
    "where, said",
    [((0, 1, 1, 17, 0), "m of"), ((0, 1, 1, 17, 1), "l of"), ((0, 1, 1, 17, 3), r"O_acc\[1\] of")],
)
def test_one_wrong_bit_in_the_trace_is_found_and_placed(where, said):
    made, (O, lse, trace) = run("step3_flash_v2", SMALL)
    assert first_difference(made, SMALL.tile, O, lse, trace) is None
    broken = trace.copy()
    broken[where] = np.nextafter(broken[where], np.float32(np.inf))
    told = first_difference(made, SMALL.tile, O, lse, broken)
    assert told.startswith(said.replace("\\", "")) and "head 1, row 17 after key tile 1" in told


def test_one_wrong_bit_in_O_or_lse_is_found():
    made, (O, lse, trace) = run("step3_flash_v2", SMALL)
    wrong = O.copy()
    wrong[0, 0, 5, 1] = np.nextafter(wrong[0, 0, 5, 1], np.float16(9))
    assert first_difference(made, SMALL.tile, wrong, lse, trace).startswith("O at [0, 0, 5, 1]")
    # Where l is a power of two, lse is one product of exact numbers.
    l = states(made, 8)[:, :, -1, :, 1]
    at = tuple(np.argwhere(np.log2(l) % 1 == 0)[0])
    wrong = lse.copy()
    wrong[at] = np.nextafter(wrong[at], np.float32(np.inf))
    assert first_difference(made, SMALL.tile, O, wrong, trace).startswith("lse at")


def test_a_dead_tile_may_be_left_out_and_a_live_one_may_not():
    made, (O, lse, trace) = run("step4_causal", SMALL)
    skipped = np.isnan(trace).all(axis=-1)[0, 0]
    assert skipped.any() and (skipped <= dead(made, SMALL.tile)).all()
    broken = trace.copy()
    broken[:, :, 0] = np.nan
    assert "after key tile 0: got" in first_difference(made, SMALL.tile, O, lse, broken)


def test_normal_inputs_are_not_exact():
    """The proofs are about their inputs: on N(0, 1) the same comparison fails, so it can fail."""
    made = problem(SMALL)
    rng = np.random.default_rng(0)
    loose = type(made)(*(rng.standard_normal(x.shape).astype(x.dtype) for x in (made.Q, made.K, made.V)), made.options)
    from flash_cuda.executors.emulator import Emulator

    where = {"tile": SMALL.tile, "threads": SMALL.threads, "on": Emulator()}
    O, lse, trace = KERNELS["step3_flash_v2"].attention()(
        loose.Q, loose.K, loose.V, **loose.options, **where, trace=True
    )
    assert first_difference(loose, SMALL.tile, O, lse, trace) is not None


def test_exp2_is_exact_on_integers_and_a_wrong_one_is_noticed(monkeypatch):
    assert exact.powers_wrong("emulated") == []
    wrong = lambda x: np.float32(2.0**x) * np.float32(1 + 2e-7 * (x == 5))  # noqa: E731
    monkeypatch.setattr("flash_cuda.parts.elements.exp2", wrong)
    assert exact.powers_wrong("emulated") == [5]


def test_the_verb(monkeypatch, capsys):
    monkeypatch.setattr(exact, "settings", lambda executor, step: [SMALL])
    assert main(["exact", "--on", "emulator", "--kernels", "step2_flash_v1,step4_causal"]) == 0
    out = capsys.readouterr().out
    assert "exp2 is exact on all 254 integers -126 ... 127" in out and "4 of 4 proofs hold (emulated on" in out
    monkeypatch.setattr(exact, "powers_wrong", lambda executor: [3])
    assert main(["exact", "--on", "emulator", "--kernels", "step4_causal"]) == 1
