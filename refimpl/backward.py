"""Backward pass: gradients of Q, K and V from O and lse; S and P are computed again, nothing N x N is stored.

**Idea**: lse holds m and l of a row in one number, so P_ij = exp(S_ij - lse_i) is final at once: no online
softmax. And the row sum that the softmax's derivative needs, rowsum(P * dP), equals D = rowsum(dO * O): it
is known before any tile is visited, from O alone. Then dS = P * (dP - D) with dP = dO V^T, and

    dV = P^T dO        dQ = scale dS K        dK = scale dS^T Q

**Changed from** the forward pass: every tile of S takes part in two sums, one along its rows (dQ) and one
along its columns (dK, dV), and no loop order keeps both on chip. order="v1" has K and V outside and sends
dQ round through HBM; order="v2" takes two passes, one for dK and dV and one for dQ, and computes S and dP
twice instead. All query heads of a K/V head add to the same dK_j and dV_j. Masks are honoured by masking
alone. Dropout's factor Z multiplies P and dP but not the P in dS: D already holds it, through O. A score
rule multiplies dS by its derivative. A gradient that reaches lse comes back as P dlse, so it enters with D.

**Traffic**: D costs one pass over O and dO, `fills_D`, to be added to either order. A visit loads Q_i,
dO_i, lse_i and D_i; in v1 also dQ_acc, in fp32, with first and last visit as in step2_flash_v1. K/V tiles
are loaded once for all query heads that share them, but for the dQ pass of v2.

    fills_D = B*Hq*Nq*(2*dv*e + f)
    fills_v1 = B*(2*Hk*Nk*(d + dv)*e + Hq*Nq*(max(Tc, 1)*((d + dv)*e + 2*f) + d*e + 2*max(Tc - 1, 0)*d*f))
    fills_v2 = B*(2*Hk*Nk*(d + dv)*e + Hq*(Nq*((Tc + 1)*((d + dv)*e + 2*f) + d*e) + Tr*Nk*(d + dv)*e))

**Numerics**: P from lse differs from the forward's P by the rounding of lse. dP - D cancels where a row has
all its weight on one key. scale is applied once, to the finished sums. Tiles are summed in a fixed order,
so that runs repeat to the bit.

**Source**: order v1: Dao et al. 2022, "FlashAttention", appendix B.4, algorithm 4, and D: appendix B.2,
equation 4; from lse alone: Dao 2023, "FlashAttention-2", section 3.1.2, algorithm 2, which keeps K and V
outside and adds dQ up atomically. order v2, free of atomics, is how the fused-attention tutorial of Triton
splits it.
"""

from itertools import product

import numpy as np

from refimpl.heads import bias_gradient, check, prepare
from refimpl.softmax import pivot, rowsum, weigh
from refimpl.tiling import DEFAULT_TILE, spans


def row_dots(O, dO, dlse, D, head):
    """Write D = rowsum(dO * O) - dlse (Nq, 1) of one head."""
    for rows in spans(len(O), head.tile.Br):
        # load
        O_i = head.load("O", O[rows])
        dO_i = head.load("dO", dO[rows])

        # write
        head.store("D", D[rows], rowsum(dO_i * O_i) - dlse[rows])


def recompute(Q_i, K_j, V_j, dO_i, lse_i, D_i, rows, cols, head, dbias=None):
    """Return who sees what, Z_ij, P_ij and dS_ij, the gradient of scale q.k; add to dbias if there is one.

    P and dS are 0 where hidden: a NaN behind the mask, or in the row, stays where it is. An empty row sees
    nothing, whatever made it empty.
    """
    # scores
    states = head.states(head.scale * (Q_i @ K_j.T), rows, cols)
    S_ij = states[-1]
    seen = head.visible(rows, cols) & (S_ij != -np.inf) & (lse_i != -np.inf)

    # softmax
    Z_ij = head.dropout(rows, cols)
    P_ij = np.where(seen, np.exp(S_ij - pivot(lse_i)), 0)
    dP_ij = np.where(Z_ij == 0, 0, Z_ij * (dO_i @ V_j.T))
    dS_ij = np.where(seen, P_ij * (dP_ij - D_i), 0)
    return seen, Z_ij, P_ij, head.unscore(states, dS_ij, rows, cols, dbias)


