"""Ledger entries for section 18.7.2: PyTorch's scaled_dot_product_attention and FlexAttention."""

import numpy as np

from verify.claims.emulate import exact, flash_forward, rounded
from verify.claims.ledger import Cases, Truth, claim

SDPA = "PyTorch documentation, torch.nn.functional.scaled_dot_product_attention"
UTILS = "pytorch aten/src/ATen/native/transformers/cuda/sdp_utils.cpp"
FLEX = "PyTorch 2.5 torch/nn/attention/flex_attention.py"


@claim(
    "18.7-030", section="18.7.2", where="text", kind="library",
    title_en="attn_mask together with is_causal", title_zh="is_causal 优先于 attn_mask",
    paraphrase="When both are given, is_causal takes priority over attn_mask.",
    stated="is_causal wins", verdict="wrong", severity=2,
    right="An error is raised when both are set: the reference code asserts attn_mask is None. The advice "
    "to prefer is_causal where it applies is sound.",
    source=SDPA,
)
def both_masks():
    return Truth("error")


@claim(
    "18.7-031", section="18.7.2", where="text", kind="library",
    title_en="SDPA and fewer K, V heads", title_zh="GQA/MQA 支持",
    paraphrase="SDPA broadcasts K and V over groups of query heads by itself.",
    stated={"without an argument": True}, verdict="wrong", severity=3,
    right="Only with enable_gqa=True, new in 2.5; before that one had to repeat K and V. Without it the "
    "head dimensions must match (or one of them be 1).",
    source=SDPA,
)
def gqa():
    return Truth({"without an argument": False}, "enable_gqa defaults to False")


@claim(
    "18.7-032", section="18.7.2", where="Listing 2", kind="library",
    title_en="Context manager for backends", title_zh="torch.backends.cuda.sdp_kernel",
    paraphrase="torch.backends.cuda.sdp_kernel sets the choice; printing sdp_kernel() shows the order.",
    stated={"current API": "torch.backends.cuda.sdp_kernel", "printing it shows the order": True},
    verdict="wrong", severity=1,
    right="torch.nn.attention.sdpa_kernel(SDPBackend....) since 2.3; the old one is deprecated. It is a "
    "context manager: printing the call shows an object, not an order.",
    source="PyTorch documentation, torch.nn.attention.sdpa_kernel",
)
def context_manager():
    return Truth({"current API": "torch.nn.attention.sdpa_kernel", "printing it shows the order": False})


@claim(
    "18.7-033", section="18.7.2", where="Figure 18-27", kind="library",
    title_en="SDPA and the flash-attn package", title_zh="flash-attn installed?",
    paraphrase="The flash backend is taken if the flash-attn package is installed; without it one gets "
    "other backends. From 2.5 kernels come with torch, and an installed package takes precedence.",
    stated={"2.0 to 2.4 need the package": True, "2.5 prefers the package": True}, verdict="wrong",
    severity=3,
    right="Neither. torch has carried its own copy of the kernels since 2.0 (v1; v2 from 2.2) and never "
    "looks for the package. Installing flash-attn changes nothing in SDPA.",
    source=f"{UTILS}, can_use_flash_attention (USE_FLASH_ATTENTION at build time); PyTorch 2.0 and 2.2 "
    "release notes",
)
def package_needed():
    return Truth({"2.0 to 2.4 need the package": False, "2.5 prefers the package": False})


@claim(
    "18.7-034", section="18.7.2", where="Figure 18-27", kind="library",
    title_en="What EFFICIENT_ATTENTION is", title_zh="EFFICIENT_ATTENTION (cuDNN)",
    paraphrase="The memory-efficient backend is cuDNN's.",
    stated="cuDNN", verdict="wrong", severity=2,
    right="It is the CUTLASS kernel that came from xFormers. cuDNN is a backend of its own, CUDNN_ATTENTION.",
    source="PyTorch documentation, torch.nn.attention.SDPBackend",
)
def efficient():
    return Truth("CUTLASS, from xFormers")


@claim(
    "18.7-035", section="18.7.2", where="text", kind="library",
    title_en="Backends that take an arbitrary mask", title_zh="自定义 attn_mask",
    paraphrase="Of SDPA's backends only MATH takes an arbitrary attn_mask; flash takes none but causal.",
    stated={"MATH": True, "EFFICIENT": False, "CUDNN": False, "FLASH": False}, verdict="wrong", severity=2,
    right="The memory-efficient and the cuDNN backends take masks as well; flash does not.",
    source=f"{UTILS}, the constraint lists of the three backends (check_for_attn_mask is in flash's only)",
)
def masks():
    return Truth({"MATH": True, "EFFICIENT": True, "CUDNN": True, "FLASH": False})


