"""Edits at work: copies of the modules that an edit reaches, in memory, beside the originals.

A copy is run from the shipped source with the edit in it. Modules that import an edited one, at whatever remove, are
copied too, so that they find the copy; all others are the originals. An import inside a copy goes through a hook of its
own, so neither `sys.modules` nor any module of the process is changed, and nothing is written to disk.
"""

import ast
import builtins
import importlib
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace

from verify.mutants.mutant import FOLDERS

PACKAGES = tuple(FOLDERS.values())
# Rules are run with globals of their own, so a probe names what it raises in full.
STOP = 'raise __import__("verify.mutants.graft", fromlist=["Reached"]).Reached\n'
_number = count()


class DoesNotApply(ValueError):
    """The text that an edit replaces is not where it should be, or is there more than once. One line."""


class Reached(Exception):
    """A probe was run: the edited place is on the way of the call."""


@cache
def source(name) -> str:
    """The shipped text of a module."""
    return Path(find_spec(name).origin).read_text(encoding="utf-8")


def edited(edits) -> dict[str, str]:
    """Apply edits, one after the other.

    Parameters
    ----------
    edits : sequence of Edit

    Returns
    -------
    dict of str to str
        Module name -> changed source.

    Raises
    ------
    DoesNotApply
        An edit's old text does not occur exactly once in its function, or changes nothing.
    """
    texts = {}
    for edit in edits:
        text = texts.get(edit.module) or source(edit.module)
        start, stop = _extent(text, edit)
        inside = text[start:stop]
        where = f"{edit.path}, {edit.function or 'module'}"
        if inside.count(edit.old) != 1 or edit.new == edit.old:
            found = f"occurs {inside.count(edit.old)} times" if edit.new != edit.old else "is replaced by itself"
            raise DoesNotApply(f"{where}: {edit.old!r} {found}")
        texts[edit.module] = text[:start] + inside.replace(edit.old, edit.new) + text[stop:]
        _parsed(texts[edit.module], where)
    return texts


def _extent(text, edit):
    """Where in the text the edit's function begins and ends, in characters."""
    if not edit.function:
        return 0, len(text)
    kinds = ast.FunctionDef, ast.ClassDef
    found = [node for node in ast.walk(_parsed(text, edit.path)) if isinstance(node, kinds)]
    found = [node for node in found if node.name == edit.function]
    if len(found) != 1:
        raise DoesNotApply(f"{edit.path}: {len(found)} functions are called {edit.function}")
    lines = text.splitlines(keepends=True)
    return tuple(len("".join(lines[:n])) for n in (found[0].lineno - 1, found[0].end_lineno))


def _parsed(text, where):
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise DoesNotApply(f"{where}: the text is no Python any more ({error.msg}, line {error.lineno})") from None


def probed(edits) -> dict[str, str]:
    """As `edited`, with a raise of `Reached` before the statement in which each edit of a function begins."""
    texts = edited(edits)
    for edit in (edit for edit in edits if edit.function):
        text = texts[edit.module]
        start, stop = _extent(text, edit)
        line = text.count("\n", 0, start + text[start:stop].index(edit.new or "\n")) + 1
        texts[edit.module] = _stopped_at(text, line)
    return texts


def _stopped_at(text, line):
    """The text with a raise before the innermost statement that covers the line, or before the next one."""
    inner = None
    for node in ast.walk(ast.parse(text)):
        for body in (getattr(node, name, []) for name in ("body", "orelse", "finalbody")):
            for stmt in body if isinstance(body, list) else []:
                if isinstance(stmt, ast.stmt) and stmt.lineno <= line <= stmt.end_lineno:
                    is_elif = isinstance(node, ast.If) and body is node.orelse and isinstance(stmt, ast.If)
                    if not is_elif and (inner is None or stmt.lineno >= inner.lineno):
                        inner = stmt
    lines = text.splitlines(keepends=True)
    first = min([inner.lineno, *(d.lineno for d in getattr(inner, "decorator_list", []))])
    lines.insert(first - 1, " " * inner.col_offset + STOP)
    return "".join(lines)


@cache
def _imports(name) -> frozenset:
    """Modules of ours that a module imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(m for m in found if m.startswith(tuple(f"{p}." for p in PACKAGES)) and _is_module(m))


@cache
def _is_module(name):
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@cache
def reach(name) -> frozenset:
    """All modules of ours that a module imports, at whatever remove, and itself."""
    found, left = {name}, [name]
    while left:
        new = _imports(left.pop()) - found
        found |= new
        left += new
    return frozenset(found)


class Copies:
    """A view of our modules in which some have another source.

    Parameters
    ----------
    texts : dict of str to str
        Module name -> source.
    names : dict of str to object
        What all copies find besides, as globals.
    """

    def __init__(self, texts, names=None):
        self._texts, self._names = texts, names or {}
        self._copies = {}
        self._mark = next(_number)

    def load(self, name) -> ModuleType:
        """Import a module: a copy if a changed one is in its reach, else the original.

        Parameters
        ----------
        name : str
            Dotted, as for `importlib.import_module`, in whose place it can be given.
        """
        ours = name.split(".")[0] in PACKAGES and _is_module(name)
        if not ours or not reach(name) & self._texts.keys():
            return import_module(name)
        if name not in self._copies:
            self._copy(name)
        return self._copies[name]

    def _copy(self, name):
        text = self._texts.get(name) or source(name)
        file = f"<mutant {self._mark} of {name}>"
        module = ModuleType(name)
        module.__file__ = file
        module.__dict__.update(self._names)
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._import}
        self._copies[name] = module  # before it runs, as modules may import each other
        exec(compile(text, file, "exec"), module.__dict__)
        return module

    def _import(self, name, globals=None, locals=None, fromlist=(), level=0):
        """What an import statement calls inside a copy."""
        if name == "importlib":
            return SimpleNamespace(**vars(importlib) | {"import_module": self.load})
        if level or not fromlist or name.split(".")[0] not in PACKAGES:
            return __import__(name, globals, locals, fromlist, level)
        if name not in PACKAGES:
            return self.load(name)
        # `from package import module`: a module each, or what the package itself defines.
        whole = {item: f"{name}.{item}" for item in fromlist}
        return SimpleNamespace(
            **{
                item: self.load(path) if _is_module(path) else getattr(import_module(name), item)
                for item, path in whole.items()
            }
        )


class Graft(Copies):
    """A view of our modules in which some edits have been made.

    Parameters
    ----------
    edits : sequence of Edit
    probe : bool
        Raise `Reached` where an edit begins, to tell whether a call comes by.

    Raises
    ------
    DoesNotApply
        As `edited`.

    Examples
    --------
    >>> attention = Graft(MUTANTS["O_not_rescaled"].edits).load("flash_cuda.step3_flash_v2").attention
    """

    def __init__(self, edits, probe=False):
        super().__init__(probed(edits) if probe else edited(edits))
