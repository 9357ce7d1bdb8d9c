"""One pair of rules that holds every option of a flash-attn call at once.

A compiled kernel is made for one pair of rules. Here the options are numbers and arrays of `aux` alone, so one kernel a
head dim and type serves every combination of them. What is absent is a window bound out of reach, a cap of 0, an empty
array: one comparison each.
"""

import numpy as np

from refimpl import mask_tensor, masks, scores
from refimpl.mask_tensor import boolean_mask, boolean_tiles
from refimpl.masks import padding_mask, window_mask, window_tiles
from refimpl.rule import Rule
from refimpl.scores import alibi_score, bias_score, softcap_score, softcap_slope
from refimpl.vocabulary import minimum, real, tile_class


def standard_mask(b, h, i, j, left, right, lengths_q, lengths_k, mask, cells, offsets):
    """Window, lengths and boolean mask together."""
    seen = window_mask(b, h, i, j, left, right) & padding_mask(b, h, i, j, lengths_q, lengths_k, offsets)
    return seen & (boolean_mask(b, h, i, j, mask, cells, offsets) if mask.size else True)


def standard_tiles(b, h, i0, i1, j0, j1, left, right, lengths_q, lengths_k, mask, cells, offsets):
    """The window's class of what the lengths leave of the tile, and the boolean mask's of it all."""
    rows, keys = minimum(i1, offsets[b] + lengths_q[b]), minimum(j1, lengths_k[b])
    within = tile_class((i0 < rows) & (j0 < keys), (i1 == rows) & (j1 == keys))
    kind = minimum(within, window_tiles(b, h, i0, rows, j0, keys, left, right))
    return minimum(kind, boolean_tiles(b, h, i0, i1, j0, j1, mask, cells, offsets)) if mask.size else kind


def standard_score(s, b, h, i, j, cap, slopes, bias, offsets):
    """Softcap, then ALiBi, then a bias."""
    s = softcap_score(s, b, h, i, j, cap) if cap > 0 else s
    s = alibi_score(s, b, h, i, j, slopes) if slopes.size else s
    return bias_score(s, b, h, i, j, bias, offsets) if bias.size else s


def standard_slope(s, b, h, i, j, cap, slopes, bias, offsets):
    """The softcap's; the others only add."""
    return softcap_slope(s, b, h, i, j, cap) if cap > 0 else real(1)


def standard(*, causal=False, window=None, mask=None, softcap=0.0, alibi_slopes=None, bias=None):
    """Make the pair of rules for any of flash-attn's options; lengths come with the call.

    Parameters
    ----------
    causal : bool
        No query sees a later key, as with a right bound of 0.
    window : (left, right), optional
        As `masks.window`.
    mask : array_like of bool, broadcast to (B, Hq, Nq, Nk), optional
        True = attend.
    softcap : float
        As `scores.softcap`; 0 is none.
    alibi_slopes : array_like (Hq,) or (B, Hq), optional
        As `scores.alibi`.
    bias : array_like, broadcast to (B, Hq, Nq, Nk), optional
        As `scores.bias`: added last; -inf hides the key from the row.

    Returns
    -------
    mask, score : Rule
        Whatever was given, fn, tiles and grad are the same functions, and aux is of the same types.

    Raises
    ------
    TypeError, ValueError
        As the rules named; window is not a pair.
    """
    left, right = masks.ends(window)
    right = min(right, 0) if causal else right
    table = None if mask is None else mask_tensor.boolean(mask)
    (cap,) = (0.0,) if softcap == 0 else scores.softcap(softcap).aux
    slopes = None if alibi_slopes is None else scores.alibi(alibi_slopes)
    added = None if bias is None else scores.bias(bias)

    def mask_aux(at):
        absent = np.empty((0,) * 4, bool), np.empty((0,) * 5, np.int32)
        seen, cells, _ = (*absent, None) if table is None else table.at(at).aux
        return left, right, at.lengths_q, at.lengths_k, seen, cells, at.offsets

    def score_aux(at):
        (slope,) = (np.empty((0, 0)),) if slopes is None else slopes.at(at).aux
        plus, _ = (np.empty((0,) * 4), None) if added is None else added.at(at).aux
        return cap, slope, plus, at.offsets

    given = None if added is None else added.bias
    return (
        Rule(standard_mask, tiles=standard_tiles, aux=mask_aux, pads=True),
        Rule(standard_score, kind="score", grad=standard_slope, aux=score_aux, bias=given),
    )
