"""Tiles cover a sequence once, in order, and refuse sizes that make no sense."""

import pytest

from refimpl.tiling import Tile, cdiv, spans


@pytest.mark.parametrize("B", [1, 3, 8, 16])
@pytest.mark.parametrize("N", [0, 1, 7, 8, 9, 16, 113])
def test_spans_cover(N, B):
    """Every index once, no empty slice, all but the last of full size."""
    parts = spans(N, B)
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(N))
    assert all(part.stop - part.start == B for part in parts[:-1])
    assert len(parts) == cdiv(N, B)


@pytest.mark.parametrize(
    ("a", "b", "up"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (-1, 4, 0), (-4, 4, -1), (-5, 4, -1)]
)
def test_cdiv(a, b, up):
    """Up means towards plus infinity, as the traffic formulas need for queries before the first key."""
    assert cdiv(a, b) == up


@pytest.mark.parametrize(
    ("sizes", "kind", "says"),
    [
        ((0, 4), ValueError, "Br"),
        ((4, -1), ValueError, "Bc"),
        ((4.0, 4), TypeError, "Br"),
        ((4, "4"), TypeError, "Bc"),
    ],
)
def test_tile_refuses(sizes, kind, says):
    """The message names the size that is wrong."""
    with pytest.raises(kind, match=says):
        Tile(*sizes)
