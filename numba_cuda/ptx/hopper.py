"""The instructions of sm_90a that step 6 is made of, as typed functions: wgmma, mbarrier, TMA, setmaxnreg.

A *warpgroup* is four warps, 128 threads, the first a multiple of 4. Its threads run these together; those of `mbarrier`
and TMA one thread runs alone. Arrays here are register arrays (``cuda.local.array`` indexed by constants only): a
function takes the whole array, and the compiler keeps its elements in registers. Addresses are 32-bit addresses of
shared memory, as from ``smem_address``.

Where an accumulator's elements are (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16", figure for D): warp w
of the warpgroup has rows 16 w ... 16 w + 15, and lane t in it

    acc[4 n + 0], acc[4 n + 1]    row t // 4,      columns 8 n + 2 (t % 4), + 1
    acc[4 n + 2], acc[4 n + 3]    row t // 4 + 8,  the same columns

which is also the layout of a 64 x 16 operand A in registers, two columns packed in each: P goes from the product that
made it into the next one without leaving the thread.

**Source**: PTX ISA 9.0, sections "Asynchronous Warpgroup Level Matrix Instructions", "mbarrier", "Data Movement and
Conversion Instructions: Tensor copy", "setmaxnreg".
"""

from functools import cache, wraps

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

F32, I32, I64, VOID = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.VoidType()
PTX_TYPE = {"fp16": "f16", "bf16": "bf16"}
SWIZZLE_ATOM = 1024  # bytes: 8 rows of 128, the unit that the 128-byte swizzle permutes within
MADE = {}  # instruction -> (name of the function here that made it, its arguments): what a stand-in must know of it


def made(factory):
    """Make one instruction for each set of arguments, and note it in `MADE`."""

    @cache
    def make(*arguments):
        instruction = factory(*arguments)
        MADE[instruction] = factory.__name__, arguments
        return instruction

    return wraps(factory)(make)


def assembly(builder, returns, takes, text, constraints, args):
    """Emit one inline-assembly call, never moved or dropped."""
    return builder.call(ir.InlineAsm(ir.FunctionType(returns, takes), text, constraints, side_effect=True), args)


def elements(context, builder, array_type, array, count, first=0):
    """Pointers to ``count`` elements of a register array."""
    data = context.make_array(array_type)(context, builder, array).data
    return [builder.gep(data, [ir.Constant(I64, first + k)], inbounds=True) for k in range(count)]


def plain(text, *names_and_types):
    """An intrinsic that only runs ``text``: $0, $1 ... are its arguments, each given by its Numba type."""
    machine = {types.uint32: (I32, "r"), types.int32: (I32, "r"), types.uint64: (I64, "l"), types.int64: (I64, "l")}
    takes = [machine[kind][0] for kind in names_and_types]
    constraints = ",".join([machine[kind][1] for kind in names_and_types] + ["~{memory}"])

    def codegen(context, builder, sig, args):
        assembly(builder, VOID, takes, text, constraints, args)
        return context.get_dummy_value()

    def typed(*args):
        return signature(types.void, *names_and_types), codegen

    # Numba reads the number of arguments off the function's own signature.
    names = ", ".join(f"a{k}" for k in range(len(names_and_types)))
    scope = {"typed": typed}
    exec(f"def instruction(typingctx, {names}):\n    return typed()", scope)
    return intrinsic(scope["instruction"])


# ---- wgmma -----------------------------------------------------------------------------------------------------------


def k_major(rows):
    """The constant half of the descriptor of a tile stored [slab][row][64]: rows run along M or N, columns along K.

    Bits: 62 - 63 swizzle (1: 128 bytes), 32 - 45 stride offset (8 rows, in units of 16 bytes), 16 - 29 leading offset
    (unused under this swizzle). The address, in units of 16 bytes, is or-ed into bits 0 - 13.
    """
    return (1 << 62) | ((SWIZZLE_ATOM >> 4) << 32) | (1 << 16)


def mn_major(rows):
    """Likewise where the tile's rows run along K and its columns along N: the leading offset leads to the next slab."""
    return (1 << 62) | ((SWIZZLE_ATOM >> 4) << 32) | (((rows * 128) >> 4) << 16)


@made
def wgmma_shared(N, dtype, negate=False):
    """acc (+)= A B^T for one m64 nN k16 step: both operands in shared memory, K-major.

    Returns ``f(acc, A, B, keep)``: ``acc`` float32[N / 2], descriptors as uint64, ``keep`` int32: 0 to start from zero.
    ``negate`` turns the sign of A. PTX: ``wgmma.mma_async.sync.aligned.m64nNk16.f32.{f16,bf16}``.
    """
    R = N // 2
    kind = PTX_TYPE[dtype]
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, ${R + 2}, 0; wgmma.mma_async.sync.aligned.m64n{N}k16.f32.{kind}.{kind} "
        f"{{{','.join(f'${k}' for k in range(R))}}}, ${R}, ${R + 1}, p, {-1 if negate else 1}, 1, 0, 0; }}"
    )
    constraints = ",".join(["=f"] * R + ["l", "l", "r"] + [str(k) for k in range(R)])

    @intrinsic
    def wgmma(typingctx, acc, A, B, keep):
        def codegen(context, builder, sig, args):
            _update(context, builder, sig.args[0], args[0], R, [I64, I64, I32], text, constraints, list(args[1:]))
            return context.get_dummy_value()

        return signature(types.void, acc, types.uint64, types.uint64, types.int32), codegen

    return wgmma


