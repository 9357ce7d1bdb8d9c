"""What ptxas says of a Hopper kernel that the linker keeps to itself: whether its products run one by one."""

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

from flash_cuda.executors import assembler

ARCH = "sm_90a"
MOST_SHARED, RESERVED = 227 * 1024, 1024  # of a block on sm_90: what it may ask for, what the system keeps
SERIALISED = re.compile(r"wgmma.*(serializ|ignored)|C75\d\d")


def ptxas():
    """The assembler of the dev extra, or any on the path."""
    folders = Path(sysconfig.get_path("purelib"), "nvidia").glob("*/bin/ptxas")
    return next(map(str, folders), None) or shutil.which("ptxas")


class Kept(assembler.Assembler):
    """The offline executor, keeping the PTX that each cubin is linked from; ``kernels`` has (name, PTX, resources)."""

    def __init__(self):
        super().__init__(ARCH)
        self.kernels = []

    def launch(self, body, blocks, threads, args, shared=0):
        signature = tuple(assembler.numba_type(arg) for arg in args)
        (cubin, ptx), = assembler.assemble(body, signature, self.ccs).values()
        self.kernels.append((body.__name__, ptx, assembler.resources(cubin)))


def notes(ptx, folder):
    """What ptxas says of a kernel."""
    path = folder / "kernel.ptx"
    # All that is in it was there in PTX 9.0; an NVVM newer than ptxas gives it a number that ptxas would refuse.
    path.write_text(re.sub(r"^\.version .*", ".version 9.0", ptx.rstrip("\0"), flags=re.MULTILINE))
    command = [ptxas(), f"-arch={ARCH}", "-v", path, "-o", path.with_suffix(".cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
