"""NumPy arrays for `arrays`, and what all kinds share: banded buffers around what a stranger's kernel reads and writes.

Inputs lie in larger buffers whose ends are filled with NaN. A kernel that reads past an input therefore computes with
NaN, and one that writes past it changes the band. Where a library lets its allocations be watched, the buffers that a
kernel makes for its outputs are banded and poisoned in the same way.
"""

import sys
from contextlib import contextmanager

import numpy as np

from verify.foreign.as_numpy import to_numpy

BAND = 1 << 14  # bytes on either side: a 64 x 64 tile of fp32
POISON = 0xFF  # as every byte of a number: NaN in each floating type, -1 in integers
MOST_WATCHED = 256  # allocations of one call; a kernel that makes more would fill the memory with bands


class Arrays:
    """What one library can do, and the banded buffers of one call.

    Attributes
    ----------
    name : str
    executor : "gpu", "cpu" or "simulated"
    device : str
    strided : bool
        Whether arrays can be views that are not contiguous.
    """

    name = "numpy"
    executor = "cpu"
    strided = True

    def __init__(self):
        self._bands = []  # (what, buffer)

    @property
    def device(self):
        """The machine's name in a report."""
        from verify.executors import device_name

        return device_name("cpu")

    def put(self, x, what="an input"):
        """A NumPy array as one of this library, strides kept, in a banded buffer.

        Parameters
        ----------
        x : ndarray
        what : str
            Its name in a complaint.
        """
        x, root, first = _root(x)
        raw = np.full(2 * BAND + root.nbytes, POISON, np.uint8)
        raw[BAND : BAND + root.nbytes] = root.reshape(-1, order="A").view(np.uint8)
        buffer = self._buffer(raw)
        self._bands.append((what, buffer))
        return self._view(buffer, BAND + first, x.shape, x.strides, x.dtype)

    def get(self, array):
        """The array as NumPy has it."""
        return to_numpy(array)

    @contextmanager
    def watch(self):
        """While this is open, buffers that the kernel makes are banded and poisoned, where that can be done."""
        names = ("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like", "full_like")
        # Numba compiles calls of np.empty by identity, so a file that uses it keeps NumPy as it is.
        real = {} if "numba" in sys.modules else {name: getattr(np, name) for name in names}
        for name, make in real.items():
            setattr(np, name, self._watched(make, poison=name.startswith("empty")))
        try:
            yield
        finally:
            for name, make in real.items():
                setattr(np, name, make)

    def sync(self):
        """Wait until the device is done, so that its errors belong to this call."""

    def broken(self) -> list[str]:
        """Names of the buffers whose bands were written to."""
        return list(dict.fromkeys(what for what, buffer in self._bands if not self._intact(buffer)))

    def _buffer(self, raw):
        """The library's buffer with these bytes."""
        return raw

    def _view(self, buffer, first, shape, strides, dtype):
        """An array at byte `first` of a buffer."""
        return np.ndarray(shape, dtype, buffer, first, strides)

    def _intact(self, buffer):
        """Whether both bands still hold the poison."""
        return bool((self._ends(buffer) == POISON).all())

    def _ends(self, buffer):
        return np.concatenate([buffer[:BAND], buffer[-BAND:]])

    def _watched(self, make, poison):
        def banded(*args, **kwargs):
            made = make(*args, **kwargs)
            if type(made) is not np.ndarray or made.dtype.hasobject or not made.nbytes or self._full():
                return made
            raw = np.frombuffer(bytearray([POISON]) * (2 * BAND + made.nbytes), np.uint8)
            self._bands.append(("an output or work array", raw))
            view = self._view(raw, BAND, made.shape, made.strides, made.dtype)
            if not poison:
                view[...] = made
            return view

        return banded

    def _full(self):
        return len(self._bands) >= MOST_WATCHED


def _root(x):
    """x, the contiguous array that it is a view of, and the byte of that at which it starts."""
    root = x
    while isinstance(root.base, np.ndarray):
        root = root.base
    if not root.flags.forc or root.dtype != x.dtype:
        root = x = np.ascontiguousarray(x)
    return x, root, x.__array_interface__["data"][0] - root.__array_interface__["data"][0]


MAKERS = {"numpy": Arrays}
