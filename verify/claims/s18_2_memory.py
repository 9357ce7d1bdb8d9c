"""Ledger entries for section 18.2.4: gradients, what they need kept, peak memory, recomputation."""

from math import inf

import numpy as np

from verify.claims.account import backward_flops, eager_forward_elements, flash_forward_elements
from verify.claims.hardware import A100
from verify.claims.ledger import Bound, Cases, Elsewhere, Truth, claim, stated_in
from verify.claims.s18_2 import softmax


@claim(
    "18.2-040", section="18.2.4", where="Formula", kind="formula",
    title_en="Vectorised softmax backward", title_zh="Softmax 反向传播",
    paraphrase="ds = a * (da - <a, da>): equal to the Jacobian product, with O(n) instead of O(n^2) memory.",
    stated={"equals Jacobian product": True}, verdict="confirmed",
)
def vector_softmax_backward():
    rng = np.random.default_rng(0)
    a, g = softmax(rng.standard_normal(64)), rng.standard_normal(64)
    error = np.abs((np.diag(a) - np.outer(a, a)) @ g - a * (g - a @ g)).max()
    return Truth({"equals Jacobian product": bool(error <= 1e-14)}, f"largest difference {error:.1e}")


def gradient_errors(scale):
    """Largest error of dV = A^T dO, dQ = dS K, dK = dS^T Q against central differences, for A = softmax(scale S)."""
    rng = np.random.default_rng(1)
    Q, K, V, dO = rng.standard_normal((4, 6, 4))

    def loss(Q, K, V):
        return (softmax(scale * Q @ K.T) @ V * dO).sum()

    A = softmax(scale * Q @ K.T)
    dA = dO @ V.T
    dS = A * (dA - (A * dA).sum(1, keepdims=True))
    stated = (dS @ K, dS.T @ Q, A.T @ dO)
    worst = 0.0
    for which, grad in enumerate(stated):
        for at in np.ndindex(grad.shape):
            step = [np.zeros_like(x) for x in (Q, K, V)]
            step[which][at] = 1e-6
            up = loss(*(x + s for x, s in zip((Q, K, V), step, strict=True)))
            down = loss(*(x - s for x, s in zip((Q, K, V), step, strict=True)))
            worst = max(worst, abs(grad[at] - (up - down) / 2e-6))
    return worst


@claim(
    "18.2-041", section="18.2.4", where="Formula", kind="formula",
    title_en="Gradients of Q, K, V", title_zh="链式法则",
    paraphrase="dV = A^T dO, dA = dO V^T, dS = softmax backward, dQ = dS K, dK = dS^T Q.",
    stated={"equal to central differences": True}, verdict="depends", severity=2,
    right="With A = softmax(QK^T). The attention of 18.2.1 divides by sqrt(d); then dQ and dK need the "
    "factor too, as the listing below them has.",
)
def gradient_formulas():
    plain, scaled = gradient_errors(1.0), gradient_errors(0.5)
    return Cases(
        {
            "A = softmax(QK^T)": {"equal to central differences": plain <= 1e-7},
            "A = softmax(QK^T / sqrt(d))": {"equal to central differences": scaled <= 1e-7},
        },
        f"largest differences {plain:.0e} and {scaled:.0e}",
    )


@claim(
    "18.2-042", section="18.2.4", where="text", kind="statement",
    title_en="S is needed for the backward pass", title_zh="softmax 反向需要 S",
    paraphrase="The softmax backward, and so dQ and dK, needs S kept beside A (also the reason given in "
    "Table 18-4).",
    stated={"S needed": True, "A needed": True}, verdict="wrong", severity=2,
    right="A alone: ds = a * (da - <a, da>) has no s in it, and the listing takes S as a parameter it never "
    "reads. PyTorch saves the softmax's output, not its input. Half of the quadratic memory claimed is not "
    "needed.",
    source="PyTorch derivatives.yaml: _softmax is differentiated from its result",
)
def needs_scores():
    rng = np.random.default_rng(2)
    s, g = rng.standard_normal((2, 16))
    shifted = s + 3.7

    def from_output(a):
        return a * (g - a @ g)

    # The same A from two different S: were S needed, the gradients would differ.
    same = np.abs(from_output(softmax(s)) - from_output(softmax(shifted))).max() <= 1e-15
    return Truth({"S needed": not same, "A needed": True}, "two S that differ by a constant have one A and one dS")


