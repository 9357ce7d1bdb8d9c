"""Ledger entries for section 18.1.1: the account of memory traffic that motivates the chapter."""

from math import log10

from verify.claims import hardware
from verify.claims.account import (
    backward_flops,
    eager_backward_elements,
    eager_forward_elements,
    fit_exponent,
    forward_flops,
)
from verify.claims.hardware import A100, H100, H200
from verify.claims.ledger import Cases, Truth, claim


@claim(
    "18.1-001", section="18.1.1", where="text", kind="number",
    title_en="Size of one score matrix", title_zh="中间矩阵",
    paraphrase="For N = 4096 the scores alone hold 16M elements, about 64 MB in FP32.",
    stated={"elements, M": 16, "FP32, MB": 64}, unit="M, MB", tol=0.005,
    verdict="units", unit_factor=1.048576, severity=1,
    right="16.8 million elements, 67.1 MB: the text counts Mi and MiB. Elsewhere it counts decimal MB (140 "
    "MB, 105 MB).",
)
def score_matrix():
    return Truth({"elements, M": 4096**2 / 1e6, "FP32, MB": 4096**2 * 4 / 1e6}, "4096 x 4096 x 4 bytes")


@claim(
    "18.1-002", section="18.1.1", where="Formula", kind="formula",
    title_en="Orders of projection, scores and weighted sum", title_zh="计算量",
    paraphrase="The projections cost O(N d^2); the scores and the weighted sum each cost O(N^2 d); the FFN "
    "O(N d^2).",
    stated={"projections": {"N": 1, "d": 2}, "scores": {"N": 2, "d": 1}, "FFN": {"N": 1, "d": 2}},
    verdict="confirmed",
)
def orders():
    costs = {
        "projections": lambda N, d: 3 * 2 * N * d * d,
        "scores": lambda N, d: forward_flops(N, d) / 2,
        "FFN": lambda N, d: 2 * 2 * N * d * (4 * d),
    }
    return Truth(
        {
            name: {
                "N": fit_exponent(lambda n, f=f: f(n, 64), 1 << 12, 1 << 20),
                "d": fit_exponent(lambda d, f=f: f(64, d), 1 << 12, 1 << 20),
            }
            for name, f in costs.items()
        },
        "exponents fitted between 2^12 and 2^20",
    )


@claim(
    "18.1-003", section="18.1.1", where="text", kind="number",
    title_en="Length from which attention dominates", title_zh="长序列",
    paraphrase="Beyond N = 2048 the attention matrix dominates a layer's compute and memory.",
    stated=2048, unit="tokens", verdict="depends", severity=2, conflicts_with=("18.2-016",),
    right="Attention passes a 4x FFN at N = 4 d_model and all linear layers at N = 6 d_model: 2048 tokens "
    "only for a model width of 512 (FFN alone); 16384 tokens at width 4096.",
)
def crossover():
    def length(width):
        # 4 N^2 width (scores and weighted sum) = 16 N width^2 (two 4x products)
        return 16 * width**2 / (4 * width)

    return Cases({f"width {w}": length(w) for w in (512, 768, 4096)}, "where 4 N^2 d equals the FFN's 16 N d^2")


@claim(
    "18.1-004", section="18.1.1", where="Listing 2", kind="table",
    title_en="HBM account of the standard forward", title_zh="HBM 访问量",
    paraphrase="Per head 4 N d + 4 N^2 elements cross HBM; at N = 4096, d = 128 that is 2.1M + 67M, or 140 "
    "MB in FP16.",
    stated={"N d terms, M": 2.1, "N^2 terms, M": 67, "elements, M": 70, "MB": 140}, unit="M, MB",
    verdict="confirmed",
)
def forward_account():
    N, d = 4096, 128
    total = eager_forward_elements(N, d)
    return Truth(
        {
            "N d terms, M": 4 * N * d / 1e6,
            "N^2 terms, M": (total - 4 * N * d) / 1e6,
            "elements, M": total / 1e6,
            "MB": total * 2 / 1e6,
        },
        f"three kernels move {total:,} elements",
    )


