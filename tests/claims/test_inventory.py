"""Coverage: every table, figure, listing, formula and blog section has entries or a reason."""

from verify.claims import inventory, ledger


def test_no_unexplained_blank():
    """The generated table is complete and names only entries that exist."""
    assert inventory.gaps() == []


def test_reasons_are_sentences():
    """A blank is explained, not waved through."""
    for rows in inventory.coverage().values():
        for item, ids in rows.items():
            if isinstance(ids, str):
                assert len(ids) > 25, f"{item}: {ids!r}"


def test_every_entry_is_in_the_table():
    """No entry is lost between the items and the running text."""
    listed = {
        id for rows in inventory.coverage().values() for ids in rows.values() if not isinstance(ids, str) for id in ids
    }
    assert listed == set(ledger.load())


def test_a_missing_item_is_found(monkeypatch):
    """The check can fail: a table left out, an item without entries, and an id that does not exist."""
    broken = {group: dict(rows) for group, rows in inventory.ITEMS.items()}
    del broken["18.1"]["Figure 18-2"]
    broken["18.2"]["Table 18-3"] = ()
    broken["18.3"]["Table 18-9"] = ("18.3-041", "18.3-999")
    monkeypatch.setattr(inventory, "ITEMS", broken)
    found = "\n".join(inventory.gaps())
    for part in ("Figure 18-2: not listed", "Table 18-3: neither", "no entry 18.3-999"):
        assert part in found
