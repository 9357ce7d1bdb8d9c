"""Time work on a GPU that runs behind the host's back: events around the launches alone, a cold or a warm L2, in turns.

Four mistakes are easy, and each has its answer here.

*The host's clock.* A launch returns before the kernel has begun. So the device's own events are used, recorded just
before and just after the work.

*Waiting counted as work.* An idle device reaches the first event at once and then waits until the host has got the work
ready: tens of microseconds in Python, as long as a small kernel runs. So each run has a head start: while the
device is still writing a buffer, the host gets events and work into the queue. How long the host takes is a figure of
its own, `Times.host_us`, taken for calls in a row and for a call after a wait.

*A neighbour counted as the host.* After the same wait a call was seen to take a few microseconds on some cores and ten
times that on others, for seconds at a time, and so did whatever else was done first, a few additions in Python or
asking the driver for its context. That fits somebody else who uses the core and its caches meanwhile, as its other
thread or as another guest of the machine; none was seen directly. So the host's times are taken in batches spread over
the rounds and over the cores. Others can only add, so the least batch is the host's time; the usual one is kept beside,
and so are additions that launch nothing.

*A cache left warm.* The buffer of the head start is several times as large as the L2, so that no input is found there.
For the warm time the work runs once more in between.

Contenders take turns, A B C, C B A, ...: what drifts meets all of them alike (see `bench.stats`).
"""

import os
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from verify import executors

FLUSH_BYTES = 256 << 20  # over twice the largest L2 to date
ROUNDS = 24
WARM_RUNS = 5
LATENCY_RUNS, BATCHES = 15, 5  # of the host: runs a batch, and batches
WARMUPS = 3
ADDITIONS = 200  # in Python: work for the host alone, a few microseconds
MARGIN = 2.0  # the head start is this many times as long as the host needs


