"""What a case is, and the problem it makes: inputs, and options in words that any implementation can be told."""

from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

import numpy as np

from verify.dtypes import DTYPES
from verify.layouts import LAYOUTS
from verify.option_recipes import OPTION_RECIPES
from verify.recipes import RECIPES

# How small shapes are emulated: three or so tiles of 16 and eight threads a block are few enough for pure Python.
SMALL_TILE = 16
SMALL_THREADS = (4, 2)
FULL_TILE = 64


class Shape(NamedTuple):
    """Batch, query heads, key heads, query length, key length, head dim of Q and K, head dim of V."""

    B: int
    Hq: int
    Hk: int
    Nq: int
    Nk: int
    d: int
    dv: int


def dense(N, Nk=None, *, B=1, H=1, Hk=None, d, dv=None):
    """Shape from what differs: keys as many as queries, as many key heads as heads, dv = d."""
    return Shape(B, H, Hk or H, N, N if Nk is None else Nk, d, dv or d)


@dataclass(frozen=True, eq=False)
class Problem:
    """The inputs of one run.

    Attributes
    ----------
    Q, K, V : ndarray (B, Hq, Nq, d), (B, Hk, Nk, d), (B, Hk, Nk, dv)
        In the storage type, in the layout of the case. With lengths, what lies past them is NaN.
    options : dict
        Keyword arguments of attention in plain words, numbers and arrays, as `refimpl.oracle.attention` takes them:
        scale, causal, align, and whichever of mask, bias, window, softcap, alibi_slopes, lengths_q, lengths_k, keep
        and dropout_p there are. They say everything.
    rules : dict of str to tuple
        Names and arguments of rules in `refimpl.options` that `options` spells out as a mask, or "relative" as a bias.
    dropout : (p, seed, offset) or None
        What `options["keep"]` is drawn with.
    case, dtype, layout : str
    seed : int
    backward : bool
        Gradients are judged, too.
    """

    Q: np.ndarray
    K: np.ndarray
    V: np.ndarray
    options: dict
    case: str = "unnamed"
    dtype: str = "fp32"
    layout: str = "contiguous"
    seed: int = 0
    rules: dict = field(default_factory=dict)
    dropout: tuple | None = None
    backward: bool = False

    @property
    def shape(self) -> Shape:
        """Sizes, read off the arrays."""
        B, Hq, Nq, d = self.Q.shape
        return Shape(B, Hq, self.K.shape[1], Nq, self.K.shape[2], d, self.V.shape[3])

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and keys in use of each batch entry, (B,) each."""
        s = self.shape
        given = (self.options.get("lengths_q"), s.Nq), (self.options.get("lengths_k"), s.Nk)
        return tuple(np.full(s.B, N) if lengths is None else np.asarray(lengths) for lengths, N in given)

    @property
    def finite(self) -> bool:
        """No input holds NaN or inf, so no output may hold NaN."""
        return all(bool(np.isfinite(x.astype(np.float64)).all()) for x in (self.Q, self.K, self.V))

    def dO(self) -> np.ndarray:
        """A gradient of O to go back from: N(0, 1) in the storage type, (B, Hq, Nq, dv); NaN past a length."""
        s = self.shape
        rng = np.random.default_rng([self.seed, crc32(self.case.encode()), 1])
        dO = rng.standard_normal((s.B, s.Hq, s.Nq, s.dv)).astype(self.Q.dtype)
        for b, n in enumerate(self.lengths[0]):
            dO[b, :, n:] = np.nan
        return dO


@dataclass(frozen=True)
class Case:
    """One way in which attention kernels have been wrong, as a recipe.

    Attributes
    ----------
    id, about, kind : str
        Name; what it is there for, in one line; the group that reports sort by.
    full, small : Shape
        What a GPU runs; what is emulated. The small one still reaches what the case is about.
    recipe, layout : str
        How values are made (`recipes`) and laid out (`layouts`).
    causal, align, scale
        Options of attention.
    having : tuple of str
        Further options, by how they are made (`option_recipes`).
    backward : bool
        Judge dQ, dK and dV too, and dbias where there is a bias.
    seed : int
        The generator is seeded with this and the id, so that no two cases share a stream.
    """

    id: str
    about: str
    kind: str
    full: Shape
    small: Shape
    recipe: str = "normal"
    layout: str = "contiguous"
    causal: bool = False
    align: str = "bottom_right"
    scale: float | None = None
    having: tuple = ()
    backward: bool = False
    seed: int = 0

    @property
    def options(self) -> dict:
        """Keyword arguments of attention that are the same at both shapes."""
        return {"scale": self.scale, "causal": self.causal, "align": self.align}

    @property
    def needs(self) -> set[str]:
        """Capabilities that a kernel must have, in the registry's words."""
        s = self.full
        wanted = {
            "causal": self.causal,
            "top_left": self.causal and self.align == "top_left",
            "gqa": s.Hq != s.Hk,
            "strides": self.layout not in ("contiguous", "packed"),
            "nan_hidden": self.recipe == "nan_hidden",
            "nan_seen": self.recipe == "nan_seen",
            "varlen": self.layout == "packed",
            "backward": self.backward,
        }
        asked = {name for name, needed in wanted.items() if needed}
        return asked.union(*(OPTION_RECIPES[name].needs for name in self.having))

    def shape(self, small: bool) -> Shape:
        """The emulated shape, or the full one."""
        return self.small if small else self.full

    def build(self, dtype: str, small: bool = True, seed: int | None = None) -> Problem:
        """Make the inputs.

        Parameters
        ----------
        dtype : str
            Storage type. The values are rounded to it, and truth is computed from the rounded ones.
        small : bool
            The emulated shape instead of the full one.
        seed : int, optional
            Instead of the case's own.

        Raises
        ------
        KeyError
            For an unknown dtype.
        """
        seed = self.seed if seed is None else seed
        rng = np.random.default_rng([seed, crc32(self.id.encode())])
        shape, edge = self.shape(small), SMALL_TILE if small else FULL_TILE
        arrays = RECIPES[self.recipe](rng, shape)
        options, rules, dropout = self.options, {}, None
        for name in self.having:
            made = OPTION_RECIPES[name].make(rng, shape, edge)
            options |= made.options
            rules |= made.rules
            dropout = made.dropout or dropout
        stored = (x.astype(DTYPES[dtype].numpy) for x in arrays)
        lengths = options.get("lengths_q"), options.get("lengths_k"), options.get("lengths_k")
        stored = [_ended(x, n) for x, n in zip(stored, lengths, strict=True)]
        stored = LAYOUTS[self.layout](*stored)
        return Problem(
            *stored, options, self.id, dtype, self.layout, seed, rules, dropout, self.backward
        )


def _ended(x, lengths):
    """NaN past each batch entry's length: what is not there must not be felt."""
    for b, n in enumerate([] if lengths is None else lengths):
        x[b, :, n:] = np.nan
    return x
