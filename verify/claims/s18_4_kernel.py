"""Ledger entries for sections 18.4.3 and 18.4.4: the forward kernel's mapping, and the backward pass."""

import numpy as np

from refimpl import oracle, step3_flash_v2
from refimpl.tiling import Tile, spans
from verify.claims import hardware
from verify.claims.account import eager_forward_elements, fit_exponent, flash_forward_elements
from verify.claims.ledger import Cases, Elsewhere, Truth, claim, stated_in
from verify.claims.s18_4 import V1_SOURCE, tally


@claim(
    "18.4-028", section="18.4.3", where="Figure 18-16", kind="library",
    title_en="Grid of the v1 kernel", title_zh="Grid 维度",
    paraphrase="v1's grid is (batch x heads, T_r): a block for each query tile.",
    stated={"v1 runs query tiles in parallel": True}, verdict="inconsistent", severity=2,
    conflicts_with=("18.1-021",),
    source=f"{hardware.FA1}; {hardware.FA2}, section 3.2; Dao-AILab/flash-attention before and in commit a44f48df, "
    "fmha_fprop_fp16_kernel.sm80.cu",
    right="18.1.2 has it right: v1 runs a block per batch and head. The library split the rows over a few "
    "blocks from October 2022 on (num_splits, chosen by occupancy); a block for each query tile is v2's.",
)
def grid():
    v1 = stated_in("18.1-021")["v1"]
    return Elsewhere({"v1 runs query tiles in parallel": v1["sequence"]}, ("18.1-021",), "18.1.2 on v1")


