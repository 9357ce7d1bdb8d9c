"""The comparison itself: NaN never passes, infinities match their own kind, and the metrics are what they say."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from verify import errors
from verify.result import Metrics, Result

INF, NAN = math.inf, math.nan
SUITE = Path(__file__).parents[1] / "data" / "conformance.json"


def pairs():
    """The reported comparison fault A02: arrays, and the verdict that is right."""
    case = next(case for case in json.loads(SUITE.read_text()) if case["id"] == "A02")
    return [(p["reference"], p["result"], p["verdict"]) for p in case["params"]["pairs"]]


@pytest.mark.parametrize("wanted, got, verdict", pairs())
def test_compare_says_what_the_reported_fault_asks_for(wanted, got, verdict):
    assert errors.compare([float(x) for x in wanted], [float(x) for x in got], 1e-12) == verdict


@pytest.mark.parametrize(
    "wanted, got, right",
    [
        (1.0, 1.5, True),
        (1.0, 1.6, False),
        (1.0, NAN, False),
        (NAN, NAN, False),
        (NAN, 1.0, False),
        (INF, INF, True),
        (INF, -INF, False),
        (-INF, -1e30, False),
        (1.0, INF, False),
    ],
)
def test_within(wanted, got, right):
    assert errors.within([wanted], [got], 0.5).tolist() == [right]


@pytest.mark.parametrize(
    "wanted, got, lse, right",
    [
        (NAN, NAN, False, True),
        (NAN, INF, False, True),
        (INF, NAN, False, True),
        (NAN, 0.0, False, False),
        (1.0, NAN, False, False),
        (-INF, NAN, False, True),
        (-INF, NAN, True, False),
        (-INF, -INF, True, True),
        (NAN, -INF, True, False),
        (NAN, NAN, True, True),
    ],
)
def test_within_where_nan_may_spread(wanted, got, lse, right):
    assert errors.within([wanted], [got], 0.5, spread=True, lse=lse).tolist() == [right]


def measure(wanted, got, limit=0.1, plain=None, **options):
    wanted = np.array(wanted, float)
    plain = wanted if plain is None else np.array(plain, float)
    return errors.measure(wanted, np.array(got, float), limit=limit, plain=plain, apriori=1.0, fixed=None, **options)


def test_metrics_of_a_known_error():
    m = measure([[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.5, 4.0]], plain=[[1.0, 2.0], [3.0, 4.25]])
    assert (m.max_abs, m.max_rel, m.worst_index, m.got, m.wanted) == (0.5, 0.5 / 3, (1, 0), 3.5, 3.0)
    assert (m.rmse, m.rmse_plain, m.rmse_ratio, m.plain) == (0.25, 0.125, 2.0, 0.25)
    assert (m.nan, m.inf, m.share_out, m.ok, m.bound) == (0, 0, 0.25, False, 0.1)
    assert m.ratio == pytest.approx(5.0)
    assert m.cosine == pytest.approx((1 + 4 + 10.5 + 16) / math.sqrt(30 * (1 + 4 + 12.25 + 16)))


@pytest.mark.parametrize("bad", (NAN, INF, -INF))
def test_one_bad_value_fails_and_is_the_worst(bad):
    m = measure([1.0, 2.0, 3.0], [1.0, bad, 3.0], limit=1e9)
    assert not m.ok and m.worst_index == (1,) and m.max_abs == INF and m.ratio == INF
    assert (m.nan, m.inf) == ((1, 0) if math.isnan(bad) else (0, 1))


def test_expected_nan_counts_as_no_error():
    m = measure([1.0, NAN], [1.0, NAN], spread=True)
    assert m.ok and m.max_abs == 0 and m.nan == 1


def test_relative_error_ignores_elements_near_zero():
    assert measure([100.0, 1e-9], [100.0, 1e-3]).max_rel == 0


@pytest.mark.parametrize("shape", ((0,), (2, 0, 3)))
def test_nothing_to_compare_passes(shape):
    m = measure(np.zeros(shape), np.zeros(shape))
    assert m.ok and m.max_abs == 0 and m.worst_index == ()


def test_result_survives_json():
    """Through text and back, NaN and infinities included."""
    metrics = measure([1.0, 2.0], [INF, 2.0])
    result = Result("k", "c", "fp16", "emulated", "CPU", {"B": 1}, [16, 16], "fail", "why", {"O": metrics}, 0.5, 3)
    text = json.dumps(result.to_dict(), allow_nan=False)
    assert Result.from_dict(json.loads(text)) == result
    assert isinstance(result.outputs["O"], Metrics) and result.ratio == INF
