"""What a consumer warpgroup of the backward pass on Hopper does between two products: weights, their gradients, sums.

A warpgroup has keys as rows and queries as columns, so that by the lane map of `ptx.hopper` a thread has two keys, and
in each of them pairs of neighbouring queries.
"""

from numba import cuda
from numba.cuda.types import float32, int32, uint32, uint64

from flash_cuda.parts.tile_ops import as_module
from flash_cuda.ptx.hopper import ex2, pack
from flash_cuda.ptx.hopper_backward import add_four, load_pair, store_word


def hopper_gradient_ops(Br, Bc, dtype):
    """The routines for one tile shape and storage type, as device functions.

    Parameters
    ----------
    Br, Bc : int
        Queries and keys of a tile.
    dtype : "fp16" or "bf16"
        What P and dS are rounded to.
    """
    NS = Br // 2  # registers of S a thread
    packed = pack(dtype)

    @cuda.jit(device=True, forceinline=True)
    def weigh(S, pair, scale_log2, lse_at, lane):
        """S^T becomes P^T = 2**(scale_log2 S - lse), lse of the tile's queries in log2 units in shared memory."""
        at = uint32(lse_at + uint32(8 * (lane & 3)))
        for n in range(NS // 4):
            load_pair(pair, 0, uint32(at + uint32(32 * n)))
            S[4 * n] = ex2(S[4 * n] * scale_log2 - pair[0])
            S[4 * n + 1] = ex2(S[4 * n + 1] * scale_log2 - pair[1])
            S[4 * n + 2] = ex2(S[4 * n + 2] * scale_log2 - pair[0])
            S[4 * n + 3] = ex2(S[4 * n + 3] * scale_log2 - pair[1])

    @cuda.jit(device=True, forceinline=True)
    def hide(S, key, row0, end, diag, lane):
        """0 where key > query + diag or key >= end; for both keys of the thread."""
        first = int32(row0 + 2 * (lane & 3) + diag)
        for r in range(2):
            first_seen = int32(key + 8 * r - first) if key + 8 * r < end else int32(Br)
            for n in range(NS // 4):
                for e in range(2):
                    if int32(8 * n + e) < first_seen:
                        S[4 * n + 2 * r + e] = float32(0.0)

    @cuda.jit(device=True, forceinline=True)
    def pack_weights(S, P, half):
        """64 queries of P = S rounded to the storage type, two in a register: operand A of the next product."""
        for n in range(16):
            P[16 * half + n] = packed(S[32 * half + 2 * n], S[32 * half + 2 * n + 1])

    @cuda.jit(device=True, forceinline=True)
    def gradient(S, dP, pair, W, half, D_at, lane):
        """64 queries of W = dS^T = P^T (dP^T - D), rounded and packed likewise; D of the tile in shared memory."""
        at = uint32(D_at + uint32(256 * half + 8 * (lane & 3)))
        for m in range(8):
            n = 8 * half + m
            load_pair(pair, 0, uint32(at + uint32(32 * m)))
            W[2 * n] = packed(S[4 * n] * (dP[4 * n] - pair[0]), S[4 * n + 1] * (dP[4 * n + 1] - pair[1]))
            W[2 * n + 1] = packed(S[4 * n + 2] * (dP[4 * n + 2] - pair[0]), S[4 * n + 3] * (dP[4 * n + 3] - pair[1]))

    @cuda.jit(device=True, forceinline=True)
    def share_gradient(W, to, row_in_tile, lane):
        """Store dS^T for all warpgroups: [Br / 64][Bc][64], 128-byte swizzled.

        The eight keys of a warp's lanes lie in eight rows, whose chunks the swizzle spreads over all banks.
        """
        at = uint32(to + uint32(128 * row_in_tile + ((row_in_tile & 7) << 4) + 4 * (lane & 3)))
        for n in range(NS // 4):
            panel = uint32(at + uint32(n // 8 * Bc * 128)) ^ uint32(n % 8 << 4)
            store_word(panel, W[2 * n])
            store_word(uint32(panel + uint32(8 * 128)), W[2 * n + 1])

    @cuda.jit(device=True, forceinline=True)
    def add_queries(dQ, at):
        """Add this warpgroup's 64 x 64 part of dS K as the lanes hold it: neighbours in a warp are neighbours."""
        for n in range(8):
            add_four(at + uint64(n * 128 * 16), dQ, 4 * n)

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, factor, count):
        """acc *= factor."""
        for n in range(count):
            acc[n] *= factor

    return as_module(weigh, hide, pack_weights, gradient, share_gradient, add_queries, multiply)
