"""Neighbouring elements between registers, where they are fp32, and global memory, where they may have 16 bits.

One instruction moves as many bytes as there are elements in it; a warp whose lanes are neighbours too moves whole
sectors. Rows of the arrays are less than 2 GiB apart, their columns adjacent. Stand-ins: ``ptx.standins``.

**Source**: PTX ISA 9.0, sections "ld", "st", "cvt".
"""

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from flash_cuda.ptx.asm import F32, I32, VOID, asm, global_address, load, registers, store

WIDE, HALF = types.float32, types.float16  # what has 16 bits and is not fp16 is bf16


def _rounded(builder, kind, values):
    """fp32 numbers as a store takes them: themselves, or two to a register, rounded to nearest-even."""
    if kind == WIDE:
        return values
    text = f"cvt.rn.{'f16' if kind == HALF else 'bf16'}x2.f32 $0, $2, $1;"
    return [asm(builder, I32, text, "=r,f,f", values[k : k + 2], False) for k in range(0, len(values), 2)]


def _store(context, builder, sig, args, values):
    """Store neighbours from X[row, column] on."""
    kind = sig.args[0].dtype
    operands, letter = _rounded(builder, kind, values), "f" if kind == WIDE else "r"
    to = global_address(context, builder, sig.args[0], *args[:3], ir.Constant(I32, 0))
    names = ", ".join(f"${k + 1}" for k in range(len(operands)))
    vector = "" if len(operands) == 1 else f".v{len(operands)}"
    text = f"st.global{vector}.b32 [$0], {{{names}}};" if vector else f"st.global.b32 [$0], {names};"
    asm(builder, VOID, text, ",".join(["l", *letter * len(operands), "~{memory}"]), [to, *operands])
    return context.get_dummy_value()


@intrinsic
def store_global_2(typingctx, X, row, column, low, high):
    """X[row, column], X[row, column + 1] = two fp32 numbers, rounded to X's type; on a boundary of as many bytes.

    PTX: ``st.global.v2.b32``, or ``cvt.rn.f16x2.f32`` (bf16x2) and ``st.global.b32``.
    """

    def codegen(context, builder, sig, args):
        return _store(context, builder, sig, args, list(args[3:]))

    return signature(types.void, X, row, column, WIDE, WIDE), codegen


@intrinsic
def store_global_4(typingctx, X, row, column, r, at):
    """X[row, column ... column + 3] = r[at ... at + 3], as `store_global_2`.

    PTX: ``st.global.v4.b32``, or twice ``cvt.rn.f16x2.f32`` (bf16x2) and ``st.global.v2.b32``.
    """

    def codegen(context, builder, sig, args):
        values = load(builder, registers(context, builder, sig.args[3], args[3], args[4], 4))
        return _store(context, builder, sig, args, values)

    return signature(types.void, X, row, column, r, at), codegen


@intrinsic
def load_global_4(typingctx, r, at, X, row, column):
    """r[at ... at + 3] = X[row, column ... column + 3] in fp32, exact; on a boundary of as many bytes.

    PTX: ``ld.global.v4.b32``, or ``ld.global.v2.b32`` and ``cvt.f32.f16`` or, a bf16 being the upper half of an fp32,
    ``shl.b32`` and ``and.b32``.
    """
    moves = {
        WIDE: "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",
        HALF: "{ .reg .b32 a, b; .reg .b16 l, h; ld.global.v2.b32 {a, b}, [$4]; mov.b32 {l, h}, a; cvt.f32.f16 $0, l; "
              "cvt.f32.f16 $1, h; mov.b32 {l, h}, b; cvt.f32.f16 $2, l; cvt.f32.f16 $3, h; }",
    }  # fmt: skip
    halves = ("{ .reg .b32 a, b, c, d; ld.global.v2.b32 {a, b}, [$4]; shl.b32 c, a, 16; mov.b32 $0, c; "
              "and.b32 d, a, 0xffff0000; mov.b32 $1, d; shl.b32 c, b, 16; mov.b32 $2, c; "
              "and.b32 d, b, 0xffff0000; mov.b32 $3, d; }")  # fmt: skip

    def codegen(context, builder, sig, args):
        text = moves.get(sig.args[2].dtype, halves)
        source = global_address(context, builder, sig.args[2], *args[2:], ir.Constant(I32, 0))
        four = asm(builder, ir.LiteralStructType([F32] * 4), text, "=f,=f,=f,=f,l,~{memory}", [source])
        values = [builder.extract_value(four, k) for k in range(4)]
        store(builder, values, registers(context, builder, sig.args[0], args[0], args[1], 4))
        return context.get_dummy_value()

    return signature(types.void, r, at, X, row, column), codegen
