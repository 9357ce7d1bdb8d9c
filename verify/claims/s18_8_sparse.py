"""Ledger entries for section 18.8.1: block-sparse attention, patterns and speedups."""

import numpy as np

from verify.claims.ledger import Bound, Cases, Elsewhere, Truth, claim


@claim(
    "18.8-001", section="18.8.1", where="Figure 18-29", kind="formula",
    title_en="Work of a sliding window", title_zh="滑动窗口 O(n w)",
    paraphrase="A window of w keys costs n w pairs.",
    stated={"n=4096, w=256": 4096 * 256, "n=16384, w=1024": 16384 * 1024}, unit="pairs", tol=0.04,
    verdict="confirmed",
)
def window_work():
    def pairs(n, w):
        return sum(min(n - 1, i + w // 2) - max(0, i - w // 2) + 1 for i in range(n))

    return Truth(
        {f"n={n}, w={w}": pairs(n, w) for n, w in ((4096, 256), (16384, 1024))},
        "w / 2 on each side, edges cut",
    )


@claim(
    "18.8-002", section="18.8.1", where="Figure 18-29", kind="formula",
    title_en="Work of global tokens and of a stride", title_zh="O(n (w+g)), O(n²/k)",
    paraphrase="g global tokens on top of a window cost n (w + g); every k-th key costs n^2 / k.",
    stated={"global": 2048 * (128 + 16), "stride 4": 2048 * 2048 // 4},
    unit="pairs at n = 2048, w = 128, g = 16", tol=0.15, verdict="confirmed", reading_is_guess=True,
)
def pattern_work():
    n, w, g, k = 2048, 128, 16, 4
    i, j = np.indices((n, n))
    window = np.abs(i - j) <= w // 2
    glob = window | (i < g) | (j < g)
    return Truth(
        {"global": int(glob.sum()), "stride 4": int((j % k == 0).sum())},
        "counted; global tokens are rows and columns, so that the count lies nearer n (w + 2 g)",
    )


@claim(
    "18.8-003", section="18.8.1", where="Figure 18-29", kind="number",
    title_en="Width of the window, figure against text", title_zh="前后各 w/2",
    paraphrase="The figure lets token i see [i - w, i + w].",
    stated=2 * 256 + 1, unit="keys at w = 256", verdict="inconsistent", severity=2,
    conflicts_with=("18.8-001",),
    right="The text has w / 2 on each side, 257 keys: half. The cost n w and the speedup n / w fit the "
    "text's definition only.",
)
def window_width():
    i, w = 10_000, 256
    return Elsewhere(
        sum(abs(i - j) <= w // 2 for j in range(20_000)), ("18.8-001",), "w / 2 to each side, as in the text"
    )


@claim(
    "18.8-004", section="18.8.1", where="text", kind="library",
    title_en="Mistral's window", title_zh="Mistral 7B 采用此模式",
    paraphrase="Mistral 7B uses the window of w / 2 tokens before and after.",
    stated={"before": 2048, "after": 2048}, unit="tokens at w = 4096", tol=0.001, verdict="wrong", severity=2,
    right="4096 before, none after: it is a causal model. Longformer is the symmetric one.",
    source="Jiang et al., Mistral 7B, arXiv:2310.06825, section 2",
)
def mistral():
    return Truth({"before": 4096, "after": 0})


# Figure 18-30 as printed: eight query rows, seven cells each although the header names keys K0 to K7.
FIGURE = ["##.|....", "##.|....", "###|....", "###|....", "..#|##..", "..#|##..", "...|####", "...|####"]


@claim(
    "18.8-005", section="18.8.1", where="Figure 18-30", kind="table",
    title_en="Picture of a block-sparse matrix", title_zh="块稀疏矩阵",
    paraphrase="Eight tokens, blocks of two, a window of three blocks: block tridiagonal.",
    stated={"block tridiagonal, however a lost column is restored": True}, verdict="wrong", severity=1,
    reading_is_guess=True,
    right="With blocks of 2 and a window of 3 the rows see keys 0-3, 0-5, 2-7, 4-7. The figure has seven "
    "cells a row for eight keys, is not symmetric, and no lost column at any place repairs it.",
)
def figure_matrix():
    rows = np.array([[c == "#" for c in row.replace("|", "")] for row in FIGURE])
    block = np.abs(np.subtract.outer(np.arange(8) // 2, np.arange(8) // 2)) <= 1
    lost = rows.shape[1]
    fits = any(np.array_equal(np.insert(rows, at, block[:, at], axis=1), block) for at in range(lost + 1))
    apart = min(int((np.insert(rows, at, block[:, at], axis=1) != block).sum()) for at in range(lost + 1))
    return Truth(
        {"block tridiagonal, however a lost column is restored": fits},
        f"at least {apart} of 64 cells differ, whichever is lost",
    )


@claim(
    "18.8-006", section="18.8.1", where="Formula", kind="formula",
    title_en="Speedup of a window", title_zh="理论加速比",
    paraphrase="Tc / min(Tc, w / Bc), about n / w: 16 for 64K tokens and a window of 4096.",
    stated=16, unit="x", tol=0.01, verdict="depends", severity=2,
    right="Against full square attention, and only if tile edges fall on window edges; counting straddled "
    "tiles 15.8 at Bc = 128. Against causal attention, which is what a language model runs, 8.0.",
)
def window_speedup():
    n, w, B = 65536, 4096, 128
    T = n // B
    straddled = sum(min(T - 1, i + w // 2 // B) - max(0, i - w // 2 // B) + 1 for i in range(T))
    causal = sum(min(i, w // B) + 1 for i in range(T))
    return Cases(
        {
            "square, w / Bc tiles a row": T / (w / B),
            "square, visited tiles counted": T * T / straddled,
            "causal on both sides": T * (T + 1) / 2 / causal,
        },
        f"visited tiles: {straddled} of {T * T}",
    )


@claim(
    "18.8-007", section="18.8.1", where="Formula", kind="formula",
    title_en="Mean number of active tiles", title_zh="平均有效 key 块数",
    paraphrase="A row of tiles has min(Tc, w / Bc) active tiles.",
    stated={"w=4096, Bc=128": 32, "w=256, Bc=128": 2}, unit="tiles", tol=0.02, verdict="wrong", severity=2,
    right="One more: a window of w / 2 to each side touches w / Bc + 1 tiles when tile and window edges "
    "coincide, w / Bc + 2 otherwise. For narrow windows that is half as much again.",
)
def active_tiles():
    def mean(n, w, B):
        T = n // B
        return sum(min(T - 1, i + w // 2 // B) - max(0, i - w // 2 // B) + 1 for i in range(T)) / T

    return Truth(
        {"w=4096, Bc=128": mean(1 << 19, 4096, 128), "w=256, Bc=128": mean(1 << 16, 256, 128)},
        "Br = Bc = 128, counted",
    )


@claim(
    "18.8-008", section="18.8.1", where="text", kind="statement",
    title_en="Format of the tile index", title_zh="CSR 格式的块索引表",
    paraphrase="The active tiles are stored as CSR; the listing reads block_mask[i][j] and "
    "block_mask_len[i].",
    stated="row pointers and one column array", verdict="inconsistent", severity=1,
    conflicts_with=("18.8-090",),
    right="A padded list with a length per row (ELL) is what the listing reads. CSR would be cols[ptr[i] + "
    "j], j < ptr[i + 1] - ptr[i].",
)
def index_format():
    return Elsewhere("padded lists and lengths", ("18.8-090",), "as the listing addresses it")


@claim(
    "18.8-009", section="18.8.1", where="Table 18-32", kind="table",
    title_en="Speedups and accuracy of the patterns", title_zh="精度与加速",
    paraphrase="Block-sparse attention is up to 8 times as fast with windows, 6 with global tokens, 2 for "
    "stride 2, 5 for learned patterns.",
    stated={"window": 8, "global": 6, "stride 2": 2, "learned": 5}, unit="x", verdict="unverifiable",
    severity=1,
    right="No models, data or sources. Stride 2 cannot exceed 2. The accuracy column mixes absolute and "
    "relative perplexity (below 0.5, 1 to 2 %).",
)
def pattern_table():
    n = 65536
    return Bound(
        1,
        {"window": n / 4096, "global": n / (4096 + 64), "stride 2": 2.0, "learned": 1e9},
        "kept share of pairs at n = 64K",
    )


@claim(
    "18.8-010", section="18.8.1", where="text", kind="number",
    title_en="Gain of sparse patterns in general", title_zh="2-10 倍的加速",
    paraphrase="Well designed sparse patterns make attention 2 to 10 times as fast at less than 1 % of "
    "perplexity.",
    stated={"lo": 2, "hi": 10}, unit="x", verdict="unverifiable", severity=1,
    right="No experiment is named; the gain follows from n / w and may be anything from 1 up.",
)
def general_gain():
    return Bound(1, 1e9, "no experiment is named")
