"""What all tests share: `gpu` tests are skipped, with the reason, where there is no GPU to run them on."""

import os

import pytest

# Small launches are the point of a test; numba-cuda would warn of each one.
os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")
os.environ.setdefault("MPLBACKEND", "Agg")


def _gpu_missing() -> str | None:
    """Why no GPU can be used, or None."""
    try:
        from numba import cuda
    except ImportError as error:
        return f"numba.cuda does not import: {error}"
    return None if cuda.is_available() else "no CUDA GPU"


def pytest_collection_modifyitems(config, items):
    """Mark every `gpu` test as skipped when there is no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _gpu_missing() if marked else None
    config.stash[_GPU] = bool(marked) and reason is None
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_logreport(report):
    """Note that a `gpu` test really ran."""
    if report.when == "call" and "gpu" in report.keywords and not report.skipped:
        _ran.append(report.nodeid)


def pytest_sessionfinish(session, exitstatus):
    """On a machine with a GPU, a run that was to test it and did not is a failure."""
    wanted = session.config.stash.get(_GPU, False) and not session.config.option.collectonly
    if wanted and not _ran and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


_GPU = pytest.StashKey[bool]()
_ran: list[str] = []
