"""Step 5: both products on tensor cores, which take operands of 16 bits and sum in fp32.

**Idea**: Q, K and V are stored in 16 bits, so their products are exact; but the second product has the weights P for an
operand, and these must be rounded to 16 bits first. The sum l is taken before that, in full.

**Changed from step4_causal**: P is rounded before it meets V, and O_acc is multiplied by 1 / l, one division a row.

**Traffic**: as step 4. What is faster is the arithmetic, and that copies run beside it.

    fills = B*Hq*(f*Nq + e*(d+dv)*(Nq + sum(max(0, min(Nk, Bc*cdiv(min(Nq, i*Br+Br)+diag, Bc))) for i in range(Tr))))

**Numerics**: with 16-bit inputs each weight has a relative error of up to 2^-11 in fp16 and 2^-8 in bf16, half an ulp
next to a power of two; below 2^-14 that is an absolute 2^-25 in fp16. They are as often too large as too small, so over
many keys the errors average out, where l and the division do not see them at all. Everything else is as in step 4. With
other inputs nothing is rounded.

**Source**: Dao 2022, "FlashAttention", section 4.3; Dao 2023, "FlashAttention-2", section 3.3; Markidis et al. 2018,
"NVIDIA Tensor Core Programmability, Performance & Precision", section III.
"""

import numpy as np

from refimpl.heads import run
from refimpl.rule import TileClass
from refimpl.softmax import identity, pivot, rowmax, rowsum, weigh
from refimpl.tiling import DEFAULT_TILE, spans


def one_head(Q, K, V, O, lse, head):
    """Read Q (Nq, d), K (Nk, d), V (Nk, dv) of one head from HBM; write O (Nq, dv) and lse (Nq, 1)."""
    for rows in spans(len(Q), head.tile.Br):
        # load
        Q_i = head.load("Q", Q[rows])
        m_i, l_i, O_acc = identity(O[rows].shape, head.dtype)
        for cols in spans(len(K), head.tile.Bc):
            kind = head.classify(rows, cols)
            if kind is TileClass.EMPTY:  # nothing of it is loaded
                continue

            # load
            K_j = head.load("K", K[cols])
            V_j = head.load("V", V[cols])

            # scores: a hidden key scores -inf, whatever K holds there
            seen = True if kind is TileClass.FULL else head.visible(rows, cols)
            S_ij = np.where(seen, head.score(head.scale * (Q_i @ K_j.T), rows, cols), -np.inf)

            # softmax: pivot(m) is m, but 0 in a row with no key yet, where -inf - (-inf) would be NaN
            m_new = np.maximum(m_i, rowmax(S_ij))
            alpha = np.exp(m_i - pivot(m_new))
            P_ij = np.exp(S_ij - pivot(m_new))
            l_i = alpha * l_i + rowsum(P_ij)
            m_i = m_new

            # accumulate
            O_acc = alpha * O_acc + weigh(head.operand(P_ij, V), V_j, seen, head.dropout(rows, cols))
            head.visit(rows, cols, m_i, l_i, O_acc)

        # write: a row that sees no key has l = 0, and is 0 rather than 0 / 0
        head.store("O", O[rows], np.where(l_i == 0, 0, O_acc * (1 / l_i)))
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
