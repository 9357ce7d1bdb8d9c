"""The reports: what failed is named, what was skipped is not counted, and the page stands alone and holds every run."""

import html.parser
import io
import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.console import Console

from verify import document, report, summary
from verify.cases import DEFAULT
from verify.html import page, shade
from verify.registry import REFERENCES
from verify.testing import check

STEP = REFERENCES["refimpl.step3_flash_v2"].attention()


@pytest.fixture(scope="module")
def results():
    """Two kernels: one passes, one fails gqa, does not finish ties, and does not store bf16."""
    good = [
        replace(check(STEP, case, dtype=dtype), kernel="step3_flash_v2", executor="emulated", tile=[16, 16])
        for dtype in ("fp32", "bf16")
        for case in ("square", "gqa", "ties")
    ]
    other = [replace(r, kernel="step4_causal") for r in good]
    m = other[1].outputs["O"]
    broken = {**other[1].outputs, "O": replace(m, max_abs=3 * m.bound, ok=False, share_out=0.25)}
    reason = "O of case gqa at [0, 1, 2, 3]: got 1, wanted 2"
    other[1] = replace(other[1], verdict="fail", outputs=broken, reason=reason)
    other[2] = replace(other[2], verdict="error", outputs={}, reason="no answer within 3 s </script><b>")
    other[3:] = [replace(r, verdict="skip", outputs={}, reason="stores fp32, not bf16") for r in other[3:]]
    return good + other


def terminal(results, record=None):
    console = Console(file=io.StringIO(), width=120, highlight=False, soft_wrap=True)
    report.terminal(results, record, console)
    return console.file.getvalue()


def recorded(results, **changes):
    """A record of the same results on a GPU."""
    made = document.build([replace(r, executor="gpu", tile=None) for r in results], "emulated")
    return made | {"executor": "gpu", "device": "Some GPU", "made": "2026-01-02T03:04:05+00:00"} | changes


def test_lines_count_by_kernel_and_type(results):
    lines = {(line.kernel, line.dtype): line for line in summary.lines(results)}
    assert lines["step3_flash_v2", "fp32"].counts == {"pass": 3, "fail": 0, "error": 0, "skip": 0}
    assert lines["step4_causal", "fp32"].counts == {"pass": 1, "fail": 1, "error": 1, "skip": 0}
    assert lines["step4_causal", "fp32"].worst.ratio == pytest.approx(3)
    assert lines["step4_causal", "fp32"].where == "gqa O"
    # Three skipped runs are three runs that nobody passed.
    assert lines["step4_causal", "bf16"].passed == "0/0" and lines["step4_causal", "bf16"].worst is None


def test_terminal_names_what_failed_and_what_ran(results):
    said = terminal(results)
    assert "FAIL  step4_causal gqa fp32: O of case gqa at [0, 1, 2, 3]: got 1, wanted 2" in said
    assert "ERROR step4_causal ties fp32: no answer within 3 s" in said
    assert "skip  step4_causal: stores fp32, not bf16 (3 runs)" in said
    assert "--kernels step4_causal --cases gqa --dtype fp32 --seed 0 --dump DIR" in said
    assert "Emulated on CPU at N up to 48, tile 16; full size not run" in said
    assert "No GPU result is recorded yet." in said
    assert re.search(r"step3_flash_v2 +fp32 +3/3 +0 +0", said)


def test_skips_of_kernels_that_lack_the_same_are_one_line(results):
    """Options that a kernel lacks are joined over its cases, and kernels that skipped alike over theirs."""
    lacks = [("a", "a boolean mask"), ("a", "softcap, a boolean mask"), ("b", "a boolean mask"), ("b", "softcap"),
             ("c", "softcap")]  # fmt: skip
    skipped = [replace(results[0], kernel=k, verdict="skip", reason=f"does not take {words}") for k, words in lacks]
    found = {reason: len(group) for reason, group in summary.skips(results[:2] + skipped).items()}
    assert found == {"a, b: does not take a boolean mask, softcap": 4, "c: does not take softcap": 1}


def test_a_record_is_shown_beside_and_a_changed_kernel_as_stale(results):
    fresh, changed = recorded(results), recorded(results, fingerprints={"step4_causal": "of another day"})
    said = terminal(results, fresh)
    assert "Some GPU" in said and "2026-01-02" in said and "stale" not in said
    assert re.search(r"step4_causal +fp32 +1/3 .* 1/3, 3.00", said)
    said = terminal(results, changed)
    assert re.search(r"step4_causal +fp32 .* 1/3, 3.00 stale", said) and "Changed since: step4_causal." in said
    assert summary.recorded(changed)["step3_flash_v2", "fp32"].count("stale") == 0


