"""Ledger entries for section 18.7.1: the flash-attn package, its requirements and arguments.

Read from the tagged sources. The chapter pins 2.6.3; where it says "v3" the hopper/ folder of 2.8.3 is meant.
"""

import numpy as np

from verify.claims.ledger import Bound, Cases, Elsewhere, Truth, claim, stated_in

REPO = "Dao-AILab/flash-attention"
INTERFACE = f"{REPO} v2.6.3 flash_attn/flash_attn_interface.py"


@claim(
    "18.7-001", section="18.7.1", where="Table 18-26", kind="library",
    title_en="Minimum requirements", title_zh="集成环境要求",
    paraphrase="flash-attn needs at least Ampere (SM 80), CUDA 11.6, PyTorch 1.13, Python 3.7 and Linux.",
    stated={"GPU": "sm_80", "CUDA": "11.6", "PyTorch": "1.13", "Python": "3.7"}, verdict="wrong", severity=1,
    right="For the pinned 2.6.3: CUDA 11.6, PyTorch 1.12, Python 3.8 (python_requires). Since 2.7.4: CUDA "
    "12.0, PyTorch 2.1, Python 3.9.",
    source=f"{REPO} v2.6.3 README.md and setup.py",
)
def requirements():
    return Truth({"GPU": "sm_80", "CUDA": "11.6", "PyTorch": "1.12", "Python": "3.8"}, "v2.6.3")


@claim(
    "18.7-002", section="18.7.1", where="text", kind="library",
    title_en="Older GPUs with flash-attn 0.2.x", title_zh="GTX 10/20 系列",
    paraphrase="On Pascal and Turing one may go back to flash-attn 0.2.x (18.7.4: 0.2.8 also for the V100).",
    stated={"Pascal": True, "Volta (V100)": True, "Turing": True}, verdict="wrong", severity=3,
    right="Turing only, and best with 1.0.9. Version 0.2.8 refuses everything but sm_75 and sm_8x, and is "
    "compiled for sm_75 and sm_80 alone; V100 support was announced and never released.",
    source=f"{REPO} v0.2.8 csrc/flash_attn/fmha_api.cpp, TORCH_CHECK(is_sm8x || is_sm75); setup.py",
)
def old_gpus():
    return Truth({"Pascal": False, "Volta (V100)": False, "Turing": True}, "the check in mha_fwd")


@claim(
    "18.7-003", section="18.7.1", where="text", kind="library",
    title_en="CUDA version that brought memcpy_async", title_zh="cuda::memcpy_async",
    paraphrase="CUDA 11.6 introduced cuda::memcpy_async (and 18.7.4: __pipeline_memcpy_async needs 11.6).",
    stated="11.6", verdict="wrong", severity=1,
    right="CUDA 11.0, libcu++ 1.1.0. flash-attn does not call it: it uses cp.async through CuTe.",
    source="CCCL documentation, libcudacxx, asynchronous operations (CUDA Toolkit availability)",
)
def memcpy_async():
    return Truth("11.0")


@claim(
    "18.7-004", section="18.7.1", where="text", kind="library",
    title_en="What TORCH_CUDA_ARCH_LIST does", title_zh="TORCH_CUDA_ARCH_LIST",
    paraphrase="TORCH_CUDA_ARCH_LIST selects the architectures that flash-attn is built for; the default "
    "is the present GPU, and others then JIT-compile PTX at start (5 to 10 s; 5 to 15 s in 18.7.4).",
    stated={"selects the targets": True, "default target": "present GPU", "ships PTX": True}, verdict="wrong",
    severity=3,
    right="2.6.3 hard-codes sm_80 and (from CUDA 11.8) sm_90 whatever the variable says, as cubins without "
    "PTX. An RTX 4090 runs the sm_80 cubin by binary compatibility. From 2.7.3 on FLASH_ATTN_CUDA_ARCHS "
    "selects.",
    source=f"{REPO} v2.6.3 setup.py, -gencode arch=compute_80,code=sm_80",
)
def arch_list():
    return Truth({"selects the targets": False, "default target": "sm_80 and sm_90", "ships PTX": False})


