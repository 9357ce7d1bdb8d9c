"""The clock, on a device whose times are known: each of the four mistakes shows there, and none in the clock."""

import os

import numpy as np
import pytest

from verify import timing
from verify.bench.simulated import FLUSH_MS, Device
from verify.timing import BATCHES, Clock, Contender, interleaved


def test_a_run_takes_as_long_as_it_takes():
    """Also where the host needs far longer to launch than the device to run."""
    device = Device()
    clock = Clock(device)
    for host_ms in (0.001, 0.05, 0.4):
        work = device.work("a", 0.020, 0.012, host_ms)
        clock.give_start(host_ms)
        assert clock.cold(work) == pytest.approx(0.020) and clock.warm(work) == pytest.approx(0.012)
        assert clock.latency_us(work) == pytest.approx(1e3 * host_ms)


def test_a_host_that_has_waited_is_slower():
    """Both times are told apart: of a call after a wait, and of calls in a row."""
    device, waited = Device(), [False]
    clock, real = Clock(device), device.wait

    def wait():
        real()
        waited[0] = True

    def work():
        device._host += 0.050 if waited[0] else 0.010
        waited[0] = False

    device.wait = wait
    assert clock.latency_us(work) == pytest.approx(50.0)
    assert clock.latency_us(work, waiting=False) == pytest.approx(10.0)

    def plain():
        device._host += 0.007 if waited[0] else 0.002
        waited[0] = False

    assert clock.latency_us(work, instead=plain) == pytest.approx(7.0)  # the work follows, and is waited for
    assert clock.latency_us(plain, waiting=False) == pytest.approx(2.0)


def test_without_a_head_start_the_host_is_timed():
    device = Device()
    clock = Clock(device)
    work = device.work("a", 0.020, host_ms=0.4)
    clock._flushes = 0
    assert clock.cold(work) > 0.4
    clock._flushes = 1  # shorter than the launch takes
    assert clock.cold(work) > 0.3


def test_flushes_take_what_they_take():
    assert Clock(Device()).flush_ms == pytest.approx(FLUSH_MS)


def test_turns_go_back_and_forth_and_slow_ones_leave_early():
    device, order = Device(), []
    clock = Clock(device)
    cold = clock.cold

    def noted(work):
        order.append(work.name)
        return cold(work)

    clock.cold = noted
    works = [device.work(name, ms, host_ms=0.01) for name, ms in (("a", 1.0), ("b", 1.0), ("c", 300.0))]
    found = interleaved(clock, [Contender(work.name, work) for work in works], 10, 3.0)
    assert [len(found[name].ms) for name in "abc"] == [10, 10, 3]
    assert found["a"].ms == pytest.approx([1.0] * 10)
    assert found["a"].warm_ms == pytest.approx([1.0] * 5) and found["c"].warm_ms == []
    assert "".join(order[-23:]) == "abc" "cba" "abc" + 3 * "baab" + "ba"
    assert all(t.host_us["latency_us"] == pytest.approx(10.0) for t in found.values())


def test_a_slow_launch_is_not_timed_in_turns_either():
    """The head start is as long as the slowest host needs."""
    device = Device()
    works = device.work("a", 0.02, host_ms=0.5), device.work("b", 0.03, host_ms=0.01)
    found = interleaved(Clock(device), [Contender(work.name, work) for work in works], 6)
    assert found["a"].ms == pytest.approx([0.02] * 6) and found["b"].warm_ms == pytest.approx([0.03] * 5)


def test_fewest_rounds_are_kept_whatever_they_cost():
    device = Device()
    found = interleaved(Clock(device), [Contender("a", device.work("a", 900.0))], 10, 1.0, fewest=6)
    assert len(found["a"].ms) == 6


def test_the_context_is_entered_for_every_run_and_not_timed():
    device, inside, seen = Device(), [], []

    class Slow:
        def __enter__(self):
            device._host += 5.0
            inside.append(1)

        def __exit__(self, *error):
            inside.pop()

    work = device.work("a", 1.0)

    def launch():
        seen.append(len(inside))
        work()

    found = interleaved(Clock(device), [Contender("a", launch, Slow)], 6)
    assert set(seen) == {1} and found["a"].ms == pytest.approx([1.0] * 6)
    assert found["a"].host_us["latency_us"] == pytest.approx(4.0)


@pytest.mark.parametrize("rounds", [1, 3, 5, 24])
def test_a_neighbour_is_not_the_host(rounds):
    """Some batches are disturbed: the least is what a call takes. A call that takes long every time is told as that."""
    device, batch = Device(), []

    def graph():
        batch.append(1)
        return device.work("a", 1.0, host_ms=0.005 if len(batch) % 3 == 1 else 0.080)

    quick = Contender("a", device.work("a", 1.0, host_ms=0.030), graph=graph)
    times = interleaved(Clock(device), [quick], rounds)["a"]
    assert (times.host_us["latency_us"], times.usual_us["latency_us"]) == pytest.approx((30.0, 30.0))
    assert (times.host_us["graph_us"], times.host_us["graph_queued_us"]) == pytest.approx((5.0, 5.0))
    assert len(times.batches_us["graph_us"]) == len(batch) == min(rounds + 1, BATCHES)
    assert rounds < 5 or times.usual_us["graph_us"] == pytest.approx(80.0)
    names = ("latency_us", "queued_us", "graph_us", "graph_queued_us", "plain_us", "plain_queued_us")
    assert tuple(times.host_us) == names


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads stay where the system puts them")
def test_batches_are_spread_over_the_cores(monkeypatch):
    """The thread may be anywhere again afterwards, also if one of them fails."""
    allowed, cores = os.sched_getaffinity(0), []

    def batch(clock, contender):
        cores.append(os.sched_getaffinity(0))
        if len(cores) == 8:
            raise ArithmeticError
        return {"latency_us": 1.0}

    monkeypatch.setattr(timing, "_host_times", batch)
    device = Device()
    work = Contender("a", device.work("a", 1.0))
    interleaved(Clock(device), [work])
    assert cores[0] == allowed and len(cores) == BATCHES and all(len(core) == 1 for core in cores[1:])
    assert len({min(core) for core in cores[1:]}) == min(len(allowed), BATCHES - 1)
    with pytest.raises(ArithmeticError):
        interleaved(Clock(device), [work])
    assert os.sched_getaffinity(0) == allowed


def test_the_simulated_device_scatters_as_told():
    """Log-normal runs, outliers, and a factor on everything; the medians stay where they were put."""
    device = Device(seed=7, scatter=0.05, outliers=0.1)
    clock = Clock(device)
    work = device.work("a", 1.0)
    times = np.array([clock.cold(work) for _ in range(2000)])
    assert 0.98 < np.median(times) < 1.03 and 0.06 < np.mean(times > 1.3) < 0.14
    slow = Device(drift=lambda ms: 2.0)
    assert Clock(slow).cold(slow.work("a", 1.0)) == pytest.approx(2.0)
