"""The pseudo-code of the companion blog, run against fp64, and what its finite sentinel does to masked rows."""

import numpy as np

from refimpl import oracle
from verify.claims.ledger import Cases, claim
from verify.claims.trial import everywhere, judge_forward, make, per_head


def sketch(Q, K, V, *, Br, Bc, scaled, start=-1e30, mask=None, hidden=-np.inf):
    """The blog's loop: Q tiles outside, m from a finite sentinel, O / l at the end. No scale unless `scaled`."""
    d = Q.shape[1]
    out = np.empty_like(Q)
    for i in range(0, len(Q), Br):
        Q_i = Q[i : i + Br]
        o, l, m = np.zeros((len(Q_i), d)), np.zeros((len(Q_i), 1)), np.full((len(Q_i), 1), start)
        for j in range(0, len(K), Bc):
            S = Q_i @ K[j : j + Bc].T * (d**-0.5 if scaled else 1.0)
            if mask is not None:
                S = np.where(mask[i : i + Br, j : j + Bc], S, hidden)
            m_new = np.maximum(m, S.max(1, keepdims=True))
            P, alpha = np.exp(S - m_new), np.exp(m - m_new)
            o = o * alpha + P @ V[j : j + Bc]
            l = l * alpha + P.sum(1, keepdims=True)
            m = m_new
        out[i : i + Br] = o / l
    return out


def judged(scaled):
    return judge_forward(lambda Q, K, V, Br, Bc: per_head(sketch, 1)(Q, K, V, Br=Br, Bc=Bc, scaled=scaled))


@claim(
    "blog-030", section="2.1", where="Listing 1", kind="listing",
    title_en="Simplified forward pass", title_zh="flash_attn_forward",
    paraphrase="For each Q tile: loop over K, V tiles, keep m, l and O, divide at the end.",
    stated=everywhere(), verdict="depends", severity=2, mended=lambda: judged(scaled=True)[0],
    right="Right for softmax(Q K^T) V, ragged tiles included. Attention has the scale 1/sqrt(d), which is "
    "missing unless it was multiplied into Q beforehand. Nothing is stored or returned.",
)
def forward_sketch():
    bare, told = judged(scaled=False)
    scaled, told_scaled = judged(scaled=True)
    return Cases(
        {"as printed": bare, "Q scaled beforehand": scaled}, f"as printed: {told}. Scaled: {told_scaled}"
    )


@claim(
    "blog-031", section="2.2", where="text", kind="statement",
    title_en="Finite sentinel and masked rows", title_zh="有限负数作初值",
    paraphrase="A small finite number as start keeps the numbers stable and avoids the special cases of "
    "infinity.",
    stated={"row 5": True, "row 20": True, "others": True}, verdict="depends", severity=3,
    right="A row without any key ends as 0 / 0 = NaN if masked scores are -inf, and as the mean of V if "
    "they are -1e30 as well. Check l = 0 (or m = -inf) at the end and write O = 0, lse = -inf.",
)
def masked_rows():
    def run(empty_row, hidden):
        t = make(2031, Nq=48, d=8)
        mask = np.ones((48, 48), bool)
        mask[5] = not empty_row
        mask[20, :16] = False
        want = oracle.attention(t.Q, t.K, t.V, mask=mask)[0][0, 0]
        with np.errstate(all="ignore"):
            got = sketch(t.Q[0, 0], t.K[0, 0], t.V[0, 0], Br=16, Bc=16, scaled=True, mask=mask, hidden=hidden)
        good = np.abs(got - want).max(1) < 1e-9
        return {
            "row 5": bool(good[5]),
            "row 20": bool(good[20]),
            "others": bool(np.delete(good, [5, 20]).all()),
        }, got[5, 0]

    infinite, value = run(True, -np.inf)
    finite, mean = run(True, -1e30)
    return Cases(
        {
            "every row sees a key": run(False, -np.inf)[0],
            "row 5 sees none, masked scores -inf": infinite,
            "row 5 sees none, masked scores -1e30": finite,
        },
        f"row 5 wants 0 and gets {value} with -inf, {mean:.3f} (the mean of V) with -1e30; row 20's first "
        "tile is masked",
    )


@claim(
    "blog-032", section="3.1", where="text", kind="statement",
    title_en="Ladder of validation", title_zh="正确性验证矩阵",
    paraphrase="A hand case (N = 4, d = 2, integers), fp64 on random and stressed input, and a framework "
    "cross-check find a wrong kernel.",
    stated={"hand case finds a missing scale": True, "identical queries find it": True}, verdict="depends",
    severity=2,
    right="Only if the case can tell. With d = 2 the missing scale shows; with equal keys (all scores "
    "equal) no fault in scale or maximum can show. Several heads, ragged lengths and Br != Bc are missing "
    "from the ladder; 18.5's listings would pass it.",
)
def ladder():
    def finds(Q, K, V):
        want = oracle.attention(Q[None, None], K[None, None], V[None, None])[0][0, 0]
        return bool(np.abs(sketch(Q, K, V, Br=2, Bc=2, scaled=False) - want).max() > 1e-6)

    Q = np.array([[1, 0], [0, 2], [-1, 1], [2, 2]], float)
    K, V = Q[::-1].copy(), np.arange(8, dtype=float).reshape(4, 2)
    same_q, same_k = np.ones((4, 2)), np.ones((4, 2))
    keys = ("hand case finds a missing scale", "identical queries find it")
    return Cases(
        {
            "distinct keys": dict(zip(keys, (finds(Q, K, V), finds(same_q, K, V)), strict=True)),
            "identical keys": dict(zip(keys, (finds(Q, same_k, V), finds(same_q, same_k, V)), strict=True)),
        }
    )
