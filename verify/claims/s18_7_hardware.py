"""Ledger entries for section 18.7.4: GPU generations, other vendors, installation trouble."""

from verify.claims.hardware import A100, CUDA_GUIDE, H200_DATASHEET
from verify.claims.ledger import Bound, Cases, Elsewhere, Truth, claim

REPO = "Dao-AILab/flash-attention"
TPU_DOCS = "Google Cloud documentation, TPU v5e and TPU v5p system architecture"


@claim(
    "18.7-080", section="18.7.4", where="Table 18-29", kind="hardware",
    title_en="Architecture names and memory", title_zh="GPU 架构支持矩阵",
    paraphrase="RTX 4090 is Ampere (one row) and Ada (the next); H200 and H100 NVL are Hopper 90a with 141 "
    "GB; B200 is SM 100.",
    stated={"RTX 4090": "Ampere", "H200 GB": 141, "H100 NVL GB": 141, "H200 cc": "90a", "B200 cc": "100"},
    tol=0, verdict="wrong", severity=1,
    right="RTX 4090 is Ada only. H100 NVL has 94 GB. H200 is compute capability 9.0 like the H100; sm_90a "
    "is a compiler target for all of them.",
    source=f"{H200_DATASHEET}; NVIDIA H100 NVL datasheet; {CUDA_GUIDE}",
)
def names():
    return Truth({"RTX 4090": "Ada", "H200 GB": 141, "H100 NVL GB": 94, "H200 cc": "90", "B200 cc": "100"})


@claim(
    "18.7-081", section="18.7.4", where="Table 18-29", kind="library",
    title_en="Which version runs where", title_zh="FA v1 / v2 / v3 支持",
    paraphrase="v1 runs in part on Volta and Turing; v2 on Ampere and later; v3 on Hopper and in full on "
    "Blackwell (FA-4).",
    stated={"v1 on Volta": "partial", "v1 on Turing": "partial", "v2 on Turing": "no", "v3 on B200": "full"},
    verdict="wrong", severity=3,
    right="v1: nothing on Volta; Turing yes, in FP16 only and with smaller heads in the backward. v3's "
    "kernels use wgmma, which sm_100 does not have: they do not run on a B200. FlashAttention-4 is other "
    "code.",
    source=f"{REPO} v1.0.9 fmha_api.cpp; v2.8.3 hopper/ (sm_90a); flash_attn/cute (sm_100)",
)
def versions():
    return Truth({"v1 on Volta": "no", "v1 on Turing": "partial", "v2 on Turing": "no", "v3 on B200": "no"})


@claim(
    "18.7-082", section="18.7.4", where="text", kind="library",
    title_en="FP8 kernels need Hopper", title_zh="FP8 支持仅限 Hopper+",
    paraphrase="The FP8 kernels rely on wgmma and do not run on SM 89.",
    stated={"FP8 on sm_89": False}, verdict="confirmed",
    source=f"{REPO} v2.8.3 hopper/flash_api.cpp: 'on Ampere/Ada cards only supports fp16 and bf16'",
)
def fp8_needs_hopper():
    return Truth({"FP8 on sm_89": False}, "refused by the type check")


@claim(
    "18.7-083", section="18.7.4", where="text", kind="library",
    title_en="Built on SM 89, run on SM 80", title_zh="PTX→Cubin 的 JIT 编译",
    paraphrase="If the cubin for a target is missing the driver compiles the PTX at first launch: so a "
    "build on an RTX 4090 runs on an A100 after 5 to 15 s.",
    stated={"compute_89 PTX runs on sm_80": True}, verdict="wrong", severity=3,
    right="PTX runs on equal or newer architectures only, so the launch fails with 'no kernel image', as "
    "table 18-31 of the same section says. (flash-attn 2.x always builds sm_80 and is not affected.)",
    source="CUDA C++ Programming Guide, PTX compatibility",
)
def jit():
    ptx, device = 89, 80
    return Truth({"compute_89 PTX runs on sm_80": device >= ptx}, "PTX is forward compatible only")


