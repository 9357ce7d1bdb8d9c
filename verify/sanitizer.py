"""NVIDIA's compute-sanitizer on one run of a kernel, where it is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from verify import calls, executors
from verify.cases import DEFAULT
from verify.registry import CUDA

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
LIMIT = 270.0  # seconds; who runs this in a worker allows it more, so that nothing is left running


def program() -> str | None:
    """The path of compute-sanitizer; None if it is not on this machine."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    for home in filter(None, homes):
        for place in ("bin", "compute-sanitizer"):
            if (path := Path(home, place, "compute-sanitizer")).is_file():
                return str(path)
    return shutil.which("compute-sanitizer")


def sanitize(kernel, case, dtype, tool) -> str | None:
    """What a tool of compute-sanitizer says against one run on small shapes; None if nothing.

    Raises
    ------
    FileNotFoundError
        compute-sanitizer is not on this machine.
    """
    found = program()
    if found is None:
        raise FileNotFoundError("compute-sanitizer")
    code = f"from verify import sanitizer; sanitizer.small({kernel!r}, {case!r}, {dtype!r})"
    command = [found, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {LIMIT:g} s"
    return verdict_of(done.returncode, done.stdout + done.stderr)


def small(kernel, case, dtype):
    """One run on a GPU at the small shape, as a sanitizer makes it thousands of times slower."""
    entry = CUDA[kernel]
    problem = entry.fitted(DEFAULT[case]).build(dtype, small=True)
    list(calls.runs(entry, problem, {"on": executors.open_executor("gpu")}))


def verdict_of(status: int, words: str) -> str | None:
    """What a sanitizer's exit status and output come to: None if it ran to the end and found nothing."""
    lines = [line.lstrip("= ").strip() for line in words.splitlines() if line.startswith("=====")]
    summary = next((line for line in reversed(lines) if "SUMMARY" in line), None)
    if status == 0 and summary and (" 0 error" in summary or " 0 hazard" in summary):
        return None
    telling = ("invalid", "race", "uninit", "barrier")
    said = next((line for line in lines if any(word in line.lower() for word in telling)), "")
    if status == 1:  # the program under it failed by itself, and says so last
        own = [line.strip() for line in words.splitlines() if line.strip() and not line.startswith("=====")]
        said = own[-1] if own else said
    return f"{said}; {summary or 'no summary'} (exit status {status})".removeprefix("; ")
