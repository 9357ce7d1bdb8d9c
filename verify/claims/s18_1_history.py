"""Ledger entries for section 18.1.2: the versions of FlashAttention and who adopted them."""

from math import inf

from refimpl.tiling import cdiv
from verify.claims import hardware
from verify.claims.account import fit_exponent
from verify.claims.hardware import A100, H100
from verify.claims.ledger import Bound, Cases, Range, Truth, claim

PYTORCH_SDPA = "PyTorch 2.0 documentation, torch.nn.functional.scaled_dot_product_attention"
TRANSFORMERS_434 = "huggingface/transformers pull request 25598 (merged for v4.34); v4.36 release notes"
FLEX = "PyTorch blog, FlexAttention, August 2024, section on performance (A100 figures)"


@claim(
    "18.1-020", section="18.1.2", where="text", kind="library",
    title_en="Speed-up and memory of v1", title_zh="FA v1 加速",
    paraphrase="v1 is 2-4 times as fast as standard attention on A100 and needs O(N) instead of O(N^2) "
    "memory.",
    stated={"speed-up": Range(2, 4), "memory exponent before": 2, "memory exponent after": 1},
    verdict="confirmed", source=f"{hardware.FA2}, abstract (2-4x over optimised baselines)",
)
def v1_gain():
    return Truth(
        {
            "speed-up": Range(2, 4),
            "memory exponent before": fit_exponent(lambda N: 2 * N * N, 1 << 12, 1 << 20),
            "memory exponent after": fit_exponent(lambda N: 2 * N, 1 << 12, 1 << 20),
        },
        "S and P against m and l; the speed-up as published",
    )


@claim(
    "18.1-021", section="18.1.2", where="Listing 3", kind="library",
    title_en="What v1 and v2 run in parallel", title_zh="并行策略",
    paraphrase="v1 spreads work over batch and heads only; v2 adds the blocks of the query sequence.",
    stated={"v1": {"batch": True, "heads": True, "sequence": False},
            "v2": {"batch": True, "heads": True, "sequence": True}},
    verdict="confirmed", conflicts_with=("18.4-028",), source=f"{hardware.FA2}, section 3.2",
)
def parallel_dimensions():
    return {
        "v1": {"batch": True, "heads": True, "sequence": False},
        "v2": {"batch": True, "heads": True, "sequence": True},
    }


def tile_loads(Tr, Tc, order):
    """K/V tile fills of a causal forward that skips dead tiles, visiting each row's tiles in `order`."""
    loads = 0
    for i in range(Tr):
        visible = list(range(cdiv((i + 1) * Tc, Tr)))
        for _ in visible if order == "forward" else reversed(visible):
            loads += 1
    return loads


@claim(
    "18.1-022", section="18.1.2", where="text", kind="number",
    title_en="Traffic saved by reversing the loop", title_zh="逆向循环顺序",
    paraphrase="Visiting K/V tiles from the diagonal backwards reuses tiles in SRAM and saves 37 % of HBM "
    "reads.",
    stated=37, unit="%", verdict="wrong", severity=2,
    right="Nothing: the same tiles are filled in either order. Skipping tiles above the diagonal saves (Tc - "
    "1)/(2 Tc) of the fills: 37.5 % for 4 tiles, nearly half for many.",
    source=f"{hardware.FA2}, section 3.1.1 (skipping; no saving is claimed for the order)",
)
def reversed_loop():
    forward, backward = tile_loads(32, 32, "forward"), tile_loads(32, 32, "reversed")
    return Truth(100 * (1 - backward / forward), f"{forward} tile fills forwards, {backward} backwards, 32 x 32 tiles")


@claim(
    "18.1-023", section="18.1.2", where="text", kind="number",
    title_en="Factors of v2's speed-up", title_zh="加速拆解",
    paraphrase="The doubling from v1 to v2 is the product of three factors: 1.3, 1.15 and 1.05.",
    stated=2, unit="x", verdict="wrong", severity=2, conflicts_with=("18.1-024",),
    right="The product is 1.57. The same sentence then gives v2 1.5 times the TFLOP/s of v1. The paper's "
    "account of the doubling is different: fewer non-matmul FLOP, sequence parallelism, and work split among "
    "warps by Q.",
    source=f"{hardware.FA2}, sections 3.1-3.3",
)
def v2_factors():
    return Truth(1.3 * 1.15 * 1.05, "1.3 x 1.15 x 1.05")


