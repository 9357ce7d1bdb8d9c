"""The listings of section 18.8: the sparse inner loop, split decoding and its merge, run against fp64."""

import numpy as np

from refimpl import oracle
from refimpl.tiling import cdiv
from verify.claims.ledger import Cases, Truth, claim
from verify.claims.trial import make

N, B, d = 96, 16, 8


def patterns():
    """Name -> element mask (N, N): what the kernel is asked to compute."""
    i, j = np.indices((N, N))
    return {
        "whole tiles": np.abs(i // B - j // B) <= 1,
        "window edge inside a tile": np.abs(i - j) <= 20,
        "causal window": (j <= i) & (i - j <= 20),
        "a row of tiles without keys": (np.abs(i // B - j // B) <= 1) & (i // B != 2),
    }


def active(mask):
    """Tile lists: every tile with at least one visible pair."""
    return [
        [j for j in range(N // B) if mask[i * B : i * B + B, j * B : j * B + B].any()] for i in range(N // B)
    ]


def sparse(Q, K, V, mask, *, scaled, element_mask, guarded):
    """The inner loop over active tiles; P is read as the exponentials of S, which the listing never computes."""
    out = np.empty_like(Q)
    for i, tiles in enumerate(active(mask)):
        rows = slice(i * B, i * B + B)
        m, l, o = np.full((B, 1), -np.inf), np.zeros((B, 1)), np.zeros((B, d))
        for j in tiles:
            cols = slice(j * B, j * B + B)
            S = Q[rows] @ K[cols].T * (d**-0.5 if scaled else 1.0)
            if element_mask:
                S = np.where(mask[rows, cols], S, -np.inf)
            m_new = np.maximum(m, S.max(1, keepdims=True))
            safe = np.where(np.isinf(m_new), 0, m_new)
            alpha, P = np.exp(m - safe), np.exp(S - safe)
            l, o, m = alpha * l + P.sum(1, keepdims=True), alpha * o + P @ V[cols], m_new
        out[rows] = np.where(l > 0, o / np.where(l > 0, l, 1), 0) if guarded else o / l
    return out


def judge_sparse(**how):
    t = make(1890, Nq=N, d=d)
    verdicts, told = {}, []
    for name, mask in patterns().items():
        want = oracle.attention(t.Q, t.K, t.V, mask=mask)[0][0, 0]
        with np.errstate(all="ignore"):
            got = sparse(t.Q[0, 0], t.K[0, 0], t.V[0, 0], mask, **how)
        error = float(np.abs(got - want).max())
        verdicts[name] = error <= 1e-9
        told.append(f"{name}: {error:.1e}")
    return verdicts, "; ".join(told)


@claim(
    "18.8-090", section="18.8.1", where="Listing 1", kind="listing",
    title_en="Sparse inner loop", title_zh="Sparse inner loop",
    paraphrase="For each query tile only the listed key tiles are loaded, multiplied and merged; O is "
    "divided by l at the end.",
    stated=dict.fromkeys(patterns(), True), verdict="wrong", severity=3,
    mended=lambda: judge_sparse(scaled=True, element_mask=True, guarded=True)[0],
    right="Right for patterns made of whole tiles, once the scale stands in the code and not in a comment "
    "and P is computed (it appears undefined). Pairs masked inside an active tile are attended to, and a "
    "row without keys is 0 / 0 = NaN.",
)
def sparse_loop():
    _, bare = judge_sparse(scaled=False, element_mask=False, guarded=False)
    verdicts, told = judge_sparse(scaled=True, element_mask=False, guarded=False)
    return Truth(verdicts, f"with the comment's scale applied: {told}. Without it: {bare}")


@claim(
    "18.8-091", section="18.8.1", where="text", kind="formula",
    title_en="Skipping a tile equals filling it with minus infinity", title_zh="跳过的块贡献零",
    paraphrase="Tiles that are skipped contribute nothing, exactly as scores of -inf would.",
    stated={"whole tiles": True}, verdict="confirmed",
)
def skip_equals_mask():
    verdicts, _ = judge_sparse(scaled=True, element_mask=False, guarded=False)
    return Truth(
        {"whole tiles": verdicts["whole tiles"]}, "the oracle with a mask against the loop over listed tiles"
    )


CACHES = {"one split": (64, 64), "four splits": (256, 64), "ragged cache": (250, 64), "peaked": (256, 64)}


def decode(q, K, V, per_split, *, Bc=16, scaled, bounded, normalised=False):
    """Two steps: partial (m, l, O) a split, then the merge. `normalised` stores O / l instead of O."""
    parts = []
    for start in range(0, cdiv(len(K), per_split) * per_split, per_split):
        m, l, o = -np.inf, 0.0, np.zeros(d)
        for j in range(start, start + per_split, Bc):
            rows = slice(j, min(j + Bc, len(K)) if bounded else j + Bc)
            pad = 0 if bounded else max(0, j + Bc - len(K))
            K_j = np.concatenate([K[rows], np.full((min(pad, Bc), d), np.nan)])
            V_j = np.concatenate([V[rows], np.full((min(pad, Bc), d), np.nan)])
            if not len(K_j):
                continue
            s = K_j @ q * (d**-0.5 if scaled else 1.0)
            m_new = max(m, s.max()) if not np.isnan(s).any() else np.nan
            p, alpha = np.exp(s - m_new), np.exp(m - m_new)
            l, o, m = alpha * l + p.sum(), alpha * o + p @ V_j, m_new
        parts.append((m, l, o / l if normalised else o))
    top = max(m for m, _, _ in parts) if not any(np.isnan(m) for m, _, _ in parts) else np.nan
    weights = [np.exp(m - top) for m, _, _ in parts]
    total = sum(l * w for (_, l, _), w in zip(parts, weights, strict=True))
    return sum(o * w for (_, _, o), w in zip(parts, weights, strict=True)) / total


def judge_decode(**how):
    verdicts, told = {}, []
    for name, (n, split) in CACHES.items():
        t = make(1891, Nq=1, Nk=n, d=d, gain=40.0 if name == "peaked" else 1.0)
        want = oracle.attention(t.Q, t.K, t.V)[0][0, 0, 0]
        with np.errstate(all="ignore"):
            got = decode(t.Q[0, 0, 0], t.K[0, 0], t.V[0, 0], split, **how)
        error = float(np.abs(got - want).max())
        verdicts[name] = error <= 1e-9
        told.append(f"{name}: {error:.1e}")
    return verdicts, "; ".join(told)


@claim(
    "18.8-092", section="18.8.2", where="Listing 2", kind="listing",
    title_en="Split decoding and merge", title_zh="FlashDecoding",
    paraphrase="Each block keeps m, l and O for its slice of the cache; a second kernel rescales by exp(m - "
    "max m), adds, divides.",
    stated=dict.fromkeys(CACHES, True), verdict="depends", severity=2,
    mended=lambda: judge_decode(scaled=True, bounded=True)[0],
    right="The merge is right. The scores lack 1/sqrt(d) unless the query comes scaled, and the last tile "
    "of a ragged cache is read past its end. Scale q once; cut the last tile.",
)
def split_listing():
    bare, _ = judge_decode(scaled=False, bounded=False)
    scaled, told = judge_decode(scaled=True, bounded=False)
    whole = {**scaled, "ragged cache": judge_decode(scaled=True, bounded=True)[0]["ragged cache"]}
    return Cases(
        {
            "as printed": bare,
            "query scaled beforehand": scaled,
            "scaled, length a multiple of the tile (no ragged cache)": whole,
        },
        told,
    )


@claim(
    "18.8-093", section="18.8.2", where="Formula", kind="formula",
    title_en="Merge formula", title_zh="归约合并",
    paraphrase="O = sum of O_t exp(m_t - m) over sum of l_t exp(m_t - m), with O_t the local output.",
    stated={"four splits": True, "peaked": True}, verdict="depends", severity=3,
    right="With unnormalised O_t, as in the listing. If O_t is the local attention output O_t / l_t (what "
    "kernels store, next to lse_t), each term needs the factor l_t as well: weights exp(lse_t - lse).",
)
def merge_formula():
    keys = ("four splits", "peaked")
    raw, _ = judge_decode(scaled=True, bounded=True)
    norm, told = judge_decode(scaled=True, bounded=True, normalised=True)
    return Cases(
        {"O_t unnormalised": {k: raw[k] for k in keys}, "O_t normalised": {k: norm[k] for k in keys}},
        f"with normalised O_t: {told}",
    )
