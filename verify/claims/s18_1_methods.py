"""Ledger entries for section 18.1.3: sparse, low-rank and kernel alternatives, and their comparison."""

from math import inf

import numpy as np

from verify.claims.account import compulsory_elements, fit_exponent, forward_flops
from verify.claims.hardware import A100, H100
from verify.claims.ledger import Bound, Cases, Elsewhere, Truth, claim, stated_in

LRA = "Tay et al., Long Range Arena, arXiv:2011.04006, table 1"
# ListOps accuracy (%) in that table.
LISTOPS = {"Transformer": 36.37, "Linformer": 35.70, "Performer": 18.01}
# The bench of Table 18-2.
B, H, N, d = 8, 16, 4096, 64


@claim(
    "18.1-040", section="18.1.3", where="text", kind="formula",
    title_en="Cost of window plus global tokens", title_zh="滑动窗口注意力",
    paraphrase="A window of w tokens and g global tokens make attention cost O(N (w + g)).",
    stated={"N": 1, "w": 1, "g": 1}, verdict="confirmed",
)
def longformer_cost():
    def pairs(n, w, g):
        return n * (2 * w + 1) + 2 * n * g

    return {
        "N": fit_exponent(lambda n: pairs(n, 512, 32), 1 << 14, 1 << 20),
        "w": fit_exponent(lambda w: pairs(1 << 20, w, 0), 1 << 10, 1 << 14),
        "g": fit_exponent(lambda g: pairs(1 << 20, 0, g), 1 << 10, 1 << 14),
    }


@claim(
    "18.1-041", section="18.1.3", where="text", kind="statement",
    title_en="What BigBird proves", title_zh="BigBird",
    paraphrase="BigBird's pattern provably keeps the graph connected (a 'Watkins conjecture').",
    stated={"Watkins conjecture in the paper": True}, verdict="wrong", severity=1,
    right="The paper proves that the pattern is a universal approximator and Turing complete; its random "
    "part is motivated by expander and small-world (Watts-Strogatz) graphs. No conjecture of that name "
    "appears.",
    source="Zaheer et al., Big Bird, arXiv:2007.14062, section 3",
)
def bigbird():
    return {"Watkins conjecture in the paper": False}


@claim(
    "18.1-042", section="18.1.3", where="text", kind="number",
    title_en="Mistral's window and grouped heads", title_zh="滑动窗口与GQA",
    paraphrase="Mistral 7B has a window of 4096 and 8 K/V heads for 32 query heads, which cuts the KV "
    "cache by about 75 %.",
    stated={"window": 4096, "K/V heads": 8, "cache saved, %": 75}, verdict="confirmed",
    source="Jiang et al., Mistral 7B, arXiv:2310.06825, table 1",
)
def mistral():
    return {"window": 4096, "K/V heads": 8, "cache saved, %": 100 * (1 - 8 / 32)}


@claim(
    "18.1-043", section="18.1.3", where="text", kind="statement",
    title_en="Where Linformer appeared", title_zh="Linformer",
    paraphrase="Linformer is cited as an ICML 2020 paper.",
    stated={"venue": "ICML 2020"}, verdict="wrong", severity=1,
    right="A preprint, arXiv:2006.04768; it was not published at "
    "ICML.", source="Wang et al., arXiv:2006.04768",
)
def linformer_venue():
    return {"venue": "arXiv 2020"}


@claim(
    "18.1-044", section="18.1.3", where="Formula", kind="formula",
    title_en="Cost of a low-rank projection", title_zh="低秩近似",
    paraphrase="Projecting K and V to k rows turns O(N^2 d) into O(N k d), linear in N.",
    stated={"N": 1, "k": 1, "d": 1}, verdict="confirmed",
)
def linformer_cost():
    def flops(n, k, d):
        return 2 * (2 * n * k * d) + 2 * (2 * n * k * d)

    return {
        "N": fit_exponent(lambda n: flops(n, 256, 64), 1 << 12, 1 << 16),
        "k": fit_exponent(lambda k: flops(4096, k, 64), 1 << 6, 1 << 10),
        "d": fit_exponent(lambda x: flops(4096, 256, x), 1 << 5, 1 << 8),
    }


