"""What every step does with a tile: load it, multiply it, mask it, reduce its rows. One routine each for all steps.

A block of TY x TX threads works on Br x Bc scores. Thread (ty, tx) owns the scores

    rows ty, ty + TY, ty + 2 TY, ...   x   columns tx, tx + TX, tx + 2 TX, ...

and the same rows of O with output columns tx, tx + TX, ...: a row is shared by the TX threads of one ty.
Neighbouring threads take neighbouring columns, so global loads coalesce, and shared tiles have rows one
word longer than their data, so that TX rows read at one column fall into TX different banks.

Tiles in shared memory are fp32 whatever the storage type; a thread's own scores, m, l and O_acc are registers.
Steps 0 - 4 differ only in the order in which they call these routines.
"""

import math
from types import ModuleType

from numba import cuda
from numba.cuda.types import float32

from flash_cuda.parts.elements import MASKED, exp2, log2, narrow, widen


def tile_ops(Br, Bc, D, TY, TX):
    """The routines for one tile shape, as device functions.

    Parameters
    ----------
    Br, Bc : int
        Rows of the query tile and of the key tile; multiples of TY and TX.
    D : int
        Head dims the tile has room for, a multiple of TX; the real d and dv are at most D.
    TY, TX : int
        The block's threads, TX of them along a row.
    """
    RY, CX, VX = Br // TY, Bc // TX, D // TX
    NEG_INF, LN2 = -math.inf, math.log(2.0)

    @cuda.jit(device=True)
    def load(tile, X, row0, col0):
        """Copy the part of X (rows, columns) from (row0, col0) into shared memory as fp32; zeros past X's end."""
        rows, cols = tile.shape[0], tile.shape[1] - 1  # the last column is padding against bank conflicts
        for e in range(cuda.threadIdx.x, rows * cols, TY * TX):
            r, c = e // cols, e % cols
            # Guard: the last tile is ragged, and d need not fill the tile. One element moved.
            if row0 + r < X.shape[0] and col0 + c < X.shape[1]:
                tile[r, c] = widen(X[row0 + r, col0 + c])
            else:
                tile[r, c] = float32(0.0)

    @cuda.jit(device=True)
    def zero(O_acc):
        """O_acc = 0."""
        for a in range(RY):
            for v in range(VX):
                O_acc[a, v] = float32(0.0)

    @cuda.jit(device=True)
    def start(m, l, O_acc):
        """The state of rows that have seen no key: the identity of the online softmax."""
        for a in range(RY):
            m[a] = float32(NEG_INF)
            l[a] = float32(0.0)
        zero(O_acc)

    @cuda.jit(device=True)
    def scores(Q_s, K_s, scale, s):
        """s = scale * Q_i K_j^T, each thread its own RY x CX scores: outer products over the head dim."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        for a in range(RY):
            for b in range(CX):
                s[a, b] = float32(0.0)
        k = cuda.local.array(CX, float32)
        for c in range(D):  # columns past d are zero in both tiles
            for b in range(CX):
                k[b] = K_s[tx + b * TX, c]
            for a in range(RY):
                q = Q_s[ty + a * TY, c]
                for b in range(CX):
                    s[a, b] += q * k[b]
        for a in range(RY):
            for b in range(CX):
                s[a, b] *= scale

    @cuda.jit(device=True)
    def mask(s, row0, col0, Nk, diag):
        """Scores of keys past the end or above the diagonal become -inf: key j is seen by row r iff j <= r + diag."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        for a in range(RY):
            last = min(row0 + ty + a * TY + diag, Nk - 1)
            for b in range(CX):
                if col0 + tx + b * TX > last:
                    s[a, b] = float32(NEG_INF)

    @cuda.jit(device=True)
    def share_row_max(s, part):
        """Each thread leaves the maximum of its own columns, a row at a time."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        for a in range(RY):
            m = s[a, 0]
            for b in range(1, CX):
                m = max(m, s[a, b])
            part[ty + a * TY, tx] = m

    @cuda.jit(device=True)
    def update_max(part, m, alpha):
        """m_new = max(m, row maximum of the tile); alpha = 2^(m - m_new), what older sums are worth now."""
        ty = cuda.threadIdx.x // TX
        for a in range(RY):
            m_new = m[a]
            for k in range(TX):
                m_new = max(m_new, part[ty + a * TY, k])
            # A row that has seen no key has m = m_new = -inf, and -inf - (-inf) is NaN; its sums are 0 anyway.
            alpha[a] = float32(1.0) if m_new == float32(NEG_INF) else exp2(m[a] - m_new)
            m[a] = m_new

    @cuda.jit(device=True)
    def share_exp(s, m, P_s, part):
        """P = 2^(s - m) into shared memory, MASKED where a key is not seen; partial row sums into ``part``."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        for a in range(RY):
            total = float32(0.0)
            for b in range(CX):
                p = float32(MASKED)
                # Guard: s = -inf means masked, and with m = -inf the difference would be NaN.
                if s[a, b] != float32(NEG_INF):
                    p = exp2(s[a, b] - m[a])
                    total += p
                P_s[ty + a * TY, tx + b * TX] = p
            part[ty + a * TY, tx] = total

    @cuda.jit(device=True)
    def update_sum(part, alpha, l):
        """l = alpha * l + row sum of the tile."""
        ty = cuda.threadIdx.x // TX
        for a in range(RY):
            total = float32(0.0)
            for k in range(TX):
                total += part[ty + a * TY, k]
            l[a] = alpha[a] * l[a] + total

    @cuda.jit(device=True)
    def rescale(O_acc, alpha):
        """O_acc = alpha * O_acc, row by row."""
        for a in range(RY):
            for v in range(VX):
                O_acc[a, v] *= alpha[a]

    @cuda.jit(device=True)
    def accumulate(P_s, V_s, O_acc):
        """O_acc += P V_j. A masked key is skipped, not multiplied by 0: its V may hold NaN, and 0 * NaN is NaN."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        value = cuda.local.array(VX, float32)
        for k in range(Bc):
            for v in range(VX):
                value[v] = V_s[k, tx + v * TX]
            for a in range(RY):
                p = P_s[ty + a * TY, k]
                if not p < float32(0.0):
                    for v in range(VX):
                        O_acc[a, v] += p * value[v]

    @cuda.jit(device=True)
    def write(O_acc, l, m, O, lse, row0):
        """O = O_acc / l in the storage type, lse = ln 2 (m + log2 l); 0 and -inf for a row that has seen no key."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        for a in range(RY):
            row = row0 + ty + a * TY
            if row < O.shape[0]:  # guard: the last query tile is ragged
                for v in range(VX):
                    # Guard: dv need not fill D, and a row without keys has l = 0. One element of O stored.
                    if tx + v * TX < O.shape[1]:
                        o = float32(0.0) if l[a] == float32(0.0) else O_acc[a, v] / l[a]
                        O[row, tx + v * TX] = narrow(o, O)
                if tx == 0:  # one of the row's TX threads stores its lse
                    lse[row] = float32(NEG_INF) if l[a] == float32(0.0) else float32(LN2) * (m[a] + log2(l[a]))

    @cuda.jit(device=True)
    def record(trace_j, m, l, O_acc, row0):
        """The state after key tile j, for ``verify exact`` and ``verify trace``: m (log2 units), l, O_acc."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        for a in range(RY):
            row = row0 + ty + a * TY
            if row < trace_j.shape[0]:
                if tx == 0:
                    trace_j[row, 0] = m[a]
                    trace_j[row, 1] = l[a]
                for v in range(VX):
                    if tx + v * TX < trace_j.shape[1] - 2:
                        trace_j[row, 2 + tx + v * TX] = O_acc[a, v]

    @cuda.jit(device=True)
    def keep(O_acc, m, l, O_hbm, m_hbm, l_hbm, row0):
        """Store a query tile's state in global memory between two visits; one thread of a row stores its m and l."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        for a in range(RY):
            row = row0 + ty + a * TY
            if row < m_hbm.shape[0]:  # guard: the last query tile is ragged
                if tx == 0:
                    m_hbm[row] = m[a]
                    l_hbm[row] = l[a]
                for v in range(VX):
                    if tx + v * TX < O_hbm.shape[1]:  # guard: dv need not fill D
                        O_hbm[row, tx + v * TX] = O_acc[a, v]

    @cuda.jit(device=True)
    def fetch(O_hbm, m_hbm, l_hbm, m, l, O_acc, row0):
        """Load what ``keep`` stored; rows and columns that do not exist start anew."""
        start(m, l, O_acc)
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        for a in range(RY):
            row = row0 + ty + a * TY
            if row < m_hbm.shape[0]:
                m[a] = m_hbm[row]
                l[a] = l_hbm[row]
                for v in range(VX):
                    if tx + v * TX < O_hbm.shape[1]:
                        O_acc[a, v] = O_hbm[row, tx + v * TX]

    @cuda.jit(device=True)
    def write_scores(s, S, row0, col0):
        """Store the tile's scores in S (Nq, Nk)."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        for a in range(RY):
            for b in range(CX):
                row, col = row0 + ty + a * TY, col0 + tx + b * TX
                if row < S.shape[0] and col < S.shape[1]:  # guard: ragged in both directions
                    S[row, col] = s[a, b]

    @cuda.jit(device=True)
    def write_output(O_acc, O, row0):
        """Store O in its storage type, as it is."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        for a in range(RY):
            row = row0 + ty + a * TY
            for v in range(VX):
                if row < O.shape[0] and tx + v * TX < O.shape[1]:  # guard: ragged rows, dv need not fill D
                    O[row, tx + v * TX] = narrow(O_acc[a, v], O)

    return as_module(load, zero, start, scores, mask, share_row_max, update_max, share_exp, update_sum, rescale,
                   accumulate, keep, fetch, write_scores, write_output, write, record)


def as_module(*routines):
    """The routines as attributes of a module object, the one namespace that Numba resolves at compile time."""
    module = ModuleType("tile")
    for routine in routines:
        setattr(module, routine.py_func.__name__, routine)
    return module
