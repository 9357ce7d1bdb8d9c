"""What every step does before and after its kernels: check the arguments, choose the tile, allocate, hand over.

An *executor* decides where a body runs: ``gpu.Gpu``, ``emulator.Emulator`` or ``assembler.Assembler``. It has

    input(name, array)          an input as the body will see it, read-only
    empty(name, shape, dtype)   an output or workspace, poisoned
    launch(body, blocks, threads, args, shared=0)   ``shared`` bytes of dynamic shared memory
    result(array)               back to the kind of array that came in
    multiprocessors             how many blocks can stay at once; for step 6, as the next
    tensor_maps((array, rows of a box[, length]), ...)   what tells the copy engine of arrays
"""

import math
from dataclasses import dataclass

import numpy as np

from flash_cuda.parts.elements import STORAGE
from refimpl.tiling import Tile, cdiv

THREADS = (16, 8)  # TY, TX: a warp covers 4 rows by 8 columns
# Head room D -> tile. Chosen so that Q_i, K_j and V_j, all three resident in step 2, fit 48 KiB of shared memory.
TILES = {16: Tile(64, 64), 32: Tile(64, 64), 64: Tile(64, 32), 128: Tile(32, 24), 256: Tile(16, 8)}


def head_room(d, dv):
    """The smallest number of columns in TILES that holds d and dv."""
    return next(D for D in TILES if max(d, dv) <= D)


def tile_for(d, dv=None):
    """The tile that all steps use for these head dims."""
    return TILES[head_room(d, dv or d)]


def _shape(name, array, ndim=4):
    if len(getattr(array, "shape", ())) != ndim:
        got = getattr(array, "shape", type(array).__name__)
        raise ValueError(f"{name}: expected an array of shape (B, H, N, d), got {got}")
    return tuple(array.shape)


def storage(name, array):
    """The storage type's name of an array, or TypeError that names the argument."""
    dtype = getattr(array, "dtype", None)
    for dtype_name, (face, _) in STORAGE.items():
        if dtype is not None and dtype == face:
            return dtype_name
    got = type(array).__name__ if dtype is None else dtype
    raise TypeError(f"{name}: expected dtype {', '.join(STORAGE)}, got {got}")


def _check(Q, K, V):
    """Shapes and dtypes that fit together, or an error that names the argument."""
    B, Hq, Nq, d = _shape("Q", Q)
    Bk, Hk, Nk, dk = _shape("K", K)
    Bv, Hv, Nv, dv = _shape("V", V)
    for name, got, want, what in (("K", Bk, B, "batch"), ("V", Bv, B, "batch"), ("K", dk, d, "head dim"),
                                  ("V", Hv, Hk, "heads"), ("V", Nv, Nk, "length")):
        if got != want:
            raise ValueError(f"{name}: expected {what} {want}, got {got}")
    if not 1 <= d <= max(TILES):
        raise ValueError(f"Q: expected head dim 1 .. {max(TILES)}, got {d}")
    if not 1 <= dv <= max(TILES):
        raise ValueError(f"V: expected head dim 1 .. {max(TILES)}, got {dv}")
    if Hk < 1 or Hq < 1 or Hq % Hk:
        raise ValueError(f"Q: expected a positive multiple of K's {Hk} heads, got {Hq}")
    want = storage("Q", Q)
    for name, array in (("K", K), ("V", V)):
        if isinstance(array, np.ndarray) != isinstance(Q, np.ndarray):
            raise TypeError(f"{name}: expected an array like Q, a {type(Q).__name__}, got a {type(array).__name__}")
        if storage(name, array) != want:
            raise TypeError(f"{name}: expected dtype {want} like Q, got {storage(name, array)}")
    return B, Hq, Hk, Nq, Nk, d, dv


