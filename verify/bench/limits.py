"""What a measured time is held against: the work that was asked for, what a chip is sold as doing, what none can do.

Operations are counted by visible pairs: a product costs two operations for each pair of a query and a key that it sees
and for each element of a head. Forward there are two products, backward five (S again, dV, dP, dQ, dK: 2.5 times as
many where dv = d). Bytes are the compulsory ones: each input read once, each output written once.
"""

from dataclasses import dataclass

from verify.cases import Shape
from verify.claims import hardware
from verify.dtypes import DTYPES

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Work:
    """What one call has to do.

    Attributes
    ----------
    flops : int
        Operations by the convention above.
    least_flops : int
        Without what a method could have kept instead: backward, S need not be computed again.
    read, written : int
        Compulsory bytes.
    """

    flops: int
    least_flops: int
    read: int
    written: int

    def tflops(self, ms: float) -> float:
        """Rate in 1e12 operations a second."""
        return self.flops / ms / 1e9

    def gb_per_s(self, ms: float) -> float:
        """Compulsory bytes a second, in 1e9: a lower bound of the traffic."""
        return (self.read + self.written) / ms / 1e6


@dataclass(frozen=True)
class Ceiling:
    """The rates that one machine reaches, or is said to reach.

    Attributes
    ----------
    tflops : float or None
        Products of 16-bit operands.
    gb_per_s : float or None
        Memory, bytes read plus bytes written.
    l2_bytes : int
        Written data that may still be in the cache when a kernel ends.
    source : str
    """

    tflops: float | None
    gb_per_s: float | None
    l2_bytes: int
    source: str

    def shares(self, work: Work, ms: float) -> dict:
        """Fractions of this ceiling that a time reaches; None where the ceiling is not known."""
        return {
            "tflops": work.tflops(ms) / self.tflops if self.tflops else None,
            "gb_per_s": work.gb_per_s(ms) / self.gb_per_s if self.gb_per_s else None,
        }


def visible_pairs(shape: Shape, causal: bool) -> int:
    """How many (query, key) pairs of one head are visible, ends aligned."""
    if not causal:
        return shape.Nq * shape.Nk
    # Row r sees keys 0 ... r + Nk - Nq. Rows with none come first, then the counts go up by one to Nk.
    rows = min(shape.Nq, shape.Nk)
    return rows * shape.Nk - rows * (rows - 1) // 2


def work(shape: Shape, causal: bool, dtype: str, direction: str = FORWARD) -> Work:
    """The work of one attention call.

    Parameters
    ----------
    shape : Shape
    causal : bool
        Ends aligned.
    dtype : str
        Storage type of Q, K, V, O and the gradients.
    direction : "forward" or "backward"
    """
    s, e = shape, DTYPES[dtype].bytes
    pairs = 2 * s.B * s.Hq * visible_pairs(s, causal)
    inputs = e * s.B * (s.Hq * s.Nq * s.d + s.Hk * s.Nk * (s.d + s.dv))
    output = e * s.B * s.Hq * s.Nq * s.dv
    if direction == FORWARD:
        flops = pairs * (s.d + s.dv)
        return Work(flops, flops, inputs, output)
    return Work(pairs * (3 * s.d + 2 * s.dv), pairs * (2 * s.d + 2 * s.dv), inputs + output, inputs)


def datasheet(device: str) -> Ceiling | None:
    """The ceiling by the maker's sheet; None for a device that is not in the table.

    Parameters
    ----------
    device : str
        Its name as the driver gives it, such as "NVIDIA H200".
    """
    sheet = _sheet(device)
    return sheet and Ceiling(sheet.fp16, sheet.gb_per_s, sheet.l2_mib << 20, sheet.source)


def speed_of_light(device: str, max_sm_mhz=None, measured: Ceiling | None = None) -> Ceiling | None:
    """Rates that the machine cannot exceed.

    The sheet's tensor-core peak is for its boost clock, and boards run above it: where the driver says how high the
    clock may go, the peak is scaled to that. For a device without a sheet it is twice what was measured on it, since
    a plain product and a plain copy reach more than half of the peak everywhere.

    Parameters
    ----------
    device : str
    max_sm_mhz : float, optional
        Highest clock of the multiprocessors, as the driver reports it.
    measured : Ceiling, optional

    Returns
    -------
    Ceiling or None
        None if nothing is known of the device.
    """
    sheet = _sheet(device)
    if sheet:
        above = max(1.0, max_sm_mhz / (1e3 * sheet.boost_ghz)) if max_sm_mhz else 1.0
        words = f"{sheet.source}, at {max(max_sm_mhz or 0, 1e3 * sheet.boost_ghz):.0f} MHz"
        return Ceiling(sheet.fp16 * above, sheet.gb_per_s, sheet.l2_mib << 20, words)
    if measured and measured.tflops and measured.gb_per_s:
        return Ceiling(2 * measured.tflops, 2 * measured.gb_per_s, measured.l2_bytes, f"twice {measured.source}")
    return None


def too_fast(ms: float, work: Work, light: Ceiling | None, cold: bool = True) -> str | None:
    """Why no machine can have done this work in this time; None if one can.

    With a warm L2 the inputs need not come from memory, so only operations count. With a cold one every input does;
    of what is written, as much as the L2 holds may still be there when the kernel ends, and is not counted.

    Parameters
    ----------
    ms : float
    work : Work
    light : Ceiling or None
        From `speed_of_light`; with None only times that are not positive numbers are refused.
    cold : bool
    """
    if not 0 < ms < float("inf"):  # NaN fails this too
        return f"{ms} ms is not a time"
    if light is None:
        return None
    rate = work.least_flops / ms / 1e9
    if rate > light.tflops:
        return f"{ms:.4g} ms would be {rate:,.0f} TFLOP/s; the machine has {light.tflops:,.0f} ({light.source})"
    moved = work.read + max(0, work.written - light.l2_bytes)
    rate = moved / ms / 1e6
    if cold and rate > light.gb_per_s:
        return f"{ms:.4g} ms would be {rate:,.0f} GB/s; the machine has {light.gb_per_s:,.0f} ({light.source})"
    return None


def _sheet(device):
    """The row of the hardware table that a driver's device name belongs to."""
    # "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200": PCIe and other variants have other rates.
    words = device.upper().replace("-", " ").split()
    for entry in (hardware.A100, hardware.H100, hardware.H200):
        if entry.name.split()[0] in words and not {"PCIE", "NVL", "40GB"} & set(words):
            return entry
    return None
