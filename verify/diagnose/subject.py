"""The kernel under diagnosis, whatever it is: called on a probe, it gives outputs or what went wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from verify.diagnose.probe import Probe

# What executors see happen, by the type of what they raise.
DETECTED = {
    "Race": "missing_barrier",
    "UninitialisedRead": "read_before_write",
    "OutOfBounds": "out_of_bounds",
    "ReadOnly": "input_written",
    "DivergentBarrier": "divergent_barrier",
}
BLOCKS = "blocks_collide"  # a race that no barrier mends


@dataclass(frozen=True)
class Subject:
    """What is diagnosed.

    Attributes
    ----------
    name : str
    call : callable
        ``call(probe) -> {"O": ..., "lse": ...}``, or the gradients of a probe of the backward pass; lse may be missing.
    offers : frozenset of str
        What it takes, in the registry's words.
    dtypes : tuple of str
    d : int or None
        The head dim of probes, if it takes no other.
    small : bool
        Probes of the size that can be emulated.
    whole, square
        As `battery`.
    with_gradients : frozenset of str or None
        What it takes together with a backward pass, if not all.
    """

    name: str
    call: Callable
    offers: frozenset
    dtypes: tuple = ("fp32", "fp16", "bf16")
    d: int | None = None
    small: bool = False
    whole: int = 1
    square: bool = False
    with_gradients: frozenset | None = None

    def takes(self, probe: Probe) -> bool:
        """Whether it is run on a probe at all."""
        needs = probe.needs
        return needs <= self.offers and ("backward" not in needs or needs <= (self.with_gradients or self.offers))


@dataclass(frozen=True, eq=False)
class Sample:
    """One run: the probe and outputs in fp64, or what was raised."""

    probe: Probe
    outputs: dict
    raised: str = ""  # one line
    kind: str = ""  # the exception's type

    @cached_property
    def wrong(self) -> bool:
        """Some output is out of tolerance, or there is none."""
        return bool(self.raised) or any(off.any() for off in self.off.values())

    @property
    def detected(self) -> str:
        """The name of what an executor saw happen; empty if it saw nothing."""
        if self.kind == "Race" and " block" in self.raised:
            return BLOCKS
        return DETECTED.get(self.kind, "")

    @cached_property
    def off(self) -> dict:
        """Elements of each output that are out of tolerance, bool."""
        truth, tolerance = self.probe.truth, self.probe.tolerance
        return {name: ~near(x, truth[name], tolerance[name]) for name, x in self.outputs.items()}


def sample(subject: Subject, probe: Probe) -> Sample:
    """Run a kernel on a probe, on copies of its inputs where these are contiguous."""
    before = [x.tobytes() for x in (probe.Q, probe.K, probe.V)]
    returned, fault = {}, None
    try:
        with np.errstate(all="ignore"):
            returned = subject.call(probe)
    except Exception as error:
        fault = Sample(probe, {}, f"{type(error).__name__}: {error}".splitlines()[0], type(error).__name__)
    for name, x, was in zip("QKV", (probe.Q, probe.K, probe.V), before, strict=True):
        if x.tobytes() != was:
            x[...] = np.frombuffer(was, x.dtype).reshape(x.shape)  # for the next kernel
            fault = Sample(probe, {}, f"input {name} was modified", "ReadOnly")
    return fault or _read(returned, probe)


def _read(returned, probe):
    """What a kernel returned as a sample, or why that is none."""
    try:
        outputs = {n: np.asarray(x).astype(np.float64) for n, x in returned.items() if x is not None}
    except Exception as error:
        return Sample(probe, {}, f"{type(error).__name__}: {error}".splitlines()[0], type(error).__name__)
    for name, x in outputs.items():
        if x.shape != probe.truth[name].shape:
            return Sample(probe, {}, f"{name} has shape {x.shape}, expected {probe.truth[name].shape}", "shape")
    return Sample(probe, outputs)


def blank(sample: Sample) -> bool:
    """Whether O is 0 all over where it should not be, and no right lse shows that the scores were computed."""
    O = sample.outputs.get("O")
    if O is None or O.any() or not sample.off["O"].any():
        return False
    return "lse" not in sample.outputs or bool(sample.off["lse"].any())


def near(got, wanted, tolerance):
    """Which elements agree: within the tolerance, or both infinite alike, or both NaN."""
    with np.errstate(all="ignore"):
        return (np.abs(got - wanted) <= tolerance) | (got == wanted) | (np.isnan(got) & np.isnan(wanted))
