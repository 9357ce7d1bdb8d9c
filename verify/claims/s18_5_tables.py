"""Ledger entries for section 18.5.3: the timing tables of v1 against v2, judged by the rates they imply."""

from math import inf

from verify.claims.account import backward_flops, forward_flops, tflops
from verify.claims.hardware import A100, FA2, H100
from verify.claims.ledger import Bound, Cases, Elsewhere, Range, Truth, claim, stated_in

# Table 18-17: batch, N, heads, d, v1 ms, v2 ms, printed speedup.
FORWARD = [
    (8, 1024, 16, 64, 0.32, 0.14, 2.3),
    (8, 2048, 16, 64, 1.15, 0.48, 2.4),
    (8, 4096, 16, 64, 4.52, 1.71, 2.6),
    (2, 8192, 32, 128, 13.80, 4.18, 3.3),
    (1, 1024, 40, 128, 1.85, 0.87, 2.1),
    (1, 4096, 40, 128, 27.90, 10.32, 2.7),
    (4, 1024, 16, 64, 0.51, 0.29, 1.8),
    (4, 2048, 16, 64, 1.85, 0.86, 2.2),
]
# Table 18-18: batch, N, heads, d, v1 ms, v2 ms, printed speedup.
BACKWARD = [
    (4, 2048, 16, 64, 3.12, 1.82, 1.7),
    (2, 4096, 16, 64, 12.80, 6.74, 1.9),
    (1, 8192, 32, 128, 38.40, 21.33, 1.8),
]


def name(row):
    return f"B={row[0]}, N={row[1]}, H={row[2]}, d={row[3]}"


def forward_work(row, causal):
    """FLOPs of one row of the forward table."""
    B, N, H, d = row[:4]
    return B * H * forward_flops(N, d, causal=causal)


@claim(
    "18.5-060", section="18.5.3", where="text", kind="number",
    title_en="Peak of v2 on an A100", title_zh="理论峰值占比",
    paraphrase="v2 reaches up to 230 TFLOP/s on an A100, 73.7 % of 312.",
    stated={"TFLOP/s": 230, "share": 73.7}, unit="TFLOP/s, %", tol=0.005, verdict="confirmed",
    source=f"{FA2}, section 4.1",
)
def v2_peak():
    return Truth({"TFLOP/s": 230, "share": 100 * 230 / A100.fp16}, "the paper says up to 230, 73 %")


@claim(
    "18.5-061", section="18.5.3", where="Table 18-17", kind="timing",
    title_en="Forward times of v2", title_zh="前向耗时",
    paraphrase="Eight configurations take v2 0.14 to 10.32 ms on an A100.",
    stated={name(r): r[5] for r in FORWARD}, unit="ms", verdict="wrong", severity=3,
    right="B=2, N=8192, H=32, d=128 in 4.18 ms means 526 TFLOP/s (peak: 312), or 263 if the mask is causal, "
    "above the 230 that the section calls v2's best. B=8, N=4096 implies 321 without a mask; the 40-head "
    "rows only 25 to 33.",
    source=A100.source,
)
def forward_times():
    floor = {name(r): forward_work(r, causal=True) / 230e9 for r in FORWARD}
    rates = ", ".join(f"{tflops(forward_work(r, causal=False), r[5]):.0f}" for r in FORWARD)
    return Bound(
        floor,
        inf,
        "a causal forward at v2's stated best of 230 TFLOP/s",
        f"implied TFLOP/s row by row: {rates} without a mask, half of that if causal",
    )


@claim(
    "18.5-062", section="18.5.3", where="Table 18-17", kind="timing",
    title_en="Half the batch takes longer", title_zh="前向耗时",
    paraphrase="At N = 1024, H = 16, d = 64 batch 4 takes 0.51 and 0.29 ms, batch 8 takes 0.32 and 0.14 ms.",
    stated={"v1": 0.51 / 0.32, "v2": 0.29 / 0.14}, unit="time of batch 4 over time of batch 8",
    verdict="wrong", severity=3,
    right="Half the work cannot take 1.6 and 2.1 times as long on the same kernel; one half to one is "
    "possible.",
)
def half_batch():
    return Bound(0.5, 1.0, "batch 4 is half the thread blocks of batch 8, same kernel and shapes")


@claim(
    "18.5-063", section="18.5.3", where="Table 18-17", kind="table",
    title_en="Speedup column of the forward table", title_zh="加速比",
    paraphrase="v2's forward is 1.8 to 3.3 times as fast as v1's in eight configurations.",
    stated={name(r): r[6] for r in FORWARD}, unit="x", tol=0.03, verdict="confirmed",
)
def forward_speedups():
    return Truth({name(r): r[4] / r[5] for r in FORWARD}, "v1 time over v2 time")


