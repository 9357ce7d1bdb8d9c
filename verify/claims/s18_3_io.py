"""Ledger entries for section 18.3.3: I/O complexity, and the table of traffic by sequence length."""

from math import inf, log, sqrt

from verify.claims import hardware
from verify.claims.account import (
    compulsory_elements,
    eager_backward_elements,
    eager_forward_elements,
    fit_exponent,
    flash_forward_elements,
    forward_flops,
)
from verify.claims.hardware import A100, H100, H200
from verify.claims.ledger import Bound, Cases, Elsewhere, Truth, claim, stated_in
from verify.claims.s18_3 import KIB, tile_bytes
from verify.claims.s18_3_roofline import fills

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
D = 64


def rows(*values):
    """One value for each length of Table 18-10, labelled."""
    return dict(zip((f"N = {N}" for N in LENGTHS), values, strict=True))


def by_length(f):
    """f(N) for each length of Table 18-10."""
    return rows(*map(f, LENGTHS))


def flash_mb(N, Br=128):
    """FP16 tile fills of one head's forward pass, MB."""
    return 2 * flash_forward_elements(N, D, Br) / 1e6


@claim(
    "18.3-040", section="18.3.3", where="Formula", kind="formula",
    title_en="I/O of a matrix product", title_zh="红蓝卵石博弈",
    paraphrase="Order m n k / sqrt(M) for a fast memory of M; doubling M saves a factor of about 1.4.",
    stated={"exponent of M": -0.5, "doubling M": 1.4}, verdict="confirmed", reading_is_guess=True,
    source="Hong and Kung, STOC 1981",
)
def pebble():
    def traffic(M):
        side = sqrt(M / 3)
        return 2 * 4096**3 / side

    return {"exponent of M": fit_exponent(traffic, 1 << 14, 1 << 18), "doubling M": traffic(1 << 14) / traffic(1 << 15)}


@claim(
    "18.3-041", section="18.3.3", where="Table 18-9", kind="table",
    title_en="Bytes of each operation", title_zh="HBM 读写",
    paraphrase="Reads and writes of QK^T, softmax and PV in FP16; in all 8 N^2 + 12 N d bytes.",
    stated={"QK^T reads N d": 4, "QK^T writes N^2": 2, "softmax reads N^2": 2, "softmax writes N^2": 2,
            "PV reads N^2": 2, "PV reads N d": 4, "PV writes N d": 4, "total N d": 12},
    unit="bytes", verdict="wrong", severity=1, conflicts_with=("18.3-024", "18.3-039"),
    right="PV reads V alone (2 N d) and writes O (2 N d): 8 N d in all, as 18.3.2's sum and Figure 18-9 have "
    "it.",
)
def operation_bytes():
    return Truth(
        {
            "QK^T reads N d": 4,
            "QK^T writes N^2": 2,
            "softmax reads N^2": 2,
            "softmax writes N^2": 2,
            "PV reads N^2": 2,
            "PV reads N d": 2,
            "PV writes N d": 2,
            "total N d": 2 * (eager_forward_elements(1 << 20, 1) - 4 * (1 << 40)) / (1 << 20),
        },
        "one N x d array is 2 N d bytes in FP16",
    )


@claim(
    "18.3-036", section="18.3.3", where="Formula", kind="formula",
    title_en="Forward and backward traffic", title_zh="前向加反向 I/O",
    paraphrase="With the backward pass (which 'recomputes S and P') traffic is three times the forward, 24 "
    "N^2 bytes.",
    stated={"bytes / N^2": 24}, verdict="inconsistent", severity=2, conflicts_with=("18.1-012", "18.1-004"),
    right="18.1.1 counts 4 N^2 + 3 N^2 elements, 14 N^2 bytes. Five backward kernels move 7 N^2 elements: 22 "
    "N^2 bytes with the forward. The standard backward recomputes nothing; it reads the stored P.",
)
def both_passes():
    backward = stated_in("18.1-012")["N^2 terms"]
    N = 1 << 12
    own = 2 * (eager_forward_elements(N, 0) + eager_backward_elements(N, 0)) / N**2
    return Elsewhere({"bytes / N^2": 2 * (4 + backward)}, ("18.1-004", "18.1-012"), f"own count: {own:.0f}")


@claim(
    "18.3-042", section="18.3.3", where="Formula", kind="formula",
    title_en="The M in N^2 d^2 / M", title_zh="SRAM 字节数 M",
    paraphrase="M is the SRAM in bytes, about 20 MB on an A100.",
    stated={"M, KiB": 20 * 1024, "traffic at N = 4096 is possible": True}, verdict="wrong", severity=3,
    right="M is what one block can use, in elements: at most 164 KiB of one SM. With 20 MB the formula gives "
    "3,300 elements at N = 4096, d = 64, where Q, K, V and O alone are a million.",
    source=f"{hardware.FA1}, section 2.1 and theorem 2; {hardware.CUDA_GUIDE}",
)
def which_m():
    N = 4096
    formula = N**2 * D**2 / (20 * 2**20)
    return Truth(
        {"M, KiB": A100.shared_kib, "traffic at N = 4096 is possible": formula >= compulsory_elements(N, D)},
        f"formula {formula:,.0f} elements, compulsory {compulsory_elements(N, D):,}",
    )