def load_rows(Q, dO, lse, D, rows, head):
    """Load what a visit needs of its query rows."""
    named = (("Q", Q), ("dO", dO), ("lse", lse), ("D", D))
    return (head.load(name, x[rows]) for name, x in named)


def keys_outer(Q, K, V, dO, lse, D, dQ, dK, dV, dbias, heads):
    """Fill dQ (G, Nq, d), dK (Nk, d), dV (Nk, dv) of one K/V head and its G query heads, order v1."""
    tile, scale = heads[0].tile, heads[0].scale
    dQ_sum = heads[0].scratch(*Q.shape)
    for cols in spans(len(K), tile.Bc) or [slice(0, 0)]:
        # load
        K_j = heads[0].load("K", K[cols])
        V_j = heads[0].load("V", V[cols])
        dK_j, dV_j = np.zeros_like(K_j), np.zeros_like(V_j)
        for (g, head), rows in product(enumerate(heads), spans(Q.shape[1], tile.Br)):
            # load
            Q_i, dO_i, lse_i, D_i = load_rows(Q[g], dO[g], lse[g], D[g], rows, head)
            dQ_acc = np.zeros_like(Q_i) if cols.start == 0 else head.load("dQ_acc", dQ_sum[g, rows])

            # scores, softmax
            seen, Z_ij, P_ij, dS_ij = recompute(Q_i, K_j, V_j, dO_i, lse_i, D_i, rows, cols, head, dbias)

            # accumulate
            dV_j = dV_j + weigh(P_ij.T, dO_i, seen.T, Z_ij.T)
            dK_j = dK_j + weigh(dS_ij.T, Q_i, seen.T)
            dQ_acc = dQ_acc + weigh(dS_ij, K_j, seen)

            # write
            if cols.stop < len(K):
                head.store("dQ_acc", dQ_sum[g, rows], dQ_acc)
            else:
                head.store("dQ", dQ[g, rows], scale * dQ_acc)

        # write
        heads[0].store("dK", dK[cols], scale * dK_j)
        heads[0].store("dV", dV[cols], dV_j)


def two_passes(Q, K, V, dO, lse, D, dQ, dK, dV, dbias, heads):
    """Fill dQ (G, Nq, d), dK (Nk, d), dV (Nk, dv) of one K/V head and its G query heads, order v2."""
    tile, scale = heads[0].tile, heads[0].scale
    for cols in spans(len(K), tile.Bc):
        # load
        K_j = heads[0].load("K", K[cols])
        V_j = heads[0].load("V", V[cols])
        dK_j, dV_j = np.zeros_like(K_j), np.zeros_like(V_j)
        for (g, head), rows in product(enumerate(heads), spans(Q.shape[1], tile.Br)):
            # load
            Q_i, dO_i, lse_i, D_i = load_rows(Q[g], dO[g], lse[g], D[g], rows, head)

            # scores, softmax
            seen, Z_ij, P_ij, dS_ij = recompute(Q_i, K_j, V_j, dO_i, lse_i, D_i, rows, cols, head, dbias)

            # accumulate
            dV_j = dV_j + weigh(P_ij.T, dO_i, seen.T, Z_ij.T)
            dK_j = dK_j + weigh(dS_ij.T, Q_i, seen.T)

        # write
        heads[0].store("dK", dK[cols], scale * dK_j)
        heads[0].store("dV", dV[cols], dV_j)

    for (g, head), rows in product(enumerate(heads), spans(Q.shape[1], tile.Br)):
        # load
        Q_i, dO_i, lse_i, D_i = load_rows(Q[g], dO[g], lse[g], D[g], rows, head)
        dQ_acc = np.zeros_like(Q_i)
        for cols in spans(len(K), tile.Bc):
            # load
            K_j = head.load("K", K[cols])
            V_j = head.load("V", V[cols])

            # scores, softmax
            seen, _, _, dS_ij = recompute(Q_i, K_j, V_j, dO_i, lse_i, D_i, rows, cols, head)

            # accumulate
            dQ_acc = dQ_acc + weigh(dS_ij, K_j, seen)

        # write
        head.store("dQ", dQ[g, rows], scale * dQ_acc)


