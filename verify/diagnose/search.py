"""Finds the faulty reference that is as a kernel is: right where it is right, wrong where and as it is wrong."""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np

from verify.diagnose.fault import Fault
from verify.diagnose.library import FAULTS
from verify.diagnose.reference import Tiling
from verify.diagnose.subject import Sample, near

GRADIENTS = "dQ", "dK", "dV"
SIZES = (16, 32, 48, 64, 80, 96, 128, 192, 256)
ROW_SIZES = (16, 32, 48, 64, 96, 128)
SMALL_SIZES = (8, 12, 16, 24, 32, 48)
SMALL_ROW_SIZES = (8, 16, 32)
ALL_ROWS = 64  # holds all rows of an emulated probe, as a simulated kernel's tile may
KEY_BY_KEY = 1  # a kernel with a warp or a thread to a row may update its state after every key
HIT = 0.9  # share of a probe's affected elements that have to come out as predicted
CLOSE = 0.02  # of an element's error, which a prediction may leave
CHEAP = 20_000  # scores of a probe on which everything is tried
A_STEP = 32  # scores that take as long as a step to the next key, where a tile is a single one
WITHIN = 4.0  # factor within which the size of an error that is a matter of rounding has to be predicted


@dataclass(frozen=True)
class Match:
    """How well one fault at one tiling explains all runs.

    Attributes
    ----------
    fault : Fault
    tiling : Tiling
    explained, failing : int
        Failing probes that it explains, and how many there are.
    kept, passing : int
        Passing probes that it leaves right, and how many there are.
    share : float
        Mean share of affected elements that come out as predicted, over failing probes and contradicted ones.
    residual : float
        Median distance from the prediction over the failing elements, in units of the outputs.
    alone : tuple of str
        Gradients in which it has this fault, the others being right everywhere; empty for all of them.
    """

    fault: Fault
    tiling: Tiling
    explained: int
    failing: int
    kept: int
    passing: int
    share: float
    residual: float
    alone: tuple = ()

    @property
    def holds(self) -> bool:
        """Nothing of note is left unexplained or contradicted."""
        slack = self.failing // 10
        return self.share >= HIT and self.explained >= self.failing - slack and self.kept >= self.passing - slack


def search(samples: list[Sample], small: bool) -> list[Match]:
    """All matches worth a name, the best first; a fault class once, at its best variant and tiling.

    Parameters
    ----------
    samples : list of Sample
        All of the forward, or all of the backward pass; some of them wrong.
    small : bool
        Emulated sizes: other tile sizes come into question.
    """
    runs = sorted((s for s in samples if not s.raised), key=_cost)
    failing = [s for s in runs if s.wrong and s.probe.K.shape[2] > 1]
    if failing and _cost(failing[0]) <= CHEAP:  # then such come first, as they rule out most
        first = [s for s in failing if _cost(s) <= CHEAP]
        runs.sort(key=lambda s: s not in first)
    elif not any(s.wrong for s in runs):
        return []
    off = {name for s in runs for name, x in s.off.items() if x.any()}
    found = _matches(runs, small)
    if not found and runs[0].probe.dO is not None and len(off) < len(GRADIENTS):
        # One gradient has its own line of code, and what goes wrong there leaves the others right.
        found = _matches(runs, small, tuple(name for name in GRADIENTS if name in off))
    order = list(FAULTS.values())
    return sorted(found.values(), key=lambda m: (*_rank(m), order.index(m.fault)))


def _matches(runs, small, alone=()) -> dict:
    """The best match of each fault class that holds, by name."""
    found = {}
    for key, fault in FAULTS.items():
        if fault.backward != (runs[0].probe.dO is not None):
            continue
        for tiling in tilings(fault, small):
            match = evaluate(key, tiling, runs, alone)
            if match and match.holds and better(match, found.get(fault.name)):
                found[fault.name] = match
    return found


def better(match, than):
    """Whether a match is to be preferred to another of the same class."""
    return than is None or _rank(match) < _rank(than)


def _rank(match):
    """Smaller is better: the share of what is explained, on how many probes, whether in its digits, how closely."""
    return -round(match.share, 2), -match.explained, match.fault.noisy, round(np.log10(match.residual + 1e-12), 1)


def _cost(sample):
    """What a prediction costs, scores and steps over keys: cheap probes come first, as they rule out most faults."""
    Q, K = sample.probe.Q, sample.probe.K
    return (Q.shape[0] * Q.shape[1] * Q.shape[2] + A_STEP) * K.shape[2]


def tilings(fault: Fault, small: bool) -> list[Tiling]:
    """What is tried: tile sizes, the order of key tiles, ways of going back, as far as a fault depends on them."""
    sizes, heights = (SMALL_SIZES, SMALL_ROW_SIZES) if small else (SIZES, ROW_SIZES)
    orders = (False, True) if "order" in fault.tiled else (False,)
    if small and fault.model.rows_matter:  # others would say of it that all rows are wrong, which tells nothing
        heights += (ALL_ROWS,)
    sizes += (KEY_BY_KEY,) if "order" in fault.tiled else ()
    rows, columns = heights if "Br" in fault.tiled else heights[:1], sizes if "Bc" in fault.tiled else sizes[:1]
    either = (False, True) if fault.backward else (False,)
    return [Tiling(*point) for point in product(rows, columns, orders, either, either)]


