"""The diff of two consecutive steps is one idea: short files, few changed lines, phases in one order."""

import ast
import difflib
import inspect
import io
import tokenize
from itertools import pairwise

import pytest

LIMIT = 40
PHASES = ["load", "scores", "softmax", "accumulate", "write"]
PARAGRAPHS = ["Idea", "Changed from", "Traffic", "Numerics", "Source"]


def code_lines(source):
    """The lines of a module that are code: no docstrings, no comments, no blank lines."""
    dropped = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node) is not None:
            dropped.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    return [line for number, line in enumerate(lines, 1) if line.strip() and number not in dropped]


def changed(before, after):
    """Lines taken out and lines put in, as `diff` counts them."""
    marks = [line[:2] for line in difflib.ndiff(code_lines(before), code_lines(after))]
    return marks.count("- "), marks.count("+ ")


def test_what_counts_as_code():
    """Docstrings, comments and blank lines do not; a line with a comment behind it does."""
    source = '"""Doc.\n\nMore."""\n\n# why\nx = 1  # because\n\ndef f():\n    """Doc."""\n    return "# no"\n'
    assert code_lines(source) == ["x = 1", "def f():", '    return "# no"']
    assert changed(source, source.replace("x = 1", "y = 2\nz = 3")) == (1, 2)


def test_each_step_changes_little(ladder):
    """At most 40 lines, out and in together; one idea is not more."""
    for before, after in pairwise(ladder.values()):
        out, put = changed(inspect.getsource(before), inspect.getsource(after))
        assert 0 < out + put <= LIMIT, after.__name__


def test_length(step):
    """Short enough to hold in the head."""
    assert 40 <= len(inspect.getsource(step).splitlines()) <= 150


def test_same_functions(ladder):
    """One core and one public function, in this order, with one signature."""
    for module in ladder.values():
        body = ast.parse(inspect.getsource(module)).body
        assert [x.name for x in body if isinstance(x, ast.FunctionDef)] == ["one_head", "attention"]
        first = ladder["step0_standard"]
        assert inspect.signature(module.attention) == inspect.signature(first.attention)
        assert inspect.getsource(module.attention) == inspect.getsource(first.attention)


def test_phases_in_order(step):
    """Phases are marked by the same words, and never go backwards but to start again with a load."""
    lines = [line.strip() for line in inspect.getsource(step.one_head).splitlines()]
    words = [line[2:].split(":")[0] for line in lines if line.startswith("# ")]
    ranks = [PHASES.index(word) for word in words if word in PHASES]
    assert set(ranks) == set(range(len(PHASES)))
    assert all(later >= earlier or later == 0 for earlier, later in pairwise(ranks))


def test_paragraphs(step):
    """Idea, Changed from, Traffic, Numerics, Source: each once, in this order."""
    heads = [line[2:].split("**")[0] for line in step.__doc__.splitlines() if line.startswith("**")]
    assert [next(p for p in PARAGRAPHS if head.startswith(p)) for head in heads] == PARAGRAPHS


def test_names_the_step_before(ladder):
    """`Changed from` says what to diff with."""
    for before, after in pairwise(ladder):
        assert f"**Changed from {before}**" in ladder[after].__doc__


@pytest.mark.parametrize("dead", ["S", "P"])
def test_nothing_quadratic_after_step_0(ladder, dead):
    """From step 1 on no N x N array is in HBM."""
    names = {name: f'"{dead}"' in inspect.getsource(module.one_head) for name, module in ladder.items()}
    assert [name for name, found in names.items() if found] == ["step0_standard"]