ORDERS = {"v1": keys_outer, "v2": two_passes}


def each_group(order, make_head, sequences, dbias):
    """Run an order on every K/V head with its query heads.

    `sequences` gives, for each batch entry, Q, K, V, O, lse, dO, dlse and dQ, dK, dV to fill, each with its heads
    first and its rows second.
    """
    with np.errstate(all="ignore"):  # a NaN in an input must travel on in silence
        for b, (Q, K, V, O, lse, dO, dlse, dQ, dK, dV) in enumerate(sequences):
            size = len(Q) // len(K)
            for k in range(len(K)):
                group = slice(k * size, (k + 1) * size)
                heads = [make_head(b, h) for h in range(len(Q))[group]]
                D = heads[0].scratch(size, Q.shape[1], 1)
                for head, *rows in zip(heads, O[group], dO[group], dlse[group, :, None], D, strict=True):
                    row_dots(*rows, head)
                rows = Q[group], K[k], V[k], dO[group], lse[group, :, None], D
                ORDERS[order](*rows, dQ[group], dK[k], dV[k], dbias, heads)


def attention_backward(
    Q,
    K,
    V,
    O,
    lse,
    dO,
    *,
    scale=None,
    causal=False,
    align="bottom_right",
    mask=None,
    rules=(),
    lengths_q=None,
    lengths_k=None,
    dropout=None,
    dlse=None,
    dbias=False,
    tile=DEFAULT_TILE,
    observe=None,
    dtype=np.float64,
    order="v2",
):
    """Compute the gradients of sum(dO * O) + sum(dlse * lse) with respect to Q, K and V.

    Parameters
    ----------
    Q, K, V : array_like (B, Hq, Nq, d), (B, Hk, Nk, d), (B, Hk, Nk, dv), of one floating-point type
    O, lse : array_like (B, Hq, Nq, dv), (B, Hq, Nq)
        What the forward pass returned for these arguments; lse in natural logarithm.
    dO : array_like (B, Hq, Nq, dv)
        Gradient of O.
    scale, causal, align, mask, rules, lengths_q, lengths_k, dropout, tile, observe, dtype
        As the forward pass, e.g. `step3_flash_v2.attention`. Loads and stores are observed, visits are not.
    dlse : array_like (B, Hq, Nq), optional
        Gradient of lse; none if left out.
    dbias : bool
        Whether to return the gradient of the rules' bias as well.
    order : "v1" or "v2"
        One pass with dQ going round through HBM, or two passes.

    Returns
    -------
    dQ, dK, dV : ndarray
        Of the shapes of Q, K, V and the arithmetic type. 0 in a row that sees no key and in a key that is
        not seen.
    dbias : ndarray
        If asked for; of the shape of the bias, summed over the axes along which it was broadcast.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it and what was expected.
    """
    if order not in ORDERS:
        raise ValueError(f'order must be "v1" or "v2", got {order!r}')
    dlse = np.zeros(np.shape(lse)) if dlse is None else dlse
    arrays = {"Q": Q, "K": K, "V": V, "O": O, "lse": lse, "dO": dO, "dlse": dlse}
    like = {"O": "B Hq Nq dv", "lse": "B Hq Nq", "dO": "B Hq Nq dv", "dlse": "B Hq Nq"}
    arrays, sizes = check(arrays, like)
    make_head = prepare(
        sizes, scale=scale, causal=causal, align=align, mask=mask, rules=rules, lengths_q=lengths_q,
        lengths_k=lengths_k, dropout=dropout, tile=tile, observe=observe, dtype=dtype,
    )  # fmt: skip
    inputs = arrays.values()
    gradients = [np.full(arrays[name].shape, np.nan, dtype) for name in "QKV"]
    total, dbias = bias_gradient(make_head, dbias)
    each_group(order, make_head, zip(*inputs, *gradients, strict=True), total)
    return tuple(gradients) if dbias is None else (*gradients, dbias)
