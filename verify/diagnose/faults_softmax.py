"""Faults of the running state: m, l and O_acc from tile to tile, the division, lse."""

import numpy as np

from verify.diagnose.fault import fault
from verify.diagnose.reference import Reference, pivot

ONLINE = "18.4.2"
STATE = "the three lines that update m, l and O_acc after a key tile"
LSE = "the line that writes lse"


class Tiled(Reference):
    """Depends on the key tiles and their order."""

    tiled = "Bc order"


@fault("O_not_rescaled", "alpha not applied to O_acc", ONLINE, STATE)
class _(Tiled):
    def next_O(self, O, alpha, PV, l, l_new):
        return O + PV


@fault("l_not_rescaled", "alpha not applied to l", ONLINE, STATE)
class _(Tiled):
    def next_l(self, l, alpha, P):
        return l + P.sum(-1)


@fault("nothing_rescaled", "alpha applied to neither O_acc nor l", ONLINE, STATE)
class _(Tiled):
    def alpha(self, m, m_new, tile_max):
        return np.ones_like(m)


@fault(
    "nothing_rescaled",
    "each key tile's sums, taken against its own maximum, added up as they are",
    ONLINE,
    "the merge of partial results: each by exp of its maximum minus the largest",
)
class _(Tiled):
    def alpha(self, m, m_new, tile_max):
        return np.ones_like(m)

    def weights(self, x, m_new, m, tile_max):
        return self.exp(x - pivot(tile_max)[..., None])


@fault("alpha_inverted", "alpha = exp(m_new - m) instead of exp(m - m_new)", ONLINE, "the sign in alpha's exponent")
class _(Tiled):
    def alpha(self, m, m_new, tile_max):
        return np.where(np.isneginf(m), 0, self.exp(pivot(m_new) - pivot(m)))


@fault("alpha_inverted", "alpha = exp(m_new - m), infinite at the first tile", ONLINE, "the sign in alpha's exponent")
class _(Tiled):
    def alpha(self, m, m_new, tile_max):
        return self.exp(m_new - m)


@fault(
    "alpha_of_tile_max", "alpha taken to the tile's own maximum, not the running one", ONLINE, "what alpha subtracts"
)
class _(Tiled):
    def alpha(self, m, m_new, tile_max):
        return self.exp(m - pivot(tile_max))


@fault("alpha_of_tile_max", "alpha taken to the tile's own maximum, and 1 where the tile is hidden", ONLINE,
       "what alpha subtracts")  # fmt: skip
class _(Tiled):
    def alpha(self, m, m_new, tile_max):
        return np.where(np.isneginf(tile_max), 1, self.exp(m - pivot(tile_max)))


@fault("alpha_squared", "alpha applied twice to O_acc", ONLINE, "whether O_acc is rescaled in two places")
class _(Tiled):
    def next_O(self, O, alpha, PV, l, l_new):
        return alpha[..., None] ** 2 * O + PV


@fault("l_rescaled_twice", "alpha applied twice to l", ONLINE, "whether l is rescaled in two places")
class _(Tiled):
    def next_l(self, l, alpha, P):
        return alpha**2 * l + P.sum(-1)


@fault(
    "alpha_on_new_tile",
    "alpha applied to the new tile's product as well",
    ONLINE,
    "whether P V is added before the rescale",
)
class _(Tiled):
    def next_O(self, O, alpha, PV, l, l_new):
        return alpha[..., None] * (O + PV)


@fault("alpha_on_new_sum", "alpha applied to the new tile's sum as well", ONLINE, "whether l grows before its rescale")
class _(Tiled):
    def next_l(self, l, alpha, P):
        return alpha * (l + P.sum(-1))


@fault(
    "max_of_previous_tile", "the weights taken with the maximum before the tile", ONLINE, "which m is subtracted in P"
)
class _(Tiled):
    def weights(self, x, m_new, m, tile_max):
        return self.exp(x - pivot(np.where(np.isneginf(m), m_new, m))[..., None])


@fault(
    "max_of_previous_tile",
    "the weights taken with the maximum before the tile, 0 at first",
    ONLINE,
    "which m P subtracts",
)
class _(Tiled):
    def weights(self, x, m_new, m, tile_max):
        return self.exp(x - pivot(m)[..., None])


@fault("max_of_tile", "the weights taken with the tile's own maximum", ONLINE, "which m is subtracted in P")
class _(Tiled):
    def weights(self, x, m_new, m, tile_max):
        return self.exp(x - pivot(tile_max)[..., None])


@fault("max_missing", "no maximum subtracted", ONLINE, "exp of raw scores: it overflows from 89 on")
class _(Tiled):
    def running_max(self, m, tile_max):
        return np.zeros_like(m)

    def first_max(self):
        return 0.0


