"""Ledger entries for section 18.3.2: arithmetic intensity and where attention lies on the roofline."""

from refimpl import step0_standard
from refimpl.tiling import Tile
from verify.claims import hardware
from verify.claims.account import (
    compulsory_elements,
    eager_forward_elements,
    fit_exponent,
    flash_forward_elements,
    forward_flops,
)
from verify.claims.hardware import A100, H100
from verify.claims.ledger import Cases, Elsewhere, Truth, claim, stated_in
from verify.claims.s18_4 import tally


@claim(
    "18.3-022", section="18.3.2", where="Formula", kind="formula",
    title_en="Intensity of a matrix product", title_zh="算术强度",
    paraphrase="MNK / (MK + KN + MN) FLOP/byte in FP16; 341 for a 1024 cube, above A100's ridge of 153.",
    stated={"1024 cube": 341, "A100 ridge": 153, "H100 ridge": 295}, unit="FLOP/byte", verdict="confirmed",
    source=f"{hardware.A100_DATASHEET}; {hardware.H100_DATASHEET}",
)
def matmul_intensity():
    n = 1024
    return {"1024 cube": 2 * n**3 / (2 * 3 * n * n), "A100 ridge": A100.ridge, "H100 ridge": H100.ridge}


@claim(
    "18.3-023", section="18.3.2", where="Formula", kind="formula",
    title_en="Limit of the intensity", title_zh="强度极限",
    paraphrase="With M, N and K all large the intensity tends to min(M, N, K).",
    stated={"AI / min": 1}, verdict="depends", severity=1, reading_is_guess=True,
    conflicts_with=("18.3-022",),
    right="To min(M, N, K) only when the other two are much larger; for a cube to n/3, as the next line "
    "computes.",
)
def matmul_limit():
    def ratio(M, N, K):
        return {"AI / min": M * N * K / (M * K + K * N + M * N) / min(M, N, K)}

    return Cases({"cube": ratio(4096, 4096, 4096), "one side small": ratio(1 << 16, 1 << 16, 64)})


@claim(
    "18.3-024", section="18.3.2", where="Formula", kind="formula",
    title_en="Traffic of standard attention", title_zh="总 HBM 读写量",
    paraphrase="Standard attention takes about 4 N^2 d FLOP and moves 8 N^2 + 8 N d bytes.",
    stated={"FLOP / N^2 d": 4, "bytes / N^2": 8, "bytes / N d": 8}, verdict="confirmed",
    conflicts_with=("18.3-041",),
)
def standard_traffic():
    N, d = 1 << 20, 64
    square = 2 * eager_forward_elements(N, 0) / N**2
    return {
        "FLOP / N^2 d": forward_flops(N, d) / (N * N * d),
        "bytes / N^2": square,
        "bytes / N d": (2 * eager_forward_elements(N, d) - square * N**2) / (N * d),
    }


@claim(
    "18.3-025", section="18.3.2", where="Formula", kind="formula",
    title_en="Softmax as five operations", title_zh="Softmax 计算量",
    paraphrase="Softmax costs about 5 N^2 FLOP (3 n^2 in 18.2.3).",
    stated=5, unit="N^2", verdict="confirmed", conflicts_with=("18.2-020",),
)
def softmax_five():
    operations = ("maximum", "subtract", "exponential", "sum", "divide")
    return len(operations)


@claim(
    "18.3-026", section="18.3.2", where="Formula", kind="formula",
    title_en="Intensity d/2", title_zh="标准注意力强度",
    paraphrase="Dropping O(N d), standard attention has an intensity of d/2.",
    stated={"AI / d": 0.5}, unit="FLOP/byte", verdict="confirmed", conflicts_with=("18.1-005",),
)
def half_d():
    N, d = 1 << 20, 64
    return {"AI / d": forward_flops(N, d) / (2 * eager_forward_elements(N, d)) / d}


@claim(
    "18.3-027", section="18.3.2", where="Formula", kind="formula",
    title_en="A more exact intensity d/3", title_zh="更精确的算术强度",
    paraphrase="With a second softmax pass, mask and dropout it is about d/3: 21 at d = 64, 43 at d = 128.",
    stated={"d = 64": 21, "d = 128": 43}, unit="FLOP/byte", verdict="depends", severity=2,
    reading_is_guess=True,
    conflicts_with=("18.1-005", "18.3-026"),
    right="d/3 is what one extra read and write of N x N gives. The six-kernel chain of 18.3.4 has three of "
    "them: d/5, 12.8 and 25.6.",
)
def third_d():
    N = 1 << 20

    def ai(passes):
        return {f"d = {d}": forward_flops(N, d) / (2 * eager_forward_elements(N, d, passes=passes)) for d in (64, 128)}

    return Cases({"one extra pass over N x N": ai(1), "scale, mask and dropout as kernels": ai(3)})


