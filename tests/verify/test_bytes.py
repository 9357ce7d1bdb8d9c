"""The byte ledger: formulas of the docstrings equal counts to the byte, and a wrong one is noticed."""

import json

import pytest

from refimpl.tiling import Tile
from verify import bytes as ledger
from verify.__main__ import main
from verify.bytes import Setting, compulsory, count_fills, count_requested, evaluate, fitted, formula
from verify.cases import dense
from verify.registry import KERNELS

RAGGED = Setting(dense(17, 21, H=2, Hk=1, d=3, dv=5), causal=True)


@pytest.mark.parametrize("kernel", ledger.KERNELS)
@pytest.mark.parametrize("setting", (*ledger.EMULATED, ledger.COUNTED[-1]), ids=str)
def test_fills_equal_their_formula(kernel, setting):
    setting = fitted(kernel, setting)
    assert count_fills(kernel, setting) == evaluate(formula(kernel, "fills"), setting)


@pytest.mark.parametrize("kernel", ledger.KERNELS)
@pytest.mark.parametrize("setting", (RAGGED, Setting(dense(20, 0, d=4)), Setting(dense(9, 25, d=4), tile=Tile(8, 16))))
def test_requested_bytes_equal_their_formula(kernel, setting):
    setting = fitted(kernel, setting)
    assert count_requested(kernel, setting) == evaluate(formula(kernel, "requested"), setting)


def test_compulsory_is_every_input_and_output_once():
    """17 x 3 of Q, 21 x 8 of one K/V head, 17 x 5 of O, two query heads, two bytes each."""
    assert compulsory(RAGGED) == 2 * (2 * 17 * 3 + 21 * 8 + 2 * 17 * 5)
    assert compulsory(Setting(dense(20, 0, d=4))) == 2 * 20 * 4


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("setting", [s for s in ledger.EMULATED if s.shape.Nk], ids=str)
def test_no_kernel_moves_less_than_it_must(kernel, setting):
    """Except from step 4 on, which need not load keys that no query sees."""
    setting = fitted(kernel, setting)
    fills, requested = (evaluate(formula(kernel, name), setting) for name in ("fills", "requested"))
    assert requested >= fills
    assert fills >= compulsory(setting) or int(kernel[4]) >= 4


def test_evaluate_does_arithmetic():
    names = RAGGED.names
    assert (names["Tr"], names["Tc"], names["diag"], names["e"], names["f"]) == (2, 2, 4, 2, 4)
    assert evaluate("Br*Bc + sum(min(i, 3)*e for i in range(Tr)) - cdiv(Nk, 4)", RAGGED) == 256 + 2 - 6
    assert Setting(dense(3, 9, d=1)).names["diag"] == 9


@pytest.mark.parametrize(
    "bad", ("__import__('os')", "Q.size", "lambda: 1", "[1][0]", "open('x')", "N*d", "e if x else f")
)
def test_evaluate_refuses_anything_else(bad):
    with pytest.raises(ValueError, match="formula"):
        evaluate(bad, RAGGED)


def test_a_docstring_without_its_formula_is_an_error(monkeypatch):
    import refimpl.step1_fused as module

    formula.cache_clear()
    monkeypatch.setattr(module, "__doc__", "**Traffic**: some.")
    with pytest.raises(ValueError, match=r"expected one line 'fills = \.\.\.' in its docstring, found 0"):
        formula("step1_fused", "fills")
    formula.cache_clear()


def test_the_verb_fails_on_a_formula_that_is_off_by_one(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ledger, "EMULATED", (RAGGED,))
    monkeypatch.setattr(ledger, "COUNTED", ledger.COUNTED[:1])
    path = tmp_path / "bytes.json"
    assert main(["bytes", "--kernels", "step3_flash_v2", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "3 of 3 counts equal their formula to the byte; 1 larger sizes" in out
    assert "requested = B*Hq*(" in out and "compulsory" in out
    entries = json.loads(path.read_text())
    assert [e["ledger"] for e in entries] == ["fills", "requested"] * 2 and all(e["ok"] for e in entries)
    assert entries[0]["counted"] == entries[0]["formula"] and entries[3]["counted"] is None
    monkeypatch.setattr(ledger, "evaluate", lambda expression, setting: evaluate(expression, setting) + 1)
    assert main(["bytes", "--kernels", "step3_flash_v2"]) == 1
    assert "FAIL  step3_flash_v2 fills at B1 H2/1 17x21 d3/5 fp16 tile 16x16 causal: formula" in capsys.readouterr().out
