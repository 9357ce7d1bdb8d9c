"""`python -m figures`: what it writes, what it says of a topic that is not there."""

import re
from pathlib import Path

import matplotlib
import pytest

import figures
from figures.__main__ import main
from figures.style import render

ROOT = Path(__file__).resolve().parents[2]
SHOWN = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", (ROOT / "README.md").read_text())


def test_writes_what_it_prints(tmp_path, capsys):
    """One file a figure, named after topic and figure, and its path on a line of its own."""
    assert main(["tiling", "--out", str(tmp_path)]) == 0
    printed = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == [tmp_path / "tiling_causal.svg"]
    assert printed[0].read_text().startswith("<?xml")
    assert list(tmp_path.iterdir()) == printed


def test_unknown_topic_is_one_line(tmp_path, capsys):
    """Exit 2, the topic and the known ones named, nothing drawn."""
    assert main(["tiling", "tileing", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "'tileing'" in said.err and all(topic in said.err for topic in figures.TOPICS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shown", SHOWN)
def test_picture_is_in_step(shown):
    """The pictures that the README shows are what the code draws now."""
    path = ROOT / shown
    drawn_by = re.search(r"Matplotlib v([\d.]+)", path.read_text())[1]
    if drawn_by != matplotlib.__version__:
        pytest.skip(f"drawn by matplotlib {drawn_by}, and {matplotlib.__version__} draws letters differently")
    topic = max((t for t in figures.TOPICS if path.stem.startswith(f"{t}_")), key=len)
    drawn = dict(figures.draw(topic))[path.stem.removeprefix(f"{topic}_")]
    assert render(drawn, "svg").decode() == path.read_text(), "run `make figures`"


def test_readme_shows_a_picture_that_is_there():
    """A fresh clone has every picture that the README shows."""
    assert SHOWN
    assert all((ROOT / path).is_file() for path in SHOWN)
    ignored = (ROOT / ".gitignore").read_text()
    assert all(f"!{path}" in ignored for path in SHOWN)
