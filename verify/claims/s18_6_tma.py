"""Ledger entries for section 18.6.3: TMA, warp specialisation and the per-tile latency table."""

from verify.claims.account import tflops
from verify.claims.hardware import CUDA_GUIDE, H100, H100_WHITEPAPER
from verify.claims.ledger import Cases, Elsewhere, Truth, claim, stated_in

REPO = "Dao-AILab/flash-attention"


@claim(
    "18.6-040", section="18.6.3", where="text", kind="hardware",
    title_en="Where TMA sits", title_zh="TMA 硬件单元",
    paraphrase="TMA replaces manual cp.async copies; the unit sits in each GPC.",
    stated={"replaces cp.async": "TMA", "one unit per": "GPC"}, verdict="wrong", severity=1,
    right="One unit per SM.",
    source=f"{H100_WHITEPAPER}, figure of the SM and section on TMA",
)
def tma_unit():
    return Truth({"replaces cp.async": "TMA", "one unit per": "SM"})


@claim(
    "18.6-041", section="18.6.3", where="text", kind="number",
    title_en="v2's share of peak, again", title_zh="Tensor Core 利用率",
    paraphrase="v3 reaches about 75 % of FP16 peak, far above the 50 to 60 % of v2 with cp.async on an A100.",
    stated={"lo": 50, "hi": 60}, unit="%", tol=0.05, verdict="inconsistent", severity=2,
    conflicts_with=("18.5-073", "18.6-012"),
    right="73 to 74 % by 18.5.3, 42 % by 18.6.1. The paper: 50 to 73 % depending on size.",
    source="Dao, FlashAttention-2, abstract",
)
def v2_share_again():
    value = stated_in("18.5-073")["A100 v2"]
    return Elsewhere({"lo": value, "hi": value}, ("18.5-073",), "figure 18-22")


@claim(
    "18.6-042", section="18.6.3", where="text", kind="library",
    title_en="Threads that load a tile in v2", title_zh="32 个线程合作",
    paraphrase="v1 and v2 need 32 threads to generate addresses and copy a K, V tile.",
    stated=32, unit="threads", tol=0, verdict="wrong", severity=1,
    right="All threads of the block take part: 128 (4 warps), 256 for some head sizes.",
    source=f"{REPO} v2.6.3 csrc/flash_attn/src/kernel_traits.h, kNThreads = kNWarps * 32, GmemTiledCopyQKV",
)
def loading_threads():
    return Truth(4 * 32, "four warps in most configurations")


@claim(
    "18.6-043", section="18.6.3", where="Listing 2", kind="library",
    title_en="Calls of the TMA sample", title_zh="cuda::memcpy_async_tensor_2d",
    paraphrase="A tile is loaded with cuda::memcpy_async_tensor_2d(smem, gmem + offset, descriptor, "
    "barrier); then all warps arrive and wait on a barrier that is a local variable.",
    stated={"function exists": True, "takes a global pointer": True, "barrier may be a local variable": True},
    verdict="wrong", severity=3,
    right="cuda::device::experimental::cp_async_bulk_tensor_2d_global_to_shared(smem, tensor map, x, y, "
    "barrier): the tensor map holds the address, coordinates say which tile; one thread issues it and "
    "arrives with the expected byte count (barrier_arrive_tx); the barrier lives in shared memory.",
    source=f"{CUDA_GUIDE}, asynchronous data copies using TMA; CCCL, cuda::ptx::cp_async_bulk_tensor",
)
def tma_call():
    return Truth(
        {"function exists": False, "takes a global pointer": False, "barrier may be a local variable": False},
        "headers <cuda/barrier> and <cuda/ptx>",
    )


@claim(
    "18.6-044", section="18.6.3", where="text", kind="library",
    title_en="Share of producer warps", title_zh="生产者 Warp 分配约 20%",
    paraphrase="Producers get about 20 % of the warp slots, consumers 80 %.",
    stated=20, unit="%", tol=0.1, verdict="wrong", severity=1,
    right="One warpgroup of three (d = 128: two consumers) or four (d = 64: three): 33 or 25 %. Of its four "
    "warps one issues TMA. Registers are shared 24 to 240 a thread instead.",
    source=f"{REPO} v2.8.3 hopper/flash_fwd_kernel_sm90.h, NumLoadWarpGroups, LoadRegisterRequirement",
)
def producers():
    return Cases({"d = 128, two consumer warpgroups": 100 / 3, "d = 64, three": 100 / 4})


