"""Ledger entries for section 18.6.2: FP8 formats, block scales and their accuracy, by emulation."""

import functools
import math

import ml_dtypes
import numpy as np

from verify.claims.emulate import rounded
from verify.claims.hardware import FA3, H100
from verify.claims.ledger import Cases, Elsewhere, Truth, claim, stated_in

REPO = "Dao-AILab/flash-attention"
TE = "NVIDIA Transformer Engine documentation, recipe.DelayedScaling and FP8 delayed scaling"
E4M3, E5M2 = ml_dtypes.finfo(ml_dtypes.float8_e4m3fn), ml_dtypes.finfo(ml_dtypes.float8_e5m2)
# Table 18-21: d, N, BF16 TFLOP/s, its printed share, FP8 TFLOP/s, its printed share, bound of the MSE.
TABLE = [
    (64, 4096, 385, 67, 610, 53, 1e-4),
    (128, 8192, 412, 72, 730, 64, 5e-5),
    (256, 16384, 430, 75, 850, 74, 2e-5),
]


def name(d, N):
    return f"d={d}, N={N}"


def block_quantised(x, rows=128):
    """E4M3 with one scale per `rows` x d block, amax to 448, and back: what the tensor core works on."""
    out = np.empty_like(x, dtype=np.float32)
    for i in range(0, len(x), rows):
        block = x[i : i + rows]
        s = np.float32(np.abs(block).max() / 448)
        out[i : i + rows] = rounded(block / s, "e4m3") * s
    return out


@functools.cache
def fp8_error(d, N, rows=64, seed=0):
    """MSE and relative RMS error of FP8 attention on standard normal input, on `rows` sampled query rows.

    Q, K, V in E4M3 with block scales, scores and softmax in fp32, P (0 to 1) in E4M3, sums in fp32.
    """
    rng = np.random.default_rng([d, N, seed])
    Q = rng.standard_normal((rows, d), dtype=np.float32)
    K = rng.standard_normal((N, d), dtype=np.float32)
    V = rng.standard_normal((N, d), dtype=np.float32)

    def attend(Q, K, V, p):
        S = (Q @ K.T) * np.float32(d**-0.5)
        P = np.exp(S - S.max(1, keepdims=True))
        return (p(P) @ V) / P.sum(1, keepdims=True)

    want = attend(Q, K, V, lambda P: P)  # fp32 error is 1e-7, five orders below that of FP8
    got = attend(block_quantised(Q), block_quantised(K), block_quantised(V), lambda P: rounded(P, "e4m3"))
    mse = float(np.mean((got - want) ** 2))
    return mse, math.sqrt(mse / float(np.mean(want**2)))


@claim(
    "18.6-020", section="18.6.2", where="Figure 18-24", kind="number",
    title_en="Range of the FP8 formats", title_zh="动态范围",
    paraphrase="E4M3 spans 2^-6 to 448, E5M2 2^-14 to 57344 (normal numbers).",
    stated={"E4M3 max": 448, "E4M3 min": 2**-6, "E5M2 max": 57344, "E5M2 min": 2**-14}, tol=0,
    verdict="confirmed", reading_is_guess=True,
)
def ranges():
    return Truth(
        {
            "E4M3 max": float(E4M3.max),
            "E4M3 min": float(E4M3.smallest_normal),
            "E5M2 max": float(E5M2.max),
            "E5M2 min": float(E5M2.smallest_normal),
        },
        f"subnormals reach 2^{math.log2(E4M3.smallest_subnormal):.0f} and "
        f"2^{math.log2(E5M2.smallest_subnormal):.0f}",
    )


@claim(
    "18.6-021", section="18.6.2", where="text", kind="number",
    title_en="Decimal digits of the FP8 formats", title_zh="有效十进制数字",
    paraphrase="E4M3 has about 3 significant decimal digits, E5M2 about 2.",
    stated={"E4M3": 3, "E5M2": 2}, unit="digits", tol=0.2, verdict="wrong", severity=3,
    right="1.2 and 0.9: the text takes mantissa bits for decimal digits. A rounding changes a value by up "
    "to 6 and 12 %.",
)
def digits():
    return Truth(
        {"E4M3": (E4M3.nmant + 1) * math.log10(2), "E5M2": (E5M2.nmant + 1) * math.log10(2)},
        f"largest relative rounding error {2.0 ** -(E4M3.nmant + 1):.1%} and {2.0 ** -(E5M2.nmant + 1):.1%}",
    )


