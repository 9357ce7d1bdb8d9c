"""The score changes we ship: each one line, its derivative, and how to make the rule.

Names: `x_score` is the expression, `x_slope` its derivative with respect to s, `x(...)` makes the rule. Rules that only
add something have the derivative 1, `rule.unchanged`.
"""

import math

import numpy as np

from refimpl.rule import Rule, unchanged
from refimpl.vocabulary import maximum, minimum, real, tanh, where

NEG_INF = -math.inf


def numbers(name, x):
    """Return x as an array of real numbers, or refuse it by name."""
    x = np.asarray(x)
    if x.dtype.kind not in "fiu" and x.dtype.name != "bfloat16":
        raise TypeError(f"{name} must be real numbers, got {x.dtype}")
    return x if x.dtype == np.float64 else x.astype(np.float64)


def softcap_score(s, b, h, i, j, cap):
    """Near s where s is small, never beyond the cap."""
    return cap * tanh(s / cap)


def softcap_slope(s, b, h, i, j, cap):
    """The derivative of the hyperbolic tangent is 1 minus its square."""
    return real(1) - tanh(s / cap) * tanh(s / cap)


def softcap(cap):
    """Make the rule s -> cap tanh(s / cap).

    Raises
    ------
    TypeError, ValueError
        cap is not a positive, finite number.

    Source
    ------
    Gemma Team 2024, "Gemma 2", section 2.
    """
    try:
        cap = float(cap)
    except (TypeError, ValueError):
        raise TypeError(f"softcap must be a number, got {cap!r}") from None
    if not 0 < cap < math.inf:
        raise ValueError(f"softcap must be positive and finite, got {cap}")
    return Rule(softcap_score, kind="score", grad=softcap_slope, aux=(cap,))


def alibi_score(s, b, h, i, j, slopes):
    """A penalty for distance, each head its own."""
    return s - slopes[b, h] * real(abs(i - j))


def alibi(slopes):
    """Make the rule s -> s - slope |i - j|.

    Parameters
    ----------
    slopes : array_like (Hq,) or (B, Hq)

    Raises
    ------
    TypeError
        slopes are not real numbers.

    Source
    ------
    Press et al. 2022, "Train Short, Test Long", section 3.
    """
    slopes = numbers("alibi_slopes", slopes)
    return Rule(alibi_score, kind="score", grad=unchanged, aux=lambda at: (at.spread("alibi_slopes", slopes, "B Hq"),))


def relative_score(s, b, h, i, j, table, radius):
    """A number for each distance and head; distances beyond the radius share the last one."""
    return s + real(table[h, minimum(maximum(j - i, -radius), radius) + radius])


def relative(table):
    """Make the rule s -> s + table[h, clip(j - i, -R, R) + R].

    Parameters
    ----------
    table : array_like (2 R + 1,) or (Hq, 2 R + 1)
        First the bias of keys R or more before the query, in the middle that of its own position.

    Raises
    ------
    TypeError, ValueError
        The table is not of real numbers; its last axis is not odd.

    Source
    ------
    Shaw et al. 2018, "Self-Attention with Relative Position Representations", section 3.2 (clipping); as a number added
    to the score: Raffel et al. 2020, "T5", section 2.1.
    """
    table = numbers("table", table)
    if table.ndim not in (1, 2) or table.shape[-1] % 2 == 0:
        raise ValueError(f"table must be (2 R + 1,) or (Hq, 2 R + 1), got shape {table.shape}")
    radius = table.shape[-1] // 2

    def aux(at):
        if table.shape[:-1] not in ((), (1,), (at.Hq,)):
            raise ValueError(f"table must have {at.Hq} heads, got shape {table.shape}")
        return np.broadcast_to(table, (at.Hq, 2 * radius + 1)), radius

    return Rule(relative_score, kind="score", grad=unchanged, aux=aux)


def bias_score(s, b, h, i, j, bias, offsets):
    """Add an element of an array, by row and not by position; -inf wins, be the score a NaN."""
    x = real(bias[b, h, i - offsets[b], j])
    return where(x == NEG_INF, x, s + x)


def bias(bias):
    """Make the rule s -> s + bias[b, h, r, j], of row r.

    Parameters
    ----------
    bias : array_like, broadcast to (B, Hq, Nq, Nk)
        -inf hides the key from the row.

    Raises
    ------
    TypeError
        bias is not of real numbers.
    """
    bias = numbers("bias", bias)

    def aux(at):
        return at.spread("bias", bias, "B Hq Nq Nk"), at.offsets

    return Rule(bias_score, kind="score", grad=unchanged, aux=aux, bias=bias)


def finite_mask(b, h, i, j, bias, offsets):
    """A bias of -inf hides: its key is not there, whatever its value holds."""
    return bias[b, h, i - offsets[b], j] != NEG_INF


def finite(bias):
    """Make the mask of the pairs that a bias does not hide, for who needs it apart. Parameters as `bias`."""
    return Rule(finite_mask, aux=lambda at: (at.spread("bias", bias, "B Hq Nq Nk"), at.offsets))
