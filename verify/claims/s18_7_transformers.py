"""Ledger entries for section 18.7.3: attention in Hugging Face Transformers."""

from verify.claims.ledger import Bound, Cases, Elsewhere, Truth, claim

DOCS = "Transformers documentation, perf_infer_gpu_one"
MISTRAL = "Transformers v4.36 to v4.46, models/mistral/modeling_mistral.py"


def window_pairs(N, left, right):
    """Visible (row, key) pairs of a causal mask with a window of `left` and `right` neighbours."""
    return sum(min(i, left) + 1 + min(right, 0) for i in range(N))


@claim(
    "18.7-060", section="18.7.3", where="text", kind="library",
    title_en="Version that brought sdpa and attn_implementation", title_zh="v4.36",
    paraphrase="sdpa and the attn_implementation argument exist from v4.36 on.",
    stated="4.36", verdict="confirmed",
    source="Transformers v4.36.0 release notes",
)
def sdpa_version():
    return Truth("4.36")


@claim(
    "18.7-061", section="18.7.3", where="Figure 18-28", kind="library",
    title_en="sdpa without flash-attn", title_zh="SDPA falls back to cuDNN/Math",
    paraphrase="With sdpa the flash backend is used if flash-attn is installed, else cuDNN or Math; with "
    "both installed it routes to the package.",
    stated={"depends on the package": True}, verdict="wrong", severity=3,
    right="sdpa never uses the package: torch has its own flash kernels.",
    source="pytorch sdp_utils.cpp; see 18.7-033",
)
def sdpa_package():
    return Truth({"depends on the package": False})


@claim(
    "18.7-062", section="18.7.3", where="text", kind="library",
    title_en="ALL_ATTENTION_FUNCTIONS", title_zh="ALL_ATTENTION_FUNCTIONS",
    paraphrase="In the version described (v4.46) models register their functions in ALL_ATTENTION_FUNCTIONS "
    "and fall back to eager with a warning.",
    stated={"in v4.46": True}, verdict="wrong", severity=1,
    right="The dictionary came with v4.48; 4.46 has one attention class per implementation (as figure 18-28 "
    "draws it), and an unsupported choice raises ValueError.",
    source="Transformers v4.48.0 release notes; modeling_utils.py of v4.46",
)
def attention_functions():
    return Truth({"in v4.46": False})


@claim(
    "18.7-063", section="18.7.3", where="text", kind="library",
    title_en="Attention per module", title_zh="_attn_implementation_per_module",
    paraphrase="config._attn_implementation_per_module sets the implementation of each layer (experimental).",
    stated={"exists": True}, verdict="wrong", severity=2,
    right="No such attribute in any version searched. From v4.48 attn_implementation may be a dict by "
    "sub-model (text, vision).",
    source="search over public sources: no occurrence; Transformers documentation, attention_interface",
)
def per_module():
    return Truth({"exists": False})


@claim(
    "18.7-064", section="18.7.3", where="text", kind="library",
    title_en="Padding side for flash_attention_2", title_zh="Pad token 处理",
    paraphrase="flash_attention_2 supports right padding only; for left padding take sdpa.",
    stated={"generation wants": "right"}, verdict="wrong", severity=3,
    right="The reverse: both sides are unpadded by the mask, and batched generation must be padded left. "
    "Mistral even raises an error for right padding.",
    source=f"{MISTRAL}, 'batched generation with padding_side='right''",
)
def padding():
    return Truth({"generation wants": "left"})


@claim(
    "18.7-065", section="18.7.3", where="text", kind="library",
    title_en="output_attentions with flash_attention_2", title_zh="output_attentions=True",
    paraphrase="With output_attentions=True the model switches to the eager path for one pass and returns "
    "the full weights.",
    stated="falls back to eager", verdict="wrong", severity=2,
    right="flash_attention_2 ignores the wish and returns None (later versions warn). It is sdpa that falls "
    "back to eager.",
    source="Transformers modeling_llama.py, LlamaFlashAttention2.forward: output_attentions = False",
)
def output_attentions():
    return Truth("returns None")


@claim(
    "18.7-066", section="18.7.3", where="text", kind="library",
    title_en="float32 with flash_attention_2", title_zh="必须 FP16 或 BF16",
    paraphrase="Loading a model in float32 with flash_attention_2 raises an error.",
    stated="error at load", verdict="wrong", severity=1,
    right="Loading logs a warning; the error comes from the kernel at the first forward pass, or the layer "
    "casts to half.",
    source="Transformers modeling_utils.py, _check_and_enable_flash_attn_2 (logger.warning_once)",
)
def float32():
    return Truth("warning at load")


