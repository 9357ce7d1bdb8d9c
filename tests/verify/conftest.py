"""A small tiled kernel in NumPy with switches for bugs: the judge is tested on kernels whose faults are known."""

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from verify.cases import DEFAULT
from verify.judge import reference, verdict
from verify.tolerance import FACTOR

sys.path.insert(0, str(Path(__file__).parent))  # helpers_*, for this folder's tests

F = np.float32
TILE = 16

BUGS = {
    "no_rescale": "O_acc is not rescaled when the maximum grows",
    "l_not_rescaled": "l is not rescaled when the maximum grows",
    "inverse_rescale": "alpha is exp(m_new - m)",
    "rescale_by_tile_max": "alpha takes the tile's maximum for the running one",
    "last_ragged_tile_dropped": "Nk // Bc key tiles instead of rounding up",
    "padding_keys_counted": "keys past the end score 0 instead of -inf",
    "last_rows_unwritten": "Nq // Br query tiles are written",
    "diagonal_off_by_one": "a query does not see its own key",
    "diagonal_too_far": "a query sees the next key",
    "causal_ignored": "nothing is masked",
    "aligned_top_left": "bottom_right is taken for top_left",
    "dead_tile_rounding": "the last live tile is skipped when the diagonal ends inside it",
    "lse_base_2": "lse is log2",
    "lse_without_max": "m is not added back",
    "lse_before_last_tile": "lse is from the state one tile before the end",
    "exp2_without_log2e": "exp2 is fed natural-log scores",
    "one_nan": "one element of O is NaN",
    "one_inf": "one element of O is inf",
    "one_element": "one element of O is off by 3 %",
    "sign_flip": "the score of one channel is subtracted",
    "scale_forgotten": "scores are not scaled",
    "scale_of_padded_d": "the scale is that of d rounded up to 16",
    "scale_of_dv": "the scale is 1/sqrt(dv)",
    "wrong_head_stride": "head h reads the rows of head h + 1 of Q",
    "wrong_batch_stride": "every batch reads the keys of batch 0",
    "heads_tiled": "head h uses key head h % Hk",
    "no_max": "exp is taken of raw scores",
    "max_starts_at_0": "the running maximum starts at 0",
    "max_starts_at_-5e4": "the running maximum starts at -5e4",
    "max_starts_at_-65504": "the running maximum starts at fp16's lowest",
    "mask_is_-1e4": "hidden keys score -1e4",
    "max_of_unscaled": "the maximum is taken before a negative scale turns it into a minimum",
    "empty_row_is_nan": "0 / 0 in rows that see no key",
    "empty_row_is_mean": "rows that see no key average all values",
    "no_division": "O is not divided by l",
    "divides_each_tile": "O_acc is divided by l after every tile, and rescaled as if it were not",
    "stale_V": "the last tile's V is used for the next",
    "stale_K": "one key of a tile is the previous tile's",
    "head_dim_tail_dropped": "only whole groups of four channels enter the scores",
    "dv_cut_to_d": "only d columns of V are used",
    "strides_ignored": "a view is read as if it were contiguous",
    "half_scores": "scores are rounded to fp16 before scaling",
    "half_sums": "O_acc is kept in fp16",
    "rounded_P": "weights are rounded to bf16, whatever the storage type",
    "nan_leaks": "a hidden key's weight of 0 multiplies its NaN",
    "nan_swallowed": "NaN is written as 0",
    "ties_broken": "of equal scores in a row only the first counts",
    "modifies_input": "V is scaled in place",
    "log2e_truncated": "1.442694 for log2(e): the last digit of seven is wrong",
    "exp2_of_degree_4": "exp2 is a polynomial of degree 4 on half-unit intervals",
}

LOG2_E = F(np.log2(np.e))
# The interpolant in Chebyshev's points on [-1/2, 1/2]: relative error 2e-6.
POLYNOMIAL = np.polynomial.Chebyshev.interpolate(np.exp2, 4, [-0.5, 0.5]).convert(kind=np.polynomial.Polynomial)


def exp(x, bug):
    """exp of fp32 numbers, or what a bug makes of it."""
    if bug == "log2e_truncated":
        return np.exp2(x * F(1.442694))
    if bug == "exp2_of_degree_4":
        y = np.maximum(x * LOG2_E, F(-150))
        whole = np.rint(y)
        return np.ldexp(POLYNOMIAL(y - whole).astype(F), whole.astype(int)).astype(F)
    return np.exp2(x) if bug == "exp2_without_log2e" else np.exp(x)


