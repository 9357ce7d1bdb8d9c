"""The card of a kernel: its verdict counts nothing that was skipped; pictures and sentences say where and how much."""

import html.parser
import io
import json
import re
import shlex
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console

from verify.card import card
from verify.card import cases as card_cases
from verify.card import draw as card_draw
from verify.card import html as card_html
from verify.card import pattern as card_pattern
from verify.card import text as card_text
from verify.card.place import place
from verify.cases import DEFAULT
from verify.foreign.facts import Facts
from verify.foreign.run import Plan, Run, run_one
from verify.foreign.spec import Spec
from verify.judge import reference
from verify.result import Result
from verify.testing import check

SOURCE = """
import numpy as np

def attn(q, k, v, causal=False):
    stored = q.dtype
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    s = q @ k.swapaxes(-1, -2) / np.float32(q.shape[-1] ** 0.5)
    if causal:
        s = np.where(np.tri(*s.shape[-2:], s.shape[-1] - s.shape[-2], dtype=bool), s, -np.inf)
    m = s.max(-1, keepdims=True)
    e = np.exp(s - m)
    O = e / e.sum(-1, keepdims=True) @ v
    BUG
    return O.astype(stored), (m + np.log(e.sum(-1, keepdims=True)))[..., 0]
"""
ROWS = "if causal: O[:, -1:, 16:32, 4:] *= 1.5"


def made(tmp_path, bug="pass", cases=("square", "causal", "softcap"), dtypes=("fp32", "fp16"), extra=(), facts=None):
    """A card of a file with a bug, run in this process."""
    path = tmp_path / "mine.py"
    path.write_text(SOURCE.replace("BUG", bug))
    lacks = {"softcap": "does not take softcap: its signature has no softcap"}
    facts = facts or Facts("numpy", "the default", options=("causal",), device="CPU", small=True, refused=lacks)
    plan = Plan(Spec(f"{path}:attn"), facts, (*(DEFAULT[name] for name in cases), *extra), dtypes)
    return card.build(plan, [_run(plan, *key) for key in plan.keys])


def _run(plan, case, dtype):
    if reason := plan.facts.failure or plan.facts.refuses(case, dtype):
        size, verdict = case.small._asdict(), "error" if plan.facts.failure else "skip"
        return Run(Result("mine.py:attn", case.id, dtype, "cpu", "CPU", size, None, verdict, reason))
    from verify.foreign import spec as foreign

    foreign.load.cache_clear()  # the file of this name changes from test to test
    return run_one(plan, case, dtype)


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    grid = [c for c in card_cases.matrix() if not c.having and "normal" in c.id and "more" not in c.id]
    return made(tmp_path_factory.mktemp("right"), extra=(*grid, *card_cases.growth()))


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    grid = [c for c in card_cases.matrix() if not c.having and "normal" in c.id and "more" not in c.id]
    return made(tmp_path_factory.mktemp("wrong"), ROWS, extra=(*grid, *card_cases.growth()))


def terminal(one):
    console = Console(file=io.StringIO(), width=120, highlight=False, soft_wrap=True)
    card_text.terminal(one, console)
    return console.file.getvalue()


def test_the_verdict_counts_no_skip_as_a_pass(right, wrong, tmp_path):
    assert right.verdict == "pass" and wrong.verdict == "fail"
    assert right.headline() == "28 of 28 runs passed, 2 skipped"
    nothing = made(tmp_path, cases=("softcap",))
    assert nothing.verdict == "nothing judged" and nothing.headline().startswith("0 of 0 runs passed")
    broken = made(tmp_path, facts=Facts(failure="SyntaxError: no"))
    assert broken.verdict == "nothing judged" and broken.headline() == "could not be judged: SyntaxError: no"


def test_the_terminal_says_how_it_was_called_and_what_is_wrong(right, wrong):
    said = terminal(wrong)
    assert said.startswith("mine.py:attn: FAIL. 22 of 28 runs passed, 6 failed")
    assert "Called with numpy arrays (the default), layout bhsd (the default); options" in said
    assert "Small shapes have at most 256 keys" in said
    assert re.search(
        r"FAIL  causal \(48 x 48\), fp32: O up to \S+ times its bound in 16.7% of its elements, at \[", said
    )
    assert "What all 6 failing runs have in common is causal masking; so have 2 of the 22 that pass" in said
    assert "rows 16-31 of 48; columns 4-7 of 8; as whole tiles of 16 rows" in said
    assert "skip  does not take softcap: its signature has no softcap (2 runs)" in said
    assert "fp32: yours is off by" in said and "3 of 14 are out of bound" in said and "that is not rounding" in said
    assert "normal." in terminal(right) and "FAIL" not in terminal(right)


def test_the_run_that_is_looked_at_is_the_most_telling_one(right, wrong):
    assert wrong.worst.place.text and max(wrong.worst.place.rows) > 1
    assert sum(r > 1 for r in wrong.worst.place.rows) / len(wrong.worst.place.rows) <= 0.5
    assert right.worst.place.text == "" and right.worst.result.ratio == max(r.ratio for r in right.results if r.outputs)


