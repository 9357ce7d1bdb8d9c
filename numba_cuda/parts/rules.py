"""Rules on their way into a kernel: functions made callable from device code, arguments sent to the executor.

The options of a call become one mask rule and one score rule. Those that flash-attn has too are data of a single pair
(`refimpl.standard`), so that all their combinations share one compiled kernel for each head dim and type; further rules
are joined to that pair, and make another kernel.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from flash_cuda.parts.vocabulary import arguments, device
from refimpl.frame import Frame
from refimpl.philox import Dropout
from refimpl.rule import Rule, and_, then, undecided
from refimpl.standard import standard

NAMES = "offsets", "mask_aux", "score_aux", "drop_aux"  # under which the rules' arrays are counted


class Functions(NamedTuple):
    """What a kernel is made for: device functions, the same objects for the same rules; grad may be None."""

    mask: object
    tiles: object
    score: object
    grad: object


class Bound(NamedTuple):
    """Rules bound to one call: the functions, and (offsets, mask aux, score aux, drop aux) as kernel arguments."""

    functions: Functions
    arguments: tuple
    dropping: bool  # a kernel of its own: drawing costs registers that others need


def bind(
    p, *, rules=(), causal=False, align="bottom_right", window=None, lengths_q=None, lengths_k=None, dropout=None,
    **options,
):  # fmt: skip
    """Make rules of a call's options and send their arguments to the executor.

    Parameters
    ----------
    p : launch.Problem
    rules : Rule or sequence of Rule
        Joined to the rest: masks by and, score rules applied last, in turn.
    causal, align, window, lengths_q, lengths_k
        As `refimpl.oracle.attention`.
    dropout : refimpl.philox.Dropout, optional
    **options
        mask, softcap, alibi_slopes, bias, as `refimpl.standard.standard`; None is absent.

    Raises
    ------
    ValueError, TypeError
        One line that names the argument, from the rules.
    """
    rules = [rules] if isinstance(rules, Rule) else list(rules)
    for rule in rules:
        if not isinstance(rule, Rule):
            raise TypeError(f"rules: expected Rule objects, got {rule!r}")
    frame = Frame(p.B, p.Hq, p.Nq, p.Nk, lengths_q, lengths_k, align)
    given = {name: value for name, value in options.items() if value is not None}
    seen, changed = standard(causal=causal, window=window, **given)
    seen = and_(seen, *(rule for rule in rules if rule.kind == "mask")).at(frame)
    changed = then(changed, *(rule for rule in rules if rule.kind == "score")).at(frame)
    if not isinstance(dropout, Dropout | None):
        raise TypeError(f"dropout: expected a Dropout or None, got {dropout!r}")
    sent = (frame.offsets,), seen.aux, changed.aux, _drop_aux(dropout, frame)
    (offsets,), *rest = (arguments(p.on, aux, name) for aux, name in zip(sent, NAMES, strict=True))
    functions = _functions(seen.fn, seen.tiles or undecided, changed.fn, changed.grad)
    return Bound(functions, (offsets, *(as_float32(aux) for aux in rest)), dropout is not None)


def _drop_aux(dropout, frame):
    """(factor, key0, key1, threshold, keep): keep empty where it is drawn."""
    if dropout is None:
        return 1.0, 0, 0, 0, np.empty((0,) * 4, bool)
    keep = dropout.at(frame).keep
    return dropout.scale, *dropout.arguments, np.empty((0,) * 4, bool) if keep is None else keep


@cache
def _functions(*functions):
    return Functions(*(fn and device(fn) for fn in functions))


def as_float32(aux):
    """Numbers of a rule in the type a kernel computes in."""
    if isinstance(aux, tuple):
        return tuple(as_float32(part) for part in aux)
    return np.float32(aux) if isinstance(aux, float) else aux
