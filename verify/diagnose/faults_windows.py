"""Faults of hidden keys other than by the diagonal: mask values, windows, boolean masks, lengths, hidden NaN."""

import numpy as np

from verify.diagnose.fault import fault
from verify.diagnose.faults_masks import Tiles
from verify.diagnose.reference import Reference, pivot

for _value in (-1e4, -5e4, -65504.0, -1e9, 0.0):
    _name = "mask_value_too_small" if _value else "mask_multiplied"

    @fault(
        _name,
        f"hidden keys given the score {_value:g}",
        "18.2.2",
        "the score of a hidden key: it has to be -inf",
        empty=True,
    )
    class _(Reference):
        VALUE = _value

        def hidden(self):
            return self.VALUE

    @fault(
        _name,
        f"hidden keys given the score {_value:g}, empty rows as they should be",
        "18.2.2",
        "the score of a hidden key",
    )
    class _(Reference):
        VALUE = _value

        def hidden(self):
            return self.VALUE

        def forward(self):
            out = super().forward()
            empty = ~np.broadcast_to(self.visible(), self.full_shape()).any(-1)
            return {"O": np.where(empty[..., None], 0, out["O"]), "lse": np.where(empty, -np.inf, out["lse"])}


@fault(
    "empty_row_mean",
    "the mean of all values in rows that see no key",
    "18.2.2",
    "a finite mask value: such a row must be 0",
    empty=True,
)
class _(Reference):
    def forward(self):
        out = super().forward()
        V = self.inputs()[2]
        empty = ~np.broadcast_to(self.visible(), self.full_shape()).any(-1)[..., None]
        if self.Nk:
            out["O"] = np.where(empty, V.mean(2, keepdims=True), out["O"])
        return out


for _left, _right, _says in ((-1, 0, "left end one key too near"), (1, 0, "left end one key too far"),
                             (0, -1, "right end one key too near"), (0, 1, "right end one key too far"),
                             (-1, -1, "both ends exclusive"), (1, 1, "both ends one key too far")):  # fmt: skip

    @fault("window_off_by_one", f"the window's {_says}", "18.7.1", "the comparisons of the window", "window")
    class _(Reference):
        MORE = _left, _right

        def window(self):
            left, right = self.option("window") or (None, None)
            near = np.True_ if left is None else self.key() >= self.row() - left - self.MORE[0]
            return near if right is None else near & (self.key() <= self.row() + right + self.MORE[1])


    @fault("window_off_by_one", f"the window's {_says}, where causal is a window with right end 0", "18.7.1",
           "the comparisons of the window")  # fmt: skip
    class _(Reference):
        MORE = _left, _right

        def causal(self):
            return self.key() <= self.row() + self.MORE[1] if self.option("causal") else np.True_

        def window(self):
            left, right = self.option("window") or (None, None)
            near = np.True_ if left is None else self.key() >= self.row() - left - self.MORE[0]
            return near if right is None else near & (self.key() <= self.row() + right + self.MORE[1])


@fault("window_ignored", "the window missing", "18.7.1", "whether the window is applied", "window")
class _(Reference):
    def window(self):
        return np.True_


@fault("window_one_side", "only the window's left bound applied", "18.7.1", "the right bound", "window")
class _(Reference):
    def window(self):
        left, _ = self.option("window") or (None, None)
        return np.True_ if left is None else self.key() >= self.row() - left


@fault("window_one_side", "only the window's right bound applied", "18.7.1", "the left bound", "window")
class _(Reference):
    def window(self):
        _, right = self.option("window") or (None, None)
        return np.True_ if right is None else self.key() <= self.row() + right


@fault("window_swapped", "the window's ends exchanged", "18.7.1", "which end is left", "window")
class _(Reference):
    def window(self):
        left, right = (self.option("window") or (None, None))[::-1]
        near = np.True_ if left is None else self.key() >= self.row() - left
        return near if right is None else near & (self.key() <= self.row() + right)


@fault("window_none_is_0", "an open end of the window taken for 0", "18.7.1", "the marker of no bound", "window")
class _(Reference):
    def window(self):
        if self.option("window") is None:
            return np.True_
        left, right = (x or 0 for x in self.option("window"))
        return (self.key() >= self.row() - left) & (self.key() <= self.row() + right)


@fault("window_none_is_0", "no window taken for one of (0, 0)", "18.7.1", "the marker of no bound")
class _(Reference):
    def window(self):
        left, right = (x or 0 for x in self.option("window") or (0, 0))
        return (self.key() >= self.row() - left) & (self.key() <= self.row() + right)


