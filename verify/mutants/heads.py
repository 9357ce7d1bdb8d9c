"""Bugs of scale, lse and of what belongs to which head: one number or one index, wrong everywhere."""

from verify.mutants.mutant import Edit, Mutant

TILE_OPS, STEP3, LAUNCH = "numba_cuda/parts/tile_ops.py", "numba_cuda/step3_flash_v2.py", "numba_cuda/launch.py"
V2 = "step3_flash_v2"
FACTOR = "scale_log2 = np.float32(scale * math.log2(math.e))"
LSE = "float32(LN2) * (m[a] + log2(l[a]))"
HEAD = "h_k = h // (Hq // Hk)"

ENTRIES = (
    Mutant(
        "scale_missing", "q.k is not scaled",
        "18.2.1", "scale and lse",
        (Edit(LAUNCH, "prepare", FACTOR, FACTOR.replace("scale * math", "math")),),
        through=V2, first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "scale_squared", "q.k is scaled twice",
        "18.2.1", "scale and lse",
        (Edit(LAUNCH, "prepare", FACTOR, FACTOR.replace("scale *", "scale * scale *")),),
        through=V2, first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "scale_of_padded_d", "the default scale is that of d rounded up to the tile's room",
        "18.2.1", "scale and lse",
        (Edit(LAUNCH, "prepare", "1.0 / math.sqrt(d)", "1.0 / math.sqrt(head_room(d, dv))"),),
        through=V2, first=("square", "odd_head_dim"),
    ),
    Mutant(
        "scale_of_dv", "the default scale is 1/sqrt(dv)",
        "18.2.1", "scale and lse",
        (Edit(LAUNCH, "prepare", "1.0 / math.sqrt(d)", "1.0 / math.sqrt(dv)"),),
        through="general", first=("dv_not_d", "back_causal"),
    ),
    Mutant(
        "scale_taken_positive", "a negative scale counts as its absolute value",
        "18.2.1", "scale and lse",
        (Edit(LAUNCH, "prepare", "else float(scale)", "else abs(float(scale))"),),
        through="general", first=("negative_scale", "back_empty_rows"),
    ),
    Mutant(
        "exp_base_swapped", "scores in natural units are put to exp2",
        "18.4.2", "scale and lse",
        (Edit(LAUNCH, "prepare", FACTOR, "scale_log2 = np.float32(scale)"),),
        through=V2, bug="exp_base_2", first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "log2e_truncated", "log2(e) is taken for 1.442694: the last digit of seven is wrong",
        "18.4.5", "scale and lse",
        (Edit(LAUNCH, "prepare", FACTOR, "scale_log2 = np.float32(scale * 1.442694)"),),
        through=V2, dtypes=("fp32",), first=("logits_x10", "growing_max"),
    ),
    Mutant(
        "lse_base_2", "lse is a base-2 logarithm",
        "18.4.3", "scale and lse",
        (Edit(TILE_OPS, "write", LSE, "m[a] + log2(l[a])"),),
        through=V2, first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "lse_without_m", "lse is log(l), and m is not added back",
        "18.4.3", "scale and lse",
        (Edit(TILE_OPS, "write", LSE, "float32(LN2) * log2(l[a])"),),
        through=V2, bug="lse_without_max", first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "lse_of_two_bases", "lse adds m in log2 units to a natural log(l)",
        "18.4.3", "scale and lse",
        (Edit(TILE_OPS, "write", LSE, "m[a] + float32(LN2) * log2(l[a])"),),
        through=V2, bug="lse_max_base_2", first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "lse_plus_inf", "a row that sees no key has lse = +inf",
        "18.2.2", "scale and lse",
        (Edit(TILE_OPS, "write", "lse[row] = float32(NEG_INF) if", "lse[row] = -float32(NEG_INF) if"),),
        through=V2, bug="empty_row_lse", first=("empty_rows", "no_keys"),
    ),
    Mutant(
        "head_mapping_modulo", "query head h uses key head h % Hk",
        "18.2.2", "heads",
        (Edit(STEP3, V2, HEAD, "h_k = h % Hk"),),
        through=V2, bug="heads_modulo", first=("gqa", "all_negative_gqa"),
    ),
    Mutant(
        "V_head_of_query", "V is read by query head, as if there were as many",
        "18.2.2", "heads",
        (Edit(STEP3, V2, "tile.load(KV_s, V[b, h_k], j * Bc, 0)", "tile.load(KV_s, V[b, min(h, Hk - 1)], j * Bc, 0)"),),
        through=V2, first=("gqa", "all_negative_gqa"),
    ),
    Mutant(
        "batch_stride_0", "every batch entry reads the keys of the first",
        "18.4.3", "heads",
        (Edit(STEP3, V2, "tile.load(KV_s, K[b, h_k], j * Bc, 0)", "tile.load(KV_s, K[0, h_k], j * Bc, 0)"),),
        through=V2, bug="batch_0_of_K", first=("batch_heads", "batch_heads_cross"),
    ),
    Mutant(
        "stride_of_wrong_axis", "K is read with the strides of heads and rows changed places",
        "18.4.3", "heads",
        (
            Edit(
                LAUNCH, "prepare", 'on.input("K", K)',
                'on.input("K", K.reshape(B, Nk, Hk, d).swapaxes(1, 2))',
            ),
        ),
        through=V2, first=("batch_heads", "tile"),
    ),
    Mutant(
        "strides_ignored", "V is read from the start of its memory as if it were contiguous",
        "18.4.3", "heads",
        (
            Edit(
                LAUNCH, "prepare", 'on.input("V", V)',
                'on.input("V", np.resize(V if V.base is None else V.base, V.shape))',
            ),
        ),
        through=V2, bug="strides_of_V", first=("offset_view", "fused_qkv"),
    ),
    Mutant(
        "block_index_transposed", "the block's number is taken apart in the wrong order: heads before query tiles",
        "18.5.1", "heads",
        (
            Edit(STEP3, V2, "i = cuda.blockIdx.x % Tr", "i = cuda.blockIdx.x // Hq % Tr"),
            Edit(STEP3, V2, "h = cuda.blockIdx.x // Tr % Hq", "h = min(cuda.blockIdx.x // Tr % Hq, Hq - 1)"),
        ),
        through=V2, first=("tile_plus_1", "batch_heads"),
    ),
)  # fmt: skip
