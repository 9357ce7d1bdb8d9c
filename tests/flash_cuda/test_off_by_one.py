"""Every edge of step 4's tile classes, moved by one either way, is seen by a default case."""

import numpy as np
import pytest
from helpers_mutate import step_with

from flash_cuda.executors.emulator import Emulator
from flash_cuda.executors.memory import KernelFault
from refimpl import oracle
from refimpl.tiling import Tile
from verify.cases import DEFAULT

LAST = "seen_by_last = min(min((i + 1) * Br, Nq) + diag, Nk)"
FIRST = "seen_by_first = min(i * Br + 1 + diag, Nk)"
EDITS = {
    "one row too few is live": (LAST, LAST.replace("+ diag", "+ diag - 1")),
    "an edge tile counts as full": (FIRST, FIRST.replace("+ 1 + diag", "+ 2 + diag")),
    "the end of the keys counts as full": (FIRST, FIRST.replace(", Nk)", ", Nk + 1)")),
    "the diagonal's sign is wrong for live tiles": (LAST, LAST.replace("+ diag", "- diag")),
    "the diagonal's sign is wrong for full tiles": (FIRST, FIRST.replace("+ diag", "- diag")),
}


def worst(module):
    """The largest error of O over the default cases about shapes and diagonals, at small size; inf for a fault."""
    errors, on = [], {"tile": Tile(16, 16), "threads": (4, 2)}
    for case in DEFAULT.values():
        if case.kind not in ("shape", "ragged", "causal"):
            continue
        made = case.build("fp32", small=True)
        try:
            O, _ = module.attention(made.Q, made.K, made.V, **made.options, on=Emulator(), **on)
        except KernelFault:
            return np.inf
        true, _ = oracle.attention(*(x.astype(np.float64) for x in (made.Q, made.K, made.V)), **made.options)
        error = np.abs(O - true).max(initial=0.0) / max(1.0, np.abs(true).max(initial=0.0))
        errors.append(error if np.isfinite(error) else np.inf)
    return max(errors)


def test_the_step_itself_is_right():
    assert worst(step_with("step4_causal")) <= 1e-5


@pytest.mark.parametrize("name", EDITS)
def test_an_edge_moved_by_one_is_seen(name):
    assert worst(step_with("step4_causal", EDITS[name])) > 1e-3
