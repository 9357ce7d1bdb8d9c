"""Dropout: the generator against published vectors, the mask by its definition, attention against the oracle."""

import numpy as np
import pytest

from refimpl import oracle, step3_flash_v2, step4_causal
from refimpl.backward import attention_backward
from refimpl.philox import WORD, Dropout, draw, kept, philox, signed
from refimpl.tiling import Tile, spans

# kat_vectors of Random123, philox4x32 with 10 rounds: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter, key, result):
    """On Python integers, on signed ones with the same bits, and on 64-bit arrays, where products overflow."""
    counter, key, result = words(counter), words(key), words(result)
    assert list(philox(*counter, *key)) == result
    assert list(philox(*(signed(word) for word in counter + key))) == result
    assert [int(x[0]) for x in philox(*(np.array([word]) for word in counter + key))] == result


def test_draws_are_the_words_in_turn():
    """Columns 4 n ... 4 n + 3 get the four words of one counter (n, row, b, h)."""
    for col in range(9):
        assert draw(5, 6, 7, col, 8, 9) == philox(col // 4, 7, 5, 6, 8, 9)[col % 4]


@pytest.mark.parametrize("p", [0.0, 0.25, 0.9, 1.0])
def test_mask_by_definition(p):
    """Each element as `kept` says of its place alone, whatever the tile; a scalar and an array give the same."""
    dropout = Dropout(p, seed=2**63 + 12345, offset=2**40 + 1)
    whole = dropout.mask(2, 3, slice(0, 21), slice(0, 19))
    alone = [[kept(2, 3, row, col, *dropout.arguments) for col in range(19)] for row in range(21)]
    assert np.array_equal(whole, alone)
    for Br, Bc in ((1, 1), (4, 4), (5, 3), (8, 16)):
        for rows in spans(21, Br):
            for cols in spans(19, Bc):
                assert np.array_equal(dropout.mask(2, 3, rows, cols), whole[rows, cols])


def test_arguments_fit_32_signed_bits():
    """What a kernel is given, at the ends of the ranges."""
    for seed in (0, 2**64 - 1, 2**31, 2**63):
        for p in (0.0, 0.5, 1.0):
            arguments = Dropout(p, seed, offset=2**64 - 1).arguments
            assert all(-(2**31) <= n < 2**31 for n in arguments)
            assert arguments[2] == p * 2**30


def test_everything_matters():
    """Seed, offset, batch, head, row and column: change one, and the mask is another, as far off as chance says."""
    here = slice(0, 64), slice(0, 64)

    def mask(seed=1, offset=1, b=1, h=1):
        return Dropout(0.5, seed, offset).mask(b, h, *here)

    first = mask()
    others = [mask(seed=2), mask(offset=2), mask(b=2), mask(h=2), mask(seed=2**32 + 1), mask(b=0, h=2)]
    others += [first.T, np.roll(first, 1, 0), np.roll(first, 1, 1)]
    for other in others:
        assert abs((first == other).mean() - 0.5) <= 4 * 0.5 / 64


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_keep_rate(p):
    """10^7 draws: the rate is within 4 standard deviations of 1 - p."""
    n = 3200
    kept_share = Dropout(p, seed=42).mask(0, 0, slice(0, n), slice(0, n)).mean()
    assert n * n >= 10**7
    assert abs(kept_share - (1 - p)) <= 4 * (p * (1 - p)) ** 0.5 / n


def test_words_are_uniform():
    """All 16 values of the highest and of the lowest four bits come equally often: chi-square within 4 sigma."""
    row, col = np.ogrid[:512, :512]
    drawn = draw(0, 0, row, col, 1, 2)
    assert 0 <= drawn.min() <= drawn.max() <= WORD
    for nibble in (drawn >> 28, drawn & 15):
        counts = np.bincount(nibble.ravel(), minlength=16)
        mean = 512 * 512 / 16
        assert abs(((counts - mean) ** 2 / mean).sum() - 15) <= 4 * 30**0.5


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tile", [Tile(8, 6), Tile(64, 64)])
def test_attention(step, draw, agree, p, tile):
    """Forward in every step equals the oracle with this keep mask; p = 1 gives 0 and leaves lse alone."""
    Q, K, V, _ = draw(19, 23, 2, 4, 2)
    dropout = Dropout(p, seed=9)
    keep = [[dropout.mask(b, h, slice(0, 19), slice(0, 23)) for h in range(4)] for b in range(2)]
    got = step.attention(Q, K, V, causal=True, dropout=dropout, tile=tile)
    agree(got, oracle.attention(Q, K, V, causal=True, keep=np.array(keep), dropout_p=p), 1e-12)
    agree(got[1:], step.attention(Q, K, V, causal=True, tile=tile)[1:], 0)
    assert (got[0] == 0).all() == (p == 1)


@pytest.mark.parametrize("order", ["v1", "v2"])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("given", [False, True])
def test_gradients(draw, agree, order, p, given):
    """Backward equals the oracle, drawn mask or given one; with p = 1 all of O's gradients vanish, lse's do not."""
    Q, K, V, dO = draw(19, 23, 2, 4, 2)
    dlse = dO[..., 0]
    keep = np.random.default_rng(1).random((2, 1, 19, 23)) < 0.6
    dropout = Dropout(p, seed=9, keep=keep if given else None)
    if not given:
        keep = np.array([[dropout.mask(b, h, slice(0, 19), slice(0, 23)) for h in range(4)] for b in range(2)])
    options = {"causal": True, "dropout": dropout, "tile": Tile(8, 6)}
    O, lse = step4_causal.attention(Q, K, V, **options)
    got = attention_backward(Q, K, V, O, lse, dO, dlse=dlse, order=order, **options)
    same = {"causal": True, "keep": keep, "dropout_p": p}
    agree(got, oracle.attention_backward(Q, K, V, dO, dlse=dlse, **same)[:3], 1e-11)
    without = attention_backward(Q, K, V, O, lse, dO, order=order, **options)
    assert all((x == 0).all() for x in without) == (p == 1)


def test_a_dropped_value_reaches_nobody(draw):
    """A NaN in a value that every row has dropped: O and all gradients but its own stay as they were."""
    Q, K, V, dO = draw(9, 12)
    keep = np.random.default_rng(1).random((9, 12)) < 0.6
    keep[:, 5] = False
    options = {"dropout": Dropout(0.4, keep=keep), "tile": Tile(4, 5)}

    def everything():
        O, lse = step3_flash_v2.attention(Q, K, V, **options)
        return O, lse, *attention_backward(Q, K, V, O, lse, dO, **options)

    clean = everything()
    V[..., 5, :] = np.nan
    for x, y in zip(everything(), clean, strict=True):
        assert np.array_equal(x, y)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"p": -0.1}, ValueError, "dropout p"),
        ({"p": 1.1}, ValueError, "dropout p"),
        ({"p": np.nan}, ValueError, "dropout p"),
        ({"p": "a"}, TypeError, "dropout p"),
        ({"p": 0.5, "seed": -1}, ValueError, "dropout seed"),
        ({"p": 0.5, "seed": 0.5}, TypeError, "dropout seed"),
        ({"p": 0.5, "offset": 2**64}, ValueError, "dropout offset"),
        ({"p": 0.5, "keep": np.ones((2, 2))}, TypeError, "dropout keep"),
    ],
)
def test_refuses(options, kind, says):
    """Each wrong argument is named."""
    with pytest.raises(kind, match=says):
        Dropout(**options)
