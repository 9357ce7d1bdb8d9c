"""Masks and score changes as rules: one plain expression each, run on index arrays here and inlined on a GPU.

A mask rule is true where query i attends to key j; a score rule gives the new score. `i` is the query's position
on the keys' axis, `j` the key's position, both within their sequence. One calling convention serves every rule,
shipped, combined or your own, in NumPy, in the emulator and in a kernel:

    seen = fn(b, h, i, j, *aux)                 mask
    kind = tiles(b, h, i0, i1, j0, j1, *aux)    its class of the tile i0 <= i < i1, j0 <= j < j1: 0, 1 or 2
    s = fn(s, b, h, i, j, *aux)                 score
    ds = ds * grad(s, b, h, i, j, *aux)         its derivative, at the score before the change

`aux` holds numbers and arrays, so that a compiled kernel takes them as one argument, a tuple. A combination's aux
is the tuple of its two rules' tuples, unpacked inside: the lines above stay as they are. Whoever calls sees to it
that the pair exists: row i - offsets[b] in 0 ... Nq - 1, j in 0 ... Nk - 1, tile bounds likewise. i itself may be
negative, so what belongs to a query is looked up by its row.

A rule knows no lengths. `Rule.at` binds it to the `Frame` of one call; that is when its arrays get full shape.
Write functions of your own at module level: a kernel is compiled once for each function object.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from enum import IntEnum
from functools import cache, reduce

import numpy as np

from refimpl.vocabulary import maximum, minimum, real


class TileClass(IntEnum):
    """What a mask leaves of a tile: nothing (not visited), some of it, or all (no masking needed)."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


@dataclass(frozen=True, eq=False)
class Rule:
    """A mask or a change of scores, written once.

    Parameters
    ----------
    fn : callable
        The expression, as the module docstring says.
    kind : "mask" or "score"
    grad : callable, optional
        For a score rule: the derivative d fn / d s, with fn's arguments. The backward pass needs it.
    aux : tuple, or callable
        Further arguments of fn: numbers and arrays; or a function that makes them of a `Frame`.
    tiles : callable, optional
        For a mask rule: the class of a tile without a look at its elements. PARTIAL is always right.
    pads : bool
        Whether a mask rule hides what lies past the lengths of the frame, so that nobody else need do it.
    bias : ndarray, optional
        For a score rule that adds this array last of all: the backward pass can return its gradient.
    parts : tuple of Rule
        What a combination was made of.
    offset : int or ndarray of int (B,)
        Row r of batch b is at position r + offset[b]. `at` sets it.

    Raises
    ------
    TypeError
        fn, grad or tiles cannot be called; aux is neither a tuple nor callable.
    ValueError
        kind is neither "mask" nor "score", or grad, bias or tiles was given to the wrong kind.
    """

    fn: Callable
    _: KW_ONLY
    kind: str = "mask"
    grad: Callable | None = None
    aux: tuple | Callable = ()
    tiles: Callable | None = None
    pads: bool = False
    bias: np.ndarray | None = None
    parts: tuple = ()
    offset: int | np.ndarray = 0

    def __post_init__(self):
        if self.kind not in ("mask", "score"):
            raise ValueError(f'kind must be "mask" or "score", got {self.kind!r}')
        for name in ("fn", "grad", "tiles"):
            given = getattr(self, name)
            if not callable(given) and (name == "fn" or given is not None):
                raise TypeError(f"{name} must be callable, got {given!r}")
        if not isinstance(self.aux, tuple) and not callable(self.aux):
            raise TypeError(f"aux must be a tuple or a function of a Frame, got {self.aux!r}")
        for name, kind in (("grad", "score"), ("bias", "score"), ("tiles", "mask")):
            if getattr(self, name) is not None and self.kind != kind:
                raise ValueError(f"{name} belongs to a {kind} rule, and this one is a {self.kind} rule")

    def at(self, frame):
        """Return the rule bound to a call: its aux made, its offset that of the frame."""
        aux = self.aux(frame) if callable(self.aux) else self.aux
        return replace(self, aux=aux, offset=frame.offsets)


