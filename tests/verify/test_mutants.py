"""The mutants: every one applies, is reached, and is killed; what does not count as one is refused."""

import json
import sys
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest

from flash_cuda.executors.emulator import Emulator
from verify.__main__ import main
from verify.cases import DEFAULT
from verify.mutants import AREAS, MUTANTS, DoesNotApply, Edit, Graft, Reached, campaign, page, report, trial
from verify.mutants.graft import edited
from verify.mutants.trial import Trial
from verify.registry import ALL

TILE_OPS = "numba_cuda/parts/tile_ops.py"
SUM = "l[a] = alpha[a] * l[a] + total"

# One of each area and way to die, spread over the types; the slow test runs all of them.
FEW = [
    ("O_not_rescaled", "fp16", "number"), ("empty_row_is_nan", "bf16", "nan"), ("stale_V_no_barrier", "fp32", "race"),
    ("V_overwritten_early", "fp16", "race"), ("last_ragged_tile_dropped", "bf16", "number"),
    ("diagonal_one_far", "fp32", "number"), ("top_left_for_bottom_right", "fp16", "number"),
    ("lse_base_2", "bf16", "number"), ("head_mapping_modulo", "fp32", "number"),
    ("window_left_short", "fp16", "number"), ("softcap_after_mask", "bf16", "number"), ("alibi_sign", "fp32", "number"),
    ("dropout_missing_in_dV", "fp16", "number"), ("D_per_tile", "bf16", "number"), ("dK_not_scaled", "fp32", "number"),
    ("fp16_row_sum", "fp16", "number"), ("numpy_NaN_leaks", "bf16", "nan"),
    ("P_rows_exchanged", "fp16", "number"), ("sums_of_the_next_lane", "bf16", "number"),
]  # fmt: skip


def test_the_catalogue_is_as_large_as_it_claims():
    assert len(MUTANTS) >= 50
    assert sum(mutant.in_numba for mutant in MUTANTS.values()) >= 30
    assert {mutant.area for mutant in MUTANTS.values()} == set(AREAS)
    paths = {edit.path for mutant in MUTANTS.values() for edit in mutant.edits}
    assert {path.split("/")[0] for path in paths} == {"numba_cuda", "refimpl"} and "numba_cuda/launch.py" in paths
    kinds = {mutant.name: mutant.about for mutant in MUTANTS.values()}
    assert len(set(kinds)) == len(MUTANTS) and all(kinds.values())


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda mutant: mutant.name)
def test_every_edit_applies(mutant):
    """Its text is in the shipped source once; the kernel takes the cases that are to be run first."""
    assert edited(mutant.edits)
    assert mutant.section.startswith("18.") and mutant.through in ALL
    assert set(mutant.first) <= set(trial.cases_for(mutant)) and len(trial.cases_for(mutant)) >= 2
    assert trial.cases_for(mutant)[: len(mutant.first)] == list(mutant.first)


def reached(mutant, case, dtype):
    """Whether a run of the case comes by the place of the edit."""
    try:
        trial.produced(Graft(mutant.edits, probe=True), mutant.through, DEFAULT[case].build(dtype), mutant.tile)
    except Reached:
        return True
    return False


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda mutant: mutant.name)
def test_every_mutant_is_reached(mutant):
    assert any(reached(mutant, case, mutant.dtypes[0]) for case in mutant.first)


def test_a_place_that_no_case_comes_by_is_not_reached():
    mutant = MUTANTS["head_mapping_modulo"]
    assert reached(mutant, "tile", "fp32")
    assert not reached(replace(mutant, through="step1_fused"), "tile", "fp32")


@pytest.mark.parametrize(("name", "dtype", "kill"), FEW)
def test_a_mutant_is_killed_twice(name, dtype, kill):
    (row,) = campaign.hunt(name, (dtype,))
    assert row.verdict == "killed" and row.by_numbers, row
    assert {t.kill for t in row.kills} & ({"race", "uninitialised"} if kill == "race" else {kill})
    assert len(row.trials) < row.of


@pytest.mark.slow
def test_all_mutants_are_killed_and_no_correct_kernel_is(tmp_path):
    """The verb itself, as CI and people run it."""
    assert main(["mutants", "--json", str(tmp_path / "m.json"), "--html", str(tmp_path / "m.html")]) == 0
    told = json.loads((tmp_path / "m.json").read_text())
    assert told["passed"] and len(told["mutants"]) == len(MUTANTS)
    for mutant in told["mutants"]:
        for row in mutant["rows"].values():
            assert len({t["case"] for t in row["trials"] if t["kill"]}) >= campaign.ENOUGH, mutant["name"]
    assert len(set(told["controls"]["seeds"])) == 20


