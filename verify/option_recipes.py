"""How the options of a case are made: each recipe is one option, or one edge of it, at any shape.

A recipe takes a generator, a shape and the edge of a tile there (16 emulated, 64 in full), and returns `Made`: keyword
arguments of attention in plain words. A rule of `refimpl.options` is spelled out here pair by pair, as a mask or a
bias, from its definition and without its code; kernels that take rules are given the rule, others the array.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from verify import dropout as drawing


class Made(NamedTuple):
    """What a recipe makes: plain options, rules that they spell out, and (p, seed, offset) of dropout."""

    options: dict
    rules: dict = {}  # noqa: RUF012 (a NamedTuple's default, never changed)
    dropout: tuple | None = None


class OptionRecipe(NamedTuple):
    """A recipe, and what it asks of a kernel in the registry's words."""

    make: Callable
    needs: frozenset


OPTION_RECIPES: dict[str, OptionRecipe] = {}


def needs(*words):
    """Enter a recipe by its name."""

    def enter(make):
        OPTION_RECIPES[make.__name__] = OptionRecipe(make, frozenset(words))
        return make

    return enter


# Windows. A tile and a bit, so that it starts in one tile and ends in another.


@needs("window")
def window_left(rng, shape, edge):
    """No key further back than a tile and a bit; all after it."""
    return Made({"window": (edge + 1, None)})


@needs("window")
def window_left_short(rng, shape, edge):
    """A tile less two: with ends aligned at a tile, one pair of the tile on the diagonal is hidden."""
    return Made({"window": (edge - 2, None)})


