"""Sequences of different lengths packed end to end: attention and its gradients, forward and backward.

**Idea**: rows of all sequences stand in one array, and cumulative lengths say where each begins. A sequence is
a batch entry of its own size, so the cores of the steps run on views of the packed arrays: nothing is padded
or copied. Rows and keys of a rule count from the start of their sequence, `b` is the sequence, and bottom_right
puts its last row at its last key.

**Changed from step4_causal**: the views, and the lengths.

**Source**: the layout is that of flash-attn's `flash_attn_varlen_func`.
"""

import numpy as np

from refimpl.backward import ORDERS, each_group
from refimpl.heads import bias_gradient, check, each_head, prepare
from refimpl.step4_causal import one_head
from refimpl.tiling import DEFAULT_TILE

PACKED = {"Q": "rows Hq d", "K": "keys Hk d", "V": "keys Hk dv"}


def boundaries(name, cu_seqlens, total):
    """Check cumulative lengths (B + 1,) of a packed axis; return its slices, and the lengths.

    Raises
    ------
    TypeError
        They are not integers.
    ValueError
        They are not a 1-d array that starts at 0, never falls and ends within the axis.
    """
    cu = np.asarray(cu_seqlens)
    if cu.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {cu.dtype}")
    cu = cu.astype(np.int64)
    if cu.ndim != 1 or cu.size == 0 or cu[0] != 0:
        raise ValueError(f"{name} must be a 1-d array that starts at 0, got {cu_seqlens!r}")
    if (np.diff(cu) < 0).any():
        raise ValueError(f"{name} must never fall, got {cu_seqlens!r}")
    if cu[-1] > total:
        raise ValueError(f"{name} must end within the {total} rows there are, got {cu[-1]}")
    return [slice(start, stop) for start, stop in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)], np.diff(cu)


def pack(arrays, like, cu_seqlens_q, cu_seqlens_k, options):
    """Check a packed call; return its arrays, a function (b, h) -> Head, and the slices of rows and of keys."""
    arrays, sizes = check(arrays, PACKED | like)
    at_q, lengths_q = boundaries("cu_seqlens_q", cu_seqlens_q, sizes["rows"])
    at_k, lengths_k = boundaries("cu_seqlens_k", cu_seqlens_k, sizes["keys"])
    if len(at_q) != len(at_k):
        raise ValueError(f"cu_seqlens_k must hold {len(at_q)} sequences like cu_seqlens_q, got {len(at_k)}")
    # An array of a rule, (B, Hq, Nq, Nk), has room for the longest sequence.
    sizes |= {"B": len(at_q), "Nq": lengths_q.max(initial=0), "Nk": lengths_k.max(initial=0)}
    return arrays, prepare(sizes, lengths_q=lengths_q, lengths_k=lengths_k, **options), at_q, at_k


def sequences(arrays, at, axis=0):
    """Give each sequence's part of an array, heads first: views, so that they can be filled."""
    return [np.moveaxis(arrays, axis, 1)[:, rows] for rows in at]


def attention(
    Q,
    K,
    V,
    cu_seqlens_q,
    cu_seqlens_k,
    *,
    scale=None,
    causal=False,
    align="bottom_right",
    mask=None,
    rules=(),
    dropout=None,
    tile=DEFAULT_TILE,
    observe=None,
    dtype=np.float64,
):
    """Compute softmax(scale Q K^T) V of each sequence.

    Parameters
    ----------
    Q, K, V : array_like (rows, Hq, d), (keys, Hk, d), (keys, Hk, dv), of one floating-point type
        Packed; query head h uses K/V head h // (Hq // Hk).
    cu_seqlens_q, cu_seqlens_k : array_like of int (B + 1,)
        Sequence b has rows cu_seqlens_q[b] ... cu_seqlens_q[b + 1] - 1, and likewise keys; either may be none.
    scale, causal, align, mask, rules, dropout, tile, observe, dtype
        As `step4_causal.attention`, with Nq and Nk the longest lengths.

    Returns
    -------
    O : ndarray (rows, Hq, dv)
        0 in a row that sees no key, and in rows past the last sequence.
    lse : ndarray (Hq, rows)
        Natural logarithm; -inf in those rows.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it and what was expected.
    """
    options = {"scale": scale, "causal": causal, "align": align, "mask": mask, "rules": rules, "dropout": dropout}
    options |= {"tile": tile, "observe": observe, "dtype": dtype}
    arrays, make_head, at_q, at_k = pack({"Q": Q, "K": K, "V": V}, {}, cu_seqlens_q, cu_seqlens_k, options)
    Q, K, V = arrays.values()
    end = at_q[-1].stop if at_q else 0
    O = np.full((*Q.shape[:2], V.shape[2]), np.nan, dtype)
    lse = np.full((Q.shape[1], len(Q)), np.nan, dtype)
    O[end:], lse[:, end:] = 0, -np.inf
    parts = [sequences(Q, at_q), sequences(K, at_k), sequences(V, at_k), sequences(O, at_q), sequences(lse, at_q, 1)]
    each_head(one_head, make_head, zip(*parts, strict=True))
    return O, lse


def attention_backward(
    Q,
    K,
    V,
    O,
    lse,
    dO,
    cu_seqlens_q,
    cu_seqlens_k,
    *,
    scale=None,
    causal=False,
    align="bottom_right",
    mask=None,
    rules=(),
    dropout=None,
    dlse=None,
    dbias=False,
    tile=DEFAULT_TILE,
    observe=None,
    dtype=np.float64,
    order="v2",
):
    """Compute the gradients of sum(dO * O) + sum(dlse * lse) of packed sequences.

    Parameters
    ----------
    O, lse, dO, dlse : array_like (rows, Hq, dv), (Hq, rows), (rows, Hq, dv), (Hq, rows)
        As `backward.attention_backward`.
    and all others
        As `attention` here, and `backward.attention_backward`.

    Returns
    -------
    dQ, dK, dV, and dbias if asked for
        Of the shapes of Q, K, V and the bias; 0 past the last sequence.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it and what was expected.
    """
    if order not in ORDERS:
        raise ValueError(f'order must be "v1" or "v2", got {order!r}')
    options = {"scale": scale, "causal": causal, "align": align, "mask": mask, "rules": rules, "dropout": dropout}
    options |= {"tile": tile, "observe": observe, "dtype": dtype}
    dlse = np.zeros(np.shape(lse)) if dlse is None else dlse
    arrays = {"Q": Q, "K": K, "V": V, "O": O, "lse": lse, "dO": dO, "dlse": dlse}
    like = {"O": "rows Hq dv", "lse": "Hq rows", "dO": "rows Hq dv", "dlse": "Hq rows"}
    arrays, make_head, at_q, at_k = pack(arrays, like, cu_seqlens_q, cu_seqlens_k, options)
    gradients = {f"d{name}": np.full(arrays[name].shape, np.nan, dtype) for name in "QKV"}
    for name, at in (("dQ", at_q), ("dK", at_k), ("dV", at_k)):
        gradients[name][at[-1].stop if at else 0 :] = 0
    parts = [
        sequences(x, at_k if name[-1] in "KV" else at_q, 1 if name.endswith("lse") else 0)
        for name, x in (arrays | gradients).items()
    ]
    total, dbias = bias_gradient(make_head, dbias)
    each_group(order, make_head, zip(*parts, strict=True), total)
    return tuple(gradients.values()) if dbias is None else (*gradients.values(), dbias)
