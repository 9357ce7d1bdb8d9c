"""The pseudo-code of section 18.4, transcribed in behaviour and run against fp64, each fault beside its repair.

Every function takes single-head (N, d) arrays, as the listings do; `per_head` loops over batch and heads outside.
"""

import numpy as np

from refimpl.tiling import cdiv
from verify.claims.ledger import Truth, claim
from verify.claims.trial import TRIALS, everywhere, judge_backward, judge_forward, per_head


def tiled_forward(Q, K, V, Br, Bc, scale, *, state_rows=None, with_statistics=False):
    """Both forward listings of 18.4: Q tile outside, K/V tiles inside, local maximum, two rescaling factors.

    `state_rows` is how many rows m, l and O are given: the listings take Br whatever the tile has left, which a
    ragged last tile does not broadcast against. None repairs it.
    """
    N = len(Q)
    O = np.zeros((N, V.shape[1]))
    m_all, l_all = np.zeros(N), np.zeros(N)
    for start in range(0, cdiv(N, Br) * Br, Br):
        Q_i = Q[start : start + Br]
        rows = len(Q_i) if state_rows is None else state_rows
        m_i, l_i, O_i = np.full(rows, -np.inf), np.zeros(rows), np.zeros((rows, V.shape[1]))
        for first in range(0, len(K), Bc):
            S_ij = Q_i @ K[first : first + Bc].T * scale
            m_tile = S_ij.max(axis=1)
            P_tile = np.exp(S_ij - m_tile[:, None])
            m_new = np.maximum(m_i, m_tile)
            old, new = np.exp(m_i - m_new), np.exp(m_tile - m_new)
            l_i = old * l_i + new * P_tile.sum(axis=1)
            O_i = old[:, None] * O_i + new[:, None] * (P_tile @ V[first : first + Bc])
            m_i = m_new
        O[start : start + Br] = O_i / l_i[:, None]
        m_all[start : start + Br], l_all[start : start + Br] = m_i, l_i
    return (O, m_all, l_all) if with_statistics else O


def framework(repaired):
    """Judge the high-level listing of 18.4.1, as printed or with the state sized by the tile."""

    def run(Q, K, V, Br, Bc):
        def one(q, k, v):
            rows = None if repaired else Br
            return tiled_forward(q, k, v, Br, Bc, 1 / np.sqrt(q.shape[1]), state_rows=rows)

        return per_head(one, 1)(Q, K, V)

    return judge_forward(run)


@claim(
    "18.4-010", section="18.4.1", where="Listing 1", kind="listing",
    title_en="Tiled forward framework", title_zh="分块算法框架",
    paraphrase="The two-level loop with online softmax, for any N, Br and Bc.",
    stated=everywhere(), verdict="wrong", severity=2,
    right="Right whenever Br divides N, for any number of key tiles and ragged keys. A last query tile with "
    "fewer than Br rows meets a state of Br rows and raises. Size the state by the rows the tile has.",
    mended=lambda: framework(repaired=True)[0],
)
def framework_listing():
    return Truth(*framework(repaired=False))


def with_names(verdicts, told, defined):
    """Add to a judgement whether the listing defines the names it reads; the rest is judged as if it did."""
    return {"defines T_r": defined} | verdicts, f"as printed T_r is undefined; with it given: {told}"


@claim(
    "18.4-039", section="18.4.3", where="Listing 1", kind="listing",
    title_en="Forward kernel", title_zh="完整 Kernel 伪代码",
    paraphrase="The annotated forward kernel: one CUDA block per query tile, K and V streamed.",
    stated={"defines T_r": True} | everywhere(), verdict="wrong", severity=2,
    right="T_r is read and never assigned. With it given, the ragged fault of 18.4.1 remains. And a block "
    "that handles one tile must not loop over all of them: in a grid of T_r blocks each would compute the "
    "whole head. Take the tile index from the grid.",
    mended=lambda: {"defines T_r": True} | framework(repaired=True)[0],
)
def kernel_listing():
    return Truth(*with_names(*framework(repaired=False), defined=False))


@claim(
    "18.4-030", section="18.4.3", where="Listing 1", kind="code",
    title_en="Meaning of softmax_scale in the kernel", title_zh="softmax_scale",
    paraphrase="The kernel multiplies QK^T by softmax_scale.",
    stated={"scores are multiplied by scale": True}, verdict="confirmed", conflicts_with=("18.2-017",),
)
def kernel_scale():
    one = {"several key tiles": TRIALS["several key tiles"]}
    ok, told = judge_forward(
        lambda Q, K, V, Br, Bc: per_head(lambda q, k, v: tiled_forward(q, k, v, Br, Bc, 1 / np.sqrt(q.shape[1])), 1)(
            Q, K, V
        ),
        one,
    )
    return Truth({"scores are multiplied by scale": ok["several key tiles"]}, f"with 1/sqrt(d): {told}")