@needs("window")
def window_right(rng, shape, edge):
    """No key further ahead than half a tile; all before it."""
    return Made({"window": (None, edge // 2)})


@needs("window")
def window_both(rng, shape, edge):
    """Both bounds, and unequal: one key ahead, so that a tile ahead is seen by one pair."""
    return Made({"window": (edge - 1, 1)})


@needs("window")
def window_narrow(rng, shape, edge):
    """A quarter of a tile back, one key ahead."""
    return Made({"window": (edge // 4, 1)})


@needs("window")
def window_beyond(rng, shape, edge):
    """Bounds past both ends: nothing is hidden."""
    return Made({"window": (shape.Nk + 5, shape.Nq + shape.Nk)})


@needs("window")
def window_self(rng, shape, edge):
    """Each query sees the key at its own position alone."""
    return Made({"window": (0, 0)})


# What becomes of scores.


@needs("softcap")
def softcap(rng, shape, edge):
    """A cap that most scores feel."""
    return Made({"softcap": 1.25})


@needs("softcap")
def softcap_low(rng, shape, edge):
    """A cap below 1."""
    return Made({"softcap": 0.75})


@needs("alibi")
def alibi(rng, shape, edge):
    """A slope for each head, steep enough that another head's, or another distance, shows."""
    return Made({"alibi_slopes": _fp32(0.05 + 0.4 * rng.random(shape.Hq))})


@needs("alibi")
def alibi_batch(rng, shape, edge):
    """A slope for each batch entry and head, one of them negative: distance is rewarded."""
    slopes = 0.05 + 0.4 * rng.random((shape.B, shape.Hq))
    slopes[-1, -1] *= -0.25
    return Made({"alibi_slopes": _fp32(slopes)})


@needs("bias")
def bias(rng, shape, edge):
    """A number for each head, row and key, the same for the batch; one in eight is -inf, and so is a whole row."""
    x = rng.standard_normal((1, shape.Hq, shape.Nq, shape.Nk))
    x[rng.random(x.shape) < 0.125] = -np.inf
    x[0, -1, shape.Nq // 2] = -np.inf
    return Made({"bias": _fp32(x)})


@needs("bias")
def bias_keys(rng, shape, edge):
    """A number for each batch entry and key, the same for heads and rows; some -inf."""
    x = rng.standard_normal((shape.B, 1, 1, shape.Nk))
    x[..., 1::5] = -np.inf
    return Made({"bias": _fp32(x)})


@needs("bias")
def relative(rng, shape, edge):
    """A number for each head and distance j - i; distances beyond six share the last."""
    table = _fp32(rng.standard_normal((shape.Hq, 13)))
    i, j = _pairs(shape)
    return Made({"bias": table[:, np.clip(j - i, -6, 6) + 6][None]}, {"relative": (table,)})


# Masks.


@needs("mask")
def mask_heads(rng, shape, edge):
    """A mask for each batch entry and head, with tiles all hidden, tiles all seen, and a row without a key."""
    seen = rng.random((shape.B, shape.Hq, shape.Nq, shape.Nk)) < 0.6
    seen[:, 0, :edge, :edge] = True
    seen[:, 0, :edge, edge : 2 * edge] = False
    seen[:, -1, :edge, : edge // 2] = True
    seen[:, -1, edge:, :edge] = False
    seen[:, -1, shape.Nq // 3] = False
    return Made({"mask": seen})


@needs("mask")
def mask_keys(rng, shape, edge):
    """Which keys there are, for each batch entry, the same for heads and rows."""
    seen = rng.random((shape.B, 1, 1, shape.Nk)) < 0.6
    seen[..., :edge] = [[[True]]]
    return Made({"mask": seen})


@needs("lengths")
def lengths(rng, shape, edge):
    """Rows and keys that do not exist: none of them in one batch entry, no keys in the next, then all ends ragged."""
    q, k = (rng.integers(1, N, shape.B) for N in (shape.Nq, shape.Nk))
    q[0], k[0] = 0, shape.Nk - 1
    q[1 % shape.B], k[1 % shape.B] = shape.Nq, 0
    q[-1], k[-1] = shape.Nq - 1, shape.Nk - 3
    return Made({"lengths_q": q, "lengths_k": k})


@needs("mask")
def document(rng, shape, edge):
    """Four documents in one sequence, with borders of their own in rows and keys.

    In the first batch entry one row, the last of a tile, is a document, and so is the last key of another tile.
    """
    q, k = (np.sort(rng.integers(0, 4, (shape.B, N))) for N in (shape.Nq, shape.Nk))
    q[0] = np.searchsorted([edge - 1, edge], np.arange(shape.Nq), side="right")
    k[0] = np.searchsorted([edge, 2 * edge - 1], np.arange(shape.Nk), side="right")
    return Made({"mask": (q[:, :, None] == k[:, None, :])[:, None]}, {"document": (q, k)})


@needs("mask")
def document_shuffled(rng, shape, edge):
    """Documents whose rows are strewn over the sequence: no tile is of one document."""
    q, k = rng.integers(0, 3, shape.Nq), rng.integers(0, 3, shape.Nk)
    return Made({"mask": (q[:, None] == k)[None, None]}, {"document": (q, k)})


@needs("mask")
def prefix_lm(rng, shape, edge):
    """A prefix that all see, of another length in each batch entry: in a tile's middle, and one key into a tile."""
    prefix = np.resize([edge + 1, edge // 2], shape.B)
    i, j = _pairs(shape)
    return Made({"mask": ((j <= i) | (j < prefix[:, None, None]))[:, None]}, {"prefix_lm": (prefix,)})


@needs("mask")
def dilated(rng, shape, edge):
    """Every second key, counted from the query both ways."""
    i, j = _pairs(shape)
    return Made({"mask": (abs(i - j) % 2 == 0)[None, None]}, {"dilated": (2,)})


@needs("mask")
def dilated_wide(rng, shape, edge):
    """Steps wider than a tile: some are empty, and some see a pair in a corner, or ahead of the query."""
    step = 2 * edge - 3
    i, j = _pairs(shape)
    return Made({"mask": (abs(i - j) % step == 0)[None, None]}, {"dilated": (step,)})


@needs("mask")
def strided(rng, shape, edge):
    """The pattern of sparse transformers: the last four keys, and every fourth before them."""
    i, j = _pairs(shape)
    return Made({"mask": ((j <= i) & ((i - j <= 4) | ((i - j) % 4 == 0)))[None, None]}, {"strided": (4,)})


# Dropout.


@needs("dropout")
def dropout(rng, shape, edge):
    """A third of the weights, by a seed and an offset that need more than 32 bits."""
    return _dropout(1 / 3, 0x1234_5678_9ABC, 3 << 33, shape)


@needs("dropout")
def dropout_all(rng, shape, edge):
    """All weights: O is 0, and lse is what it was."""
    return _dropout(1.0, 7, 0, shape)


def _dropout(p, seed, offset, shape):
    kept = drawing.keep(p, seed, offset, (shape.B, shape.Hq, shape.Nq, shape.Nk))
    return Made({"keep": kept, "dropout_p": p}, dropout=(p, seed, offset))


def _pairs(shape):
    """Positions i (Nq, 1) of queries on the keys' axis, ends aligned, and j (Nk,) of keys."""
    return np.arange(shape.Nq)[:, None] + shape.Nk - shape.Nq, np.arange(shape.Nk)


def _fp32(x):
    """Numbers as kernels get them."""
    return x.astype(np.float32)