@claim(
    "18.7-036", section="18.7.2", where="text", kind="library",
    title_en="Head dimensions above 256", title_zh="头维度上限",
    paraphrase="SDPA falls back to MATH for head dimensions above 256.",
    stated="MATH", verdict="wrong", severity=1,
    right="Flash declines it, but the memory-efficient backend has no upper limit (only alignment) and is "
    "tried first.",
    source=f"{UTILS}, check_head_dim_size_mem_efficient",
)
def large_heads():
    return Truth("EFFICIENT_ATTENTION")


@claim(
    "18.7-037", section="18.7.2", where="text", kind="library",
    title_en="FP8 in SDPA", title_zh="FP8 类型",
    paraphrase="SDPA takes float8_e4m3fn in its MATH and CUDNN_ATTENTION backends (as of 2.5).",
    stated={"CUDNN": True, "FLASH": False}, verdict="wrong", severity=2,
    right="cuDNN's backend in SDPA accepts FP16 and BF16 only. Newer versions take FP8 in the flash backend "
    "when FlashAttention-3 is activated.",
    source=f"{UTILS}, check_dtypes_low_precision, check_dtypes_flash_attention",
)
def fp8():
    return Truth({"CUDNN": False, "FLASH": False}, "at 2.5; no FP8 in either list")


@claim(
    "18.7-038", section="18.7.2", where="text", kind="library",
    title_en="Deterministic algorithms", title_zh="确定性模式",
    paraphrase="use_deterministic_algorithms(True) turns SDPA's flash backend off and falls back to MATH.",
    stated="MATH", verdict="wrong", severity=1,
    right="Flash stays and runs its deterministic backward; cuDNN is the one that is excluded.",
    source=f"{UTILS}, check_cudnn_deterministic; no such check among flash's constraints",
)
def deterministic():
    return Truth("FLASH_ATTENTION")


@claim(
    "18.7-039", section="18.7.2", where="text", kind="number",
    title_en="Error against FP16 and BF16", title_zh="数值误差",
    paraphrase="SDPA's backends differ by less than 1e-3 in FP16 and less than 2e-4 in BF16.",
    stated={"FP16 below 1e-3": True, "BF16 below 2e-4": True}, verdict="wrong", severity=2,
    right="BF16 has 8 significant bits, FP16 has 11: its error is 8 times larger, not 5 times smaller. The "
    "two bounds may have been swapped, but 2e-4 is too tight for either.",
)
def backend_errors():
    rng = np.random.default_rng(1872)
    got = {}
    for dtype in ("fp16", "bf16"):
        Q, K, V = rounded(rng.standard_normal((3, 512, 64)), dtype)
        got[dtype] = float(np.abs(flash_forward(Q, K, V, dtype=dtype) - exact(Q, K, V)).max())
    return Truth(
        {"FP16 below 1e-3": got["fp16"] < 1e-3, "BF16 below 2e-4": got["bf16"] < 2e-4},
        f"N = 512, d = 64, normal input: max error {got['fp16']:.1e} in FP16, {got['bf16']:.1e} in BF16",
    )


@claim(
    "18.7-040", section="18.7.2", where="text", kind="library",
    title_en="Environment variable that disables flash", title_zh="TORCH_SDPA_USE_FLASH_ATTN",
    paraphrase="TORCH_SDPA_USE_FLASH_ATTN=0 disables the flash backend everywhere.",
    stated={"exists": True}, verdict="wrong", severity=1,
    right="No such variable. Use torch.backends.cuda.enable_flash_sdp(False) or sdpa_kernel.",
    source=f"{UTILS} (reads TORCH_CUDNN_SDPA_DEPRIORITIZED only); no occurrence in public sources searched",
)
def environment():
    return Truth({"exists": False})


@claim(
    "18.7-041", section="18.7.2", where="Table 18-27", kind="library",
    title_en="Version history of SDPA", title_zh="集成演进",
    paraphrase="SDPA's history: 2.0 forward only, package needed; 2.1 backward, dropout, cuDNN as "
    "mem_efficient; 2.2 complex scale; 2.3 cuDNN backend; 2.4 FlexAttention; 2.5 kernels bundled.",
    stated={
        "backward since": "2.1", "dropout since": "2.1", "kernels bundled since": "2.5",
        "cuDNN backend released in": "2.3", "FlexAttention released in": "2.4",
        "news of 2.2": "complex scale",
    },
    verdict="wrong", severity=2,
    right="2.0 brought FlashAttention v1 bundled, forward and backward, with dropout; 2.2 brought "
    "FlashAttention-2; 2.5 the cuDNN backend and FlexAttention (prototype). scale is a real number.",
    source="PyTorch release notes 2.0, 2.2 and 2.5",
)
def history():
    return Truth(
        {
            "backward since": "2.0",
            "dropout since": "2.0",
            "kernels bundled since": "2.0",
            "cuDNN backend released in": "2.5",
            "FlexAttention released in": "2.5",
            "news of 2.2": "FlashAttention-2",
        },
        "18.1.2 of the chapter dates FlexAttention to 2.5 as well",
    )


