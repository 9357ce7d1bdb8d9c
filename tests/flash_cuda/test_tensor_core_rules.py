"""Step 5 with rules, lane by lane: every option against the oracle, the tiles that are skipped, its own mistakes."""

import ml_dtypes
import numpy as np
import pytest
from helpers_clean import unclean
from helpers_mutate import step_with
from hypothesis import given, settings
from hypothesis import strategies as st
from random_options import Combination, draw, judge_forward

from flash_cuda.executors.emulator import Emulator
from flash_cuda.executors.memory import KernelFault, Race
from flash_cuda.parts.tensor_rule_ops import drawn_pair
from flash_cuda.step5_tensor_core import Shape, attention
from refimpl import options, oracle
from refimpl.frame import Frame, visible
from refimpl.philox import Dropout
from refimpl.rule import and_
from refimpl.standard import standard
from refimpl.tiling import Tile, cdiv, spans
from verify.calls import options_for
from verify.cases import DEFAULT
from verify.registry import KERNELS

HALVES = "fp16", "bf16"
SMALL = {"tile": Tile(16, 16), "on": Emulator}
BLOCKS = [  # one warp and more, a band of 16 rows each and two
    Shape(16, 16, 16), Shape(32, 32, 32), Shape(64, 16, 16, True), Shape(32, 48, 16, False, True),
    Shape(64, 64, 32, True),
]  # fmt: skip


def draws(Nq, Nk, d=8, H=2, dtype=np.float16, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((1, h, n, d)).astype(dtype) for h, n in ((H, Nq), (1, Nk), (1, Nk))]


def told(arrays, given, truth, attention=attention, **on):
    """What is wrong with a call, None if nothing."""
    dtype = "bf16" if arrays[0].dtype == ml_dtypes.bfloat16 else "fp16"
    made = Combination(0, dtype, dict(zip(("Q", "K", "V", "dO"), (*arrays, arrays[0]), strict=True)), given, truth)
    return judge_forward(made, attention, **({"on": Emulator} if "shape" in on else SMALL), **on)


# ---- options


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 10**6))
def test_random_combinations_emulated(seed):
    made = draw(seed, longest=40, dims=(16, 16) if seed % 2 else (1, 16), dtypes=HALVES)
    shape = BLOCKS[seed % len(BLOCKS)]
    assert (wrong := judge_forward(made, attention, shape=shape, on=Emulator)) is None, wrong


@pytest.mark.gpu
def test_random_combinations_on_a_gpu():
    """500, at the tiles that calls take."""
    from flash_cuda.executors.gpu import Gpu

    combinations = (draw(seed, longest=300, dims=(64, 64) if seed % 4 else (33, 64), dtypes=HALVES)
                    for seed in range(500))  # fmt: skip
    wrong = [said for made in combinations if (said := judge_forward(made, attention, on=Gpu))]
    assert not wrong, f"{len(wrong)} wrong, the first: {wrong[0]}"


IDS = np.repeat(np.arange(5), [3, 30, 1, 9, 37])  # 80 keys; a query stands at the same place as its key
I, J = np.ogrid[35:80, 0:80]  # positions of 45 queries
TABLE = np.random.default_rng(3).standard_normal(7).astype(np.float32)


@pytest.mark.parametrize("rules, truth", [
    (options.document(IDS[35:], IDS), {"mask": IDS[35:, None] == IDS}),
    (options.prefix_lm(50), {"mask": np.maximum(I + 1, 50) > J}),
    (options.dilated(3), {"mask": (I - J) % 3 == 0}),
    (options.strided(7), {"mask": (J <= I) & ((I - J <= 7) | ((I - J) % 7 == 0))}),
    (options.relative(TABLE), {"bias": TABLE[np.clip(J - I, -3, 3) + 3]}),
    (options.or_(options.window(3, 0), options.document(IDS[35:], IDS)),
     {"mask": ((I - J >= 0) & (I - J <= 3)) | (IDS[35:, None] == IDS)}),
    (options.and_(options.causal(), options.or_(options.window(2, 2), options.dilated(16))),
     {"mask": (J <= I) & ((abs(I - J) <= 2) | ((I - J) % 16 == 0))}),
    ([options.softcap(2.0), options.alibi([0.5, 0.1]), options.window(40, 0)],
     {"softcap": 2.0, "alibi_slopes": np.array([0.5, 0.1]), "window": (40, 0)}),
    (options.Rule(lambda b, h, i, j: (i + j) % 2 == h), {"mask": np.arange(2)[:, None, None] == (I + J) % 2}),
], ids=["document", "prefix_lm", "dilated", "strided", "relative", "or", "and", "joined", "own"])  # fmt: skip
def test_rules(rules, truth):
    """Combined ones and one's own too."""
    assert told(draws(45, 80), {"rules": rules}, truth) is None