@claim(
    "18.7-005", section="18.7.1", where="text", kind="library",
    title_en="Head dimensions with kernels of their own", title_zh="d={16,32,64,128,256}",
    paraphrase="flash-attn compiles one kernel each for d = 16, 32, 64, 128, 256.",
    stated="16 32 64 128 256", verdict="wrong", severity=2,
    right="32, 64, 96, 128, 160, 192, 224 and 256; other sizes are rounded up to the next one.",
    source=f"{REPO} v2.6.3 csrc/flash_attn/src/flash_fwd_hdim*",
)
def head_kernels():
    return Truth("32 64 96 128 160 192 224 256", "files of the forward kernels")


@claim(
    "18.7-006", section="18.7.1", where="text", kind="library",
    title_en="MAX_JOBS", title_zh="MAX_JOBS",
    paraphrase="MAX_JOBS sets the number of parallel compile jobs.",
    stated={"read by setup.py": True}, verdict="confirmed",
    source=f"{REPO} v2.6.3 setup.py, NinjaBuildExtension",
)
def max_jobs():
    return Truth({"read by setup.py": True}, "not overridden when already set")


@claim(
    "18.7-007", section="18.7.1", where="Listing 6", kind="library",
    title_en="Signature of flash_attn_func", title_zh="flash_attn_func 参数",
    paraphrase="flash_attn_func takes q, k, v, dropout_p, softmax_scale, causal, window_size, "
    "alibi_slopes, deterministic, return_attn_probs, in this order.",
    stated="q k v dropout_p softmax_scale causal window_size alibi_slopes deterministic return_attn_probs",
    verdict="depends", severity=1,
    right="Up to 2.5.9. In the 2.6.3 that the chapter installs, softcap stands between window_size and "
    "alibi_slopes: positional arguments from the eighth on are shifted.",
    source=INTERFACE,
)
def signature():
    old = "q k v dropout_p softmax_scale causal window_size alibi_slopes deterministic return_attn_probs"
    return Cases({"2.4 to 2.5.9": old, "2.6.3": old.replace("alibi_slopes", "softcap alibi_slopes")})


@claim(
    "18.7-008", section="18.7.1", where="text", kind="library",
    title_en="Head dimension limits by version", title_zh="headdim",
    paraphrase="v1 takes 16 to 256, v2 up to 256, v3 up to 256.",
    stated={"v1": 256, "v2": 256, "v3": 256}, tol=0, verdict="wrong", severity=2,
    right="v1: up to 128, multiples of 8 (its backward above 64 on A100 and H100 only).",
    source=f"{REPO} v1.0.9 fmha_api.cpp (head_size <= 128); v2.6.3 and v2.8.3 flash_api.cpp",
)
def head_limits():
    return Truth({"v1": 128, "v2": 256, "v3": 256})


@claim(
    "18.7-009", section="18.7.1", where="text", kind="statement",
    title_en="Dropout excludes SDPA", title_zh="dropout_p",
    paraphrase="With dropout one cannot use the SDPA backends and must call flash-attn.",
    stated={"SDPA's flash backend does dropout": False}, verdict="inconsistent", severity=2,
    conflicts_with=("18.7-043",),
    right="It does, as 18.7.2 says itself.",
    source="pytorch aten/src/ATen/native/transformers/cuda/sdp_utils.cpp",
)
def dropout_sdpa():
    return Elsewhere({"SDPA's flash backend does dropout": stated_in("18.7-043")["flash"]}, ("18.7-043",))


@claim(
    "18.7-010", section="18.7.1", where="text", kind="statement",
    title_en="In-kernel causal mask is bit-identical", title_zh="逐位一致",
    paraphrase="The kernel skips the upper triangle and agrees bit by bit with a standard causal mask.",
    stated={"bit-identical in fp32": True}, verdict="wrong", severity=1, reading_is_guess=True,
    right="Equal up to rounding: sums over tiles run in another order than over whole rows.",
)
def bitwise():
    rng = np.random.default_rng(1871)
    Q, K, V = rng.standard_normal((3, 256, 64), dtype=np.float32)
    S = np.where(np.tri(256, dtype=bool), Q @ K.T * np.float32(0.125), np.float32(-np.inf))
    P = np.exp(S - S.max(1, keepdims=True))
    whole = (P @ V) / P.sum(1, keepdims=True)
    parts = np.empty_like(whole)
    for i in range(0, 256, 64):
        m, l, o = np.full((64, 1), -np.inf, np.float32), np.float32(0), np.float32(0)
        for j in range(0, i + 64, 64):
            s = S[i : i + 64, j : j + 64]
            m_new = np.maximum(m, s.max(1, keepdims=True))
            p, alpha = np.exp(s - m_new), np.exp(m - m_new)
            l, o, m = alpha * l + p.sum(1, keepdims=True), alpha * o + p @ V[j : j + 64], m_new
        parts[i : i + 64] = o / l
    different = float(np.mean(parts != whole))
    return Truth(
        {"bit-identical in fp32": different == 0},
        f"{different:.0%} of the outputs differ, by at most {np.abs(parts - whole).max():.1e}",
    )


