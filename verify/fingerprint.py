"""A short name for what a kernel is, so that a record made with an older one shows as stale.

It hashes the source of the step and of everything of ours it is built from, without comments, docstrings and folders'
names, and the launch configuration. So rewording and moving change nothing; a changed instruction or tile size does.
Of a function that is written twice only what the compiler takes counts, not what the emulator runs in its place.
The compiler is not part of it: records name their package versions beside it.
"""

import ast
import hashlib
import inspect
from functools import cache
from importlib import import_module

LADDER = ("step0_standard", "step1_fused", "step2_flash_v1", "step3_flash_v2", "step4_causal")
PARTS = ("flash_cuda.parts.tile_ops", "flash_cuda.parts.elements")  # of the ladder; a test finds them to be all
TOGETHER = {"general": ("backward",)}  # judged as one kernel, so named as one
JUDGING = tuple(f"verify.{stem}" for stem in (
    "case", "cases", "dropout", "errors", "gradient_tolerance", "judge", "layouts", "option_cases", "option_recipes",
    "plain", "plain_options", "recipes", "tolerance",
))  # fmt: skip  # inputs and bounds: what a verdict is, whichever kernel it is on
PACKAGES = "flash_cuda", "refimpl"  # a kernel inlines the functions of rules too
FOLDERS = {*PACKAGES, "flash_cuda.parts", "flash_cuda.executors"}  # of modules, with nothing of their own
# Of instructions: only those that are used count.
LIBRARIES = {"flash_cuda.ptx"} | {
    f"flash_cuda.ptx.{stem}" for stem in ("asm", "global_memory", "hopper", "hopper_backward")}  # fmt: skip
HOST = {f"flash_cuda.executors.{stem}" for stem in ("gpu", "emulator", "memory", "assembler")} | {
    "flash_cuda.launch", "refimpl.frame", "refimpl.tiling"}  # fmt: skip  # around a kernel, not in it


@cache
def fingerprint(kernel, *more):
    """Twelve hexadecimal digits for a CUDA kernel.

    Parameters
    ----------
    kernel : str
        The stem of a module of flash_cuda, such as "step3_flash_v2".
    *more : str
        Stems of others that are meant with it, such as that of its gradients.
    """
    launch = import_module("flash_cuda.launch")
    digest = hashlib.sha256(repr((launch.TILES, launch.THREADS)).encode())
    own = [f"flash_cuda.{stem}" for stem in dict.fromkeys((kernel, *TOGETHER.get(kernel, ()), *more))]
    modules = [*own, *(PARTS if kernel in LADDER else built_from(*own))]
    for module in modules:
        if module not in LIBRARIES:
            digest.update(code_alone(_source(module)).encode())
    for definition in definitions_used([module for module in modules if module not in LIBRARIES]):
        digest.update(_text(definition).encode())
    return digest.hexdigest()[:12]


@cache
def judging():
    """Twelve hexadecimal digits for the default cases and what they are judged by."""
    digest = hashlib.sha256()
    for module in (*JUDGING, "refimpl.oracle"):
        digest.update(code_alone(_source(module)).encode())
    return digest.hexdigest()[:12]


def built_from(*modules) -> list[str]:
    """Names of the modules of ours that these import, and those they import, without these and the host's.

    Parameters
    ----------
    *modules : str
        Full names, such as "flash_cuda.general".
    """
    found, todo = set(modules), list(modules)
    while todo:
        new = _imported(ast.parse(_source(todo.pop()))) - HOST - found
        found |= new
        todo += new
    return sorted(found - set(modules))


def definitions_used(modules) -> list[ast.AST]:
    """The definitions in `LIBRARIES` that these modules use, and those that these use, by module and name."""
    trees = {module: ast.parse(_source(module)) for module in (*modules, *LIBRARIES)}
    tables = {module: _definitions(trees[module]) for module in LIBRARIES}
    found, todo = set(), [pair for module in modules for pair in _from_libraries(trees[module], trees[module])]
    while todo:
        module, name = pair = todo.pop()
        node = tables[module].get(name)
        if node is None or pair in found:
            continue
        found.add(pair)
        named = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        todo += [(module, other) for other in named & tables[module].keys()]
        todo += _from_libraries(node, trees[module])
    return [tables[module][name] for module, name in sorted(found)]


def _definitions(tree):
    """Name -> the statement of a module that defines it."""
    table = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            table[node.name] = node
        elif isinstance(node, ast.Assign):
            names = (part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name))
            table |= dict.fromkeys(names, node)
    return table


def _from_libraries(node, tree):
    """(library, name) of what a part of a module uses under the names that the module imports."""
    whole, single = {}, {}
    for statement in ast.walk(tree):
        for alias in statement.names if isinstance(statement, ast.ImportFrom) else ():
            target = whole if f"{statement.module}.{alias.name}" in LIBRARIES else single
            target[alias.asname or alias.name] = statement.module, alias.name
    pairs = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id in whole:
            pairs.add((".".join(whole[part.value.id]), part.attr))
        elif isinstance(part, ast.Name) and part.id in single:
            pairs.add(single[part.id])
    return sorted(pair for pair in pairs if pair[0] in LIBRARIES)


def _imported(tree):
    """Full names of the modules of ours that a module imports, anywhere in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inside if node.module in FOLDERS else inside & LIBRARIES or {node.module}
    return {name for name in names if name and name.startswith(tuple(f"{package}." for package in PACKAGES))}


def _source(module):
    return inspect.getsource(import_module(module))


def code_alone(source):
    """The syntax tree of Python source as text, without comments, docstrings and layout.

    Written out here rather than by ast.dump or ast.unparse, whose forms change with Python's version. Of an import of
    ours the folder is left out, and so is the order of imports: a kernel is the same wherever its parts are kept.
    """
    tree = ast.parse(source)
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and _ours(node.module)]
    named = sorted(node.module.rpartition(".")[2] + _text(node.names) for node in imports)
    tree.body = [node for node in tree.body if node not in imports]
    emulated = _emulated(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in emulated:
            node.body = []
    return _text(named) + _text(tree)


def _emulated(tree):
    """Names of functions that the compiler never sees: each has an overload that is written without it."""
    names = set()
    for node in tree.body:
        for decorator in getattr(node, "decorator_list", ()):
            if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", None) == "overload":
                name = decorator.args[0].id
                parts = (part for statement in node.body for part in ast.walk(statement))
                if name not in {getattr(part, "id", None) for part in parts}:
                    names.add(name)
    return names


def _ours(module):
    return bool(module) and module.split(".")[0] in PACKAGES


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
