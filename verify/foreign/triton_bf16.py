"""How wrong Triton multiplies two bf16 tiles: the interpreters of some versions take the bits for integers."""

import torch
import triton
import triton.language as tl

N = 16


@triton.jit
def _product(a_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a = tl.load(a_ptr + at)
    tl.store(out_ptr + at, tl.dot(a, a))


def error() -> float:
    """Largest error of a product of two tiles of ones."""
    out = torch.zeros(N, N)
    _product[(1,)](torch.ones(N, N, dtype=torch.bfloat16), out, N=N)
    return float((out - N).abs().max())
