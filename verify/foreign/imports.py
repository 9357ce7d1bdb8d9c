"""What a stranger's file imports, and simulators in the place of a GPU for what it does."""

import ast
import ctypes
import os
import sys
from functools import cache

# The package, and the switch that it looks at when it is first imported.
SIMULATORS = {"numba": "NUMBA_ENABLE_CUDASIM", "triton": "TRITON_INTERPRET"}


def imports(path) -> set[str]:
    """The packages that a file imports anywhere; "numba" only where that is numba.cuda."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError):
        return set()  # importing the file will say what is wrong
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
        else:
            continue
        # Numba compiles for the CPU too, and then takes NumPy arrays.
        found |= {name.split(".")[0] for name in names if name.split(".")[0] != "numba" or "numba.cuda" in name}
    return found


def simulate_without_gpu(path):
    """Where no GPU answers, have Numba and Triton come up as their own simulators. Both decide when first imported."""
    names = imports(path)
    for package, switch in SIMULATORS.items():
        if package in names and package not in sys.modules and not gpu_answers():
            os.environ[switch] = "1"


def unsimulated(error) -> str:
    """What to set for a simulator, if an exception says that no GPU is there; else empty."""
    signs = {"numba": type(error).__name__ == "CudaSupportError", "triton": "active drivers" in str(error)}
    package = next((package for package, shown in signs.items() if shown and not gpu_answers()), None)
    if package is None:
        return ""
    return f"no GPU: set {SIMULATORS[package]}=1 before {package} is first imported, as in conftest.py, to simulate one"


def simulated() -> bool:
    """Whether this process runs GPU code in a simulator."""
    return any(package in sys.modules and os.environ.get(switch) == "1" for package, switch in SIMULATORS.items())


@cache
def bf16_excuse() -> str:
    """Why nothing can be said of bf16 here; empty where Triton is not simulated, or multiplies bf16 tiles rightly."""
    if "triton" not in sys.modules or os.environ.get(SIMULATORS["triton"]) != "1":
        return ""
    try:
        from verify.foreign.triton_bf16 import error

        far = error()
    except Exception:  # whatever is wrong with Triton here, the kernel's own calls will say it
        return ""
    told = f"Triton's interpreter multiplies bf16 tiles wrongly here (a tl.dot of ones is off by {far:.0e})"
    return "" if far < 0.1 else f"{told}, and so does this kernel in it: judge bf16 on a GPU"


@cache
def gpu_answers() -> bool:
    """Whether the CUDA driver is there and sees a device; asked without importing what the answer decides on."""
    for name in ("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1", "nvcuda.dll"):
        try:
            driver, count = ctypes.CDLL(name), ctypes.c_int(0)
        except OSError:
            continue
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    return False
