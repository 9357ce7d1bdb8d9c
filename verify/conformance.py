"""Runs the cases of a conformance file against an implementation: right, wrong, or refused with a reason."""

import ast
import re
from dataclasses import dataclass

import numpy as np

from refimpl import softmax
from refimpl.tiling import Tile
from verify import conformance_calls, errors, executors, suite_file
from verify.cases import SMALL_THREADS, SMALL_TILE
from verify.dtypes import DTYPES
from verify.registry import ALL

OUTPUTS = {"out": "O", "lse": "lse", "dq": "dQ", "dk": "dK", "dv": "dV", "dbias": "dbias"}
COMPARISON, MERGE = "verify.errors", "refimpl.softmax.merge"
# More blocks than this take minutes to emulate.
MOST_EMULATED = 2000


@dataclass(frozen=True)
class Outcome:
    """What an implementation made of a case in one storage type.

    Attributes
    ----------
    verdict : "right", "wrong" or "refused"
    reason : str
        The first thing that is wrong, or why it was refused.
    checked : int
        Outputs compared.
    """

    case: str
    kernel: str
    dtype: str
    verdict: str
    reason: str = ""
    checked: int = 0


def subjects(case) -> list[str]:
    """What a case is run against: functions of ours for comparisons and merges, else every implementation."""
    layout = case["input"]["layout"]
    return {"comparison only": [COMPARISON], "rows": [MERGE], "vector": []}.get(layout, list(ALL))


def needs(case) -> set[str]:
    """Capabilities a case asks for, in the registry's words."""
    p, arrays, expected = case["params"], case["input"]["arrays"], case["expected"]
    align = p.get("causal_align", "bottom_right")
    asked = {
        "causal": p.get("causal") or any(v.get("causal") for v in p.get("variants", []) if isinstance(v, dict)),
        "top_left": "top_left" in align,
        "gqa": p.get("heads_q") != p.get("heads_k"),
        "strides": "how_to_build" in case["input"],
        "mask": {"mask", "block_mask"} & arrays.keys(),
        "bias": "bias" in arrays,
        "nan_seen": case["kind"] == "padding-nan-leak" and "mask" in arrays,  # hidden, beside keys that are seen
        "window": "window_left" in p or "equals_window_of_tokens" in p or case["kind"] == "sliding-window",
        "softcap": "softcap" in p,
        "alibi": "alibi_slopes" in p,
        "dropout": "dropout_p" in p,
        "varlen": case["input"]["layout"] == "varlen_thd",
        "paged": case["input"]["layout"] == "paged",
    }
    # A case about the backward pass alone is nothing for a kernel that has none.
    asked["backward"] = case["kind"] == "backward-omits-option" and "dq" in expected
    return {name for name, is_asked in asked.items() if is_asked}


def refusal(case, kernel: str, dtype: str, executor: str) -> str | None:
    """Why an implementation is not run on a case; None if it is."""
    if dtype not in case["input"]["dtypes"]:
        kinds = ", ".join(case["input"]["dtypes"])
        return f"the case is for {kinds}" if set(case["input"]["dtypes"]) & DTYPES.keys() else f"does not store {kinds}"
    if kernel in (COMPARISON, MERGE):
        return None
    shapes = {name: a["shape"] for name, a in case["input"]["arrays"].items()}
    d = max(1, shapes["q"][-1])
    dv = max(1, shapes.get("v", shapes["q"])[-1])
    if reason := ALL[kernel].lacks(needs(case), dtype, d, dv):
        return reason
    blocks = shapes["q"][0] * (shapes["q"][1] if len(shapes["q"]) == 4 else 1)
    if ALL[kernel].runs == "cuda" and executor == "emulated" and blocks > MOST_EMULATED:
        return f"{blocks} blocks take too long to emulate: needs a GPU"
    return None


def run_case(path: str, case_id: str, kernel: str, dtype: str, executor: str) -> Outcome:
    """Run one case against one implementation. Runs in a worker."""
    case = suite_file.load(path)[case_id]
    checked = 0
    if kernel == COMPARISON:
        told, checked = _compare_pairs(case)
    elif kernel == MERGE:
        told, checked = _merge(case, dtype)
    else:
        told = None
        for task in suite_file.tasks(case):
            told, n = _run_task(case, task, kernel, dtype, executor)
            checked += n
            if told:
                told = f"{task.label}: {told}" if task.label else told
                break
    return Outcome(case_id, kernel, dtype, "wrong" if told else "right", told or "", checked)


def _compare_pairs(case):
    """The pairs of a comparison case against the judge's own comparison."""
    pairs = case["params"]["pairs"]
    for pair, wanted in zip(pairs, case["expected"]["verdicts"], strict=True):
        values = [np.array([float(x) for x in pair[side]]) for side in ("reference", "result")]
        if (got := errors.compare(*values, 1e-12)) != wanted:
            return f"{pair['reference']} against {pair['result']}: said {got!r}, wanted {wanted!r}", 0
    return None, len(pairs)


def _merge(case, dtype):
    """Two partial results, joined by the monoid of refimpl.softmax."""
    arrays = {n: suite_file.build(a).astype(DTYPES[dtype].numpy) for n, a in case["input"]["arrays"].items()}
    names = list(arrays)  # O and lse of one part, then of the other
    parts = [softmax.from_output(arrays[O], arrays[lse][:, None]) for O, lse in (names[:2], names[2:])]
    O, lse = softmax.finish(softmax.merge(*parts))
    return _compare(case, {"out": O, "lse": lse[:, 0]}, case["expected"], dtype, arrays)