@fault(
    "window_misaligned",
    "the window counted from the row, not from its position",
    "18.7.1",
    "Nk - Nq in the window",
    "window",
)
class _(Reference):
    def window(self):
        left, right = self.option("window") or (None, None)
        row = np.arange(self.Nq)[:, None]
        near = np.True_ if left is None else self.key() >= row - left
        return near if right is None else near & (self.key() <= row + right)


@fault(
    "window_tile_skipped",
    "the first key tile of the window skipped",
    "18.7.1",
    "rounding of the first key tile",
    "window",
)
class _(Tiles):
    def window(self):
        left, _ = self.option("window") or (None, None)
        Bc = self.tiling.Bc
        start = -np.inf if left is None else -(-np.maximum(self.tile_rows()[0] - left, 0) // Bc) * Bc
        return super().window() & (self.key() >= start)


@fault("mask_ignored", "the boolean mask missing", "18.2.2", "whether the mask is applied", "mask")
class _(Reference):
    def mask(self):
        return np.True_


@fault("mask_inverted", "the boolean mask read with the opposite meaning", "18.2.2", "what true means", "mask")
class _(Reference):
    def mask(self):
        given = self.option("mask")
        return np.True_ if given is None else self.to_keys(~np.asarray(given, bool), True)


@fault(
    "mask_replaces_causal",
    "causal forgotten where a mask is given",
    "18.7.2",
    "how masks are joined",
    ("mask", "causal"),
)
class _(Reference):
    def causal(self):
        return np.True_ if self.option("mask") is not None else super().causal()


@fault(
    "mask_of_first_head",
    "the mask of the first batch entry and head used for all",
    "18.2.2",
    "the mask's strides",
    "mask",
)
class _(Reference):
    def mask(self):
        given = self.option("mask")
        return np.True_ if given is None else self.to_keys(np.asarray(given, bool)[:1, :1], True)


@fault("mask_of_first_head", "the mask of the first head used for all", "18.2.2", "the mask's strides", "mask")
class _(Reference):
    def mask(self):
        given = self.option("mask")
        return np.True_ if given is None else self.to_keys(np.asarray(given, bool)[:, :1], True)


for _more in (-1, 1):

    @fault("length_off_by_one", f"{'one key too few' if _more < 0 else 'one key too many'} of each sequence", "18.7.3",
           "the comparison with the length", "lengths_k")  # fmt: skip
    class _(Reference):
        MORE = _more

        def in_length(self):
            if self.option("lengths_k") is None:
                return super().in_length()
            n = np.asarray(self.option("lengths_k"))[:, None, None, None] + self.MORE
            q = np.asarray(self.option("lengths_q"))[:, None, None, None]
            return (self.key() < n) & (np.arange(self.Nq)[:, None] < q)


@fault("lengths_ignored", "padding keys attended", "18.7.3", "whether key lengths are applied", "lengths_k")
class _(Reference):
    def in_length(self):
        q = self.option("lengths_q")
        return np.True_ if q is None else np.arange(self.Nq)[:, None] < np.asarray(q)[:, None, None, None]


@fault("lengths_ignored", "padding attended, rows and keys", "18.7.3", "whether lengths are applied", "lengths_k")
class _(Reference):
    def in_length(self):
        return np.True_


@fault(
    "padding_rows_written",
    "rows past a sequence's end computed",
    "18.7.3",
    "rows beyond the length have to be 0",
    "lengths_q",
)
class _(Reference):
    def in_length(self):
        k = self.option("lengths_k")
        return np.True_ if k is None else self.key() < np.asarray(k)[:, None, None, None]


@fault(
    "hidden_NaN_leaks",
    "hidden keys multiplied by 0, NaN or not",
    "18.2.2",
    "0 * NaN: skip a hidden key's value instead",
)
class _(Reference):
    def unseen(self, V):
        return V


@fault(
    "mask_after_max",
    "hidden keys counted in the maximum, from which small scores vanish",
    "18.5.2",
    "masking after the maximum",
)
class _(Reference):
    tiled = "Bc order"

    def forward(self):
        Q, K, _ = self.inputs()
        with np.errstate(all="ignore"):
            self.raw = np.where(self.exists(), self.scores(Q, K), -np.inf)
        self.at = 0
        return super().forward()

    def weights(self, x, m_new, m, tile_max):
        return np.where(np.isneginf(x), 0, self.exp(x - pivot(m_new)[..., None]))

    def running_max(self, m, tile_max):
        cols = self.key_tiles()[self.at]
        self.at += 1
        return np.maximum(m, self.raw[..., cols].max(-1, initial=-np.inf))
