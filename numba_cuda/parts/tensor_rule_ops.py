"""What step 5 with rules does to a tile of scores in registers: tell what is seen, change scores, hide, drop weights.

Works beside ``tensor_ops`` on the same fragments: score s[at] of a lane, in a warp whose first row is row0, belongs to

    row row0 + 16 (at // (4 NB)) + lane // 4 + 8 (at // 2 % 2),  key col0 + 8 (at // 4 % NB) + 2 (lane % 4) + at % 2

and a rule (`refimpl.rule`) is asked for it by just these. What rules say of a lane's scores is kept as one *word* of 64
bits, a bit each: a loop that makes it touches no register array, so it may be too long to unroll, whatever the rule;
and it runs before the product, while the registers of the scores are free.
"""

import math

from numba import cuda
from numba.cuda.types import float32, int32, uint32, uint64

from flash_cuda.parts.straight import repeated
from flash_cuda.parts.tile_ops import as_module
from flash_cuda.parts.vocabulary import device
from flash_cuda.ptx import ballot, thread_index
from refimpl.philox import RESOLUTION, philox
from refimpl.vocabulary import where

MOST = 64  # scores a lane, bits of a word


def drawn_pair(b, h, row, col, key0, key1, threshold):
    """`refimpl.philox.kept` of an even column, and twice that of the next: one run of the generator serves both."""
    w0, w1, w2, w3 = philox(col >> 2, row, b, h, key0, key1)
    first, second = where((col & 2) == 0, w0, w2), where((col & 2) == 0, w1, w3)
    kept = where((first >> (32 - RESOLUTION)) >= threshold, 1, 0)
    return kept + where((second >> (32 - RESOLUTION)) >= threshold, 2, 0)