@claim(
    "18.3-028", section="18.3.2", where="text", kind="number",
    title_en="Share of the ridge", title_zh="背脊点占比",
    paraphrase="21 and 43 FLOP/byte are 14 % and 28 % of A100's ridge.",
    stated={"d = 64, %": 14, "d = 128, %": 28}, unit="%", verdict="confirmed",
)
def ridge_share():
    return {f"d = {d}, %": 100 * d / 3 / A100.ridge for d in (64, 128)}


@claim(
    "18.3-029", section="18.3.2", where="text", kind="number",
    title_en="More than an order of magnitude", title_zh="数量级差距",
    paraphrase="At d = 64 standard attention is more than ten times below the compute roof.",
    stated={"more than 10x": True}, verdict="wrong", severity=1, conflicts_with=("18.3-028",),
    right="7.2 times by the text's 21 FLOP/byte, 4.8 by d/2.",
)
def order_gap():
    return Truth(
        {"more than 10x": A100.ridge / (64 / 3) > 10}, f"{A100.ridge:.0f} / 21.3 = {A100.ridge / (64 / 3):.1f}"
    )


@claim(
    "18.3-030", section="18.3.2", where="text", kind="number",
    title_en="Half of the ridge at d = 128", title_zh="接近背脊点",
    paraphrase="At d = 128 standard attention is already near half of the ridge.",
    stated=50, unit="%", verdict="inconsistent", severity=1, conflicts_with=("18.3-028",),
    right="28 %, as stated two sentences before (42 % by d/2).",
)
def half_ridge():
    return Elsewhere(stated_in("18.3-028")["d = 128, %"], ("18.3-028",), "the text's own share")


@claim(
    "18.3-031", section="18.3.2", where="Formula", kind="formula",
    title_en="Intensity without S and P traffic", title_zh="理论 AI",
    paraphrase="4 N^2 d FLOP over 8 N d bytes is N d / 2: 65,536 FLOP/byte at N = 2048, d = 64.",
    stated=65536, unit="FLOP/byte", verdict="wrong", severity=3, conflicts_with=("18.3-050", "18.3-051"),
    right="4 N^2 d / 8 N d = N/2 = 1024, an upper bound: d cancels. With K and V streamed once per 128-row "
    "tile it is 120, near the tile height.",
)
def flash_intensity():
    N, d = 2048, 64
    streamed = forward_flops(N, d) / (2 * flash_forward_elements(N, d, 128))
    return Truth(
        forward_flops(N, d) / (2 * compulsory_elements(N, d)),
        f"compulsory traffic only; {streamed:.0f} when K and V are filled per 128-row tile",
    )


def fills(N, d, M):
    """Tile fills of flash attention with four tiles of B rows in a fast memory of M elements."""
    rows = M / (4 * d)
    return 2 * N * d + 2 * N * d * N / rows


@claim(
    "18.3-032", section="18.3.2", where="Formula", kind="formula",
    title_en="Order of flash attention's traffic", title_zh="I/O 复杂度下界",
    paraphrase="Traffic of order N^2 d^2 / M for a fast memory of M, and no exact method does better for all "
    "M.",
    stated={"N": 2, "d": 2, "M": -1}, unit="exponent", verdict="confirmed", tol=0.03,
    source=f"{hardware.FA1}, theorem 2 and proposition 3 (M in elements, d <= M <= N d)",
)
def traffic_order():
    N, d, M = 1 << 16, 64, 1 << 14
    return {
        "N": fit_exponent(lambda n: fills(n, d, M), N, 4 * N),
        "d": fit_exponent(lambda x: fills(N, x, M), d, 2 * d),
        "M": fit_exponent(lambda m: fills(N, d, m), M, 2 * M),
    }


@claim(
    "18.3-033", section="18.3.2", where="Formula", kind="formula",
    title_en="Reduction against standard attention", title_zh="读写量降低",
    paraphrase="FlashAttention lowers the traffic of standard attention by the factor d^2 / M.",
    stated={"d": 2, "M": -1}, unit="exponent", verdict="confirmed", reading_is_guess=True, tol=0.03,
    source=f"{hardware.FA1}, section 3.2",
)
def reduction_order():
    N, d, M = 1 << 18, 64, 1 << 14

    def ratio(d, M):
        return fills(N, d, M) / eager_forward_elements(N, d)

    return {"d": fit_exponent(lambda x: ratio(x, M), d, 2 * d), "M": fit_exponent(lambda m: ratio(d, m), M, 2 * M)}


