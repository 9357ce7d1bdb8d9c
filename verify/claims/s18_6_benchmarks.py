"""Ledger entries for section 18.6.4: the overlapped pipeline and the v3 benchmark tables."""

from itertools import pairwise

from verify.claims.account import compulsory_elements, flash_forward_elements, forward_flops
from verify.claims.hardware import FA3, H100
from verify.claims.ledger import Bound, Cases, Elsewhere, Range, Truth, claim, stated_in

REPO = "Dao-AILab/flash-attention"
# Table 18-23: pass, N, d, v2 TFLOP/s, v3 TFLOP/s, printed speedup.
ROWS = [
    ("forward", 512, 64, 186, 245, 1.32),
    ("forward", 1024, 64, 234, 330, 1.41),
    ("forward", 2048, 128, 298, 447, 1.50),
    ("forward", 4096, 128, 325, 520, 1.60),
    ("forward", 8192, 128, 340, 578, 1.70),
    ("forward", 16384, 256, 356, 676, 1.90),
    ("backward", 512, 64, 142, 213, 1.50),
    ("backward", 4096, 128, 278, 472, 1.70),
    ("backward", 16384, 256, 310, 558, 1.80),
]
# Table 18-24: d, intensity, v2 share, v3 share, printed speedup.
HEADS = [(32, 16, 28, 35, 1.15), (64, 32, 41, 53, 1.30), (128, 64, 55, 75, 1.60), (256, 128, 62, 82, 1.85)]
# Table 18-25: size, v2 BF16, v3 BF16, v3 FP8, printed FP8/v2, printed FP8/BF16.
CHAIN = [
    ("N=1024, d=64", 234, 330, 462, 1.97, 1.40),
    ("N=4096, d=128", 325, 520, 780, 2.40, 1.50),
    ("N=8192, d=128", 340, 578, 838, 2.47, 1.45),
    ("N=16384, d=256", 356, 676, 845, 2.37, 1.25),
]


def row_name(row):
    return f"{row[0]} N={row[1]}, d={row[2]}"


@claim(
    "18.6-060", section="18.6.4", where="text", kind="number",
    title_en="Steady-state latency of a tile", title_zh="稳态 tile 延迟",
    paraphrase="The slowest of the three overlapped stages sets the time of a tile; the paper measured "
    "12.6 us: loads hidden, 8.3 us of WGMMA, 4.3 us of softmax.",
    stated=12.6, unit="us", verdict="inconsistent", severity=3, conflicts_with=("18.6-046",),
    right="8.3 us by the rule in the sentence before. 12.6 is the sum of the two, that is no overlap at all "
    "(table 18-22 splits the same 12.6 into 12.1 + 0.5). The paper has no per-tile latency.",
    source=FA3,
)
def steady():
    return Elsewhere(max(8.3, 4.3), ("18.6-060",), "the larger of the two stages; their sum is 12.6")


@claim(
    "18.6-061", section="18.6.4", where="text", kind="library",
    title_en="Ampere runs the three stages in sequence", title_zh="三个阶段串行执行",
    paraphrase="On Ampere loading, products and softmax run one after another.",
    stated={"loads overlap products": False}, verdict="wrong", severity=2,
    right="v2 issues cp.async for the next tile before the products of the present one. What Ampere cannot "
    "do is leave a warp's own products running while it does softmax.",
    source=f"{REPO} v2.6.3 csrc/flash_attn/src/flash_fwd_kernel.h (cp_async_fence before gemm)",
)
def ampere_overlap():
    return Truth({"loads overlap products": True}, "copies of V fly during QK^T, copies of K during PV")


@claim(
    "18.6-062", section="18.6.4", where="Table 18-23", kind="table",
    title_en="Speedup column", title_zh="加速比",
    paraphrase="v3 is 1.32 to 1.90 times as fast as v2 forward, 1.50 to 1.80 backward.",
    stated={row_name(r): r[5] for r in ROWS}, unit="x", tol=0.005, verdict="confirmed",
)
def speedups():
    return Truth({row_name(r): r[4] / r[3] for r in ROWS})


