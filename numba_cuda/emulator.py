"""The CPU executor: runs a kernel body thread by thread in plain Python, and refuses what a GPU would let pass.

The threads of a block are greenlets under one cooperative scheduler, so a run is deterministic and its thread
order is a choice (``seed``). Between two barriers any order is legal on a GPU; a kernel that depends on one is
wrong even where the answer comes out right. So the emulator does not look at answers. It raises on

* a **race**: an element written by one thread and touched by another with no barrier between (``memory``),
* a **divergent barrier**: threads of a block waiting at different ``syncthreads``, or some gone home,
* an index outside an array, negative ones included, and shared memory read before it is written,
* a write to an input.

And it counts every load and store of global memory: the *requested* bytes of the ledger.
"""

import sys
from contextvars import copy_context
from dataclasses import dataclass
from types import FunctionType, ModuleType, SimpleNamespace

import numpy as np
from greenlet import getcurrent, greenlet
from numba import cuda
from numba.cuda import types
from numba.cuda.dispatcher import CUDADispatcher

from flash_cuda.memory import GlobalArray, KernelFault, SharedArray

_NUMPY_TYPES = {types.float32: np.float32, types.float16: np.float16, types.int32: int, types.int64: int}


class DivergentBarrier(KernelFault):
    """Not every thread of a block reached the same ``syncthreads``."""


@dataclass(eq=False)
class _Thread:
    """A CUDA thread: its place in the grid and what it has allocated so far."""

    index: int
    block: object
    greenlet: object = None
    barrier: tuple = None
    shared_seen: int = 0


class _Block:
    """A block: its shared memory and its barrier count, which is the clock of the race detector."""

    def __init__(self, index):
        self.index, self.epoch, self.shared = index, 0, []


class _Cuda:
    """What a kernel body finds under the name ``cuda``: the current thread's view of the machine."""

    def __init__(self, machine):
        self._machine = machine
        self.shared = SimpleNamespace(array=self._shared_array)
        self.local = SimpleNamespace(array=self._local_array)

    @property
    def threadIdx(self):
        return SimpleNamespace(x=self._machine.thread.index, y=0, z=0)

    @property
    def blockIdx(self):
        return SimpleNamespace(x=self._machine.thread.block.index, y=0, z=0)

    @property
    def blockDim(self):
        return SimpleNamespace(x=self._machine.threads, y=1, z=1)

    def _shared_array(self, shape, dtype):
        # The n-th shared array a thread asks for is the n-th of its block, whoever came first.
        thread, block = self._machine.thread, self._machine.thread.block
        if thread.shared_seen == len(block.shared):
            block.shared.append(SharedArray(self._machine, shape, f"shared array {thread.shared_seen}"))
        thread.shared_seen += 1
        return block.shared[thread.shared_seen - 1]

    def _local_array(self, shape, dtype):
        return np.full(shape, np.nan, dtype)

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

    Attributes
    ----------
    counts : dict
        Array name -> (loads, stores) in elements, over everything launched so far.
    """

    where = "emulated"

    def __init__(self, seed=0):
        self._order = None if seed is None else np.random.default_rng(seed)
        self._arrays = []
        self._bodies = {}
        self.thread = None
        self.threads = 0
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

    def result(self, array):
        return array.data

    def launch(self, body, blocks, threads, args):
        """Run ``body(*args)`` on every thread of every block, a block at a time."""
        if body not in self._bodies:
            self._bodies[body] = _rebind(body, _Cuda(self), {})
        run = self._bodies[body]
        self.launches += 1
        self.threads = threads
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
            block.epoch += 1
            _same_barrier(waiting, block)
            waiting = [thread for thread in waiting if not thread.greenlet.dead]

    def _permuted(self, items):
        return items if self._order is None else [items[k] for k in self._order.permutation(len(items))]

    def _global(self, name, data, writable):
        array = GlobalArray(self, data, name, writable)
        self._arrays.append(array)
        return array


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
    if isinstance(value, ModuleType):
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
