"""The ledger: declared verdicts follow from recomputation, and no stated number can change unnoticed."""

from dataclasses import replace

import pytest

from verify.claims import ledger
from verify.claims.ledger import Bound, Cases, Elsewhere, Range, Truth, imply, leaves, perturbed

CLAIMS = ledger.load()
each = pytest.mark.parametrize("claim", CLAIMS.values(), ids=list(CLAIMS))


def implied(claim, stated):
    """The verdict that the entry's recomputation gives another stated value."""
    return imply(claim, stated, ledger.recomputed(claim)).verdict


def bare(truth):
    """The recomputed value without its wrapper."""
    return truth.value if isinstance(truth, (Truth, Elsewhere)) else truth


@each
def test_declared_verdict_is_what_the_recomputation_implies(claim):
    """The verdict written down is the one that follows."""
    outcome = claim.recompute()
    assert outcome.verdict == claim.verdict, outcome.detail
    assert outcome.agrees == (claim.verdict in ("confirmed", "unverifiable"))


@each
def test_a_changed_stated_value_changes_the_verdict(claim):
    """Confirmed: any one leaf changed is rejected. Wrong or inconsistent: the recomputed value itself would pass."""
    truth = ledger.recomputed(claim)
    if claim.verdict == "confirmed":
        value = claim.stated
    elif isinstance(truth, Cases):
        value = next(iter(truth.values.values()))
    elif isinstance(truth, Bound):
        return
    else:
        value = bare(truth)
    cases = truth.values.values() if isinstance(truth, Cases) else [truth]
    assert any(imply(claim, value, case).verdict == "confirmed" for case in cases)
    for path, changed in perturbed(value, claim.tol):
        for case in cases:
            if imply(claim, value, case).verdict == "confirmed":
                assert imply(claim, changed, case).verdict != "confirmed", f"{path} may change unnoticed"


@each
def test_units_entries_are_right_in_the_other_unit_only(claim):
    """Scaling by `unit_factor` repairs a units entry; any other factor does not."""
    if claim.verdict != "units":
        assert claim.unit_factor is None
        return
    assert implied(claim, ledger.scale(claim.stated, claim.unit_factor)) == "confirmed"
    assert implied(claim, ledger.scale(claim.stated, 3.0)) == "wrong"


@each
def test_bounds_exclude_something_or_say_why_not(claim):
    """An unverifiable number turns wrong outside its bound; where there is none, a reason is given."""
    truth = ledger.recomputed(claim)
    if not isinstance(truth, Bound):
        return
    assert len(truth.reason) > 15
    ends = [end for side in (truth.lo, truth.hi) for end in leaves(side).values()]
    if any(abs(end) != float("inf") for end in ends):
        verdicts = {implied(claim, ledger.scale(claim.stated, factor)) for factor in (-1e12, 1e-12, 1e12)}
        assert "wrong" in verdicts


@each
def test_entry_is_complete(claim):
    """What a reader needs is there: titles in both languages, what is right, a source where one is needed."""
    assert claim.section.startswith(claim.group) or claim.group == "blog"
    assert claim.title_en and claim.title_zh and claim.paraphrase
    assert 1 <= claim.severity <= 3
    if claim.verdict != "confirmed":
        assert len(claim.right) > 10
    if claim.kind in ("hardware", "library"):
        assert claim.source
    if claim.verdict == "inconsistent":
        assert isinstance(ledger.recomputed(claim), Elsewhere) and claim.conflicts_with
    assert claim.id not in claim.conflicts_with
    for other in claim.conflicts_with:
        assert other in CLAIMS, f"conflicts with {other}, which does not exist"


@each
def test_faulty_listings_are_mended(claim):
    """A listing that fails has a repair that passes everything the listing was expected to."""
    if claim.kind == "listing" and claim.verdict == "wrong":
        assert claim.mended is not None
    if claim.mended is not None:
        assert claim.verdict != "confirmed"
        assert imply(claim, claim.stated, claim.mended()).verdict == "confirmed"


@each
def test_recomputation_does_not_read_what_is_stated(claim):
    """Replacing the stated value leaves the recomputation as it was."""
    other = replace(claim, stated="nothing")
    assert ledger.recomputed(other) is ledger.recomputed(claim)


def test_every_verdict_and_most_kinds_occur():
    """The ledger is not one-sided."""
    assert {claim.verdict for claim in CLAIMS.values()} == set(ledger.VERDICTS)
    assert len(CLAIMS) >= 150


class TestImply:
    """The rules, on made-up entries."""

    @staticmethod
    def claim(stated, **data):
        return ledger.Claim(
            "18.1-999", "18.1", "text", "t", "t", "p", stated, "confirmed", "number", truth=dict, **data
        )

    def test_values(self):
        """Tolerance, units, and everything else."""
        c = self.claim(100.0, unit_factor=1.024)
        assert imply(c, 100.0, 101.0).verdict == "confirmed"
        assert imply(c, 100.0, 102.5).verdict == "units"
        assert imply(c, 100.0, Truth(120.0)).verdict == "wrong"

    def test_nan_agrees_with_nothing(self):
        """A recomputation that fails silently cannot confirm."""
        assert imply(self.claim(float("nan")), float("nan"), float("nan")).verdict == "wrong"
        assert imply(self.claim(1.0), 1.0, float("nan")).verdict == "wrong"

    def test_types_do_not_mix(self):
        """True is not 1, and "1" is not 1."""
        assert imply(self.claim(True), True, 1).verdict == "wrong"
        assert imply(self.claim("1"), "1", 1).verdict == "wrong"

    def test_cases(self):
        """All, some, none."""
        c = self.claim(1)
        assert imply(c, 1, Cases({"a": 1, "b": 1})).verdict == "confirmed"
        assert imply(c, 1, Cases({"a": 1, "b": 2})).verdict == "depends"
        assert imply(c, 1, Cases({"a": 3, "b": 2})).verdict == "wrong"

    def test_elsewhere_and_bound(self):
        """Contradiction, and the limits of what cannot be rerun."""
        c = self.claim(1)
        assert imply(c, 1, Elsewhere(2, ("x",))).verdict == "inconsistent"
        assert imply(c, 1, Bound(0, 2, "reason")).verdict == "unverifiable"
        assert imply(c, 3, Bound(0, 2, "reason")).verdict == "wrong"

    def test_ranges(self):
        """A truth inside, outside, and a range inside a range."""
        c = self.claim(Range(2, 4), tol=0)
        assert imply(c, Range(2, 4), 3).verdict == "confirmed"
        assert imply(c, Range(2, 4), 5).verdict == "wrong"
        assert imply(c, Range(2, 4), Range(2, 3)).verdict == "confirmed"
        assert imply(c, Range(2, 4), Range(1, 3)).verdict == "wrong"

    def test_shapes_must_match(self):
        """A row that one side lacks is a mistake in the entry, not a disagreement."""
        with pytest.raises(ValueError, match="shape"):
            imply(self.claim({"a": 1}), {"a": 1}, {"b": 1})

    def test_registration(self):
        """Ids are unique, verdicts and kinds known."""
        known = next(iter(CLAIMS.values()))
        data = {
            name: getattr(known, name)
            for name in ("section", "where", "title_en", "title_zh", "paraphrase", "stated", "verdict", "kind")
        }
        with pytest.raises(ValueError, match="twice"):
            ledger.claim(known.id, **data)(dict)
        with pytest.raises(ValueError, match="unknown"):
            ledger.claim("18.1-998", **(data | {"verdict": "perhaps"}))(dict)
        assert "18.1-998" not in CLAIMS
