"""Bugs of the Hopper kernel: layouts of wgmma and TMA, phases of its barriers, products read while they still run."""

from verify.mutants.mutant import Edit, Mutant

OPS, STEP6 = "numba_cuda/parts/hopper_ops.py", "numba_cuda/step6_flash_v3.py"
STEP, AREA = "step6_flash_v3", "tensor cores"
HALF = ("fp16", "bf16")
RAGGED = ("113x203", "1024x1023")


def _hopper(name, about, path, function, old, new, first=RAGGED, **more):
    edits = (Edit(path, function, old, new),)
    return Mutant(name, about, "18.6", AREA, edits, through=STEP, dtypes=HALF, first=first, **more)


ENTRIES = (
    _hopper(
        "K_descriptor_steps_too_long", "the steps along K's columns in a descriptor are twice as long as 16 of them",
        STEP6, "start_scores", "K_k = uint32(K_at + uint32((k // 4) * (Bc * 128 >> 4) + (k % 4) * 2))",
        "K_k = uint32(K_at + uint32((k // 4) * (Bc * 128 >> 4) + (k % 4) * 4))",
    ),
    _hopper(
        "seam_keeps_old_O", "O_acc is not begun anew where the chain enters another query tile",
        STEP6, STEP, "int32(0) if fresh else int32(1), fresh", "int32(1), fresh", first=("square", "causal"),
    ),
    _hopper(
        "box_tail_counts", "keys that the copy engine filled with zeros, past the last, are seen",
        OPS, "mask_above", "int32(min(row + 8 * r + high, Nk - 1) - first)", "int32((row + 8 * r + high) - first)",
    ),
    _hopper(
        "P_pairs_swapped", "the two weights of a register change places on their way into the second product",
        OPS, "pack_weights", "packed(S[2 * n], S[2 * n + 1])", "packed(S[2 * n + 1], S[2 * n])",
    ),
    _hopper(
        "wgmma_columns_of_another_lane", "a lane masks the columns of its neighbour",
        OPS, "mask_above", "int32(j * Bc + 2 * (lane & 3))", "int32(j * Bc + (lane & 3))",
        first=("causal_113x203", "mqa"),
    ),
    _hopper(
        "hopper_maximum_of_half_a_quad", "a row's maximum is exchanged between two of its four lanes",
        OPS, "softmax", "        new0, new1 = fmax(new0, across0), fmax(new1, across1)\n        # Guard",
        "        # Guard",
        bug="maximum_of_half_a_quad",
    ),
    _hopper(
        "O_words_traded_wrongly", "lanes k and k + 2 keep the wrong pair when they make 16 bytes of O",
        OPS, "write", "c0 = trade(a0 if upper else b0, int32(2))", "c0 = trade(b0 if upper else a0, int32(2))",
    ),
    _hopper(
        "phase_bit_not_flipped", "a ring's phase stays as it was when its stages have been gone through",
        STEP6, "step", "uint32(phase ^ 1)", "phase", by_order=True,
    ),
    _hopper(
        "V_full_not_waited_for", "V is multiplied before its copy has arrived",
        STEP6, STEP, "                ptx.mbarrier_wait(V_bar, V_phase)\n                ptx.wgmma_fence()",
        "                ptx.wgmma_fence()", by_order=True,
    ),
    _hopper(
        "S_read_in_flight", "scores are read while the product that makes them still runs",
        STEP6, STEP, "                wait_S(S)\n", "",
    ),
    _hopper(
        "no_fence_before_wgmma", "no wgmma.fence between writing O_acc's registers and the product that adds to them",
        STEP6, STEP, "ptx.mbarrier_wait(V_bar, V_phase)\n                ptx.wgmma_fence()\n",
        "ptx.mbarrier_wait(V_bar, V_phase)\n", by_order=True,
    ),
)  # fmt: skip
