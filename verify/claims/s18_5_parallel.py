"""Ledger entries for section 18.5.1: how FlashAttention-2 spreads the work over thread blocks and warps."""

import numpy as np

from refimpl.tiling import cdiv
from verify.claims.hardware import A100, AMPERE_TUNING, CUDA_GUIDE, FA2
from verify.claims.ledger import Cases, Elsewhere, Truth, claim, stated_in

REPO = "Dao-AILab/flash-attention"


@claim(
    "18.5-001", section="18.5.1", where="text", kind="library",
    title_en="Grid of FlashAttention v1", title_zh="v1 的并行策略",
    paraphrase="v1 parallelises over batch and heads only: one thread block per (batch, head) does the "
    "whole sequence.",
    stated={"batch": True, "heads": True, "sequence": False}, verdict="depends", severity=1,
    conflicts_with=("18.4-028",),
    right="True of the paper and of releases up to 0.2.1. The v1 code split the rows too, from October 2022 "
    "(0.2.2) on: its grid has num_splits as third dimension, chosen to fill the SMs. The chapter itself "
    "gives v1 the grid (batch x heads, Tr) in 18.4.3.",
    source=f"{REPO} v0.2.8 and v1.0.9, csrc/flash_attn/src/fmha_fwd_launch_template.h, dim3 grid(b, h, "
    f"num_splits); {FA2}, section 3.2",
)
def v1_grid():
    return Cases(
        {
            "paper, code to 0.2.1": {"batch": True, "heads": True, "sequence": False},
            "code 0.2.2 to 1.0.9": {"batch": True, "heads": True, "sequence": True},
        },
        "read from the launch templates",
    )


@claim(
    "18.5-002", section="18.5.1", where="text", kind="number",
    title_en="Thread blocks of v1 in the example", title_zh="线程块总数",
    paraphrase="With B = 1, H = 40, N = 8192 only 40 blocks can be scheduled, far short of the 108 SMs of "
    "an A100.",
    stated={"blocks": 40, "SMs": 108}, tol=0, verdict="confirmed",
)
def v1_blocks():
    return Truth({"blocks": 1 * 40, "SMs": A100.sms}, f"{40 / A100.sms:.0%} of the SMs get one block")


@claim(
    "18.5-003", section="18.5.1", where="Formula", kind="formula",
    title_en="Tile visits of one v1 block", title_zh="每个线程块的工作量",
    paraphrase="The work of a block grows as N^2 / (Br Bc).",
    stated={"N=1024": 64, "N=8192": 4096}, unit="tile visits at Br = Bc = 128", tol=0, verdict="confirmed",
    reading_is_guess=True,
)
def v1_visits():
    def visits(N, Br=128, Bc=128):
        return sum(1 for _ in range(0, N, Bc) for _ in range(0, N, Br))

    return Truth(
        {f"N={N}": visits(N) for N in (1024, 8192)}, "counted; the exponent 2 is displaced in the print"
    )


@claim(
    "18.5-004", section="18.5.1", where="Formula", kind="formula",
    title_en="Rows are independent", title_zh="沿序列长度维度并行",
    paraphrase="Row i of O depends on row i of Q and on all of K and V, not on other rows of Q; so rows may "
    "be spread over thread blocks.",
    stated={"rows alone give the same O": True, "changing the other rows of Q changes them": False},
    verdict="confirmed",
)
def independent_rows():
    from refimpl import oracle

    rng = np.random.default_rng(185)
    Q, K, V = rng.standard_normal((3, 1, 1, 40, 8))
    whole = oracle.attention(Q, K, V)[0]
    parts = np.concatenate([oracle.attention(Q[:, :, i : i + 7], K, V)[0] for i in range(0, 40, 7)], axis=2)
    other = Q.copy()
    other[:, :, 7:] += 1
    moved = oracle.attention(other, K, V)[0][:, :, :7]
    return Truth(
        {
            "rows alone give the same O": bool(np.allclose(parts, whole, rtol=0, atol=1e-14)),
            "changing the other rows of Q changes them": not np.allclose(
                moved, whole[:, :, :7], rtol=0, atol=1e-14
            ),
        },
        f"max difference {np.abs(parts - whole).max():.1e}",
    )


@claim(
    "18.5-005", section="18.5.1", where="Figure 18-19", kind="formula",
    title_en="Thread blocks of v2", title_zh="线程块总数",
    paraphrase="v2 cuts Q into Tr = ceil(N / Br) tiles, one block each: B H Tr blocks instead of B H.",
    stated={"Br=64": 5120, "Br=128": 2560}, unit="blocks for B = 1, H = 40, N = 8192", tol=0,
    verdict="confirmed",
    source=f"{REPO} v2.6.3, flash_fwd_launch_template.h, dim3 grid(num_m_block, b, h)",
)
def v2_blocks():
    return Truth(
        {f"Br={Br}": 1 * 40 * cdiv(8192, Br) for Br in (64, 128)},
        f"{2560 / 108:.1f} blocks an SM at Br = 128",
    )


