"""The warp-level instructions of sm_80 that step 5 is made of, as typed functions on (array, index) or register arrays.

A *register array* is a ``cuda.local.array`` of one dimension that only constants index once loops are unrolled, so the
compiler keeps its elements in registers; ``(r, at)`` names the elements from r[at] on. Shared tiles are uint16 arrays:
the bits of 16-bit floats, whichever of the two kinds. In *warp-wide* functions all 32 lanes must arrive together.

A fragment is a small matrix of which each lane holds a few elements. With g = lane // 4 and t = lane % 4, in
``mma.sync.m16n8k16`` (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type")

    A, 16 x 16, row-major     a0: row g, columns 2t 2t+1    a1: row g+8, the same     a2, a3: columns 2t+8 2t+9 of these
    B, 16 x 8, column-major   b0: rows 2t 2t+1, column g    b1: rows 2t+8 2t+9 of it
    C and D, 16 x 8           c0 c1: row g, columns 2t 2t+1     c2 c3: row g+8, the same

two 16-bit numbers to a register in A and B, the first in the lower half. Two C fragments side by side have just the
lane map of one A fragment: scores become weights for the next product without leaving their lane.

Here is what the compiler emits, by means of ``ptx.asm``. What the emulator runs in the place of each is in
``ptx.standins``, by the same name.

**Source**: PTX ISA 9.0; the sections are named at each function.
"""

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from flash_cuda.ptx.asm import (
    F32,
    I32,
    I64,
    VOID,
    arithmetic,
    asm,
    bare,
    element,
    global_address,
    int32,
    load,
    registers,
    shared_address,
    store,
)

F32_T, U32_T = types.float32, types.uint32


def _mma(kind, apart=False):
    text = (f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};")
    constraints = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"

    def codegen(context, builder, sig, args):
        at = [registers(context, builder, sig.args[k], args[k], args[k + 1], n, apart and k == 0)
              for k, n in ((0, 8), (2, 4), (4, 4))]  # fmt: skip
        C, A, B = (load(builder, pointer) for pointer in at)
        D = []
        for n in range(2):
            operands = A + B[2 * n : 2 * n + 2] + C[4 * n : 4 * n + 4]
            four = asm(builder, ir.LiteralStructType([F32] * 4), text, constraints, operands, False)
            D += [builder.extract_value(four, k) for k in range(4)]
        store(builder, D, at[0])
        return context.get_dummy_value()

    return codegen


@intrinsic
def mma_f16(typingctx, c, c_at, a, a_at, b, b_at):
    """C (16 x 16, fp32, two fragments side by side) += A (16 x 16) B (16 x 16, likewise) in fp16; warp-wide.

    c[c_at ...] are 8 registers, a[a_at ...] and b[b_at ...] 4 each: just what one `ldmatrix_x4` brings.
    PTX: twice ``mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32``, section "mma". Each product is exact; how the sum
    of seventeen terms rounds is not documented, but a sum that fp32 can hold at every stage comes out exact.
    """
    return signature(types.void, c, c_at, a, a_at, b, b_at), _mma("f16")


@intrinsic
def mma_bf16(typingctx, c, c_at, a, a_at, b, b_at):
    """As `mma_f16` in bf16. PTX: twice ``mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32``, section "mma"."""
    return signature(types.void, c, c_at, a, a_at, b, b_at), _mma("bf16")


@intrinsic
def mma_f16_apart(typingctx, c, c_at, a, a_at, b, b_at):
    """As `mma_f16`, with C's registers one by one, for sm_100 and later (see ``asm.registers``). PTX: the same."""
    return signature(types.void, c, c_at, a, a_at, b, b_at), _mma("f16", True)


@intrinsic
def mma_bf16_apart(typingctx, c, c_at, a, a_at, b, b_at):
    """As `mma_bf16`, likewise. PTX: the same."""
    return signature(types.void, c, c_at, a, a_at, b, b_at), _mma("bf16", True)


def _ldmatrix(suffix):
    text = f"ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{$0,$1,$2,$3}}, [$4];"

    def codegen(context, builder, sig, args):
        address = [int32(builder, args[3])]
        four = asm(builder, ir.LiteralStructType([I32] * 4), text, "=r,=r,=r,=r,r,~{memory}", address)
        values = [builder.extract_value(four, k) for k in range(4)]
        store(builder, values, registers(context, builder, sig.args[0], args[0], args[1], 4))
        return context.get_dummy_value()

    return codegen