def kernel(bug=None, tile=TILE):
    """Return attention(Q, K, V, *, scale, causal, align) in fp32 with one bug, or none, built in."""
    assert bug is None or bug in BUGS

    def is_(*names):
        return bug in names

    def attention(Q, K, V, *, scale=None, causal=False, align="bottom_right"):
        stored = Q.dtype
        if is_("strides_ignored"):
            Q, K, V = (_as_if_contiguous(x) for x in (Q, K, V))
        B, Hq, Nq, d = Q.shape
        Hk, Nk, dv = K.shape[1], K.shape[2], V.shape[3]
        d_scale = {"scale_of_padded_d": -(-d // 16) * 16, "scale_of_dv": dv}.get(bug, d)
        scale = 1 / np.sqrt(d_scale) if scale is None else scale
        scale = F(1 if is_("scale_forgotten") else scale)
        diag = Nk - Nq if align == "bottom_right" and not is_("aligned_top_left") else 0
        diag += {"diagonal_off_by_one": -1, "diagonal_too_far": 1}.get(bug, 0)
        O = np.full((B, Hq, Nq, dv), np.nan, stored)
        lse = np.full((B, Hq, Nq), np.nan, F)
        for b in range(B):
            for h in range(Hq):
                h_k = h % Hk if is_("heads_tiled") else h // (Hq // Hk)
                q = Q[b, (h + 1) % Hq if is_("wrong_head_stride") else h]
                k = K[0 if is_("wrong_batch_stride") else b, h_k]
                head(q, k, V[b, h_k], O[b, h], lse[b, h], scale, causal and not is_("causal_ignored"), diag)
        if is_("one_nan", "one_inf", "one_element") and O.size:
            at = tuple(n // 2 for n in O.shape)
            O[at] = {"one_nan": np.nan, "one_inf": np.inf}.get(bug, O[at] * stored.type(1.03))
        if is_("nan_swallowed"):
            O[np.isnan(O)], lse[np.isnan(lse)] = 0, 0
        if is_("modifies_input") and V.flags.writeable:
            V *= stored.type(2)
        return O, lse

    def head(Q, K, V, O, lse, scale, causal, diag):
        stored, (Nq, d), (Nk, dv) = O.dtype, Q.shape, V.shape
        Q, K, V = (x.astype(F) for x in (Q, K, V))
        first = {"max_starts_at_0": 0, "max_starts_at_-5e4": -5e4, "max_starts_at_-65504": -65504}.get(bug, -np.inf)
        wide = d - d % 4 if is_("head_dim_tail_dropped") else d
        for r in range(0, Nq, tile):
            rows = np.arange(r, min(r + tile, Nq))
            m = np.full(len(rows), first, F)
            l, O_acc, early = np.zeros(len(rows), F), np.zeros((len(rows), dv), F), None
            stops = range(0, Nk - Nk % tile if is_("last_ragged_tile_dropped") else Nk, tile)
            if causal and is_("dead_tile_rounding"):
                stops = range(0, max(0, (rows[-1] + diag + 1) // tile * tile), tile)
            for c in stops:
                cols = np.arange(c, min(c + tile, Nk))
                K_j, V_j = K[cols], V[cols]
                if is_("stale_V") and c:
                    V_j = V[cols - tile]
                if is_("stale_K") and c:
                    K_j = np.concatenate([K[c - 1 : c], K_j[1:]])
                s = Q[rows, :wide] @ K_j[:, :wide].T
                if is_("sign_flip"):
                    s = s - 2 * Q[rows, :1] @ K_j[:, :1].T
                if is_("half_scores"):
                    s = s.astype(np.float16).astype(F)
                raw, s = s, s * scale
                seen = cols <= rows[:, None] + diag if causal else np.ones(s.shape, bool)
                hidden = F(-1e4 if is_("mask_is_-1e4") else -np.inf)
                s = np.where(seen, s, hidden)
                if is_("ties_broken"):
                    again = [[x in line[:i] for i, x in enumerate(line)] for line in s.tolist()]
                    s = np.where(np.array(again).reshape(s.shape), -np.inf, s)
                if is_("padding_keys_counted"):
                    pad = np.zeros((len(rows), tile - len(cols)), F)
                    s, seen = np.hstack([s, pad]), np.hstack([seen, pad == 0])
                    V_j = np.vstack([V_j, np.zeros((tile - len(cols), dv), F)])
                top = np.where(seen, raw * abs(scale), -np.inf) if is_("max_of_unscaled") else s
                m_tile = top.max(axis=1)
                m_new = np.maximum(m, m_tile)
                pivot = np.where(np.isneginf(m_new), F(0), m_new)
                if is_("no_max"):
                    pivot, m_new = np.zeros_like(pivot), np.zeros_like(m_new)
                alpha = exp(
                    m - (np.where(np.isneginf(m_tile), 0, m_tile) if is_("rescale_by_tile_max") else pivot), bug
                )
                if is_("inverse_rescale"):
                    alpha = np.where(np.isneginf(m), 0, np.exp(np.minimum(pivot - m, 80)))
                p = exp(s - pivot[:, None], bug)
                if is_("rounded_P"):
                    p = p.astype("bfloat16").astype(F)
                early = (m, l)
                l = (l if is_("l_not_rescaled") else alpha * l) + p.sum(axis=1, dtype=F)
                if not is_("nan_leaks"):
                    p = np.where(seen, p, 0)
                    V_rows = [np.where(seen[:, j, None], V_j[j], 0) for j in range(len(V_j))]
                    product = sum((p[:, j, None] * V_rows[j] for j in range(len(V_j))), np.zeros_like(O_acc))
                else:
                    product = p @ V_j
                O_acc = (O_acc if is_("no_rescale") else alpha[:, None] * O_acc) + product
                if is_("dv_cut_to_d"):
                    O_acc[:, d:] = 0
                if is_("divides_each_tile"):
                    O_acc = O_acc / np.where(l == 0, 1, l)[:, None]
                if is_("half_sums"):
                    O_acc = O_acc.astype(np.float16).astype(F)
                m = m_new
            empty = np.isneginf(m) if np.isneginf(first) else l == 0
            safe_l = np.where(empty, 1, l)[:, None]
            out = O_acc if is_("no_division", "divides_each_tile") else O_acc / safe_l
            out = np.where(empty[:, None], 0, out)
            if is_("empty_row_is_nan"):
                out = O_acc / l[:, None]
            if is_("empty_row_is_mean") and Nk:
                out = np.where(empty[:, None], V.mean(axis=0), out)
            if is_("last_rows_unwritten") and r + tile > Nq:
                continue
            O[rows] = out.astype(stored)
            if is_("lse_before_last_tile") and early:
                m, l = early
            value = np.log(l) if is_("lse_without_max") else m + np.log(l)
            lse[rows] = np.where(empty, -np.inf, value * (F(np.log2(np.e)) if is_("lse_base_2") else 1))

    def quiet(*args, **kwargs):
        with np.errstate(all="ignore"):
            return attention(*args, **kwargs)

    return quiet


def _as_if_contiguous(x):
    """The first elements of the buffer that x is a view of, in x's shape."""
    flat = x
    while flat.base is not None and isinstance(flat.base, np.ndarray):
        flat = flat.base
    flat = flat.ravel()
    return np.resize(flat, x.size).reshape(x.shape)


@cache
def problem_and_reference(case, dtype):
    """Inputs and anchors of a default case, once for all faults."""
    problem = DEFAULT[case].build(dtype)
    return problem, reference(problem)


def fails(kernel, case, dtype="fp32", factor=FACTOR):
    """Whether a kernel fails a default case at its small shape."""
    problem, known = problem_and_reference(case, dtype)
    Q, K, V = (np.copy(x) if x.flags.c_contiguous else x for x in (problem.Q, problem.K, problem.V))
    fresh = replace(problem, Q=Q, K=K, V=V)
    before = [x.tobytes() for x in (Q, K, V)]
    O, lse = kernel(Q, K, V, **problem.options)
    facts = {"kernel": "faulty", "executor": "numpy", "device": "CPU", "tile": None, "seconds": 0.0}
    found = verdict(fresh, {"O": O, "lse": lse}, known=known, before=before, factor=factor, **facts)
    return found.verdict == "fail"


@pytest.fixture(scope="session")
def faulty():
    """`faulty.kernel(bug=None, tile=16)`, `faulty.BUGS`, and `faulty.fails(kernel, case, dtype, factor)`."""
    return SimpleNamespace(kernel=kernel, BUGS=BUGS, fails=fails)
