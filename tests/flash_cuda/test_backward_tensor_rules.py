"""Gradients under rules on tensor cores, lane by lane: every option, the pairs that are skipped, its own mistakes."""

import ml_dtypes
import numpy as np
import pytest
from helpers_clean import unclean
from helpers_mutate import step_with
from hypothesis import given, settings
from hypothesis import strategies as st
from random_options import Combination, draw, judge_gradients

from flash_cuda.backward_tensor_core import attention_backward
from flash_cuda.executors.emulator import Emulator
from flash_cuda.executors.memory import KernelFault
from flash_cuda.parts.backward_tensor_shapes import (
    KEYS_BY_ARRAY,
    KEYS_BY_RULE,
    SHARED_LIMIT,
    Shape,
    fitting,
    usable,
)
from flash_cuda.parts.tensor_gradient_rule_ops import drawn_four
from refimpl import options, oracle
from refimpl.frame import Frame, visible
from refimpl.philox import Dropout
from refimpl.rule import and_
from refimpl.standard import standard
from refimpl.tiling import spans

HALVES = "fp16", "bf16"
BLOCKS = [  # one warp and more, a band of 16 rows each and two
    Shape(16, 16), Shape(32, 32, 32), Shape(64, 16, 32, True), Shape(32, 16, 16, False, True), Shape(48, 32),
]  # fmt: skip
EITHER = pytest.mark.parametrize("deterministic", [True, False])
SMALL = {"keys": Shape(32, 16), "queries": Shape(32, 16), "on": Emulator}


def draws(Nq, Nk, d=8, H=2, dtype=np.float16, seed=0):
    """Q, K, V and dO."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((1, h, n, d)).astype(dtype) for h, n in ((H, Nq), (1, Nk), (1, Nk), (H, Nq))]


def told(arrays, given, truth, deterministic=True, attention_backward=attention_backward, **where):
    """What is wrong with a call's gradients, None if nothing."""
    dtype = "bf16" if arrays[0].dtype == ml_dtypes.bfloat16 else "fp16"
    made = Combination(0, dtype, dict(zip(("Q", "K", "V", "dO"), arrays, strict=True)), given, truth)
    return judge_gradients(made, attention_backward, deterministic=deterministic, **(SMALL | where))


# ---- options


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 10**6))
def test_random_combinations_emulated(seed):
    made = draw(seed, longest=30, dims=(16, 16) if seed % 2 else (1, 16), dtypes=HALVES)
    shape = BLOCKS[seed % len(BLOCKS)]
    wrong = judge_gradients(made, attention_backward, deterministic=seed // 2 % 2 == 0, keys=shape, queries=shape,
                            on=Emulator)  # fmt: skip
    assert wrong is None, wrong


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, 500, 100))
def test_random_combinations_on_a_gpu(first):
    """500 in all, at the tiles that calls take."""
    from flash_cuda.executors.gpu import Gpu

    combinations = (draw(seed, longest=300, dims=(64, 64) if seed % 4 else (33, 64), dtypes=HALVES)
                    for seed in range(first, first + 100))  # fmt: skip
    judged = (judge_gradients(made, attention_backward, deterministic=made.seed % 2 == 0, on=Gpu)
              for made in combinations)  # fmt: skip
    wrong = [said for said in judged if said]
    assert not wrong, f"{len(wrong)} wrong, the first: {wrong[0]}"


IDS = np.repeat(np.arange(5), [3, 20, 1, 9, 17])  # 50 keys; a query stands at the same place as its key
I, J = np.ogrid[20:50, 0:50]  # positions of 30 queries
TABLE = np.random.default_rng(3).standard_normal(7).astype(np.float32)


