"""Attention in fp64 NumPy, a key tile at a time, cut into steps of which a fault replaces one.

All rows of all heads go at once: which rows a fault concerns is a matter of masks. A fault that does not depend on key
tiles runs with a single one. Exponentials overflow and vanish where fp32 does, as the kernels that are diagnosed
compute in it: without that, a forgotten maximum would be right.

Source: Dao, "FlashAttention-2" (2023), Algorithms 1 and 2; written apart from `refimpl` and `oracle`.
"""

import math
from dataclasses import dataclass

import numpy as np

F32_MAX, F32_TINY = float(np.finfo(np.float32).max), 2.0**-149


@dataclass(frozen=True)
class Tiling:
    """What a stranger's kernel does not tell of how it is written.

    Attributes
    ----------
    Br, Bc : int
        Rows and keys of a tile.
    backwards : bool
        The last key tile comes first.
    softmax_again : bool
        The backward pass computes lse again, from its own scores, instead of taking the forward pass's.
    D_of_P : bool
        It computes D as rowsum(P dP) instead of rowsum(dO O).
    """

    Br: int = 64
    Bc: int = 64
    backwards: bool = False
    softmax_again: bool = False
    D_of_P: bool = False


class Reference:
    """The right answer; its subclasses are the faults.

    Parameters
    ----------
    probe : verify.diagnose.probe.Probe
    tiling : Tiling
    """

    tiled = ""  # what predictions depend on: "", "Bc", "Br Bc"; "Bc order" where the order of key tiles matters too
    rows_matter = ()  # options of which one has to be given for Br to change anything; it always may if empty

    def __init__(self, probe, tiling=None):
        self.probe, self.tiling = probe, tiling or Tiling()
        self.options = probe.options
        self.B, self.Hq, self.Nq, self.d = probe.Q.shape
        self.Hk, self.Nk, self.dv = probe.K.shape[1], probe.K.shape[2], probe.V.shape[3]
        self.group = self.Hq // self.Hk
        self.padded = None  # K with zeros past its end, if it is the probe's own
        self.wild = None  # rows (B, Hq, Nq) of which a fault only says that they are wrong
        self.unknown = None  # rows of which it says nothing

    def option(self, name):
        """An option's value; None if it is not given."""
        return self.options.get(name)

    # inputs
    def key_head(self):
        """Which key head each query head reads."""
        return np.arange(self.Hq) // self.group

    def padded_keys(self):
        """Keys that the kernel computes with, zeros past the end."""
        return self.Nk

    def inputs(self):
        """Q, K, V in fp64, K and V one head for each query head; views that are not to be written to."""
        Q, K, V = self.probe.wide
        heads = self.key_head()
        if self.Hq != self.Hk or not np.array_equal(heads, np.arange(self.Hk)):
            K, V = K[:, heads], V[:, heads]
        V = self.unseen(V)
        if more := self.padded_keys() - self.Nk:
            own = K is self.probe.wide[1]
            K, V = (np.pad(x, ((0, 0), (0, 0), (0, more), (0, 0))) for x in (K, V))
            self.padded = K if own else None
        return Q, K, V

    def scale(self):
        """The factor of q.k."""
        given = self.option("scale")
        return 1 / math.sqrt(self.d) if given is None else given

    def unseen(self, V):
        """V without NaN and inf: probes hold them only at keys that no row sees, which must not count."""
        return np.where(np.isfinite(V), V, 0) if "nan" in self.probe.needs else V

    # scores
    def scores(self, Q, K):
        """Natural scores (B, Hq, Nq, keys): scale, softcap, bias."""
        return self.add_bias(self.cap(self.scale() * self.product(Q, K)))

    def product(self, Q, K):
        """q.k"""
        if Q is self.probe.wide[0] and K is self.probe.wide[1]:
            return self.probe.product
        if Q is self.probe.wide[0] and K is self.padded:
            return self.to_keys(self.probe.product, 0.0)
        return Q @ K.swapaxes(-1, -2)

    def cap(self, s):
        """softcap"""
        c = self.option("softcap")
        return s if c is None else c * np.tanh(s / c)

    def slopes(self):
        """ALiBi's, for each query head."""
        return np.asarray(self.option("alibi_slopes"), np.float64)[..., :, None, None]

    def distance(self):
        """Of query and key, as ALiBi counts it."""
        return np.abs(self.row() - self.key())

    def alibi(self):
        """What ALiBi adds."""
        return 0.0 if self.option("alibi_slopes") is None else -self.slopes() * self.distance()

    def bias(self):
        """What the additive bias adds, zeros past the last key."""
        given = self.option("bias")
        return 0.0 if given is None else self.to_keys(np.asarray(given, np.float64), 0.0)

    def add_bias(self, s):
        """ALiBi and bias."""
        return s + self.alibi() + self.bias()

    # what is seen
    def offset(self):
        """What turns a row into a position among the keys, (B, 1, 1, 1) with lengths."""
        if self.option("align") == "top_left":
            return 0
        q, k = self.option("lengths_q"), self.option("lengths_k")
        if q is None and k is None:
            return self.Nk - self.Nq
        both = [np.full(self.B, n) if x is None else np.asarray(x) for x, n in ((q, self.Nq), (k, self.Nk))]
        return (both[1] - both[0])[:, None, None, None]

    def row(self):
        """Query positions, aligned to the keys."""
        return np.arange(self.Nq)[:, None] + self.offset()

    def key(self):
        """Key positions."""
        return np.arange(self.padded_keys())

    def to_keys(self, x, fill):
        """An array whose last axis is keys, continued past the end."""
        x = np.broadcast_to(x, (*x.shape[:-1], self.Nk))
        return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, self.padded_keys() - self.Nk)], constant_values=fill)

    def exists(self):
        """Keys before the end."""
        return self.key() < self.Nk

    def causal(self):
        """Keys up to the row's position."""
        return self.key() <= self.row() if self.option("causal") else np.True_

    def window(self):
        """Keys in the window."""
        left, right = self.option("window") or (None, None)
        near = np.True_ if left is None else self.key() >= self.row() - left
        return near if right is None else near & (self.key() <= self.row() + right)

    def mask(self):
        """The boolean mask."""
        given = self.option("mask")
        return np.True_ if given is None else self.to_keys(np.asarray(given, bool), True)

    def in_length(self):
        """Rows and keys in use."""
        ok = np.True_
        if (n := self.option("lengths_k")) is not None:
            ok = ok & (self.key() < np.asarray(n)[:, None, None, None])
        if (n := self.option("lengths_q")) is not None:
            ok = ok & (np.arange(self.Nq)[:, None] < np.asarray(n)[:, None, None, None])
        return ok

    def visible(self):
        """Which row sees which key."""
        return self.exists() & self.causal() & self.window() & self.mask() & self.in_length()

    def hidden(self):
        """The score of a hidden key."""
        return -np.inf

    # softmax
    def first_max(self):
        """Where the running maximum starts."""
        return -np.inf

    def exp(self, x):
        """exp, in fp32's range."""
        e = np.exp(np.minimum(x, 100.0))
        e[e > F32_MAX] = np.inf
        e[e < F32_TINY] = 0
        return e

    def running_max(self, m, tile_max):
        """m of the next state."""
        return np.maximum(m, tile_max)

    def alpha(self, m, m_new, tile_max):
        """The factor that takes sums from m to m_new."""
        return self.exp(m - pivot(m_new))

    def weights(self, x, m_new, m, tile_max):
        """exp(s - m)"""
        return self.exp(x - pivot(m_new)[..., None])

    def next_l(self, l, alpha, P):
        """l of the next state."""
        return alpha * l + P.sum(-1)

    def next_O(self, O, alpha, PV, l, l_new):
        """O_acc of the next state; l and l_new are the sums before and after."""
        return alpha[..., None] * O + PV

    def rounded(self, name, x):
        """A quantity (S, P, l, O) as the kernel keeps it; fp64 here."""
        return x

    def keep(self):
        """Factors of the weights under dropout, (B, Hq, Nq, Nk) or 1."""
        if (kept := self.option("keep")) is None:
            return None
        p = self.option("dropout_p")
        factor = 1 / (1 - p) if p < 1 else 0.0
        return np.broadcast_to(factor * self.to_keys(np.asarray(kept, np.float64), 0.0), self.full_shape())

    def full_shape(self):
        """Of the scores."""
        return self.B, self.Hq, self.Nq, self.padded_keys()

    def key_tiles(self):
        """Slices of the keys, in the order of the loop."""
        n = self.padded_keys()
        Bc = self.tiling.Bc if "Bc" in self.tiled else max(1, n)
        tiles = [slice(a, min(a + Bc, n)) for a in range(0, n, Bc)]
        return tiles[::-1] if self.tiling.backwards else tiles

    def tile_of(self, x, tiles, at):
        """Tile number `at` of an array (..., keys, columns)."""
        return x[:, :, tiles[at]]

    def divide(self, O, l):
        """O = O_acc / l; 0 for a row without keys."""
        return np.where(l == 0, 0, O / np.where(l == 0, 1, l))

    def log_sum(self, m, l):
        """lse, natural; -inf for a row without keys."""
        return np.where(l == 0, -np.inf, pivot(m) + np.log(np.where(l == 0, 1, l)))

    def forward(self):
        """Outputs by name: O (B, Hq, Nq, dv), lse (B, Hq, Nq)."""
        with np.errstate(all="ignore"):
            Q, K, V = self.inputs()
            shape = self.full_shape()
            seen = np.broadcast_to(self.visible(), shape)
            S = np.where(seen, self.rounded("S", self.scores(Q, K)), self.hidden())
            keep = self.keep()
            m, l, O = np.full(shape[:3], self.first_max()), np.zeros(shape[:3]), np.zeros((*shape[:3], self.dv))
            tiles = self.key_tiles()
            for at, cols in enumerate(tiles):
                x = S[..., cols]
                tile_max = x.max(-1, initial=-np.inf)
                m_new = self.running_max(m, tile_max)
                alpha = self.alpha(m, m_new, tile_max)
                P = self.weights(x, m_new, m, tile_max)
                l_new = self.in_range(self.rounded("l", self.next_l(l, alpha, P)))
                P = self.rounded("P", P if keep is None else P * keep[..., cols])
                PV = P @ self.tile_of(V, tiles, at)
                O = self.in_range(self.rounded("O", self.next_O(O, alpha, PV, l, l_new)))
                m, l = m_new, l_new
            return {"O": self.divide(O, l[..., None]), "lse": self.log_sum(m, l)}

    def in_range(self, x):
        """Infinite beyond fp32's largest number."""
        return np.where(np.abs(x) > F32_MAX, np.sign(x) * np.inf, x)


def pivot(m):
    """m, but 0 for a row that has seen no key, where -inf - (-inf) would be NaN."""
    return np.where(np.isneginf(m), 0, m)
