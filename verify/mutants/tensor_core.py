"""Bugs of tensor-core kernels: what a lane holds of a tile, how tiles lie in shared memory, copies still under way."""

from refimpl.tiling import Tile
from verify.mutants.mutant import Edit, Mutant

OPS, STEP5 = "numba_cuda/parts/tensor_ops.py", "numba_cuda/step5_tensor_core.py"
STEP, AREA = "step5_tensor_core", "tensor cores"
HALF = ("fp16", "bf16")
WHOLE = "cuda.syncthreads()  # K_j and V_j are whole, and K_j-1 and V_j-1 have been read"

ENTRIES = (
    Mutant(
        "V_not_transposed", "V's fragments are read by rows, as K's are",
        "18.4.5", AREA,
        (Edit(OPS, "accumulate", "ldmatrix_x4_trans(b, 0,", "ldmatrix_x4(b, 0,"),),
        through=STEP, dtypes=HALF, first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "swizzle_not_on_both_sides", "tiles are written in plain order and read as if they were swizzled",
        "18.4.5", AREA,
        (Edit(OPS, "load", "first = address_of(tile, at + place(r, chunk))",
              "first = address_of(tile, at + r * D + chunk * 8)"),),
        through=STEP, dtypes=HALF, first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "maximum_of_half_a_quad", "a row's maximum is exchanged between two of its four lanes",
        "18.4.5", AREA,
        (Edit(OPS, "softmax", "            top = fmax(top, shfl_xor(top, 2))\n", ""),),
        through=STEP, dtypes=HALF, first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "sum_of_half_a_quad", "l adds up the parts of two of a row's four lanes",
        "18.4.5", AREA,
        (Edit(OPS, "whole_sum", "return part + shfl_xor(part, 2)", "return part"),),
        through=STEP, dtypes=HALF, first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "P_rows_exchanged", "the weights of rows r and r + 8 change places in the fragments of P",
        "18.4.5", AREA,
        (Edit(OPS, "softmax", "p[2 * (a * NB + n) + r % 2] =", "p[2 * (a * NB + n) + 1 - r % 2] ="),),
        through=STEP, dtypes=HALF, first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "mask_of_first_lane", "every lane of a quad masks the columns of the first",
        "18.5.2", AREA,
        (Edit(OPS, "mask", "int32(row0 - col0 + diag) - 2 * (lane & 3)", "int32(row0 - col0 + diag)"),),
        through=STEP, dtypes=HALF, bug="diagonal_one_far", first=("causal_113x203", "mqa"),
    ),
    Mutant(
        "copies_not_waited_for", "a tile is read before its asynchronous copy has been waited for",
        "18.4.5", AREA,
        (Edit(STEP5, STEP, f"            cp_async_wait()\n            {WHOLE}", f"            {WHOLE}"),),
        through=STEP, dtypes=HALF, first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "copy_overwrites_early", "no barrier before the copy that takes the place of a tile still being read",
        "18.4.5", AREA,
        (Edit(STEP5, STEP, WHOLE, "pass"),),
        through=STEP, dtypes=HALF, tile=Tile(64, 16), first=("square", "causal"),
    ),
    Mutant(
        "one_stage_for_two", "the first of the two buffers is read at every tile",
        "18.4.5", AREA,
        (Edit(STEP5, STEP, "int32((j & 1) * STAGE)", "int32(0)"),),
        through=STEP, dtypes=HALF, bug="stale_tile_of_KV", first=("1024x1023", "113x203"),
    ),
    Mutant(
        "bf16_taken_for_fp16", "bf16 operands are multiplied as fp16",
        "18.4.5", AREA,
        (Edit(OPS, "tensor_ops", "else (mma_bf16, pack_bf16)", "else (mma_f16, pack_bf16)"),),
        through=STEP, dtypes=("bf16",), first=("tile", "tile_plus_1"),
    ),
    Mutant(
        "tensor_head_mapping_modulo", "query head h uses key head h % Hk",
        "18.2.2", AREA,
        (Edit(STEP5, STEP, "h_k = int32(uint32(h) // uint32(uint32(Hq) // uint32(Hk)))", "h_k = int32(h % Hk)"),),
        through=STEP, dtypes=HALF, bug="heads_modulo", first=("gqa", "all_negative_gqa"),
    ),
)  # fmt: skip
