"""What the backward kernels on tensor cores do with a tile beyond ``tensor_ops``: weights, their gradient, and sums.

A block owns R *rows*, and walks over tiles of C *columns*: keys and queries in the kernel for dK and dV, queries and
keys in the one for dQ. So S and dP, of M bands of 16 rows a warp, are always rows of the warp by columns of the tile,

    s[4 (a NB + n) + e]     row 16 a + lane // 4 + 8 (e // 2),  column 8 n + 2 (lane % 4) + e % 2

and P and dS, rounded, are A fragments in their lanes for the sums that the rows own, in either kernel. Only dQ of the
one-pass kernel adds over the rows: there dS goes through shared memory and comes back transposed. All warps share that
product, each with some queries by some columns of dQ.
"""

import math

from numba import cuda
from numba.cuda.types import float32, int32, uint32

from flash_cuda.parts.tensor_ops import swizzling
from flash_cuda.parts.tile_ops import as_module
from flash_cuda.ptx import (
    address_of,
    ex2,
    fma,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mma_bf16,
    mma_bf16_apart,
    mma_f16,
    mma_f16_apart,
    pack_bf16,
    pack_f16,
    red_add,
    red_add_4,
    store_shared_2,
    thread_index,
)
from flash_cuda.ptx.global_memory import load_global_4