def accumulate(m, l, x, repaired):
    """Listing of 18.4.2: merge one block of scores into (m, l); also returns the block's exponentials.

    As printed those are taken against the block's own maximum, which is not returned. The repair takes them against
    the new maximum and lets a row of minus infinities contribute nothing.
    """
    if repaired:
        m_new = np.maximum(m, x.max(axis=1))
        base = np.where(np.isinf(m_new), 0.0, m_new)
        P = np.exp(x - base[:, None])
        return m_new, np.exp(m - base) * l + P.sum(axis=1), P
    m_tile = x.max(axis=1)
    P = np.exp(x - m_tile[:, None])
    m_new = np.maximum(m, m_tile)
    return m_new, np.exp(m - m_new) * l + np.exp(m_tile - m_new) * P.sum(axis=1), P


def judge_accumulate(repaired):
    """Run the listing over blocks as a caller would, for several kinds of input."""
    rng = np.random.default_rng(0)
    plain = rng.standard_normal((6, 40))
    masked_first = plain.copy()
    masked_first[:, :10] = -np.inf
    inputs = {"random": plain, "peaked": 60 * plain, "first block masked": masked_first}
    verdicts = {}
    for name, x in inputs.items():
        V = rng.standard_normal((40, 3))
        m, l, O = np.full(6, -np.inf), np.zeros(6), np.zeros((6, 3))
        with np.errstate(invalid="ignore"):
            for first in range(0, 40, 10):
                m_new, l, P = accumulate(m, l, x[:, first : first + 10], repaired)
                # All a caller has is m, m_new and P: the only factor it can form is exp(m - m_new).
                base = np.where(np.isinf(m_new), 0.0, m_new)
                O = np.exp(m - base)[:, None] * O + P @ V[first : first + 10]
                m = m_new
            top = x.max(axis=1)
            want_l = np.exp(x - top[:, None]).sum(axis=1)
            want_O = np.exp(x - top[:, None]) @ V / want_l[:, None]
            verdicts[f"{name}: m and l"] = bool((m == top).all() and np.allclose(l, want_l, rtol=1e-12))
            verdicts[f"{name}: output"] = bool(np.allclose(O / l[:, None], want_O, rtol=1e-10))
    return verdicts


@claim(
    "18.4-016", section="18.4.2", where="Listing 1", kind="listing",
    title_en="Online accumulation function", title_zh="online_softmax_accumulate",
    paraphrase="Merges a block of scores into (m, l) and returns the block's 'local softmax output'.",
    stated={f"{kind}: {what}": True for kind in ("random", "peaked", "first block masked")
            for what in ("m and l", "output")},
    verdict="wrong", severity=3,
    right="m and l are right unless a block is masked whole (then NaN for good). The returned P is relative "
    "to the block's own maximum, which is not returned: no caller can rescale it. Return exp(x - m_new), and "
    "guard the empty row.",
    mended=lambda: judge_accumulate(repaired=True),
)
def accumulate_listing():
    return judge_accumulate(repaired=False)


def tiled_backward(Q, K, V, dO, saved, Br, Bc, scale, *, D="tile", state_rows=None):
    """Backward listing of 18.4.4; D is summed over one tile as printed, or over the row as rowsum(dO * O).

    `saved` is what the forward pass kept: O, m and l.
    """
    O, m, l = saved
    dQ, dK, dV = np.zeros_like(Q), np.zeros_like(K), np.zeros_like(V)
    for start in range(0, cdiv(len(Q), Br) * Br, Br):
        q = slice(start, start + Br)
        rows = len(Q[q]) if state_rows is None else state_rows
        dQ_i = np.zeros((rows, Q.shape[1]))
        for first in range(0, len(K), Bc):
            k = slice(first, first + Bc)
            P = np.exp(Q[q] @ K[k].T * scale - m[q, None]) / l[q, None]
            dP = dO[q] @ V[k].T
            total = (P * dP).sum(axis=1) if D == "tile" else (dO[q] * O[q]).sum(axis=1)
            dS = P * (dP - total[:, None])
            dV[k] += P.T @ dO[q]
            dK[k] += dS.T @ Q[q] * scale
            dQ_i += dS @ K[k] * scale
        dQ[q] = dQ_i
    return dQ, dK, dV


def backward(*, D, sized):
    """Judge the backward listing with its faults left in or repaired."""

    def run(Q, K, V, dO, Br, Bc):
        def one(q, k, v, g):
            scale = 1 / np.sqrt(q.shape[1])
            saved = tiled_forward(q, k, v, Br, Bc, scale, with_statistics=True)
            return tiled_backward(q, k, v, g, saved, Br, Bc, scale, D=D, state_rows=None if sized else Br)

        return per_head(one, 3)(Q, K, V, dO)

    return judge_backward(run)


@claim(
    "18.4-046", section="18.4.4", where="Listing 1", kind="listing",
    title_en="Backward kernel", title_zh="反向 Kernel 伪代码",
    paraphrase="Rebuilds P tile by tile from m and l, and takes D as the row sum of P * dP within the tile.",
    stated={"defines T_r": True} | everywhere(), verdict="wrong", severity=3, conflicts_with=("18.4-045",),
    right="Beside the undefined T_r and the ragged last tile: D belongs to the whole row. Per tile it is "
    "right only when one tile holds all keys; otherwise dQ and dK are off by 0.2 to 0.6 on unit-variance "
    "inputs. D = rowsum(dO * O), from the O_i that the listing loads and never uses.",
    mended=lambda: {"defines T_r": True} | backward(D="row", sized=True)[0],
)
def backward_listing():
    return Truth(*with_names(*backward(D="tile", sized=False), defined=False))
