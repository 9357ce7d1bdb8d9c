"""Ledger entries for the companion blog: online softmax, sentinels, thresholds and the backward formula."""

import numpy as np

from verify.claims.emulate import exact, flash_forward, rounded
from verify.claims.ledger import Cases, Range, Truth, claim


def softmax(S):
    P = np.exp(S - S.max(1, keepdims=True))
    return P / P.sum(1, keepdims=True)


@claim(
    "blog-040", section="2.2", where="Formula", kind="formula",
    title_en="Merge rules of the online softmax", title_zh="递推合并",
    paraphrase="m_new = max(m, m_ij); scale O and l by exp(m - m_new); add the new tile's; O / l is the "
    "softmax result.",
    stated={"equals softmax": True, "exponentials at most 1": True}, verdict="confirmed",
)
def merge_rules():
    rng = np.random.default_rng(2040)
    S, V = 30 * rng.standard_normal((8, 60)), rng.standard_normal((60, 4))
    m, l, o, largest = np.full((8, 1), -np.inf), np.zeros((8, 1)), np.zeros((8, 4)), 0.0
    for j in range(0, 60, 7):
        s = S[:, j : j + 7]
        m_new = np.maximum(m, s.max(1, keepdims=True))
        alpha, P = np.exp(m - m_new), np.exp(s - m_new)
        largest = max(largest, float(P.max()), float(alpha.max()))
        l, o, m = alpha * l + P.sum(1, keepdims=True), alpha * o + P @ V[j : j + 7], m_new
    error = float(np.abs(o / l - softmax(S) @ V).max())
    return Truth(
        {"equals softmax": error < 1e-12, "exponentials at most 1": largest <= 1}, f"error {error:.1e}"
    )


@claim(
    "blog-041", section="2.2", where="text", kind="statement",
    title_en="-65504 lies below every score", title_zh="初始化 m_i 用 -65504",
    paraphrase="Start m at -65504 or -1e30, smaller than any real score.",
    stated={"-65504": True, "-1e30": True}, verdict="depends", severity=3,
    right="-65504 is FP16's lowest value, but scores are kept in FP32 and may be lower: then m stays, every "
    "exponential is 0 and the row is 0 / 0. -1e30 is safe for FP32 scores (and is -inf if stored in FP16). "
    "-inf with a guard is right for all.",
)
def sentinel():
    def works(scale, start):
        rng = np.random.default_rng(2041)
        S, V = -scale * (1 + rng.random((4, 12))), rng.standard_normal((12, 2))
        m, l, o = np.full((4, 1), start), np.zeros((4, 1)), np.zeros((4, 2))
        for j in range(0, 12, 4):
            s = S[:, j : j + 4]
            m_new = np.maximum(m, s.max(1, keepdims=True))
            alpha, P = np.exp(m - m_new), np.exp(s - m_new)
            l, o, m = alpha * l + P.sum(1, keepdims=True), alpha * o + P @ V[j : j + 4], m_new
        with np.errstate(invalid="ignore"):
            return bool(np.abs(o / l - softmax(S) @ V).max() < 1e-9)

    return Cases(
        {
            f"scores around {-scale:g}": {"-65504": works(scale, -65504.0), "-1e30": works(scale, -1e30)}
            for scale in (30.0, 1e5)
        }
    )


@claim(
    "blog-042", section="2.2", where="text", kind="statement",
    title_en="What goes wrong with minus infinity", title_zh="exp(-inf - x)",
    paraphrase="The danger of an infinite start is exp(-inf - x).",
    stated={"exp(-inf - x) is NaN": True, "exp(-inf - (-inf)) is NaN": False}, verdict="wrong", severity=2,
    right="exp(-inf - x) is 0 for every finite x, as IEEE 754 has it. The NaN comes from -inf - (-inf), "
    "when a tile is fully masked before any key was seen: guard that case. A finite sentinel hides it and "
    "divides 0 by 0 at the end.",
)
def infinity():
    with np.errstate(invalid="ignore"):
        finite, both = (
            np.exp(np.float32(-np.inf) - np.float32(3)),
            np.exp(np.float32(-np.inf) - np.float32(-np.inf)),
        )
    return Truth(
        {"exp(-inf - x) is NaN": bool(np.isnan(finite)), "exp(-inf - (-inf)) is NaN": bool(np.isnan(both))}
    )