@claim(
    "18.5-064", section="18.5.3", where="Table 18-17", kind="statement",
    title_en="Where the forward table comes from", title_zh="数据来源",
    paraphrase="The forward times are approximated from figure 3 and table 1 of the FlashAttention-2 "
    "paper.",
    stated={"figure 3": "kernel times", "table 1": "kernel times"}, verdict="wrong", severity=3,
    right="Figure 3 is the drawing of work partitioning between warps; table 1 is end-to-end training "
    "TFLOP/s of GPT models. Kernel speeds are in figures 4 to 7, in TFLOP/s, and contain none of these "
    "configurations.",
    source=FA2,
)
def forward_source():
    return Truth({"figure 3": "work partitioning between warps", "table 1": "training TFLOP/s of GPT models"})


@claim(
    "18.5-065", section="18.5.3", where="text", kind="number",
    title_en="Range of forward speedups in the paper", title_zh="前向加速比",
    paraphrase="The paper reports forward speedups of 1.7 to 3.3.",
    stated={"lo": 1.7, "hi": 3.3}, unit="x", tol=0.03, verdict="wrong", severity=1,
    right="1.7 to 3.0 (section 4 of the paper).",
    source=f"{FA2}, section 4",
)
def paper_range():
    return Truth({"lo": 1.7, "hi": 3.0})


@claim(
    "18.5-066", section="18.5.3", where="text", kind="number",
    title_en="Speedup against sequence length", title_zh="加速比随序列长度增加",
    paraphrase="From N = 1024 to 4096 the forward speedup over v1 rises from about 2 to 2.7.",
    stated={"N=1024": 2.0, "N=4096": 2.7}, unit="x", tol=0.07, verdict="depends", severity=1,
    right="Holds for the 40-head rows (2.1 to 2.7); in the batch-8 rows it goes from 2.3 to 2.6.",
)
def speedup_growth():
    by = {r[:3]: r[4] / r[5] for r in FORWARD}
    return Cases(
        {
            "B=1, H=40": {"N=1024": by[1, 1024, 40], "N=4096": by[1, 4096, 40]},
            "B=8, H=16": {"N=1024": by[8, 1024, 16], "N=4096": by[8, 4096, 16]},
        }
    )


@claim(
    "18.5-067", section="18.5.3", where="Table 18-18", kind="timing",
    title_en="Backward times against each other", title_zh="反向耗时",
    paraphrase="B=4, N=2048 takes 3.12 / 1.82 ms, B=2, N=4096 takes 12.80 / 6.74 ms (v1 / v2), same heads "
    "and d.",
    stated={"v1": 12.80 / 3.12, "v2": 6.74 / 1.82}, unit="ratio of times", verdict="wrong", severity=3,
    right="The second has twice the FLOPs of the first: about twice the time. The table says four times.",
)
def backward_ratio():
    def work(r):
        return r[0] * r[2] * backward_flops(r[1], r[3], recompute=True)

    ratio = work(BACKWARD[1]) / work(BACKWARD[0])
    return Bound(
        0.8 * ratio,
        1.2 * ratio,
        "same d and heads, throughput changes little from N = 2048 on (figure 6 of the paper)",
        f"twice the FLOPs; implied rates {', '.join(f'{tflops(work(r), r[5]):.0f}' for r in BACKWARD)} "
        "TFLOP/s",
    )


@claim(
    "18.5-068", section="18.5.3", where="Table 18-18", kind="timing",
    title_en="Backward against forward", title_zh="反向耗时",
    paraphrase="v2's backward at B=1, N=8192, H=32, d=128 takes 21.33 ms.",
    stated=21.33, unit="ms", tol=0.4, verdict="inconsistent", severity=2, conflicts_with=("18.5-061",),
    right="The forward table gives 2.09 ms for this size; five products against two make about 5 to 6 ms. "
    "One of the two is wrong, and the forward is the impossible one: at the paper's 196 TFLOP/s the "
    "backward takes 14 ms.",
    source=f"{FA2}, figure 6",
)
def backward_forward():
    forward = stated_in("18.5-061")[name(FORWARD[3])] / 2
    return Elsewhere(2.5 * forward, ("18.5-061",), f"2.5 x {forward:.2f} ms, half of the batch-2 entry")


@claim(
    "18.5-069", section="18.5.3", where="Table 18-18", kind="table",
    title_en="Speedup column of the backward table", title_zh="反向加速比",
    paraphrase="v2's backward is 1.7, 1.9 and 1.8 times as fast as v1's in three configurations.",
    stated={name(r): r[6] for r in BACKWARD}, unit="x", tol=0.02, verdict="confirmed",
)
def backward_speedups():
    return Truth({name(r): r[4] / r[5] for r in BACKWARD})


