"""The diagnosis: right kernels get no name, known bugs theirs, unknown ones none; and it says where and how sure."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from verify.__main__ import main
from verify.diagnose import in_examples, locate, report, search, self_test, subjects
from verify.diagnose.battery import battery
from verify.diagnose.diagnosis import NAMED, NONE, UNKNOWN, Diagnosis, diagnose
from verify.diagnose.grafted import EXPECTED
from verify.diagnose.in_examples import EXAMPLES, FILES, FOLDER
from verify.diagnose.library import FAULTS
from verify.diagnose.planted import OUTSIDE, PLANTED, RIGHT, changed, edited
from verify.diagnose.reference import Tiling
from verify.diagnose.self_test import Trial
from verify.diagnose.subject import BLOCKS, DETECTED, Subject
from verify.diagnose.subjects import ALWAYS, of_module
from verify.foreign.facts import Facts
from verify.foreign.spec import Spec

TAKES = ALWAYS | {"causal", "top_left", "gqa", "strides"}


def subject(kernel, dtypes=("fp32",), offers=TAKES):
    """A function of Q, K, V and options as a subject, on probes of the emulated sizes."""

    def call(probe):
        options = {"scale": None, "causal": False, "align": "bottom_right"} | probe.options
        return dict(zip(("O", "lse"), kernel(probe.Q, probe.K, probe.V, **options), strict=True))

    return Subject("kernel", call, frozenset(offers), dtypes, small=True)


# Bug of the judge's own faulty kernel, which knows nothing of the diagnosis -> name.
NAMES = {
    "no_rescale": "O_not_rescaled",
    "inverse_rescale": "alpha_inverted",
    "last_ragged_tile_dropped": "last_ragged_tile_dropped",
    "padding_keys_counted": "ragged_tile_not_masked",
    "diagonal_too_far": "diagonal_one_far",
    "lse_without_max": "lse_without_max",
    "exp2_without_log2e": "exp_base_2",
    "heads_tiled": "heads_modulo",
    "max_starts_at_0": "max_starts_at_0",
    "stale_V": "stale_tile_of_V",
    "half_sums": "O_acc_in_fp16",
    "modifies_input": "input_written",
}


# Those that tell the size of a key tile.
SIZED = {"no_rescale", "inverse_rescale", "last_ragged_tile_dropped", "padding_keys_counted", "stale_V", "half_sums"}


@pytest.mark.parametrize("bug", NAMES)
def test_a_known_bug_is_named(faulty, bug):
    """In a kernel of 16 x 16 tiles, which it is not told."""
    found = diagnose(subject(faulty.kernel(bug)), locate=False)
    assert found.verdict == NAMED
    assert found.names[0] == NAMES[bug]
    for match in found.matches[:1]:
        assert match.explained == match.failing
        assert match.kept == match.passing
        if bug in SIZED:
            assert match.tiling.Bc == 16


@pytest.mark.parametrize("bug", ["one_nan", "one_inf", "one_element", "ties_broken", "exp2_of_degree_4"])
def test_an_unknown_bug_gets_no_name(faulty, bug):
    """It fails probes, and no model is wrong as it is."""
    found = diagnose(subject(faulty.kernel(bug)), locate=False)
    assert found.verdict == UNKNOWN
    assert found.failing
    assert found.names == []
    assert any("none of the known bugs" in line for line in report.lines(found))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_right_kernel_gets_none(faulty, dtype):
    """In any type."""
    found = diagnose(subject(faulty.kernel()), (dtype,))
    assert (found.verdict, found.names) == (NONE, [])
    assert len(found.samples) > 25
    assert "no fault found" in report.lines(found)[0]


def test_the_report_has_the_evidence(faulty):
    """The fault, the tile size, on how many probes, chapter and place."""
    text = "\n".join(report.lines(diagnose(subject(faulty.kernel("no_rescale")))))
    assert "1. O_not_rescaled: equals the reference with alpha not applied to O_acc at Bc = 16" in text
    assert "chapter 18.4.2; look at" in text
    assert "first wrong element: O[0, 0, 0, 0] of probe square" in text
    assert "first wrong weights: probe square, batch 0, head 0: rows" in text


def test_weights_are_read_off_and_the_region_found():
    """A kernel that skips keys 16 - 31 in rows from 8 on: that is the region, and its weights are 0."""
    module = changed("whole", (("    s = s + term\n", "    s = s + term\n    s[:, :, 8:, 16:32] = -np.inf\n"),))
    kernel = replace(of_module(module, "hole"), small=True)
    probe = next(p for p in battery("fp32", True) if p.id == "square")
    P = locate.weights(kernel, probe)
    assert np.all(P[:, :, 8:, 16:32] == 0)
    np.testing.assert_allclose(P[:, :, :8], locate.true_weights(probe)[:, :, :8], rtol=1e-4, atol=1e-9)
    # Rows from 8 on have all their weights changed, so the region is theirs; in row 8 the worst key is in the hole.
    found = locate.region(kernel, probe)
    assert found.rows[0] == 8
    assert found.rows[1] == probe.Q.shape[2] - 1
    right = of_module(changed("whole"), "right")
    assert locate.region(right, probe) is None


def test_an_exception_is_told_and_the_rest_still_judged(faulty):
    """A kernel that raises on one probe and is wrong on others."""
    kernel = faulty.kernel("no_rescale")

    def raising(Q, K, V, **options):
        if K.shape[2] == 0:
            raise ZeroDivisionError("no keys")
        return kernel(Q, K, V, **options)

    found = diagnose(subject(raising), locate=False)
    assert found.names[0] == "O_not_rescaled"
    assert "raised on 1: ZeroDivisionError: no keys" in "\n".join(report.lines(found))


def test_a_race_is_called_one(faulty):
    """Two runs that differ in their bits."""
    right, rng = faulty.kernel(), np.random.default_rng(1)

    def unsteady(Q, K, V, **options):
        O, lse = right(Q, K, V, **options)
        return (O + rng.normal(0, 0.1, O.shape)).astype(O.dtype), lse

    found = diagnose(subject(unsteady), locate=False)
    assert found.names[0] == "race"


def test_the_backward_pass_is_looked_at_when_the_forward_is_right():
    """A wrong gradient is named; a kernel wrong both ways is named for its forward pass."""
    edits = (("+= sm * (dsk.T @ qt)", "+= dsk.T @ qt"),)
    found = diagnose(replace(of_module(changed("tiled_back", edits), "k"), small=True), locate=False)
    assert found.backward
    assert found.names[0] == "scale_missing_in_dK"
    both = (*edits, ("p = e / np.where(tot == 0, f(1), tot)", "p = e"))
    found = diagnose(replace(of_module(changed("tiled_back", both), "k"), small=True), locate=False)
    assert not found.backward
    assert found.names[0] == "not_divided"


@pytest.mark.parametrize("wrong", ["first", "last", "shape"])
def test_of_two_ways_to_the_gradients_the_wrong_one_is_looked_at(wrong, monkeypatch):
    """Whether a kernel adds them up by atomics or not, its fault is found."""
    probe = next(p for p in battery("fp32", small=True) if "dK" in p.truth)
    right = dict(probe.truth)
    off = right | {"dK": right["dK"][..., :1] if wrong == "shape" else right["dK"] + 1}
    monkeypatch.setattr(subjects.calls, "runs", lambda *given: iter([off, right] if wrong == "first" else [right, off]))
    got = subjects.run_ours("general", probe, "emulated")
    assert got["dK"] is off["dK"] and got["dQ"] is right["dQ"]


def test_plants_apply_and_their_names_exist():
    """Every edit of the list finds its text, and what is expected is in the library."""
    from verify.mutants import MUTANTS

    names = {fault.name for fault in FAULTS.values()}
    assert set(EXPECTED) <= set(MUTANTS)
    assert set(EXPECTED.values()) <= names | {OUTSIDE} | {*DETECTED.values(), BLOCKS}
    for bug in PLANTED:
        assert bug.module() is changed(bug.stem, bug.edits)
        assert bug.expected in names | {OUTSIDE}
    assert sum(bug.expected == OUTSIDE for bug in PLANTED) >= 12
    assert {bug.stem for bug in PLANTED} == set(RIGHT)
    with pytest.raises(ValueError, match="occurs 0 times"):
        changed("whole", (("no such text", ""),))


@pytest.mark.parametrize("bug", EXAMPLES, ids=lambda bug: bug.id)
def test_plants_in_examples_apply_and_their_names_exist(bug):
    """Whether its library is here or not."""
    text = (FOLDER / bug.file).read_text()
    assert edited(text, bug.edits, bug.file) != text
    assert bug.expected in {fault.name for fault in FAULTS.values()} | {OUTSIDE}
    assert set(bug.dtypes) <= set(FILES[bug.file][1])


def test_examples_are_tried_where_they_run_and_said_to_be_left_out_where_not(monkeypatch):
    """Each in a process of its own where its library decides on a simulator when it comes up."""
    assert in_examples.needs_process("numba_attention.py") == "numba"
    assert in_examples.needs_process("triton_attention.py") == "triton"
    assert in_examples.needs_process("numpy_attention.py") == ""
    monkeypatch.setattr(in_examples, "gpu_answers", lambda: False)
    monkeypatch.setattr(in_examples, "gpu_missing", lambda: "no CUDA GPU answers")
    monkeypatch.setattr(in_examples, "find_spec", lambda package: package != "cupy")
    said = "\n".join(in_examples.left_out())
    assert "cupy_attention.py and its 6 bugs: cupy is not installed" in said
    assert "triton_attention.py in bf16, 3 bugs: Triton's interpreter" in said
    tried = [call for call in self_test.calls() if call[0] in ("example", "right example")]
    files = {self_test._group(call) for call in tried}
    assert files == {"", "numba", "triton"}
    assert not any(dtype == "bf16" for call, dtype in ((c, c[2]) for c in tried) if self_test._group(call) == "triton")
    assert "left out: so" in report.self_test_lines([], ["so"])


def test_a_bug_in_an_example_is_named():
    """The file is edited, written down, loaded as anybody's, and gone afterwards."""
    bug = next(bug for bug in EXAMPLES if bug.bug == "delta forgotten")
    with in_examples.subject(bug.file, bug.edits) as kernel:
        found = diagnose(replace(kernel, small=True), locate=False)
    assert found.names[0] == bug.expected == "D_missing"