@claim(
    "18.7-042", section="18.7.2", where="text", kind="library",
    title_en="flash-attn 2.6 on an H100 inside SDPA", title_zh="约 15-20% 性能增益",
    paraphrase="Installing flash-attn 2.6+ on an H100 brings SDPA v3's Hopper kernels and 15 to 20 %.",
    stated={"2.6 contains the v3 kernels": True, "SDPA picks them up": True}, verdict="wrong", severity=3,
    right="v3 is a separate build in hopper/ with its own module (flash_attn_interface); the flash_attn "
    "package runs v2 on an H100, and SDPA uses neither.",
    source="Dao-AILab/flash-attention v2.6.3 README, FlashAttention-3 beta",
)
def hopper_package():
    return Truth({"2.6 contains the v3 kernels": False, "SDPA picks them up": False})


@claim(
    "18.7-043", section="18.7.2", where="text", kind="library",
    title_en="Fused dropout at p = 0.1", title_zh="dropout 融合",
    paraphrase="With dropout_p = 0.1 the flash and the cuDNN backend both fuse the dropout.",
    stated={"flash": True, "cuDNN": True}, verdict="wrong", severity=1,
    right="Flash does. cuDNN's dropout has a resolution of 1/16, and SDPA declines p = 0.1 there (present "
    "source).",
    source=f"{UTILS}, check_cudnn_dropout",
)
def fused_dropout():
    p = 0.1
    return Truth({"flash": True, "cuDNN": (p * 16).is_integer()}, "cuDNN needs a multiple of 1/16")


@claim(
    "18.7-044", section="18.7.2", where="text", kind="library",
    title_en="Layout of SDPA and flash-attn", title_zh="(batch, num_heads, seqlen, head_dim)",
    paraphrase="SDPA takes (batch, heads, length, d), flash-attn (batch, length, heads, d); the scale "
    "defaults to 1/sqrt(d).",
    stated={"SDPA": "BHSD", "flash-attn": "BSHD", "scale": "1/sqrt(d)"}, verdict="confirmed",
    source=f"{SDPA}; flash-attn v2.6.3 docstring",
)
def layouts():
    return Truth({"SDPA": "BHSD", "flash-attn": "BSHD", "scale": "1/sqrt(d)"})


@claim(
    "18.7-045", section="18.7.2", where="text", kind="library",
    title_en="Limits of FlexAttention", title_zh="FlexAttention 的限制",
    paraphrase="As of 2.5 FlexAttention has no dropout, compiles on first use and runs on NVIDIA SM80+ "
    "only.",
    stated={"dropout argument": False, "compiles on first call": True}, verdict="confirmed",
    source=FLEX,
)
def flex_limits():
    return Truth(
        {"dropout argument": False, "compiles on first call": True}, "signature of flex_attention in 2.5"
    )


@claim(
    "18.7-046", section="18.7.2", where="text", kind="number",
    title_en="Keys inside the sample's window", title_zh="sliding window: 1024 left",
    paraphrase="q - kv <= 1024 and kv <= q keeps 1024 keys to the left and none to the right.",
    stated={"to the left": 1024, "with itself": 1025, "to the right": 0}, unit="keys", tol=0,
    verdict="confirmed",
)
def window_keys():
    q, kv = 3000, np.arange(6000)
    keep = (q - kv <= 1024) & (kv <= q)
    return Truth(
        {
            "to the left": int(keep[:q].sum()),
            "with itself": int(keep.sum()),
            "to the right": int(keep[q + 1 :].sum()),
        }
    )


@claim(
    "18.7-047", section="18.7.2", where="text", kind="library",
    title_en="Causal mask of SDPA for unequal lengths", title_zh="is_causal",
    paraphrase="is_causal may be handed to flash and cuDNN, which skip tiles inside the kernel.",
    stated={"flash takes is_causal": True}, verdict="depends", severity=2,
    right="For equal lengths only. SDPA's triangle starts top left, flash's ends bottom right, so that "
    "flash is declined when the lengths differ.",
    source=f"{UTILS}, check_flash_causal_non_square_seqlens",
)
def rectangular():
    return Cases({"Nq = Nk": {"flash takes is_causal": True}, "Nq != Nk": {"flash takes is_causal": False}})
