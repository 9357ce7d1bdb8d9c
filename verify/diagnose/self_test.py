"""The diagnosis diagnosed: bugs planted in implementations other than its models, and kernels with none."""

import random
from contextlib import nullcontext
from dataclasses import dataclass

from verify.diagnose import in_examples
from verify.diagnose.diagnosis import NONE, diagnose
from verify.diagnose.grafted import EXPECTED
from verify.diagnose.planted import OUTSIDE, PLANTED, RIGHT, changed
from verify.diagnose.subject import Subject
from verify.diagnose.subjects import OURS, of_module, registered, run_ours
from verify.pool import each

# What has to be reached: shares of the bugs in the library, and the most wrong names outside of it.
FIRST, AMONG_THREE, WRONG = 0.80, 0.95, 1
LIMIT = 300.0
SAMPLE = 16  # mutants of our own kernels that are emulated
SEED = 0  # of the draw
OUR_RIGHT = ("step3_flash_v2", "refimpl.step2_flash_v1")


@dataclass(frozen=True)
class Trial:
    """One kernel and what was said of it.

    Attributes
    ----------
    id, implementation : str
        The implementation is "NumPy", "numba", or such as "Triton example".
    dtype : str
    expected : str or None
        A name, OUTSIDE, or None for a right kernel.
    names : tuple of str
        Up to three, the likeliest first.
    seen : bool
        Some probe failed.
    """

    id: str
    implementation: str
    dtype: str
    expected: str | None
    names: tuple
    seen: bool

    @property
    def ok(self) -> bool:
        """The right name first, no name where there is none to give, no fault where there is none."""
        if self.expected is None:
            return not self.seen
        return self.names[:1] == (self.expected,) if self.expected else not self.names


@dataclass(frozen=True)
class Score:
    """Figures of a self-test."""

    known: int
    first: int
    among_three: int
    outside: int
    wrong_names: int
    unseen: int
    right: int
    accused: int

    @property
    def passed(self) -> bool:
        """All goals are reached."""
        enough = self.first >= FIRST * self.known and self.among_three >= AMONG_THREE * self.known
        return enough and self.wrong_names <= WRONG and not self.accused


def score(trials) -> Score:
    """Count. A bug outside the library that no probe sees is not counted as left unnamed."""
    known = [t for t in trials if t.expected]
    outside = [t for t in trials if t.expected == OUTSIDE]
    right = [t for t in trials if t.expected is None]
    return Score(
        len(known),
        sum(t.ok for t in known),
        sum(t.expected in t.names for t in known),
        sum(t.seen for t in outside),
        sum(bool(t.names) for t in outside),
        sum(not t.seen for t in outside),
        len(right),
        sum(not t.ok for t in right),
    )


def calls(everything=False) -> list[tuple]:
    """Arguments of `trial` for all that is tried: (kind, key, dtype).

    Parameters
    ----------
    everything : bool
        All mutants of ours that the library has a name for, not a sample.
    """
    found = [("planted", n, dtype) for n, bug in enumerate(PLANTED) for dtype in bug.dtypes]
    found += [("right", stem, dtype) for stem, dtypes in RIGHT.items() for dtype in dtypes]
    found += [("ours", name, "fp32") for name in OUR_RIGHT]
    here = [file for file in in_examples.FILES if not in_examples.missing(file)]
    found += [("right example", file, dtype) for file in here for dtype in in_examples.types(file)]
    found += [
        ("example", n, dtype)
        for n, bug in enumerate(in_examples.EXAMPLES) if bug.file in here
        for dtype in bug.dtypes if dtype in in_examples.types(bug.file)
    ]
    drawn = mutants(bodies=False) if everything else sorted(random.Random(SEED).sample(mutants(), SAMPLE))
    return found + [("mutant", name, _turn(name, at)) for at, name in enumerate(drawn)]


def mutants(bodies=True) -> list[str]:
    """Mutants that are tried: those in the bodies of kernels, or all."""
    from verify.mutants import MUTANTS

    return [name for name in EXPECTED if MUTANTS[name].in_numba or not bodies]


def _turn(name, at):
    """A storage type for a mutant: each of its own in turn."""
    from verify.mutants import MUTANTS

    return MUTANTS[name].dtypes[at % len(MUTANTS[name].dtypes)]


def run(everything=False, jobs=None, progress=lambda done, total: None) -> list[Trial]:
    """Run all trials in worker processes.

    Raises
    ------
    RuntimeError
        If a trial does not come back.
    """
    made = calls(everything)
    answers = each("verify.diagnose.self_test:trial", made, limit=LIMIT, jobs=jobs, groups=[*map(_group, made)],
                   progress=progress)  # fmt: skip
    for call, (_, failure) in zip(made, answers, strict=True):
        if failure:
            raise RuntimeError(f"{call}: {failure}")
    return [found for found, _ in answers]


def _group(call):
    """The kind of process that a trial needs."""
    kind, key, _ = call
    if kind == "example":
        return in_examples.needs_process(in_examples.EXAMPLES[key].file)
    return in_examples.needs_process(key) if kind == "right example" else ""


def trial(kind, key, dtype) -> Trial:
    """Diagnose one kernel."""
    name, implementation, context, expected = SUBJECTS[kind](key)
    with context as subject:
        found = diagnose(subject, (dtype,), locate=False)
    return Trial(name, implementation, dtype, expected, tuple(found.names), found.verdict != NONE)


def _planted(n):
    bug = PLANTED[n]
    return bug.id, "NumPy", nullcontext(of_module(bug.module(), bug.stem)), bug.expected


def _right(stem):
    return f"{stem}: right", "NumPy", nullcontext(of_module(changed(stem), stem)), None


def _ours(name):
    kernel = registered(name, "emulated")
    return f"{name}: right", "numba" if "." not in name else "NumPy", nullcontext(kernel), None


def _example(n):
    bug = in_examples.EXAMPLES[n]
    return bug.id, in_examples.written_in(bug.file), in_examples.subject(bug.file, bug.edits), bug.expected


def _right_example(file):
    return f"examples/{file}: right", in_examples.written_in(file), in_examples.subject(file), None


def _mutant(name):
    from verify.mutants import MUTANTS, Graft

    mutant = MUTANTS[name]
    graft = Graft(mutant.edits)
    subject = Subject(
        name,
        lambda probe: run_ours(mutant.through, probe, "emulated", tile=mutant.tile, load=graft.load),
        registered(mutant.through, "emulated").offers | OURS,
        small=True,
    )
    return f"{mutant.through}: {name}", "numba", nullcontext(subject), EXPECTED[name]


SUBJECTS = {"planted": _planted, "right": _right, "ours": _ours, "example": _example,
            "right example": _right_example, "mutant": _mutant}  # fmt: skip
