"""What the backward kernels do with a tile beyond `tile_ops`: products with P and dS, also transposed, and row sums.

On the lane map of `tile_ops` a thread owns, of the sums over queries, key rows ty, ty + TY, ... of the tile and the
columns tx, tx + TX, ... A pair whose key is hidden is skipped, not multiplied by 0: its K, V, Q or dO may hold NaN.
"""

from numba import cuda
from numba.cuda.types import float32

from flash_cuda.parts.elements import narrow, widen
from flash_cuda.parts.tile_ops import as_module


def gradient_ops(Br, Bc, D, TY, TX):
    """The routines for one tile shape, as device functions; parameters as `tile_ops.tile_ops`."""
    RY, CY, VX = Br // TY, Bc // TY, D // TX
    SX = min(VX, 8)  # columns of a sum that comes beside those of dK and dV: more find no registers

    @cuda.jit(device=True)
    def share_row_products(O, dO, row0, part):
        """Each thread leaves the sum of dO * O over its own columns, a row at a time."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        for a in range(RY):
            row = row0 + ty + a * TY
            total = float32(0.0)
            if row < O.shape[0]:  # guard: the last query tile is ragged
                for c in range(tx, O.shape[1], TX):
                    total += widen(dO[row, c]) * widen(O[row, c])
            part[ty + a * TY, tx] = total

    @cuda.jit(device=True)
    def write_row_sums(part, dlse, D, row0):
        """D = row sum - dlse: one thread of a row adds up what the others left."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        for a in range(RY):
            row = row0 + ty + a * TY
            if tx == 0 and row < D.shape[0]:
                total = float32(0.0)
                for k in range(TX):
                    total += part[ty + a * TY, k]
                D[row] = total - dlse[row]

    @cuda.jit(device=True)
    def accumulate_rows(P_s, W_s, X_s, acc):
        """acc += W X over the keys of the tile, where P says the key is seen: dQ from dS and K."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        x = cuda.local.array(VX, float32)
        for k in range(Bc):
            for v in range(VX):
                x[v] = X_s[k, tx + v * TX]
            for a in range(RY):
                if not P_s[ty + a * TY, k] < float32(0.0):
                    for v in range(VX):
                        acc[a, v] += W_s[ty + a * TY, k] * x[v]

    @cuda.jit(device=True)
    def add_rows(P_s, W_s, X_s, sums, row0):
        """sums (Nq, d) += W X, atomically: many blocks add to the same rows, in no order."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        acc = cuda.local.array((RY, SX), float32)
        x = cuda.local.array(SX, float32)
        for v0 in range(0, VX, SX):
            for a in range(RY):
                for v in range(SX):
                    acc[a, v] = float32(0.0)
            for k in range(Bc):
                for v in range(SX):
                    x[v] = X_s[k, tx + (v0 + v) * TX]
                for a in range(RY):
                    if not P_s[ty + a * TY, k] < float32(0.0):
                        for v in range(SX):
                            acc[a, v] += W_s[ty + a * TY, k] * x[v]
            for a in range(RY):
                row = row0 + ty + a * TY
                for v in range(SX):
                    column = tx + (v0 + v) * TX
                    if row < sums.shape[0] and column < sums.shape[1]:  # guard: ragged rows, d need not fill D
                        cuda.atomic.add(sums, (row, column), acc[a, v])

    @cuda.jit(device=True)
    def clear_rows(sums, row0):
        """sums = 0 for the rows of a tile; nothing for an array without rows."""
        for e in range(cuda.threadIdx.x, Br * sums.shape[1], TY * TX):
            row = row0 + e // sums.shape[1]
            if row < sums.shape[0]:  # guard: the last query tile is ragged
                sums[row, e % sums.shape[1]] = float32(0.0)

    @cuda.jit(device=True)
    def accumulate_columns(P_s, W_s, X_s, acc):
        """acc += W^T X over the tile's queries where P says the key is seen: dV from P and dO, dK from dS and Q."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        x = cuda.local.array(VX, float32)
        for r in range(Br):
            for v in range(VX):
                x[v] = X_s[r, tx + v * TX]
            for a in range(CY):
                if not P_s[r, ty + a * TY] < float32(0.0):
                    for v in range(VX):
                        acc[a, v] += W_s[r, ty + a * TY] * x[v]

    @cuda.jit(device=True)
    def zero_columns(acc):
        """acc = 0."""
        for a in range(CY):
            for v in range(VX):
                acc[a, v] = float32(0.0)

    @cuda.jit(device=True)
    def write_rows(acc, factor, X, row0):
        """Store factor * acc in X (Nq, d), in its storage type."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        for a in range(RY):
            row = row0 + ty + a * TY
            for v in range(VX):
                if row < X.shape[0] and tx + v * TX < X.shape[1]:  # guard: ragged rows, d need not fill D
                    X[row, tx + v * TX] = narrow(factor * acc[a, v], X)

    @cuda.jit(device=True)
    def write_columns(acc, factor, X, row0):
        """Store factor * acc in X (Nk, d), in its storage type."""
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX
        for a in range(CY):
            row = row0 + ty + a * TY
            for v in range(VX):
                if row < X.shape[0] and tx + v * TX < X.shape[1]:  # guard: ragged keys, d need not fill D
                    X[row, tx + v * TX] = narrow(factor * acc[a, v], X)

    return as_module(share_row_products, write_row_sums, accumulate_rows, add_rows, clear_rows, accumulate_columns,
                     zero_columns, write_rows, write_columns)  # fmt: skip