@intrinsic
def address_of(typingctx, tile, index):
    """The 32-bit address of tile[index] in shared memory; in the emulator, counted from the tile's start.

    A value that the compiler cannot look into, so that it adds constants to this register in the instructions that use
    it, rather than computing each sum anew. PTX: ``mov.b32``.
    """

    def codegen(context, builder, sig, args):
        address = shared_address(context, builder, sig.args[0], args[0], args[1])
        return asm(builder, I32, "mov.b32 $0, $1;", "=r,r", [address], False)

    return signature(U32_T, tile, index), codegen


@intrinsic
def thread_index(typingctx):
    """The thread's number in its block, read anew at each call and never kept in a register from one tile to the next.

    What is computed from it is not kept either: some instructions a tile, for registers that products need more.
    PTX: ``mov.u32 r, %tid.x``.
    """

    def codegen(context, builder, sig, args):
        return asm(builder, I32, "mov.u32 $0, %tid.x;", "=r", [])

    return signature(types.int32), codegen


@intrinsic
def ldmatrix_x4(typingctx, r, at, tile, address):
    """r[at ... at + 3] = this lane's part of four 8 x 8 matrices of 16-bit elements in ``tile``; warp-wide.

    Lane 8 q + i gives the address (see `address_of`) of row i of matrix q: 8 elements on a 16-byte boundary. Lane
    4 g + t then holds elements 2t and 2t+1 of row g of matrix q in r[at + q].
    PTX: ``ldmatrix.sync.aligned.m8n8.x4.shared.b16``, section "ldmatrix".
    """
    return signature(types.void, r, at, tile, address), _ldmatrix("")


@intrinsic
def ldmatrix_x4_trans(typingctx, r, at, tile, address):
    """As `ldmatrix_x4`, each matrix transposed: lane 4 g + t holds elements 2t and 2t+1 of *column* g.

    PTX: ``ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16``, section "ldmatrix".
    """
    return signature(types.void, r, at, tile, address), _ldmatrix(".trans")


def _cp_async(sized):
    text = "cp.async.cg.shared.global.L2::128B [$0], [$1], 16" + (", $2;" if sized else ";")

    def codegen(context, builder, sig, args):
        source = global_address(context, builder, sig.args[2], *args[2:6])
        size = [builder.mul(int32(builder, args[6]), ir.Constant(I32, 2))] if sized else []
        operands = [int32(builder, args[1]), source, *size]
        asm(builder, VOID, text, "r,l,r,~{memory}" if sized else "r,l,~{memory}", operands)
        return context.get_dummy_value()

    return codegen


@intrinsic
def cp_async_16(typingctx, tile, address, X, row, column, ahead):
    """Begin to copy 8 elements, X[row, column + ahead ...], to ``address`` in the tile; both on 16-byte boundaries.

    The copy passes by the registers and the L1. It is there for this thread after `cp_async_wait`, and for others after
    a barrier besides. PTX: ``cp.async.cg.shared.global [dst], [src], 16``, section "cp.async".
    """
    return signature(types.void, tile, address, X, row, column, ahead), _cp_async(False)


@intrinsic
def cp_async_part(typingctx, tile, address, X, row, column, ahead, count):
    """As `cp_async_16` with the first ``count`` of the elements, and zeros for the rest; with 0 nothing is read.

    PTX: ``cp.async.cg.shared.global [dst], [src], 16, src-size``, section "cp.async".
    """
    return signature(types.void, tile, address, X, row, column, ahead, count), _cp_async(True)


@intrinsic
def cp_async_commit(typingctx):
    """Close a group: this thread's copies since the last one. PTX: ``cp.async.commit_group``."""
    return bare("cp.async.commit_group;")


@intrinsic
def cp_async_wait(typingctx):
    """Wait until all of this thread's groups have arrived. PTX: ``cp.async.wait_group 0``."""
    return bare("cp.async.wait_group 0;")


