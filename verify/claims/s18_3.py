"""Ledger entries for section 18.3.1: the memory hierarchy and the budget it gives a tile."""

from math import inf

from verify.claims import hardware
from verify.claims.hardware import A100, H100, H200
from verify.claims.ledger import Bound, Cases, Elsewhere, Range, Truth, claim, stated_in

KIB = 1024


@claim(
    "18.3-001", section="18.3.1", where="text", kind="hardware",
    title_en="Five years of compute against bandwidth", title_zh="算力与带宽错位",
    paraphrase="Throughput grew nearly tenfold (312 TFLOP/s FP16 to 1979 FP8), bandwidth only 1.6 times.",
    stated={"compute x": 10, "bandwidth x": 1.6}, unit="x", verdict="wrong", severity=1, tol=0.1,
    right="FP16 against FP16 it is 3.2x; against FP8, which halves the bytes too, 6.3x. A100 and H100 are "
    "two years apart.",
    source=f"{hardware.A100_DATASHEET}; {hardware.H100_DATASHEET}",
)
def compute_growth():
    bandwidth = H100.gb_per_s / A100.gb_per_s
    return Cases(
        {
            "FP16 to FP16": {"compute x": H100.fp16 / A100.fp16, "bandwidth x": bandwidth},
            "FP16 to FP8": {"compute x": H100.fp8 / A100.fp16, "bandwidth x": bandwidth},
        }
    )


@claim(
    "18.3-002", section="18.3.1", where="Table 18-7", kind="hardware",
    title_en="Capacities and peak bandwidths of A100", title_zh="GPU 存储层次",
    paraphrase="192 KB per SM at 19 TB/s in all; 40 MB L2; 80 GB HBM2e at 2039 GB/s.",
    stated={"SRAM per SM, KiB": 192, "SRAM, TB/s": 19, "L2, MiB": 40, "HBM, GB": 80, "HBM, GB/s": 2039},
    verdict="confirmed", tol=0.03, source=f"{hardware.A100_DATASHEET}; {hardware.A100_WHITEPAPER}",
)
def hierarchy():
    return {
        "SRAM per SM, KiB": A100.l1_kib,
        "SRAM, TB/s": A100.shared_tb_per_s,
        "L2, MiB": A100.l2_mib,
        "HBM, GB": A100.gb,
        "HBM, GB/s": A100.gb_per_s,
    }


@claim(
    "18.3-003", section="18.3.1", where="Table 18-7", kind="hardware",
    title_en="Bandwidth of the L2 cache", title_zh="L2 Cache 带宽",
    paraphrase="A100's L2 delivers about 4 TB/s.",
    stated=4, unit="TB/s", verdict="unverifiable", severity=1, source=hardware.A100_WHITEPAPER,
    right="The published peak is 5120 bytes a clock, 7.2 TB/s at 1.41 GHz; the other rows of the table give "
    "peaks.",
)
def l2_bandwidth():
    return Bound(
        A100.gb_per_s / 1e3,
        5120 * A100.boost_ghz / 1e3,
        "a measured rate whose method is not named",
        "between HBM's rate and the published peak of 5120 bytes a clock",
    )


@claim(
    "18.3-004", section="18.3.1", where="Table 18-7", kind="hardware",
    title_en="Latencies", title_zh="延迟",
    paraphrase="About 20 cycles for SRAM, 200 for L2, 600 for HBM.",
    stated={"SRAM": 20, "L2": 200, "HBM": 600}, unit="cycles", verdict="unverifiable", severity=1,
    right="NVIDIA publishes none. Microbenchmarks of A100 give 19-33, about 200, and 290 to about 600 by "
    "method.",
    source="Abdelkhalik et al., Demystifying the Nvidia Ampere Architecture, arXiv:2208.11174",
)
def latencies():
    return Bound(
        {"SRAM": 19, "L2": 190, "HBM": 290},
        {"SRAM": 33, "L2": 300, "HBM": 700},
        "not published by the vendor; measured values differ by method",
    )


@claim(
    "18.3-005", section="18.3.1", where="text", kind="hardware",
    title_en="HBM bandwidths of three generations", title_zh="HBM 带宽",
    paraphrase="2039, 3350 and 4800 GB/s for A100, H100 and H200, the last with 141 GB.",
    stated={"A100": 2039, "H100": 3350, "H200": 4800, "H200, GB": 141}, unit="GB/s", verdict="confirmed",
    source=f"{hardware.A100_DATASHEET}; {hardware.H100_DATASHEET}; {hardware.H200_DATASHEET}",
)
def hbm_rates():
    return {gpu.name[:4]: gpu.gb_per_s for gpu in (A100, H100, H200)} | {"H200, GB": H200.gb}


