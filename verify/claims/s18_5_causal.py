"""Ledger entries for section 18.5.2: causal tiles, what may be skipped, and the unified kernel."""

import numpy as np

from refimpl.tiling import cdiv
from verify.claims.hardware import A100, FA2
from verify.claims.ledger import Bound, Cases, Elsewhere, Truth, claim

REPO = "Dao-AILab/flash-attention"


def tile_class(q, k):
    """Full, dead or partial by looking at every (row, key) pair; `q` and `k` are half-open ranges."""
    visible = np.subtract.outer(np.arange(*q), np.arange(*k)) >= 0
    return "full" if visible.all() else "partial" if visible.any() else "dead"


def tiles(N, Br, Bc):
    for i in range(0, N, Br):
        for j in range(0, N, Bc):
            yield (i, min(i + Br, N)), (j, min(j + Bc, N))


@claim(
    "18.5-030", section="18.5.2", where="Formula", kind="formula",
    title_en="Rule that classifies causal tiles", title_zh="完全有效 / 完全被掩码 / 部分有效",
    paraphrase="For row range [qs, qe) and key range [ks, ke): full if ke <= qs, dead if ks > qe, partial "
    "otherwise.",
    stated={"Br = Bc = 64": True, "Br = 2 Bc": True, "Br = 48, Bc = 64": True}, verdict="wrong", severity=2,
    right="With half-open ranges a tile is full iff ke - 1 <= qs and dead iff ks >= qe. As printed, the "
    "dead tile right of the diagonal (ks = qe, every row of tiles when Br = Bc) is worked on: T - 1 tiles "
    "too many. Harmless to the result.",
)
def classification():
    def printed(q, k):
        return "full" if k[1] <= q[0] else "dead" if k[0] > q[1] else "partial"

    agrees, told = {}, []
    for name, (Br, Bc) in {
        "Br = Bc = 64": (64, 64),
        "Br = 2 Bc": (128, 64),
        "Br = 48, Bc = 64": (48, 64),
    }.items():
        pairs = [(printed(q, k), tile_class(q, k)) for q, k in tiles(768, Br, Bc)]
        agrees[name] = all(a == b for a, b in pairs)
        told.append(f"{name}: {sum(a != b for a, b in pairs)} of {len(pairs)} tiles misjudged")
    return Truth(agrees, "; ".join(told))


@claim(
    "18.5-031", section="18.5.2", where="Figure 18-20", kind="number",
    title_en="Three by three tiles under a causal mask", title_zh="分块对比图",
    paraphrase="Of three by three tiles under a causal mask six are computed and three skipped.",
    stated={"compute": 6, "skip": 3}, tol=0, verdict="confirmed",
)
def nine_tiles():
    kinds = [tile_class(q, k) for q, k in tiles(192, 64, 64)]
    return Truth(
        {"compute": len(kinds) - kinds.count("dead"), "skip": kinds.count("dead")},
        f"of the six, {kinds.count('partial')} on the diagonal need the mask; the caption says all are "
        "computed in full",
    )