@intrinsic
def ex2(typingctx, x):
    """2**x in one instruction, to 2 ulp; exact for whole x from -126 on, 0 below. PTX: ``ex2.approx.ftz.f32``."""
    return signature(F32_T, F32_T), arithmetic("ex2.approx.ftz.f32 $0, $1;", "=f,f")


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c, rounded once. PTX: ``fma.rn.f32``."""
    return signature(F32_T, F32_T, F32_T, F32_T), arithmetic("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f")


@intrinsic
def fmax(typingctx, a, b):
    """The larger; a NaN loses to a number. Python's ``max`` would be a comparison and a choice. PTX: ``max.f32``."""
    return signature(F32_T, F32_T, F32_T), arithmetic("max.f32 $0, $1, $2;", "=f,f,f")


@intrinsic
def pack_f16(typingctx, low, high):
    """Two fp32 numbers rounded to fp16, in the halves of a register. PTX: ``cvt.rn.f16x2.f32``, section "cvt"."""
    return signature(U32_T, F32_T, F32_T), arithmetic("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", I32)


@intrinsic
def pack_bf16(typingctx, low, high):
    """Two fp32 numbers rounded to bf16, in the halves of a register. PTX: ``cvt.rn.bf16x2.f32``, section "cvt"."""
    return signature(U32_T, F32_T, F32_T), arithmetic("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", I32)


@intrinsic
def shfl_xor(typingctx, x, mask):
    """The x (fp32) of the lane whose number differs by the bits of ``mask``; warp-wide.

    PTX: ``shfl.sync.bfly.b32``, section "shfl.sync".
    """

    def codegen(context, builder, sig, args):
        text = "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;"
        return asm(builder, F32, text, "=f,f,r", [args[0], int32(builder, args[1])])

    return signature(F32_T, F32_T, mask), codegen


@intrinsic
def ballot(typingctx, condition):
    """A word with a bit for each lane, lane 0 lowest: 1 where ``condition`` holds; warp-wide.

    PTX: ``vote.sync.ballot.b32``, section "vote.sync".
    """

    def codegen(context, builder, sig, args):
        text = "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
        return asm(builder, I32, text, "=r,r", [builder.zext(args[0], I32)])

    return signature(U32_T, types.boolean), codegen


@intrinsic
def store_shared_2(typingctx, tile, index, pair):
    """tile[index], tile[index + 1] = the halves of a register; on a 4-byte boundary. PTX: ``st.shared.b32``."""

    def codegen(context, builder, sig, args):
        address = shared_address(context, builder, sig.args[0], args[0], args[1])
        asm(builder, VOID, "st.shared.b32 [$0], $1;", "r,r,~{memory}", [address, args[2]])
        return context.get_dummy_value()

    return signature(types.void, tile, index, U32_T), codegen


@intrinsic
def store_global_16(typingctx, X, row, column, tile, index):
    """X[row, column ...] = 8 elements, tile[index ...], both on 16-byte boundaries.

    PTX: ``ld.shared.v4.b32``, ``st.global.v4.b32``.
    """

    def codegen(context, builder, sig, args):
        to = global_address(context, builder, sig.args[0], *args[:3], ir.Constant(I32, 0))
        source = shared_address(context, builder, sig.args[3], args[3], args[4])
        text = ("{{ .reg .b32 a, b, c, d; ld.shared.v4.b32 {{a, b, c, d}}, [$1]; "
                "st.global.v4.b32 [$0], {{a, b, c, d}}; }}").replace("{{", "{").replace("}}", "}")
        asm(builder, VOID, text, "l,r,~{memory}", [to, source])
        return context.get_dummy_value()

    return signature(types.void, X, row, column, tile, index), codegen


@intrinsic
def copy_in(typingctx, tile, index, X, row, column):
    """tile[index] = the bits of X[row, column], one 16-bit element, any strides. PTX: ``ld.b16``, ``st.b16``."""

    def codegen(context, builder, sig, args):
        bits = builder.load(element(context, builder, sig.args[2], args[2], args[3:]))
        builder.store(bits, element(context, builder, sig.args[0], args[0], args[1:2]))
        return context.get_dummy_value()

    return signature(types.void, tile, index, X, row, column), codegen


