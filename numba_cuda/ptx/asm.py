"""How an instruction of ``ptx`` is emitted: inline assembly, register arrays as operands, addresses as numbers.

These run in the compiler, on LLVM values. Nothing here is executed by a kernel or by the emulator.
"""

from llvmlite import ir
from numba.cuda import types
from numba.cuda.typing import signature

F32, I16, I32, I64, VOID = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.VoidType()


def asm(builder, returns, text, constraints, args, fixed=True):
    """One inline-assembly call; ``fixed``: never moved across another such, duplicated or dropped."""
    kind = ir.FunctionType(returns, [arg.type for arg in args])
    return builder.call(ir.InlineAsm(kind, text, constraints, side_effect=fixed), args)


def int32(builder, value):
    """An index as 32 bits, which all our shared tiles and register arrays are indexed with."""
    if value.type.width == 32:
        return value
    return builder.trunc(value, I32) if value.type.width > 32 else builder.zext(value, I32)


def registers(context, builder, kind, array, at, count, apart=False):
    """Pointer to ``count`` elements of a register array from ``at`` on, as one vector; ``apart``: a pointer to each.

    Fewer instructions than one by one, before they all vanish: a loop that looks too long is not unrolled, and an array
    that a loop indexes is not kept in registers. But from sm_100 on two fp32 numbers are a type of the machine's, and
    what a loop carries as a vector stands in registers of 64 bits beside those of 32 bits that instructions take.
    """
    data = context.make_array(kind)(context, builder, array).data
    if apart:
        first = builder.gep(data, [at], inbounds=True)
        return [builder.gep(first, [ir.Constant(I32, k)], inbounds=True) for k in range(count)]
    whole = ir.VectorType(data.type.pointee, count).as_pointer()
    return builder.bitcast(builder.gep(data, [at], inbounds=True), whole)


def load(builder, pointer):
    """The elements of a vector in registers, or what is at each of several pointers."""
    if isinstance(pointer, list):
        return [builder.load(each) for each in pointer]
    vector = builder.load(pointer, align=4)
    return [builder.extract_element(vector, ir.Constant(I32, k)) for k in range(vector.type.count)]


def store(builder, values, pointer):
    """Values into a vector in registers, or each to its pointer."""
    if isinstance(pointer, list):
        for value, each in zip(values, pointer, strict=True):
            builder.store(value, each)
        return
    vector = ir.Constant(pointer.type.pointee, ir.Undefined)
    for k, value in enumerate(values):
        vector = builder.insert_element(vector, value, ir.Constant(I32, k))
    builder.store(vector, pointer, align=4)


def shared_address(context, builder, kind, array, index):
    """The 32-bit address, in the window of shared memory, of an element of a shared array."""
    data = context.make_array(kind)(context, builder, array).data
    window = builder.addrspacecast(data, ir.PointerType(data.type.pointee, addrspace=3))
    size = ir.Constant(I32, kind.dtype.bitwidth // 8)
    return builder.add(builder.ptrtoint(window, I32), builder.mul(int32(builder, index), size))


def global_address(context, builder, kind, array, row, column, ahead):
    """The 64-bit address of an element of a two-dimensional global array whose columns are adjacent.

    Rows are less than 2 GiB apart (step 5's check), so one product of 32-bit numbers leads to a row. It is written in
    assembly, since the compiler would take it for one of 64 bits. ``ahead`` is added last, where an instruction can
    hold it.
    """
    view = context.make_array(kind)(context, builder, array)
    data, stride = builder.ptrtoint(view.data, I64), builder.trunc(builder.extract_value(view.strides, 0), I32)
    operands = [int32(builder, row), stride, data]
    at_row = asm(builder, I64, "mad.wide.s32 $0, $1, $2, $3;", "=l,r,r,l", operands, False)
    size = ir.Constant(I32, kind.dtype.bitwidth // 8)
    operands = [int32(builder, column), size, at_row]
    at_column = asm(builder, I64, "mad.wide.s32 $0, $1, $2, $3;", "=l,r,r,l", operands, False)
    return builder.add(at_column, builder.mul(builder.sext(int32(builder, ahead), I64), builder.sext(size, I64)))


def bare(text):
    def codegen(context, builder, sig, args):
        asm(builder, VOID, text, "~{memory}", [])
        return context.get_dummy_value()

    return signature(types.void), codegen


def arithmetic(text, constraints, returns=F32):
    def codegen(context, builder, sig, args):
        return asm(builder, returns, text, constraints, list(args), False)

    return codegen


def element(context, builder, kind, array, indices):
    """Pointer to the bits of one element of an array with any strides."""
    view = context.make_array(kind)(context, builder, array)
    offset = ir.Constant(I64, 0)
    for k, index in enumerate(indices):
        wide = index if index.type.width == 64 else builder.sext(index, I64)
        offset = builder.add(offset, builder.mul(wide, builder.extract_value(view.strides, k)))
    address = builder.add(builder.ptrtoint(view.data, I64), offset)
    return builder.inttoptr(address, I16.as_pointer())