def sharing(C, D, warps):
    """(WQ, WC): how warps share C queries by D columns of dQ: as many warps as can, then the least read by each.

    A warp has a power of two of 16 queries, and pairs of chunks that start where the swizzle lets constants reach them.
    """
    ways = max((swizzling(D)[1] + 1) // 2, 1)

    def fits(across, down):
        queries, pairs = C // 16 // down, D // 16 // across
        return (C // 16 % down == 0 and D // 16 % across == 0 and queries & (queries - 1) == 0
                and (pairs % ways == 0 or ways % pairs == 0))  # fmt: skip

    pairs = [(q, c) for q in range(1, warps + 1) for c in range(1, warps // q + 1) if fits(c, q)]
    return min(pairs, key=lambda pair: (-pair[0] * pair[1], C // pair[0] + D // pair[1]))


def tensor_gradient_ops(R, C, D, warps, dtype, hold, fresh, vector=False, apart=False):
    """The routines for one tile shape, as device functions; parameters as `tensor_ops.tensor_ops`.

    Parameters
    ----------
    R, C : int
        Rows of the tiles that a block keeps, a multiple of 16 ``warps``, and of those it walks over, of 16.
    hold : bool
        Whether a warp's fragments of what the block keeps stay in registers.
    vector : bool
        Whether sums of dQ are added to by four neighbours at once (sm_90), which decides how they lie in memory.
    apart : bool
        As `tensor_ops.tensor_ops`.
    """
    T, M = 32 * warps, R // (16 * warps)
    KD, CB, NB, ND = D // 16, C // 16, C // 8, D // 8
    SHIFT, MASK = swizzling(D)
    WAYS = max((MASK + 1) // 2, 1)
    GROUPS = KD // WAYS
    ROW, GROUP = 2 * D, 32 * WAYS  # bytes of a row, and of a group of chunks that the swizzle permutes
    W_SHIFT, W_MASK = swizzling(C)  # the same for the tile of dS, whose rows are C elements
    W_WAYS = max((W_MASK + 1) // 2, 1)
    WQ, WC = sharing(C, D, warps)
    QM, QC = CB // WQ, KD // WC  # of a warp's part of dQ: bands of 16 queries, pairs of chunks
    PART, A_SIZE = 8 * QM * QC, 4 * QM  # its elements in a lane, and those of dS that they take at once
    KEPT = -(-2 * C // T)
    INF = math.inf
    ONCE, EACH, LANE = (4, 128, 4) if vector else (1, 32, 1)
    mma, pack = (mma_f16, pack_f16) if dtype == "fp16" else (mma_bf16, pack_bf16)
    if apart:
        mma = mma_f16_apart if dtype == "fp16" else mma_bf16_apart

    @cuda.jit(device=True)
    def kept_index():
        """The thread's number, in a register."""
        return int32(cuda.threadIdx.x)

    thread = thread_index if fresh else kept_index

    @cuda.jit(device=True)
    def place(r, c):
        """Where row r of a tile has its chunk c."""
        return r * D + (c ^ ((r >> SHIFT) & MASK)) * 8

    @cuda.jit(device=True)
    def place_w(r, c):
        """The same in the tile of dS."""
        return r * C + (c ^ ((r >> W_SHIFT) & W_MASK)) * 8

    @cuda.jit(device=True)
    def at_rows(tiles, at):
        """Where this lane reads A fragments of a kept tile: its warp's rows 0-7 and 8-15, then 8 columns on."""
        t = thread()
        return int32(address_of(tiles, at + place((t >> 5) * (16 * M) + (t & 15), (t & 31) >> 4)))

    @cuda.jit(device=True)
    def at_columns(tiles, at):
        """Where it reads B fragments, rows of a tile as columns: rows 0-7 at twice 8 columns, then rows 8-15."""
        t = thread()
        return int32(address_of(tiles, at + place((t & 7) + ((t & 16) >> 1), (t >> 3) & 1)))

    @cuda.jit(device=True)
    def at_sums(tiles, at):
        """Where it reads B fragments transposed, rows of a tile to be summed over: rows 0-15, then 8 columns on."""
        t = thread()
        return int32(address_of(tiles, at + place(t & 15, (t & 31) >> 4)))

    @cuda.jit(device=True)
    def load_stats(stats, row0, end, kept):
        """lse (log2 units) and D of the next C queries, one or two numbers a thread, into registers."""
        for x in range(KEPT):
            e = int32(thread() + x * T)
            row, what = int32(row0 + (e & (C - 1))), int32(e // C)
            if e < 2 * C:
                if row < end:  # guard: the last query tile is ragged. One number moved.
                    kept[x] = stats[what, row]
                else:  # a row that is not there has no weight
                    kept[x] = float32(0.0) if what else float32(INF)

    @cuda.jit(device=True)
    def share_stats(kept, stats_s, stage):
        """From there into shared memory: C numbers lse, then C numbers D."""
        for x in range(KEPT):
            e = int32(thread() + x * T)
            if e < 2 * C:
                stats_s[stage, e] = kept[x]

    @cuda.jit(device=True)
    def hold_stats(stats, row0, end, lse_r, D_r):
        """lse and D of a lane's own rows, where queries are the rows."""
        for r in range(2 * M):
            t = thread()
            row = int32(row0 + (t >> 5) * (16 * M) + 16 * (r // 2) + ((t & 31) >> 2) + 8 * (r % 2))
            lse_r[r], D_r[r] = float32(INF), float32(0.0)
            if row < end:  # guard: ragged rows. Two numbers moved.
                lse_r[r], D_r[r] = stats[0, row], stats[1, row]

    @cuda.jit(device=True)
    def zero(acc):
        """acc = 0, for M bands of rows by D columns."""
        for x in range(4 * M * ND):
            acc[x] = float32(0.0)

    @cuda.jit(device=True)
    def clear(s):
        """s = 0."""
        for x in range(4 * M * NB):
            s[x] = float32(0.0)

    @cuda.jit(device=True)
    def begin(s, stats_s, stage):
        """s = -D of the column's query, so that the product that follows makes it dP - D."""
        column = int32(C + 2 * (thread() & 3))
        for n in range(NB):
            D0, D1 = stats_s[stage, column + 8 * n], stats_s[stage, column + 8 * n + 1]
            for band in range(0, 4 * M * NB, 4 * NB):
                at = band + 4 * n
                s[at], s[at + 1], s[at + 2], s[at + 3] = -D0, -D1, -D0, -D1

    @cuda.jit(device=True)
    def begin_rows(s, D_r):
        """The same where queries are the rows."""
        for a in range(M):
            for x in range(0, 4 * NB, 4):
                for e in range(4):
                    s[4 * a * NB + x + e] = -D_r[2 * a + e // 2]

    @cuda.jit(device=True)
    def multiply(q, tiles, row_at, column_at, s):
        """s += X Y^T for the rows of a kept tile X and of a walked one Y, a fragment of which serves all M bands."""
        b = cuda.local.array(4, uint32)
        for g in range(GROUPS):
            for w in range(WAYS):  # 16 columns of both
                if not hold:
                    for a in range(M):
                        ldmatrix_x4(q, 4 * (a * KD + g * WAYS + w), tiles, (row_at ^ 32 * w) + g * GROUP + a * 16 * ROW)
                for n in range(CB):  # 16 rows of Y
                    ldmatrix_x4(b, 0, tiles, (column_at ^ 32 * w) + g * GROUP + n * 16 * ROW)
                    for a in range(M):
                        mma(s, 4 * (a * NB + 2 * n), q, 4 * (a * KD + g * WAYS + w), b, 0)

    @cuda.jit(device=True)
    def weigh(s, scale, stats_s, stage):
        """s = P = 2^(scale s - lse), each column with its query's lse."""
        column = int32(2 * (thread() & 3))
        for n in range(NB):
            lse0, lse1 = stats_s[stage, column + 8 * n], stats_s[stage, column + 8 * n + 1]
            for band in range(0, 4 * M * NB, 4 * NB):
                for e in range(0, 4, 2):
                    at = band + 4 * n + e
                    s[at], s[at + 1] = ex2(fma(s[at], scale, -lse0)), ex2(fma(s[at + 1], scale, -lse1))

    @cuda.jit(device=True)
    def weigh_rows(s, scale, lse_r):
        """The same where queries are the rows."""
        for a in range(M):
            for x in range(0, 4 * NB, 4):
                for e in range(4):
                    at = 4 * a * NB + x + e
                    s[at] = ex2(fma(s[at], scale, -lse_r[2 * a + e // 2]))

    @cuda.jit(device=True)
    def hide(s, col0, row0, Nk, diag):
        """P = 0 for keys, the rows, past the end or above the diagonal: query i sees key j iff j <= i + diag."""
        t = thread()
        key = int32(col0 + (t >> 5) * (16 * M) + ((t & 31) >> 2))
        for a in range(M):
            for e in range(4):
                k = int32(key + 16 * a + 8 * (e // 2))
                # The first query that sees it, counted from this lane's first.
                first = int32(k - diag - row0) - int32(2 * (t & 3) + e % 2)
                for n in range(NB):
                    if k >= Nk or int32(8 * n) < first:
                        s[4 * (a * NB + n) + e] = float32(0.0)

    @cuda.jit(device=True)
    def hide_rows(s, row0, col0, Nk, diag):
        """The same where queries are the rows."""
        t = thread()
        row = int32(row0 + (t >> 5) * (16 * M) + ((t & 31) >> 2))
        for a in range(M):
            for e in range(4):
                # The last key that the query sees, counted from this lane's first.
                last = int32(min(row + 16 * a + 8 * (e // 2) + diag, Nk - 1) - col0) - int32(2 * (t & 3) + e % 2)
                for n in range(NB):
                    if int32(8 * n) > last:
                        s[4 * (a * NB + n) + e] = float32(0.0)

    @cuda.jit(device=True)
    def rounded(s, p):
        """P as A fragments."""
        for x in range(2 * M * NB):
            p[x] = pack(s[2 * x], s[2 * x + 1])

    @cuda.jit(device=True)
    def gradient(s, dp, g):
        """dS = P (dP - D) as A fragments; P in fp32."""
        for x in range(2 * M * NB):
            g[x] = pack(s[2 * x] * dp[2 * x], s[2 * x + 1] * dp[2 * x + 1])

    @cuda.jit(device=True)
    def share_gradient(g, tiles, at):
        """dS into shared memory, a row of C queries for each key."""
        t = thread()
        lane = t & 31
        first = int32(at + place_w((t >> 5) * (16 * M) + (lane >> 2), 0) + 2 * (lane & 3))
        for a in range(M):
            for n in range(NB):
                for h in range(2):
                    c = 8 * (n & W_MASK)  # within a group of chunks that the swizzle permutes
                    beyond = 8 * (n - (n & W_MASK)) + (16 * a + 8 * h) * C
                    store_shared_2(tiles, (first ^ c) + beyond, g[2 * (a * NB + n) + h])

    @cuda.jit(device=True)
    def add_queries(tiles, w_at, k_at, sums):
        """sums += dS K over the block's keys, all warps together; each lane's numbers where only it will add."""
        t = thread()
        warp, lane = t >> 5, t & 31
        if warp < WQ * WC:
            band, pair = (warp // WC) * QM, (warp % WC) * QC
            # dS, transposed: keys 0-7 at twice 8 queries, then keys 8-15: a0 ... a3. K, transposed: as `at_sums`.
            a_at = int32(address_of(tiles, w_at + place_w((t & 7) + ((t & 16) >> 1), 2 * band + ((t >> 3) & 1))))
            b_at = int32(address_of(tiles, k_at + place(t & 15, 2 * pair + (lane >> 4))))
            acc, a, b = cuda.local.array(PART, float32), cuda.local.array(A_SIZE, uint32), cuda.local.array(4, uint32)
            for x in range(PART):
                acc[x] = float32(0.0)
            for k in range(R // 16):  # 16 keys
                for q in range(QM):
                    beyond = (q // W_WAYS) * 32 * W_WAYS + k * 32 * C
                    ldmatrix_x4_trans(a, 4 * q, tiles, (a_at ^ 32 * (q % W_WAYS)) + beyond)
                for c in range(QC):  # 16 columns
                    beyond = (c // WAYS) * GROUP + k * 16 * ROW
                    ldmatrix_x4_trans(b, 0, tiles, (b_at ^ 32 * (c % WAYS)) + beyond)
                    for q in range(QM):
                        mma(acc, 8 * (q * QC + c), a, 4 * q, b, 0)
            first = int32(warp * (32 * PART) + lane * LANE)
            for x in range(0, PART, ONCE):
                if vector:
                    red_add_4(sums, first, x // ONCE * EACH, acc, x)
                else:
                    red_add(sums, first, x * EACH, acc, x)

    @cuda.jit(device=True)
    def sums_of(u):
        """(row, column, where) of 16 sums of dQ's tile: 8 columns of a row, and of the row 8 below."""
        block, r = u >> 3, u & 7
        warp, x = block // (PART // 4), block % (PART // 4)
        row = (warp // WC * QM + x // (2 * QC)) * 16 + r
        column = (warp % WC * 2 * QC + x % (2 * QC)) * 8
        return row, column, warp * (32 * PART) + 128 * x + 4 * r * LANE

    @cuda.jit(device=True)
    def gather(sums, i, at, factor, x):
        """x = factor times these 16, the first row's and then the other's."""
        four = cuda.local.array(4, float32)
        for n in range(4):
            load_global_4(four, 0, sums, i, int32(at + n * (4 if vector else 32)))
            for e in range(4):
                # Four neighbours are what a lane has of a pair of columns, or what four lanes have of one of these.
                pair, of = (n, e) if vector else (e, n)
                x[8 * (of // 2) + 2 * pair + of % 2] = factor * four[e]

    @cuda.jit(device=True)
    def stage(acc, factor, X_s):
        """factor * acc, rounded, into shared memory, to be written out."""
        t = thread()
        lane = t & 31
        for r in range(2 * M):
            a, h = r // 2, 2 * (r % 2)
            row = (t >> 5) * (16 * M) + 16 * a + (lane >> 2) + 8 * (r % 2)
            for n in range(ND):
                x = 4 * (a * ND + n) + h
                store_shared_2(X_s, place(row, n) + 2 * (lane & 3), pack(acc[x] * factor, acc[x + 1] * factor))

    return as_module(at_rows, at_columns, at_sums, load_stats, share_stats, hold_stats, zero, clear, begin, begin_rows,
                     multiply, weigh, weigh_rows, hide, hide_rows, rounded, gradient, share_gradient, add_queries,
                     sums_of, gather, stage)  # fmt: skip