@claim(
    "18.6-063", section="18.6.4", where="Table 18-23", kind="table",
    title_en="Peak share of v3, table against text", title_zh="v3 吞吐",
    paraphrase="v3 reaches about 75 % of FP16 peak.",
    stated=75, unit="%", tol=0.03, verdict="inconsistent", severity=2,
    conflicts_with=("18.6-062", "18.1-026"),
    right="The best row of the table is 676 TFLOP/s, 68 %. The paper reaches 740 to 756 in the row that the "
    "table gives 676.",
    source=f"{FA3}, abstract and figure 5",
)
def best_row():
    return Elsewhere(
        100 * max(r[4] for r in ROWS) / H100.fp16, ("18.6-062",), "largest v3 entry over 989.4 TFLOP/s"
    )


@claim(
    "18.6-064", section="18.6.4", where="text", kind="number",
    title_en="Gain when N doubles", title_zh="N 翻倍",
    paraphrase="Doubling N raises v2's throughput by about 15 %, v3's by about 35 %, nearly linear.",
    stated={"v2": 15, "v3": 35}, unit="%", tol=0.1, verdict="inconsistent", severity=2,
    conflicts_with=("18.6-062",),
    right="Over the table's five doublings 14 % and 23 % on average; 35 % occurs only in the first two. "
    "Linear growth would be 100 %, and throughput cannot grow past the peak.",
)
def doubling():
    forward = [r for r in ROWS if r[0] == "forward"]

    def mean(column):
        return 100 * ((forward[-1][column] / forward[0][column]) ** (1 / (len(forward) - 1)) - 1)

    each = [f"{100 * (b[4] / a[4] - 1):.0f}" for a, b in pairwise(forward)]
    return Elsewhere(
        {"v2": mean(3), "v3": mean(4)}, ("18.6-062",), f"v3 step by step: {', '.join(each)} %; d changes too"
    )


@claim(
    "18.6-065", section="18.6.4", where="text", kind="statement",
    title_en="Backward gains more than forward", title_zh="反向加速比",
    paraphrase="The backward speedup is higher than the forward one throughout.",
    stated={"N=512": True, "N=4096": True, "N=16384": True}, verdict="inconsistent", severity=1,
    conflicts_with=("18.6-062",),
    right="At N = 16384 it is lower (1.80 against 1.90). In the paper the backward gains less: 1.5 to 1.75 "
    "against 1.5 to 2.0.",
    source=f"{FA3}, abstract and section 4.1",
)
def backward_gain():
    by = {r[:2]: r[5] for r in ROWS}
    return Elsewhere(
        {f"N={n}": by["backward", n] > by["forward", n] for n in (512, 4096, 16384)},
        ("18.6-062",),
        "rows with equal N and d",
    )


@claim(
    "18.6-066", section="18.6.4", where="text", kind="hardware",
    title_en="Smallest WGMMA tile", title_zh="WGMMA 的最小有效 tile",
    paraphrase="WGMMA's smallest tile is 64 x 64, so that it cannot be filled for d < 64.",
    stated={"M": 64, "N": 64, "K": 16}, tol=0, verdict="wrong", severity=2,
    right="m64n8k16: N is any multiple of 8 up to 256. For QK^T the head dimension is K (steps of 16), not "
    "N, so d = 32 fills it too. What falls with d is the number of products per exponential.",
    source="PTX ISA, wgmma.mma_async shapes for FP16",
)
def wgmma_shape():
    return Truth({"M": 64, "N": 8, "K": 16}, "shapes m64n8k16, m64n16k16, ..., m64n256k16")


@claim(
    "18.6-067", section="18.6.4", where="Table 18-24", kind="formula",
    title_en="Arithmetic intensity against head dimension", title_zh="算术强度",
    paraphrase="The intensity is 16, 32, 64, 128 FLOP/byte for d = 32, 64, 128, 256 at N = 8192.",
    stated={f"d = {d}": ai for d, ai, *_ in HEADS}, unit="FLOP/byte", verdict="depends", severity=3,
    right="That is d / 2, the standard implementation that stores S and P. Flash kernels with 128-row tiles "
    "have about 128 by tile fills and 4096 by compulsory traffic, both independent of d.",
)
def intensity():
    N = 8192
    return Cases(
        {
            "standard, S and P in HBM": {f"d = {d}": forward_flops(N, d) / (2 * 4 * N * N) for d, *_ in HEADS},
            "flash, tile fills, Br = 128": {
                f"d = {d}": forward_flops(N, d) / (2 * flash_forward_elements(N, d, 128)) for d, *_ in HEADS
            },
            "flash, compulsory": {
                f"d = {d}": forward_flops(N, d) / (2 * compulsory_elements(N, d)) for d, *_ in HEADS
            },
        }
    )


