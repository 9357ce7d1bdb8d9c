"""Scalars: how a kernel widens storage types to fp32, rounds back, and takes powers of two.

Every function here is written twice. The Python body is what the emulator runs; the overload beside it
is what the compiler inlines. One name, so that a kernel's text serves both.

bfloat16 travels as its 16 bits (uint16): Numba's own bfloat16 needs NVRTC and a C++ shim for each conversion,
while two integer instructions do the same on every architecture since sm_75.
"""

import math

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic, overload
from numba.cuda.typing import signature

MASKED = -1.0  # a probability is never negative, so this marks "key not visible" where P is stored


def widen(x):
    """The stored element ``x`` (fp32, fp16 or bf16) as fp32; exact."""
    return np.float32(x)


def narrow(x, like):
    """fp32 ``x`` rounded to nearest-even in the storage type of the array ``like``."""
    return like.dtype.type(x)


def exp2(x):
    """2**x in fp32; exact for integers in [-126, 127] (checked by ``verify exact``).

    Here in fp64 and rounded: with some processors NumPy's own in fp32 is off by an ulp at 127.
    """
    return np.float32(np.exp2(np.float64(x)))


def log2(x):
    """Base-2 logarithm in fp32; here, as `exp2`, in fp64 and rounded."""
    return np.float32(np.log2(np.float64(x)))


@intrinsic
def _bits_to_f32(typingctx, bits):
    """The fp32 number whose bit pattern is the uint32 ``bits``."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], ir.FloatType())

    return signature(types.float32, types.uint32), codegen


@intrinsic
def _f32_to_bits(typingctx, x):
    """The bit pattern of the fp32 number ``x``."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return signature(types.uint32, types.float32), codegen


def bf16_bits(bits):
    """fp32 bits (uint32) to the bits of the nearest bf16, ties to even; a NaN stays a (quiet) NaN.

    Adding 0x7FFF plus the lowest kept bit carries into the kept half exactly when round-half-even goes up.
    """
    u32 = types.uint32
    if (bits & u32(0x7FFFFFFF)) > u32(0x7F800000):
        return types.uint16((bits >> u32(16)) | u32(0x0040))
    return types.uint16((bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16))


@overload(widen, inline="always")
def _widen(x):
    if x == types.uint16:  # bf16: its bits are the upper half of an fp32
        return lambda x: _bits_to_f32(types.uint32(x) << types.uint32(16))
    return lambda x: types.float32(x)


@overload(bf16_bits)
def _bf16_bits(bits):
    return bf16_bits


@overload(narrow)
def _narrow(x, like):
    if like.dtype == types.uint16:
        return lambda x, like: bf16_bits(_f32_to_bits(x))
    if like.dtype == types.float16:
        return lambda x, like: types.float16(x)
    return lambda x, like: types.float32(x)


@overload(exp2)
def _exp2(x):
    return lambda x: math.exp2(types.float32(x))


@overload(log2)
def _log2(x):
    return lambda x: math.log2(types.float32(x))


STORAGE = {  # dtype name -> (NumPy type at the public face, type on the device)
    "fp32": (np.dtype(np.float32), np.dtype(np.float32)),
    "fp16": (np.dtype(np.float16), np.dtype(np.float16)),
    "bf16": (np.dtype(ml_dtypes.bfloat16), np.dtype(np.uint16)),
}
