"""A probe: one set of inputs a suspect kernel is run on, with fp64 truth and the error that rounding explains."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from refimpl import oracle
from verify import judge
from verify.case import Problem
from verify.diagnose.reference import Reference
from verify.dtypes import DTYPES
from verify.tolerance import FACTOR, FP32_ULP

# What an option needs a kernel to offer, in the registry's words.
NEEDS = {"window": "window", "softcap": "softcap", "alibi_slopes": "alibi", "bias": "bias", "mask": "mask",
         "lengths_k": "lengths", "lengths_q": "lengths", "keep": "dropout", "scale": "scale"}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Probe:
    """Inputs and options.

    Attributes
    ----------
    id, about : str
    Q, K, V : ndarray (B, Hq, Nq, d), (B, Hk, Nk, d), (B, Hk, Nk, dv), storage type
    options : dict
        As `oracle.attention`, without those that are not given.
    dtype : str
    dO : ndarray (B, Hq, Nq, dv), optional
        With it, the probe is of the backward pass.
    exact : bool
        A right kernel makes no rounding error worth the name, so that the smallest trace of a fault counts.
    """

    id: str
    about: str
    Q: np.ndarray
    K: np.ndarray
    V: np.ndarray
    options: dict
    dtype: str = "fp32"
    dO: np.ndarray | None = None
    exact: bool = False

    @cached_property
    def wide(self) -> tuple:
        """Q, K and V in fp64."""
        arrays = tuple(x.astype(np.float64) for x in (self.Q, self.K, self.V))
        for x in arrays:
            x.flags.writeable = False  # all faults share them
        return arrays

    @cached_property
    def product(self) -> np.ndarray:
        """q.k of all pairs, in fp64, where every query head has a key head of its own."""
        found = self.wide[0] @ self.wide[1].swapaxes(-1, -2)
        found.flags.writeable = False
        return found

    @cached_property
    def needs(self) -> set:
        """What a kernel must take, in the words of the registry and of strangers' capabilities."""
        Nq, Nk, d, dv = self.Q.shape[2], self.K.shape[2], self.Q.shape[3], self.V.shape[3]
        top_left = self.options.get("align") == "top_left"
        aligned = Nq != Nk and not {"causal", "window", "alibi_slopes"}.isdisjoint(self.options)
        asked = {
            "causal": self.options.get("causal", False),
            "top_left": aligned and top_left,
            "bottom_right": aligned and not top_left,
            "cross": Nq != Nk,
            "causal_cross": Nq != Nk and self.options.get("causal", False),
            "no_keys": Nk == 0,
            "ragged": bool(Nq % 16 or Nk % 16),
            "gqa": self.Q.shape[1] != self.K.shape[1],
            "odd_d": bool(d % 8),
            "wide_v": dv != d,
            "strides": not all(x.flags.c_contiguous for x in (self.Q, self.K, self.V)),
            "nan": not np.isfinite(self.V.astype(np.float64)).all(),
            "backward": self.dO is not None,
        }
        return {word for name, word in NEEDS.items() if name in self.options} | {
            w for w, is_so in asked.items() if is_so
        }

    @cached_property
    def empty(self) -> np.ndarray:
        """Rows that see no key, bool (B, Hq, Nq)."""
        made = Reference(self)
        return ~np.broadcast_to(made.visible(), made.full_shape()).any(-1)

    @cached_property
    def posed(self) -> Problem:
        """The probe as those who call and judge kernels want it."""
        options = {"scale": None, "causal": False, "align": "bottom_right"} | self.options
        backward = self.dO is not None
        return _Posed(self.Q, self.K, self.V, options, self.id, self.dtype, backward=backward, gradient=self.dO)

    @cached_property
    def anchors(self) -> dict:
        """What the judge goes by, for each output that a kernel is asked for."""
        with np.errstate(all="ignore"):
            found = judge.reference(self.posed, self.dO).anchors
        return {name: found[name] for name in (("O", "lse") if self.dO is None else ("dQ", "dK", "dV"))}

    @cached_property
    def truth(self) -> dict:
        """Outputs by name, fp64: O and lse, or dQ, dK and dV."""
        return {name: anchor.truth for name, anchor in self.anchors.items()}

    @cached_property
    def forward_outputs(self) -> tuple:
        """The right O, in the storage type, and lse, fp32: what a backward pass is given."""
        O, lse = oracle.attention(self.Q, self.K, self.V, threads=1, **self.options)
        return O.astype(self.Q.dtype), lse.astype(np.float32)

    @cached_property
    def tolerance(self) -> dict:
        """Error that is not held against a kernel, by output: the judge's bound.

        For an exact probe less: what a division and a product cost in fp32, and the storage.
        """
        if self.exact:
            small = 16 * FP32_ULP * _largest(self.V) / max(1, self.K.shape[2])
            ulp, lse = DTYPES[self.dtype].ulp, max(1.0, _largest(self.truth["lse"]))
            return {"O": small + 2 * ulp * np.abs(self.truth["O"]), "lse": 4 * FP32_ULP * lse}
        return {name: FACTOR * anchor.error + anchor.floor for name, anchor in self.anchors.items()}

    @cached_property
    def score(self) -> float:
        """max |scale q.k|"""
        with np.errstate(all="ignore"):
            reference = Reference(self)
            Q, K, _ = reference.inputs()
            return abs(reference.scale()) * _largest(reference.product(Q, K))

    def stored(self, outputs: dict) -> dict:
        """fp64 outputs in the types that a kernel would return them in."""
        with np.errstate(all="ignore"):
            return {n: np.asarray(x).astype(np.float32 if n == "lse" else self.Q.dtype) for n, x in outputs.items()}


@dataclass(frozen=True, eq=False)
class _Posed(Problem):
    """A problem whose gradient of O is given."""

    gradient: np.ndarray | None = None

    def dO(self):
        return self.gradient


def _largest(x):
    """max |x| over finite elements."""
    x = np.abs(np.asarray(x, np.float64))
    return float(x[np.isfinite(x)].max(initial=0))
