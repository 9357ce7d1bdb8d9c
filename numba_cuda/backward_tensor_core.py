"""The gradients on tensor cores: all five products of 16-bit numbers, dQ added up atomically or in a pass of its own.

**Idea**: a block keeps one tile of keys and walks over the tiles of queries that see it, with the keys as *rows*: it
computes S^T = K Q^T and dP^T = V dO^T. Then P^T and dS^T come out of the tensor core in just the lanes from which
dV += P^T dO and dK += dS^T Q take them, and both sums stay in registers.

**Changed from backward**: the instructions, and the copies that run ahead, are those of step 5 (``tensor_ops``). What
`backward` calls deterministic is here, too, a second kernel with queries as rows and the loop over keys: S and dP are
computed twice, seven products and not five, but nothing is added in an order that the hardware chooses, and nothing of
size N x N or N x N / Bc is stored. Without it dS goes through shared memory into a fifth product, all warps share dS K,
and add it to fp32 sums. Data moves as follows, at d = 128 with 64 keys and 64 queries a tile on 4 warps:

    global -> shared   K_j and V_j, 32 KiB, once; Q_i and dO_i, 32 KiB, a tile ahead     cp.async, 16 bytes a thread
    shared -> registers  a warp's rows of K_j and V_j, 8 KiB, all of Q_i and dO_i twice, 64 KiB     ldmatrix
    registers          S, dP - D (128 mma), P and dS rounded, dV += P dO, dK += dS Q (128 mma)
    registers -> shared -> registers   dS, 8 KiB; all of it, 8 KiB, by 32 columns of K, 4 KiB
    registers -> L2    64 x 32 of dS K a warp (64 mma)                          red, 512 bytes a warp, 128 before sm_90

Shared memory is what is short: 336 KiB are read a tile pair and 40 KiB written, 3000 cycles at 128 bytes each, while
320 mma a warp take some 2100 at the rate that mma.sync reaches on an H100. Two blocks share a multiprocessor. A lane
has 128 registers of dK and dV and 64 of S and dP, so that a warp cannot have more than 16 keys; at d = 64 it has 32,
and a fragment of Q or dO serves two products. Up to d = 32, and without the fifth product at 64, it keeps its rows of K
and V in registers. Above d = 128 one launch adds up dV and another dK, at 128 without the fifth product tiles of 32
queries leave registers enough. A GPU with less shared memory gets smaller tiles of queries, too.

**Speed** of the one-pass kernel with what goes before and after it, by keys x queries a tile: multiples of the rate of
FlashAttention-2 in the same run on an H200 (fp16, 16 heads, 16K tokens, N = 1024 and 4096, without a mask / causal):

    d = 64     128 x 32, 32 keys a warp  1.16 / 1.26, 1.09 / 1.21     128 x 64  0.99 / 1.08, 0.92 / 1.03
               128 x 128                 1.00 / 1.07, 0.93 / 1.04
    d = 128    64 x 64    1.03 / 1.14, 0.94 / 1.02     128 x 64  1.01 / 1.07, 0.93 / 0.99
               128 x 32   0.90 / 0.98, 0.81 / 0.88

A first kernel computes D = rowsum(dO O) - dlse, puts lse into log2 units and clears the sums; a last one rounds the
sums. These lie as the lanes hold them, so that a warp adds to neighbours. A row that sees no key has lse = -inf;
+inf takes its place, so that its weights are 0.

**Traffic**: K, V, dK and dV once, Q and dO once a live tile of keys; with atomics Br x d fp32 additions a live tile
and the sums once written, once read; without, Q, dO and dQ once more, and K and V once a live tile of queries.

**Numerics**: products of 16-bit numbers are exact and summed in fp32; P and dS = P (dP - D) are rounded to 16 bits for
the products that follow, dS from the P that is not rounded. The sum dP begins at -D. scale is applied once, to finished
sums. A hidden key or query of a tile has weight 0, so a NaN there reaches what the tile adds to; keys that no query
sees are not touched. Without atomics the bits are the same every run, with them only those of dK and dV.

**Source**: Dao, "FlashAttention-2" (2023), section 3.1.2 and Algorithm 2; the instructions as in ``ptx``.
"""

from functools import cache

from numba import cuda
from numba.cuda.types import float32, int32, uint16, uint32

