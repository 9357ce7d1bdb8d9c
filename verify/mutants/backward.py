"""Bugs of the backward pass: D, the scale, the loops either way, and options that the forward pass knew."""

from verify.mutants.mutant import Edit, Mutant

BACKWARD, GRADIENT_OPS, RULE_OPS = (
    f"numba_cuda/{stem}.py" for stem in ("backward", "parts/gradient_ops", "parts/rule_ops")
)
STANDARD, REFERENCE = "refimpl/standard.py", "refimpl/backward.py"
ALL, NUMPY, NUMPY_V1 = "general", "refimpl.step3_flash_v2", "refimpl.step2_flash_v1"
SEEN = "bits = visible(b, h, row0, col0, Nq, Nk, offset, whole, mask_aux)"

ENTRIES = (
    Mutant(
        "l_as_constant", "l is differentiated as a constant: dS is P dP, without D",
        "18.4.4", "backward",
        (Edit(RULE_OPS, "share_gradient", "p * (dP[a, c] - D[row]) * slope[a, c]", "p * dP[a, c] * slope[a, c]"),),
        through=ALL, bug="D_missing", first=("back_causal", "back_square"),
    ),
    Mutant(
        "D_of_first_columns", "D sums over one column a thread",
        "18.4.4", "backward",
        (
            Edit(
                GRADIENT_OPS, "share_row_products", "for c in range(tx, O.shape[1], TX):",
                "for c in range(tx, min(TX, O.shape[1]), TX):",
            ),
        ),
        through=ALL, first=("back_causal", "back_square"),
    ),
    Mutant(
        "D_of_one_thread", "D is one thread's share of a row's sum",
        "18.4.4", "backward",
        (Edit(GRADIENT_OPS, "write_row_sums", "for k in range(TX):", "for k in range(1):"),),
        through=ALL, first=("back_causal", "back_square"),
    ),
    Mutant(
        "D_per_tile", "D sums P dP over the tile instead of the row",
        "18.4.4", "backward",
        (
            Edit(
                REFERENCE, "recompute", "P_ij * (dP_ij - D_i)",
                "P_ij * (dP_ij - rowsum(P_ij * dP_ij))",
            ),
        ),
        through=NUMPY, first=("back_causal", "back_square"),
    ),
    Mutant(
        "dK_not_scaled", "dK is not multiplied by the scale",
        "18.4.4", "backward",
        (
            Edit(
                BACKWARD, "backward_dkv", "grad.write_columns(dK_acc, scale,",
                "grad.write_columns(dK_acc, float32(1.0),",
            ),
        ),
        through=ALL, bug="scale_missing_in_dK", first=("back_causal", "back_square"),
    ),
    Mutant(
        "dQ_scaled_twice", "dQ is multiplied by the scale twice",
        "18.4.4", "backward",
        (Edit(BACKWARD, "backward_dq", "grad.write_rows(dQ_acc, scale,", "grad.write_rows(dQ_acc, scale * scale,"),),
        through=ALL, bug="scale_squared_in_dQ", first=("back_causal", "back_square"),
    ),
    Mutant(
        "dV_scaled", "dV is multiplied by the scale",
        "18.4.4", "backward",
        (
            Edit(
                BACKWARD, "backward_dkv", "grad.write_columns(dV_acc, float32(1.0),",
                "grad.write_columns(dV_acc, scale,",
            ),
        ),
        through=ALL, first=("back_causal", "back_square"),
    ),
    Mutant(
        "lse_taken_for_base_2", "the backward pass subtracts lse from scores in log2 units",
        "18.4.4", "backward",
        (
            Edit(
                RULE_OPS, "share_weights", "exp2(float32(LOG2E) * (x - lse[row]))",
                "exp2(float32(LOG2E) * x - lse[row])",
            ),
        ),
        through=ALL, first=("back_causal", "back_square"),
    ),
    Mutant(
        "mask_forgotten_backward", "the backward pass does not mask the tiles it visits",
        "18.4.4", "backward",
        (Edit(RULE_OPS, "share_weights", SEEN, SEEN.replace("whole", "True")),),
        through=ALL, first=("back_causal", "back_mask"),
    ),
    Mutant(
        "gqa_one_head_backward", "dK and dV sum over the first query head of a group alone",
        "18.2.2", "backward",
        (
            Edit(
                BACKWARD, "backward_dkv", "for h in range(h_k * group, (h_k + 1) * group):",
                "for h in range(h_k * group, h_k * group + 1):",
            ),
        ),
        through=ALL, bug="group_not_summed", first=("back_gqa", "back_alibi"),
    ),
    Mutant(
        "gqa_modulo_backward", "dK and dV sum over query heads h_k, h_k + Hk, ...",
        "18.2.2", "backward",
        (
            Edit(
                BACKWARD, "backward_dkv", "for h in range(h_k * group, (h_k + 1) * group):",
                "for h in range(h_k, Hq, Hk):",
            ),
        ),
        through=ALL, bug="heads_modulo_in_sums", first=("back_gqa", "back_alibi"),
    ),
    Mutant(
        "dQ_last_tile_dropped", "dQ sums over Nk // Bc key tiles instead of rounding up",
        "18.4.4", "backward",
        (Edit(BACKWARD, "backward_dq", "(Nk + Bc - 1) // Bc", "Nk // Bc"),),
        through=ALL, bug="ragged_keys_missing_in_dQ", first=("back_causal", "back_square"),
    ),
    Mutant(
        "dKV_last_rows_dropped", "dK and dV sum over Nq // Br query tiles instead of rounding up",
        "18.4.4", "backward",
        (Edit(BACKWARD, "backward_dkv", "(Nq + Br - 1) // Br", "Nq // Br"),),
        through=ALL, bug="ragged_rows_missing_in_dK_dV", first=("back_causal", "back_square"),
    ),
    Mutant(
        "dS_not_transposed", "dK and dV take P and dS with rows and columns changed places",
        "18.4.4", "backward",
        (
            Edit(
                GRADIENT_OPS, "accumulate_columns", "acc[a, v] += W_s[r, ty + a * TY] * x[v]",
                "acc[a, v] += W_s[ty + a * TY, r] * x[v]",
            ),
        ),
        through=ALL, first=("back_causal", "back_square"),
    ),
    Mutant(
        "dS_overwritten_early",
        "no barrier at the end of the backward loop: the next dS is written while this one is read",
        "18.4.1", "backward",
        (
            Edit(
                BACKWARD, "backward_dkv",
                "cuda.syncthreads()  # Q_i, dO_i, P_ij and dS_ij have been read: the next may take their place", "pass",
            ),
        ),
        through=ALL, first=("back_causal", "back_empty_rows"),
    ),
    Mutant(
        "dS_read_early", "no barrier between dS and its product with K",
        "18.4.1", "backward",
        (Edit(BACKWARD, "backward_dq", "cuda.syncthreads()  # P_ij and dS_ij are whole", "pass"),),
        through=ALL, first=("back_causal", "back_square"),
    ),
    Mutant(
        "stale_dO", "dO_i is the tile before",
        "18.4.4", "backward",
        (
            Edit(
                BACKWARD, "backward_dkv", "tile.load(dO_s, dO[b, h], i * Br, 0)",
                "tile.load(dO_s, dO[b, h], max(i - 1, 0) * Br, 0)",
            ),
        ),
        through=ALL, first=("back_causal", "back_empty_rows"),
    ),
    Mutant(
        "softcap_slope_missing", "the softcap's derivative is left out",
        "18.7.1", "backward",
        (Edit(STANDARD, "standard_slope", "if cap > 0 else real(1)", "if cap < 0 else real(1)"),),
        through=ALL, first=("back_window_softcap", "back_softcap_alibi"),
    ),
    Mutant(
        "softcap_slope_wrong", "the softcap's derivative is 1 - tanh instead of 1 - tanh^2",
        "18.7.1", "backward",
        (
            Edit(
                "refimpl/scores.py", "softcap_slope", "real(1) - tanh(s / cap) * tanh(s / cap)",
                "real(1) - tanh(s / cap)",
            ),
        ),
        through=ALL, first=("back_window_softcap", "back_softcap_alibi"),
    ),
    Mutant(
        "bias_gradient_without_D", "the gradient of a bias is P dP",
        "18.4.4", "backward",
        (
            Edit(
                RULE_OPS, "write_bias_gradient", "else p * (dP[a, c] - D[row])", "else p * dP[a, c]",
            ),
        ),
        through=ALL, bug="D_missing", first=("back_bias", "back_bias_keys"),
    ),
    Mutant(
        "numpy_l_as_constant", "l is differentiated as a constant",
        "18.4.4", "backward",
        (Edit(REFERENCE, "recompute", "P_ij * (dP_ij - D_i)", "P_ij * dP_ij"),),
        through=NUMPY, bug="D_missing", first=("back_causal", "back_square"),
    ),
    Mutant(
        "numpy_dK_not_scaled", "dK is not multiplied by the scale",
        "18.4.4", "backward",
        (Edit(REFERENCE, "two_passes", "scale * dK_j", "dK_j"),),
        through=NUMPY, bug="scale_missing_in_dK", first=("back_causal", "back_square"),
    ),
    Mutant(
        "dQ_not_carried", "dQ starts anew at every visit of the v1 order",
        "18.4.4", "backward",
        (
            Edit(
                REFERENCE, "keys_outer",
                'np.zeros_like(Q_i) if cols.start == 0 else head.load("dQ_acc", dQ_sum[g, rows])', "np.zeros_like(Q_i)",
            ),
        ),
        through=NUMPY_V1, first=("back_causal", "back_square"),
    ),
)  # fmt: skip
