"""`python -m verify claims`: filters, outputs, exit status; and the helpers that entries are made of."""

import json
import time

import numpy as np
import pytest

from verify.__main__ import main
from verify.claims import account, emulate, html, ledger, report, trial
from verify.claims.hardware import A100, H100


@pytest.fixture(scope="module")
def results():
    """All entries with their outcomes."""
    return [(claim, claim.recompute()) for claim in ledger.load().values()]


def test_whole_ledger_is_quick_and_exits_0(capsys):
    """Every recomputation, the table and the counts."""
    start = time.perf_counter()
    assert main(["claims"]) == 0
    assert time.perf_counter() - start < 60
    out = capsys.readouterr().out
    assert "18.4-046" in out and "概述" in out
    assert "verdicts differ" not in out
    assert str(len(ledger.load())) in out


def test_filters(capsys):
    """Sections, subsections, verdicts and ids choose."""
    assert main(["claims", "--section", "18.4.5", "--verdict", "wrong", "--json", "-"]) == 0
    chosen = json.loads(capsys.readouterr().out)["entries"]
    assert chosen and all(e["section"] == "18.4.5" and e["verdict"] == "wrong" for e in chosen)
    assert main(["claims", "--id", "18.4-046"]) == 0
    out = capsys.readouterr().out
    assert "rowsum(dO * O)" in out and "18.4-045" in out


