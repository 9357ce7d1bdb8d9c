"""Bugs of options: windows, masks, lengths, and what is done to scores."""

from verify.mutants.mutant import Edit, Mutant

GENERAL, RULE_OPS, VARLEN = "numba_cuda/general.py", "numba_cuda/parts/rule_ops.py", "numba_cuda/interface/varlen.py"
MASKS, SCORES, STANDARD, TENSOR, FRAME = (
    f"refimpl/{stem}.py" for stem in ("masks", "scores", "standard", "mask_tensor", "frame")
)
ALL = "general"

ENTRIES = (
    Mutant(
        "window_left_short", "the left bound of a window is exclusive",
        "18.7.1", "options",
        (Edit(MASKS, "window_mask", "i - j <= left", "i - j < left"),),
        through=ALL, bug="window_off_by_one", first=("window_left", "window_both"),
    ),
    Mutant(
        "window_left_far", "a window reaches one key further back",
        "18.7.1", "options",
        (Edit(MASKS, "window_mask", "i - j <= left", "i - j <= left + 1"),),
        through=ALL, bug="window_off_by_one", first=("window_left", "window_both"),
    ),
    Mutant(
        "window_right_short", "the right bound of a window is exclusive",
        "18.7.1", "options",
        (Edit(MASKS, "window_mask", "j - i <= right", "j - i < right"),),
        through=ALL, bug="window_off_by_one", first=("window_right", "window_both"),
    ),
    Mutant(
        "window_tile_dead", "a tile is not visited if its last query's window starts after it",
        "18.7.1", "options",
        (Edit(MASKS, "window_tiles", "nearest, furthest = i0 - (j1 - 1)", "nearest, furthest = (i1 - 1) - (j1 - 1)"),),
        through=ALL, bug="window_tile_skipped", first=("window_left", "window_both"),
    ),
    Mutant(
        "window_unbounded_is_0", "a bound of a window that is not given is taken for 0",
        "18.7.1", "options",
        (Edit(MASKS, "bound", "UNBOUNDED if x is None", "0 if x is None"),),
        through=ALL, bug="window_none_is_0", first=("window_left", "tile_plus_1"),
    ),
    Mutant(
        "mask_rows_unaligned", "masks are asked about the row, not about its position on the keys' axis",
        "18.5.2", "options",
        (Edit(RULE_OPS, "visible", "mask_fn(b, h, row + offset, j", "mask_fn(b, h, row, j"),),
        through=ALL, bug="aligned_top_left", first=("causal_113x203", "window_left"),
    ),
    Mutant(
        "partial_tile_full", "tiles that are seen in part are not masked",
        "18.5.2", "options",
        (Edit(GENERAL, "general", "offsets[b], kind == 2, mask_aux", "offsets[b], kind >= 1, mask_aux"),),
        through=ALL, first=("causal", "window_both"),
    ),
    Mutant(
        "mask_bits_transposed", "the bits of a thread's visible pairs are written by columns and read by rows",
        "18.5.2", "options",
        (
            Edit(
                RULE_OPS, "visible", "row0 + ty + at // CX * TY, col0 + tx + at % CX * TX",
                "row0 + ty + at % RY * TY, col0 + tx + at // RY * TX",
            ),
        ),
        through=ALL, first=("causal", "mask"),
    ),
    Mutant(
        "tile_class_read_early", "no barrier between the threads' classes of tiles and their use",
        "18.4.1", "options",
        (Edit(GENERAL, "general", "cuda.syncthreads()  # their classes are there", "pass"),),
        through=ALL, first=("causal", "window_left"),
    ),
    Mutant(
        "live_tile_stepped_over", "the way from a live tile leads past the next one",
        "18.5.2", "options",
        (Edit(RULE_OPS, "share_steps", "at = t + uint32(1)", "at = t + uint32(2)"),),
        through=ALL, first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "mask_inverted", "true in a boolean mask means hidden",
        "18.7.2", "options",
        (Edit(TENSOR, "boolean_mask", "return mask[b, h, i - offsets[b], j]",
              "return mask[b, h, i - offsets[b], j] ^ True"),),
        through=ALL, first=("mask", "mask_keys"),
    ),
    Mutant(
        "mask_of_first_head", "a boolean mask of each head is read as that of the first",
        "18.7.2", "options",
        (Edit(TENSOR, "boolean_mask", "mask[b, h, i", "mask[b, 0, i"),),
        through=ALL, first=("mask", "all_options"),
    ),
    Mutant(
        "mask_tile_full", "a tile counts as seen whole if every 8 x 8 square of it holds a visible pair",
        "18.5.2", "options",
        (Edit(TENSOR, "boolean_tiles", "full == (r1 - r0)", "live == (r1 - r0)"),),
        through=ALL, bug="partial_tile_full", first=("mask", "mask_keys"),
    ),
    Mutant(
        "mask_or_causal", "a boolean mask together with a window lets through what either does",
        "18.7.2", "options",
        (Edit(STANDARD, "standard_mask", "return seen & (boolean_mask", "return seen | (boolean_mask"),),
        through=ALL, first=("mask_keys", "all_options"),
    ),
    Mutant(
        "padding_key_counted", "one key past a length is attended to",
        "18.7.1", "options",
        (Edit(MASKS, "padding_mask", "(j < lengths_k[b])", "(j <= lengths_k[b])"),),
        through=ALL, bug="length_off_by_one", first=("lengths", "back_lengths"),
    ),
    Mutant(
        "length_of_first_batch", "every batch entry has as many keys as the first",
        "18.7.1", "options",
        (Edit(MASKS, "padding_mask", "(j < lengths_k[b])", "(j < lengths_k[0])"),),
        through=ALL, first=("lengths", "back_lengths"),
    ),
    Mutant(
        "aligned_by_padding", "the last row is aligned to the last key of the padded arrays, not to those in use",
        "18.7.1", "options",
        (
            Edit(
                FRAME, "__post_init__", "row_offset(self.lengths_q, self.lengths_k, self.align)",
                "row_offset(0 * self.lengths_q + self.Nq, 0 * self.lengths_k + self.Nk, self.align)",
            ),
        ),
        through=ALL, bug="shift_of_full_length", first=("lengths_causal", "packed"),
    ),
    Mutant(
        "packed_keys_not_ended", "packed sequences are padded for the kernel, which is not told where keys end",
        "18.7.1", "options",
        (Edit(VARLEN, "_pack", "lengths_q=lengths_q, lengths_k=lengths_k,", "lengths_q=lengths_q,"),),
        through=ALL, bug="lengths_ignored", first=("packed", "packed_options"),
    ),
    Mutant(
        "document_sees_earlier", "a query sees the keys of earlier documents, too",
        "18.7.1", "options",
        (Edit(MASKS, "document_mask", "i - offsets[b]] == ids_k[b, j]", "i - offsets[b]] >= ids_k[b, j]"),),
        through=ALL, first=("document", "document_shuffled"),
    ),
    Mutant(
        "dilated_from_start", "every step-th key is counted from the first key, not from the query",
        "18.8.3", "options",
        (Edit(MASKS, "dilated_mask", "(i - j) % step", "j % step"),),
        through=ALL, first=("dilated", "dilated_wide"),
    ),
    Mutant(
        "softcap_formula", "softcap is s tanh(s / cap)",
        "18.7.1", "options",
        (Edit(SCORES, "softcap_score", "cap * tanh(s / cap)", "s * tanh(s / cap)"),),
        through=ALL, first=("softcap", "softcap_causal"),
    ),
    Mutant(
        "softcap_after_mask", "the softcap comes after the mask, and makes a number of -inf",
        "18.7.1", "options",
        (
            Edit(
                RULE_OPS, "apply",
                "                x = float32(NEG_INF)\n"
                "                if bits >> uint32(a * CX + c) & uint32(1):\n"
                "                    x = float32(LOG2E) * float32(score_fn(s[a, c],",
                "                x = s[a, c] if bits >> uint32(a * CX + c) & uint32(1) else float32(NEG_INF)\n"
                "                if i - offset < Nq and col0 + tx + c * TX < Nk:\n"
                "                    x = float32(LOG2E) * float32(score_fn(x,",
            ),
        ),
        through=ALL, first=("softcap_causal", "all_options"),
    ),
    Mutant(
        "softcap_after_bias", "ALiBi comes before the softcap",
        "18.7.1", "options",
        (
            Edit(
                STANDARD, "standard_score",
                "    s = softcap_score(s, b, h, i, j, cap) if cap > 0 else s\n"
                "    s = alibi_score(s, b, h, i, j, slopes) if slopes.size else s\n",
                "    s = alibi_score(s, b, h, i, j, slopes) if slopes.size else s\n"
                "    s = softcap_score(s, b, h, i, j, cap) if cap > 0 else s\n",
            ),
        ),
        through=ALL, first=("packed_options", "all_options"),
    ),
    Mutant(
        "softcap_ignored", "the softcap is not applied",
        "18.7.1", "options",
        (Edit(STANDARD, "standard_score", "if cap > 0 else s", "if cap < 0 else s"),),
        through=ALL, first=("softcap", "softcap_causal"),
    ),
    Mutant(
        "alibi_sign", "ALiBi rewards distance",
        "18.7.1", "options",
        (Edit(SCORES, "alibi_score", "s - slopes", "s + slopes"),),
        through=ALL, first=("alibi", "alibi_batch"),
    ),
    Mutant(
        "alibi_signed_distance", "ALiBi takes i - j, which is negative for later keys",
        "18.7.1", "options",
        (Edit(SCORES, "alibi_score", "abs(i - j)", "(i - j)"),),
        through=ALL, bug="alibi_without_abs", first=("alibi", "packed_options"),
    ),
    Mutant(
        "alibi_slope_of_first_head", "ALiBi gives every head the slope of the first",
        "18.7.1", "options",
        (Edit(SCORES, "alibi_score", "slopes[b, h]", "slopes[b, 0]"),),
        through=ALL, bug="alibi_of_first_head", first=("alibi", "alibi_batch"),
    ),
    Mutant(
        "scores_unaligned", "score rules are asked about the row, not about its position on the keys' axis",
        "18.7.1", "options",
        (Edit(RULE_OPS, "apply", "i = row0 + ty + a * TY + offset", "i = row0 + ty + a * TY"),
         Edit(SCORES, "bias_score", "i - offsets[b], j", "i, j")),
        through=ALL, first=("alibi", "relative"),
    ),
    Mutant(
        "bias_of_first_head", "a bias of each head is read as that of the first",
        "18.7.2", "options",
        (Edit(SCORES, "bias_score", "bias[b, h, i", "bias[b, 0, i"),),
        through=ALL, first=("bias", "all_options"),
    ),
    Mutant(
        "option_head_mapping_modulo", "query head h uses key head h % Hk",
        "18.2.2", "heads",
        (Edit(GENERAL, "general", "h_k = h // (Hq // Hk)", "h_k = h % Hk"),),
        through=ALL, bug="heads_modulo", first=("gqa", "alibi"),
    ),
    Mutant(
        "log2e_applied_twice", "scores that come back from the rules are in log2 units already, and become so again",
        "18.4.2", "scale and lse",
        (Edit(GENERAL, "attention", "p.lse, p.scale, *bound", "p.lse, p.scale_log2, *bound"),),
        through=ALL, bug="exp_base_2", first=("square", "causal"),
    ),
)  # fmt: skip
