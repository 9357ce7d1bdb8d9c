"""What every report says, whatever it looks like: a line a kernel and type, what failed, what ran, what did not."""

from dataclasses import dataclass

from verify.document import counts, results_of, stale
from verify.result import Result


def shown(ratio: float) -> str:
    """Error over bound in a few characters, such as "0.61", "2e+06" or "inf"."""
    return f"{ratio:.2f}" if ratio < 1000 else f"{ratio:.0e}" if ratio < 1e9 else "inf"

LACKS = "does not take "  # as `registry.Kernel.lacks` begins


@dataclass(frozen=True)
class Line:
    """All cases of one kernel in one storage type.

    Attributes
    ----------
    counts : dict
        By verdict.
    worst : Result or None
        The judged run with the largest error over bound; None if none was judged.
    """

    kernel: str
    dtype: str
    counts: dict
    worst: Result | None

    @property
    def ran(self) -> int:
        """Runs that were not skipped."""
        return sum(self.counts.values()) - self.counts["skip"]

    @property
    def passed(self) -> str:
        """Such as "36/36": skipped runs count for nothing."""
        return f"{self.counts['pass']}/{self.ran}"

    @property
    def where(self) -> str:
        """Case and output of the worst ratio."""
        if self.worst is None:
            return ""
        name = max(self.worst.outputs, key=lambda output: self.worst.outputs[output].ratio)
        return f"{self.worst.case} {name}"


def lines(results) -> list[Line]:
    """One `Line` for each kernel and storage type, in the order of the results."""
    groups = {}
    for result in results:
        groups.setdefault((result.kernel, result.dtype), []).append(result)
    return [
        Line(kernel, dtype, counts(group), max((r for r in group if r.outputs), key=lambda r: r.ratio, default=None))
        for (kernel, dtype), group in groups.items()
    ]


def failures(results) -> list[Result]:
    """Results that make the run fail."""
    return [r for r in results if r.verdict in ("fail", "error")]


def skips(results) -> dict[str, list[Result]]:
    """Skipped results by who skipped them and why: options that a kernel lacks together, and kernels alike together."""
    by_kernel = {}
    for result in results:
        if result.verdict == "skip":
            missing = result.reason.startswith(LACKS)
            by_kernel.setdefault(result.kernel, {}).setdefault(LACKS if missing else result.reason, []).append(result)
    alike = {}
    for kernel, reasons in by_kernel.items():
        for reason, group in reasons.items():
            if reason == LACKS:
                words = [word for r in group for word in r.reason.removeprefix(LACKS).split(", ")]
                reason = LACKS + ", ".join(dict.fromkeys(words))
            alike.setdefault((reason, len(group)), {})[kernel] = group
    return {
        f"{', '.join(kernels)}: {reason}": [r for group in kernels.values() for r in group]
        for (reason, _), kernels in alike.items()
    }


def what_ran(results) -> str:
    """One sentence on where the kernels ran and at what size."""
    said = []
    for kind in ("gpu", "emulated", "numpy", "cpu", "simulated"):
        group = [r for r in results if r.executor == kind]
        if not group:
            continue
        N = max(max(r.size["Nq"], r.size["Nk"]) for r in group)
        tiles = sorted({r.tile[0] for r in group if r.tile})
        tile = f", tile {tiles[0]}" if tiles else ""
        if kind == "gpu":
            said.append(f"run on {group[0].device} at full size, N up to {N}")
        elif kind == "emulated":
            said.append(f"emulated on {group[0].device} at N up to {N}{tile}; full size not run")
        elif kind == "simulated":
            said.append(f"simulated on {group[0].device} at N up to {N}; full size not run")
        elif kind == "cpu":
            said.append(f"run on {group[0].device} at N up to {N}")
        else:
            said.append(f"NumPy on {group[0].device} at N up to {N}{tile}")
    return "; ".join(said)


def fixed_limits(results) -> str:
    """One sentence on what the blog's fixed limits would have said of O."""
    judged = [r for r in results if r.outputs and r.outputs["O"].fixed is not None]
    stricter = [r for r in judged if r.outputs["O"].ok and not r.outputs["O"].max_abs <= r.outputs["O"].fixed]
    looser = [r for r in judged if not r.outputs["O"].ok and r.outputs["O"].max_abs <= r.outputs["O"].fixed]
    if not judged:
        return ""
    if not stricter and not looser:
        return f"The blog's fixed limits (fp32 1e-5, fp16 1e-3) judge all {len(judged)} outputs as here."
    return (
        f"The blog's fixed limits (fp32 1e-5, fp16 1e-3) would have failed {len(stricter)} and passed {len(looser)} "
        f"of {len(judged)} outputs that are judged the other way here."
    )


def recorded(document) -> dict[tuple[str, str], str]:
    """A recorded run by kernel and type, each as "36/36, 0.61", with "stale" where the kernel has changed since."""
    if document is None:
        return {}
    old = stale(document)
    return {
        (line.kernel, line.dtype): line.passed
        + (f", {shown(line.worst.ratio)}" if line.worst else "")
        + (" stale" if line.kernel in old else "")
        for line in lines(results_of(document))
    }