def test_the_simplest_failing_run_is_looked_at(tmp_path):
    """Not the mildest, whose inputs or options are one more thing to understand."""
    cases = ("logits_x10", "causal", "gqa", "square")
    bug = "O[..., :4, :] += 1 if q.std() > 2 else 2 if causal else 9"
    assert made(tmp_path, bug, cases[:2], ("fp32",)).worst.result.case == "causal"
    assert made(tmp_path, bug, (cases[0], cases[1], cases[3]), ("fp32",)).worst.result.case == "square"


def test_the_first_type_is_looked_at(tmp_path):
    """A fault of a few elements in a coarse type is no simpler to see than the same in fp32."""
    one = made(tmp_path, "O[..., : 1 if stored != 'f4' else None, :] += 9", ("square",), ("fp32", "bf16"))
    assert one.worst.result.dtype == "fp32" and " --cases square --dtype fp32 " in one.again()


def test_values_that_are_not_finite_are_said_in_words(tmp_path):
    """ "inf times its bound" says nothing."""
    nan = terminal(made(tmp_path, "O[..., -1, :] = np.nan", ("square",), ("fp32",)))
    assert re.search(r"fp32: O wrong, with 8 NaN, in \S+% of its elements, at \[0, 0, \d+, 0\] nan for", nan)
    inf = terminal(made(tmp_path, "O[..., -1, :] = -np.inf", ("square",), ("fp32",)))
    assert "O wrong, with 8 inf, in" in inf and "inf times" not in nan + inf
    large = terminal(made(tmp_path, "O[..., -1, :] = 1e30", ("square",), ("fp32",)))
    assert re.search(r"O up to \de\+3\d times its bound", large) and "the worst inf" not in large


def test_a_run_that_is_lost_is_not_called_a_matter_of_rounding(tmp_path):
    """The worst is one of those that are out of bound, and what is not finite is no number of times a bound."""
    bug = "O[..., -1, :] = np.where(q.std() > 2, np.nan, O[..., -1, :])"
    line = made(tmp_path, bug, ("square", "causal", "logits_x10"), ("fp32",)).why()[-1]
    assert "1 of 3 is out of bound, the worst not finite: that is not rounding" in line


def test_the_command_that_repeats_a_run_can_be_pasted(tmp_path):
    folder = tmp_path / "my kernels"
    folder.mkdir()
    words = shlex.split(made(folder, "O = O * 2", ("square",), ("fp32",)).again())
    assert words[:5] == ["python", "-m", "verify", "--kernel", f"{folder / 'mine.py'}:attn"]
    assert words[-2:] == ["--dump", "failing"] and "--backward" not in words


def test_captions_of_the_place_do_not_meet(wrong):
    """A caption ends before the next one begins, at 6.8 px a letter: wider than 12 px type mostly is."""
    picture = card_draw.place(wrong.worst.place)
    captions = re.findall(r'<text class="" x="([\d.]+)" y="20.0"[^>]*>([^<]+)<', picture)
    assert len(captions) == 3
    for (x, words), (after, _) in pairwise(captions):
        assert float(x) + 6.8 * len(words) < float(after), words


def test_place_names_heads_rows_columns_and_tiles():
    problem = DEFAULT["batch_heads"].build("fp32")
    known = reference(problem)
    O, lse = (known.anchors[name].plain.copy() for name in ("O", "lse"))
    O[1, 2, 4:7] += 1
    outputs = {"O": O, "lse": lse}
    metrics = check(lambda *_, **__: (O, lse), "batch_heads").outputs
    found = place(outputs, known, metrics)
    assert found.output == "O" and found.worst == (1, 2) and found.shape == (2, 3, 17, 8)
    assert found.text.startswith(
        "O is out of bound in 2.9% of its elements; (batch, head) (1, 2); rows 4-6 of 17; every column"
    )
    assert [k for k, r in enumerate(found.rows) if r > 1] == [4, 5, 6]
    assert found.heads[1][2] > 1 and sum(r > 1 for line in found.heads for r in line) == 1
    assert np.array(found.map).shape == (17, 8)


def test_large_outputs_are_shown_in_groups():
    case = replace(DEFAULT["square"], small=DEFAULT["square"].small._replace(Nq=400, Nk=8, d=80, dv=80))
    problem = case.build("fp32")
    known = reference(problem)
    O, lse = (known.anchors[name].plain.copy() for name in ("O", "lse"))
    O[0, 0, 399, 79] = np.nan
    found = place({"O": O, "lse": lse}, known, check(lambda *_, **__: (O, lse), case).outputs)
    assert (found.rows_each, found.columns_each) == (5, 3) and len(found.rows) == 80 and len(found.map[0]) == 27
    assert found.rows[-1] == np.inf and found.map[-1][-1] == np.inf and "row 399 of 400; column 79 of 80" in found.text


