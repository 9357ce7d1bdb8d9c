"""A short name for what a kernel is, so that a record made with an older one shows as stale.

It hashes the source of the step and of everything of ours it is built from, without comments and docstrings, and the
launch configuration. So rewording changes nothing, while a changed instruction or tile size does.
The compiler is not part of it: records name their package versions beside it.
"""

import ast
import hashlib
import inspect
from functools import cache
from importlib import import_module

PARTS = ("tile_ops", "elements")  # what every body is built from
RULES = ("rule_ops", "vocabulary")  # and what those with rules have besides


@cache
def fingerprint(kernel):
    """Twelve hexadecimal digits for a registered CUDA kernel.

    Parameters
    ----------
    kernel : str
        A stem such as "step3_flash_v2".
    """
    launch = import_module("flash_cuda.launch")
    digest = hashlib.sha256(repr((launch.TILES, launch.THREADS)).encode())
    for stem in (kernel, *PARTS, *(RULES if kernel == "general" else ())):
        digest.update(code_alone(inspect.getsource(import_module(f"flash_cuda.{stem}"))).encode())
    return digest.hexdigest()[:12]


def code_alone(source):
    """The syntax tree of Python source as text, without comments, docstrings and layout.

    Written out here rather than by ast.dump or ast.unparse, whose forms change with Python's version.
    """
    return _text(ast.parse(source))


def _text(node):
    if isinstance(node, list):
        return "[" + ",".join(_text(item) for item in node) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    # A version that adds a field leaves it empty in code that does not use it.
    fields = ((name, _without_docstring(value) if name == "body" else value) for name, value in ast.iter_fields(node))
    inside = ",".join(f"{name}={_text(value)}" for name, value in fields if value is not None and value != [])
    return f"{type(node).__name__}({inside})"


def _without_docstring(body):
    first = body[0] if isinstance(body, list) and body else None
    text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return body[1:] if text else body