@made
def wgmma_registers(N, dtype):
    """acc (+)= A B for one m64 nN k16 step: A in registers, B in shared memory with rows along K (MN-major).

    Returns ``f(acc, A, k, B, keep)``: ``acc`` float32[N / 2]; ``A`` uint32 register array of packed pairs, of which
    elements 4 k ... 4 k + 3 are this step's; ``B`` descriptor; ``keep`` as above. ``k`` is a constant, once unrolled.
    """
    R = N // 2
    kind = PTX_TYPE[dtype]
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, ${R + 5}, 0; wgmma.mma_async.sync.aligned.m64n{N}k16.f32.{kind}.{kind} "
        f"{{{','.join(f'${k}' for k in range(R))}}}, {{{','.join(f'${R + k}' for k in range(4))}}}, ${R + 4}, "
        f"p, 1, 1, 1; }}"
    )
    constraints = ",".join(["=f"] * R + ["r"] * 4 + ["l", "r"] + [str(k) for k in range(R)])

    @intrinsic
    def wgmma(typingctx, acc, A, k, B, keep):
        def codegen(context, builder, sig, args):
            data = context.make_array(sig.args[1])(context, builder, args[1]).data
            first = builder.mul(args[2], ir.Constant(I64, 4))
            a = [builder.load(builder.gep(data, [builder.add(first, ir.Constant(I64, e))])) for e in range(4)]
            takes = [I32] * 4 + [I64, I32]
            _update(context, builder, sig.args[0], args[0], R, takes, text, constraints, [*a, args[3], args[4]])
            return context.get_dummy_value()

        return signature(types.void, acc, A, types.int64, types.uint64, types.int32), codegen

    return wgmma


@made
def wgmma_wait(pending, *lengths):
    """Wait until at most ``pending`` groups are in flight; ``f(array, ...)`` with float32 arrays of these lengths.

    The arrays are those the finished groups wrote: named here, so that the compiler reads none of their elements
    before. Without that, ptxas finds a register in use by a product in flight and runs all products one by one.
    """
    R = sum(lengths)
    text = f"wgmma.wait_group.sync.aligned {pending};"
    constraints = ",".join(["=f"] * R + [str(k) for k in range(R)] + ["~{memory}"])

    def codegen(context, builder, sig, args):
        pointers = []
        for kind, array, length in zip(sig.args, args, lengths, strict=True):
            pointers += elements(context, builder, kind, array, length)
        _through(builder, pointers, [], text, constraints, [])
        return context.get_dummy_value()

    if len(lengths) == 1:

        @intrinsic
        def wait(typingctx, a):
            return signature(types.void, a), codegen

    else:

        @intrinsic
        def wait(typingctx, a, b):
            return signature(types.void, a, b), codegen

    return wait


def _update(context, builder, array_type, array, length, takes, text, constraints, operands):
    _through(builder, elements(context, builder, array_type, array, length), takes, text, constraints, operands)


def _through(builder, pointers, takes, text, constraints, operands):
    """Load the elements, pass them through the assembly as tied registers, store what comes out."""
    before = [builder.load(pointer) for pointer in pointers]
    returns = ir.LiteralStructType([F32] * len(pointers))
    after = assembly(builder, returns, takes + [F32] * len(pointers), text, constraints, operands + before)
    for k, pointer in enumerate(pointers):
        builder.store(builder.extract_value(after, k), pointer)


wgmma_fence = plain("wgmma.fence.sync.aligned;")
wgmma_commit = plain("wgmma.commit_group.sync.aligned;")

# ---- mbarrier --------------------------------------------------------------------------------------------------------

# (address, arrivals that complete a phase)
mbarrier_init = plain("mbarrier.init.shared::cta.b64 [$0], $1;", types.uint32, types.uint32)
# Makes the initialised barriers visible to the copy engine.
mbarrier_fence = plain("fence.mbarrier_init.release.cluster;")
# (address): one arrival
mbarrier_arrive = plain("mbarrier.arrive.shared::cta.b64 _, [$0];", types.uint32)
# (address, bytes): one arrival, and that many bytes of copies to come in this phase
mbarrier_expect = plain("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", types.uint32, types.uint32)
# (address, parity): until the phase of that parity is complete. A new barrier is in phase 0, so that waiting for
# parity 1 returns at once: the phase before the first counts as complete.
mbarrier_wait = plain(
    "{ .reg .pred p; AGAIN_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; "
    "@p bra DONE_${:uid}; bra AGAIN_${:uid}; DONE_${:uid}: }",
    types.uint32, types.uint32,
)  # fmt: skip

# ---- TMA, registers, named barriers ----------------------------------------------------------------------------------

