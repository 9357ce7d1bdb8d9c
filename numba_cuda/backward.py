"""The gradients, tile by tile, without anything N x N in memory: P is computed again from lse.

**Idea**: with P_ij = exp(s_ij - lse_i) and D_i = sum_j dO_ij O_ij, one number a row, every gradient is a sum over
tiles:  dV_j = P^T dO,  dP = dO V^T,  dS = P (dP - D),  dQ_i = scale dS K,  dK_j = scale dS^T Q.

**Changed from general**: two kernels with the loops either way, so that each adds up what it owns in registers and
writes it once: no atomics, the same bits every run. A key head's block adds over all query heads that read it. A first
kernel computes D. `backward_atomic` is the other way to do it.

**Traffic**: the kernel for dQ moves Q, dO and dQ once, K and V once a live tile; the one for dK and dV moves K, V, dK
and dV once, Q and dO once a live tile. The arrays of rules are left out; a tile that is not live costs its class, once
a block in each of the two, as in the forward kernel.

**Numerics**: fp32 throughout; D is summed in fp32 from dO and the stored O, so O's rounding enters it. A gradient that
reaches lse enters beside D, since d lse_i / d s_ij = P_ij.

**Source**: Dao et al., "FlashAttention" (2022), appendix B.2 and Algorithm 4; loop order as Dao,
"FlashAttention-2" (2023), section 3.1.2, Algorithm 2.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int32, uint32

from flash_cuda import backward_atomic
from flash_cuda.backward_bias import backward_dbias, backward_dtable
from flash_cuda.launch import prepare, storage
from flash_cuda.parts.gradient_ops import gradient_ops
from flash_cuda.parts.rule_ops import rule_ops
from flash_cuda.parts.rules import bind
from flash_cuda.parts.tile_ops import tile_ops
from refimpl.frame import Frame
from refimpl.rule import Rule, stages, unchanged
from refimpl.scores import relative_score
from refimpl.tiling import Tile, cdiv

# Head room D -> tile. Q_i, dO_i, K_j, V_j, P_ij and dS_ij together fit 48 KiB of shared memory.
GRADIENT_TILES = {16: Tile(16, 32), 32: Tile(16, 32), 64: Tile(16, 32), 128: Tile(16, 16), 256: Tile(8, 8)}
THREADS = (8, 8)  # no more rows of threads than the smallest tile has rows


@cache
def make_rows_kernel(Br, Bc, D, TY, TX):
    """The kernel for D = rowsum(dO O) - dlse, which also clears sums to be added to; grid (B * Hq * Tr)."""
    grad = gradient_ops(Br, Bc, D, TY, TX)

    def backward_rows(O, dO, dlse, D_hbm, dQ_sum):
        sum_s = cuda.shared.array((Br, TX), float32)

        Hq, Nq = O.shape[1], O.shape[2]
        Tr = (Nq + Br - 1) // Br
        i = cuda.blockIdx.x % Tr
        h = cuda.blockIdx.x // Tr % Hq
        b = cuda.blockIdx.x // (Tr * Hq)

        # load: O_i and dO_i, Br x dv elements each
        grad.share_row_products(O[b, h], dO[b, h], i * Br, sum_s)
        cuda.syncthreads()  # the partial sums of all threads are there

        # write: D_i = rowsum(dO O) - dlse, Br elements
        grad.write_row_sums(sum_s, dlse[b, h], D_hbm[b, h], i * Br)
        grad.clear_rows(dQ_sum[b, h], i * Br)  # Br x d elements with atomics, none without

    return backward_rows


@cache
def make_dq_kernel(Br, Bc, D, TY, TX, rules, dropping=False, with_bias=False):
    """The kernel for dQ, and dS for the bias's gradient; grid (B * Hq * Tr)."""
    tile = tile_ops(Br, Bc, D, TY, TX)
    grad = gradient_ops(Br, Bc, D, TY, TX)
    rule = rule_ops(Br, Bc, TY, TX, *rules)
    RY, CX, VX, T = Br // TY, Bc // TX, D // TX, TY * TX
    D_pad, Bc_pad = D + 1, Bc + 1

    def backward_dq(Q, K, V, dO, lse, D_hbm, dQ, dS_hbm, scale, offsets, mask_aux, score_aux, drop_aux):
        Q_s = cuda.shared.array((Br, D_pad), float32)
        dO_s = cuda.shared.array((Br, D_pad), float32)
        K_s = cuda.shared.array((Bc, D_pad), float32)
        V_s = cuda.shared.array((Bc, D_pad), float32)
        P_s = cuda.shared.array((Br, Bc_pad), float32)
        dS_s = cuda.shared.array((Br, Bc_pad), float32)
        kind_s = cuda.shared.array(T, int32)
        step_s = cuda.shared.array(T, int32)
        s = cuda.local.array((RY, CX), float32)
        slope = cuda.local.array((RY, CX), float32)
        dQ_acc = cuda.local.array((RY, VX), float32)

        Hq, Nq = Q.shape[1], Q.shape[2]
        Hk, Nk = K.shape[1], K.shape[2]
        Tr, Tc = (Nq + Br - 1) // Br, (Nk + Bc - 1) // Bc
        i = cuda.blockIdx.x % Tr
        h = cuda.blockIdx.x // Tr % Hq
        b = cuda.blockIdx.x // (Tr * Hq)
        h_k = h // (Hq // Hk)

        # load: Q_i and dO_i, Br x d and Br x dv elements, once
        tile.load(Q_s, Q[b, h], i * Br, 0)
        tile.load(dO_s, dO[b, h], i * Br, 0)
        tile.zero(dQ_acc)

        j = int32(0)
        while j < Tc:
            t = uint32(j) % uint32(T)
            if t == 0:  # the block's threads look at the next T key tiles, one each
                cuda.syncthreads()  # what was known of the last T is not needed any more
                rule.share_kinds(kind_s, b, h, i, j, 0, 1, Nq, Nk, offsets[b], mask_aux)
                cuda.syncthreads()  # their classes are there
                rule.share_steps(kind_s, step_s)
                if with_bias:
                    rule.write_no_gradient(kind_s, i, j, 0, 1, Nq, Nk, dS_hbm[b, h])
                cuda.syncthreads()  # and the way from each live one to the next
            kind = kind_s[t]
            if kind > 0:  # the same for all threads of the block: not an EMPTY tile
                # load: K_j and V_j, Bc x d and Bc x dv elements
                tile.load(K_s, K[b, h_k], j * Bc, 0)
                tile.load(V_s, V[b, h_k], j * Bc, 0)
                cuda.syncthreads()  # all four tiles are whole before anyone reads them

                # scores, and the weights they had
                tile.scores(Q_s, K_s, scale, s)
                rule.share_weights(s, slope, b, h, i * Br, j * Bc, Nq, Nk, offsets[b], kind == 2, lse[b, h],
                                   mask_aux, score_aux, P_s)  # fmt: skip

                # gradient of the scores
                tile.scores(dO_s, V_s, float32(1.0), s)
                if dropping:
                    rule.drop_products(s, P_s, b, h, i * Br, j * Bc, drop_aux)
                rule.share_gradient(s, slope, P_s, D_hbm[b, h], i * Br, Nq, dS_s)
                if with_bias:
                    rule.write_bias_gradient(s, P_s, D_hbm[b, h], i * Br, j * Bc, Nq, Nk, dS_hbm[b, h])
                cuda.syncthreads()  # P_ij and dS_ij are whole

                # accumulate
                grad.accumulate_rows(P_s, dS_s, K_s, dQ_acc)
                cuda.syncthreads()  # K_j, V_j and dS_ij have been read: the next tile may take their place
            j += step_s[t]

        # write: dQ_i, Br x d elements, once
        grad.write_rows(dQ_acc, scale, dQ[b, h], i * Br)

    return backward_dq


