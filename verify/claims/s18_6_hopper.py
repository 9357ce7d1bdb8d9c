"""Ledger entries for section 18.6.1: Hopper, what v3 uses of it, and the comparison with Ampere."""

from refimpl.tiling import cdiv
from verify.claims.hardware import A100, CUDA_GUIDE, FA3, H100, H100_WHITEPAPER
from verify.claims.ledger import Cases, Elsewhere, Range, Truth, claim, stated_in

REPO = "Dao-AILab/flash-attention"


@claim(
    "18.6-001", section="18.6.1", where="text", kind="library",
    title_en="GPUs that v1 and v2 run on", title_zh="仅在 Ampere 架构上运行",
    paraphrase="v1 and v2 run on Ampere (A100) only.",
    stated={"v1": "Ampere", "v2": "Ampere"}, verdict="wrong", severity=2,
    right="v1 (1.0.9): Turing, Ampere, Ada, Hopper. v2 (2.6.3): Ampere, Ada, Hopper. The chapter's own "
    "table 18-29 says so too.",
    source=f"{REPO} v1.0.9 csrc/flash_attn/fmha_api.cpp (is_sm75, is_sm8x, is_sm90); v2.6.3 README and "
    "flash_api.cpp",
)
def supported():
    return Truth({"v1": "Turing, Ampere, Ada, Hopper", "v2": "Ampere, Ada, Hopper"})


@claim(
    "18.6-002", section="18.6.1", where="text", kind="library",
    title_en="The three innovations v3 rests on", title_zh="三大硬件创新",
    paraphrase="v3 uses thread block clusters, distributed shared memory and the asynchronous execution "
    "engine.",
    stated={"clusters": True, "DSMEM reads": True, "asynchronous copies and products": True}, verdict="wrong",
    severity=2,
    right="The paper names three: overlap by warp specialisation (TMA and WGMMA), softmax under the "
    "products, and FP8 with block scales and incoherent processing. Clusters of 2 are used for some head "
    "sizes without a mask, with TMA; no kernel reads another SM's shared memory.",
    source=f"{FA3}, abstract; {REPO} v2.8.3 hopper/flash_fwd_launch_template.h (Enable_cluster), no mapa "
    "or DSMEM access",
)
def v3_uses():
    return Truth({"clusters": True, "DSMEM reads": False, "asynchronous copies and products": True})


@claim(
    "18.6-003", section="18.6.1", where="text", kind="number",
    title_en="v3 against v2 on an H100", title_zh="吞吐提升",
    paraphrase="v3 has 1.5 to 2.0 times the throughput of v2 on an H100.",
    stated=Range(1.5, 2.0), unit="x", verdict="confirmed",
    source=f"{FA3}, abstract (forward; backward 1.5 to 1.75)",
)
def v3_speedup():
    return Truth(Range(1.5, 2.0), "FP16 forward, as the abstract states it")


@claim(
    "18.6-004", section="18.6.1", where="text", kind="hardware",
    title_en="A Hopper SM", title_zh="Hopper SM 架构关键特性",
    paraphrase="An SM has 128 FP32 cores, 4 tensor cores and 256 KB of L1 and shared memory; a TPC has 2 "
    "SMs; an H100 SXM5 has 132 SMs.",
    stated={"FP32 cores": 128, "tensor cores": 4, "L1 + shared, KB": 256, "SMs a TPC": 2, "SMs": 132}, tol=0,
    verdict="confirmed",
    source=H100_WHITEPAPER,
)
def hopper_sm():
    return Truth(
        {
            "FP32 cores": 128,
            "tensor cores": 4,
            "L1 + shared, KB": H100.l1_kib,
            "SMs a TPC": 2,
            "SMs": H100.sms,
        },
        "the full GH100 die has 144 SMs; the text's 'complete chip' can only mean the product",
    )


@claim(
    "18.6-005", section="18.6.1", where="text", kind="number",
    title_en="Growth from A100 to H100", title_zh="仅增加 22%",
    paraphrase="The H100 has 22 % more SMs than the A100 and 3.2 times its FP16 rate.",
    stated={"SMs": 22, "FP16": 3.2}, unit="%, x", tol=0.015, verdict="confirmed",
)
def growth():
    return Truth({"SMs": 100 * (H100.sms / A100.sms - 1), "FP16": H100.fp16 / A100.fp16})


@claim(
    "18.6-006", section="18.6.1", where="Figure 18-23", kind="hardware",
    title_en="SMs in a cluster", title_zh="最大 8 个 SM per Cluster",
    paraphrase="A cluster spans at most 8 SMs.",
    stated=8, unit="SMs", tol=0, verdict="depends", severity=1,
    right="8 is the portable limit; an H100 takes 16 with cudaFuncAttributeNonPortableClusterSizeAllowed.",
    source=f"{CUDA_GUIDE}; NVIDIA Hopper Tuning Guide, thread block clusters",
)
def cluster_size():
    return Cases({"portable": 8, "H100 with the non-portable attribute": 16})


@claim(
    "18.6-007", section="18.6.1", where="text", kind="number",
    title_en="DSMEM against HBM", title_zh="Distributed Shared Memory 带宽",
    paraphrase="At hundreds of GB/s DSMEM is far better than HBM3's aggregate 3.35 TB/s.",
    stated={"DSMEM is faster": True}, verdict="depends", severity=2,
    right="As printed the smaller number is called the better. It holds only per SM: HBM's share of one SM "
    "is 25 GB/s.",
)
def dsmem():
    return Cases(
        {
            "as printed, against the aggregate": {"DSMEM is faster": H100.gb_per_s < 900},
            "per SM on both sides": {"DSMEM is faster": H100.gb_per_s / H100.sms < 100},
        },
        f"hundreds of GB/s is 100 to 900; {H100.gb_per_s} GB/s over {H100.sms} SMs is "
        f"{H100.gb_per_s / H100.sms:.0f}",
    )


