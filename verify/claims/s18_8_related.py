"""Ledger entries for section 18.8.3: paged and ring attention, FlashInfer, xFormers, and the summary tables."""

import math

from verify.claims.hardware import A100, FA2, FA3
from verify.claims.ledger import Bound, Cases, Elsewhere, Range, Truth, claim

PAGED = "Kwon et al., Efficient Memory Management for LLM Serving with PagedAttention, arXiv:2309.06180"
RING = "Liu et al., Ring Attention, arXiv:2310.01889"
XFORMERS = "xFormers documentation, components/ops"


@claim(
    "18.8-040", section="18.8.3", where="text", kind="number",
    title_en="Memory use with and without paging", title_zh="内存利用率",
    paraphrase="Paging uses 96 % of the cache memory, earlier engines 20 to 40 %.",
    stated={"paged": 96, "earlier lo": 20, "earlier hi": 40}, unit="%", tol=0.05, verdict="confirmed",
    source=f"{PAGED}, figure 2",
)
def paged_memory():
    return Truth(
        {"paged": 96.3, "earlier lo": 20.4, "earlier hi": 38.2}, "token states as share of KV cache memory"
    )


@claim(
    "18.8-041", section="18.8.3", where="text", kind="number",
    title_en="Throughput of vLLM", title_zh="2-4 倍",
    paraphrase="With paging two to four times as many requests can be served.",
    stated=Range(2, 4), unit="x", verdict="confirmed",
    source=f"{PAGED}, abstract (throughput at equal latency)",
)
def paged_throughput():
    return Truth(Range(2, 4))


@claim(
    "18.8-042", section="18.8.3", where="Figure 18-32", kind="library",
    title_en="Paging and cp.async", title_zh="Load KV from pages via cp.async",
    paraphrase="The attention kernel looks the block table up and loads the pages, logical block 0 at page "
    "3, block 1 at page 7.",
    stated={"block table maps logical to physical": True, "two blocks map to": [3, 7]}, tol=0,
    verdict="confirmed",
    source=f"{PAGED}, section 4",
)
def block_table():
    return Truth(
        {"block table maps logical to physical": True, "two blocks map to": [3, 7]},
        "an example; vLLM's kernel uses plain loads",
    )


