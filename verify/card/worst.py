"""Of all runs of a kernel the one whose error is worth looking at: the simplest that fails."""

import math


def worst_run(plan, runs):
    """The simplest failing run, else the one with the largest error; None if none was judged.

    Parameters
    ----------
    plan : verify.foreign.run.Plan
    runs : sequence of Run
    """
    judged = [run for run in runs if run.place]
    failing = [run for run in judged if run.result.verdict == "fail" and run.place.text]
    if failing:
        cases = {case.id: case for case in plan.cases}
        types = list(dict.fromkeys(run.result.dtype for run in runs))
        # Inputs and options of a simple case are no second thing to understand, nor is a coarser type. Among those
        # alike, what is wrong everywhere shows least; nor does a picture of a few elements show much.
        return min(failing, key=lambda run: (*_simple(cases[run.result.case]), types.index(run.result.dtype),
                                             *_telling(run)))  # fmt: skip
    return max(judged, key=lambda run: run.result.ratio, default=None)


def _simple(case):
    """How much there is to understand about a case beside that it fails: least is first."""
    return case.recipe != "normal" or case.layout != "contiguous", len(case.needs) + (case.scale is not None)


def _telling(run):
    """How little the place of an error says: least is first."""
    return math.isinf(run.result.ratio), len(run.place.rows) < 16, _share(run)


def _share(run):
    """Share of the rows, as far as they can be told apart, that are out of bound."""
    rows = run.place.rows
    return sum(not r <= 1 for r in rows) / len(rows)