class Device:
    """The GPU as a clock needs it, on the default stream; `bench_simulated.Device` has the same methods."""

    def __init__(self):
        from numba import cuda

        self._cuda = cuda
        self._buffer = cuda.device_array(FLUSH_BYTES, np.uint8)

    def host_ms(self):
        """The host's time in milliseconds."""
        return 1e3 * time.perf_counter()

    def flush(self):
        """Queue the writing of a buffer that pushes everything else out of the L2."""
        self._cuda.cudadrv.driver.device_memset(self._buffer, 0, FLUSH_BYTES)

    def mark(self):
        """Queue an event and return it."""
        event = self._cuda.event()
        event.record()
        return event

    def wait(self):
        """Until the queue is empty."""
        self._cuda.synchronize()

    def elapsed_ms(self, start, stop):
        """Milliseconds between two events that have passed."""
        return self._cuda.event_elapsed_time(start, stop)

    def copy_gb_per_s(self, clock, nbytes=4 << 30):
        """Rate of a plain copy of so many bytes, or of a quarter of what is free; bytes read plus bytes written."""
        nbytes = min(nbytes, self._cuda.current_context().get_memory_info().free // 4)
        source, target = (self._cuda.device_array(nbytes, np.uint8) for _ in range(2))
        times = [clock.cold(lambda: target.copy_to_device(source)) for _ in range(7)]
        return 2 * nbytes / float(np.median(times)) / 1e6


class Clock:
    """Times single runs of work on a device."""

    def __init__(self, device=None):
        self.device = device or Device()
        self.flush_ms = None
        self._flushes = 2
        self.flush_ms = float(np.median([self.cold(self.device.flush) for _ in range(5)]))

    def give_start(self, host_ms):
        """Make the head start long enough for work that takes the host so long to launch."""
        self._flushes = 2 + int(MARGIN * host_ms / self.flush_ms)

    def cold(self, work):
        """Milliseconds of one run with nothing of its own in the L2."""
        self._head_start()
        return self._timed(work)

    def warm(self, work):
        """Milliseconds of one run straight after another."""
        self._head_start()
        work()
        return self._timed(work)

    def latency_us(self, work, runs=LATENCY_RUNS, waiting=True, instead=None):
        """Microseconds that the host takes to launch the work: median.

        ``waiting``: each time into an empty queue, after a wait for what was in it; else one call after another.
        ``instead``: what is timed in the place of the work, which is launched behind it.
        """
        taken = []
        self.device.wait()
        if not waiting:
            work()  # the first one still follows a wait
        for _ in range(runs):
            if waiting:
                self.device.wait()
            begin = self.device.host_ms()
            (instead or work)()
            taken.append(self.device.host_ms() - begin)
            if instead:
                work()
        self.device.wait()
        return 1e3 * float(np.median(taken))

    def _head_start(self):
        self.device.wait()
        for _ in range(self._flushes):
            self.device.flush()

    def _timed(self, work):
        start = self.device.mark()
        work()
        stop = self.device.mark()
        self.device.wait()
        return self.device.elapsed_ms(start, stop)


@dataclass
class Contender:
    """One way of doing the work of a point.

    Attributes
    ----------
    name : str
    work : callable
        Launches it; no arguments, returns at once.
    within : callable
        A context manager in which the work runs as it should, entered outside the clock.
    outputs : callable or None
        Host arrays of the sampled rows by name, to be checked before and after anything is timed.
    facts : dict
        What a record says of it: version, fingerprint, tile, ...
    graph : callable or None
        Makes a CUDA graph of the work, once it has run: a second way for the host to launch it.
    """

    name: str
    work: object
    within: object = nullcontext
    outputs: object = None
    facts: dict = field(default_factory=dict)
    graph: object = None


@dataclass
class Times:
    """What was measured of a contender: cold times a round, in order, and the rest.

    Attributes
    ----------
    ms, warm_ms : list of float
        One cold run a round; some warm runs after the rounds, if the contender took part in all of them.
    batches_us : dict of str to list of float
        The host's times in microseconds, each batch's median. "latency_us" and "queued_us": of the work as it is timed,
        after a wait and for calls in a row; "graph_us" and "graph_queued_us": as a CUDA graph, if it can be one;
        "plain_us" and "plain_queued_us": of `ADDITIONS` additions in Python where the graph would be launched.
    """

    ms: list = field(default_factory=list)
    warm_ms: list = field(default_factory=list)
    batches_us: dict = field(default_factory=dict)

    @property
    def host_us(self) -> dict[str, float]:
        """The host's times: the least batch of each."""
        return {name: min(batches) for name, batches in self.batches_us.items()}

    @property
    def usual_us(self) -> dict[str, float]:
        """The host's times with whatever else went on meanwhile: the median batch of each."""
        return {name: float(np.median(batches)) for name, batches in self.batches_us.items()}


def interleaved(clock, contenders, rounds=ROUNDS, seconds=3.0, fewest=1) -> dict[str, Times]:
    """Time contenders in turns.

    Parameters
    ----------
    clock : Clock
    contenders : list of Contender
        Each has run before: nothing is compiled any more.
    rounds : int
        At most so many, each a cold run of everyone still taking part.
    seconds : float
        For all of it. Each contender may spend an equal share; one that is so slow that it cannot
        take part in every round takes part in the first ones.
    fewest : int
        Rounds that everyone takes part in whatever it costs.

    Returns
    -------
    dict of str to Times
    """
    device, found, share = clock.device, {}, {}
    for c in contenders:
        found[c.name] = Times()
        with c.within():
            once_us = clock.latency_us(c.work, 1)
            clock.give_start(once_us / 1e3)
            begin = device.host_ms()
            clock.cold(c.work)
            one_ms = device.host_ms() - begin
            share[c.name] = max(fewest, min(rounds, int(1e3 * seconds / len(contenders) / one_ms)))
            found[c.name].batches_us["latency_us"] = [once_us]
            if share[c.name] == rounds:  # what has time for all rounds has time to warm up
                for _ in range(WARMUPS):
                    clock.cold(c.work)
                found[c.name].batches_us = {name: [us] for name, us in _host_times(clock, c).items()}
    # One head start for all, long enough for the slowest host: the same conditions for everyone.
    clock.give_start(max(t.host_us["latency_us"] for t in found.values()) / 1e3)
    due = {batch * rounds // BATCHES: batch for batch in range(1, BATCHES)}
    for k in range(rounds):
        for c in contenders if k % 2 == 0 else reversed(contenders):
            if k < share[c.name]:
                with c.within():
                    if k in due and share[c.name] == rounds:
                        with _on_core(due[k]):
                            for name, us in _host_times(clock, c).items():
                                found[c.name].batches_us[name].append(us)
                    found[c.name].ms.append(clock.cold(c.work))
    for c in contenders:
        if share[c.name] == rounds:  # whatever takes longer does not live on what a cache holds
            with c.within():
                found[c.name].warm_ms = [clock.warm(c.work) for _ in range(WARM_RUNS)]
    return found


def _host_times(clock, contender):
    """A batch of the host's times, by the names that `Times` has for them."""
    work = contender.work
    found = {"latency_us": clock.latency_us(work), "queued_us": clock.latency_us(work, waiting=False)}
    if contender.graph:
        graph = contender.graph()
        found |= {
            "graph_us": clock.latency_us(graph),
            "graph_queued_us": clock.latency_us(graph, waiting=False),
            "plain_us": clock.latency_us(graph, instead=_additions),
            "plain_queued_us": clock.latency_us(_additions, waiting=False),
        }
    return found


@contextmanager
def _on_core(batch):
    """This thread on another core for each batch, where the system lets a thread be put somewhere."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {sorted(allowed)[batch * len(allowed) // BATCHES]})
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _additions():
    total = 0
    for n in range(ADDITIONS):
        total += n
    return total


def missing():
    """Why nothing can be timed here; None on a GPU."""
    return executors.gpu_missing()
