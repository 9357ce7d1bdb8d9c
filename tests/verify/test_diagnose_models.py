"""The models of faults: the reference is right without one, each changes something, and no two are the same."""

from collections import defaultdict

import numpy as np
import pytest

from refimpl import oracle
from verify.diagnose.battery import battery
from verify.diagnose.gradients import Gradients
from verify.diagnose.library import FAULTS
from verify.diagnose.reference import Reference, Tiling

TILING = Tiling(8, 16)
# Names that the probes cannot tell apart at one tiling: (which, why).
ALIKE = {}


def finite(probe):
    """Whether a probe is one that the tiled reference computes without a NaN of its own."""
    return "nan" not in probe.needs


@pytest.mark.parametrize("tiling", [Tiling(8, 16), Tiling(16, 7, True)])
def test_the_reference_is_right_forward(tiling):
    """Against the oracle, on every probe; tiled as if it depended on it."""

    class Tiled(Reference):
        tiled = "Bc order"

    for probe in (p for p in battery("fp32", True) if p.dO is None):
        made = Tiled(probe, tiling).forward()
        O, lse = oracle.attention(probe.Q, probe.K, probe.V, **probe.options)
        np.testing.assert_allclose(made["O"], O, rtol=1e-9, atol=1e-12, err_msg=probe.id, equal_nan=False)
        np.testing.assert_allclose(made["lse"], lse, rtol=1e-12, atol=1e-12, err_msg=probe.id, equal_nan=False)


@pytest.mark.parametrize("again", [False, True])
def test_the_reference_is_right_backward(again):
    """Either way of going back; with D of P there is not even the rounding of O."""
    for probe in (p for p in battery("fp32", True) if p.dO is not None):
        made = Gradients(probe, Tiling(softmax_again=again, D_of_P=True)).backward()
        grads = oracle.attention_backward(probe.Q, probe.K, probe.V, probe.dO, **probe.options)
        for name, want in zip(("dQ", "dK", "dV"), grads, strict=False):
            np.testing.assert_allclose(made[name], want, rtol=1e-9, atol=1e-9, err_msg=probe.id, equal_nan=False)


@pytest.fixture(scope="module")
def changes():
    """For each fault, the outputs of all probes that it concerns, as bytes where they differ from truth."""
    probes = battery("fp32", True)
    found = {}
    for key, fault in FAULTS.items():
        marks = []
        for probe in probes:
            if fault.concerns(probe):
                outputs, wild, _ = fault.predict(probe, TILING)
                assert outputs.keys() == probe.truth.keys()
                for name, x in outputs.items():
                    assert x.shape == probe.truth[name].shape, (key, probe.id, name)
                    with np.errstate(all="ignore"):
                        near = np.abs(x.astype(np.float64) - probe.truth[name]) <= probe.tolerance[name]
                    near |= x.astype(np.float64) == probe.truth[name]
                    if not near.all():
                        # In steps of the tolerance: what differs by less, no probe tells apart.
                        step = np.max(probe.tolerance[name]) + 1e-30
                        with np.errstate(all="ignore"):
                            coarse = np.round(np.nan_to_num(x.astype(np.float64)) / step / 8)
                        marks.append((probe.id, name, coarse.tobytes()))
                if wild is not None and wild.any():
                    marks.append((probe.id, "rows", wild.tobytes()))
        found[key] = tuple(marks)
    return found


def test_every_fault_changes_an_output(changes):
    """On some probe, at some tiling: else nobody could be told that they have it."""
    quiet = {FAULTS[key].name for key, marks in changes.items() if not marks}
    heard = {FAULTS[key].name for key, marks in changes.items() if marks}
    # P and m in narrow types and wide head dims need the full sizes, or another tile than this one.
    assert quiet - heard <= {"mask_after_max", "dQ_dK_exchanged"}


def test_no_two_names_say_the_same(changes):
    """Faults of different names differ on some probe."""
    groups = defaultdict(set)
    for key, marks in changes.items():
        if marks:
            groups[marks].add(FAULTS[key].name)
    assert [names for names in groups.values() if len(names) > 1] == []


def test_every_fault_can_be_read_about():
    """A section of the chapter, and something to look at."""
    for fault in FAULTS.values():
        assert fault.chapter.startswith("18.")
        assert fault.look
        assert fault.what
        assert issubclass(fault.model, Gradients) == fault.backward
