"""Where a kernel runs: the GPU if one answers, else the emulator; opened afresh for every run."""

import platform
from functools import cache


@cache
def gpu_missing() -> str | None:
    """Why no GPU can be used; None if one can."""
    try:
        from numba import cuda
    except ImportError as error:
        return f"numba.cuda does not import: {error}"
    if getattr(cuda, "implementation", "") != "NVIDIA":
        return "numba.cuda is Numba's built-in target, not NVIDIA's numba-cuda"
    return None if cuda.is_available() else "no CUDA GPU answers"


def default() -> str:
    """ "gpu" or "emulated", whichever is there."""
    return "emulated" if gpu_missing() else "gpu"


def open_executor(kind: str, seed: int = 0):
    """An executor for one run.

    Parameters
    ----------
    kind : "gpu" or "emulated"
    seed : int
        Order of the emulated threads; a GPU chooses its own.
    """
    if kind == "gpu":
        from flash_cuda.executors.gpu import Gpu

        return Gpu(guard=True)
    from flash_cuda.executors.emulator import Emulator

    return Emulator(seed=seed)


@cache
def device_name(kind: str) -> str:
    """What to call the machine in a report."""
    if kind == "gpu":
        from numba import cuda

        name = cuda.get_current_device().name
        return name.decode() if isinstance(name, bytes) else name
    return f"CPU ({platform.machine()})"