@pytest.mark.parametrize("rules, truth", [
    (options.document(IDS[20:], IDS), {"mask": IDS[20:, None] == IDS}),
    (options.prefix_lm(30), {"mask": np.maximum(I + 1, 30) > J}),
    (options.dilated(3), {"mask": (I - J) % 3 == 0}),
    (options.relative(TABLE), {"bias": TABLE[np.clip(J - I, -3, 3) + 3]}),
    (options.or_(options.window(3, 0), options.document(IDS[20:], IDS)),
     {"mask": ((I - J >= 0) & (I - J <= 3)) | (IDS[20:, None] == IDS)}),
    ([options.softcap(2.0), options.alibi([0.5, 0.1]), options.window(20, 0)],
     {"softcap": 2.0, "alibi_slopes": np.array([0.5, 0.1]), "window": (20, 0)}),
    (options.Rule(lambda b, h, i, j: (i + j) % 2 == h), {"mask": np.arange(2)[:, None, None] == (I + J) % 2}),
], ids=["document", "prefix_lm", "dilated", "relative", "or", "joined", "own"])  # fmt: skip
def test_rules(rules, truth):
    """Combined ones and one's own too; dQ either way."""
    for deterministic in (True, False):
        assert told(draws(30, 50), {"rules": rules}, truth, deterministic) is None


@pytest.mark.parametrize("shape", [(1, 2, 21, 35), (2, 1, 35), (21, 1)], ids=str)
def test_the_gradient_of_a_bias(shape):
    """Summed over the axes along which it was broadcast, whichever way dQ is asked for."""
    bias = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    given = {"bias": bias, "softcap": 2.0, "window": (9, 3)}
    assert told(draws(21, 35), given, given, len(shape) > 2) is None


def test_the_gradient_of_a_table():
    """Sums of a bias's gradient along the diagonals; a window hides most tiles, whose part of it is 0."""
    arrays, offset = draws(21, 70), 70 - 21
    table = np.random.default_rng(6).standard_normal((2, 7)).astype(np.float32)
    bins = np.clip(np.arange(70) - np.arange(21)[:, None] - offset, -3, 3) + 3
    want = oracle.attention_backward(*(x.astype(float) for x in arrays), bias=table[:, bins], window=(9, 3))
    O, lse = oracle.attention(*(x.astype(float) for x in arrays[:3]), bias=table[:, bins], window=(9, 3))
    found = attention_backward(*arrays[:3], O.astype(np.float16), lse.astype(np.float32), arrays[3], on=Emulator(),
                               window=(9, 3), rules=options.relative(table), dtable=True, keys=SMALL["keys"],
                               queries=SMALL["queries"])  # fmt: skip
    true = np.array([[want[3][h][bins == n].sum() for n in range(7)] for h in range(2)])
    assert found[3] is None and np.abs(found[4] - true).max() <= 2e-3 * np.abs(true).max()


def test_a_window_put_off_by_one_is_seen():
    arrays = draws(20, 33)
    for left, right in ((5, 2), (4, 2), (6, 2), (5, 1), (5, 3)):
        right_one = (left, right) == (5, 2)
        assert (told(arrays, {"rules": options.window(left, right)}, {"window": (5, 2)}) is None) == right_one


@pytest.mark.parametrize("scale", [-0.7, 0.0])
@pytest.mark.parametrize("given", [{"window": (9, 4)}, {"softcap": 1.5, "causal": True}], ids=["mask", "score"])
def test_any_scale(scale, given):
    given = given | {"scale": scale}
    assert told(draws(20, 33, dtype=ml_dtypes.bfloat16), given, given, scale < 0) is None


@EITHER
@pytest.mark.parametrize("Nq, Nk", [(0, 5), (5, 0), (1, 1), (33, 17)])
def test_edges_of_the_shapes(Nq, Nk, deterministic):
    for option in ({"window": (2, 0)}, {"alibi_slopes": np.array([1.0, 2.0])}):
        assert told(draws(Nq, Nk), option, option, deterministic) is None


