"""Which block works on which query tiles, and in which order: even shares, and heads that share K and V close together.

A causal query tile is as long as the keys it sees. Tiles are dealt out in rounds, one to a block, forwards through the
blocks and then backwards, so that who got the longer of one round gets the shorter of the next. Heads go in groups,
whose K and V stay in L2 together; one group runs from its longest tiles to its shortest, the next from its shortest to
its longest, and the last one ends short. A block finds its tiles by arithmetic on its own number: a table would do
better by a percent or two, but what is loaded is not known to be the same for all lanes of a warp, and a product's
addresses must be.
"""

from functools import lru_cache

import numpy as np

L2_SHARE = 24 << 20  # bytes of K and V that are hoped to stay in a 50 MiB L2
SHARERS = 4  # blocks at least that read the same K and V at about the same time make L2's size unimportant
SEAM = 1  # what ending a query tile and beginning another costs, in key tiles


@lru_cache(maxsize=256)
def group_size(lengths, heads, bytes_of_head, blocks):
    """Heads that are worked on together: what L2 holds, or of half to all of that what leaves the shares most even.

    Parameters
    ----------
    lengths : tuple of int
        Key tiles that each query tile sees.
    heads : int
        Query heads of all batches.
    bytes_of_head : int
        Of K and V that one query head reads.
    blocks : int
    """
    if min(lengths) == max(lengths):
        return 1  # nothing to even out
    if heads * SHARERS <= blocks:
        return heads
    most = min(heads, max(1, L2_SHARE // bytes_of_head))
    return min(range(most, most // 2, -1), key=lambda group: unevenness(lengths, heads, group, blocks))


def key_tiles_of(p, low, high):
    """How many key tiles each query tile sees; one at least, as the kernel counts."""
    first = np.arange(p.Tr) * p.tile.Br
    last = np.minimum(first + p.tile.Br, p.Nq) - 1
    end = np.maximum(-(-np.clip(last + high + 1, 0, p.Nk) // p.tile.Bc), 1)
    begin = np.minimum(np.maximum(first + low, 0) // p.tile.Bc, end - 1)
    return tuple((end - begin).tolist())


def tiles_in_order(lengths, heads, group):
    """(query tile, head) of every place in the order in which tiles are dealt out; what the kernel computes.

    Returns
    -------
    tile, head : (len(lengths) * heads,), int
    """
    Tr = len(lengths)
    place = np.arange(Tr * heads)
    g, u = place // (group * Tr), place % (group * Tr)
    members = np.minimum(group, heads - g * group)
    tile = u // members
    last = (heads + group - 1) // group - 1
    return np.where((last - g) % 2, tile, Tr - 1 - tile), g * group + u % members


def unevenness(lengths, heads, group, blocks):
    """Work of the busiest block, over the mean."""
    cost = np.asarray(lengths)[tiles_in_order(lengths, heads, group)[0]] + SEAM
    rounds = -(-len(cost) // blocks)
    work = np.zeros((rounds, blocks))
    work.flat[: len(cost)] = cost
    work[1::2] = work[1::2, ::-1]  # every second round runs backwards through the blocks
    return float(work.sum(axis=0).max() * blocks / cost.sum())
