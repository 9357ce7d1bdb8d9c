"""Step 2: FlashAttention v1, one pass over K and V by online softmax, with K and V in the outer loop.

**Idea**: O can be kept up to date like l: when the maximum grows, what was accumulated under the old one is
rescaled by alpha = exp(m_i - m_new). So the first pass is not needed, and K and V are read once in all.

**Changed from step1_fused**: one pass instead of two; and the loops change places, as in the paper, so that
K_j and V_j stay on chip while all Q tiles go by. The price: m_i, l_i and O_acc of every Q tile go round
through HBM at each visit.

**Traffic**: a visit loads Q_i, m_i, l_i and O_acc and stores the last three, in fp32. The first visit
starts from nothing and loads no state; the last one writes O and lse in its place. With no keys one empty
visit writes both.

    fills = B*Hq*(e*(Nk*(d + dv) + max(Tc, 1)*Nq*d + Nq*dv) + f*Nq*(2*max(Tc - 1, 0)*(dv + 2) + 1))

**Numerics**: l and O_acc are rescaled alike, once a tile. O is divided by l once, on the last visit. The
paper divides on every visit and multiplies back on the next; without that there is less rounding, and m, l
and O_acc can be exact.

**Source**: Dao et al. 2022, "FlashAttention", section 3.1, algorithm 1, lines 5 to 15, but for the division.
"""

import numpy as np

from refimpl.heads import run
from refimpl.softmax import identity, pivot, rowmax, rowsum, weigh
from refimpl.tiling import DEFAULT_TILE, spans


def one_head(Q, K, V, O, lse, head):
    """Read Q (Nq, d), K (Nk, d), V (Nk, dv) of one head from HBM; write O (Nq, dv) and lse (Nq, 1)."""
    # Where rows wait between visits.
    m = head.scratch(len(Q), 1)
    l = head.scratch(len(Q), 1)
    O_sum = head.scratch(*O.shape)
    # With no keys an empty tile is the last one, so that O and lse are written.
    for cols in spans(len(K), head.tile.Bc) or [slice(0, 0)]:
        # load
        K_j = head.load("K", K[cols])
        V_j = head.load("V", V[cols])
        for rows in spans(len(Q), head.tile.Br):
            # load
            Q_i = head.load("Q", Q[rows])
            if cols.start == 0:
                m_i, l_i, O_acc = identity(O[rows].shape, head.dtype)
            else:
                m_i = head.load("m", m[rows])
                l_i = head.load("l", l[rows])
                O_acc = head.load("O_acc", O_sum[rows])

            # scores: a hidden key scores -inf, whatever K holds there
            seen = head.visible(rows, cols)
            S_ij = np.where(seen, head.score(head.scale * (Q_i @ K_j.T), rows, cols), -np.inf)

            # softmax: pivot(m) is m, but 0 in a row with no key yet, where -inf - (-inf) would be NaN
            m_new = np.maximum(m_i, rowmax(S_ij))
            alpha = np.exp(m_i - pivot(m_new))
            P_ij = np.exp(S_ij - pivot(m_new))
            l_i = alpha * l_i + rowsum(P_ij)
            m_i = m_new

            # accumulate
            O_acc = alpha * O_acc + weigh(P_ij, V_j, seen, head.dropout(rows, cols))
            head.visit(rows, cols, m_i, l_i, O_acc)

            # write: a row that sees no key has l = 0, and is 0 rather than 0 / 0
            if cols.stop < len(K):
                head.store("m", m[rows], m_i)
                head.store("l", l[rows], l_i)
                head.store("O_acc", O_sum[rows], O_acc)
            else:
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