@claim(
    "18.1-045", section="18.1.3", where="Table 18-2", kind="table",
    title_en="Linformer under a causal mask", title_zh="因果掩码基准",
    paraphrase="Linformer is timed in a causal benchmark beside exact causal attention.",
    stated={"rows before a changed key stay the same": True}, verdict="wrong", severity=2,
    right="Its projection mixes all positions of K and V, so every row sees the future: it has no causal "
    "form, and the row does not belong in the table.",
)
def linformer_leak():
    rng = np.random.default_rng(0)
    n, k, width = 64, 16, 8
    Q, K, V = rng.standard_normal((3, n, width))
    E = rng.standard_normal((k, n)) / np.sqrt(n)

    def attend(K):
        S = Q @ (E @ K).T / np.sqrt(width)
        P = np.exp(S - S.max(1, keepdims=True))
        return P / P.sum(1, keepdims=True) @ (E @ V)

    changed = K.copy()
    changed[-1] += 1.0
    moved = np.abs(attend(changed) - attend(K))[:-1].max()
    return Truth(
        {"rows before a changed key stay the same": bool(moved == 0)},
        f"changing the last key moves earlier rows by up to {moved:.1e}",
    )


@claim(
    "18.1-046", section="18.1.3", where="Formula", kind="formula",
    title_en="Performer's random features", title_zh="随机特征映射",
    paraphrase="Features sin(w x), cos(w x) with Gaussian w have inner products that approximate exp(q.k).",
    stated={"mean ratio to exp(q.k)": 1.0}, verdict="wrong", severity=2, reading_is_guess=True, tol=0.05,
    right="They approximate the Gaussian kernel exp(-|q - k|^2 / 2); exp(q.k) needs the factor exp((|q|^2 + "
    "|k|^2) / 2) too. And Performer's point is to avoid them: its positive features exp(w.x - |x|^2 / 2) "
    "have bounded variance.",
    source="Choromanski et al., Performers, arXiv:2009.14794, section 2.3",
)
def performer_features():
    rng = np.random.default_rng(0)
    w = rng.standard_normal((200_000, 8))
    q, k = rng.standard_normal((2, 8))
    q, k = q / np.linalg.norm(q), k / np.linalg.norm(k)
    features = (np.cos(w @ q) * np.cos(w @ k) + np.sin(w @ q) * np.sin(w @ k)).mean()
    positive = np.exp(w @ q - 0.5 + w @ k - 0.5).mean()
    exact = np.exp(q @ k)
    return Truth(
        {"mean ratio to exp(q.k)": float(features / exact)},
        f"200,000 features, unit q and k; positive features give {positive / exact:.3f}",
    )


@claim(
    "18.1-047", section="18.1.3", where="Formula", kind="formula",
    title_en="Linear attention, reordered and recurrent", title_zh="线性注意力",
    paraphrase="With a factored similarity the products can be reordered to O(N d^2), and run as a "
    "recurrence.",
    stated={"reordered equals quadratic": True, "recurrence equals causal quadratic": True},
    verdict="confirmed",
)
def linear_forms():
    rng = np.random.default_rng(1)
    q, k, V = rng.standard_normal((3, 40, 6))
    q, k = (np.where(x > 0, x + 1, np.exp(x)) for x in (q, k))
    A = q @ k.T
    quadratic = A @ V / A.sum(1, keepdims=True)
    reordered = q @ (k.T @ V) / (q @ k.sum(0))[:, None]
    A = np.tril(A)
    causal = A @ V / A.sum(1, keepdims=True)
    state, norm, steps = np.zeros((6, 6)), np.zeros(6), []
    for t in range(40):
        state += np.outer(k[t], V[t])
        norm += k[t]
        steps.append(q[t] @ state / (q[t] @ norm))
    return {
        "reordered equals quadratic": bool(np.abs(reordered - quadratic).max() <= 1e-12),
        "recurrence equals causal quadratic": bool(np.abs(np.array(steps) - causal).max() <= 1e-12),
    }