@claim(
    "18.5-006", section="18.5.1", where="text", kind="library",
    title_en="How v2 picks Br", title_zh="动态调整 Br",
    paraphrase="v1 gives each block a fixed Br x d share; v2 sets Br dynamically from the SM's registers "
    "and shared memory.",
    stated={"chosen by the GPU's shared memory": True}, verdict="depends", severity=1,
    right="Only for d = 256, where the launcher asks for the shared memory and takes 128 or 64 rows. For "
    "all other head dimensions the tile is fixed by d, dropout, causal and whether the GPU is sm_86/89.",
    source=f"{REPO} v2.6.3, csrc/flash_attn/src/flash_fwd_launch_template.h, run_mha_fwd_hdim32 ... hdim256",
)
def v2_tile_choice():
    return Cases(
        {
            "d up to 224": {"chosen by the GPU's shared memory": False},
            "d = 256": {"chosen by the GPU's shared memory": True},
        },
        "Flash_fwd_kernel_traits<Headdim, 128, 64, ...> against max_smem_per_block",
    )


@claim(
    "18.5-007", section="18.5.1", where="text", kind="statement",
    title_en="Heads as a grid dimension", title_zh="批次维度与头维度的并行",
    paraphrase="New in v2: heads become a grid dimension, where v1 expanded the batch index and looped over "
    "heads inside.",
    stated=1, unit="v1 blocks for B = 1, H = 40", tol=0, verdict="inconsistent", severity=2,
    conflicts_with=("18.5-002",),
    right="v1 had a block for each (batch, head) from the start, as the section says two paragraphs "
    "earlier; there was no loop over heads and no synchronisation across heads to save.",
)
def v1_heads():
    return Elsewhere(
        stated_in("18.5-002")["blocks"], ("18.5-002",), "B x H blocks according to the same section"
    )


@claim(
    "18.5-008", section="18.5.1", where="Listing 1", kind="library",
    title_en="Warps split the rows of Q", title_zh="线程块-Warp 映射",
    paraphrase="v1 shares K and V among the warps of a block and must combine across warps; v2 splits Q "
    "instead, so that row statistics need only warp shuffles.",
    stated={"v1 splits": "K and V", "v2 splits": "Q", "v2 combines across warps": False}, verdict="confirmed",
    source=f"{FA2}, section 3.3 and figure 3 (split-K against split-Q)",
)
def warp_split():
    return Truth(
        {"v1 splits": "K and V", "v2 splits": "Q", "v2 combines across warps": False},
        "as the v2 paper has it",
    )


@claim(
    "18.5-009", section="18.5.1", where="Formula", kind="formula",
    title_en="Shared-memory budget of a tile pair", title_zh="SRAM 容量约束",
    paraphrase="Br d + Bc (2 d + Br) <= M, where M is the shared memory in KB.",
    stated={"d=64": 40960, "d=128": 65536}, unit="left side at Br = Bc = 128, compared with bytes",
    unit_factor=2, verdict="units", severity=2,
    right="The left side counts elements, M bytes: multiply by 2 for FP16. And v2 holds S in registers, so "
    "that the term Br Bc does not occupy shared memory at all: 48 KiB and 96 KiB for these two.",
)
def sram_budget():
    def fp16_bytes(Br, Bc, d):
        return 2 * (Br * d + Bc * 2 * d + Br * Bc)

    return Truth(
        {f"d={d}": fp16_bytes(128, 128, d) for d in (64, 128)}, "bytes of Q, K, V and S tiles in FP16"
    )


@claim(
    "18.5-010", section="18.5.1", where="text", kind="hardware",
    title_en="Shared memory per block on an A100", title_zh="片上共享内存容量",
    paraphrase="M is 192 KB per block on an A100.",
    stated=192, unit="KB", tol=0.01, verdict="wrong", severity=2,
    right="163 KiB for one block (164 KiB for all blocks of an SM); 192 KiB is L1 and shared memory "
    "together. At 192 KB the launch fails.",
    source=f"{AMPERE_TUNING}; {CUDA_GUIDE} (compute capability 8.0)",
)
def a100_shared():
    return Truth(A100.shared_kib - 1, "1 KiB of each SM's shared memory is reserved per block")


@claim(
    "18.5-011", section="18.5.1", where="text", kind="number",
    title_en="A larger Bc shortens the loop", title_zh="SRAM 循环步数",
    paraphrase="v2 enlarges Bc so that Tc = ceil(N / Bc) falls and with it the loop's overhead.",
    stated={"steps fall": True, "HBM traffic falls": False}, verdict="confirmed",
)
def larger_bc():
    N, d, Br = 8192, 128, 128
    steps = {Bc: cdiv(N, Bc) for Bc in (32, 64, 128)}
    traffic = {Bc: cdiv(N, Br) * sum(2 * min(Bc, N - j) * d for j in range(0, N, Bc)) for Bc in steps}
    return Truth(
        {"steps fall": steps[32] > steps[64] > steps[128], "HBM traffic falls": traffic[128] < traffic[32]},
        f"steps {steps}; K and V fills do not depend on Bc, only on Br (the text claims no saving of "
        "traffic here)",
    )