def test_the_height_of_a_tile_changes_nothing_where_a_fault_says_so():
    """The search computes such a prediction once for all heights."""
    probe = next(p for p in battery("fp32", True) if p.id == "ragged")
    models = [key for key, fault in FAULTS.items() if fault.model.rows_matter and not fault.needs]
    assert len(models) > 5
    for key in models:
        low, high = (FAULTS[key].predict(probe, Tiling(Br, 16))[0] for Br in (8, 32))
        assert all(np.array_equal(low[name], high[name], equal_nan=True) for name in low), key
    assert search.prediction(probe, models[0], Tiling(8, 16)) is search.prediction(probe, models[0], Tiling(32, 16))


def test_a_state_that_changes_from_key_to_key_is_searched_for():
    """As in kernels that have no tiles of keys; only where the order of tiles matters."""
    sizes = {key: {t.Bc for t in search.tilings(fault, True)} for key, fault in FAULTS.items()}
    assert 1 in sizes["O_not_rescaled"]
    assert 1 not in sizes["last_ragged_tile_dropped"] | sizes["scale_missing"]


def test_score_counts():
    """Names first, among three, outside, and right ones accused."""
    trials = [
        Trial("a", "NumPy", "fp32", "x", ("x", "y"), True),
        Trial("b", "NumPy", "fp32", "x", ("y", "x"), True),
        Trial("c", "NumPy", "fp32", "x", (), True),
        Trial("d", "NumPy", "fp32", OUTSIDE, ("y",), True),
        Trial("e", "NumPy", "fp32", OUTSIDE, (), True),
        Trial("f", "NumPy", "fp32", OUTSIDE, (), False),
        Trial("g", "NumPy", "fp32", None, (), False),
        Trial("h", "NumPy", "fp32", None, (), True),
    ]
    got = self_test.score(trials)
    assert (got.known, got.first, got.among_three) == (3, 1, 2)
    assert (got.outside, got.wrong_names, got.unseen, got.right, got.accused) == (2, 1, 1, 2, 1)
    assert not got.passed
    assert self_test.score([trials[0], trials[4], trials[6]]).passed
    text = "\n".join(report.self_test_lines(trials))
    assert "right name first: 1 of 3, 33%" in text
    assert "b [fp32]: expected x, got y, x (among three)" in text


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "--kernel: expected a kernel to diagnose, or --self-test"),
        (["--kernel", "step3_flash_v2", "--self-test"], "--self-test: brings its own kernels"),
        (["--kernel", "step3_flash_v2", "--all"], "--all: goes with --self-test"),
        (["--kernel", "step3_flash_v2", "--backward"], "--backward: goes with a kernel of one's own"),
        (["--kernel", "oracle", "--dtype", "fp64"], "--dtype: expected fp32, fp16 or bf16"),
        (["--kernel", "nowhere.py:attn"], "there is no file nowhere.py"),
    ],
)
def test_misuse_is_one_line(args, says, capsys):
    """Exit status 2, before anything runs."""
    assert main(["diagnose", *args]) == 2
    assert says in capsys.readouterr().err