@cache
def make_dkv_kernel(Br, Bc, D, TY, TX, rules, dropping=False):
    """The kernel for dK and dV; grid (B * Hk * Tc)."""
    tile = tile_ops(Br, Bc, D, TY, TX)
    grad = gradient_ops(Br, Bc, D, TY, TX)
    rule = rule_ops(Br, Bc, TY, TX, *rules)
    RY, CX, CY, VX, T = Br // TY, Bc // TX, Bc // TY, D // TX, TY * TX
    D_pad, Bc_pad = D + 1, Bc + 1

    def backward_dkv(Q, K, V, dO, lse, D_hbm, dK, dV, scale, offsets, mask_aux, score_aux, drop_aux):
        Q_s = cuda.shared.array((Br, D_pad), float32)
        dO_s = cuda.shared.array((Br, D_pad), float32)
        K_s = cuda.shared.array((Bc, D_pad), float32)
        V_s = cuda.shared.array((Bc, D_pad), float32)
        P_s = cuda.shared.array((Br, Bc_pad), float32)
        dS_s = cuda.shared.array((Br, Bc_pad), float32)
        kind_s = cuda.shared.array(T, int32)
        step_s = cuda.shared.array(T, int32)
        s = cuda.local.array((RY, CX), float32)
        slope = cuda.local.array((RY, CX), float32)
        dK_acc = cuda.local.array((CY, VX), float32)
        dV_acc = cuda.local.array((CY, VX), float32)

        Hq, Nq = Q.shape[1], Q.shape[2]
        Hk, Nk = K.shape[1], K.shape[2]
        Tr, Tc = (Nq + Br - 1) // Br, (Nk + Bc - 1) // Bc
        j = cuda.blockIdx.x % Tc
        h_k = cuda.blockIdx.x // Tc % Hk
        b = cuda.blockIdx.x // (Tc * Hk)
        group = Hq // Hk

        # load: K_j and V_j, Bc x d and Bc x dv elements, once
        tile.load(K_s, K[b, h_k], j * Bc, 0)
        tile.load(V_s, V[b, h_k], j * Bc, 0)
        grad.zero_columns(dK_acc)
        grad.zero_columns(dV_acc)

        for h in range(h_k * group, (h_k + 1) * group):
            i = int32(0)
            while i < Tr:
                t = uint32(i) % uint32(T)
                if t == 0:  # the block's threads look at the next T query tiles, one each
                    cuda.syncthreads()  # what was known of the last T is not needed any more
                    rule.share_kinds(kind_s, b, h, i, j, 1, 0, Nq, Nk, offsets[b], mask_aux)
                    cuda.syncthreads()  # their classes are there
                    rule.share_steps(kind_s, step_s)
                    cuda.syncthreads()  # and the way from each live one to the next
                kind = kind_s[t]
                if kind > 0:  # the same for all threads of the block: not an EMPTY tile
                    # load: Q_i and dO_i, Br x d and Br x dv elements
                    tile.load(Q_s, Q[b, h], i * Br, 0)
                    tile.load(dO_s, dO[b, h], i * Br, 0)
                    cuda.syncthreads()  # all four tiles are whole before anyone reads them

                    # scores, and the weights they had
                    tile.scores(Q_s, K_s, scale, s)
                    rule.share_weights(s, slope, b, h, i * Br, j * Bc, Nq, Nk, offsets[b], kind == 2, lse[b, h],
                                       mask_aux, score_aux, P_s)  # fmt: skip

                    # gradient of the scores
                    tile.scores(dO_s, V_s, float32(1.0), s)
                    if dropping:
                        rule.drop_products(s, P_s, b, h, i * Br, j * Bc, drop_aux)
                    rule.share_gradient(s, slope, P_s, D_hbm[b, h], i * Br, Nq, dS_s)
                    if dropping:  # only now: dS takes the whole weight, dV the dropped one
                        rule.drop(P_s, b, h, i * Br, j * Bc, drop_aux, float32(0.0))
                    cuda.syncthreads()  # P_ij and dS_ij are whole

                    # accumulate
                    grad.accumulate_columns(P_s, P_s, dO_s, dV_acc)
                    grad.accumulate_columns(P_s, dS_s, Q_s, dK_acc)
                    cuda.syncthreads()  # Q_i, dO_i, P_ij and dS_ij have been read: the next may take their place
                i += step_s[t]

        # write: dK_j and dV_j, Bc x d and Bc x dv elements, once
        grad.write_columns(dK_acc, scale, dK[b, h_k], j * Bc)
        grad.write_columns(dV_acc, float32(1.0), dV[b, h_k], j * Bc)

    return backward_dkv


