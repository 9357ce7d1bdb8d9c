"""The offline executor: a launch becomes the linked cubin that a GPU loads, and a report of what is in it.

Needs NVVM and nvJitLink (the ``dev`` extra), but neither a GPU nor a driver. ``launch`` compiles the body it is
given for the argument types it is given and runs nothing; the steps' own ``attention`` functions drive it.
"""

import contextlib
import re
import struct
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from numba.cuda import compiler, types
from numba.cuda.cudadrv import nvvm
from numba.cuda.cudadrv.driver import _have_nvjitlink
from numba.cuda.np.numpy_support import from_dtype

from flash_cuda.executors.cubin_cache import Cubin
from flash_cuda.parts.elements import STORAGE


@dataclass(frozen=True)
class Report:
    """What one kernel needs on one architecture, read from the linked cubin.

    ``stack_bytes`` counts a thread's local memory, spilled registers included; ``f64`` the fp64 instructions of
    the linked PTX.
    """

    kernel: str
    arch: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    f64: int


def parse_arch(arch):
    """"sm_90a" -> (9, 0, "a"); "sm_80" -> (8, 0)."""
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch)
    if not match:
        raise ValueError(f"arch: expected a name like sm_80 or sm_90a, got {arch!r}")
    major, minor, suffix = match.groups()
    return (int(major), int(minor), suffix) if suffix else (int(major), int(minor))


@contextlib.contextmanager
def _pretend_device(cc):
    """Numba asks the current device for its compute capability whenever a kernel calls a device function."""
    from numba.cuda import dispatcher

    real = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc[:2])
    try:
        yield
    finally:
        dispatcher.get_current_device = real


def numba_type(value):
    """The Numba type that a launch gives an argument: arrays with any strides, int32, float32, tuples of these."""
    if isinstance(value, tuple):
        return types.BaseTuple.from_types([numba_type(part) for part in value])
    if is_array(value):
        return types.Array(from_dtype(device_dtype(value.dtype)), value.ndim, "A")
    return types.float32 if isinstance(value, (float, np.floating)) else types.int32


def is_array(value):
    """Whether an argument is an array to a kernel, rather than a number."""
    return hasattr(value, "dtype") and hasattr(value, "ndim") and not isinstance(value, np.generic)


def device_dtype(dtype):
    """The dtype under which an array's elements travel: bf16 as uint16, anything else as itself."""
    return next((device for face, device in STORAGE.values() if dtype == face), np.dtype(dtype))


class Assembler:
    """Executor that assembles for one or more architectures. ``reports`` holds a :class:`Report` a launch and each.

    Parameters
    ----------
    archs : str
        Names like sm_80 or sm_90a.
    """

    where = "assembled"

    def __init__(self, *archs):
        self.ccs = {arch: parse_arch(arch) for arch in archs or ("sm_90a",)}
        self.reports = []
        self._known = {}  # of each kernel that was assembled for such arguments before

    def input(self, name, array):
        return array

    def empty(self, name, shape, dtype):
        # A stride-0 array of the right shape: only its type is looked at.
        return np.broadcast_to(np.zeros((), dtype), shape)

    multiprocessors = 132

    def tensor_maps(self, *tiles):
        return np.zeros(16 * len(tiles), np.uint64)

    def result(self, array):
        return array

    def launch(self, body, blocks, threads, args, shared=0):
        key = body, tuple(numba_type(a) for a in args)
        if key not in self._known:
            self._known[key] = [
                Report(kernel=body.__name__, arch=arch, f64=len(re.findall(r"\.f64\b", ptx)), **resources(cubin))
                for arch, (cubin, ptx) in assemble(*key, self.ccs).items()
            ]
        self.reports += self._known[key]


def assemble(body, signature, ccs):
    """{architecture: (the cubin that a launch would load, the PTX it was made from after linking)}.

    Typing and lowering do not depend on the architecture and are done once.
    """
    first = next(iter(ccs.values()))
    with _pretend_device(first):
        library = _library(body, signature, first)
    return {arch: (bytes(library.get_cubin(cc=cc).code), library.get_lto_ptx(cc=cc)) for arch, cc in ccs.items()}


def compile_cubin(body, signature, cc):
    """The `Cubin` of a kernel for the current device, whose compute capability is given, as (9, 0, "a")."""
    library = _library(body, signature, cc, _have_nvjitlink())
    return Cubin(bytes(library.get_cubin(cc=cc).code), library._entry_name)


def _library(body, signature, cc, lto=True):
    """A kernel typed and lowered, in Numba's own container, which translates and links it when asked.

    Takes numba-cuda's own steps (dispatcher._Kernel, 0.30), which have no public face for use without a device; all but
    the PTX before linking, which nothing here needs.
    """
    compiled = compiler.compile_cuda(
        body, types.void, signature, nvvm_options={"fastmath": False, "opt": 3}, cc=cc[:2], lto=lto)
    library = compiled.library
    library._entry_name = compiled.fndesc.llvm_func_name
    kernel = library.get_function(compiled.fndesc.llvm_func_name)
    compiler.kernel_fixup(kernel, False)
    nvvm.set_launch_bounds(kernel, getattr(body, "jit_options", {}).get("launch_bounds"))
    return library


def resources(cubin):
    """Registers, shared and stack bytes of the one kernel in an ELF cubin.

    The sections .nv.info* hold (format, attribute, size-or-value) records; attributes 0x11 (frame size) and 0x2f
    (register count) carry (symbol, value). Shared memory is the size of .nv.shared.<kernel>.
    """
    found = {"registers": 0, "stack_bytes": 0, "shared_bytes": 0}
    for name, size, data in _sections(cubin):
        if name.startswith(".nv.shared."):
            found["shared_bytes"] = max(found["shared_bytes"], size)
        if not name.startswith(".nv.info"):
            continue
        at = 0
        while at + 4 <= len(data):
            form, attribute, value = struct.unpack_from("<BBH", data, at)
            at += 4
            if form != 4:  # only form 4 is followed by ``value`` bytes of payload
                continue
            if attribute in (0x11, 0x2F):
                key = "stack_bytes" if attribute == 0x11 else "registers"
                found[key] = max(found[key], struct.unpack_from("<II", data, at)[1])
            at += value
    if not found["registers"]:
        raise RuntimeError("no register count in the cubin: its format is not the one this reader knows")
    return found


def _sections(elf):
    """(name, size, bytes) of each section of a 64-bit little-endian ELF file."""
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    step, count, names_at = struct.unpack_from("<HHH", elf, 0x3A)
    if elf[:4] != b"\x7fELF" or not offset or names_at >= count:
        raise RuntimeError("not a cubin: no ELF section table")
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, offset + k * step) for k in range(count)]
    names = elf[headers[names_at][4]:]
    for header in headers:
        name = names[header[0]:names.index(b"\0", header[0])].decode()
        nobits = header[1] == 8
        yield name, header[5], b"" if nobits else elf[header[4]:header[4] + header[5]]