@claim(
    "18.5-070", section="18.5.3", where="text", kind="number",
    title_en="Backward speedups lie between 1.5 and 2", title_zh="反向传播加速比",
    paraphrase="The backward speedup over v1 stays within 1.5 to 2.0.",
    stated=Range(1.5, 2.0), unit="x", verdict="confirmed",
)
def backward_range():
    ratios = [r[4] / r[5] for r in BACKWARD]
    return Truth(Range(min(ratios), max(ratios)), "of table 18-18")


@claim(
    "18.5-071", section="18.5.3", where="text", kind="number",
    title_en="End-to-end training gain", title_zh="端到端训练吞吐",
    paraphrase="Training is 1.5 to 2.5 times as fast with v2 as with v1.",
    stated={"lo": 1.5, "hi": 2.5}, unit="x", verdict="wrong", severity=2,
    right="1.04 to 1.29 against v1 (2.8 against no FlashAttention at all).",
    source=f"{FA2}, table 1",
)
def end_to_end():
    table = {"1.3B 2k": (189, 196), "1.3B 8k": (170, 220), "2.7B 2k": (189, 205), "2.7B 8k": (175, 225)}
    ratios = [v2 / v1 for v1, v2 in table.values()]
    return Truth({"lo": min(ratios), "hi": max(ratios)}, "TFLOP/s a GPU in table 1 of the paper")


@claim(
    "18.5-072", section="18.5.3", where="text", kind="timing",
    title_en="Samples a second on one A100", title_zh="每秒可处理的样本数",
    paraphrase="A causal GPT with N = 2048, d = 128, H = 32 trains at 128 samples per second and GPU with "
    "v1, 205 with v2.",
    stated={"v1": 128, "v2": 205}, unit="samples/s", verdict="wrong", severity=3, reading_is_guess=True,
    right="32 heads of 128 are a width of 4096. Even a single layer of that width (201M weights, 6 FLOP a "
    "weight and token) cannot pass 126 samples a second at peak; a 7B model cannot pass 3.8. No model size "
    "is given.",
)
def samples():
    weights = 12 * 4096**2
    limit = A100.fp16 * 1e12 / (6 * weights * 2048)
    return Bound(
        0,
        limit,
        "one layer, 100 % of peak, attention FLOPs not counted",
        f"at most {limit:.0f} samples/s for one layer, "
        f"{A100.fp16 * 1000000000000.0 / (6 * 6700000000.0 * 2048):.1f} for 6.7B weights",
    )


@claim(
    "18.5-073", section="18.5.3", where="Figure 18-22", kind="table",
    title_en="Shares of peak in the figure", title_zh="TFLOPS 利用率",
    paraphrase="A100: v1 130 of 312 is 42 %, v2 230 is 74 %; H100: v1 180 of 990 is 18 %, v2 340 is 34 %.",
    stated={"A100 v1": 42, "A100 v2": 74, "H100 v1": 18, "H100 v2": 34}, unit="%", verdict="confirmed",
)
def shares():
    return Truth(
        {
            "A100 v1": 100 * 130 / A100.fp16,
            "A100 v2": 100 * 230 / A100.fp16,
            "H100 v1": 100 * 180 / H100.fp16,
            "H100 v2": 100 * 340 / H100.fp16,
        }
    )


@claim(
    "18.5-074", section="18.5.3", where="Figure 18-22", kind="number",
    title_en="Rates in the figure against the papers", title_zh="v1/v2 TFLOPS",
    paraphrase="v1 reaches 130 and v2 230 TFLOP/s on an A100; v1 180 and v2 340 on an H100.",
    stated={"A100 v1": 130, "A100 v2": 230, "H100 v1": 180, "H100 v2": 340}, unit="TFLOP/s", tol=0.05,
    verdict="confirmed",
    source=f"{FA2}, sections 1 and 4.1, figure 7; flash2 release post of July 2023 (v1: up to 124 on an "
    "A100)",
)
def rates():
    return Truth(
        {"A100 v1": 124, "A100 v2": 230, "H100 v1": 188, "H100 v2": 335}, "H100 v1 read off figure 7"
    )


