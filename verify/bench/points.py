"""What is timed: sizes, their arrays, and every kernel or peer as something that runs on them and is checked first."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from itertools import product

import numpy as np

from verify import registry, timing
from verify.bench import limits, peers
from verify.bench.check import GRADIENTS, rows_of
from verify.bench.limits import BACKWARD, FORWARD
from verify.cases import Shape
from verify.dtypes import DTYPES
from verify.fingerprint import fingerprint

SWEEP_HEADS = 16
KEPT = 2  # sizes whose arrays are kept


@dataclass(frozen=True)
class Point:
    """One size: self-attention, as many key heads as query heads.

    Attributes
    ----------
    direction : "forward" or "backward"
    B, H, N, d : int
    dtype : str
    causal : bool
    """

    direction: str
    B: int
    H: int
    N: int
    d: int
    dtype: str
    causal: bool

    @property
    def shape(self) -> Shape:
        """Sizes as `cases.Shape`."""
        return Shape(self.B, self.H, self.H, self.N, self.N, self.d, self.d)

    @property
    def work(self) -> limits.Work:
        """Operations and compulsory bytes."""
        return limits.work(self.shape, self.causal, self.dtype, self.direction)

    def __str__(self):
        mask = "causal" if self.causal else "full"
        return f"{self.direction} {self.dtype} d{self.d} {mask} {self.B}x{self.H} heads N {self.N}"


def points(directions, lengths, dims, dtypes, masks, heads, tokens=None) -> list[Point]:
    """All combinations.

    Parameters
    ----------
    tokens : int, optional
        Tokens of all sequences together: the batch is this over N, and 1 at least. 1 if not given.
    """
    return [
        Point(way, max(1, (tokens or N) // N), heads, N, d, dtype, causal)
        for way, d, dtype, causal, N in product(directions, dims, dtypes, masks, lengths)
    ]


class Inputs:
    """Device arrays of points, N(0, 1); those of equal size share their memory, as making them costs more than timing.

    Parameters
    ----------
    upload : callable, optional
        NumPy array -> device array of a shape: the GPU's if not given.
    """

    def __init__(self, upload=None):
        self._upload, self._kept = upload or _device_array, {}

    def host(self, point):
        """{"Q", "K", "V", "dO"}: NumPy arrays (B, H, N, d)."""
        return {name: host for name, (host, _) in self._both(point).items()}

    def device(self, point):
        """The same on the device; dO for a backward point alone."""
        return {name: self._upload(host, kept) for name, (host, kept) in self._both(point).items()
                if name != "dO" or point.direction == BACKWARD}  # fmt: skip

    def _both(self, point):
        s, dtype = point.shape, DTYPES[point.dtype].numpy
        size = s.B * s.Hq * s.Nq * s.d
        if (size, point.dtype) not in self._kept:
            while len(self._kept) >= KEPT:
                del self._kept[next(iter(self._kept))]

            def make(k):
                return np.random.default_rng([size, s.d, k]).standard_normal(size, dtype=np.float32).astype(dtype), {}

            with ThreadPoolExecutor() as pool:  # neither step holds Python's lock
                self._kept[size, point.dtype] = dict(zip(("Q", "K", "V", "dO"), pool.map(make, range(4)), strict=True))
        shape = (s.B, s.Hq, s.Nq, s.d)
        return {name: (flat.reshape(shape), kept) for name, (flat, kept) in self._kept[size, point.dtype].items()}


def _faced(array, dtype):
    """An executor's result as an input again: bf16 under its own name instead of the bits that travel."""
    from flash_cuda.interface.memory import DeviceView

    pointer = int(array.__cuda_array_interface__["data"][0])
    return DeviceView(array, pointer, array.shape, array.strides, dtype)


def _device_array(host, kept):
    """The device's view of a NumPy array; its memory is uploaded once for all shapes."""
    from flash_cuda.executors.gpu import upload
    from flash_cuda.interface.memory import DeviceView

    if "memory" not in kept:
        kept["memory"] = upload(host.reshape(-1))
    pointer = int(kept["memory"].__cuda_array_interface__["data"][0])
    return DeviceView(kept["memory"], pointer, host.shape, host.strides, host.dtype)


