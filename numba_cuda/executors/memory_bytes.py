"""The emulator's dynamic shared memory: bytes with addresses, filled by a copy engine, ordered by mbarriers.

What a copy is still to bring reads as NaN, and it comes as late as it may: when a thread waits for it. But whether an
order of events is *enforced* is not left to the order in which threads happen to run. Each thread carries a clock,
one number for each mbarrier (the phases that it knows to be complete), one for each warpgroup (its products that it
knows to have read their operands) and two for each thread (what it knows that one to have loaded and stored itself, and
which of its stores a fence has handed over to products). An arrival takes the clock along, a wait brings it. So a
product may read what its threads know to be there, and a copy may overwrite what its thread knows to have been read;
anything else is a race, even where all came out well this time.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from flash_cuda.executors.memory import KernelFault, OutOfBounds, Race, UninitialisedRead
from flash_cuda.executors.memory_bits import NAN_BITS
from flash_cuda.parts.tensor_map import SWIZZLE_COLUMNS, obstacle

START = 16  # address of the first byte: aligned as a GPU grants it, and to no more
CHUNK = 16  # bytes, the unit of the swizzle and of all bookkeeping
MAP_BYTES = 128
BARRIER_BYTES = 8
WARPGROUP = 128  # threads
WARPGROUPS, BARRIERS, THREADS = 8, 120, 512  # that a clock has room for
ACCESSES = WARPGROUPS + BARRIERS  # from here on in a clock: each thread's loads and stores
FENCED = ACCESSES + THREADS  # and those stores that a fence has handed over
CLOCK = FENCED + THREADS
WORD = 4  # bytes, what a thread stores at once
ROW_BYTES = 2 * SWIZZLE_COLUMNS
_NEVER = -1


class PhaseFault(KernelFault):
    """An mbarrier is used against its protocol."""


class Address(NamedTuple):
    """The address of a byte of a global array, or of what stands for one."""

    array: object
    offset: int = 0

    def __add__(self, nbytes):
        return Address(self.array, self.offset + nbytes)


class TensorMaps(NamedTuple):
    """What the copy engine knows of some arrays: ``(array, rows of a box)`` each, and the rows there are, if not all.

    Raises
    ------
    ValueError
        An array that it cannot read, as the driver would refuse it.
    """

    tiles: tuple

    def check(self):
        """Return it if the engine takes all of its arrays."""
        for array, *_ in self.tiles:
            data = array.data
            told = obstacle(data.shape, data.strides, data.__array_interface__["data"][0], data.itemsize)
            if told:
                raise ValueError(f"{array.name}: expected an array that the copy engine can read, but {told}")
        return self


def swizzled(addresses):
    """Where the bytes of these addresses really are: 16-byte chunks trade places within 8 rows of 128 bytes."""
    return addresses ^ ((addresses >> 7 & 7) << 4)


class Clocked:
    """What a thread knows of events that others may wait for; clocks are never changed, only replaced."""

    def __init__(self):
        self.clock = np.zeros(CLOCK, np.int64)

    def learn(self, clock):
        """Know what another knows, too."""
        self.clock = np.maximum(self.clock, clock)


class Mbarrier(Clocked):
    """An mbarrier: a phase is complete when all arrivals and all bytes it expects have come.

    ``clock`` collects what those who arrive know; ``complete_clock`` is what the last phase's knew.
    """

    def __init__(self, number, offset, count, epoch):
        super().__init__()
        self.number, self.offset, self.count, self.epoch = number, offset, count, epoch
        self.slot = WARPGROUPS + number
        self.phase, self.pending, self.nbytes = 0, count, 0
        self.announced = False  # to the copy engine
        self.copies = []  # under way: functions that land them
        self.complete_clock = self.clock

    def __str__(self):
        return f"mbarrier {self.number} (byte {self.offset}) in phase {self.phase}"

    def arrive(self, clock):
        """One arrival."""
        if not self.pending:
            raise PhaseFault(f"{self}: one arrival too many, it expects {self.count}")
        self.pending -= 1
        self.learn(clock)
        self.settle()

    def settle(self):
        """Complete the phase if nothing is missing."""
        if self.pending or self.nbytes:
            return
        self.phase += 1
        self.pending = self.count
        self.complete_clock = self.clock.copy()
        self.complete_clock[self.slot] = self.phase
        self.clock = np.zeros_like(self.clock)
        if self.copies:
            raise PhaseFault(f"mbarrier {self.number} (byte {self.offset}): phase {self.phase - 1} is complete before "
                             f"all of its copies have come, {len(self.copies)} are under way")

    def passed(self, parity):
        """Whether the phase of that parity is complete; copies that are under way land first, as late as they may."""
        if self.phase & 1 == parity:
            copies, self.copies = self.copies, []
            while copies:
                land, nbytes = copies.pop(0)
                land()
                self.nbytes -= nbytes
                self.copies = copies
                self.settle()
        return self.phase & 1 != parity


class Missing(NamedTuple):
    """What a thread waits for at a line, said when asked: what the present phase still lacks."""

    barrier: Mbarrier
    line: int

    def __str__(self):
        barrier = self.barrier
        return (f"the end of phase {barrier.phase} of mbarrier {barrier.number} (byte {barrier.offset}) at line "
                f"{self.line}: {barrier.pending} of {barrier.count} arrivals and {barrier.nbytes} bytes are missing")


class SharedBytes:
    """Dynamic shared memory of one block, and what orders its uses.

    Parameters
    ----------
    machine : emulator.Emulator
    nbytes : int
        What the launch gives.
    """

    def __init__(self, machine, nbytes):
        self._machine, self.end = machine, START + nbytes
        chunks = -(-self.end // CHUNK)
        self._chunks = np.full((chunks, CHUNK // 2), NAN_BITS, np.uint16)
        self._slot = np.full(chunks, _NEVER)  # of the mbarrier that the last copy to a chunk reports to
        self._phase = np.zeros(chunks, np.int64)  # in which phase of it
        self._reads = np.zeros((WARPGROUPS, chunks), np.int64)  # each warpgroup's clock after its last read
        # What threads did themselves: who stored a word, as its how manyth access; likewise who loaded of a chunk.
        self._writer = np.full((chunks, CHUNK // WORD), _NEVER)
        self._written = np.zeros((chunks, CHUNK // WORD), np.int64)
        self._loads = {}  # chunk -> {thread: its how manyth access}
        self._barriers = {}
        self._threads = {}
        self._named = {}
        self.registers = {}  # warpgroup -> registers that each of its threads has

    @cached_property
    def watch(self):
        """Whether to raise on races."""
        return self._machine.watch

    def of(self, thread, make):
        """A thread's own record, made at first."""
        if thread.index not in self._threads:
            self._threads[thread.index] = make()
        return self._threads[thread.index]

    def synchronise(self):
        """A barrier of all threads: each knows what any one knew."""
        if self._threads:
            clock = np.max([thread.clock for thread in self._threads.values()], axis=0)
            for thread in self._threads.values():
                thread.learn(clock)

    def close(self):
        """All threads are gone: nothing may come any more."""
        for barrier in self._barriers.values():
            if barrier.copies:
                raise PhaseFault(f"{barrier}: the block ends, and {len(barrier.copies)} copies are still under way")

    # ---- mbarriers

    def make_barrier(self, address, count):
        """Initialise an mbarrier."""
        if address % BARRIER_BYTES or not START <= address <= self.end - BARRIER_BYTES:
            raise OutOfBounds(f"mbarrier at byte {address - START}: expected a multiple of {BARRIER_BYTES} within "
                              f"{self.end - START}")
        if address in self._barriers:
            raise PhaseFault(f"{self._barriers[address]} is initialised again")
        epoch = self._machine.thread.block.epoch, self._machine.thread.index
        self._barriers[address] = Mbarrier(len(self._barriers), address - START, count, epoch)

    def announce_barriers(self):
        """Let the copy engine know the barriers there are."""
        for barrier in self._barriers.values():
            barrier.announced = True

    def barrier(self, address):
        """The mbarrier at an address."""
        if address not in self._barriers:
            raise PhaseFault(f"byte {address - START} of shared memory holds no mbarrier")
        found, thread = self._barriers[address], self._machine.thread
        epoch, maker = found.epoch
        if self.watch and epoch == thread.block.epoch and maker != thread.index:
            raise Race(f"{found}: thread {thread.index} uses what thread {maker} initialised since the last barrier")
        return found

    def named(self, name):
        """A named barrier, of threads: [how many have come, phases that are over, what they knew, what is known]."""
        return self._named.setdefault(name, [0, 0, Clocked(), np.zeros(CLOCK, np.int64)])

    # ---- tiles

    def _chunks_of(self, addresses, what, place=swizzled):
        if addresses.min() < START or addresses.max() + CHUNK > self.end:
            raise OutOfBounds(f"{what}: bytes {addresses.min() - START} ... {addresses.max() + CHUNK - 1 - START} "
                              f"of {self.end - START} of shared memory")
        return place(addresses) // CHUNK

    def begin_copy(self, to, rows, barrier, clock):
        """Start to bring a box of ``rows`` rows of 128 bytes; ``rows`` is (n, 64) uint16. It reports to ``barrier``."""
        if to % ROW_BYTES:
            raise OutOfBounds(f"copy to byte {to - START}: expected an address in multiples of {ROW_BYTES}, got {to}")
        self._begin(to, rows, barrier, clock, swizzled)

    def begin_run(self, to, words, barrier, clock):
        """Start to bring neighbouring numbers as they are: ``words`` is (n,) uint16, n a multiple of 8."""
        if to % CHUNK or words.size * 2 % CHUNK:
            raise OutOfBounds(f"copy of {words.size * 2} bytes to byte {to - START}: expected multiples of {CHUNK}")
        self._begin(to, words, barrier, clock, np.asarray)

    def _begin(self, to, words, barrier, clock, place):
        """Start a copy to the chunks from ``to`` on, each where ``place`` says that it really is."""
        if not barrier.announced:
            raise PhaseFault(f"{barrier}: the copy engine has not been told of it (mbarrier_fence)")
        addresses = to + CHUNK * np.arange(words.size * 2 // CHUNK)
        at = self._chunks_of(addresses, "copy", place)
        for address in self._barriers:
            if addresses[0] <= address < addresses[-1] + CHUNK:
                raise Race(f"copy to byte {to - START}: it overwrites {self._barriers[address]}")
        if self.watch:
            self._settled(at, clock, f"copy to byte {to - START}")
        self._chunks[at] = NAN_BITS
        self._slot[at], self._phase[at] = barrier.slot, barrier.phase
        self._writer[at] = _NEVER
        chunks = np.ascontiguousarray(words).reshape(-1, CHUNK // 2)

        def land():
            self._chunks[at] = chunks

        barrier.copies.append((land, words.size * 2))

    def _settled(self, at, clock, what):
        """Raise unless who overwrites these chunks knows that what is there came and was read."""
        self._arrived(at, clock, f"{what}: another copy to its place need not have come yet")
        for group in range(WARPGROUPS):
            if (self._reads[group, at] > clock[group]).any():
                raise Race(f"{what}: warpgroup {group} need not have read yet what is there")
        for k in set(at.tolist()) & self._loads.keys():
            for thread, count in self._loads[k].items():
                if count > clock[ACCESSES + thread]:
                    raise Race(f"{what}: thread {thread} need not have read yet what is there")
        writer = self._writer[at]
        if ((writer != _NEVER) & (self._written[at] > clock[ACCESSES + writer])).any():
            raise Race(f"{what}: another thread need not have stored yet what it stores there")

    def _word_settled(self, at, k, clock, what):
        """The same for one word of one chunk, number by number: most accesses are such, and arrays of one are slow."""
        self._chunk_arrived(at, clock, f"{what}: another copy to its place need not have come yet")
        for group in range(WARPGROUPS):
            if self._reads[group, at] > clock[group]:
                raise Race(f"{what}: warpgroup {group} need not have read yet what is there")
        for thread, count in self._loads.get(at, {}).items():
            if count > clock[ACCESSES + thread]:
                raise Race(f"{what}: thread {thread} need not have read yet what is there")
        writer = self._writer[at, k]
        if writer != _NEVER and self._written[at, k] > clock[ACCESSES + writer]:
            raise Race(f"{what}: another thread need not have stored yet what it stores there")

    def _chunk_arrived(self, at, clock, what):
        """As `_arrived`, of one chunk."""
        slot = self._slot[at]
        if slot != _NEVER and clock[slot] <= self._phase[at]:
            raise Race(f"{what}: phase {self._phase[at]} of mbarrier {slot - WARPGROUPS}")

    def _arrived(self, at, clock, what):
        """Raise unless all copies to these chunks are known to have come."""
        unknown = (self._slot[at] != _NEVER) & (clock[self._slot[at]] <= self._phase[at])
        if unknown.any():
            slot, phase = self._slot[at][unknown][0], self._phase[at][unknown][0]
            raise Race(f"{what}: phase {phase} of mbarrier {slot - WARPGROUPS}")

    def store(self, address, word, thread):
        """A thread stores 32 bits."""
        at, k = self._word(address, "store")
        if self.watch:
            self._word_settled(at, k, thread.clock, f"store to byte {address - START}")
        index = self._count(thread)
        self._writer[at, k], self._written[at, k] = index, thread.clock[ACCESSES + index]
        self._slot[at] = _NEVER
        self._chunks[at, 2 * k : 2 * k + 2] = np.array([word], "<u4").view("<u2")

    def load(self, address, count, thread):
        """A thread loads ``count`` neighbouring fp32 numbers, as many as fit in a chunk."""
        at, k = self._word(address, "load")
        if k + count > CHUNK // WORD or k % count:
            raise OutOfBounds(f"load of {count} numbers from byte {address - START}: not on a boundary of their size")
        index = self._count(thread)
        if self.watch:
            self._chunk_arrived(at, thread.clock, f"load from byte {address - START}, of a copy not waited for")
            writer = self._writer[at, k : k + count]
            others = (writer != _NEVER) & (writer != index)
            if (others & (self._written[at, k : k + count] > thread.clock[ACCESSES + writer])).any():
                raise Race(f"load from byte {address - START}: another thread need not have stored it yet")
            if self._slot[at] == _NEVER and (writer == _NEVER).any():
                raise UninitialisedRead(f"load from byte {address - START}: nothing was brought or stored there")
        self._loads.setdefault(at, {})[index] = thread.clock[ACCESSES + index]
        return self._chunks[at].view(np.float32)[k : k + count].copy()

    def hand_over(self, thread):
        """A thread's fence: its stores so far are there for products of those who know of this."""
        index = self._machine.thread.index
        thread.clock = thread.clock.copy()
        thread.clock[FENCED + index] = thread.clock[ACCESSES + index]

    def _count(self, thread):
        """The number of the present thread, which loads or stores once more."""
        index = self._machine.thread.index
        thread.clock = thread.clock.copy()
        thread.clock[ACCESSES + index] += 1
        return index

    def _word(self, address, what):
        """(chunk, word in it) of an address as it is, not swizzled."""
        if address % WORD or not START <= address <= self.end - WORD:
            raise OutOfBounds(f"{what} at byte {address - START}: expected a multiple of {WORD} within "
                              f"{self.end - START}")
        return address // CHUNK, address % CHUNK // WORD

    def read(self, addresses, group, tick, clock):
        """The chunks at these addresses, as read by a warpgroup's product: (..., 8) uint16.

        ``clock`` is what all of its threads knew when they started it; ``tick`` the warpgroup's clock once it has read.
        """
        at = self._chunks_of(addresses, "operand")
        if self.watch:
            writer = self._writer[at]
            if ((self._slot[at] == _NEVER)[..., None] & (writer == _NEVER)).any():
                raise UninitialisedRead(f"warpgroup {group}: a product reads shared memory that no copy goes to")
            self._arrived(at, clock, f"warpgroup {group}: a product reads bytes of a copy that not all threads have "
                                     "waited for")  # fmt: skip
            if ((writer != _NEVER) & (self._written[at] > clock[FENCED + writer])).any():
                raise Race(f"warpgroup {group}: a product reads what a thread stored, with no fence after it that all "
                           "threads know of")  # fmt: skip
        self._reads[group, at] = tick
        return self._chunks[at]
