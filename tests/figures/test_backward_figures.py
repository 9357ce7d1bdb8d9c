"""The backward pass in figures: lanes as the emulator moves them, the kernel's own order, rates of the record."""

import json

import numpy as np
import pytest

from figures import backward, backward_rates
from figures.products import Products
from flash_cuda import backward_tensor_core
from flash_cuda.ptx import hopper_standins, standins
from refimpl import oracle
from refimpl.tiling import Tile
from verify.bench.points import fingerprint_of
from verify.bench.suite import H200


def test_lanes_are_those_of_the_emulators_products():
    """What a product leaves and what one takes, by the stand-ins' own maps: of mma, and of a warp in wgmma."""
    left, taken, across = backward.data_lanes()
    lane = np.arange(32)[:, None]
    assert (left.lane[standins._C_ROW[:, :4], standins._C_COLUMN[:, :4]] == lane).all()
    assert (taken.lane[standins._A_ROW[:, :4], standins._A_COLUMN[:, :4]] == lane).all()
    row, column = (of[:32] for of in np.broadcast_arrays(*hopper_standins._layout(4)))
    assert (left.lane[row, column] == lane).all()
    first = standins._A_ROW < 8  # queries, where they are the rows
    lanes = np.broadcast_to(lane, first.shape)[first]
    assert (across.lane[standins._A_COLUMN[first], standins._A_ROW[first]] == lanes).all()
    assert left.in_place(taken) == left.lane.size > left.in_place(across)


def test_flight_is_the_order_of_the_docstring():
    """S and dP belong to the next tile, dQ to the one before; at every wait but dV's something is in flight."""
    flight = backward.data_flight()
    starts = {moment.what: moment.late for moment in flight.moments if moment.kind == "start"}
    assert starts == {"dV": 0, "dQ": -1, "dK": 0, "S": 1, "dP": 1}
    assert flight.waits() == [("dP", {"dV"}), ("dV", set()), ("dQ", {"dK", "S"}), ("dK", {"S"}), ("S", {"dP"})]


def test_a_product_that_nobody_waits_for_is_noticed(monkeypatch):
    text = backward.getsource(backward.backward_hopper_kernels.make_kernel)
    monkeypatch.setattr(backward, "getsource", lambda _: text.replace("wait_dK(dK_acc)", "pass"))
    with pytest.raises(RuntimeError, match="expected products"):
        backward.data_flight()


def record(folder, rows):
    head = {"kind": "suite", "device": "NVIDIA H200", "made": "2026-12-02T00:00:00+00:00"}
    ceilings = {"measured": {"tflops": 700.0, "gb_per_s": 4000.0}}
    (folder / "suite.json").write_text(json.dumps({**head, "ceilings": ceilings, "rows": rows}))


def row(name, N, tflops, direction="backward", **more):
    size = {"direction": direction, "dtype": "fp16", "d": 64, "causal": False, "N": N}
    return size | {"name": name, "tflops": tflops} | more


def test_rates_are_those_of_the_record(tmp_path):
    fresh = {"fingerprint": fingerprint_of("step6_flash_v3", "backward")}
    rows = [row("step6_flash_v3", 4096, 400.0, **fresh), row("step6_flash_v3", 1024, 300.0, **fresh),
            row("step5_tensor_core", 1024, 200.0, fingerprint="old"), row("sdpa_cudnn", 1024, 350.0),
            row("step6_flash_v3", 1024, 999.0, "forward", fingerprint="old"),
            row("step6_flash_v3", 1024, 888.0, dtype="bf16", **fresh),
            {"direction": "backward", "dtype": "fp16", "name": "sdpa_flash", "not_measured": "no torch",
             "d": 64}]  # fmt: skip
    record(tmp_path, rows)
    data = backward_rates.data_by_length(tmp_path)
    assert data.lines == {("step6_flash_v3", 64, False): [(1024, 300.0), (4096, 400.0)],
                          ("step5_tensor_core", 64, False): [(1024, 200.0)],
                          ("sdpa_cudnn", 64, False): [(1024, 350.0)]}  # fmt: skip
    assert data.stale == ("step5_tensor_core",) and data.reached == 700.0
    figure = backward_rates.fig_by_length(data)
    assert "Changed since: step5_tensor_core" in figure.get_suptitle()
    drawn = {tuple(line.get_ydata()) for line in figure.axes[0].lines if line.get_marker() == "o"}
    assert drawn == {(300.0, 400.0), (200.0,), (350.0,)}
    empty = [ax for ax in figure.axes if any(text.get_text() == "no record" for text in ax.texts)]
    assert len(empty) == len(figure.axes) - 1 == len(H200.dims) * len(H200.masks) - 1


def test_a_record_without_backward_passes_says_so(tmp_path):
    assert backward_rates.data_by_length(tmp_path).note == "no record of the suite yet"
    record(tmp_path, [row("step6_flash_v3", 1024, 999.0, "forward")])
    data = backward_rates.data_by_length(tmp_path)
    assert not data.lines and "no backward pass on record" in data.note
    assert "no backward pass on record" in backward_rates.fig_by_length(data).get_suptitle()


@pytest.mark.parametrize("deterministic", [False, True])
def test_products_are_counted(deterministic):
    """Five products in one pass, four and three in two; a kernel's fragments are read as often as its tiles say."""
    rng, N, d = np.random.default_rng(0), 32, 16
    Q, K, V, dO = (rng.standard_normal((1, 1, N, d)).astype(np.float16) for _ in range(4))
    O, lse = oracle.attention(*(x.astype(np.float64) for x in (Q, K, V)))
    on = Products()
    backward_tensor_core.attention_backward(Q, K, V, O.astype(np.float16), lse.astype(np.float32), dO, on=on,
                                            deterministic=deterministic, tile=Tile(16, 16))  # fmt: skip
    products = {kernel: flops / (2 * N * N * d) for kernel, flops in on.flops.items()}
    assert products == ({"backward_keys": 4, "backward_queries": 3} if deterministic else {"backward_keys": 5})
    assert all(on.read_bytes[kernel] % 512 == 0 and on.read_bytes[kernel] for kernel in products)
    assert on.waits == []
