"""A process to run kernels in: whatever a kernel does to it, the verifier goes on."""

import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from importlib import import_module

# A fresh interpreter: a fork would inherit the parent's CUDA context and its threads' locks.
_CONTEXT = multiprocessing.get_context("spawn")


class WorkerDied(RuntimeError):
    """The process ended, or was ended at its time limit, before it answered. The message is one line."""


class Worker:
    """One process that calls functions by name, one at a time.

    Use as a context manager; the process starts with the first call and again after one that killed it.
    """

    def __init__(self):
        self._process = self._pipe = self._log = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def call(self, function, *args, limit):
        """Run ``function(*args)`` in the process.

        Parameters
        ----------
        function : str
            "package.module:name".
        args
            Anything that pickles.
        limit : float
            Seconds. At the limit the process is killed. Starting it is not counted.

        Returns
        -------
        What the function returns.

        Raises
        ------
        WorkerDied
            At the limit, or when the process ends by itself, with its last words.
        RuntimeError
            If the function raises: the message is the exception's, with its traceback as a note.
        """
        if self._process is None or not self._process.is_alive():
            self._start()
        try:
            self._pipe.send((function, args))
            if not self._pipe.poll(limit):
                self.close()
                raise WorkerDied(f"no answer within {limit:g} s")
            answer, value, note = self._pipe.recv()
        except (EOFError, OSError):
            raise WorkerDied(self._obituary()) from None
        if answer:
            return value
        error = RuntimeError(value)
        error.add_note(note)
        raise error

    def close(self):
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._log.close()
        self._process = self._pipe = self._log = None

    def _start(self):
        self.close()
        self._log = tempfile.NamedTemporaryFile("r", prefix="verify-", suffix=".log")  # noqa: SIM115 (close() does)
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs, self._log.name), daemon=True)
        self._process.start()
        theirs.close()
        if not self._pipe.poll(120) or self._pipe.recv() != "ready":
            self.close()
            raise WorkerDied("the worker process did not start within 120 s")

    def _obituary(self):
        self._process.join(10)
        code = self._process.exitcode
        cause = f"exit status {code}"
        if code is not None and code < 0:
            cause = signal.Signals(-code).name
        words = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        self.close()
        return f"the worker process died ({cause})" + (f": {words[-1][:200]}" if words else "")


def _serve(pipe, log):
    """The process's own loop. What it prints goes to the log."""
    os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")
    words = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(words, 1)
    os.dup2(words, 2)
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):  # workers share the cores among them already
        pipe.send("ready")
        while True:
            try:
                function, args = pipe.recv()
            except (EOFError, KeyboardInterrupt):
                return
            try:
                module, name = function.split(":")
                pipe.send((True, getattr(import_module(module), name)(*args), ""))
            except Exception as error:
                line = f"{type(error).__name__}: {error}".splitlines()[0]
                line += f" ({error.place})" if getattr(error, "place", "") else ""  # where in a stranger's file
                pipe.send((False, line, traceback.format_exc()))
            sys.stdout.flush()