@claim(
    "18.6-068", section="18.6.4", where="Table 18-24", kind="table",
    title_en="Utilisation against the table's own intensity", title_zh="利用率",
    paraphrase="v2 uses 28 to 62 % and v3 35 to 82 % of the tensor cores at intensities of 16 to 128 "
    "FLOP/byte.",
    stated={f"d = {d}": {"v2": u2, "v3": u3} for d, _, u2, u3, _ in HEADS}, unit="%", verdict="wrong", severity=3,
    right="With these intensities HBM would allow 5, 11, 22 and 43 %. The intensity column is wrong (it is "
    "the standard implementation's); the shares contradict table 18-23 as well.",
)
def roofline():
    limit = {f"d = {d}": 100 * ai * H100.gb_per_s / 1e3 / H100.fp16 for d, ai, *_ in HEADS}
    return Bound(
        0,
        {d: {"v2": cap, "v3": cap} for d, cap in limit.items()},
        "roofline of an H100 at the stated intensity",
        "limits: " + ", ".join(f"{cap:.0f} %" for cap in limit.values()),
    )


@claim(
    "18.6-069", section="18.6.4", where="Table 18-24", kind="table",
    title_en="Speedup column against the utilisation columns", title_zh="v3/v2 加速比",
    paraphrase="v3 is 1.15, 1.30, 1.60 and 1.85 times as fast as v2 at d = 32, 64, 128 and 256.",
    stated={f"d = {d}": s for d, *_, s in HEADS}, unit="x", tol=0.03, verdict="wrong", severity=2,
    right="The quotient of the two columns beside it is 1.25, 1.29, 1.36, 1.32: flat.",
)
def head_speedups():
    return Truth({f"d = {d}": u3 / u2 for d, _, u2, u3, _ in HEADS}, "v3 share over v2 share")


@claim(
    "18.6-070", section="18.6.4", where="Table 18-24", kind="table",
    title_en="Tables 18-23 and 18-24 at N = 8192, d = 128", title_zh="利用率",
    paraphrase="At N = 8192, d = 128 v2 uses 55 % and v3 75 % of the tensor cores.",
    stated={"v2": 55, "v3": 75}, unit="%", tol=0.05, verdict="inconsistent", severity=3,
    conflicts_with=("18.6-062",),
    right="Table 18-23 has 340 and 578 TFLOP/s for this size: 34 and 58 %.",
)
def at_8192():
    row = next(r for r in ROWS if r[:3] == ("forward", 8192, 128))
    return Elsewhere(
        {"v2": 100 * row[3] / H100.fp16, "v3": 100 * row[4] / H100.fp16}, ("18.6-062",), "over 989.4 TFLOP/s"
    )


@claim(
    "18.6-075", section="18.6.4", where="Table 18-25", kind="table",
    title_en="Columns shared with table 18-23", title_zh="v3 FP8 完整加速链条",
    paraphrase="At four sizes v2 in BF16, v3 in BF16 and v3 in FP8 reach 234 to 845 TFLOP/s.",
    stated={name: {"v2 BF16": a, "v3 BF16": b, "v3 FP8": c} for name, a, b, c, *_ in CHAIN}, unit="TFLOP/s",
    verdict="unverifiable", severity=1,
    right="Below the hardware's peaks, and the BF16 columns repeat table 18-23. The source named is the v3 "
    "paper, which has neither these sizes with d mixed nor these numbers.",
    source=FA3,
)
def chain_values():
    top = {"v2 BF16": H100.fp16, "v3 BF16": H100.fp16, "v3 FP8": H100.fp8}
    return Bound(0, {name: top for name, *_ in CHAIN}, "not in the paper; only bounded by the peaks")


@claim(
    "18.6-076", section="18.6.4", where="Table 18-25", kind="table",
    title_en="Ratios of the FP8 chain", title_zh="加速比",
    paraphrase="v3 in FP8 is 1.97 to 2.47 times as fast as v2 and 1.25 to 1.50 times as fast as v3 in "
    "BF16.",
    stated={name: {"over v2": s2, "over BF16": s3} for name, _, _, _, s2, s3 in CHAIN}, unit="x", tol=0.005,
    verdict="confirmed",
)
def chain_ratios():
    return Truth({name: {"over v2": c / a, "over BF16": c / b} for name, a, b, c, *_ in CHAIN})


