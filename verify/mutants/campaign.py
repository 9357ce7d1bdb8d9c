"""All mutants against the default cases, and correct kernels on fresh seeds: is the judge strict, and is it fair?"""

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from verify.cases import DEFAULT
from verify.mutants import trial
from verify.mutants.catalogue import MUTANTS
from verify.mutants.graft import Graft
from verify.mutants.trial import Trial
from verify.pool import cores, each
from verify.registry import CUDA, REFERENCES

ENOUGH = 2  # cases that have to kill a mutant, in every storage type
FRESH = 20  # seeds on which correct kernels have to pass
SHARE = 13  # the emulator runs every so many-th case of a fresh seed
LIMIT = 600.0  # seconds for one mutant
CONTROLS = tuple(name for name in REFERENCES if name != "oracle")  # NumPy kernels: fast enough for every fresh seed
DTYPES = ("fp32", "fp16", "bf16")


@dataclass(frozen=True)
class Row:
    """One mutant in one storage type.

    Attributes
    ----------
    mutant, dtype : str
    trials : tuple of Trial
        In the order in which they were run.
    of : int
        Cases that its kernel takes.
    changes : bool or None
        For a mutant that nothing killed: whether any output of any case changed at all. None for the others.
    failure : str
        Why there is no answer, if there is none: it hung, or its process died.
    """

    mutant: str
    dtype: str
    trials: tuple
    of: int
    changes: bool | None = None
    failure: str = ""

    @cached_property
    def kills(self) -> list[Trial]:
        """Trials that killed it."""
        return [t for t in self.trials if t.kill]

    @property
    def by_numbers(self) -> int:
        """How many kills the numbers alone bring about."""
        return sum(bool(t.numbers) for t in self.kills)

    @property
    def verdict(self) -> str:
        """killed; weak: by fewer cases than `ENOUGH`; lives; equivalent: it changes no bit of any output; error."""
        if self.failure:
            return "error"
        if not self.kills:
            return "lives" if self.changes else "equivalent"
        return "killed" if len(self.kills) >= ENOUGH else "weak"


@dataclass(frozen=True)
class Campaign:
    """What came of it all.

    Attributes
    ----------
    rows : list of Row
    controls : list of (str, Trial)
        Correct kernels by name, on fresh seeds.
    seeds : tuple of int
    full : bool
        Every case was run, and not only until `ENOUGH` of them killed.
    failures : list of str
        Controls that gave no answer.
    """

    rows: list
    controls: list
    seeds: tuple
    full: bool
    failures: tuple = ()

    @property
    def bad(self) -> list[Row]:
        """Rows that make the campaign fail."""
        return [row for row in self.rows if row.verdict != "killed"]

    @property
    def unfair(self) -> list:
        """Correct kernels that were failed: (name, trial)."""
        return [(name, t) for name, t in self.controls if t.kill]

    @property
    def passed(self) -> bool:
        """All mutants are killed often enough, and all correct kernels pass."""
        return not self.bad and not self.unfair and not self.failures


def hunt(name, dtypes=DTYPES, full=False) -> list[Row]:
    """Run a mutant on cases until enough of them kill it, or on all, in each storage type. Runs in a worker."""
    mutant = MUTANTS[name]
    graft, cases, rows = Graft(mutant.edits), trial.cases_for(mutant), []
    for dtype in types_of(mutant, dtypes):
        trials = []
        for case in cases:
            trials.append(trial.attempt(graft, mutant.through, case, dtype, tile=mutant.tile))
            if not full and _enough(trials, mutant.by_order):
                break
        changes = None
        if not any(t.kill for t in trials):
            changes = any(trial.changed(graft, mutant.through, case, dtype, mutant.tile) for case in cases)
        rows.append(Row(name, dtype, tuple(trials), len(cases), changes))
    return rows


def types_of(mutant, dtypes) -> list[str]:
    """Those of the storage types in which the mutant is a bug."""
    return [dtype for dtype in dtypes if dtype in mutant.dtypes]


def _enough(trials, by_order):
    """Enough cases killed, and one of them by numbers where any can, as most kernels have no emulator to watch them."""
    kills = [t for t in trials if t.kill]
    return len(kills) >= ENOUGH and (by_order or any(t.numbers for t in kills))


def control(keys) -> list:
    """Run correct kernels on fresh seeds: (kernel, case, dtype, seed) each. Runs in a worker."""
    shipped = Graft(())
    return [(kernel, trial.attempt(shipped, kernel, case, dtype, seed)) for kernel, case, dtype, seed in keys]


def work(kind, *args) -> list:
    """A hunt or a share of the controls. Runs in a worker."""
    return {"hunt": hunt, "control": control}[kind](*args)


def control_keys(seeds) -> list:
    """What correct kernels are run on: (kernel, case, dtype, seed).

    Each seed runs every case once in NumPy, and one in `SHARE` in the emulator, with another kernel and another type
    from seed to seed.
    """
    keys = []
    for turn, seed in enumerate(seeds):
        dtype = DTYPES[turn % len(DTYPES)]
        for at, (name, case) in enumerate(DEFAULT.items()):
            for many in (CONTROLS, tuple(CUDA)):
                takers = [k for k in many if not (CUDA | REFERENCES)[k].refuses(case, dtype, small=True)]
                if takers and (many is CONTROLS or (at + turn) % SHARE == 0):
                    keys.append((takers[(at // SHARE + turn) % len(takers)], name, dtype, seed))
    return keys


def run(names, dtypes, *, seeds, full=False, jobs=None, progress=lambda done, total: None) -> Campaign:
    """Run mutants and controls in worker processes.

    Parameters
    ----------
    names, dtypes : sequence of str
        Mutants, and storage types; a mutant is not run in a type that its entry leaves out.
    seeds : sequence of int
        Fresh ones; none for no controls.
    full : bool
    jobs : int, optional
        Processes at a time; the number of cores if not given.
    progress : callable
        ``progress(done, total)`` in runs of a mutant or a share of controls.
    """
    hunts = [(name, tuple(dtypes), full) for name in names if types_of(MUTANTS[name], dtypes)]
    keys = control_keys(seeds)
    shares = [(list(share),) for _, share in groupby(keys, key=lambda key: (key[3], key[2]))]
    # Together: the same processes, with what they have computed, and none of them waits for the last of the hunts.
    calls = [("hunt", *args) for args in hunts] + [("control", *args) for args in shares]
    answers = each("verify.mutants.campaign:work", calls, limit=LIMIT, jobs=jobs or cores(), progress=progress)
    hunted, controlled, rows = answers[: len(hunts)], answers[len(hunts) :], []
    for (name, *_), (found, failure) in zip(hunts, hunted, strict=True):
        of = len(trial.cases_for(MUTANTS[name]))
        rows += found or [Row(name, dtype, (), of, failure=failure) for dtype in types_of(MUTANTS[name], dtypes)]
    controls = [pair for found, _ in controlled for pair in found or ()]
    failures = tuple(f"{len(share[0])} runs of seed {share[0][0][3]}: {failure}"
                     for share, (_, failure) in zip(shares, controlled, strict=True) if failure)
    return Campaign(rows, controls, tuple(seeds), full, failures)
