"""The emulator's shared memory for tiles of 16-bit floats: moved by rows of 8, filled by copies that take their time.

The rules are those of ``memory.SharedArray``; the bookkeeping is done for many elements at once. What a `cp.async` is
still to bring reads as NaN, so a kernel that does not wait gets an answer that no check lets pass. For the detector of
races a copy writes twice, when it begins and when it arrives.
"""

from math import prod

import numpy as np

from flash_cuda.executors.memory import OutOfBounds, Race, UninitialisedRead

NAN_BITS = 0x7FFF  # a NaN in fp16 and in bf16
RUN = 8  # elements in 16 bytes
_NAN_RUN = np.full(RUN, NAN_BITS, np.uint16)
_MANY = -1  # more than one thread has read the element in this epoch
_NEVER = -1


class SharedBits:
    """A shared array of uint16 of one dimension; elements are the bits of fp16 or bf16 numbers.

    Parameters
    ----------
    watch : bool
        As in ``emulator.Emulator``: if not, what nobody has written reads as NaN, and nothing is a race.
    """

    def __init__(self, machine, shape, name, watch=True):
        size = prod(shape) if isinstance(shape, tuple) else shape
        self.shape, self.size = (size,), size
        self._machine, self._name, self._watch = machine, name, watch
        self._bits = np.full(size, NAN_BITS, np.uint16)
        # Thread and epoch of each element's last write and read.
        self._writer, self._written = np.full(size, _NEVER), np.full(size, _NEVER)
        self._reader, self._read = np.full(size, _NEVER), np.full(size, _NEVER)

    def _places(self, starts, count):
        """Index arrays of ``count`` elements from each start."""
        starts = np.asarray(starts)
        if starts.min() < 0 or starts.max() + count > self.size:
            raise OutOfBounds(f"{self._name} of {self.size}: {count} elements from {starts} on")
        if (starts % count).any():
            raise OutOfBounds(f"{self._name}: {count} elements at once from {starts}, expected multiples of {count}")
        return starts[..., None] + np.arange(count)

    def get(self, starts, count, threads):
        """The bits of ``count`` elements from each start, as read by that many threads: (starts, count) uint16."""
        at = self._places(starts, count)
        if not self._watch:
            return self._bits[at]
        epoch, who = self._machine.thread.block.epoch, np.asarray(threads)[..., None]
        fresh = (self._written[at] == epoch) & (self._writer[at] != who)
        if fresh.any():
            k = at[fresh][0]
            raise Race(f"{self._name}[{k}]: a thread reads what thread {self._writer[k]} wrote since the last barrier")
        if (self._written[at] == _NEVER).any():
            raise UninitialisedRead(f"{self._name}[{at[self._written[at] == _NEVER][0]}]: read before any write")
        again = (self._read[at] == epoch) & (self._reader[at] != who)
        self._reader[at] = np.where(again, _MANY, who)
        self._read[at] = epoch
        return self._bits[at]

    def put(self, start, bits):
        """Write the bits of neighbouring elements, as the current thread."""
        if not 0 <= start <= self.size - len(bits) or start % len(bits):
            self._places(start, len(bits))  # raises
        at, thread = slice(start, start + len(bits)), self._machine.thread
        epoch, me = thread.block.epoch, thread.index
        if self._watch:
            for last, by, what in ((self._written, self._writer, "wrote"), (self._read, self._reader, "read")):
                if epoch not in last[at].tolist():  # of a few elements a list is quicker than an array
                    continue
                met = (last[at] == epoch) & (by[at] != me)
                if met.any():
                    raise Race(f"{self._name}[{start + met.argmax()}]: thread {me} overwrites what another thread "
                               f"{what} since the last barrier")
        self._bits[at], self._writer[at], self._written[at] = bits, me, epoch

    def __setitem__(self, index, bits):
        self.put(index, np.array([bits], np.uint16))

    def __getitem__(self, index):
        return int(self.get([index], 1, [self._machine.thread.index])[0, 0])


class Copies:
    """The asynchronous copies of one thread, in groups."""

    def __init__(self):
        self._open, self._closed = [], []

    def begin(self, tile, start, bits):
        """Start a copy: its place reads as NaN until it lands."""
        tile.put(start, _NAN_RUN if len(bits) == RUN else np.full(len(bits), NAN_BITS, np.uint16))
        self._open.append((tile, start, bits))

    def commit(self):
        """Close the group."""
        self._closed.append(self._open)
        self._open = []

    def wait(self):
        """Land the copies of all closed groups."""
        for group in self._closed:
            for tile, start, bits in group:
                tile.put(start, bits)
        self._closed = []
