"""The figure of masks: classes are what a look at every pair says, and the numbers drawn are counted from them."""

import re

import numpy as np
import pytest

from figures import masks
from refimpl import masks as shipped
from refimpl.rule import TileClass
from refimpl.tiling import spans

DATA = masks.data_classes()


@pytest.mark.parametrize("panel", DATA, ids=lambda panel: panel.title)
def test_classes_are_right(panel):
    """EMPTY and FULL are never wrong, and exact but for rules joined, which may say PARTIAL."""
    for i, rows in enumerate(spans(masks.NQ, masks.TILE.Br)):
        for j, cols in enumerate(spans(masks.NK, masks.TILE.Bc)):
            tile = panel.seen[rows, cols]
            exact = TileClass.FULL if tile.all() else TileClass.PARTIAL if tile.any() else TileClass.EMPTY
            joined = panel.title.startswith(("and_", "strided"))
            assert panel.classes[i, j] == exact or (joined and panel.classes[i, j] == TileClass.PARTIAL), (i, j)


def test_every_shipped_mask_is_drawn():
    makers = {name.removesuffix("_mask") for name in vars(shipped) if name.endswith("_mask")} - {"causal_mask"}
    drawn = {re.match(r"[a-z_]+", panel.title)[0] for panel in DATA}
    assert {"prefix_lm" if name == "prefix" else name for name in makers} | {"strided", "boolean"} <= drawn
    assert masks.NQ % masks.TILE.Br and masks.NK % masks.TILE.Bc


def test_the_picture_says_what_the_data_say():
    figure = masks.fig_classes(DATA)
    assert len(figure.axes) == len(DATA) == 12
    for ax, panel in zip(figure.axes, DATA, strict=True):
        assert ax.get_title(loc="left") == panel.title
        told = f"visited {panel.visited} of {panel.classes.size}, masked {panel.masked}"
        assert told in [text.get_text() for text in ax.texts]
        (image,) = ax.images
        drawn = np.asarray(image.get_array())
        full = np.kron(panel.classes == TileClass.FULL, np.ones((8, 8), bool))[: masks.NQ, : masks.NK]
        # What a reader can see is what is seen: full tiles, and dark pairs in the others.
        np.testing.assert_array_equal((drawn == 3) | full, panel.seen)