@claim(
    "18.6-022", section="18.6.2", where="Figure 18-24", kind="library",
    title_en="FP8 in v3's backward pass", title_zh="FP8 前向和反向传播",
    paraphrase="v3 is the first to do both passes in FP8: E4M3 forward, E5M2 for dQ, dK and dV.",
    stated={"forward": "E4M3", "backward": "E5M2"}, verdict="wrong", severity=3,
    right="v3 has an FP8 forward only (E4M3); no kernel is instantiated for E5M2 in it, and the backward "
    "pass takes FP16 and BF16.",
    source=f"{FA3}, section 3.3; {REPO} v2.8.3 hopper/ (float_e4m3_t only; backward instances fp16 and "
    "bf16)",
)
def passes():
    return Truth({"forward": "E4M3", "backward": "FP16 or BF16 only"}, "instantiations in hopper/, v2.8.3")


@claim(
    "18.6-023", section="18.6.2", where="text", kind="hardware",
    title_en="FLOPs of a tensor core a clock", title_zh="每时钟周期",
    paraphrase="A tensor core of the H100 does 1024 FP16 or 2048 FP8 operations a clock.",
    stated={"FP16": 1024, "FP8": 2048}, unit="FLOP/clock", tol=0.01, verdict="confirmed",
    source=f"{H100.source}; clock of 1830 MHz: {FA3}, appendix C.1",
)
def per_clock():
    cores = H100.sms * 4 * H100.boost_ghz * 1e9
    return Truth(
        {"FP16": H100.fp16 * 1e12 / cores, "FP8": H100.fp8 * 1e12 / cores},
        "dense peak over 528 cores and clock",
    )


@claim(
    "18.6-024", section="18.6.2", where="Formula", kind="formula",
    title_en="Scale of a block", title_zh="per-block scaling",
    paraphrase="s = max|Q| / 448, so that Q / s fills the range of E4M3.",
    stated={"largest code": 448, "overflows": False}, tol=0, verdict="confirmed",
)
def block_scale():
    block = np.random.default_rng(624).standard_normal((128, 128)).astype(np.float32)
    s = np.abs(block).max() / np.float32(448)
    codes = (block / s).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return Truth({"largest code": float(np.abs(codes).max()), "overflows": bool(np.isnan(codes).any())})


@claim(
    "18.6-025", section="18.6.2", where="text", kind="statement",
    title_en="Scaling keeps mean and variance", title_zh="均值和方差",
    paraphrase="The block scale ensures that mean and variance after quantisation equal those of the "
    "original.",
    stated={"variance within 1 %": True}, verdict="depends", severity=2,
    right="The scale ensures only that the largest entry fits. The variance survives for Gaussian blocks; a "
    "single large outlier pushes the rest below the smallest code and destroys it. Hence v3's incoherent "
    "processing.",
    source=f"{FA3}, section 3.3",
)
def moments():
    rng = np.random.default_rng(625)
    plain = rng.standard_normal((128, 128)).astype(np.float32)
    spiked = plain.copy()
    spiked[0, 0] = 1e6

    def ratio(block):
        back = block_quantised(block)
        return float(back.ravel()[1:].var() / block.ravel()[1:].var())

    cases = {
        "Gaussian block": ratio(plain),
        "the other entries of a block with one outlier of 1e6": ratio(spiked),
    }
    return Cases(
        {k: {"variance within 1 %": abs(v - 1) < 0.01} for k, v in cases.items()},
        "variance after over before: " + ", ".join(f"{v:.4f}" for v in cases.values()),
    )