@claim(
    "blog-043", section="2.3", where="Formula", kind="formula",
    title_en="Softmax backward", title_zh="softmax 的雅可比",
    paraphrase="dV = P^T dO and dS = P o (dP - rowsum(dP o P)), with dP = dO V^T.",
    stated={"dS": True, "dV": True}, verdict="confirmed",
)
def softmax_backward():
    rng = np.random.default_rng(2043)
    S, V, dO = rng.standard_normal((4, 6)), rng.standard_normal((6, 3)), rng.standard_normal((4, 3))
    P = softmax(S)
    dP = dO @ V.T
    dS, dV = P * (dP - (dP * P).sum(1, keepdims=True)), P.T @ dO
    h = 1e-6

    def slope(x, f):
        out = np.empty_like(x)
        for at in np.ndindex(x.shape):
            up, down = x.copy(), x.copy()
            up[at] += h
            down[at] -= h
            out[at] = (f(up) - f(down)) / (2 * h)
        return out

    errors = (
        np.abs(dS - slope(S, lambda s: (softmax(s) @ V * dO).sum())).max(),
        np.abs(dV - slope(V, lambda v: (P @ v * dO).sum())).max(),
    )
    return Truth(
        {"dS": bool(errors[0] < 1e-8), "dV": bool(errors[1] < 1e-8)},
        f"central differences: {errors[0]:.1e}, {errors[1]:.1e}",
    )


@claim(
    "blog-044", section="2.3", where="text", kind="statement",
    title_en="Running m and l in the backward pass", title_zh="反向也要维护缩放状态",
    paraphrase="m and l change from tile to tile, so the backward pass must keep a rescaling state too, or "
    "gradients are off by a factor.",
    stated={"needs rescaling between tiles": True}, verdict="wrong", severity=3,
    right="The backward pass starts from the final lse: P = exp(S - lse) is right in every tile at once, in "
    "any order, with no state and no rescaling.",
)
def backward_state():
    rng = np.random.default_rng(2044)
    N, d, B = 48, 8, 16
    Q, K, V, dO = rng.standard_normal((4, N, d))
    S = Q @ K.T
    lse = S.max(1) + np.log(np.exp(S - S.max(1, keepdims=True)).sum(1))
    P = softmax(S)
    D = (dO * (P @ V)).sum(1)
    want = (P * (dO @ V.T - D[:, None])) @ K
    errors = []
    for order in (range(0, N, B), reversed(range(0, N, B))):
        dQ = np.zeros((N, d))
        for j in order:
            p = np.exp(Q @ K[j : j + B].T - lse[:, None])
            dQ += (p * (dO @ V[j : j + B].T - D[:, None])) @ K[j : j + B]
        errors.append(float(np.abs(dQ - want).max()))
    return Truth(
        {"needs rescaling between tiles": max(errors) > 1e-10},
        f"two tile orders, no state: errors {errors[0]:.0e}, {errors[1]:.0e}",
    )


@claim(
    "blog-045", section="4.3", where="text", kind="number",
    title_en="Error when l is taken as a constant", title_zh="l_i 当作常量",
    paraphrase="Leaving l's derivative out of dS gave gradient errors of a few percent.",
    stated=Range(1, 10), unit="% of the gradient", tol=0, verdict="depends", severity=2,
    right="It drops the term D = rowsum(dP o P). How much that is depends on the input: a few percent when "
    "many keys share the weight, order one for short or peaked rows. Small errors are the dangerous ones.",
)
def constant_l():
    def dropped(N, gain):
        rng = np.random.default_rng(2045)
        S, V, dO = (
            gain * rng.standard_normal((32, N)),
            rng.standard_normal((N, 64)),
            rng.standard_normal((32, 64)),
        )
        P = softmax(S)
        dP = dO @ V.T
        dS = P * (dP - (dP * P).sum(1, keepdims=True))
        return 100 * float(np.sqrt(np.mean((P * dP - dS) ** 2) / np.mean(dS**2)))

    got = {
        "N = 1024, scores of size 1": dropped(1024, 1),
        "N = 16": dropped(16, 1),
        "N = 1024, peaked": dropped(1024, 8),
    }
    return Cases(got, "relative RMS error of dS: " + ", ".join(f"{k} {v:.1f} %" for k, v in got.items()))


