"""Option cases: spelled out right, told to each implementation in its words, felt if an option is left out."""

from dataclasses import replace

import numpy as np
import pytest

from refimpl import options, oracle
from refimpl.frame import Frame, visible
from refimpl.philox import Dropout
from verify import calls, dropout, judge, runner
from verify.cases import DEFAULT, DENSE
from verify.option_cases import OPTION_CASES
from verify.option_recipes import OPTION_RECIPES
from verify.registry import ALL, OPTIONS, REFERENCES

IDS = [case.id for case in OPTION_CASES]
NUMPY = "refimpl.step3_flash_v2"
# Which word of the registry an argument of attention is.
WORDS = {"mask": "mask", "bias": "bias", "window": "window", "softcap": "softcap", "alibi_slopes": "alibi",
         "lengths_q": "lengths", "lengths_k": "lengths", "keep": "dropout", "dropout_p": "dropout",
         "causal": "causal"}  # fmt: skip


def judged(kernel, problem, where=None, known=None):
    """Metrics of a registered implementation on a problem."""
    where = runner.placed("numpy", [16, 16], 0) if where is None else where
    known = known or judge.reference(problem, problem.dO() if problem.backward else None)
    return judge.judge(problem, **calls.outputs(ALL[kernel], problem, where), known=known)


def test_the_default_cases_are_the_dense_ones_and_these():
    assert list(DEFAULT) == [*DENSE, *IDS] and not DENSE.keys() & set(IDS)
    assert {name for case in OPTION_CASES for name in case.having} == OPTION_RECIPES.keys()
    assert {word for case in DEFAULT.values() for word in case.needs} == OPTIONS.keys() - {"paged", "rules"}


@pytest.mark.parametrize("small", (True, False))
@pytest.mark.parametrize("name", IDS)
def test_needs_name_every_option_there_is(name, small):
    """What a kernel is asked for is what the problem holds, no more and no less."""
    case = DEFAULT[name]
    problem = case.build("fp32", small)
    held = {WORDS[key] for key, x in problem.options.items() if key in WORDS and x is not None and x is not False}
    assert held == case.needs & set(WORDS.values())
    assert problem.shape == case.shape(small) and problem.backward == case.backward


@pytest.mark.parametrize("name", [case.id for case in OPTION_CASES if case.build("fp32").rules])
def test_rules_are_spelled_out_as_they_are(name):
    """The array that stands for a rule, pair by pair, at both shapes and by another seed."""
    for small, seed in ((True, None), (True, 5), (False, None)):
        problem = DEFAULT[name].build("fp32", small, seed)
        s = problem.shape
        for rule_name, arguments in problem.rules.items():
            rule = getattr(options, rule_name)(*arguments).at(Frame(s.B, s.Hq, s.Nq, s.Nk))
            for b in range(s.B):
                for h in range(s.Hq):
                    whole = b, h, slice(0, s.Nq), slice(0, s.Nk)
                    if rule.kind == "mask":
                        wanted = np.broadcast_to(problem.options["mask"], (s.B, s.Hq, s.Nq, s.Nk))[b, h]
                        np.testing.assert_array_equal(visible(rule, *whole), wanted)
                    else:
                        wanted = np.broadcast_to(problem.options["bias"], (s.B, s.Hq, s.Nq, s.Nk))[b, h]
                        found = options.scored(rule, np.zeros((s.Nq, s.Nk), np.float32), *whole)
                        np.testing.assert_array_equal(found, wanted)


