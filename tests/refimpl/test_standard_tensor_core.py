"""The NumPy twin of standard attention on tensor cores: the oracle's answer, weights rounded, bytes by its formula."""

import numpy as np
import pytest

from refimpl import oracle, standard_tensor_core
from refimpl.observe import Tally
from refimpl.tiling import Tile

OPTIONS = [{}, {"causal": True}, {"causal": True, "align": "top_left"}, {"scale": -0.7}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [(17, 33, 2, 4, 2, 5, 3), (33, 17, 1, 1, 1, 8, 8), (9, 0, 1, 2, 2, 3, 3)])
def test_nothing_is_rounded_in_fp64(draw, agree, size, options):
    Q, K, V, _ = draw(*size)
    agree(standard_tensor_core.attention(Q, K, V, **options, tile=Tile(8, 16)), oracle.attention(Q, K, V, **options),
          1e-13)  # fmt: skip


def test_weights_are_rounded_to_the_inputs_type(draw):
    """As the formula written out, with P cast to fp16 where it meets V."""
    Q, K, V, _ = (x.astype(np.float16) for x in draw(20, 30))
    O, _ = standard_tensor_core.attention(Q, K, V)
    S = Q[0, 0].astype(np.float64) @ K[0, 0].T.astype(np.float64) / np.sqrt(5)
    P = np.exp(S - S.max(1, keepdims=True))
    P /= P.sum(1, keepdims=True)
    rounded, plain = (x.astype(np.float64) @ V[0, 0].astype(np.float64) for x in (P.astype(np.float16), P))
    assert np.abs(O[0, 0] - rounded).max() <= 1e-6 < np.abs(O[0, 0] - plain).max()


def test_weights_cross_in_the_storage_type(draw, fills):
    size = (2, 4, 2, 17, 33, 5, 3, Tile(16, 8))
    B, Hq, Hk, Nq, Nk, d, dv, tile = size
    Q, K, V, _ = draw(Nq, Nk, B, Hq, Hk, d, dv)
    tally = Tally()
    standard_tensor_core.attention(Q, K, V, tile=tile, observe=tally)
    for e in (2, 4):
        assert tally.hbm_bytes(e) == fills(standard_tensor_core, *size, diag=Nk, e=e)
