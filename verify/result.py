"""What one judged run leaves behind: numbers for each output, a verdict, and everything needed to run it again."""

import math
from dataclasses import asdict, dataclass, field

VERDICTS = ("pass", "fail", "skip", "error")


@dataclass(frozen=True)
class Metrics:
    """How far one output lies from fp64 truth.

    Attributes
    ----------
    max_abs, rmse : float
        Largest and root-mean-square |got - wanted|. Infinite where a value is NaN or inf that should not be.
    max_rel : float
        Largest |got - wanted| / |wanted| where |wanted| is above 1 % of the largest: below, it is noise.
    rmse_plain, rmse_ratio : float
        RMSE of the plain formula at the same precision, and `rmse` over it.
    cosine : float
        Of the two outputs as one vector each; 1 where both are zero.
    nan, inf : int
        Counts in the output that was judged.
    share_out : float
        Share of elements that are out of bound.
    worst_index : tuple of int
        Where the error is largest; got, wanted: the two values there.
    plain, apriori : float
        Anchors: largest error of the plain formula, and the bound derived before anything is run.
    bound : float
        The limit: 2 x plain + floor.
    fixed : float or None
        The blog's fixed absolute limit for this type; shown, never used.
    ok : bool
        Every element is within `bound`, and every element that must not be finite is not.
    """

    max_abs: float
    max_rel: float
    rmse: float
    rmse_plain: float
    rmse_ratio: float
    cosine: float
    nan: int
    inf: int
    share_out: float
    worst_index: tuple
    got: float
    wanted: float
    plain: float
    apriori: float
    bound: float
    fixed: float | None
    ok: bool

    @property
    def ratio(self) -> float:
        """Error over bound: at most 1 when the output passes by size, infinite when it is not a number."""
        if self.max_abs == 0:
            return 0.0 if self.ok else math.inf
        return self.max_abs / self.bound if self.bound else math.inf


@dataclass(frozen=True)
class Result:
    """One kernel, one case, one dtype.

    Attributes
    ----------
    executor : str
        "gpu", "emulated" or "numpy"; "cpu" or "simulated" for a kernel that is not ours. device: its name.
    size : dict
        B, Hq, Hk, Nq, Nk, d, dv of what ran, or would have run.
    tile : list of int or None
        [Br, Bc] where the run chose it; None where the kernel did.
    verdict : str
        "pass", "fail", "skip" or "error"; reason: one line for all but the first.
    outputs : dict of str to Metrics
        By output: O, lse, and gradients if any. Empty where nothing ran.
    """

    kernel: str
    case: str
    dtype: str
    executor: str
    device: str
    size: dict
    tile: list | None
    verdict: str
    reason: str = ""
    outputs: dict = field(default_factory=dict)
    seconds: float = 0.0
    seed: int = 0

    @property
    def ratio(self) -> float | None:
        """Worst error over bound of all outputs; None where nothing was judged."""
        return max((metrics.ratio for metrics in self.outputs.values()), default=None)

    def to_dict(self) -> dict:
        """Plain data for JSON, in which NaN and infinities are the strings "nan", "inf", "-inf"."""
        return encode(asdict(self))

    @classmethod
    def from_dict(cls, data) -> "Result":
        """Undo `to_dict`."""
        data = dict(data)
        data["outputs"] = {
            name: Metrics(**{key: _decode(key, value) for key, value in metrics.items()})
            for name, metrics in data["outputs"].items()
        }
        return cls(**data)


def encode(value):
    """JSON has no word for NaN and infinities, so they become strings."""
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


def _decode(key, value):
    """A metric from JSON: the strings of `encode` back to numbers, the index back to a tuple."""
    if key == "worst_index":
        return tuple(value)
    return float(value) if isinstance(value, str) else value