@claim(
    "18.3-034", section="18.3.2", where="text", kind="timing",
    title_en="Measured traffic at N = 1024", title_zh="实测 HBM 访问量",
    paraphrase="Measured on A100 at N = 1024, d = 64: from 500 MB to 60 MB, 8.3 times less.",
    stated={"reduction at N = 1024, d = 64": 8.3}, unit="x", verdict="inconsistent", severity=2,
    conflicts_with=("18.3-045", "18.3-046"),
    right="Table 18-10 has 12.0 for the same sizes. Counted fills give 3.8 for one forward pass with 128-row "
    "tiles; the paper's 9.2 (40.3 to 4.4 GB) is a whole GPT-2 step with backward, dropout and mask.",
    source=f"{hardware.FA1}, figure 2",
)
def measured_traffic():
    key = "reduction at N = 1024, d = 64"
    return Elsewhere({key: stated_in("18.3-046")["N = 1024"]}, ("18.3-046",), "Table 18-10, row 1024")


@claim(
    "18.3-035", section="18.3.2", where="text", kind="timing",
    title_en="Bandwidth of copies and softmax", title_zh="有效带宽",
    paraphrase="A device copy reaches 1.8 TB/s, 88 % of peak; softmax kernels only 200-400 GB/s, 10-20 %.",
    stated={"copy, %": 88, "softmax low, %": 10, "softmax high, %": 20}, unit="%", verdict="confirmed",
    source=hardware.A100_DATASHEET,
)
def copy_share():
    return Truth(
        {
            "copy, %": 100 * 1800 / A100.gb_per_s,
            "softmax low, %": 100 * 200 / A100.gb_per_s,
            "softmax high, %": 100 * 400 / A100.gb_per_s,
        },
        "the divisions; the rates themselves are not reproducible, and a fused row softmax reaches far more",
    )


@claim(
    "18.3-037", section="18.3.2", where="text", kind="number",
    title_en="Bytes of one vector load", title_zh="float4 向量化",
    paraphrase="float4 loads move 128 bits a thread, 512 bytes a warp.",
    stated={"bits a thread": 128, "bytes a warp": 512}, verdict="confirmed", tol=0,
)
def float4():
    return {"bits a thread": 4 * 32, "bytes a warp": 32 * 16}


@claim(
    "18.3-038", section="18.3.2", where="text", kind="formula",
    title_en="Gain shrinks as d grows", title_zh="加速比随 d 下降",
    paraphrase="FlashAttention's advantage over standard attention falls as the head dimension grows.",
    stated={"gain at d = 128 against d = 64": 0.5}, verdict="confirmed", tol=0.05,
)
def gain_by_d():
    def gain(d):
        return eager_forward_elements(1 << 14, d) / flash_forward_elements(1 << 14, d, 128)

    return Truth(
        {"gain at d = 128 against d = 64": gain(128) / gain(64)},
        f"traffic ratios {gain(64):.2f} and {gain(128):.2f} at N = 16384, Br = 128; reading 'falls' as halving",
    )


@claim(
    "18.3-039", section="18.3.2", where="Figure 18-9", kind="table",
    title_en="Traffic operation by operation", title_zh="读写流程与计算量",
    paraphrase="Q, K, V and O move 2 N d bytes each, S and P 2 N^2 bytes in each direction.",
    stated={"Q": 2, "K": 2, "V": 2, "O": 2, "S written": 2, "S read": 2, "P written": 2, "P read": 2},
    unit="bytes / (N d or N^2)", verdict="confirmed", conflicts_with=("18.3-041",),
)
def figure_traffic():
    N, d, fp16 = 256, 16, 2
    watch = tally(step0_standard, N, d, Tile(N, N))
    moved = {name: fp16 * watch.loads[name] / (N * d) for name in "QKV"} | {"O": fp16 * watch.stores["O"] / (N * d)}
    for name in "SP":
        moved[f"{name} written"] = fp16 * watch.stores[name] / N**2
        moved[f"{name} read"] = fp16 * watch.loads[name] / N**2
    return Truth(moved, "counted while the standard step of the reference ran with each array as one tile")
