"""Time kernels on a GPU: CUDA events around the launches alone, with a cold L2, and the count of runs kept.

The protocol, for each point: up to 20 warm-ups and up to 50 timed runs, all within 3 seconds (but at least one of
each); before every timed run a buffer several times the size of the L2 cache is written, so that no input is found
there. Outputs and workspaces are allocated beforehand. The median and the 90th percentile are reported.
"""

import time
from dataclasses import asdict, dataclass
from itertools import product

import numpy as np

from verify import document, executors, registry
from verify.dtypes import DTYPES
from verify.fingerprint import fingerprint

WARMUPS, RUNS, SECONDS = 20, 50, 3.0
FLUSH_BYTES = 256 << 20  # over twice the largest L2 to date


@dataclass(frozen=True)
class Point:
    """One measurement to be made: self-attention of one batch, Hq = Hk heads, N tokens."""

    kernel: str
    N: int
    d: int
    heads: int
    dtype: str
    causal: bool

    @property
    def size(self):
        """Sizes as results name them."""
        N, d, H = self.N, self.d, self.heads
        return {"B": 1, "Hq": H, "Hk": H, "Nq": N, "Nk": N, "d": d, "dv": d}


def points(kernels, lengths, dims, dtypes, masks, heads):
    """All combinations, the kernel varying fastest so that those compared are timed side by side."""
    return [
        Point(kernel, N, d, heads, dtype, causal)
        for d, dtype, causal, N, kernel in product(dims, dtypes, masks, lengths, kernels)
    ]


class Clock:
    """A GPU's clock: flushes the L2 and times launches with events."""

    def __init__(self):
        from numba import cuda

        self._cuda = cuda
        self._flush = cuda.device_array(FLUSH_BYTES, np.uint8)

    def once(self, work):
        """Milliseconds of one cold run of ``work``."""
        self._cuda.cudadrv.driver.device_memset(self._flush, 0, FLUSH_BYTES)
        start, stop = self._cuda.event(), self._cuda.event()
        start.record()
        work()
        stop.record()
        stop.synchronize()
        return self._cuda.event_elapsed_time(start, stop)

    def run(self, work):
        """(times in ms, number of warm-ups) by the protocol; a third of the seconds go to warming up."""
        begin = time.perf_counter()
        warm = 0
        while warm < 1 or (warm < WARMUPS and time.perf_counter() - begin < SECONDS / 3):
            self.once(work)
            warm += 1
        times = []
        while not times or (len(times) < RUNS and time.perf_counter() - begin < SECONDS):
            times.append(self.once(work))
        return times, warm

    def copy_gb_per_s(self, nbytes=4 << 30):
        """Rate of a device-to-device copy, bytes read plus bytes written: the memory ceiling of this very device."""
        source, target = (self._cuda.device_array(nbytes, np.uint8) for _ in range(2))
        times, _ = self.run(lambda: target.copy_to_device(source))
        return 2 * nbytes / float(np.median(times)) / 1e6


def measure(point, clock):
    """One row of a record: what ran, and its times."""
    from flash_cuda.gpu import Gpu, upload
    from flash_cuda.launch import tile_for

    rng = np.random.default_rng([point.N, point.d, point.heads])
    shape, kind = (1, point.heads, point.N, point.d), DTYPES[point.dtype].numpy
    arrays = [upload(rng.standard_normal(shape, dtype=np.float32).astype(kind)) for _ in range(3)]
    on = Gpu()
    registry.KERNELS[point.kernel].attention()(*arrays, causal=point.causal, on=on)
    times, warm = clock.run(on.replay)
    tile = tile_for(point.d)
    return {
        **{key: asdict(point)[key] for key in ("kernel", "dtype", "causal")},
        "tile": [tile.Br, tile.Bc],
        "size": point.size,
        "median_ms": float(np.median(times)),
        "p90_ms": float(np.percentile(times, 90)),
        "min_ms": float(min(times)),
        "runs": len(times),
        "warmups": warm,
        "fingerprint": fingerprint(point.kernel),
    }


def record(rows, copy_gb_per_s):
    """A record of times: the head that says where it was made, and its rows."""
    return {
        **document.head("times", "gpu"),
        "protocol": {"warmups": WARMUPS, "runs": RUNS, "seconds": SECONDS, "l2": "cold", "clock": "CUDA events"},
        "copy_gb_per_s": copy_gb_per_s,
        "rows": rows,
    }


def missing():
    """Why nothing can be timed here; None on a GPU."""
    return executors.gpu_missing()
