"""Many calls over a few worker processes: each with its time limit, and no process for two groups of calls."""

import os
import threading
from collections import deque

from verify.worker import Worker, WorkerDied

# A second process for the last few calls of a group costs more than it saves.
WORTH_A_PROCESS = 4


def cores(most=16) -> int:
    """Processes worth running at once."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(most, usable))


def each(function, calls, *, limit, jobs=None, groups=None, fresh=False, progress=lambda done, total: None):
    """Call a function once for each tuple of arguments.

    Parameters
    ----------
    function : str
        "package.module:name".
    calls : list of tuple
        Arguments of each call.
    limit : float
        Seconds for one call.
    jobs : int, optional
        Processes at a time; the number of cores if not given.
    groups : list, optional
        A name for each call. A process serves calls of one name only, so that what one kernel does to its process
        stays with that kernel. One group if not given.
    fresh : bool
        A new process after each exception too, as a CUDA context does not survive a fault.
    progress : callable
        ``progress(done, total)`` after each call, from any thread.

    Returns
    -------
    list of (value, None) or (None, str)
        What each call returned, or one line on why it did not, in the order of `calls`.
    """
    calls = list(calls)
    work = _Work(calls, groups or [""] * len(calls))

    def serve():
        while (group := work.choose()) is not None:
            with Worker() as worker:
                while (at := work.take(group)) is not None:
                    work.finish(at, _answer(worker, function, calls[at], limit, fresh), progress)
            work.leave(group)

    threads = [threading.Thread(target=serve) for _ in range(min(jobs or cores(), len(calls)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return work.answers


def _answer(worker, function, args, limit, fresh):
    """(value, None), or (None, one line)."""
    try:
        return worker.call(function, *args, limit=limit), None
    except WorkerDied as death:
        return None, str(death)
    except RuntimeError as error:
        if fresh:
            worker.close()
        return None, str(error)


class _Work:
    """Calls left to do, by group, shared by threads."""

    def __init__(self, calls, groups):
        self.answers = [(None, "was never run")] * len(calls)
        self._total, self._done, self._lock = len(calls), 0, threading.Lock()
        self._queues, self._busy = {}, {}
        for at, group in enumerate(groups):
            self._queues.setdefault(group, deque()).append(at)
            self._busy[group] = 0

    def choose(self):
        """The group whose processes have the most calls left each; None when there is nothing worth a process."""
        with self._lock:
            left = {g: len(q) for g, q in self._queues.items() if len(q) > (WORTH_A_PROCESS if self._busy[g] else 0)}
            if not left:
                return None
            group = max(left, key=lambda g: left[g] / (self._busy[g] + 1))
            self._busy[group] += 1
            return group

    def leave(self, group):
        """A process of the group has ended."""
        with self._lock:
            self._busy[group] -= 1

    def take(self, group):
        """The next call of a group, or None."""
        with self._lock:
            return self._queues[group].popleft() if self._queues[group] else None

    def finish(self, at, answer, progress):
        """Keep an answer and say so."""
        with self._lock:
            self.answers[at] = answer
            self._done += 1
            progress(self._done, self._total)
