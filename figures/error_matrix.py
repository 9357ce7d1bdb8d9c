"""Every kernel on every case: the error as a share of its bound, from the newest record or a quick run."""

from dataclasses import dataclass
from itertools import product

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.patches import Patch

from figures.style import INK, MUTED, Picture, picture, styled
from refimpl.tiling import Tile
from verify import calls, document
from verify.cases import DEFAULT, SMALL_TILE
from verify.judge import reference, verdict
from verify.registry import CUDA, KERNELS, REFERENCES
from verify.result import Result

DTYPES = ("fp32", "fp16", "bf16")
RAMP = LinearSegmentedColormap.from_list("share of bound", ["#F7FBFF", "#9ECAE1", "#2171B5"])
WRONG, SKIPPED = "#D62728", "#E3E3E3"


@dataclass(frozen=True)
class Matrix:
    """Results laid out by case and by (dtype, kernel).

    Attributes
    ----------
    cases : list of str
    columns : list of (dtype, kernel)
    results : dict of (case, dtype, kernel) to Result
    note : str
        What ran where.
    """

    cases: list
    columns: list
    results: dict
    note: str


def matrix(results: list[Result], note: str) -> Matrix:
    """Lay results out, cases and kernels in the order in which they first appear."""
    cells = {(r.case, r.dtype, r.kernel): r for r in results}
    dtypes = sorted({r.dtype for r in results}, key=lambda name: (*DTYPES, name).index(name))
    kernels = list(dict.fromkeys(r.kernel for r in results))
    cases = list(dict.fromkeys(r.case for r in results))
    return Matrix(cases, [(dtype, kernel) for dtype in dtypes for kernel in kernels], cells, note)


def run_refimpl() -> list[Result]:
    """Judge refimpl's steps, calculating in fp32, on the small shape of every default case."""
    tile = Tile(SMALL_TILE, SMALL_TILE)
    facts = {"executor": "numpy", "device": "CPU", "seconds": 0.0, "tile": [tile.Br, tile.Bc]}
    results = []
    for case, dtype in product(DEFAULT.values(), DTYPES):
        problem = case.build(dtype)
        known = reference(problem, problem.dO() if problem.backward else None)
        before = [x.tobytes() for x in (problem.Q, problem.K, problem.V)]
        for name in KERNELS:
            step = REFERENCES[f"refimpl.{name}"]
            if reason := step.refuses(case, dtype):
                size = problem.shape._asdict()
                results.append(Result(name, case.id, dtype, size=size, verdict="skip", reason=reason, **facts))
                continue
            outputs = calls.outputs(step, problem, {"tile": tile})
            results.append(verdict(problem, outputs, known=known, before=before, kernel=name, **facts))
    return results


def data_kernels() -> Matrix:
    """The newest GPU run on record, of cases that some step takes; without one, refimpl's steps, judged now."""
    run = document.newest_gpu()
    if run is None:
        return matrix(run_refimpl(), "refimpl in fp32 arithmetic, small shapes")
    results = [r for r in document.results_of(run) if r.kernel in CUDA]
    taken = {r.case for r in results if r.kernel in KERNELS and r.verdict != "skip"}
    results = [r for r in results if r.case in taken]
    return matrix(results, f"kernels on {run['device']}, {run['made'][:10]}")


@styled
def fig_kernels(data: Matrix) -> Picture:
    """Draw one cell a case and kernel: its worst error over its bound.

    Parameters
    ----------
    data : Matrix
    """
    figure = picture("tall")
    figure.set_size_inches(7.6, 1.7 + 0.19 * len(data.cases))
    ax = figure.subplots()
    fills = np.empty((len(data.cases), len(data.columns), 4))
    for y, case in enumerate(data.cases):
        for x, (dtype, kernel) in enumerate(data.columns):
            colour, text, ink = _cell(data.results.get((case, dtype, kernel)))
            fills[y, x] = to_rgba(colour)
            if text:
                ax.text(x + 0.5, y + 0.52, text, ha="center", va="center", fontsize=6.5, color=ink)
    # One image and its grid: a polygon a cell makes a file several times as large.
    size = (0, len(data.columns), len(data.cases), 0)
    ax.imshow(fills, extent=size, aspect="auto", interpolation="nearest", zorder=0)
    ax.vlines(range(size[1] + 1), 0, size[2], color="white", linewidth=1, zorder=1)
    ax.hlines(range(size[2] + 1), 0, size[1], color="white", linewidth=1, zorder=1)
    kernels = len({kernel for _, kernel in data.columns})
    for x in range(0, len(data.columns), kernels):
        ax.text(x + kernels / 2, -2.1, data.columns[x][0], ha="center", va="bottom", weight="bold")
        ax.axvline(x, color="white", linewidth=5)
    names = [kernel.split("_")[0] for _, kernel in data.columns]
    ax.set_xticks(
        np.arange(len(names)) + 0.5, names, rotation=60, ha="left", rotation_mode="anchor", fontsize=7.5
    )
    ax.set_yticks(np.arange(len(data.cases)) + 0.5, data.cases, fontsize=7.5)
    ax.xaxis.tick_top()
    ax.set(xlim=(0, len(names)), ylim=(len(data.cases), 0))
    ax.tick_params(length=0)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    figure.suptitle(
        f"Largest error over its bound: {data.note}", x=0.01, ha="left", fontsize=10.5, weight="bold"
    )
    shades = [
        Patch(facecolor=RAMP(share), edgecolor=MUTED, linewidth=0.4, label=f"{share:.1f}")
        for share in (0.0, 0.5, 1.0)
    ]
    shades += [Patch(facecolor=WRONG, label="out of bound"), Patch(facecolor=SKIPPED, label="not run")]
    figure.legend(handles=shades, loc="outside lower center", ncols=5, fontsize=8)
    return figure


def _cell(result: Result | None) -> tuple:
    """Fill, text and its colour of one cell."""
    if result is None or result.verdict == "skip":
        return SKIPPED, "", INK
    if result.verdict != "pass":
        return WRONG, "error" if result.verdict == "error" else _share(result.ratio), "white"
    share = min(result.ratio or 0.0, 1.0)
    return RAMP(share), _share(share), "white" if share > 0.6 else INK


def _share(ratio: float | None) -> str:
    """A share in two digits."""
    if ratio is None:
        return "!"
    return f"{ratio:.2f}".lstrip("0") if ratio < 10 else f"{ratio:.0e}".replace("e+0", "e")