ALONE = {
    "dK = dK.reshape(B, Hk, group, Nk, d)[:, :, 0]": ("group_not_summed", "dK"),
    "dK = dK.reshape(B, group, Hk, Nk, d).sum(1)": ("heads_modulo_in_sums", "dK"),
    "dV = dV.reshape(B, Hk, group, Nk, d).mean(2)": ("group_averaged", "dV"),
    "dK = full(dS + P * D); dK = dK.reshape(B, Hk, group, Nk, d).sum(2)": ("D_missing", "dK"),
    "dK = full(dS) / scale * d**-0.5; dK = dK.reshape(B, Hk, group, Nk, d).sum(2)": ("scale_ignored_in_dK", ""),
    "dK[:, :, -1] = 0; dK = dK.reshape(B, Hk, group, Nk, d).sum(2)": ("", ""),
}
GRADIENTS = """
import numpy as np
from refimpl import oracle

def attn(q, k, v, *, scale=None, causal=False):
    O, lse = oracle.attention(*(x.astype(np.float64) for x in (q, k, v)), scale=scale, causal=causal)
    return O.astype(q.dtype), lse.astype(np.float32)

def attn_backward(q, k, v, do, *, scale=None, causal=False):
    (B, Hq, Nq, d), (_, Hk, Nk, _) = q.shape, k.shape
    group = Hq // Hk
    scale = d**-0.5 if scale is None else scale
    Q, K, V, dO = (x.astype(np.float64) for x in (q, k, v, do))
    K, V = (np.repeat(x, group, 1) for x in (K, V))
    S = scale * Q @ K.swapaxes(2, 3)
    if causal:
        S = np.where(np.arange(Nk) <= np.arange(Nq)[:, None] + Nk - Nq, S, -np.inf)
    m = S.max(-1, keepdims=True, initial=-1e300)
    P = np.exp(S - m)
    l = P.sum(-1, keepdims=True)
    P = P / np.where(l > 0, l, 1)
    dP = dO @ V.swapaxes(2, 3)
    D = (P * dP).sum(-1, keepdims=True)
    dS = P * (dP - D)
    full = lambda dS: scale * dS.swapaxes(2, 3) @ Q
    dQ, dK, dV = scale * dS @ K, full(dS), P.swapaxes(2, 3) @ dO
    {}
    dK, dV = (x if x.shape[1] == Hk and x.ndim == 4 else x.reshape(B, Hk, group, Nk, -1).sum(2) for x in (dK, dV))
    return [x.astype(q.dtype) for x in (dQ, dK, dV)]
"""


