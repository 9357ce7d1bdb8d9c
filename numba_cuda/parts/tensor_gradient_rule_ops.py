"""What the backward kernels on tensor cores do with rules: tell what is seen, weights and slopes, what dropout keeps.

Works beside ``tensor_gradient_ops`` on the same fragments: element s[at] of a lane belongs, in the warp's part of a
pair of tiles, to

    row 16 (at // (4 NB)) + lane // 4 + 8 (at // 2 % 2),  column 8 (at // 4 % NB) + 2 (lane % 4) + at % 2

where rows are keys and columns queries in the kernel for dK and dV, and the other way round in the one for dQ: that is
all in which the two differ here. Rules (`refimpl.rule`) are asked for one query and one key in either. What is known of
a lane's scores is a *word* of 32 bits, one each, as in ``tensor_rule_ops``.

A backward kernel's blocks walk over *pairs* of tiles with a number each: the query tiles of one head after another, or
the key tiles. The number of the next live pair is found as there, a block's threads looking at one pair each.
"""

import math

from numba import cuda
from numba.cuda.types import float32, int32, uint32

from flash_cuda.parts.straight import repeated
from flash_cuda.parts.tile_ops import as_module
from flash_cuda.parts.vocabulary import device
from flash_cuda.ptx import ballot, ex2, fma, pack_bf16, pack_f16, thread_index
from refimpl.philox import RESOLUTION, philox
from refimpl.vocabulary import where

MOST = 32  # scores a lane, bits of a word


def drawn_four(b, h, row, col, key0, key1, threshold):
    """`refimpl.philox.kept` of the four keys that share a run of the generator with ``col``, a bit each."""
    w0, w1, w2, w3 = philox(col >> 2, row, b, h, key0, key1)
    low = where((w0 >> (32 - RESOLUTION)) >= threshold, 1, 0) + where((w1 >> (32 - RESOLUTION)) >= threshold, 2, 0)
    high = where((w2 >> (32 - RESOLUTION)) >= threshold, 4, 0) + where((w3 >> (32 - RESOLUTION)) >= threshold, 8, 0)
    return low + high