@claim(
    "18.1-005", section="18.1.1", where="Formula", kind="formula",
    title_en="Intensity of standard attention", title_zh="操作强度",
    paraphrase="At N = 2048, d = 64 in FP16 the intensity is 2d / (8 x 2), about 8 FLOP/byte.",
    stated=8, unit="FLOP/byte", verdict="wrong", severity=3, reading_is_guess=True,
    conflicts_with=("18.3-026", "18.3-027"),
    right="31 FLOP/byte: 4 N^2 d FLOP over 8 N^2 + 8 N d bytes is d/2 for large N. Still far left of the "
    "ridge.",
)
def intensity():
    N, d = 2048, 64
    return Truth(forward_flops(N, d) / (2 * eager_forward_elements(N, d)), "FLOP over the text's own account of bytes")


@claim(
    "18.1-006", section="18.1.1", where="text", kind="hardware",
    title_en="A100 peak, bandwidth and ridge", title_zh="Roofline 拐点",
    paraphrase="An A100 peaks at 312 TFLOP/s in FP16 with 2039 GB/s, so its ridge lies at 153 FLOP/byte.",
    stated={"TFLOP/s": 312, "GB/s": 2039, "FLOP/byte": 153}, unit="TFLOP/s, GB/s, FLOP/byte",
    verdict="confirmed", tol=0.005, source=hardware.A100_DATASHEET,
)
def a100_ridge():
    return Truth({"TFLOP/s": A100.fp16, "GB/s": A100.gb_per_s, "FLOP/byte": A100.ridge}, "80GB SXM, dense")


@claim(
    "18.1-007", section="18.1.1", where="Table 18-1", kind="hardware",
    title_en="Three generations of GPU", title_zh="GPU 算力与带宽",
    paraphrase="A100, H100 and H200: FP16 peak, bandwidth, ridge, and the growth from one to the next.",
    stated={
        "A100": {"TFLOP/s": 312, "GB/s": 2039, "ridge": 153},
        "H100": {"TFLOP/s": 989, "GB/s": 3350, "ridge": 295, "compute x": 3.2, "bandwidth x": 1.64},
        "H200": {"TFLOP/s": 989, "GB/s": 4800, "ridge": 206, "bandwidth gain, %": 43, "GB": 141},
    },
    verdict="confirmed",
    source=f"{hardware.A100_DATASHEET}; {hardware.H100_DATASHEET}; {hardware.H200_DATASHEET}",
)
def generations():
    def row(gpu):
        return {"TFLOP/s": gpu.fp16, "GB/s": gpu.gb_per_s, "ridge": gpu.ridge}

    return {
        "A100": row(A100),
        "H100": row(H100) | {"compute x": H100.fp16 / A100.fp16, "bandwidth x": H100.gb_per_s / A100.gb_per_s},
        "H200": row(H200) | {"bandwidth gain, %": 100 * (H200.gb_per_s / H100.gb_per_s - 1), "GB": H200.gb},
    }


@claim(
    "18.1-008", section="18.1.1", where="text", kind="number",
    title_en="Distance from the ridge", title_zh="拐点差距",
    paraphrase="At its 8 FLOP/byte standard attention falls short of the ridge by 19x on A100 and 37x on "
    "H100.",
    stated={"A100": 19, "H100": 37}, unit="x", verdict="wrong", severity=2, conflicts_with=("18.1-005",),
    right="4.9x and 9.5x: the divisions are right, the 8 FLOP/byte they start from is not.",
)
def ridge_distance():
    N, d = 2048, 64
    ai = forward_flops(N, d) / (2 * eager_forward_elements(N, d))
    return Truth({"A100": A100.ridge / ai, "H100": H100.ridge / ai}, f"from {ai:.1f} FLOP/byte")


@claim(
    "18.1-009", section="18.1.1", where="Table 18-1", kind="statement",
    title_en="Ridge rises with every generation", title_zh="存储墙的世代演进",
    paraphrase="Compute keeps growing faster than bandwidth, so the ridge keeps moving right.",
    stated={"A100 to H100": True, "H100 to H200": True}, verdict="wrong", severity=1,
    right="From H100 to H200 bandwidth grew by 43 % at equal compute: the ridge fell from 295 to 206 "
    "FLOP/byte, as the table's own last row says.",
    source=f"{hardware.H100_DATASHEET}; {hardware.H200_DATASHEET}",
)
def ridge_trend():
    return Truth(
        {"A100 to H100": H100.ridge > A100.ridge, "H100 to H200": H200.ridge > H100.ridge},
        f"ridges {A100.ridge:.0f}, {H100.ridge:.0f}, {H200.ridge:.0f} FLOP/byte",
    )