@claim(
    "18.1-024", section="18.1.2", where="text", kind="timing",
    title_en="Utilisation of v1 and v2", title_zh="GPU 利用率",
    paraphrase="Sequence parallelism raised utilisation from about 50 % to about 65 %, a factor 1.3.",
    stated={"v1, %": 50, "v2, %": 65, "ratio": 1.3}, unit="% of peak", verdict="wrong", severity=2,
    right="v1 reaches 25-40 % of an A100's peak, v2 50-73 %.", source=f"{hardware.FA2}, abstract",
)
def utilisation():
    return Truth({"v1, %": Range(25, 40), "v2, %": Range(50, 73), "ratio": 65 / 50}, "as published by the author")


@claim(
    "18.1-025", section="18.1.2", where="text", kind="timing",
    title_en="Training at 73 % of peak", title_zh="训练吞吐",
    paraphrase="v2 brings training throughput to about 73 % of the roofline limit.",
    stated=73, unit="% of peak", verdict="depends", severity=1, tol=0.005,
    source=f"{hardware.FA2}, abstract, section 4",
    right="73 % is the best forward kernel (230 TFLOP/s); end-to-end GPT training reached 225 TFLOP/s, 72 %.",
)
def training_share():
    return Cases({"best forward kernel, as published": 73, "GPT training, 225 TFLOP/s": 100 * 225 / A100.fp16})


@claim(
    "18.1-026", section="18.1.2", where="text", kind="timing",
    title_en="Throughput of v3", title_zh="FA v3 吞吐",
    paraphrase="v3 forward: 740 TFLOP/s in FP16 (75 % of 989), 1.2 PFLOP/s in FP8, 1.5-2.0 times v2.",
    stated={"FP16, TFLOP/s": 740, "share of peak, %": 75, "FP8, PFLOP/s": 1.2, "over v2": Range(1.5, 2.0)},
    verdict="confirmed", source=f"{hardware.FA3}, abstract",
)
def v3_throughput():
    return Truth(
        {
            "FP16, TFLOP/s": 740,
            "share of peak, %": 100 * 740 / H100.fp16,
            "FP8, PFLOP/s": 1.2,
            "over v2": Range(1.5, 2.0),
        },
        f"published; 1.2 PFLOP/s is {100 * 1200 / H100.fp8:.0f} % of the FP8 peak",
    )


@claim(
    "18.1-027", section="18.1.2", where="text", kind="statement",
    title_en="Perplexity cost of FP8", title_zh="精度损失",
    paraphrase="FP8 attention changes perplexity by less than 0.01.",
    stated=0.01, unit="perplexity", verdict="unverifiable", severity=2,
    right="The paper reports RMSE against fp64 (2.6 times below per-tensor FP8), no perplexity; model and "
    "data are not named here.",
    source=f"{hardware.FA3}, section 4.3",
)
def fp8_perplexity():
    return Bound(0, inf, "no model, data set or source is named, and the paper has no such measurement")


@claim(
    "18.1-028", section="18.1.2", where="text", kind="hardware",
    title_en="What thread block clusters are for", title_zh="线程束专业化",
    paraphrase="Hopper's thread block clusters are what lets warp groups of one SM run different tasks.",
    stated={"clusters enable warp specialisation": True, "one cluster spans one SM": True},
    verdict="wrong", severity=2, source=f"{hardware.CUDA_GUIDE}; {hardware.H100_WHITEPAPER}; {hardware.FA3}",
    right="A cluster is a group of blocks on different SMs of one GPC, with access to each other's shared "
    "memory. Warps of one block could always branch differently; TMA, asynchronous WGMMA and setmaxnreg make "
    "it pay.",
)
def clusters():
    return {"clusters enable warp specialisation": False, "one cluster spans one SM": False}


@claim(
    "18.1-029", section="18.1.2", where="text", kind="hardware",
    title_en="FP8 formats of Hopper", title_zh="FP8 低精度计算",
    paraphrase="Hopper's fourth-generation tensor cores take FP8 in E4M3 and E5M2, at twice the FP16 rate.",
    stated={"generation": 4, "E4M3": True, "E5M2": True, "rate against FP16": 2}, verdict="confirmed",
    source=hardware.H100_WHITEPAPER,
)
def fp8_formats():
    return {"generation": 4, "E4M3": True, "E5M2": True, "rate against FP16": H100.fp8 / H100.fp16}


@claim(
    "18.1-030", section="18.1.2", where="text", kind="library",
    title_en="Backends of PyTorch's SDPA", title_zh="主流框架集成",
    paraphrase="PyTorch 2.0 brought scaled_dot_product_attention: flash where its conditions hold (head "
    "size, no explicit mask), else memory-efficient or math.",
    stated={"since": "2.0", "flash takes attn_mask": False, "backends": 3}, verdict="confirmed",
    source=PYTORCH_SDPA,
)
def sdpa_backends():
    return Truth({"since": "2.0", "flash takes attn_mask": False, "backends": 3}, "cuDNN came as a fourth in 2.5")