@claim(
    "18.7-011", section="18.7.1", where="text", kind="library",
    title_en="Alignment of the causal mask", title_zh="因果掩码 (下三角)",
    paraphrase="causal=True applies the lower triangle.",
    stated={"row 0 of 2 x 5 sees": 1, "row 1 of 2 x 5 sees": 2}, unit="keys", tol=0, verdict="depends",
    severity=3,
    right="The triangle ends in the bottom right corner since 2.1: with 2 queries and 5 keys the rows see 4 "
    "and 5 keys. SDPA's is_causal starts in the top left corner. They agree for equal lengths only.",
    source=f"{INTERFACE}, docstring of flash_attn_func; PyTorch documentation of "
    "scaled_dot_product_attention",
)
def causal_alignment():
    def seen(shift):
        return {f"row {i} of 2 x 5 sees": int(sum(j <= i + shift for j in range(5))) for i in range(2)}

    return Cases(
        {"flash-attn before 2.1, SDPA (top left)": seen(0), "flash-attn from 2.1 (bottom right)": seen(3)}
    )


@claim(
    "18.7-012", section="18.7.1", where="text", kind="library",
    title_en="Windows and ALiBi slopes", title_zh="window_size, alibi_slopes",
    paraphrase="window_size is (left, right), (-1, -1) means no window; slopes are (nheads,) or (batch, "
    "nheads).",
    stated={"order": "left, right", "no window": -1, "slopes": "(nheads,) or (batch, nheads)"},
    verdict="confirmed",
    source=INTERFACE,
)
def window_argument():
    return Truth(
        {"order": "left, right", "no window": -1, "slopes": "(nheads,) or (batch, nheads)"},
        "docstring, v2.6.3",
    )


@claim(
    "18.7-013", section="18.7.1", where="text", kind="library",
    title_en="How the deterministic backward works", title_zh="deterministic",
    paraphrase="deterministic=True uses an ordered atomicAdd path and gives up warp shuffles.",
    stated="ordered atomicAdd", verdict="wrong", severity=2,
    right="Each group of blocks adds to a dQ buffer of its own, and the buffers are summed in order "
    "afterwards: more memory, no atomics across groups. Shuffles are untouched. The forward pass is "
    "deterministic anyway.",
    source=f"{REPO} v2.6.3 csrc/flash_attn/flash_api.cpp, dq_accum of shape (nsplits, ...)",
)
def deterministic():
    return Truth("separate dQ buffers, summed in order")


@claim(
    "18.7-014", section="18.7.1", where="text", kind="number",
    title_en="Cost of determinism, twice", title_zh="略慢",
    paraphrase="The deterministic backward is 5 to 10 % slower in one place of the text, 5 to 8 % in "
    "another.",
    stated={"lo": 5, "hi": 10}, unit="%", verdict="inconsistent", severity=1, conflicts_with=("18.7-013",),
    right="Two values in one section, no measurement. The documentation says slightly slower.",
    source=INTERFACE,
)
def determinism_cost():
    return Elsewhere({"lo": 5, "hi": 8}, ("18.7-013",), "the paragraph on deterministic=True further down")


@claim(
    "18.7-015", section="18.7.1", where="text", kind="library",
    title_en="return_attn_probs", title_zh="return_attn_probs",
    paraphrase="return_attn_probs=True returns the softmax weights besides the output, for display or "
    "debugging.",
    stated={"returns": "out, weights", "weights are usable": True}, verdict="wrong", severity=3,
    right="Returns out, softmax_lse and S_dmask. For testing only: scaling may differ, signs encode "
    "dropout, and without dropout S_dmask is empty.",
    source=INTERFACE,
)
def attn_probs():
    return Truth({"returns": "out, softmax_lse, S_dmask", "weights are usable": False}, "docstring, v2.6.3")


