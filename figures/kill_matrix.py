"""Which input kills which bug: a cell for each mutant and case, coloured where the judge failed the run."""

from dataclasses import dataclass

import numpy as np

from figures.error_matrix import SKIPPED
from figures.style import INK, STEP_COLOUR, Picture, picture, styled
from refimpl import oracle
from verify.cases import DEFAULT
from verify.mutants import MUTANTS, Graft, trial
from verify.registry import ALL
from verify.runner import placed

# Bugs in the NumPy steps, which run in milliseconds; and cases of which each is there for some bug.
AREAS = ("softmax", "tiles", "causal", "heads")
BUGS = tuple(name for name, m in MUTANTS.items() if m.through.startswith("refimpl.") and m.area in AREAS)
CASES = (
    "hand", "square", "tile", "tile_plus_1", "113x203", "causal", "empty_rows", "edge_hides_one", "edge_shows_one",
    "gqa", "growing_max", "late_max", "ties", "large_values", "nan_hidden", "nan_seen",
)  # fmt: skip
KILLED = STEP_COLOUR["step6_flash_v3"]


@dataclass(frozen=True)
class Kills:
    """A matrix of trials.

    Attributes
    ----------
    bugs, cases : list of str
    kills : dict of (bug, case) to str
        What the trial ended with; "" if the run passed. Missing where the kernel does not take the case.
    note : str
    """

    bugs: list
    cases: list
    kills: dict
    note: str

    def killers(self, bug: str) -> list[str]:
        """The cases that kill a bug."""
        return [case for case in self.cases if self.kills.get((bug, case))]


def matrix(bugs, cases, dtype: str = "fp32") -> Kills:
    """Run every bug on every case.

    Parameters
    ----------
    bugs : sequence of str
        Names of mutants.
    cases : sequence of str
    dtype : str
        Storage type.
    """
    found = {}
    for bug in bugs:
        mutant = MUTANTS[bug]
        graft = Graft(mutant.edits)
        for case in cases:
            if not ALL[mutant.through].refuses(DEFAULT[case], dtype):
                found[bug, case] = trial.attempt(graft, mutant.through, case, dtype, tile=mutant.tile).kill
    return Kills(list(bugs), list(cases), found, dtype)


def fixed_limit(bug: str, limit: float = 2e-2) -> bool:
    """Whether a bug in a kernel survives what many benchmarks check: uniform numbers in [0, 1), one limit on O.

    Parameters
    ----------
    bug : str
        A mutant that is seen through one of the kernels.
    limit : float
        On the absolute error.
    """
    mutant, kernel = MUTANTS[bug], ALL[MUTANTS[bug].through]
    rng = np.random.default_rng(0)
    Q, K, V = (rng.random((1, 2, 48, 8), np.float32) for _ in "QKV")
    try:
        O, _ = kernel.attention(Graft(mutant.edits).load)(Q, K, V, **placed("emulated", [16, 16], 1))
    except Exception:  # the emulator's watch, say; the benchmark would have had the numbers, but let us be kind to it
        return False
    return bool(np.abs(O - oracle.attention(Q, K, V)[0]).max() <= limit)


def data_kills() -> Kills:
    """Bugs in the NumPy steps, run now."""
    return matrix(BUGS, CASES)


@styled
def fig_kills(data: Kills) -> Picture:
    """Draw a cell a bug and case; at the right how many cases kill the bug."""
    figure = picture("wide")
    figure.set_size_inches(7.6, 1.5 + 0.21 * len(data.bugs))
    ax = figure.subplots()
    for y, bug in enumerate(data.bugs):
        for x, case in enumerate(data.cases):
            kill = data.kills.get((bug, case))
            colour = SKIPPED if kill is None else KILLED if kill else "#F3F6FA"
            ax.fill_between([x, x + 1], y, y + 1, color=colour, edgecolor="white", linewidth=1)
            if kill and kill != "number":
                ax.text(x + 0.5, y + 0.52, kill, ha="center", va="center", fontsize=6, color="white")
        killers = len(data.killers(bug))
        ax.text(len(data.cases) + 0.2, y + 0.52, str(killers), va="center", fontsize=7.5, color=INK)
    upright = {"rotation": 90, "fontsize": 7.5}
    ax.set_xticks([x + 0.5 for x in range(len(data.cases))], data.cases, **upright)
    ax.set_yticks([y + 0.5 for y in range(len(data.bugs))], data.bugs, fontsize=7.5)
    ax.xaxis.tick_top()
    ax.set(xlim=(0, len(data.cases)), ylim=(len(data.bugs), 0), ylabel="bug", xlabel="case")
    ax.xaxis.set_label_position("bottom")
    ax.tick_params(length=0)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    figure.suptitle(f"Which case kills which bug, {data.note}; right: how many do", x=0.01, ha="left", fontsize=10)
    return figure