@claim(
    "18.6-026", section="18.6.2", where="text", kind="hardware",
    title_en="Accumulator of FP8 products", title_zh="累加器为 FP32",
    paraphrase="The tensor core accumulates S in FP32 throughout.",
    stated={"mantissa bits": 24}, tol=0, verdict="depends", severity=2,
    right="The instruction declares an FP32 accumulator; measured on Hopper it keeps about 14 bits for FP8 "
    "operands, so long sums need promotion to FP32 registers every 128 products or so.",
    source="PTX ISA, wgmma.mma_async (.f32 accumulator); DeepSeek-V3 technical report, arXiv:2412.19437, "
    "section 3.3.2",
)
def accumulator():
    return Cases({"declared": {"mantissa bits": 24}, "measured on H800": {"mantissa bits": 14}})


@claim(
    "18.6-027", section="18.6.2", where="text", kind="library",
    title_en="Meaning of delayed scaling", title_zh="delayed scaling",
    paraphrase="Delayed scaling: sum several tiles in FP32 before quantising the result.",
    stated="quantise after several tiles", verdict="wrong", severity=2,
    right="The term means that the scale is taken from the maxima of earlier iterations instead of the "
    "present tensor. Summing in FP32 first is plain accumulation. v3 uses neither in a backward pass.",
    source=TE,
)
def delayed():
    return Truth("scale from the amax history", "as Transformer Engine defines it")


@claim(
    "18.6-028", section="18.6.2", where="text", kind="library",
    title_en="FP8 forward with BF16 backward", title_zh="BF16 混合模式",
    paraphrase="v3 can fall back to a mixed mode: FP8 forward, BF16 backward.",
    stated={"mode exists": True}, verdict="wrong", severity=2,
    right="No such mode: autograd of the FP8 forward calls the backward kernel with FP8 tensors, which it "
    "refuses. One has to keep BF16 inputs and write the autograd function oneself.",
    source=f"{REPO} v2.8.3 hopper/flash_attn_interface.py, FlashAttnFunc",
)
def mixed_mode():
    return Truth({"mode exists": False}, "no argument for it; backward passes the saved q, k, v on")


@claim(
    "18.6-029", section="18.6.2", where="Table 18-21", kind="table",
    title_en="Utilisation column", title_zh="util",
    paraphrase="BF16 at 385, 412, 430 TFLOP/s is 67, 72, 75 % of peak; FP8 at 610, 730, 850 is 53, 64, 74 %.",
    stated={name(d, N): {"BF16": ub, "FP8": u8} for d, N, _, ub, _, u8, _ in TABLE}, unit="%",
    verdict="wrong", severity=3,
    right="39, 42, 43 % and 31, 37, 43 % of the H100 SXM5's 989 and 1979. All six printed shares fit peaks "
    "of 573 and 1146, which no H100 has.",
    source=H100.source,
)
def utilisation():
    implied = [b / ub * 100 for _, _, b, ub, _, _, _ in TABLE] + [
        f / u8 * 100 for _, _, _, _, f, u8, _ in TABLE
    ]
    return Truth(
        {
            name(d, N): {"BF16": 100 * b / H100.fp16, "FP8": 100 * f / H100.fp8}
            for d, N, b, _, f, _, _ in TABLE
        },
        "peaks that the printed shares imply: " + ", ".join(f"{p:.0f}" for p in implied),
    )


@claim(
    "18.6-030", section="18.6.2", where="Table 18-21", kind="table",
    title_en="FP8 gain, text against table", title_zh="加速 1.3 至 1.6 倍",
    paraphrase="For d >= 128 FP8 is 1.3 to 1.6 times as fast as BF16.",
    stated={"lo": 1.3, "hi": 1.6}, unit="x", verdict="inconsistent", severity=2,
    conflicts_with=("18.6-029", "18.6-075"),
    right="The table printed above it gives 1.77 and 1.98 for these sizes; table 18-25 gives 1.25 to 1.50.",
)
def fp8_gain():
    gains = [f / b for d, _, b, _, f, _, _ in TABLE if d >= 128]
    return Elsewhere({"lo": min(gains), "hi": max(gains)}, ("18.6-029",), "FP8 over BF16 in table 18-21")


