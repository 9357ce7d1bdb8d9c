"""Standard attention with the roundings of tensor cores: the honest baseline of steps 5 and 6.

**Idea**: as step 0, S and P go through HBM between three kernels. P is an operand of the second product, so it has to
be rounded to the 16 bits of the inputs; it is stored so.

**Changed from step0_standard**: P is multiplied by 1 / l, one division a row, rounded, and half as large in HBM.

**Traffic**: as step 0, P in the storage type.

    fills = B*Hq*(e*(Tc*Nq*d + Tr*Nk*(d + dv) + Nq*dv + 2*Nq*Nk) + f*(2*Nq*Nk + Nq))

**Numerics**: each weight, divided by l already, has a relative error of up to half an ulp of the inputs' type, and so
their sum need not be 1, where steps 5 and 6 round before they divide. With inputs of more bits nothing is rounded.

**Source**: Vaswani et al. 2017, "Attention is all you need", section 3.2.1, equation 1; as three passes
through HBM: Dao et al. 2022, "FlashAttention", algorithm 0.
"""

import numpy as np

from refimpl.heads import run
from refimpl.softmax import pivot, rowmax, rowsum, weigh
from refimpl.tiling import DEFAULT_TILE, spans


def one_head(Q, K, V, O, lse, head):
    """Read Q (Nq, d), K (Nk, d), V (Nk, dv) of one head from HBM; write O (Nq, dv) and lse (Nq, 1)."""
    S = head.scratch(len(Q), len(K))
    P = head.scratch(len(Q), len(K))
    for rows in spans(len(Q), head.tile.Br):
        for cols in spans(len(K), head.tile.Bc):
            # load
            Q_i = head.load("Q", Q[rows])
            K_j = head.load("K", K[cols])

            # scores: a hidden key scores -inf, whatever K holds there
            seen = head.visible(rows, cols)
            S_ij = np.where(seen, head.score(head.scale * (Q_i @ K_j.T), rows, cols), -np.inf)

            # write
            head.store("S", S[rows, cols], S_ij)

    for rows in spans(len(Q), head.tile.Br):
        # load
        S_i = head.load("S", S[rows])

        # softmax: pivot(m) is m, but 0 in a row with no key yet, where -inf - (-inf) would be NaN
        m_i = rowmax(S_i)
        P_i = np.exp(S_i - pivot(m_i))
        l_i = rowsum(P_i)

        # write: a row that sees no key has l = 0, and is 0 rather than 0 / 0
        head.store("weights", P[rows], head.operand(np.where(l_i == 0, 0, P_i * (1 / l_i)), V))
        head.store("lse", lse[rows], m_i + np.log(l_i))

    for rows in spans(len(Q), head.tile.Br):
        O_acc = np.zeros(O[rows].shape, head.dtype)
        for cols in spans(len(K), head.tile.Bc):
            # load
            P_ij = head.load("weights", P[rows, cols])
            V_j = head.load("V", V[cols])

            # accumulate
            O_acc = O_acc + weigh(P_ij, V_j, head.visible(rows, cols), head.dropout(rows, cols))
            head.visit(rows, cols, None, None, O_acc)

        # write
        head.store("O", O[rows], O_acc)


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
