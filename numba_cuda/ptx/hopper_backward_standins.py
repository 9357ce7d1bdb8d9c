"""What the emulator runs for the instructions of ``ptx.hopper_backward``: the same names, in NumPy; see there."""

import numpy as np
from numba.cuda.extending import _Intrinsic

from flash_cuda.executors.memory import OutOfBounds
from flash_cuda.ptx import hopper_backward as ptx
from flash_cuda.ptx.hopper_standins import FACTORIES, known, start


def wgmma_rows(N, dtype, first):
    def wgmma(machine, acc, A, B):
        start(machine, ("wgmma", N, dtype, False), acc, A, None, B, int(not first))

    return wgmma


def wgmma_across(N, dtype, first):
    def wgmma(machine, acc, A, B):
        start(machine, ("across", N, dtype, False), acc, A, None, B, int(not first))

    return wgmma


def bulk_load(machine, to, address, nbytes, barrier):
    memory = machine.thread.block.bytes
    words = _run(address, nbytes // 4)
    memory.begin_run(to, words.view(np.uint16), memory.barrier(barrier), known(machine).clock)


def proxy_fence(machine):
    machine.thread.block.bytes.hand_over(known(machine))


def store_word(machine, address, word):
    machine.thread.block.bytes.store(address, word, known(machine))


def load_pair(machine, r, at, address):
    r[at : at + 2] = machine.thread.block.bytes.load(address, 2, known(machine))


def load_four(machine, r, at, address):
    r[at : at + 4] = _run(address, 4)


def add_four(machine, address, r, at):
    array, first = _place(address, 4)
    for k in range(4):
        array.add(tuple(map(int, np.unravel_index(first + k, array.shape))), r[at + k])


def _place(address, count):
    """(array, number of its first element) of ``count`` fp32 numbers from an address on."""
    array, offset = address
    if offset % 16 or not 0 <= offset // 4 <= array.size - count:
        raise OutOfBounds(f"{array.name}: {4 * count} bytes from byte {offset} of {array.size * 4}")
    return array, offset // 4


def _run(address, count):
    """That many neighbouring fp32 numbers of global memory, loaded at once."""
    array, first = _place(address, count)
    places = (np.unravel_index(first + k, array.shape) for k in range(count))
    return np.array([array[tuple(map(int, place))] for place in places], np.float32)


BACKWARD_TABLE = {
    instruction: globals()[name]
    for name, instruction in vars(ptx).items()
    if isinstance(instruction, _Intrinsic) and name in globals()
}
FACTORIES |= {make.__name__: make for make in (wgmma_rows, wgmma_across)}
