"""The CPU executor: runs a kernel body thread by thread in plain Python, and refuses what a GPU would let pass.

The threads of a block are greenlets under one cooperative scheduler, so a run is deterministic and its thread
order is a choice (``seed``). Between two barriers any order is legal on a GPU; a kernel that depends on one is
wrong even where the answer comes out right. So the emulator does not look at answers. It raises on

* a **race**: an element written by one thread and touched by another with no barrier between (``memory``),
* a **divergent barrier**: threads of a block waiting at different ``syncthreads``, or some gone home,
* an index outside an array, negative ones included, and shared memory read before it is written,
* lanes of a warp that do not come to the same warp-wide instruction (``ptx.standins``),
* mbarriers used against their protocol, waits without end, copies and products whose order nothing enforces
  (``memory_bytes``, ``ptx.hopper_standins``),
* a write to an input.

And it counts every load and store of global memory: the *requested* bytes of the ledger.
"""

import sys
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace

import numpy as np
from greenlet import getcurrent, greenlet
from numba import cuda
from numba.cuda import types
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.extending import _Intrinsic

from flash_cuda.executors.memory import GlobalArray, KernelFault, SharedArray, UnwatchedGlobal, UnwatchedShared
from flash_cuda.executors.memory_bits import NAN_BITS, Copies, SharedBits
from flash_cuda.executors.memory_bytes import SharedBytes, TensorMaps
from flash_cuda.ptx.hopper_backward_standins import BACKWARD_TABLE
from flash_cuda.ptx.hopper_standins import HOPPER_TABLE, made
from flash_cuda.ptx.standins import TABLE

_NUMPY_TYPES = {types.float32: np.float32, types.float16: np.float16} | dict.fromkeys(
    (types.int32, types.int64, types.uint32, types.uint64), int) | {types.uint16: np.uint16}
# Instruction -> what runs in its place, f(machine, ...); modules of instructions add theirs.
STAND_INS = TABLE | HOPPER_TABLE | BACKWARD_TABLE
# Modules whose lines are no lines of a kernel.
_INSTRUCTIONS = {__name__} | {f"flash_cuda.ptx.{stem}standins" for stem in ("", "hopper_", "hopper_backward_")}
_NAN_PAIR = NAN_BITS << 16 | NAN_BITS  # what a register that holds two 16-bit numbers has in it before any write


class DivergentBarrier(KernelFault):
    """Not every thread of a block reached the same ``syncthreads``."""


class DivergentWarp(KernelFault):
    """Not every lane of a warp, or thread of another group, reached the same group-wide instruction."""


class Deadlock(KernelFault):
    """Threads wait for what no thread will do."""


@dataclass(eq=False)
class _Thread:
    """A CUDA thread: its place in the grid and what it has allocated so far."""

    index: int
    block: object
    greenlet: object = None
    barrier: tuple = None
    shared_seen: int = 0
    answer: object = None
    copies: Copies = field(default_factory=Copies)
    ready: object = None
    waits_for: object = None  # in words, or what says it when asked
    registers: list = field(default_factory=list)  # its local arrays


class _Group:
    """Where threads of a group meet: at which instruction, who has come and what they brought."""

    def __init__(self, size):
        self.place, self.come, self.given = None, [], [None] * size


class _Block:
    """A block: its shared memory and its barrier count, which is the clock of the race detector."""

    def __init__(self, index):
        self.index, self.epoch, self.shared = index, 0, []
        self.groups = {}
        self.bytes = None  # its dynamic shared memory, if a thread asks for it


class _Cuda:
    """What a kernel body finds under the name ``cuda``: the current thread's view of the machine."""

    def __init__(self, machine):
        self._machine = self.machine = machine
        self.shared = SimpleNamespace(array=self._shared_array)
        self.local = SimpleNamespace(array=self._local_array)
        self.atomic = SimpleNamespace(add=lambda array, index, value: array.add(index, value))

    @property
    def threadIdx(self):
        return SimpleNamespace(x=self._machine.thread.index, y=0, z=0)

    @property
    def blockIdx(self):
        return SimpleNamespace(x=self._machine.thread.block.index, y=0, z=0)

    @property
    def blockDim(self):
        return SimpleNamespace(x=self._machine.threads, y=1, z=1)

    @property
    def gridDim(self):
        return SimpleNamespace(x=self._machine.blocks, y=1, z=1)

    def shfl_xor_sync(self, mask, x, across):
        return self._machine.meet("shfl", x, lambda lanes: [lanes[k ^ across] for k in range(32)])

    def _shared_array(self, shape, dtype, alignment=None):
        # The n-th shared array a thread asks for is the n-th of its block, whoever came first.
        thread, block = self._machine.thread, self._machine.thread.block
        bits = dtype is np.uint16
        if shape == 0 and bits:  # dynamic: as many bytes as the launch gives
            shape = self._machine.shared_bytes // 2
        if shape == 0:  # dynamic: as many bytes as the launch gives
            block.bytes = block.bytes or SharedBytes(self._machine, self._machine.shared_bytes)
            return block.bytes
        if thread.shared_seen == len(block.shared):
            name = f"shared array {thread.shared_seen}"
            machine = self._machine
            block.shared.append(SharedBits(machine, shape, name, machine.watch) if bits else
                                machine.shared_kind(machine, shape, name, dtype))
        thread.shared_seen += 1
        return block.shared[thread.shared_seen - 1]

    def _local_array(self, shape, dtype):
        array = np.full(shape, _NAN_PAIR, np.int64) if dtype is int else np.full(shape, np.nan, dtype)
        self._machine.thread.registers.append(array)
        return array

    def syncthreads(self):
        caller = sys._getframe(1)
        self._machine.thread.barrier = (caller.f_code.co_filename, caller.f_lineno)
        getcurrent().parent.switch()