def test_a_window_put_off_by_one_is_seen():
    arrays = draws(45, 80)
    for left, right in ((5, 2), (4, 2), (6, 2), (5, 1), (5, 3)):
        right_one = (left, right) == (5, 2)
        assert (told(arrays, {"rules": options.window(left, right)}, {"window": (5, 2)}) is None) == right_one


@pytest.mark.parametrize("scale", [-0.7, 0.0, 3.0])
@pytest.mark.parametrize("given", [{"window": (9, 4)}, {"softcap": 1.5, "causal": True}], ids=["mask", "score"])
def test_any_scale(scale, given):
    given = given | {"scale": scale}
    assert told(draws(20, 40, dtype=ml_dtypes.bfloat16), given, given) is None


@pytest.mark.parametrize("Nq, Nk", [(0, 5), (5, 0), (1, 1), (33, 17)])
def test_edges_of_the_shapes(Nq, Nk):
    for option in ({"window": (2, 0)}, {"alibi_slopes": np.array([1.0, 2.0])}):
        assert told(draws(Nq, Nk), option, option) is None


def test_a_plain_call_takes_the_plain_kernel():
    """None and no rules are no options: what it compiles is what it always did."""
    bodies = []

    class Noting(Emulator):
        def launch(self, body, *args, **how):
            bodies.append(body.__name__)

    for call in ({}, {"window": None, "softcap": None, "rules": ()}, {"causal": True, "rules": []}, {"softcap": 3.0}):
        attention(*draws(3, 3), on=Noting(), **call)
    assert bodies == ["step5_tensor_core"] * 3 + ["step5_with_rules"]


def test_the_same_bits_in_any_thread_order():
    arrays, given = draws(40, 60), {"causal": True, "softcap": 2.0, "dropout": Dropout(0.3, seed=5)}
    runs = [attention(*arrays, shape=BLOCKS[2], on=Emulator(seed), **given) for seed in (None, 0, 1)]
    for other in runs[1:]:
        for x, y in zip(runs[0], other, strict=True):
            np.testing.assert_array_equal(x, y)


def test_dropout_draws_what_numpy_draws():
    drop = Dropout(0.3, seed=2**40 + 7, offset=3)
    pairs = [[drawn_pair(1, 2, r, c, *drop.arguments) for c in range(0, 12, 2)] for r in range(9)]
    drawn = np.array(pairs)[..., None] >> np.arange(2) & 1
    np.testing.assert_array_equal(drawn.reshape(9, 12), drop.mask(1, 2, slice(0, 9), slice(0, 12)))


def test_what_holds_nan_past_the_ends_is_not_touched():
    """Keys past the sequence's, and keys right of the window of a tile's last row; one beside seen keys is."""
    Q, K, V = draws(16, 64)
    clean = [attention(Q, K, V, window=(9, 3), align="top_left", lengths_k=n, tile=Tile(16, 16), on=Emulator())[0]
             for n in (np.array([13]), np.array([64]))]  # fmt: skip
    for first, n in ((13, 13), (19, 64)):
        broken = [x.copy() for x in (K, V)]
        for x in broken:
            x[:, :, first:] = np.nan
        O, _ = attention(Q, *broken, window=(9, 3), align="top_left", lengths_k=np.array([n]), tile=Tile(16, 16),
                         on=Emulator())  # fmt: skip
        np.testing.assert_array_equal(O, clean[n == 64])
    broken[1][:, :, 3] = np.nan
    O, _ = attention(Q, *broken, window=(2, 0), align="top_left", tile=Tile(16, 16), on=Emulator())
    assert np.isnan(O).all()


