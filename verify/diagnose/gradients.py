"""The backward pass in fp64 NumPy, cut into steps of which a fault replaces one.

    P = exp(s - lse)     dV = P^T dO      dP = dO V^T           D = rowsum(dO O)
    dS = P (dP - D)      dQ = scale dS K  dK = scale dS^T Q

with the derivative of softcap in dS, and with dropout in P for dV and in dP. A kernel gets the right O and lse.

Source: Dao et al., "FlashAttention" (2022), appendix B.2 and Algorithm 4.
"""

import numpy as np

from verify.diagnose.reference import Reference, pivot


class Gradients(Reference):
    """The right gradients; its subclasses are faults of the backward pass."""

    backward_tiled = ""  # as `tiled`

    def lse(self, S):
        """What the weights are recomputed from, (B, Hq, Nq)."""
        m = S.max(-1, initial=-np.inf)
        return pivot(m) + np.log(np.exp(S - pivot(m)[..., None]).sum(-1))

    def recomputed(self, S, lse):
        """P, from the scores and lse; a row without keys has none."""
        return self.exp(S - pivot(lse)[..., None])

    def cap_slope(self, raw):
        """d cap / d s at the scaled product."""
        c = self.option("softcap")
        return 1.0 if c is None else 1 - np.tanh(raw / c) ** 2

    def keep_values(self):
        """Factors of the weights in dV."""
        return self.keep()

    def keep_products(self):
        """Factors of dP."""
        return self.keep()

    def row_sums(self, dO, O, P, dP):
        """D (B, Hq, Nq), or (B, Hq, Nq, Nk) where a fault makes it differ from tile to tile."""
        return (P * dP).sum(-1) if self.tiling.D_of_P else (dO * O).sum(-1)

    def d_scores(self, P, dP, D):
        """dS, but for softcap."""
        return P * (dP - (D if D.ndim == 4 else D[..., None]))

    def scale_q(self):
        """The scale in dQ."""
        return self.scale()

    def scale_k(self):
        """The scale in dK."""
        return self.scale()

    def values_weights(self, P, S):
        """The weights in dV."""
        return P

    def to_heads(self, x):
        """Sums over the query heads that read a key head."""
        out = np.zeros((self.B, self.Hk, *x.shape[2:]))
        for h, at in enumerate(self.key_head()):
            out[:, at] += x[:, h]
        return out

    def sum_over_keys(self, dS, K):
        """dS K"""
        return dS @ K

    def sum_over_rows(self, X, Y):
        """X^T Y, for dK and dV."""
        return X.swapaxes(-1, -2) @ Y

    def backward(self):
        """dQ, dK, dV by name, shaped as Q, K and V."""
        with np.errstate(all="ignore"):
            Q, K, V = self.inputs()
            dO, O = self.probe.dO.astype(np.float64), self.probe.forward_outputs[0].astype(np.float64)
            raw = self.scale() * self.product(Q, K)
            shown = np.broadcast_to(self.visible(), self.full_shape())
            S = np.where(shown, self.add_bias(self.cap(raw)), -np.inf)
            lse = self.lse(S if self.tiling.softmax_again else self.seen_in_forward())
            P = self.recomputed(S, lse)
            weights, keep = self.values_weights(P, S), self.keep_values()
            weights = self.rounded("P", weights if keep is None else weights * keep)
            dP = self.products(dO, V)
            if (kept := self.keep_products()) is not None:
                dP = dP * kept
            dS = self.d_scores(P, dP, self.row_sums(dO, O, P, dP))
            dS = self.rounded("dS", np.where(shown, dS * self.cap_slope(raw), 0))
            return {
                "dQ": self.scale_q() * self.sum_over_keys(dS, K),
                "dK": self.to_heads(self.scale_k() * self.sum_over_rows(dS, Q)),
                "dV": self.to_heads(self.sum_over_rows(weights, dO)),
            }

    def products(self, dO, V):
        """dP = dO V^T"""
        return dO @ V.swapaxes(-1, -2)

    def seen_in_forward(self):
        """The scores that the forward pass had."""
        right = Reference(self.probe, self.tiling)
        Q, K, _ = right.inputs()
        seen = np.broadcast_to(right.visible(), right.full_shape())
        return np.where(seen, right.scores(Q, K), -np.inf)
