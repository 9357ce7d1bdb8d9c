"""Ratios of two kernels' times that were measured in turns, with intervals that say how sure one can be of them.

**Paired.** A GPU's clock, power and temperature drift while it is measured, and a ratio of two medians takes that drift
for a difference. Runs of one round stand side by side in time, so the ratio within a round is free of it.

**Interval of a median**: from order statistics. Each ratio lies below the true median with probability 1/2, whatever
the distribution, so that the number below it is binomial, and (k-th smallest, k-th largest) holds the median with
probability 1 - 2 P(Bin(n, 1/2) < k): the sign test turned round. The largest k that leaves 95 % is taken; below six
rounds none does, and there is no interval.

**Interval of a geometric mean over points**: bootstrap of the rounds within each point, percentiles 2.5 and 97.5.
Points are the ones asked for, not a sample of others, and are not resampled. Neither interval knows of what differs
between two processes or two machines.

**Source**: Conover, Practical Nonparametric Statistics (1999), section 3.2; Efron and Tibshirani, An Introduction to
the Bootstrap (1993), chapter 13.
"""

from dataclasses import dataclass
from math import comb

import numpy as np

CONFIDENCE = 0.95
LEAST_ROUNDS = 6  # 1 - 2 (1/2)^n reaches 95 % from here on
RESAMPLES = 4000


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one is as another, with the ends of the 95 % interval; None where none can be given."""

    value: float
    low: float | None
    high: float | None
    rounds: int

    def reaches(self, bar: float) -> bool:
        """Whether the interval, or without one the value, reaches a bar."""
        return (self.value if self.high is None else self.high) >= bar

    def __str__(self):
        span = "" if self.low is None else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.value:.3f}{span}"


def median_ranks(n: int) -> tuple[int, int] | None:
    """Indices of the sorted sample that bound its median with at least 95 %; None for fewer than six values.

    Parameters
    ----------
    n : int
        Sample size.
    """
    tail, k = 0.0, 0  # P(Bin(n, 1/2) < k)
    while 2 * (tail + comb(n, k) / 2**n) <= 1 - CONFIDENCE:
        tail += comb(n, k) / 2**n
        k += 1
    return (k - 1, n - k) if k else None


def paired(ms, other_ms) -> Ratio:
    """How many times as fast the first is as the other.

    Parameters
    ----------
    ms, other_ms : sequence of float
        Times in milliseconds, a value a round, in the same rounds; one list may end earlier, then the rounds that both
        took part in count.

    Raises
    ------
    ValueError
        There is no common round.
    """
    n = min(len(ms), len(other_ms))
    if not n:
        raise ValueError("ms, other_ms: expected a round that both took part in, there is none")
    ratios = np.sort(np.asarray(other_ms[:n], float) / np.asarray(ms[:n], float))
    ranks = median_ranks(n)
    low, high = (None, None) if ranks is None else (float(ratios[k]) for k in ranks)
    return Ratio(float(np.median(ratios)), low, high, n)


def geometric_mean(pairs, seed: int = 0) -> Ratio:
    """The geometric mean of paired ratios over points.

    Parameters
    ----------
    pairs : sequence of (ms, other_ms)
        As for `paired`, one a point.
    seed : int
        Of the bootstrap.

    Returns
    -------
    Ratio
        Without an interval if a point has fewer than six common rounds.
    """
    rng = np.random.default_rng(seed)
    medians, resampled, fewest = [], np.zeros(RESAMPLES), min(min(len(a), len(b)) for a, b in pairs)
    for ms, other in pairs:
        n = min(len(ms), len(other))
        logs = np.log(np.asarray(other[:n], float) / np.asarray(ms[:n], float))
        medians.append(np.median(logs))
        resampled += np.median(logs[rng.integers(0, n, (RESAMPLES, n))], axis=1)
    value = float(np.exp(np.mean(medians)))
    if fewest < LEAST_ROUNDS:
        return Ratio(value, None, None, fewest)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.exp(np.percentile(resampled / len(pairs), [tail, 100 - tail]))
    return Ratio(value, float(low), float(high), fewest)
