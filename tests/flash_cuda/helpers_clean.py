"""What a compiled kernel must not have, said for all kernels of a test at once rather than for the first."""

from importlib.metadata import version


def unclean(reports, fewest=16, shared=None):
    """A line for each report with a stack, spills, fp64 instructions, or registers or shared memory out of bounds."""
    lines = []
    for r in reports:
        faults = [f"{r.stack_bytes} bytes of stack or spills"] * (r.stack_bytes > 0)
        faults += [f"{r.f64} fp64 instructions"] * (r.f64 > 0)
        faults += [f"{r.registers} registers"] * (not fewest <= r.registers <= 255)
        faults += [f"{r.shared_bytes} bytes of shared memory"] * (shared is not None and r.shared_bytes > shared)
        lines += [f"{r.kernel} {r.arch}: {', '.join(faults)} (nvJitLink {version('nvidia-nvjitlink')})"] * bool(faults)
    return lines
