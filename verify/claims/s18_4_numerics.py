"""Ledger entries for section 18.4.5: low precision, where its errors come from, and what training shows."""

import functools
from math import inf

import ml_dtypes
import numpy as np

from verify.claims import hardware
from verify.claims.emulate import DTYPES, exact, flash_forward, gradients, rounded
from verify.claims.ledger import Bound, Cases, Range, Truth, claim

N, D = 512, 64
V1_CODE = "Dao-AILab/flash-attention v1.x, csrc/flash_attn/fmha_api.cpp (o_tmp and softmax_lse are float)"


@functools.cache
def inputs(gain=1.0):
    """Q, K, V, dO of one head from a fixed seed; `gain` sharpens the scores."""
    Q, K, V, dO = np.random.default_rng(18).standard_normal((4, N, D))
    return gain * Q, K, V, dO


def measure(got, want):
    """Max absolute, mean relative and normwise relative error, and cosine, in fp64."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error = np.abs(got - want)
    return {
        "max": float(error.max()),
        "mean relative": float((error / np.abs(want)).mean()),
        "normwise": float(np.linalg.norm(error) / np.linalg.norm(want)),
        "cosine": float((got * want).sum() / np.linalg.norm(got) / np.linalg.norm(want)),
    }


@functools.cache
def forward_error(dtype="fp16", gain=1.0, **stores):
    """Errors of the emulated forward against fp64 on the same rounded inputs."""
    Q, K, V, _ = inputs(gain)
    return measure(flash_forward(Q, K, V, dtype=dtype, **stores), exact(Q, K, V, dtype))


@functools.cache
def backward_error(dtype="fp16", gain=1.0):
    """Errors of dQ, dK, dV, likewise."""
    arrays = inputs(gain)
    want = gradients(*(rounded(x, dtype) for x in arrays))
    return dict(zip(("dQ", "dK", "dV"), map(measure, gradients(*arrays, dtype), want), strict=True))


@claim(
    "18.4-060", section="18.4.5", where="Table 18-13", kind="table",
    title_en="FP16 and BF16", title_zh="FP16 与 BF16 对比",
    paraphrase="Exponent and mantissa bits, largest value and smallest normal of both.",
    stated={"FP16": {"exponent": 5, "mantissa": 10, "max": 65504, "min normal": 6.1e-5},
            "BF16": {"exponent": 8, "mantissa": 7, "max": 3.39e38, "min normal": 1.18e-38}},
    verdict="confirmed", tol=0.005,
)
def formats():
    def row(name):
        info = ml_dtypes.finfo(DTYPES[name])
        return {
            "exponent": int(info.nexp),
            "mantissa": int(info.nmant),
            "max": float(info.max),
            "min normal": float(info.smallest_normal),
        }

    return {"FP16": row("fp16"), "BF16": row("bf16")}


@claim(
    "18.4-061", section="18.4.5", where="text", kind="number",
    title_en="exp(-80) in FP16", title_zh="指数下溢",
    paraphrase="exp(-80) = 1.8e-35 underflows to 0 in FP16.",
    stated={"exp(-80)": 1.8e-35, "in FP16": 0}, verdict="confirmed",
)
def underflow():
    return {"exp(-80)": float(np.exp(-80.0)), "in FP16": float(rounded(np.exp(-80.0), "fp16"))}


@claim(
    "18.4-062", section="18.4.5", where="text", kind="number",
    title_en="exp(-80) in BF16", title_zh="BF16 精确表示",
    paraphrase="BF16 represents exp(-80) exactly.",
    stated={"relative error": 0}, verdict="wrong", severity=1,
    right="It does not underflow, but has 8 significant bits: this value is off by 0.04 %, any by up to 0.4 %.",
)
def bf16_exact():
    x = np.exp(-80.0)
    return {"relative error": float(abs(rounded(x, "bf16") - x) / x)}


@claim(
    "18.4-063", section="18.4.5", where="text", kind="number",
    title_en="Rescaling factors flushed to zero", title_zh="重缩放因子下溢",
    paraphrase="FP16 may turn a small rescaling factor into 0 and lose early contributions that should only "
    "be weighed down.",
    stated={"an FP16 output shows it": True}, verdict="wrong", severity=1,
    right="A factor flushed to 0 is below 3e-8, far under the 5e-4 that FP16 output resolves: what is lost "
    "could not be seen. Rounding of larger factors costs more.",
)
def flushed_factor():
    rng = np.random.default_rng(0)
    Q, K, V = rng.standard_normal((3, 128, D))
    # The second key tile's scores exceed the first's by 16 * 16 / sqrt(64) = 32.
    Q[:, 0], K[:64, 0], K[64:, 0] = 16, 0, 16
    wide = flash_forward(Q, K, V, factor="fp32")
    flushed = flash_forward(Q, K, V, factor="fp16")
    return Truth(
        {"an FP16 output shows it": bool((wide != flushed).any())},
        f"exp(-32) in FP16 is {np.exp(-32.0).astype(np.float16)}; with FP16 and FP32 factors the outputs are "
        "equal bit for bit",
    )


@claim(
    "18.4-064", section="18.4.5", where="Figure 18-18", kind="library",
    title_en="Where v1 rounds", title_zh="混合精度策略",
    paraphrase="Products take FP16 and add in FP32; m, l and exp are FP32; the factor is turned into FP16 "
    "and O_i is kept in FP16.",
    stated={"product sums": "FP32", "m, l, exp": "FP32", "rescaling factor": "FP16", "O_i": "FP16"},
    verdict="wrong", severity=2, source=V1_CODE,
    right="The output accumulator and its factor are FP32 too; FP16 are Q, K, V, the P fed to the second "
    "product, and the stored O. Keeping O_i in FP16 adds a rounding per key tile.",
)
def policy():
    kept, low = forward_error(), forward_error(acc="fp16", factor="fp16", Bc=16)
    return Truth(
        {"product sums": "FP32", "m, l, exp": "FP32", "rescaling factor": "FP32", "O_i": "FP32"},
        f"emulated, 32 key tiles: relative error {kept['normwise']:.1e}, with FP16 O_i {low['normwise']:.1e}",
    )


@claim(
    "18.4-065", section="18.4.5", where="text", kind="hardware",
    title_en="Accuracy of __expf", title_zh="ULP",
    paraphrase="__expf is accurate to 1 ULP in FP32.",
    stated={"x = 0": 1, "x = -10": 1, "x = -80": 1}, unit="ULP", verdict="wrong", severity=2,
    right="2 + floor(|1.173 x|): 2, 13 and 95 ULP. 1 ULP is the documented error of expf, which kernels "
    "avoid.",
    source="CUDA C++ Programming Guide, intrinsic functions",
)
def expf_ulp():
    return {f"x = {x}": 2 + int(abs(1.173 * x)) for x in (0, -10, -80)}


@claim(
    "18.4-066", section="18.4.5", where="text", kind="statement",
    title_en="Atomic adds in the forward pass", title_zh="原子累加",
    paraphrase="Among the forward's errors is the rounding of atomic additions into l.",
    stated={"l is added up atomically": True}, verdict="wrong", severity=1, conflicts_with=("18.4-039",),
    right="l belongs to one block, which adds tile sums in a fixed order; no listing of the chapter has an "
    "atomic in the forward. Only the backward's dQ has.",
    source=f"{hardware.FA1}, algorithm 1",
)
def forward_atomics():
    return {"l is added up atomically": False}


@claim(
    "18.4-067", section="18.4.5", where="text", kind="number",
    title_en="Largest source of error", title_zh="误差来源排序",
    paraphrase="The exponential contributes the largest rounding error, then the rescaling factors, then "
    "the sums.",
    stated={"largest": "exp, factors, sums in FP32"}, verdict="wrong", severity=2,
    right="Rounding P to FP16 for the second product, and O for storage: each about 2e-4 relative, a "
    "thousand times all the FP32 operations together (3e-7). The list leaves both out.",
)
def error_sources():
    sizes = {
        "P in FP16": forward_error(out="fp32")["normwise"],
        "O in FP16": forward_error(p="fp32")["normwise"],
        "exp, factors, sums in FP32": forward_error(p="fp32", out="fp32")["normwise"],
    }
    return Truth({"largest": max(sizes, key=sizes.get)}, "; ".join(f"{k}: {v:.1e}" for k, v in sizes.items()))


@claim(
    "18.4-068", section="18.4.5", where="text", kind="number",
    title_en="Statistics in FP16", title_zh="统计量精度",
    paraphrase="The paper's ablation: m and l in FP16 cost a relative error of about 1e-3.",
    stated={"relative error": 1e-3, "in the paper": True}, verdict="wrong", severity=1, tol=0.6,
    source=hardware.FA1,
    right="The size is plausible (emulated: 6e-4 to 1e-3, growing with the number of tiles), but the paper "
    "has no such ablation.",
)
def low_statistics():
    return {"relative error": forward_error(stats="fp16", Bc=16)["normwise"], "in the paper": False}


@claim(
    "18.4-069", section="18.4.5", where="Table 18-14", kind="table",
    title_en="Largest errors of v1", title_zh="最大绝对误差",
    paraphrase="FP16: output within 1e-3, dQ, dK and dV within 5e-3 of standard attention.",
    stated={"O": Range(0, 1e-3), "dQ": Range(0, 5e-3), "dK, dV": Range(0, 5e-3)}, verdict="depends",
    severity=1,
    right="True of unit-variance inputs (below 2e-4). Absolute errors follow the size of the values: with "
    "sharper scores they pass the limits although nothing is wrong. Judge against the error of the plain "
    "formula at the same precision.",
)
def largest_errors():
    def row(gain):
        back = backward_error(gain=gain)
        return {
            "O": forward_error(gain=gain)["max"],
            "dQ": back["dQ"]["max"],
            "dK, dV": max(back["dK"]["max"], back["dV"]["max"]),
        }

    values = {"unit variance": row(1.0), "Q 16 times as large": row(16.0)}
    told = "; ".join(f"{name}: " + ", ".join(f"{k} {v:.0e}" for k, v in r.items()) for name, r in values.items())
    return Cases(values, told)


@claim(
    "18.4-070", section="18.4.5", where="Table 18-14", kind="table",
    title_en="Mean relative errors", title_zh="平均相对误差",
    paraphrase="In FP16 v1's mean relative error is below 1e-5 for the output and 1e-4 for the gradients.",
    stated={"O": Range(0, 1e-5), "dQ": Range(0, 1e-4), "dK": Range(0, 1e-4)}, verdict="wrong", severity=2,
    right="Impossible: storing the exact result in FP16 already costs 1.8e-4 on average. Emulated: 1e-3 to "
    "2e-3, since values near zero weigh heavily in a mean of ratios.",
)
def mean_errors():
    back = backward_error()
    x = exact(*inputs()[:3])
    floor = measure(rounded(x, "fp16"), x)["mean relative"]
    return Truth(
        {"O": forward_error()["mean relative"], "dQ": back["dQ"]["mean relative"], "dK": back["dK"]["mean relative"]},
        f"rounding the exact output alone: {floor:.1e}",
    )


@claim(
    "18.4-071", section="18.4.5", where="Table 18-14", kind="table",
    title_en="Cosine similarity", title_zh="余弦相似度",
    paraphrase="v1's output and gradients have a cosine similarity above 0.999 with standard attention's.",
    stated={"O": True, "dQ": True, "dK": True, "dV": True}, verdict="confirmed",
)
def cosines():
    values = {"O": forward_error()["cosine"]} | {k: v["cosine"] for k, v in backward_error().items()}
    return Truth(
        {name: value > 0.999 for name, value in values.items()},
        "; ".join(f"{k}: 1 - {1 - v:.0e}" for k, v in values.items()) + " (a weak test: seven nines are normal)",
    )


@claim(
    "18.4-072", section="18.4.5", where="Table 18-14", kind="statement",
    title_en="Origin of the error table", title_zh="逐位误差",
    paraphrase="The v1 paper is said to report these against PyTorch's scaled_dot_product_attention in FP32.",
    stated={"in the v1 paper": True, "function existed then": True}, verdict="wrong", severity=2,
    right="The paper (May 2022) has no such table, and the function came with PyTorch 2.0 (March 2023). The "
    "first FlashAttention paper with an error table is v3's, as RMSE.",
    source=f"{hardware.FA1}; PyTorch 2.0 release notes; {hardware.FA3}, section 4.3",
)
def table_origin():
    posted, released = (2022, 5), (2023, 3)
    return {"in the v1 paper": False, "function existed then": released <= posted}


@claim(
    "18.4-073", section="18.4.5", where="text", kind="number",
    title_en="Which rows err most", title_zh="误差模式",
    paraphrase="Forward errors gather in rows with nearly uniform attention.",
    stated={"uniform rows err more than peaked ones": True}, verdict="depends", severity=1,
    right="Relative to their small outputs, slightly. In absolute terms, which the table uses, the peaked "
    "rows err more: their outputs are larger.",
)
def uniform_rows():
    key = "uniform rows err more than peaked ones"
    flat, peaked = forward_error(gain=0.5), forward_error(gain=8.0)
    return Cases(
        {"absolute": {key: flat["max"] > peaked["max"]}, "relative": {key: flat["normwise"] > peaked["normwise"]}},
        f"max {flat['max']:.0e} and {peaked['max']:.0e}, relative {flat['normwise']:.1e} and {peaked['normwise']:.1e}",
    )


@claim(
    "18.4-074", section="18.4.5", where="text", kind="number",
    title_en="Backward against forward error", title_zh="反向误差",
    paraphrase="Backward errors are about five times forward ones.",
    stated=5, unit="x", verdict="wrong", severity=1, tol=0.3,
    right="About equal relative to the values (1.1 times). In absolute terms it depends on the inputs; 5 is "
    "the ratio of the table's two limits.",
)
def backward_against_forward():
    back = backward_error()
    worst = {kind: max(v[kind] for v in back.values()) for kind in ("normwise", "max")}
    return Cases({kind: value / forward_error()[kind] for kind, value in worst.items()}, "unit-variance inputs")


@claim(
    "18.4-075", section="18.4.5", where="text", kind="number",
    title_en="BF16 against FP16", title_zh="BF16 误差",
    paraphrase="BF16 errors are about half of FP16's, thanks to its range.",
    stated={"O": 0.5, "dQ": 0.5, "dK": 0.5, "dV": 0.5}, unit="x", verdict="wrong", severity=3, tol=0.3,
    right="About 8 times as large: BF16 has three mantissa bits fewer, and softmax weights do not need its "
    "range.",
)
def bf16_against_fp16():
    low, high = backward_error("bf16"), backward_error("fp16")
    ratios = {k: low[k]["normwise"] / high[k]["normwise"] for k in low}
    return Truth(
        {"O": forward_error("bf16")["normwise"] / forward_error("fp16")["normwise"]} | ratios,
        "relative errors, each against fp64 on its own rounded inputs",
    )


@claim(
    "18.4-076", section="18.4.5", where="Table 18-15", kind="table",
    title_en="GPT-2 with v1", title_zh="FA v1 语言建模验证",
    paraphrase="GPT-2, 12 layers, WikiText-103: perplexity 18.3 with either attention, 2.4 times as fast.",
    stated={"data": "WikiText-103", "perplexity": 18.3, "speed-up": 2.4}, verdict="wrong", severity=1,
    tol=0.002,
    right="OpenWebText, perplexity 18.2, 3.5 times Hugging Face's speed and 1.7 times Megatron's. 2.4 is the "
    "speed-up on Long Range Arena.",
    source=f"{hardware.FA1}, table 2",
)
def gpt2():
    return {"data": "OpenWebText", "perplexity": 18.2, "speed-up": 3.5}


@claim(
    "18.4-077", section="18.4.5", where="Table 18-16", kind="table",
    title_en="BERT with v1", title_zh="FA v1 预训练精度验证",
    paraphrase="BERT, a million steps: MLM accuracy 65.2 %, next-sentence accuracy 88.1 and 88.0 %.",
    stated={"MLM accuracy, %": 65.2, "NSP accuracy": "reported"}, verdict="wrong", severity=1,
    source=f"{hardware.FA1}, table 1",
    right="The paper trains BERT-large from the MLPerf 1.1 checkpoint to its target of 72.0 % MLM accuracy "
    "and reports the time (17.4 against 20.0 minutes). It has no next-sentence accuracy.",
)
def bert():
    return {"MLM accuracy, %": 72.0, "NSP accuracy": "not reported"}


@claim(
    "18.4-078", section="18.4.5", where="text", kind="statement",
    title_en="Master weights", title_zh="主权重",
    paraphrase="Mixed-precision training keeps FP16 master weights with FP32 optimiser states.",
    stated={"weight 1 keeps an update of 1e-4": True}, verdict="wrong", severity=2,
    right="The master weights are FP32; FP16 ones would drop updates below half a ULP, here 1e-4 on 1. The "
    "FP16 copy is for the products.",
    source="Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.1",
)
def master_weights():
    moved = np.float16(1) - np.float16(1e-4) != np.float16(1)
    wide = np.float32(1) - np.float32(1e-4) != np.float32(1)
    return Truth({"weight 1 keeps an update of 1e-4": bool(moved)}, f"in FP32 it {'does' if wide else 'does not'}")


@claim(
    "18.4-079", section="18.4.5", where="text", kind="number",
    title_en="Gradient noise against rounding", title_zh="梯度噪声",
    paraphrase="Mini-batch noise is 1-2 orders of magnitude above v1's rounding errors.",
    stated=Range(10, 100), unit="x", verdict="unverifiable", severity=1,
    right="It depends on model and batch. With relative rounding errors of 3e-4 the gap is usually much "
    "larger.",
)
def gradient_noise():
    return Bound(1, inf, "model, batch size and stage of training are not given")
