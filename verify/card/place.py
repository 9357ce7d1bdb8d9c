"""Where in an output its error lies: which rows, columns and heads, and whether tiles of some size show in it."""

from dataclasses import dataclass

import numpy as np

from verify import errors

MOST_ROWS, MOST_COLUMNS = 96, 32
TILES = (256, 128, 64, 32, 16, 8)


@dataclass(frozen=True)
class Place:
    """The error of one output, over its bound.

    Attributes
    ----------
    output : str
        The one with the largest error over bound.
    shape : tuple of int
        (B, H, N, d); d is 1 for lse.
    heads : list of list of float
        Largest error over bound of each batch entry and head.
    rows, columns : list of float
        The same of each row and column; of groups of `rows_each` rows where there are many.
    map : list of list of float
        Rows by columns, in the same groups, of the worst head.
    rows_each, columns_each : int
    worst : tuple of int
        (b, h) of `map`.
    text : str
        The same in words, of what is out of bound; empty if nothing is.
    """

    output: str
    shape: tuple
    heads: list
    rows: list
    columns: list
    map: list
    rows_each: int
    columns_each: int
    worst: tuple
    text: str


def place(outputs, known, metrics) -> Place | None:
    """Locate the error of the output that is furthest off.

    Parameters
    ----------
    outputs : dict of str to ndarray
    known : judge.Reference
    metrics : dict of str to Metrics
        As the judge measured them.

    Returns
    -------
    Place or None
        None where there is nothing to look at.
    """
    sized = [name for name in metrics if outputs[name].size and outputs[name].ndim in (3, 4)]
    if not sized:
        return None
    name = max(sized, key=lambda name: metrics[name].ratio)
    truth, got, bound = known.anchors[name].truth, outputs[name], metrics[name].bound
    right = errors.within(truth, got, bound, spread=known.spread, lse=name == "lse")
    far = errors.distance(truth, got, right)
    ratio = np.where(far == 0, 0.0, far / bound if bound else np.inf)
    ratio = ratio[..., None] if ratio.ndim == 3 else ratio
    out = ~right[..., None] if right.ndim == 3 else ~right
    worst = np.unravel_index(np.argmax(ratio.max(axis=(2, 3))), ratio.shape[:2])
    each = [-(-ratio.shape[2] // MOST_ROWS), -(-ratio.shape[3] // MOST_COLUMNS)]
    return Place(
        name,
        tuple(int(n) for n in ratio.shape),
        _plain(ratio.max(axis=(2, 3))),
        _plain(_grouped(ratio.max(axis=(0, 1, 3)), each[0])),
        _plain(_grouped(ratio.max(axis=(0, 1, 2)), each[1])),
        _plain(_grouped(_grouped(ratio[worst], each[0]).T, each[1]).T),
        *each,
        tuple(int(n) for n in worst),
        _words(name, out) if out.any() else "",
    )


def _grouped(x, each):
    """Maxima of groups of `each` along the first axis."""
    return np.stack([x[k : k + each].max(axis=0) for k in range(0, len(x), each)])


def _plain(x):
    """Nested lists of floats, rounded to what a picture can show."""
    return np.where(np.isfinite(x), np.round(x, 4), np.inf).tolist()


def _words(name, out):
    """Which heads, rows and columns are out of bound."""
    B, H, _, d = out.shape
    row_kind = "key" if name in ("dK", "dV") else "row"
    said = [f"{name} is out of bound in {out.mean():.1%} of its elements"]
    heads = np.argwhere(out.any(axis=(2, 3)))
    if B * H > 1:
        listed = ", ".join(f"({b}, {h})" for b, h in heads[:6].tolist()) + (" ..." if len(heads) > 6 else "")
        said.append("every head" if len(heads) == B * H else f"(batch, head) {listed}")
    rows = out.any(axis=(0, 1, 3))
    said.append(_which(rows, row_kind))
    if d > 1:
        said.append(_which(out.any(axis=(0, 1, 2)), "column"))
    if tile := _tile(rows):
        said.append(f"as whole tiles of {tile} {row_kind}s")
    return "; ".join(said)


def _which(bad, what):
    """ "every row", "rows 16-31 and 48-63 of 64"."""
    if bad.all():
        return f"every {what}"
    edges = np.flatnonzero(np.diff(np.concatenate([[0], bad.astype(int), [0]])))
    spans = [(a, b - 1) for a, b in edges.reshape(-1, 2).tolist()]
    if len(spans) > 4:
        return f"{int(bad.sum())} of {len(bad)} {what}s, the first {spans[0][0]}, the last {spans[-1][1]}"
    listed = " and ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
    one = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"{what}{'' if one else 's'} {listed} of {len(bad)}"


def _tile(bad):
    """The largest size of tiles each of which is either all right or all wrong; None if both do not occur."""
    if bad.all() or not bad.any():
        return None
    for size in TILES:
        if size < len(bad):
            tiles = [bad[k : k + size] for k in range(0, len(bad), size)]
            if all(tile.all() or not tile.any() for tile in tiles):
                return size
    return None
