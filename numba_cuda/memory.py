"""The emulator's memory: arrays that check each access against the rules a GPU relies on, and count it.

The race detector keeps, for each element, who touched it last and in which epoch (the number of barriers the
block has passed). Two threads of one block may meet at an element only in different epochs; two blocks may not
meet at a written element at all within one launch, since nothing orders them.
"""

from math import prod
from types import SimpleNamespace

import numpy as np

_MANY = -1  # more than one thread has read the element in this epoch


class KernelFault(Exception):
    """A kernel did what a GPU may punish only sometimes."""


class Race(KernelFault):
    """Two threads touch an element, one of them writing, with no barrier between."""


class OutOfBounds(KernelFault, IndexError):
    """An index outside the array (IndexError, as NumPy would)."""


class UninitialisedRead(KernelFault):
    """Shared memory read before anything was written to it in this block."""


class ReadOnly(KernelFault):
    """A kernel wrote to one of its inputs."""


class SharedArray:
    """A shared array of one block, one or two dimensions; float32, as all our tiles are."""

    def __init__(self, machine, shape, name):
        self.shape = tuple(shape) if isinstance(shape, tuple) else (shape,)
        size = prod(self.shape)
        self._machine, self._name, self._width = machine, name, self.shape[-1]
        self._value = [None] * size
        self._writer, self._written = [None] * size, [-1] * size  # thread, epoch of the last write
        self._reader, self._read = [None] * size, [-1] * size  # thread (or _MANY), epoch of the last read

    def _at(self, index):
        if type(index) is not tuple:
            index = (index,)
        for k, n in zip(index, self.shape, strict=True):
            if not 0 <= k < n:
                raise OutOfBounds(f"{self._name} of shape {self.shape}: index {index}")
        return index[0] * self._width + index[1] if len(index) == 2 else index[0]

    def __getitem__(self, index):
        at, thread = self._at(index), self._machine.thread
        epoch, me = thread.block.epoch, thread.index
        if self._written[at] == epoch and self._writer[at] != me:
            raise Race(f"{self._name}[{index}]: thread {me} reads what thread {self._writer[at]} wrote since the "
                       "last barrier")
        value = self._value[at]
        if value is None:
            raise UninitialisedRead(f"{self._name}[{index}]: thread {me} reads it before any write")
        if self._read[at] != epoch:
            self._read[at], self._reader[at] = epoch, me
        elif self._reader[at] != me:
            self._reader[at] = _MANY
        return value

    def __setitem__(self, index, value):
        at, thread = self._at(index), self._machine.thread
        epoch, me = thread.block.epoch, thread.index
        if self._written[at] == epoch and self._writer[at] != me:
            raise Race(f"{self._name}[{index}]: threads {self._writer[at]} and {me} write with no barrier between")
        if self._read[at] == epoch and self._reader[at] != me:
            raise Race(f"{self._name}[{index}]: thread {me} overwrites what another thread read since the last barrier")
        self._value[at] = np.float32(value)
        self._writer[at], self._written[at] = me, epoch


class GlobalArray:
    """A global array, or a view of one that shares its counters and its history."""

    def __init__(self, machine, data, name, writable, parent=None):
        self._machine, self.data, self.name, self._writable = machine, data, name, writable
        self.shape, self.dtype, self.ndim, self.size = data.shape, data.dtype, data.ndim, data.size
        self.count = parent.count if parent else SimpleNamespace(loads=0, stores=0)
        # Element address -> (launch, block, epoch, thread) of its last write and read; inputs need neither.
        self._writes = parent._writes if parent else {}
        self._reads = parent._reads if parent else {}

    def _key(self, index):
        if type(index) is not tuple:
            index = (index,)
        if len(index) > self.ndim:
            raise OutOfBounds(f"{self.name} of shape {self.shape}: {len(index)} indices")
        for k, n in zip(index, self.shape, strict=False):
            if not 0 <= k < n:
                raise OutOfBounds(f"{self.name} of shape {self.shape}: index {index}")
        return index

    def _address(self, index):
        base = self.data.__array_interface__["data"][0]
        return base + sum(k * stride for k, stride in zip(index, self.data.strides, strict=True))

    def _who(self):
        thread = self._machine.thread
        return self._machine.launches, thread.block.index, thread.block.epoch, thread.index

    def __getitem__(self, index):
        index = self._key(index)
        if len(index) < self.ndim:
            return GlobalArray(self._machine, self.data[index], self.name, self._writable, self)
        self.count.loads += 1
        if self._writable:
            me, at = self._who(), self._address(index)
            self._meet(self._writes.get(at), me, index, "reads what it wrote")
            seen = self._reads.get(at)
            # Two readers in one epoch: remember one that no single writer can be.
            self._reads[at] = me if seen is None or seen[:3] != me[:3] or seen == me else (*me[:3], _MANY)
        return self.data[index]

    def __setitem__(self, index, value):
        index = self._key(index)
        if not self._writable:
            raise ReadOnly(f"{self.name}[{index}]: a kernel may not write to its input")
        if len(index) < self.ndim:
            raise OutOfBounds(f"{self.name} of shape {self.shape}: {len(index)} indices")
        me, at = self._who(), self._address(index)
        self._meet(self._writes.get(at), me, index, "writes it too")
        self._meet(self._reads.get(at), me, index, "overwrites what it read")
        self.count.stores += 1
        self._writes[at] = me
        self.data[index] = value

    def _meet(self, other, me, index, what):
        """Raise if ``other`` and ``me`` are two threads of one launch with nothing between them."""
        if other is None or other[0] != me[0] or other == me:
            return
        if other[1] != me[1] or (other[2] == me[2] and other[3] != me[3]):
            who = "several threads" if other[3] == _MANY else f"thread {other[3]}"
            raise Race(f"{self.name}[{index}]: {who} of block {other[1]} came first; thread {me[3]} of block {me[1]} "
                       f"{what}, with no barrier between")
