"""What comes after the backward kernel on Hopper: the sums of dQ, scaled and rounded, to where dQ lies."""

from functools import cache

from numba import cuda
from numba.cuda.types import float32, int32, uint64

from flash_cuda.backward_hopper_kernels import Bc
from flash_cuda.parts.hopper_gradient_ops import hopper_gradient_ops
from flash_cuda.parts.hopper_ops import hopper_ops
from flash_cuda.ptx import hopper as ptx
from flash_cuda.ptx.hopper_backward import load_four


@cache
def make_round_kernel(shape, dtype):
    """The kernel that rounds the sums of dQ; grid (B * Hq * Tr * Br / 64), 128 threads."""
    Br, D = shape
    grad, ops = hopper_gradient_ops(Br, Bc, dtype), hopper_ops(Bc, D, dtype)
    NO, parts = D // 2, Br // 64

    def backward_hopper_round(sums, dQ, scale, Nq, d):
        acc = cuda.local.array(NO, float32)
        tid = int32(cuda.threadIdx.x)
        lane = tid & 31
        tile = ptx.quotient(int32(cuda.blockIdx.x), int32(parts))
        part = int32(cuda.blockIdx.x - tile * parts)
        Tr = ptx.quotient(int32(Nq + Br - 1), int32(Br))
        bh = ptx.quotient(tile, Tr)
        at = ptx.gmem_address(sums) + uint64(4 * Br * D) * uint64(tile) + uint64(int32(4 * 64 * D * part + 16 * tid))
        for n in range(NO // 4):
            load_four(acc, 4 * n, at + uint64(16 * 128 * n))
        grad.multiply(acc, scale, NO)
        row = int32((tile - bh * Tr) * Br + part * 64 + tid // 32 * 16 + lane // 4)
        place = int32(bh * Nq + row)
        ops.write(acc, 0, ptx.gmem_address(dQ), place, row < Nq, d, lane)
        ops.write(acc, 1, ptx.gmem_address(dQ), place + 8, row + 8 < Nq, d, lane)

    return backward_hopper_round