@claim(
    "18.2-044", section="18.2.4", where="Table 18-6", kind="table",
    title_en="Tensors alive in the backward pass", title_zh="反向传播的中间张量",
    paraphrase="Q, K, V: 3hnd; S, A, dS, dA: hn^2 each; dO: hnd; all at two bytes, all held at once.",
    stated={"n^2 matrices": 4, "bytes / h n^2": 8, "dO, bytes / h n d": 2}, verdict="confirmed",
)
def alive():
    matrices = ("S", "A", "dS", "dA")
    return {"n^2 matrices": len(matrices), "bytes / h n^2": 2 * len(matrices), "dO, bytes / h n d": 2}


@claim(
    "18.2-045", section="18.2.4", where="Formula", kind="formula",
    title_en="Peak memory formula", title_zh="内存峰值",
    paraphrase="The peak is 2hnd + 4hn^2 bytes in FP16.",
    stated={"bytes / h n^2": 4, "bytes / h n d": 2}, verdict="inconsistent", severity=2,
    conflicts_with=("18.2-044",),
    right="The table above it keeps four n x n matrices: 8 h n^2 bytes, plus dQ, dK, dV. 4 h n^2 is what two "
    "of them take; two suffice (A, and dA overwritten by dS) if S is dropped and dS is made in place.",
)
def peak_formula():
    table = stated_in("18.2-044")
    return Elsewhere(
        {"bytes / h n^2": table["bytes / h n^2"], "bytes / h n d": table["dO, bytes / h n d"]},
        ("18.2-044",),
        "summing Table 18-6",
    )


@claim(
    "18.2-046", section="18.2.4", where="text", kind="number",
    title_en="Peak memory for 16 heads", title_zh="峰值",
    paraphrase="h = 16, d = 128: 16.8 MB + 1.07 GB = 1.09 GB at n = 4096, 4.3 GB at n = 8192.",
    stated={"n = 4096, GB": 1.09, "n = 8192, GB": 4.3}, unit="GB", verdict="depends", severity=2,
    conflicts_with=("18.2-044", "18.2-045"),
    right="2.16 GB and 8.6 GB with the four matrices of Table 18-6; the stated values for the least that can "
    "work.",
)
def peak_numbers():
    def peak(matrices, n):
        return (2 * 16 * n * 128 + 2 * matrices * 16 * n * n) / 1e9

    return Cases({f"{m} matrices": {f"n = {n}, GB": peak(m, n) for n in (4096, 8192)} for m in (2, 4)})


@claim(
    "18.2-047", section="18.2.4", where="text", kind="formula",
    title_en="Recomputing doubles the work", title_zh="时间-空间权衡",
    paraphrase="Without stored S and A the backward pass recomputes QK^T and the softmax, doubling its work.",
    stated=2, unit="x", verdict="wrong", severity=2, conflicts_with=("18.2-049",),
    right="1.25x: one product on top of four. The next paragraph says 25 % itself.",
)
def recompute_factor():
    return Truth(
        backward_flops(1024, 64, recompute=True) / backward_flops(1024, 64, recompute=False), "10 n^2 d against 8 n^2 d"
    )


@claim(
    "18.2-048", section="18.2.4", where="text", kind="formula",
    title_en="FLOPs of the standard backward", title_zh="标准反向传播 FLOPs",
    paraphrase="The standard backward takes about 8 n^2 d: dO V^T, softmax backward, dS K and dS^T Q, "
    "'two n x n products'.",
    stated={"FLOP / n^2 d": 8, "products listed": 3, "products said": 2}, verdict="wrong", severity=1,
    right="8 n^2 d is right and is four products; the list leaves out A^T dO, and the count says two.",
)
def backward_products():
    total = backward_flops(1024, 64, recompute=False) / (1024 * 1024 * 64)
    return Truth(
        {"FLOP / n^2 d": total, "products listed": total / 2, "products said": total / 2},
        "dV, dA, dQ, dK at 2 n^2 d each",
    )


