"""The kernels of ``backward_tensor_rules``: those of ``backward_tensor_core``, with rules in the diagonal's place."""

from functools import cache

from numba import cuda
from numba.cuda.types import float32, int32, uint16, uint32

from flash_cuda.parts.tensor_gradient_ops import tensor_gradient_ops
from flash_cuda.parts.tensor_gradient_rule_ops import tensor_gradient_rule_ops
from flash_cuda.parts.tensor_ops import tensor_ops
from flash_cuda.ptx import ballot, cp_async_commit, cp_async_wait


@cache
def make_keys_kernel(shape, D, dtype, fill, rules, dropping, of_k=True, of_v=True, adding=False, vector=False,
                     apart=False):
    """The kernel for dK, dV or both; grid (B * Hk * Tc).

    Parameters
    ----------
    shape, D, dtype, fill, of_k, of_v, adding, vector, apart
        As `backward_tensor_core.make_keys_kernel`.
    rules : backward_tensor_rules.Functions
    dropping : bool
        Weights were dropped.
    """
    Bc, Br, band, hold, fresh, blocks = shape
    warps, M = Bc // band, band // 16
    tile = tensor_ops(Bc, Br, D, warps, dtype, fill, hold, fresh, apart)
    grad = tensor_gradient_ops(Bc, Br, D, warps, dtype, hold, fresh, vector, apart)
    rule = tensor_gradient_rule_ops(Bc, Br, warps, dtype, True, *rules)
    # Where V_j, the first Q_i, the first dO_i and dS are, and from one Q_i or dO_i to the next.
    V_AT, Q_AT, G_AT, W_AT, STAGE = Bc * D, 2 * Bc * D, 2 * Bc * D + 2 * Br * D, 2 * Bc * D + 4 * Br * D, Br * D
    a_size, s_size, p_size = M * D // 4, M * Br // 2, M * Br // 4
    v_size, k_size = M * D // 2 if of_v else 1, M * D // 2 if of_k else 1
    stats_size, kept_size = 2 * Br, -(-2 * Br // (32 * warps))
    scored = rules.score is not None

    def backward_keys_with_rules(
        Q, K, V, dO, stats, sums, dK, dV, scale, scale_log2, together, right, offsets, ends_q, ends_k, mask_aux,
        score_aux, drop_aux,
    ):  # fmt: skip
        tiles = cuda.shared.array(0, uint16, alignment=128)  # K_j, V_j, two Q_i, two dO_i, dS
        stats_s = cuda.shared.array((2, stats_size), float32)  # lse_i and D_i, of two tiles
        note = cuda.shared.array(7, int32)  # what is the same for all threads and pairs: registers are few
        turn_s = cuda.shared.array((2, 3), int32)  # likewise for all threads: h, the first query, and whether whole
        live_s = cuda.shared.array(warps, int32)
        whole_s = cuda.shared.array(warps, int32)
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
        total, h0, col0 = int32(Tr * members), int32(h_k * members), int32(j * Bc)
        offset, end_q = int32(offsets[b]), int32(ends_q[b])
        # What lies past the keys in use, or past what the last row may see, is not read, whatever it holds.
        end_k = int32(min(end_q + offset + right, ends_k[b]))
        if cuda.threadIdx.x == 0:
            note[0], note[1], note[2], note[3], note[4], note[5], note[6] = b, h0, col0, offset, end_q, h_k, total

        # load: K_j and V_j, Bc x d and Bc x dv elements, once; the first live Q_i and dO_i
        n, whole = rule.seek(live_s, whole_s, b, h0, col0, int32(0), total, Nq, Nk, offset, mask_aux)
        if n < total:
            h, row0, _ = rule.pair_of(n, h0, col0, Nq)
            if cuda.threadIdx.x == 0:
                turn_s[0, 0], turn_s[0, 1], turn_s[0, 2] = h, row0, int32(whole)
            tile.load_queries(tiles, 0, K[b, h_k], col0, end_k)
            tile.load_queries(tiles, V_AT, V[b, h_k], col0, end_k)
            tile.load(tiles, Q_AT, Q[b, h], row0, end_q)
            tile.load(tiles, G_AT, dO[b, h], row0, end_q)
            grad.load_stats(stats[b, h], row0, end_q, kept)
            grad.share_stats(kept, stats_s, 0)
        cp_async_commit()
        if of_k:
            grad.zero(dK_acc)
        if of_v:
            grad.zero(dV_acc)

        stage, first = int32(0), True
        while n < total:
            cp_async_wait()
            cuda.syncthreads()  # Q_i, dO_i, lse_i, D_i are there; those before and their dS are done with
            b, h0, col0, offset, total = note[0], note[1], note[2], note[3], note[6]
            # load: the next live Q_i and dO_i, Br x d and Br x dv elements, 2 Br numbers, while these are worked on
            n, whole = rule.seek(live_s, whole_s, b, h0, col0, int32(n + 1), total, Nq, Nk, offset, mask_aux)
            if n < total:
                h, row0, _ = rule.pair_of(n, h0, col0, Nq)
                if tile.thread() == 0:
                    turn_s[1 - stage, 0], turn_s[1 - stage, 1], turn_s[1 - stage, 2] = h, row0, int32(whole)
                tile.load(tiles, int32(Q_AT + STAGE - stage * STAGE), Q[b, h], row0, note[4])
                tile.load(tiles, int32(G_AT + STAGE - stage * STAGE), dO[b, h], row0, note[4])
                grad.load_stats(stats[b, h], row0, note[4], kept)
            cp_async_commit()
            at = int32(stage * STAGE)
            k_at, v_at = grad.at_rows(tiles, 0), grad.at_rows(tiles, V_AT)
            if hold and first:
                tile.hold_queries(k, tiles, k_at)
                if of_k:
                    tile.hold_queries(v, tiles, v_at)
            first = False

            h = turn_s[stage, 0]
            row_w, col_w = rule.part_of(tile.thread(), turn_s[stage, 1], col0)
            kind = rule.kind_of(b, h, row_w, col_w, Nq, Nk, offset, turn_s[stage, 2] == 1, mask_aux)
            seen = uint32(0xFFFFFFFF)
            if kind == 0:  # the same for all lanes of the warp
                seen = uint32(0)
            elif kind == 1 or col_w + 16 * M > Nk:
                seen = rule.visible(b, h, row_w, col_w, Nq, Nk, offset, kind == 2, mask_aux)
            if ballot(seen != uint32(0)) != 0:  # some lane has something to do
                if dropping:
                    keeps = rule.kept(b, h, row_w, col_w, Nq, Nk, drop_aux)
                # scores, and the weights they had
                grad.clear(s)
                grad.multiply(k, tiles, k_at, grad.at_columns(tiles, int32(Q_AT + at)), s)
                if scored:
                    row_w, col_w = rule.part_of(tile.thread(), turn_s[stage, 1], note[2])
                    rule.weigh(s, p, scale, stats_s, stage, note[0], turn_s[stage, 0], row_w, col_w, Nq, Nk, note[3],
                               score_aux)  # fmt: skip
                else:
                    grad.weigh(s, scale_log2, stats_s, stage)
                    grad.rounded(s, p)
                if seen != uint32(0xFFFFFFFF):
                    rule.hide(s, seen)
                    rule.hide_rounded(p, seen)
                if dropping:  # dS takes the whole weight, dV the dropped one
                    rule.hide_rounded(p, keeps)

                # accumulate, and the gradient of the scores
                if of_v:
                    tile.accumulate(p, tiles, grad.at_sums(tiles, int32(G_AT + at)), dV_acc)
                if of_k:
                    if dropping:
                        grad.clear(dp)
                        grad.multiply(v, tiles, v_at, grad.at_columns(tiles, int32(G_AT + at)), dp)
                        rule.drop_products(dp, keeps, drop_aux[0], stats_s, stage)
                    else:
                        grad.begin(dp, stats_s, stage)
                        grad.multiply(v, tiles, v_at, grad.at_columns(tiles, int32(G_AT + at)), dp)
                    grad.gradient(s, dp, p)
                    if adding:
                        grad.share_gradient(p, tiles, W_AT)
                    tile.accumulate(p, tiles, grad.at_sums(tiles, int32(Q_AT + at)), dK_acc)
            elif adding:
                rule.none(p)
                grad.share_gradient(p, tiles, W_AT)
            if adding:
                cuda.syncthreads()  # dS is whole
                i = int32(uint32(turn_s[stage, 1]) // uint32(Br))
                grad.add_queries(tiles, W_AT, 0, sums[note[0], turn_s[stage, 0], i])  # add: Br x D elements of dQ
            stage = int32(1 - stage)
            if n < note[6]:
                grad.share_stats(kept, stats_s, stage)

        # write: dK_j and dV_j, Bc x d and Bc x dv elements, once
        if of_v:
            cuda.syncthreads()  # K_j has been read: dV_j may take its place
            grad.stage(dV_acc, drop_aux[0] if dropping else float32(1.0), tiles)
            cuda.syncthreads()  # dV_j is whole
            tile.write(tiles, dV[note[0], note[5]], note[2])
        if of_k:
            cuda.syncthreads()  # K_j, or dV_j, has been read: dK_j may take its place
            grad.stage(dK_acc, scale, tiles)
            cuda.syncthreads()  # dK_j is whole
            tile.write(tiles, dK[note[0], note[5]], note[2])

    backward_keys_with_rules.jit_options = {"launch_bounds": (shape.threads, blocks) if blocks else shape.threads}
    return backward_keys_with_rules


@cache
def make_queries_kernel(shape, D, dtype, fill, rules, dropping, keeping=False):
    """The kernel for dQ alone, without atomics; grid (B * Hq * Tr).

    Parameters
    ----------
    shape, D, dtype, fill, rules, dropping
        As `make_keys_kernel`.
    keeping : bool
        Also leave dS, for the gradient of what was added to scores, in global memory; elsewhere it has been cleared.
    """
    Br, Bc, band, hold, fresh, blocks = shape
    fresh = fresh or fill == "single"  # element by element there are no registers to keep it
    warps, M = Br // band, band // 16
    tile = tensor_ops(Br, Bc, D, warps, dtype, fill, hold, fresh)
    grad = tensor_gradient_ops(Br, Bc, D, warps, dtype, hold, fresh)
    rule = tensor_gradient_rule_ops(Br, Bc, warps, dtype, False, *rules, keeping)
    G_AT, K_AT, V_AT, STAGE = Br * D, 2 * Br * D, 2 * Br * D + 2 * Bc * D, Bc * D
    a_size, s_size, p_size, q_size, rows = M * D // 4, M * Bc // 2, M * Bc // 4, M * D // 2, 2 * M
    w_size = s_size if keeping else 1
    scored = rules.score is not None

    def backward_queries_with_rules(
        Q, K, V, dO, stats, dQ, dS, scale, scale_log2, together, right, offsets, ends_q, ends_k, mask_aux, score_aux,
        drop_aux,
    ):  # fmt: skip
        tiles = cuda.shared.array(0, uint16, alignment=128)  # Q_i, dO_i, two K_j, two V_j
        note = cuda.shared.array(6, int32)  # what is the same for all threads and tiles: registers are few
        live_s = cuda.shared.array(warps, int32)
        whole_s = cuda.shared.array(warps, int32)
        q = cuda.local.array(a_size, uint32)
        g = cuda.local.array(a_size, uint32)
        s = cuda.local.array(s_size, float32)
        dp = cuda.local.array(s_size, float32)
        p = cuda.local.array(p_size, uint32)
        P = cuda.local.array(w_size, float32)
        lse_r = cuda.local.array(rows, float32)
        D_r = cuda.local.array(rows, float32)
        dQ_acc = cuda.local.array(q_size, float32)

        Hq, Nq = int32(Q.shape[1]), int32(Q.shape[2])
        Hk, Nk = int32(K.shape[1]), int32(K.shape[2])
        Tr = int32(uint32(Nq + Br - 1) // uint32(Br))
        Tc = int32(uint32(Nk + Bc - 1) // uint32(Bc))
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
        offset, end_q = int32(offsets[b]), int32(ends_q[b])
        # What lies past the keys in use, or past what the tile's last row may see, is not read, whatever it holds.
        end_k = int32(min(min(row0 + Br, end_q) + offset + right, ends_k[b]))
        if cuda.threadIdx.x == 0:
            note[0], note[1], note[2], note[3], note[4], note[5] = b, h, row0, offset, end_k, h_k

        # load: Q_i and dO_i, Br x d and Br x dv elements, once; the first live K_j and V_j
        n, whole = rule.seek(live_s, whole_s, b, h, row0, int32(0), Tc, Nq, Nk, offset, mask_aux)
        if n < Tc:
            tile.load_queries(tiles, 0, Q[b, h], row0, end_q)
            tile.load_queries(tiles, G_AT, dO[b, h], row0, end_q)
            tile.load(tiles, K_AT, K[b, h_k], int32(n * Bc), end_k)
            tile.load(tiles, V_AT, V[b, h_k], int32(n * Bc), end_k)
        cp_async_commit()
        grad.hold_stats(stats[b, h], row0, end_q, lse_r, D_r)
        grad.zero(dQ_acc)

        at, first = int32(0), True
        while n < Tc:
            cp_async_wait()
            cuda.syncthreads()  # K_j and V_j are whole, and those before them have been read
            b, h, row0, offset = note[0], note[1], note[2], note[3]
            # load: the next live K_j and V_j, Bc x d and Bc x dv elements, while this tile is worked on
            n_next, whole_next = rule.seek(live_s, whole_s, b, h, row0, int32(n + 1), Tc, Nq, Nk, offset, mask_aux)
            if n_next < Tc:
                tile.load(tiles, int32(K_AT + STAGE - at), K[b, note[5]], int32(n_next * Bc), note[4])
                tile.load(tiles, int32(V_AT + STAGE - at), V[b, note[5]], int32(n_next * Bc), note[4])
            cp_async_commit()
            q_at, g_at = grad.at_rows(tiles, 0), grad.at_rows(tiles, G_AT)
            if hold and first:
                tile.hold_queries(q, tiles, q_at)
                tile.hold_queries(g, tiles, g_at)
            first = False

            row_w, col0 = rule.part_of(tile.thread(), row0, int32(n * Bc))
            kind = rule.kind_of(b, h, row_w, col0, Nq, Nk, offset, whole, mask_aux)
            edge, seen = kind == 1 or col0 + Bc > Nk, uint32(0xFFFFFFFF)
            if kind == 0:  # the same for all lanes of the warp
                seen = uint32(0)
            elif edge:
                seen = rule.visible(b, h, row_w, col0, Nq, Nk, offset, kind == 2, mask_aux)
            if ballot(seen != uint32(0)) != 0:  # some lane has something to do
                if dropping:
                    keeps = rule.kept(b, h, row_w, col0, Nq, Nk, drop_aux)
                # scores, and the weights they had
                grad.clear(s)
                grad.multiply(q, tiles, q_at, grad.at_columns(tiles, int32(K_AT + at)), s)
                if keeping:
                    rule.weigh(s, P, scale, lse_r, int32(0), b, h, row_w, col0, Nq, Nk, offset, score_aux)
                elif scored:
                    rule.weigh(s, p, scale, lse_r, int32(0), b, h, row_w, col0, Nq, Nk, offset, score_aux)
                else:
                    grad.weigh_rows(s, scale_log2, lse_r)
                if edge:
                    rule.hide(s, seen)

                # gradient of the scores
                if dropping:
                    grad.clear(dp)
                    grad.multiply(g, tiles, g_at, grad.at_columns(tiles, int32(V_AT + at)), dp)
                    rule.drop_products(dp, keeps, drop_aux[0], D_r, int32(0))
                else:
                    grad.begin_rows(dp, D_r)
                    grad.multiply(g, tiles, g_at, grad.at_columns(tiles, int32(V_AT + at)), dp)
                grad.gradient(s, dp, p)
                if keeping:
                    rule.write_bias_gradient(P, dp, seen, row_w, col0, Nq, Nk, dS[b, h])

                # accumulate
                tile.accumulate(p, tiles, grad.at_sums(tiles, int32(K_AT + at)), dQ_acc)
            n, whole, at = n_next, whole_next, int32(STAGE - at)

        # write: dQ_i, Br x d elements, once
        cuda.syncthreads()  # Q_i has been read: dQ_i may take its place
        grad.stage(dQ_acc, scale, tiles)
        cuda.syncthreads()  # dQ_i is whole
        tile.write(tiles, dQ[note[0], note[1]], note[2])

    backward_queries_with_rules.jit_options = {"launch_bounds": (shape.threads, blocks) if blocks else shape.threads}
    return backward_queries_with_rules


def backward_clear(dS):
    """dS = 0, (B, Hq, Nq, Nk), a block a row: what the pairs of tiles that are not visited have of it."""
    Hq, Nq = dS.shape[1], dS.shape[2]
    r, h, b = cuda.blockIdx.x % Nq, cuda.blockIdx.x // Nq % Hq, cuda.blockIdx.x // (Nq * Hq)
    for c in range(cuda.threadIdx.x, dS.shape[3], cuda.blockDim.x):
        dS[b, h, r, c] = float32(0.0)  # clear: a row's Nk elements