@claim(
    "18.1-010", section="18.1.1", where="text", kind="hardware",
    title_en="Bandwidth of SRAM against HBM", title_zh="带宽差距",
    paraphrase="On-chip SRAM is nearly ten times as fast as HBM.",
    stated=10, unit="x", verdict="confirmed", tol=0.1, source=hardware.A100_WHITEPAPER,
)
def sram_bandwidth():
    return Truth(A100.shared_tb_per_s * 1e3 / A100.gb_per_s, "128 bytes a clock and SM at 1.41 GHz, 108 SMs")


@claim(
    "18.1-011", section="18.1.1", where="text", kind="hardware",
    title_en="Capacity of SRAM against HBM", title_zh="容量差距",
    paraphrase="On-chip SRAM is five orders of magnitude smaller than HBM.",
    stated=5, unit="orders of magnitude", verdict="depends", severity=1, tol=0.15,
    source=hardware.A100_DATASHEET,
    right="5.6 orders for one SM's 192 KiB against 80 GB, 3.6 for all 108 SMs together; the bandwidth ratio "
    "beside it is for all SMs together.",
)
def sram_capacity():
    one = A100.l1_kib * 1024
    return Cases({"one SM": log10(A100.gb * 1e9 / one), "all SMs": log10(A100.gb * 1e9 / (one * A100.sms))})


@claim(
    "18.1-012", section="18.1.1", where="Formula", kind="formula",
    title_en="HBM account of the standard backward", title_zh="反向传播的单头 HBM I/O",
    paraphrase="The backward pass moves about 4 N d + 3 N^2 elements a head (105 MB at N = 4096, d = 128).",
    stated={"N d terms": 4, "N^2 terms": 3}, verdict="wrong", severity=2, conflicts_with=("18.3-036",),
    right="Five kernels move 8 N d + 7 N^2 elements (243 MB). Even one that reads P once and writes and "
    "reads dS once must read Q, K, V, dO and write dQ, dK, dV: 7 N d + 3 N^2.",
)
def backward_account():
    big = 1 << 20
    eager = {
        "N d terms": (eager_backward_elements(big, 1) - 7 * big * big) / big,
        "N^2 terms": eager_backward_elements(big, 0) / big**2,
    }
    least = {"N d terms": 4 + 3, "N^2 terms": 3}
    return Cases({"a kernel per operation": eager, "P read once, dS written and read once": least})


@claim(
    "18.1-013", section="18.1.1", where="text", kind="number",
    title_en="Traffic of a training step's attention", title_zh="前向+反向合计",
    paraphrase="Forward and backward make 245 MB a head and 3.9 GB for 16 heads.",
    stated={"one head, MB": 245, "16 heads, GB": 3.9}, unit="MB, GB", verdict="depends", severity=2,
    conflicts_with=("18.1-012",),
    right="381 MB and 6.1 GB when each operation is a kernel. 246 MB needs a backward pass that reads P once "
    "and writes and reads dS once, which no sequence of matrix-product calls does.",
)
def step_account():
    N, d = 4096, 128

    def total(backward):
        one = 2 * (eager_forward_elements(N, d) + backward)
        return {"one head, MB": one / 1e6, "16 heads, GB": 16 * one / 1e9}

    return Cases(
        {
            "a kernel per operation": total(eager_backward_elements(N, d)),
            "P read once, dS written and read once": total(7 * N * d + 3 * N * N),
        }
    )


@claim(
    "18.1-014", section="18.1.1", where="text", kind="statement",
    title_en="Recomputation removes the N x N matrices", title_zh="重计算策略",
    paraphrase="Recomputing S and P in the backward pass frees HBM of every N x N matrix, at extra "
    "arithmetic.",
    stated={"N^2 elements kept for the backward": 0, "FLOP ratio": 1.25}, verdict="confirmed",
)
def recompute_trade():
    ratio = backward_flops(4096, 128, recompute=True) / backward_flops(4096, 128, recompute=False)
    return Truth({"N^2 elements kept for the backward": 0, "FLOP ratio": ratio}, "O, and two numbers a row, are kept")