@claim(
    "18.5-075", section="18.5.3", where="text", kind="statement",
    title_en="Why v2 is at 34 % on an H100", title_zh="I/O 瓶颈",
    paraphrase="v2's share of peak is lower on the H100 because attention's I/O bottleneck weighs more "
    "there.",
    stated={"HBM limits v2 to 340 TFLOP/s": True}, verdict="wrong", severity=3,
    right="HBM allows 429 TFLOP/s even if no K, V re-read ever hits the L2 cache, and v3 reaches 740 with "
    "tiles of the same height. v2 uses the Ampere instruction (mma.sync), which cannot feed Hopper's tensor "
    "cores, and no TMA.",
    source=f"{FA2}, section 4.1; Shah et al., arXiv:2407.08608, section 1",
)
def h100_limit():
    Br, N, d = 128, 8192, 128
    intensity = forward_flops(N, d) / (2 * (2 * N * d + N // Br * 2 * N * d))
    roof = intensity * H100.gb_per_s / 1e3
    return Truth(
        {"HBM limits v2 to 340 TFLOP/s": roof <= 340},
        f"{intensity:.0f} FLOP/byte by tile fills: {roof:.0f} TFLOP/s",
    )


@claim(
    "18.5-076", section="18.5.3", where="Table 18-19", kind="table",
    title_en="Running product of the ablation", title_zh="累计加速比",
    paraphrase="1.4 for sequence parallelism, 1.3 for warp softmax, about 1 for fewer other FLOPs, 1.7 for "
    "causal skipping: together 1.4, 1.8, 1.8, 3.0.",
    stated={"sequence": 1.4, "warp": 1.8, "other FLOPs": 1.8, "causal": 3.0}, unit="x", tol=0.04,
    verdict="confirmed",
)
def cumulative():
    total, running = 1.0, {}
    for step, factor in {"sequence": 1.4, "warp": 1.3, "other FLOPs": 1.0, "causal": 1.7}.items():
        total *= factor
        running[step] = total
    return Truth(running, "the third factor taken as 1.0 of 0.95 to 1.1")


@claim(
    "18.5-077", section="18.5.3", where="Table 18-19", kind="table",
    title_en="Ablation against the forward table", title_zh="消融实验",
    paraphrase="For B=8, N=2048, H=16, d=64 all improvements together give 1.8 without and 3.0 with a "
    "causal mask.",
    stated={"no mask": 1.8, "causal": 3.0}, unit="x", verdict="inconsistent", severity=2,
    conflicts_with=("18.5-063",),
    right="Table 18-17 gives 2.4 for exactly this configuration: neither of the two.",
)
def ablation_conflict():
    value = stated_in("18.5-063")["B=8, N=2048, H=16, d=64"]
    return Elsewhere(
        {"no mask": value, "causal": value}, ("18.5-063",), "table 18-17, same batch, length, heads and d"
    )


@claim(
    "18.5-078", section="18.5.3", where="Table 18-19", kind="statement",
    title_en="Where the ablation comes from", title_zh="数据来源",
    paraphrase="The contributions of the improvements are approximated from table 2 of the "
    "FlashAttention-2 paper, its ablation study.",
    stated={"tables in the paper": 2, "ablation study": True}, tol=0, verdict="wrong", severity=3,
    right="The paper has one table (training speed) and no ablation of these improvements. The 1.7 to 1.8 "
    "for skipping causal tiles is real, but compares v2 with a mask against v2 without, not against v1.",
    source=f"{FA2}, section 3.1",
)
def ablation_source():
    return Truth({"tables in the paper": 1, "ablation study": False})


@claim(
    "18.5-079", section="18.5.3", where="Table 18-19", kind="number",
    title_en="Gain from fewer non-matmul FLOPs", title_zh="减少非 GEMM FLOPs",
    paraphrase="Fewer FLOPs outside the matrix products contribute 5 to 10 percent, says the text below "
    "the table.",
    stated={"lo": 1.05, "hi": 1.10}, unit="x", tol=0.005, verdict="inconsistent", severity=1,
    conflicts_with=("18.5-076",),
    right="The table says 0.95 to 1.1, that is from a loss of 5 to a gain of 10 percent.",
)
def non_gemm():
    return Elsewhere({"lo": 0.95, "hi": 1.1}, ("18.5-076",), "the factor printed in table 18-19")


@claim(
    "18.5-080", section="18.5.3", where="Table 18-19", kind="timing",
    title_en="Gain from sequence parallelism", title_zh="序列长度并行",
    paraphrase="Sequence parallelism alone gives 1.4 at B=8, H=16.",
    stated=1.4, unit="x", verdict="unverifiable", severity=1,
    right="Not measured in the source. B H = 128 blocks already cover 108 SMs; what is left to gain is the "
    "second, nearly empty wave: at most 1.69 with one block an SM.",
)
def sequence_gain():
    waves = -(-128 // A100.sms)
    return Bound(
        1.0,
        waves * A100.sms / 128,
        "v1 runs 128 blocks in two waves of 108",
        "bounded by the tail of the second wave",
    )