@EITHER
@pytest.mark.parametrize("d, shape", [(64, Shape(32, 16, 32)), (192, Shape(16, 16))])
def test_every_kind_of_block(d, shape, deterministic):
    """Above d = 128 dK and dV are summed apart."""
    given = {"softcap": 1.0, "window": (9, 0)}
    assert told(draws(17, 20, d, H=1), given, given, deterministic, keys=shape, queries=shape) is None


def test_a_plain_call_takes_the_plain_kernels():
    """None and no rules are no options: what it compiles is what it always did."""
    bodies = []

    class Noting(Emulator):
        def launch(self, body, *args, **how):
            bodies.append(body.__name__)

    Q, K, V, dO = draws(3, 3)
    for call in ({}, {"window": None, "softcap": None, "rules": ()}, {"causal": True, "rules": []}, {"softcap": 3.0}):
        attention_backward(Q, K, V, dO, np.zeros((1, 2, 3), np.float32), dO, on=Noting(), **call)
    plain, ruled = (["backward_rows", f"backward_keys{s}", f"backward_queries{s}"] for s in ("", "_with_rules"))
    assert bodies == 3 * plain + ruled


def run(arrays, given, on, deterministic=True, shape=SMALL["keys"]):
    """dQ, dK and dV after some forward pass, whose O is 0 where dO is NaN."""
    Q, K, V, dO = arrays
    O, lse = np.nan_to_num(dO), np.ones(Q.shape[:3], np.float32)
    return attention_backward(Q, K, V, O, lse, dO, on=on, deterministic=deterministic, keys=shape, queries=shape,
                              **given)[:3]  # fmt: skip


def test_the_same_bits_in_any_thread_order():
    """All gradients if asked for, else dK and dV."""
    arrays, given = draws(30, 40), {"causal": True, "softcap": 2.0, "dropout": Dropout(0.3, seed=5)}
    first, *others = [run(arrays, given, Emulator(seed)) for seed in (None, 1)]
    others.append((first[0], *run(arrays, given, Emulator(2), deterministic=False)[1:]))
    for other in others:
        for x, y in zip(first, other, strict=True):
            np.testing.assert_array_equal(x, y)


def test_dropout_draws_what_numpy_draws():
    drop = Dropout(0.3, seed=2**40 + 7, offset=3)
    fours = [[drawn_four(1, 2, r, c, *drop.arguments) for c in range(0, 12, 4)] for r in range(9)]
    drawn = np.array(fours)[..., None] >> np.arange(4) & 1
    np.testing.assert_array_equal(drawn.reshape(9, 12), drop.mask(1, 2, slice(0, 9), slice(0, 12)))


@EITHER
def test_what_holds_nan_past_the_ends_is_not_touched(deterministic):
    """Rows and keys past the lengths in use, and keys right of the window of the last row."""
    given = {"window": (9, 3), "align": "top_left", "lengths_q": np.array([19]), "lengths_k": np.array([33])}
    arrays = draws(30, 40)
    clean = run(arrays, given, Emulator(), deterministic)
    for name, x in zip(("Q", "K", "V", "dO"), arrays, strict=True):
        x[:, :, 19 if name in ("Q", "dO") else 22 :] = np.nan
    found = run(arrays, given, Emulator(), deterministic)
    for x, y, end in zip(found, clean, (19, 22, 22), strict=True):
        np.testing.assert_array_equal(x, y)
        assert not x[:, :, end:].any() and np.isfinite(x).all() and x.any()


