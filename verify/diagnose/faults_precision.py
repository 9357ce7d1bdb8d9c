"""Faults of precision: quantities kept in fewer bits than they need, in fp32 and 16-bit kernels alike."""

import ml_dtypes
import numpy as np

from verify.diagnose.fault import fault
from verify.diagnose.reference import Reference

NUMERICS = "18.4.5"
TYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}


def to_bits(x, bits):
    """Rounded to a significand of `bits` bits, of unlimited range."""
    f, e = np.frexp(x)
    return np.ldexp(np.rint(f * 2.0**bits), e - bits)


def narrow(x, dtype):
    """Rounded to a type, and back."""
    return x.astype(TYPES[dtype]).astype(np.float64)


class _Narrow(Reference):
    """One quantity in a type, from tile to tile."""

    WHICH, TYPE = "", ""

    def rounded(self, name, x):
        return narrow(x, self.TYPE) if name == self.WHICH else x


for _type in TYPES:

    @fault(f"O_acc_in_{_type}", f"O_acc kept in {_type}", NUMERICS, "the type of the accumulator: fp32", noisy=True)
    class _(_Narrow):
        WHICH, TYPE, tiled = "O", _type, "Bc order"

    @fault(f"l_in_{_type}", f"l kept in {_type}", NUMERICS, "the type of the statistics: fp32", noisy=True)
    class _(_Narrow):
        WHICH, TYPE, tiled = "l", _type, "Bc order"

    @fault(
        f"O_acc_and_l_in_{_type}",
        f"O_acc and l kept in {_type}",
        NUMERICS,
        "the type of accumulators: fp32",
        noisy=True,
    )
    class _(_Narrow):
        TYPE, tiled = _type, "Bc order"

        def rounded(self, name, x):
            return narrow(x, self.TYPE) if name in "Ol" else x

    @fault(f"S_in_{_type}", f"scores rounded to {_type}", NUMERICS, "the type of S: fp32", noisy=True)
    class _(_Narrow):
        WHICH, TYPE = "S", _type

    @fault(f"S_in_{_type}", f"q.k rounded to {_type}, before the scale", NUMERICS, "the type of S: fp32", noisy=True)
    class _(_Narrow):
        TYPE = _type

        def product(self, Q, K):
            return narrow(super().product(Q, K), self.TYPE)

    @fault(f"P_in_{_type}", f"weights rounded to {_type}", NUMERICS, "the type of P in the second product", noisy=True)
    class _(_Narrow):
        WHICH, TYPE, tiled = "P", _type, "Bc order"

    @fault(f"P_in_{_type}", f"weights rounded to {_type}, in l as well", NUMERICS, "the type of P", noisy=True)
    class _(Reference):
        TYPE, tiled = _type, "Bc order"

        def weights(self, x, m_new, m, tile_max):
            return narrow(super().weights(x, m_new, m, tile_max), self.TYPE)

    @fault(
        f"m_in_{_type}", f"m kept in {_type}, alpha and weights from different m", NUMERICS, "the type of m", noisy=True
    )
    class _(Reference):
        TYPE, tiled = _type, "Bc order"

        def alpha(self, m, m_new, tile_max):
            return super().alpha(narrow(m, self.TYPE), m_new, tile_max)

    @fault(
        "inputs_in_fp16_or_tf32" if _type == "fp16" else "inputs_in_bf16",
        f"inputs rounded to {_type}",
        NUMERICS,
        "the types of Q_i, K_j and V_j",
        noisy=True,
    )
    class _(Reference):
        TYPE = _type

        def inputs(self):
            return [narrow(x, self.TYPE) for x in super().inputs()]


@fault("inputs_in_fp16_or_tf32", "inputs rounded to TF32", NUMERICS, "TF32 tensor cores on fp32 inputs", noisy=True)
class _(Reference):
    def inputs(self):
        return [to_bits(x, 11) for x in super().inputs()]


@fault(
    "inputs_in_fp16_or_tf32",
    "inputs and weights rounded to TF32",
    NUMERICS,
    "TF32 tensor cores on fp32 inputs",
    noisy=True,
)
class _(Reference):
    tiled = "Bc order"

    def inputs(self):
        return [to_bits(x, 11) for x in super().inputs()]

    def rounded(self, name, x):
        return to_bits(x, 11) if name == "P" else x
