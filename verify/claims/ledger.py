"""What a ledger entry is, and how its verdict follows from its recomputation.

An entry is data plus one small function. The data hold what the text states; the function returns what is true *in
the same shape*. Nothing in the function may look at the stated value: the framework compares the two, so that a
changed stated value or a changed recomputation changes the implied verdict, and a test holds the declared one to it.

What the function returns decides which verdicts are possible:

========================  =====================================================================================
returns                   implied verdict
========================  =====================================================================================
a value, or `Truth`       confirmed if every leaf agrees; units if it agrees after `unit_factor`; else wrong
`Elsewhere(value, ids)`   confirmed if it agrees; else inconsistent (the value is what other entries state)
`Cases({assumption: v})`  confirmed if all agree, wrong if none does, depends otherwise
`Bound(lo, hi, reason)`   unverifiable (with the reason) while the stated value is possible; wrong outside it
========================  =====================================================================================
"""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

VERDICTS = ("wrong", "inconsistent", "units", "depends", "unverifiable", "confirmed")
KINDS = ("formula", "number", "table", "listing", "code", "library", "hardware", "timing", "statement")
# Module name prefixes that hold entries; every such module of this package is imported by `load`.
PREFIXES = ("s18_", "blog", "listings_")


@dataclass(frozen=True)
class Range:
    """A stated interval such as "2 to 4 times": it agrees with a truth that lies inside it."""

    lo: float
    hi: float


@dataclass(frozen=True)
class Truth:
    """A recomputed value in the shape of `stated`, with a sentence that says how it came out."""

    value: Any
    detail: str = ""


@dataclass(frozen=True)
class Elsewhere:
    """What other entries of the same text state about the same quantity."""

    value: Any
    ids: tuple[str, ...]
    detail: str = ""


@dataclass(frozen=True)
class Cases:
    """The quantity under each reading or assumption that the text leaves open."""

    values: dict[str, Any]
    detail: str = ""


@dataclass(frozen=True)
class Bound:
    """The interval in which a number nobody can rerun must lie, and why it cannot be rerun.

    `lo` and `hi` are in the shape of `stated`, or one number for all leaves; infinite where nothing is known.
    """

    lo: Any
    hi: Any
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Outcome:
    """Result of a recomputation: the value, whether the stated one agrees, the verdict that follows, and why.

    `off` names the leaves that disagree, the cases that do, or the leaves outside a bound.
    """

    value: Any
    agrees: bool
    verdict: str
    detail: str
    off: tuple[str, ...] = ()


@dataclass(frozen=True)
class Claim:
    """One statement of the text.

    Attributes
    ----------
    id : str
        "18.3-017" or "blog-004"; the part before the dash is the section the reports group by.
    section, where : str
        "18.3.2" and "Table 18-7" | "Figure 18-2" | "Listing 3" | "Formula 2" | "text".
    title_en, title_zh : str
        A few words; `title_zh` is the chapter's own term.
    paraphrase : str
        What the text says, in our words.
    stated : number, str, bool, Range, or dict of these
        Data. A table is one dict; its keys name row and column.
    unit : str
        Of the stated numbers; "" when they are pure.
    verdict : str
        Declared; one of `VERDICTS`. A test holds it against `recompute().verdict`.
    right : str
        What holds instead; required unless confirmed.
    severity : int
        1 harmless, 2 misleads, 3 produces wrong results or wrong decisions.
    tol : float
        Relative tolerance of numeric leaves. The default forgives rounding to two digits; 0 demands equality.
    unit_factor : float, dict or None
        Factor that turns the stated numbers right when only the unit is wrong, e.g. 1.024**3 for GiB called
        GB; a dict in the shape of `stated` where rows need different ones.
    mended : callable or None
        For a faulty listing: judges the repaired version, same shape as `stated`; must agree with it.
    """

    id: str
    section: str
    where: str
    title_en: str
    title_zh: str
    paraphrase: str
    stated: Any
    verdict: str
    kind: str
    truth: Callable[[], Any] = field(repr=False, compare=False)
    unit: str = ""
    right: str = ""
    severity: int = 1
    reading_is_guess: bool = False
    conflicts_with: tuple[str, ...] = ()
    source: str = ""
    tol: float = 0.02
    unit_factor: float | dict | None = None
    mended: Callable[[], Any] | None = field(default=None, repr=False, compare=False)

    @property
    def group(self) -> str:
        """The section that reports group by: "18.3" or "blog"."""
        return self.id.rsplit("-", 1)[0]

    def recompute(self) -> Outcome:
        """Run the recomputation (once a process) and compare it with the stated value."""
        return imply(self, self.stated, recomputed(self))


def recomputed(claim):
    """What the entry's function returned (it runs once a process)."""
    return _run(claim.truth)


@functools.cache
def _run(function):
    return function()


