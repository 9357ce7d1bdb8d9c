"""Ledger entries for section 18.8.2: FlashDecoding and the engines that use it."""

from refimpl.tiling import cdiv
from verify.claims.hardware import A100
from verify.claims.ledger import Bound, Cases, Elsewhere, Truth, claim, stated_in

POST = "Dao, Haziza, Massa, Sizov: Flash-Decoding, Stanford CRFM and PyTorch blogs, October 2023"
VLLM = "vllm-project/vllm, vllm/model_executor/layers/attention.py (0.2.x)"


@claim(
    "18.8-020", section="18.8.2", where="text", kind="statement",
    title_en="Which batches FlashDecoding is for", title_zh="大 batch size 推理",
    paraphrase="FlashDecoding removes the lack of parallelism that FlashAttention has at large batch "
    "sizes.",
    stated="large batch", verdict="inconsistent", severity=3, conflicts_with=("18.8-021",),
    right="At small ones: with few (batch, head) pairs the GPU is not filled. The section says so itself "
    "two paragraphs on.",
    source=POST,
)
def which_batch():
    return Elsewhere("small batch", ("18.8-021",), "b = 1 to 4 in the explanation of the bottleneck")


@claim(
    "18.8-021", section="18.8.2", where="Figure 18-31", kind="number",
    title_en="SMs used when decoding 64 heads", title_zh="利用率约 59%",
    paraphrase="When decoding, 64 heads and batch 1 start 64 blocks on 108 SMs, 59 %.",
    stated={"blocks": 64, "share": 59}, unit="blocks, %", tol=0.01, verdict="confirmed",
)
def decode_share():
    return Truth(
        {"blocks": 64 * 1, "share": 100 * 64 / A100.sms},
        "with 8 K, V heads packed together it would be 8 blocks",
    )


@claim(
    "18.8-022", section="18.8.2", where="text", kind="number",
    title_en="Llama-2-70B on one A100", title_zh="单张 A100",
    paraphrase="The example runs Llama-2-70B on a single A100.",
    stated={"weights fit": True}, verdict="depends", severity=1,
    right="70B weights are 140 GB in FP16: two cards at least. With 4-bit weights (35 GB) they fit.",
)
def llama_70b():
    return Cases({"FP16": {"weights fit": A100.gb >= 140}, "4-bit weights": {"weights fit": A100.gb >= 35}})


@claim(
    "18.8-023", section="18.8.2", where="text", kind="number",
    title_en="Steps over 100K keys", title_zh="串行遍历步数",
    paraphrase="100000 keys in tiles of 128 are 782 steps.",
    stated=782, unit="steps", tol=0, verdict="confirmed",
)
def steps_100k():
    return Truth(cdiv(100_000, 128))


@claim(
    "18.8-024", section="18.8.2", where="text", kind="statement",
    title_en="Parallelism of prefill", title_zh="预填充阶段 b·h 个",
    paraphrase="In prefill FlashAttention distributes over batch and heads: b h blocks.",
    stated=64, unit="blocks for b = 1, h = 64, N = 8192, Br = 128", tol=0, verdict="inconsistent", severity=2,
    conflicts_with=("18.5-005",),
    right="b h Tr blocks since v2 (18.5.1): 4096 here. That is why prefill fills the GPU and decoding, with "
    "one row of tiles, does not.",
)
def prefill():
    per_head = stated_in("18.5-005")["Br=128"] // 40
    return Elsewhere(64 * per_head, ("18.5-005",), f"{per_head} row tiles a head")


@claim(
    "18.8-025", section="18.8.2", where="text", kind="number",
    title_en="Steps over 128K keys", title_zh="1000 步",
    paraphrase="128K keys in tiles of 128 are 1000 steps, or 1000 blocks of one step.",
    stated=1000, unit="steps", tol=0.03, verdict="confirmed",
)
def steps_128k():
    return Truth(cdiv(131072, 128), "1000 with K = 1000, 1024 with K = 1024")


@claim(
    "18.8-026", section="18.8.2", where="text", kind="number",
    title_en="Speedup equal to the number of blocks", title_zh="加速比接近块数",
    paraphrase="1000 blocks of one step take about the time of one step: a speedup of about 1000.",
    stated=1000, unit="x", tol=0.1, verdict="wrong", severity=3,
    right="All blocks share HBM: 65.5 MB for one head take 32 us however they are split. A single block "
    "that reads at an SM's 64 bytes a clock needs 726 us, so that about 23 is the limit. The post reports "
    "up to 50 for the attention (against a slower single block) and 8 end to end.",
    source=POST,
)
def split_speedup():
    kv = 128_000 * 128 * 2 * 2
    together = kv / (A100.gb_per_s * 1e9)
    alone = kv / (64 * A100.boost_ghz * 1e9)
    return Truth(
        alone / together,
        f"{kv / 1e6:.1f} MB: {together * 1e6:.0f} us from HBM, {alone * 1e6:.0f} us through one SM",
    )


@claim(
    "18.8-027", section="18.8.2", where="Table 18-35", kind="table",
    title_en="FlashDecoding's gain, table against text", title_zh="5-20x (长序列解码)",
    paraphrase="The summary table gives FlashDecoding 5 to 20 times as its ceiling.",
    stated={"hi": 20}, unit="x", verdict="inconsistent", severity=2, conflicts_with=("18.8-026",),
    right="18.8.2 says close to the number of blocks, 1000 in its example. The table is the plausible one.",
)
def ceiling():
    return Elsewhere({"hi": stated_in("18.8-026")}, ("18.8-026",))


