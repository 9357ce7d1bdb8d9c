"""Step 1: one fused kernel, two passes over K; S and P never leave the chip.

**Idea**: what is cheap to compute again need not be stored. A first pass over K finds m and l of every row;
a second one computes the same scores again, and now that m is final their exponentials can go into O.

**Changed from step0_standard**: three kernels become one loop over Q tiles, with no S and no P in HBM.
There is never a whole row to take a maximum of, so m and l are updated tile by tile, and l is rescaled when
m grows.

**Traffic**: nothing N x N is left. Q_i is loaded once; every Q tile passes over K twice and over V once.

    fills = B*Hq*(e*(Nq*d + Tr*Nk*(2*d + dv) + Nq*dv) + f*Nq)

**Numerics**: l is rescaled by alpha <= 1 once a tile, which adds a rounding each. O_acc is summed from
exponentials with the final m and divided by l at the end, once an element.

**Source**: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3 (the first
pass); recomputing instead of storing: Dao et al. 2022, "FlashAttention", section 3.1.
"""

import numpy as np

from refimpl.heads import run
from refimpl.softmax import identity, pivot, rowmax, rowsum, weigh
from refimpl.tiling import DEFAULT_TILE, spans


def one_head(Q, K, V, O, lse, head):
    """Read Q (Nq, d), K (Nk, d), V (Nk, dv) of one head from HBM; write O (Nq, dv) and lse (Nq, 1)."""
    for rows in spans(len(Q), head.tile.Br):
        # load
        Q_i = head.load("Q", Q[rows])
        m_i, l_i, O_acc = identity(O[rows].shape, head.dtype)
        for cols in spans(len(K), head.tile.Bc):
            # load
            K_j = head.load("K", K[cols])

            # scores: a hidden key scores -inf, whatever K holds there
            seen = head.visible(rows, cols)
            S_ij = np.where(seen, head.score(head.scale * (Q_i @ K_j.T), rows, cols), -np.inf)

            # softmax: pivot(m) is m, but 0 in a row with no key yet, where -inf - (-inf) would be NaN
            m_new = np.maximum(m_i, rowmax(S_ij))
            alpha = np.exp(m_i - pivot(m_new))
            P_ij = np.exp(S_ij - pivot(m_new))
            l_i = alpha * l_i + rowsum(P_ij)
            m_i = m_new

        for cols in spans(len(K), head.tile.Bc):
            # load
            K_j = head.load("K", K[cols])
            V_j = head.load("V", V[cols])

            # scores
            seen = head.visible(rows, cols)
            S_ij = np.where(seen, head.score(head.scale * (Q_i @ K_j.T), rows, cols), -np.inf)

            # softmax: m is final
            P_ij = np.exp(S_ij - pivot(m_i))

            # accumulate
            O_acc = O_acc + weigh(P_ij, V_j, seen, head.dropout(rows, cols))
            head.visit(rows, cols, m_i, l_i, O_acc)

        # write: a row that sees no key has l = 0, and is 0 rather than 0 / 0
        head.store("O", O[rows], np.where(l_i == 0, 0, O_acc / l_i))
        head.store("lse", lse[rows], m_i + np.log(l_i))


def attention(
    Q,
    K,
    V,
    *,
    scale=None,
    causal=False,
    align="bottom_right",
    mask=None,
    rules=(),
    lengths_q=None,
    lengths_k=None,
    dropout=None,
    tile=DEFAULT_TILE,
    observe=None,
    dtype=np.float64,
):
    """Compute softmax(scale Q K^T) V with this step's data flow.

    Parameters
    ----------
    Q, K, V : array_like (B, Hq, Nq, d), (B, Hk, Nk, d), (B, Hk, Nk, dv), of one floating-point type
        Query head h uses K/V head h // (Hq // Hk).
    scale : float, optional
        Factor of q.k, of any sign; 1/sqrt(d) if left out.
    causal : bool
        Row r sees key j iff j <= r + Nk - Nq (align="bottom_right") or j <= r (align="top_left").
    mask : array_like of bool, broadcast to (B, Hq, Nq, Nk), optional
        True = attend.
    rules : Rule or sequence of Rule
        Further options, from `refimpl.options` or your own; score rules apply in their order, then all masks.
    lengths_q, lengths_k : array_like of int (B,), optional
        Rows and keys in use of each batch entry; bottom_right counts from these.
    dropout : philox.Dropout, optional
        Of the weights; lse knows nothing of it.
    tile : Tile
        Br query rows by Bc keys.
    observe : Observer, optional
        Hears of loads, stores and tile visits.
    dtype : np.float64 or np.float32
        Arithmetic type.

    Returns
    -------
    O : ndarray (B, Hq, Nq, dv)
        0 in a row that sees no key.
    lse : ndarray (B, Hq, Nq)
        Natural logarithm of the sum of exp(s) over the keys a row sees; -inf if there are none.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it and what was expected (`heads.check`, `heads.prepare`).
    """
    return run(
        one_head, Q, K, V, scale=scale, causal=causal, align=align, mask=mask, rules=rules, lengths_q=lengths_q,
        lengths_k=lengths_k, dropout=dropout, tile=tile, observe=observe, dtype=dtype,
    )  # fmt: skip