def leaves(value, path="") -> dict[str, Any]:
    """Flatten nested dicts and lists to {path: leaf}."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        # NumPy scalars become Python ones, so that a bool is a bool.
        return {path: value.item() if hasattr(value, "item") else value}
    flat = {}
    for key, sub in items:
        flat.update(leaves(sub, f"{path}/{key}" if path else str(key)))
    return flat


def close(stated, true, tol) -> bool:
    """Does one stated leaf agree with one true leaf? NaN agrees with nothing."""
    if isinstance(stated, Range):
        ends = (true.lo, true.hi) if isinstance(true, Range) else (true, true)
        slack = tol * max(abs(end) for end in ends)
        return all(stated.lo - slack <= end <= stated.hi + slack for end in ends)
    if isinstance(stated, (bool, str)) or isinstance(true, (bool, str)) or stated is None or true is None:
        return type(stated) is type(true) and stated == true
    if isinstance(true, Range):
        slack = tol * max(abs(true.lo), abs(true.hi))
        return true.lo - slack <= stated <= true.hi + slack
    if math.isinf(stated) or math.isinf(true):
        return stated == true
    return abs(stated - true) <= tol * abs(true)


def disagreements(stated, true, tol) -> list[str]:
    """Paths of the leaves that do not agree; a leaf missing on either side is a mistake in the entry.

    Raises
    ------
    ValueError
        If the two do not have the same leaves.
    """
    mine, theirs = leaves(stated), leaves(true)
    if mine.keys() != theirs.keys():
        raise ValueError(f"stated and recomputed differ in shape: {sorted(mine.keys() ^ theirs.keys())}")
    return [path for path in mine if not close(mine[path], theirs[path], tol)]


def scale(value, factor):
    """Multiply every number in a stated value; the factor may be a dict in the shape of the value."""
    if isinstance(value, dict):
        each = factor if isinstance(factor, dict) else dict.fromkeys(value, factor)
        return {key: scale(sub, each[key]) for key, sub in value.items()}
    if isinstance(value, (list, tuple)):
        return [scale(sub, factor) for sub in value]
    if isinstance(value, Range):
        return Range(value.lo * factor, value.hi * factor)
    if isinstance(value, (bool, str)) or value is None:
        return value
    return value * factor


def _outside(stated, lo, hi) -> list[str]:
    flat = leaves(stated)
    low = leaves(lo) if isinstance(lo, dict) else dict.fromkeys(flat, lo)
    high = leaves(hi) if isinstance(hi, dict) else dict.fromkeys(flat, hi)
    bad = []
    for path, leaf in flat.items():
        if isinstance(leaf, (bool, str)):
            continue
        ends = (leaf.lo, leaf.hi) if isinstance(leaf, Range) else (leaf, leaf)
        if not low[path] <= ends[0] <= ends[1] <= high[path]:
            bad.append(path)
    return bad


def imply(claim, stated, truth) -> Outcome:
    """The verdict that follows from a truth, for the entry's own or for another stated value."""
    if isinstance(truth, Bound):
        bad = _outside(stated, truth.lo, truth.hi)
        detail = "; ".join(part for part in (truth.reason, truth.detail) if part)
        verdict = "wrong" if bad else "unverifiable"
        return Outcome({"lo": truth.lo, "hi": truth.hi}, not bad, verdict, detail, tuple(bad))
    if isinstance(truth, Cases):
        off = tuple(name for name, value in truth.values.items() if disagreements(stated, value, claim.tol))
        verdict = "confirmed" if not off else "wrong" if len(off) == len(truth.values) else "depends"
        return Outcome(truth.values, not off, verdict, truth.detail, off)
    elsewhere = isinstance(truth, Elsewhere)
    value = truth.value if isinstance(truth, (Truth, Elsewhere)) else truth
    detail = truth.detail if isinstance(truth, (Truth, Elsewhere)) else ""
    bad = disagreements(stated, value, claim.tol)
    if not bad:
        return Outcome(value, True, "confirmed", detail)
    if claim.unit_factor and not disagreements(scale(stated, claim.unit_factor), value, claim.tol):
        return Outcome(value, False, "units", detail, tuple(bad))
    return Outcome(value, False, "inconsistent" if elsewhere else "wrong", detail, tuple(bad))


def perturbed(stated, tol):
    """Yield (path, copy of `stated` with that one leaf changed by more than the tolerance)."""
    if isinstance(stated, dict):
        for key, sub in stated.items():
            for path, changed in perturbed(sub, tol):
                yield f"{key}/{path}".rstrip("/"), {**stated, key: changed}
    elif isinstance(stated, (list, tuple)):
        for at, sub in enumerate(stated):
            for path, changed in perturbed(sub, tol):
                yield f"{at}/{path}".rstrip("/"), [*stated[:at], changed, *stated[at + 1 :]]
    elif isinstance(stated, bool):
        yield "", not stated
    elif isinstance(stated, str):
        yield "", stated + " not"
    elif isinstance(stated, Range):
        width = stated.hi - stated.lo + (4 * tol + 0.01) * max(abs(stated.lo), abs(stated.hi), 1e-300)
        yield "", Range(stated.lo + width, stated.hi + width)
    elif stated is not None:
        yield "", stated * (1 + 4 * tol + 0.01) if stated else 1.0


CLAIMS: dict[str, Claim] = {}


def claim(id, **data):
    """Decorator: register a function without arguments as the recomputation of entry `id`.

    Raises
    ------
    ValueError
        If the id is taken, or the verdict or kind is not one of the listed ones.
    """

    def register(function):
        if id in CLAIMS:
            raise ValueError(f"claim {id} is registered twice")
        if data["verdict"] not in VERDICTS or data["kind"] not in KINDS:
            raise ValueError(f"claim {id}: unknown verdict {data['verdict']!r} or kind {data['kind']!r}")
        CLAIMS[id] = Claim(id=id, truth=function, **data)
        return function

    return register


def stated_in(id):
    """What another entry states: for recomputations that return `Elsewhere`."""
    load()
    return CLAIMS[id].stated


@functools.cache
def load() -> dict[str, Claim]:
    """Import every module of this package that holds entries and return them by id, in section order."""
    package = importlib.import_module(__package__)
    for info in pkgutil.iter_modules(package.__path__):
        if info.name.startswith(PREFIXES):
            importlib.import_module(f"{__package__}.{info.name}")
    ordered = dict(sorted(CLAIMS.items(), key=lambda item: (item[0].startswith("blog"), item[0])))
    CLAIMS.clear()
    CLAIMS.update(ordered)
    return CLAIMS