@claim(
    "blog-046", section="3.1", where="text", kind="number",
    title_en="Fixed limits for FP16", title_zh="fp16: 相对 1e-2, 绝对 1e-3",
    paraphrase="An FP16 kernel is right if its largest relative error is of order 1e-2 and its absolute "
    "error of order 1e-3.",
    stated={"relative below 1e-2": True, "absolute below 1e-3": True}, verdict="wrong", severity=3,
    right="A right kernel breaks them on plain normal input: outputs near zero make the relative error "
    "exceed 1, and the absolute one grows with |V| and the scores. Bound the error by a multiple of the "
    "plain formula's at the same precision.",
)
def fp16_limits():
    def run(gain, values):
        rng = np.random.default_rng(2046)
        Q, K, V = rounded(
            rng.standard_normal((3, 256, 64)) * np.array([gain, 1, values])[:, None, None], "fp16"
        )
        got, want = flash_forward(Q, K, V), exact(Q, K, V)
        return float(np.max(np.abs(got - want) / np.abs(want))), float(np.abs(got - want).max())

    cases = {"normal input": run(1, 1), "values of size 30": run(1, 30), "peaked scores": run(20, 1)}
    return Cases(
        {
            k: {"relative below 1e-2": r < 1e-2, "absolute below 1e-3": a < 1e-3}
            for k, (r, a) in cases.items()
        },
        "right kernel, emulated: "
        + "; ".join(f"{k}: relative {r:.1e}, absolute {a:.1e}" for k, (r, a) in cases.items()),
    )


@claim(
    "blog-047", section="3.1", where="text", kind="number",
    title_en="Fixed limit for FP32", title_zh="fp32: 小于 1e-5",
    paraphrase="An FP32 kernel keeps its largest absolute error below 1e-5.",
    stated={"below 1e-5": True}, verdict="depends", severity=2,
    right="For normal input by a factor of ten or more. For the stress inputs that the same section "
    "recommends a right kernel exceeds it: the error of a score of size s is s 2^-24.",
)
def fp32_limit():
    def run(gain):
        rng = np.random.default_rng(2047)
        Q, K, V = rounded(rng.standard_normal((3, 256, 64)) * np.array([gain, 1, 1])[:, None, None], "fp32")
        return float(np.abs(flash_forward(Q, K, V, dtype="fp32") - exact(Q, K, V)).max())

    got = {"normal input": run(1), "large scores": run(300)}
    return Cases(
        {k: {"below 1e-5": v < 1e-5} for k, v in got.items()},
        ", ".join(f"{k} {v:.1e}" for k, v in got.items()),
    )


@claim(
    "blog-048", section="3.1", where="text", kind="statement",
    title_en="Cosine similarity as a metric", title_zh="余弦相似度",
    paraphrase="Cosine similarity should be recorded beside the maximum errors.",
    stated={"cosine falls below 0.999": True, "maximum error shows it": True}, verdict="wrong", severity=1,
    reading_is_guess=True,
    right="Record it, but do not rely on it: one wrong row of 4096 leaves a cosine above 0.999, and a wrong "
    "scale of O leaves it at 1. The maximum error sees both. (The blog gives no limit for it; 0.999 is a "
    "common one.)",
)
def cosine():
    rng = np.random.default_rng(2048)
    O = rng.standard_normal((4096, 64))
    bad = O.copy()
    bad[17] = 0
    value = float((O * bad).sum() / np.sqrt((O**2).sum() * (bad**2).sum()))
    return Truth(
        {
            "cosine falls below 0.999": value < 0.999,
            "maximum error shows it": bool(np.abs(O - bad).max() > 0.1),
        },
        f"one row lost: cosine {value:.6f}",
    )


@claim(
    "blog-049", section="4.3", where="text", kind="number",
    title_en="Gradient error after the fix", title_zh="梯度误差降到 1e-4 以下",
    paraphrase="With the full Jacobian the gradient error against numerical differences falls below 1e-4.",
    stated={"FP64 differences": True}, verdict="confirmed",
)
def gradient_check():
    rng = np.random.default_rng(2049)
    Q, K, V, dO = rng.standard_normal((4, 12, 4))

    def loss(q):
        return (softmax(q @ K.T / 2) @ V * dO).sum()

    P = softmax(Q @ K.T / 2)
    dQ = (P * (dO @ V.T - (dO * (P @ V)).sum(1, keepdims=True))) @ K / 2
    numeric = np.empty_like(Q)
    for at in np.ndindex(Q.shape):
        step = np.zeros_like(Q)
        step[at] = 1e-6
        numeric[at] = (loss(Q + step) - loss(Q - step)) / 2e-6
    error = float(np.max(np.abs(dQ - numeric)) / np.abs(dQ).max())
    return Truth(
        {"FP64 differences": error < 1e-4}, f"{error:.1e} in fp64; FP32 differences cannot go much below 1e-3"
    )
