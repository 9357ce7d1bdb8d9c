"""What is installed, which GPU answers, which executors work, and what to do about what does not."""

import json
import platform
import sys

import numpy as np
from rich.console import Console
from rich.text import Text

from verify import document, executors
from verify.cases import DEFAULT, SMALL_THREADS, SMALL_TILE
from verify.registry import KERNELS

_MARK = {"ok": ("ok", "green"), "missing": ("--", "yellow"), "broken": ("!!", "bold red")}


def add_arguments(parser):
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args) -> int:
    """Check everything; 1 if something that should work here does not."""
    checks = [*_installed(), _truth(), _emulator(), _assembler(), _gpu(), _cache(), _records()]
    if args.json:
        print(json.dumps([dict(zip(("what", "state", "found", "do"), c, strict=True)) for c in checks], indent=1))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for what, state, found, todo in checks:
            mark, style = _MARK[state]
            console.print(Text(mark, style=style), Text(f"  {what:16} {found}"), sep="")
            if todo:
                console.print(Text(f"    {'':16} do: {todo}", style="dim"))
    return 1 if any(state == "broken" for _, state, _, _ in checks) else 0


def _installed():
    """Python and the packages."""
    yield "Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}", ""
    optional = {"cuda-toolkit": "pip install -e '.[cu13]' for GPU or offline compilation", "cuda-bindings": ""}
    for name, version in document.packages().items():
        if version:
            yield name, "ok", version, ""
        elif name == "flashproof":
            yield name, "missing", "run from its folder, not installed", "pip install -e . to run it from anywhere"
        elif name == "numba-cuda" and sys.platform == "darwin":
            yield name, "missing", "no wheel for macOS", "reference, notebooks and figures work; kernels do not"
        else:
            yield name, "missing" if name in optional else "broken", "not installed", optional.get(name, "make verify")


def _attempt(what, function, todo):
    """One check that runs something: its words, or the first line of what it raises."""
    try:
        return what, "ok", function(), ""
    except Exception as error:
        return what, "broken", f"{type(error).__name__}: {error}".splitlines()[0], todo


def _hand(attention, **where):
    """Run the hand case and say how it came out."""
    from verify import testing

    def call(*arrays, **options):
        return attention(*arrays, **options, **where)

    result = testing.check(call, DEFAULT["hand"])
    if result.verdict != "pass":
        raise RuntimeError(result.reason)
    return f"the hand case passes (error {result.outputs['O'].max_abs:.1e})"


def _truth():
    def work():
        from refimpl import oracle

        problem = DEFAULT["hand"].build("fp32")
        O, _ = oracle.attention(problem.Q, problem.K, problem.V, **problem.options)
        return f"the hand case gives {np.array2string(O[0, 0, 0], precision=4)} in its first row"

    return _attempt("fp64 truth", work, "run make test, and report what fails")


def _emulator():
    def work():
        from flash_cuda.executors.emulator import Emulator
        from refimpl.tiling import Tile

        tile = Tile(SMALL_TILE, SMALL_TILE)
        return _hand(KERNELS["step3_flash_v2"].attention(), on=Emulator(), tile=tile, threads=SMALL_THREADS)

    return _attempt("emulator", work, "numba-cuda has to import: see above")


def _assembler():
    def work():
        from numba.cuda.cudadrv import nvvm

        nvvm.NVVM()
        return "NVVM loads: kernels can be compiled offline"

    what, state, found, todo = _attempt("assembler", work, "pip install -e '.[dev]' to compile kernels without a GPU")
    return what, "missing" if state == "broken" else state, found, todo


def _gpu():
    if reason := executors.gpu_missing():
        todo = "kernels are emulated at small shapes instead; with an NVIDIA driver, make verify installs what it needs"
        return "GPU", "missing", reason, todo

    def work():
        from numba import cuda

        device = cuda.get_current_device()
        words = _hand(KERNELS["step3_flash_v2"].attention(), on=executors.open_executor("gpu"))
        cc = ".".join(str(part) for part in device.compute_capability)
        return f"{executors.device_name('gpu')}, compute capability {cc}, driver {document.driver()}: {words}"

    return _attempt("GPU", work, "a driver of version 580 or newer for CUDA 13, or pip install -e '.[cu12]'")


def _cache():
    """Where compiled kernels are kept, and how much is there."""
    from flash_cuda.executors import cubin_cache

    where = cubin_cache.folder()
    if where is None:
        return "cubin cache", "missing", "off", "unset FLASHPROOF_CACHE, or every process compiles its kernels anew"
    sizes = [file.stat().st_size for file in where.glob("*.cubin")]
    return "cubin cache", "ok", f"{where}: {len(sizes)} kernels, {sum(sizes) / 2**20:.1f} MiB", ""


def _records():
    record = document.newest_gpu()
    if record is None:
        return "GPU records", "missing", "none in verify/records", ""
    n = record["counts"]
    return "GPU records", "ok", f"{record['device']}, {record['made'][:10]}: {n['pass']} passed, {n['fail']} failed", ""
