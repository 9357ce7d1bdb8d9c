"""The kernel listings of section 18.5, transcribed in behaviour and held against fp64."""

import numpy as np

from refimpl.tiling import cdiv
from verify.claims.ledger import Truth, claim
from verify.claims.trial import CAUSAL, everywhere, judge_forward, per_head

WARPS = 4  # the listings leave num_warps open; their rows a warp are Br / num_warps


def read_rows(memory, start, count):
    """Rows of a flat device array; rows past its end are NaN, as a guard band would return them."""
    rows = np.full((count, memory.shape[1]), np.nan)
    have = memory[start : start + count]
    rows[: len(have)] = have
    return rows


def skeleton(Q, K, V, Br, Bc, *, scaled=False, row_state=False, head_offset=False, bounds=False):
    """Listing 2 (v2 forward skeleton); each flag repairs one of its faults.

    As printed: no softmax scale; one m and one l for all rows of a warp; K and V addressed from the start of
    the whole array for every head; a ragged last key tile is read in full. What is left to a comment
    (rescaling O) or to a helper (Q's load, the row of o_reg) is done as a reader would expect.
    """
    B, H, N, d = Q.shape
    Nk = K.shape[2]
    flat = [x.reshape(-1, d) for x in (Q, K, V)]
    out = np.full((B * H * N, d), np.nan)
    scale = d**-0.5 if scaled else 1.0
    for block in np.ndindex(B, H, cdiv(N, Br)):
        b, h, i = block
        first = (b * H + h) * N + i * Br
        Q_i = read_rows(flat[0], first, Br)
        base = (b * H + h) * Nk if head_offset else 0
        W = Br // WARPS
        m = np.full((WARPS, W), -np.inf)
        l = np.zeros((WARPS, W))
        o = np.zeros((WARPS, W, d))
        for j in range(cdiv(Nk, Bc)):
            count = min(Bc, Nk - j * Bc) if bounds else Bc
            K_j, V_j = (read_rows(x, base + j * Bc, count) for x in flat[1:])
            for w in range(WARPS):
                for r in range(W):
                    at = (w, r if row_state else 0)  # l_reg and m_reg are scalars of the warp
                    s = scale * K_j @ Q_i[w * W + r]
                    m_new = max(m[at], s.max()) if not np.isnan(s).any() else np.nan
                    p, alpha = np.exp(s - m_new), np.exp(m[at] - m_new)
                    o[w, r] = alpha * o[w, r] + p @ V_j
                    l[at] = alpha * l[at] + p.sum()
                    m[at] = m_new
        rows = (o / (l if row_state else l[:, :1])[..., None]).reshape(Br, d)
        keep = min(Br, N - i * Br) if bounds else min(Br, len(out) - first)
        out[first : first + keep] = rows[:keep]
    return out.reshape(B, H, N, d)


REPAIRS = {"scale": "scaled", "row state": "row_state", "head offset": "head_offset", "bounds": "bounds"}


def mended_skeleton(Q, K, V, Br, Bc):
    return skeleton(Q, K, V, Br, Bc, **dict.fromkeys(REPAIRS.values(), True))


@claim(
    "18.5-090", section="18.5.1", where="Listing 2", kind="listing",
    title_en="Skeleton of the v2 forward kernel", title_zh="Kernel 伪代码",
    paraphrase="A block loops over key tiles; each warp keeps m and l in a register and accumulates its rows "
    "of O.",
    stated=everywhere(), verdict="wrong", severity=3, mended=lambda: judge_forward(mended_skeleton)[0],
    right="Four faults, each enough alone: scores are not scaled by 1/sqrt(d); one m and one l serve all "
    "rows of a warp instead of one a row; K and V have no batch and head offset, so that every head attends "
    "to the first one's keys; the ragged last tile brings rows that do not exist. With all four repaired it "
    "passes everywhere.",
)
def skeleton_listing():
    verdicts, _ = judge_forward(skeleton)
    told = []
    for fault, flag in REPAIRS.items():
        others = {name: name != flag for name in REPAIRS.values()}
        ok, _ = judge_forward(lambda *a, o=others: skeleton(*a, **o))
        told.append(
            f"with only the {fault} fault left it fails on: "
            f"{', '.join((n for n, good in ok.items() if not good))}"
        )
    return Truth(verdicts, "; ".join(told))


