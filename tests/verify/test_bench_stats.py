"""Intervals: that they hold the truth as often as they say, found by drawing, and that they can fail to."""

from math import comb
from statistics import NormalDist

import numpy as np
import pytest

from verify.bench import stats as bench_stats
from verify.bench.simulated import Device
from verify.bench.stats import LEAST_ROUNDS, geometric_mean, median_ranks, paired
from verify.timing import Clock, Contender, interleaved

DRAWS = {
    "normal": lambda rng, n: 1 + 0.05 * rng.standard_normal(n),
    "skewed": lambda rng, n: 1 + 0.05 * (rng.exponential(size=n) - np.log(2)),
    "heavy": lambda rng, n: 1 + 0.02 * rng.standard_cauchy(n),
    "two clocks": lambda rng, n: np.where(rng.random(n) < 0.3, 1.3, 1.0) + 0.01 * rng.standard_normal(n),
}
MEDIANS = dict.fromkeys(DRAWS, 1.0) | {"two clocks": 1 + 0.01 * NormalDist().inv_cdf(0.5 / 0.7)}


def test_ranks_by_the_binomial_distribution():
    assert median_ranks(5) is None and median_ranks(6) == (0, 5) and LEAST_ROUNDS == 6
    assert median_ranks(9) == (1, 7) and median_ranks(24) == (6, 17) and median_ranks(1) is None
    for n in range(6, 40):
        low, high = median_ranks(n)
        outside = [2 * sum(comb(n, i) for i in range(k)) / 2**n for k in (low + 1, low + 2)]
        assert low + high == n - 1 and outside[0] <= 0.05 < outside[1], n


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("n", [6, 15, 24])
def test_the_interval_holds_the_true_median_95_times_of_100(draw, n):
    """Whatever the distribution. 2000 samples: three standard errors are 1.5 %."""
    rng = np.random.default_rng([n, len(draw)])
    true, (low, high) = MEDIANS[draw], median_ranks(n)
    samples = np.sort(DRAWS[draw](rng, (2000, n)), axis=1)
    held = np.mean((samples[:, low] <= true) & (true <= samples[:, high]))
    assert held >= 0.935
    narrow = np.mean((samples[:, low + 1] <= true) & (true <= samples[:, high - 1]))
    assert narrow < 0.95  # the next narrower pair of ranks would not do


def test_the_interval_of_a_geometric_mean_holds_it(monkeypatch):
    monkeypatch.setattr(bench_stats, "RESAMPLES", 400)
    rng = np.random.default_rng(3)
    truths = np.exp(0.3 * rng.standard_normal(8))
    true, held = float(np.exp(np.mean(np.log(truths)))), 0
    for trial in range(200):
        pairs = [(np.ones(24), t * np.exp(0.05 * rng.standard_normal(24))) for t in truths]
        found = geometric_mean(pairs, seed=trial)
        held += found.low <= true <= found.high
        assert found.low <= found.value <= found.high
    assert 0.90 <= held / 200 <= 0.995


def test_pairing_takes_drift_out():
    """Two works of equal speed on a clock that slows down: in turns the ratio is 1, one after the other it is not."""
    def drift(ms):
        return 1 + 0.5 * min(1.0, ms / 150)

    device = Device(seed=2, scatter=0.003, drift=drift)
    clock = Clock(device)
    a, b = (device.work(name, 1.0) for name in "ab")
    apart = [[clock.cold(work) for _ in range(24)] for work in (a, b)]
    assert paired(*apart).low > 1.05
    device = Device(seed=2, scatter=0.003, drift=drift)
    found = interleaved(Clock(device), [Contender("a", device.work("a", 1.0)), Contender("b", device.work("b", 1.0))])
    turns = paired(found["a"].ms, found["b"].ms)
    assert turns.low <= 1 <= turns.high and turns.high - turns.low < 0.02


def test_ratios_of_unequal_lists():
    ratio = paired([1.0] * 8, [2.0] * 6)
    assert ratio.value == ratio.low == ratio.high == 2.0 and ratio.rounds == 6
    assert paired([1.0], [2.0]).low is None and geometric_mean([([1.0], [2.0])]).high is None
    with pytest.raises(ValueError, match="a round that both took part in"):
        paired([], [1.0])


def test_reaching_a_bar():
    """By the upper end; without an interval by the value itself. NaN reaches nothing."""
    low = paired(np.ones(24), np.linspace(0.9, 1.0, 24))
    assert low.value < 0.96 < low.high < 1.0
    assert low.reaches(0.96) and not low.reaches(1.0)
    assert paired([1.0], [0.99]).reaches(0.99) and not paired([1.0], [0.99]).reaches(1.0)
    assert not paired([np.nan] * 6, [1.0] * 6).reaches(0.1)
