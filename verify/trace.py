"""The state (m, l, O_acc) of a kernel after every key tile, beside fp64: where it first leaves what rounding explains.

Notation: u = 2^-24; scores in log2 units. A score errs by at most

    ds = (d + 6) u log2(e) |scale| max_j sum_k |q_k k_jk|

over the keys a row sees: d operations of the dot product, the scale, log2(e), their product, and the rules' own. So

    |dm|     <=  ds
    |dl|     <=  w l
    |dO_acc| <=  w sum_j 2^(s_j - m) |v_j|       w = 2^(2 ds) - 1 + (n + 8 t) u

where a weight errs by 2^(s - m) of a score and a maximum that are both off by ds, n keys were added up and t tiles
rescaled, each with an exponential (2 ulp), a product and a sum. What falls below 2^-126 a GPU may flush to zero: n
times that comes on top. m, l and O_acc in a narrower type, or from wrong inputs, are outside.
"""

import math
from dataclasses import dataclass
from importlib import import_module

import numpy as np

from refimpl.observe import Trace
from refimpl.tiling import Tile, spans
from verify import calls, executors
from verify.case import SMALL_THREADS, SMALL_TILE
from verify.diagnose.probe import Probe
from verify.diagnose.reference import Reference, pivot
from verify.registry import ALL

U = 2.0**-24
FLUSHED = 2.0**-126
LOG2E = math.log2(math.e)
STEPS = ("step2_flash_v1", "step3_flash_v2", "step4_causal", "general")  # of flash_cuda, with a trace build
TRACED = (*STEPS, *(f"refimpl.{step}" for step in STEPS[:3]))  # those of refimpl have observers


@dataclass(frozen=True)
class Leaving:
    """The first quantity out of its bound.

    Attributes
    ----------
    quantity : str
        "m" (log2 units), "l" or "O_acc[c]".
    b, h, tile, row : int
        Batch entry, query head, key tile, row.
    keys : (first, last)
        Of that tile.
    got, wanted, bound : float
    """

    quantity: str
    b: int
    h: int
    tile: int
    row: int
    keys: tuple
    got: float
    wanted: float
    bound: float

    def __str__(self):
        keys = f"keys {self.keys[0]} - {self.keys[1]}"
        where = f"batch {self.b}, head {self.h}, row {self.row}, key tile {self.tile} ({keys})"
        return f"{where}: {self.quantity} is {self.got:.9g}, fp64 {self.wanted:.9g}, bound {self.bound:.2g}"


@dataclass(frozen=True)
class Traced:
    """A trace, what it should be, and by how much it may differ; all (B, Hq, Tc, Nq, 2 + dv).

    Attributes
    ----------
    got, wanted, bound : ndarray
        m in log2 units, l, O_acc.
    dead : ndarray of bool (B, Hq, Tc, Nq)
        Key tiles of which a row's query tile sees nothing: they may be left out, and then hold what was there before.
    Bc, Nk : int
        Keys of a tile, and all of them.
    """

    got: np.ndarray
    wanted: np.ndarray
    bound: np.ndarray
    dead: np.ndarray
    Bc: int
    Nk: int

    @property
    def ratios(self) -> np.ndarray:
        """Error over bound; infinite where one is not finite as the other is."""
        with np.errstate(all="ignore"):
            error = np.abs(self.got - self.wanted)
            ratio = np.where(error == 0, 0, error / self.bound)
        alike = (self.got == self.wanted) | (np.isnan(self.wanted) & ~np.isfinite(self.got))
        skipped = (self.dead & np.isnan(self.got).all(-1))[..., None]
        return np.where(alike | skipped, 0, np.where(np.isfinite(ratio), ratio, np.inf))

    def first(self) -> Leaving | None:
        """What leaves first: by batch entry and head, then by key tile, row and quantity."""
        ratios = self.ratios
        wrong = ~(ratios <= 1)
        if not wrong.any():
            return None
        b, h, j, row, at = (int(k) for k in np.argwhere(wrong)[0])
        name = ("m", "l")[at] if at < 2 else f"O_acc[{at - 2}]"
        place = (b, h, j, row, at)
        keys = (j * self.Bc, min((j + 1) * self.Bc, self.Nk) - 1)
        return Leaving(name, b, h, j, row, keys, *(float(x[place]) for x in (self.got, self.wanted, self.bound)))