def test_philox_known_answers():
    """The vectors published with the generator (Random123, kat_vectors): counters and keys of 0, of ones, of pi."""
    ones = 2**32 - 1
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for counter, key, wanted in (
        ((0,) * 4, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (pi, 0x299F31D0_A4093822, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        assert tuple(int(word) for word in dropout.philox4x32(counter, key)) == wanted


@pytest.mark.parametrize("p, seed, offset", ((0.3, 5, 0), (1.0, 7, 0), (0.0, 7, 1), (0.5, 2**63 + 11, 2**40 + 3)))
def test_the_restated_mask_is_the_one_that_kernels_draw(p, seed, offset):
    drawn = Dropout(p, seed, offset)
    kept = dropout.keep(p, seed, offset, (2, 3, 5, 23))
    for b in range(2):
        for h in range(3):
            np.testing.assert_array_equal(kept[b, h], drawn.mask(b, h, slice(0, 5), slice(0, 23)))
    assert kept.mean() == pytest.approx(1 - p, abs=0.1)


@pytest.mark.parametrize("name", [name for name in IDS if DEFAULT[name].having and name != "window_beyond"])
def test_an_option_left_out_is_felt(name):
    """The oracle without one of the options fails the case; so every option of a case is about something."""
    problem = DEFAULT[name].build("fp32")
    dO = problem.dO() if problem.backward else None
    known = judge.reference(problem, dO)
    finite = [np.nan_to_num(x) for x in (problem.Q, problem.K, problem.V)]  # padding, where lengths are left out
    groups = {WORDS[key] for key in problem.options if key in WORDS and problem.options[key] is not False}
    for word in groups - {"causal"}:
        told = {key: x for key, x in problem.options.items() if WORDS.get(key) != word}
        O, lse = oracle.attention(*finite, **told)
        outputs = {"O": O.astype(np.float32), "lse": lse.astype(np.float32)}
        assert not all(m.ok for m in judge.judge(problem, **outputs, known=known).values()), word


@pytest.mark.parametrize("name", [name for name in IDS if DEFAULT[name].backward])
def test_a_gradient_off_by_a_little_is_felt(name):
    """Each gradient by itself, its largest element off by one in a hundred thousand of it."""
    problem = DEFAULT[name].build("fp32")
    known = judge.reference(problem, problem.dO())
    for output, anchor in known.anchors.items():
        if output.startswith("d"):
            at = np.unravel_index(np.abs(anchor.truth).argmax(), anchor.truth.shape)
            got = anchor.truth.astype(np.float32)
            assert judge.measure(output, got, known, "fp32").ok
            got[at] *= 1 + 2e-5
            assert not judge.measure(output, got, known, "fp32").ok, output


@pytest.mark.parametrize("dtype", ("fp32", "fp16", "bf16"))
@pytest.mark.parametrize("name", IDS)
def test_nothing_correct_exceeds_the_apriori_bound(name, dtype):
    """A NumPy step, or the oracle where it takes no packed sequences; seeds and steps are `test_factor`'s."""
    problem = DEFAULT[name].build(dtype)
    kernel = "oracle" if REFERENCES[NUMPY].refuses(DEFAULT[name], dtype) else NUMPY
    assert (kernel == "oracle") == (problem.layout == "packed")
    for output, m in judged(kernel, problem, {} if kernel == "oracle" else None).items():
        assert m.ok and m.max_abs <= m.apriori and m.plain <= m.apriori, (output, m)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("fp32", "fp16", "bf16"))
def test_the_kernel_with_rules_passes_by_other_seeds_too(dtype):
    for name in DEFAULT:
        for seed in (1, 2):
            problem = DEFAULT[name].build(dtype, seed=seed)
            found = judged("general", problem, runner.placed("emulated", [16, 16], seed))
            assert all(m.ok for m in found.values()), (name, seed)


def test_padding_is_nan_and_reaches_nothing():
    problem = DEFAULT["back_lengths"].build("fp16")
    rows, keys = problem.lengths
    assert not problem.finite and rows[0] == 0 and keys[1] == 0
    for b in range(3):
        assert np.isnan(problem.Q[b, :, rows[b] :].astype(float)).all()
        assert np.isnan(problem.K[b, :, keys[b] :].astype(float)).all()
        assert np.isnan(problem.dO()[b, :, rows[b] :].astype(float)).all()
    known = judge.reference(problem, problem.dO())
    assert all(np.isfinite(known.anchors[name].truth).all() for name in ("O", "dQ", "dK", "dV"))


def test_packing_and_unpacking():
    x, lengths = np.arange(48.0).reshape(3, 2, 4, 2), np.array([3, 0, 2])
    packed = calls.pack(x, lengths)
    assert packed.shape == (5, 2, 2) and (packed[3] == x[2, :, 0]).all()
    back = calls.unpack(packed, lengths, 4, -1.0)
    assert (back[0, :, :3] == x[0, :, :3]).all() and (back[2, :, :2] == x[2, :, :2]).all()
    assert (back[0, :, 3:] == -1).all() and (back[1] == -1).all()


@pytest.mark.parametrize("name", ("packed_options", "back_packed"))
def test_packed_sequences_run_through_the_interface(name):
    problem = DEFAULT[name].build("fp32")
    found = judged("general", problem, runner.placed("emulated", [16, 16], 3))
    assert all(m.ok for m in found.values()), found
    assert found.keys() == ({"O", "lse", "dQ", "dK", "dV"} if problem.backward else {"O", "lse"})


def test_an_option_that_packed_sequences_cannot_have_is_not_lost():
    problem = replace(DEFAULT["dropout"].build("fp32"), layout="packed")
    with pytest.raises(ValueError, match="case: dropout is packed, and the interface takes no dropout_p, keep"):
        calls.outputs(ALL["general"], problem, {})


def test_options_in_a_kernels_words():
    """Rules go to who takes rules, arrays to who does not; all but the oracle draw dropout themselves."""
    problem = DEFAULT["document"].build("fp32")
    assert calls.options_for(ALL["oracle"], problem).keys() == problem.options.keys()
    general = calls.options_for(ALL["general"], problem)
    assert "mask" not in general and [rule.fn.__name__ for rule in general["rules"]] == ["document_mask"]
    drops = calls.options_for(ALL["general"], DEFAULT["dropout"].build("fp32"))
    assert drops["dropout"] == Dropout(1 / 3, 0x1234_5678_9ABC, 3 << 33) and "keep" not in drops
    steps = calls.options_for(ALL[NUMPY], DEFAULT["all_options"].build("fp32"))
    assert [rule.fn.__name__ for rule in steps["rules"]] == [
        "window_mask", "softcap_score", "alibi_score", "bias_score",
    ]  # fmt: skip
    assert {"mask", "causal", "lengths_q", "lengths_k"} <= steps.keys()
