"""Fingerprints: what changes one, and what a kernel is built from."""

import ast

import pytest

from verify import document, fingerprint


@pytest.fixture
def fresh():
    """Without what was computed before."""
    fingerprint.fingerprint.cache_clear()
    yield
    fingerprint.fingerprint.cache_clear()


def test_imports_are_followed_and_the_hosts_modules_are_not():
    found = fingerprint.built_from("flash_cuda.backward")
    parts = {f"flash_cuda.parts.{stem}" for stem in ("gradient_ops", "rule_ops", "tile_ops", "elements", "vocabulary")}
    assert parts <= set(found)
    assert not set(found) & fingerprint.HOST and "flash_cuda.backward" not in found


@pytest.mark.parametrize("kernel", fingerprint.LADDER)
def test_what_is_written_out_is_what_is_found(kernel):
    """The ladder's parts are a list, for the sake of older records; a step that imports more would be missed."""
    assert set(fingerprint.PARTS) == set(fingerprint.built_from(f"flash_cuda.{kernel}"))


@pytest.mark.parametrize("part", ["parts.gradient_ops", "backward", "parts.vocabulary"])
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


def with_text(monkeypatch, module, added):
    """The fingerprint of step 5 with a line more in a module."""
    source = fingerprint._source
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "_source", lambda name: source(name) + (added if name == module else ""))
        fingerprint.fingerprint.cache_clear()
        return fingerprint.fingerprint("step5_tensor_core")


@pytest.mark.parametrize("library, used", [("ptx", "mma_f16"), ("ptx.asm", "asm")])
def test_of_a_library_of_instructions_those_used_count(library, used, fresh, monkeypatch):
    """An instruction more changes no kernel; one that step 5 runs, directly or not, changes step 5."""
    before, module = fingerprint.fingerprint("step5_tensor_core"), f"flash_cuda.{library}"
    assert with_text(monkeypatch, module, "\nnothing_of_step5 = 1\n") == before
    assert with_text(monkeypatch, module, f"\n{used} = 1\n") != before


def test_instructions_of_another_kernel_do_not_count(fresh, monkeypatch):
    before = fingerprint.fingerprint("step5_tensor_core")
    assert with_text(monkeypatch, "flash_cuda.ptx.hopper", "\nex2 = 1\n") == before


def test_a_record_of_verify_knows_a_kernel_by_its_gradients_too(fresh, monkeypatch):
    """One of forward times does not."""
    source = fingerprint._source
    forward, both, alone = (fingerprint.fingerprint("step5_tensor_core"), document._fingerprint("step5_tensor_core"),
                            document._fingerprint("step4_causal"))  # fmt: skip
    assert alone == fingerprint.fingerprint("step4_causal") and both != forward
    assert document._fingerprint("general") == fingerprint.fingerprint("general")
    monkeypatch.setattr(fingerprint, "_source", lambda name: source(name) + (
        "\nx = 1\n" if name == "flash_cuda.parts.tensor_gradient_ops" else ""))
    fingerprint.fingerprint.cache_clear()
    assert document._fingerprint("step5_tensor_core") != both
    assert fingerprint.fingerprint("step5_tensor_core") == forward


def test_instructions_reached_through_a_module_are_found():
    """Step 6 names them as attributes, and its routines by name."""
    used = {node.name for node in fingerprint.definitions_used(
        ["flash_cuda.step6_flash_v3", "flash_cuda.parts.hopper_ops"]) if hasattr(node, "name")}  # fmt: skip
    assert {"wgmma_shared", "wgmma_wait", "assembly", "quotient", "ex2"} <= used


def test_what_judges_is_all_of_what_is_imported_to_judge():
    """Every module of verify that cases, truth and bounds are made with counts, but for names and forms."""
    neither = {"verify.dtypes", "verify.result"}
    found, todo = set(), ["verify.judge", "verify.cases"]
    while todo:
        module = todo.pop()
        found.add(module)
        for node in ast.walk(ast.parse(fingerprint._source(module))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "verify":
                names = [node.module] if node.module != "verify" else [f"verify.{alias.name}" for alias in node.names]
                todo += [name for name in names if name not in found]
    assert found - neither == set(fingerprint.JUDGING)


def test_a_changed_bound_changes_what_judges(monkeypatch):
    before, source = fingerprint.judging(), fingerprint._source
    monkeypatch.setattr(fingerprint, "_source", lambda name: source(name) + "\nx = 1\n" * (name == "verify.plain"))
    assert fingerprint.judging.__wrapped__() != before


def test_a_move_changes_nothing_and_another_routine_does():
    """A record holds for the same code in another folder, with its imports in another order."""
    here = "from flash_cuda.tile_ops import tile_ops\nfrom flash_cuda.launch import prepare\nx = 1\n"
    there = "from flash_cuda.launch import prepare\nfrom flash_cuda.parts.tile_ops import tile_ops\nx = 1\n"
    assert fingerprint.code_alone(here) == fingerprint.code_alone(there)
    assert fingerprint.code_alone(here) != fingerprint.code_alone(here.replace("tile_ops import", "tensor_ops import"))
    assert fingerprint.code_alone("import a\nimport b\n") != fingerprint.code_alone("import b\nimport a\n")


def test_what_only_the_emulator_runs_changes_nothing():
    """Of a function with an overload the compiler never sees the body, unless the overload falls back on it."""
    twice = "def f(x):\n    return x\n\n@overload(f, inline='always')\ndef _f(x):\n    return lambda x: x + 1\n"
    once = "def f(x):\n    return x\n\n@overload(f)\ndef _f(x):\n    return f\n"
    for text, body_counts in ((twice, False), (once, True)):
        before = fingerprint.code_alone(text)
        assert (fingerprint.code_alone(text.replace("return x\n", "return 2 * x\n")) != before) is body_counts
        assert fingerprint.code_alone(text.replace("_f(x):\n", "_f(x):\n    x = 1\n")) != before
        assert fingerprint.code_alone(text.replace("def f(x)", "def f(x, y)")) != before
    assert fingerprint.code_alone(twice.replace("x + 1", "x + 2")) != fingerprint.code_alone(twice)
