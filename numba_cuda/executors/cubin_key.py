"""A name for what a cubin is compiled from: the same in every process, another as soon as anything in it changes.

A body comes out of a factory, so that its source says little: tile sizes, the storage type and the routines it calls
are in its closure. So everything that can be reached from it is written down in an order of its own: code, constants,
closures, the globals it uses, and theirs. What cannot be written down has no name and is compiled each time, rather
than ever meeting another's cubin; likewise code of a module that was changed in memory.

Overloads and intrinsics hang on functions from outside, where no walk finds them; so the text of all modules of this
folder is part of the name, and that of each module a function was reached in. Then the compiler's versions, and what
the environment tells it.
"""

import dataclasses
import functools
import hashlib
import os
import sys
from importlib import metadata
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType

import numpy as np
from cuda import pathfinder
from llvmlite import ir
from numba import types
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.extending import intrinsic

PACKAGES = "numba-cuda", "numba", "llvmlite", "cuda-core", "cuda-bindings"
LIBRARIES = "nvvm", "nvJitLink"  # the compiler and the linker, wherever they were installed from
INSTALLED = {"numba", "numba_cuda", "llvmlite", "numpy", "ml_dtypes", "cuda"} | sys.stdlib_module_names
INTRINSIC = type(intrinsic(lambda context: None))
PLAIN = type(None), type(...), bool, int, float, complex, str, bytes, np.generic, np.dtype, types.Type

CONTAINERS = tuple, list, dict, set, frozenset, CodeType


class NoName(Exception):
    """A kernel is made of something that cannot be told from another by what is in it; says what."""


def name_of(body, signature, cc, driver=0):
    """The name of the cubin of a kernel.

    Parameters
    ----------
    body : function
        With its ``jit_options``, if it has any.
    signature : tuple of numba types
    cc : tuple
        What it is compiled for, as (9, 0, "a").
    driver : int
        The driver's version.

    Returns
    -------
    name : str
        The body's own name and 40 hexadecimal digits.

    Raises
    ------
    NoName
    """
    walk = Walk()
    walk.add(body)
    walk.add((getattr(body, "jit_options", None), signature, cc, driver))
    walk.add((sys.implementation.cache_tag, *compiler()))
    for file in sorted(walk.files | set(IMPORTED)):
        walk.add((os.path.basename(file), contents(file)))
    return f"{body.__name__}-{walk.digest.hexdigest()[:40]}"