@claim(
    "18.3-006", section="18.3.1", where="text", kind="hardware",
    title_en="Width of the HBM bus", title_zh="超宽总线",
    paraphrase="HBM reaches its bandwidth through a 1024-bit bus.",
    stated=1024, unit="bits", verdict="depends", severity=1, source=hardware.A100_WHITEPAPER,
    right="1024 bits a stack; A100 and H100 have five stacks, 5120 bits. 1024 bits would give 408 GB/s.",
)
def bus_width():
    return Cases({"one stack": A100.bus_bits / 5, "the GPU": A100.bus_bits})


@claim(
    "18.3-007", section="18.3.1", where="text", kind="number",
    title_en="HBM latency against SRAM", title_zh="访问延迟",
    paraphrase="HBM latency (400-800 cycles) is 100-200 times that of SRAM.",
    stated=Range(100, 200), unit="x", verdict="inconsistent", severity=2, conflicts_with=("18.3-004",),
    right="30 times by the table's 600 and 20 cycles; 400/30 to 800/20 gives 13 to 40.",
)
def latency_ratio():
    table = stated_in("18.3-004")
    return Elsewhere(table["HBM"] / table["SRAM"], ("18.3-004",), "600 / 20 cycles from Table 18-7")


@claim(
    "18.3-008", section="18.3.1", where="text", kind="number",
    title_en="S at N = 8K against the L2 cache", title_zh="S 矩阵",
    paraphrase="At N = 8K the FP16 scores take 128 MB, more than the whole L2 cache.",
    stated={"MB": 128, "larger than A100's L2": True}, unit="MB", verdict="units", unit_factor=1.048576,
    tol=0.005,
    right="128 MiB, 134 MB. The comparison holds.",
)
def scores_8k():
    size = 8192**2 * 2
    return {"MB": size / 1e6, "larger than A100's L2": size > A100.l2_mib * 2**20}


@claim(
    "18.3-009", section="18.3.1", where="text", kind="hardware",
    title_en="Size of a global-memory transaction", title_zh="内存事务",
    paraphrase="Transactions are 32 bytes on A100 and 128 bytes on H100.",
    stated={"A100": 32, "H100": 128}, unit="bytes", verdict="wrong", severity=2,
    source=hardware.BEST_PRACTICES,
    right="32-byte sectors on both (in 128-byte lines). A warp reading 32 consecutive floats takes four "
    "sectors.",
)
def transaction():
    return {"A100": 32, "H100": 32}


@claim(
    "18.3-010", section="18.3.1", where="text", kind="number",
    title_en="Bandwidth left by strided access", title_zh="有效带宽",
    paraphrase="Column-wise reading leaves 10-20 % of peak bandwidth.",
    stated=Range(10, 20), unit="%", verdict="depends", severity=1, source=hardware.BEST_PRACTICES,
    right="One useful element a 32-byte sector: 12.5 % in FP32, 6.25 % in FP16, the type used here. And a "
    "row softmax reads rows.",
)
def strided():
    return Cases({"FP32": 100 * 4 / 32, "FP16": 100 * 2 / 32})


@claim(
    "18.3-011", section="18.3.1", where="text", kind="hardware",
    title_en="SRAM of all SMs", title_zh="总片上 SRAM",
    paraphrase="A100: 192 KB x 108 SMs, about 20 MB (164 KB usable each); H100: 256 KB x 132, about 33 MB "
    "(228 KB).",
    stated={"A100, MB": 20, "A100 usable, KiB": 164, "H100, MB": 33, "H100 usable, KiB": 228},
    verdict="units",
    unit_factor={"A100, MB": 1.048576, "A100 usable, KiB": 1, "H100, MB": 1.048576, "H100 usable, KiB": 1},
    right="20.25 and 33 MiB; 21.2 and 34.6 MB.",
    source=f"{hardware.A100_WHITEPAPER}; {hardware.H100_WHITEPAPER}",
)
def total_sram():
    return {
        "A100, MB": A100.sms * A100.l1_kib * KIB / 1e6,
        "A100 usable, KiB": A100.shared_kib,
        "H100, MB": H100.sms * H100.l1_kib * KIB / 1e6,
        "H100 usable, KiB": H100.shared_kib,
    }