def planted(monkeypatch, old, new):
    """A row of a mutant that is not in the catalogue, on a few cases."""
    mutant = replace(MUTANTS["l_not_rescaled"], name="tried", edits=(Edit(TILE_OPS, "update_sum", old, new),))
    monkeypatch.setitem(campaign.MUTANTS, "tried", mutant)
    monkeypatch.setattr(trial, "cases_for", lambda mutant: ["tile_plus_1", "1024x1023", "growing_max"])
    return campaign.hunt("tried", ("fp32",))[0]


def test_an_equivalent_mutant_is_refused(monkeypatch):
    row = planted(monkeypatch, SUM, "l[a] = total + l[a] * alpha[a]")
    assert row.verdict == "equivalent" and row.changes is False
    assert not campaign.Campaign([row], [], (), False).passed


def test_a_mutant_that_lives_is_told_from_one_that_changes_nothing(monkeypatch):
    """Here l is off by a part in 2^22, within the bound."""
    row = planted(monkeypatch, SUM, f"{SUM} + float32(2.0**-22) * total")
    assert row.verdict == "lives" and row.changes is True
    assert not campaign.Campaign([row], [], (), False).passed


def test_one_case_is_not_enough(monkeypatch):
    row = planted(monkeypatch, SUM, f"{SUM} if alpha[a] > float32(0.01) else total")
    assert row.verdict == "weak" and [t.case for t in row.kills] == ["growing_max"]
    assert not campaign.Campaign([row], [], (), False).passed


@pytest.mark.parametrize(("edit", "said"), [
    (Edit(TILE_OPS, "update_sum", "l[a] = beta", "pass"), "tile_ops.py, update_sum: 'l[a] = beta' occurs 0 times"),
    (Edit(TILE_OPS, "mask", "row0", "col0"), "occurs 2 times"),
    (Edit(TILE_OPS, "no_such", "a", "b"), "0 functions are called no_such"),
    (Edit(TILE_OPS, "update_sum", SUM, SUM), "is replaced by itself"),
    (Edit(TILE_OPS, "update_sum", SUM, "l[a] = ("), "no Python any more"),
])  # fmt: skip
def test_an_edit_that_does_not_apply_says_why(edit, said):
    with pytest.raises(DoesNotApply) as found:
        Graft((edit,))
    assert said in str(found.value) and "\n" not in str(found.value)


def test_a_graft_touches_nothing_but_itself():
    """Two at once, and the shipped kernel between them: each has its own bug, or none."""
    shipped = import_module("flash_cuda.step3_flash_v2")
    run(shipped)  # what it imports on its way is there from here on, whichever test came first
    before = dict(sys.modules)
    grafts = [Graft(MUTANTS[name].edits) for name in ("lse_base_2", "not_divided")]
    base_2, undivided = (graft.load("flash_cuda.step3_flash_v2") for graft in grafts)
    assert len({id(m.attention) for m in (shipped, base_2, undivided)}) == 3
    assert grafts[0].load("flash_cuda.launch") is import_module("flash_cuda.launch")
    assert grafts[0].load("numpy") is np
    O, lse = (x for x in run(shipped))
    O_2, lse_2 = run(base_2)
    O_u, lse_u = run(undivided)
    assert np.array_equal(O, O_2) and not np.allclose(lse, lse_2)
    assert not np.allclose(O, O_u) and np.array_equal(lse, lse_u)
    assert np.array_equal(O, run(shipped)[0])
    ours = {name: module for name, module in before.items() if name.startswith(("refimpl.", "flash_cuda."))}
    assert len(ours) > 10 and all(sys.modules[name] is module for name, module in ours.items())
    assert not any(module in (base_2, undivided) for module in sys.modules.values())


def run(module):
    """O and lse of a small case."""
    problem = DEFAULT["tile_plus_1"].build("fp32")
    return module.attention(problem.Q, problem.K, problem.V, on=Emulator(), **placed())


def placed():
    from refimpl.tiling import Tile

    return {"tile": Tile(16, 16), "threads": (4, 2)}


def test_a_rule_is_edited_for_the_kernel_too():
    """A mask's text is compiled into the general kernel: a graft reaches it through four modules."""
    graft = Graft(MUTANTS["window_left_short"].edits)
    for name in ("refimpl.standard", "flash_cuda.parts.rules", "flash_cuda.general", "flash_cuda.backward"):
        assert graft.load(name) is not import_module(name)
    assert graft.load("flash_cuda.parts.rule_ops") is import_module("flash_cuda.parts.rule_ops")


