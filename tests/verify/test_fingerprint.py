"""Fingerprints: what changes one, and what a kernel is built from."""

import pytest

from verify import fingerprint


@pytest.fixture
def fresh():
    """Without what was computed before."""
    fingerprint.fingerprint.cache_clear()
    yield
    fingerprint.fingerprint.cache_clear()


def test_imports_are_followed_and_the_hosts_modules_are_not():
    found = fingerprint.built_from("flash_cuda.backward")
    parts = {f"flash_cuda.{stem}" for stem in ("gradient_ops", "rule_ops", "tile_ops", "elements", "vocabulary")}
    assert parts <= set(found)
    assert not set(found) & fingerprint.HOST and "flash_cuda.backward" not in found


@pytest.mark.parametrize("kernel", fingerprint.LADDER)
def test_what_is_written_out_is_what_is_found(kernel):
    """The ladder's parts are a list, for the sake of older records; a step that imports more would be missed."""
    assert set(fingerprint.PARTS) == set(fingerprint.built_from(f"flash_cuda.{kernel}"))


@pytest.mark.parametrize("part", ["gradient_ops", "backward", "vocabulary"])
def test_a_changed_part_changes_it_and_a_comment_does_not(part, fresh, monkeypatch):
    before, source = fingerprint.fingerprint("backward"), fingerprint._source

    def with_text(added):
        """Add to the source of the part."""
        changed = f"flash_cuda.{part}"
        monkeypatch.setattr(fingerprint, "_source", lambda name: source(name) + (added if name == changed else ""))
        fingerprint.fingerprint.cache_clear()

    with_text("\n# said again\n")
    assert fingerprint.fingerprint("backward") == before
    with_text("\nx = 1\n")
    assert fingerprint.fingerprint("backward") != before
