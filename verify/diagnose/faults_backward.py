"""Faults of the backward pass: D, scales, options forgotten on the way back, sums over heads and tiles."""

import numpy as np

from verify.diagnose.fault import fault
from verify.diagnose.gradients import Gradients

BACK = "18.4.4"
HEADS_OF_SUM = "which query heads are added up"


@fault("D_missing", "D left out of dS, l taken for a constant", BACK, "dS = P (dP - D)")
class _(Gradients):
    def d_scores(self, P, dP, D):
        return P * dP


@fault("D_sign", "D added instead of subtracted", BACK, "dS = P (dP - D)")
class _(Gradients):
    def d_scores(self, P, dP, D):
        return super().d_scores(P, dP, -D)


@fault("D_per_tile", "D summed over one key tile instead of the row", BACK, "D = rowsum(dO O), once for a row")
class _(Gradients):
    backward_tiled = tiled = "Bc"

    def row_sums(self, dO, O, P, dP):
        D = np.zeros_like(P)
        for cols in self.key_tiles():
            D[..., cols] = (P[..., cols] * dP[..., cols]).sum(-1, keepdims=True)
        return D


@fault("D_of_dO", "D = rowsum(dO dO)", BACK, "D = rowsum(dO O)")
class _(Gradients):
    def row_sums(self, dO, O, P, dP):
        return (dO * dO).sum(-1)


@fault("D_of_P", "D = rowsum(dP), without the weights", BACK, "D = rowsum(P dP)")
class _(Gradients):
    def row_sums(self, dO, O, P, dP):
        return dP.sum(-1)


@fault("dS_without_P", "dS = dP - D, without P", BACK, "dS = P (dP - D)")
class _(Gradients):
    def d_scores(self, P, dP, D):
        return np.where(P > 0, 1.0, 0.0) * super().d_scores(np.ones_like(P), dP, D)


for _side, _power, _says in (
    ("q", 0, "missing in"),
    ("q", 2, "applied twice to"),
    ("k", 0, "missing in"),
    ("k", 2, "applied twice to"),
):
    _name = f"scale_{'missing' if _power == 0 else 'squared'}_in_d{_side.upper()}"

    @fault(_name, f"the scale {_says} d{_side.upper()}", BACK, f"the factor of d{_side.upper()}")
    class _(Gradients):
        SIDE, POWER = _side, _power

        def scale_q(self):
            return self.scale() ** (self.POWER if self.SIDE == "q" else 1)

        def scale_k(self):
            return self.scale() ** (self.POWER if self.SIDE == "k" else 1)


for _power, _says in ((0, "missing in"), (2, "applied twice to")):

    @fault(
        f"scale_{'missing' if _power == 0 else 'squared'}_in_dQ_dK",
        f"the scale {_says} dQ and dK",
        BACK,
        "the factor of dS",
    )
    class _(Gradients):
        POWER = _power

        def scale_q(self):
            return self.scale() ** self.POWER

        def scale_k(self):
            return self.scale() ** self.POWER


for _name, _sides, _look in (("dQ", "q", "the factor of dQ"), ("dK", "k", "the factor of dK"),
                             ("dQ_dK", "qk", "the factor of dS")):  # fmt: skip

    _where = _name.replace("_", " and ")

    @fault(f"scale_ignored_in_{_name}", f"1 / sqrt(d) in {_where} whatever the scale", BACK, _look)
    class _(Gradients):
        SIDES = _sides

        def scale_q(self):
            return self.d**-0.5 if "q" in self.SIDES else self.scale()

        def scale_k(self):
            return self.d**-0.5 if "k" in self.SIDES else self.scale()


class _OtherScores(Gradients):
    """The weights recomputed from other scores than the forward's."""

    def score(self):
        return 1.0

    def recomputed(self, S, lse):
        return super().recomputed(S * self.score(), lse)


@fault("scale_missing_in_P", "the scale missing where P is recomputed", BACK, "the scores of the backward pass")
class _(_OtherScores):
    def score(self):
        return 1 / self.scale()


@fault("P_base_2", "2^x of natural scores where P is recomputed", BACK, "which exp the backward calls")
class _(Gradients):
    def recomputed(self, S, lse):
        return self.exp(np.log(2) * (S - np.where(np.isneginf(lse), 0, lse)[..., None]))


@fault("lse_taken_for_base_2", "lse taken for log2 units where P is recomputed", BACK, "the unit of lse")
class _(Gradients):
    def recomputed(self, S, lse):
        return super().recomputed(S, lse * np.log(2))


@fault("lse_in_log2_units", "lse in log2 units beside natural scores where P is recomputed", BACK, "the unit of lse")
class _(Gradients):
    def recomputed(self, S, lse):
        return super().recomputed(S, lse * np.log2(np.e))


@fault("P_not_normalised", "P recomputed without l", BACK, "lse, or m and l, where P is recomputed")
class _(Gradients):
    def lse(self, S):
        return S.max(-1, initial=-np.inf)


@fault("dV_not_normalised", "dV from weights without l", BACK, "the weights in dV")
class _(Gradients):
    def values_weights(self, P, S):
        return self.exp(S - np.where(np.isneginf(m := S.max(-1, initial=-np.inf)), 0, m)[..., None])


