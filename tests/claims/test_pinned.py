"""Every stated and recomputed value is pinned: a changed one fails here even where the verdict stays the same.

A wrong entry stays wrong when a digit of either side changes, so that the verdict alone does not notice. If a change
is meant, run `python tests/claims/test_pinned.py` and look at the difference it makes to pinned.json.
"""

import json
import math
from pathlib import Path

import pytest

from verify.claims import ledger, report
from verify.claims.ledger import leaves

PINNED = Path(__file__).with_name("pinned.json")
CLAIMS = ledger.load()


def values(claim) -> dict[str, dict]:
    """What an entry states and what its function returns, flat, in JSON's types; rounding noise removed."""

    def tidy(leaf):
        return float(f"{leaf:.4g}") if isinstance(leaf, float) and math.isfinite(leaf) else leaf

    recomputed = leaves(report.plain(claim.recompute().value))
    return {
        "stated": leaves(report.plain(claim.stated)),
        "recomputed": {path: tidy(leaf) for path, leaf in recomputed.items()},
    }


def same(got, want) -> bool:
    """Equal, or equal to three digits: the last of four may round either way."""
    if isinstance(got, bool) or isinstance(want, bool) or not isinstance(want, (int, float)):
        return type(got) is type(want) and got == want
    return isinstance(got, (int, float)) and math.isclose(got, want, rel_tol=2e-3, abs_tol=1e-12)


@pytest.fixture(scope="module")
def pinned():
    """The values as committed."""
    return json.loads(PINNED.read_text(encoding="utf-8"))


@pytest.mark.parametrize("id", CLAIMS)
def test_values_are_the_pinned_ones(id, pinned):
    """Neither side of an entry has changed: the stated one exactly, the recomputed one to three digits."""
    got, want = values(CLAIMS[id]), pinned[id]
    assert got["stated"] == want["stated"]
    assert got["recomputed"].keys() == want["recomputed"].keys()
    off = [path for path, leaf in got["recomputed"].items() if not same(leaf, want["recomputed"][path])]
    assert not off, {path: (got["recomputed"][path], want["recomputed"][path]) for path in off}


def test_nothing_else_is_pinned(pinned):
    """No entry was dropped."""
    assert pinned.keys() == CLAIMS.keys()


@pytest.mark.parametrize(
    ("got", "want"), [(1027, 1024), (0.502, 0.5), (True, 1), ("a", "b"), (None, 0.0), (float("nan"), 1.0)]
)
def test_other_values_are_not_the_same(got, want):
    """The comparison can fail."""
    assert not same(got, want)


if __name__ == "__main__":
    rows = (f"{json.dumps(id)}: {json.dumps(values(claim), ensure_ascii=False)}" for id, claim in CLAIMS.items())
    PINNED.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
