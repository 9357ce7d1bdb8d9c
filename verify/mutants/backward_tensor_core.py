"""Bugs of the backward pass on tensor cores: transposed lanes and masks, dS on its way through shared memory, sums."""

from refimpl.tiling import Tile
from verify.mutants.mutant import Edit, Mutant

OPS, ROWS, STEP = (
    f"numba_cuda/{stem}.py"
    for stem in ("parts/tensor_gradient_ops", "parts/backward_tensor_rows", "backward_tensor_core")
)
KEYS = "backward_keys"  # the kernel with keys as rows
WHOLE = "cuda.syncthreads()  # Q_i, dO_i, lse_i, D_i are there; those before and their dS are done with"
WARPS = Tile(16, 32)  # of keys, so that a block has two warps
RAGGED, CAUSAL = ("back_gqa", "back_square"), ("back_causal", "back_empty_rows")


def _backward(name, about, path, function, old, new, first=RAGGED, **more):
    edits = (Edit(path, function, old, new),)
    return Mutant(name, about, "18.4.4", "tensor cores", edits, through="step5_tensor_core", dtypes=("fp16", "bf16"),
                  first=first, **more)


ENTRIES = (
    _backward(
        "dS_read_by_rows", "dS comes back from shared memory by rows of keys, though dQ sums over them",
        OPS, "add_queries", "place_w((t & 7) + ((t & 16) >> 1), 2 * band + ((t >> 3) & 1))",
        "place_w(t & 15, 2 * band + ((t & 31) >> 4))",
    ),
    _backward(
        "dS_swizzle_on_one_side", "dS is written in plain order and read as if it were swizzled",
        OPS, "share_gradient", "place_w((t >> 5) * (16 * M) + (lane >> 2), 0)",
        "((t >> 5) * (16 * M) + (lane >> 2)) * C",
    ),
    _backward(
        "dS_not_waited_for", "no barrier between writing dS and reading what other warps wrote of it",
        STEP, KEYS, "                cuda.syncthreads()  # dS is whole\n", "", tile=WARPS, by_order=True,
    ),
    _backward(
        "dV_over_K", "no barrier before dV takes the place of keys that other warps still read",
        STEP, KEYS, "            cuda.syncthreads()  # K_j has been read: dV_j may take its place\n", "", tile=WARPS,
    ),
    _backward(
        "queries_not_waited_for", "Q and dO are read before their asynchronous copies have been waited for",
        STEP, KEYS, f"            cp_async_wait()\n            {WHOLE}", f"            {WHOLE}",
        bug="copies_not_waited_for",
    ),
    _backward(
        "first_queries_at_every_tile", "the first of the two buffers of Q, dO, lse and D is read at every tile",
        STEP, KEYS, "stage = int32(n & 1)", "stage = int32(0)",
    ),
    _backward(
        "lse_of_the_tile_before", "the next tile's lse and D are written into the buffer that is being read",
        STEP, KEYS, "grad.share_stats(kept, stats_s, int32(1 - stage))", "grad.share_stats(kept, stats_s, stage)",
    ),
    _backward(
        "lse_of_the_first_column", "both of a lane's neighbouring columns take the lse of the first",
        OPS, "weigh", "ex2(fma(s[at + 1], scale, -lse1))", "ex2(fma(s[at + 1], scale, -lse0))",
    ),
    _backward(
        "dP_begins_at_zero", "the product dP begins at 0 where it was to begin at -D",
        OPS, "begin", "s[at], s[at + 1], s[at + 2], s[at + 3] = -D0, -D1, -D0, -D1",
        "s[at], s[at + 1], s[at + 2], s[at + 3] = 0 * D0, 0 * D1, 0 * D0, 0 * D1", bug="D_missing",
    ),
    _backward(
        "tensor_dK_not_scaled", "dK is not multiplied by the scale",
        STEP, KEYS, "grad.stage(dK_acc, scale, tiles)", "grad.stage(dK_acc, float32(1.0), tiles)",
        bug="scale_missing_in_dK",
    ),
    _backward(
        "rows_past_the_end_weigh", "rows past the last query, in whose place that one is read again, have weights",
        OPS, "load_stats", "float32(0.0) if what else float32(INF)", "float32(0.0)",
    ),
    _backward(
        "keys_past_the_end_weigh", "keys past the last, in whose place that one is read again, have weights in dQ",
        OPS, "hide", "if k >= Nk or int32(8 * n) < first", "if int32(8 * n) < first",
    ),
    _backward(
        "transposed_diagonal", "keys as rows hide the query on the diagonal too",
        OPS, "hide", "int32(8 * n) < first", "int32(8 * n) <= first", CAUSAL, bug="diagonal_one_short",
    ),
    _backward(
        "diagonal_tile_skipped", "the loop over queries begins after the tile that the diagonal enters",
        STEP, KEYS, "int32(max(col0 - diag, 0) // Br)", "int32((max(col0 - diag, 0) + Br - 1) // Br)", CAUSAL,
        tile=Tile(32, 16),
    ),
    _backward(
        "sums_of_the_next_lane", "dQ is added up where another lane's sums lie",
        OPS, "add_queries", "(32 * PART) + lane * LANE)", "(32 * PART) + (lane ^ 1) * LANE)",
    ),
    _backward(
        "tensor_dQ_not_scaled", "the sums of dQ are rounded without the scale",
        ROWS, "backward_round", "gather(sums[b, h], i, at, scale, x)",
        "gather(sums[b, h], i, at, float32(1.0), x)", bug="scale_missing_in_dQ",
    ),
    _backward(
        "last_key_hidden_in_dQ", "the kernel for dQ alone hides the last key that a query sees",
        OPS, "hide_rows", "int32(8 * n) > last", "int32(8 * n) >= last", bug="diagonal_one_short",
    ),
)  # fmt: skip