@pytest.mark.parametrize("kernel", ("step2_flash_v1", "general"))
def test_an_unwatched_run_of_a_correct_kernel_has_the_same_bits(kernel):
    """What the race detector does is to watch."""
    problem, shipped = DEFAULT["tile_plus_1"].build("fp32"), Graft(())
    (watched,), _ = trial.produced(shipped, kernel, problem)
    (unwatched,), _ = trial.produced(shipped, kernel, problem, watch=False)
    assert all(watched[name].tobytes() == unwatched[name].tobytes() for name in watched)


def test_every_way_to_die_has_its_words():
    assert set(trial.FAULTS.values()) <= set(trial.KILLS) and set(trial.KILLS) == set(page.LETTERS)
    assert len(set(page.LETTERS.values())) == len(page.LETTERS)


def test_a_mutant_that_writes_to_its_input_is_seen():
    """In NumPy, where nobody else would: the outputs are right."""
    step, load = "refimpl/step3_flash_v2.py", 'V_j = head.load("V", V[cols])'
    graft = Graft((Edit(step, "one_head", load, f"{load}\n            if cols.stop == len(K): V[...] = 0"),))
    found = trial.attempt(graft, "refimpl.step3_flash_v2", "tile", "fp32")
    assert found.kill == "modified" and found.numbers


def test_fresh_seeds_reach_every_case():
    seeds = range(50, 50 + campaign.FRESH)
    keys = campaign.control_keys(seeds)
    assert {seed for *_, seed in keys} == set(seeds) and {dtype for _, _, dtype, _ in keys} == set(campaign.DTYPES)
    emulated = [key for key in keys if not key[0].startswith("refimpl")]
    assert {case for _, case, _, _ in emulated} == set(DEFAULT)
    assert {kernel for kernel, *_ in emulated} >= {"step0_standard", "step1_fused", "step2_flash_v1", "general"}
    assert not any(ALL[kernel].refuses(DEFAULT[case], dtype) for kernel, case, dtype, _ in keys)
    assert len(set(keys)) == len(keys) >= 20 * len(DEFAULT)


def test_a_correct_kernel_that_is_failed_fails_the_campaign(capsys):
    row = campaign.Row("lse_base_2", "fp32", tuple(Trial(c, "fp32", 0, "number", True, "off") for c in ("a", "b")), 9)
    fine = Trial("tile", "fp32", 77, "", False)
    good = campaign.Campaign([row], [("general", fine)], (77,), False)
    assert good.passed
    for bad in (
        replace(good, controls=[("general", replace(fine, kill="number", numbers=True, detail="error 1, bound 0"))]),
        replace(good, failures=("3 runs of seed 77: no answer within 300 s",)),
    ):
        assert not bad.passed
        report.terminal(bad)
        said = capsys.readouterr().out
        assert "seed 77" in said and ("--seed 77" in said or "no answer" in said)


def test_the_verb_reports_what_it_ran(tmp_path, capsys):
    html, made = tmp_path / "m.html", tmp_path / "m.json"
    names = "lse_base_2,numpy_l_not_rescaled"
    assert main(["mutants", "--only", names, "--dtype", "fp32", "--json", str(made), "--html", str(html)]) == 0
    said = capsys.readouterr().out
    assert "2 mutants, 1 of them in the kernels' bodies" in said and "2/2" in said and "--full runs all" in said
    told = json.loads(made.read_text())
    assert told["passed"] and [m["name"] for m in told["mutants"]] == ["numpy_l_not_rescaled", "lse_base_2"][::-1]
    row = told["mutants"][0]["rows"]["fp32"]
    assert row["verdict"] == "killed" and row["run"] == len(row["trials"]) == 2 < row["of"]
    assert html.read_text() == page.page(told, report.sentences(campaign_of(told)))
    assert "lse is a base-2 logarithm" in html.read_text()


def campaign_of(told):
    """The campaign that a document was made of."""
    rows = [
        campaign.Row(m["name"], dtype, tuple(Trial(**t) for t in row["trials"]), row["of"])
        for m in told["mutants"]
        for dtype, row in m["rows"].items()
    ]
    return campaign.Campaign(rows, [], (), told["full"])


@pytest.mark.parametrize(("arguments", "said"), [
    (["--only", "lse_base2"], "--only: there is no mutant or area 'lse_base2'; did you mean 'lse_base_2'?"),
    (["--only", ","], "--only: expected the name of a mutant"),
    (["--seed", "-1"], "--seed: expected an integer of at least 0"),
    (["--only", "log2e_truncated", "--dtype", "bf16"], "--only, --dtype: none of these mutants is a bug in bf16"),
])  # fmt: skip
def test_misuse_is_one_line(arguments, said, capsys):
    assert main(["mutants", *arguments]) == 2
    assert capsys.readouterr().err.strip().startswith(f"verify: {said}")


def test_the_list_names_every_mutant(capsys):
    assert main(["mutants", "--list"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in MUTANTS) and "tile_ops: update_sum" in said