@pytest.mark.parametrize("change, error, says", [
    ({"rules": [3]}, TypeError, "rules: expected Rule objects"),
    ({"window": (-2, 0)}, ValueError, "window left"),
    ({"window": 3}, ValueError, "window must be a pair"),
    ({"softcap": -1.0}, ValueError, "softcap"),
    ({"mask": np.ones((5, 8), bool)}, ValueError, "mask"),
    ({"mask": np.ones((5, 9))}, TypeError, "mask"),
    ({"bias": np.ones((5, 8))}, ValueError, "bias"),
    ({"alibi_slopes": np.ones(3)}, ValueError, "slopes"),
    ({"lengths_k": np.array([10])}, ValueError, "lengths_k"),
    ({"dropout": 0.5}, TypeError, "dropout: expected a Dropout"),
    ({"bogus": 1}, TypeError, "bogus"),
    ({"softcap": 1.0, "tile": Tile(32, 80)}, ValueError, r"tile: expected at most 64 scores a lane, got 80 of \(32"),
])  # fmt: skip
def test_bad_options_are_named(change, error, says):
    with pytest.raises(error, match=says):
        attention(*draws(5, 9), on=Emulator(), **change)


# ---- tiles that are skipped

MASK = np.kron(np.random.default_rng(2).random((3, 5)) < 0.4, np.ones((16, 16))).astype(bool)[:45, :80]


@pytest.mark.parametrize("given", [
    {"rules": options.document(IDS[35:], IDS)}, {"window": (9, 1)}, {"mask": MASK},
    {"rules": options.prefix_lm(20), "align": "top_left"},
    {"causal": True, "align": "top_left", "lengths_k": np.array([60])},
], ids=["documents", "window", "holes", "prefix", "lengths"])  # fmt: skip
@pytest.mark.parametrize("tile", [Tile(16, 16), Tile(32, 16)], ids=str)
def test_dead_tiles_are_not_loaded(given, tile):
    """The keys loaded are those of the tiles in which some pair is seen, by a look at all pairs."""
    arrays, at = draws(45, 80), Frame(1, 2, 45, 80, None, given.get("lengths_k"), given.get("align", "bottom_right"))
    usual, _ = standard(**{name: x for name, x in given.items() if name in ("causal", "window", "mask")})
    seen = and_(usual, *([given["rules"]] if "rules" in given else [])).at(at)
    live = sum(visible(seen, 0, h, rows, cols).any()
               for h in range(2) for rows in spans(45, tile.Br) for cols in spans(80, tile.Bc))  # fmt: skip
    assert 0 < live < 2 * cdiv(45, tile.Br) * 5
    machine = Emulator()
    attention(*arrays, **given, tile=tile, on=machine)
    assert machine.counts["K"] == machine.counts["V"] == (live * 16 * 8, 0)


