"""The look: labels that do not touch, one colour a step, the same bytes on every run."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

import figures
from figures.style import STEP_COLOUR, render, spread
from verify.registry import KERNELS


@pytest.fixture(scope="module", params=figures.TOPICS)
def made(request):
    """(fig_<name>, its data) of one topic, by name."""
    return {name: (fig, data()) for name, fig, data in figures.recipes(request.param)}


@pytest.fixture
def drawn(made):
    """All figures of one topic, by name."""
    return {name: fig(data) for name, (fig, data) in made.items()}


def test_every_topic_has_a_figure_and_it_renders(made, drawn):
    """A topic without figures, or one that fails to draw, is a mistake; and every run gives the same bytes."""
    assert made
    for name, (fig, data) in made.items():
        svg = render(drawn[name], "svg")
        assert b"</svg>" in svg and len(svg) < 1e6
        assert svg == render(fig(data), "svg")


def boxes_of(figure, monkeypatch):
    """Every text that reaches the canvas, and its box, a pixel smaller all round."""
    found = {}
    draw = Text.draw

    def noted(text, renderer, *args, **kwargs):
        if text.get_visible() and text.get_text().strip():
            box = Text.get_window_extent(text, renderer)  # an annotation would count its arrow
            found[id(text)] = text.get_text(), box.padded(-1.5)
        return draw(text, renderer, *args, **kwargs)

    monkeypatch.setattr(Text, "draw", noted)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    found.clear()  # the layout settles in the first round
    canvas.draw()
    return list(found.values())


def test_no_two_texts_overlap(drawn, monkeypatch):
    """Axis labels, titles, tick labels and notes keep clear of each other, and stay inside the picture."""
    for name, figure in drawn.items():
        boxes = boxes_of(figure, monkeypatch)
        assert len(boxes) > 10
        for (a, box_a), (b, box_b) in itertools.combinations(boxes, 2):
            assert not box_a.overlaps(box_b), f"{name}: {a!r} and {b!r} overlap"
        for text, box in boxes:
            inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
            assert inside, f"{name}: {text!r} leaves the picture"


def test_axes_have_labels(drawn):
    """Every axis with ticks says what it is, one label a shared row or column at least."""
    for name, figure in drawn.items():
        for axis in ("xaxis", "yaxis"):
            ticked = [
                ax for ax in figure.axes if ax.axison and any(t.get_text() for t in getattr(ax, axis).get_ticklabels())
            ]
            if ticked and name != "kernels":  # the matrix's rows and columns name themselves
                assert any(getattr(ax, axis).label.get_text() for ax in ticked), f"{name}: {axis} without a label"


def test_one_colour_a_step():
    """Every registered step has a colour, and no two share one."""
    assert set(KERNELS) <= set(STEP_COLOUR)
    assert len(set(STEP_COLOUR.values())) == len(STEP_COLOUR)


@given(st.lists(st.floats(-10, 10), max_size=12), st.floats(0.01, 3))
def test_spread(wanted, gap):
    """Labels come out far enough apart, in order, and about the centre they had."""
    placed = spread(wanted, gap)
    order = np.argsort(wanted, kind="stable")
    steps = np.diff(np.array(placed)[order])
    assert (steps >= gap - 1e-9).all()
    if wanted:
        assert abs(np.mean(placed) - np.mean(wanted)) <= 1e-9


def test_spread_leaves_alone_what_fits():
    """Labels that do not touch stay where their lines end."""
    assert spread([3.0, 1.0, 2.0], 0.5) == [3.0, 1.0, 2.0]
