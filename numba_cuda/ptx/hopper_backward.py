"""The instructions that the backward pass on Hopper needs besides those of ``ptx.hopper``, as typed functions.

Addresses are 32-bit addresses of shared memory, register arrays are indexed by constants only, as there.

**Source**: PTX ISA 9.0, sections "wgmma.mma_async", "cp.async.bulk", "fence.proxy.async", "ld", "st".
"""

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from flash_cuda.ptx.hopper import F32, I32, I64, PTX_TYPE, VOID, assembly, elements, made, plain


def _wgmma(N, dtype, across, first):
    """``f(acc, A, B)``, both operands in shared memory: with ``first`` acc = A B, else acc += A B.

    A product that is not to add needs nothing of what the accumulators were. Said this way, the compiler may use their
    registers for something else until then.
    """
    R, kind, turned = N // 2, PTX_TYPE[dtype], int(across)
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, {int(not first)}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{N}k16.f32.{kind}.{kind} "
        f"{{{','.join(f'${k}' for k in range(R))}}}, ${R}, ${R + 1}, p, 1, 1, {turned}, {turned}; }}"
    )
    tied = [] if first else [str(k) for k in range(R)]
    constraints = ",".join(["=f"] * R + ["l", "l"] + tied)

    @intrinsic
    def wgmma(typingctx, acc, A, B):
        def codegen(context, builder, sig, args):
            pointers = elements(context, builder, sig.args[0], args[0], R)
            before = [] if first else [builder.load(pointer) for pointer in pointers]
            returns, takes = ir.LiteralStructType([F32] * R), [I64, I64] + [F32] * len(before)
            after = assembly(builder, returns, takes, text, constraints, [*args[1:], *before])
            for k, pointer in enumerate(pointers):
                builder.store(builder.extract_value(after, k), pointer)
            return context.get_dummy_value()

        return signature(types.void, acc, types.uint64, types.uint64), codegen

    return wgmma


@made
def wgmma_rows(N, dtype, first):
    """acc (+)= A B^T for one m64 nN k16 step: both operands in shared memory, K-major.

    Returns ``f(acc, A, B)``: ``acc`` float32[N / 2], descriptors as uint64; ``first``: acc is only written.
    """
    return _wgmma(N, dtype, False, first)


@made
def wgmma_across(N, dtype, first):
    """acc (+)= A^T B for one m64 nN k16 step: both operands in shared memory, their rows along K (MN-major).

    Returns ``f(acc, A, B)`` as `wgmma_rows`; A is 16 x 64, B 16 x N.
    """
    return _wgmma(N, dtype, True, first)


# (to, address in global memory, bytes, mbarrier): copy neighbours; both addresses and the number of bytes are multiples
# of 16. The bytes are counted off the mbarrier's phase.
bulk_load = plain(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    types.uint32, types.uint64, types.uint32, types.uint32,
)  # fmt: skip
# What this thread stored to shared memory may be read by wgmma once others know that it came here.
proxy_fence = plain("fence.proxy.async.shared::cta;")
# (address, word)
store_word = plain("st.shared.b32 [$0], $1;", types.uint32, types.uint32)


def _load(text, count, machine):
    """``f(r, at, address)``: ``count`` neighbours to r[at ...]."""
    constraints = ",".join(["=f"] * count + [machine, "~{memory}"])

    def codegen(context, builder, sig, args):
        kind = I32 if machine == "r" else I64
        returns = ir.LiteralStructType([F32] * count)
        values = assembly(builder, returns, [kind], text, constraints, [args[2]])
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        for k in range(count):
            at = builder.add(args[1], ir.Constant(args[1].type, k))
            builder.store(builder.extract_value(values, k), builder.gep(data, [at], inbounds=True))
        return context.get_dummy_value()

    return codegen


@intrinsic
def load_pair(typingctx, r, at, address):
    """r[at], r[at + 1] = two fp32 numbers of shared memory from an 8-byte boundary on. PTX: ``ld.shared.v2.f32``."""
    return signature(types.void, r, at, types.uint32), _load("ld.shared.v2.f32 {$0, $1}, [$2];", 2, "r")


@intrinsic
def load_four(typingctx, r, at, address):
    """r[at ... at + 3] = four fp32 numbers of global memory from a 16-byte boundary on. PTX: ``ld.global.v4.f32``."""
    return signature(types.void, r, at, types.uint64), _load("ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", 4, "l")


@intrinsic
def add_four(typingctx, address, r, at):
    """Four fp32 numbers of global memory += r[at ... at + 3], each atomically, from a 16-byte boundary on.

    PTX: ``red.global.add.v4.f32``.
    """

    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[1])(context, builder, args[1]).data
        at = [builder.add(args[2], ir.Constant(args[2].type, k)) for k in range(4)]
        values = [builder.load(builder.gep(data, [k], inbounds=True)) for k in at]
        text = "red.global.add.v4.f32 [$0], {$1, $2, $3, $4};"
        assembly(builder, VOID, [I64] + [F32] * 4, text, "l,f,f,f,f,~{memory}", [args[0], *values])
        return context.get_dummy_value()

    return signature(types.void, types.uint64, r, at), codegen
