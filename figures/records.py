"""Times measured on a GPU, as `verify/records` keeps them.

`verify.bench.record` says what is in one: where it was made, the rate of a plain copy on that device, and `rows`, one
a measured point. `dram_bytes` is there where a hardware counter was read.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from refimpl.tiling import Tile
from verify.document import RECORDS
from verify.fingerprint import fingerprint


@dataclass(frozen=True)
class Point:
    """One kernel at one size on one device.

    Attributes
    ----------
    copy_gb_per_s : float or None
        What a plain copy reaches there, bytes read plus bytes written: the memory ceiling in practice.
    fingerprint : str
        Of the kernel that was timed.
    """

    kernel: str
    device: str
    copy_gb_per_s: float | None
    fingerprint: str
    dtype: str
    causal: bool
    tile: Tile
    size: dict
    median_ms: float
    p90_ms: float
    dram_bytes: int | None = None

    @property
    def flops(self) -> int:
        """4 B H Nq Nk d operations, half of it when causal: the convention, not what the kernel does."""
        s = self.size
        full = 2 * s["B"] * s["Hq"] * s["Nq"] * s["Nk"] * (s["d"] + s["dv"])
        return full // 2 if self.causal else full

    @property
    def tflops(self) -> float:
        """Rate in 1e12 operations a second, by that convention."""
        return self.flops / self.median_ms / 1e9

    def has(self, **size) -> bool:
        """These letters of the size have these values."""
        return all(self.size[name] == value for name, value in size.items())

    @property
    def stale(self) -> bool:
        """The kernel was changed since."""
        return fingerprint(self.kernel) != self.fingerprint


def newest(kind: str, folder: Path = RECORDS) -> dict | None:
    """The newest record of a kind, or None."""
    documents = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    found = [data for data in documents if isinstance(data, dict) and data.get("kind") == kind]
    return max(found, key=lambda data: data["made"], default=None)


def times(folder: Path = RECORDS, kind: str = "times") -> list[Point]:
    """Every point of the newest record of times, or of another kind with rows of that form; empty if there is none."""
    record = newest(kind, folder)
    if record is None:
        return []
    return [
        Point(
            row["name"] if "name" in row else row["kernel"],
            record["device"],
            _copy(record),
            row["fingerprint"],
            row["dtype"],
            row["causal"],
            Tile(*row["tile"]),
            row["size"] if "size" in row else _size(row),
            row["median_ms"],
            row["p90_ms"],
            row.get("dram_bytes"),
        )
        for row in record["rows"]
        # A record of `verify bench` also has peers, backward passes, and what could not be measured.
        if "median_ms" in row and row.get("direction", "forward") == "forward" and "fingerprint" in row
    ]


def _copy(record: dict) -> float | None:
    """The rate of a plain copy, where records of either form keep it."""
    if "ceilings" in record:
        return record["ceilings"]["measured"]["gb_per_s"]
    return record.get("copy_gb_per_s")


def _size(row: dict) -> dict:
    """Self-attention's sizes under all their letters."""
    B, H, N, d = (row[name] for name in "BHNd")
    return {"B": B, "Hq": H, "Hk": H, "Nq": N, "Nk": N, "d": d, "dv": d}
