"""Ledger entries for section 18.7.4: tuning parameters, backend benchmark, FP8 inference, tensor parallelism."""

from verify.claims.hardware import A100
from verify.claims.ledger import Bound, Cases, Elsewhere, Truth, claim

REPO = "Dao-AILab/flash-attention"


@claim(
    "18.7-100", section="18.7.4", where="Listing 3", kind="library",
    title_en="Environment variables for tile sizes", title_zh="FLASH_ATTN_BR / FLASH_ATTN_BC",
    paraphrase="FLASH_ATTN_BR and FLASH_ATTN_BC override the tile sizes (default 128).",
    stated={"read by the package": True}, verdict="wrong", severity=2,
    right="They do not occur in any revision of the repository. Tile sizes are template arguments fixed at "
    "compile time.",
    source=f"{REPO}, git log --all -S FLASH_ATTN_BR: no commit; v2.6.3 flash_fwd_launch_template.h",
)
def tile_variables():
    return Truth({"read by the package": False})


@claim(
    "18.7-101", section="18.7.4", where="text", kind="library",
    title_en="Head dimension 80", title_zh="非典型维度",
    paraphrase="Unusual sizes such as 80 take a generic loop.",
    stated="generic loop", verdict="wrong", severity=1,
    right="They are rounded up to the next kernel, 96 here, and the surplus columns are zeros.",
    source=f"{REPO} v2.6.3 csrc/flash_attn/flash_api.cpp, head_size_rounded",
)
def odd_head():
    return Truth("padded to 96")


@claim(
    "18.7-102", section="18.7.4", where="text", kind="number",
    title_en="Loss at head dimension 80", title_zh="性能降低 15-25%",
    paraphrase="Unusual head dimensions such as 80 lose 15 to 25 % of the throughput.",
    stated=20, unit="%", tol=0.25, verdict="confirmed",
)
def odd_head_loss():
    rounded = -(-80 // 32) * 32
    return Truth(
        100 * (1 - 80 / rounded), f"{rounded - 80} of {rounded} columns are padding: 17 % of the products"
    )


@claim(
    "18.7-103", section="18.7.4", where="text", kind="statement",
    title_en="Kernels of a larger batch", title_zh="批处理批量",
    paraphrase="A larger batch means more parallel kernels; for small batches torch.compile merges the "
    "kernels of a batch into a CUDA graph.",
    stated=4, unit="launches for batch 4", tol=0, verdict="wrong", severity=1,
    right="One kernel with a larger grid. There are no per-sequence kernels to merge; a graph saves "
    "launches between layers.",
)
def batch_kernels():
    return Truth(1, "grid (Tr, batch, heads) of a single launch")


@claim(
    "18.7-104", section="18.7.4", where="text", kind="timing",
    title_en="Flash against mem_efficient", title_zh="典型结果",
    paraphrase="On an A100 (B=4, H=32, d=128) mem_efficient is 5 to 10 % faster at N = 256, flash 15 to 30 "
    "% at N >= 1024.",
    stated={"N=256": 7.5, "N=1024": 22.5}, unit="%", verdict="unverifiable", severity=1,
    right="Not measured in the source. The v2 paper has the xFormers kernel behind v2 by 25 to 130 % at all "
    "lengths from 512.",
    source="Dao, FlashAttention-2, figure 5",
)
def backends():
    return Bound(0, 200, "no measurement is given; PyTorch versions differ")


@claim(
    "18.7-105", section="18.7.4", where="Listing 4", kind="number",
    title_en="Memory of the math backend in the benchmark", title_zh="benchmark_sdpa_backends",
    paraphrase="The benchmark of backends runs all of them up to N = 8192 at B = 4, H = 32, math included.",
    stated={"S and P in FP16 fit": True}, verdict="depends", severity=1,
    right="S and P take 17.2 GB each in FP16, twice that when math keeps fp32 copies: an 80 GB card manages "
    "FP16, a 24 GB card runs out of memory and the script stops.",
)
def math_memory():
    both = 2 * 4 * 32 * 8192**2 * 2 / 1e9
    return Cases(
        {"80 GB": {"S and P in FP16 fit": both < A100.gb}, "24 GB": {"S and P in FP16 fit": both < 24}},
        f"S and P together {both:.1f} GB",
    )


@claim(
    "18.7-106", section="18.7.4", where="text", kind="statement",
    title_en="Softmax precision in FP8 mode", title_zh="归一化精度",
    paraphrase="In FP8 mode the softmax runs in FP16.",
    stated="FP16", verdict="inconsistent", severity=2, conflicts_with=("18.6-032",),
    right="FP32, as 18.6.2 says and v3 does. FP16 softmax is the baseline that the paper compares with.",
    source="Shah et al., FlashAttention-3, section 4.3",
)
def fp8_softmax():
    return Elsewhere("FP32", ("18.6-032",), "18.6.2: softmax in FP32, accumulation in FP32")


@claim(
    "18.7-107", section="18.7.4", where="text", kind="library",
    title_en="Output type in FP8 mode", title_zh="最终输出写回 FP8",
    paraphrase="In FP8 mode the kernel writes its output in FP8.",
    stated="FP8", verdict="wrong", severity=2,
    right="BF16, as 18.6.2 has it (BF16 or FP16).",
    source=f"{REPO} v2.8.3 hopper/flash_api.cpp: 'For FP8 input, output must have dtype BF16'",
)
def fp8_output():
    return Truth("BF16")


@claim(
    "18.7-108", section="18.7.4", where="text", kind="number",
    title_en="KV cache under tensor parallelism", title_zh="KV cache 总大小",
    paraphrase="With TP = 4 and a GQA factor of 2 the total KV cache falls to 1/8.",
    stated=1 / 8, unit="of the multi-head cache on one GPU", verdict="depends", severity=2,
    right="Per GPU. Over all four GPUs it is 1/2: tensor parallelism spreads the cache, only GQA shrinks it.",
)
def kv_cache():
    return Cases({"per GPU": 1 / (4 * 2), "total": 4 / (4 * 2)})


@claim(
    "18.7-109", section="18.7.4", where="Listing 5", kind="library",
    title_en="FP8 through flash_attn_func", title_zh="from flash_attn import flash_attn_func",
    paraphrase="Casting q, k, v to float8_e4m3fn and calling flash_attn's flash_attn_func runs v3's FP8 "
    "kernel.",
    stated={"flash_attn accepts FP8": True}, verdict="wrong", severity=3,
    right="It raises: FP16 and BF16 only. v3's function is flash_attn_interface.flash_attn_func, with "
    "q_descale, k_descale, v_descale; a bare cast has no scale (18.7-123).",
    source=f"{REPO} v2.6.3 flash_api.cpp: 'FlashAttention only support fp16 and bf16 data type'",
)
def fp8_call():
    return Truth({"flash_attn accepts FP8": False})
