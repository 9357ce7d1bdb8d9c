"""Exact inputs: problems on which every product, power and sum is exact in fp32, so that equality is the test.

Scores are integers in log2 units: Q and K hold -1, 0 and 1, and scale = ln 2, which the kernels fold with log2(e)
into exactly 1. V holds small integers. Then exp2(s - m) is a power of two, and l and O_acc are integer multiples of
the smallest one. They are exact, in whatever order they are added up and however often they are rescaled, as long as

    (largest score - smallest score) + log2(number of keys) + log2(max |V|) <= 24

in every row. So the state (m, l, O_acc) after each key tile must equal fp64 bit for bit, for any tile size and any
order of threads. What differs is a mistake of logic: rounding has no part in it.
"""

import math
from dataclasses import dataclass

import numpy as np

from refimpl.tiling import Tile, spans
from verify import plain
from verify.cases import Problem, Shape, dense
from verify.dtypes import DTYPES
from verify.registry import KERNELS

BUDGET = 24  # bits of an fp32 significand
V_MAX = 3
STEPS = ("step2_flash_v1", "step3_flash_v2", "step4_causal", "step5_tensor_core", "step6_flash_v3")  # with a state
POWERS = np.arange(-126, 128)  # the normal range of fp32: below it the hardware flushes to zero


@dataclass(frozen=True)
class Setting:
    """One exact problem and how it is run."""

    shape: Shape
    causal: bool
    tile: Tile
    threads: tuple | None
    dtype: str

    def __str__(self):
        s = self.shape
        heads = f"B{s.B} H{s.Hq}/{s.Hk}"
        mask = " causal" if self.causal else ""
        return f"{heads} {s.Nq}x{s.Nk} d{s.d}/{s.dv} {self.dtype} tile {self.tile.Br}x{self.tile.Bc}{mask}"