@fault("max_missing", "the maximum forgotten after every tile: alpha takes it, the weights and the next tile do not",
       ONLINE, "whether the new maximum is kept")  # fmt: skip
class _(Tiled):
    def running_max(self, m, tile_max):
        return np.zeros_like(m)

    def alpha(self, m, m_new, tile_max):
        top = np.maximum(m, tile_max)
        return np.where(np.isneginf(top), 1, self.exp(m - pivot(top)))


@fault("max_of_unscaled", "the maximum of unscaled scores, which a negative scale makes a minimum", ONLINE,
       "the order of scale and maximum")  # fmt: skip
class _(Reference):
    def running_max(self, m, tile_max):
        return np.maximum(m, self.scale() * self.top if self.scale() < 0 else tile_max)

    def product(self, Q, K):
        raw = super().product(Q, K)
        seen = np.broadcast_to(self.visible(), raw.shape)
        self.top = np.where(seen, raw, -np.inf).max(-1, initial=-np.inf)
        self.top = np.where(np.isneginf(self.top), 0, self.top)
        return raw


@fault("max_of_unscaled", "the maximum taken with the absolute scale", ONLINE, "the order of scale and maximum")
class _(Reference):
    def running_max(self, m, tile_max):
        return np.maximum(m, abs(self.scale()) * self.top if self.scale() < 0 else tile_max)

    def product(self, Q, K):
        raw = super().product(Q, K)
        seen = np.broadcast_to(self.visible(), raw.shape)
        self.top = np.where(seen, raw, -np.inf).max(-1, initial=-np.inf)
        self.top = np.where(np.isneginf(self.top), 0, self.top)
        return raw


@fault("max_starts_at_0", "the running maximum started at 0", ONLINE, "m's first value: it has to be -inf")
class _(Tiled):
    def first_max(self):
        return 0.0


for _start in (-1e4, -5e4, -65504.0):

    @fault(
        "max_starts_too_high",
        f"the running maximum started at {_start:g}",
        ONLINE,
        "m's first value: it has to be -inf",
    )
    class _(Tiled):
        START = _start

        def first_max(self):
            return self.START


@fault("not_divided", "the division by l missing", ONLINE, "the last line before O is stored")
class _(Reference):
    def divide(self, O, l):
        return O


@fault("divided_each_tile", "O_acc divided by l after every tile", ONLINE, "a division inside the loop over key tiles")
class _(Tiled):
    def next_O(self, O, alpha, PV, l, l_new):
        return (alpha[..., None] * O + PV) / np.where(l_new == 0, 1, l_new)[..., None]

    def divide(self, O, l):
        return O


@fault("divided_each_tile", "O_acc divided by l after every tile and once more", ONLINE, "a division inside the loop")
class _(Tiled):
    def next_O(self, O, alpha, PV, l, l_new):
        return (alpha[..., None] * O + PV) / np.where(l_new == 0, 1, l_new)[..., None]


@fault(
    "divided_each_tile",
    "each tile's product divided by the l so far, and never put right",
    ONLINE,
    "a division in the loop",
)
class _(Tiled):
    def next_O(self, O, alpha, PV, l, l_new):
        return alpha[..., None] * O + PV / np.where(l_new == 0, 1, l_new)[..., None]

    def divide(self, O, l):
        return O


@fault("divided_by_tile_sum", "each tile normalised by its own sum", ONLINE, "which l divides")
class _(Tiled):
    def next_O(self, O, alpha, PV, l, l_new):
        own = l_new - alpha * l
        return alpha[..., None] * O + PV / np.where(own == 0, 1, own)[..., None]

    def divide(self, O, l):
        return O


@fault("l_of_last_tile", "l only of the last key tile", ONLINE, "whether l is added to, or assigned")
class _(Tiled):
    def next_l(self, l, alpha, P):
        return P.sum(-1)


@fault("O_of_last_tile", "O_acc only of the last key tile", "18.4.3", "whether O_acc is added to, or assigned")
class _(Tiled):
    def next_O(self, O, alpha, PV, l, l_new):
        return PV


@fault(
    "l_one_tile_late",
    "O divided by the sum before the last key tile",
    ONLINE,
    "the order of l's update and the division",
)
class _(Tiled):
    def forward(self):
        self.before = np.zeros((self.B, self.Hq, self.Nq))
        return super().forward()

    def next_l(self, l, alpha, P):
        self.before = l
        return super().next_l(l, alpha, P)

    def divide(self, O, l):
        return super().divide(O, self.before[..., None])


@fault(
    "parts_not_weighted",
    "results of key tiles averaged without their weights",
    "18.8.2",
    "the merge of partial results",
)
class _(Tiled):
    def next_O(self, O, alpha, PV, l, l_new):
        own = l_new - alpha * l
        return O + PV / np.where(own == 0, 1, own)[..., None] / len(self.key_tiles())

    def divide(self, O, l):
        return O