@pytest.mark.parametrize("change, error, says", [
    ({"rules": [3]}, TypeError, "rules: expected Rule objects"),
    ({"window": (-2, 0)}, ValueError, "window left"),
    ({"softcap": -1.0}, ValueError, "softcap"),
    ({"mask": np.ones((5, 8), bool)}, ValueError, "mask"),
    ({"alibi_slopes": np.ones(3)}, ValueError, "slopes"),
    ({"lengths_k": np.array([10])}, ValueError, "lengths_k"),
    ({"dropout": 0.5}, TypeError, "dropout: expected a Dropout"),
    ({"bogus": 1}, TypeError, "bogus"),
    ({"bias": np.ones((5, 8))}, ValueError, "bias"),
    ({"bias": np.ones((5, 9)), "rules": options.softcap(2.0)}, ValueError, "bias: expected no rule after it"),
    ({"dtable": True}, ValueError, "dtable: expected False unless there is one relative rule"),
    ({"rules": options.Rule(lambda s, b, h, i, j: s, kind="score")}, ValueError, "rules: expected .* a derivative"),
    ({"softcap": 1.0, "keys": Shape(32, 64, 32)}, ValueError,
     r"keys: expected at most 32 scores a lane, got 64 of \(32, 64\) on 1 warps"),
])  # fmt: skip
def test_bad_options_are_named(change, error, says):
    Q, K, V, dO = draws(5, 9)
    with pytest.raises(error, match=says):
        attention_backward(Q, K, V, dO, np.zeros((1, 2, 5), np.float32), dO, on=Emulator(), **change)


# ---- pairs that are skipped

MASK = np.kron(np.random.default_rng(1).random((2, 4)) < 0.4, np.ones((16, 16))).astype(bool)[:30, :50]


@pytest.mark.parametrize("given", [
    {"rules": options.document(IDS[20:], IDS)}, {"window": (3, 1)}, {"mask": MASK},
    {"causal": True, "align": "top_left", "lengths_k": np.array([40]), "lengths_q": np.array([16])},
], ids=["documents", "window", "holes", "lengths"])  # fmt: skip
@pytest.mark.parametrize("rows", [16, 32])
def test_dead_pairs_are_not_loaded(given, rows):
    """Tiles loaded are those in which some pair is seen, by a look at all pairs; one that is kept, if any is live."""
    arrays = draws(30, 50)
    at = Frame(1, 2, 30, 50, given.get("lengths_q"), given.get("lengths_k"), given.get("align", "bottom_right"))
    usual, _ = standard(**{name: x for name, x in given.items() if name in ("causal", "window", "mask")})
    seen = and_(usual, *([given["rules"]] if "rules" in given else [])).at(at)
    live = {of: np.array([[[visible(seen, 0, h, r, c).any() for c in spans(50, across)] for r in spans(30, down)]
                          for h in range(2)]) for of, down, across in (("keys", 16, rows), ("queries", rows, 16))}
    keys, queries = live["keys"], live["queries"]
    assert 0 < keys.sum() + queries.sum() < keys.size + queries.size
    tile = 16 * 8
    wanted = {
        "K": rows * 8 * keys.any(axis=(0, 1)).sum() + tile * queries.sum(),
        "Q": tile * keys.sum() + rows * 8 * queries.any(axis=2).sum(),
    }
    machine = Emulator()
    run(arrays, given, machine, shape=Shape(rows, 16))
    counts = {name: machine.counts[name][0] for name in "QKV"}
    assert counts == wanted | {"V": wanted["K"]}
    assert machine.counts["dO"][0] == wanted["Q"] + 2 * 30 * 8  # and once for D


def test_many_rounds():
    """A block of one warp looks at 32 pairs at a time: whole rounds are empty, and the next live one is in another."""
    ids = np.repeat(np.arange(4), [20, 700, 20, 20])
    rows = np.r_[0:10, 740:760]
    for arrays, ids_q, ids_k in ((draws(30, 760, H=1), ids[rows], ids), (draws(760, 30, H=1), ids, ids[rows])):
        call, truth = {"rules": options.document(ids_q, ids_k)}, {"mask": ids_q[:, None] == ids_k}
        shape = Shape(16, 16)
        assert told(arrays, call, truth, keys=shape, queries=shape) is None


# ---- mistakes

