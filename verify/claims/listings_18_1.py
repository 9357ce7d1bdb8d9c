"""The code samples of section 18.1, transcribed in behaviour and run against fp64."""

import numpy as np

from verify.claims.ledger import Truth, claim
from verify.claims.trial import TRIALS, everywhere, judge_forward


def standard(Q, K, V, factor):
    """Listing of 18.1.1: materialise S, take its softmax, multiply by V."""
    S = np.matmul(Q, np.swapaxes(K, -2, -1)) * factor
    E = np.exp(S - S.max(axis=-1, keepdims=True))
    return np.matmul(E / E.sum(axis=-1, keepdims=True), V)


@claim(
    "18.1-015", section="18.1.1", where="Listing 1", kind="code",
    title_en="Standard attention in PyTorch", title_zh="标准注意力实现",
    paraphrase="Three lines: scaled QK^T, softmax over the last axis, times V.",
    stated=everywhere(), verdict="confirmed",
)
def standard_listing():
    return Truth(*judge_forward(lambda Q, K, V, Br, Bc: standard(Q, K, V, 1 / np.sqrt(Q.shape[-1]))))


@claim(
    "18.1-057", section="18.1.1", where="Listing 1", kind="code",
    title_en="Meaning of 'scale' in the first listing", title_zh="缩放参数",
    paraphrase="The listing's scale multiplies the scores: 1/sqrt(d) is to be passed.",
    stated={"scores are multiplied by scale": True}, verdict="confirmed", conflicts_with=("18.2-017",),
)
def standard_scale():
    trial = {"several key tiles": TRIALS["several key tiles"]}
    ok, told = judge_forward(lambda Q, K, V, Br, Bc: standard(Q, K, V, 1 / np.sqrt(Q.shape[-1])), trial)
    return Truth({"scores are multiplied by scale": ok["several key tiles"]}, f"with 1/sqrt(d): {told}")


def elu_plus_one(x):
    """Feature map of the Linear Transformer."""
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def linear(Q, K, V, transpose_sum):
    """Listing of 18.1.3; with `transpose_sum` the normaliser's row vector is made a column."""
    q, k = elu_plus_one(Q), elu_plus_one(K)
    state = np.swapaxes(k, -2, -1) @ V
    total = k.sum(axis=-2, keepdims=True)
    if transpose_sum:
        total = np.swapaxes(total, -2, -1)
    return (q @ state) * (1.0 / (q @ total))


def judge_linear(transpose_sum):
    """Compare with the quadratic form for several shapes."""
    rng = np.random.default_rng(0)
    verdicts, told = {}, []
    for name, (n, d) in {"d = 8": (32, 8), "d = 1": (32, 1), "several heads": (24, 4)}.items():
        shape = (2, 3, n, d) if name == "several heads" else (n, d)
        Q, K, V = rng.standard_normal((3, *shape))
        A = elu_plus_one(Q) @ np.swapaxes(elu_plus_one(K), -2, -1)
        want = A @ V / A.sum(-1, keepdims=True)
        try:
            got = linear(Q, K, V, transpose_sum)
        except ValueError as error:
            verdicts[name] = False
            told.append(f"{name}: {type(error).__name__}")
            continue
        verdicts[name] = bool(got.shape == want.shape and np.abs(got - want).max() <= 1e-12)
        told.append(f"{name}: {'agrees' if verdicts[name] else 'differs'}")
    return verdicts, "; ".join(told)


@claim(
    "18.1-058", section="18.1.3", where="Listing 1", kind="code",
    title_en="Linear attention listing", title_zh="线性注意力代码",
    paraphrase="Linear attention is phi(Q)(phi(K)^T V), divided by phi(Q) times the sum of phi(K) kept as "
    "a (1, d) row.",
    stated={"d = 8": True, "d = 1": True, "several heads": True}, verdict="wrong", severity=2,
    right="(N, d) times (1, d) is no matrix product: the code raises for every d but 1. Transpose the sum to "
    "(d, 1).",
    mended=lambda: judge_linear(transpose_sum=True)[0],
)
def linear_listing():
    return Truth(*judge_linear(transpose_sum=False))
