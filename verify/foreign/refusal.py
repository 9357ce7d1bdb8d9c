"""Which exceptions of a stranger's kernel are its way of saying that it does not take something."""

import linecache
import traceback
from pathlib import Path

# What a refusal of a promise looks like. An IndexError is an accident, and so is a ValueError that nobody raised.
REFUSALS = (NotImplementedError, TypeError, RuntimeError)
ON_PURPOSE = (ValueError, AssertionError)


def refusal(error) -> bool:
    """Whether an exception is a kernel's way of saying that it does not take something."""
    if fatal(error):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    line = linecache.getline(frames[-1].filename, frames[-1].lineno).strip() if frames else ""
    said = line.startswith(("raise", "assert"))
    return isinstance(error, REFUSALS) or (isinstance(error, ON_PURPOSE) and said)


def fatal(error) -> bool:
    """Whether it is a fault of the device, not an answer."""
    return "CUDA" in type(error).__name__.upper() or "CUDA error" in str(error) or "CUDA_ERROR" in str(error)


def one_line(error) -> str:
    """An exception's type and first line."""
    text = f"{type(error).__name__}: {error}".strip()
    return (text.splitlines()[0] if text else type(error).__name__)[:200]


def line_of(error, path) -> str:
    """The line of a file that an exception came by last, such as "mine.py:31"; empty if it did not come from there."""
    own, frames = path.resolve(), traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == own]
    return f"{path.name}:{lines[-1]}" if lines else ""