@claim(
    "18.7-067", section="18.7.3", where="Table 18-28", kind="library",
    title_en="First version with flash_attention_2", title_zh="flash_attention_2 支持版本",
    paraphrase="flash_attention_2 exists for LLaMA from Transformers 4.31, Mistral 4.34, Falcon 4.32, "
    "GPT-NeoX 4.32.",
    stated={"LLaMA": "4.31", "Mistral": "4.34", "Falcon": "4.32", "GPT-NeoX": "4.32"}, verdict="wrong",
    severity=2,
    right="4.34 is the first version with FlashAttention-2 at all: Llama, Mistral, Falcon. GPT-NeoX "
    "followed in 4.36.",
    source=f"{DOCS} of v4.34.1, v4.35.1 (Llama, Mistral, Falcon) and v4.36",
)
def first_version():
    return Truth({"LLaMA": "4.34", "Mistral": "4.34", "Falcon": "4.34", "GPT-NeoX": "4.36"})


@claim(
    "18.7-068", section="18.7.3", where="Table 18-28", kind="table",
    title_en="Gemma 2 twice", title_zh="Gemma 2",
    paraphrase="One row of the table of supported models has Gemma 2 from v4.38, another from v4.43.",
    stated="4.38", verdict="inconsistent", severity=1, conflicts_with=("18.7-067",),
    right="Gemma is in 4.38, Gemma 2 in 4.42.",
    source="Transformers v4.38.0 and v4.42.0 release notes",
)
def gemma_twice():
    return Elsewhere("4.43", ("18.7-067",), "the last row of the same table")


@claim(
    "18.7-069", section="18.7.3", where="Table 18-28", kind="library",
    title_en="Head ratio of Gemma", title_zh="9:1 GQA ratio",
    paraphrase="Gemma and Gemma 2 have 9 query heads for each K, V head.",
    stated=9, unit="query heads a K, V head", tol=0, verdict="wrong", severity=1,
    right="Gemma 2B: 8 (multi-query); Gemma 7B: 1; Gemma 2 9B and 27B: 2.",
    source="config.json of google/gemma-2b, gemma-7b, gemma-2-9b, gemma-2-27b",
)
def gemma_ratio():
    return Cases({"Gemma 2B": 8 / 1, "Gemma 7B": 16 / 16, "Gemma 2 9B": 16 / 8, "Gemma 2 27B": 32 / 16})


@claim(
    "18.7-070", section="18.7.3", where="Table 18-28", kind="library",
    title_en="K, V heads of Falcon", title_zh="MQA (n_kv_heads=1)",
    paraphrase="Falcon is multi-query with one K, V head.",
    stated=1, unit="K, V heads", tol=0, verdict="depends", severity=1,
    right="Falcon 7B has 1; Falcon 40B and 180B have 8.",
    source="config.json of tiiuae/falcon-7b and falcon-40b",
)
def falcon():
    return Cases({"Falcon 7B": 1, "Falcon 40B": 8})


@claim(
    "18.7-071", section="18.7.3", where="text", kind="library",
    title_en="Window that the Mistral layer passes", title_zh="window_size=(-1, 4096)",
    paraphrase="The Mistral layer passes window_size=(-1, 4096): left unbounded, right 4096.",
    stated={"left": -1, "right": 4096}, tol=0, verdict="wrong", severity=3,
    right="(4096, 4096) with causal=True, so that the last 4097 keys are seen. (-1, 4096) with a causal "
    "mask is no window at all: every earlier key stays visible.",
    source=f"{MISTRAL} and modeling_flash_attention_utils.py: window_size = (sliding_window, "
    "sliding_window)",
)
def mistral_window():
    N = 16384
    open_left, real = window_pairs(N, N, 0), window_pairs(N, 4096, 0)
    return Truth(
        {"left": 4096, "right": 4096},
        f"N = {N}: (-1, 4096) leaves {open_left} causal pairs, the real one {real}",
    )