def test_a_pattern_needs_something_that_sets_failures_apart(right, tmp_path):
    assert card_pattern.pattern(right) == ""
    everything = made(tmp_path, "O = O * 2")
    assert card_pattern.pattern(everything) == ""
    cases = ("square", "tile", "tile_less_1", "tile_plus_1")
    told = card_pattern.pattern(made(tmp_path, "if q.shape[2] % 16: O = O * 2", cases=cases))
    assert "lengths that no tile divides; so has none of the 4 that pass" in told
    assert told.endswith("CAPABILITIES = {'ragged': False}")


def test_anchors_and_growth_hold_the_judges_numbers(wrong):
    found = {(a["dtype"], a["output"]): a for a in wrong.anchors()}
    assert set(found) == {(t, n) for t in ("fp32", "fp16") for n in ("O", "lse")}
    for a in found.values():
        m = next(r for r in wrong.results if (r.case, r.dtype) == (a["case"], a["dtype"])).outputs[a["output"]]
        assert (a["error"], a["plain"], a["bound"]) == (m.max_abs, m.plain, m.bound)
    assert not found["fp32", "O"]["ok"] and found["fp32", "lse"]["ok"]
    assert [g["N"] for g in wrong.growth() if g["dtype"] == "fp32"] == [8, 16, 32, 64, 128, 256]


def test_json_and_markdown(wrong):
    data = json.loads(json.dumps(wrong.to_dict(), allow_nan=False))
    assert data["kind"] == "card" and data["verdict"] == "fail" and data["counts"]["fail"] == 6
    assert [Result.from_dict(r) for r in data["results"]] == wrong.results
    assert data["worst"]["place"]["text"] == wrong.worst.place.text and len(data["fingerprint"]) == 12
    text = card_text.markdown(wrong)
    assert text.startswith("# mine.py:attn: fail\n\n22 of 28 runs passed, 6 failed")
    assert "| fp32 | O |" in text and "| fp16 | 256 |" in text and "## Skipped, which is not a pass" in text


class Reader(html.parser.HTMLParser):
    """Checks that tags are balanced, and collects cells, headings and references to the outside."""

    VOID = frozenset({"meta", "br", "hr"})

    def __init__(self):
        super().__init__()
        self.open, self.cells, self.outside, self.headings = [], {}, [], []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        self.outside += [value for key, value in attrs.items() if key in ("src", "href")]
        if "data-run" in attrs:
            self.cells[int(attrs["data-run"])] = attrs["class"]

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def test_the_page_stands_alone_and_has_every_run(right, wrong):
    text = card_html.page([wrong, right])
    reader = Reader()
    reader.feed(text)
    assert reader.open == [] and reader.outside == [] and "http" not in text
    runs = json.loads(re.search(r'<script type="application/json" id="runs">(.*?)</script>', text, re.DOTALL).group(1))
    assert runs == wrong.to_dict()["results"] + right.to_dict()["results"]
    drawn = {k for k, r in enumerate(runs) if not r["case"].startswith("growth")}
    assert set(reader.cells) == drawn
    for k, look in reader.cells.items():
        assert (look == "fail") == (runs[k]["verdict"] == "fail") and (look == "skip") == (runs[k]["verdict"] == "skip")
    for heading in ("What failed", "Why is it not equal?", "Error matrix", "Where the error sits", "Growth with N"):
        assert heading in reader.headings


def test_a_page_of_what_could_not_be_judged(tmp_path):
    text = card_html.page([made(tmp_path, facts=Facts(failure="SyntaxError: <b> & co"))])
    assert "SyntaxError: &lt;b&gt; &amp; co" in text and "Error matrix" not in text


@pytest.mark.parametrize(
    "ratio, look", ((0, "h0"), (0.1, "h1"), (0.6, "h4"), (1, "h5"), (1.01, "x1"), (11, "x2"), (float("inf"), "x3"))
)
def test_colours_change_at_the_bound(ratio, look):
    assert card_draw.heat(ratio) == look


def test_axes_hold_zeros_and_infinities():
    m = {"dtype": "fp32", "output": "O", "case": "c", "fixed": None, "ok": False}
    zero = m | {"error": 0.0, "plain": 0.0, "bound": 1e-6, "apriori": float("inf"), "ratio": 0.0}
    wild = m | {"error": float("inf"), "plain": 1e-7, "bound": 1e-6, "apriori": 1e-5, "ratio": float("inf")}
    for picture in (card_draw.anchors([zero, wild]), card_draw.growth([zero | {"N": 8}, wild | {"N": 16}])):
        assert "nan" not in picture.lower() and "inf" not in picture.replace("infin", "")


def test_the_matrix_has_every_shape_mask_and_class_once():
    ids = [case.id for case in card_cases.matrix()]
    n = len(card_cases.SHAPES) * len(card_cases.MASKS) * len(card_cases.RECIPES)
    assert len(ids) == len(set(ids)) == n and not set(ids) & DEFAULT.keys()
    assert all("," not in name and " " not in name for name in ids)  # so that --cases can name them
    tops = {case.align for case in card_cases.matrix("top_left")}
    assert tops == {"top_left"}