def tile_bytes(Br, Bc, d, with_O=False):
    """The constraint of 18.3.1: Q, K, V and one score tile at two bytes; optionally an output tile."""
    return 2 * Br * d + 4 * Bc * d + 2 * Br * Bc + (2 * Br * d if with_O else 0)


@claim(
    "18.3-012", section="18.3.1", where="Formula", kind="formula",
    title_en="Tile sizes that fit, by the stated sum", title_zh="SRAM 约束求解",
    paraphrase="2 Br d + 4 Bc d + 2 Br Bc at d = 64 gives 98 KB for 128 x 128, 164 KB for 128 x 256, 196 KB "
    "for 256 x 256.",
    stated={"128 x 128": 98, "128 x 256": 164, "256 x 256": 196}, unit="KB", verdict="wrong", severity=2,
    conflicts_with=("18.4-006",),
    right="80, 144 and 224 KiB. The first two are the sum plus an FP16 output tile in decimal kB (98.3, "
    "163.8), compared with a limit in KiB; the third fits neither.",
)
def tile_budget():
    tiles = {"128 x 128": (128, 128), "128 x 256": (128, 256), "256 x 256": (256, 256)}
    return Cases(
        {
            "the stated sum, KiB": {k: tile_bytes(*t, 64) / KIB for k, t in tiles.items()},
            "the stated sum, kB": {k: tile_bytes(*t, 64) / 1e3 for k, t in tiles.items()},
            "plus an output tile, KiB": {k: tile_bytes(*t, 64, True) / KIB for k, t in tiles.items()},
            "plus an output tile, kB": {k: tile_bytes(*t, 64, True) / 1e3 for k, t in tiles.items()},
        }
    )


@claim(
    "18.3-013", section="18.3.1", where="text", kind="number",
    title_en="256 x 256 tiles on H100", title_zh="更大的分块",
    paraphrase="H100's 228 KB allow Br = Bc = 256 at d = 64.",
    stated=True, verdict="depends", severity=2, source=hardware.H100_WHITEPAPER,
    right="By the stated sum, which has no room for O: 224 KiB of at most 227 a block. With an output tile "
    "256 KiB: no. Real Hopper kernels keep S and O in registers and use 128 or 192 query rows.",
)
def hopper_tile():
    limit = (H100.shared_kib - 1) * KIB
    return Cases(
        {"Q, K, V, S": tile_bytes(256, 256, 64) <= limit, "and an output tile": tile_bytes(256, 256, 64, True) <= limit}
    )


@claim(
    "18.3-014", section="18.3.1", where="text", kind="hardware",
    title_en="Shared-memory configurations of A100", title_zh="可调分配比例",
    paraphrase="A100 offers 0, 64, 128 or 192 KB of shared memory.",
    stated={"0": True, "64": True, "128": True, "192": True}, unit="KiB", verdict="wrong", severity=1,
    right="0, 8, 16, 32, 64, 100, 132 or 164 KB; one block gets at most 163 KB.",
    source=f"{hardware.CUDA_GUIDE}; {hardware.AMPERE_TUNING}",
)
def carveouts():
    return {size: int(size) in (0, 8, 16, 32, 64, 100, 132, 164) for size in ("0", "64", "128", "192")}


@claim(
    "18.3-015", section="18.3.1", where="text", kind="number",
    title_en="L2 cache per SM", title_zh="L2 分摊",
    paraphrase="Divided among the SMs, the L2 cache is less than 400 KB per SM.",
    stated={"A100 under 400": True, "H100 under 400": True}, unit="KiB", verdict="confirmed",
)
def l2_share():
    share = {gpu.name[:4]: gpu.l2_mib * 1024 / gpu.sms for gpu in (A100, H100)}
    return Truth(
        {f"{name} under 400": kib < 400 for name, kib in share.items()},
        "; ".join(f"{name}: {kib:.0f} KiB" for name, kib in share.items()),
    )


@claim(
    "18.3-016", section="18.3.1", where="text", kind="hardware",
    title_en="Register file", title_zh="寄存器文件",
    paraphrase="The register file has 65,536 32-bit registers per SM, at most 255 per thread.",
    stated={"registers per SM": 65536, "registers a thread": 255}, verdict="confirmed", tol=0,
    source=hardware.CUDA_GUIDE,
)
def registers():
    return {"registers per SM": 65536, "registers a thread": 255}


