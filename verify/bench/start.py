"""How long a kernel's first result takes: where it has to be compiled, and in a process that finds it compiled."""

import os
import tempfile
from contextlib import contextmanager

from verify import timing
from verify.bench import points as bench_points
from verify.bench.check import rows_of
from verify.worker import Worker, WorkerDied

CACHE = "FLASHPROOF_CACHE"
LIMIT = 120.0  # seconds for one process


@contextmanager
def empty_cache():
    """A cache of compiled kernels that is empty, and gone afterwards: what runs within compiles its kernels."""
    kept = os.environ.get(CACHE)
    with tempfile.TemporaryDirectory(prefix="flashproof-") as folder:
        os.environ[CACHE] = folder
        try:
            yield
        finally:
            del os.environ[CACHE]
            if kept is not None:
                os.environ[CACHE] = kept


def restarts(rows, kernels) -> list[dict]:
    """The first call of each kernel and direction in a process of its own, at a point where it has run in this one.

    Parameters
    ----------
    rows : list of dict
        Of a record: what ran.
    kernels : list of str

    Returns
    -------
    list of dict
        The point's sizes, "name", and "first_call_s" or "not_measured".
    """
    ran = {(row["name"], row["direction"]): row for row in rows if "ms" in row and row["name"] in kernels}
    found = []
    for (name, _), row in ran.items():
        where = {size: row[size] for size in bench_points.Point.__dataclass_fields__}
        with Worker() as worker:
            try:
                said = {"first_call_s": worker.call("verify.bench.start:first_call", name, where, limit=LIMIT)}
            except (WorkerDied, RuntimeError) as error:
                said = {"not_measured": bench_points.brief(error)}
        found.append({**where, "name": name, **said})
    return found


def first_call(name, where) -> float:
    """Seconds of a kernel's first call in this process, its arrays being on the device already.

    Parameters
    ----------
    name : str
    where : dict
        The sizes of a `points.Point`.
    """
    point, device = bench_points.Point(**where), timing.Device()
    kernel = bench_points.kernel(name, point, bench_points.Inputs().device(point), rows_of(point))
    return seconds(kernel.work, device)


def seconds(work, device) -> float:
    """Seconds until a run of something is done, from before it is launched."""
    begin = device.host_ms()
    work()
    device.wait()
    return (device.host_ms() - begin) / 1e3
