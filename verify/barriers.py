"""Copies of a kernel's module with something done at its barriers: one taken out, or warps held up around all of them.

Between two barriers a GPU runs warps in whatever order it likes, and mostly it likes the same one. A kernel that needs
one order is wrong, and may be right a million times. With some warps asleep next to each barrier other orders come up.
"""

import ast
import inspect
import re
from functools import cache
from importlib import import_module
from types import ModuleType

# Calls at which threads wait for one another. A wgmma's wait is a thread's own business.
WAITS = re.compile(r"syncthreads|barrier|(^|_)wait")
ASLEEP_NS = 20_000  # longer than a phase between two barriers runs
SHARE = 3  # one warp in so many sleeps at a site


def sites(module: str) -> list[ast.Expr]:
    """The statements of a module that wait, in order.

    Parameters
    ----------
    module : str
        Such as "flash_cuda.step3_flash_v2".
    """
    return _ordered(ast.parse(_source(module)))


def without(module: str, k: int) -> ModuleType:
    """A copy of a module in which its k-th `syncthreads` does nothing."""
    tree = ast.parse(_source(module))
    removed = _barriers(_ordered(tree))[k]
    return _made(module, _Edit(lambda node: [ast.copy_location(ast.Pass(), node)] if node is removed else [node]), tree)


def barriers(module: str) -> int:
    """How many `syncthreads` a module has."""
    return len(_barriers(sites(module)))


def delayed(module: str, seed: int, stall=None, gone: int | None = None) -> ModuleType:
    """A copy of a module in which some warps sleep before and after each statement that waits; others by each seed.

    Parameters
    ----------
    module : str
    seed : int
    stall : callable, optional
        What is called there with the number of the place; `stalling(seed)` if not given.
    gone : int, optional
        Which `syncthreads` does nothing.
    """
    tree = ast.parse(_source(module))
    waits = _ordered(tree)
    place = {id(node): 2 * k for k, node in enumerate(waits)}
    removed = None if gone is None else _barriers(waits)[gone]

    def around(node):
        if id(node) not in place:
            return [node]
        calls = [ast.parse(f"stall({place[id(node)] + after})").body[0] for after in (0, 1)]
        inner = ast.Pass() if node is removed else node
        return [ast.copy_location(part, node) for part in (calls[0], inner, calls[1])]

    return _made(module, _Edit(around), tree, stall=stall or stalling(seed))


@cache
def stalling(seed: int):
    """The device function that puts some warps to sleep, by block, warp, place and seed."""
    from numba import cuda
    from numba.cuda.types import uint32

    @cuda.jit(device=True)
    def stall(site):
        """Sleep, if it is this warp's turn here."""
        mixed = (cuda.blockIdx.x * 31 + (cuda.threadIdx.x // 32) * 7 + site * 13 + seed * 101) * 2654435761
        if (mixed >> 7) % SHARE == 0:
            cuda.nanosleep(uint32(ASLEEP_NS))

    return stall


class _Edit(ast.NodeTransformer):
    """Replace expression statements by lists of statements."""

    def __init__(self, change):
        self._change = change

    def visit_Expr(self, node):
        return self._change(node)


def _made(module, edit, tree, **names):
    """Run the changed tree as a module of the same name that nobody else sees."""
    copy = ModuleType(module)
    copy.__dict__.update(names)
    exec(compile(ast.fix_missing_locations(edit.visit(tree)), f"<{module}, changed>", "exec"), copy.__dict__)
    return copy


def _ordered(tree):
    return sorted(_waits(tree), key=lambda node: (node.lineno, node.col_offset))


def _barriers(nodes):
    return [node for node in nodes if name_of(node) == "syncthreads"]


def _waits(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name = name_of(node)
            if WAITS.search(name) and "wgmma" not in name:
                yield node


def name_of(node):
    """Name of the function that a statement calls."""
    called = node.value.func
    return getattr(called, "attr", None) or getattr(called, "id", "")


def _source(module):
    return inspect.getsource(import_module(module))
