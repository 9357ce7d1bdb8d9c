"""Every option, as a rule: the names to write `rules=[window(128, 0), softcap(30.0)]` with.

What a rule is, and how to write one's own, is in `rule`; the words it is written in are in `vocabulary`; those we ship
are in `masks`, `mask_tensor` and `scores`, with all of flash-attn's in one pair in `standard`; `frame` evaluates them.
"""

from refimpl.frame import Frame, classify, positions, row_offset, scored, slope, visible
from refimpl.mask_tensor import boolean
from refimpl.masks import causal, causal_mask, dilated, document, padding, prefix_lm, strided, window
from refimpl.rule import Rule, TileClass, and_, or_, stages, then, undecided
from refimpl.scores import alibi, bias, finite, relative, softcap
from refimpl.standard import standard
from refimpl.vocabulary import maximum, minimum, real, tanh, tile_class, where

__all__ = [
    "Frame", "Rule", "TileClass", "alibi", "and_", "bias", "boolean", "causal", "causal_mask", "classify", "dilated",
    "document", "finite", "maximum", "minimum", "or_", "padding", "positions", "prefix_lm", "real", "relative",
    "row_offset", "scored", "slope", "softcap", "stages", "standard", "strided", "tanh", "then", "tile_class",
    "undecided", "visible", "where", "window",
]  # fmt: skip
