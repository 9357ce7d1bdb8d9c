"""Ledger entries for section 18.8.4: hardware co-design, transfer to other operators, open questions."""

import numpy as np

from verify.claims.account import eager_forward_elements
from verify.claims.hardware import H100
from verify.claims.ledger import Bound, Cases, Elsewhere, Truth, claim

REPO = "Dao-AILab/flash-attention"
TARGETS = {"v1": "Ampere", "v2": "Ampere", "v3": "Hopper"}


@claim(
    "18.8-060", section="18.8.4", where="Figure 18-33", kind="statement",
    title_en="Three versions, three generations", title_zh="代际耦合",
    paraphrase="The three versions correspond to three GPU generations.",
    stated={"generations of v1 to v3": 3}, tol=0, verdict="wrong", severity=1,
    right="Two: v1 and v2 both target Ampere (the figure shows it so), v3 Hopper. Blackwell belongs to "
    "FlashAttention-4.",
)
def generations():
    return Truth({"generations of v1 to v3": len(set(TARGETS.values()))})


@claim(
    "18.8-061", section="18.8.4", where="Formula", kind="formula",
    title_en="Order of HBM traffic before and after", title_zh="HBM 访问量从 O(n² d)",
    paraphrase="HBM accesses fall from O(n^2 d) to O(n^2 d^2 / M).",
    stated={"standard, doubling d": 2.0}, unit="factor of the traffic", tol=0.05, verdict="wrong", severity=2,
    reading_is_guess=True,
    right="From O(n^2 + n d): S and P do not depend on d. n^2 d is the number of FLOPs. (The exponents are "
    "displaced in the print; this is the likeliest reading.)",
    source="Dao et al., FlashAttention, theorem 2",
)
def traffic_order():
    ratio = eager_forward_elements(16384, 128) / eager_forward_elements(16384, 64)
    return Truth({"standard, doubling d": ratio}, "n = 16384, d = 64 and 128")


@claim(
    "18.8-062", section="18.8.4", where="text", kind="hardware",
    title_en="SRAM of a Blackwell SM", title_zh="更大的 SRAM",
    paraphrase="B200 has a larger L1 and shared memory per SM.",
    stated={"L1 + shared, KB": 512}, verdict="wrong", severity=2, reading_is_guess=True,
    right="256 KB, 228 KB of it shared memory: as on Hopper. What is new is 256 KB of tensor memory per SM "
    "for accumulators. (The text names no number; 512 stands for any larger one.)",
    source="NVIDIA Blackwell Tuning Guide, unified shared memory",
)
def blackwell_sram():
    return Truth({"L1 + shared, KB": H100.l1_kib}, "unchanged from compute capability 9.0")


@claim(
    "18.8-063", section="18.8.4", where="text", kind="library",
    title_en="Date of FlashAttention-4", title_zh="2025 年 7 月",
    paraphrase="FlashAttention-4 was published in July 2025.",
    stated="2025-07", verdict="wrong", severity=1,
    right="First Blackwell code in the repository on 29 June 2025, presented in August 2025 (Hot Chips), "
    "first tagged beta and paper in March 2026.",
    source=f"{REPO}, commit a5e1a3c5 (2025-06-29), tag fa4-v4.0.0.beta0 (2026-03-05)",
)
def fa4_date():
    return Truth("2025-08", "the presentation; no reading gives July")


@claim(
    "18.8-064", section="18.8.4", where="text", kind="statement",
    title_en="Is there a FlashAttention-4", title_zh="FA v4 的潜在方向",
    paraphrase="A later paragraph speaks of v4 as a possible future direction.",
    stated={"v4 exists": False}, verdict="inconsistent", severity=1, conflicts_with=("18.8-063",),
    right="Two paragraphs earlier it has been published.",
)
def fa4_future():
    return Elsewhere({"v4 exists": True}, ("18.8-063",))


@claim(
    "18.8-065", section="18.8.4", where="text", kind="library",
    title_en="ELSA", title_zh="ELSA 架构",
    paraphrase="ELSA, from Carnegie Mellon, puts exponent units and a row-maximum tree into a systolic "
    "array.",
    stated={"from": "Carnegie Mellon", "exact": True}, verdict="wrong", severity=2,
    right="From Seoul National University (ISCA 2021). It is approximate: it filters out keys unlikely to "
    "matter before computing their scores.",
    source="Ham et al., ELSA, ISCA 2021",
)
def elsa():
    return Truth({"from": "Seoul National University", "exact": False})


@claim(
    "18.8-066", section="18.8.4", where="text", kind="number",
    title_en="Tiles of 256 with 256 KB", title_zh="块大小可从 128 增至 256",
    paraphrase="With 256 KB of SRAM per SM, v2 can go from tiles of 128 to 256 and halve the outer "
    "iterations.",
    stated={"fits": True}, verdict="depends", severity=2,
    right="Q, K and V tiles of 256 x 128 fit (192 KB). The accumulators do not: O and S in FP32 need 128 + "
    "256 KB of registers, and an SM has 256 KB.",
)
def tiles_of_256():
    d, size = 128, 256
    shared = 3 * size * d * 2 / 1024
    registers = (size * d + size * size) * 4 / 1024
    return Cases(
        {"shared memory": {"fits": shared <= 256}, "registers": {"fits": registers <= 256}},
        f"{shared:.0f} KB of tiles in FP16, {registers:.0f} KB of accumulators in FP32",
    )


