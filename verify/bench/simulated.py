"""A GPU that is two numbers and a queue, to try a way of timing on times that are known.

It does what makes timing hard: launches return at once and take the host a while, the device works them off one after
another, the cache remembers the last work, the clock drifts, runs scatter, and now and then one takes much longer.
"""

from dataclasses import dataclass

import numpy as np

FLUSH_MS, LAUNCH_MS, MARK_MS = 0.065, 0.004, 0.002


@dataclass(frozen=True)
class Work:
    """Work for a simulated device: call it to launch it.

    Attributes
    ----------
    device : Device
    name : str
        Whose data is in the cache afterwards.
    cold_ms, warm_ms : float
        How long it takes at full clock, with nothing and with its own data in the cache.
    host_ms : float
        How long the host takes to launch it.
    """

    device: object
    name: str
    cold_ms: float
    warm_ms: float
    host_ms: float

    def __call__(self):
        self.device.launch(self)


class Device:
    """The simulated GPU; the methods are those of `timing.Device`.

    Parameters
    ----------
    seed : int
    scatter : float
        Standard deviation of the logarithm of a run's time.
    outliers : float
        Share of runs that take half as long again.
    drift : callable, optional
        Time in ms since the start -> factor on all of the device's times; 1 if not given.
    """

    def __init__(self, seed=0, scatter=0.0, outliers=0.0, drift=None):
        self._rng = np.random.default_rng(seed)
        self._scatter, self._outliers, self._drift = scatter, outliers, drift or (lambda ms: 1.0)
        self._host = 0.0  # the host's time
        self._free = 0.0  # when the device will have worked off its queue
        self._cached = None

    def work(self, name, cold_ms, warm_ms=None, host_ms=LAUNCH_MS):
        """Something to time; as long warm as cold if nothing else is said."""
        return Work(self, name, cold_ms, cold_ms if warm_ms is None else warm_ms, host_ms)

    def launch(self, work):
        """Queue work: the host is back when it is queued."""
        self._host += work.host_ms
        start = max(self._host, self._free)
        ms = work.warm_ms if self._cached == work.name else work.cold_ms
        factor = np.exp(self._scatter * self._rng.standard_normal()) * self._drift(start)
        if self._rng.random() < self._outliers:
            factor *= 1.5
        self._free = start + ms * factor
        self._cached = work.name

    def host_ms(self):
        """The host's time in milliseconds."""
        return self._host

    def flush(self):
        """Queue the writing of a buffer that pushes everything else out of the cache."""
        self._host += LAUNCH_MS
        self._free = max(self._host, self._free) + FLUSH_MS
        self._cached = None

    def mark(self):
        """Queue an event; its time is when the device gets to it, which an idle one does at once."""
        self._host += MARK_MS
        self._free = max(self._host, self._free)
        return self._free

    def wait(self):
        """Until the queue is empty."""
        self._host = max(self._host, self._free)

    def elapsed_ms(self, start, stop):
        """Milliseconds between two events."""
        return stop - start