def test_a_record_of_other_cases_or_bounds_says_so(results):
    """A record made before a case or a bound was changed, or before that was recorded, is told from today's."""
    assert "older cases" not in terminal(results, recorded(results))
    for then in ("of another day", None):
        said = terminal(results, recorded(results, judged_by=then))
        assert "older cases" in said and "Cases or bounds were changed since." in said


def test_the_newest_gpu_record_of_its_kind_is_found(tmp_path, results):
    assert document.newest_gpu(tmp_path) is None
    for name, data in {
        "old": recorded(results, made="2026-01-01T00:00:00+00:00"),
        "new": recorded(results, made="2026-05-01T00:00:00+00:00"),
        "emulated": recorded(results, made="2026-09-01T00:00:00+00:00", executor="emulated"),
        "times": recorded(results, made="2026-09-01T00:00:00+00:00", kind="times"),
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    (tmp_path / "broken.json").write_text("{")
    assert document.newest_gpu(tmp_path)["made"].startswith("2026-05")


def test_a_kernel_that_does_not_import_has_no_fingerprint(results):
    """Its result is an error with the reason; the document is written all the same."""
    gone = [replace(results[0], kernel="step9_gone", verdict="error", outputs={}, reason="ModuleNotFoundError: ...")]
    assert document.build(gone, "emulated")["fingerprints"] == {"step9_gone": None}
    assert set(document.build(results, "emulated")["fingerprints"]) == {"step3_flash_v2", "step4_causal"}


def test_markdown_has_the_same_lines(results):
    text = report.markdown(results, recorded(results))
    assert "| step4_causal | fp32 | 1/3 | 2 | 0 | 3.00 | gqa O | 1/3, 3.00 |" in text
    assert "- **step4_causal** gqa fp32, fail: O of case gqa" in text
    assert "- step4_causal: stores fp32, not bf16 (3 runs)" in text


class Reader(html.parser.HTMLParser):
    """Checks that tags are balanced, and collects cells and references to the outside."""

    VOID = frozenset({"meta", "br"})

    def __init__(self):
        super().__init__()
        self.open, self.cells, self.outside = [], {}, []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        self.outside += [value for key, value in attrs.items() if key in ("src", "href")]
        if "data-run" in attrs:
            self.cells[int(attrs["data-run"])] = attrs["class"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_has_a_cell_for_every_run(results):
    made = document.build(results, "emulated")
    text = page(made, results, recorded(results))
    reader = Reader()
    reader.feed(text)
    assert reader.open == [] and reader.outside == [] and "http" not in text
    assert sorted(reader.cells) == list(range(len(results)))
    assert reader.cells[7] == "fail" and reader.cells[8] == "error" and reader.cells[9] == "skip"
    runs = re.search(r'<script type="application/json" id="runs">(.*?)</script>', text, re.DOTALL).group(1)
    assert json.loads(runs) == made["results"]
    assert "prefers-color-scheme: dark" in text


def test_ratios_are_short():
    shown = [summary.shown(x) for x in (0.0, 0.614, 3.0, 2116058.97, float("inf"))]
    assert shown == ["0.00", "0.61", "3.00", "2e+06", "inf"]


@pytest.mark.parametrize("ratio, look", ((0.0, "s0"), (0.1, "s1"), (0.3, "s3"), (0.74, "s4"), (1.0, "s5")))
def test_shade_follows_the_ratio(results, ratio, look):
    m = results[0].outputs["O"]
    outputs = {"O": replace(m, max_abs=ratio * m.bound)}
    assert shade(replace(results[0], outputs=outputs)) == (look, f"{ratio:.2f}")


def test_the_blogs_limits_are_compared_with_ours(results):
    loud = check(STEP, "large_values")
    assert loud.verdict == "pass" and loud.outputs["O"].max_abs > 1e-5
    assert "would have failed 1 and passed 0 of 1" in summary.fixed_limits([loud])
    assert summary.fixed_limits([r for r in results if r.dtype == "bf16"]) == ""
    assert "judge all 1 outputs as here" in summary.fixed_limits(results[:1])


def test_every_case_belongs_to_one_group_of_the_matrix():
    """Kinds follow each other without a break, as the matrix prints a heading where the kind changes."""
    kinds = [case.kind for case in DEFAULT.values()]
    assert len(set(kinds)) == 1 + sum(a != b for a, b in pairwise(kinds))


def test_a_record_that_judged_fewer_ways_is_stale():
    """A second way to the gradients is not covered by what was recorded before there was one."""
    from verify import document
    from verify.document import _fingerprint, _ways

    made = {"fingerprints": {name: _fingerprint(name) for name in ("step3_flash_v2", "general")}}
    assert document.stale(made) == {"general"}
    assert document.stale(made | {"ways": {"general": _ways("general")}}) == set()