def attention_backward(
    Q, K, V, O, lse, dO, *, scale=None, causal=False, align="bottom_right", bias=None, dlse=None, rules=(),
    dtable=False, deterministic=True, tile=None, threads=None, on=None, **options,
):  # fmt: skip
    """Gradients of attention on the executor ``on``.

    Parameters
    ----------
    Q, K, V, O : as given to and returned by the forward pass
    lse : (B, Hq, Nq), float32, natural logarithm
    dO : (B, Hq, Nq, dv), dtype of Q
    dlse : (B, Hq, Nq), float32, optional
        The gradient that reaches lse; 0 if not given.
    deterministic : bool
        The same bits every run; or dQ by atomic additions, in one pass instead of two (`backward_atomic`).
    dtable : bool
        Also return the gradient of the table of the one `relative` rule among the rules.
    scale, causal, align, bias, rules, tile, threads, on, **options
        As `general.attention`.

    Returns
    -------
    dQ, dK, dV : shapes and dtype of Q, K, V
        K's and V's summed over the query heads that read them. 0 for a row that sees no key.
    dbias : shape of bias, float32, or None without a bias
        Summed over the axes along which the bias was broadcast.
    dtable : (Hq, 2 R + 1), float32; if asked for
        That of a table which all heads share is its sum over them.

    Raises
    ------
    ValueError, TypeError
        As the forward pass; a score rule without a derivative; O, lse, dO or dlse of another shape or type; the
        gradient of a bias or table is wanted and a rule after it does more than add.
    """
    p = prepare(Q, K, V, scale, causal, align, tile, threads or THREADS, on, tiles=GRADIENT_TILES)
    rules = [rules] if isinstance(rules, Rule) else list(rules)
    bound = bind(p, causal=causal, align=align, bias=bias, rules=rules, **options)
    if bound.functions.grad is None:
        raise ValueError("rules: expected a score rule with a derivative (grad) for the backward pass")
    keep = _keeps_dS(rules, bias, dtable)
    rows, output = (p.B, p.Hq, p.Nq), (p.B, p.Hq, p.Nq, p.dv)
    for name, x, shape, like in (("O", O, output, Q), ("dO", dO, output, Q), ("lse", lse, rows, None),
                                 ("dlse", dlse, rows, None)):  # fmt: skip
        if x is None and name == "dlse":
            continue
        if tuple(x.shape) != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")
        if (storage(name, x) != storage("Q", like)) if like is not None else x.dtype != np.float32:
            raise TypeError(f"{name}: expected dtype {'fp32' if like is None else storage('Q', like)}, got {x.dtype}")
    dlse = np.broadcast_to(np.zeros((), np.float32), rows) if dlse is None else dlse
    d_O, d_dO, d_lse, d_dlse = (p.on.input(n, x) for n, x in (("O", O), ("dO", dO), ("lse", lse), ("dlse", dlse)))
    D = p.empty("D", *rows)
    dQ, dK, dV = (p.on.empty(n, x.shape, x.dtype) for n, x in (("dQ", Q), ("dK", K), ("dV", V)))
    dS = p.empty("dS", *((*rows, p.Nk) if keep else (p.B, p.Hq, 0, 0)))
    sums = p.empty("dQ_sum", p.B, p.Hq, *((0, 0) if deterministic else (p.Nq, p.d)))
    made = *p.constants, bound.functions, bound.dropping
    p.launch(make_rows_kernel(*p.constants), p.B * p.Hq * p.Tr, d_O, d_dO, d_dlse, D, sums)
    inputs, columns = (p.Q, p.K, p.V, d_dO, d_lse, D), p.B * p.Hk * cdiv(p.Nk, p.tile.Bc)
    if deterministic:
        of_q, of_kv = make_dq_kernel(*made, with_bias=keep), make_dkv_kernel(*made)
        p.launch(of_q, p.B * p.Hq * p.Tr, *inputs, dQ, dS, p.scale, *bound.arguments)
        p.launch(of_kv, columns, *inputs, dK, dV, p.scale, *bound.arguments)
    else:
        p.launch(backward_atomic.make_kernel(*made), columns, *inputs, sums, dS, dK, dV, p.scale, *bound.arguments)
        p.launch(backward_atomic.round_sums, cdiv(dQ.size, p.threads[0] * p.threads[1]), sums, p.scale, dQ)
    threads = p.threads[0] * p.threads[1]
    dbias = None
    if bias is not None:
        full = p.empty("dbias", *((1,) * (4 - np.ndim(bias)) + np.shape(bias)))
        p.launch(backward_dbias, cdiv(full.size, threads), dS, full)
        dbias = p.on.result(full).reshape(np.shape(bias))
    results = [*(p.on.result(x) for x in (dQ, dK, dV)), dbias]
    if dtable:
        bins = np.shape(_relative(rules)[0].at(Frame(p.B, p.Hq, p.Nq, p.Nk)).aux[0])
        sums = p.empty("dtable", *bins)
        p.launch(backward_dtable, cdiv(sums.size, threads), dS, bound.arguments[0], sums)
        results.append(p.on.result(sums))
    return tuple(results)


def _relative(rules):
    return [rule for rule in rules if rule.fn is relative_score]


def _keeps_dS(rules, bias, dtable):
    """Whether dS is to be kept; the rules after what it is the gradient of must only add."""
    if dtable and len(_relative(rules)) != 1:
        raise ValueError(f"dtable: expected False unless there is one relative rule, there are {len(_relative(rules))}")
    scores = [rule for rule in rules if rule.kind == "score"]
    after = scores if bias is not None else scores[scores.index(_relative(rules)[0]) :] if dtable else []
    if not all(stage.grad is unchanged for rule in after for stage in stages(rule)):
        name = "bias" if bias is not None else "dtable"
        raise ValueError(f"{name}: expected no rule after it that does more than add to the score, for its gradient")
    return bias is not None or bool(dtable)