class Walk:
    """A digest of everything that can be reached from what is added, and the files in which functions were found."""

    def __init__(self):
        self.digest, self.files, self._seen, self._kept = hashlib.sha256(), set(), {}, []

    def note(self, *words):
        """Add words to the digest, with ends between them."""
        for word in words:
            data = word if isinstance(word, bytes) else str(word).encode()
            self.digest.update(b"%d:" % len(data) + data)

    def add(self, value):
        """Add a value and what it is made of."""
        kind = type(value)
        self.note(kind.__name__)
        if isinstance(value, PLAIN):
            self.note(value if kind is bytes else repr(value))
            return
        if not isinstance(value, CONTAINERS):  # which may be one object here and two equal ones in the next process
            if id(value) in self._seen:  # of routines that call each other, each is written down once
                self.note(self._seen[id(value)])
                return
            self._seen[id(value)] = len(self._seen)
            self._kept.append(value)  # or its id might come back
        self._parts(value)

    def _parts(self, value):
        if isinstance(value, tuple | list):
            self._all(value)
        elif isinstance(value, dict):
            self._all(part for pair in value.items() for part in pair)
        elif isinstance(value, set | frozenset):
            self._all(sorted(value, key=repr))
        elif isinstance(value, CodeType):
            self._all((value.co_name, value.co_code, value.co_consts, value.co_names, value.co_varnames,
                       value.co_cellvars, value.co_freevars, value.co_flags))  # fmt: skip
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, CUDADispatcher):
            options = {name: option for name, option in value.targetoptions.items() if name != "extensions"}
            if value.targetoptions.get("extensions"):
                raise NoName(f"{value.py_func.__qualname__}: compiled with extensions")
            self._all((value.py_func, options))
        elif isinstance(value, INTRINSIC):
            self.add(value._defn)
        elif isinstance(value, type | BuiltinFunctionType):
            self.note(value.__module__, value.__qualname__)
            if isinstance(value, type):
                self._located(value.__module__)
        elif isinstance(value, ModuleType):
            self._module(value)
        elif isinstance(value, ir.Type):
            self.note(str(value))
        elif isinstance(value, np.ndarray):
            self._all((value.dtype, value.shape, value.tobytes()))
        elif dataclasses.is_dataclass(value):
            self._all((type(value), vars(value)))
        else:
            raise NoName(f"a {type(value).__module__}.{type(value).__qualname__} is part of it")

    def _all(self, values):
        for value in values:
            self.add(value)
        self.note("end")

    def _function(self, function):
        self.note(function.__module__, function.__qualname__)
        if self._located(function.__module__, function.__globals__):
            return
        names = used_names(function.__code__)
        known = [name for name in names if name in function.__globals__]
        self._all((function.__code__, function.__defaults__, function.__kwdefaults__))
        self._all(cell.cell_contents for cell in function.__closure__ or ())
        for name in known:
            value = function.__globals__[name]
            self.note(name)
            self.add(value)
            if isinstance(value, ModuleType) and value.__name__.split(".")[0] not in INSTALLED:
                self._all(vars(value)[part] for part in names if part in vars(value))

    def _module(self, module):
        """A module by its name; one that is only a bag of routines, by these."""
        self.note(module.__name__)
        if sys.modules.get(module.__name__) is module:
            self._located(module.__name__)
        else:
            contents = {name: part for name, part in vars(module).items() if not name.startswith("__")}
            self._all((contents,))

    def _located(self, name, namespace=None):
        """Note the file of a module; True for one that was installed and is known by its version."""
        if namespace is not None and "__spec__" not in namespace:
            return False  # no module's, but made for this function alone, as for a rule: all it uses is walked
        if name.split(".")[0] in INSTALLED:
            return True
        module = sys.modules.get(name)
        if module is None or (namespace is not None and vars(module) is not namespace):
            raise NoName(f"module {name} is not the one that was imported")
        file = getattr(module, "__file__", None)
        if not file or not os.path.isfile(file):
            raise NoName(f"module {name} has no source file")
        self.files.add(file)
        return False


def used_names(code):
    """Names of globals and attributes that code uses, that of functions inside it too, in order."""
    names = dict.fromkeys(code.co_names)
    for part in code.co_consts:
        if isinstance(part, CodeType):
            names |= dict.fromkeys(used_names(part))
    return list(names)


# The modules of this folder, and when each was changed last: what is imported is no newer, if that still holds later.
IMPORTED = {str(path): path.stat().st_mtime_ns for path in sorted(Path(__file__).parents[1].rglob("*.py"))}


@functools.cache
def contents(file):
    """A digest of a source file; NoName if it was changed since this process began to import."""
    if os.stat(file).st_mtime_ns != IMPORTED.get(file, os.stat(file).st_mtime_ns):
        raise NoName(f"{file} was changed after it was imported")
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


@functools.cache
def compiler():
    """What compiles: versions of packages, the files of compiler and linker, and what the environment tells them."""
    try:
        found = [f"{name} {metadata.version(name)}" for name in PACKAGES]
    except metadata.PackageNotFoundError as error:
        raise NoName(f"no version of {error.name}") from None
    for name in LIBRARIES:
        try:
            file = pathfinder.load_nvidia_dynamic_lib(name).abs_path
        except pathfinder.DynamicLibNotFoundError:  # then the driver links
            found.append(f"no {name}")
            continue
        stat = os.stat(file)
        found.append(f"{file} {stat.st_size} {stat.st_mtime_ns}")
    return *found, *(f"{name}={text}" for name, text in sorted(os.environ.items()) if name.startswith("NUMBA_"))