PLACE = "down, across = at // (4 * NB) * 16 + (at & 2) * 4, at // 4 % NB * 8 + (at & 1)"
OPS = {
    "rows eight apart exchanged": (PLACE, PLACE.replace("(at & 2) * 4", "(2 - (at & 2)) * 4")),
    "columns of a pair exchanged": (PLACE, PLACE.replace("(at & 1)", "1 - (at & 1)")),
    "the mask takes the row for the position": ("mask_fn(b, h, int32(row + offset), j", "mask_fn(b, h, row, j"),
    "the score takes the row for the position": ("int32(min(row, Nq - 1) + offset)", "int32(min(row, Nq - 1))"),
    "a pair in part counts as whole": ("ballot(kind == 2)", "ballot(kind > 0)"),
    "a live pair is stepped over": ("                    n = int32(n + 1)\n", "                    n = int32(n + 2)\n"),
    "a warp leaves out a row too many": ("min(row0 + WR, Nq) + offset)", "min(row0 + WR, Nq) + offset - 1)"),
    "the next head begins a tile late": ("int32(h + int32(beyond))", "int32(h + int32(uint32(n + 1) // Tr))"),
    "lse of the neighbouring query": ("of_query(stats, stage, 0, at + 1)", "of_query(stats, stage, 0, at)"),
    "no slope": ("weight * slope", "weight"),
    "slope of the changed score": ("float32(slope_fn(x, b,", "float32(slope_fn(float32(score_fn(x, b, h, i, j, "
                                   "*score_aux)), b,"),
    "hidden weights stay": ("                s[at] = float32(0.0)\n", "                pass\n"),
    "hidden weights stay in dV": ("            p[x] &= both\n", "            pass\n"),
    "weights of another lane's keys": ("WIDTH * (rank ^ x)", "WIDTH * rank"),
    "dropped dP": ("dP = factor * dp[at] if (word >> uint32(at)) & uint32(1) else float32(0.0)",
                   "dP = factor * dp[at]"),
    "D under dropout": ("dP - of_query(stats, stage, 1, at)", "dP"),
    "a bias has gradients where hidden": ("P[at] * dp[at] if (word >> uint32(at)) & uint32(1) else float32(0.0)",
                                          "P[at] * dp[at]"),
}  # fmt: skip
STEP = {
    "the end of the keys counts as seen": ("elif kind == 1 or col_w + 16 * M > Nk:", "elif kind == 1:"),
    "scores not scaled": ("rule.weigh(s, p, scale, stats_s", "rule.weigh(s, p, float32(1.0), stats_s"),
    "1 / (1 - p) is forgotten in dV": ("drop_aux[0] if dropping else float32(1.0)", "float32(1.0)"),
    "dV takes all weights": ("                    rule.hide_rounded(p, keeps)\n", "                    pass\n"),
    "dS of the pair before": ("                rule.none(p)\n", ""),
    "padding rows are read": ("offset, end_q = int32(offsets[b]), int32(ends_q[b])\n        # What lies past the keys "
                              "in use, or past what the last row", "offset, end_q = int32(offsets[b]), Nq\n        # "
                              "What lies past the keys in use, or past what the last row"),
    "the other stage is copied into": ("int32(Q_AT + STAGE - stage * STAGE)", "int32(Q_AT + stage * STAGE)"),
    "the next head's row": ("turn_s[1 - stage, 0], turn_s[1 - stage, 1]", "turn_s[stage, 0], turn_s[stage, 1]"),
    "no barrier before dS is read": ("                cuda.syncthreads()  # dS is whole\n", ""),
}  # fmt: skip


