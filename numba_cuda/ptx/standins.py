"""What the emulator runs for the instructions of ``ptx`` and ``ptx.global_memory``: the same names, lane by lane.

The first argument is the emulator, whose current thread each acts for. ``TABLE`` leads from instruction to stand-in.

Warp-wide ones are a *rendezvous*: a lane leaves what it brings and waits; the last of the 32 to come computes for all.
Registers really travel between lanes here, by the lane maps that the PTX ISA draws, so that a wrong map, a fragment in
the wrong order or a lane that stays away gives a wrong answer or a fault, as on a GPU.
"""

import ml_dtypes
import numpy as np
from numba.cuda.extending import _Intrinsic

from flash_cuda import ptx
from flash_cuda.executors.memory_bits import RUN
from flash_cuda.ptx import global_memory as ptx_global

LANES = np.arange(32)
_G, _T = LANES // 4, LANES % 4
_PAIR = 2 * _T[:, None] + np.arange(2)  # columns 2t, 2t + 1
# Where the elements of a lane's registers stand, in the order of registers and, within one, low half first.
_A_ROW = np.repeat(np.stack([_G, _G + 8, _G, _G + 8], 1), 2, axis=1)
_A_COLUMN = np.concatenate([_PAIR, _PAIR, _PAIR + 8, _PAIR + 8], 1)
_B_ROW = np.concatenate([_PAIR, _PAIR + 8] * 2, 1)
_B_COLUMN = np.repeat(np.stack([_G, _G, _G + 8, _G + 8], 1), 2, axis=1)
_C_ROW = np.repeat(np.stack([_G, _G + 8] * 2, 1), 2, axis=1)
_C_COLUMN = np.concatenate([_PAIR, _PAIR, _PAIR + 8, _PAIR + 8], 1)

TINY = np.float32(2.0**-126)  # the smallest number that .ftz does not flush to zero


def _halves(registers):
    """(lanes, registers) of 32 bits as (lanes, 2 registers) of 16, low half first."""
    return np.ascontiguousarray(registers, dtype="<u4").view("<u2")


def _words(bits):
    """The other way: pairs of 16 bits along the last axis as registers."""
    return np.ascontiguousarray(bits, dtype="<u2").view("<u4").astype(np.int64)


# ---- a warp together


def mma_f16(machine, c, c_at, a, a_at, b, b_at):
    _mma(machine, np.float16, c, c_at, a, a_at, b, b_at)


def mma_bf16(machine, c, c_at, a, a_at, b, b_at):
    _mma(machine, ml_dtypes.bfloat16, c, c_at, a, a_at, b, b_at)


mma_f16_apart, mma_bf16_apart = mma_f16, mma_bf16


def _mma(machine, kind, c, c_at, a, a_at, b, b_at):
    """Summed in fp64 and rounded to fp32 once: exact wherever the tensor core's own sum is."""

    def product(lanes):
        A, B, C = np.empty((16, 16)), np.empty((16, 16)), np.empty((16, 16))
        A[_A_ROW, _A_COLUMN] = _halves([lane[1] for lane in lanes]).view(kind)
        B[_B_ROW, _B_COLUMN] = _halves([lane[2] for lane in lanes]).view(kind)
        C[_C_ROW, _C_COLUMN] = [lane[0] for lane in lanes]
        return (C + A @ B).astype(np.float32)[_C_ROW, _C_COLUMN]

    given = c[c_at : c_at + 8], a[a_at : a_at + 4], b[b_at : b_at + 4]
    c[c_at : c_at + 8] = machine.meet("mma", given, product)


def ldmatrix_x4(machine, r, at, tile, address):
    r[at : at + 4] = _ldmatrix(machine, tile, address, (0, 1, 2))


def ldmatrix_x4_trans(machine, r, at, tile, address):
    r[at : at + 4] = _ldmatrix(machine, tile, address, (0, 2, 1))


def _ldmatrix(machine, tile, address, order):
    first = machine.thread.index // 32 * 32

    def load(addresses):
        matrices = tile.get(np.array(addresses) // 2, RUN, first + LANES).reshape(4, 8, 8).transpose(order)
        # Matrix q's row g, elements 2t and 2t + 1, to register q of lane 4 g + t.
        return _words(matrices.reshape(4, 32, 2))[..., 0].T

    return machine.meet("ldmatrix", address, load)


def shfl_xor(machine, x, mask):
    return machine.meet("shfl", x, lambda lanes: [lanes[k ^ mask] for k in range(32)])


def ballot(machine, condition):
    return machine.meet("ballot", condition, lambda lanes: [sum(1 << k for k in range(32) if lanes[k])] * 32)


# ---- a lane alone


def thread_index(machine):
    return machine.thread.index


def address_of(machine, tile, index):
    return 2 * index


def cp_async_16(machine, tile, address, X, row, column, ahead):
    cp_async_part(machine, tile, address, X, row, column, ahead, RUN)


def cp_async_part(machine, tile, address, X, row, column, ahead, count):
    bits = np.zeros(RUN, np.uint16)
    bits[:count] = X.run(row, column + ahead, count).view(np.uint16)
    machine.thread.copies.begin(tile, address // 2, bits)


def cp_async_commit(machine):
    machine.thread.copies.commit()


def cp_async_wait(machine):
    machine.thread.copies.wait()


def ex2(machine, x):
    y = np.float32(np.exp2(np.float64(x)))  # in fp32 NumPy's is not the same on every processor
    return np.float32(0.0) if y < TINY else y


def fma(machine, a, b, c):
    return np.float32(float(a) * float(b) + float(c))


def fmax(machine, a, b):
    return np.fmax(a, b)


def pack_f16(machine, low, high):
    return int(_words(np.array([low, high], np.float32).astype(np.float16).view(np.uint16))[0])


def pack_bf16(machine, low, high):
    return int(_words(np.array([low, high], np.float32).astype(ml_dtypes.bfloat16).view(np.uint16))[0])


def store_shared_2(machine, tile, index, pair):
    tile.put(index, _halves([[pair]])[0])


def store_global_16(machine, X, row, column, tile, index):
    for k, value in enumerate(tile.get([index], RUN, [machine.thread.index])[0].view(X.dtype)):
        X[row, column + k] = value


def store_global_2(machine, X, row, column, low, high):
    store_global_4(machine, X, row, column, (low, high), 0)


def store_global_4(machine, X, row, column, r, at):
    for k, value in enumerate(r[at : at + 4]):
        X[row, column + k] = X.dtype.type(value)


def load_global_4(machine, r, at, X, row, column):
    for k in range(4):
        r[at + k] = np.float32(X[row, column + k])


def copy_in(machine, tile, index, X, row, column):
    tile[index] = np.asarray(X[row, column]).view(np.uint16)


def copy_out(machine, X, row, column, tile, index):
    X[row, column] = np.uint16(tile[index]).view(X.dtype)


def red_add(machine, X, index, ahead, r, at):
    X.add(index + ahead, r[at])


def red_add_4(machine, X, index, ahead, r, at):
    for k in range(4):
        X.add(index + ahead + k, r[at + k])


def dot_f16(machine, X, Y, row, column, total):
    for x, y in zip(X.run(row, column, RUN), Y.run(row, column, RUN), strict=True):
        total = fma(machine, x, y, total)
    return total


dot_bf16 = dot_f16


TABLE = {instruction: globals()[name] for module in (ptx, ptx_global) for name, instruction in vars(module).items()
         if isinstance(instruction, _Intrinsic)}  # fmt: skip
