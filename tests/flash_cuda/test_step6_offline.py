"""Step 6 as an H200 would load it, checked without one: no stack, no spills, no fp64, and products that overlap."""

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers_mutate import edit, step_with

from flash_cuda import assembler
from flash_cuda import step6_flash_v3 as step6

pytest.importorskip("cuda.bindings.nvvm", reason="no NVVM: install the dev extra")

ARCH = "sm_90a"
MOST_SHARED, RESERVED = 227 * 1024, 1024  # of a block on sm_90: what it may ask for, what the system keeps
SERIALISED = re.compile(r"wgmma.*(serializ|ignored)|C75\d\d")
SHAPES = [shape for table in ([x for x in vars(step6).values() if isinstance(x, step6.Shape)], step6.SHAPES.values())
          for shape in table]  # fmt: skip


def ptxas():
    """The assembler of the dev extra, or any on the path."""
    folders = Path(sysconfig.get_path("purelib"), "nvidia").glob("*/bin/ptxas")
    return next(map(str, folders), None) or shutil.which("ptxas")


class Kept(assembler.Assembler):
    """The offline executor, keeping the PTX that each cubin is linked from."""

    def launch(self, body, blocks, threads, args, shared=0):
        signature = tuple(assembler.numba_type(arg) for arg in args)
        (cubin, self.ptx), = assembler.assemble(body, signature, self.ccs).values()
        self.reports.append(assembler.resources(cubin))


def assembled(shape, dtype=np.float16, module=step6, **options):
    on = Kept(ARCH)
    Q, K = (np.zeros((1, heads, 300, shape.D), dtype) for heads in (2, 1))
    module.attention(Q, K, K, shape=shape, on=on, **options)
    return on


def check(shape, tmp_path, **more):
    on = assembled(shape, causal=True, **more)
    (found,) = on.reports
    assert found["stack_bytes"] == 0, f"{shape}: {found['stack_bytes']} bytes of stack or spills"
    assert 16 < found["registers"] <= 65536 // shape.threads
    assert found["shared_bytes"] <= RESERVED and shape.shared_bytes <= MOST_SHARED
    assert not re.search(r"\.f64\b", on.ptx)
    assert {"wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg", "mbarrier.try_wait"} <= set(
        re.findall(r"wgmma\.mma_async|cp\.async\.bulk\.tensor|setmaxnreg|mbarrier\.try_wait", on.ptx)
    )
    if ptxas() is None:
        pytest.skip("the cubin is clean; no ptxas to say whether it runs products one by one: install the dev extra")
    said = notes(on.ptx, tmp_path)
    assert not SERIALISED.search(said) and "setmaxnreg" not in said and "spill stores" in said, said


def notes(ptx, folder):
    """What ptxas says of a kernel; nvJitLink keeps it to itself."""
    path = folder / "step6.ptx"
    # All that is in it was there in PTX 9.0; an NVVM newer than ptxas gives it a number that ptxas would refuse.
    path.write_text(re.sub(r"^\.version .*", ".version 9.0", ptx.rstrip("\0"), flags=re.MULTILINE))
    command = [ptxas(), f"-arch={ARCH}", "-v", path, "-o", path.with_suffix(".cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def test_head_dim_64(tmp_path):
    check(step6.SHAPES[64], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_every_shape(shape, tmp_path):
    check(shape, tmp_path)


@pytest.mark.slow
def test_bf16_and_a_negative_scale(tmp_path):
    check(step6.SHAPES[128], tmp_path, dtype=ml_dtypes.bfloat16)
    check(step6.SHAPES[128], tmp_path, scale=-1.0)


@pytest.mark.slow
@pytest.mark.skipif(ptxas() is None, reason="no ptxas: install the dev extra")
def test_products_that_run_one_by_one_are_noticed(tmp_path):
    """Without the wait for S its registers are read while a product writes them, and ptxas runs no two at a time."""
    changed = step_with("step6_flash_v3", edit("step6_flash_v3", r"wait_S\(S\)$", "pass"))
    shape = changed.Shape(128, 64, 64)
    assert SERIALISED.search(notes(assembled(shape, module=changed).ptx, tmp_path))