@claim(
    "18.2-049", section="18.2.4", where="text", kind="formula",
    title_en="Extra work of recomputation", title_zh="重计算",
    paraphrase="Recomputing adds 2 n^2 d, 25 % of the backward's FLOP.",
    stated={"extra / n^2 d": 2, "per cent": 25}, verdict="confirmed",
)
def recompute_extra():
    extra = backward_flops(1024, 64, recompute=True) - backward_flops(1024, 64, recompute=False)
    return {
        "extra / n^2 d": extra / (1024 * 1024 * 64),
        "per cent": 100 * extra / backward_flops(1024, 64, recompute=False),
    }


@claim(
    "18.2-050", section="18.2.4", where="text", kind="number",
    title_en="Memory saved by recomputation", title_zh="显存节省",
    paraphrase="At n = 4096 and 16 heads recomputation saves about 1 GB.",
    stated=1, unit="GB", verdict="confirmed", tol=0.08,
)
def memory_saved():
    return Truth(2 * 16 * 4096**2 * 2 / 1e9, "S and A of 16 heads in FP16")


@claim(
    "18.2-051", section="18.2.4", where="text", kind="timing",
    title_en="Time cost of recomputation", title_zh="反向传播计算时间",
    paraphrase="At n = 4096 recomputing S and A costs only about 5 ms of extra backward time.",
    stated=5, unit="ms", verdict="unverifiable", severity=1,
    right="69 GFLOP take 0.22 ms at an A100's peak: 5 ms means 14 TFLOP/s, 4 % of it. And flash backward is "
    "faster than the standard one, not slower, since it saves more traffic than it adds arithmetic.",
)
def recompute_time():
    flops = 16 * 2 * 4096**2 * 128
    low = flops / A100.fp16 / 1e9
    return Bound(low, inf, "device, batch and kernel are not given", f"{flops / 1e9:.0f} GFLOP, {low:.2f} ms at peak")


@claim(
    "18.2-052", section="18.2.4", where="Figure 18-6", kind="statement",
    title_en="Statistics kept for the backward pass", title_zh="统计量",
    paraphrase="Flash keeps O and per row both a log-sum-exp and the maximum (text: the maximum and the "
    "sum).",
    stated={"numbers kept a row": 2}, verdict="depends", severity=1,
    right="v1 keeps m and l; v2 keeps only lse = m + log l, which rebuilds P as exp(S - lse). lse and m "
    "together, as in the figure, hold one number too many.",
    source="FlashAttention-2, arXiv:2307.08691, section 3.1",
)
def statistics_kept():
    rng = np.random.default_rng(3)
    S = rng.standard_normal((8, 32))
    m = S.max(1)
    lse = m + np.log(np.exp(S - m[:, None]).sum(1))
    rebuilt = np.abs(np.exp(S - lse[:, None]) - softmax(S)).max()
    assert rebuilt <= 1e-14
    return Cases(
        {"v1: m and l": {"numbers kept a row": 2}, "v2: lse": {"numbers kept a row": 1}},
        f"exp(S - lse) equals P to {rebuilt:.0e}",
    )


@claim(
    "18.2-055", section="18.2.4", where="text", kind="number",
    title_en="Traffic saved by FlashAttention", title_zh="HBM 读写量降低",
    paraphrase="Not storing the n x n matrices cuts the attention module's HBM traffic by an order of magnitude.",
    stated=10, unit="x", verdict="depends", severity=1, tol=0.1, source="FlashAttention, arXiv:2205.14135, figure 2",
    right="Counted tile fills of the forward pass fall by 3.9 at d = 64 and 2.0 at d = 128 (128-row tiles). The paper "
    "measured 9.2 for a GPT-2 step with backward, mask and dropout, where the L2 cache helps too.",
)
def traffic_saved():
    def fills(d):
        return eager_forward_elements(4096, d) / flash_forward_elements(4096, d, 128)

    return Cases({"forward, d = 64": fills(64), "forward, d = 128": fills(128), "GPT-2 step, measured": 40.3 / 4.4})
