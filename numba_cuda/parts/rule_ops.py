"""What kernels with rules do to a tile of scores: change them, hide keys, and turn them into weights and gradients.

Works beside `tile_ops`, on the same lane map. A rule's functions (`refimpl.rule`) are inlined; their ``aux`` arrives as
a kernel argument. Scores are natural here, since rules are written in them; they become log2 units on the way out.
"""

import math

from numba import cuda
from numba.cuda.types import float32, int32, uint32

from flash_cuda.parts.elements import MASKED, exp2
from flash_cuda.parts.tile_ops import as_module
from flash_cuda.parts.vocabulary import device
from refimpl.philox import kept as is_drawn


def is_kept(b, h, row, col, key0, key1, threshold, keep):
    """Whether dropout keeps a weight: as a mask says that was given, or else as drawn."""
    return keep[b, h, row, col] if keep.size else is_drawn(b, h, row, col, key0, key1, threshold)


def rule_ops(Br, Bc, TY, TX, mask_fn, tiles_fn, score_fn, grad_fn):
    """The routines for one tile shape and one pair of rules, as device functions.

    Parameters
    ----------
    Br, Bc, TY, TX : int
        As `tile_ops.tile_ops`; at most 32 scores a thread.
    mask_fn, tiles_fn, score_fn, grad_fn : device functions
        seen(b, h, i, j, *aux), kind(b, h, i0, i1, j0, j1, *aux), score(s, b, h, i, j, *aux) and its derivative; None
        for a forward kernel.

    Raises
    ------
    ValueError
        A thread has more scores than a word has bits.
    """
    RY, CX = Br // TY, Bc // TX
    if RY * CX > 32:
        raise ValueError(f"tile: expected at most 32 scores a thread, got ({Br}, {Bc}) for {TY} x {TX} threads")
    kept_fn = device(is_kept)
    grad_fn = grad_fn or score_fn  # a forward kernel has none, and never asks
    NEG_INF, LOG2E = -math.inf, math.log2(math.e)

    @cuda.jit(device=True)
    def share_kinds(kind_s, b, h, i, j, step_i, step_j, Nq, Nk, offset, mask_aux):
        """Thread t leaves the class of the t-th tile from (i, j) on, down or across; EMPTY past the end."""
        i += step_i * cuda.threadIdx.x
        j += step_j * cuda.threadIdx.x
        kind = int32(0)
        if i * Br < Nq and j * Bc < Nk:
            last_i, last_j = min((i + 1) * Br, Nq), min((j + 1) * Bc, Nk)
            kind = int32(tiles_fn(b, h, i * Br + offset, last_i + offset, j * Bc, last_j, *mask_aux))
        kind_s[cuda.threadIdx.x] = kind

    @cuda.jit(device=True)
    def share_steps(kind_s, step_s):
        """Each live tile's thread leaves how far the next live one is, or the end; the first tile's does so anyway."""
        t = uint32(cuda.threadIdx.x)
        if t == 0 or kind_s[t] > 0:
            at = t + uint32(1)
            while at < uint32(TY * TX) and kind_s[at] == 0:
                at += uint32(1)
            step_s[t] = int32(at - t)

    @cuda.jit(device=True)
    def visible(b, h, row0, col0, Nq, Nk, offset, whole, mask_aux):
        """A bit for each of the thread's pairs, in order: 1 where it exists and is seen; ``whole`` spares the mask.

        Bits and not an array: this loop may then be too long to unroll, whatever the rule, and the scores, which it
        does not touch, stay in registers.
        """
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        if whole and row0 + Br <= Nq and col0 + Bc <= Nk:
            return uint32(0xFFFFFFFF)
        bits = uint32(0)
        for at in range(RY * CX):
            row, j = row0 + ty + at // CX * TY, col0 + tx + at % CX * TX
            # Guard: rules may look up arrays by row and key, so a pair past either end must not reach them.
            if row < Nq and j < Nk and (whole or mask_fn(b, h, row + offset, j, *mask_aux)):
                bits |= uint32(1) << uint32(at)
        return bits

    @cuda.jit(device=True)
    def apply(s, b, h, row0, col0, Nq, Nk, offset, whole, mask_aux, score_aux):
        """s = log2(e) score(s), or -inf for a pair that is hidden or does not exist; ``whole`` spares the mask."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        bits = visible(b, h, row0, col0, Nq, Nk, offset, whole, mask_aux)
        for a in range(RY):
            i = row0 + ty + a * TY + offset
            for c in range(CX):
                x = float32(NEG_INF)
                if bits >> uint32(a * CX + c) & uint32(1):
                    x = float32(LOG2E) * float32(score_fn(s[a, c], b, h, i, col0 + tx + c * TX, *score_aux))
                s[a, c] = x

    @cuda.jit(device=True)
    def share_weights(s, slope, b, h, row0, col0, Nq, Nk, offset, whole, lse, mask_aux, score_aux, P_s):
        """P = exp(score(s) - lse) into shared memory, MASKED where hidden; slope = d score / d s for the gradient."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        bits = visible(b, h, row0, col0, Nq, Nk, offset, whole, mask_aux)
        for a in range(RY):
            row = row0 + ty + a * TY
            i = row + offset
            for c in range(CX):
                j = col0 + tx + c * TX
                p = float32(MASKED)
                slope[a, c] = float32(0.0)
                if bits >> uint32(a * CX + c) & uint32(1):
                    x = float32(score_fn(s[a, c], b, h, i, j, *score_aux))
                    if x != float32(NEG_INF):  # guard: a bias of -inf hides the key, as a mask does
                        p = exp2(float32(LOG2E) * (x - lse[row]))
                        slope[a, c] = float32(grad_fn(s[a, c], b, h, i, j, *score_aux))
                P_s[ty + a * TY, tx + c * TX] = p

    @cuda.jit(device=True)
    def drop(P_s, b, h, row0, col0, drop_aux, gone):
        """P / (1 - p) where dropout keeps the weight, else ``gone``; hidden pairs stay MASKED."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        for a in range(RY):
            for c in range(CX):
                r, k = ty + a * TY, tx + c * TX  # this thread's own element: no barrier needed
                if not P_s[r, k] < float32(0.0):
                    kept = kept_fn(b, h, row0 + r, col0 + k, *drop_aux[1:])
                    P_s[r, k] = P_s[r, k] * drop_aux[0] if kept else gone

    @cuda.jit(device=True)
    def drop_products(dP, P_s, b, h, row0, col0, drop_aux):
        """dP likewise, with 0 where the weight is dropped: what the gradient of a weight is after dropout."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        for a in range(RY):
            for c in range(CX):
                r, k = ty + a * TY, tx + c * TX
                if not P_s[r, k] < float32(0.0):
                    kept = kept_fn(b, h, row0 + r, col0 + k, *drop_aux[1:])
                    dP[a, c] = dP[a, c] * drop_aux[0] if kept else float32(0.0)

    @cuda.jit(device=True)
    def share_gradient(dP, slope, P_s, D, row0, Nq, dS_s):
        """dS = P (dP - D) slope, the gradient of the scaled product; 0 where the key is hidden."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        for a in range(RY):
            row = row0 + ty + a * TY
            for c in range(CX):
                p = P_s[ty + a * TY, tx + c * TX]  # this thread's own element: no barrier needed
                dS = float32(0.0)
                if row < Nq and not p < float32(0.0):
                    dS = p * (dP[a, c] - D[row]) * slope[a, c]
                dS_s[ty + a * TY, tx + c * TX] = dS

    @cuda.jit(device=True)
    def write_bias_gradient(dP, P_s, D, row0, col0, Nq, Nk, dS):
        """Store P (dP - D), the gradient of what was added to the score last, for the pairs that exist."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        for a in range(RY):
            row = row0 + ty + a * TY
            for c in range(CX):
                j = col0 + tx + c * TX
                if row < Nq and j < Nk:
                    p = P_s[ty + a * TY, tx + c * TX]  # this thread's own element
                    dS[row, j] = float32(0.0) if p < float32(0.0) else p * (dP[a, c] - D[row])

    @cuda.jit(device=True)
    def write_no_gradient(kind_s, i, j, step_i, step_j, Nq, Nk, dS):
        """Store 0 for the pairs of those tiles from (i, j) on, down or across, that will not be visited."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        for t in range(TY * TX):
            if kind_s[t] == 0:
                for a in range(RY):
                    for c in range(CX):
                        row, key = (i + t * step_i) * Br + ty + a * TY, (j + t * step_j) * Bc + tx + c * TX
                        if row < Nq and key < Nk:
                            dS[row, key] = float32(0.0)

    return as_module(share_kinds, share_steps, apply, share_weights, drop, drop_products, share_gradient,
                     write_bias_gradient, write_no_gradient)  # fmt: skip
