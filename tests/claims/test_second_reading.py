"""The second reading: which entries, that its two records say the same, and that the reports show it."""

from collections import Counter
from pathlib import Path

import pytest

from verify.__main__ import main
from verify.claims import html, ledger, report, second_reading
from verify.claims.second_reading import AGREED, DIFFERED, IDS, PER_BLOG, PER_SECTION

CLAIMS = ledger.load()
DOCUMENT = Path(second_reading.__file__).with_suffix(".md").read_text(encoding="utf-8")


def rows(heading) -> dict[str, list[str]]:
    """The table under a heading of the document: id -> its other cells."""
    body = DOCUMENT.split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines() if line[:1] == "|"]
    return {id: rest for id, *rest in cells[2:]}


def test_at_least_thirty_entries_from_every_section():
    """As many of each section as the draw says, none twice, all in the ledger."""
    assert len(IDS) == len(AGREED) + len(DIFFERED) >= 30
    assert CLAIMS.keys() >= IDS
    drawn = Counter(CLAIMS[id].group for id in IDS)
    assert drawn.pop("blog") == PER_BLOG
    assert len(drawn) == 8 and set(drawn.values()) == {PER_SECTION}


def test_the_document_says_the_same():
    """Both tables list the ids of the data, and each settled verdict is the one the ledger declares."""
    agreed, differed = rows("Agreements"), rows("Differences")
    assert agreed.keys() == set(AGREED) and differed.keys() == DIFFERED.keys()
    for id, cells in agreed.items():
        assert cells[1] == CLAIMS[id].verdict, id
    for id, (before, second, _, settled) in differed.items():
        assert settled == CLAIMS[id].verdict, id
        assert second.split()[0] == DIFFERED[id].second != before


def test_every_difference_says_how_it_was_settled():
    """A verdict that is one, and a sentence that ends in the word that stays."""
    for id, difference in DIFFERED.items():
        assert difference.second in ledger.VERDICTS
        assert len(difference.settled) > 60 and CLAIMS[id].verdict in difference.settled.lower()


@pytest.mark.parametrize("id", ["18.1-008", "blog-007"])
def test_reports_show_it(id, capsys):
    """In the entry's full print, in its JSON, on the page."""
    told = second_reading.told(id)
    assert main(["claims", "--id", id]) == 0
    assert told in capsys.readouterr().out
    result = (CLAIMS[id], CLAIMS[id].recompute())
    assert report.entry(*result)["second_reading"] == told
    assert "Second reading:</b> " in html.page([result])


def test_entries_read_once_say_nothing():
    """Only the drawn ones carry the note."""
    assert second_reading.told("18.1-001") == ""
    assert report.entry(CLAIMS["18.1-001"], CLAIMS["18.1-001"].recompute())["second_reading"] == ""