@claim(
    "18.6-077", section="18.6.4", where="text", kind="number",
    title_en="Three factors of the chain", title_zh="三个独立贡献因子的乘积",
    paraphrase="1.5 (pipeline) x 1.15 (TMA) x 1.4 (FP8) explains a total of 2 to 2.5.",
    stated=Range(2.0, 2.5), unit="x", verdict="confirmed",
    source=f"{FA3}, table 2",
)
def chain_product():
    return Truth(
        1.5 * 1.15 * 1.4,
        f"the paper's ablation: warp specialisation {661 / 570:.2f}, overlap with softmax {661 / 582:.2f}; "
        "they are not separate "
        "from TMA",
    )


@claim(
    "18.6-078", section="18.6.4", where="text", kind="statement",
    title_en="FP8 gains most for small heads", title_zh="头维度较小时更显著",
    paraphrase="The FP8 gain is largest at d = 64 (1.40).",
    stated={"d with the largest gain": 64}, tol=0, verdict="inconsistent", severity=2,
    conflicts_with=("18.6-076",),
    right="The table has 1.50 and 1.45 at d = 128. In the paper the gain grows with d: about 1.2 at 64, 1.5 "
    "at 256.",
    source=f"{FA3}, figures 5, 7 and 9",
)
def largest_gain():
    rows = stated_in("18.6-076")
    best = max(rows, key=lambda name: rows[name]["over BF16"])
    return Elsewhere({"d with the largest gain": int(best.split("d=")[1])}, ("18.6-076",), f"row {best}")


@claim(
    "18.6-079", section="18.6.4", where="text", kind="statement",
    title_en="Memory becomes the bottleneck at d = 256", title_zh="内存带宽成为瓶颈",
    paraphrase="At d = 256 the intensity is high enough, so memory bandwidth becomes the limit and FP8 "
    "gains less.",
    stated={"intensity falls from d=64 to d=256": True}, verdict="wrong", severity=2,
    right="A higher intensity moves away from the bandwidth limit. By tile fills it does not depend on d at "
    "all, and FP8 doubles it.",
)
def d256():
    def ai(d, size):
        return forward_flops(16384, d) / (size * flash_forward_elements(16384, d, 128))

    return Truth(
        {"intensity falls from d=64 to d=256": ai(256, 1) < 0.99 * ai(64, 1)},
        f"FP8 tile fills: {ai(64, 1):.0f} FLOP/byte at d = 64, {ai(256, 1):.0f} at 256; BF16 "
        f"{ai(256, 2):.0f}",
    )


@claim(
    "18.6-080", section="18.6.4", where="Table 18-25", kind="table",
    title_en="FP8 at N = 16384, d = 256", title_zh="v3 FP8",
    paraphrase="v3 reaches 845 TFLOP/s in FP8, quoted from the v3 paper.",
    stated=845, unit="TFLOP/s", tol=0.05, verdict="wrong", severity=2, conflicts_with=("18.1-026",),
    right="About 1171 without a mask (1056 with a causal one). 18.1.2 of the chapter itself says 1.2 "
    "PFLOP/s.",
    source=f"{FA3}, figure 7 and abstract",
)
def fp8_d256():
    return Cases({"no mask": 1171, "causal": 1056}, "read off figure 7")


@claim(
    "18.6-081", section="18.6.4", where="Table 18-23", kind="statement",
    title_en="Gain grows monotonically with N", title_zh="单调递增",
    paraphrase="The forward speedup grows monotonically with the sequence length.",
    stated={"increases in every step": True, "at fixed d=128": True}, verdict="confirmed",
)
def monotone():
    forward = [r for r in ROWS if r[0] == "forward"]

    def rising(rows):
        return all(a[5] < b[5] for a, b in pairwise(rows))

    return Truth(
        {
            "increases in every step": rising(forward),
            "at fixed d=128": rising([r for r in forward if r[2] == 128]),
        },
        "in the table; the head dimension changes along with N in two of the five steps",
    )