def tensor_gradient_rule_ops(R, C, warps, dtype, of_keys, mask_fn, tiles_fn, score_fn, slope_fn, unrounded=False):
    """The routines for one tile shape and one pair of rules, as device functions.

    Parameters
    ----------
    R, C, warps, dtype
        As `tensor_gradient_ops.tensor_gradient_ops`; at most 32 scores a lane.
    of_keys : bool
        Whether rows are keys.
    mask_fn, tiles_fn, score_fn, slope_fn : device functions
        As `rule_ops.rule_ops`; the last two None where scores stay as they are.
    unrounded : bool
        Whether `weigh` leaves P as it is, rather than rounded for a product.

    Raises
    ------
    ValueError
        A lane has more scores than a word has bits.
    """
    M, NB, T = R // (16 * warps), C // 8, 32 * warps
    SIZE = 4 * M * NB
    if SIZE > MOST:
        name = "keys" if of_keys else "queries"
        raise ValueError(f"{name}: expected at most {MOST} scores a lane, got {SIZE} of ({R}, {C}) on {warps} warps")
    # Queries by keys of a tile pair, and of a warp's part of it.
    BR, BC, WR, WC = (C, R, C, 16 * M) if of_keys else (R, C, 16 * M, C)
    # Lanes that need the same runs of the generator, from one to the next; how many neighbouring keys a lane has.
    SHARE, ACROSS, WIDTH = (4, 4, 1) if of_keys else (2, 1, 2)
    EACH = 0x11111111 if of_keys else 0x33333333
    LOG2E, WARP = math.log2(math.e), 0xFFFFFFFF
    pack = pack_f16 if dtype == "fp16" else pack_bf16
    drawn_fn = device(drawn_four)
    score_fn, slope_fn = score_fn or mask_fn, slope_fn or mask_fn  # where there are none, none is asked

    @cuda.jit(device=True)
    def pair_of(n, h, first, Nq):
        """(head, first query, first key) of tile pair n of a block that keeps the tile from ``first`` on."""
        if of_keys:
            Tr = uint32(Nq + BR - 1) // uint32(BR)
            beyond = uint32(n) // Tr
            return int32(h + int32(beyond)), int32(int32(uint32(n) - beyond * Tr) * BR), first
        return h, first, int32(n * BC)

    @cuda.jit(device=True)
    def share_kinds(live_s, whole_s, b, h, first, n, total, Nq, Nk, offset, mask_aux):
        """Each thread tells the class of one tile pair from n on; a warp leaves which are live, and whole, in words."""
        t = thread_index()
        n = int32(n + t)
        kind = int32(0)
        if n < total:
            head, row0, col0 = pair_of(n, h, first, Nq)
            i1, j1 = int32(min(row0 + BR, Nq) + offset), int32(min(col0 + BC, Nk))
            kind = int32(tiles_fn(b, head, int32(row0 + offset), i1, col0, j1, *mask_aux))
        live, whole = ballot(kind > 0), ballot(kind == 2)
        if t & 31 == 0:
            live_s[t >> 5] = live
            whole_s[t >> 5] = whole

    @cuda.jit(device=True)
    def seek(live_s, whole_s, b, h, first, n, total, Nq, Nk, offset, mask_aux):
        """(the first live pair from n on, whether it is whole), for the block together; past the end if none is."""
        whole, searching = False, n < total
        while searching:
            t = uint32(n) % uint32(T)
            if t == 0:  # the block's threads look at the next T pairs, one each
                cuda.syncthreads()  # what was known of the last T is not needed any more
                share_kinds(live_s, whole_s, b, h, first, n, total, Nq, Nk, offset, mask_aux)
                cuda.syncthreads()  # their classes are there
            word = uint32(live_s[t >> uint32(5)]) >> (t & uint32(31))
            if word == 0:  # none in the rest of this word
                n = int32(n + 32 - int32(t & uint32(31)))
                searching = n < total
            else:
                while word & uint32(1) == 0:
                    word >>= uint32(1)
                    n = int32(n + 1)
                t = uint32(n) % uint32(T)
                whole = (uint32(whole_s[t >> uint32(5)]) >> (t & uint32(31))) & uint32(1) == 1
                searching = False
        return n, whole

    @cuda.jit(device=True)
    def part_of(t, row0, col0):
        """(first query, first key) of the warp's part of a pair."""
        beyond = int32((t >> 5) * (16 * M))
        return (row0, int32(col0 + beyond)) if of_keys else (int32(row0 + beyond), col0)

    @cuda.jit(device=True)
    def kind_of(b, h, row0, col0, Nq, Nk, offset, whole, mask_aux):
        """The class of the warp's part; ``whole`` is what is known of the pair."""
        if row0 >= Nq or col0 >= Nk:
            return int32(0)
        if whole:
            return int32(2)
        i1, j1 = int32(min(row0 + WR, Nq) + offset), int32(min(col0 + WC, Nk))
        return int32(tiles_fn(b, h, int32(row0 + offset), i1, col0, j1, *mask_aux))

    @cuda.jit(device=True, forceinline=True)
    def lane_first(lane, row0, col0):
        """(query, key) of this lane's first element."""
        if of_keys:
            return int32(row0 + 2 * (lane & 3)), int32(col0 + (lane >> 2))
        return int32(row0 + (lane >> 2)), int32(col0 + 2 * (lane & 3))

    @cuda.jit(device=True, forceinline=True)
    def place(row0, col0, at):
        """(query, key) of element ``at``, from those of the lane's first."""
        down, across = at // (4 * NB) * 16 + (at & 2) * 4, at // 4 % NB * 8 + (at & 1)
        if of_keys:
            return int32(row0 + across), int32(col0 + down)
        return int32(row0 + down), int32(col0 + across)

    @cuda.jit(device=True)
    def visible(b, h, row0, col0, Nq, Nk, offset, whole, mask_aux):
        """The word of pairs that exist and are seen; ``whole`` spares the mask."""
        row0, col0 = lane_first(int32(thread_index() & 31), row0, col0)
        word = uint32(0)
        for at in range(SIZE):
            row, j = place(row0, col0, at)
            # Guard: rules may look up arrays by row and key, so a pair past either end must not reach them.
            if row < Nq and j < Nk and (whole or mask_fn(b, h, int32(row + offset), j, *mask_aux)):
                word |= uint32(1) << uint32(at)
        return word

    # lse or D of an element's query: in shared memory for columns, C numbers each; in registers for rows.
    if of_keys:

        @cuda.jit(device=True, forceinline=True)
        def of_query(stats_s, stage, what, at):
            return stats_s[stage, int32(C * what + 2 * (thread_index() & 3)) + at // 4 % NB * 8 + (at & 1)]

    else:

        @cuda.jit(device=True, forceinline=True)
        def of_query(stats_r, stage, what, at):
            return stats_r[2 * (at // (4 * NB)) + (at // 2 & 1)]

    @cuda.jit(device=True, forceinline=True)
    def weigh_one(x, at, lse, b, h, row0, col0, Nq, Nk, offset, score_aux):
        """(P, P times the slope) of one scaled score; a pair past an end takes the last one's place."""
        row, j = place(row0, col0, at)
        i, j = int32(min(row, Nq - 1) + offset), min(j, int32(Nk - 1))
        weight = ex2(fma(float32(score_fn(x, b, h, i, j, *score_aux)), float32(LOG2E), -lse))
        # Guard: what has no weight has no gradient, whatever the slope at a score of -inf is.
        slope = float32(slope_fn(x, b, h, i, j, *score_aux))
        return weight, float32(0.0) if weight == float32(0.0) else weight * slope

    @cuda.jit(device=True, forceinline=True)
    def weigh_two(s, at, p, scale, stats, stage, b, h, row0, col0, Nq, Nk, offset, score_aux):
        """P of two neighbours into p, rounded into p[at // 2], and times the slopes into s[at], s[at + 1]."""
        lse0, lse1 = of_query(stats, stage, 0, at), of_query(stats, stage, 0, at + 1)
        P0, s[at] = weigh_one(scale * s[at], at, lse0, b, h, row0, col0, Nq, Nk, offset, score_aux)
        P1, s[at + 1] = weigh_one(scale * s[at + 1], at + 1, lse1, b, h, row0, col0, Nq, Nk, offset, score_aux)
        if unrounded:
            p[at], p[at + 1] = P0, P1
        else:
            p[at // 2] = pack(P0, P1)

    weigh_eight = repeated(weigh_two, 4, 2)

    @cuda.jit(device=True, forceinline=True)
    def weigh_part(s, at, p, scale, stats, stage, b, h, row0, col0, Nq, Nk, offset, score_aux):
        """Eight scores, with the lane's number read anew: what the compiler computes for them dies with them."""
        row0, col0 = lane_first(int32(thread_index() & 31), row0, col0)
        weigh_eight(s, at, p, scale, stats, stage, b, h, row0, col0, Nq, Nk, offset, score_aux)

    weigh_all = repeated(weigh_part, SIZE // 8, 8)

    @cuda.jit(device=True)
    def weigh(s, p, scale, stats, stage, b, h, row0, col0, Nq, Nk, offset, score_aux):
        """p = P = exp(score(scale s) - lse), rounded; s = P times d score / d (scale s); of hidden pairs too."""
        weigh_all(s, 0, p, scale, stats, stage, b, h, row0, col0, Nq, Nk, offset, score_aux)

    @cuda.jit(device=True)
    def hide(s, word):
        """0 in the place of weights that are not in the word."""
        for at in range(SIZE):
            if (word >> uint32(at)) & uint32(1) == 0:
                s[at] = float32(0.0)

    @cuda.jit(device=True)
    def hide_rounded(p, word):
        """The same for weights that have been rounded, two in a register."""
        for x in range(SIZE // 2):
            two = (word >> uint32(2 * x)) & uint32(3)
            both = (uint32(0xFFFF) if two & uint32(1) else uint32(0)) | (
                uint32(0xFFFF0000) if two & uint32(2) else uint32(0))  # fmt: skip
            p[x] &= both

    @cuda.jit(device=True)
    def kept(b, h, row0, col0, Nq, Nk, drop_aux):
        """The word of weights that dropout keeps: as a mask says that was given, or else as drawn.

        A run of the generator serves four keys, which belong to four lanes, or two: each runs its share, and they tell
        one another.
        """
        _, key0, key1, threshold, keep = drop_aux
        lane = int32(thread_index() & 31)
        row0, col0 = lane_first(lane, row0, col0)
        word = uint32(0)
        if keep.size:
            for at in range(SIZE):
                row, j = place(row0, col0, at)
                if row < Nq and j < Nk and keep[b, h, row, j]:  # guard: the mask has no more rows, nor keys
                    word |= uint32(1) << uint32(at)
        else:
            rank = (lane // ACROSS) & (SHARE - 1)
            mine = uint32(0)
            for r in range(SIZE // 4):
                row, j = place(row0, col0, int32(4 * r + WIDTH * rank))
                mine |= uint32(drawn_fn(b, h, row, j, key0, key1, threshold)) << uint32(4 * r)
            for x in range(SHARE):
                other = mine if x == 0 else uint32(cuda.shfl_xor_sync(WARP, int32(mine), x * ACROSS))
                ours = (other >> uint32(WIDTH * rank)) & uint32(EACH)
                word |= ours << uint32(WIDTH * (rank ^ x))
        return word

    @cuda.jit(device=True)
    def drop_products(dp, word, factor, stats, stage):
        """dp = dP - D, with dP multiplied by what dropout multiplied the weight by."""
        for at in range(SIZE):
            dP = factor * dp[at] if (word >> uint32(at)) & uint32(1) else float32(0.0)
            dp[at] = dP - of_query(stats, stage, 1, at)

    @cuda.jit(device=True)
    def none(g):
        """dS = 0, of a part in which nothing is seen."""
        for x in range(SIZE // 2):
            g[x] = uint32(0)

    @cuda.jit(device=True, forceinline=True)
    def write_one(P, at, dp, word, row0, col0, Nq, Nk, dS):
        row, j = place(row0, col0, at)
        if row < Nq and j < Nk:  # guard: ragged rows and keys. One number moved.
            dS[row, j] = P[at] * dp[at] if (word >> uint32(at)) & uint32(1) else float32(0.0)

    write_all = repeated(write_one, SIZE)

    @cuda.jit(device=True)
    def write_bias_gradient(P, dp, word, row0, col0, Nq, Nk, dS):
        """Store P (dP - D), the gradient of what was added to the score last, for the pairs that exist."""
        row0, col0 = lane_first(int32(thread_index() & 31), row0, col0)
        write_all(P, 0, dp, word, row0, col0, Nq, Nk, dS)

    return as_module(pair_of, seek, part_of, kind_of, visible, weigh, hide, hide_rounded, kept, drop_products,
                     none, write_bias_gradient)  # fmt: skip