@pytest.mark.parametrize("line", ALONE)
def test_what_is_wrong_with_one_gradient_alone_has_its_name(line):
    """A separate line of code for each: the others are right, and that does not hide the fault."""
    module, (name, alone) = ModuleType("one"), ALONE[line]
    exec(GRADIENTS.replace("{}", line), module.__dict__)
    found = diagnose(replace(of_module(module, "one"), small=True), ("fp32",), locate=False)
    assert found.backward and found.names[:1] == [name] * bool(name)
    assert (f", in {alone} alone, " in "\n".join(report.lines(found))) == bool(alone)


STRANGERS = """
import numpy as np
from refimpl import oracle

def attn(q, k, v, *, scale=None, causal=False):
    O, _ = oracle.attention(*(x.astype(np.float64) for x in (q, k, v)), scale=scale, causal=causal)
    return O.astype(q.dtype)

def overwrites(q, k, v, *, scale=None, causal=False):
    O = attn(q, k, v, scale=scale, causal=causal)
    k[...] = 7
    return O

def attn_backward(q, k, v, do, *, scale=None, causal=False):
    raise ValueError("not today")

def whole(q, k, v, *, scale=None, causal=False):
    if q.shape[2] % 128:
        raise IndexError("index 128 is out of bounds")
    return attn(q, k, v, scale=scale, causal=causal)

def dies(q, k, v, *, scale=None, causal=False):
    if q.shape[1] != k.shape[1]:
        import os
        os._exit(3)
    return attn(q, k, v, scale=scale, causal=causal)
"""


