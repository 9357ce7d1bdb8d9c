"""Ledger entries for section 18.2.3: FLOPs, memory, and how both grow with the sequence."""

from math import inf

from verify.claims.account import backward_flops, fit_exponent, forward_flops
from verify.claims.ledger import Bound, Cases, Elsewhere, Truth, claim, stated_in

MI, GI = 1.048576, 1.073741824
LENGTHS = (512, 2048, 8192, 32768, 131072)


def rows(*values):
    """One value for each length of Table 18-5, labelled."""
    return dict(zip((f"n = {n}" for n in LENGTHS), values, strict=True))


@claim(
    "18.2-018", section="18.2.3", where="text", kind="number",
    title_en="Matrix products in attention", title_zh="三个矩阵乘法",
    paraphrase="Standard attention consists of three matrix products (said again in 18.3.2 and 18.3.3).",
    stated=3, unit="products", verdict="wrong", severity=1,
    right="Two: QK^T and AV. The list that follows has the softmax as its third item.",
)
def products():
    n, d = 512, 64
    return Truth(round(forward_flops(n, d) / (2 * n * n * d)), "4 n^2 d FLOP at 2 n^2 d each")


@claim(
    "18.2-019", section="18.2.3", where="Formula", kind="formula",
    title_en="FLOPs of the two products", title_zh="计算复杂度推导",
    paraphrase="QK^T and AV take 2 n^2 d FLOP each; over h heads attention is O(n^2 d_model).",
    stated={"QK^T, n=1000 d=64": 128e6, "AV, n=1000 d=64": 128e6, "exponent of n": 2,
        "exponent of d_model": 1},
    verdict="confirmed",
)
def product_flops():
    return {
        "QK^T, n=1000 d=64": 1000 * 1000 * (64 + 64),
        "AV, n=1000 d=64": 1000 * 64 * (1000 + 1000),
        "exponent of n": fit_exponent(lambda n: forward_flops(n, 64), 1024, 8192),
        "exponent of d_model": fit_exponent(lambda w: 16 * forward_flops(1024, w // 16), 1024, 4096),
    }


@claim(
    "18.2-020", section="18.2.3", where="Formula", kind="formula",
    title_en="FLOPs of the softmax", title_zh="行级 Softmax",
    paraphrase="Softmax takes about 3 n^2 operations: n exponentials and n - 1 additions a row.",
    stated=3, unit="n^2", verdict="depends", severity=1, conflicts_with=("18.3-025",),
    right="3 for exp, sum and divide; 5 for the safe softmax everybody runs (max and subtract too). 18.3 "
    "counts 5.",
)
def softmax_flops():
    return Cases({"exp, sum, divide": 3, "max, subtract, exp, sum, divide": 5})


@claim(
    "18.2-016", section="18.2.3", where="text", kind="number",
    title_en="Where attention overtakes the FFN", title_zh="主导地位",
    paraphrase="Attention dominates once n > d_model.",
    stated=1, unit="n / d_model", verdict="wrong", severity=2, conflicts_with=("18.1-003",),
    right="At n = 4 d_model it equals a 4x FFN alone, at n = 6 d_model all linear layers. The example, 8192 "
    "tokens against width 1024, satisfies both.",
)
def overtakes():
    # 4 n^2 D against 16 n D^2
    return Truth(16 / 4, "4 n^2 D = 16 n D^2")


@claim(
    "18.2-021", section="18.2.3", where="Table 18-4", kind="table",
    title_en="Tensors kept for the backward pass", title_zh="标准注意力的中间张量",
    paraphrase="Q, K, V (3nd), S and A (n^2 each) and O (nd) at two bytes must be kept for the backward "
    "pass.",
    stated={"Q, K, V at n=2048 d=128, MB": 1.573, "S, MB": 8.389, "A, MB": 8.389, "O, MB": 0.524},
    verdict="confirmed", reading_is_guess=True,
)
def kept_tensors():
    n, d = 2048, 128
    return {
        "Q, K, V at n=2048 d=128, MB": 3 * n * d * 2 / 1e6,
        "S, MB": n * n * 2 / 1e6,
        "A, MB": n * n * 2 / 1e6,
        "O, MB": n * d * 2 / 1e6,
    }


@claim(
    "18.2-023", section="18.2.3", where="text", kind="number",
    title_en="Sizes of score matrices", title_zh="显存",
    paraphrase="An n x n matrix in FP16 takes 8 MB at n = 2048 and 128 MB at 8192; S and A at 32k about 4 GB "
    "a head.",
    stated={"2048, MB": 8, "8192, MB": 128, "32768 S and A, GB": 4}, unit="MB, GB", verdict="units",
    severity=1,
    unit_factor={"2048, MB": MI, "8192, MB": MI, "32768 S and A, GB": GI}, tol=0.005,
    right="8.4 MB, 134 MB and 4.3 GB: these are MiB and GiB.",
)
def matrix_sizes():
    return {"2048, MB": 2048**2 * 2 / 1e6, "8192, MB": 8192**2 * 2 / 1e6, "32768 S and A, GB": 2 * 32768**2 * 2 / 1e9}


@claim(
    "18.2-024", section="18.2.3", where="Table 18-5", kind="table",
    title_en="FLOPs of QK^T by length", title_zh="序列长度与 FLOPs",
    paraphrase="QK^T of one head with d = 128 takes 67M, 1.07G, 17.2G, 275G, 4.4T FLOP for n from 512 to "
    "131072.",
    stated=rows(67e6, 1.07e9, 17.2e9, 275e9, 4.4e12), unit="FLOP",
    verdict="confirmed",
)
def flops_by_length():
    return rows(*(forward_flops(n, 128) / 2 for n in LENGTHS))


@claim(
    "18.2-025", section="18.2.3", where="Table 18-5", kind="table",
    title_en="Size of S by length", title_zh="S 显存",
    paraphrase="One n x n FP16 matrix takes 512 KB, 8 MB, 128 MB, 2 GB, 32 GB for n from 512 to 131072.",
    stated=rows(0.512, 8, 128, 2000, 32000), unit="MB", verdict="units",
    unit_factor=rows(1.024, MI, MI, GI, GI), tol=0.002,
    right="KiB, MiB and GiB; in decimal units up to 7 % more.",
)
def scores_by_length():
    return rows(*(n * n * 2 / 1e6 for n in LENGTHS))


@claim(
    "18.2-026", section="18.2.3", where="Table 18-5", kind="table",
    title_en="Memory of a head by length", title_zh="单头总显存",
    paraphrase="All arrays of one head take about 1.5 MB, 18 MB, 258 MB, 4.1 GB, 65 GB for n from 512 to "
    "131072 (read as binary units).",
    stated=rows(1.5, 18, 258, 4.1 * 1024, 65 * 1024), unit="MiB",
    verdict="wrong", severity=1,
    right="S, A, Q, K, V and O give 1.5, 18, 264 MiB, 4.03 and 64.1 GiB: the row for 8192 counts only one of "
    "the four (n, d) arrays where the rows above count all.",
)
def head_by_length():
    return Truth(
        rows(*((2 * n * n + 4 * n * 128) * 2 / 2**20 for n in LENGTHS)),
        "two n x n and four n x d arrays at two bytes",
    )


@claim(
    "18.2-027", section="18.2.3", where="text", kind="number",
    title_en="Doubling the length", title_zh="二次复杂度",
    paraphrase="Twice the length means four times the FLOP of QK^T.",
    stated=4, unit="x", verdict="confirmed", tol=0,
)
def doubling():
    return forward_flops(4096, 128) / forward_flops(2048, 128)


@claim(
    "18.2-028", section="18.2.3", where="text", kind="number",
    title_en="8 to 64 heads at 32k on one card", title_zh="单卡",
    paraphrase="At n = 32k, with 4 GB a head, 8 to 64 heads cannot be held by one card.",
    stated={"8 heads fit in 80 GB": False, "64 heads fit in 80 GB": False}, verdict="wrong", severity=1,
    right="S and A of 8 heads take 34 GB and fit an 80 GB card (the forward pass alone even a 40 GB one); 64 "
    "heads take 275 GB and do not.",
)
def heads_on_card():
    head = 2 * 32768**2 * 2 / 1e9
    return Truth({f"{h} heads fit in 80 GB": h * head < 80 for h in (8, 64)}, f"{head:.2f} GB a head")


@claim(
    "18.2-029", section="18.2.3", where="text", kind="formula",
    title_en="Backward against forward FLOPs", title_zh="反向传播计算量",
    paraphrase="The backward pass of attention costs about twice the forward.",
    stated=2, unit="x", verdict="confirmed",
)
def backward_ratio():
    return Truth(backward_flops(1024, 64, recompute=False) / forward_flops(1024, 64), "four products against two")


@claim(
    "18.2-030", section="18.2.3", where="text", kind="number",
    title_en="Attention's share of training memory", title_zh="激活内存",
    paraphrase="For GPT models at n = 2048, attention activations are 30-50 % of training memory.",
    stated=40, unit="%", verdict="unverifiable", severity=1,
    right="It depends on batch, width, depth and optimiser; S and A take 2 h n^2 of roughly 34 n D + 5 h n^2 "
    "bytes a layer.",
    source="Korthikanti et al., arXiv:2205.05198, equation 1 (activations a layer)",
)
def activation_share():
    return Bound(0, 100, "batch, model and optimiser are not given")


@claim(
    "18.2-031", section="18.2.3", where="text", kind="formula",
    title_en="Prefill and decode", title_zh="Prefill 与 Decode",
    paraphrase="Prefill costs O(n^2 d); a decode step O(n d) over a cache that grows as O(n h d).",
    stated={"prefill": 2, "decode step": 1, "cache": 1}, unit="exponent of n", verdict="confirmed",
)
def phases():
    low, high = 1 << 10, 1 << 16
    return {
        "prefill": fit_exponent(lambda n: forward_flops(n, 128), low, high),
        "decode step": fit_exponent(lambda n: 4 * n * 128, low, high),
        "cache": fit_exponent(lambda n: 2 * n * 32 * 128, low, high),
    }


@claim(
    "18.2-032", section="18.2.3", where="Figure 18-5", kind="formula",
    title_en="Order of the softmax", title_zh="复杂度全景",
    paraphrase="The caption calls both products and the softmax O(n^2 d); the figure itself gives the "
    "softmax O(n^2).",
    stated={"exponent of d, softmax": 1}, verdict="inconsistent", severity=1, conflicts_with=("18.2-020",),
    right="O(n^2): no d in it. The figure is right.",
)
def softmax_order():
    per_pair = stated_in("18.2-020")
    return Elsewhere(
        {"exponent of d, softmax": fit_exponent(lambda d: per_pair * 1024**2, 64, 256)},
        ("18.2-020",),
        "3 n^2 does not contain d",
    )


@claim(
    "18.2-033", section="18.2.2", where="Figure 18-4", kind="statement",
    title_en="Masks act before the softmax", title_zh="掩码的作用位置",
    paraphrase="Masks are added to the scaled scores, before the softmax.",
    stated={"rows sum to 1 when masked before": True, "when zeroed after": False}, verdict="confirmed",
)
def mask_place():
    import numpy as np

    rng = np.random.default_rng(6)
    S = rng.standard_normal((8, 8))
    keep = np.tril(np.ones((8, 8), bool))
    before = np.exp(np.where(keep, S, -inf))
    before /= before.sum(1, keepdims=True)
    after = np.exp(S)
    after = np.where(keep, after / after.sum(1, keepdims=True), 0)
    return {
        "rows sum to 1 when masked before": bool(np.allclose(before.sum(1), 1)),
        "when zeroed after": bool(np.allclose(after.sum(1), 1)),
    }