@claim(
    "18.6-008", section="18.6.1", where="text", kind="statement",
    title_en="Instruction that v3 prefetches with", title_zh="异步执行模型",
    paraphrase="In v3 one warp group prefetches K and V with cp.async.",
    stated="cp.async", verdict="inconsistent", severity=2, conflicts_with=("18.6-040",),
    right="TMA (cp.async.bulk.tensor), as 18.6.3 says at length. v3 keeps cp.async for paged K, V without "
    "TMA only.",
    source=f"{REPO} v2.8.3 hopper/mainloop_fwd_sm90_tma_gmma_ws.hpp, Use_TMA_KV",
)
def prefetch():
    return Elsewhere("TMA", ("18.6-040",), "18.6.3: TMA replaces manual cp.async")


@claim(
    "18.6-009", section="18.6.1", where="text", kind="number",
    title_en="Thread blocks of v2 at N = 8192", title_zh="约 160 个线程块",
    paraphrase="With batch 1, 40 heads and N = 8192 v2 launches about 160 blocks: 4 row blocks a head.",
    stated=160, unit="blocks", verdict="inconsistent", severity=3, conflicts_with=("18.5-005",),
    right="2560 (Br = 128): 64 row blocks a head. Four row blocks would be tiles of 2048 rows. So v2 fills "
    "an A100 24 times over, and the argument that follows, too few blocks, falls.",
    source=f"{REPO} v2.6.3 flash_fwd_launch_template.h (Br = 128 for d = 128)",
)
def v2_launch():
    by_formula = stated_in("18.5-005")["Br=128"]
    return Elsewhere(
        by_formula, ("18.5-005",), f"B H ceil(N / Br); 160 blocks would need Br = {cdiv(8192 * 40, 160)}"
    )


@claim(
    "18.6-010", section="18.6.1", where="Table 18-20", kind="hardware",
    title_en="A100 and H100 side by side", title_zh="A100 与 H100 关键特性对比",
    paraphrase="A100 and H100 have 312 and 989 TFLOP/s FP16, 164 and 228 KB of shared memory, 108 and 132 "
    "SMs, 64 warps per SM; FP8, TMA, WGMMA and clusters exist on the H100 only, FP8 at twice the BF16 "
    "rate.",
    stated={
        "A100": {"FP16": 312, "shared, KB": 164, "SMs": 108, "warps": 64, "FP8": False},
        "H100": {"FP16": 989, "shared, KB": 228, "SMs": 132, "warps": 64, "FP8": True}, "FP8 over BF16": 2,
    },
    tol=0.005, verdict="confirmed",
    source=f"{A100.source}; {H100.source}; {CUDA_GUIDE}",
)
def side_by_side():
    def column(gpu):
        return {
            "FP16": gpu.fp16,
            "shared, KB": gpu.shared_kib,
            "SMs": gpu.sms,
            "warps": 64,
            "FP8": gpu.fp8 is not None,
        }

    return Truth({"A100": column(A100), "H100": column(H100), "FP8 over BF16": H100.fp8 / H100.fp16})


@claim(
    "18.6-011", section="18.6.1", where="Table 18-20", kind="hardware",
    title_en="More SMs and occupancy", title_zh="Higher occupancy ceiling",
    paraphrase="132 SMs instead of 108 raise the ceiling of occupancy.",
    stated={"occupancy ceiling rises": True}, verdict="wrong", severity=1,
    right="Occupancy is resident warps of an SM over 64; it is the same on both. What rises is the number "
    "of blocks in flight.",
    source=CUDA_GUIDE,
)
def occupancy():
    warps = {"A100": 2048 // 32, "H100": 2048 // 32}
    return Truth({"occupancy ceiling rises": warps["H100"] > warps["A100"]}, f"warps per SM: {warps}")


@claim(
    "18.6-012", section="18.6.1", where="text", kind="number",
    title_en="v2's share of peak on an A100", title_zh="SM 利用率",
    paraphrase="v3 reaches 75 % of an H100's peak, v2 only about 42 % of an A100's.",
    stated=42, unit="%", verdict="inconsistent", severity=2, conflicts_with=("18.5-073", "18.6-041"),
    right="74 % according to figure 18-22, where 42 % is v1. The chapter gives four values: 42, 50 to 60, "
    "73.7 and 74.",
)
def v2_share():
    return Elsewhere(stated_in("18.5-073")["A100 v2"], ("18.5-073",), "figure 18-22; its 42 % belongs to v1")


@claim(
    "18.6-013", section="18.6.1", where="Figure 18-23", kind="hardware",
    title_en="Register file and HBM of the figure", title_zh="Register File",
    paraphrase="An SM has 65536 registers of 32 bits, 228 KB of shared memory; HBM3 gives 3.35 TB/s.",
    stated={"registers, KiB": 256, "shared, KB": 228, "HBM, TB/s": 3.35}, tol=0.005, verdict="confirmed",
    source=f"{H100_WHITEPAPER}; {CUDA_GUIDE}",
)
def figure_numbers():
    return Truth(
        {"registers, KiB": 65536 * 4 / 1024, "shared, KB": H100.shared_kib, "HBM, TB/s": H100.gb_per_s / 1e3},
        "65536 x 4 bytes",
    )
