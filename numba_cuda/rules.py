"""Rules on their way into a kernel: functions made callable from device code, arguments sent to the executor."""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from flash_cuda.vocabulary import arguments, device
from refimpl.frame import Frame
from refimpl.heads import gather
from refimpl.rule import Rule, and_, then, undecided


class Functions(NamedTuple):
    """What a kernel is made for: device functions, the same objects for the same rules."""

    mask: object
    tiles: object
    score: object
    grad: object


NAMES = "offsets", "mask_aux", "score_aux"  # under which the rules' arrays are counted


@dataclass(frozen=True)
class Bound:
    """Rules bound to one call: the functions, and (offsets, mask aux, score aux) as kernel arguments."""

    functions: Functions
    arguments: tuple
    score: Rule


def everything(b, h, i, j):
    """The mask of a call without masks."""
    return True


def every_tile(b, h, i0, i1, j0, j1):
    """Each tile is FULL."""
    return 2


def same(s, b, h, i, j):
    """The score rule of a call without score rules."""
    return s


def one(s, b, h, i, j):
    """Its derivative."""
    return 1


def no_derivative(s, b, h, i, j, *aux):
    """Stands in for a score rule's missing derivative in a forward kernel, which never asks for it."""
    return 0


def bind(p, *, causal, align, mask, rules, lengths_q, lengths_k):
    """Gather a call's options as rules and send their arguments to the executor of ``p`` (`launch.Problem`)."""
    frame = Frame(p.B, p.Hq, p.Nq, p.Nk, lengths_q, lengths_k, align)
    lengths = not (lengths_q is None and lengths_k is None)
    hidden, changes = gather(rules, causal=causal, mask=mask, lengths=lengths)
    seen = and_(*hidden).at(frame) if hidden else Rule(everything, tiles=every_tile)
    changed = then(*changes).at(frame) if changes else Rule(same, kind="score", grad=one)
    functions = _functions(seen.fn, seen.tiles or undecided, changed.fn, changed.grad or no_derivative)
    sent = (frame.offsets,), seen.aux, changed.aux
    (offsets,), mask_aux, score_aux = (arguments(p.on, aux, name) for aux, name in zip(sent, NAMES, strict=True))
    return Bound(functions, (offsets, mask_aux, score_aux), changed)


@cache
def _functions(*functions):
    return Functions(*(device(fn) for fn in functions))
