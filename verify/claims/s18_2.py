"""Ledger entries for sections 18.2.1 and 18.2.2: the attention formula, heads, masks and the KV cache."""

import numpy as np

from verify.claims.account import forward_flops
from verify.claims.ledger import Cases, Elsewhere, Truth, claim, stated_in


def softmax(s):
    """Row softmax in fp64."""
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


@claim(
    "18.2-002", section="18.2.1", where="Formula", kind="formula",
    title_en="Variance of a dot product", title_zh="缩放因子与梯度稳定性",
    paraphrase="With independent unit-variance components q.k has mean 0 and variance d; dividing by sqrt(d) "
    "makes it 1.",
    stated={"variance / d": 1, "variance after scaling": 1}, verdict="confirmed", tol=0.03,
)
def dot_variance():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 40_000, 64))
    s = (q * k).sum(1)
    return Truth(
        {"variance / d": float(s.var() / 64), "variance after scaling": float((s / 8).var())},
        "40,000 Gaussian pairs, d = 64",
    )


@claim(
    "18.2-003", section="18.2.1", where="Formula", kind="formula",
    title_en="Variance of a product", title_zh="推导细节",
    paraphrase="Var(qk) = Var(q)Var(k) + Var(q)E[k]^2 + Var(k)E[q]^2 for independent q and k.",
    stated={"ratio to the formula": 1}, verdict="confirmed", tol=0.03, reading_is_guess=True,
)
def product_variance():
    rng = np.random.default_rng(1)
    q, k = 0.7 + 1.5 * rng.standard_normal(400_000), -1.2 + 0.8 * rng.standard_normal(400_000)
    formula = 1.5**2 * 0.8**2 + 1.5**2 * 1.2**2 + 0.8**2 * 0.7**2
    return Truth({"ratio to the formula": float((q * k).var() / formula)}, "non-zero means, 400,000 samples")


@claim(
    "18.2-004", section="18.2.1", where="Formula", kind="formula",
    title_en="Properties of the softmax", title_zh="归一化 保序性",
    paraphrase="Softmax rows are positive, sum to 1 and keep the order of the scores.",
    stated={"positive": True, "sums to 1": True, "keeps order": True}, verdict="depends", severity=1,
    right="In exact arithmetic. In floating point weights far below the maximum are exactly 0, and equal: "
    "order becomes 'not reversed'.",
)
def softmax_properties():
    def check(s):
        a = softmax(s)
        order = np.argsort(s)
        return {
            "positive": bool((a > 0).all()),
            "sums to 1": bool(abs(a.sum() - 1) <= 1e-12),
            "keeps order": bool((np.diff(a[order]) > 0).all()),
        }

    s = np.random.default_rng(2).standard_normal(50)
    return Cases({"scores of order 1": check(s), "scores of order 1000": check(1000 * s)}, "fp64")


@claim(
    "18.2-005", section="18.2.1", where="Formula", kind="formula",
    title_en="Softmax Jacobian", title_zh="Jacobian 矩阵",
    paraphrase="da_i/ds_j = a_i (delta_ij - a_j); stated again in 18.2.4 with the two cases written out.",
    stated={"equals central differences": True}, verdict="confirmed",
)
def jacobian():
    s = np.random.default_rng(3).standard_normal(12)
    a, h = softmax(s), 1e-6
    numeric = np.array([(softmax(s + h * e) - softmax(s - h * e)) / (2 * h) for e in np.eye(12)]).T
    error = np.abs(np.diag(a) - np.outer(a, a) - numeric).max()
    return Truth({"equals central differences": bool(error <= 1e-9)}, f"largest difference {error:.1e}")


