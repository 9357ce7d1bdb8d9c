"""A mask given as an array of booleans, and what tells the class of its tiles without reading them.

Where rules have a formula for a tile, an array has only its elements. So they are summed up once, in squares of CELL x
CELL, as a table of sums from the corner: how many squares of any tile hold a visible pair, and how many hold nothing
else, then takes four look-ups each.
"""

import numpy as np

from refimpl.rule import Rule
from refimpl.vocabulary import tile_class

CELL = 8  # edge of a square; tiles of all kernels are multiples of it


def boolean_mask(b, h, i, j, mask, cells, offsets):
    """Look the pair up, by row and not by position."""
    return mask[b, h, i - offsets[b], j]


def boolean_tiles(b, h, i0, i1, j0, j1, mask, cells, offsets):
    """Count, in four look-ups each, the tile's squares that hold a visible pair, and those that hold no hidden one."""
    r0, r1 = (i0 - offsets[b]) // CELL, (i1 - offsets[b] + CELL - 1) // CELL
    c0, c1 = j0 // CELL, (j1 + CELL - 1) // CELL
    live = cells[b, h, 0, r1, c1] - cells[b, h, 0, r0, c1] - cells[b, h, 0, r1, c0] + cells[b, h, 0, r0, c0]
    full = cells[b, h, 1, r1, c1] - cells[b, h, 1, r0, c1] - cells[b, h, 1, r1, c0] + cells[b, h, 1, r0, c0]
    return tile_class(live > 0, full == (r1 - r0) * (c1 - c0))


def count_cells(mask):
    """Sum up a boolean mask in squares of CELL x CELL, so that the class of a tile is a matter of a few look-ups.

    Parameters
    ----------
    mask : ndarray of bool (..., Nq, Nk)

    Returns
    -------
    ndarray of int32 (..., 2, cdiv(Nq, CELL) + 1, cdiv(Nk, CELL) + 1)
        Entry [..., 0, r, c]: how many of the first r x c squares hold a visible pair; [..., 1, r, c]: how many hold
        no hidden pair. A tile not cut at multiples of CELL is judged by the squares it touches: PARTIAL more often.
    """
    tables = []
    for reduce in (np.logical_or, np.logical_and):
        squares = mask
        for axis in (-2, -1):
            squares = reduce.reduceat(squares, np.arange(0, mask.shape[axis], CELL), axis=axis)
        sums = squares.cumsum(-2, dtype=np.int32).cumsum(-1, dtype=np.int32)
        tables.append(np.pad(sums, [(0, 0)] * (mask.ndim - 2) + [(1, 0), (1, 0)]))
    return np.stack(tables, axis=-3)


def boolean(mask):
    """Make the rule that row r sees key j iff mask[b, h, r, j].

    Parameters
    ----------
    mask : array_like of bool, broadcast to (B, Hq, Nq, Nk)
        True = attend.

    Raises
    ------
    TypeError
        mask is not boolean.
    """
    mask = np.asarray(mask)
    if mask.dtype != bool:
        raise TypeError(f"mask must be boolean (true = attend), got {mask.dtype}")

    def aux(at):
        full = at.spread("mask", mask, "B Hq Nq Nk")
        # What is the same for every batch entry or head is summed up once.
        alone = full[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in full.strides[:2])]
        cells = count_cells(alone)
        return full, np.broadcast_to(cells, (at.B, at.Hq, *cells.shape[2:])), at.offsets

    return Rule(boolean_mask, tiles=boolean_tiles, aux=aux)