@claim(
    "18.3-043", section="18.3.3", where="Table 18-10", kind="table",
    title_en="Size of S", title_zh="S矩阵大小",
    paraphrase="S in FP16 takes 512 KB, 2, 8, 32, 128, 512 MB for N from 512 to 16384.",
    stated=rows(0.512, 2, 8, 32, 128, 512), unit="MB", verdict="units",
    unit_factor=rows(1.024, *[1.048576] * 5),
    tol=0.002,
    right="KiB and MiB; the next columns of the same table are decimal MB.",
)
def s_sizes():
    return by_length(lambda N: 2 * N * N / 1e6)


@claim(
    "18.3-044", section="18.3.3", where="Table 18-10", kind="table",
    title_en="Standard attention by length", title_zh="标准注意力 MB",
    paraphrase="Standard attention moves 2.1, 8.4, 33.6, 134.2, 536.9 and 2147.5 MB for N from 512 to "
    "16384 (FP16, d = 64, one head).",
    stated=rows(2.1, 8.4, 33.6, 134.2, 536.9, 2147.5), unit="MB", verdict="depends", severity=1,
    right="This is 8 N^2 alone. With Q, K, V and O the first rows are 2.36, 8.9 and 34.6 MB.",
)
def standard_column():
    return Cases(
        {
            "8 N^2": by_length(lambda N: 8 * N * N / 1e6),
            "8 N^2 + 8 N d": by_length(lambda N: 2 * eager_forward_elements(N, D) / 1e6),
        }
    )


@claim(
    "18.3-045", section="18.3.3", where="Table 18-10", kind="table",
    title_en="FlashAttention by length", title_zh="FlashAttention MB",
    paraphrase="FlashAttention moves 0.3, 0.7, 1.2, 2.0, 3.3 and 5.3 MB for N from 512 to 16384 (FP16, d "
    "= 64, one head).",
    stated=rows(0.3, 0.7, 1.2, 2.0, 3.3, 5.3), unit="MB", verdict="wrong", severity=3,
    conflicts_with=("18.3-031", "18.3-042", "18.4-033"),
    right="From N = 4096 on this is less than reading Q, K, V and writing O once (2.1, 4.2, 8.4 MB). Fills "
    "with 128-row tiles: 0.66, 2.4, 8.9, 35, 136, 541 MB.",
)
def flash_column():
    return Cases(
        {
            "compulsory, 8 N d": by_length(lambda N: 2 * compulsory_elements(N, D) / 1e6),
            "fills, Br = 128": by_length(flash_mb),
            "fills, Br = 64": by_length(lambda N: flash_mb(N, 64)),
        }
    )


@claim(
    "18.3-046", section="18.3.3", where="Table 18-10", kind="table",
    title_en="Reduction by length", title_zh="减幅",
    paraphrase="FlashAttention moves 7, 12, 28, 67, 163 and 405 times less than standard attention for N "
    "from 512 to 16384.",
    stated=rows(7.0, 12.0, 28.0, 67.1, 162.7, 405.2), unit="x", verdict="wrong", severity=3,
    conflicts_with=("18.3-034", "18.4-034"),
    right="3.6 to 4.0: both grow as N^2, so the ratio tends to 2 Br / d, 4 for Br = 128 and d = 64. (What "
    "the L2 cache saves comes on top and is not counted by any formula of the chapter.)",
)
def reductions():
    return Truth(by_length(lambda N: 2 * eager_forward_elements(N, D) / 1e6 / flash_mb(N)), "fills with Br = 128")


@claim(
    "18.3-047", section="18.3.3", where="text", kind="timing",
    title_en="I/O time of standard attention", title_zh="理论 I/O 时间",
    paraphrase="At 2039 GB/s the traffic of the standard forward takes 0.001, 0.004, 0.016, 0.066, 0.263 "
    "and 1.053 ms for N from 512 to 16384.",
    stated=rows(0.001, 0.004, 0.016, 0.066, 0.263, 1.053), unit="ms", verdict="confirmed", tol=0.04,
)
def standard_times():
    return Truth(by_length(lambda N: 8 * N * N / A100.gb_per_s / 1e6), "8 N^2 bytes")


@claim(
    "18.3-048", section="18.3.3", where="text", kind="timing",
    title_en="I/O time of FlashAttention", title_zh="I/O 时间",
    paraphrase="At 2039 GB/s FlashAttention's traffic takes 0.0001, 0.0003, 0.0006, 0.001, 0.0016 and "
    "0.0026 ms for N from 512 to 16384: nearly constant.",
    stated=rows(0.0001, 0.0003, 0.0006, 0.001, 0.0016, 0.0026), unit="ms", verdict="wrong", severity=2,
    conflicts_with=("18.3-045",), tol=0.04,
    right="0.0003 to 0.27 ms at the fills with 128-row tiles; quadratic like the arithmetic. Even the stated "
    "row grows 26-fold.",
)
def flash_times():
    return Truth(by_length(lambda N: flash_mb(N) / A100.gb_per_s), "fills with Br = 128 at 2039 GB/s")