@claim(
    "18.7-072", section="18.7.3", where="text", kind="number",
    title_en="Attention saved at 32K", title_zh="节省的计算量",
    paraphrase="A window of 4096 saves about 85 % of the attention work at 32K, against computing outside "
    "the window too.",
    stated=85, unit="%", tol=0.02, verdict="wrong", severity=1,
    right="77 % of the causal pairs, 88 % of the full square; tile granularity changes little.",
)
def saved_at_32k():
    N = 32768
    seen = window_pairs(N, 4096, 0)
    return Cases(
        {
            "against the causal triangle": 100 * (1 - seen / (N * (N + 1) / 2)),
            "against the square": 100 * (1 - seen / N**2),
        },
        f"{seen} pairs in the window",
    )


@claim(
    "18.7-073", section="18.7.3", where="Listing 5", kind="library",
    title_en="Sliding window of the sample's model", title_zh="Mistral-7B-Instruct-v0.2",
    paraphrase="Mistral-7B-Instruct-v0.2 runs 32K tokens with a sliding window.",
    stated={"sliding_window": 4096}, tol=0, verdict="wrong", severity=3,
    right="v0.2 has no sliding window (sliding_window: null) but full 32K attention, rope theta 1e6. The "
    "window was v0.1's.",
    source="model card and config.json of mistralai/Mistral-7B-Instruct-v0.2",
)
def v02_window():
    return Truth({"sliding_window": None}, "no sliding window in v0.2")


@claim(
    "18.7-074", section="18.7.3", where="Listing 5", kind="number",
    title_en="Tokens of the long document", title_zh="约 32K tokens",
    paraphrase="Three words repeated 8000 times are about 32K tokens.",
    stated=32000, unit="tokens", verdict="unverifiable", severity=1,
    right="Depends on the tokenizer: at least one token a word, 24000; four tokens a repetition would be "
    "32000.",
)
def tokens():
    text = "Mistral attention window "
    return Bound(
        8000 * len(text.split()),
        8000 * len(text),
        "the tokenizer is not part of the text",
        "between one token a word and one a character",
    )


@claim(
    "18.7-075", section="18.7.3", where="text", kind="library",
    title_en="BetterTransformer and CUDA graphs", title_zh="BetterTransformer",
    paraphrase="to_bettertransformer() replaces attention and turns on CUDA Graph capture through "
    "torch.compile; inference only.",
    stated={"captures CUDA graphs": True, "still the way to get SDPA": True}, verdict="wrong", severity=2,
    right="It swaps layers for PyTorch's fast path or SDPA and captures nothing. Since 4.36 it is "
    "superseded: for Llama and others it refuses, because sdpa is built in.",
    source="optimum v1.16.1 release notes; Transformers v4.36.0",
)
def bettertransformer():
    return Truth({"captures CUDA graphs": False, "still the way to get SDPA": False})


@claim(
    "18.7-076", section="18.7.3", where="text", kind="timing",
    title_en="Gain from CUDA graphs", title_zh="端到端延迟降低",
    paraphrase="CUDA graphs lower the latency of batch-1 inference by another 10 to 20 %.",
    stated={"lo": 10, "hi": 20}, unit="%", verdict="unverifiable", severity=1,
    right="No model, GPU or measurement is named; the gain is whatever share of time launches take.",
)
def cuda_graphs():
    return Bound(0, 100, "nothing to measure against is named")


@claim(
    "18.7-077", section="18.7.3", where="text", kind="library",
    title_en="flash_attention_2 and Hopper", title_zh="v3 的 Hopper 特性",
    paraphrase="With flash-attn 2.3+ flash_attention_2 enables v3's Hopper features; take 2.6+ on an H100 "
    "for full speed.",
    stated={"flash_attention_2 runs v3 kernels": True}, verdict="wrong", severity=3,
    right="It calls the v2 kernels. v3 is a separate package; Transformers knows it as flash_attention_3 in "
    "later versions.",
    source="flash-attn v2.6.3 README; Transformers documentation, attention_interface",
)
def hopper_features():
    return Truth({"flash_attention_2 runs v3 kernels": False})


@claim(
    "18.7-078", section="18.7.3", where="text", kind="library",
    title_en="Random generators of dropout", title_zh="Philox vs MTGP",
    paraphrase="SDPA backends draw dropout with other generators (Philox against MTGP) than eager, which "
    "explains NaN losses with LoRA.",
    stated={"eager CUDA generator": "MTGP", "explains NaN": True}, verdict="wrong", severity=2,
    right="Both draw from PyTorch's Philox generator, with different offsets; other random bits change a "
    "loss, they do not make it NaN.",
    source="PyTorch CUDAGeneratorImpl (Philox)",
)
def generators():
    return Truth({"eager CUDA generator": "Philox", "explains NaN": False})