@claim(
    "18.7-084", section="18.7.4", where="text", kind="hardware",
    title_en="LDS of CDNA", title_zh="LDS 64 KB per CU",
    paraphrase="An MI200 compute unit has 64 KB of LDS, less than the A100's 192 KB per SM.",
    stated={"MI200 LDS, KB": 64, "A100 L1 + shared, KB": 192}, tol=0, verdict="confirmed",
    source=f"AMD Instinct MI200 instruction set architecture; {A100.source}",
)
def lds():
    return Truth(
        {"MI200 LDS, KB": 64, "A100 L1 + shared, KB": A100.l1_kib}, "usable as shared memory: 164 KB"
    )


@claim(
    "18.7-085", section="18.7.4", where="text", kind="hardware",
    title_en="Asynchronous copies on CDNA2", title_zh="__builtin_amdgcn_s_buffer_load",
    paraphrase="s_buffer_load copies asynchronously from global memory to LDS.",
    stated="LDS", verdict="wrong", severity=2,
    right="The s_ prefix means scalar: the data go to scalar registers. Direct loads to LDS are buffer_load "
    "... lds and global_load_lds.",
    source="AMD Instinct MI200 ISA, scalar memory instructions; LLVM AMDGPU documentation",
)
def s_buffer_load():
    return Truth("scalar registers")


@claim(
    "18.7-086", section="18.7.4", where="text", kind="library",
    title_en="SDPA on ROCm", title_zh="aotriton 后端",
    paraphrase="On ROCm, SDPA's flash switch selects AOTriton's kernel instead of the CUDA one.",
    stated="AOTriton", verdict="confirmed",
    source="pytorch aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, USE_ROCM (newer versions offer CK "
    "as well)",
)
def rocm():
    return Truth("AOTriton")


@claim(
    "18.7-087", section="18.7.4", where="Listing 2", kind="library",
    title_en="Name of MLX's attention", title_zh="mlx.nn.fast.scaled_dot_product_attention",
    paraphrase="MLX has fused attention as mlx.nn.fast.scaled_dot_product_attention, for arrays (batch, "
    "length, heads, d).",
    stated={"module": "mlx.nn.fast", "layout": "BSHD"}, verdict="wrong", severity=3,
    right="mlx.core.fast.scaled_dot_product_attention, for arrays [B, N, T, D] (heads before length). The "
    "sample, once the name is mended, attends across heads; see 18.7-124.",
    source="MLX documentation, mlx.core.fast.scaled_dot_product_attention",
)
def mlx():
    return Truth({"module": "mlx.core.fast", "layout": "BHSD"})


@claim(
    "18.7-088", section="18.7.4", where="text", kind="timing",
    title_en="M2 Max against A100", title_zh="3-5 倍",
    paraphrase="SDPA (math) on an M2 Max takes 3 to 5 times as long as on an A100.",
    stated={"lo": 3, "hi": 5}, unit="x", verdict="unverifiable", severity=1,
    right="No type, head count or version is given. Memory bandwidth alone (400 against 2039 GB/s) gives "
    "5.1, FP32 rates 1.4, tensor cores 23.",
)
def m2_max():
    return Bound(19.5 / 13.6, A100.fp16 / 13.6, "between the FP32 ratio and tensor cores against FP32")


@claim(
    "18.7-089", section="18.7.4", where="text", kind="library",
    title_en="Release of PyTorch 2.6", title_zh="PyTorch 2.6",
    paraphrase="PyTorch 2.6 appeared in January 2025.",
    stated="2025-01", verdict="confirmed",
    source="PyTorch 2.6 release blog, 29 January 2025",
)
def torch_26():
    return Truth("2025-01", "the claims about IPEX beside it name no measurement")


@claim(
    "18.7-090", section="18.7.4", where="text", kind="hardware",
    title_en="HBM bandwidth of TPU v5p", title_zh="v5p 约 4.8 TB/s",
    paraphrase="TPU v5p has about 4.8 TB/s of on-chip HBM bandwidth.",
    stated=4800, unit="GB/s", verdict="wrong", severity=3,
    right="2765 GB/s (95 GB). 4800 is the interconnect between chips, in Gbit/s. HBM is not on the chip.",
    source=TPU_DOCS,
)
def tpu_bandwidth():
    return Truth(2765, "inter-chip interconnect: 4800 Gbps")