@claim(
    "18.3-049", section="18.3.3", where="text", kind="formula",
    title_en="Growth of the flash column", title_zh="增长量级",
    paraphrase="FlashAttention's column of Table 18-10 grows as N^2 d^2 / M.",
    stated={"exponent of N": 2}, verdict="inconsistent", severity=2, conflicts_with=("18.3-045",),
    right="N^2 is right; the column grows as N^0.8, slower than its own inputs.",
)
def flash_growth():
    column = stated_in("18.3-045")
    return Elsewhere(
        {"exponent of N": log(column["N = 16384"] / column["N = 512"]) / log(32)},
        ("18.3-045",),
        "from 0.3 to 5.3 MB over a factor of 32 in N",
    )


@claim(
    "18.3-050", section="18.3.3", where="Formula", kind="formula",
    title_en="Intensity does not depend on N", title_zh="与 N 无关",
    paraphrase="FlashAttention's intensity, 4 N^2 d FLOP over its traffic, is proportional to M / d, "
    "whatever N.",
    stated={"N": 0, "M": 1, "d": -1}, unit="exponent", verdict="confirmed", tol=0.03,
    conflicts_with=("18.3-031",),
)
def intensity_order():
    N, M = 1 << 18, 1 << 14

    def ai(n, d, m):
        return forward_flops(n, d) / fills(n, d, m)

    exponents = {
        "N": fit_exponent(lambda n: ai(n, D, M), N, 4 * N),
        "M": fit_exponent(lambda m: ai(N, D, m), M, 2 * M),
        "d": fit_exponent(lambda d: ai(N, d, M), D, 2 * D),
    }
    return Truth({name: round(value, 2) for name, value in exponents.items()}, "fills with four tiles in M elements")


def largest_tile(device):
    """Largest multiple of 64 with Br = Bc that the constraint of 18.3.1 allows at d = 64."""
    return max(B for B in range(64, 1024, 64) if tile_bytes(B, B, D) <= device.shared_kib * KIB)


@claim(
    "18.3-051", section="18.3.3", where="text", kind="number",
    title_en="Intensity of the tiled kernel", title_zh="分块 AI",
    paraphrase="M / 3d is 104,000 FLOP/byte on A100 and 171,900 on H100, far above the ridge.",
    stated={"A100": 104_000, "H100": 171_900}, unit="FLOP/byte", verdict="wrong", severity=3,
    conflicts_with=("18.3-031", "18.3-042", "18.3-026"),
    right="About the tile height: 188 and 252 for the largest tiles the chapter allows (192 and 256 rows). "
    "On H100, ridge 295, that is still memory-bound without the L2 cache. M was the SRAM of all SMs in "
    "bytes.",
)
def tiled_intensity():
    def ai(device):
        return forward_flops(1 << 14, D) / (2 * flash_forward_elements(1 << 14, D, largest_tile(device)))

    return Truth(
        {"A100": ai(A100), "H100": ai(H100)},
        f"tiles of {largest_tile(A100)} and {largest_tile(H100)} rows, N = 16384; ridges "
        f"{A100.ridge:.0f}, {H100.ridge:.0f}",
    )


@claim(
    "18.3-052", section="18.3.3", where="Figure 18-10", kind="statement",
    title_en="Below O(N^2), and more SRAM from H100 to H200", title_zh="I/O 复杂度降低路径",
    paraphrase="Tiling leads to a sub-O(N^2) region; M grows from H100 to H200.",
    stated={"traffic grows slower than N^2": True, "H200 has more SRAM": True}, verdict="wrong", severity=2,
    right="N^2 d^2 / M is O(N^2) for a given GPU: the constant falls, not the order. H200 is an H100 with "
    "other memory; its SRAM is the same 228 KB per SM.",
    source=f"{hardware.FA1}, theorem 2; {hardware.H200_DATASHEET}",
)
def lower_order():
    exponent = fit_exponent(lambda N: flash_forward_elements(N, D, 128), 1 << 14, 1 << 18)
    return Truth(
        {"traffic grows slower than N^2": exponent < 1.9, "H200 has more SRAM": H200.shared_kib > H100.shared_kib},
        f"exponent {exponent:.3f} between 2^14 and 2^18",
    )


@claim(
    "18.3-053", section="18.3.3", where="text", kind="timing",
    title_en="Real kernels take 2-3 times as long", title_zh="真实耗时",
    paraphrase="At less than half of peak bandwidth real kernels take 2-3 times the theoretical time.",
    stated=2.5, unit="x", verdict="unverifiable", severity=1,
    right="More than 2 follows from less than 50 %; 18.3.2's 10-20 % for softmax kernels would make it 5 to "
    "10.",
    conflicts_with=("18.3-035",),
)
def real_times():
    return Bound(2, inf, "needs the device and kernels meant")
