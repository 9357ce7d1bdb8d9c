"""A run as one JSON document, and the newest such document recorded on a GPU."""

import hashlib
import json
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from verify import executors, tolerance
from verify.fingerprint import fingerprint, judging
from verify.registry import CUDA
from verify.result import Result

SCHEMA = 1
RECORDS = Path(__file__).parent / "records"
PACKAGES = ("flashproof", "numpy", "numba", "numba-cuda", "ml_dtypes", "cuda-toolkit", "cuda-bindings")
# Recorded with a stranger's kernel, where they are installed.
FURTHER = ("torch", "triton", "flash-attn", "jax", "cupy", "cupy-cuda12x", "cupy-cuda13x")


def build(results, executor) -> dict:
    """Everything a later reader needs to know about a run.

    Parameters
    ----------
    results : list of Result
    executor : "gpu" or "emulated"

    Returns
    -------
    dict
        schema, kind ("verify"), made (UTC), executor, device, driver, python, packages, commit, factor, fingerprints
        of cases and bounds (judged_by) and of the kernels that ran, their ways to the gradients, counts by verdict, and
        results as `Result.to_dict` gives them.
    """
    ran = dict.fromkeys(r.kernel for r in results if r.executor != "numpy" and r.verdict != "skip")
    return {
        **head("verify", executor),
        "factor": tolerance.FACTOR,
        "judged_by": judging(),
        "fingerprints": {kernel: _fingerprint(kernel) for kernel in ran},
        "ways": {kernel: _ways(kernel) for kernel in ran},
        "counts": counts(results),
        "results": [result.to_dict() for result in results],
    }


def head(kind, executor, device=None) -> dict:
    """Where, when and with what a document was made: the first entries of all of them."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "executor": executor,
        "device": device or executors.device_name(executor),
        "driver": driver() if executor == "gpu" else None,
        "python": platform.python_version(),
        "packages": packages(),
        "commit": commit(),
    }


def counts(results) -> dict[str, int]:
    """How many results have each verdict; all four are always there."""
    return {name: sum(r.verdict == name for r in results) for name in ("pass", "fail", "error", "skip")}


def lines(made, rows) -> str:
    """A document as JSON text with each of its rows on a line of its own, so that a changed row is a changed line.

    Parameters
    ----------
    made : dict
    rows : "results" or "rows"
        The entry that holds them, the last one.
    """
    head = json.dumps({**made, rows: []}, indent=1, allow_nan=False)
    text = ",\n".join("  " + json.dumps(row, allow_nan=False) for row in made[rows])
    return head.removesuffix("[]\n}") + (f"[\n{text}\n ]\n}}\n" if text else "[]\n}\n")


def newest_gpu(folder=RECORDS) -> dict | None:
    """The newest document of a GPU run in a folder of records, or None. Files of other kinds are passed over."""
    found = []
    for path in sorted(Path(folder).glob("*.json")):
        try:
            data = json.loads(path.read_text())
        except ValueError:
            continue
        if isinstance(data, dict) and data.get("kind") == "verify" and data.get("executor") == "gpu":
            found.append(data)
    return max(found, key=lambda data: data.get("made", ""), default=None)


def stale(document) -> set[str]:
    """Kernels of a recorded run whose code has changed since, or of whose ways to the gradients not all were judged."""
    if document is None:
        return set()
    ways = document.get("ways", {})
    return {kernel for kernel, name in document.get("fingerprints", {}).items()
            if _fingerprint(kernel) != name or _ways(kernel) != ways.get(kernel, [{}])}  # fmt: skip


def judged_otherwise(document) -> bool:
    """Whether cases or bounds have changed since a recorded run, so that its counts and ratios are of older ones."""
    return document.get("judged_by") != judging()


def _ways(kernel):
    """A kernel's ways to the gradients, as JSON has them."""
    return list(CUDA[kernel].ways) if kernel in CUDA else [{}]


def _fingerprint(kernel):
    """A kernel's fingerprint, its gradients' included; None if it does not import, which the results say already."""
    back = CUDA[kernel].gradients if kernel in CUDA else None
    try:
        return fingerprint(kernel, *([back.module.removeprefix("flash_cuda.")] if back else []))
    except (ImportError, SyntaxError):
        return None


def file_fingerprint(path) -> str | None:
    """Twelve hexadecimal digits for a file as it is; None if there is none."""
    path = Path(path)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else None


def results_of(document) -> list[Result]:
    """The results in a document."""
    return [Result.from_dict(data) for data in document["results"]]


def packages(names=PACKAGES) -> dict[str, str | None]:
    """Installed versions of what a result depends on; None where one is missing."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str | None:
    """The checkout's commit, with "+" if it has changes; None outside a checkout."""
    root = Path(__file__).parent.parent

    def git(*args):
        return subprocess.run(["git", "-C", root, *args], capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != root:
            return None
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def driver() -> str | None:
    """The CUDA driver's version, as nvidia-smi prints it."""
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