@claim(
    "18.7-091", section="18.7.4", where="text", kind="hardware",
    title_en="v5e and v5p against the A100's HBM", title_zh="比 A100 HBM2e 更高的带宽",
    paraphrase="v5e and v5p beat an A100 thanks to higher memory bandwidth.",
    stated={"v5e above A100": True, "v5p above A100": True}, verdict="wrong", severity=2,
    right="v5e has 819 GB/s, 0.4 of an A100, and 197 TFLOP/s BF16, 0.63 of it. Only v5p is above (2765 "
    "GB/s, 459 TFLOP/s).",
    source=TPU_DOCS,
)
def tpu_against_a100():
    return Truth({"v5e above A100": A100.gb_per_s < 819, "v5p above A100": A100.gb_per_s < 2765})


@claim(
    "18.7-092", section="18.7.4", where="text", kind="library",
    title_en="jax.nn.dot_product_attention on TPU", title_zh="Pallas Kernel",
    paraphrase="jax.nn.dot_product_attention uses a Pallas kernel on TPUs.",
    stated="Pallas", verdict="wrong", severity=2,
    right="Its implementation argument knows xla and cudnn; on a TPU it is plain XLA. The Pallas kernels "
    "are in jax.experimental.pallas.ops.tpu.flash_attention.",
    source="JAX documentation, jax.nn.dot_product_attention",
)
def jax_attention():
    return Truth("XLA")


@claim(
    "18.7-093", section="18.7.4", where="text", kind="timing",
    title_en="Latencies at 4096 on TPU and A100", title_zh="0.8-1.2 ms",
    paraphrase="Self-attention at N = 4096 takes 0.8 to 1.2 ms on v5e and v5p, 1.5 to 2 ms on an A100, 3.5 "
    "ms with math.",
    stated={"TPU": 0.8, "A100": 1.5, "math": 3.5}, unit="ms", verdict="unverifiable", severity=2,
    right="Batch, heads and d are missing, so that no rate can be formed. Two chips 2.3 times apart share "
    "one number.",
)
def tpu_latency():
    return Bound(0, float("inf"), "batch size, heads and head dimension are not given")


@claim(
    "18.7-094", section="18.7.4", where="Table 18-31", kind="library",
    title_en="CUDA for compute_89", title_zh="Unsupported GPU architecture compute_89",
    paraphrase="Error 'unsupported architecture compute_89' needs CUDA 11.8 or newer.",
    stated="11.8", verdict="confirmed",
    source="CUDA 11.8 release notes (Ada and Hopper targets)",
)
def compute_89():
    return Truth("11.8")


@claim(
    "18.7-095", section="18.7.4", where="Table 18-31", kind="statement",
    title_en="Missing cubin, two consequences", title_zh="no kernel image is available",
    paraphrase="Without a cubin for the present GPU the launch fails with 'no kernel image'.",
    stated="launch fails", verdict="inconsistent", severity=2, conflicts_with=("18.7-083", "18.7-004"),
    right="Right for flash-attn, which ships no PTX. 18.7.1 and an earlier paragraph promise a JIT "
    "compilation instead.",
)
def missing_cubin():
    return Elsewhere("JIT compilation", ("18.7-083", "18.7-004"), "the text on cubin compatibility")


@claim(
    "18.7-096", section="18.7.4", where="Table 18-30", kind="library",
    title_en="v2 on ROCm", title_zh="CUDA 与 ROCm 支持对比",
    paraphrase="v2 is supported in full on MI250X and MI300X at the end of 2024.",
    stated={"largest head dimension": 256}, tol=0, verdict="depends", severity=1,
    right="Forward up to 256, backward up to 128 in the default (composable kernel) backend; the Triton "
    "backend was work in progress.",
    source=f"{REPO} v2.7.2 README, AMD ROCm support",
)
def rocm_support():
    return Cases({"forward": {"largest head dimension": 256}, "backward": {"largest head dimension": 128}})