@claim(
    "18.8-043", section="18.8.3", where="Formula", kind="formula",
    title_en="Communication of ring attention", title_zh="通信量每轮 O(n d / P)",
    paraphrase="Each round sends O(n d / P), sublinear in the sequence length.",
    stated={"exponent of n": 0.5}, tol=0.05, verdict="wrong", severity=2, reading_is_guess=True,
    right="O(n d / P) is linear in n. Sublinear it is in the number of GPUs only; over all P rounds each "
    "GPU sends O(n d). (0.5 stands for any exponent below 1.)",
    source=RING,
)
def ring_order():
    def sent(n, d=128, P=8):
        return 2 * (n // P) * d * 2

    return Truth(
        {"exponent of n": math.log2(sent(1 << 21) / sent(1 << 20))}, "K and V of n / P tokens a round"
    )


@claim(
    "18.8-044", section="18.8.3", where="text", kind="number",
    title_en="Memory share of one GPU in the ring", title_zh="各 GPU 内存占用仅 1/8",
    paraphrase="In a ring of 8 GPUs each holds 1/8 of the sequence's Q, K, V.",
    stated=1 / 8, unit="of the activations", tol=0, verdict="confirmed",
)
def ring_memory():
    return Truth((1 << 20) // 8 / (1 << 20), "weights and optimiser state are not divided by the ring")


@claim(
    "18.8-045", section="18.8.3", where="text", kind="timing",
    title_en="Communication share at 1M tokens", title_zh="通信开销",
    paraphrase="On 8 A100 SXM with 1M tokens communication takes 12 to 18 % of the time.",
    stated={"lo": 12, "hi": 18}, unit="%", verdict="wrong", severity=2,
    right="Under 2 % even if nothing overlaps: a round computes 4 (n/P)^2 d FLOPs a head and sends 8 (n/P) "
    "d bytes, 1 us of NVLink per 60 us of tensor core. The paper hides it entirely.",
    source=f"{RING}, section 3; NVLink 3: 300 GB/s each way",
)
def ring_share():
    tokens = (1 << 20) / 8
    compute = 4 * tokens**2 / 2 / (A100.fp16 * 1e12)  # causal, peak rate: the least favourable to computing
    send = 2 * 2 * tokens * 2 / 2 / 300e9
    share = 100 * send / (send + compute)
    return Bound(0, share, "NVLink, no overlap, tensor cores at peak", f"at most {share:.1f} %")


@claim(
    "18.8-046", section="18.8.3", where="text", kind="library",
    title_en="Users of ring attention", title_zh="LWM 和 StripedHyena",
    paraphrase="Ring Attention is used in Large World Model and StripedHyena for training at a million "
    "tokens.",
    stated={"LWM": True}, verdict="confirmed",
    source="Liu et al., World Model on Million-Length Video and Language, arXiv:2402.08268",
)
def ring_users():
    return Truth(
        {"LWM": True},
        "for StripedHyena no source was found (128K context, hybrid of convolutions); not judged",
    )


@claim(
    "18.8-047", section="18.8.3", where="text", kind="library",
    title_en="FlashInfer", title_zh="FlashInfer 的算子库生态",
    paraphrase="FlashInfer is a kernel library for inference with JIT compilation, paged and ragged "
    "layouts, cascade attention and sampling.",
    stated={"JIT": True, "paged": True, "ragged": True, "cascade": True, "sampling": True},
    verdict="confirmed",
    source="FlashInfer documentation; Ye et al., arXiv:2501.01005 (University of Washington, NVIDIA, CMU "
    "and others)",
)
def flashinfer():
    return Truth({"JIT": True, "paged": True, "ragged": True, "cascade": True, "sampling": True})


@claim(
    "18.8-048", section="18.8.3", where="text", kind="statement",
    title_en="Which came first", title_zh="FlashAttention 出现之前",
    paraphrase="xFormers' memory-efficient attention was the leading I/O-aware implementation before "
    "FlashAttention.",
    stated={"before May 2022": True}, verdict="depends", severity=1,
    right="The algorithm (Rabe and Staats, December 2021) yes. xFormers' CUTLASS kernel, which the table "
    "describes, appeared in late 2022, after FlashAttention (May 2022).",
    source="arXiv:2112.05682, arXiv:2205.14135, xFormers release notes",
)
def which_first():
    return Cases(
        {
            "algorithm, 2021-12": {"before May 2022": (2021, 12) < (2022, 5)},
            "CUTLASS kernel, late 2022": {"before May 2022": (2022, 10) < (2022, 5)},
        }
    )


@claim(
    "18.8-049", section="18.8.3", where="Table 18-34", kind="table",
    title_en="Forward speed at 1K context", title_zh="前向速度 (A100, 1K ctx)",
    paraphrase="v2 runs at 225 TFLOP/s forward at 1K context, xFormers at 140.",
    stated={"v2": 225, "xFormers": 140}, unit="TFLOP/s", tol=0.1, verdict="wrong", severity=3,
    right="225 is the training throughput of a 2.7B model at 8K context. At 1K the forward pass does about "
    "150 to 160 without a mask; xFormers 60 to 100 in the same figure.",
    source=f"{FA2}, figure 5 and table 1",
)
def at_1k():
    return Cases(
        {"d = 64": {"v2": 149, "xFormers": 97}, "d = 128": {"v2": 157, "xFormers": 63}}, "read off figure 5"
    )


@claim(
    "18.8-050", section="18.8.3", where="Table 18-34", kind="number",
    title_en="Utilisation of v2 and xFormers", title_zh="FLOPS 利用率",
    paraphrase="v2 up to 72 %; xFormers 45 to 55 %, about 140 TFLOP/s.",
    stated={"v2": 72, "xFormers": 45}, unit="%", tol=0.01, verdict="confirmed",
)
def utilisation():
    return Truth(
        {"v2": 100 * 225 / A100.fp16, "xFormers": 100 * 140 / A100.fp16},
        "the rates in the same table over 312",
    )


@claim(
    "18.8-051", section="18.8.3", where="Table 18-34", kind="library",
    title_en="Causal masks in xFormers", title_zh="无特殊处理",
    paraphrase="xFormers' kernel does nothing special for causal masks.",
    stated={"skips masked parts": False}, verdict="wrong", severity=2,
    right="LowerTriangularMask is a type of its own so that the kernel knows which parts to leave out: it cuts "
    "num_keys off at the diagonal of the query tile.",
    source=f"{XFORMERS}, attention biases; pytorch aten/src/ATen/native/transformers/cuda/mem_eff_attention/"
    "kernel_forward.h, advance_to_block (the same kernel)",
)
def xformers_causal():
    return Truth({"skips masked parts": True})


@claim(
    "18.8-052", section="18.8.3", where="text", kind="statement",
    title_en="Choice on AMD GPUs", title_zh="xFormers 是唯一选项",
    paraphrase="On AMD GPUs xFormers is the only option.",
    stated={"options": 1}, tol=0, verdict="inconsistent", severity=2, conflicts_with=("18.7-096", "18.7-086"),
    right="18.7.4 lists two more: the ROCm build of flash-attn (v2 in full) and SDPA with AOTriton.",
)
def amd_choice():
    return Elsewhere(
        {"options": 3}, ("18.7-096", "18.7-086"), "table 18-30 and the paragraph after it, with xFormers"
    )


@claim(
    "18.8-053", section="18.8.3", where="Table 18-35", kind="table",
    title_en="Ceiling of v2 against the naive version", title_zh="2-7.6x vs naive",
    paraphrase="v2 is 2 to 7.6 times as fast as naive attention.",
    stated={"lo": 2, "hi": 7.6}, unit="x", tol=0.05, verdict="wrong", severity=1,
    right="3 to 10 in the v2 paper. 7.6 is v1 on GPT-2's attention.",
    source=f"{FA2}, section 4; FlashAttention paper, figure 1",
)
def v2_ceiling():
    return Truth({"lo": 3, "hi": 10})


@claim(
    "18.8-054", section="18.8.3", where="Table 18-35", kind="table",
    title_en="Ceilings of v3 and of block sparsity", title_zh="理论加速上限",
    paraphrase="v3 is 1.5 to 2 times as fast as v2; block sparsity gains 2 to 16 times, depending on the "
    "pattern.",
    stated={"v3 lo": 1.5, "v3 hi": 2.0, "sparse hi": 16}, unit="x", verdict="confirmed",
    source=f"{FA3}, abstract",
)
def other_ceilings():
    return Truth({"v3 lo": 1.5, "v3 hi": 2.0, "sparse hi": 65536 / 4096}, "16 is the n / w of 18.8.1")


@claim(
    "18.8-055", section="18.8.3", where="Table 18-35", kind="statement",
    title_en="Maturity of FlashDecoding", title_zh="集成中 / 生产级",
    paraphrase="FlashDecoding is still being integrated.",
    stated="being integrated", verdict="inconsistent", severity=1, conflicts_with=("18.8-031", "18.8-032"),
    right="18.8.2 has it in vLLM (default), TensorRT-LLM, TGI and SGLang.",
)
def maturity():
    return Elsewhere("in production", ("18.8-031", "18.8-032"), "the list of engines in 18.8.2")


@claim(
    "18.8-056", section="18.8.2", where="Table 18-33", kind="table",
    title_en="Paging against FlashDecoding", title_zh="PagedAttention 与 FlashDecoding 的分工",
    paraphrase="Paging manages memory, FlashDecoding parallelises the decoding kernel; the two are "
    "orthogonal.",
    stated={"paging changes the result": False, "splitting changes the result": False}, verdict="confirmed",
)
def orthogonal():
    import numpy as np

    from refimpl import oracle

    rng = np.random.default_rng(1833)
    q, K, V = rng.standard_normal((1, 1, 1, 8)), *rng.standard_normal((2, 1, 1, 64, 8))
    pages = rng.permutation(4)
    pool_k, pool_v = (x.reshape(1, 1, 4, 16, 8)[:, :, np.argsort(pages)] for x in (K, V))
    gathered = [x[:, :, pages].reshape(1, 1, 64, 8) for x in (pool_k, pool_v)]
    want = oracle.attention(q, K, V)[0]
    paged = oracle.attention(q, *gathered)[0]
    halves = [oracle.attention(q, K[:, :, s], V[:, :, s]) for s in (slice(0, 32), slice(32, 64))]
    lse = np.logaddexp(halves[0][1], halves[1][1])
    split = sum(O * np.exp(part - lse)[..., None] for O, part in halves)
    return Truth(
        {
            "paging changes the result": bool(np.abs(paged - want).max() > 1e-12),
            "splitting changes the result": bool(np.abs(split - want).max() > 1e-12),
        }
    )
