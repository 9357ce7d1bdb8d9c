"""Bugs of the NumPy steps: the same mistakes where there are no threads."""

from verify.mutants.mutant import Edit, Mutant

STEP0, STEP1, STEP2, STEP3, STEP4 = (
    f"refimpl/{stem}.py"
    for stem in ("step0_standard", "step1_fused", "step2_flash_v1", "step3_flash_v2", "step4_causal")
)
HEADS, SOFTMAX, TILING, HEAD = "refimpl/heads.py", "refimpl/softmax.py", "refimpl/tiling.py", "refimpl/head.py"
V2 = "refimpl.step3_flash_v2"

ENTRIES = (
    Mutant(
        "numpy_O_not_rescaled", "O_acc is not rescaled when the maximum grows",
        "18.4.2", "softmax",
        (Edit(STEP3, "one_head", "O_acc = alpha * O_acc + weigh", "O_acc = O_acc + weigh"),),
        through=V2, bug="O_not_rescaled", first=("growing_max", "late_max"),
    ),
    Mutant(
        "numpy_l_not_rescaled", "l is not rescaled when the maximum grows",
        "18.4.2", "softmax",
        (Edit(STEP2, "one_head", "l_i = alpha * l_i + rowsum(P_ij)", "l_i = l_i + rowsum(P_ij)"),),
        through="refimpl.step2_flash_v1", bug="l_not_rescaled", first=("growing_max", "late_max"),
    ),
    Mutant(
        "numpy_l_from_second_pass", "the second pass weighs with exp(s), without m",
        "18.3.4", "softmax",
        (
            Edit(
                STEP1, "one_head", "# softmax: m is final\n            P_ij = np.exp(S_ij - pivot(m_i))",
                "# softmax: m is final\n            P_ij = np.exp(S_ij)",
            ),
        ),
        through="refimpl.step1_fused", bug="max_missing", first=("square", "causal"),
    ),
    Mutant(
        "numpy_P_from_last_max", "P is taken against the maximum before this tile",
        "18.4.2", "softmax",
        (Edit(STEP3, "one_head", "P_ij = np.exp(S_ij - pivot(m_new))", "P_ij = np.exp(S_ij - pivot(m_i))"),),
        through=V2, bug="max_of_previous_tile", first=("square", "causal"),
    ),
    Mutant(
        "numpy_pivot", "a row that has seen no key subtracts -inf from -inf",
        "18.4.2", "softmax",
        (Edit(SOFTMAX, "pivot", "return np.where(m == -np.inf, 0, m)", "return m"),),
        through="refimpl.step4_causal", bug="empty_first_tile_is_nan", first=("empty_rows", "window_left"),
    ),
    Mutant(
        "numpy_NaN_leaks", "a hidden key's weight of 0 is multiplied with its value, which may be NaN",
        "18.2.2", "causal",
        (Edit(SOFTMAX, "weigh", "if not wild.any():", "if True:"),),
        through=V2, bug="hidden_NaN_leaks", first=("nan_hidden", "nan_seen"),
    ),
    Mutant(
        "numpy_last_tile_dropped", "the last tile is dropped where it is not full",
        "18.4.1", "tiles",
        (Edit(TILING, "spans", "for start in range(0, N, B)]", "for start in range(0, N - B + 1, B)]"),),
        through=V2, bug="last_ragged_tile_dropped", first=("tile_plus_1", "113x203"),
    ),
    Mutant(
        "numpy_stale_V", "V_j is that of the first tile, as wide as this one",
        "18.4.1", "tiles",
        (
            Edit(
                STEP3, "one_head", 'V_j = head.load("V", V[cols])',
                'V_j = head.load("V", V[: cols.stop - cols.start])',
            ),
        ),
        through=V2, bug="stale_tile_of_V", first=("square", "causal"),
    ),
    Mutant(
        "numpy_head_mapping_modulo", "query head h uses key head h % Hk",
        "18.2.2", "heads",
        (Edit(HEADS, "each_head", "k = h // (len(Q) // len(K))", "k = h % len(K)"),),
        through=V2, bug="heads_modulo", first=("gqa", "alibi"),
    ),
    Mutant(
        "numpy_empty_row_mean", "a row that sees no key is divided by 1 instead of being 0",
        "18.2.2", "softmax",
        (Edit(STEP0, "one_head", 'np.where(l_i == 0, 0, P_i / l_i)', 'np.where(l_i == 0, 1 / len(K), P_i / l_i)'),),
        through="refimpl.step0_standard", bug="empty_row_mean", first=("empty_rows", "window_right"),
    ),
    Mutant(
        "numpy_mask_before_scores", "score rules come after the mask",
        "18.7.1", "options",
        (
            Edit(
                STEP3, "one_head",
                "S_ij = np.where(seen, head.score(head.scale * (Q_i @ K_j.T), rows, cols), -np.inf)",
                "S_ij = head.score(np.where(seen, head.scale * (Q_i @ K_j.T), -np.inf), rows, cols)",
            ),
        ),
        through=V2, bug="softcap_after_mask", first=("softcap_causal", "all_options"),
    ),
    Mutant(
        "numpy_full_tile_unmasked", "tiles that are not empty are not masked",
        "18.5.2", "causal",
        (
            Edit(
                STEP4, "one_head", "seen = True if kind is TileClass.FULL else head.visible(rows, cols)", "seen = True",
            ),
        ),
        through="refimpl.step4_causal", bug="partial_tile_full", first=("causal", "mqa"),
    ),
    Mutant(
        "numpy_fp16_sum", "l is summed in fp16",
        "18.4.5", "precision",
        (Edit(SOFTMAX, "rowsum", "P.sum(axis=-1, keepdims=True)", "P.sum(axis=-1, keepdims=True, dtype=np.float16)"),),
        through=V2, bug="l_in_fp16", first=("square", "causal"),
    ),
)  # fmt: skip