@claim(
    "18.1-048", section="18.1.3", where="Formula", kind="formula",
    title_en="cosFormer's position weight factors", title_zh="cosFormer",
    paraphrase="Weighting by cos(pi (i - j) / 2N) keeps linear cost.",
    stated={"linear form equals quadratic": True}, verdict="confirmed",
    source="Qin et al., cosFormer, arXiv:2202.08791, equation 9",
)
def cosformer():
    rng = np.random.default_rng(2)
    n = 32
    q, k, V = np.abs(rng.standard_normal((3, n, 5)))
    angle = np.pi * np.arange(n) / (2 * n)
    A = q @ k.T * np.cos(angle[:, None] - angle)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    linear = (q * cos) @ ((k * cos).T @ V) + (q * sin) @ ((k * sin).T @ V)
    return {"linear form equals quadratic": bool(np.abs(linear - A @ V).max() <= 1e-12)}


@claim(
    "18.1-050", section="18.1.3", where="Table 18-2", kind="timing",
    title_en="Forward times of seven schemes", title_zh="前向耗时",
    paraphrase="A100, N = 4096, d = 64, 16 heads, batch 8, causal, FP16: milliseconds per forward pass.",
    stated={"standard": 48.2, "FA v2": 6.1, "FA v3 (H100)": 2.8, "Linformer": 5.2, "Performer": 4.8,
            "Linear Transformer": 4.3, "Longformer": 12.1},
    unit="ms", verdict="unverifiable", severity=1,
    right="Above the floors set by peak rate and compulsory traffic, so possible; script, versions and "
    "spread are missing.",
)
def table_times():
    heads = B * H
    traffic = 2 * heads * compulsory_elements(N, d) / (A100.gb_per_s * 1e6)
    causal = heads * forward_flops(N, d, causal=True)

    def floor(flops, device=A100):
        return max(flops / device.fp16 / 1e9, traffic * A100.gb_per_s / device.gb_per_s)

    low = {
        "standard": 2 * heads * 4 * N * N / (A100.gb_per_s * 1e6),
        "FA v2": floor(causal),
        "FA v3 (H100)": floor(causal, H100),
        "Linformer": floor(heads * 8 * N * 256 * d),
        "Performer": floor(heads * 8 * N * 256 * d),
        "Linear Transformer": floor(heads * 4 * N * d * d),
        "Longformer": floor(heads * 4 * N * 512 * d),
    }
    told = ", ".join(f"{name} {value:.2f}" for name, value in low.items())
    return Bound(low, inf, "measured on a machine and script that are not given", f"floors in ms: {told}")


@claim(
    "18.1-051", section="18.1.3", where="Table 18-2", kind="timing",
    title_en="Table 18-2 against the stated utilisation", title_zh="耗时与利用率",
    paraphrase="FA v2 takes 6.1 ms on A100 and FA v3 2.8 ms on H100, where 18.1.2 gives them 65 % and 75 % "
    "of peak.",
    stated={"FA v2, ms": 6.1, "FA v3, ms": 2.8}, unit="ms", verdict="inconsistent", severity=2,
    conflicts_with=("18.1-024", "18.1-026", "18.5-061"),
    right="At those shares the causal half of the work takes 1.4 and 0.4 ms. The table's times imply 45 "
    "TFLOP/s (14 %) and 98 TFLOP/s (10 %); even counting masked work they imply 29 % and 20 %. Table 18-17 "
    "gives v2 1.71 ms for the same batch, heads, length and width on the same card.",
)
def table_utilisation():
    flops = B * H * forward_flops(N, d, causal=True)
    v2 = stated_in("18.1-024")["v2, %"] / 100
    v3 = stated_in("18.1-026")["share of peak, %"] / 100
    return Elsewhere(
        {"FA v2, ms": flops / (v2 * A100.fp16) / 1e9, "FA v3, ms": flops / (v3 * H100.fp16) / 1e9},
        ("18.1-024", "18.1-026"),
        f"{flops / 1e9:.0f} GFLOP below the diagonal",
    )


