"""What the figures draw: their data against brute force, counted traffic and the oracle."""

import re

import numpy as np
import pytest
from matplotlib.colors import to_hex

from figures import error_matrix, hbm_traffic, online_softmax, roofline, tiling
from figures.devices import A100, DEVICES, H100, H200
from refimpl import oracle, step0_standard, step1_fused, step2_flash_v1, step3_flash_v2
from refimpl.observe import Tally
from refimpl.options import TileClass
from refimpl.tiling import Tile
from verify.cases import DEFAULT
from verify.registry import KERNELS
from verify.result import Metrics, Result

STEPS = {
    "step0_standard": step0_standard,
    "step1_fused": step1_fused,
    "step2_flash_v1": step2_flash_v1,
    "step3_flash_v2": step3_flash_v2,
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("tile", [Tile(16, 16), Tile(24, 10)], ids=str)
def test_traffic_is_what_the_step_moves(step, tile):
    """The line drawn is the traffic counted while the step runs, ragged lengths included."""
    tally = Tally()
    arrays = np.zeros((3, 1, 1, 50, hbm_traffic.D))
    STEPS[step].attention(*arrays, tile=tile, observe=tally)
    assert hbm_traffic.fills(step, 50, tile) == tally.hbm_bytes(e=hbm_traffic.E)


@pytest.mark.parametrize("make", [hbm_traffic.data_by_length, hbm_traffic.data_by_tile])
def test_no_method_is_below_the_compulsory_minimum(make):
    """All lines lie above the minimum, and the steps come in the order that the ladder claims."""
    data = make()
    assert all((line > data.compulsory).all() for line in [*data.steps.values(), data.idealised])
    v1, v2 = data.steps["step2_flash_v1"], data.steps["step3_flash_v2"]
    assert (v2 < data.steps["step1_fused"]).all() and (v2 < v1).all() and (v2 < data.steps["step0_standard"]).all()


def test_idealised_standard_line():
    """S and P of two bytes, written once and read once: 8 N² bytes, and Q, K, V, O once."""
    data = hbm_traffic.data_by_length()
    N, d = data.x.astype(float), hbm_traffic.D
    assert (data.idealised == 8 * N**2 + 8 * N * d).all()
    assert (data.compulsory == 8 * N * d).all()


def test_tiles_are_classified_as_their_elements_say():
    """Counting elements one by one gives the classes that are drawn."""
    grids = tiling.data_causal()
    assert {(g.Nq > g.Nk) - (g.Nq < g.Nk) for g in grids} == {-1, 0, 1}
    for g in grids:
        shift = g.Nk - g.Nq if g.align == "bottom_right" else 0
        for rows, cols, kind in g.classes:
            pairs = [(r, c) for r in range(rows.start, rows.stop) for c in range(cols.start, cols.stop)]
            seen = sum(c <= r + shift for r, c in pairs)
            wanted = {0: TileClass.EMPTY, len(pairs): TileClass.FULL}.get(seen, TileClass.PARTIAL)
            assert kind is wanted
        assert g.seen.sum() == sum(c <= r + shift for r in range(g.Nq) for c in range(g.Nk))


def test_state_ends_at_the_oracles_answer():
    """After the last tile O_acc / l is O, and m + ln l is lse."""
    for case, g in zip(("square", "growing_max", "late_max"), online_softmax.data_state(), strict=True):
        problem = DEFAULT[case].build("fp64")
        O, lse = oracle.attention(problem.Q, problem.K, problem.V)
        row = 0, 0, online_softmax.ROW
        assert abs(g.O_acc[-1] / g.l[-1] - O[row][0]) <= 1e-12 and pytest.approx(O[row][0], abs=1e-12) == g.O
        assert abs(g.m[-1] + np.log(g.l[-1]) - lse[row]) <= 1e-12
        assert g.m[-1] == pytest.approx(g.scores.max(), abs=1e-12)
        assert (g.alpha <= 1).all() and g.alpha[0] == 0


def test_ridges():
    """The ridge is where the two roofs meet."""
    for device in DEVICES:
        for rate in (device.fp32_tflops, device.fp16_tflops):
            ridge = device.ridge(rate)
            assert device.roof(ridge, rate) == pytest.approx(rate)
            assert device.roof(ridge / 2, rate) == pytest.approx(rate / 2)
    assert A100.ridge(A100.fp16_tflops) < H100.ridge(H100.fp16_tflops) > H200.ridge(H200.fp16_tflops)


def test_intensity_follows_from_the_fills():
    """Less traffic for the same work is a higher intensity, and none beats the compulsory minimum's."""
    data = roofline.data_steps()
    values = [data.intensity[step] for step in ("step0_standard", "step1_fused", "step3_flash_v2")]
    assert values == sorted(values) and values[-1] < data.compulsory
    assert data.compulsory == roofline.N / 2  # 4 N² d over 8 N d


def result(case, kernel, verdict="pass", ratio=0.5):
    """A judged run with this share of its bound."""
    metrics = dict.fromkeys(
        ("max_rel", "rmse", "rmse_plain", "rmse_ratio", "cosine", "got", "wanted", "plain", "apriori"), 0.0
    )
    O = Metrics(
        max_abs=ratio,
        bound=1.0,
        nan=0,
        inf=0,
        share_out=0.0,
        worst_index=(0,),
        fixed=None,
        ok=verdict == "pass",
        **metrics,
    )
    outputs = {} if verdict == "skip" else {"O": O}
    return Result(kernel, case, "fp32", "numpy", "CPU", {}, None, verdict, outputs=outputs)


def test_matrix_shows_what_failed_and_what_did_not_run():
    """A pass is a shade, a failure is red with its ratio, a skip is grey and empty: never drawn as passed."""
    results = [
        result("a", "step0_standard"),
        result("a", "step1_fused", "fail", 7.0),
        result("b", "step0_standard", "skip"),
    ]
    figure = error_matrix.fig_kernels(error_matrix.matrix(results, "made up"))
    (ax,) = figure.axes
    texts = [t.get_text() for t in ax.texts]
    assert ".50" in texts and "7.00" in texts
    (image,) = ax.get_images()
    fills = [to_hex(colour).upper() for colour in image.get_array().reshape(-1, 4)]
    assert fills.count(error_matrix.WRONG.upper()) == 1
    assert fills.count(error_matrix.SKIPPED.upper()) == 2  # the skip, and the pair that has no result at all


def test_matrix_of_refimpl_is_complete_and_passes():
    """Every case, dtype and step has a verdict, and it is pass; packed sequences are nothing for these steps."""
    data = error_matrix.matrix(error_matrix.run_refimpl(), "now")
    assert set(data.results) == {(case, *column) for case in DEFAULT for column in data.columns}
    assert len(data.columns) == len(KERNELS) * len(error_matrix.DTYPES)
    assert [key for key, r in data.results.items() if r.verdict != "pass" and "packed" not in r.reason] == []
    skipped = {case for (case, *_), r in data.results.items() if r.verdict == "skip"}
    assert skipped == {case.id for case in DEFAULT.values() if case.layout == "packed"}


def test_matrix_prefers_a_record(monkeypatch):
    """With a GPU run on record that is what is drawn, under its device's name."""
    run = {"device": "Test GPU", "made": "2026-01-02T00:00:00+00:00"}
    run["results"] = [
        result(case, kernel, verdict).to_dict()
        for case, kernel, verdict in (
            ("square", "step0_standard", "pass"), ("square", "a_stranger", "pass"), ("square", "general", "pass"),
            ("document", "step0_standard", "skip"), ("document", "general", "pass"),
        )
    ]  # fmt: skip
    monkeypatch.setattr(error_matrix.document, "newest_gpu", lambda: run)
    data = error_matrix.data_kernels()
    assert data.columns == [("fp32", "step0_standard"), ("fp32", "general")]
    assert data.cases == ["square"]  # of `document` the ladder has nothing to show
    assert "Test GPU" in data.note and "2026-01-02" in data.note


def test_sources_of_the_roofs_are_named():
    """Each device says which sheet its numbers are from."""
    assert all(re.search(r"datasheet", device.source) and device.name in device.source for device in DEVICES)
