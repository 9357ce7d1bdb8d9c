"""The launches of a call as one CUDA graph: the driver queues them all for the price of less than one.

A backward pass is three launches or more, and each costs the host some microseconds. Recorded once, they are one object
that the driver already knows whole.

    on = Gpu()
    dQ, dK, dV, _ = backward_hopper.attention_backward(Q, K, V, O, lse, dO, on=on)
    again = on.graph()
    again()         # the same gradients into the same arrays, from what Q, K, V, O, lse and dO hold now

**Source**: CUDA Driver API, "Graph Management"; CUDA Programming Guide, "CUDA Graphs", stream capture.
"""

import contextlib

from cuda.bindings import driver as binding

from flash_cuda.executors.launcher import DriverError, call


class Graph:
    """Launches in their order, ready to be queued together: call it to queue them, again and again.

    Parameters
    ----------
    launches : sequence of launcher.Launch
        Each has run before, so that its kernel is loaded. Their arguments are those of now, and are kept alive.
    stream : numba.cuda stream, optional
        Where the graph is queued.

    Raises
    ------
    DriverError
        The driver does not record a launch.
    """

    def __init__(self, launches, stream=0):
        self._kept = tuple(launches)
        # Launches are recorded on a stream of their own, as the default one records nothing.
        aside = call(binding.cuStreamCreate, binding.CUstream_flags.CU_STREAM_NON_BLOCKING)
        try:
            graph = self._recorded(aside)
        finally:
            call(binding.cuStreamDestroy, aside)
        try:
            self._ready = call(binding.cuGraphInstantiate, graph, 0)
        finally:
            call(binding.cuGraphDestroy, graph)
        self._call = self._ready, binding.CUstream(int(getattr(stream, "handle", stream) or 0))

    def _recorded(self, stream):
        """What the launches are as a CUgraph."""
        call(binding.cuStreamBeginCapture, stream, binding.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        try:
            for launch in self._kept:
                launch.into(stream)
        except DriverError:
            binding.cuStreamEndCapture(stream)  # which fails, too; what was refused first is what to say
            raise
        return call(binding.cuStreamEndCapture, stream)

    def __call__(self):
        (status,) = binding.cuGraphLaunch(*self._call)
        if status:
            raise DriverError(f"cuGraphLaunch: {getattr(status, 'name', status)}")

    def __del__(self):
        with contextlib.suppress(Exception):  # the driver may be gone already, or there never was a graph
            binding.cuGraphExecDestroy(self._ready)