def settings(executor: str, step: str = STEPS[0]) -> list[Setting]:
    """What is proved: every tile size, square and ragged, causal and not, in turn through the storage types."""
    kernel = KERNELS[step]
    if executor == "gpu":
        shapes, threads = (dense(256, B=2, H=4, Hk=2, d=64), dense(203, 331, H=2, d=113, dv=64)), None
        shapes += (dense(130, 144, d=64),)  # 14 more keys than queries: the diagonal ends one key short of a tile
        tiles = (Tile(16, 8), Tile(16, 16), Tile(32, 8), Tile(32, 16), Tile(32, 24))
    else:
        shapes, threads = (dense(32, H=2, Hk=1, d=8), dense(29, 45, d=7, dv=5), dense(41, 30, d=8)), (4, 2)
        shapes += (dense(34, 48, d=8),)  # likewise
        tiles = (Tile(8, 8), Tile(16, 16), Tile(16, 8), Tile(8, 16), Tile(32, 12), Tile(12, 48))
    if kernel.tile_units == (16, 16):  # one warp and two, one band of 16 rows a warp and two
        emulated = Tile(16, 16), Tile(16, 32), Tile(32, 16), Tile(48, 32)
        tiles = (Tile(64, 32), Tile(64, 64), Tile(128, 32), Tile(128, 64)) if executor == "gpu" else emulated
    if kernel.tile_units == (64, 16):  # one warpgroup and two; more heads, so that a block goes from tile to tile
        emulated = Tile(64, 16), Tile(128, 32)
        tiles = (Tile(64, 32), Tile(64, 64), Tile(128, 48), Tile(128, 64)) if executor == "gpu" else emulated
        shapes = tuple(kernel.fitting(shape)._replace(B=2) for shape in shapes)
    names = kernel.dtypes
    grid = [(shape, causal, tile) for tile in tiles for shape in shapes for causal in (False, True)]
    # The shift makes a shape meet all types as the tiles go by.
    kinds = 2 * len(shapes)
    return [Setting(*point, threads, names[(k % kinds + k // kinds) % len(names)]) for k, point in enumerate(grid)]


def problem(setting: Setting, seed: int = 0) -> Problem:
    """Exact inputs of a setting.

    Each query has at most six non-zero channels, so that scores stay within -6 ... 6 at any head dim.

    Raises
    ------
    ValueError
        If a row exceeds the budget: the shape is too long for it.
    """
    s, kind = setting.shape, DTYPES[setting.dtype].numpy
    rng = np.random.default_rng([seed, *s])
    Q = np.zeros((s.B, s.Hq, s.Nq, s.d))
    channels = rng.permuted(np.broadcast_to(np.arange(s.d), Q.shape), axis=-1)[..., : min(6, s.d)]
    np.put_along_axis(Q, channels, rng.choice([-1.0, 1.0], channels.shape), axis=-1)
    K = rng.integers(-1, 2, (s.B, s.Hk, s.Nk, s.d))
    V = rng.integers(-V_MAX, V_MAX + 1, (s.B, s.Hk, s.Nk, s.dv))
    options = {"scale": math.log(2), "causal": setting.causal, "align": "bottom_right"}
    made = Problem(*(x.astype(kind) for x in (Q, K, V)), options, "exact", setting.dtype, seed=seed)
    need = bits_needed(made)
    if not need <= BUDGET:
        raise ValueError(f"shape: {setting} needs {need:.1f} bits, expected at most {BUDGET}")
    return made


def bits_needed(made: Problem) -> float:
    """Significand bits that the worst row of a problem uses."""
    worst = 0.0
    for *_, Q, K, _V, seen in plain.heads(made):
        S = Q.astype(np.float64) @ K.T.astype(np.float64)
        spread = np.where(seen, S, -np.inf).max(1, initial=-np.inf) - np.where(seen, S, np.inf).min(1, initial=np.inf)
        n = seen.sum(axis=1)
        if n.any():
            worst = max(worst, float((spread[n > 0] + np.log2(n[n > 0] * V_MAX)).max()))
    return worst


def states(made: Problem, Bc: int) -> np.ndarray:
    """The state after each key tile, in fp64.

    Returns
    -------
    ndarray (B, Hq, Tc, Nq, 2 + dv)
        m in log2 units, l, O_acc, over the keys of tiles 0 ... j; -inf, 0, 0 where none of them is seen.
    """
    s = made.shape
    tiles = spans(s.Nk, Bc)
    out = np.zeros((s.B, s.Hq, len(tiles), s.Nq, 2 + s.dv))
    for b, h, Q, K, V, seen in plain.heads(made):
        S = np.where(seen, Q.astype(np.float64) @ K.T.astype(np.float64), -np.inf)
        for j, cols in enumerate(tiles):
            S_j = S[:, : cols.stop]
            m = S_j.max(axis=1)
            P = np.exp2(S_j - np.where(np.isneginf(m), 0, m)[:, None])
            out[b, h, j, :, 0], out[b, h, j, :, 1] = m, P.sum(axis=1)
            out[b, h, j, :, 2:] = P @ V[: cols.stop].astype(np.float64)
    return out


def dead(made: Problem, tile: Tile) -> np.ndarray:
    """Which key tiles a query tile need not visit: bool (Tc, Nq), the same for every row of a query tile."""
    s = made.shape
    seen = plain.visible(s.Nq, s.Nk, made.options["causal"], made.options["align"])
    out = np.zeros((len(spans(s.Nk, tile.Bc)), s.Nq), bool)
    for rows in spans(s.Nq, tile.Br):
        for j, cols in enumerate(spans(s.Nk, tile.Bc)):
            out[j, rows] = not seen[rows, cols].any()
    return out


def first_difference(made: Problem, tile: Tile, O, lse, trace, reciprocal=False) -> str | None:
    """Where outputs and trace first differ from fp64, in tile order; None if every bit is right.

    A dead tile may be left out, and its trace then still holds the poison. The division by l is rounded, correctly,
    so O must be the correctly rounded quotient, or the rounded product with the rounded ``reciprocal``. lse = ln 2
    (m + log2 l) must be right to the bit where l is a power of two, as the logarithm is an integer there: one product
    in fp32.
    """
    want = states(made, tile.Bc)
    skipped = np.isnan(trace).all(axis=-1) & dead(made, tile)
    wrong = ~((trace == want) | skipped[..., None])
    if wrong.any():
        b, h, j, row, at = (int(k) for k in np.argwhere(wrong)[0])
        name = ("m", "l")[at] if at < 2 else f"O_acc[{at - 2}]"
        got, wanted = trace[b, h, j, row, at], want[b, h, j, row, at]
        return f"{name} of batch {b}, head {h}, row {row} after key tile {j}: got {got!r}, wanted {wanted!r}"
    m, l, O_acc = want[:, :, -1, :, 0], want[:, :, -1, :, 1], want[:, :, -1, :, 2:]
    quotient = np.where(l[..., None] == 0, 0, O_acc / np.where(l == 0, 1, l)[..., None])
    # Rounded twice, as kernels do: to fp32 by the division, to the storage type by the store.
    rounded = quotient.astype(np.float32)
    if reciprocal:
        with np.errstate(divide="ignore"):
            share = np.where(l == 0, 0, np.float32(1) / l.astype(np.float32)).astype(np.float32)
        rounded = O_acc.astype(np.float32) * share[..., None]
    wrong = rounded.astype(O.dtype) != O
    if wrong.any():
        at = tuple(int(k) for k in np.argwhere(wrong)[0])
        return f"O at {list(at)}: got {O[at]!r}, wanted {quotient[at]!r}"
    with np.errstate(divide="ignore"):
        log2_l = np.log2(l)
        whole = (m + log2_l).astype(np.float32) * np.float32(math.log(2))  # -inf for a row without keys
    wrong = (np.rint(log2_l) == log2_l) & (lse != whole)
    if wrong.any():
        at = tuple(int(k) for k in np.argwhere(wrong)[0])
        return f"lse at {list(at)}: got {lse[at]!r}, wanted {whole[at]!r}"
    return None


def powers_wrong(executor: str) -> list[int]:
    """Integers of `POWERS` at which the executor's exp2 is not the power of two; empty if it is exact."""
    x = POWERS.astype(np.float32)
    if executor == "gpu":
        from verify.powers import exp2_on_gpu

        got = exp2_on_gpu(x)
    else:
        from flash_cuda.parts.elements import exp2

        got = np.array([exp2(value) for value in x])
    return [int(k) for k, value in zip(POWERS, got, strict=True) if float(value) != 2.0 ** int(k)]


def prove(step: str, setting: Setting, executor: str, seed: int) -> str | None:
    """Run a step on an exact problem with its trace and compare. Runs in a worker.

    Parameters
    ----------
    step : str
        One of `STEPS`.
    setting : Setting
    executor : "gpu" or "emulated"
    seed : int
        Of the thread order, where the executor has one.

    Returns
    -------
    str or None
        The first difference.
    """
    from verify import executors

    made = problem(setting)
    on = executors.open_executor(executor, seed)
    O, lse, trace = KERNELS[step].attention()(
        made.Q, made.K, made.V, **made.options, tile=setting.tile, threads=setting.threads, on=on, trace=True
    )
    return first_difference(made, setting.tile, O, lse, trace, KERNELS[step].reciprocal)
