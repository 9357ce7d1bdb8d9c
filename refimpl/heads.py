"""The fixed part of every step: checks, options turned into rules, and the loop over heads."""

import math
from functools import partial

import numpy as np

from refimpl import masks, scores
from refimpl.frame import Frame
from refimpl.head import Head
from refimpl.mask_tensor import boolean
from refimpl.observe import Observer
from refimpl.philox import Dropout
from refimpl.rule import Rule, and_, stages, unchanged
from refimpl.tiling import Tile


def check(arrays, like=None):
    """Return Q, K, V (and more) as arrays that fit together, and the six sizes.

    Parameters
    ----------
    arrays : dict of str to array_like
        Q, K and V first.
    like : dict of str to tuple, optional
        Shape that each further array must have, in letters: {"O": "B Hq Nq dv", ...}.

    Returns
    -------
    arrays : dict of str to ndarray
    sizes : dict of str to int
        B, Hq, Hk, Nq, Nk, d, dv.

    Raises
    ------
    TypeError
        An array is not of a floating-point type, or Q, K and V differ in type.
    ValueError
        Shapes do not fit, Hq is not a multiple of Hk, or a head count or head dim is 0.
    """
    arrays = {name: np.asarray(x) for name, x in arrays.items()}
    for name, x in arrays.items():
        if x.dtype.kind != "f" and x.dtype.name != "bfloat16":
            raise TypeError(f"{name} must be of a floating-point type, got {x.dtype}")
    sizes = {}
    letters = {"Q": "B Hq Nq d", "K": "B Hk Nk d", "V": "B Hk Nk dv"} | (like or {})
    for name, shape in letters.items():
        got, shape = arrays[name].shape, shape.split()
        if len(got) != len(shape):
            raise ValueError(f"{name} must be ({', '.join(shape)}), got shape {got}")
        for letter, n in zip(shape, got, strict=True):
            if sizes.setdefault(letter, n) != n:
                raise ValueError(f"{name} must have {letter} = {sizes[letter]}, got shape {got}")
            if n == 0 and letter in ("Hq", "Hk", "d", "dv"):
                raise ValueError(f"{name} must have {letter} of at least 1, got shape {got}")
    if sizes["Hq"] % sizes["Hk"]:
        Hq, Hk = sizes["Hq"], sizes["Hk"]
        raise ValueError(f"Q must have a multiple of {Hk} heads, the number of K's, got {Hq}")
    for name in ("K", "V"):
        if arrays[name].dtype != arrays["Q"].dtype:
            raise TypeError(f"{name} must be of Q's type {arrays['Q'].dtype}, got {arrays[name].dtype}")
    return arrays, sizes


def gather(given, *, causal, mask, lengths, finite=False):
    """Turn the options of a call into its masks and its score rules, in the order in which they apply.

    Parameters
    ----------
    given : Rule or sequence of Rule
        The caller's `rules`.
    causal : bool
    mask : array_like of bool or None
    lengths : bool
        Whether rows and keys past a length are to be hidden, by `masks.padding` unless a given rule does it.
    finite : bool
        Whether what a bias of -inf hides is wanted as a mask even where the score says so, being -inf itself.

    Returns
    -------
    masks, scores : list of Rule
        Chains of score rules taken apart.

    Raises
    ------
    TypeError
        given holds something else than rules, or mask is not boolean.
    """
    given = given if isinstance(given, (tuple, list)) else [given]
    for rule in given:
        if not isinstance(rule, Rule):
            raise TypeError(f"rules must be Rule objects, got {rule!r}")
    changes = [stage for rule in given if rule.kind == "score" for stage in stages(rule)]
    hidden = [masks.causal()] if causal else []
    hidden += [] if mask is None else [boolean(mask)]
    hidden += [rule for rule in given if rule.kind == "mask"]
    hidden += [masks.padding()] if lengths and not any(rule.pads for rule in hidden) else []
    for n, rule in enumerate(changes):
        # A rule that does more than add, a softcap say, would make a number of -inf again.
        lost = any(later.grad is not unchanged for later in changes[n + 1 :])
        if rule.bias is not None and np.isneginf(rule.bias).any() and (finite or lost):
            hidden.append(scores.finite(rule.bias))
    return hidden, changes