@fault("dV_of_dS", "dS in the place of P in dV", BACK, "dV = P^T dO")
class _(Gradients):
    def backward(self):
        out = super().backward()
        return out | {"dV": self.to_heads(self.sum_over_rows(self.kept_dS, self.probe.dO.astype(np.float64)))}

    def d_scores(self, P, dP, D):
        self.kept_dS = super().d_scores(P, dP, D)
        return self.kept_dS


@fault(
    "dQ_dK_exchanged",
    "dS transposed: Q's and K's gradients from each other's sums",
    BACK,
    "which product sums over rows",
)
class _(Gradients):
    def backward(self):
        out = super().backward()
        same = out["dQ"].shape == out["dK"].shape
        return out | {"dQ": out["dK"], "dK": out["dQ"]} if same else out


@fault("group_not_summed", "dK and dV of the last query head of a group only", BACK, "the sum over query heads", "gqa")
class _(Gradients):
    def to_heads(self, x):
        return x[:, self.group - 1 :: self.group]


@fault("group_not_summed", "dK and dV of the first query head of a group only", BACK, "the sum over query heads", "gqa")
class _(Gradients):
    def to_heads(self, x):
        return x[:, :: self.group]


@fault("group_averaged", "dK and dV averaged over the query heads of a group", BACK, "the sum over query heads", "gqa")
class _(Gradients):
    def to_heads(self, x):
        return super().to_heads(x) / self.group


@fault(
    "heads_modulo_in_backward", "key head h % Hk in the backward pass", BACK, "which key head a query head reads", "gqa"
)
class _(Gradients):
    def key_head(self):
        return np.arange(self.Hq) % self.Hk


@fault("heads_modulo_in_sums", "dK and dV added up over h % Hk", BACK, "the sum over query heads", "gqa")
class _(Gradients):
    def to_heads(self, x):
        return x.reshape(self.B, self.group, self.Hk, *x.shape[2:]).sum(1)


@fault(
    "heads_modulo_in_sums", "dK and dV computed for query heads h % Hk, dQ as it should be", BACK, HEADS_OF_SUM, "gqa"
)
class _(Gradients):
    """As a kernel of its own for dK and dV has it, which computes P for the query heads that it adds up."""

    def key_head(self):
        return np.arange(self.Hq) % self.Hk if self.wrong else super().key_head()

    def backward(self):
        self.wrong = False
        right = super().backward()
        self.wrong = True
        return super().backward() | {"dQ": right["dQ"]}

    wrong = False


class _Parts(Gradients):
    backward_tiled = tiled = "Bc"

    def part(self, n, which):
        """All but, or only, the last (ragged) tile along an axis of length n."""
        Bc = self.tiling.Bc
        return {"whole": slice(0, n // Bc * Bc), "last": slice(max(0, -(-n // Bc) - 1) * Bc, n)}[which]


@fault("dQ_of_last_tile", "dQ only of the last key tile", BACK, "whether dQ is added to, or assigned")
class _(_Parts):
    def sum_over_keys(self, dS, K):
        cols = self.part(self.Nk, "last")
        return dS[..., cols] @ K[:, :, cols]


@fault(
    "ragged_keys_missing_in_dQ", "the last, ragged key tile missing in dQ", BACK, "the bound of the loop over key tiles"
)
class _(_Parts):
    def sum_over_keys(self, dS, K):
        cols = self.part(self.Nk, "whole")
        return dS[..., cols] @ K[:, :, cols]


@fault("dK_dV_of_last_tile", "dK and dV only of the last query tile", BACK, "whether dK, dV are added to, or assigned")
class _(_Parts):
    def sum_over_rows(self, X, Y):
        rows = self.part(self.Nq, "last")
        return X[:, :, rows].swapaxes(-1, -2) @ Y[:, :, rows]


@fault(
    "ragged_rows_missing_in_dK_dV",
    "the last, ragged query tile missing in dK and dV",
    BACK,
    "the loop over query tiles",
)
class _(_Parts):
    def sum_over_rows(self, X, Y):
        rows = self.part(self.Nq, "whole")
        return X[:, :, rows].swapaxes(-1, -2) @ Y[:, :, rows]


@fault(
    "lse_ignores_empty_rows",
    "NaN in gradients of rows that see no key",
    BACK,
    "exp(s - lse) where lse is -inf",
    empty=True,
)
class _(Gradients):
    def backward(self):
        out = super().backward()
        empty = ~np.broadcast_to(self.visible(), self.full_shape()).any(-1)
        out["dQ"][empty] = np.nan
        return out


@fault(
    "lse_ignores_empty_rows",
    "NaN in all gradients that a row without keys reaches",
    BACK,
    "exp(s - lse) where lse is -inf",
    empty=True,
)
class _(Gradients):
    def backward(self):
        out = super().backward()
        empty = ~np.broadcast_to(self.visible(), self.full_shape()).any(-1)
        out["dQ"][empty] = np.nan
        reached = self.to_heads(empty.any(-1)[..., None, None] * np.ones((1, 1, 1, 1)))[..., 0, 0] > 0
        out["dK"][reached], out["dV"][reached] = np.nan, np.nan
        return out
