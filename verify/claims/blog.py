"""Ledger entries for the companion blog: the traffic account, the data flow, benchmarking and tile sizes."""

import numpy as np

from refimpl.tiling import cdiv
from verify.claims.account import (
    compulsory_elements,
    eager_forward_elements,
    fit_exponent,
    flash_forward_elements,
    forward_flops,
)
from verify.claims.hardware import A100, CUDA_GUIDE, FA1
from verify.claims.ledger import Cases, Elsewhere, Range, Truth, claim


@claim(
    "blog-001", section="1.1", where="text", kind="number",
    title_en="Size of one N x N matrix", title_zh="N×N 中间矩阵",
    paraphrase="At N = 4096 in FP16 an N x N matrix is 32 MB, and four passes over it 128 MB.",
    stated={"one": 32, "four": 128}, unit="MB", unit_factor=1.048576, tol=0.005, verdict="units", severity=1,
    right="33.6 and 134 MB, or 32 and 128 MiB.",
)
def matrix_size():
    return Truth({"one": 4096**2 * 2 / 1e6, "four": 4 * 4096**2 * 2 / 1e6})


@claim(
    "blog-002", section="1.1", where="text", kind="number",
    title_en="Time for the intermediate matrices", title_zh="搬运中间矩阵的时间",
    paraphrase="At 2 TB/s the four passes take about 64 us.",
    stated=64, unit="us", tol=0.06, verdict="confirmed",
)
def moving_time():
    return Truth(4 * 4096**2 * 2 / 2e12 * 1e6, "67 us in decimal megabytes")


@claim(
    "blog-003", section="1.1", where="Formula", kind="formula",
    title_en="FLOPs of one head", title_zh="计算量 4 N² d",
    paraphrase="QK^T and PV cost 4 N^2 d, 8.6 GFLOP at N = 4096, d = 128; 86 us at 100 TFLOP/s.",
    stated={"GFLOP": 8.6, "us": 86}, unit="GFLOP, us", tol=0.005, verdict="confirmed",
)
def head_flops():
    flops = forward_flops(4096, 128)
    return Truth({"GFLOP": flops / 1e9, "us": flops / 100e12 * 1e6})


@claim(
    "blog-004", section="1.1", where="text", kind="statement",
    title_en="Share of the time spent moving", title_zh="一半多的时间",
    paraphrase="Of the standard forward's time more than half goes into moving half-finished results, "
    "less than half into computing.",
    stated={"moving exceeds computing": True}, verdict="wrong", severity=2,
    right="By the blog's own numbers 64 of 150 us, 43 %. It becomes true with a real A100: 27.5 us of "
    "computing at 312 TFLOP/s.",
)
def moving_share():
    moving, computing = 4 * 4096**2 * 2 / 2e12, forward_flops(4096, 128) / 100e12
    real = forward_flops(4096, 128) / (A100.fp16 * 1e12)
    return Truth(
        {"moving exceeds computing": moving > computing},
        f"{moving / (moving + computing):.0%} at 100 TFLOP/s, {moving / (moving + real):.0%} at 312",
    )