def prepare(sizes, *, scale, causal, align, mask, rules, lengths_q, lengths_k, dropout, tile, observe, dtype):
    """Check the options and return a function (b, h) -> Head.

    Parameters
    ----------
    sizes : dict
        From `check`.
    scale : float or None
        Factor of q.k, of any sign; None is 1/sqrt(d).
    causal : bool
    align, lengths_q, lengths_k
        As `frame.Frame`.
    mask : array_like of bool or None
        True = attend; broadcast to (B, Hq, Nq, Nk).
    rules : Rule or sequence of Rule
    dropout : Dropout or None
    tile : Tile
    observe : Observer or None
    dtype : np.float64 or np.float32
        Arithmetic type.

    Raises
    ------
    TypeError
        mask is not boolean; scale is not a number; rules, dropout, tile, observe or dtype is of another type.
    ValueError
        scale is not finite, align is unknown, lengths do not fit, or an option's array cannot be broadcast.
    """
    try:
        scale = 1 / math.sqrt(sizes["d"]) if scale is None else float(scale)
    except (TypeError, ValueError):
        raise TypeError(f"scale must be a number or None, got {scale!r}") from None
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    for name, x, kind, wanted in (
        ("tile", tile, Tile, "a Tile(Br, Bc)"),
        ("observe", observe, Observer | None, "an Observer or None"),
        ("dropout", dropout, Dropout | None, "a Dropout or None"),
    ):
        if not isinstance(x, kind):
            raise TypeError(f"{name} must be {wanted}, got {x!r}")
    if dtype not in (np.float64, np.float32):
        raise TypeError(f"dtype must be float64 or float32, got {dtype!r}")
    frame = Frame(*(sizes[n] for n in ("B", "Hq", "Nq", "Nk")), lengths_q, lengths_k, align)
    lengths = not (lengths_q is None and lengths_k is None)
    # As a mask, a bias of -inf also keeps a NaN in the key's value out of the products.
    hidden, changes = gather(rules, causal=causal, mask=mask, lengths=lengths, finite=True)
    return partial(
        Head,
        scale=scale,
        tile=tile,
        mask=and_(*hidden).at(frame) if hidden else None,
        scores=tuple(rule.at(frame) for rule in changes),
        drop=dropout and dropout.at(frame),
        dtype=np.dtype(dtype).type,
        observer=Observer() if observe is None else observe,
    )


def each_head(one_head, make_head, sequences):
    """Run a step's core on every query head.

    `sequences` gives, for each batch entry, Q, K, V, and O and lse to fill, each with its heads first and its
    rows second.
    """
    with np.errstate(all="ignore"):  # log 0 = -inf is wanted, and NaN in an input must travel on in silence
        for b, (Q, K, V, O, lse) in enumerate(sequences):
            for h in range(len(Q)):
                k = h // (len(Q) // len(K))
                one_head(Q[h], K[k], V[k], O[h], lse[h, :, None], make_head(b, h))


def run(one_head, Q, K, V, **given):
    """Compute attention head by head with a step's core.

    Parameters
    ----------
    one_head : callable
        `one_head(Q, K, V, O, lse, head)`, on arrays (N, d) of one head and lse (Nq, 1); fills O and lse.
    Q, K, V : array_like (B, Hq, Nq, d), (B, Hk, Nk, d), (B, Hk, Nk, dv)
        Query head h uses K/V head h // (Hq // Hk). They are not modified.
    **given
        The options of `prepare`.

    Returns
    -------
    O : ndarray (B, Hq, Nq, dv)
        0 in a row that sees no key.
    lse : ndarray (B, Hq, Nq)
        Natural logarithm of the sum of exp(s); -inf in a row that sees no key. Both of the arithmetic type.

    Raises
    ------
    TypeError, ValueError
        As `check` and `prepare`.
    """
    arrays, sizes = check({"Q": Q, "K": K, "V": V})
    make_head = prepare(sizes, **given)
    B, Hq, Nq, dv = (sizes[n] for n in ("B", "Hq", "Nq", "dv"))
    # NaN to begin with, so that a row the core forgets cannot look like an answer.
    O = np.full((B, Hq, Nq, dv), np.nan, given["dtype"])
    lse = np.full((B, Hq, Nq), np.nan, given["dtype"])
    each_head(one_head, make_head, zip(*arrays.values(), O, lse, strict=True))
    return O, lse


def bias_gradient(make_head, wanted):
    """Return zeros to sum up the gradient of the call's bias in: with four axes, and the same in its own shape.

    Raises
    ------
    ValueError
        It is wanted, and the rules hold no bias or more than one.
    """
    if not wanted:
        return None, None
    given = [rule.bias for rule in make_head.keywords["scores"] if rule.bias is not None]
    if len(given) != 1:
        raise ValueError(f"dbias must be False unless the rules hold one bias, they hold {len(given)}")
    dbias = np.zeros(given[0].shape, make_head.keywords["dtype"])
    return dbias.reshape((1,) * (4 - dbias.ndim) + dbias.shape), dbias