@claim(
    "18.4-029", section="18.4.3", where="Figure 18-16", kind="statement",
    title_en="A row a thread, reduced by shuffles", title_zh="Warp 与行映射",
    paraphrase="128 rows over 4 warps are 32 rows each, a row a thread; row maxima and sums are reduced with "
    "warp shuffles.",
    stated={"rows a warp": 32, "a thread with a whole row needs shuffles": True}, verdict="wrong", severity=1,
    right="A thread that holds a whole row needs no shuffle; shuffles are for rows spread over threads, as "
    "the tensor cores' layout does (four threads a row). The two halves of the description exclude each "
    "other.",
    source="PTX ISA, mma.m16n8k16 accumulator fragment layout",
)
def row_mapping():
    return {"rows a warp": 128 // 4, "a thread with a whole row needs shuffles": False}


@claim(
    "18.4-027", section="18.4.3", where="text", kind="library",
    title_en="How v1 splits work among warps", title_zh="Warp 划分",
    paraphrase="In v1 each warp takes some rows of Q.",
    stated={"split": "rows of Q"}, verdict="wrong", severity=2,
    source=f"{hardware.FA2}, section 3.3; {V1_SOURCE}",
    right="v1 splits K and V among its four warps ('split-K') and must exchange partial results through "
    "shared memory; splitting Q is what v2 changed to.",
)
def warp_split():
    return Truth({"split": "keys"}, "kernel traits name 1 warp along M (queries) and 4 along N (keys)")


@claim(
    "18.4-031", section="18.4.3", where="text", kind="number",
    title_en="Size of the resident Q tile", title_zh="Q 块驻留",
    paraphrase="128 x 64 in FP16 takes 16 KB, about 8 % of 192 KB.",
    stated={"KiB": 16, "%": 8}, verdict="confirmed", tol=0.05,
)
def q_tile():
    return {"KiB": 128 * 64 * 2 / 1024, "%": 100 * 128 * 64 * 2 / (192 * 1024)}


@claim(
    "18.4-032", section="18.4.3", where="text", kind="number",
    title_en="Loads saved by residency", title_zh="驻留策略",
    paraphrase="With 32 key tiles, keeping Q_i saves 31 loads of it; each K element in SRAM is used Br "
    "times.",
    stated={"loads saved": 31, "uses of a K element": 128}, verdict="confirmed", tol=0,
)
def residency():
    tiles = len(spans(4096, 128))
    return {"loads saved": tiles - 1, "uses of a K element": 128}


@claim(
    "18.4-033", section="18.4.3", where="Formula", kind="formula",
    title_en="Read volume", title_zh="HBM 读取量",
    paraphrase="The kernel reads Q once, K and V T_r times: (1 + 2 T_r) N d elements; order N^2 d / Br.",
    stated={"Q": 1, "K": 4, "V": 4, "exponent of N": 2, "exponent of Br": -1}, verdict="confirmed", tol=0.03,
    unit="N d elements at T_r = 4", conflicts_with=("18.3-045",),
)
def read_volume():
    watch = tally(step3_flash_v2, N=256, d=16, tile=Tile(64, 32))
    return Truth(
        {name: watch.loads[name] / (256 * 16) for name in "QKV"}
        | {
            "exponent of N": fit_exponent(lambda N: flash_forward_elements(N, 64, 128), 1 << 16, 1 << 18),
            "exponent of Br": fit_exponent(lambda Br: flash_forward_elements(1 << 18, 64, Br), 64, 256),
        },
        "loads counted while the reference ran",
    )


@claim(
    "18.4-034", section="18.4.3", where="Formula", kind="formula",
    title_en="Traffic advantage", title_zh="加速比",
    paraphrase="The choice of Br gives FlashAttention an advantage of about Br / 2d over standard attention.",
    stated={"Br = 128, d = 64": 1.0}, unit="x", verdict="wrong", severity=2, reading_is_guess=True, tol=0.05,
    conflicts_with=("18.3-046",),
    right="2 Br / d over all traffic (4 here), Br / d for reads alone: with Br / 2d there would be no "
    "advantage at the usual 128 and 64.",
)
def advantage():
    N, d, Br = 1 << 16, 64, 128
    key = "Br = 128, d = 64"
    reads = (2 * N * N + 3 * N * d) / (flash_forward_elements(N, d, Br) - N * d)
    return Cases(
        {"all traffic": {key: eager_forward_elements(N, d) / flash_forward_elements(N, d, Br)}, "reads": {key: reads}}
    )


@claim(
    "18.4-035", section="18.4.3", where="text", kind="number",
    title_en="S and P in registers", title_zh="寄存器容量",
    paraphrase="The 128 x 128 tile of S and P lives in registers; each warp's registers suffice.",
    stated={"at most 255 registers a thread": True}, verdict="depends", severity=2,
    source=hardware.CUDA_GUIDE,
    right="128 registers a thread for one warp's 32 rows of S in FP32. S and P together take 256 and leave "
    "none for anything else; the whole tile in one warp would take 512. Real kernels narrow the tile or turn "
    "S into P in place.",
)
def registers():
    key = "at most 255 registers a thread"
    counts = {
        "S of the warp's 32 rows": 32 * 128 / 32,
        "S and P of them": 2 * 32 * 128 / 32,
        "the whole tile in each warp": 128 * 128 / 32,
    }
    return Cases(
        {name: {key: n <= 255} for name, n in counts.items()},
        ", ".join(f"{name}: {n:.0f}" for name, n in counts.items()),
    )


@claim(
    "18.4-036", section="18.4.3", where="text", kind="statement",
    title_en="S and P: SRAM or registers", title_zh="临时张量的位置",
    paraphrase="S and P exist in registers only, never in shared memory.",
    stated={"S and P count against SRAM": False}, verdict="inconsistent", severity=1,
    conflicts_with=("18.4-005",),
    right="Table 18-11 and its constraint count both against SRAM. In registers, as here, they do not limit "
    "Br and Bc by SRAM at all.",
)
def where_scores():
    table = stated_in("18.4-005")
    return Elsewhere({"S and P count against SRAM": "S" in table and "P" in table}, ("18.4-005",), "Table 18-11")


@claim(
    "18.4-037", section="18.4.3", where="Formula", kind="formula",
    title_en="Rescaling of the output", title_zh="输出重缩放",
    paraphrase="O_new = e^(m_old - m_new) O_old + e^(m_ij - m_new) P V, factors at most 1, divided by l at "
    "the end.",
    stated={"equals attention": True, "largest factor": 1}, verdict="confirmed",
)
def rescaling():
    rng = np.random.default_rng(0)
    Q, K, V = rng.standard_normal((3, 24, 6))
    S = 4 * Q @ K.T
    m, l, O, top = np.full(24, -np.inf), np.zeros(24), np.zeros((24, 6)), 0.0
    for s in spans(24, 5):
        m_tile = S[:, s].max(1)
        P = np.exp(S[:, s] - m_tile[:, None])
        m_new = np.maximum(m, m_tile)
        old, new = np.exp(m - m_new), np.exp(m_tile - m_new)
        top = max(top, old.max(), new.max())
        l, O, m = old * l + new * P.sum(1), old[:, None] * O + new[:, None] * (P @ V[s]), m_new
    want = np.exp(S - S.max(1, keepdims=True))
    want = want / want.sum(1, keepdims=True) @ V
    return {"equals attention": bool(np.abs(O / l[:, None] - want).max() <= 1e-13), "largest factor": float(top)}


def exact_backward(dP_of_tiles, Bc):
    """dQ of a small head with D summed per tile of Bc keys or over the row, and their largest difference."""
    rng = np.random.default_rng(1)
    Q, K, V, dO = rng.standard_normal((4, 64, 8))
    S = Q @ K.T / np.sqrt(8)
    P = np.exp(S - S.max(1, keepdims=True))
    P /= P.sum(1, keepdims=True)
    dP = dO @ V.T
    whole = P * (dP - (P * dP).sum(1, keepdims=True))
    tiled = np.concatenate(
        [P[:, s] * (dP[:, s] - (P[:, s] * dP[:, s]).sum(1, keepdims=True)) for s in spans(64, Bc)], axis=1
    )
    used = tiled if dP_of_tiles else whole
    return used @ K / np.sqrt(8), whole @ K / np.sqrt(8)


@claim(
    "18.4-040", section="18.4.4", where="Formula", kind="formula",
    title_en="Gradients with D over the whole row", title_zh="标准反向的变量依赖",
    paraphrase="dS = P (dP - D) with D = rowsum(P dP), dQ = dS K / sqrt(d), dK = dS^T Q / sqrt(d), dV = P^T "
    "dO.",
    stated={"dQ": True, "dK": True, "dV": True}, verdict="confirmed",
)
def row_d():
    rng = np.random.default_rng(2)
    Q, K, V, dO = rng.standard_normal((4, 40, 8))
    S = Q @ K.T / np.sqrt(8)
    P = np.exp(S - S.max(1, keepdims=True))
    P /= P.sum(1, keepdims=True)
    dP = dO @ V.T
    D = (P * dP).sum(1, keepdims=True)
    dS = (dP - D) * P
    grads = {"dQ": dS @ K / np.sqrt(8), "dK": dS.T @ Q / np.sqrt(8), "dV": P.T @ dO}
    wants = oracle.attention_backward(*(x[None, None] for x in (Q, K, V, dO)))
    errors = [np.abs(got - want[0, 0]).max() for got, want in zip(grads.values(), wants[:3], strict=True)]
    other = np.abs(D[:, 0] - (dO * (P @ V)).sum(1)).max()
    return Truth(
        {name: bool(error <= 1e-12) for name, error in zip(grads, errors, strict=True)},
        f"largest error against fp64 {max(errors):.0e}; rowsum(dO * O) is the same D to {other:.0e}",
    )


@claim(
    "18.4-041", section="18.4.4", where="text", kind="number",
    title_en="S and P at N = 2048", title_zh="中间矩阵大小",
    paraphrase="S and P take 8 MB each in FP16 at N = 2048.",
    stated=8, unit="MB", verdict="units", unit_factor=1.048576, right="8 MiB, 8.4 MB.", tol=0.001,
)
def s_and_p():
    return 2048**2 * 2 / 1e6


@claim(
    "18.4-042", section="18.4.4", where="Table 18-12", kind="table",
    title_en="Output and statistics kept", title_zh="输出与统计量大小",
    paraphrase="Kept for the backward pass at N = 4096, d = 64 in FP32: O 1 MB, m 16 KB, l 16 KB.",
    stated={"O, MB": 1, "m, KB": 16, "l, KB": 16}, verdict="units", tol=0.001,
    unit_factor={"O, MB": 1.048576, "m, KB": 1.024, "l, KB": 1.024},
    right="1 MiB and 16 KiB. (O is stored in FP16 in training: half a MiB.)",
)
def kept():
    return {"O, MB": 4096 * 64 * 4 / 1e6, "m, KB": 4096 * 4 / 1e3, "l, KB": 4096 * 4 / 1e3}


@claim(
    "18.4-043", section="18.4.4", where="text", kind="number",
    title_en="Intermediates saved", title_zh="中间变量存储",
    paraphrase="O, m and l together take over 60 times less memory than the standard S and P.",
    stated={"more than 60x": True}, verdict="confirmed",
)
def saved():
    ratio = 2 * 4096**2 * 2 / (4096 * 64 * 4 + 2 * 4096 * 4)
    return Truth({"more than 60x": ratio > 60}, f"{ratio:.1f} with S and P in FP16")


@claim(
    "18.4-044", section="18.4.4", where="Formula", kind="formula",
    title_en="P from m and l, without rescaling", title_zh="重建 P",
    paraphrase="With the final m and l, P_ij = exp(S_ij - m_i) / l_i for each tile on its own.",
    stated={"equals P": True}, verdict="confirmed",
)
def rebuilt():
    rng = np.random.default_rng(3)
    S = 6 * rng.standard_normal((20, 32))
    m = S.max(1, keepdims=True)
    l = np.exp(S - m).sum(1, keepdims=True)
    P = np.concatenate([np.exp(S[:, s] - m) / l for s in spans(32, 8)], axis=1)
    return {"equals P": bool(np.abs(P - np.exp(S) / np.exp(S).sum(1, keepdims=True)).max() <= 1e-15)}


@claim(
    "18.4-045", section="18.4.4", where="Formula", kind="formula",
    title_en="Gradients with D per tile", title_zh="分块梯度公式",
    paraphrase="Per tile dS_ij = P_ij (dP_ij - rowsum(P_ij dP_ij)), said to equal the standard backward.",
    stated={"one key tile": True, "four key tiles": True}, verdict="wrong", severity=3,
    conflicts_with=("18.4-040",),
    right="The sum must run over all keys of the row; per tile it is a different number for each j. "
    "Precompute D_i = rowsum(dO_i * O_i), as the paper does.",
    source=f"{hardware.FA1}, algorithm 4",
)
def tile_d():
    verdicts, told = {}, []
    for name, Bc in (("one key tile", 64), ("four key tiles", 16)):
        got, want = exact_backward(True, Bc)
        error = np.abs(got - want).max()
        verdicts[name] = bool(error <= 1e-12)
        told.append(f"{name}: dQ off by {error:.1e} of at most {np.abs(want).max():.2f}")
    return Truth(verdicts, "; ".join(told))


@claim(
    "18.4-047", section="18.4.4", where="text", kind="library",
    title_en="What v1's backward accumulates in HBM", title_zh="原子加",
    paraphrase="dQ is kept on chip in the outer loop; dK and dV go to HBM by atomic adds.",
    stated={"added up in HBM": "dK, dV"}, verdict="wrong", severity=2, conflicts_with=("18.4-003",),
    right="The other way round: v1's outer loop runs over K and V, keeps dK_j and dV_j on chip, and adds dQ "
    "up in HBM (v2: with atomics). The text also disagrees with its listing on when the adds happen: after "
    "the inner loop, or in it.",
    source=f"{hardware.FA1}, algorithm 4; {hardware.FA2}, algorithm 2",
)
def atomics():
    return {"added up in HBM": "dQ"}


@claim(
    "18.4-048", section="18.4.4", where="text", kind="formula",
    title_en="FLOPs of the flash backward", title_zh="反向浮点运算量",
    paraphrase="The backward costs about twice the forward, since dQ and dK need a product each where the "
    "forward has PV.",
    stated=2, unit="x", verdict="wrong", severity=2, conflicts_with=("18.2-029",),
    right="2.5: five products (S again, dV, dP, dQ, dK) against two. 2 is the standard backward, which "
    "recomputes nothing.",
    source=f"{hardware.FA2}, section 4.1 (2.5 times the forward)",
)
def flash_backward_ratio():
    return Truth(len(("S", "dV", "dP", "dQ", "dK")) / len(("S", "O")), "products of 2 N^2 d FLOP each")


@claim(
    "18.4-049", section="18.4.4", where="text", kind="formula",
    title_en="Share of recomputation", title_zh="重计算占比",
    paraphrase="Recomputation is about 25 % of the backward's total work.",
    stated=25, unit="%", verdict="wrong", severity=1, conflicts_with=("18.2-049",),
    right="One product of five, 20 %. It is 25 % of what the backward costs without it, which is what 18.2.4 "
    "says.",
)
def recompute_share():
    return Truth(100 / 5, "2 N^2 d of 10 N^2 d")