def undecided(b, h, i0, i1, j0, j1, *aux):
    """Call every tile PARTIAL: what stands in for `tiles` where a rule has none."""
    return 1


def unchanged(s, b, h, i, j, *aux):
    """Return the derivative of a rule that adds something to the score."""
    return real(1)


# Combinations. Of one pair of functions one function is made, so that what was compiled for it is found again.


@cache
def _both(f, g):
    return lambda b, h, i, j, aux_f, aux_g: f(b, h, i, j, *aux_f) & g(b, h, i, j, *aux_g)


@cache
def _either(f, g):
    return lambda b, h, i, j, aux_f, aux_g: f(b, h, i, j, *aux_f) | g(b, h, i, j, *aux_g)


@cache
def _both_tiles(f, g):
    return lambda b, h, i0, i1, j0, j1, aux_f, aux_g: minimum(
        f(b, h, i0, i1, j0, j1, *aux_f), g(b, h, i0, i1, j0, j1, *aux_g)
    )


@cache
def _either_tiles(f, g):
    return lambda b, h, i0, i1, j0, j1, aux_f, aux_g: maximum(
        f(b, h, i0, i1, j0, j1, *aux_f), g(b, h, i0, i1, j0, j1, *aux_g)
    )


@cache
def _chain(f, g):
    return lambda s, b, h, i, j, aux_f, aux_g: g(f(s, b, h, i, j, *aux_f), b, h, i, j, *aux_g)


@cache
def _chain_grad(f, f_grad, g_grad):
    return lambda s, b, h, i, j, aux_f, aux_g: (
        f_grad(s, b, h, i, j, *aux_f) * g_grad(f(s, b, h, i, j, *aux_f), b, h, i, j, *aux_g)
    )


def _fold(kind, rules, pair):
    """Combine rules of one kind from the left, two at a time."""
    for rule in rules:
        if not isinstance(rule, Rule) or rule.kind != kind:
            got = f"a {rule.kind} rule" if isinstance(rule, Rule) else repr(rule)
            raise TypeError(f"rules must be {kind} rules, got {got}")
    if not rules:
        raise ValueError(f"rules must be at least one {kind} rule, got none")

    def joined(f, g):
        return replace(pair(f, g), kind=kind, aux=lambda frame: (f.at(frame).aux, g.at(frame).aux), parts=(f, g))

    return reduce(joined, rules)


def and_(*rules):
    """Make the mask of the pairs that all of the mask rules let through.

    A tile is EMPTY if one rule calls it so, FULL if all do; PARTIAL may hide that the rules share nothing in it.

    Raises
    ------
    TypeError, ValueError
        A rule is not a mask, or there is none.
    """
    return _fold("mask", rules, lambda f, g: Rule(_both(f.fn, g.fn), tiles=_both_tiles(*_tiles(f, g))))


def or_(*rules):
    """Make the mask of the pairs that at least one of the mask rules lets through.

    A tile is FULL if one rule calls it so, EMPTY if all do. Raises as `and_`.
    """
    return _fold("mask", rules, lambda f, g: Rule(_either(f.fn, g.fn), tiles=_either_tiles(*_tiles(f, g))))


def _tiles(*rules):
    return (rule.tiles or undecided for rule in rules)


def then(*rules):
    """Make the score rule that applies the given ones in turn, the first one first. Raises as `and_`.

    It has a derivative if all of them have.
    """

    def pair(f, g):
        grad = _chain_grad(f.fn, f.grad, g.grad) if f.grad and g.grad else None
        return Rule(_chain(f.fn, g.fn), kind="score", grad=grad)

    return _fold("score", rules, pair)


def stages(rule):
    """Return the rules that a score rule is a chain of, in order; itself alone if it is none."""
    return [stage for part in rule.parts for stage in stages(part)] or [rule]