from flash_cuda.parts.backward_tensor_call import (
    given_options,
    launch,
    launch_round,
    launch_rows,
    outputs,
    results,
    set_up,
)
from flash_cuda.parts.backward_tensor_shapes import KEYS, QUERIES, usual_keys
from flash_cuda.parts.tensor_gradient_ops import tensor_gradient_ops
from flash_cuda.parts.tensor_layout import side_by_side
from flash_cuda.parts.tensor_ops import tensor_ops
from flash_cuda.ptx import cp_async_commit, cp_async_wait
from refimpl.tiling import Tile, cdiv


@cache
def make_keys_kernel(shape, D, dtype, fill, of_k=True, of_v=True, adding=False, vector=False, apart=False):
    """The kernel for dK, dV or both; grid (B * Hk * Tc).

    Parameters
    ----------
    shape : Shape
    D : int
        Head room, a multiple of 16.
    dtype : "fp16" or "bf16"
    fill : "whole", "padded" or "single"
        As `tensor_ops.tensor_ops`.
    of_k, of_v : bool
        What is wanted; the other output is not written.
    adding : bool
        Also add dS K to the sums of dQ.
    vector, apart : bool
        As `tensor_gradient_ops.tensor_gradient_ops`.
    """
    Bc, Br, band, hold, fresh, blocks = shape
    warps, M = Bc // band, band // 16
    tile = tensor_ops(Bc, Br, D, warps, dtype, fill, hold, fresh, apart)
    grad = tensor_gradient_ops(Bc, Br, D, warps, dtype, hold, fresh, vector, apart)
    # Where V_j, the first Q_i, the first dO_i and dS are, and from one Q_i or dO_i to the next.
    V_AT, Q_AT, G_AT, W_AT, STAGE = Bc * D, 2 * Bc * D, 2 * Bc * D + 2 * Br * D, 2 * Bc * D + 4 * Br * D, Br * D
    a_size, s_size, p_size = M * D // 4, M * Br // 2, M * Br // 4
    v_size, k_size = M * D // 2 if of_v else 1, M * D // 2 if of_k else 1
    stats_size, kept_size = 2 * Br, -(-2 * Br // (32 * warps))

    def backward_keys(Q, K, V, dO, stats, sums, dK, dV, scale, scale_log2, diag, together):
        tiles = cuda.shared.array(0, uint16, alignment=128)  # K_j, V_j, two Q_i, two dO_i, dS
        stats_s = cuda.shared.array((2, stats_size), float32)  # lse_i and D_i, of two tiles
        k = cuda.local.array(a_size, uint32)
        v = cuda.local.array(a_size, uint32)
        s = cuda.local.array(s_size, float32)
        dp = cuda.local.array(s_size, float32)
        p = cuda.local.array(p_size, uint32)
        kept = cuda.local.array(kept_size, float32)
        dK_acc = cuda.local.array(k_size, float32)
        dV_acc = cuda.local.array(v_size, float32)

        Hq, Nq = int32(Q.shape[1]), int32(Q.shape[2])
        Hk, Nk = int32(K.shape[1]), int32(K.shape[2])
        Tr = int32(uint32(Nq + Br - 1) // uint32(Br))
        Tc = int32(uint32(Nk + Bc - 1) // uint32(Bc))
        # Blocks start in this order: ``together`` heads side by side, of them the first key tiles first, since under a
        # causal mask those are the longest.
        group = int32(uint32(cuda.blockIdx.x) // uint32(together * Tc))
        heads = int32(min(together, int32(K.shape[0]) * Hk - group * together))
        at = int32(cuda.blockIdx.x - group * together * Tc)
        j = int32(uint32(at) // uint32(heads))
        head = int32(group * together + at - j * heads)
        b = int32(uint32(head) // uint32(Hk))
        h_k = int32(head - b * Hk)
        members = int32(uint32(Hq) // uint32(Hk))

        # Key j is seen by row i iff j <= i + diag: no row sees keys from ``end`` on.
        col0, end = int32(j * Bc), int32(min(Nk, Nq + diag))
        i_first = int32(max(col0 - diag, 0) // Br)
        live = int32((Tr - i_first) * members) if col0 < end else int32(0)
        h, i = int32(h_k * members), i_first

        # load: K_j and V_j, Bc x d and Bc x dv elements, once; the first Q_i and dO_i
        if live > 0:
            tile.load_queries(tiles, 0, K[b, h_k], col0, end)
            tile.load_queries(tiles, V_AT, V[b, h_k], col0, end)
            tile.load(tiles, Q_AT, Q[b, h], int32(i * Br), Nq)
            tile.load(tiles, G_AT, dO[b, h], int32(i * Br), Nq)
            grad.load_stats(stats[b, h], int32(i * Br), Nq, kept)
            grad.share_stats(kept, stats_s, 0)
        cp_async_commit()
        if of_k:
            grad.zero(dK_acc)
        if of_v:
            grad.zero(dV_acc)

        for n in range(live):
            cp_async_wait()
            cuda.syncthreads()  # Q_i, dO_i, lse_i, D_i are there; those before and their dS are done with
            stage = int32(n & 1)
            at = int32(stage * STAGE)
            row0, i_next, h_next = int32(i * Br), int32(i + 1), h
            if i_next == Tr:
                i_next, h_next = i_first, int32(h + 1)
            # load: the next Q_i and dO_i, Br x d and Br x dv elements, 2 Br numbers, while these are worked on
            if int32(n + 1) < live:
                tile.load(tiles, int32(Q_AT + STAGE - at), Q[b, h_next], int32(i_next * Br), Nq)
                tile.load(tiles, int32(G_AT + STAGE - at), dO[b, h_next], int32(i_next * Br), Nq)
                grad.load_stats(stats[b, h_next], int32(i_next * Br), Nq, kept)
            cp_async_commit()
            k_at, v_at = grad.at_rows(tiles, 0), grad.at_rows(tiles, V_AT)
            if hold and n == 0:
                tile.hold_queries(k, tiles, k_at)
                if of_k:
                    tile.hold_queries(v, tiles, v_at)

            # scores, and the weights they had
            grad.clear(s)
            grad.multiply(k, tiles, k_at, grad.at_columns(tiles, int32(Q_AT + at)), s)
            grad.weigh(s, scale_log2, stats_s, stage)
            if int32(col0 + Bc) > int32(min(row0 + 1 + diag, Nk)):  # an edge tile: the first row does not see all of it
                grad.hide(s, col0, row0, Nk, diag)

            # gradient of the scores
            if of_k:
                grad.begin(dp, stats_s, stage)
                grad.multiply(v, tiles, v_at, grad.at_columns(tiles, int32(G_AT + at)), dp)

            # accumulate
            if of_v:
                grad.rounded(s, p)
                tile.accumulate(p, tiles, grad.at_sums(tiles, int32(G_AT + at)), dV_acc)
            if of_k:
                grad.gradient(s, dp, p)
                if adding:
                    grad.share_gradient(p, tiles, W_AT)
                tile.accumulate(p, tiles, grad.at_sums(tiles, int32(Q_AT + at)), dK_acc)
            if adding:
                cuda.syncthreads()  # dS is whole
                grad.add_queries(tiles, W_AT, 0, sums[b, h, i])  # add: Br x D elements of dQ
            if int32(n + 1) < live:
                grad.share_stats(kept, stats_s, int32(1 - stage))
            i, h = i_next, h_next

        # write: dK_j and dV_j, Bc x d and Bc x dv elements, once
        if of_v:
            cuda.syncthreads()  # K_j has been read: dV_j may take its place
            grad.stage(dV_acc, float32(1.0), tiles)
            cuda.syncthreads()  # dV_j is whole
            tile.write(tiles, dV[b, h_k], col0)
        if of_k:
            cuda.syncthreads()  # K_j, or dV_j, has been read: dK_j may take its place
            grad.stage(dK_acc, scale, tiles)
            cuda.syncthreads()  # dK_j is whole
            tile.write(tiles, dK[b, h_k], col0)

    backward_keys.jit_options = {"launch_bounds": (shape.threads, blocks) if blocks else shape.threads}
    return backward_keys


@cache
def make_queries_kernel(shape, D, dtype, fill):
    """The kernel for dQ alone, without atomics; grid (B * Hq * Tr). Parameters as `make_keys_kernel`."""
    Br, Bc, band, hold, fresh, blocks = shape
    fresh = fresh or fill == "single"  # element by element there are no registers to keep it
    warps, M = Br // band, band // 16
    tile = tensor_ops(Br, Bc, D, warps, dtype, fill, hold, fresh)
    grad = tensor_gradient_ops(Br, Bc, D, warps, dtype, hold, fresh)
    G_AT, K_AT, V_AT, STAGE = Br * D, 2 * Br * D, 2 * Br * D + 2 * Bc * D, Bc * D
    a_size, s_size, p_size, q_size, rows = M * D // 4, M * Bc // 2, M * Bc // 4, M * D // 2, 2 * M

    def backward_queries(Q, K, V, dO, stats, dQ, scale, scale_log2, diag, together):
        tiles = cuda.shared.array(0, uint16, alignment=128)  # Q_i, dO_i, two K_j, two V_j
        q = cuda.local.array(a_size, uint32)
        g = cuda.local.array(a_size, uint32)
        s = cuda.local.array(s_size, float32)
        dp = cuda.local.array(s_size, float32)
        p = cuda.local.array(p_size, uint32)
        lse_r = cuda.local.array(rows, float32)
        D_r = cuda.local.array(rows, float32)
        dQ_acc = cuda.local.array(q_size, float32)

        Hq, Nq = int32(Q.shape[1]), int32(Q.shape[2])
        Hk, Nk = int32(K.shape[1]), int32(K.shape[2])
        Tr = int32(uint32(Nq + Br - 1) // uint32(Br))
        # Blocks start as in step 5: ``together`` heads side by side, of them the last query tiles first.
        group = int32(uint32(cuda.blockIdx.x) // uint32(together * Tr))
        heads = int32(min(together, int32(Q.shape[0]) * Hq - group * together))
        at = int32(cuda.blockIdx.x - group * together * Tr)
        turn = int32(uint32(at) // uint32(heads))
        head = int32(group * together + at - turn * heads)
        row0 = int32((Tr - 1 - turn) * Br)
        b = int32(uint32(head) // uint32(Hq))
        h = int32(head - b * Hq)
        h_k = int32(uint32(h) // uint32(uint32(Hq) // uint32(Hk)))

        # Row r sees keys 0 .. r + diag: the tile's last row bounds what is live, its first row what is full.
        seen_by_last = int32(min(min(row0 + Br, Nq) + diag, Nk))
        live = int32(uint32(max(seen_by_last, 0) + Bc - 1) // uint32(Bc))
        seen_by_first = int32(min(row0 + 1 + diag, Nk))

        # load: Q_i and dO_i, Br x d and Br x dv elements, once; K_0 and V_0
        if live > 0:
            tile.load_queries(tiles, 0, Q[b, h], row0, Nq)
            tile.load_queries(tiles, G_AT, dO[b, h], row0, Nq)
            tile.load(tiles, K_AT, K[b, h_k], 0, seen_by_last)
            tile.load(tiles, V_AT, V[b, h_k], 0, seen_by_last)
        cp_async_commit()
        grad.hold_stats(stats[b, h], row0, Nq, lse_r, D_r)
        grad.zero(dQ_acc)

        for j in range(live):
            cp_async_wait()
            cuda.syncthreads()  # K_j and V_j are whole, and K_j-1 and V_j-1 have been read
            col0, col1, at = int32(j * Bc), int32(j * Bc + Bc), int32((j & 1) * STAGE)
            # load: K_j+1 and V_j+1, Bc x d and Bc x dv elements, while this tile is worked on
            if int32(j + 1) < live:
                tile.load(tiles, int32(K_AT + STAGE - at), K[b, h_k], col1, seen_by_last)
                tile.load(tiles, int32(V_AT + STAGE - at), V[b, h_k], col1, seen_by_last)
            cp_async_commit()
            q_at, g_at = grad.at_rows(tiles, 0), grad.at_rows(tiles, G_AT)
            if hold and j == 0:
                tile.hold_queries(q, tiles, q_at)
                tile.hold_queries(g, tiles, g_at)

            # scores, and the weights they had
            grad.clear(s)
            grad.multiply(q, tiles, q_at, grad.at_columns(tiles, int32(K_AT + at)), s)
            grad.weigh_rows(s, scale_log2, lse_r)
            if col1 > seen_by_first:  # an edge tile: the first row does not see all of it
                grad.hide_rows(s, row0, col0, Nk, diag)

            # gradient of the scores
            grad.begin_rows(dp, D_r)
            grad.multiply(g, tiles, g_at, grad.at_columns(tiles, int32(V_AT + at)), dp)

            # accumulate
            grad.gradient(s, dp, p)
            tile.accumulate(p, tiles, grad.at_sums(tiles, int32(K_AT + at)), dQ_acc)

        # write: dQ_i, Br x d elements, once
        cuda.syncthreads()  # Q_i has been read: dQ_i may take its place
        grad.stage(dQ_acc, scale, tiles)
        cuda.syncthreads()  # dQ_i is whole
        tile.write(tiles, dQ[b, h], row0)

    backward_queries.jit_options = {"launch_bounds": (shape.threads, blocks) if blocks else shape.threads}
    return backward_queries


def attention_backward(
    Q, K, V, O, lse, dO, *, scale=None, causal=False, align="bottom_right", dlse=None, deterministic=True, tile=None,
    threads=None, on=None, keys=None, queries=None, **options,
):  # fmt: skip
    """Gradients of attention on the executor ``on``.

    Parameters
    ----------
    Q, K, V : as given to the forward pass, fp16 or bf16
        Rows that do not begin on 16-byte boundaries, or whose columns are not adjacent, are read element by element:
        right, and slow.
    O : (B, Hq, Nq, dv), dtype of Q
        What the forward pass returned.
    lse : (B, Hq, Nq), float32, natural logarithm
        Likewise; -inf for a row that sees no key.
    dO : (B, Hq, Nq, dv), dtype of Q
    scale, causal, align, on
        As `flash_cuda.launch.prepare`.
    dlse : (B, Hq, Nq), float32, optional
        The gradient that reaches lse; 0 if not given.
    deterministic : bool
        The same bits every run; or dQ by atomic additions, with five products a tile instead of seven.
    tile : refimpl.tiling.Tile, optional
        Br and Bc powers of two from 16 on; by the tables of `parts.backward_tensor_shapes` if not given.
    threads
        Taken as every backward pass does, and of no effect.
    keys, queries : Shape, optional
        In the place of ``tile``: everything that was chosen for speed.
    **options
        mask, bias, window, softcap, alibi_slopes, lengths_q, lengths_k, dropout, rules, dtable: a call with any of them
        takes the kernels of `backward_tensor_rules`.

    Returns
    -------
    dQ, dK, dV : shapes and dtype of Q, K, V
        K's and V's summed over the query heads that read them. 0 for a row that sees no key, and for a key that no row
        sees.
    None
        Where `backward.attention_backward` has the gradient of a bias; with one, that gradient. With dtable a fifth.

    Raises
    ------
    TypeError, ValueError
        As `prepare`; fp32 inputs; O, lse, dO or dlse of another shape or type; a tile or shape of no use; as the rules.
    RuntimeError
        As `prepare`; a GPU without these instructions.
    """
    options = given_options(options)
    if options:
        from flash_cuda.backward_tensor_rules import attention_backward as with_rules

        return with_rules(Q, K, V, O, lse, dO, scale=scale, causal=causal, align=align, dlse=dlse, tile=tile, on=on,
                          deterministic=deterministic, keys=keys, queries=queries, **options)  # fmt: skip
    p, given, setting = set_up(Q, K, V, O, lse, dO, dlse, scale, causal, align, on, tile)
    D, dtype, fill, vector = setting[:4]
    dQ, dK, dV = outputs(p, Q, K, V)
    keys, queries = setting.shapes(keys, queries, usual_keys(setting, deterministic), QUERIES[D])
    stats, sums = launch_rows(p, given, setting, keys, deterministic)

    inputs, scales = (p.Q, p.K, p.V, given.dO, stats), (p.scale, p.scale_log2, p.diag)
    blocks, shared = p.B * p.Hk * cdiv(p.Nk, keys.rows), keys.shared_bytes(D, True)
    together = side_by_side(p.B * p.Hk, 2 * p.Nq * (p.d + p.dv) * p.Hq // p.Hk) if causal else 1
    for of_k, of_v in setting.passes:
        adding = of_k and not deterministic  # with dQ's sums registers are fewest
        kernel = make_keys_kernel(keys, D, dtype, fill, of_k, of_v, adding, vector, adding and setting.later)
        launch(p, kernel, blocks, keys.threads, *inputs, sums, dK, dV, *scales, together, shared=shared)
    if deterministic:
        launch_queries(p, queries, D, dtype, fill, given.dO, stats, dQ, causal)
    else:
        launch_round(p, setting, keys, sums, dQ)
    return results(p, dQ, dK, dV)


def tile_for(d, causal=False):
    """The tile for a head dim where d = dv and dQ is added up atomically."""
    keys = KEYS[next(room for room in KEYS if d <= room)]
    return Tile(keys.columns, keys.rows)


def launch_queries(p, queries, D, dtype, fill, dO, stats, dQ, causal):
    """dQ without atomics: S and dP once more, with queries as rows."""
    blocks, shared = p.B * p.Hq * cdiv(p.Nq, queries.rows), queries.shared_bytes(D, False)
    together = side_by_side(p.B * p.Hq, 2 * p.Nk * (p.d + p.dv) * p.Hk // p.Hq) if causal else 1
    kernel = make_queries_kernel(queries, D, dtype, fill)
    arguments = p.Q, p.K, p.V, dO, stats, dQ, p.scale, p.scale_log2, p.diag, together
    launch(p, kernel, blocks, queries.threads, *arguments, shared=shared)
