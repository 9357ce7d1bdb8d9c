"""What the tests of the interface share: small arrays and the oracle in flash-attn's layout, small tiles."""

import numpy as np

from flash_cuda.executors.emulator import Emulator
from refimpl import oracle
from refimpl.tiling import Tile

SMALL = {"tile": Tile(8, 8), "threads": (2, 2)}


def emulated(**more):
    """Keyword arguments that run a call on four emulated threads a block."""
    return {"on": Emulator(), **SMALL, **more}


def draw(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def heads_first(x):
    return np.asarray(x).astype(np.float64).transpose(0, 2, 1, 3)


def true(q, k, v, **options):
    """The oracle's (out, lse)."""
    O, lse = oracle.attention(heads_first(q), heads_first(k), heads_first(v), **options)
    return O.transpose(0, 2, 1, 3), lse


def true_gradients(q, k, v, dout, **options):
    """The oracle's [dq, dk, dv]."""
    grads = oracle.attention_backward(*map(heads_first, (q, k, v, dout)), **options)[:3]
    return [x.transpose(0, 2, 1, 3) for x in grads]


def assert_close(got, want, tol=2e-6):
    """Equal where infinite, within tol of the largest elsewhere."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    got = got.astype(np.float64)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    scale = max(1.0, np.abs(want[finite]).max(initial=0))
    np.testing.assert_allclose(got[finite], want[finite], rtol=0, atol=tol * scale, equal_nan=False)