@claim(
    "18.1-052", section="18.1.3", where="Table 18-2", kind="table",
    title_en="Peak memory of seven schemes", title_zh="峰值显存",
    paraphrase="Peak memory of seven schemes at N = 4096, d = 64, 16 heads, batch 8: from 14.8 GB "
    "(standard) to 1.8 GB (Linear Transformer).",
    stated={"standard": 14.8, "FA v2": 2.3, "FA v3 (H100)": 2.1, "Linformer": 1.9, "Performer": 2.0,
            "Linear Transformer": 1.8, "Longformer": 5.6},
    unit="GB", verdict="unverifiable", severity=1,
    right="Q, K, V and O take 0.27 GB and the standard S and P 8.6 GB more; about 2 GB of every row is "
    "something else (a framework's context, a model around it) that the table does not name.",
)
def table_memory():
    heads = B * H
    arrays = 2 * heads * compulsory_elements(N, d) / 1e9
    low = dict.fromkeys(("FA v2", "FA v3 (H100)", "Linformer", "Performer", "Linear Transformer"), arrays)
    low |= {"standard": arrays + 2 * 2 * heads * N * N / 1e9, "Longformer": arrays + 2 * heads * N * 512 / 1e9}
    return Bound(
        low,
        80,
        "what else the process held is not stated",
        f"floors: Q, K, V, O {arrays:.2f} GB; standard {low['standard']:.1f} GB; card 80 GB",
    )


@claim(
    "18.1-053", section="18.1.3", where="text", kind="number",
    title_en="Exact attention wins by needing fewer steps", title_zh="训练步数",
    paraphrase="6.1 ms exact beats 4.3 ms approximate end to end, because approximations need 10-30 % more "
    "steps.",
    stated={"exact is faster at +10 %": True, "exact is faster at +30 %": True}, verdict="inconsistent",
    severity=2,
    conflicts_with=("18.1-050",),
    right="4.3 ms x 1.3 = 5.6 ms < 6.1 ms: by these numbers the approximation wins on attention time; "
    "break-even is 42 % more steps. Only when the rest of the model dominates can extra steps cost more than "
    "they save.",
)
def fewer_steps():
    ms = stated_in("18.1-050")
    fast, exact = ms["Linear Transformer"], ms["FA v2"]
    return Elsewhere(
        {f"exact is faster at +{p} %": fast * (1 + p / 100) > exact for p in (10, 30)},
        ("18.1-050",),
        f"{fast} ms + 30 % = {fast * 1.3:.2f} ms against {exact} ms",
    )


@claim(
    "18.1-054", section="18.1.3", where="text", kind="number",
    title_en="ListOps losses of Linformer and Performer", title_zh="ListOps 任务",
    paraphrase="On LRA's ListOps, Linformer loses 9 % and Performer 12 % against full attention.",
    stated={"Linformer": 9, "Performer": 12}, unit="%", verdict="wrong", severity=2, source=LRA,
    right="Accuracies 36.37 (full), 35.70 (Linformer), 18.01 (Performer): losses of 0.7 and 18.4 points, or "
    "2 % and 50 %.",
)
def listops():
    full = LISTOPS["Transformer"]
    loss = {name: full - LISTOPS[name] for name in ("Linformer", "Performer")}
    return Cases({"in points": loss, "in per cent of full attention": {n: 100 * x / full for n, x in loss.items()}})


@claim(
    "18.1-055", section="18.1.3", where="text", kind="statement",
    title_en="Hardware favours exact methods", title_zh="硬件代际红利",
    paraphrase="New hardware helps exact methods far more than approximate ones (2.8 ms against 48.2 ms).",
    stated={"v3 on H100 against standard on A100, x": 17.2}, unit="x", verdict="depends", severity=1,
    right="48.2/2.8 compares two GPUs and two algorithms at once, and no approximate method was timed on "
    "H100. Between the two exact kernels the ratio is 2.2, below the 3.2 by which peak compute grew.",
)
def generation_gain():
    ms = stated_in("18.1-050")
    key = "v3 on H100 against standard on A100, x"
    return Cases(
        {
            "two GPUs and two algorithms": {key: ms["standard"] / ms["FA v3 (H100)"]},
            "flash to flash": {key: ms["FA v2"] / ms["FA v3 (H100)"]},
        }
    )


@claim(
    "18.1-056", section="18.1.3", where="Table 18-2", kind="table",
    title_en="Perplexity losses of approximations", title_zh="精度损失",
    paraphrase="Perplexity rises by 0.8 (Linformer), 0.5 (Performer) and 1.2 (Linear Transformer).",
    stated={"Linformer": 0.8, "Performer": 0.5, "Linear Transformer": 1.2}, unit="perplexity",
    verdict="unverifiable", severity=1,
    right="A timing bench has no perplexity; model, data and training are not named.",
    source=f"compare {LRA}, where the three differ by task in sign and size",
)
def perplexity_losses():
    return Bound(0, inf, "model, data set and training run are not named")
