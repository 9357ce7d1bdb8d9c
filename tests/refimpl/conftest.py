"""Shared by the tests of `refimpl`: steps as fixtures, random problems, comparison that NaN cannot pass."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers_options, for this folder's tests

STEPS = (
    "step0_standard", "step1_fused", "step2_flash_v1", "step3_flash_v2", "step4_causal", "step5_tensor_core",
    "step6_flash_v3",
)  # fmt: skip


@pytest.fixture(params=STEPS)
def step(request):
    """Each step of the ladder in turn."""
    return importlib.import_module(f"refimpl.{request.param}")


@pytest.fixture
def ladder():
    """All steps by name."""
    return {name: importlib.import_module(f"refimpl.{name}") for name in STEPS}


@pytest.fixture
def draw():
    """Make Q, K, V (and dO) of given sizes from a seed."""

    def make(Nq, Nk, B=1, Hq=1, Hk=1, d=5, dv=5, seed=0):
        rng = np.random.default_rng(seed)
        shapes = (B, Hq, Nq, d), (B, Hk, Nk, d), (B, Hk, Nk, dv), (B, Hq, Nq, dv)
        return [rng.standard_normal(shape) for shape in shapes]

    return make


@pytest.fixture
def agree():
    """Compare arrays: equal shapes, equal infinities, no NaN, finite values within tol x max(1, largest)."""

    def compare(got, want, tol):
        assert len(got) == len(want)
        for x, y in zip(got, want, strict=True):
            assert x.shape == y.shape
            finite = np.isfinite(y)
            assert np.array_equal(np.where(finite, 0, x), np.where(finite, 0, y))
            error, size = np.abs(x[finite] - y[finite]), np.abs(y[finite])
            assert error.size == 0 or error.max() <= tol * max(1, size.max())

    return compare


@pytest.fixture
def fills():
    """Evaluate a traffic line of a module's docstring at given sizes, in bytes."""

    def evaluate(module, B, Hq, Hk, Nq, Nk, d, dv, tile, diag=None, e=2, f=4, name="fills"):
        (line,) = (x for x in module.__doc__.splitlines() if x.strip().startswith(f"{name} = "))
        sizes = {"B": B, "Hq": Hq, "Hk": Hk, "Nq": Nq, "Nk": Nk, "d": d, "dv": dv, "e": e, "f": f}
        tiles = {"Br": tile.Br, "Bc": tile.Bc, "Tr": -(-Nq // tile.Br), "Tc": -(-Nk // tile.Bc)}
        words = {"sum": sum, "min": min, "max": max, "range": range, "cdiv": lambda a, b: -(-a // b)}
        scope = sizes | tiles | words | {"diag": Nk if diag is None else diag, "__builtins__": {}}
        return eval(line.split("=", 1)[1].strip(), scope)

    return evaluate
