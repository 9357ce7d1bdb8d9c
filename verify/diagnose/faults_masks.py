"""Faults of which key a row sees: the diagonal, tile edges, ragged tiles."""

import numpy as np

from verify.diagnose.fault import fault
from verify.diagnose.reference import Reference

CAUSAL = "18.5.2"
RAGGED = "18.4.1"
DIAGONAL = "the comparison of key and query position in the causal mask"
BOUND = "the bounds of the loop over key tiles"

for _shift, _name in ((-1, "diagonal_one_short"), (1, "diagonal_one_far")):

    @fault(
        _name,
        f"the causal diagonal {'below' if _shift < 0 else 'past'} its place by one key",
        CAUSAL,
        DIAGONAL,
        "causal",
    )
    class _(Reference):
        SHIFT = _shift

        def causal(self):
            return self.key() <= self.row() + self.SHIFT if self.option("causal") else np.True_


@fault("causal_ignored", "the causal mask missing", CAUSAL, "whether the mask is applied at all", "causal")
class _(Reference):
    def causal(self):
        return np.True_


@fault("causal_reversed", "the causal mask the wrong way round", CAUSAL, DIAGONAL, "causal")
class _(Reference):
    def causal(self):
        return self.key() >= self.row() if self.option("causal") else np.True_


@fault(
    "aligned_top_left",
    "causal aligned top left instead of bottom right",
    CAUSAL,
    "Nk - Nq in the query's position",
    "causal",
)
class _(Reference):
    def causal(self):
        return self.key() <= np.arange(self.Nq)[:, None] if self.option("causal") else np.True_


@fault(
    "aligned_bottom_right",
    "causal aligned bottom right instead of top left",
    CAUSAL,
    "Nk - Nq in the query's position",
    "causal",
)
class _(Reference):
    def option(self, name):
        return "bottom_right" if name == "align" else super().option(name)


@fault(
    "shift_ignored",
    "query positions not aligned to the keys, in every option",
    CAUSAL,
    "Nk - Nq in the query's position",
)
class _(Reference):
    def offset(self):
        return 0


@fault(
    "shift_of_full_length",
    "positions aligned by the padded lengths",
    "18.7.3",
    "whose lengths align the rows",
    "lengths_k",
)
class _(Reference):
    def offset(self):
        return self.Nk - self.Nq


class Tiles(Reference):
    """Row and key tiles as index arrays."""

    tiled, rows_matter = "Br Bc", ("causal", "window")

    def key_tiles(self):
        return [slice(0, self.padded_keys())]

    def tile_rows(self):
        """First and last position of each row's query tile, (Nq, 1) each."""
        Br = self.tiling.Br
        first = np.arange(self.Nq)[:, None] // Br * Br
        return first + self.offset(), np.minimum(first + Br, self.Nq) - 1 + self.offset()

    def tile_keys(self):
        """First and last key of each key's tile."""
        Bc = self.tiling.Bc
        return self.key() // Bc * Bc, np.minimum(self.key() // Bc * Bc + Bc, self.Nk) - 1


@fault("only_last_tile_masked", "only the last live key tile masked, though the diagonal crosses more", CAUSAL,
       "which tiles are masked when Br > Bc", "causal")  # fmt: skip
