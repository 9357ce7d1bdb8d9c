"""A diagnosis from beginning to end: run the probes, see what fails, search for its cause, say where it starts."""

from dataclasses import dataclass, field, replace

from verify.diagnose.battery import battery
from verify.diagnose.locate import Region, region
from verify.diagnose.search import search
from verify.diagnose.subject import Sample, Subject, blank, sample

NONE, NAMED, UNKNOWN = "no fault found", "named", "none of the known bugs"


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes
    ----------
    subject : str
    dtype : str
        The storage type it was found in.
    verdict : str
        NONE, NAMED or UNKNOWN.
    matches : list of Match
        The likeliest first; empty unless NAMED by a model.
    samples : list of Sample
        All runs in that type.
    backward : bool
        It is the backward pass that is wrong.
    detected : str
        What an executor saw happen, as `Sample.detected`.
    unsteady : bool
        Two runs on one probe differ in their bits.
    place : Region or None
    tried, left : tuple of str
        Storage types up to this one, and those that were not looked at, as this one fails.
    """

    subject: str
    dtype: str
    verdict: str
    matches: list = field(default_factory=list)
    samples: list = field(default_factory=list)
    backward: bool = False
    detected: str = ""
    unsteady: bool = False
    place: Region | None = None
    tried: tuple = ()
    left: tuple = ()

    @property
    def names(self) -> list[str]:
        """Up to three names, the likeliest first."""
        first = [self.detected] if self.detected else ["race"] if self.unsteady else []
        return (first + [m.fault.name for m in self.matches])[:3]

    @property
    def failing(self) -> list[Sample]:
        """Runs that were wrong."""
        return [s for s in self.samples if s.wrong]


def diagnose(subject: Subject, dtypes=None, *, locate=True, progress=lambda done, total: None) -> Diagnosis:
    """Diagnose a kernel.

    Parameters
    ----------
    subject : Subject
    dtypes : sequence of str, optional
        Storage types, in the order in which they are tried until one fails; the subject's own if not given.
    locate : bool
        Read the weights off the kernel to find the first wrong region.
    progress : callable
        ``progress(done, total)`` after each run.
    """
    found, tried, dtypes = None, (), tuple(dtypes or subject.dtypes)
    for dtype in dtypes:
        tried += (dtype,)
        probes = [
            p for p in battery(dtype, subject.small, subject.d, subject.whole, subject.square) if subject.takes(p)
        ]
        samples = []
        for turn, passes in enumerate((False, True)):
            # Gradients are looked at only where the forward pass is right: they would be wrong after it.
            if turn and any(s.wrong for s in samples):
                break
            for probe in (p for p in probes if (p.dO is not None) == passes):
                samples.append(sample(subject, probe))
                progress(len(samples), len(probes))
        found = replace(_judged(subject, dtype, samples, locate), tried=tried, left=dtypes[len(tried) :])
        if found.verdict != NONE:
            return found
    return found


def _judged(subject, dtype, samples, locate):
    failing = [s for s in samples if s.wrong]
    if not failing:
        return Diagnosis(subject.name, dtype, NONE, samples=samples)
    backward = all(s.probe.dO is not None for s in failing)
    detected = next((s.detected for s in failing if s.detected), "")
    told = [s for s in failing if not s.raised]
    unsteady = bool(told) and not detected and _differs(told[0], sample(subject, told[0].probe))
    relevant = [s for s in samples if (s.probe.dO is not None) == backward and not s.raised]
    # Where nothing ever reaches the output, every fault that loses all keys or all columns explains it.
    full = [s for s in relevant if "O" in s.probe.truth and s.probe.truth["O"].any()]
    nothing = len(full) > 1 and all(blank(s) for s in full)
    nameless = detected or unsteady or nothing
    matches = [] if nameless else search(relevant, subject.small)
    named = detected or unsteady or matches
    place = region(subject, told[0].probe) if locate and told and not backward else None
    verdict = NAMED if named else UNKNOWN
    return Diagnosis(subject.name, dtype, verdict, matches, samples, backward, detected, unsteady, place)


def _differs(one, other):
    """Whether two runs of a probe differ in a bit."""
    return any(x.tobytes() != other.outputs[n].tobytes() for n, x in one.outputs.items() if n in other.outputs)
