"""Bugs of the causal mask: where the diagonal is, which tiles it cuts, and what a hidden score is."""

from verify.mutants.mutant import Edit, Mutant

TILE_OPS, STEP4, LAUNCH, FRAME, MASKS = (
    "numba_cuda/parts/tile_ops.py", "numba_cuda/step4_causal.py", "numba_cuda/launch.py", "refimpl/frame.py",
    "refimpl/masks.py",
)  # fmt: skip
CAUSAL = "step4_causal"
LAST = "seen_by_last = min(min((i + 1) * Br, Nq) + diag, Nk)"
FIRST = "seen_by_first = min(i * Br + 1 + diag, Nk)"
DIAG = 'diag = Nk if not causal else Nk - Nq if align == "bottom_right" else 0'

ENTRIES = (
    Mutant(
        "diagonal_one_short", "a query does not see the key at its own position",
        "18.5.2", "causal",
        (Edit(TILE_OPS, "mask", "+ diag, Nk - 1)", "+ diag - 1, Nk - 1)"),),
        through=CAUSAL, first=("causal", "mqa"),
    ),
    Mutant(
        "diagonal_one_far", "a query sees the key after its own position",
        "18.5.2", "causal",
        (Edit(TILE_OPS, "mask", "+ diag, Nk - 1)", "+ diag + 1, Nk - 1)"),),
        through=CAUSAL, first=("causal", "mqa"),
    ),
    Mutant(
        "top_left_for_bottom_right", "the diagonal starts at the first key, though the last query stands at the last",
        "18.5.2", "causal",
        (Edit(LAUNCH, "prepare", DIAG, "diag = Nk if not causal else 0"),),
        through=CAUSAL, bug="aligned_top_left", first=("causal_113x203", "empty_rows"),
    ),
    Mutant(
        "diagonal_sign", "the shift between rows and keys is Nq - Nk",
        "18.5.2", "causal",
        (Edit(LAUNCH, "prepare", DIAG, DIAG.replace("Nk - Nq", "Nq - Nk")),),
        through=CAUSAL, first=("causal_113x203", "empty_rows"),
    ),
    Mutant(
        "only_last_tile_masked", "only the last live tile is masked, though the diagonal may cut two",
        "18.5.2", "causal",
        (Edit(STEP4, CAUSAL, "if (j + 1) * Bc > seen_by_first:", "if j == live - 1:"),),
        through=CAUSAL, first=("empty_rows", "edge_shows_one"),
    ),
    Mutant(
        "live_tile_dead", "a tile of which the last row sees one key is not visited",
        "18.5.2", "causal",
        (Edit(STEP4, CAUSAL, LAST, LAST.replace("+ diag", "+ diag - 1")),),
        through=CAUSAL, bug="live_tile_skipped", first=("edge_shows_one", "mqa"),
    ),
    Mutant(
        "edge_tile_full", "a tile of which the first row misses one key is not masked",
        "18.5.2", "causal",
        (Edit(STEP4, CAUSAL, FIRST, FIRST.replace("+ 1 + diag", "+ 2 + diag")),),
        through=CAUSAL, bug="edge_tile_taken_for_full", first=("edge_hides_one", "edge_hides_one_far"),
    ),
    Mutant(
        "ragged_edge_full", "tiles below the diagonal are not masked, though the last one ends past the keys",
        "18.5.2", "causal",
        (Edit(STEP4, CAUSAL, FIRST, "seen_by_first = i * Br + 1 + diag"),),
        through=CAUSAL, bug="ragged_tile_not_masked", first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "live_tiles_rounded_down", "the number of live tiles is rounded down",
        "18.5.2", "causal",
        (Edit(STEP4, CAUSAL, "live = (max(seen_by_last, 0) + Bc - 1) // Bc", "live = max(seen_by_last, 0) // Bc"),),
        through=CAUSAL, first=("tile_plus_1", "causal_113x203"),
    ),
    Mutant(
        "mask_value_too_small", "hidden keys score -1e4, which real scores can be below",
        "18.2.2", "causal",
        (Edit(TILE_OPS, "mask", "s[a, b] = float32(NEG_INF)", "s[a, b] = float32(-1e4)"),),
        through=CAUSAL, first=("all_negative", "empty_rows"),
    ),
    Mutant(
        "hidden_NaN_leaks", "a hidden key's weight of 0 is multiplied with its value, which may be NaN",
        "18.2.2", "causal",
        (Edit(TILE_OPS, "share_exp", "p = float32(MASKED)", "p = float32(0.0)"),),
        through="step3_flash_v2", first=("nan_hidden", "nan_seen"),
    ),
    Mutant(
        "masked_by_product", "hidden scores are multiplied by 0 instead of becoming -inf",
        "18.2.2", "causal",
        (Edit(TILE_OPS, "mask", "s[a, b] = float32(NEG_INF)", "s[a, b] *= float32(0.0)"),),
        through=CAUSAL, bug="mask_multiplied", first=("causal", "tile_plus_1"),
    ),
    Mutant(
        "rule_diagonal_short", "the causal rule says j < i",
        "18.2.2", "causal",
        (Edit(MASKS, "causal_mask", "return j <= i", "return j < i"),),
        through="refimpl.step3_flash_v2", bug="diagonal_one_short", first=("causal", "mqa"),
    ),
    Mutant(
        "rule_tile_dead", "the causal rule calls a tile empty of which the last query sees one key",
        "18.5.2", "causal",
        (Edit(MASKS, "causal_tiles", "j0 <= i1 - 1", "j0 < i1 - 1"),),
        through="refimpl.step4_causal", bug="live_tile_skipped", first=("edge_shows_one", "edge_shows_one_far"),
    ),
    Mutant(
        "rule_tile_full", "the causal rule calls a tile full of which the first query misses one key",
        "18.5.2", "causal",
        (Edit(MASKS, "causal_tiles", "j1 - 1 <= i0", "j1 - 2 <= i0"),),
        through="refimpl.step4_causal", bug="edge_tile_taken_for_full", first=("edge_hides_one", "edge_hides_one_far"),
    ),
)  # fmt: skip
