"""What step 5 does with a tile: copy it in, multiply it on tensor cores, reduce its rows in registers. One warp's work.

A block has one warp for each 16 M rows of its query tile, and nothing that a warp computes crosses to another: only
the tiles in shared memory are common. A lane holds fragments as in ``ptx``: of S, for each of its M bands of 16 rows,

    s[4 (a NB + n) + e]     row 16 a + lane // 4 + 8 (e // 2),  key 8 n + 2 (lane % 4) + e % 2

likewise ``O_acc`` with output columns in the place of keys, and m, l, alpha [2 a + e // 2] for its 2 M rows. A row is
shared by the four lanes of a *quad*, so its maximum takes two exchanges. The sum l stays in four parts until the end.

Tiles in shared memory are rows of D 16-bit elements, in *chunks* of 8 (16 bytes). Eight rows are read at one chunk by
``ldmatrix``; in plain order they would lie in the same banks. So row r keeps chunk c in the place of c ^ swizzle(r),
and any eight neighbouring rows cover all 32 banks. The exclusive or touches only the low bits of c, so a lane needs
four start addresses (one for each pair of chunks in a group of 8) and reaches everything else by constants.

A register array that a loop indexes needs the loop unrolled. From sm_100 on the compiler tells how often a loop runs
only where the step of Numba's ``range`` is short enough for selections; what is computed from a loop's variable becomes
part of that step, if the variable is used nowhere else. So none is used in one product alone: x in s[4 a NB + x + e]
goes in steps of 4, where n in s[4 (a NB + n) + e] would leave s in local memory.
"""

import math

from numba import cuda
from numba.cuda.types import float32, int32, uint32

from flash_cuda.parts.elements import log2
from flash_cuda.parts.straight import repeated
from flash_cuda.parts.tile_ops import as_module
from flash_cuda.ptx import (
    address_of,
    copy_in,
    copy_out,
    cp_async_16,
    cp_async_part,
    ex2,
    fma,
    fmax,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mma_bf16,
    mma_bf16_apart,
    mma_f16,
    mma_f16_apart,
    pack_bf16,
    pack_f16,
    shfl_xor,
    store_global_16,
    store_shared_2,
    thread_index,
)