@claim(
    "18.8-067", section="18.8.4", where="text", kind="formula",
    title_en="Merging the statistics of LayerNorm", title_zh="分块统计量合并",
    paraphrase="Mean and variance of chunks can be merged, so that one pass over the data gives both.",
    stated={"mean": True, "variance": True}, verdict="confirmed",
)
def layernorm():
    x = np.random.default_rng(1867).standard_normal(1000) + 1e4
    n, mean, M2 = 0, 0.0, 0.0
    for chunk in np.array_split(x, 7):
        delta = chunk.mean() - mean
        total = n + len(chunk)
        M2 += ((chunk - chunk.mean()) ** 2).sum() + delta**2 * n * len(chunk) / total
        mean += delta * len(chunk) / total
        n = total
    return Truth(
        {"mean": abs(mean - x.mean()) < 1e-8, "variance": abs(M2 / n - x.var()) < 1e-8},
        f"variance differs by {abs(M2 / n - x.var()):.1e}",
    )


@claim(
    "18.8-068", section="18.8.4", where="text", kind="timing",
    title_en="Gain for LayerNorm", title_zh="归一化延迟降低 30-50%",
    paraphrase="Statistics by chunks lower the latency of normalisation by 30 to 50 %.",
    stated={"lo": 30, "hi": 50}, unit="%", verdict="unverifiable", severity=1,
    right="No measurement. Three reads and a write become two and a write at best: 25 % of the bytes; half "
    "if the row stays on chip, which ordinary kernels already do.",
)
def layernorm_gain():
    return Bound(
        0,
        100 * (1 - 2 / 4),
        "bytes: two-pass statistics, normalisation and store against one read and one write",
    )


@claim(
    "18.8-069", section="18.8.4", where="text", kind="number",
    title_en="Lines of v3", title_zh="超过 5000 行",
    paraphrase="v3's core exceeds 5000 lines of CUDA.",
    stated={"over 5000": True}, verdict="confirmed",
    source=f"{REPO}, hopper/*.h, *.hpp, *.cu, *.cpp",
)
def v3_lines():
    counted = {"first release, 7f67966c": 6249, "2.8.3": 14041}
    return Truth({"over 5000": min(counted.values()) > 5000}, f"lines counted: {counted}")


@claim(
    "18.8-070", section="18.8.4", where="text", kind="timing",
    title_en="Triton against hand-written kernels", title_zh="85-90% 性能",
    paraphrase="Triton versions reach 85 to 90 % of the hand-written kernels.",
    stated={"lo": 85, "hi": 90}, unit="%", verdict="unverifiable", severity=1,
    right="No GPU or version is named. In the v2 paper (A100) Triton was at 67 to 77 % forward and about 50 "
    "% backward.",
    source="Dao, FlashAttention-2, section 4.1: v2 is 1.3 to 1.5 times as fast forward, about 2 backward",
)
def triton():
    return Bound(
        0, 100, "no configuration is named", f"v2 paper: {100 / 1.5:.0f} to {100 / 1.3:.0f} % forward"
    )


@claim(
    "18.8-071", section="18.8.4", where="text", kind="statement",
    title_en="Backward of v3 in E5M2, again", title_zh="反向为 E5M2",
    paraphrase="v3's FP8 scheme is E4M3 forward and E5M2 backward.",
    stated="E5M2", verdict="wrong", severity=2,
    right="There is no FP8 backward (18.6-022).",
    source="Shah et al., FlashAttention-3, section 3.3",
)
def e5m2_again():
    return Truth("none")


@claim(
    "18.8-072", section="18.8.4", where="text", kind="statement",
    title_en="P in INT4", title_zh="INT4 存储",
    paraphrase="Most of P is near zero, so INT4 would do for those entries.",
    stated={"error below 1 % for normal input": True}, verdict="wrong", severity=1, reading_is_guess=True,
    right="Being near zero is the reason it does not: the many small weights carry much of the sum. Linear "
    "INT4 codes of P (max 1) round two fifths of them to zero and are off by up to half a step in the rest. "
    "It would take scales per row or logarithmic codes.",
)
def int4():
    rng = np.random.default_rng(1872)
    S = rng.standard_normal((64, 1024))
    V = rng.standard_normal((1024, 32))
    P = np.exp(S - S.max(1, keepdims=True))
    low = np.round(P * 15) / 15
    want, got = P @ V / P.sum(1, keepdims=True), low @ V / low.sum(1, keepdims=True)
    error = float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))
    return Truth(
        {"error below 1 % for normal input": error < 0.01},
        f"relative RMS error {error:.0%}, {np.mean(low == 0):.0%} of the codes are 0",
    )
