"""How the values of a case are made: each recipe is one way in which softmax kernels go wrong.

A recipe takes a generator and a shape and returns Q (B, Hq, Nq, d), K (B, Hk, Nk, d), V (B, Hk, Nk, dv) in fp64.
`Case.build` rounds them to the storage type. Unless a recipe says otherwise, everything is N(0, 1) and the scale is
1/sqrt(d), so that scores are about N(0, 1) too. "Tile" below means the 16 keys of an emulated tile.
"""

import numpy as np


def normal(rng, shape):
    """N(0, 1): what a well-scaled model feeds attention."""
    B, Hq, Hk, Nq, Nk, d, dv = shape
    Q = rng.standard_normal((B, Hq, Nq, d))
    K = rng.standard_normal((B, Hk, Nk, d))
    V = rng.standard_normal((B, Hk, Nk, dv))
    return Q, K, V


def hand(rng, shape):
    """Integers small enough for pencil and paper; with scale = ln 2 every weight is a power of two over a sum.

    Scores in log2 units (rows: queries), their powers of two, and the row sums l::

        q = (1, 0)    0 1 0 2      1 2 1 4     l =  8
        q = (0, 1)    0 0 1 -1     1 1 2 1/2   l =  9/2
        q = (1, 1)    0 1 1 1      1 2 2 2     l =  7
        q = (2, -1)   0 2 -1 5     1 4 1/2 32  l = 75/2

    O = P V and lse = ln l then follow as fractions: `cases.HAND_O` and `cases.HAND_L` hold them.
    """
    Q = np.array([[1, 0], [0, 1], [1, 1], [2, -1]], float)
    K = np.array([[0, 0], [1, 0], [0, 1], [2, -1]], float)
    V = np.array([[1, 0], [0, 2], [4, -4], [-8, 1]], float)
    return Q[None, None], K[None, None], V[None, None]


def logits_x10(rng, shape):
    """Scores ten times as large: weights span many orders, and an exp without its maximum overflows fp16."""
    Q, K, V = normal(rng, shape)
    return _grid(10 * Q), _grid(K), V


def all_negative(rng, shape):
    """Every score below -65504: no start of the maximum is low enough but -inf, be it 0, -1e4 or fp16's lowest.

    fp32 numbers of this size are 1/32 apart, so weights that depend on them would be noise. A third of the keys, in
    every tile, therefore share the highest score exactly, and the rest lie so far below that their weight is zero.
    Only one channel of Q is not 0: a sum of many products, scaled before they are added, could differ between equal
    keys by the order in which a BLAS adds at its edges.
    """
    B, Hq, Hk, Nq, Nk, d, dv = shape
    Q = np.zeros((B, Hq, Nq, d))
    Q[..., 0] = -2048.0
    K = np.full((B, Hk, Nk, d), 512.0)
    K[:, :, np.arange(Nk) % 3 > 0] = 768.0
    return Q, K, rng.standard_normal((B, Hk, Nk, dv))


def outliers(rng, shape):
    """One element in fifty is ten times as large, in all three inputs, as activations of trained models are."""
    return tuple(_grid(x * np.where(rng.random(x.shape) < 0.02, 10.0, 1.0)) for x in normal(rng, shape))


def growing_max(rng, shape):
    """Scores climb by 24 over the keys: every tile beats the maximum so far, so every rescale counts."""
    Q, K, V = normal(rng, shape)
    return (*_along(Q, K, shape, np.linspace(0, 24, shape.Nk)), V)


def late_max(rng, shape):
    """The last key outweighs all others by e^20: what was accumulated before has to be forgotten."""
    Q, K, V = normal(rng, shape)
    return (*_along(Q, K, shape, np.where(np.arange(shape.Nk) == shape.Nk - 1, 20.0, 0.0)), V)


def ties(rng, shape):
    """Every key three times, far apart, with different values: an argmax-minded shortcut picks one of them."""
    Q, K, V = normal(rng, shape)
    return Q, K[:, :, np.arange(shape.Nk) % max(1, shape.Nk // 3)], V


def identical_queries(rng, shape):
    """All queries of a head are the same vector, so all its rows must come out the same."""
    Q, K, V = normal(rng, shape)
    return np.repeat(Q[:, :, :1], shape.Nq, axis=2), K, V


def large_values(rng, shape):
    """Nearly equal weights on values near 3000: their sum before the division by l leaves fp16's range."""
    Q, K, V = normal(rng, shape)
    return 0.1 * Q, K, 3000 + 100 * V


def nan_hidden(rng, shape):
    """NaN and inf in the keys and values that no query may see: not one output may show it."""
    Q, K, V = normal(rng, shape)
    hidden = shape.Nq  # with top_left alignment the last query sees keys 0 ... Nq - 1
    K[:, :, hidden:] = np.nan
    V[:, :, hidden:] = np.inf
    V[:, :, hidden::2] = np.nan
    return Q, K, V


def nan_seen(rng, shape):
    """One NaN in V, at a key in the middle: with causal, later rows show it in that column and earlier ones do not."""
    Q, K, V = normal(rng, shape)
    V[:, :, shape.Nk // 2, shape.dv // 2] = np.nan
    return Q, K, V


def _along(Q, K, shape, lift):
    """Q and K changed so that key j's scores rise by lift[j]: a share of Q and K points in one direction."""
    Q[..., 0] = 4.0
    K[..., 0] = lift * np.sqrt(shape.d) / 4.0
    return _grid(Q), _grid(K)


def _grid(x):
    """Rounded to sixteenths: then q.k is exact in fp32 in any order, and large scores carry one rounding, not d."""
    return np.round(16 * x) / 16


RECIPES = {
    make.__name__: make
    for make in (
        normal,
        hand,
        logits_x10,
        all_negative,
        outliers,
        growing_max,
        late_max,
        ties,
        identical_queries,
        large_values,
        nan_hidden,
        nan_seen,
    )
}