@pytest.mark.parametrize(("args", "status", "says"), [
    (["overwrites"], 1, ["ReadOnly: input K was modified", "1. input_written: an input was written to"]),
    (["attn", "--backward"], 2, ["does not take a backward pass (probed: ValueError: not today); leave it out"]),
    (["whole"], 0, ["no fault found", "not looked at: does not take lengths that no tile divides (probed: IndexError"]),
    (["dies"], 1, ["raised on 2: the worker process died (exit status 3)", "none of the known bugs"]),
])  # fmt: skip
def test_what_a_stranger_does_besides_is_said(args, status, says, tmp_path, capsys):
    """Writing to its inputs, refusing what it was asked for, or dying is not "no fault found" and status 0."""
    (tmp_path / "strangers.py").write_text(STRANGERS)
    name, *more = args
    assert main(["diagnose", "--kernel", f"{tmp_path / 'strangers.py'}:{name}", "--dtype", "fp32", *more]) == status
    told = "".join(capsys.readouterr())
    assert all(line in told for line in says), told


STALE = """
def attn(q, k, v, scale=None, causal=False):
    stored, (B, H, Nq, d), Nk = q.dtype, q.shape, k.shape[2]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, H // k.shape[1], 1) for x in (k, v))
    O, T = np.zeros((B, H, Nq, v.shape[3])), {T}
    for b, h, r in np.ndindex(B, H, -(-Nq // T)):
        rows = np.arange(r * T, min(r * T + T, Nq))
        ks, vs = np.full((T, d), 7.0), np.full((T, v.shape[3]), 7.0)
        s, w = np.zeros((len(rows), 0)), np.zeros((0, v.shape[3]))
        {bound}
        for j in range(0, end, T):
            n = min(T, Nk - j)
            ks[:n], vs[:n] = k[b, h, j : j + n], v[b, h, j : j + n]
            x = q[b, h, rows] @ ks.T * (d**-0.5 if scale is None else scale)
            hidden = j + np.arange(T) > (rows[:, None] + Nk - Nq if causal else {last})
            s, w = np.hstack([s, np.where(hidden, -np.inf, x)]), np.vstack([w, vs])
        if s.shape[1]:
            m = s.max(-1, keepdims=True)
            e = np.exp(s - np.where(np.isneginf(m), 0, m))
            l = e.sum(-1, keepdims=True)
            O[b, h, rows] = e @ w / np.where(l == 0, 1, l)
    return O.astype(stored)
"""


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("", {"T": 8, "bound": "end = Nk", "last": "Nk - 1"}),
        ("ragged_tile_stale", {"T": 8, "bound": "end = Nk", "last": "Nk + T"}),
        ("live_tile_skipped", {"T": 16, "bound": "end = min(Nk, r * T + T) if causal else Nk", "last": "Nk - 1"}),
        ("live_tile_skipped",
         {"T": 64, "bound": "end = min(Nk, r * T + Nk - Nq) if causal else Nk", "last": "Nk - 1"}),
    ],
)  # fmt: skip
def test_tiles_as_large_as_a_strangers(name, parts):
    """What a ragged tile is left with by the tile before; a causal loop one tile of rows short, all rows in one."""
    module = ModuleType("stale")
    exec("import numpy as np\n" + STALE.format(**parts), module.__dict__)
    found = diagnose(replace(of_module(module, "stale"), small=True), ("fp32",), locate=False)
    assert found.names[:1] == [name] * bool(name)