def _run_task(case, task, kernel, dtype, executor):
    """(what is wrong or None, outputs compared) of one call."""
    if "probe" in task.expected[0] and ALL[kernel].runs == "numpy":
        task = suite_file.only_probed(task)  # NumPy has no launch grid to overflow
    inputs = {n: x.astype(DTYPES[dtype].numpy) if x.dtype == np.float64 and n in ("q", "k", "v", "dO") else x
              for n, x in task.arrays.items()}  # fmt: skip
    if task.label in suite_file.STRIDES:
        inputs |= {n: suite_file.STRIDES[task.label](inputs[n]) for n in "qkv"}
    refusals = [want["error"] for want in task.expected if "error" in want]
    values = [want for want in task.expected if "error" not in want]
    try:
        if task.poison:
            bad = {n: np.full((1, 1, 64, inputs[n].shape[3]), np.nan, inputs[n].dtype) for n in "qkv"}
            _call(kernel, bad, task.params, executor)
        outputs = _call(kernel, inputs, task.params, executor)
        for turn in range(1, task.repeat):
            again = _call(kernel, inputs, task.params, executor, seed=turn)
            if any(outputs[n].tobytes() != again[n].tobytes() for n in outputs):
                return "two runs on the same inputs differ", 0
    except (ValueError, TypeError) as error:
        if refusals and str(error):
            return None, 1
        return f"{type(error).__name__}: {error}", 0
    if not values:
        return f"accepted, expected an error that says: {refusals[0]['says']}", 0
    told = [_compare(case, outputs, want, dtype, inputs) for want in values]
    return next((t for t in told if t[0] is None), told[0])


def _call(kernel, inputs, params, executor, seed=0):
    """Outputs by the file's names: forward, and backward where inputs hold dO and the implementation has one."""
    return conformance_calls.call(ALL[kernel], inputs, params, _on(ALL[kernel], executor, seed))


def _on(kernel, executor, seed):
    """Arguments that say where, in what tile and in what order of threads to run."""
    if kernel.name == "oracle":
        return {}
    if kernel.runs == "numpy":
        return {"tile": Tile(SMALL_TILE, SMALL_TILE)}
    on = {"on": executors.open_executor(executor, seed)}
    if executor == "emulated":
        on |= {"tile": kernel.tile(Tile(SMALL_TILE, SMALL_TILE)), "threads": SMALL_THREADS}
    return on


def _compare(case, outputs, expected, dtype, inputs):
    """(what is wrong or None, outputs compared)."""
    checked = 0
    for name in OUTPUTS:
        if name not in expected or name not in outputs:
            continue
        wanted, got = suite_file.build(expected[name]), outputs[name]
        if "probe" in expected:
            got = got[expected["probe"]]
        if got.shape != wanted.shape:
            return f"{name} has shape {got.shape}, expected {wanted.shape}", checked
        limit = suite_file.tolerance(case, name, dtype, wanted)
        right = errors.within(wanted, got, limit) | (np.isnan(wanted) & np.isnan(got.astype(np.float64)))
        if not right.all():
            at = tuple(int(k) for k in np.argwhere(~right)[0])
            return f"{name}{list(at)} is {float(got[at]):.8g}, expected {wanted[at]:.8g} within {limit:.2g}", checked
        checked += 1
    known = inputs | outputs
    claims = case.get("exact", [])
    if any("within rounding" in line for line in claims):
        claims = []  # then the list is about values, which have been compared
    broken = [line for line in claims if holds(line, known) is False]
    return (f"not exactly: {broken[0]}" if broken else None), checked


def holds(line, arrays) -> bool | None:
    """Whether a statement such as "out[0,0,2:4] == 0" holds of the arrays; None if it is not of a form known here."""
    outputs = [x for name, x in arrays.items() if name in OUTPUTS]
    if line.startswith("no NaN"):
        return not any(np.isnan(x.astype(np.float64)).any() for x in outputs)
    sides = line.split(" == ")
    if len(sides) < 2 or not all(re.fullmatch(r"[a-z]\w*(\[[\d,:. ]+\])?|-?inf|-?\d+|\[[\d, ]+\]", s) for s in sides):
        return None
    values = [_value(side, arrays) for side in sides]
    if any(value is None for value in values):
        return None
    first = np.asarray(values[0], np.float64)
    return all(bool((np.asarray(v, np.float64) == first).all()) for v in values[1:])


def _value(side, arrays):
    """A number, a list, or an indexed array; None for an array that is not there."""
    if side.lstrip("-") == "inf":
        return float(side)
    match = re.fullmatch(r"([a-z]\w*)(?:\[(.+)\])?", side)
    if not match:
        return ast.literal_eval(side)
    name, index = match.groups()
    if name not in arrays:
        return None
    return arrays[name][_index(index)] if index else arrays[name]


def _index(text):
    """An index from its text: integers, start:stop, and an ellipsis."""
    parts = []
    for part in (piece.strip() for piece in text.split(",")):
        if part == "...":
            parts.append(Ellipsis)
        elif ":" in part:
            parts.append(slice(*(int(end) if end else None for end in part.split(":"))))
        else:
            parts.append(int(part))
    return tuple(parts)
