"""Bugs planted in the strangers' kernels: text edits, and the name that a diagnosis should give."""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import ModuleType

OUTSIDE = ""  # expected of a bug that no model of the library has: no name at all


@dataclass(frozen=True)
class Planted:
    """One bug in one kernel.

    Attributes
    ----------
    stem : str
        Module of `strangers`.
    bug : str
        In plain words.
    expected : str
        The fault's name, or OUTSIDE.
    edits : tuple of (old, new)
        Each old text occurs once.
    dtypes : tuple of str
    """

    stem: str
    bug: str
    expected: str
    edits: tuple
    dtypes: tuple = ("fp32",)

    @property
    def id(self) -> str:
        """What reports call it."""
        return f"{self.stem}: {self.bug}"

    def module(self) -> ModuleType:
        """The kernel with the bug."""
        return changed(self.stem, self.edits)


@cache
def changed(stem, edits=()) -> ModuleType:
    """A stranger's module after edits.

    Raises
    ------
    ValueError
        If an edit's old text does not occur exactly once.
    """
    text = edited((files("verify.diagnose.strangers") / f"{stem}.py").read_text(encoding="utf-8"), edits, stem)
    module = ModuleType(f"stranger_{stem}")
    exec(compile(text, f"<planted in {stem}>", "exec"), module.__dict__)
    return module


def edited(text, edits, name) -> str:
    """A kernel's text after edits.

    Raises
    ------
    ValueError
        As `changed`.
    """
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{name}: {old!r} occurs {text.count(old)} times")
        text = text.replace(old, new)
    return text


def _read() -> list[Planted]:
    """The list beside this module."""
    rows = json.loads((files("verify.diagnose") / "planted.json").read_text(encoding="utf-8"))
    return [
        Planted(
            row["kernel"],
            row["bug"],
            row["expected"],
            tuple(map(tuple, row["edits"])),
            tuple(row.get("dtypes", ("fp32",))),
        )
        for row in rows
    ]


HALF = ("fp16", "bf16")
PLANTED = _read()
RIGHT = {stem: HALF if stem == "half" else ("fp32", "fp16", "bf16")
         for stem in ("blockwise", "paper", "split", "whole", "scan", "half", "tiled_back")}  # fmt: skip
