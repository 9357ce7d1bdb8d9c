"""Where a kernel goes wrong, read off without any model of a fault: its weights, by values that are 1 for one key each.

With column c of V equal to 1 for one key and 0 for all others, O[i, c] is the weight that row i gives that key. A pass
over the keys, dv at a time, yields the whole matrix P as the kernel has it.
"""

from dataclasses import dataclass, replace

import numpy as np

from verify.diagnose.reference import Reference
from verify.diagnose.subject import sample
from verify.dtypes import DTYPES


@dataclass(frozen=True)
class Region:
    """The first wrong rows and keys of a probe.

    Attributes
    ----------
    probe : str
    b, h : int
    rows, keys : (first, last)
        The keys of the first wrong row, and the rows from there on that are wrong at one of them.
    got, wanted : float
        Weights at the worst pair of the region.
    at : (row, key)
        That pair.
    ratio : float or None
        Weight over what it should be, where it is the same all over the region.
    """

    probe: str
    b: int
    h: int
    rows: tuple
    keys: tuple
    got: float
    wanted: float
    at: tuple
    ratio: float | None

    def __str__(self):
        (r0, r1), (k0, k1) = self.rows, self.keys
        says = f"weight of key {self.at[1]} in row {self.at[0]} is {self.got:.4g}, should be {self.wanted:.4g}"
        if self.ratio is not None:
            says += ", 0 all over" if self.ratio == 0 else f", {self.ratio:.4g} times the right one all over"
        where = f"probe {self.probe}, batch {self.b}, head {self.h}: rows {r0} - {r1}, keys {k0} - {k1}"
        return f"{where}: {says}"


def weights(subject, probe):
    """P as the kernel has it, (B, Hq, Nq, Nk); None if it cannot be read.

    Parameters
    ----------
    subject : verify.diagnose.subject.Subject
    probe : verify.diagnose.probe.Probe
        Of the forward pass.
    """
    Nk, dv = probe.K.shape[2], probe.V.shape[3]
    P = np.zeros((*probe.Q.shape[:3], Nk))
    for first in range(0, Nk, dv):
        V = np.zeros_like(probe.V, order="C")
        n = min(dv, Nk - first)
        V[:, :, first + np.arange(n), np.arange(n)] = 1
        got = sample(subject, replace(probe, V=V))
        if got.raised:
            return None
        P[..., first : first + n] = got.outputs["O"][..., :n]
    return P


def true_weights(probe):
    """P as it should be."""
    made = Reference(probe)
    with np.errstate(all="ignore"):
        Q, K, _ = made.inputs()
        seen = np.broadcast_to(made.visible(), made.full_shape())
        S = np.where(seen, made.scores(Q, K), -np.inf)
        P = np.exp(S - made.forward()["lse"][..., None])
        P = np.where(seen, P, 0)
    keep = made.keep()
    return P if keep is None else P * keep


def region(subject, probe) -> Region | None:
    """The first wrong region of a probe; None if all weights are right, or none can be read."""
    P = weights(subject, probe)
    if P is None:
        return None
    wanted = true_weights(probe)
    with np.errstate(all="ignore"):
        # A weight's own rounding and that of its score; below the smallest number of the type nothing can be said.
        kind = DTYPES[probe.dtype]
        wrong = ~(np.abs(P - wanted) <= wanted * (4 * kind.ulp + 1e-5 * (1 + probe.score)) + max(1e-12, kind.subnormal))
    if not wrong.any():
        return None
    b, h, row, key = (int(k) for k in np.argwhere(wrong)[0])
    k1 = _run(wrong[b, h, row], key)
    r1 = _run(wrong[b, h, :, key : k1 + 1].any(-1), row)
    box = (b, h, slice(row, r1 + 1), slice(key, k1 + 1))
    with np.errstate(all="ignore"):
        error = np.where(np.isfinite(P[box]), np.abs(P[box] - wanted[box]), np.inf)
        ratios = (P[box] / wanted[box])[wrong[box] & (wanted[box] > 1e-3)]
    i, j = np.unravel_index(int(np.argmax(error)), error.shape)
    same = ratios.size > 1 and bool(np.ptp(ratios) <= 1e-3 * max(1.0, float(np.abs(ratios).max())))
    return Region(probe.id, b, h, (row, r1), (key, k1), float(P[box][i, j]), float(wanted[box][i, j]),
                  (row + int(i), key + int(j)), float(np.median(ratios)) if same else None)  # fmt: skip


def _run(flags, first):
    """The last index of the run of true flags that begins at `first`."""
    ends = np.flatnonzero(~flags[first:])
    return first + int(ends[0]) - 1 if ends.size else len(flags) - 1