def swizzling(D):
    """(shift, mask) of the tile's swizzle, (r >> shift) & mask: as many rows as lie in one line of 128 bytes share it.

    With G the largest power of two, at most 8, that divides the D / 8 chunks of a row, 8 / G rows fill 128 bytes.
    """
    G = math.gcd(D // 8, 8)
    return (8 // G).bit_length() - 1, G - 1


def tensor_ops(Br, Bc, D, warps, dtype, fill, hold, fresh, apart=False):
    """The routines for one tile shape, as device functions.

    Parameters
    ----------
    Br, Bc : int
        Rows of the query tile, a multiple of 16 ``warps``, and of the key tile, a multiple of 16.
    D : int
        Head dims the tile has room for, a multiple of 16.
    warps : int
    dtype : "fp16" or "bf16"
    fill : "whole", "padded" or "single"
        How rows come in and go out: D elements by 16 bytes; fewer, by 16 bytes, and zeros; element by element.
    hold : bool
        Whether a warp's fragments of Q stay in registers, rather than being read again for each key tile.
    fresh : bool
        Whether addresses are computed anew for each tile, because registers are few.
    apart : bool
        Whether the compiler is that of sm_100 and later: S and O, then, are handed to products one by one.
    """
    T, M = 32 * warps, Br // (16 * warps)
    KD, KB, NB, ND = D // 16, Bc // 16, Bc // 8, D // 8
    SHIFT, MASK = swizzling(D)
    WAYS = (MASK + 1) // 2  # pairs of chunks that the swizzle permutes among themselves
    GROUPS = KD // WAYS
    ROW, GROUP = 2 * D, 32 * WAYS  # bytes of a row, and of such a group
    K_AT, V_AT = Br * D, Br * D + 2 * Bc * D
    ACROSS = MASK + 1  # threads along a row when copying: a thread's rows then all have one swizzle
    DOWN, STEP = ACROSS.bit_length() - 1, T // ACROSS
    NEG_INF, LN2 = -math.inf, math.log(2.0)
    mma, pack = (mma_f16, pack_f16) if dtype == "fp16" else (mma_bf16, pack_bf16)
    if apart:
        mma = mma_f16_apart if dtype == "fp16" else mma_bf16_apart
    whole, single = fill == "whole", fill == "single"

    @cuda.jit(device=True)
    def kept_index():
        """The thread's number, in a register."""
        return int32(cuda.threadIdx.x)

    # Where the fragments of O and S fill the registers, nothing else shall stay in them.
    thread = thread_index if fresh else kept_index

    @cuda.jit(device=True)
    def place(r, c):
        """Where row r of a tile has its chunk c."""
        return r * D + (c ^ ((r >> SHIFT) & MASK)) * 8

    def copier(rows):
        @cuda.jit(device=True)
        def load(tile, at, X, row0, end):
            """Begin to copy X's rows row0 ... into the tile at tile[at ...]; zeros past its columns.

            In the place of rows past ``end`` the last one before it is read again: they count for nothing, and what X
            holds there, a NaN or an infinity, is not touched.
            """
            t = thread()
            r, chunk = t >> DOWN, t & MASK
            first = address_of(tile, at + place(r, chunk))
            for a in range(0, rows, STEP):
                if rows % STEP == 0 or r + a < rows:
                    # A thread's rows are 8 or more apart and swizzled alike, but where a block is one small warp.
                    to = first + a * ROW if STEP % 8 == 0 else address_of(tile, at + place(r + a, chunk))
                    row = min(int32(row0 + r + a), int32(end - 1))
                    for c in range(0, ND, ACROSS):
                        if whole:
                            cp_async_16(tile, to + c * 16, X, row, chunk * 8, c * 8)
                        else:  # d need not fill the tile
                            count = min(max(int32(X.shape[1]) - int32((chunk + c) * 8), 0), 8)
                            cp_async_part(tile, to + c * 16, X, row, chunk * 8, c * 8, count)

        @cuda.jit(device=True)
        def load_single(tile, at, X, row0, end):
            """The same for rows that have gaps or begin off 16-byte boundaries: one element at a time, at once."""
            for e in range(thread(), rows * D, T):
                r, c = e // D, e % D
                to = at + place(r, c >> 3) + (c & 7)
                if c < X.shape[1]:  # guard: d need not fill the tile. One element moved.
                    copy_in(tile, to, X, min(row0 + r, end - 1), c)
                else:
                    tile[to] = 0

        return load_single if single else load

    @cuda.jit(device=True)
    def starts(tiles):
        """Where this lane begins to read Q_i, the first K tile and the first V tile with ``ldmatrix``."""
        t = thread()
        # Q: rows 0-7 and 8-15 at 8 columns, then at the next 8: a0 ... a3.
        q_at = address_of(tiles, place((t >> 5) * (16 * M) + (t & 15), (t & 31) >> 4))
        # K: keys 0-7 at twice 8 columns, then keys 8-15: b0 b1 of two blocks of scores.
        k_at = address_of(tiles, K_AT + place((t & 7) + ((t & 16) >> 1), (t >> 3) & 1))
        # V, transposed: keys 0-15 at 8 columns, then at the next 8: b0 b1 of two blocks of O.
        v_at = address_of(tiles, V_AT + place(t & 15, (t & 31) >> 4))
        return int32(q_at), int32(k_at), int32(v_at)

    @cuda.jit(device=True)
    def hold_queries(q, tiles, q_at):
        """The warp's fragments of Q, into registers."""
        for g in range(GROUPS):
            for w in range(WAYS):
                for a in range(M):
                    ldmatrix_x4(q, 4 * (a * KD + g * WAYS + w), tiles, (q_at ^ 32 * w) + g * GROUP + a * 16 * ROW)

    @cuda.jit(device=True)
    def start(m, l_s, O_acc):
        """The state of rows that have seen no key: the identity of the online softmax."""
        for r in range(2 * M):
            m[r] = float32(NEG_INF)
            l_s[r, thread()] = float32(0.0)
        for x in range(0, 4 * M * ND, 4):
            for e in range(4):
                O_acc[x + e] = float32(0.0)

    @cuda.jit(device=True)
    def scores(q, tiles, q_at, k_at, s):
        """s = Q_i K_j^T, not yet scaled. A fragment of K serves all M bands of rows."""
        b = cuda.local.array(4, uint32)
        for x in range(0, 4 * M * NB, 4):
            for e in range(4):
                s[x + e] = float32(0.0)
        for g in range(GROUPS):
            for w in range(WAYS):  # 16 columns of Q and K
                if not hold:
                    for a in range(M):
                        ldmatrix_x4(q, 4 * (a * KD + g * WAYS + w), tiles, (q_at ^ 32 * w) + g * GROUP + a * 16 * ROW)
                for n in range(KB):  # 16 keys
                    ldmatrix_x4(b, 0, tiles, (k_at ^ 32 * w) + g * GROUP + n * 16 * ROW)
                    for a in range(M):
                        mma(s, 4 * (a * NB + 2 * n), q, 4 * (a * KD + g * WAYS + w), b, 0)

    @cuda.jit(device=True)
    def rescore(s, scale):
        """s = scale * s; where the scale is not positive, so that it cannot wait until after the maximum."""
        for x in range(0, 4 * M * NB, 4):
            for e in range(4):
                s[x + e] *= scale

    @cuda.jit(device=True)
    def mask(s, row0, col0, Nk, diag):
        """Scores of keys past the end or above the diagonal become -inf: key j is seen by row r iff j <= r + diag."""
        lane = thread() & 31
        # How far the warp's first row sees into the tile, and how far there are keys, from this lane's first column on:
        # counted from the tile, so that the compiler has nothing to keep in registers from one tile to the next.
        sight, end = int32(row0 - col0 + diag) - 2 * (lane & 3), int32(Nk - 1 - col0) - 2 * (lane & 3)
        for a in range(M):
            for e in range(4):
                last = int32(min(sight + (lane >> 2) + 16 * a + 8 * (e // 2), end) - e % 2)
                for n in range(NB):
                    if int32(8 * n) > last:
                        s[4 * (a * NB + n) + e] = float32(NEG_INF)

    @cuda.jit(device=True)
    def softmax(s, scale, m, l_s, alpha, p):
        """m, l and alpha with the tile's scores; its weights 2^(scale s - m), rounded, as A fragments p."""
        for r in range(2 * M):
            a, h = r // 2, 2 * (r % 2)
            top = float32(NEG_INF)
            for x in range(0, 4 * NB, 4):
                at = 4 * a * NB + x + h
                top = fmax(top, fmax(s[at], s[at + 1]))
            top = fmax(top, shfl_xor(top, 1))
            top = fmax(top, shfl_xor(top, 2))
            m_new = fmax(m[r], scale * top)
            # A row that has seen no key has m_new = -inf, and -inf - (-inf) is NaN: any finite number does instead.
            base = float32(0.0) if m_new == float32(NEG_INF) else m_new
            alpha[r] = ex2(m[r] - base)
            m[r] = m_new
            total = float32(0.0)
            for n in range(NB):
                at = 4 * (a * NB + n) + h
                # One instruction each: the scale goes into the subtraction of the maximum.
                p0, p1 = ex2(fma(s[at], scale, -base)), ex2(fma(s[at + 1], scale, -base))
                total += p0 + p1  # in fp32, before they are rounded for the product
                p[2 * (a * NB + n) + r % 2] = pack(p0, p1)
            t = thread()
            l_s[r, t] = alpha[r] * l_s[r, t] + total

    @cuda.jit(device=True)
    def rescale_band(O_acc, a, alpha):
        """16 of the warp's rows; a call for each, since together they may be too long a loop to unroll."""
        for x in range(0, 4 * ND, 4):
            for e in range(4):
                O_acc[4 * a * ND + x + e] *= alpha[2 * a + e // 2]

    rescale_all = repeated(rescale_band, M)

    @cuda.jit(device=True)
    def rescale(O_acc, alpha):
        """O_acc = alpha * O_acc, row by row."""
        rescale_all(O_acc, 0, alpha)

    @cuda.jit(device=True)
    def accumulate(p, tiles, v_at, O_acc):
        """O_acc += P V_j. The fragments of two neighbouring 8 x 8 blocks of P are one A fragment."""
        b = cuda.local.array(4, uint32)
        for k in range(KB):  # 16 keys
            for g in range(GROUPS):
                for w in range(WAYS):  # 16 columns of V
                    ldmatrix_x4_trans(b, 0, tiles, (v_at ^ 32 * w) + g * GROUP + k * 16 * ROW)
                    for a in range(M):
                        mma(O_acc, 4 * a * ND + 8 * (g * WAYS + w), p, 2 * (a * NB + 2 * k), b, 0)

    @cuda.jit(device=True)
    def whole_sum(part):
        """The sum of a quad's four parts, to each of its lanes."""
        part += shfl_xor(part, 1)
        return part + shfl_xor(part, 2)

    @cuda.jit(device=True)
    def stage_row(O_acc, r, m, l_s, lse, row0, O_s):
        """The r-th of the lane's rows; a call for each, as above."""
        t = thread()
        lane, a, h = t & 31, r // 2, 2 * (r % 2)
        row = (t >> 5) * (16 * M) + 16 * a + (lane >> 2) + 8 * (r % 2)
        total = whole_sum(l_s[r, thread()])
        empty = total == float32(0.0)
        share = float32(0.0) if empty else float32(1.0) / total
        for n in range(ND):
            x = 4 * (a * ND + n) + h
            to = place(row, n) + 2 * (lane & 3)
            store_shared_2(O_s, to, pack(O_acc[x] * share, O_acc[x + 1] * share))
        if lane & 3 == 0 and row0 + row < lse.shape[0]:  # one of the row's four lanes; guard: a ragged tile
            lse[row0 + row] = float32(NEG_INF) if empty else float32(LN2) * (m[r] + log2(total))

    stage_all = repeated(stage_row, 2 * M)

    @cuda.jit(device=True)
    def stage(O_acc, m, l_s, lse, row0, O_s):
        """O = O_acc / l, rounded, into shared memory; lse = ln 2 (m + log2 l) out. 0 and -inf for a row with no key."""
        stage_all(O_acc, 0, m, l_s, lse, row0, O_s)

    @cuda.jit(device=True)
    def write(O_s, O, row0):
        """Store the tile's rows of O, 16 bytes at a time."""
        t = thread()
        r, chunk = t >> DOWN, t & MASK
        for a in range(0, Br, STEP):
            for c in range(0, ND, ACROSS):
                row, column = int32(row0 + r + a), (chunk + c) * 8
                # Guard: ragged rows, and dv need not fill D. Eight elements of O stored.
                if (Br % STEP == 0 or r + a < Br) and row < O.shape[0] and (whole or column < O.shape[1]):
                    store_global_16(O, row, column, O_s, place(r + a, chunk) + c * 8)

    @cuda.jit(device=True)
    def write_single(O_s, O, row0):
        """The same element by element, where dv is no multiple of 8."""
        for e in range(cuda.threadIdx.x, Br * D, T):
            r, c = e // D, e % D
            if row0 + r < O.shape[0] and c < O.shape[1]:  # guard: as above. One element of O stored.
                copy_out(O, row0 + r, c, O_s, place(r, c >> 3) + (c & 7))

    @cuda.jit(device=True)
    def record(trace_j, m, l_s, O_acc, row0):
        """The state after key tile j, for ``verify exact`` and ``verify trace``: m (log2 units), l, O_acc."""
        lane = thread() & 31
        for r in range(2 * M):
            a, h = r // 2, 2 * (r % 2)
            row = row0 + 16 * a + (lane >> 2) + 8 * (r % 2)
            total = whole_sum(l_s[r, thread()])
            if row < trace_j.shape[0]:
                if lane & 3 == 0:
                    trace_j[row, 0] = m[r]
                    trace_j[row, 1] = total
                for x in range(2 * ND):
                    column = 8 * (x // 2) + 2 * (lane & 3) + x % 2
                    if column < trace_j.shape[1] - 2:
                        trace_j[row, 2 + column] = O_acc[4 * (a * ND + x // 2) + h + x % 2]

    module = as_module(starts, hold_queries, start, scores, rescore, mask, softmax, rescale, accumulate, stage, record)
    module.load_queries, module.load, module.thread = copier(Br), copier(Bc), thread
    module.write = write_single if single else write
    return module