class Emulator:
    """Executor that emulates; NumPy arrays in and out.

    Parameters
    ----------
    seed : int or None
        Order of blocks, and of threads between barriers: a random one by this seed, or the natural one.
    watch : bool
        Whether to raise on races and on shared memory that was not written. If not, a race does what it does to the
        numbers, which says whether they alone would show it.

    Attributes
    ----------
    counts : dict
        Array name -> (loads, stores) in elements, over everything launched so far.
    """

    where = "emulated"
    multiprocessors = 2  # so that a block that stays has several tiles

    def __init__(self, seed=0, watch=True):
        self.shared_kind, self.global_kind = (
            (SharedArray, GlobalArray) if watch else (UnwatchedShared, UnwatchedGlobal)
        )
        self.watch = watch
        self._order = None if seed is None else np.random.default_rng(seed)
        self._arrays = []
        self._bodies = {}
        self._woken = []
        self.unwritten = []  # faults that come out at the next barrier
        self.thread = None
        self.threads = self.blocks = self.shared_bytes = 0
        self.launches = 0

    @property
    def counts(self):
        totals = {}
        for array in self._arrays:
            loads, stores = totals.get(array.name, (0, 0))
            totals[array.name] = (loads + array.count.loads, stores + array.count.stores)
        return totals

    def input(self, name, array):
        return self._global(name, np.asarray(array), writable=False)

    def empty(self, name, shape, dtype):
        poison = np.full(shape, np.nan).astype(dtype)
        return self._global(name, poison, writable=True)

    def tensor_maps(self, *tiles):
        """What tells the copy engine of arrays (B, H, N, d); ``(array, rows of a box)`` each."""
        return TensorMaps(tiles).check()

    def result(self, array):
        return array.data

    def launch(self, body, blocks, threads, args, shared=0):
        """Run ``body(*args)`` on every thread of every block, a block at a time; ``shared`` bytes of shared memory."""
        if body not in self._bodies:
            self._bodies[body] = _rebind(body, _Cuda(self), {})
        run = self._bodies[body]
        self.launches += 1
        self.unwritten.clear()
        self.threads, self.blocks, self.shared_bytes = threads, blocks, shared
        with np.errstate(all="ignore"):  # inf and NaN are data here, as on a GPU
            for index in self._permuted(range(blocks)):
                self._run_block(run, _Block(int(index)), threads, args)

    def _run_block(self, run, block, threads, args):
        waiting = [_Thread(t, block) for t in range(threads)]
        for thread in waiting:
            thread.greenlet = greenlet(run)
            thread.greenlet.gr_context = copy_context()  # NumPy keeps its error state there
        first = True
        while waiting:
            for thread in self._permuted(waiting):
                self.thread, thread.barrier = thread, None
                thread.greenlet.switch(*(args if first else ()))
            first = False
            self._run_waiting(waiting)
            if self.unwritten:
                raise self.unwritten[0]
            block.epoch += 1
            _same_barrier(waiting, block)
            if block.bytes:
                block.bytes.synchronise()
            waiting = [thread for thread in waiting if not thread.greenlet.dead]
        if block.bytes:
            block.bytes.close()

    def _run_waiting(self, threads):
        """Go on with threads whose wait is over, until all stand at a barrier or are gone."""
        while True:
            woken, self._woken = self._woken, []
            woken += [thread for thread in threads if thread.ready is not None and thread.ready()]
            if not woken:
                break
            for thread in self._permuted(woken):
                self.thread, thread.ready, thread.waits_for = thread, None, None
                thread.greenlet.switch()
        stuck = [thread for thread in threads if thread.waits_for]
        if stuck:
            waiting = {}
            for thread in stuck:
                waiting.setdefault(str(thread.waits_for), []).append(thread.index)
            told = [f"{_numbered(who)} for {what}" for what, who in sorted(waiting.items())]
            raise Deadlock(f"block {stuck[0].block.index}: {len(stuck)} threads wait without end: {'; '.join(told)}")

    def wait_until(self, ready, what):
        """The current thread goes on when ``ready()`` is true; ``what`` it waits for is said if that never is."""
        thread = self.thread
        while not ready():
            thread.ready, thread.waits_for = ready, what
            getcurrent().parent.switch()

    def meet(self, name, given, compute, size=32):
        """A group-wide instruction, called by each of ``size`` neighbouring threads with what it brings.

        The last to come computes ``compute([what each brought])``, one answer a thread, and goes on; the others wait
        for it.
        """
        thread, caller = self.thread, sys._getframe(1)
        while caller.f_globals.get("__name__") in _INSTRUCTIONS:
            caller = caller.f_back
        number, rank = divmod(thread.index, size)
        group = thread.block.groups.get((size, number))
        if group is None:
            group = thread.block.groups[size, number] = _Group(size)
        place = name, caller.f_code.co_filename, caller.f_lineno
        if group.come and group.place != place:
            raise DivergentWarp(f"block {thread.block.index}, {size} threads number {number}: thread {thread.index} "
                                f"comes to {name} (line {place[2]}), others wait at {group.place[0]} "
                                f"(line {group.place[2]})")
        group.place = place
        group.come.append(thread)
        group.given[rank] = given
        if len(group.come) < size:
            thread.waits_for = f"the rest of {size} threads at {name} (line {place[2]})"
            getcurrent().parent.switch()
            return thread.answer
        answers = compute(group.given)
        for member in group.come:
            member.answer = answers[member.index % size]
        self._woken += group.come[:-1]
        group.come = []
        return thread.answer

    def _permuted(self, items):
        return items if self._order is None else [items[k] for k in self._order.permutation(len(items))]

    def _global(self, name, data, writable):
        array = self.global_kind(self, data, name, writable)
        self._arrays.append(array)
        return array