def evaluate(key, tiling, runs, alone=()):
    """The match of a fault at a tiling, if need be in some gradients ``alone``.

    None as soon as too much is unexplained or contradicted.
    """
    fault, wrong = FAULTS[key], sum(s.wrong for s in runs)
    slack = wrong // 10
    if sum(s.wrong and not fault.concerns(s.probe) for s in runs) > slack:
        return None
    shares, residuals, explained, spoken, kept = [], [], 0, 0, len(runs) - wrong
    for sample in runs:
        share, residual = agreement(key, tiling, sample, alone)
        if share is None:
            continue
        hit = share >= HIT
        if sample.wrong:
            spoken += 1
            explained += hit
            residuals.append(residual)
        elif not hit:
            kept -= 1
        if sample.wrong or not hit:
            shares.append(share)
        if spoken - explained > slack or len(runs) - wrong - kept > slack:
            return None
    if not explained:
        return None
    share, residual = float(np.mean(shares)), float(np.median(residuals))
    return Match(fault, tiling, explained, spoken, kept, len(runs) - wrong, share, residual, alone)


def agreement(key, tiling, sample, alone=()):
    """How a prediction fares on a run; if some gradients are named, in those ``alone``, as the others stay right.

    Returns
    -------
    (share, residual)
        The share of the elements that are wrong, or should be, which are as predicted, None if there are none; the
        median distance from the prediction there. Rows without keys count only for faults that are about them.
    """
    probe, fault = sample.probe, FAULTS[key]
    heeded = np.ones_like(probe.empty) if fault.empty else ~probe.empty
    predicted, wild, unknown = prediction(probe, key, tiling) if fault.concerns(probe) else (probe.truth, None, None)
    hits = total = 0
    distances = []
    for name, got in sample.outputs.items():
        truth, tolerance = probe.truth[name], probe.tolerance[name]
        claim = truth if alone and name not in alone else predicted[name].astype(np.float64)
        off = sample.off[name]
        rows = {"lse": heeded, "O": heeded[..., None], "dQ": heeded[..., None]}.get(name, np.True_)
        loose = np.zeros_like(off) if wild is None else off | (wild if name == "lse" else wild[..., None])
        affected = (off | ~near(claim, truth, tolerance) | loose) & rows
        if unknown is not None:
            affected = affected & ~(unknown if name == "lse" else unknown[..., None])
        if not affected.any():
            continue
        with np.errstate(all="ignore"):
            distance, error = np.abs(got - claim), np.abs(got - truth)
            # A fault that makes outputs large makes their rounding errors as large.
            growth = np.maximum(1, np.abs(claim) / max(1e-30, _top(truth), _top(probe.V) if name == "O" else 0))
            same = (distance <= np.maximum(tolerance * growth, CLOSE * error)) & np.isfinite(distance)
            same |= (got == claim) | (~np.isfinite(got) & ~np.isfinite(claim))
            if fault.noisy and not probe.exact:
                same |= _of_that_size(got, claim, truth)
            if name in ("O", "lse"):  # l = 0 by underflow: 0 / 0 is NaN in one kernel and guarded in another
                vanished = np.isneginf(predicted["lse"]) & ~probe.empty
                same |= (vanished if name == "lse" else vanished[..., None]) & ~np.isfinite(got)
        if wild is not None:  # right where they are not called wrong, and wrong where they are
            same = off == np.broadcast_to(wild if name == "lse" else wild[..., None], off.shape)
        hits += int(same[affected].sum())
        total += int(affected.sum())
        known = affected & ~loose & np.isfinite(distance)
        if known.any():
            distances.append(float(np.median(distance[known])))
    return (hits / total, max(distances, default=0.0)) if total else (None, 0.0)


def _of_that_size(got, claim, truth):
    """Whether errors are as large as predicted, all elements together, where they are finite."""
    fine = np.isfinite(got) & np.isfinite(claim) & np.isfinite(truth)
    a, b = np.abs(got - truth)[fine], np.abs(claim - truth)[fine]
    if not a.size or not b.any():
        return np.zeros_like(fine)
    # In the middle as well as at large: a single wild element is not a matter of rounding.
    pairs = (np.sqrt(np.mean(a**2)), np.sqrt(np.mean(b**2))), (np.median(a), np.median(b))
    alike = all(x <= WITHIN * y and y <= WITHIN * x for x, y in pairs)
    return fine if alike else np.zeros_like(fine)


@lru_cache(maxsize=40_000)
def prediction(probe, key, tiling):
    """What `Fault.predict` says of a probe; kept, as many kernels meet one probe."""
    n, fault, cut = probe.K.shape[2], FAULTS[key], tiling
    if "order" in fault.tiled:  # for a running state, a tile longer than the keys is one of any length
        cut = replace(cut, Bc=min(tiling.Bc, max(1, n)))
    if fault.model.rows_matter and not any(probe.options.get(name) for name in fault.model.rows_matter):
        cut = replace(cut, Br=1)
    return fault.predict(probe, tiling) if cut == tiling else prediction(probe, key, cut)


def _top(x):
    x = np.abs(np.asarray(x).astype(np.float64))
    return float(x[np.isfinite(x)].max(initial=0))
