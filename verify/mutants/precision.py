"""Bugs of low precision: sums, statistics and scores kept in fewer bits than fp32."""

from verify.mutants.mutant import Edit, Mutant

TILE_OPS, STEP2, LAUNCH = "numba_cuda/parts/tile_ops.py", "numba_cuda/step2_flash_v1.py", "numba_cuda/launch.py"
STEP0 = "numba_cuda/step0_standard.py"
V2 = "step3_flash_v2"
HALF = Edit(TILE_OPS, "", "from numba.cuda.types import float32\n", "from numba.cuda.types import float16, float32\n")

ENTRIES = (
    Mutant(
        "fp16_accumulator", "O_acc is kept in fp16",
        "18.4.5", "precision",
        (
            HALF,
            Edit(
                TILE_OPS, "accumulate", "O_acc[a, v] += p * value[v]",
                "O_acc[a, v] = float32(float16(O_acc[a, v] + p * value[v]))",
            ),
        ),
        through=V2, bug="O_acc_in_fp16", first=("large_values", "large_values_gqa"),
    ),
    Mutant(
        "fp16_row_sum", "l is kept in fp16",
        "18.4.5", "precision",
        (
            HALF,
            Edit(
                TILE_OPS, "update_sum", "l[a] = alpha[a] * l[a] + total",
                "l[a] = float32(float16(alpha[a] * l[a] + total))",
            ),
        ),
        through=V2, bug="l_in_fp16", first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "fp16_max", "m is kept in fp16",
        "18.4.5", "precision",
        (
            HALF,
            Edit(
                TILE_OPS, "update_max", "            m[a] = m_new", "            m[a] = float32(float16(m_new))",
            ),
        ),
        through=V2, bug="m_in_fp16", first=("square", "all_negative"),
    ),
    Mutant(
        "fp16_scores", "scores are rounded to fp16",
        "18.4.5", "precision",
        (HALF, Edit(TILE_OPS, "scores", "s[a, b] *= scale", "s[a, b] = float32(float16(s[a, b] * scale))")),
        through=V2, bug="S_in_fp16", first=("logits_x10", "square"),
    ),
    Mutant(
        "fp16_scores_unscaled", "q.k is rounded to fp16 before it is scaled, and may overflow",
        "18.4.5", "precision",
        (HALF, Edit(TILE_OPS, "scores", "s[a, b] *= scale", "s[a, b] = float32(float16(s[a, b])) * scale")),
        through=V2, bug="S_in_fp16", first=("all_negative", "logits_x10"),
    ),
    Mutant(
        "fp16_scale", "the scale is rounded to fp16",
        "18.4.5", "precision",
        (
            Edit(
                LAUNCH, "prepare", "scale_log2 = np.float32(scale * math.log2(math.e))",
                "scale_log2 = np.float32(np.float16(scale * math.log2(math.e)))",
            ),
        ),
        through=V2, first=("logits_x10", "growing_max"),
    ),
    Mutant(
        "O_acc_in_fp16_HBM", "O_acc goes round through HBM in fp16",
        "18.4.5", "precision",
        (
            Edit(
                STEP2, "attention", 'O_hbm = p.empty("O_acc", p.B, p.Hq, p.Nq, p.dv)',
                'O_hbm = p.on.empty("O_acc", (p.B, p.Hq, p.Nq, p.dv), "float16")',
            ),
        ),
        through="step2_flash_v1", bug="O_acc_in_fp16", dtypes=("fp32",), first=("large_values", "square"),
    ),
    Mutant(
        "S_in_fp16", "the score matrix in HBM is fp16",
        "18.3.3", "precision",
        (
            Edit(
                STEP0, "attention", 'S, P = p.empty("S", p.B, p.Hq, p.Nq, p.Nk),',
                'S, P = p.on.empty("S", (p.B, p.Hq, p.Nq, p.Nk), "float16"),',
            ),
        ),
        through="step0_standard", bug="S_in_fp16", first=("logits_x10", "all_negative"),
    ),
    Mutant(
        "subnormal_P_flushed", "weights below 2^-14, fp16's smallest normal number, count as 0",
        "18.4.5", "precision",
        (
            Edit(
                TILE_OPS, "share_exp", "p = exp2(s[a, b] - m[a])",
                "p = exp2(s[a, b] - m[a]) if s[a, b] - m[a] >= float32(-14.0) else float32(0.0)",
            ),
        ),
        through=V2, dtypes=("fp32",), first=("growing_max", "logits_x10"),
    ),
)  # fmt: skip
