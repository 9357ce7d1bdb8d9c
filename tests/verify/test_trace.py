"""The trace: right kernels stay within the bounds, which are not loose; a planted bug is found at its own tile."""

import numpy as np
import pytest

from refimpl.tiling import Tile
from verify import trace as tracing
from verify.__main__ import main
from verify.cases import DEFAULT
from verify.mutants import MUTANTS, Graft
from verify.registry import ALL

NUMPY = [name for name in tracing.TRACED if name.startswith("refimpl.")]
TILE = Tile(16, 16)


def traced(name, case="square", dtype="fp32", tile=TILE, **how):
    """A kernel's trace on a case's small shape."""
    with np.errstate(all="ignore"):
        return tracing.trace(name, DEFAULT[case].build(dtype), "emulated", tile, **how)[0]


@pytest.mark.parametrize("name", NUMPY)
def test_nothing_leaves_in_right_numpy_steps(name):
    """On every case, options and all, in tiles that do not divide anything; the worst error is near its bound."""
    worst = []
    for case in (id for id, case in DEFAULT.items() if not ALL[name].refuses(case, "fp32") and case.layout != "packed"):
        found = traced(name, case, tile=Tile(16, 12))
        assert found.first() is None, case
        worst.append(found.ratios.max(initial=0))
    assert 0.05 < max(worst) <= 1


@pytest.mark.parametrize(
    ("name", "case", "dtype"),
    [
        ("step2_flash_v1", "growing_max", "fp32"),
        ("step3_flash_v2", "square", "fp16"),
        ("step4_causal", "empty_rows", "bf16"),
        ("general", "alibi", "fp32"),
        ("general", "softcap", "fp32"),
    ],
)
def test_nothing_leaves_in_right_kernels(name, case, dtype):
    """Emulated; tiles that step 4 and the general kernel skip are no fault."""
    assert traced(name, case, dtype).first() is None


@pytest.mark.parametrize(
    ("mutant", "quantity", "tile"),
    [
        ("numpy_O_not_rescaled", "O_acc", 1),
        ("numpy_l_not_rescaled", "l", 1),
        ("numpy_stale_V", "O_acc", 1),
        ("numpy_last_tile_dropped", "m", 1),
        ("l_not_rescaled", "l", 1),
        ("max_starts_at_0", "m", 0),
        ("fp16_accumulator", "O_acc", 0),
    ],
)
def test_a_planted_bug_is_found_where_it_is(mutant, quantity, tile):
    """The first tile after which it tells, and what it tells by."""
    planted = MUTANTS[mutant]
    case = {"numpy_last_tile_dropped": "1024x1023", "max_starts_at_0": "all_negative"}.get(mutant, "growing_max")
    first = traced(planted.through, case, load=Graft(planted.edits).load).first()
    assert first is not None
    assert first.quantity.split("[")[0] == quantity
    assert first.tile == tile
    assert first.keys[0] == tile * TILE.Bc


def test_bounds_hold_for_worst_scores_and_not_for_more():
    """A state off by its bound is within it, by 1.01 of it is not; NaN and a wrong infinity are outside."""
    found = traced("refimpl.step3_flash_v2", "causal")
    edge = found.wanted + found.bound * (1 - 1e-9)
    held = tracing.Traced(edge, found.wanted, found.bound, found.dead, found.Bc, found.Nk)
    assert held.first() is None
    got = found.wanted.copy()
    got[0, 0, 1, 20, 1] += 1.01 * found.bound[0, 0, 1, 20, 1]
    first = tracing.Traced(got, found.wanted, found.bound, found.dead, found.Bc, found.Nk).first()
    assert (first.tile, first.row, first.quantity) == (1, 20, "l")
    for wild in (np.nan, np.inf):
        got = found.wanted.copy()
        got[0, 0, 0, 3, 2] = wild
        first = tracing.Traced(got, found.wanted, found.bound, found.dead, found.Bc, found.Nk).first()
        assert (first.tile, first.row, first.quantity) == (0, 3, "O_acc[0]")


def test_a_tile_that_is_needed_may_not_be_skipped():
    """What a kernel does not write counts as wrong where its rows see something."""
    found = traced("refimpl.step4_causal", "causal")
    got = found.got.copy()
    got[0, 0, 1, 16:32] = np.nan
    first = tracing.Traced(got, found.wanted, found.bound, found.dead, found.Bc, found.Nk).first()
    assert (first.tile, first.row) == (1, 16)


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (["--kernel", "refimpl.step3_flash_v2"], 0, "nothing leaves"),
        (["--kernel", "refimpl.step2_flash_v1", "--case", "causal", "--dtype", "fp16"], 0, "nothing leaves"),
        (["--mutant", "numpy_O_not_rescaled"], 1, "first to leave: batch 0, head 0, row"),
        (["--kernel", "step1_fused"], 2, "--kernel: there is no kernel with a trace"),
        (["--kernel", "refimpl.step3_flash_v2", "--dtype", "fp32,fp16"], 2, "expected one storage type"),
        (["--mutant", "nothing_like_it_at_all"], 2, "`verify mutants --list` has them"),
        ([], 2, "--kernel: expected one of"),
    ],
)
def test_the_command(args, status, says, capsys):
    """Exit status, and what it prints."""
    assert main(["trace", *args]) == status
    assert says in "".join(capsys.readouterr())