@claim(
    "18.5-091", section="18.5.1", where="Listing 2", kind="number",
    title_en="Index into the score registers", title_zh="S 数组",
    paraphrase="A thread declares S[Br Bc / blockDim.x] and reads S[i Bc + col] for i < Br / num_warps, col "
    "< Bc.",
    stated={"largest index": 128 * 128 // 128 - 1}, unit="elements at Br = Bc = 128, 4 warps", tol=0,
    verdict="wrong", severity=3,
    right="The index goes to Br Bc / num_warps - 1, 32 times beyond the array: a warp's share of S is "
    "treated as one thread's.",
)
def s_index():
    Br = Bc = 128
    reached = max(i * Bc + col for i in range(Br // WARPS) for col in (0, Bc - 1))
    return Truth({"largest index": reached}, f"array of {Br * Bc // (32 * WARPS)}, index up to {reached}")


@claim(
    "18.5-096", section="18.5.1", where="Listing 2", kind="number",
    title_en="First row of a warp", title_zh="row_offset",
    paraphrase="Warp w starts at row w (Br / blockDim.x * 32), in integers.",
    stated={"Br=128": 128 // 128 * 32, "Br=64": 64 // 128 * 32, "Br=192": 192 // 128 * 32},
    unit="row of warp 1, 128 threads", tol=0, verdict="wrong", severity=3,
    right="w (Br / num_warps). The integer quotient Br / blockDim.x is 0 for Br < 128 threads, so that all "
    "warps start at row 0, and loses the remainder for Br = 192. Divide last: w Br * 32 / blockDim.x.",
)
def warp_row():
    return Truth({f"Br={Br}": Br // WARPS for Br in (128, 64, 192)}, "Br rows shared evenly by 4 warps")


def tiled(Q, K, V, *, Br, Bc, steps, hidden, bounds):
    """One head: Q tiles outside, `steps(q_start)` key tiles inside, `hidden(rows, cols, last)` masked.

    Without `bounds` a key tile is read in full; what lies past the array is NaN.
    """
    N, d = Q.shape
    out = np.empty((cdiv(N, Br) * Br, d))
    for q_start in range(0, N, Br):
        Q_i = read_rows(Q, q_start, Br)
        m, l, o = np.full((Br, 1), -np.inf), np.zeros((Br, 1)), np.zeros((Br, d))
        last = steps(q_start) - 1
        for j in range(last + 1):
            count = min(Bc, len(K) - j * Bc) if bounds else Bc
            if count <= 0:
                break
            K_j, V_j = (read_rows(x, j * Bc, count) for x in (K, V))
            S = Q_i @ K_j.T * d**-0.5
            rows, cols = np.arange(q_start, q_start + Br)[:, None], np.arange(j * Bc, j * Bc + count)
            S = np.where(hidden(rows, cols, j == last), -np.inf, S)
            m_new = np.maximum(m, S.max(1, keepdims=True))
            alpha, P = np.exp(m - m_new), np.exp(S - m_new)
            l = alpha * l + P.sum(1, keepdims=True)
            o = alpha * o + P @ V_j
            m = m_new
        out[q_start : q_start + Br] = o / l
    return out[:N]


def heads(function):
    """A listing for one head as a function of (B, H, N, d) arrays and the tile sizes."""
    return lambda Q, K, V, Br, Bc: per_head(function, 1)(Q, K, V, Br=Br, Bc=Bc)


def nothing_hidden(rows, cols, last):
    return np.zeros(np.broadcast(rows, cols).shape, bool)


def last_tile_masked(rows, cols, last):
    return (cols > rows) & last


def all_tiles_masked(rows, cols, last):
    return cols > rows


def mended_plain(Q, K, V, *, Br, Bc):
    return tiled(Q, K, V, Br=Br, Bc=Bc, steps=lambda q: cdiv(len(K), Bc), hidden=nothing_hidden, bounds=True)


def mended_causal(Q, K, V, *, Br, Bc):
    def steps(q_start):
        return min(cdiv(len(K), Bc), cdiv(q_start + Br, Bc))

    return tiled(Q, K, V, Br=Br, Bc=Bc, steps=steps, hidden=all_tiles_masked, bounds=True)


@claim(
    "18.5-092", section="18.5.2", where="Listing 3", kind="listing",
    title_en="Loop bound of the non-causal branch", title_zh="max_col_block",
    paraphrase="Without a mask the loop runs over N / Bc tiles.",
    stated=everywhere(), verdict="wrong", severity=3, mended=lambda: judge_forward(heads(mended_plain))[0],
    right="ceil(N / Bc), with the last tile cut at N. The integer quotient drops the ragged tile: its keys "
    "are ignored (and with N < Bc there is no tile at all).",
)
def floor_bound():
    def listing(Q, K, V, *, Br, Bc):
        return tiled(Q, K, V, Br=Br, Bc=Bc, steps=lambda q: len(K) // Bc, hidden=nothing_hidden, bounds=False)

    return Truth(*judge_forward(heads(listing)))


@claim(
    "18.5-093", section="18.5.2", where="Listing 3", kind="listing",
    title_en="Causal forward of v2", title_zh="前向因果算法",
    paraphrase="Key tiles up to (q_start + Br + Bc - 1) / Bc are visited; the causal mask is applied in the "
    "last of them.",
    stated=everywhere(CAUSAL), verdict="wrong", severity=3,
    mended=lambda: judge_forward(heads(mended_causal), CAUSAL)[0],
    right="Two faults. When Br > Bc, or the tiles are not aligned, several tiles straddle the diagonal and "
    "only the last is masked: rows see the future. And the bound lacks the minimum with ceil(N / Bc): the "
    "last row block of a ragged N reads tiles that do not exist.",
)
def causal_listing():
    def listing(Q, K, V, *, Br, Bc):
        def steps(q_start):
            return (q_start + Br + Bc - 1) // Bc

        return tiled(Q, K, V, Br=Br, Bc=Bc, steps=steps, hidden=last_tile_masked, bounds=False)

    return Truth(*judge_forward(heads(listing), CAUSAL))


@claim(
    "18.5-094", section="18.5.2", where="Listing 5", kind="listing",
    title_en="Unified kernel, causal", title_zh="统一 Kernel 模板 (IsCausal=true)",
    paraphrase="Tc is the minimum of ceil(N / Bc) and ceil((q_start + Br) / Bc); the partial mask runs only "
    "at j = Tc - 1.",
    stated=everywhere(CAUSAL), verdict="wrong", severity=3,
    mended=lambda: judge_forward(heads(mended_causal), CAUSAL)[0],
    right="The bound is right now. The mask is still applied to one tile only: with Br > Bc, or tiles that "
    "are not aligned, rows attend to keys in their future. Mask every tile with (j + 1) Bc - 1 > q_start.",
)
def unified_causal():
    def listing(Q, K, V, *, Br, Bc):
        def steps(q_start):
            return min(cdiv(len(K), Bc), cdiv(q_start + Br, Bc))

        return tiled(Q, K, V, Br=Br, Bc=Bc, steps=steps, hidden=last_tile_masked, bounds=True)

    return Truth(*judge_forward(heads(listing), CAUSAL))


@claim(
    "18.5-095", section="18.5.2", where="Listing 5", kind="listing",
    title_en="Unified kernel, non-causal", title_zh="统一 Kernel 模板 (IsCausal=false)",
    paraphrase="All ceil(N / Bc) tiles are loaded in full; no mask code is compiled in.",
    stated=everywhere(), verdict="wrong", severity=3, mended=lambda: judge_forward(heads(mended_plain))[0],
    right="Right when Bc divides N. Otherwise the last tile holds rows past the end and nothing masks them: "
    "the claim of no masking overhead holds for exact multiples only. Give the last tile a bound "
    "(flash-attn: Is_even_MN).",
)
def unified_plain():
    def listing(Q, K, V, *, Br, Bc):
        return tiled(
            Q, K, V, Br=Br, Bc=Bc, steps=lambda q: cdiv(len(K), Bc), hidden=nothing_hidden, bounds=False
        )

    return Truth(*judge_forward(heads(listing)))