@claim(
    "18.6-031", section="18.6.2", where="Table 18-21", kind="table",
    title_en="Same sizes in tables 18-21 and 18-25", title_zh="BF16 / FP8 TFLOPS",
    paraphrase="v3 at d=128, N=8192: 412 BF16, 730 FP8; at d=256, N=16384: 430 and 850 TFLOP/s.",
    stated={"d=128, N=8192": {"BF16": 412, "FP8": 730}, "d=256, N=16384": {"BF16": 430, "FP8": 850}},
    unit="TFLOP/s", verdict="inconsistent", severity=3, conflicts_with=("18.6-075",),
    right="Table 18-25 has 578 and 838, 676 and 845 for the same GPU, sizes and code. The paper's figures "
    "show about 650 and 1000 at d = 128, 750 and 1170 at d = 256.",
    source=f"{FA3}, figures 5, 7 and 9",
)
def same_sizes():
    rows = stated_in("18.6-075")
    return Elsewhere(
        {
            "d=128, N=8192": {"BF16": rows["N=8192, d=128"]["v3 BF16"], "FP8": rows["N=8192, d=128"]["v3 FP8"]},
            "d=256, N=16384": {
                "BF16": rows["N=16384, d=256"]["v3 BF16"],
                "FP8": rows["N=16384, d=256"]["v3 FP8"],
            },
        },
        ("18.6-075",),
        "table 18-25",
    )


@claim(
    "18.6-032", section="18.6.2", where="Table 18-21", kind="table",
    title_en="MSE of FP8 attention", title_zh="精度损失",
    paraphrase="The mean square error stays below 1e-4, 5e-5 and 2e-5 in the three configurations.",
    stated={name(d, N): True for d, N, *_ in TABLE}, verdict="confirmed",
)
def mse():
    got = {name(d, N): (fp8_error(d, N)[0], bound) for d, N, *_, bound in TABLE}
    return Truth(
        {k: m < bound for k, (m, bound) in got.items()},
        "emulated, standard normal input: " + ", ".join(f"{m:.1e} (bound {b:.0e})" for m, b in got.values()),
    )


@claim(
    "18.6-033", section="18.6.2", where="Table 18-21", kind="statement",
    title_en="FP8 loss is negligible for d >= 128", title_zh="精度损失可忽略",
    paraphrase="At the usual head dimensions of 128 and more the accuracy loss of FP8 can be ignored.",
    stated={"relative RMS error below 1 %, d=128": True, "relative RMS error below 1 %, d=256": True},
    verdict="wrong", severity=3,
    right="The RMS error is several percent of the output's own size; a bound on the MSE hides it because "
    "outputs of Gaussian inputs shrink like 1/sqrt(N). BF16 loses about 0.4 %.",
)
def negligible():
    relative = {d: fp8_error(d, N)[1] for d, N, *_ in TABLE}
    return Truth(
        {f"relative RMS error below 1 %, d={d}": relative[d] < 0.01 for d in (128, 256)},
        "relative RMS errors: " + ", ".join(f"{r:.1%} at d = {d}" for d, r in relative.items()),
    )


@claim(
    "18.6-034", section="18.6.2", where="text", kind="statement",
    title_en="Larger heads suffer less from FP8", title_zh="头维度越大",
    paraphrase="The larger the head dimension, the smaller the harm: the quantisation errors average out.",
    stated={"relative error at d=256 below nine tenths of that at d=64": True}, verdict="wrong", severity=2,
    right="At equal N the relative error hardly depends on d (5.5 % against 5.3 %): errors and signal of a "
    "score both grow like sqrt(d). The table varies N with d, and it is N that makes the MSE fall.",
)
def head_size():
    relative = {d: np.mean([fp8_error(d, 2048, seed=s)[1] for s in range(3)]) for d in (64, 128, 256)}
    return Truth(
        {
            "relative error at d=256 below nine tenths of that at d=64": bool(
                relative[256] < 0.9 * relative[64]
            )
        },
        "N = 2048, mean of three inputs: " + ", ".join(f"{r:.2%} at d = {d}" for d, r in relative.items()),
    )