@claim(
    "18.3-017", section="18.3.1", where="Table 18-8", kind="hardware",
    title_en="A100 and H100 side by side", title_zh="A100 与 H100 规格",
    paraphrase="Memory, SMs, FP16 peak, SRAM, L2 and registers of the two.",
    stated={
        "A100": {"GB/s": 2039, "GB": 80, "SMs": 108, "TFLOP/s": 312, "L1, KiB": 192, "shared, KiB": 164,
            "L2, MiB": 40},
        "H100": {"GB/s": 3350, "GB": 80, "SMs": 132, "TFLOP/s": 989, "L1, KiB": 256, "shared, KiB": 228,
            "L2, MiB": 50},
    },
    verdict="confirmed", tol=0.005, source=f"{hardware.A100_WHITEPAPER}; {hardware.H100_WHITEPAPER}",
)
def side_by_side():
    return {
        gpu.name[:4]: {
            "GB/s": gpu.gb_per_s,
            "GB": gpu.gb,
            "SMs": gpu.sms,
            "TFLOP/s": gpu.fp16,
            "L1, KiB": gpu.l1_kib,
            "shared, KiB": gpu.shared_kib,
            "L2, MiB": gpu.l2_mib,
        }
        for gpu in (A100, H100)
    }


@claim(
    "18.3-018", section="18.3.1", where="text", kind="number",
    title_en="Three orders of magnitude", title_zh="带宽可比性",
    paraphrase="HBM gives 18.9 GB/s per SM, SRAM 19 TB/s on the whole card: three orders of magnitude "
    "apart.",
    stated={"HBM per SM, GB/s": 18.9, "ratio": 1000}, verdict="wrong", severity=3, tol=0.05,
    conflicts_with=("18.1-010", "18.3-019"),
    right="9.6: either 18.9 against 180 GB/s for one SM, or 2039 GB/s against 19.5 TB/s for all. One side "
    "was divided by 108, the other not.",
)
def three_orders():
    return Truth(
        {"HBM per SM, GB/s": A100.gb_per_s / A100.sms, "ratio": A100.shared_tb_per_s * 1e3 / A100.gb_per_s},
        f"shared memory of one SM: {A100.shared_tb_per_s * 1e3 / A100.sms:.0f} GB/s",
    )


@claim(
    "18.3-019", section="18.3.1", where="text", kind="hardware",
    title_en="SRAM against HBM, again", title_zh="片上带宽",
    paraphrase="On-chip bandwidth is about 9.5 times HBM's.",
    stated=9.5, unit="x", verdict="confirmed", source=hardware.A100_WHITEPAPER,
)
def sram_again():
    return A100.shared_tb_per_s * 1e3 / A100.gb_per_s


@claim(
    "18.3-020", section="18.3.1", where="Figure 18-7", kind="hardware",
    title_en="One SRAM bandwidth for both GPUs", title_zh="各层带宽与容量",
    paraphrase="The figure spans both GPUs (192-256 KB per SM, 40-50 MB L2) with 19 TB/s of SRAM bandwidth.",
    stated=19, unit="TB/s", verdict="depends", severity=1, tol=0.03,
    source=f"{hardware.A100_WHITEPAPER}; {hardware.H100_WHITEPAPER}",
    right="19.5 TB/s is A100; H100 has 31 TB/s at its boost clock.",
)
def figure_sram():
    return Cases({"A100": A100.shared_tb_per_s, "H100": H100.shared_tb_per_s}, "128 bytes a clock and SM")


@claim(
    "18.3-021", section="18.3.1", where="text", kind="number",
    title_en="Utilisation of vector loads", title_zh="向量化读取",
    paraphrase="A coalesced 128-byte transaction serves a warp and reaches over 90 % of peak bandwidth.",
    stated={"bytes a warp, FP32": 128, "share of peak, %": 90}, verdict="unverifiable", severity=1,
    right="The size is right; the share must be measured. 18.3.2 itself reports 88 % for a copy.",
    conflicts_with=("18.3-035",),
)
def vector_loads():
    return Bound(
        {"bytes a warp, FP32": 32 * 4, "share of peak, %": -inf},
        {"bytes a warp, FP32": 32 * 4, "share of peak, %": 100},
        "a rate that must be measured on a device",
    )