@pytest.mark.parametrize(
    "argv",
    [
        ["--section", "19.1"],
        ["--verdict", "false"],
        ["--id", "18.1-000"],
        ["--html", "/nowhere/x.html"],
        ["--section", "18.2.1", "--verdict", "units"],
    ],
)
def test_misuse(argv, capsys):
    """One line, exit 2."""
    assert main(["claims", *argv]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_files(tmp_path, capsys):
    """JSON, page and Markdown hold the same entries."""
    names = {kind: str(tmp_path / f"x.{kind}") for kind in ("json", "html", "md")}
    assert main(["claims", "--section", "18.4", *[a for kind, name in names.items() for a in (f"--{kind}", name)]]) == 0
    made = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    page, text = ((tmp_path / f"x.{kind}").read_text(encoding="utf-8") for kind in ("html", "md"))
    assert len(made["entries"]) > 40
    for entry in made["entries"]:
        assert f'id="c{entry["id"]}"' in page and f"| {entry['id']} |" in text
    assert sum(made["counts"]["18.4"].values()) == len(made["entries"])


def test_page_is_self_contained_and_starts_with_what_is_wrong(results):
    """No outside resource; worst first; every verdict's colour has its word."""
    page = html.page(results)
    assert "http" not in page.split("<script>")[1]
    assert 'src="' not in page and "<link" not in page
    order = [page.index(f'<h2 data-verdict="{v}"') for v in ledger.VERDICTS]
    assert order == sorted(order)
    for _, chinese in report.TITLES.values():
        assert chinese in page


def test_stated_values_that_disagree_are_marked(results):
    """A wrong leaf stands out; a confirmed entry has none."""
    by_id = {claim.id: (claim, outcome) for claim, outcome in results}
    assert "class=off" in html._values(*by_id["18.1-005"])
    assert "class=off" not in html._values(*by_id["18.1-007"])
    # A bound marks the end that is broken, on the rows that break it.
    floors, roofs = html._values(*by_id["18.5-061"]), html._values(*by_id["18.6-068"])
    assert floors.count("class=off") == 1 and "<td class=off>4.781</td>" in floors
    assert roofs.count("class=off") == 8 and "<td class=off>0</td>" not in roofs
    assert "class=off" not in html._values(*by_id["18.1-050"])


def test_numbers_read_well():
    """Leaves as printed."""
    shown = [report.number(x) for x in (True, 8390656, 0.0001234, 31.0303, 65536.0, float("inf"), ledger.Range(2, 4))]
    assert shown == ["yes", "8,390,656", "0.000123", "31.03", "65,536", "no limit", "2 to 4"]
    assert [report.number(x) for x in (2024, 1024.0, 1e6, 12345.6, 1.5e9)] == [
        "2024", "1024", "1,000,000", "12,346", "1.5e+09"
    ]  # fmt: skip
    assert report.short({"a": 1, "b": {"c": 2.5}}) == "a: 1; b/c: 2.5"


def test_a_bound_that_excludes_nothing_is_said_in_words(results):
    """No '0 to no limit' on the page or in print; a real bound shows both ends."""
    by_id = {claim.id: (claim, outcome) for claim, outcome in results}
    assert report.shown(*by_id["18.1-033"]) == "not recomputable"
    assert "not recomputable" in html._values(*by_id["18.1-033"])
    assert report.shown(*by_id["18.6-068"]).keys() == {"at least", "at most"}
    assert report.shown(*by_id["18.1-005"]) == by_id["18.1-005"][1].value


def test_account_against_counting():
    """The traffic formulas equal sums over explicitly written operations, and FLOPs over loops."""
    N, d = 8, 3
    reads, writes = (2 * N * d) + N * N + (N * N + N * d), N * N + N * N + N * d
    assert account.eager_forward_elements(N, d) == reads + writes
    assert account.forward_flops(N, d) == sum(2 * 2 * d for _ in range(N) for _ in range(N))
    assert account.forward_flops(N, d, causal=True) == sum(4 * d for i in range(N) for _ in range(i + 1))
    assert account.flash_forward_elements(10, 3, 4) == 2 * 30 + 3 * 60
    assert account.backward_flops(N, d, recompute=True) * 4 == account.backward_flops(N, d, recompute=False) * 5


def test_devices():
    """Ridges and SRAM sums of the published figures."""
    assert round(A100.ridge) == 153 and round(H100.ridge) == 295
    assert A100.l1_mib == 20.25 and H100.l1_mib == 33


def test_judges_reject_a_faulty_function():
    """A forward with a wrong scale, one that raises and one that returns NaN fail; the right one passes."""

    def attend(Q, K, V, scale):
        S = Q @ np.swapaxes(K, -1, -2) * scale
        P = np.exp(S - S.max(-1, keepdims=True))
        return P / P.sum(-1, keepdims=True) @ V

    right, _ = trial.judge_forward(lambda Q, K, V, Br, Bc: attend(Q, K, V, Q.shape[-1] ** -0.5))
    wrong, told = trial.judge_forward(lambda Q, K, V, Br, Bc: attend(Q, K, V, 1.0))
    nan, _ = trial.judge_forward(lambda Q, K, V, Br, Bc: np.full_like(Q, np.nan))
    raising, _ = trial.judge_forward(lambda Q, K, V, Br, Bc: Q @ K[..., :1])
    assert all(right.values()) and not any(wrong.values()) and not any(nan.values()) and not any(raising.values())
    assert "several heads: max error" in told


def test_emulation_rounds_where_told():
    """Storage types, saturation of E4M3, and an accumulator in FP16 that costs accuracy."""
    assert emulate.rounded(1 + 2.0**-9, "bf16") == 1 and emulate.rounded(1 + 2.0**-9, "fp16") == 1 + 2.0**-9
    assert emulate.rounded(1e6, "e4m3") == 448 and emulate.rounded(-1e9, "e5m2") == -57344
    Q, K, V = np.random.default_rng(0).standard_normal((3, 96, 16))
    want = emulate.exact(Q, K, V, "fp16")
    error = {acc: np.abs(emulate.flash_forward(Q, K, V, acc=acc, Bc=8) - want).max() for acc in ("fp32", "fp16")}
    assert error["fp32"] < 1e-3 and error["fp16"] > 1.5 * error["fp32"]
    assert np.abs(emulate.flash_forward(Q, K, V, dtype="fp32", Bc=8) - emulate.exact(Q, K, V, "fp32")).max() < 1e-5