@claim(
    "18.1-031", section="18.1.2", where="text", kind="library",
    title_en="FlashAttention in Transformers", title_zh="自动检测",
    paraphrase="Transformers detects and uses the flash-attn package by itself since v4.35.",
    stated={"since": "4.35", "chosen without being asked for": True}, verdict="wrong", severity=2,
    right="v4.34 added it behind use_flash_attention_2=True (attn_implementation since v4.36). It is never "
    "chosen unasked; what became the default, in v4.36, is SDPA.",
    source=TRANSFORMERS_434,
)
def transformers_adoption():
    return {"since": "4.34", "chosen without being asked for": False}


@claim(
    "18.1-032", section="18.1.2", where="text", kind="statement",
    title_en="Closed models that use it", title_zh="LLM 训练标配",
    paraphrase="GPT-4 is known to be trained with FlashAttention; for Claude and Gemini it is generally "
    "believed.",
    stated={"GPT-4": True}, verdict="unverifiable", severity=1,
    right="None of these vendors has published its attention kernels. 18.1.3 repeats belief as fact for all "
    "of them.",
)
def closed_models():
    return Bound(-inf, inf, "the training code of these models is not public")


@claim(
    "18.1-033", section="18.1.2", where="text", kind="statement",
    title_en="Citations and prizes", title_zh="学术影响",
    paraphrase="Over 3000 citations by 2026, among the most cited of NeurIPS 2022; an ACM dissertation award "
    "honourable mention in 2024.",
    stated={"citations": 3000, "mention in": 2024}, verdict="unverifiable", severity=1,
    right="Counts change daily. No source that we found has this mention: the 2024 award went to Ashish Sharma, "
    "with Sewon Min among the mentions, and the author's own list of honours does not name it.",
    source="University of Washington, Allen School news, 4 June 2025; tridao.me, selected honors and awards",
)
def prizes():
    return Bound(
        0, inf, "citation counts cannot be recomputed, and the complete list of honourable mentions was not at hand"
    )


@claim(
    "18.1-034", section="18.1.2", where="text", kind="library",
    title_en="Speed of FlexAttention", title_zh="FlexAttention",
    paraphrase="FlexAttention (PyTorch 2.5) reaches 90 % or more of v2's forward throughput on H100.",
    stated={"PyTorch": "2.5", "share of v2, %": Range(90, 100), "device": "H100"}, verdict="wrong",
    severity=1,
    right="The 90 % is for A100. On H100 the same authors report it ahead of v2 and at about 85 % of v3.",
    source=FLEX,
)
def flex_attention():
    return {"PyTorch": "2.5", "share of v2, %": 90, "device": "A100"}


@claim(
    "18.1-035", section="18.1.2", where="text", kind="statement",
    title_en="Ring Attention on eight GPUs", title_zh="RingAttention",
    paraphrase="Ring Attention trains with a million tokens of context on 8 A100.",
    stated=1e6, unit="tokens", verdict="unverifiable", severity=1,
    right="It depends on the model, which is not named: the context that fits falls with width and depth.",
    source="Liu et al., Ring Attention, arXiv:2310.01889, table 3 (per model size)",
)
def ring_context():
    # One BF16 activation of width 1024 a token and layer is what even a small model keeps: 80 GB a device, 24 layers.
    most = 8 * 80e9 / (2 * 1024 * 24)
    return Bound(0, most, "the model is not named; the bound is for one kept BF16 activation a layer at width 1024")


@claim(
    "18.1-036", section="18.1.2", where="Figure 18-1", kind="statement",
    title_en="Dates of the three versions", title_zh="版本演进时间线",
    paraphrase="v1 in 2022 (NeurIPS), v2 in July 2023, v3 in July 2024.",
    stated={"v1": "2022", "v2": "2023-07", "v3": "2024-07"}, verdict="confirmed",
    source=f"{hardware.FA1}; {hardware.FA2}; {hardware.FA3}",
)
def timeline():
    def posted(citation):
        number = citation.rsplit(":", 1)[1]
        return f"20{number[:2]}-{number[2:4]}"

    return Truth(
        {"v1": posted(hardware.FA1)[:4], "v2": posted(hardware.FA2), "v3": posted(hardware.FA3)},
        "year and month from the arXiv numbers",
    )
