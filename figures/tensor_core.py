"""Who holds what in a tensor-core product: lanes and registers of a fragment, and where a tile's chunks are kept."""

from dataclasses import dataclass

import numpy as np
from matplotlib.patches import Rectangle

from figures.style import EDGE, FAINT, INK, LIVE, MUTED, STEP_COLOUR, Picture, picture, styled
from flash_cuda.parts.tensor_ops import swizzling

LANES, LANE = 32, 5  # of a warp; the one whose elements are framed
CHUNK = 8  # 16-bit elements, 16 bytes: what ldmatrix reads a row of, and what the swizzle moves
LINE = 8  # chunks in 128 bytes: once through all 32 banks
READ = 2  # the chunk that is followed through its rows
REGISTERS = (LIVE, EDGE, "#BFD8B8", "#E3CFA4")  # one pale colour a register


@dataclass(frozen=True)
class Fragment:
    """One operand of ``mma.sync.m16n8k16``.

    Attributes
    ----------
    name : str
    lane, register : ndarray of int (rows, columns)
        Who holds an element, and in which of its registers.
    """

    name: str
    lane: np.ndarray
    register: np.ndarray


def data_lanes() -> list[Fragment]:
    """A (16 x 16), B (16 x 8) and C (16 x 8), by the rule of the PTX ISA: with g = lane // 4, t = lane % 4.

    Source: PTX ISA 9.0, "Matrix Fragments for mma.m16n8k16 with floating point type".
    """
    r, c = np.indices((16, 16))
    A = Fragment("A, 16 × 16", 4 * (r % 8) + c % 8 // 2, r // 8 + 2 * (c // 8))
    B = Fragment("B, 16 × 8", 4 * c[:, :8] + r[:, :8] % 8 // 2, r[:, :8] // 8)
    r, c = r[:, :8], c[:, :8]
    # Two 16-bit numbers are one register of A and B; of C each fp32 number is one.
    return [A, B, Fragment("C and D, 16 × 8", 4 * (r % 8) + c // 2, 2 * (r // 8) + c % 2)]


@styled
def fig_lanes(data: list) -> Picture:
    """Draw each element with the number of its lane, in the colour of the lane's register; one lane's are framed."""
    figure = picture("wide")
    panels = figure.subplots(1, len(data), width_ratios=[part.lane.shape[1] for part in data])
    for ax, part in zip(panels, data, strict=True):
        rows, columns = part.lane.shape
        for r, c in np.ndindex(rows, columns):
            mine = part.lane[r, c] == LANE
            edge = {"edgecolor": INK, "linewidth": 1.8, "zorder": 3} if mine else {"edgecolor": "white"}
            ax.add_patch(_cell(c, r, REGISTERS[part.register[r, c]], edge))
            weight = "bold" if mine else "normal"
            ax.text(c, r, part.lane[r, c], ha="center", va="center", fontsize=5.5, fontweight=weight, zorder=4)
        _frame(ax, rows, columns)
        ax.set_title(part.name, fontsize=9)
    panels[0].set_ylabel("row")
    panels[0].set_xlabel("column")
    for k, colour in enumerate(REGISTERS):
        held = [f"{letter}{k}" for letter, part in zip("abc", data, strict=True) if k <= part.register.max()]
        panels[0].scatter([], [], marker="s", s=40, color=colour, label=", ".join(held))
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(f"Which lane holds an element, and in which register; lane {LANE} framed", fontsize=10)
    return figure


@dataclass(frozen=True)
class Layout:
    """How a tile's first rows lie in shared memory.

    Attributes
    ----------
    title : str
    row, chunk : ndarray of int (lines, LINE)
        Which row's which chunk lies in a place; a line is 128 bytes, and its eight places are eight groups of banks.
    """

    title: str
    row: np.ndarray
    chunk: np.ndarray

    def conflict(self, chunk: int) -> int:
        """How many of eight neighbouring rows have this chunk in the same banks: turns that one read of them takes."""
        hit = (self.chunk == chunk) & (self.row < 8)
        return int(hit.sum(axis=0).max())


def laid_out(title: str, chunks: int, place) -> Layout:
    """Ask ``place(row, chunk)``, in chunks from the tile's start, for eight rows of ``chunks`` chunks each."""
    lines = 8 * chunks // LINE
    row, chunk = np.full((2, lines, LINE), -1)
    for r, c in np.ndindex(8, chunks):
        at = place(r, c)
        row.flat[at], chunk.flat[at] = r, c
    return Layout(title, row, chunk)


def data_swizzle() -> list[Layout]:
    """Step 5's tiles of d = 64 in plain order and as they are kept, and of d = 32."""
    made = [laid_out("d = 64, plain order", 8, lambda r, c: 8 * r + c)]
    for D in (64, 32):
        shift, mask = swizzling(D)
        chunks = D // CHUNK
        made.append(laid_out(f"d = {D}, swizzled", chunks,
                             lambda r, c, n=chunks, s=shift, m=mask: n * r + (c ^ (r >> s & m))))  # fmt: skip
    return made


@styled
def fig_swizzle(data: list) -> Picture:
    """Draw what lies where, and follow one chunk through eight rows."""
    figure = picture("strip")
    figure.set_size_inches(7.6, 3.4)
    panels = figure.subplots(1, len(data))
    lines = max(len(part.row) for part in data)
    for ax, part in zip(panels, data, strict=True):
        for (line, place), r in np.ndenumerate(part.row):
            c = part.chunk[line, place]
            colour = STEP_COLOUR["step5_tensor_core"] if c == READ else FAINT
            ax.add_patch(_cell(place, line, colour, {"edgecolor": "white", "linewidth": 0.8}))
            ax.text(place, line, f"{r}.{c}", ha="center", va="center", fontsize=6.5, color=INK)
        _frame(ax, lines, LINE)
        turns = part.conflict(READ)
        ax.set_title(f"{part.title}\n{turns} turn{'s' * (turns > 1)} to read chunk {READ}", fontsize=9)
        ax.set_xlabel("banks, in fours")
    panels[0].set_ylabel("line of 128 bytes")
    figure.suptitle("row.chunk, as they lie in shared memory", fontsize=9, color=MUTED)
    return figure


def _cell(x, y, colour, edge):
    """A square of the grid."""
    return Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, **edge)


def _frame(ax, rows, columns) -> None:
    """Limits and ticks of a grid of cells, the first row on top."""
    ax.set(xlim=(-0.6, columns - 0.4), ylim=(rows - 0.4, -0.6))
    ax.set_xticks(range(0, columns, 4) if columns > 8 else range(columns))
    ax.set_yticks(range(0, rows, 4) if rows > 8 else range(rows))
    ax.tick_params(labelsize=7)
    ax.grid(visible=False)
