"""What the emulator runs for the instructions of ``ptx.hopper``: the same names, in NumPy; see there.

Products are asynchronous: `wgmma` only notes what is to be done and leaves NaN in the accumulators. When all 128
threads have come to the wait, operands are fetched through their descriptors and the swizzle, registers travel by the
lane maps of the PTX ISA, and the results appear. Whoever touches a register of a product in flight, starts one on
registers that are not fenced, or has a buffer overwritten too early, gets a fault or a wrong answer, as on a GPU.
"""

import sys
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numba.cuda.extending import _Intrinsic

from flash_cuda.executors.memory import KernelFault, OutOfBounds, Race
from flash_cuda.executors.memory_bytes import (
    ACCESSES,
    CHUNK,
    MAP_BYTES,
    START,
    WARPGROUP,
    Address,
    Clocked,
    Missing,
    PhaseFault,
)
from flash_cuda.parts.tensor_map import SWIZZLE_COLUMNS
from flash_cuda.ptx import hopper as ptx
from flash_cuda.ptx import standins as ptx_standins

KINDS = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
REGISTER_FILE = 65536  # of a multiprocessor
IN_FLIGHT = np.uint32(0x7FFFBEEF).view(np.float32)  # a NaN that no arithmetic makes

_THREAD = np.arange(WARPGROUP)[:, None]
_FIRST_ROW = 16 * (_THREAD // 32) + _THREAD % 32 // 4


class InFlight(KernelFault):
    """A register of a product that is not finished, or that no fence has handed over to it, was touched."""


class _Product(NamedTuple):
    """One wgmma: where its operands are and what its thread knew."""

    made: tuple
    acc: np.ndarray
    A: object  # a descriptor, or 4 registers
    A_now: np.ndarray | None  # these registers themselves, as they may be overwritten
    B: int
    keep: int
    clock: np.ndarray


class _Thread(Clocked):
    """A thread's products: those of the open group, closed groups, and registers as of its last fence."""

    def __init__(self):
        super().__init__()
        self.open, self.groups = [], []
        self.fenced = {}
        self.maps = frozenset()  # offsets of tensor maps that a fence was given
        self.values = {}  # id of an accumulator in flight -> (what it holds, it)


def known(machine):
    """What the emulator keeps of the present thread's products and clock."""
    thread = machine.thread
    return thread.block.bytes.of(thread, _Thread)


def _layout(registers):
    """Row and column of each accumulator register of each of 128 threads."""
    r = np.arange(registers)
    return _FIRST_ROW + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * (_THREAD % 4) + r % 2


# ---- wgmma


def wgmma_fence(machine):
    mine = known(machine)
    mine.fenced = {id(array): array.copy() for array in machine.thread.registers}


def wgmma_commit(machine):
    mine = known(machine)
    mine.groups.append(mine.open)
    mine.open = []


def wgmma_shared(N, dtype, negate=False):
    def wgmma(machine, acc, A, B, keep):
        start(machine, ("wgmma", N, dtype, negate), acc, A, None, B, keep)

    return wgmma


def wgmma_registers(N, dtype):
    def wgmma(machine, acc, A, k, B, keep):
        now = A[4 * k : 4 * k + 4]
        fenced = known(machine).fenced.get(id(A))
        if machine.watch and (fenced is None or not np.array_equal(fenced[4 * k : 4 * k + 4], now)):
            raise InFlight(f"thread {machine.thread.index}: an operand's registers were written after the last fence")
        start(machine, ("wgmma", N, dtype, False), acc, now.copy(), now, B, keep)

    return wgmma


def start(machine, made, acc, A, A_now, B, keep):
    """Note a product that the present thread starts; `_Product` says what of it."""
    mine = known(machine)
    if len(acc) != made[1] // 2:
        raise OutOfBounds(f"wgmma of {made[1]} columns: expected {made[1] // 2} accumulators, got {len(acc)}")
    if id(acc) not in mine.values:
        fenced = mine.fenced.get(id(acc))
        if machine.watch and (fenced is None or fenced.tobytes() != acc.tobytes()):
            raise InFlight(f"thread {machine.thread.index}: an accumulator was written after the last wgmma_fence")
        mine.values[id(acc)] = acc.copy(), acc
        acc[:] = IN_FLIGHT
    mine.open.append(_Product(made, acc, A, A_now, B, keep, mine.clock))


def wgmma_wait(pending, *lengths):
    def wait(machine, *arrays):
        mine = known(machine)
        done = mine.groups[: max(len(mine.groups) - pending, 0)]
        mine.groups = mine.groups[len(done) :]
        products = [product for group in done for product in group]
        named = {id(array) for array in arrays}
        if machine.watch and not {id(product.acc) for product in products} <= named:
            raise InFlight(f"thread {machine.thread.index}: the wait does not name an accumulator that it finishes")
        group, memory = machine.thread.index // WARPGROUP, machine.thread.block.bytes
        machine.meet("wgmma_wait", (mine, products), lambda given: _finish(memory, group, given), WARPGROUP)

    return wait


def _finish(memory, group, given):
    """The products of 128 threads that come to a wait, in their order; they know of each other then."""
    threads, lists = zip(*given, strict=True)
    if len({len(products) for products in lists}) > 1:
        raise KernelFault(f"warpgroup {group}: threads have started different products")
    clock = np.max([thread.clock for thread in threads], axis=0)
    clock[group] += 1
    results = {}
    for together in zip(*lists, strict=True):
        first = together[0]
        if any(p[0] != first.made or p.B != first.B or p.keep != first.keep for p in together):
            raise KernelFault(f"warpgroup {group}: threads give wgmma different descriptors")
        key = id(first.acc)
        if key not in results:
            C = np.empty((64, first.made[1]), np.float32)
            before = [thread.values[id(p.acc)][0] for thread, p in zip(threads, together, strict=True)]
            C[_layout(len(first.acc))] = before
            results[key] = C, together
        C = results[key][0]
        C[...] = _product(memory, group, clock[group], C if first.keep else 0.0, together)
    for C, together in results.values():
        D = C.astype(np.float32)[_layout(C.shape[1] // 2)]
        for thread, p, values in zip(threads, together, D, strict=True):
            _give_back(memory, thread, p.acc, values)
    for thread in threads:  # of products all know alike, of each other's own loads and stores nothing new
        thread.clock = np.concatenate([clock[:ACCESSES], thread.clock[ACCESSES:]])
    return [None] * WARPGROUP


def _give_back(memory, thread, acc, values):
    """Results to a thread's accumulators, unless further products on these are in flight."""
    if any(p.acc is acc for part in (*thread.groups, thread.open) for p in part):
        thread.values[id(acc)] = values, acc
        return
    if memory.watch and (acc.view(np.uint32) != IN_FLIGHT.view(np.uint32)).any():
        raise InFlight("an accumulator was written while its product was in flight")
    del thread.values[id(acc)]
    acc[:] = values
    if id(acc) in thread.fenced:
        thread.fenced[id(acc)] = values.copy()


def _product(memory, group, tick, C, together):
    """C + A B, summed in fp64 and rounded to fp32 once: exact wherever the tensor core's own sum is."""
    first = together[0]
    kind, N, dtype, negate = first.made
    across = kind == "across"  # both operands with their rows along K
    clock = np.min([p.clock for p in together], axis=0)
    if first.A_now is None:
        if any(p.A != first.A for p in together):
            raise KernelFault(f"warpgroup {group}: threads give wgmma different descriptors")
        if across:
            A = memory.read(_mn_major(first.A, 64), group, tick, clock).reshape(16, 64).T
            B = memory.read(_mn_major(first.B, N), group, tick, clock).reshape(16, N)
        else:
            A = memory.read(_k_major(first.A, 64), group, tick, clock).reshape(64, 16)
            B = memory.read(_k_major(first.B, N), group, tick, clock).reshape(N, 16).T
    else:
        if memory.watch and any(not np.array_equal(p.A, p.A_now) for p in together):
            raise InFlight(f"warpgroup {group}: an operand's registers were written while its product was in flight")
        A = np.empty((64, 16), np.uint16)
        A[_layout(8)] = np.array([p.A_now for p in together], "<u4").view("<u2")
        B = memory.read(_mn_major(first.B, N), group, tick, clock).reshape(16, N)
    A, B = (np.ascontiguousarray(x).view(KINDS[dtype]).astype(np.float64) for x in (A, B))
    return (C + (-A if negate else A) @ B).astype(np.float32)


def _fields(descriptor):
    """(address, leading offset, stride offset) of a descriptor, in bytes; the swizzle must be that of 128 bytes."""
    if descriptor >> 62 != 1 or descriptor >> 49 & 7:
        raise KernelFault(f"descriptor {descriptor:#x}: expected the 128-byte swizzle and no base offset")
    return tuple(16 * (descriptor >> at & 0x3FFF) for at in (0, 16, 32))


def _k_major(descriptor, rows):
    """Addresses of the chunks of a rows x 16 operand whose rows are rows of shared memory."""
    address, _, stride = _fields(descriptor)
    r = np.arange(rows)
    return (address + r // 8 * stride + r % 8 * 128)[:, None] + CHUNK * np.arange(2)


def _mn_major(descriptor, columns):
    """Addresses of the chunks of a 16 x columns operand whose rows are rows of shared memory, 64 columns a slab."""
    address, leading, stride = _fields(descriptor)
    r, c = np.arange(16), 8 * np.arange(columns // 8)
    return (address + r // 8 * stride + r % 8 * 128)[:, None] + c // 64 * leading + c % 64 * 2


# ---- mbarrier


def mbarrier_init(machine, address, count):
    machine.thread.block.bytes.make_barrier(address, count)


def mbarrier_fence(machine):
    machine.thread.block.bytes.announce_barriers()


def mbarrier_arrive(machine, address):
    machine.thread.block.bytes.barrier(address).arrive(known(machine).clock)


def mbarrier_expect(machine, address, nbytes):
    barrier = machine.thread.block.bytes.barrier(address)
    barrier.nbytes += nbytes
    barrier.arrive(known(machine).clock)


def mbarrier_wait(machine, address, parity):
    barrier = machine.thread.block.bytes.barrier(address)
    if parity not in (0, 1):
        raise PhaseFault(f"{barrier}: expected a parity of 0 or 1, got {parity}")
    machine.wait_until(lambda: barrier.passed(parity), Missing(barrier, sys._getframe(1).f_lineno))
    known(machine).learn(barrier.complete_clock)


# ---- copies, registers, named barriers


def tensor_map_fence(machine, tensor_map):
    thread = known(machine)
    thread.maps = thread.maps | {tensor_map.offset}


def tma_load(machine, to, tensor_map, barrier, column, row, head, batch):
    number, rest = divmod(tensor_map.offset, MAP_BYTES)
    if rest or not 0 <= number < len(tensor_map.array.tiles):
        raise OutOfBounds(f"tensor map at byte {tensor_map.offset}: expected one of {len(tensor_map.array.tiles)}")
    if machine.watch and tensor_map.offset not in known(machine).maps:
        raise Race(f"tensor map at byte {tensor_map.offset}: no fence before its first use (tensor_map_fence)")
    array, rows, *length = tensor_map.array.tiles[number]
    memory = machine.thread.block.bytes
    box = array.box(rows, SWIZZLE_COLUMNS, row, column, head, batch, *length).view(np.uint16)
    memory.begin_copy(to, box, memory.barrier(barrier), known(machine).clock)


def barrier_sync(machine, name, threads):
    state = machine.thread.block.bytes.named(name)
    phase = state[1]
    barrier_arrive(machine, name, threads)
    machine.wait_until(lambda: state[1] > phase, f"named barrier {name}: {threads} threads are expected")
    known(machine).learn(state[3])


def barrier_arrive(machine, name, threads):
    state = machine.thread.block.bytes.named(name)
    state[0] += 1
    state[2].learn(known(machine).clock)
    if state[0] == threads:
        state[0], state[1], state[3] = 0, state[1] + 1, state[2].clock
        state[2] = Clocked()


def set_registers(kind, count):
    def instruction(machine):
        number, memory = machine.thread.index // WARPGROUP, machine.thread.block.bytes
        groups = machine.threads // WARPGROUP
        at_first = REGISTER_FILE // machine.threads // 8 * 8

        def others():
            return sum(memory.registers.get(g, at_first) for g in range(groups) if g != number)

        if kind == "inc":
            machine.wait_until(
                lambda: (others() + count) * WARPGROUP <= REGISTER_FILE, f"{count} registers for warpgroup {number}"
            )

        def agreed(given):
            memory.registers[number] = count
            return given

        machine.meet(f"setmaxnreg.{kind}", None, agreed, WARPGROUP)

    return instruction


# ---- small ones


def smem_address(machine, array):
    return START


def gmem_address(machine, array):
    return Address(array)


def pack(dtype):
    kind, bits = KINDS[dtype], np.uint16
    return lambda machine, low, high: int(kind(low).view(bits)) | int(kind(high).view(bits)) << 16


def store_16(machine, address, *words):
    array, offset = address
    values = np.array(words, "<u4").view(array.dtype)
    first = offset // array.dtype.itemsize
    if offset % 16 or not 0 <= first <= array.size - len(values):
        raise OutOfBounds(f"{array.name}: 16 bytes from byte {offset} of {array.size * array.dtype.itemsize}")
    array.store_run(tuple(map(int, np.unravel_index(first, array.shape))), values)


def trade(machine, word, across):
    return machine.meet("trade", word, lambda lanes: [lanes[k ^ across] for k in range(32)])


def uniform(machine, word):
    return machine.meet("uniform", word, lambda lanes: [lanes[0]] * 32)


def quotient(machine, n, d):
    if n < 0 or d <= 0:
        raise KernelFault(f"quotient: expected numbers from 0 on and no division by zero, got {n} / {d}")
    return n // d


def reciprocal(machine, x):
    return np.float32(1) / np.float32(x)


_HERE = vars(ptx_standins) | globals()
HOPPER_TABLE = {
    instruction: _HERE[name]
    for name, instruction in vars(ptx).items()
    if isinstance(instruction, _Intrinsic) and name in _HERE
}


# Stand-ins of the functions that make instructions; ``ptx.hopper_backward_standins`` adds its own.
FACTORIES = {make.__name__: make for make in (wgmma_shared, wgmma_registers, wgmma_wait, set_registers, pack)}


def made(instruction):
    """The stand-in of an instruction that a function of ``ptx.hopper`` made; None if none did."""
    if instruction not in ptx.MADE:
        return None
    name, arguments = ptx.MADE[instruction]
    return FACTORIES[name](*arguments)
