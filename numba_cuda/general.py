"""Any mask and any change of scores: step 4's kernel with rules in the place of the diagonal.

**Idea**: a mask rule tells the class of each tile before it is loaded, so that empty ones are stepped over and full
ones need no masking; a score rule changes each score where it stands, in registers.

**Changed from step4_causal**: the loop goes from live tile to live tile instead of ending at the diagonal: the block's
T threads ask the rule for the classes of T key tiles at once and leave the steps between them in shared memory. Scores
stay natural until the rules have seen them; what rules need travels as ``aux`` arguments, so that another window,
length or slope is no other kernel.

**Traffic**: as step 4 with the tiles that the mask does not call EMPTY in the place of those before the diagonal's end;
the arrays of the rules come on top. A skipped tile costs no load of Q, K or V, but what its class takes, once a block:
a causal or window rule a few lengths that stay in cache, a document rule four ids (16 bytes), a mask tensor eight sums
(32 bytes). The byte ledger has no formula for it: it depends on the rules' data.

**Numerics**: fp32 throughout, as step 3; the scores are rounded once more, when log2(e) is multiplied in.

**Source**: Dong et al., "Flex Attention" (2024), sections 3 and 4 (rules, tile classes); the loop as in step 3.
"""

from functools import cache

from numba import cuda
from numba.cuda.types import float32, int32, uint32

from flash_cuda.launch import TILES, prepare
from flash_cuda.parts.elements import MASKED
from flash_cuda.parts.rule_ops import rule_ops
from flash_cuda.parts.rules import bind
from flash_cuda.parts.tile_ops import tile_ops
from refimpl.tiling import Tile

# Up to d = 32 half as many keys as in the ladder: a thread evaluates the rules for each of its scores, and with more
# than 16 of these the compiler gives up keeping them in registers.
RULE_TILES = TILES | {16: Tile(64, 32), 32: Tile(64, 32)}


@cache
def make_kernel(Br, Bc, D, TY, TX, rules, dropping=False, tracing=False):
    """The kernel for one tile shape and one pair of rules; grid (B * Hq * Tr), TY * TX threads."""
    tile = tile_ops(Br, Bc, D, TY, TX)
    rule = rule_ops(Br, Bc, TY, TX, *rules)
    RY, CX, VX, T = Br // TY, Bc // TX, D // TX, TY * TX
    D_pad, Bc_pad = D + 1, Bc + 1

    def general(Q, K, V, O, lse, scale, offsets, mask_aux, score_aux, drop_aux, trace):
        Q_s = cuda.shared.array((Br, D_pad), float32)
        KV_s = cuda.shared.array((Bc, D_pad), float32)
        P_s = cuda.shared.array((Br, Bc_pad), float32)
        max_s = cuda.shared.array((Br, TX), float32)
        sum_s = cuda.shared.array((Br, TX), float32)
        kind_s = cuda.shared.array(T, int32)
        step_s = cuda.shared.array(T, int32)
        s = cuda.local.array((RY, CX), float32)
        O_acc = cuda.local.array((RY, VX), float32)
        m = cuda.local.array(RY, float32)
        l = cuda.local.array(RY, float32)
        alpha = cuda.local.array(RY, float32)

        Hq, Nq = Q.shape[1], Q.shape[2]
        Hk, Nk = K.shape[1], K.shape[2]
        Tr, Tc = (Nq + Br - 1) // Br, (Nk + Bc - 1) // Bc
        i = cuda.blockIdx.x % Tr
        h = cuda.blockIdx.x // Tr % Hq
        b = cuda.blockIdx.x // (Tr * Hq)
        h_k = h // (Hq // Hk)

        # load: Q_i, Br x d elements, once
        tile.load(Q_s, Q[b, h], i * Br, 0)
        tile.start(m, l, O_acc)

        j = int32(0)
        while j < Tc:
            t = uint32(j) % uint32(T)
            if t == 0:  # the block's threads look at the next T key tiles, one each
                cuda.syncthreads()  # what was known of the last T is not needed any more
                rule.share_kinds(kind_s, b, h, i, j, 0, 1, Nq, Nk, offsets[b], mask_aux)
                cuda.syncthreads()  # their classes are there
                rule.share_steps(kind_s, step_s)
                cuda.syncthreads()  # and the way from each live one to the next
            kind = kind_s[t]
            if kind > 0:  # the same for all threads of the block: not an EMPTY tile
                # load: K_j, Bc x d elements
                tile.load(KV_s, K[b, h_k], j * Bc, 0)
                cuda.syncthreads()  # Q_i and K_j are whole before anyone reads them

                # scores
                tile.scores(Q_s, KV_s, scale, s)
                rule.apply(s, b, h, i * Br, j * Bc, Nq, Nk, offsets[b], kind == 2, mask_aux, score_aux)

                # softmax
                tile.share_row_max(s, max_s)
                cuda.syncthreads()  # the partial maxima are there, and K_j has been read
                tile.update_max(max_s, m, alpha)
                tile.share_exp(s, m, P_s, sum_s)
                if dropping:  # after the sums: dropout does not touch the softmax
                    rule.drop(P_s, b, h, i * Br, j * Bc, drop_aux, float32(MASKED))
                tile.load(KV_s, V[b, h_k], j * Bc, 0)  # load: V_j, Bc x dv elements, into K_j's place
                cuda.syncthreads()  # P_ij, its partial sums and V_j are whole

                # accumulate
                tile.update_sum(sum_s, alpha, l)
                tile.rescale(O_acc, alpha)
                tile.accumulate(P_s, KV_s, O_acc)
                if tracing:
                    tile.record(trace[b, h, j], m, l, O_acc, i * Br)
                cuda.syncthreads()  # V_j has been read: the next tile may take its place
            j += step_s[t]

        # write: O_i and lse_i, once
        tile.write(O_acc, l, m, O[b, h], lse[b, h], i * Br)

    return general


def attention(
    Q, K, V, *, scale=None, causal=False, align="bottom_right", tile=None, threads=None, on=None, trace=None, **options
):  # fmt: skip
    """Attention with every option on the executor ``on``.

    Parameters
    ----------
    Q, K, V, scale, causal, align, tile, threads, on, trace
        As `flash_cuda.launch.prepare`.
    mask, bias, window, softcap, alibi_slopes, lengths_q, lengths_k, dropout, rules
        As `flash_cuda.parts.rules.bind`: NumPy arrays and numbers.

    Returns
    -------
    O : (B, Hq, Nq, dv), dtype of Q
    lse : (B, Hq, Nq), float32, natural logarithm

    Raises
    ------
    ValueError, TypeError
        As `prepare` and the rules; before any launch.
    """
    p = prepare(Q, K, V, scale, causal, align, tile, threads, on, trace, RULE_TILES)
    bound = bind(p, causal=causal, align=align, **options)
    kernel = make_kernel(*p.constants, bound.functions._replace(grad=None), bound.dropping, p.tracing)
    p.launch(kernel, p.B * p.Hq * p.Tr, p.Q, p.K, p.V, p.O, p.lse, p.scale, *bound.arguments, p.trace)
    return p.results()
