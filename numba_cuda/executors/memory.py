"""The emulator's memory: arrays that check each access against the rules a GPU relies on, and count it.

The race detector keeps, for each element, who touched it last and in which epoch (the number of barriers the
block has passed). Two threads of one block may meet at an element only in different epochs; two blocks may not
meet at a written element at all within one launch, since nothing orders them. Only atomic additions may meet each other
anywhere; they may not meet plain reads and writes.
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
    """A shared array of one block, one or two dimensions; ``kind`` makes a stored number one of its type."""

    def __init__(self, machine, shape, name, kind=np.float32):
        self.shape = tuple(shape) if isinstance(shape, tuple) else (shape,)
        size = prod(self.shape)
        self._machine, self._name, self._kind = machine, name, kind
        self._flat, self._rows, self._width = len(self.shape) == 1, size // max(1, self.shape[-1]), self.shape[-1]
        self._value = [None] * size
        self._writer, self._written = [None] * size, [-1] * size  # thread, epoch of the last write
        self._reader, self._read = [None] * size, [-1] * size  # thread (or _MANY), epoch of the last read

    def _at(self, index):
        row, column = (0, index) if self._flat else index
        if 0 <= row < self._rows and 0 <= column < self._width:
            return row * self._width + column
        raise OutOfBounds(f"{self._name} of shape {self.shape}: index {index}")

    def __getitem__(self, index):
        # This runs for every operand of every product: `_at`, without the price of a call.
        row, column = (0, index) if self._flat else index
        width = self._width
        at = row * width + column if 0 <= row < self._rows and 0 <= column < width else self._at(index)
        thread = self._machine.thread
        epoch, me = thread.block.epoch, thread.index
        if self._written[at] == epoch and self._writer[at] != me:
            raise Race(f"{self._name}[{index}]: thread {me} reads what thread {self._writer[at]} wrote since the "
                       "last barrier")
        value = self._value[at]
        if value is None:
            value = self._unwritten(index, me)
        if self._read[at] != epoch:
            self._read[at], self._reader[at] = epoch, me
        elif self._reader[at] != me:
            self._reader[at] = _MANY
        return value

    def _unwritten(self, index, me):
        """NaN for now, and a fault at the next barrier; but if another thread writes the element before it, a race."""
        fault = UninitialisedRead(f"{self._name}[{index}]: thread {me} reads it before any write")
        if self._kind is not np.float32:  # there is no NaN to go on with
            raise fault
        self._machine.unwritten.append(fault)
        return self._kind(np.nan)

    def __setitem__(self, index, value):
        at, thread = self._at(index), self._machine.thread
        epoch, me = thread.block.epoch, thread.index
        if self._written[at] == epoch and self._writer[at] != me:
            raise Race(f"{self._name}[{index}]: threads {self._writer[at]} and {me} write with no barrier between")
        if self._read[at] == epoch and self._reader[at] != me:
            raise Race(f"{self._name}[{index}]: thread {me} overwrites what another thread read since the last barrier")
        self._value[at] = self._kind(value)
        self._writer[at], self._written[at] = me, epoch


class UnwatchedShared(SharedArray):
    """The same without the race detector: the last write wins, and what nobody has written reads as NaN, or 0."""

    def __getitem__(self, index):
        value = self._value[self._at(index)]
        return self._kind(np.nan if self._kind is np.float32 else 0) if value is None else value

    def __setitem__(self, index, value):
        self._value[self._at(index)] = self._kind(value)


def _after(seen, me):
    """Who is remembered for an element that ``seen`` and then ``me`` has read, or added to.

    Of several threads in one epoch, or of several blocks, none is named: no single one may then write there.
    """
    if seen is None or seen[0] != me[0] or seen == me:
        return me
    if seen[1] != me[1]:
        return me[0], _MANY, _MANY, _MANY
    return (*me[:3], _MANY) if seen[2] == me[2] else me


class GlobalArray:
    """A global array, or a view of one that shares its counters and its history."""

    def __init__(self, machine, data, name, writable, parent=None):
        self._machine, self.data, self.name, self._writable = machine, data, name, writable
        self.shape, self.dtype, self.ndim, self.size = data.shape, data.dtype, data.ndim, data.size
        self._base = self._strides = None
        self.count = parent.count if parent else SimpleNamespace(loads=0, stores=0)
        # Element address -> (launch, block, epoch, thread) of its last write, read and addition; inputs need none.
        self._writes = parent._writes if parent else {}
        self._reads = parent._reads if parent else {}
        self._adds = parent._adds if parent else {}

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
        if self._base is None:  # asking an array where it lies is slow
            self._base, self._strides = self.data.__array_interface__["data"][0], self.data.strides
        at = self._base
        for k, stride in zip(index, self._strides, strict=True):
            at += k * stride
        return at

    def _who(self):
        thread = self._machine.thread
        return self._machine.launches, thread.block.index, thread.block.epoch, thread.index

    def __getitem__(self, index):
        index = self._key(index)
        if len(index) < self.ndim:
            return type(self)(self._machine, self.data[index], self.name, self._writable, self)
        self.count.loads += 1
        if self._writable:
            me, at = self._who(), self._address(index)
            self._meet(self._writes.get(at), me, index, "reads what it wrote")
            if self._adds:
                self._meet(self._adds.get(at), me, index, "reads what it added to")
            self._reads[at] = _after(self._reads.get(at), me)
        return self.data[index]

    def run(self, row, column, count):
        """``count`` neighbouring elements of a row, loaded from an input at once; with 0 nothing is touched."""
        if count:
            self._key((row, column))
            self._key((row, column + count - 1))
        self.count.loads += count
        return np.array(self.data[row, column : column + count]) if count else np.empty(0, self.dtype)

    def box(self, rows, columns, row, column, head, batch, length=None):
        """Part of an input (B, H, N, d), its corner anywhere: zeros where the array is not, or past ``length`` rows."""
        B, H, N, d = self.shape
        N = N if length is None else length
        out = np.zeros((rows, columns), self.dtype)
        if 0 <= batch < B and 0 <= head < H:
            r, c = max(row, 0), max(column, 0)
            part = self.data[batch, head, r : max(min(row + rows, N), 0), c : max(min(column + columns, d), 0)]
            self.count.loads += part.size
            out[r - row :, c - column :][: part.shape[0], : part.shape[1]] = part
        return out

    def reshape(self, *shape):
        """The same elements under another shape; a view, for arrays whose elements lie in order."""
        data = self.data.reshape(shape)
        if self.size and not np.shares_memory(data, self.data):
            raise ValueError(f"{self.name}: expected an array in order, got strides {self.data.strides}")
        return type(self)(self._machine, data, self.name, self._writable, self)

    @property
    def strides(self):
        """Bytes from an element to the next along each axis."""
        return self.data.strides

    @property
    def __array_interface__(self):
        return self.data.__array_interface__

    def __setitem__(self, index, value):
        index = self._key(index)
        if not self._writable:
            raise ReadOnly(f"{self.name}[{index}]: a kernel may not write to its input")
        if len(index) < self.ndim:
            raise OutOfBounds(f"{self.name} of shape {self.shape}: {len(index)} indices")
        self._write(self._address(index), self._who(), index)
        self.count.stores += 1
        self.data[index] = value

    def _write(self, at, me, index):
        """Note a write to the element at an address."""
        self._meet(self._writes.get(at), me, index, "writes it too")
        self._meet(self._reads.get(at), me, index, "overwrites what it read")
        if self._adds:
            self._meet(self._adds.get(at), me, index, "overwrites what it added to")
        self._writes[at] = me

    def store_run(self, index, values):
        """Store neighbouring elements of a row at once, from ``index`` on."""
        *row, column = self._key(index)
        self._key((*row, column + len(values) - 1))
        if not self._writable:
            raise ReadOnly(f"{self.name}[{index}]: a kernel may not write to its input")
        first, me, row = self._address((*row, column)), self._who(), tuple(row)
        for k in range(len(values)):
            self._write(first + k * self.data.strides[-1], me, (*row, column + k))
        self.count.stores += len(values)
        self.data[row][column : column + len(values)] = values

    def add(self, index, value):
        """Add atomically to one element; counts as a store, since nothing comes back."""
        index = self._key(index)
        if not self._writable:
            raise ReadOnly(f"{self.name}[{index}]: a kernel may not write to its input")
        if len(index) < self.ndim:
            raise OutOfBounds(f"{self.name} of shape {self.shape}: {len(index)} indices")
        me, at = self._who(), self._address(index)
        self._meet(self._writes.get(at), me, index, "adds to what it wrote")
        self._meet(self._reads.get(at), me, index, "adds to what it read")
        self.count.stores += 1
        self._adds[at] = _after(self._adds.get(at), me)
        self.data[index] += value

    def _meet(self, other, me, index, what):
        """Raise if ``other`` and ``me`` are two threads of one launch with nothing between them."""
        if other is None or other[0] != me[0] or other == me:
            return
        if other[1] != me[1] or (other[2] == me[2] and other[3] != me[3]):
            who = "several threads" if other[3] == _MANY else f"thread {other[3]}"
            where = "several blocks" if other[1] == _MANY else f"block {other[1]}"
            raise Race(f"{self.name}[{index}]: {who} of {where} came first; thread {me[3]} of block {me[1]} "
                       f"{what}, with no barrier between")


class UnwatchedGlobal(GlobalArray):
    """The same without the race detector."""

    def _meet(self, other, me, index, what):
        """Let it pass."""