def _with(kernel, change):
    """A kernel whose outputs are changed: ``change(O, lse, Q, K)``."""

    def changed(Q, K, V, **options):
        return change(*kernel(Q, K, V, **options), Q, K)

    return changed


def test_what_has_no_name_is_told_by_what_shows(faulty):
    """Where nothing comes out no name is guessed; what all failing probes share is said, and no more than that."""
    zero = diagnose(subject(_with(faulty.kernel(), lambda O, lse, Q, K: (0 * O, None))), locate=False)
    text = "\n".join(report.lines(zero))
    assert zero.names == [] and "O is 0 all over on 3" in text and "what all" not in text
    lost = diagnose(subject(_with(faulty.kernel(), lambda O, lse, Q, K: (O * np.nan, lse))), locate=False)
    assert "O is NaN or infinite all over on" in "\n".join(report.lines(lost))

    def grouped(O, lse, Q, K):
        if Q.shape[1] != K.shape[1]:
            raise IndexError("index 2 is out of bounds")
        return O, lse

    heads = diagnose(subject(_with(faulty.kernel(), grouped), ("fp32", "fp16")), locate=False)
    text = "\n".join(report.lines(heads))
    assert "what all 2 failing probes have is fewer key heads than query heads, and none of the" in text
    assert "look at which key head a query head reads" in text
    assert "not looked at, as fp32 fails: fp16" in text


def test_what_was_learnt_before_is_said_beside_no_fault(tmp_path, capsys, monkeypatch):
    """Causal aligned top left is right on what is probed, and a type that nothing was probed in is no right one."""
    facts = Facts(arrays="numpy", small=True, hints=("aligned top left",), refused={("dtype", "fp16"): "so"}, d=16)
    monkeypatch.setattr("verify.foreign.probe.probe", lambda *args, **kwargs: facts)
    monkeypatch.setattr("verify.commands.diagnose.diagnose", lambda kernel, progress: Diagnosis("k", "fp32", NONE))
    path = tmp_path / "k.py"
    path.write_text("def attn(q, k, v): return q")
    assert main(["diagnose", "--kernel", str(path), "--dtype", "fp32,fp16"]) == 0
    said = capsys.readouterr().out
    assert "  aligned top left\n" in said and "  not looked at: fp16 (so)\n" in said and "head dim 16" in said
    assert subjects.foreign(Spec(str(path)), facts, ["fp32", "fp16"]).d == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "status", "says"),
    [
        ("refimpl.step2_flash_v1", 0, "no fault found"),
        (
            "examples/numpy_attention_wrong.py",
            1,
            "1. O_not_rescaled: equals the reference with alpha not applied to O_acc at Bc = 64",
        ),
    ],
)
def test_the_command(kernel, status, says, capsys, monkeypatch):
    """From the root of the repository, in a process of the kernel's own."""
    monkeypatch.chdir(Path(__file__).parents[2])
    assert main(["diagnose", "--kernel", kernel, "--dtype", "fp32"]) == status
    assert says in capsys.readouterr().out


@pytest.mark.slow
def test_self_test_passes():
    """All its goals: names first, among three, none for bugs outside the library, and no right kernel accused."""
    trials = self_test.run()
    assert self_test.score(trials).passed, "\n".join(report.self_test_lines(trials))
