"""Fingerprints: what changes one, and what a kernel is built from."""

import ast

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


@pytest.mark.parametrize(
    "library, used, unused",
    [("ptx", "mma", "nothing_of_step5"), ("ptx_asm", "asm", "nothing_of_step5"), ("ptx_hopper", "x", "ex2")],
)
def test_of_a_library_of_instructions_those_used_count(library, used, unused, fresh, monkeypatch):
    """An instruction more changes no kernel; one that step 5 runs, directly or not, changes step 5."""
    before, source = fingerprint.fingerprint("step5_tensor_core"), fingerprint._source
    name = next((n for n in fingerprint._definitions(ast.parse(source(f"flash_cuda.{library}"))) if used in n), None)

    def with_text(added):
        changed = f"flash_cuda.{library}"
        monkeypatch.setattr(fingerprint, "_source", lambda name: source(name) + (added if name == changed else ""))
        fingerprint.fingerprint.cache_clear()
        return fingerprint.fingerprint("step5_tensor_core")

    assert with_text(f"\n{unused} = 1\n") == before
    if library != "ptx_hopper":
        assert with_text(f"\n{name} = 1\n") != before


def test_instructions_reached_through_a_module_are_found():
    """Step 6 names them as attributes, and its routines by name."""
    used = {node.name for node in fingerprint.definitions_used(["flash_cuda.step6_flash_v3", "flash_cuda.hopper_ops"])
            if hasattr(node, "name")}  # fmt: skip
    assert {"wgmma_shared", "wgmma_wait", "assembly", "quotient", "ex2"} <= used
