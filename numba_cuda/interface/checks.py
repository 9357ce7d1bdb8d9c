"""Arguments of the flash-attn interface, each checked before anything runs; an error names the argument in one line."""

import math
from operator import index

import numpy as np

from flash_cuda.interface.arrays import kind_of
from flash_cuda.launch import THREADS, TILES, head_room
from flash_cuda.parts.elements import STORAGE
from refimpl.philox import Dropout
from refimpl.tiling import Tile

HEADS = 1, 2**31 - 1
LIMITS = {"d": (1, max(TILES)), "dv": (1, max(TILES)), "H": HEADS, "Hk": HEADS}  # of axes; others may be 0


def flag(name, x):
    """A boolean."""
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False, got {x!r}")
    return bool(x)


def number(name, x):
    """A finite real number as float."""
    if isinstance(x, (bool, np.bool_)) or not isinstance(x, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: expected a number, got {x!r}")
    if not math.isfinite(x):
        raise ValueError(f"{name}: expected a finite number, got {x}")
    return float(x)


def whole(name, x, low, high=None):
    """An integer in low ... high."""
    try:
        value = index(x) if not isinstance(x, (bool, np.bool_)) else None
    except TypeError:
        value = None
    if value is None:
        raise TypeError(f"{name}: expected an integer, got {x!r}")
    if value < low or (high is not None and value > high):
        limits = f"of at least {low}" if high is None else f"in {low} ... {high}"
        raise ValueError(f"{name}: expected an integer {limits}, got {value}")
    return value


def pair(name, x, low, high=None):
    """Two integers in low ... high."""
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        raise TypeError(f"{name}: expected a pair of integers, got {x!r}")
    return tuple(whole(name, part, low, high) for part in x)


def softmax_scale(x):
    """None, or any finite number: negative and zero are right."""
    return None if x is None else number("softmax_scale", x)


def softcap(x):
    """A positive number; 0 is none, and comes back as None."""
    value = number("softcap", x)
    if value < 0:
        raise ValueError(f"softcap: expected a positive number, or 0.0 for none, got {x}")
    return value or None


def dropout_p(x):
    value = number("dropout_p", x)
    if not 0 <= value < 1:
        raise ValueError(f"dropout_p: expected a number in [0, 1), got {x}")
    return value


def array(kind, name, x, axes, sizes, dtypes=None):
    """An array of the caller's kind whose axes have the sizes known so far; new ones are noted.

    Parameters
    ----------
    kind : interface.arrays.NumPy or a kind derived from it
    axes : str
        Names of the axes, "B Nq H d".
    sizes : dict
        Name -> length; filled in.
    dtypes : sequence of NumPy dtype, optional
        The ones allowed; those of STORAGE if left out.
    """
    if not kind.holds(x):
        raise TypeError(f"{name}: expected {kind.name} like the first array, got {type(x).__name__}")
    if kind.place(x) != kind.place(kind.like):
        raise ValueError(f"{name}: expected an array on {kind.place(kind.like)} like the first, got {kind.place(x)}")
    names, shape = axes.split(), tuple(x.shape)
    want = f"({', '.join(names)})"
    if len(shape) != len(names):
        raise ValueError(f"{name}: expected shape {want}, got {shape}")
    for axis, n in zip(names, shape, strict=True):
        if sizes.get(axis, n) != n:
            raise ValueError(f"{name}: expected shape {want} with {axis} = {sizes[axis]}, got {shape}")
        low, high = LIMITS.get(axis, (0, n))
        if not low <= n <= high:
            raise ValueError(f"{name}: expected shape {want} with {axis} in {low} ... {high}, got {shape}")
    allowed = dtypes or [face for face, _ in STORAGE.values()]
    if kind.dtype(x) not in allowed:
        names_of = ", ".join(str(dtype) for dtype in allowed)
        raise TypeError(f"{name}: expected dtype {names_of}, got {kind.dtype(x)}")
    sizes.update(zip(names, shape, strict=True))
    return kind.dtype(x)


def qkv(kind, arrays, sizes=None):
    """q, k, v and more arrays of their dtype; sizes by name of the axis.

    Parameters
    ----------
    arrays : dict
        Name -> (array, axes), q first.
    """
    sizes = {} if sizes is None else sizes
    dtype = None
    for name, (x, axes) in arrays.items():
        dtype = array(kind, name, x, axes, sizes, None if dtype is None else [dtype])
    if sizes["H"] % sizes["Hk"]:
        raise ValueError(f"q: expected a positive multiple of the {sizes['Hk']} heads of k and v, got {sizes['H']}")
    return sizes


def alibi_slopes(x, B, H):
    """Slopes (H,) or (B, H) as a NumPy array, or None."""
    if x is None:
        return None
    own = kind_of("alibi_slopes", x)
    if own.wants_gradient(x):
        raise ValueError("alibi_slopes: expected an array without requires_grad: gradients are of q, k and v alone")
    if own.dtype(x) != np.float32:
        raise TypeError(f"alibi_slopes: expected dtype float32, got {own.dtype(x)}")
    if tuple(x.shape) not in ((H,), (B, H)):
        raise ValueError(f"alibi_slopes: expected shape ({H},) or ({B}, {H}), got {tuple(x.shape)}")
    return own.to_host(x)


def int32(name, x, shape):
    """A small array of int32 as NumPy int64, wherever it was."""
    own = kind_of(name, x)
    if own.dtype(x) != np.int32:
        raise TypeError(f"{name}: expected dtype int32, got {own.dtype(x)}")
    if len(x.shape) != 1 or (shape is not None and tuple(x.shape) != shape):
        raise ValueError(f"{name}: expected shape {shape or '(B + 1,)'}, got {tuple(x.shape)}")
    return own.to_host(x).astype(np.int64)


def cu_seqlens(name, x, of, total):
    """Where sequences of a packed axis begin and end, int64 (B + 1,)."""
    cu = int32(name, x, None)
    if not cu.size or cu[0] != 0:
        raise ValueError(f"{name}: expected to start at 0, got {cu[:1].tolist()}")
    if (np.diff(cu) < 0).any():
        raise ValueError(f"{name}: expected lengths that add up, never falling, got {cu.tolist()}")
    if cu[-1] > total:
        raise ValueError(f"{name}: expected to end with the {total} rows of {of}, got {cu[-1]}")
    if cu[-1] < total:
        # Rows of no sequence would come back with whatever is in memory, or be forgotten: the caller shall say.
        raise ValueError(f"{name}: total rows {total} exceed cu_seqlens[-1] = {cu[-1]} ({of} has rows of no sequence)")
    return cu


def refuse(**given):
    """Features that are not there yet, by name."""
    for name, x in given.items():
        if x is not None:
            raise ValueError(f"{name}: not supported yet, expected None")


def extras(on, tile, threads, explain):
    """Our own keyword arguments."""
    if on is not None and not all(callable(getattr(on, verb, None)) for verb in ("input", "empty", "launch", "result")):
        raise TypeError(f"on: expected an executor (Gpu, Emulator) or None, got {on!r}")
    if tile is not None and not isinstance(tile, Tile):
        raise TypeError(f"tile: expected a refimpl.tiling.Tile or None, got {tile!r}")
    if threads is not None:
        pair("threads", threads, 1)
    if not callable(explain):
        flag("explain", explain)


def dropout(p, state, random):
    """Dropout with probability p, or None; ``random()`` draws a seed where no (seed, offset) is given."""
    p = dropout_p(p)
    if state is not None:
        state = pair("rng_state", state, 0, 2**64 - 1)
    return Dropout(p, *(state or (random(), 0))) if p else None


def room(d, dv, tile, threads, tiles):
    """A tile and threads that divide as `launch.prepare` wants it; for who cannot wait until it says so."""
    (rows, columns), D = threads or THREADS, head_room(d, dv)
    Br, Bc = (tile.Br, tile.Bc) if tile else (tiles[D].Br, tiles[D].Bc)
    if Br % rows or Bc % columns or D % columns:
        raise ValueError(f"tile: expected Br, Bc multiples of the threads {(rows, columns)}, got {(Br, Bc)}")


def rows(kind, sizes, axes, **arrays):
    """softmax_lse and gradients of it: fp32, one number a row and head; a dlse may be None."""
    for name, x in arrays.items():
        if x is not None or name != "dlse":
            array(kind, name, x, axes, sizes, [np.dtype(np.float32)])


def seeded(p, state):
    """A backward pass with dropout must be told what the forward pass drew."""
    if dropout_p(p) and state is None:
        raise ValueError("rng_state: expected the (seed, offset) of the forward call, as dropout_p is not 0")


def cache_seqlens(x, B, Nmax, new, appending):
    """Keys in each entry of a cache before the call, int64 (B,), with room for the new ones."""
    if x is None:
        if appending:
            raise ValueError("cache_seqlens: expected where to write k and v, got None")
        return np.full(B, Nmax)
    several = hasattr(x, "shape") and x.shape != ()  # a NumPy integer is one number
    lengths = int32("cache_seqlens", x, (B,)) if several else np.full(B, whole("cache_seqlens", x, 0))
    if lengths.size and (lengths.min() < 0 or lengths.max() + new > Nmax):
        room = f"0 ... {Nmax - new}" + (f" (a cache of {Nmax}, {new} new)" if new else "")
        raise ValueError(f"cache_seqlens: expected lengths in {room}, got {lengths.min()} ... {lengths.max()}")
    return lengths


def cache_batch_idx(x, B, entries):
    """Which entry of the cache belongs to each of the batch, int64 (B,)."""
    if x is None:
        if entries != B:
            raise ValueError(f"k_cache: expected {B} entries, one for each of q's batch, got {entries}")
        return np.arange(B)
    chosen = int32("cache_batch_idx", x, (B,))
    if chosen.size and (chosen.min() < 0 or chosen.max() >= entries):
        raise ValueError(f"cache_batch_idx: expected 0 ... {entries - 1}, got {chosen.min()} ... {chosen.max()}")
    return chosen