@claim(
    "18.2-006", section="18.2.1", where="text", kind="statement",
    title_en="Attention matrices have low rank", title_zh="低秩倾向",
    paraphrase="Only a few singular values of A differ from zero, because long-range dependence is sparse.",
    stated={"low rank": True}, verdict="depends", severity=1,
    right="The 'diagonal dominance' listed beside it means full rank: a near-identity A of 128 tokens needs all 128 "
    "directions. Only smooth or repeated rows give low rank.",
)
def low_rank():
    n = 128
    x = np.arange(n)
    patterns = {
        "diagonal pattern": softmax(-np.abs(x[:, None] - x) * 2.0),
        "smooth pattern": softmax(np.outer(np.linspace(-1, 1, n), np.linspace(-1, 1, n))),
    }
    ranks = {}
    for name, A in patterns.items():
        sv = np.linalg.svd(A, compute_uv=False)
        ranks[name] = int((sv > 0.01 * sv[0]).sum())
    return Cases(
        {name: {"low rank": rank < n // 4} for name, rank in ranks.items()},
        ", ".join(f"{name}: {rank} of {n} singular values above 1 %" for name, rank in ranks.items()),
    )


@claim(
    "18.2-007", section="18.2.1", where="Figure 18-3", kind="formula",
    title_en="Shapes along the forward pass", title_zh="数据流",
    paraphrase="Q and K are (n, d_k), V and O are (n, d_v), S and A are (n, n).",
    stated={"S": [20, 20], "A": [20, 20], "O": [20, 5]}, verdict="confirmed", tol=0,
)
def shapes():
    Q, K, V = np.ones((20, 7)), np.ones((20, 7)), np.ones((20, 5))
    S = Q @ K.T
    A = softmax(S / np.sqrt(7))
    return {"S": list(S.shape), "A": list(A.shape), "O": list((A @ V).shape)}


@claim(
    "18.2-008", section="18.2.2", where="Formula", kind="formula",
    title_en="Heads do not change the work", title_zh="降维空间",
    paraphrase="h heads of width d_model / h cost as much as one head of full width.",
    stated={"FLOP ratio": 1}, verdict="confirmed", tol=0,
)
def heads_cost():
    return {"FLOP ratio": 16 * forward_flops(2048, 1024 // 16) / forward_flops(2048, 1024)}


@claim(
    "18.2-009", section="18.2.2", where="Formula", kind="formula",
    title_en="KV cache of LLaMA-7B", title_zh="KV Cache",
    paraphrase="2 n h n_layers d_k 2 bytes: 17 GB at 32k tokens, more than the model's own parameters.",
    stated={"GB": 17, "more than the weights": True}, unit="GB", verdict="confirmed",
    source="Touvron et al., LLaMA, arXiv:2302.13971, table 2 (6.7 G parameters, 32 layers, 32 heads, width "
    "4096)",
)
def kv_cache():
    size = 2 * 32768 * 32 * 32 * 128 * 2
    return Truth({"GB": size / 1e9, "more than the weights": size > 6.7e9 * 2}, "weights 13.4 GB in FP16")


@claim(
    "18.2-010", section="18.2.2", where="text", kind="number",
    title_en="Cache of grouped queries", title_zh="GQA",
    paraphrase="MQA divides the cache by h; 8 groups divide it by 4.",
    stated={"MQA": 32, "8 groups": 4}, unit="x", verdict="depends", severity=1,
    right="The factor is h/g: 4 for 32 heads (Mistral 7B), 8 for LLaMA 2 70B's 64.",
)
def gqa_factor():
    return Cases({f"{h} query heads": {"MQA": 32, "8 groups": h / 8} for h in (32, 64)})


@claim(
    "18.2-011", section="18.2.2", where="text", kind="library",
    title_en="Models with grouped queries", title_zh="主流 LLM",
    paraphrase="LLaMA 2 70B, Mistral and Gemma of 2023-24 all use GQA.",
    stated={"LLaMA 2 70B": True, "Mistral 7B": True, "Gemma 2B": True, "Gemma 7B": True}, verdict="wrong",
    severity=1,
    right="Gemma (February 2024) has one K/V head in the 2B model (MQA) and 16 for 16 in the 7B (MHA). GQA "
    "came with Gemma 2.",
    source="Touvron et al., LLaMA 2, arXiv:2307.09288; Gemma Team, arXiv:2403.08295, table 1",
)
def gqa_models():
    heads = {"LLaMA 2 70B": (64, 8), "Mistral 7B": (32, 8), "Gemma 2B": (8, 1), "Gemma 7B": (16, 16)}
    return Truth(
        {name: 1 < kv < q for name, (q, kv) in heads.items()},
        "; ".join(f"{name}: {kv} K/V for {q} query heads" for name, (q, kv) in heads.items()),
    )


@claim(
    "18.2-012", section="18.2.2", where="text", kind="statement",
    title_en="K and V of a group are loaded once", title_zh="组内复用",
    paraphrase="In FlashAttention's kernel a group's K and V are loaded once and shared by its query heads.",
    stated={"K/V fills against one load per group": 1}, unit="x", verdict="depends", severity=1,
    right="The standard grid has one block per query head, and each fills its own K and V tiles: the group's "
    "size times. What is shared is the L2 cache. Only kernels that pack a group's heads into one tile load "
    "once.",
    source="flash-attn 2.x grid (batch, heads, blocks of Q); the pack_gqa option of FlashAttention-3's "
    "interface",
)
def group_loads():
    key = "K/V fills against one load per group"
    return Cases({"heads of a group packed into one tile": {key: 1}, "a block per query head, group of 4": {key: 4}})


@claim(
    "18.2-013", section="18.2.2", where="Formula", kind="formula",
    title_en="Work left by the causal mask", title_zh="计算量减半",
    paraphrase="The causal mask keeps n (n + 1) / 2 elements, half the work.",
    stated={"elements at n = 4096": 8390656, "share": 0.5}, verdict="confirmed", tol=0.001,
)
def causal_half():
    kept = int(np.tril(np.ones((512, 512), bool)).sum())
    assert kept == 512 * 513 // 2
    return {"elements at n = 4096": 4096 * 4097 // 2, "share": 4096 * 4097 / 2 / 4096**2}


@claim(
    "18.2-014", section="18.2.2", where="Table 18-3", kind="table",
    title_en="Kinds of mask", title_zh="掩码类型",
    paraphrase="Causal, padding and arbitrary masks add 0 or minus infinity to scores: above the diagonal, "
    "in padded columns, anywhere.",
    stated={"masked weight": 0, "padded keys change real rows": False, "padded keys excluded": True},
    verdict="confirmed",
)
def mask_kinds():
    rng = np.random.default_rng(4)
    S, V = rng.standard_normal((12, 12)), rng.standard_normal((12, 3))
    pad = np.where(np.arange(12) >= 9, -np.inf, 0.0)
    A = softmax(S + pad)
    changed = V.copy()
    changed[9:] = 1e6
    return {
        "masked weight": float(A[:, 9:].max()),
        "padded keys change real rows": bool((A @ changed != A @ V).any()),
        "padded keys excluded": bool(np.allclose(A[:, :9].sum(1), 1)),
    }


@claim(
    "18.2-015", section="18.2.2", where="Listing 4", kind="code",
    title_en="Adding both masks", title_zh="掩码相加",
    paraphrase="Causal and padding masks are added to the scores and applied together.",
    stated={"padding on the right": True, "padding on the left": True}, verdict="wrong", severity=3,
    right="With padding on the left (what batched generation uses) the first rows see no key: softmax of a "
    "row of minus infinities is NaN, and its gradient spreads. Give such rows weight 0, or use a large "
    "finite negative.",
    mended=lambda: both_masks(guard=True),
)
def masks_added():
    return Truth(both_masks(guard=False), "rows without a visible key turn NaN")


def both_masks(guard):
    """Are all rows finite when causal and padding masks are added, with or without a guard for empty rows?"""
    rng = np.random.default_rng(5)
    n = 10
    S, V = rng.standard_normal((n, n)), rng.standard_normal((n, 4))
    causal = np.triu(np.full((n, n), -np.inf), 1)
    result = {}
    for side, padded in (("right", np.arange(n) >= 7), ("left", np.arange(n) < 3)):
        scores = S + causal + np.where(padded, -np.inf, 0.0)
        with np.errstate(invalid="ignore"):
            top = scores.max(1, keepdims=True)
            top = np.where(np.isinf(top), 0.0, top) if guard else top
            p = np.exp(scores - top)
            total = p.sum(1, keepdims=True)
            p = p / np.where(total == 0, 1.0, total) if guard else p / total
        result[f"padding on the {side}"] = bool(np.isfinite(p @ V).all())
    return result


@claim(
    "18.2-017", section="18.2.1", where="Listing 1", kind="code",
    title_en="What 'scale' means", title_zh="缩放参数",
    paraphrase="Here 'scale' divides the scores (default sqrt(d_k)); in the listings of 18.1.1 and 18.4.3 it "
    "multiplies.",
    stated={"scores are multiplied by scale": False}, verdict="inconsistent", severity=2,
    conflicts_with=("18.1-057", "18.4-030"),
    right="PyTorch and flash-attn multiply: softmax_scale = 1/sqrt(d). Passing that to this listing makes "
    "the scores d times too large, and 18.2.4's backward listing inherits the dividing meaning.",
)
def scale_meaning():
    others = [stated_in(id)["scores are multiplied by scale"] for id in ("18.1-057", "18.4-030")]
    return Elsewhere(
        {"scores are multiplied by scale": all(others)}, ("18.1-057", "18.4-030"), "both other listings multiply"
    )