def kernel(name, point, arrays, rows, options=None) -> timing.Contender:
    """One of our kernels at a point: launched once with its own host code, then its launches alone again and again.

    Parameters
    ----------
    name : str
    point : Point
    arrays : dict of str to device arrays
    rows : callable
        As `rows_of` makes it.
    options : dict, optional
        More arguments of the forward pass, such as a tile.

    Raises
    ------
    LookupError
        The kernel does not take the point, or there is no such backward pass.
    """
    entry = registry.CUDA[name]
    asked = {"causal": point.causal, "backward": point.direction == BACKWARD}
    if reason := entry.lacks({name for name in asked if asked[name]}, point.dtype, point.d, point.d):
        raise LookupError(reason)
    backward = entry.attention_backward() if point.direction == BACKWARD else None
    from flash_cuda.executors.gpu import Gpu

    Q, K, V = (arrays[key] for key in "QKV")
    facts = {"fingerprint": fingerprint_of(name, point.direction), "tile": tile_of(name, point)}
    forward, state = Gpu(), {}

    def first():
        """Compile, allocate, launch; what is timed afterwards is the launches."""
        O, lse = entry.attention()(Q, K, V, causal=point.causal, on=forward, **(options or {}))
        state.update(on=forward, out={"O": O})
        if backward:
            on, out = Gpu(), _faced(O, Q.dtype)
            found = backward(Q, K, V, out, lse, arrays["dO"], causal=point.causal, on=on, **entry.ways[0])
            state.update(on=on, out=dict(zip(GRADIENTS, found[:3], strict=True)))

    def work():
        if "on" not in state:
            first()
        else:
            state["on"].replay()

    def graph():
        """The same launches as a CUDA graph."""
        return state["on"].graph()

    def outputs():
        return {key: rows(x) for key, x in state["out"].items()}

    return timing.Contender(name, work, outputs=outputs, facts=facts, graph=graph)


def fingerprint_of(name, direction) -> str:
    """A kernel's fingerprint now; backward, that of the module with its gradients."""
    if direction == FORWARD:
        return fingerprint(name)
    return fingerprint(registry.CUDA[name].attention_backward().__module__.removeprefix("flash_cuda."))


def tile_of(name, point):
    """[Br, Bc] that a kernel takes by itself: its own choice, out of its own table by head room, or the ladder's."""
    entry = registry.CUDA[name]
    if point.direction == BACKWARD and (own := getattr(import_module(entry.gradients.module), "tile_for", None)):
        tile = own(point.d, point.causal)
        return [tile.Br, tile.Bc]
    module = import_module(entry.module)
    if hasattr(module, "shape_for"):
        tile = module.shape_for(point.d, point.N, point.causal)
        return [tile.Br, tile.Bc]
    tables = (getattr(module, table, None) for table in ("SHAPES", "RULE_TILES", "TILES"))
    table = next((table for table in tables if table), None) or import_module("flash_cuda.launch").TILES
    tile = table[min(room for room in table if point.d <= room)]
    return [tile.Br, tile.Bc]


def contenders(point, kernels, others, arrays) -> tuple[list, dict]:
    """Everyone who can be timed at a point, and why the rest cannot.

    Returns
    -------
    list of timing.Contender
    dict of str to str
        Name -> reason.
    """
    found, reasons = [], {}
    for name in kernels:
        try:
            found.append(kernel(name, point, arrays, rows_of(point)))
        except LookupError as error:
            reasons[name] = str(error)
    for name in others:
        reason = peers.absent(name)
        if not reason and point.dtype not in peers.PEERS[name].dtypes:
            reason = f"does not take {point.dtype}"
        if reason:
            reasons[name] = reason
            continue
        try:
            found.append(peers.contender(name, point, arrays, rows_of(point)))
        except Exception as error:  # a back end says in its own way what it cannot do
            reasons[name] = brief(error)
    return found, reasons


def brief(error) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]
