"""Straight code in the place of a loop: one too long to unroll is left a loop, and arrays it indexes on the stack.

How long that is depends on the compiler: nvJitLink 13.0 gives up on loops for sm_100 and later that 13.5 unrolls.
"""

from numba import cuda


def repeated(one, count, step=1):
    """The device function ``run(array, at, ...)``: ``one`` with at, at + step, ... in its place, ``count`` of them."""
    if count == 1:
        return one
    half, odd = repeated(one, count // 2, step), count % 2

    @cuda.jit(device=True, forceinline=True)
    def run(array, at, *rest):
        half(array, at, *rest)
        half(array, at + count // 2 * step, *rest)
        if odd:
            one(array, at + (count - 1) * step, *rest)

    return run
