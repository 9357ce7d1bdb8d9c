"""What a GPU would load, checked without one: linked cubins with no stack, no spills and no fp64."""

import importlib
import multiprocessing

import ml_dtypes
import numpy as np
import pytest
from helpers_clean import unclean

from flash_cuda.executors.assembler import Assembler, parse_arch, resources

pytest.importorskip("cuda.bindings.nvvm", reason="no NVVM: install the dev extra")

STEPS = ["step0_standard", "step1_fused", "step2_flash_v1", "step3_flash_v2", "step4_causal"]
BODIES = {"step0_standard": 3}  # kernels a step; one where it is not listed
DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
MAX_SHARED = 48 * 1024  # what every GPU grants a block unasked


def reports(job):
    """The reports of one (step, head dim, dtype, archs); runs in a process of its own."""
    step, d, dtype, archs = job
    on = Assembler(*archs)
    on.capability = min(parse_arch(arch)[:2] for arch in archs)
    Q, K = (np.zeros((1, heads, 100, d), DTYPES[dtype]) for heads in (2, 1))
    importlib.import_module(f"flash_cuda.{step}").attention(Q, K, K, causal=True, on=on)
    return job, on.reports


def check(jobs):
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        faults = []
        for (step, d, dtype, archs), found in pool.imap(reports, jobs):
            assert len(found) == BODIES.get(step, 1) * len(archs)
            assert all(r.shared_bytes > 0 for r in found)
            faults += [f"d={d} {dtype}: {fault}" for fault in unclean(found, shared=MAX_SHARED)]
    assert not faults


def test_each_step_assembles_clean():
    jobs = [("step0_standard", 64, "fp16", ("sm_75",)), ("step1_fused", 32, "fp32", ("sm_80",))]
    jobs += [("step2_flash_v1", 128, "bf16", ("sm_90a",)), ("step3_flash_v2", 256, "fp16", ("sm_75",))]
    jobs += [("step5_tensor_core", 128, "fp16", ("sm_80", "sm_90a")), ("step5_tensor_core", 64, "fp16", ("sm_120",))]
    check([*jobs, ("step4_causal", 64, "bf16", ("sm_80", "sm_90a"))])


@pytest.mark.slow
def test_the_general_kernel_assembles_clean():
    check([("general", d, dtype, ("sm_75", "sm_90a")) for d, dtype in ((32, "bf16"), (64, "fp16"), (128, "fp32"))])


@pytest.mark.slow
def test_tensor_cores_assemble_clean_at_every_head_dim():
    """Padded and odd ones too; sm_86 has the least shared memory."""
    dims, archs = (8, 32, 64, 80, 96, 113, 128, 192, 256), ("sm_80", "sm_86", "sm_90a")
    check([("step5_tensor_core", d, ("fp16", "bf16")[k % 2], archs) for k, d in enumerate(dims)])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_100", "sm_120"])
def test_every_step_assembles_clean_from_sm_100_on(arch):
    """There NVVM has a newer LLVM: it unrolls loops, and holds register arrays, by other rules (see tensor_ops)."""
    jobs = [("step5_tensor_core", d, "fp16", (arch,)) for d in (16, 32, 64, 96, 113, 128, 192, 256)]
    check(jobs + [(step, d, "fp16", (arch,)) for step in STEPS for d in (64, 128)])


def test_tensor_cores_do_the_work():
    """The linked PTX of step 5 at d = 64: each instruction as often as the tile's arithmetic says, in one loop."""
    from flash_cuda.executors.assembler import assemble, numba_type
    from flash_cuda.step5_tensor_core import SHAPES, make_kernel

    shape, D = SHAPES[64], 64
    half, single = np.zeros((1, 1, 1, 1), np.float16), np.zeros((1, 1, 1), np.float32)
    args = half, half, half, half, single, np.float32(1), 0, 0, np.zeros((0,) * 5, np.float32)
    kernel = make_kernel(shape, D, "bf16", "whole")
    _, ptx = assemble(kernel, tuple(map(numba_type, args)), {"sm_80": (8, 0)})["sm_80"]
    rows, threads = shape.band, 32 * shape.Br // shape.band
    scores = rows * shape.Bc // 32  # a lane's
    expected = {
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": 2 * rows * shape.Bc * D // (16 * 8 * 16),
        "ldmatrix.sync.aligned.m8n8.x4.shared": (rows + shape.Bc) * D // 256,
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared": shape.Bc * D // 256,
        "cp.async.cg.shared.global": (shape.Br + 2 * 2 * shape.Bc) * D // (8 * threads),  # Q, two K and two V tiles
        "ex2.approx.ftz.f32": scores + rows // 8,  # and alpha
        "cvt.rn.bf16x2.f32": scores // 2 + rows * D // 64,  # P, and O
        "cp.async.wait_group 0": 2,
        "bar.sync": 3,
        "ld.local": 0,
    }
    assert {name: ptx.count(name) for name in expected} == expected


@pytest.mark.slow
def test_every_combination_assembles_clean():
    archs = ("sm_75", "sm_80", "sm_90a")
    check([(step, d, dtype, archs) for step in STEPS for d in (32, 64, 113, 128, 256) for dtype in DTYPES])


def test_a_spill_and_an_fp64_instruction_are_seen():
    """The reader of cubins finds what it looks for: a local array indexed at run time, and a stray double."""
    from numba import cuda
    from numba.cuda.types import float32

    def body(x, n):
        local = cuda.local.array(64, float32)
        for k in range(64):
            local[k] = x[k]
        x[0] = local[n] * 0.3

    on = Assembler("sm_80")
    on.launch(body, 1, 32, (np.zeros(64, np.float32), 3))
    assert on.reports[0].stack_bytes >= 256 and on.reports[0].f64 > 0


def test_architecture_names():
    assert parse_arch("sm_90a") == (9, 0, "a") and parse_arch("sm_120") == (12, 0)
    with pytest.raises(ValueError, match="arch: expected a name like sm_80"):
        parse_arch("h100")


def test_what_is_no_cubin_is_refused():
    with pytest.raises(RuntimeError, match="not a cubin"):
        resources(b"\x7fELF" + bytes(0x3C) + bytes(64))