@intrinsic
def copy_out(typingctx, X, row, column, tile, index):
    """X[row, column] = the element whose bits are tile[index], any strides. PTX: ``ld.b16``, ``st.b16``."""

    def codegen(context, builder, sig, args):
        bits = builder.load(element(context, builder, sig.args[3], args[3], args[4:]))
        builder.store(bits, element(context, builder, sig.args[0], args[0], args[1:3]))
        return context.get_dummy_value()

    return signature(types.void, X, row, column, tile, index), codegen


def _red(text, constraints, count):
    def codegen(context, builder, sig, args):
        view = context.make_array(sig.args[0])(context, builder, args[0])
        data, index, ahead = builder.ptrtoint(view.data, I64), int32(builder, args[1]), int32(builder, args[2])
        size = ir.Constant(I32, sig.args[0].dtype.bitwidth // 8)
        at = asm(builder, I64, "mad.wide.s32 $0, $1, $2, $3;", "=l,r,r,l", [index, size, data], False)
        at = builder.add(at, builder.mul(builder.sext(ahead, I64), builder.sext(size, I64)))
        values = load(builder, registers(context, builder, sig.args[3], args[3], args[4], count))
        asm(builder, VOID, text, constraints, [at, *values])
        return context.get_dummy_value()

    return codegen


@intrinsic
def red_add(typingctx, X, index, ahead, r, at):
    """X[index + ahead] += r[at], fp32, atomically; X of one dimension, its elements adjacent.

    PTX: ``red.global.add.f32``, section "red".
    """
    return signature(types.void, X, index, ahead, r, at), _red("red.global.add.f32 [$0], $1;", "l,f,~{memory}", 1)


@intrinsic
def red_add_4(typingctx, X, index, ahead, r, at):
    """As `red_add` for 4 neighbours from a 16-byte boundary on and r[at ... at + 3]; sm_90 and later.

    Each of the four is atomic, not the four together. PTX: ``red.global.add.v4.f32``, section "red".
    """
    text, constraints = "red.global.add.v4.f32 [$0], {$1, $2, $3, $4};", "l,f,f,f,f,~{memory}"
    return signature(types.void, X, index, ahead, r, at), _red(text, constraints, 4)


def _dot(low, high):
    """Text for a sum of 8 products; ``low`` and ``high`` make the halves of a register fp32."""
    both = "".join(f"{low.format(to=f'f{x}', of=x)} {high.format(to=f'h{x}', of=x)} " for x in "ab")
    sums = "fma.rn.f32 t, fa, fb, t; fma.rn.f32 t, ha, hb, t; "
    steps = "".join(f"mov.b32 a, a{k}; mov.b32 b, b{k}; {both}{sums}" for k in range(4))
    text = ("{ .reg .b32 a, b, c, a0, a1, a2, a3, b0, b1, b2, b3; .reg .b16 l, h; .reg .f32 fa, fb, ha, hb, t; "
            "ld.global.v4.b32 {a0, a1, a2, a3}, [$1]; ld.global.v4.b32 {b0, b1, b2, b3}, [$2]; mov.f32 t, $3; "
            f"{steps}mov.f32 $0, t; }}")

    def codegen(context, builder, sig, args):
        at = [global_address(context, builder, sig.args[k], args[k], *args[2:4], ir.Constant(I32, 0)) for k in (0, 1)]
        return asm(builder, F32, text, "=f,l,l,f", [*at, args[4]], False)

    return codegen


@intrinsic
def dot_f16(typingctx, X, Y, row, column, total):
    """total + the 8 products of X[row, column ...] and Y[row, column ...], fp16, on 16-byte boundaries, one by one.

    PTX: ``ld.global.v4.b32``, ``cvt.f32.f16``, ``fma.rn.f32``.
    """
    return signature(F32_T, X, Y, row, column, F32_T), _dot(
        "mov.b32 {{l, h}}, {of}; cvt.f32.f16 {to}, l;", "cvt.f32.f16 {to}, h;")  # fmt: skip


@intrinsic
def dot_bf16(typingctx, X, Y, row, column, total):
    """As `dot_f16` in bf16, whose bits are the upper half of an fp32. PTX: ``shl.b32``, ``and.b32``, ``fma.rn.f32``."""
    return signature(F32_T, X, Y, row, column, F32_T), _dot(
        "shl.b32 c, {of}, 16; mov.b32 {to}, c;", "and.b32 c, {of}, 0xffff0000; mov.b32 {to}, c;")  # fmt: skip
