"""Step 6 as an H200 would load it, checked without one: no stack, no spills, no fp64, and products that overlap."""

import re

import ml_dtypes
import numpy as np
import pytest
from helpers_mutate import edit, step_with
from helpers_ptxas import MOST_SHARED, RESERVED, SERIALISED, Kept, notes, ptxas

from flash_cuda import step6_flash_v3 as step6
from flash_cuda.parts import hopper_shapes

pytest.importorskip("cuda.bindings.nvvm", reason="no NVVM: install the dev extra")

SHAPES = [*hopper_shapes.SHAPES.values(), hopper_shapes.SHORT_CAUSAL]


def assembled(shape, dtype=np.float16, module=step6, **options):
    on = Kept()
    Q, K = (np.zeros((1, heads, 300, shape.D), dtype) for heads in (2, 1))
    module.attention(Q, K, K, shape=shape, on=on, **options)
    ((_, ptx, found),) = on.kernels
    return ptx, found


def check(shape, tmp_path, **more):
    ptx, found = assembled(shape, causal=True, **more)
    assert found["stack_bytes"] == 0, f"{shape}: {found['stack_bytes']} bytes of stack or spills"
    assert 16 < found["registers"] <= 65536 // shape.threads
    assert found["shared_bytes"] <= RESERVED and shape.shared_bytes <= MOST_SHARED
    assert not re.search(r"\.f64\b", ptx)
    assert {"wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg", "mbarrier.try_wait"} <= set(
        re.findall(r"wgmma\.mma_async|cp\.async\.bulk\.tensor|setmaxnreg|mbarrier\.try_wait", ptx)
    )
    if ptxas() is None:
        pytest.skip("the cubin is clean; no ptxas to say whether it runs products one by one: install the dev extra")
    said = notes(ptx, tmp_path)
    assert not SERIALISED.search(said) and "setmaxnreg" not in said and "spill stores" in said, said


def test_head_dim_64(tmp_path):
    check(hopper_shapes.SHAPES[64], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_every_shape(shape, tmp_path):
    check(shape, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("d", hopper_shapes.SHAPES)
def test_softcap(d, tmp_path):
    check(hopper_shapes.shape_for(d, 300, causal=True, capped=True), tmp_path, softcap=30.0)


@pytest.mark.slow
def test_bf16_and_a_negative_scale(tmp_path):
    check(hopper_shapes.SHAPES[128], tmp_path, dtype=ml_dtypes.bfloat16)
    check(hopper_shapes.SHAPES[128], tmp_path, scale=-1.0)


@pytest.mark.slow
@pytest.mark.skipif(ptxas() is None, reason="no ptxas: install the dev extra")
def test_products_that_run_one_by_one_are_noticed(tmp_path):
    """Without the wait for S its registers are read while a product writes them, and ptxas runs no two at a time."""
    changed = step_with("step6_flash_v3", edit("step6_flash_v3", r"wait_S\(S\)$", "pass"))
    shape = changed.Shape(128, 64, 64)
    assert SERIALISED.search(notes(assembled(shape, module=changed)[0], tmp_path))
