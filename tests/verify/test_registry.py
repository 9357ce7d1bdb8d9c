"""The registry: what is announced is there, and a refusal says what is missing."""

from importlib import import_module

import numpy as np
import pytest

from refimpl.tiling import Tile
from verify.cases import DEFAULT, DENSE
from verify.dtypes import DTYPES, name_of
from verify.registry import ALL, KERNELS, OPTIONS, REFERENCES

# Tensor cores multiply a hidden key's weight, 0, by its value; the copy engine wants rows of 16-byte pieces.
CANNOT = {
    "step5_tensor_core": {"nan_seen"},
    "step6_flash_v3": {"nan_seen", "hand", "odd_head_dim", "dv_not_d"},
}


@pytest.mark.parametrize("kernel", ALL.values(), ids=lambda kernel: kernel.name)
def test_every_module_is_there(kernel):
    assert callable(kernel.attention())
    if kernel.reference:
        assert callable(import_module(kernel.reference).attention)
    assert kernel.options <= OPTIONS.keys() and set(kernel.dtypes) <= DTYPES.keys()


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_the_ladder_takes_every_default_case(kernel):
    """Nothing is skipped in the default run but what a kernel's instructions cannot do."""
    for small in (True, False):
        refused = {case.id for case in DENSE.values() for t in kernel.dtypes if kernel.refuses(case, t, small)}
        assert refused == CANNOT.get(kernel.name, set()) - ({"dv_not_d"} if not small else set())


def test_head_dims_come_in_units():
    kernel = KERNELS["step6_flash_v3"]
    assert kernel.lacks(set(), "fp16", 64, 60) == "head dim of V 60 is not a multiple of 8"
    assert kernel.lacks(set(), "fp16", 4, 64) == "head dim 4 is outside 8 ... 256"
    assert kernel.lacks({"window"}, "bf16", 72, 64) is None
    assert kernel.lacks(set(), "fp32", 64, 64) == "stores fp16, bf16, not fp32"


def test_tiles_come_in_units():
    assert KERNELS["step6_flash_v3"].tile(Tile(16, 17)) == Tile(64, 32)
    assert KERNELS["step3_flash_v2"].tile(Tile(7, 5)) == Tile(7, 5)


def test_a_refusal_says_what_is_missing():
    kernel = KERNELS["step3_flash_v2"]
    assert kernel.lacks({"causal"}, "fp64", 64, 64) == "stores fp32, fp16, bf16, not fp64"
    assert kernel.lacks({"causal"}, "fp32", 257, 64) == "head dim 257 is outside 1 ... 256"
    assert kernel.lacks({"causal"}, "fp32", 64, 300) == "head dim of V 300 is outside 1 ... 256"
    assert kernel.lacks({"softcap", "mask"}, "fp32", 64, 64) == "does not take a boolean mask, softcap"
    assert kernel.lacks({"causal", "gqa", "strides"}, "bf16", 1, 256) is None


def test_gradients_have_limits_of_their_own():
    step5, step6 = KERNELS["step5_tensor_core"], KERNELS["step6_flash_v3"]
    assert step6.lacks({"window"}, "fp16", 192, 192) is None
    assert step6.lacks({"backward", "causal"}, "fp16", 128, 64) is None
    assert step6.lacks({"backward"}, "fp16", 192, 64) == "head dim 192 is outside 8 ... 128 for gradients"
    assert step6.lacks({"backward", "window"}, "fp16", 64, 64) == "does not take a sliding window with gradients"
    assert step5.lacks({"backward"}, "bf16", 256, 1) is None
    assert KERNELS["step4_causal"].lacks({"backward"}, "fp32", 64, 64) == "does not take a backward pass"
    assert ALL["general"].lacks({"backward", "window", "dropout"}, "fp32", 64, 64) is None


@pytest.mark.parametrize("kernel", ALL.values(), ids=lambda kernel: kernel.name)
def test_a_kernel_with_gradients_has_them(kernel):
    """One list says that there is a backward pass, the other where; NumPy implementations have one each."""
    assert ("backward" in kernel.options) == (kernel.gradients is not None or kernel.runs == "numpy")
    if "backward" in kernel.options:
        assert callable(kernel.attention_backward())
    if kernel.gradients:
        assert kernel.gradients.options <= OPTIONS.keys() and "backward" in kernel.gradients.options


def test_the_ways_to_gradients():
    assert ALL["oracle"].ways == ALL["step4_causal"].ways == ({},)
    both = {"deterministic": False}, {"deterministic": True}
    step5, step6 = KERNELS["step5_tensor_core"], KERNELS["step6_flash_v3"]
    assert ALL["general"].ways == step5.ways == step6.ways == both
    assert step5.judged_ways(True) == step5.judged_ways(False) == step6.judged_ways(False) == both
    assert step6.judged_ways(emulated=True) == both[:1]


@pytest.mark.parametrize("name", REFERENCES)
def test_numpy_ones_give_storage_types(name):
    problem = DEFAULT["gqa"].build("bf16")
    O, lse = REFERENCES[name].attention()(problem.Q, problem.K, problem.V, causal=True)
    assert O.dtype == problem.Q.dtype and lse.dtype == np.float32
    O, lse = REFERENCES[name].attention()(*(x.astype(np.float64) for x in (problem.Q, problem.K, problem.V)))
    assert O.dtype == lse.dtype == np.float64


def test_names_of_types():
    assert [name_of(entry.numpy) for entry in DTYPES.values()] == list(DTYPES)
    with pytest.raises(TypeError, match="got int32"):
        name_of(np.int32)


@pytest.mark.parametrize("name", DTYPES)
def test_the_constants_of_a_type(name):
    """ulp and the smallest subnormal, found by trying."""
    kind = DTYPES[name]
    make = kind.numpy.type
    one = make(1)
    assert float(make(1 + kind.ulp)) == 1 + kind.ulp and make(1 + kind.ulp / 4) == one
    assert float(make(kind.subnormal)) == kind.subnormal and float(make(kind.subnormal / 4)) == 0
    assert kind.bytes == {"fp64": 8, "fp32": 4}.get(name, 2)
