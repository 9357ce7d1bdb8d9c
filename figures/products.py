"""Products that kernels on tensor cores start, counted in the emulator: their operations, and what they read."""

from collections import Counter
from typing import NamedTuple

from flash_cuda.executors.emulator import Emulator
from flash_cuda.executors.memory_bytes import WARPGROUP

MMA_FLOPS = 2 * 16 * 16 * 16  # what the emulator's stand-in of two mma.m16n8k16 side by side does
LDMATRIX_BYTES = 4 * 8 * 16  # four matrices of 8 rows of 16 bytes


class Wait(NamedTuple):
    """A warpgroup that waits for products of its.

    Attributes
    ----------
    block, warpgroup : int
    finished : list of str
        Of which register arrays, by ``names``.
    in_flight : list of str
        What goes on meanwhile.
    first_operands : list of int
        Addresses in shared memory of the finished products' first operands, of those that have it there.
    """

    block: int
    warpgroup: int
    finished: list
    in_flight: list
    first_operands: list


class Products(Emulator):
    """An emulator that keeps account of products.

    Parameters
    ----------
    names : sequence of str
        Of the local arrays of a kernel with ``wgmma``, in the order in which it makes them.

    Attributes
    ----------
    flops, read_bytes : Counter
        By kernel: operations of its products, and bytes of shared memory that they, or ``ldmatrix`` for them, read.
    waits : list of Wait
    """

    def __init__(self, names=(), seed=None):
        super().__init__(seed)
        self.names, self.flops, self.read_bytes, self.waits = names, Counter(), Counter(), []
        self._kernel = ""

    def launch(self, body, blocks, threads, args, shared=0):
        """As `Emulator.launch`."""
        self._kernel = body.__name__
        super().launch(body, blocks, threads, args, shared)

    def meet(self, name, given, compute, size=32):
        """As `Emulator.meet`; one thread speaks for its group."""
        if self.thread.index % size == 0:
            if name == "mma":
                self.flops[self._kernel] += MMA_FLOPS
            elif name == "ldmatrix":
                self.read_bytes[self._kernel] += LDMATRIX_BYTES
            elif name == "wgmma_wait":
                self._waited(*given)
        return super().meet(name, given, compute, size)

    def _waited(self, mine, finished):
        """Note a wait that ends the products ``finished``; those in ``mine`` go on."""
        for product in finished:
            rows, N = 64, product.made[1]
            self.flops[self._kernel] += 2 * rows * N * 16
            # B comes from shared memory, A too unless it is in registers: 16 columns of 2 bytes each.
            self.read_bytes[self._kernel] += 2 * 16 * (N + (rows if product.A_now is None else 0))
        named = {id(array): name for array, name in zip(self.thread.registers, self.names, strict=False)}
        left = [product for group in (*mine.groups, mine.open) for product in group]
        ended, in_flight = ([*dict.fromkeys(named.get(id(p.acc), "?") for p in ps)] for ps in (finished, left))
        addresses = [16 * (p.A & 0x3FFF) for p in finished if p.A_now is None]  # of the descriptor, in 16 bytes
        self.waits.append(Wait(self.thread.block.index, self.thread.index // WARPGROUP, ended, in_flight, addresses))
