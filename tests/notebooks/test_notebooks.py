"""Notebooks: the .ipynb is its .py executed, it runs from top to bottom, and it holds no errors."""

import importlib.util
import re
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
OPT_OUT: set[str] = set()  # stems that are not executed, each with its reason beside it

_spec = importlib.util.spec_from_file_location("notebooks_build", FOLDER / "build.py")
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)

SOURCES = build.sources()
each = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def stored(source: Path) -> nbformat.NotebookNode:
    """The committed .ipynb of a source."""
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def test_there_are_notebooks_and_each_ipynb_has_a_source():
    """Neither half of a pair is alone."""
    assert {path.stem for path in SOURCES} == {path.stem for path in FOLDER.glob("*.ipynb")}
    assert {"02_attention", "03_gpu_io", "04_flash_v1"} <= {path.stem for path in SOURCES}


@each
def test_pair_has_equal_cells(source):
    """`make notebooks` was run after the last edit."""
    wanted = [(cell.cell_type, cell.source) for cell in build.read(source).cells]
    assert [(cell.cell_type, cell.source) for cell in stored(source).cells] == wanted


@each
def test_stored_outputs(source):
    """Every code cell was run, in order, and none raised; no machine's paths; under 1 MB."""
    code = [cell for cell in stored(source).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = {output.output_type for cell in code for output in cell.outputs}
    assert "error" not in kinds
    streams = {output.name for cell in code for output in cell.outputs if output.output_type == "stream"}
    assert streams <= {"stdout"}, "a warning was stored"
    text = source.with_suffix(".ipynb").read_text()
    assert not re.search(r"/(home|root|tmp|Users|work)/", text)
    assert len(text) < 1e6


@each
def test_house_style(source):
    """The three opening headings, exercises with solutions, sources; no cell of code over 15 lines."""
    cells = build.read(source).cells
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    headings = re.findall(r"^## (.*)$", prose, re.M)
    assert headings[:3] == ["What you'll do", "What you'll learn", "What you'll need"]
    assert headings[-2:] == ["Exercises", "Sources"]
    assert "<details><summary>Solutions</summary>" in prose
    longest = max((cell for cell in cells if cell.cell_type == "code"), key=lambda cell: len(cell.source.splitlines()))
    assert len(longest.source.splitlines()) <= 15, longest.source


@each
def test_executes(source):
    """From top to bottom in a fresh kernel: its assertions hold."""
    if source.stem in OPT_OUT:
        pytest.skip("opted out, see OPT_OUT")
    executed = build.execute(source)
    kinds = {output.output_type for cell in executed.cells for output in cell.get("outputs", ())}
    assert "error" not in kinds


def test_unknown_name_is_one_line(capsys):
    """A notebook that is not there: exit 2 and what there is."""
    assert build.main(["99_nothing"]) == 2
    said = capsys.readouterr()
    assert "99_nothing" in said.err and "02_attention" in said.err and said.err.count("\n") == 1
