"""A diagnosis, and a self-test's figures, as lines to read."""

from collections import Counter

import numpy as np

from verify.diagnose import self_test
from verify.diagnose.diagnosis import NAMED, NONE, Diagnosis
from verify.diagnose.hints import hints
from verify.diagnose.planted import OUTSIDE

MOST = 3
DETECTED = {
    "missing_barrier": ("two threads met at one element with no barrier between", "18.4.3"),
    "blocks_collide": ("two blocks touched one element of global memory, one of them writing", "18.5.1"),
    "read_before_write": ("shared memory was read before it was written", "18.4.3"),
    "out_of_bounds": ("an index was outside its array", "18.4.1"),
    "input_written": ("an input was written to", "18.4.3"),
    "divergent_barrier": ("threads of a block waited at different barriers", "18.4.3"),
    "race": ("two runs on the same inputs differ in their bits: a race", "18.4.3"),
}


def lines(found: Diagnosis, notes=()) -> list[str]:
    """What to print of a diagnosis.

    Parameters
    ----------
    found : Diagnosis
    notes : sequence of str
        What was learnt of the kernel before, one line each.
    """
    failing, total = found.failing, len(found.samples)
    out = []
    if found.verdict == NONE:
        said = f"{found.subject}: {NONE} ({total} probes are right in {', '.join(found.tried)})"
        return [said, *(f"  {note}" for note in notes)]
    names = ", ".join(s.probe.id for s in failing[:8]) + (", ..." if len(failing) > 8 else "")
    what = "backward pass" if found.backward else "forward pass"
    out.append(f"{found.subject}: {len(failing)} of {total} probes fail in {found.dtype}, {what}: {names}")
    raised = Counter(s.raised for s in failing if s.raised)
    out += [f"  raised on {n}: {line}" for line, n in raised.most_common(MOST)]
    out += [f"  {hint}" for hint in hints(found)]
    if found.verdict != NAMED:
        out.append(f"  {found.verdict}")
    event = found.names[0] if found.names and found.names[0] in DETECTED else None
    if event:
        says, chapter = DETECTED[event]
        out.append(f"  1. {event}: {says}; chapter {chapter}")
    for rank, match in enumerate(found.matches[: MOST - bool(event)], 1 + bool(event)):
        out += _cause(rank, match)
    if equals := [m for m in found.matches[1:MOST] if _same(m, found.matches[0])]:
        out.append(
            f"  no probe tells 1 from {', '.join(m.fault.name for m in equals)}: one class on this kernel's options"
        )
    if element := _first_wrong(failing):
        out.append(f"  first wrong element: {element}")
    if found.place:
        out.append(f"  first wrong weights: {found.place}")
    if found.left:
        out.append(f"  not looked at, as {found.dtype} fails: {', '.join(found.left)}")
    return out + [f"  {note}" for note in notes]


def _first_wrong(failing):
    """Where the first failing probe that returned something goes wrong first; None if all raised."""
    for sample in (s for s in failing if not s.raised):
        for name, off in sample.off.items():
            if off.any():
                at = tuple(int(k) for k in np.argwhere(off)[0])
                got, wanted = sample.outputs[name][at], sample.probe.truth[name][at]
                share = f"{off.mean():.1%} of {name} is out of bound"
                return f"{name}{list(at)} of probe {sample.probe.id} is {got:.7g}, should be {wanted:.7g}; {share}"
    return None


def _cause(rank, match):
    fault, tiling = match.fault, match.tiling
    sizes = [f"{name} = {getattr(tiling, name)}" for name in ("Br", "Bc") if name in fault.tiled]
    where = f" at {', '.join(sizes)}" if sizes else ""
    order = ", last key tile first" if tiling.backwards else ""
    alone = f", in {' and '.join(match.alone)} alone" if match.alone else ""
    close = "in size" if fault.noisy else f"to {match.residual:.1g}"
    others = f"right on {match.kept} of {match.passing} that pass"
    return [
        f"  {rank}. {fault.name}: equals the reference with {fault.what}{where}{order}{alone}, {close}, "
        f"on {match.explained} of {match.failing} failing probes; {others}",
        f"     chapter {fault.chapter}; look at {fault.look}",
    ]


def _same(match, other):
    """Whether two matches explain the runs equally well."""
    return (match.explained, match.kept, round(match.share, 2)) == (other.explained, other.kept, round(other.share, 2))


def self_test_lines(trials, left_out=()) -> list[str]:
    """Every trial that went wrong, and the figures; at the end what could not be tried, and why."""
    out = []
    for t in trials:
        if not t.ok:
            wanted = {None: "no fault", OUTSIDE: "no name"}.get(t.expected, t.expected)
            rank = " (among three)" if t.expected and t.expected in t.names else ""
            out.append(f"  {t.id} [{t.dtype}]: expected {wanted}, got {', '.join(t.names) or 'no name'}{rank}")
    by = Counter(t.implementation for t in trials if t.expected)
    s = self_test.score(trials)
    kinds = ", ".join(f"{n} in {kind}" for kind, n in by.items())
    out.append(f"bugs of the library in other implementations: {s.known} ({kinds})")
    out.append(
        f"  right name first: {s.first} of {s.known}, {s.first / max(1, s.known):.0%} (goal {self_test.FIRST:.0%})"
    )
    share = s.among_three / max(1, s.known)
    out.append(
        f"  right name among three: {s.among_three} of {s.known}, {share:.0%} (goal {self_test.AMONG_THREE:.0%})"
    )
    out.append(
        f"bugs outside the library that fail a probe: {s.outside}, given a name: {s.wrong_names} (goal: at most 1)"
    )
    if s.unseen:
        out.append(f"  and {s.unseen} that no probe sees")
    out.append(f"right kernels: {s.right}, called wrong: {s.accused} (goal 0)")
    return out + [f"left out: {line}" for line in left_out]