def test_many_rounds():
    """A block of one warp looks at 32 tiles at a time: whole rounds are empty, and the next live tile is in another."""
    ids = np.repeat(np.arange(4), [40, 1200, 20, 90])
    rows = np.r_[0:20, 1240:1260]
    every_700 = options.Rule(lambda b, h, i, j: j % 700 == 5,
                             tiles=lambda b, h, i0, i1, j0, j1: (j1 + 694) // 700 - (j0 + 694) // 700)  # fmt: skip
    for call, truth in (
        ({"rules": options.document(ids[rows], ids)}, {"mask": ids[rows][:, None] == ids}),
        ({"window": (9, 1)}, {"window": (9, 1)}),
        ({"rules": every_700}, {"mask": np.arange(1350)[None] % 700 == 5}),
    ):
        assert told(draws(40, 1350, H=1), call, truth) is None


def test_the_class_of_a_tile_is_told_once_a_block():
    """Documents of whole tiles: no mask is evaluated, so each look at a key's id is one at a tile's first or last."""
    ids = np.repeat(np.arange(3), 32)
    machine = Emulator()
    attention(*draws(96, 96), rules=options.document(ids), tile=Tile(16, 16), on=machine)
    blocks, tiles = 2 * 6, 6
    assert machine.counts["mask_aux.1.1"] == (blocks * tiles * 2, 0)


def test_a_tile_whose_class_is_unknown_is_looked_into_and_left_out():
    """A mask without classes: every tile is loaded; in those that turn out empty, no lane asks for a score."""
    asked = []

    def noted(s, b, h, i, j):
        asked.append((i // 16, j // 16))
        return s

    rules = [options.Rule(lambda b, h, i, j: (i // 16 + j // 16) % 2 == 0), options.Rule(noted, kind="score")]
    machine = Emulator()
    attention(*draws(48, 48, H=1), rules=rules, tile=Tile(16, 16), on=machine)
    assert machine.counts["K"] == (9 * 16 * 8, 0)
    assert set(asked) == {(i, j) for i in range(3) for j in range(3) if (i + j) % 2 == 0}


# ---- mistakes

VISIBLE = "row, j = int32(row0 + at // (4 * NB) * 16 + (at & 2) * 4), int32(col0 + at // 4 % NB * 8 + (at & 1))"
LAST = "int32(min(int32(row0 + Br), Nq) + offset)"
OPS = {  # what is changed, and a default case that sees it
    "rows eight apart exchanged in the mask": (VISIBLE, VISIBLE.replace("(at & 2) * 4", "(2 - (at & 2)) * 4"), "mask"),
    "keys of a pair exchanged in the mask": (VISIBLE, VISIBLE.replace("(at & 1)", "1 - (at & 1)"), "window_self"),
    "the mask takes the row for the position": ("int32(row + offset), j, *mask", "row, j, *mask", "window_both"),
    "the score takes the row for the position": ("int32(row + offset), j, *score", "row, j, *score", "alibi"),
    "one row too few is live": (LAST, LAST.replace("offset", "offset - 1"), "window_both"),
    "a warp leaves out a row too many": ("16 * M), Nq) + offset", "16 * M), Nq) + offset - 1", "window_both"),
    "a tile in part counts as whole": ("ballot(kind == 2)", "ballot(kind > 0)", "document"),
    "the class of the wrong tile": ("(j + cuda.threadIdx.x)", "(j + (cuda.threadIdx.x ^ 1))", "window_both"),
    "a live tile is stepped over": ("j = int32(j + 1)", "j = int32(j + 2)", "dilated_wide"),
    "weights of a pair exchanged": ("two = uint32(word >> uint64(2 * x)) & uint32(3)",
                                    "two = uint32(2 - (word >> uint64(2 * x)) % 3)", "dropout"),
    "dropout of the rows eight above": ("x // (2 * NB) * 16 + (x & 1) * 8", "x // (2 * NB) * 16", "dropout"),
}  # fmt: skip
STEP = {
    "hidden scores stay": ("rule.hide(s, seen)", "pass", "window_both"),
    "the end of the keys counts as seen": ("edge = kind == 1 or int32(col0 + Bc) > Nk", "edge = kind == 1", "softcap"),
    "natural scores taken for base 2": ("factor = float32(LOG2E)", "factor = float32(1.0)", "softcap"),
    "scores not scaled": ("rule.change(s, scale, b", "rule.change(s, float32(1.0), b", "softcap"),
    "padding is read": ("offset + right, ends[b]))", "offset + right, Nk))", "lengths"),
    "1 / (1 - p) is forgotten": ("alpha[r] = drop_aux[0]", "alpha[r] = float32(1.0)", "dropout"),
    "dropout before the sums": (
        "tile.softmax(", "rule.hide(s, rule.kept(b, h, row_w, col0, Nq, Nk, drop_aux)); tile.softmax(", "dropout"),
    "the other stage is copied into": ("K_AT + STAGE - at", "K_AT + at", "window_both"),
}  # fmt: skip


def fails(module, name):
    """Whether a changed kernel is wrong in a default case, at its small size, in fp16."""
    made = DEFAULT[name].build("fp16", small=True)
    given = options_for(KERNELS["step5_tensor_core"], made)
    given = {"scale": None} | {key: x for key, x in given.items() if x is not None}
    try:
        O, lse = module.attention(made.Q, made.K, made.V, tile=Tile(16, 16), on=Emulator(), **given)
    except KernelFault:
        return True
    true, lse_true = oracle.attention(*(x.astype(np.float64) for x in (made.Q, made.K, made.V)), **made.options)
    close = np.abs(O.astype(np.float64) - true) <= 5e-3 * max(1.0, np.abs(true).max(initial=0.0))
    seen = np.isfinite(lse_true)
    same = np.array_equal(np.isneginf(lse), ~seen) and (np.abs(lse[seen] - lse_true[seen]) <= 1e-4).all()
    return not (close.all() and same)


@pytest.mark.parametrize("name", [*OPS, *STEP])
def test_a_mistake_fails_a_default_case(name):
    old, new, case = (OPS | STEP)[name]
    edits, ops = ([], [(old, new)]) if name in OPS else ([(old, new)], [])
    assert fails(step_with("tensor_core_rules", *edits, tensor_rule_ops=ops), case)
    assert not fails(step_with("tensor_core_rules", tensor_rule_ops=[]), case)


def test_a_missing_barrier_is_a_race():
    gone = ("                cuda.syncthreads()  # their classes are there\n", "")
    module = step_with("tensor_core_rules", tensor_rule_ops=[gone])
    with pytest.raises((Race, KernelFault)):
        module.attention(*draws(40, 60), window=(9, 1), shape=Shape(32, 16, 16), on=Emulator())


# ---- around it


class Ampere(Emulator):
    """An executor that stands for a GPU of sm_80."""

    capability = 8, 0


def test_the_interface_takes_it():
    """What step 5 draws for dropout its backward pass draws again."""
    from flash_cuda.interface import flash_attn_backward, flash_attn_func

    rng, said = np.random.default_rng(1), []
    q, k, v, dout = (rng.standard_normal((1, n, 2, 16)).astype(np.float16) for n in (20, 24, 24, 20))
    call = {"window_size": (9, 3), "softcap": 2.0, "alibi_slopes": np.array([0.5, 0.1], np.float32)}
    drop, on = {"dropout_p": 0.4, "rng_state": (7, 3)}, {"on": Ampere(), "explain": said.append}
    out, lse, S = flash_attn_func(q, k, v, **call, **drop, **on, return_attn_probs=True)
    grads = flash_attn_backward(dout, q, k, v, out, lse, **call, **drop, **on)
    keep = ~np.signbit(S)
    Q, K, V, dO = (x.transpose(0, 2, 1, 3).astype(np.float64) for x in (q, k, v, dout))
    options = {"window": (9, 3), "softcap": 2.0, "alibi_slopes": call["alibi_slopes"], "keep": keep, "dropout_p": 0.4}
    true, lse_true = oracle.attention(Q, K, V, **options)
    assert np.abs(out.transpose(0, 2, 1, 3) - true).max() <= 4e-3 and np.abs(lse - lse_true).max() <= 1e-5
    for got, want in zip(grads, oracle.attention_backward(Q, K, V, dO, **options), strict=False):
        assert np.abs(got.transpose(0, 2, 1, 3) - want).max() <= 1e-2
    assert "step5_tensor_core" in said[0] and "backward_tensor_core" in said[-1]


def assembled(d, given, *archs):
    """Reports of the kernel that a call compiles."""
    pytest.importorskip("cuda.bindings.nvvm", reason="no NVVM: install the dev extra")
    from flash_cuda.executors.assembler import Assembler, parse_arch

    on = Assembler(*archs)
    on.capability = min(parse_arch(arch)[:2] for arch in archs)
    x = np.zeros((1, 2, 100, d), np.float16)
    attention(x, x, x, on=on, **given)
    return on.reports


OPTIONS = {
    "window": {"window": (5, 2)}, "softcap": {"softcap": 2.0, "causal": True}, "bias": {"bias": np.zeros((100, 100))},
    "alibi": {"alibi_slopes": np.ones(2), "causal": True}, "mask": {"mask": np.ones((100, 100), bool)},
    "lengths": {"lengths_k": np.array([20])}, "dropout": {"dropout": Dropout(0.1, 3), "softcap": 2.0},
    "document": {"rules": options.document(np.zeros(100, int))}, "relative": {"rules": options.relative(TABLE)},
    "prefix": {"rules": options.prefix_lm(3)},
}  # fmt: skip


@pytest.mark.parametrize("d, names, arch", [(64, ["window", "alibi"], "sm_90a"), (64, ["window"], "sm_120")])
def test_assembles_clean(d, names, arch):
    assert not [(name, fault) for name in names for fault in unclean(assembled(d, OPTIONS[name], arch))]


@pytest.mark.slow
@pytest.mark.parametrize("d, archs", [(64, ("sm_80", "sm_90a")), (128, ("sm_80", "sm_90a")), (64, ("sm_120",)),
                                      (128, ("sm_100", "sm_120"))], ids=str)  # fmt: skip
def test_every_option_assembles_clean(d, archs):
    """From sm_100 on the compiler is another, and is told apart by the least of the architectures."""
    assert not [(name, fault) for name, call in OPTIONS.items() for fault in unclean(assembled(d, call, *archs))]
