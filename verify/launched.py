"""Which modules the kernels of a call are made of: a body's own, and those of all routines that it can reach."""

from types import CodeType, FunctionType, ModuleType

from numba.cuda.dispatcher import CUDADispatcher

from flash_cuda.executors.emulator import Emulator


class Witness(Emulator):
    """An executor that runs nothing and notes what it is asked to launch; results are as they were allocated."""

    def __init__(self):
        super().__init__()
        self.modules = set()

    def launch(self, body, blocks, threads, args, shared=0):
        """Note the modules of a body."""
        self.modules |= modules_of(body)


def modules_of(body) -> set[str]:
    """The modules in which a function and everything it may call were written.

    Parameters
    ----------
    body : function
        A kernel's, as launches take it.
    """
    found, seen, left = set(), set(), [body]
    while left:
        value = left.pop()
        if isinstance(value, CUDADispatcher):
            value = value.py_func
        if id(value) in seen or not isinstance(value, FunctionType | ModuleType | tuple):
            continue
        seen.add(id(value))
        if isinstance(value, tuple):
            left += value
        elif isinstance(value, ModuleType):  # a bag of routines; a module that was imported is gone through by name
            left += () if value.__spec__ else vars(value).values()
        else:
            found.add(value.__module__)
            left += [cell.cell_contents for cell in value.__closure__ or ()]
            left += _globals(value)
    return found


def _globals(function):
    """What a function's names stand for in its module, and in modules that are named there."""
    names = _names(function.__code__)
    held = [function.__globals__[name] for name in names if name in function.__globals__]
    inner = [vars(m)[name] for m in held if isinstance(m, ModuleType) for name in names if name in vars(m)]
    return held + inner


def _names(code):
    names = set(code.co_names)
    for part in code.co_consts:
        if isinstance(part, CodeType):
            names |= _names(part)
    return names
