"""Copies of a kernel's modules with something done at its barriers: one taken out, or warps held up around all of them.

Between two barriers a GPU runs warps in whatever order it likes, and mostly it likes the same one. A kernel that needs
one order is wrong, and may be right a million times. With some warps asleep next to each barrier other orders come up.
"""

import ast
import re
from functools import cache

from verify.mutants.graft import Copies, reach, source

# Calls at which threads wait for one another. A wgmma's wait is a thread's own business.
WAITS = re.compile(r"syncthreads|barrier|(^|_)wait")
ASLEEP_NS = 20_000  # longer than a phase between two barriers runs
SHARE = 3  # one warp in so many sleeps at a site
# What instructions are made of, and what stands for a GPU: no kernel's own waiting.
BELOW = ("flash_cuda.ptx", "flash_cuda.executors")


def modules(*roots: str) -> list[str]:
    """The modules with statements that wait: of those given and of all they import, in alphabetical order.

    Parameters
    ----------
    roots : str
        Such as "flash_cuda.step3_flash_v2".
    """
    found = {name for root in roots for name in reach(root) if name.startswith("flash_cuda.")}
    return sorted(name for name in found if not name.startswith(BELOW) and sites(name))


def sites(module: str) -> list[ast.Expr]:
    """The statements of a module that wait, in order."""
    return _ordered(ast.parse(source(module)))


def barriers(module: str) -> int:
    """How many `syncthreads` a module has."""
    return len(_barriers(sites(module)))


def without(module: str, k: int) -> Copies:
    """A view of our modules in which the k-th `syncthreads` of one does nothing."""
    return Copies({module: _without(module, k)})


def delayed(changed, seed: int, stall=None, gone=None) -> Copies:
    """A view of our modules in which some warps sleep before and after each statement that waits; others by each seed.

    Parameters
    ----------
    changed : sequence of str
        The modules in which they sleep.
    seed : int
    stall : callable, optional
        What is called there with the module's number and that of the place; `stalling(seed)` if not given.
    gone : tuple of (str, int), optional
        A module, and which `syncthreads` of it does nothing.
    """
    texts = {}
    for number, module in enumerate(changed):
        text = _without(*gone) if gone and gone[0] == module else source(module)
        tree = ast.parse(text)
        place = {id(node): 2 * k for k, node in enumerate(_ordered(tree))}

        def around(node, place=place, number=number):
            if id(node) not in place:
                return [node]
            before, after = (ast.parse(f"stall({number}, {place[id(node)] + k})").body[0] for k in (0, 1))
            return [before, node, after]

        texts[module] = _unparsed(_Edit(around).visit(tree))
    return Copies(texts, {"stall": stall or stalling(seed)})


@cache
def stalling(seed: int):
    """The device function that puts some warps to sleep, by block, warp, module, place and seed."""
    from numba import cuda
    from numba.cuda.types import uint32

    @cuda.jit(device=True)
    def stall(module, site):
        """Sleep, if it is this warp's turn here."""
        where = cuda.blockIdx.x * 31 + (cuda.threadIdx.x // 32) * 7 + module * 17 + site * 13 + seed * 101
        if ((where * 2654435761) >> 7) % SHARE == 0:
            cuda.nanosleep(uint32(ASLEEP_NS))

    return stall


class _Edit(ast.NodeTransformer):
    """Replace expression statements by lists of statements."""

    def __init__(self, change):
        self._change = change

    def visit_Expr(self, node):
        return self._change(node)


def _without(module, k):
    """The source of a module with its k-th `syncthreads` gone."""
    tree = ast.parse(source(module))
    removed = _barriers(_ordered(tree))[k]
    return _unparsed(_Edit(lambda node: [ast.Pass()] if node is removed else [node]).visit(tree))


def _unparsed(tree):
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


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