@claim(
    "18.7-016", section="18.7.1", where="text", kind="library",
    title_en="Two forward passes differ", title_zh="非确定性模式",
    paraphrase="Without deterministic=True two forward passes on one input may differ by up to 1e-3 in FP16.",
    stated={"forward may differ between runs": True}, verdict="wrong", severity=2,
    right="The forward pass is always deterministic; the flag concerns dQ's atomic additions in the "
    "backward pass.",
    source=f"{INTERFACE}, docstring",
)
def forward_runs():
    return Truth({"forward may differ between runs": False}, "'The forward pass is always deterministic'")


@claim(
    "18.7-017", section="18.7.1", where="Listing 10", kind="code",
    title_en="Cumulative sequence lengths", title_zh="cu_seqlens",
    paraphrase="Lengths 512, 1024, 256, 768 become 0, 512, 1536, 1792, 2560; lengths 1024, 2048, 512 total "
    "3584.",
    stated={"first": [0, 512, 1536, 1792, 2560], "second total": 3584, "second": [0, 1024, 3072, 3584]},
    tol=0, verdict="confirmed",
)
def cu_seqlens():
    def build(lengths):
        return [0, *np.cumsum(lengths).tolist()]

    second = build([1024, 2048, 512])
    return Truth({"first": build([512, 1024, 256, 768]), "second total": second[-1], "second": second})


@claim(
    "18.7-018", section="18.7.1", where="text", kind="number",
    title_en="When padding wastes more than half", title_zh="填充方案的无效计算",
    paraphrase="Once the shortest sequence is under 0.3 of the longest, padding wastes more than 50 % of "
    "the work.",
    stated={"one short in eight": True, "two sequences": True, "seven short in eight": True}, verdict="wrong",
    severity=2,
    right="The ratio of extremes says nothing about the waste: with one short sequence in eight it is 11 %, "
    "with two sequences it cannot reach 50 %. It depends on the mean length (and on its square, for "
    "attention).",
)
def padding_waste():
    batches = {
        "one short in eight": [100] + [1000] * 7,
        "two sequences": [250, 1000],
        "seven short in eight": [250] * 7 + [1000],
    }

    def waste(lengths):
        return 1 - sum(lengths) / (len(lengths) * max(lengths))

    return Truth(
        {n: waste(b) > 0.5 for n, b in batches.items()},
        "tokens wasted: " + ", ".join(f"{n} {waste(b):.0%}" for n, b in batches.items()),
    )


@claim(
    "18.7-019", section="18.7.1", where="text", kind="number",
    title_en="What varlen saves", title_zh="varlen 方案",
    paraphrase="With strongly varying lengths the varlen path saves 30 to 60 % of the computation.",
    stated={"lo": 30, "hi": 60}, unit="%", verdict="unverifiable", severity=1,
    right="No data set is named; anything from 0 to nearly 100 is possible.",
)
def varlen_saving():
    lengths = [1024, 2048, 512]
    tokens = 1 - sum(lengths) / (3 * 2048)
    pairs = 1 - sum(n * n for n in lengths) / (3 * 2048**2)
    return Bound(
        0,
        100,
        "no data set is named",
        f"the text's own example: {tokens:.0%} of tokens, {pairs:.0%} of pairs",
    )


@claim(
    "18.7-020", section="18.7.1", where="Listing 13", kind="number",
    title_en="Thresholds of the installation check", title_zh="安装后验证",
    paraphrase="A right FP16 kernel keeps the maximum output error below 5e-3 for normal input, N = 1024, d "
    "= 64, causal.",
    stated={"passes": True}, verdict="confirmed",
)
def check_threshold():
    from verify.claims.emulate import exact, flash_forward, rounded

    rng = np.random.default_rng(18720)
    Q, K, V = rounded(rng.standard_normal((3, 1024, 64)), "fp16")
    worst = 0.0
    for i in range(0, 1024, 128):  # rows up to i + 128 see about i keys: the causal mask by prefixes
        got = flash_forward(Q[i : i + 1], K[: i + 1], V[: i + 1])
        worst = max(worst, float(np.abs(got - exact(Q[i : i + 1], K[: i + 1], V[: i + 1])).max()))
    return Truth({"passes": worst < 5e-3}, f"emulated FP16 kernel, sampled rows: {worst:.1e}")
