"""Bugs of tiling: what is loaded when, what waits for what, and what becomes of the ragged last tile."""

from refimpl.tiling import Tile
from verify.mutants.mutant import Edit, Mutant

TILE_OPS, STEP0, STEP1, STEP2, STEP3, STEP4 = (
    f"numba_cuda/{stem}.py"
    for stem in ("parts/tile_ops", "step0_standard", "step1_fused", "step2_flash_v1", "step3_flash_v2", "step4_causal")
)
V2, CAUSAL = "step3_flash_v2", "step4_causal"
TILES = "Tr, Tc = (Nq + Br - 1) // Br, (Nk + Bc - 1) // Bc"


def no_barrier(path, function, reason):
    """A barrier taken out, found by the reason that stands beside it."""
    return (Edit(path, function, f"cuda.syncthreads()  # {reason}", "pass"),)


ENTRIES = (
    Mutant(
        "stale_K_no_barrier", "no barrier after the load of K_j: threads read the tile that was there before",
        "18.4.1", "tiles",
        no_barrier(STEP3, V2, "Q_i and K_j are whole before anyone reads them"),
        through=V2, bug="stale_tile_of_K", first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "stale_V_no_barrier", "no barrier after the load of V_j: threads read what K_j left",
        "18.4.1", "tiles",
        no_barrier(STEP3, V2, "P_ij, its partial sums and V_j are whole"),
        through=V2, bug="stale_tile_of_V", first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "V_overwritten_early", "no barrier at the end of the loop: the next K_j takes V_j's place while it is read",
        "18.4.1", "tiles",
        no_barrier(STEP3, V2, "V_j has been read: the next tile may take its place"),
        through=V2, first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "max_read_early", "no barrier between the threads' maxima and the row's",
        "18.4.1", "tiles",
        no_barrier(STEP4, CAUSAL, "the partial maxima are there, and K_j has been read"),
        through=CAUSAL, first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "state_read_early", "no barrier between a query tile's m and l going to HBM and their coming back",
        "18.4.1", "tiles",
        no_barrier(STEP2, "step2_flash_v1",
        "P_ij, K_j, V_j have been read, and m, l stored by one thread are seen by all"),
        through="step2_flash_v1", first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "partial_max_read_early", "no barrier between the partial maxima of a row and their maximum",
        "18.3.3", "tiles",
        no_barrier(STEP0, "step0_softmax", "the partial maxima of all threads are there"),
        through="step0_standard", first=("tile", "tile_plus_1"),
    ),
    Mutant(
        "stale_K", "K_j is the tile before",
        "18.4.1", "tiles",
        (
            Edit(
                STEP3, V2, "tile.load(KV_s, K[b, h_k], j * Bc, 0)",
                "tile.load(KV_s, K[b, h_k], max(j - 1, 0) * Bc, 0)",
            ),
        ),
        through=V2, bug="stale_tile_of_K", first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "stale_V", "V_j is the tile before",
        "18.4.1", "tiles",
        (
            Edit(
                STEP3, V2, "tile.load(KV_s, V[b, h_k], j * Bc, 0)",
                "tile.load(KV_s, V[b, h_k], max(j - 1, 0) * Bc, 0)",
            ),
        ),
        through=V2, bug="stale_tile_of_V", first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "last_ragged_tile_dropped", "Nk // Bc key tiles instead of rounding up",
        "18.4.1", "tiles",
        (Edit(STEP3, V2, TILES, TILES.replace("(Nk + Bc - 1) // Bc", "Nk // Bc")),),
        through=V2, first=("1024x1023", "tile_plus_1"),
    ),
    Mutant(
        "last_rows_unwritten", "the guard of the last query tile leaves out its last row",
        "18.4.3", "tiles",
        (Edit(TILE_OPS, "write", "if row < O.shape[0]:", "if row < O.shape[0] - 1:"),),
        through=V2, first=("square", "tile_plus_1"),
    ),
    Mutant(
        "ragged_tile_unmasked", "keys past the end count with a score of 0",
        "18.4.1", "tiles",
        (Edit(TILE_OPS, "mask", "last = min(row0 + ty + a * TY + diag, Nk - 1)", "last = row0 + ty + a * TY + diag"),),
        through=V2, bug="ragged_tile_not_masked", first=("1024x1023", "tile_plus_1"),
    ),
    Mutant(
        "last_key_masked", "the last key is masked as if it were past the end",
        "18.4.1", "tiles",
        (Edit(TILE_OPS, "mask", "+ diag, Nk - 1)", "+ diag, Nk - 2)"),),
        through=V2, bug="last_key_dropped", first=("late_max", "tile"),
    ),
    Mutant(
        "head_dim_cut", "the scores take in the first 8 channels alone",
        "18.4.3", "tiles",
        (Edit(TILE_OPS, "scores", "for c in range(D):", "for c in range(8):"),),
        through=V2, bug="head_dim_tail_dropped", first=("odd_head_dim", "head_dim_256"),
    ),
    Mutant(
        "dv_cut", "as many columns of O are stored as fit d, though V is wider",
        "18.4.3", "tiles",
        (Edit(TILE_OPS, "accumulate", "O_acc[a, v] += p * value[v]",
              "O_acc[a, v] += p * value[v] if tx + v * TX < 8 else float32(0.0)"),),
        through=V2, bug="O_columns_dropped", first=("dv_not_d", "odd_head_dim"),
    ),
    Mutant(
        "ragged_query_tile_lost", "a query tile that is not full writes into the tile before",
        "18.4.1", "tiles",
        (Edit(STEP3, V2, "tile.write(O_acc, l, m, O[b, h], lse[b, h], i * Br)",
              "tile.write(O_acc, l, m, O[b, h], lse[b, h], i * Br if (i + 1) * Br <= Nq else max(i - 1, 0) * Br)"),),
        through=V2, first=("tile_plus_1", "113x203"),
    ),
    Mutant(
        "P_not_transposed_back", "P is stored with its rows and columns changed places",
        "18.4.3", "tiles",
        (Edit(TILE_OPS, "share_exp", "P_s[ty + a * TY, tx + b * TX] = p", "P_s[tx + b * TX, ty + a * TY] = p"),),
        through=V2, first=("tile_plus_1", "1024x1023"),
    ),
    Mutant(
        "tall_tile_only_last_masked", "only the last live tile is masked, though Br > Bc puts two on the diagonal",
        "18.5.2", "causal",
        (Edit(STEP4, CAUSAL, "if (j + 1) * Bc > seen_by_first:", "if j == live - 1:"),),
        through=CAUSAL, tile=Tile(32, 16), first=("causal", "causal_113x203"),
    ),
)  # fmt: skip
