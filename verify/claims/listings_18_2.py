"""The code samples of section 18.2, transcribed in behaviour and run against fp64."""

import numpy as np

from verify.claims.account import forward_flops
from verify.claims.ledger import Cases, Truth, claim
from verify.claims.s18_2 import softmax
from verify.claims.trial import CAUSAL, TRIALS, everywhere, judge_backward, judge_forward


def dot_product_attention(Q, K, V, divisor=None):
    """Listing of 18.2.1: the scores are divided by what it calls scale, sqrt(d) unless given."""
    divisor = np.sqrt(Q.shape[-1]) if divisor is None else divisor
    return softmax(Q @ np.swapaxes(K, -2, -1) / divisor) @ V


@claim(
    "18.2-001", section="18.2.1", where="Listing 1", kind="code",
    title_en="Scaled dot-product attention", title_zh="点积注意力",
    paraphrase="softmax(QK^T / sqrt(d_k)) V with the default scale.",
    stated=everywhere(), verdict="confirmed",
)
def sdpa_listing():
    return Truth(*judge_forward(lambda Q, K, V, Br, Bc: dot_product_attention(Q, K, V)))


def split_heads(x, W, heads):
    """Listing of 18.2.2: one product, three chunks, each viewed as heads and transposed."""
    batch, n, width = x.shape
    parts = np.split(x @ W, 3, axis=-1)
    return [p.reshape(batch, n, heads, width // heads).transpose(0, 2, 1, 3) for p in parts]


@claim(
    "18.2-034", section="18.2.2", where="Listing 2", kind="code",
    title_en="Fused QKV projection", title_zh="QKV 线性投影与头切分",
    paraphrase="One product with a (d, 3d) matrix, cut and reshaped, equals separate projections per head.",
    stated={"equals separate projections": True, "shape": [2, 4, 10, 3]}, verdict="confirmed",
)
def qkv_listing():
    rng = np.random.default_rng(0)
    x, W = rng.standard_normal((2, 10, 12)), rng.standard_normal((12, 36))
    Q, K, V = split_heads(x, W, 4)
    error = 0.0
    for part, got in enumerate((Q, K, V)):
        for h in range(4):
            columns = W[:, 12 * part + 3 * h : 12 * part + 3 * (h + 1)]
            error = max(error, np.abs(got[:, h] - x @ columns).max())
    return Truth({"equals separate projections": bool(error <= 1e-13), "shape": list(Q.shape)}, f"error {error:.0e}")


@claim(
    "18.2-035", section="18.2.2", where="text", kind="statement",
    title_en="Views move no data", title_zh="view 与 transpose",
    paraphrase="Cutting, viewing and transposing only change strides; no data move.",
    stated={"memory shared": True, "last axis contiguous": True}, verdict="confirmed",
)
def views():
    qkv = np.zeros((2, 10, 36))
    part = qkv[..., 12:24]
    heads = part.reshape(2, 10, 4, 3).transpose(0, 2, 1, 3)
    return Truth(
        {
            "memory shared": bool(np.shares_memory(qkv, heads)),
            "last axis contiguous": heads.strides[-1] == heads.itemsize,
        },
        "the result is not contiguous as a whole: a kernel must take strides, or the copy comes later",
    )


def causal_mask(n):
    """Listing of 18.2.2: minus infinity above the diagonal, else 0."""
    upper = np.triu(np.ones((n, n)), 1)
    return np.where(upper == 1, -np.inf, upper)


@claim(
    "18.2-036", section="18.2.2", where="Listing 3", kind="code",
    title_en="Causal mask builder", title_zh="因果掩码的矩阵构造",
    paraphrase="An additive mask with minus infinity where j > i.",
    stated=everywhere(CAUSAL), verdict="confirmed",
)
def mask_listing():
    def attend(Q, K, V, Br, Bc):
        S = Q @ np.swapaxes(K, -2, -1) / np.sqrt(Q.shape[-1]) + causal_mask(Q.shape[-2])
        return softmax(S) @ V

    return Truth(*judge_forward(attend, CAUSAL))


@claim(
    "18.2-037", section="18.2.2", where="Listing 3", kind="code",
    title_en="The builder when lengths differ", title_zh="掩码形状",
    paraphrase="The mask takes one length n; a cache makes the number of keys larger than that of queries.",
    stated={"n x n": True, "one query, 8 keys": True}, verdict="depends", severity=2,
    right="Square only. With a cache query i sees keys up to i + Nk - Nq; the builder offers no such shape.",
)
def mask_shape():
    def works(Nq, Nk):
        try:
            return bool(np.isfinite(softmax(np.zeros((Nq, Nk)) + causal_mask(Nq)[:, :Nk]).sum()))
        except ValueError:
            return False

    fine = {"n x n": True, "one query, 8 keys": True}
    tried = {"n x n": works(8, 8), "one query, 8 keys": works(2, 8)}
    return Cases({"equal lengths only": fine if tried["n x n"] else tried, "decoding with a cache": tried})


@claim(
    "18.2-038", section="18.2.3", where="Listing 1", kind="code",
    title_en="FLOP estimator", title_zh="estimate_attention_flops",
    paraphrase="The estimator adds 2 n^2 d for QK^T, 3 n^2 for the softmax and 2 n^2 d for AV.",
    stated={"n = 1024, d = 64": 271_581_184}, unit="FLOP", verdict="confirmed", tol=0,
)
def flops_listing():
    n, d = 1024, 64
    return {"n = 1024, d = 64": forward_flops(n, d) + 3 * n * n}


def softmax_backward(a, da):
    """Listing of 18.2.4."""
    return a * (da - (a * da).sum(-1, keepdims=True))


@claim(
    "18.2-053", section="18.2.4", where="Listing 1", kind="code",
    title_en="Softmax backward listing", title_zh="softmax_backward",
    paraphrase="a * (da - sum(a * da)), row by row.",
    stated={"equals differences": True}, verdict="confirmed",
)
def softmax_backward_listing():
    rng = np.random.default_rng(1)
    s, g = rng.standard_normal((2, 5, 9))
    step = 1e-6 * np.eye(9)
    numeric = np.stack([((softmax(s + e) - softmax(s - e)) * g).sum(-1) / 2e-6 for e in step], -1)
    error = np.abs(softmax_backward(softmax(s), g) - numeric).max()
    return Truth({"equals differences": bool(error <= 1e-8)}, f"largest difference {error:.0e}")


def attention_backward(dO, Q, K, V, A, scale):
    """Listing of 18.2.4 (its parameter S is never read): all gradients from the stored A."""
    t = np.swapaxes
    dV = t(A, -2, -1) @ dO
    dS = softmax_backward(A, dO @ t(V, -2, -1)) * (1.0 / scale)
    return dS @ K, t(dS, -2, -1) @ Q, dV


def judged(scale_of):
    """The listing on all trials, with `scale_of(d)` passed as scale; A is the true attention matrix."""

    def run(Q, K, V, dO, Br, Bc):
        d = Q.shape[-1]
        A = softmax(Q @ np.swapaxes(K, -2, -1) / np.sqrt(d))
        return attention_backward(dO, Q, K, V, A, scale_of(d))

    return judge_backward(run, TRIALS)


@claim(
    "18.2-054", section="18.2.4", where="Listing 2", kind="code",
    title_en="Attention backward from a stored A", title_zh="attention_backward",
    paraphrase="Gradients of Q, K, V from S, A and the upstream gradient; 'scale' divides.",
    stated=everywhere(), verdict="depends", severity=2, conflicts_with=("18.2-017", "18.2-042"),
    right="Right when scale is sqrt(d), the dividing meaning of 18.2.1. With the 1/sqrt(d) that the other "
    "listings and the libraries call scale, dQ and dK are d times too large. S is a parameter that is never "
    "read.",
)
def backward_listing():
    dividing, told = judged(lambda d: np.sqrt(d))
    multiplying, _ = judged(lambda d: 1 / np.sqrt(d))
    return Cases({"scale = sqrt(d)": dividing, "scale = 1/sqrt(d)": multiplying}, told)
