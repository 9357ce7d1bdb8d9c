"""Run a step whose source has been changed: the emulator and the judge are tested with faults, not with words."""

import importlib.util
import inspect
import re
import types


def step_with(step, *edits, **routines):
    """The module ``flash_cuda.<step>`` with each (old, new) text edit applied once; likewise its modules of routines.

    These are named as keywords: ``tile_ops=[(old, new)]``.

    An edit whose old text is not there exactly once raises, so a mutation cannot silently stop applying.
    """
    module = _edited(step, edits)
    for name, changes in ({"tile_ops": ()} | routines).items():
        setattr(module, name, getattr(_edited(name, changes), name))
    return module


def without_line(step, text, occurrence):
    """(old, new) texts that delete the n-th line of the step's source containing ``text``."""
    lines = source(step).splitlines(keepends=True)
    hits = [k for k, line in enumerate(lines) if text in line]
    k = hits[occurrence]
    # A few lines of context make the edit unique.
    before, after = "".join(lines[k - 3 : k]), "".join(lines[k + 1 : k + 4])
    return before + lines[k] + after, before + after


def edit(name, pattern, new):
    """(old, new): the source of ``flash_cuda.<name>``, and that changed at the first place that a pattern matches."""
    old = source(name)
    changed = re.sub(pattern, new, old, count=1, flags=re.MULTILINE)
    if changed == old:
        raise ValueError(f"{name}: nothing matches {pattern!r}")
    return old, changed


def source(step):
    """The source text of a step, or of a module of routines."""
    return inspect.getsource(importlib.import_module(full_name(step)))


def full_name(stem):
    """``flash_cuda.<stem>``, or ``flash_cuda.parts.<stem>`` if it is there."""
    inside = f"flash_cuda.parts.{stem}"
    return inside if importlib.util.find_spec(inside) else f"flash_cuda.{stem}"


def _edited(name, edits):
    text = source(name)
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{name}: {old!r} occurs {text.count(old)} times")
        text = text.replace(old, new)
    module = types.ModuleType(full_name(name))
    exec(compile(text, f"<edited {name}>", "exec"), module.__dict__)
    return module
