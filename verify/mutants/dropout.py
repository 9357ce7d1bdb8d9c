"""Bugs of dropout: which weights are dropped, what the others are multiplied by, and what each pass makes of it."""

from verify.mutants.mutant import Edit, Mutant

RULE_OPS, BACKWARD, PHILOX = "numba_cuda/parts/rule_ops.py", "numba_cuda/backward.py", "refimpl/philox.py"
STEP3 = "refimpl/step3_flash_v2.py"
ALL = "general"

ENTRIES = (
    Mutant(
        "dropout_not_scaled", "kept weights are not divided by 1 - p",
        "18.7.1", "dropout",
        (Edit(RULE_OPS, "drop", "P_s[r, k] * drop_aux[0] if kept", "P_s[r, k] if kept"),),
        through=ALL, first=("dropout", "back_dropout"),
    ),
    Mutant(
        "dropout_keeps_p", "weights are kept with probability p",
        "18.7.1", "dropout",
        (Edit(PHILOX, "kept", ">= threshold", "< threshold"),),
        through=ALL, bug="dropout_inverted", first=("dropout", "back_dropout"),
    ),
    Mutant(
        "dropout_same_for_heads", "all heads of a batch entry drop the same weights",
        "18.7.1", "dropout",
        (Edit(PHILOX, "draw", "philox(col >> 2, row, b, h, key0, key1)", "philox(col >> 2, row, b, 0, key0, key1)"),),
        through=ALL, first=("dropout", "back_dropout"),
    ),
    Mutant(
        "dropout_offset_ignored", "calls of one seed drop the same weights: the offset does not enter the key",
        "18.7.1", "dropout",
        (Edit(PHILOX, "arguments", "int(self.seed) + 0x9E3779B97F4A7C15 * int(self.offset)", "int(self.seed)"),),
        through=ALL, first=("dropout", "back_dropout"),
    ),
    Mutant(
        "dropout_local_column", "weights are drawn by their column within the tile",
        "18.7.1", "dropout",
        (Edit(RULE_OPS, "drop", "row0 + r, col0 + k, *drop_aux", "row0 + r, k, *drop_aux"),),
        through=ALL, first=("dropout", "back_dropout"),
    ),
    Mutant(
        "dropout_in_sum", "l adds up the weights that dropout leaves",
        "18.7.1", "dropout",
        (
            Edit(
                STEP3, "one_head", "l_i = alpha * l_i + rowsum(P_ij)",
                "l_i = alpha * l_i + rowsum(P_ij * head.dropout(rows, cols))",
            ),
        ),
        through="refimpl.step3_flash_v2", bug="dropout_in_l", first=("dropout", "dropout_all"),
    ),
    Mutant(
        "dropout_differs_backward", "the backward pass draws by (key, query), the forward by (query, key)",
        "18.7.1", "dropout",
        (
            Edit(
                BACKWARD, "backward_dkv", "rule.drop_products(s, P_s, b, h, i * Br, j * Bc, drop_aux)",
                "rule.drop_products(s, P_s, b, h, j * Bc, i * Br, drop_aux)",
            ),
            Edit(
                BACKWARD, "backward_dkv", "rule.drop(P_s, b, h, i * Br, j * Bc, drop_aux, float32(0.0))",
                "rule.drop(P_s, b, h, j * Bc, i * Br, drop_aux, float32(0.0))",
            ),
        ),
        through=ALL, bug="dropout_mask_differs", first=("back_dropout", "back_dropout_gqa"),
    ),
    Mutant(
        "dropout_missing_in_dV", "dV sums with the weights before dropout",
        "18.7.1", "dropout",
        (Edit(BACKWARD, "backward_dkv", "rule.drop(P_s, b, h, i * Br, j * Bc, drop_aux, float32(0.0))", "pass"),),
        through=ALL, first=("back_dropout", "back_dropout_gqa"),
    ),
    Mutant(
        "dropout_missing_in_dS", "the gradient of a weight passes through dropout unchanged",
        "18.7.1", "dropout",
        (Edit(BACKWARD, "backward_dq", "rule.drop_products(s, P_s, b, h, i * Br, j * Bc, drop_aux)", "pass"),),
        through=ALL, bug="dropout_missing_in_dP", first=("back_dropout", "back_dropout_gqa"),
    ),
    Mutant(
        "softmax_gradient_of_dropped", "the softmax's derivative takes the weights after dropout",
        "18.7.1", "dropout",
        (
            Edit(
                "refimpl/backward.py", "recompute",
                "dS_ij = np.where(seen, P_ij * (dP_ij - D_i), 0)",
                "dS_ij = np.where(seen, Z_ij * P_ij * (dP_ij - D_i), 0)",
            ),
        ),
        through="refimpl.step3_flash_v2", first=("back_dropout", "back_dropout_gqa"),
    ),
)  # fmt: skip