@claim(
    "18.5-032", section="18.5.2", where="text", kind="number",
    title_en="Share of tiles that can be skipped", title_zh="可跳过的块",
    paraphrase="For large N about half of all tiles can be skipped.",
    stated=0.5, unit="of all tiles", tol=0.02, verdict="confirmed",
)
def skippable():
    def share(T):
        return (T * (T - 1) / 2) / T**2

    return Truth(share(8192 // 128), f"(T - 1) / 2T: {share(8):.1%} at T = 8, {share(64):.1%} at T = 64")


@claim(
    "18.5-033", section="18.5.2", where="text", kind="library",
    title_en="Did v1 skip causal tiles", title_zh="v1 处理因果掩码",
    paraphrase="v1 computes all tiles and masks afterwards; causal and non-causal share one loop, with no "
    "skipping.",
    stated={"v1 skips dead tiles": False}, verdict="wrong", severity=2,
    right="The v1 kernels start the loop over Q tiles at the diagonal: int begin = Is_causal ? loop_step * "
    "N / M : 0, in every release from 0.2.1 to 1.0.9. The v1 paper does not mention it.",
    source=f"{REPO} v0.2.1, v0.2.8, v1.0.9, csrc/flash_attn/src/fmha_fprop_kernel_1xN.h line 275",
)
def v1_skips():
    return Truth({"v1 skips dead tiles": True}, "read from the kernels")


@claim(
    "18.5-034", section="18.5.2", where="text", kind="number",
    title_en="Share of S computed and thrown away", title_zh="计算浪费",
    paraphrase="Without skipping, more than half of S may be discarded, when N is large and the tile sizes "
    "are badly chosen, for example Br >= Bc.",
    stated={"more than half, Br >= Bc": True, "more than half, Br < Bc": False}, verdict="wrong", severity=1,
    right="Masked pairs are N (N - 1) / 2 of N^2: below half for any tile sizes that divide N. Only padding "
    "of a ragged last tile lifts it above, and then for Br < Bc as well. Br >= Bc has no part in it.",
)
def wasted():
    def share(N, Br, Bc):
        computed = cdiv(N, Br) * Br * cdiv(N, Bc) * Bc
        return (computed - N * (N + 1) / 2) / computed

    def over(N):
        wide, tall = [(128, 64), (128, 128), (256, 64)], [(64, 128), (64, 256)]
        return {
            "more than half, Br >= Bc": any(share(N, *t) > 0.5 for t in wide),
            "more than half, Br < Bc": any(share(N, *t) > 0.5 for t in tall),
        }

    return Cases(
        {"tiles divide N": over(8192), "ragged N = 8200": over(8200)},
        f"N = 8192: {share(8192, 128, 64):.4f} for every shape; N = 8200 at 128 x 64: "
        f"{share(8200, 128, 64):.4f}",
    )


@claim(
    "18.5-035", section="18.5.2", where="text", kind="statement",
    title_en="Outer loop of v2", title_zh="外循环",
    paraphrase="The causal v2 algorithm walks over the K, V tiles in its outer loop.",
    stated="K and V tiles", verdict="inconsistent", severity=2, conflicts_with=("18.5-005",),
    right="In v2 the outer loop is the grid over Q tiles; K and V are the inner loop. Its own listing has "
    "it so.",
    source=f"{FA2}, algorithm 1",
)
def v2_outer():
    return Elsewhere("Q tiles", ("18.5-005",), "one block per Q tile, says 18.5.1")


@claim(
    "18.5-036", section="18.5.2", where="Formula", kind="formula",
    title_en="FLOPs of a causal forward", title_zh="因果 FLOPs",
    paraphrase="Causal FLOPs are about half of 4 N^2 d, that is 2 N^2 d.",
    stated=2.0, unit="N^2 d", tol=0.05, verdict="confirmed",
)
def causal_flops():
    N, d, B = 4096, 128, 128
    exact = 4 * d * (N * (N + 1) // 2) / (N * N * d)
    T = N // B
    tiled = 4 * d * (T * (T + 1) // 2) * B * B / (N * N * d)
    return Truth(tiled, f"by pairs {exact:.4f}, by visited 128 x 128 tiles {tiled:.4f}, at N = 4096")


@claim(
    "18.5-037", section="18.5.2", where="text", kind="statement",
    title_en="Which corner the backward pass skips", title_zh="无效块",
    paraphrase="The product of P with V may skip the invalid tiles in the upper left.",
    stated="upper left", verdict="wrong", severity=2,
    right="The upper right: keys later than the row. P is lower triangular, the upper left corner is the "
    "most visible of all.",
)
def corner():
    P = np.tril(np.ones((64, 64)))
    corners = {
        "upper left": P[:16, :16],
        "upper right": P[:16, -16:],
        "lower left": P[-16:, :16],
        "lower right": P[-16:, -16:],
    }
    dead = [name for name, block in corners.items() if not block.any()]
    return Truth(
        dead[0] if len(dead) == 1 else ", ".join(dead), "the one corner of tril(ones) that is all zero"
    )


@claim(
    "18.5-038", section="18.5.2", where="Listing 4", kind="formula",
    title_en="No minus infinity needed in the backward pass", title_zh="梯度结构上为零",
    paraphrase="Gradients of masked positions are structurally zero, so that no -inf has to be put into S.",
    stated={"dQ": True, "dK": True, "dV": True}, verdict="depends", severity=3,
    right="Only if every sum is restricted to j <= i. The kernel recomputes P = exp(S - lse); in a partial "
    "tile that is not zero above the diagonal, and leaving it in corrupts all three gradients. The mask "
    "must be applied again.",
)
def structural_zero():
    from refimpl import oracle

    rng = np.random.default_rng(5238)
    N, d, B = 96, 16, 32
    Q, K, V, dO = rng.standard_normal((4, N, d))
    O, lse = (x[0, 0] for x in oracle.attention(Q[None, None], K[None, None], V[None, None], causal=True))
    want = oracle.attention_backward(
        Q[None, None], K[None, None], V[None, None], dO[None, None], causal=True
    )[:3]
    scale, D = d**-0.5, (dO * O).sum(1, keepdims=True)

    def run(restrict):
        dQ, dK, dV = np.zeros((3, N, d))
        for i in range(0, N, B):
            for j in range(0, i + B, B):  # dead tiles are skipped in both versions
                r, c = slice(i, i + B), slice(j, j + B)
                P = np.exp(scale * Q[r] @ K[c].T - lse[r, None])
                if restrict:
                    P = np.where(np.subtract.outer(np.arange(i, i + B), np.arange(j, j + B)) >= 0, P, 0)
                dS = P * (dO[r] @ V[c].T - D[r])
                dQ[r] += scale * dS @ K[c]
                dK[c] += scale * dS.T @ Q[r]
                dV[c] += P.T @ dO[r]
        return [np.abs(g - w[0, 0]).max() for g, w in zip((dQ, dK, dV), want, strict=True)]

    skipping, masked = run(False), run(True)
    names = ("dQ", "dK", "dV")
    return Cases(
        {
            "sums restricted to j <= i": dict(zip(names, (e < 1e-10 for e in masked), strict=True)),
            "dead tiles skipped, nothing else": dict(zip(names, (e < 1e-10 for e in skipping), strict=True)),
        },
        f"errors without the mask: {', '.join(f'{e:.1e}' for e in skipping)}",
    )


@claim(
    "18.5-039", section="18.5.2", where="text", kind="library",
    title_en="Loop of the backward recomputation", title_zh="复用前向的跳过逻辑",
    paraphrase="The backward pass recomputes S over exactly the same column range as the forward pass.",
    stated={"same tiles": True, "same loop (columns of a row block)": True}, verdict="wrong", severity=1,
    right="The same tiles, but the other way round: a block owns a K, V tile and walks the row tiles from "
    "the diagonal down.",
    source=f"{FA2}, algorithm 2",
)
def backward_loop():
    return Truth(
        {"same tiles": True, "same loop (columns of a row block)": False}, "outer loop over j in algorithm 2"
    )


@claim(
    "18.5-040", section="18.5.2", where="text", kind="timing",
    title_en="Time v1 spends outside matrix products", title_zh="非矩阵乘法操作占比",
    paraphrase="Exponentials, reductions and rescaling take 20 to 30 percent of v1's time.",
    stated={"lo": 20, "hi": 30}, unit="%", verdict="unverifiable", severity=1,
    right="No source or measurement is named. Possible: v1 peaks at 124 TFLOP/s on an A100, so that at most "
    "60 % of its time is left for all else.",
)
def non_matmul():
    # The special-function unit gives 16 exponentials a clock and SM, the tensor cores 2048 FLOP.
    share = {d: (1 / 16) / (1 / 16 + 4 * d / 2048) for d in (64, 128)}
    return Bound(
        0,
        100 * (1 - 124 / A100.fp16),
        "no measurement is named",
        f"exponentials alone, at peak rates and not overlapped: {share[64]:.0%} at d = 64, "
        f"{share[128]:.0%} at d = 128",
    )


@claim(
    "18.5-041", section="18.5.2", where="Listing 6", kind="library",
    title_en="Argument that switches the causal mask", title_zh="训练与推理接口",
    paraphrase="Call flash_attn_varlen_func, or the kernel, with is_causal=True or False.",
    stated="is_causal", verdict="wrong", severity=2,
    right="The argument is called causal in flash-attn; is_causal belongs to PyTorch's SDPA. The code "
    "sample beside it has it right (and calls flash_attn_func, not the varlen one).",
    source=f"{REPO} v2.6.3, flash_attn/flash_attn_interface.py, flash_attn_varlen_func",
)
def causal_argument():
    return Truth("causal", "signature in v2.6.3")


@claim(
    "18.5-042", section="18.5.2", where="Figure 18-21", kind="formula",
    title_en="Loop bound in the figure", title_zh="Tc",
    paraphrase="The figure bounds the causal loop by ceil(q_start + Br) / Bc.",
    stated={"q_start=64, Br=64, Bc=48": 128 / 48, "q_start=128, Br=64, Bc=64": 3}, verdict="wrong",
    severity=1, reading_is_guess=True,
    right="ceil((q_start + Br) / Bc), as the listing has it: the bracket closes too early. Also missing: "
    "the minimum with ceil(N / Bc).",
)
def figure_bound():
    def needed(q_start, Br, Bc):
        return max(j // Bc for i in range(q_start, q_start + Br) for j in range(i + 1)) + 1

    return Truth(
        {"q_start=64, Br=64, Bc=48": needed(64, 64, 48), "q_start=128, Br=64, Bc=64": needed(128, 64, 64)},
        "tiles that hold a visible key, counted",
    )


@claim(
    "18.5-043", section="18.5.2", where="text", kind="number",
    title_en="FLOPs without the mask against with it", title_zh="多执行约 2x 的 FLOPs",
    paraphrase="The non-causal kernel executes about twice the FLOPs of the causal one.",
    stated=2.0, unit="x", tol=0.04, verdict="confirmed",
)
def noncausal_ratio():
    T = 8192 // 128
    return Truth(T**2 / (T * (T + 1) / 2), f"visited tiles at N = 8192; {2 * 8 / 9:.2f} at N = 1024")


@claim(
    "18.5-044", section="18.5.2", where="text", kind="statement",
    title_en="How many tiles of a row need the mask", title_zh="部分有效的块",
    paraphrase="Only the last tile of each row of tiles can straddle the diagonal, so the mask is applied "
    "there alone.",
    stated={"Br = Bc": 1, "Br = 2 Bc": 1, "Br = 48, Bc = 64": 1}, unit="tiles a row, at most", tol=0,
    verdict="wrong", severity=3,
    right="ceil(Br / Bc) of them, one more when the tiles are not aligned: flash-attn's loop has that many "
    "masking steps.",
    source=f"{REPO} v2.6.3, csrc/flash_attn/src/flash_fwd_kernel.h, n_masking_steps",
)
def masked_tiles():
    worst = {}
    for name, (Br, Bc) in {"Br = Bc": (64, 64), "Br = 2 Bc": (128, 64), "Br = 48, Bc = 64": (48, 64)}.items():
        rows = {}
        for q, k in tiles(768, Br, Bc):
            rows[q] = rows.get(q, 0) + (tile_class(q, k) == "partial")
        worst[name] = max(rows.values())
    return Truth(worst, "partial tiles counted in every row of tiles, N = 768")


@claim(
    "18.5-045", section="18.5.2", where="text", kind="statement",
    title_en="Both loop bounds agree", title_zh="统一 Kernel 模板",
    paraphrase="For non-causal attention the unified kernel runs ceil(N / Bc) steps.",
    stated={"N=1000, Bc=64": 16, "N=1024, Bc=64": 16}, tol=0, verdict="inconsistent", severity=3,
    conflicts_with=("18.5-092",),
    right="ceil(N / Bc). The earlier causal listing of the same section divides N / Bc as integers and "
    "loses the last, ragged tile.",
)
def noncausal_steps():
    return Elsewhere(
        {f"N={N}, Bc=64": N // 64 for N in (1000, 1024)}, ("18.5-092",), "N / B_c in the earlier listing"
    )
