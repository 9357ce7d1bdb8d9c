"""Bugs planted in examples/, kernels in NumPy, numba.cuda, Triton and CuPy: files edited and loaded like anybody's."""

import json
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

import verify
from verify.diagnose.planted import edited
from verify.diagnose.subjects import of_loaded
from verify.executors import gpu_missing
from verify.foreign.arrays import find_spec
from verify.foreign.imports import SIMULATORS, gpu_answers
from verify.foreign.spec import Spec, load

FOLDER = Path(verify.__file__).parent.parent / "examples"
# File -> the packages it needs and the storage types that it takes on a GPU.
FILES = {
    "numpy_attention.py": (("numpy",), ("fp32", "fp16", "bf16")),
    "numba_attention.py": (("numba",), ("fp32", "fp16")),
    "triton_attention.py": (("triton", "torch"), ("fp32", "fp16", "bf16")),
    "cupy_attention.py": (("cupy",), ("fp32", "fp16")),
}
NOT_SIMULATED = {"triton_attention.py": {"bf16": "Triton's interpreter multiplies bf16 numbers as integers"}}
SPELT = {"numpy": "NumPy", "triton": "Triton", "cupy": "CuPy"}


@dataclass(frozen=True)
class Example:
    """One bug in one example.

    Attributes
    ----------
    file : str
        In examples/.
    bug : str
        In plain words.
    expected : str
        The fault's name, or OUTSIDE.
    edits : tuple of (old, new)
        Each old text occurs once.
    dtypes : tuple of str
    """

    file: str
    bug: str
    expected: str
    edits: tuple
    dtypes: tuple

    @property
    def id(self) -> str:
        """What reports call it."""
        return f"examples/{self.file}: {self.bug}"


def _read() -> list[Example]:
    """The list beside this module."""
    rows = json.loads((files("verify.diagnose") / "examples.json").read_text(encoding="utf-8"))
    return [
        Example(row["file"], row["bug"], row["expected"], tuple(map(tuple, row["edits"])),
                tuple(row.get("dtypes", ("fp32",))))
        for row in rows
    ]  # fmt: skip


EXAMPLES = _read()


def written_in(file) -> str:
    """What reports call an example's kind of implementation."""
    library = FILES[file][0][0]
    return f"{SPELT.get(library, library)} example"


def missing(file) -> str | None:
    """Why an example cannot run here; None if it can."""
    if not (FOLDER / file).is_file():
        return "the package was installed without examples/"
    for package in FILES[file][0]:
        if not find_spec(package):
            return f"{package} is not installed"
    return gpu_missing() if file.startswith("cupy") else None


def types(file) -> tuple:
    """Storage types in which an example runs here."""
    lacks = {} if gpu_answers() else NOT_SIMULATED.get(file, {})
    return tuple(dtype for dtype in FILES[file][1] if dtype not in lacks)


def left_out() -> list[str]:
    """What cannot be tried here: an example or a type of it, with how many bugs, and why."""
    out = []
    for file, (_, dtypes) in FILES.items():
        reason, count = missing(file), Counter(t for bug in EXAMPLES if bug.file == file for t in bug.dtypes)
        if reason:
            out.append(f"examples/{file} and its {count.total()} bugs: {reason}")
        for dtype in dtypes if not reason else ():
            if dtype not in types(file):
                out.append(f"examples/{file} in {dtype}, {count[dtype]} bugs: {NOT_SIMULATED[file][dtype]}")
    return out


def needs_process(file) -> str:
    """The name of the group of processes that an example runs in: a simulator is chosen when its package comes up."""
    return next((package for package in FILES[file][0] if package in SIMULATORS), "")


@contextmanager
def subject(file, edits=()):
    """An example with its edits, as a subject; its file is there as long as the context.

    Raises
    ------
    ValueError
        If an edit's old text does not occur exactly once.
    """
    text = edited((FOLDER / file).read_text(encoding="utf-8"), edits, file)
    with TemporaryDirectory() as folder:
        path = Path(folder) / file
        path.write_text(text, encoding="utf-8")
        loaded = load(Spec(f"{path}:attn"))
        small = loaded.arrays != "numpy" and not gpu_answers()  # then a simulator runs it
        yield of_loaded(loaded, file, FILES[file][1], small)