# (to, tensor map, mbarrier, column, row, head, batch): copy a box of the tensor to shared memory; what lies outside
# the tensor arrives as zeros. Its bytes are counted off the mbarrier's phase.
tma_load = plain(
    "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1, {$3, $4, $5, $6}], [$2];",
    types.uint32, types.uint64, types.uint32, types.int32, types.int32, types.int32, types.int32,
)  # fmt: skip
# (tensor map): what the host copied to this address is what the copy engine will see, not what lay there before
tensor_map_fence = plain("fence.proxy.tensormap::generic.acquire.gpu [$0], 128;", types.uint64)
# (name, threads): a barrier among as many threads as are named; sync waits, arrive does not
barrier_sync = plain("bar.sync $0, $1;", types.uint32, types.uint32)
barrier_arrive = plain("bar.arrive $0, $1;", types.uint32, types.uint32)


@made
def set_registers(kind, count):
    """Give ("inc") or release ("dec") registers until each thread of this warpgroup has ``count``, a multiple of 8."""
    return plain(f"setmaxnreg.{kind}.sync.aligned.u32 {count};")


# ---- small ones ------------------------------------------------------------------------------------------------------


@intrinsic
def smem_address(typingctx, array):
    """The 32-bit shared-memory address of a shared array's first element."""

    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        shared = builder.addrspacecast(data, ir.PointerType(data.type.pointee, addrspace=3))
        return builder.ptrtoint(shared, I32)

    return signature(types.uint32, array), codegen


@intrinsic
def gmem_address(typingctx, array):
    """The 64-bit address of a global array's first element."""

    def codegen(context, builder, sig, args):
        return builder.ptrtoint(context.make_array(sig.args[0])(context, builder, args[0]).data, I64)

    return signature(types.uint64, array), codegen


@intrinsic
def ex2(typingctx, x):
    """2**x in fp32; subnormal results are 0. PTX: ``ex2.approx.ftz.f32``."""

    def codegen(context, builder, sig, args):
        call = ir.InlineAsm(ir.FunctionType(F32, [F32]), "ex2.approx.ftz.f32 $0, $1;", "=f,f")
        return builder.call(call, args)

    return signature(types.float32, types.float32), codegen


@intrinsic
def reciprocal(typingctx, x):
    """1 / x in fp32, within one unit in the last place. PTX: ``rcp.approx.ftz.f32``."""

    def codegen(context, builder, sig, args):
        call = ir.InlineAsm(ir.FunctionType(F32, [F32]), "rcp.approx.ftz.f32 $0, $1;", "=f,f")
        return builder.call(call, args)

    return signature(types.float32, types.float32), codegen


@intrinsic
def fmax(typingctx, a, b):
    """The larger in one instruction; of a number and NaN the number. PTX: ``max.f32``."""

    def codegen(context, builder, sig, args):
        call = ir.InlineAsm(ir.FunctionType(F32, [F32, F32]), "max.ftz.f32 $0, $1, $2;", "=f,f,f")
        return builder.call(call, args)

    return signature(types.float32, types.float32, types.float32), codegen


@made
def pack(dtype):
    """``f(low, high)``: two fp32 rounded to nearest-even, in one uint32. PTX: ``cvt.rn.{f16x2,bf16x2}.f32``."""
    text = f"cvt.rn.{PTX_TYPE[dtype]}x2.f32 $0, $2, $1;"

    @intrinsic
    def packed(typingctx, low, high):
        def codegen(context, builder, sig, args):
            return builder.call(ir.InlineAsm(ir.FunctionType(I32, [F32, F32]), text, "=r,f,f"), args)

        return signature(types.uint32, types.float32, types.float32), codegen

    return packed


# (address, four words): one 16-byte store
store_16 = plain(
    "st.global.v4.b32 [$0], {$1, $2, $3, $4};", types.uint64, types.uint32, types.uint32, types.uint32, types.uint32
)


@intrinsic
def trade(typingctx, word, across):
    """The word of the lane whose number differs in the bits of ``across``. PTX: ``shfl.sync.bfly.b32``."""

    def codegen(context, builder, sig, args):
        return assembly(builder, I32, [I32, I32], "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", "=r,r,r", args)

    return signature(types.uint32, types.uint32, types.int32), codegen


@intrinsic
def uniform(typingctx, word):
    """A value that all lanes of a warp have, such that the compiler knows it.

    What is the same in all lanes may live in uniform registers, where wgmma wants its descriptors and from where
    branches are taken together; a reduction over the warp is written there. PTX: ``redux.sync.or.b32``.
    """

    def codegen(context, builder, sig, args):
        return assembly(builder, I32, [I32], "redux.sync.or.b32 $0, $1, -1;", "=r,r", args)

    return signature(types.int32, types.int32), codegen


@intrinsic
def quotient(typingctx, a, b):
    """a // b of non-negative int32, in 32 bits and unchecked; Numba's own is of 64, rounds down and looks for b = 0."""

    def codegen(context, builder, sig, args):
        return builder.udiv(*args)

    return signature(types.int32, types.int32, types.int32), codegen