class _(Tiles):
    def causal(self):
        if not self.option("causal"):
            return np.True_
        last_key = self.tile_rows()[1]  # the last key that any row of the tile sees
        live, last = self.key() // self.tiling.Bc, np.maximum(last_key, 0) // self.tiling.Bc
        last = np.minimum(last, max(self.Nk - 1, 0) // self.tiling.Bc)
        return np.where(live == last, self.key() <= self.row(), live < last)


@fault("diagonal_tile_not_masked", "tiles on the diagonal not masked", CAUSAL, "which tiles count as full", "causal")
class _(Tiles):
    def causal(self):
        return self.tile_keys()[0] <= self.tile_rows()[1] if self.option("causal") else np.True_


@fault("edge_tile_taken_for_full", "tiles not masked though their last key is hidden from their first row", CAUSAL,
       "the comparison that calls a tile full", "causal")  # fmt: skip
class _(Tiles):
    def causal(self):
        if not self.option("causal"):
            return np.True_
        full = self.tile_keys()[1] - 1 <= self.tile_rows()[0]
        return full | (self.key() <= self.row())


@fault("edge_tile_taken_for_full", "whole tiles not masked though their last key is hidden from their first row",
       CAUSAL, "the comparison that calls a tile full", "causal")  # fmt: skip
class _(Tiles):
    def causal(self):
        if not self.option("causal"):
            return np.True_
        end = (self.key() // self.tiling.Bc + 1) * self.tiling.Bc
        return ((end <= self.Nk) & (end - 2 <= self.tile_rows()[0])) | (self.key() <= self.row())


@fault(
    "live_tile_skipped", "the last live key tile skipped", CAUSAL, "rounding of the last key tile to visit", "causal"
)
class _(Tiles):
    def causal(self):
        if not self.option("causal"):
            return np.True_
        end = (self.tile_rows()[1] + 1) // self.tiling.Bc * self.tiling.Bc
        return (self.key() <= self.row()) & (self.key() < end)


# What is visited of the live key tiles: by a tile's first key, and the first and last position of a tile of queries.
for _what, _visited in (
    ("a key tile skipped of which only the tile's last row sees one key", lambda r, key, first, last: key < last),
    ("key tiles visited only as far as the tile's first row sees", lambda r, key, first, last: key <= first),
    ("key tiles visited only as far as the position before the tile's first row",
     lambda r, key, first, last: key < first),
    ("key tiles visited only as far as the rows' own numbers, without Nk - Nq",
     lambda r, key, first, last: key < first - r.offset() + r.tiling.Br),
):  # fmt: skip

    @fault("live_tile_skipped", _what, CAUSAL, BOUND, "causal")
    class _(Tiles):
        VISITED = staticmethod(_visited)

        def causal(self):
            if not self.option("causal"):
                return np.True_
            return (self.key() <= self.row()) & self.VISITED(self, self.tile_keys()[0], *self.tile_rows())


class _Bc(Tiles):
    tiled = "Bc"


@fault(
    "last_ragged_tile_dropped", "the last, ragged key tile dropped", RAGGED, f"{BOUND}: Nk // Bc instead of rounding up"
)
class _(_Bc):
    def exists(self):
        return self.key() < self.Nk // self.tiling.Bc * self.tiling.Bc


@fault("ragged_tile_not_masked", "keys past the end counted with score 0", RAGGED, "the mask of the last key tile")
class _(_Bc):
    def padded_keys(self):
        return -(-self.Nk // self.tiling.Bc) * self.tiling.Bc

    def exists(self):
        return np.True_


@fault(
    "ragged_tile_not_masked",
    "keys past the end counted with score 0 in every row",
    RAGGED,
    "the mask of the last key tile",
)
class _(_Bc):
    def padded_keys(self):
        return -(-self.Nk // self.tiling.Bc) * self.tiling.Bc

    def visible(self):
        return super().visible() | (self.key() >= self.Nk)


@fault(
    "ragged_tile_not_masked",
    "the last key counted again for each key past the end",
    RAGGED,
    "the clamp of the last key tile",
)
class _(_Bc):
    def padded_keys(self):
        return -(-self.Nk // self.tiling.Bc) * self.tiling.Bc

    def inputs(self):
        Q, K, V = super().inputs()
        last = np.minimum(np.arange(self.padded_keys()), self.Nk - 1)
        return (Q, K[:, :, last], V[:, :, last]) if self.Nk else (Q, K, V)

    def exists(self):
        return np.True_


@fault(
    "ragged_tile_stale",
    "keys past the end counted as those that the tile before left in their place",
    RAGGED,
    "what the load of the last key tile leaves as it was: it has to be masked, or zeroed and masked",
)
class _(_Bc):
    def padded_keys(self):
        return -(-self.Nk // self.tiling.Bc) * self.tiling.Bc

    def exists(self):
        return np.True_

    def inputs(self):
        Q, K, V = super().inputs()
        key = self.key()
        stays = np.where(key < self.Nk, key, np.maximum(key - self.tiling.Bc, 0))
        return Q, K[:, :, stays], V[:, :, stays]

    def forward(self):
        if self.Nk < self.tiling.Bc:  # no tile came before: what is there is anybody's
            past = np.broadcast_to(self.visible(), self.full_shape())[..., self.Nk :]
            self.wild = past.any(-1)
        return super().forward()


PAST = "the comparison of a key's position with Nk: below it, not up to it"


@fault("one_key_too_many", "one key past the end counted with score 0, in ragged tiles", RAGGED, PAST)
class _Past(_Bc):
    def padded_keys(self):
        return self.Nk + (self.Nk % self.tiling.Bc > 0)

    def exists(self):
        return np.True_


@fault("one_key_too_many", "one key past the end or the length counted, in ragged tiles", RAGGED, PAST)
class _(_Past):
    def in_length(self):
        lengths = self.option("lengths_k")
        more = np.True_ if lengths is None else self.key() == np.asarray(lengths)[:, None, None, None]
        return super().in_length() | more


@fault("one_key_too_many", "the last key counted twice, in ragged tiles", RAGGED, PAST)
class _(_Past):
    def inputs(self):
        Q, K, V = super().inputs()
        last = np.minimum(self.key(), max(self.Nk - 1, 0))
        return Q, K[:, :, last], V[:, :, last]


@fault("one_key_too_many", "what follows the last key in memory counted, in ragged tiles", RAGGED, PAST)
class _Follows(_Past):
    def inputs(self):
        Q, K, V = super().inputs()
        return (Q, self.followed(K, 1), self.followed(V, 2)) if self.padded_keys() > self.Nk > 0 else (Q, K, V)

    def followed(self, x, at):
        """Keys or values with the next head's first after their last, and zeros after all of them."""
        first = self.probe.wide[at][:, :, 0].reshape(self.B * self.Hk, -1)
        after = np.vstack([first[1:], 0 * first[:1]]).reshape(self.B, self.Hk, -1)
        return np.concatenate([x[:, :, : self.Nk], after[:, self.key_head(), None]], axis=2)

    def forward(self):
        if self.padded_keys() > self.Nk:  # what comes after all of them is anybody's
            past = np.broadcast_to(self.visible(), self.full_shape())[..., -1]
            last_head, last_batch = self.key_head() == self.Hk - 1, np.arange(self.B) == self.B - 1
            self.unknown = past & last_head[:, None] & last_batch[:, None, None]
        return super().forward()


@fault("one_key_too_many", "what follows the last key in memory counted", RAGGED, PAST)
class _(_Follows):
    tiled = ""

    def padded_keys(self):
        return self.Nk + 1


@fault("last_tile_dropped", "the last key tile dropped, whole or not", RAGGED, BOUND)
class _(_Bc):
    def exists(self):
        return self.key() < max(0, -(-self.Nk // self.tiling.Bc) - 1) * self.tiling.Bc


@fault("first_tile_dropped", "the first key tile dropped", RAGGED, BOUND)
class _(_Bc):
    def exists(self):
        return (self.key() >= self.tiling.Bc) & (self.key() < self.Nk)


@fault("last_key_dropped", "the last key left out", RAGGED, "an end bound that is off by one")
class _(Reference):
    def exists(self):
        return self.key() < self.Nk - 1


@fault("first_key_dropped", "the first key left out", RAGGED, "a start bound that is off by one")
class _(Reference):
    def exists(self):
        return (self.key() > 0) & (self.key() < self.Nk)


@fault("keys_up_to_Nq", "only as many keys as there are queries", RAGGED, f"{BOUND}: Nq in the place of Nk")
class _(Reference):
    def exists(self):
        return self.key() < min(self.Nk, self.Nq)


@fault("keys_up_to_Nq", "only as many key tiles as Nq needs", RAGGED, f"{BOUND}: Nq in the place of Nk")
class _(_Bc):
    def exists(self):
        return self.key() < min(self.Nk, -(-self.Nq // self.tiling.Bc) * self.tiling.Bc)


class _Rows(Reference):
    tiled = "Br"


@fault(
    "last_rows_unwritten",
    "the last, ragged query tile not written",
    RAGGED,
    "the grid: Nq // Br instead of rounding up",
)
class _(_Rows):
    def forward(self):
        self.wild = np.broadcast_to(
            np.arange(self.Nq) >= self.Nq // self.tiling.Br * self.tiling.Br, (self.B, self.Hq, self.Nq)
        )
        return super().forward()