@claim(
    "18.8-028", section="18.8.2", where="text", kind="statement",
    title_en="Latency and length", title_zh="解码延迟",
    paraphrase="With FlashDecoding latency no longer grows linearly with the length of the cache.",
    stated={"4K to 32K": True, "32K to 256K": True}, verdict="depends", severity=2,
    right="Only until the GPU is full. Beyond that the K, V traffic sets the time, and that is linear in "
    "the length.",
    source=POST,
)
def latency():
    def time_us(n, batch_heads):
        return max(10.0, batch_heads * n * 128 * 2 * 2 / A100.gb_per_s / 1e3)  # 10 us: launches and the merge

    def sublinear(heads):
        grown = {"4K to 32K": (4096, 32768), "32K to 256K": (32768, 262144)}
        return {k: time_us(long, heads) < 7 * time_us(short, heads) for k, (short, long) in grown.items()}

    return Cases(
        {"1 head": sublinear(1), "64 heads": sublinear(64)},
        f"eight times the keys in less than seven times the time? traffic bound for 64 heads: "
        f"{time_us(4096, 64):.0f} us at 4K, {time_us(32768, 64):.0f} us at 32K",
    )


@claim(
    "18.8-029", section="18.8.2", where="text", kind="library",
    title_en="Number of splits", title_zh="线程块数 T",
    paraphrase="FlashDecoding splits the cache into T = ceil(n_kv / Bc) parts, usually hundreds to "
    "thousands.",
    stated={"lo": 100, "hi": 10000}, unit="splits", tol=0.05, verdict="wrong", severity=2,
    right="As few as fill the GPU: flash-attn tries 1 to 128 and takes the smallest within 85 % of the best "
    "occupancy. More only cost merging.",
    source="flash-attn v2.6.3 csrc/flash_attn/flash_api.cpp, num_splits_heuristic",
)
def split_count():
    return Truth({"lo": 1, "hi": 128})


@claim(
    "18.8-030", section="18.8.2", where="text", kind="library",
    title_en="Page size", title_zh="16 或 32 个 token",
    paraphrase="Pages of the KV cache hold 16 or 32 tokens.",
    stated={"16 is allowed": True}, verdict="depends", severity=2,
    right="vLLM's default is 16. flash-attn's paged kernel wants multiples of 256 (2.5 to 2.8; v3 takes "
    "smaller ones).",
    source="flash-attn v2.6.3 flash_api.cpp: 'Paged KV cache block size must be divisible by 256'; vLLM "
    "EngineArgs.block_size",
)
def page_size():
    return Cases(
        {"vLLM's own kernels": {"16 is allowed": True}, "flash-attn 2.6.3": {"16 is allowed": 16 % 256 == 0}}
    )


@claim(
    "18.8-031", section="18.8.2", where="text", kind="library",
    title_en="FlashDecoding in vLLM", title_zh="flash_decoding_attention",
    paraphrase="vLLM offers flash_decoding_attention for lengths over 4096 when batch x heads < SMs, by "
    "default since 0.3.0.",
    stated={"function": "flash_decoding_attention", "length threshold": 4096}, tol=0, verdict="wrong",
    severity=2,
    right="vLLM's split-K, V kernel is paged_attention_v2 (since 0.2.1), with partitions of 512: it is "
    "skipped only if the length is at most 8192 and either one partition suffices or sequences x heads > "
    "512. flash_decoding_attention is Colossal-AI's.",
    source=f"{VLLM}, use_v1 and _PARTITION_SIZE",
)
def vllm():
    return Truth({"function": "paged_attention_v2", "length threshold": 8192})


@claim(
    "18.8-032", section="18.8.2", where="text", kind="timing",
    title_en="Decoding gain of TensorRT-LLM", title_zh="解码延迟降低 30-40%",
    paraphrase="FlashDecoding lowers TensorRT-LLM's decoding latency by 30 to 40 % (Llama-2-70B, A100, "
    "128K).",
    stated={"lo": 30, "hi": 40}, unit="%", verdict="unverifiable", severity=1,
    right="No benchmark is named, and the model does not fit one A100 (18.8-022). Its feature is called "
    "multi-block mode.",
)
def tensorrt():
    return Bound(0, 100, "the benchmark is not identified")


@claim(
    "18.8-033", section="18.8.2", where="text", kind="statement",
    title_en="When FlashDecoding pays", title_zh="限制条件",
    paraphrase="FlashDecoding pays only when the sequence length is much larger than batch x heads.",
    stated="length against batch x heads", verdict="inconsistent", severity=2,
    conflicts_with=("18.8-021", "18.8-031"),
    right="When batch x heads (x row tiles) is below the number of SMs and the cache is long enough to "
    "split. Length and number of heads are not comparable: batch 64 x 64 heads at 128K gains nothing.",
)
def when():
    return Elsewhere(
        "batch x heads against SMs",
        ("18.8-021", "18.8-031"),
        "the condition given for vLLM and in the motivation",
    )


@claim(
    "18.8-034", section="18.8.2", where="text", kind="library",
    title_en="Date and authors", title_zh="2023 年 10 月",
    paraphrase="FlashDecoding was published in October 2023 by Stanford's CRFM.",
    stated="2023-10", verdict="confirmed",
    source=POST,
)
def published():
    return Truth("2023-10", "together with Meta's PyTorch team and Together")
