"""The Hopper backward as an H200 would load it, checked without one: no stack, no fp64, and products that overlap."""

import re

import ml_dtypes
import numpy as np
import pytest
from helpers_ptxas import MOST_SHARED, RESERVED, SERIALISED, Kept, notes, ptxas

from flash_cuda.backward_hopper import attention_backward
from flash_cuda.backward_hopper_kernels import SHAPES, THREADS

pytest.importorskip("cuda.bindings.nvvm", reason="no NVVM: install the dev extra")


def check(d, dtype, deterministic, tmp_path):
    on = Kept()
    X, lse = np.zeros((1, 2, 300, d), dtype), np.zeros((1, 2, 300), np.float32)
    attention_backward(X, X, X, X, lse, X, causal=True, deterministic=deterministic, on=on)
    assert [name for name, *_ in on.kernels] == [
        "backward_rows", "backward_hopper", "backward_queries" if deterministic else "backward_hopper_round"]
    for name, ptx, found in on.kernels:
        assert found["stack_bytes"] == 0, f"{name}: {found['stack_bytes']} bytes of stack or spills"
        assert not re.search(r"\.f64\b", ptx), name
    _, ptx, found = on.kernels[1]
    assert 16 < found["registers"] <= 65536 // THREADS
    assert found["shared_bytes"] <= RESERVED and SHAPES[d].shared_bytes <= MOST_SHARED
    products = dict.fromkeys(("0, 0", "1, 1", ""), 0)
    for turned in re.findall(r"wgmma\.mma_async.*?p, 1, 1(?:, (0, 0|1, 1))?(?:, 1)?;", ptx):
        products[turned] += 1
    assert products["0, 0"] > 0 and products[""] > 0 and (products["1, 1"] > 0) is not deterministic
    if ptxas() is None:
        pytest.skip("the cubin is clean; no ptxas to say whether it runs products one by one: install the dev extra")
    said = notes(ptx, tmp_path)
    assert not SERIALISED.search(said) and "setmaxnreg" not in said and "spill stores" in said, said


def test_head_dim_128(tmp_path):
    check(128, np.float16, False, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", SHAPES)
def test_every_shape(d, deterministic, tmp_path):
    check(d, ml_dtypes.bfloat16, deterministic, tmp_path)