def tensor_rule_ops(Br, Bc, warps, mask_fn, tiles_fn, score_fn):
    """The routines for one tile shape and one pair of rules, as device functions.

    Parameters
    ----------
    Br, Bc, warps : int
        As `tensor_ops.tensor_ops`; at most 64 scores a lane.
    mask_fn, tiles_fn, score_fn : device functions
        As `rule_ops.rule_ops`; score_fn None where scores stay as they are.

    Raises
    ------
    ValueError
        A lane has more scores than a word has bits.
    """
    M, NB = Br // (16 * warps), Bc // 8
    SIZE = 4 * M * NB
    if SIZE > MOST:
        raise ValueError(f"tile: expected at most {MOST} scores a lane, got {SIZE} of ({Br}, {Bc}) on {warps} warps")
    T, NEG_INF = 32 * warps, -math.inf
    score_fn = score_fn or mask_fn  # where there is none, none is asked
    drawn_fn = device(drawn_pair)

    @cuda.jit(device=True)
    def share_kinds(live_s, whole_s, b, h, row0, j, Nq, Nk, offset, mask_aux):
        """Each thread tells the class of one key tile from j on; a warp leaves which are live, and whole, in words."""
        j = int32(j + cuda.threadIdx.x)
        kind = int32(0)
        if int32(j * Bc) < Nk:
            i0, i1 = int32(row0 + offset), int32(min(int32(row0 + Br), Nq) + offset)
            j0, j1 = int32(j * Bc), min(int32((j + 1) * Bc), Nk)
            kind = int32(tiles_fn(b, h, i0, i1, j0, j1, *mask_aux))
        live, whole = ballot(kind > 0), ballot(kind == 2)
        if cuda.threadIdx.x & 31 == 0:
            live_s[cuda.threadIdx.x >> 5] = live
            whole_s[cuda.threadIdx.x >> 5] = whole

    @cuda.jit(device=True)
    def seek(live_s, whole_s, b, h, row0, j, Nq, Nk, offset, mask_aux):
        """(the first live key tile from j on, whether it is whole), for the block together; past the end if none is."""
        Tc = int32(uint32(Nk + Bc - 1) // uint32(Bc))
        whole, searching = False, j < Tc
        while searching:
            t = uint32(j) % uint32(T)
            if t == 0:  # the block's threads look at the next T key tiles, one each
                cuda.syncthreads()  # what was known of the last T is not needed any more
                share_kinds(live_s, whole_s, b, h, row0, j, Nq, Nk, offset, mask_aux)
                cuda.syncthreads()  # their classes are there
            word = uint32(live_s[t >> uint32(5)]) >> (t & uint32(31))
            if word == 0:  # none in the rest of this word
                j = int32(j + 32 - int32(t & uint32(31)))
                searching = j < Tc
            else:
                while word & uint32(1) == 0:
                    word >>= uint32(1)
                    j = int32(j + 1)
                t = uint32(j) % uint32(T)
                whole = (uint32(whole_s[t >> uint32(5)]) >> (t & uint32(31))) & uint32(1) == 1
                searching = False
        return j, whole

    @cuda.jit(device=True)
    def kind_of(b, h, row0, col0, Nq, Nk, offset, whole, mask_aux):
        """The class of the tile for this warp's rows alone; ``whole`` is what is known of it."""
        if row0 >= Nq:
            return int32(0)
        if whole:
            return int32(2)
        i1, j1 = int32(min(int32(row0 + 16 * M), Nq) + offset), min(int32(col0 + Bc), Nk)
        return int32(tiles_fn(b, h, int32(row0 + offset), i1, col0, j1, *mask_aux))

    @cuda.jit(device=True)
    def visible(b, h, row0, col0, Nq, Nk, offset, whole, mask_aux):
        """The word of pairs that exist and are seen; ``whole`` spares the mask."""
        lane = int32(cuda.threadIdx.x & 31)
        row0, col0 = int32(row0 + (lane >> 2)), int32(col0 + 2 * (lane & 3))
        word = uint64(0)
        for at in range(SIZE):
            row, j = int32(row0 + at // (4 * NB) * 16 + (at & 2) * 4), int32(col0 + at // 4 % NB * 8 + (at & 1))
            # Guard: rules may look up arrays by row and key, so a pair past either end must not reach them.
            if row < Nq and j < Nk and (whole or mask_fn(b, h, int32(row + offset), j, *mask_aux)):
                word |= uint64(1) << uint64(at)
        return word

    @cuda.jit(device=True, forceinline=True)
    def change_one(s, at, scale, b, h, row0, col0, Nq, Nk, offset, score_aux):
        """s[at] = score(scale s[at]); a pair past an end takes the last one's place, and counts for nothing."""
        row = min(int32(row0 + at // (4 * NB) * 16 + (at & 2) * 4), int32(Nq - 1))
        j = min(int32(col0 + at // 4 % NB * 8 + (at & 1)), int32(Nk - 1))
        s[at] = float32(score_fn(scale * s[at], b, h, int32(row + offset), j, *score_aux))

    change_eight = repeated(change_one, 8, 1)

    @cuda.jit(device=True, forceinline=True)
    def change_part(s, at, scale, b, h, row0, col0, Nq, Nk, offset, score_aux):
        """Eight scores, with the lane's number read anew: what the compiler computes for them dies with them."""
        lane = int32(thread_index() & 31)
        row0, col0 = int32(row0 + (lane >> 2)), int32(col0 + 2 * (lane & 3))
        change_eight(s, at, scale, b, h, row0, col0, Nq, Nk, offset, score_aux)

    change_all = repeated(change_part, SIZE // 8, 8)

    @cuda.jit(device=True)
    def change(s, scale, b, h, row0, col0, Nq, Nk, offset, score_aux):
        """s = score(scale s), natural; of pairs that the mask hides too."""
        change_all(s, 0, scale, b, h, row0, col0, Nq, Nk, offset, score_aux)

    @cuda.jit(device=True)
    def hide(s, word):
        """-inf in the place of scores that are not in the word."""
        for x in range(0, SIZE, 4):
            for e in range(4):
                if (word >> uint64(x + e)) & uint64(1) == 0:
                    s[x + e] = float32(NEG_INF)

    @cuda.jit(device=True)
    def kept(b, h, row0, col0, Nq, Nk, drop_aux):
        """The word of weights that dropout keeps: as a mask says that was given, or else as drawn."""
        _, key0, key1, threshold, keep = drop_aux
        lane = int32(cuda.threadIdx.x & 31)
        row0, col0 = int32(row0 + (lane >> 2)), int32(col0 + 2 * (lane & 3))
        word = uint64(0)
        for x in range(SIZE // 2):
            row, j = int32(row0 + x // (2 * NB) * 16 + (x & 1) * 8), int32(col0 + x // 2 % NB * 8)
            if keep.size:
                if row < Nq:  # guard: the mask has no more rows, nor keys
                    for e in range(2):
                        if j + e < Nk and keep[b, h, row, j + e]:
                            word |= uint64(1) << uint64(2 * x + e)
            else:
                word |= uint64(drawn_fn(b, h, row, j, key0, key1, threshold)) << uint64(2 * x)
        return word

    @cuda.jit(device=True)
    def drop(p, word):
        """0 in the place of weights that are not in the word."""
        for x in range(SIZE // 2):
            two = uint32(word >> uint64(2 * x)) & uint32(3)
            both = (uint32(0xFFFF) if two & uint32(1) else uint32(0)) | (
                uint32(0xFFFF0000) if two & uint32(2) else uint32(0))  # fmt: skip
            p[x] &= both

    return as_module(share_kinds, seek, kind_of, visible, change, hide, kept, drop)
