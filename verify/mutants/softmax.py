"""Bugs of the online softmax: maximum, rescale, sum, division, start."""

from verify.mutants.mutant import Edit, Mutant

TILE_OPS, STEP0, STEP1, STEP2, STEP3 = (
    f"numba_cuda/{stem}.py"
    for stem in ("parts/tile_ops", "step0_standard", "step1_fused", "step2_flash_v1", "step3_flash_v2")
)
V2 = "step3_flash_v2"

ENTRIES = (
    Mutant(
        "O_not_rescaled", "O_acc is not rescaled when the maximum grows",
        "18.4.2", "softmax",
        (Edit(TILE_OPS, "rescale", "O_acc[a, v] *= alpha[a]", "O_acc[a, v] *= float32(1.0)"),),
        through=V2, first=("growing_max", "late_max"),
    ),
    Mutant(
        "l_not_rescaled", "l is not rescaled when the maximum grows",
        "18.4.2", "softmax",
        (Edit(TILE_OPS, "update_sum", "l[a] = alpha[a] * l[a] + total", "l[a] = l[a] + total"),),
        through=V2, first=("growing_max", "late_max"),
    ),
    Mutant(
        "alpha_inverted", "alpha is exp(m_new - m) instead of exp(m - m_new)",
        "18.4.2", "softmax",
        (
            Edit(
                TILE_OPS, "update_max",
                "alpha[a] = float32(1.0) if m_new == float32(NEG_INF) else exp2(m[a] - m_new)",
                "alpha[a] = float32(1.0) if m[a] == float32(NEG_INF) else exp2(m_new - m[a])",
            ),
        ),
        through=V2, first=("square", "growing_max"),
    ),
    Mutant(
        "alpha_from_tile_max", "alpha is taken against the tile's maximum, P against the running one",
        "18.4.2", "softmax",
        (
            Edit(TILE_OPS, "update_max", "m_new = m[a]\n", "m_new = float32(NEG_INF)\n"),
            Edit(TILE_OPS, "update_max", "            m[a] = m_new", "            m[a] = max(m[a], m_new)"),
        ),
        through=V2, bug="alpha_of_tile_max", first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "P_from_last_max", "P is taken against the maximum before this tile",
        "18.4.2", "softmax",
        (
            Edit(
                STEP3, "step3_flash_v2",
                "            tile.update_max(max_s, m, alpha)\n            tile.share_exp(s, m, P_s, sum_s)\n",
                "            if j == 0:\n                tile.update_max(max_s, m, alpha)\n"
                "            tile.share_exp(s, m, P_s, sum_s)\n"
                "            if j > 0:\n                tile.update_max(max_s, m, alpha)\n",
            ),
        ),
        through=V2, bug="max_of_previous_tile", first=("square", "growing_max"),
    ),
    Mutant(
        "max_of_last_tile", "the maximum kept is the last tile's, not the largest so far",
        "18.4.2", "softmax",
        (Edit(TILE_OPS, "update_max", "m_new = m[a]\n", "m_new = float32(NEG_INF)\n"),),
        through=V2, bug="max_of_tile", first=("causal", "causal_top_left"),
    ),
    Mutant(
        "max_starts_at_0", "the running maximum starts at 0",
        "18.4.2", "softmax",
        (Edit(TILE_OPS, "start", "m[a] = float32(NEG_INF)", "m[a] = float32(0.0)"),),
        through=V2, first=("all_negative", "all_negative_gqa"),
    ),
    Mutant(
        "max_starts_too_high", "the running maximum starts at -5e4, which real scores can be below",
        "18.4.2", "softmax",
        (Edit(TILE_OPS, "start", "m[a] = float32(NEG_INF)", "m[a] = float32(-5e4)"),),
        through=V2, first=("all_negative", "all_negative_gqa"),
    ),
    Mutant(
        "no_max", "exp is taken of scores without their maximum",
        "18.4.2", "softmax",
        (Edit(TILE_OPS, "update_max", "            m[a] = m_new", "            m[a] = float32(0.0)"),),
        through=V2, bug="max_missing", first=("logits_x10", "late_max"),
    ),
    Mutant(
        "not_divided", "O_acc is written without the division by l",
        "18.4.3", "softmax",
        (Edit(TILE_OPS, "write", "O_acc[a, v] / l[a]", "O_acc[a, v]"),),
        through=V2, first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "divided_each_tile", "O_acc is divided by l after every tile, and rescaled as if it were not",
        "18.5.1", "softmax",
        (
            Edit(
                STEP3, "step3_flash_v2",
                "            tile.accumulate(P_s, KV_s, O_acc)\n",
                "            tile.accumulate(P_s, KV_s, O_acc)\n            for a in range(RY):\n"
                "                for v in range(VX):\n"
                "                    O_acc[a, v] /= max(l[a], float32(1e-30))\n",
            ),
            Edit(TILE_OPS, "write", "O_acc[a, v] / l[a]", "O_acc[a, v]"),
        ),
        through=V2, first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "sum_of_one_thread", "l adds up one thread's columns of a row",
        "18.4.3", "softmax",
        (Edit(TILE_OPS, "update_sum", "for k in range(TX):", "for k in range(1):"),),
        through=V2, first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "empty_first_tile_is_nan", "a row whose first tile is hidden subtracts -inf from -inf",
        "18.4.2", "softmax",
        (
            Edit(
                TILE_OPS, "update_max",
                "alpha[a] = float32(1.0) if m_new == float32(NEG_INF) else exp2(m[a] - m_new)",
                "alpha[a] = exp2(m[a] - m_new)",
            ),
        ),
        through="general", first=("empty_rows", "window_both"),
    ),
    Mutant(
        "empty_row_is_nan", "a row that sees no key is 0 / 0",
        "18.2.2", "softmax",
        (
            Edit(
                TILE_OPS, "write",
                "float32(0.0) if l[a] == float32(0.0) else O_acc[a, v] / l[a]", "O_acc[a, v] / l[a]",
            ),
        ),
        through=V2, bug="empty_row_nan", first=("empty_rows", "no_keys"),
    ),
    Mutant(
        "partial_sums_not_rescaled", "the threads' sums of a row are added without being brought to its maximum",
        "18.3.3", "softmax",
        (Edit(STEP0, "step0_softmax", "else l * exp2(m - m_row)", "else l"),),
        through="step0_standard", bug="l_not_rescaled", first=("logits_x10", "square"),
    ),
    Mutant(
        "P_not_divided", "the softmax kernel stores exp(s - m) and forgets l",
        "18.3.3", "softmax",
        (Edit(STEP0, "step0_softmax", "exp2(s - m_row) / l_row", "exp2(s - m_row)"),),
        through="step0_standard", bug="P_not_normalised", first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "l_summed_in_both_passes", "l is added up in both passes over K",
        "18.3.4", "softmax",
        (
            Edit(
                STEP1, "step1_fused",
                "            tile.accumulate(P_s, KV_s, O_acc)\n",
                "            tile.accumulate(P_s, KV_s, O_acc)\n            tile.update_sum(sum_s, alpha, l)\n",
            ),
        ),
        through="step1_fused", first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "state_not_fetched", "a query tile starts anew at every visit: what went to HBM is not fetched",
        "18.4.3", "softmax",
        (
            Edit(
                STEP2, "step2_flash_v1",
                "tile.fetch(O_hbm[b, h], m_hbm[b, h], l_hbm[b, h], m, l, O_acc, i * Br)", "tile.start(m, l, O_acc)",
            ),
        ),
        through="step2_flash_v1", first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "l_not_fetched", "l starts anew at every visit, while m and O_acc go on",
        "18.4.3", "softmax",
        (Edit(TILE_OPS, "fetch", "l[a] = l_hbm[row]", "l[a] = float32(0.0)"),),
        through="step2_flash_v1", first=("tile_plus_1", "1024x1023"),
    ),
)  # fmt: skip
