"""Bugs of rules on tensor cores, forward and backward: what is asked of whom, what is hidden or dropped and when."""

from refimpl.tiling import Tile
from verify.mutants.mutant import Edit, Mutant

OPS, FORWARD = "numba_cuda/parts/tensor_rule_ops.py", "numba_cuda/tensor_core_rules.py"
GRADIENT_OPS, BACKWARD = "numba_cuda/parts/tensor_gradient_rule_ops.py", "numba_cuda/backward_tensor_rules_kernels.py"
STEP, KEYS = "step5_with_rules", "backward_keys_with_rules"
WARPS = Tile(16, 32)  # of keys, so that a block that keeps them has two warps


def _mutant(name, about, section, path, function, old, new, first, **more):
    return Mutant(name, about, section, "tensor cores", (Edit(path, function, old, new),), through="step5_tensor_core",
                  dtypes=("fp16", "bf16"), first=first, **more)


ENTRIES = (
    _mutant(
        "tensor_mask_unaligned", "the mask is asked about the row, not about its position on the keys' axis", "18.5.2",
        OPS, "visible", "int32(row + offset), j, *mask", "row, j, *mask", ("window_left", "window_both"),
        bug="aligned_top_left",
    ),
    _mutant(
        "tensor_partial_tile_full", "tiles that are seen in part are taken for whole", "18.5.2",
        OPS, "share_kinds", "ballot(kind == 2)", "ballot(kind > 0)", ("window_both", "document"),
        bug="partial_tile_full",
    ),
    _mutant(
        "tensor_live_tile_stepped_over", "a step over a tile that is not live steps over the next one too", "18.5.2",
        OPS, "seek", "j = int32(j + 1)", "j = int32(j + 2)", ("dilated_wide", "window_left_short"),
        bug="live_tile_skipped",
    ),
    _mutant(
        "tensor_natural_score_base_2", "changed scores, which are natural, are taken for scores in log2 units",
        "18.4.4", FORWARD, STEP, "factor = float32(LOG2E)", "factor = float32(1.0)", ("softcap", "alibi"),
        bug="exp_base_2",
    ),
    _mutant(
        "tensor_padding_is_read", "keys past a batch entry's length are read, whatever they hold", "18.7.1",
        FORWARD, STEP, "offset + right, ends[b]))", "offset + right, Nk))", ("lengths", "all_options"),
    ),
    _mutant(
        "tensor_dropout_not_scaled", "the weights that are kept are not divided by 1 - p", "18.7.1",
        FORWARD, STEP, "alpha[r] = drop_aux[0]", "alpha[r] = float32(1.0)", ("dropout", "back_dropout"),
        bug="dropout_not_scaled",
    ),
    _mutant(
        "tensor_slope_missing", "the gradient of a score does not pass through its change", "18.4.4",
        GRADIENT_OPS, "weigh_one", "weight * slope", "weight", ("back_window_softcap", "back_softcap_alibi"),
        bug="softcap_slope_missing",
    ),
    _mutant(
        "tensor_score_unaligned", "the change of a score is asked about the row, not about its position", "18.7.1",
        GRADIENT_OPS, "weigh_one", "int32(min(row, Nq - 1) + offset)", "int32(min(row, Nq - 1))",
        ("back_alibi", "back_softcap_alibi"), bug="scores_unaligned",
    ),
    _mutant(
        "tensor_hidden_weights_in_dV", "weights of hidden keys, and of dropped ones, go into dV", "18.4.4",
        GRADIENT_OPS, "hide_rounded", "p[x] &= both", "p[x] |= uint32(0) & both", ("back_mask", "back_dropout"),
    ),
    _mutant(
        "tensor_dropout_draws_exchanged", "lanes that share a run of the generator do not exchange what they drew",
        "18.7.1", GRADIENT_OPS, "kept", "WIDTH * (rank ^ x)", "WIDTH * rank", ("back_dropout", "back_dropout_gqa"),
        bug="dropout_mask_differs",
    ),
    _mutant(
        "tensor_dropout_missing_in_dP", "dP is not multiplied by what dropout multiplied the weight by", "18.7.1",
        GRADIENT_OPS, "drop_products", "factor * dp[at] if (word >> uint32(at)) & uint32(1) else float32(0.0)",
        "dp[at]", ("back_dropout", "back_dropout_gqa"), bug="dropout_missing_in_dP",
    ),
    _mutant(
        "tensor_D_missing_under_dropout", "under dropout D is not subtracted from dP", "18.7.1",
        GRADIENT_OPS, "drop_products", "dP - of_query(stats, stage, 1, at)", "dP", ("back_dropout", "back_dropout_gqa"),
        bug="D_missing",
    ),
    _mutant(
        "dS_of_the_pair_before", "a warp with nothing to do leaves what stands in its part of dS", "18.4.4",
        BACKWARD, KEYS, "                rule.none(p)\n", "", ("back_window_softcap", "back_mask"), tile=WARPS,
    ),
)  # fmt: skip