@claim(
    "18.6-045", section="18.6.3", where="text", kind="library",
    title_en="Depth of v3's pipeline", title_zh="流水线深度为 2 级",
    paraphrase="Shared memory holds two stages of K and V.",
    stated=2, unit="stages", tol=0, verdict="confirmed",
    source=f"{REPO} v2.8.3 hopper/flash_fwd_launch_template.h, kStages = Arch >= 90 ? 2 : ...; the same file in "
    "commit b443207c (November 2024)",
)
def stages():
    return Truth(2, "kStages of the sm90 kernels; the FP8 kernel for d = 64 had 4 until the end of 2024")


@claim(
    "18.6-046", section="18.6.3", where="Table 18-22", kind="table",
    title_en="Sums of the latency table", title_zh="总延迟",
    paraphrase="One tile step takes v2 12.3 us to load and 8.7 to compute, 21.0 in all; v3 0.5 + 12.1 = "
    "12.6 us, 40 % less.",
    stated={"v2": 21.0, "v3": 12.6, "saved": 40}, unit="us, %", tol=0.005, verdict="confirmed",
)
def sums():
    v2, v3 = 12.3 + 8.7, 0.5 + 12.1
    return Truth({"v2": v2, "v3": v3, "saved": 100 * (1 - v3 / v2)})


@claim(
    "18.6-047", section="18.6.3", where="Table 18-22", kind="timing",
    title_en="Utilisation from the latency table", title_zh="Tensor Core 利用率",
    paraphrase="One tile step takes 21.0 us with v2 and 12.6 us with v3 at d = 128: 41 and 75 % of the "
    "tensor cores.",
    stated={"v2": 41, "v3": 75}, unit="%", verdict="wrong", severity=3, reading_is_guess=True,
    right="A 128 x 128 tile at d = 128 is 8.4 MFLOP: 1.1 us at an SM's peak. 21.0 and 12.6 us mean 5 and 9 "
    "%. By share of the printed times it would be 41 and 96 %. The three columns cannot belong together.",
    source=H100.source,
)
def tile_utilisation():
    flop = 4 * 128 * 128 * 128
    sm_peak = H100.fp16 * 1e12 / H100.sms
    return Cases(
        {
            "tile FLOPs over time and peak of one SM": {
                "v2": 100 * flop / (21.0e-6 * sm_peak),
                "v3": 100 * flop / (12.6e-6 * sm_peak),
            },
            "computing time over total time": {"v2": 100 * 8.7 / 21.0, "v3": 100 * 12.1 / 12.6},
        },
        f"whole GPU: {H100.sms * tflops(flop, 0.0126):.0f} TFLOP/s at 12.6 us a tile (Br = 128 is assumed, "
        "Bc = 128 stated)",
    )


@claim(
    "18.6-048", section="18.6.3", where="Table 18-22", kind="statement",
    title_en="Compute time rises and is called better", title_zh="计算延迟",
    paraphrase="Compute latency improves from 8.7 to 12.1 us, because tensor cores have more uninterrupted "
    "work.",
    stated={"less time for the same products": True}, verdict="wrong", severity=2,
    right="12.1 us is longer than 8.7 us. Uninterrupted work would shorten it.",
)
def compute_time():
    return Truth(
        {"less time for the same products": 12.1 < 8.7}, "the tile and its FLOPs are the same in both rows"
    )


@claim(
    "18.6-049", section="18.6.3", where="text", kind="statement",
    title_en="What competes with cp.async for the load unit", title_zh="LSU 竞争",
    paraphrase="In v2 cp.async shares load/store bandwidth with feeding the tensor cores' WGMMA.",
    stated="WGMMA", verdict="wrong", severity=1,
    right="v2 on an A100 has no WGMMA: operands reach mma.sync through ldmatrix, and that shares the "
    "load/store unit with cp.async. WGMMA reads shared memory itself.",
)
def lsu():
    return Truth("ldmatrix for mma.sync", "WGMMA exists from sm_90a on; v2 issues mma.sync everywhere")