def states(problem, tile):
    """fp64 states after each key tile, and their bounds; see the module for the derivation.

    Parameters
    ----------
    problem : verify.case.Problem
    tile : Tile

    Returns
    -------
    (wanted, bound, dead)
        As `Traced`.
    """
    options = {name: x for name, x in problem.options.items() if x is not None}
    made = Reference(Probe(problem.case, "", problem.Q, problem.K, problem.V, options, problem.dtype))
    s, tiles = problem.shape, spans(problem.shape.Nk, tile.Bc)
    wanted = np.zeros((s.B, s.Hq, len(tiles), s.Nq, 2 + s.dv))
    bound, dead = np.zeros_like(wanted), np.zeros(wanted.shape[:4], bool)
    with np.errstate(all="ignore"):
        Q, K, _ = made.inputs()
        V = problem.V.astype(np.float64)[:, made.key_head()]
        seen = np.broadcast_to(made.visible(), made.full_shape())
        S = np.where(seen, LOG2E * made.scores(Q, K), -np.inf)
        seen = ~np.isneginf(S)  # a bias of -inf hides a key as well
        size = np.where(seen, np.abs(Q) @ np.abs(K).swapaxes(-1, -2), 0)
        keep = made.keep()
        for j, cols in enumerate(tiles):
            upto = slice(0, cols.stop)
            ds = (s.d + 6) * U * LOG2E * abs(made.scale()) * size[..., upto].max(-1, initial=0)
            m = S[..., upto].max(-1, initial=-np.inf)
            P = np.exp2(S[..., upto] - pivot(m)[..., None])
            kept = P if keep is None else P * keep[..., upto]
            n = seen[..., upto].sum(-1)
            w = np.exp2(2 * ds) - 1 + (n + 8 * (j + 1)) * U
            wild = ~np.isfinite(V[:, :, upto])
            tame = np.where(wild, 0, V[:, :, upto])
            touched = (seen[..., upto].astype(float) @ wild.astype(float)) > 0
            wanted[:, :, j, :, 0], wanted[:, :, j, :, 1] = m, P.sum(-1)
            wanted[:, :, j, :, 2:] = np.where(touched, np.nan, kept @ tame)
            bound[:, :, j, :, 0] = ds
            bound[:, :, j, :, 1] = w * P.sum(-1) + n * FLUSHED
            bound[:, :, j, :, 2:] = w[..., None] * (kept @ np.abs(tame)) + (n * FLUSHED)[..., None] * np.abs(tame).max(
                initial=0
            )
            for rows in spans(s.Nq, tile.Br):
                dead[:, :, j, rows] = ~seen[:, :, rows, cols].any((-1, -2))[..., None]
    return wanted, bound, dead


def trace(name, problem, executor, tile=None, load=import_module, watch=True):
    """Run a kernel on a problem with its trace.

    Parameters
    ----------
    name : str
        One of `TRACED`.
    problem : verify.case.Problem
        Not a packed one.
    executor : "gpu" or "emulated"
        For kernels of flash_cuda.
    tile : Tile, optional
        16 x 16 if not given.
    load : callable
        As `verify.calls.outputs`.
    watch : bool
        With the emulator's race detector.

    Returns
    -------
    (Traced, outputs)
        The outputs O and lse by name.
    """
    kernel, tile = ALL[name], tile or Tile(SMALL_TILE, SMALL_TILE)
    options = calls.options_for(kernel, problem, load)
    arrays = problem.Q, problem.K, problem.V
    size = load("refimpl.tiling").Tile(tile.Br, tile.Bc)
    wanted, bound, dead = states(problem, tile)
    if kernel.runs == "cuda":
        if executor == "emulated":
            from flash_cuda.executors.emulator import Emulator

            where = {"on": Emulator(seed=problem.seed, watch=watch), "threads": SMALL_THREADS}
        else:
            where = {"on": executors.open_executor("gpu")}
        O, lse, got = kernel.attention(load)(*arrays, **options, **where, tile=size, trace=True)
        got = np.asarray(got).astype(np.float64)
    else:
        seen = Trace()
        O, lse = kernel.attention(load)(*arrays, **options, tile=size, observe=seen)
        got = np.full(wanted.shape, np.nan)
        for visit in seen.visits if got.shape[2] else ():  # step 2 calls at no keys, too, to write its zeros
            rows = slice(visit.i * tile.Br, visit.i * tile.Br + len(visit.O_acc))
            at = got[visit.b, visit.h, visit.j, rows]
            at[:, 0], at[:, 1], at[:, 2:] = visit.m.ravel() * LOG2E, visit.l.ravel(), visit.O_acc
    return Traced(got, wanted, bound, dead, tile.Bc, problem.shape.Nk), {"O": O, "lse": lse}