@claim(
    "blog-005", section="1.1", where="text", kind="statement",
    title_en="Passes over S and P", title_zh="写 S、读 S、写 P、读 P",
    paraphrase="The standard version writes and reads S and P once each, besides Q, K, V and O.",
    stated={"passes": 4, "N d terms": 4}, tol=0, verdict="confirmed",
)
def passes():
    N, d = 4096, 128
    total = eager_forward_elements(N, d)
    return Truth(
        {"passes": (total - 4 * N * d) // N**2, "N d terms": compulsory_elements(N, d) // (N * d)},
        f"{total} elements",
    )


@claim(
    "blog-006", section="1.2", where="text", kind="formula",
    title_en="HBM traffic comes down from O(N^2 + N d)", title_zh="HBM 访问从 O(N² + Nd)",
    paraphrase="The standard traffic is of order N^2 + N d; FlashAttention lowers it.",
    stated={"standard, exponent of N": 2, "flash is lower at N=4096": True}, tol=0.01, verdict="confirmed",
    source=FA1,
)
def order():
    standard = fit_exponent(lambda n: eager_forward_elements(n, 64), 1 << 16, 1 << 20)
    lower = flash_forward_elements(4096, 64, 128) < eager_forward_elements(4096, 64)
    flash = fit_exponent(lambda n: flash_forward_elements(n, 64, 128), 1 << 12, 1 << 16)
    return Truth(
        {"standard, exponent of N": standard, "flash is lower at N=4096": lower},
        f"flash by tile fills still grows like N^{flash:.2f}: smaller by a factor, not in order",
    )


@claim(
    "blog-007", section="1.2", where="text", kind="hardware",
    title_en="SRAM against HBM", title_zh="片上 SRAM 带宽",
    paraphrase="On-chip SRAM has ten times the bandwidth of HBM.",
    stated=10, unit="x", tol=0.1, verdict="confirmed",
    source=f"{A100.source}; {CUDA_GUIDE}",
)
def sram_ratio():
    return Truth(
        A100.shared_tb_per_s * 1e3 / A100.gb_per_s,
        f"A100: {A100.shared_tb_per_s:.1f} against {A100.gb_per_s / 1e3:.2f} TB/s",
    )


@claim(
    "blog-008", section="2.1", where="text", kind="statement",
    title_en="Loop order of the sketch", title_zh="外层循环遍历 K/V 分块",
    paraphrase="The outer loop walks over K, V tiles, the inner loop handles the present Q tile.",
    stated="K and V outside", verdict="inconsistent", severity=2, conflicts_with=("blog-030",),
    right="The code above it has the Q tiles outside and K, V inside, and so has the next sentence (each Q "
    "tile sweeps all K, V tiles). K, V outside is v1's order.",
)
def loop_order():
    return Elsewhere("Q outside", ("blog-030",), "the pseudo-code: i over rows of Q outside, j inside")


@claim(
    "blog-009", section="2.1", where="text", kind="statement",
    title_en="Why K, V would be outside", title_zh="causal mask 跳过",
    paraphrase="K, V are outside because a causal mask then allows many tiles to be skipped.",
    stated={"K, V outside": 36, "Q outside": 64}, unit="tile visits of 8 x 8 under a causal mask", tol=0,
    verdict="wrong", severity=2,
    right="Either order can skip the same tiles: 36 of 64. K, V outside costs: O, m and l make a round trip "
    "through HBM at each visit.",
)
def skipping():
    T = 8
    kv_outside = sum(1 for j in range(T) for i in range(T) if j <= i)
    q_outside = sum(1 for i in range(T) for j in range(T) if j <= i)
    return Truth({"K, V outside": kv_outside, "Q outside": q_outside})


@claim(
    "blog-010", section="3.2", where="text", kind="statement",
    title_en="Median or P90 against outliers", title_zh="取中位数或 P90",
    paraphrase="Take the median or the P90 of 50 runs, not the mean, because single spikes distort the mean.",
    stated={"median moves less than 1 %": True, "P90 moves less than 1 %": True}, verdict="depends",
    severity=1,
    right="The median, and say the spread. P90 is a tail measure: six spikes in 50 runs are enough to move "
    "it, three are not.",
)
def robust():
    def moved(spikes):
        times = np.full(50, 1.0)
        times[:spikes] = 3.0
        return {
            "median moves less than 1 %": bool(np.median(times) < 1.01),
            "P90 moves less than 1 %": bool(np.quantile(times, 0.9) < 1.01),
        }

    return Cases(
        {"three spikes in 50": moved(3), "six spikes in 50": moved(6)},
        "20 warm-up and 50 timed runs as in the blog",
    )


@claim(
    "blog-011", section="3.2", where="text", kind="formula",
    title_en="Effective rate", title_zh="有效算力",
    paraphrase="Effective rate is total FLOPs over kernel time.",
    stated={"8.59 GFLOP in 86 us": 100}, unit="TFLOP/s", tol=0.005, verdict="confirmed",
)
def effective_rate():
    return Truth(
        {"8.59 GFLOP in 86 us": forward_flops(4096, 128) / 86e-6 / 1e12},
        "state whether causal FLOPs are halved",
    )


@claim(
    "blog-012", section="3.2", where="text", kind="statement",
    title_en="Flush the cache between cases", title_zh="清理缓存",
    paraphrase="Read and write a large buffer between cases, or the L2 cache flatters the next one.",
    stated={"Q, K, V of N=2K fit the L2 cache": True, "of N=16K, 32 heads": False}, verdict="confirmed",
    source=A100.source,
)
def flush():
    def fits(N, heads, d=128):
        return 3 * heads * N * d * 2 <= A100.l2_mib * 2**20

    return Truth(
        {"Q, K, V of N=2K fit the L2 cache": fits(2048, 16), "of N=16K, 32 heads": fits(16384, 32)},
        "16 heads of 128 against 40 MiB",
    )


@claim(
    "blog-013", section="3.3", where="text", kind="hardware",
    title_en="128 x 128 tiles on new and old cards", title_zh="新卡 128×128, 老卡 64×64",
    paraphrase="128 x 128 fits the new cards easily; on cards of about 2019 64 x 64 is already tight.",
    stated={"128x128 on A100": True, "128x128 on Turing": False, "64x64 on Turing": True},
    verdict="confirmed",
    source=f"{CUDA_GUIDE} (64 KiB on compute capability 7.5, 163 KiB on 8.0)",
)
def old_cards():
    def kib(Br, Bc, d=128):
        return 2 * (Br * d + 2 * Bc * d) / 1024

    return Truth(
        {
            "128x128 on A100": kib(128, 128) <= 163,
            "128x128 on Turing": kib(128, 128) <= 64,
            "64x64 on Turing": kib(64, 64) <= 64,
        },
        f"Q, K, V tiles at d = 128: {kib(128, 128):.0f} and {kib(64, 64):.0f} KiB",
    )


@claim(
    "blog-014", section="4.2", where="text", kind="statement",
    title_en="128 x 64 does not compile on the old card", title_zh="编译不通过",
    paraphrase="The new card's 128 x 64 tiles fail to compile on the old one; 64 x 64 works.",
    stated={"128x64": False, "64x64": True}, verdict="depends", severity=1,
    right="By the limit of 48 KiB for statically declared shared memory: 64 KiB against 48 KiB at d = 128. "
    "With dynamic shared memory a Turing card (64 KiB) takes both. The card is not named.",
    source=CUDA_GUIDE,
)
def old_compile():
    need = {"128x64": 2 * (128 + 2 * 64) * 128 / 1024, "64x64": 2 * (64 + 2 * 64) * 128 / 1024}
    return Cases(
        {
            "static limit of 48 KiB": {k: v <= 48 for k, v in need.items()},
            "dynamic limit of 64 KiB": {k: v <= 64 for k, v in need.items()},
        },
        f"{need}",
    )


@claim(
    "blog-015", section="4.1", where="text", kind="number",
    title_en="Share of S and P in the traffic", title_zh="约 60% 的 HBM 流量",
    paraphrase="In the four-kernel standard version at N = 4K to 8K, d = 128 the passes over S and P make "
    "up about 60 % of the traffic.",
    stated=60, unit="%", tol=0.1, verdict="depends", severity=2,
    right="97 to 98 % if the fourth kernel is none of scale and mask (Q, K, V, O are small at these "
    "lengths). 65 % if the fourth kernel is another pass over S and is counted apart.",
)
def sp_share():
    def share(N, d, extra):
        return 100 * 4 * N * N / eager_forward_elements(N, d, passes=extra)

    return Cases(
        {"three kernels": share(4096, 128, 0), "scale or mask as a fourth kernel": share(4096, 128, 1)},
        f"at N = 8192: {share(8192, 128, 0):.0f} and {share(8192, 128, 1):.0f} %",
    )


@claim(
    "blog-016", section="4.1", where="text", kind="number",
    title_en="Memory at batch 8", title_zh="batch=8 时已经非常紧张",
    paraphrase="At batch 8 and 8K tokens S and P use most of the memory.",
    stated={"over half of 80 GB": True}, verdict="confirmed", reading_is_guess=True,
)
def batch_memory():
    size = 2 * 8 * 32 * 8192**2 * 2 / 1e9
    return Truth(
        {"over half of 80 GB": size > 40},
        f"S and P of 32 heads in FP16: {size:.0f} GB (heads and card are assumed)",
    )


@claim(
    "blog-017", section="4.2", where="text", kind="statement",
    title_en="When a tile may be skipped", title_zh="三角形循环跳过",
    paraphrase="A K tile is skipped when all its positions are later than the present Q tile.",
    stated={"skips exactly the dead tiles": True, "result unchanged": True}, verdict="confirmed",
)
def skip_rule():
    from refimpl import oracle

    rng = np.random.default_rng(2017)
    N, Br, Bc, d = 96, 32, 16, 8
    Q, K, V = rng.standard_normal((3, N, d))
    dead, skipped, out = 0, 0, np.empty((N, d))
    for i in range(0, N, Br):
        S = np.full((Br, N), -np.inf)
        for j in range(0, N, Bc):
            visible = np.subtract.outer(np.arange(i, i + Br), np.arange(j, j + Bc)) >= 0
            dead += not visible.any()
            if j > i + Br - 1:
                skipped += 1
                continue
            S[:, j : j + Bc] = np.where(visible, Q[i : i + Br] @ K[j : j + Bc].T * d**-0.5, -np.inf)
        P = np.exp(S - S.max(1, keepdims=True))
        out[i : i + Br] = P @ V / P.sum(1, keepdims=True)
    want = oracle.attention(Q[None, None], K[None, None], V[None, None], causal=True)[0][0, 0]
    error = float(np.abs(out - want).max())
    return Truth(
        {"skips exactly the dead tiles": dead == skipped, "result unchanged": error < 1e-12},
        f"{skipped} of {cdiv(N, Br) * cdiv(N, Bc)} tiles; the blog's 'hardly affects correctness' can be "
        "'not at all'",
    )


@claim(
    "blog-018", section="4.1", where="text", kind="number",
    title_en="Time grows with the square of the length", title_zh="随长度平方上涨",
    paraphrase="The standard version's time grows with the square of the length.",
    stated=Range(1.9, 2.0), unit="exponent", verdict="confirmed",
)
def square():
    return Truth(
        fit_exponent(lambda n: eager_forward_elements(n, 128), 4096, 8192), "traffic between 4K and 8K"
    )