def _numbered(threads):
    """The numbers of some threads, in short."""
    first, last = min(threads), max(threads)
    return f"thread {first}" if first == last else f"threads {first} ... {last} ({len(threads)} of them)"


def _same_barrier(threads, block):
    """All threads of the block stand at one barrier, or all have returned."""
    places = {thread.barrier for thread in threads}
    if len(places) > 1:
        at = sorted(f"line {place[1]}" if place else "returned" for place in places)
        raise DivergentBarrier(f"block {block.index}: threads diverge at a barrier ({', '.join(at)})")


def _rebind(value, fake_cuda, memo):
    """``value`` with every reference to ``cuda``, to device functions and to Numba's scalar types replaced.

    Functions are copied with new globals and closures; nothing that belongs to the compiler is changed, so one
    process can compile a body and emulate it.
    """
    if value is cuda:
        return fake_cuda
    if isinstance(value, CUDADispatcher):
        value = value.py_func
    if isinstance(value, _Intrinsic):
        stand_in = STAND_INS.get(value) or made(value)
        return partial(stand_in, fake_cuda.machine) if stand_in else value
    if isinstance(value, ModuleType):
        if value.__name__.startswith("flash_cuda.ptx"):
            return SimpleNamespace(
                **{k: _rebind(v, fake_cuda, memo) for k, v in vars(value).items() if isinstance(v, _Intrinsic)}
            )
        if value.__name__ != "tile":
            return value
        return SimpleNamespace(**{k: _rebind(v, fake_cuda, memo) for k, v in vars(value).items() if k[:2] != "__"})
    if isinstance(value, types.Type):
        return _NUMPY_TYPES.get(value, value)
    if not isinstance(value, FunctionType) or not value.__globals__.get("__name__", "").startswith("flash_cuda"):
        return value
    if value not in memo:
        used = set(value.__code__.co_names)
        scope = {k: v for k, v in value.__globals__.items() if k in used or k == "__builtins__"}
        cells = tuple(_cell() for _ in value.__closure__ or ())
        memo[value] = FunctionType(value.__code__, scope, value.__name__, value.__defaults__, cells)
        for k in scope.keys() - {"__builtins__"}:
            scope[k] = _rebind(scope[k], fake_cuda, memo)
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            cell.cell_contents = _rebind(old.cell_contents, fake_cuda, memo)
    return memo[value]


def _cell():
    """An empty closure cell."""
    value = None
    return (lambda: value).__closure__[0]
