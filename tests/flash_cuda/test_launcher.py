"""Launching without Numba: parameters packed as a compiled kernel takes them, moved to other arrays; and plans."""

import re
import struct

import numpy as np
import pytest
from helpers_driver import FakeGpu, array, pretend, words

from flash_cuda import step5_tensor_core, step6_flash_v3
from flash_cuda.executors import gpu, graph
from flash_cuda.executors.assembler import assemble, numba_type
from flash_cuda.executors.cubin_cache import Cubin
from flash_cuda.executors.launcher import DriverError, Kernel, Launch
from flash_cuda.plan import KEPT_MAPS, Plan


@pytest.fixture
def driver(monkeypatch):
    """The fake driver; whatever is to be compiled is not."""
    monkeypatch.setenv("FLASHPROOF_CACHE", "off")
    monkeypatch.setattr(gpu, "compile_cubin", lambda body, signature, cc: Cubin(b"code", body.__name__))
    return pretend(monkeypatch)


def kernel_of(driver):
    return Kernel(Cubin(b"code", "entry"))


def test_parameters_are_those_of_a_compiled_kernel(driver):
    """In number and size as the linked PTX declares them: arrays of any rank, numbers, and tuples of them."""

    def body(A, x, aux, n):
        A[0, 0, 0, 0] = x * aux[0][n] + aux[1] + aux[2][0]

    args = array(1 << 20, (2, 3, 4, 5)), np.float32(0.5), (array(2 << 20, (7,), np.float32), 3, (2.5,)), np.int32(9)
    launch = Launch(kernel_of(driver), 1, 32, args)
    _, ptx = assemble(body, tuple(map(numba_type, args)), {"sm_80": (8, 0)})["sm_80"]
    declared = re.findall(r"\.param \.[a-z](\d+)", ptx[ptx.index(".entry") : ptx.index("{", ptx.index(".entry"))])
    assert [int(bits) // 8 for bits in declared] == [8] * 13 + [4] + [8] * 7 + [4, 4, 4]
    assert launch.parameters == len(declared)
    launch()
    found = words(driver.launches[0].params, launch.parameters)
    assert found[:13] == [0, 0, 120, 2, 1 << 20, 2, 3, 4, 5, 120, 40, 10, 2]
    assert struct.pack("<q", found[13])[:4] == struct.pack("<f", 0.5)
    assert found[14:21] == [0, 0, 7, 4, 2 << 20, 7, 4] and found[21] == 3 and found[23] == 9
    assert struct.pack("<q", found[22])[:4] == struct.pack("<f", 2.5)


def test_an_array_is_moved_by_its_pointer_alone(driver):
    A, B = array(16, (4, 2), np.float32), array(1 << 20, (3,), np.float32, strides=(0,))
    launch = Launch(kernel_of(driver), (5, 6), 32, (A, 7, B), shared=100)
    ((_, first), (found, second)) = launch.arrays
    assert found is B
    launch.move(second, 999)
    launch()
    told = driver.launches[0]
    assert told.sizes == (5, 6, 1, 32, 1, 1) and told.shared == 100 and told.stream == 0 and told.function == 12
    assert words(told.params, launch.parameters) == [0, 0, 8, 4, 16, 4, 2, 8, 4, 7, 0, 0, 3, 4, 999, 3, 0]
    assert first == 4


def test_what_the_driver_refuses_is_named(driver):
    from cuda.bindings.driver import CUresult

    driver.status = CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    with pytest.raises(DriverError, match="CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES for entry"):
        Launch(kernel_of(driver), 1, 32, (3,))()
    with pytest.raises(DriverError, match="cuLibraryLoadData: CUDA_ERROR_INVALID_IMAGE"):
        Kernel(Cubin(b"bad", "entry"))


def test_more_shared_memory_is_asked_for_once(driver):
    kernel = kernel_of(driver)
    for nbytes in (1000, 500, 2000):
        kernel.allow_shared(nbytes)
    assert [value for _, value in driver.attributes] == [1000, 2000]


def test_kernels_differ_by_the_kinds_of_their_arguments(driver):
    def body(x, n):
        x[0] = n

    one = array(16, (4,), np.float32)
    kernels = [gpu.kernel_for(body, args) for args in (
        (one, 1), (array(32, (9,), np.float32), np.int32(2)), (one, 1.0), (array(32, (9,), np.float16), 1),
        (array(32, (9, 1), np.float32), 1), ((one, 1),),
    )]  # fmt: skip
    assert kernels[0] is kernels[1] and len(set(kernels)) == 5


def inputs(base, B=1, H=2, N=300, d=64):
    """Q, K and V, one after the other from an address on."""
    size = 2 * B * H * N * d
    return [array(base + k * size, (B, H, N, d)) for k in range(3)]


@pytest.mark.parametrize("step", [step5_tensor_core, step6_flash_v3])
def test_a_plan_launches_on_other_arrays(driver, step):
    """Only the pointers of Q, K and V change; tensor maps are made anew for new addresses and kept for known ones."""
    plan = Plan(step.attention, *inputs(1 << 30), causal=True, on=FakeGpu())
    launch = plan._launches[0]
    assert len(driver.launches) == 1 and plan.O.shape == (1, 2, 300, 64) and plan.lse.shape == (1, 2, 300)
    before = words(driver.launches[0].params, launch.parameters)
    O, lse = plan(*inputs(1 << 31))
    after = words(driver.launches[1].params, launch.parameters)
    assert O is plan.O and lse is plan.lse
    changed = {(old, new) for old, new in zip(before, after, strict=True) if old != new}
    size = 2 * 2 * 300 * 64
    if step is step5_tensor_core:
        assert changed == {((1 << 30) + k * size, (1 << 31) + k * size) for k in range(3)}
        plan.launch(1 << 30, (1 << 30) + size, (1 << 30) + 2 * size)
    else:
        assert changed == {(1 << 50, (1 << 50) + 4096)} and len(plan._maps) == 2
        plan(*inputs(1 << 30))
        assert len(plan._maps) == 2 and len(plan._on.maps) == 1
    assert words(driver.launches[2].params, launch.parameters) == before
    assert all(told.sizes == driver.launches[0].sizes for told in driver.launches)


def test_a_plan_keeps_a_bounded_number_of_maps(driver):
    plan = Plan(step6_flash_v3.attention, *inputs(1 << 30), on=FakeGpu())
    for k in range(1, KEPT_MAPS + 20):
        plan(*inputs((1 << 30) + (k << 24)))
    assert len(plan._maps) == KEPT_MAPS


def test_a_plan_refuses_other_layouts(driver):
    Q, K, V = inputs(1 << 30)
    plan = Plan(step5_tensor_core.attention, Q, K, V, on=FakeGpu())
    with pytest.raises(ValueError, match="K: expected shape, strides and dtype"):
        plan(Q, array(1 << 31, (1, 2, 299, 64)), V)
    with pytest.raises(ValueError, match="V: expected shape, strides and dtype"):
        plan(Q, K, array(1 << 31, (1, 2, 300, 64), strides=(2 * 300 * 64 * 2, 128, 256, 2)))
    with pytest.raises(TypeError, match="Q: expected a numba device array, as planned, got a ndarray"):
        plan(np.zeros((1, 2, 300, 64), np.float16), K, V)
    with pytest.raises(ValueError, match="address: expected as far from a multiple of 16 as planned"):
        plan.launch((1 << 30) + 2, 1 << 30, 1 << 30)
    with pytest.raises(TypeError, match="K: expected an array on a GPU, got a NumPy array in host memory"):
        Plan(step5_tensor_core.attention, Q, np.zeros((1, 2, 300, 64), np.float16), V, on=FakeGpu())


def test_a_plan_refuses_a_step_that_hands_on_parts(driver):
    """A kernel that is given part of K would go on reading the old one."""

    def attention(Q, K, V, on):
        arrays = [on.input(name, x) for name, x in zip("QKV", (Q, K, V), strict=True)]
        part = array((1 << 30) + 2 * 2 * 300 * 64 + 128, (1, 2, 299, 64))
        on.launch(lambda *_: None, 1, 32, (arrays[0], part, arrays[2]))
        return arrays[0], None

    with pytest.raises(ValueError, match="attention: expected a step that gives K to its kernels as it is"):
        Plan(attention, *inputs(1 << 30), on=FakeGpu())


def recording(driver, monkeypatch, refused=()):
    """The fake driver with what makes graphs; it notes what it is asked, and refuses some of it."""
    asked = []

    class Graphs:
        CUstream, CUresult = driver.CUstream, driver.CUresult
        CUstream_flags, CUstreamCaptureMode = graph.binding.CUstream_flags, graph.binding.CUstreamCaptureMode

        def __getattr__(self, name):
            def verb(*args):
                asked.append(name)
                fault = self.CUresult.CUDA_ERROR_INVALID_VALUE
                return fault if name in refused else self.CUresult.CUDA_SUCCESS, len(asked)

            verb.__name__ = name
            return verb

    monkeypatch.setattr(graph, "binding", Graphs())
    return asked


def test_a_graph_records_each_launch_on_a_stream_of_its_own(driver, monkeypatch):
    asked = recording(driver, monkeypatch)
    kernel = kernel_of(driver)
    graph.Graph([Launch(kernel, n, 32, ()) for n in (3, 4)])
    assert [launch.sizes[0] for launch in driver.launches] == [3, 4]
    assert {launch.stream for launch in driver.launches} == {1}  # what cuStreamCreate gave
    assert asked[:3] == ["cuStreamCreate", "cuStreamBeginCapture", "cuStreamEndCapture"]
    assert sorted(asked[3:6]) == ["cuGraphDestroy", "cuGraphInstantiate", "cuStreamDestroy"]


@pytest.mark.parametrize("refused", ["cuLaunchKernel", "cuStreamBeginCapture", "cuGraphInstantiate"])
def test_what_the_driver_refuses_of_a_graph_is_named_and_nothing_is_left(driver, monkeypatch, refused):
    """The first refusal is told, not what comes of it; the stream goes, and the graph if there was one."""
    also = ("cuStreamEndCapture",) if refused == "cuLaunchKernel" else ()
    asked = recording(driver, monkeypatch, (refused, *also))
    if refused == "cuLaunchKernel":
        driver.status = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DriverError, match=f"{refused}: CUDA_ERROR_INVALID_VALUE"):
        graph.Graph([Launch(kernel_of(driver), 1, 32, ())])
    assert "cuStreamDestroy" in asked and ("cuGraphDestroy" in asked) == (refused == "cuGraphInstantiate")