@dataclass
class Problem:
    """One call: its arrays on the executor, its sizes, and the constants its kernels are made with."""

    on: object
    B: int
    Hq: int
    Hk: int
    Nq: int
    Nk: int
    d: int
    dv: int
    tile: Tile
    threads: tuple
    scale: np.float32
    scale_log2: np.float32
    diag: int
    Q: object = None
    K: object = None
    V: object = None
    O: object = None
    lse: object = None
    trace: object = None
    tracing: bool = False

    @property
    def constants(self):
        """(Br, Bc, D, TY, TX), what ``make_kernel`` takes."""
        return self.tile.Br, self.tile.Bc, head_room(self.d, self.dv), *self.threads

    @property
    def Tr(self):
        return cdiv(self.Nq, self.tile.Br)

    @property
    def Tc(self):
        return cdiv(self.Nk, self.tile.Bc)

    def empty(self, name, *shape):
        """An fp32 workspace in global memory."""
        return self.on.empty(name, shape, np.dtype(np.float32))

    def launch(self, body, blocks, *args, **how):
        """Run ``body`` on ``blocks`` blocks, unless there is nothing to do; ``how`` goes to the executor."""
        if blocks:
            self.on.launch(body, blocks, self.threads[0] * self.threads[1], args, **how)

    def results(self):
        """(O, lse), and with tracing the trace as a third."""
        outputs = (self.O, self.lse, self.trace) if self.tracing else (self.O, self.lse)
        return tuple(self.on.result(array) for array in outputs)


def prepare(
    Q, K, V, scale=None, causal=False, align="bottom_right", tile=None, threads=None, on=None, trace=False, tiles=TILES
):  # fmt: skip
    """Check a call and allocate its outputs.

    Parameters
    ----------
    Q : (B, Hq, Nq, d), K : (B, Hk, Nk, d), V : (B, Hk, Nk, dv)
        fp32, fp16 or bf16 (``ml_dtypes.bfloat16``), any strides; Hq a multiple of Hk; d, dv in 1 .. 256.
    scale : float, optional
        Factor of the scores, 1/sqrt(d) if not given; may be 0 or negative.
    causal : bool
        Key j is seen by query i iff j <= i + Nk - Nq ("bottom_right") or j <= i ("top_left", see ``align``).
    tile : refimpl.tiling.Tile, optional
        Multiples of the threads; by ``tiles``, a table like `TILES`, if not given.
    threads : (TY, TX), optional
        The block's shape, 16 x 8 if not given.
    on : executor, optional
        The GPU if not given.
    trace : bool
        Also return (m in log2 units, l, O_acc) after each key tile, float32 (B, Hq, Tc, Nq, 2 + dv); steps 2 - 6.

    Raises
    ------
    ValueError, TypeError
        One line that names the argument and what was expected, before anything is launched.
    RuntimeError
        No executor was given and there is no GPU.
    """
    B, Hq, Hk, Nq, Nk, d, dv = _check(Q, K, V)
    try:
        scale = 1.0 / math.sqrt(d) if scale is None else float(scale)
    except (TypeError, ValueError):
        raise TypeError(f"scale: expected a number, got {scale!r}") from None
    if not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    if align not in ("bottom_right", "top_left"):
        raise ValueError(f'align: expected "bottom_right" or "top_left", got {align!r}')
    threads = threads or THREADS
    tile = tile or tiles[head_room(d, dv)]
    if tile.Br % threads[0] or tile.Bc % threads[1] or head_room(d, dv) % threads[1]:
        raise ValueError(f"tile: expected Br, Bc multiples of the threads {threads}, got ({tile.Br}, {tile.Bc})")
    if on is None:
        from flash_cuda.executors.gpu import Gpu

        on = Gpu()
    # Key j is seen by row r iff j <= r + diag: one comparison for causal in either corner and for no mask at all.
    diag = Nk if not causal else Nk - Nq if align == "bottom_right" else 0
    # The base-2 exponential is the hardware's own; log2(e) goes into the scale, once, in fp64.
    scale_log2 = np.float32(scale * math.log2(math.e))
    p = Problem(on, B, Hq, Hk, Nq, Nk, d, dv, tile, threads, np.float32(scale), scale_log2, diag)
    p.Q, p.K, p.V = on.input("Q", Q), on.input("K", K), on.input("V", V)
    p.O = on.empty("O", (B, Hq, Nq, dv), Q.dtype)
    p.lse = p.empty("lse", B, Hq, Nq)
    p.tracing = bool(trace)
    p.trace = p.empty("trace", *((B, Hq, p.Tc, Nq, 2 + dv) if trace else (0, 0, 0, 0, 0)))
    return p