def survives(module):
    """Whether changed kernels give right gradients, without a fault, in all of a few small calls."""
    drop = Dropout(0.4, seed=3)
    keep = np.array([[drop.mask(0, h, slice(0, 21), slice(0, 41)) for h in range(2)]])
    padded = draws(21, 41)
    for x, end in zip(padded, (9, 33, 33, 9), strict=True):
        x[:, :, end:] = np.nan
    lengths = {"lengths_q": np.array([9]), "lengths_k": np.array([33])}
    calls = (
        (draws(21, 37), {"window": (9, 1)}, None),
        (draws(37, 41), {"softcap": 1.0, "alibi_slopes": np.array([0.9, 0.1])}, None),
        (draws(21, 41), {"dropout": drop, "causal": True}, {"keep": keep, "dropout_p": 0.4, "causal": True}),
        (padded, lengths, None),
        (draws(21, 41), {"bias": TABLE.reshape(7, 1)[np.arange(21) % 7], "window": (9, 1)}, None),
    )  # fmt: skip
    try:
        return all(told(arrays, call, truth or call, deterministic, module.attention_backward) is None
                   for arrays, call, truth in calls for deterministic in (False, True))  # fmt: skip
    except KernelFault:
        return False


def edited(kernels=(), ops=()):
    """`backward_tensor_rules` with changed kernels and routines."""
    module, kernels = step_with("backward_tensor_rules"), step_with(
        "backward_tensor_rules_kernels", *kernels, tensor_gradient_rule_ops=ops)  # fmt: skip
    module.make_keys_kernel, module.make_queries_kernel = kernels.make_keys_kernel, kernels.make_queries_kernel
    return module


def test_the_kernels_themselves_survive():
    assert survives(edited())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OPS, *STEP])
def test_a_mistake_is_seen(name):
    assert not survives(edited([STEP[name]]) if name in STEP else edited(ops=[OPS[name]]))


# ---- what a GPU would load


def assembled(d, given, *archs, fp16=True):
    """Reports of the kernels that a call compiles, in either mode, as each architecture has them."""
    pytest.importorskip("cuda.bindings.nvvm", reason="no NVVM: install the dev extra")
    from flash_cuda.executors.assembler import Assembler, parse_arch

    x, reports = np.zeros((1, 2, 100, d), np.float16 if fp16 else ml_dtypes.bfloat16), []
    for arch in archs:
        on = Assembler(arch)
        on.capability = parse_arch(arch)[:2]
        for deterministic in (False, True):
            attention_backward(x, x, x, x, np.zeros((1, 2, 100), np.float32), x, on=on, deterministic=deterministic,
                               **given)  # fmt: skip
        reports += [r for r in on.reports if "rules" in r.kernel]
    return reports


OPTIONS = {
    "window": {"window": (5, 2)}, "softcap": {"softcap": 2.0, "causal": True},
    "alibi": {"alibi_slopes": np.ones(2), "causal": True}, "mask": {"mask": np.ones((100, 100), bool)},
    "lengths": {"lengths_k": np.array([20])}, "dropout": {"dropout": Dropout(0.1, 3), "softcap": 2.0},
    "document": {"rules": options.document(np.zeros(100, int))}, "relative": {"rules": options.relative(TABLE)},
    "bias": {"bias": np.zeros((100, 100)), "causal": True},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_assembles_clean(d, name):
    """In either mode; with sums added one by one, as before sm_90, and by the compiler of sm_100, for some."""
    archs = ("sm_80", "sm_90a") if name in ("window", "alibi") else ("sm_90a",)
    archs += {"softcap": ("sm_100",), "bias": ("sm_120",)}.get(name, ())
    reports = assembled(d, OPTIONS[name], *archs, fp16=d == 64)
    assert {r.kernel for r in reports} == {"backward_keys_with_rules", "backward_queries_with_rules"}
    assert not unclean(reports)


def test_blocks_fit_the_shared_memory_that_there_is():
    for table in (KEYS_BY_RULE, KEYS_BY_ARRAY):
        for D, shape in table.items():
            assert fitting(shape, D, True, SHARED_LIMIT - 1024) == shape == usable("keys", shape)
            assert shape.rows * shape.columns <= 32 * shape.threads  # bits of a word
