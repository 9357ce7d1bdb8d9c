"""Shipped rules with one thing wrong (as in the tests of `refimpl`), put in place of those that kernels are given."""

import inspect
import sys
from contextlib import contextmanager
from pathlib import Path

from flash_cuda import backward, general
from flash_cuda.parts import rules, vocabulary
from refimpl import mask_tensor, masks, scores, standard

sys.path.insert(0, str(Path(__file__).parents[1] / "refimpl"))
from helpers_edits import mutants

__all__ = ["functions", "mutants", "planted"]

MODULES = (masks, mask_tensor, scores, standard)
CACHES = (vocabulary.device, rules._functions, general.make_kernel, backward.make_dq_kernel, backward.make_dkv_kernel)


def functions(*endings):
    """(name, home module) of every shipped rule function whose name ends so."""
    return [
        (name, module)
        for module in MODULES
        for name, fn in vars(module).items()
        if name.endswith(endings) and inspect.isfunction(fn) and fn.__module__ == module.__name__
    ]


@contextmanager
def planted(name, mutant):
    """Have every module that names the function find the mutant, and compiled kernels forgotten before and after."""
    homes = [(module, getattr(module, name)) for module in MODULES if hasattr(module, name)]
    try:
        for module, _ in homes:
            setattr(module, name, mutant)
        _forget()
        yield
    finally:
        for module, fn in homes:
            setattr(module, name, fn)
        _forget()


def _forget():
    for cache in CACHES:
        cache.cache_clear()
