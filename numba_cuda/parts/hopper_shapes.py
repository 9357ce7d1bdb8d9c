"""What step 6's kernel can be made for, and which of that was fastest: tiles, buffers, turns."""

from typing import NamedTuple

from flash_cuda.ptx.hopper import SWIZZLE_ATOM

BARRIER = 8  # bytes of an mbarrier; those of a ring of n stages: n "full" ones, then n "empty" ones


class Shape(NamedTuple):
    """What a kernel is made for.

    Br, Bc: tile. D: head room. k_stages, v_stages, q_stages: buffers for tiles of K, V and Q in shared memory. turns:
    the warpgroups start their products one after the other, so that one's softmax falls under the products of the rest.
    """

    Br: int
    Bc: int
    D: int
    k_stages: int = 2
    v_stages: int = 2
    q_stages: int = 2
    turns: bool = False

    @property
    def consumers(self):
        """Consumer warpgroups."""
        return self.Br // 64

    @property
    def threads(self):
        """Threads a block."""
        return 128 * (self.consumers + 1)

    @property
    def shared_bytes(self):
        """Dynamic shared memory: the tiles, the barriers, and what aligning to a swizzle atom may skip."""
        rows = self.q_stages * self.Br + (self.k_stages + self.v_stages) * self.Bc
        stages = self.q_stages + self.k_stages + self.v_stages
        return 2 * self.D * rows + 2 * BARRIER * stages + SWIZZLE_ATOM


SHAPES = {
    64: Shape(192, 128, 64, 3, 3, turns=True),
    128: Shape(128, 128, 128, 2, 3),
    192: Shape(128, 80, 192),
    256: Shape(128, 64, 256, 2, 2, 1),
}
SHORT_CAUSAL = Shape(128, 192, 64, 3, 3, turns=True)  # for which 192 rows would hide much of their last key tiles
SHORT = 1536
CAPPED = Shape(192, 96, 64, 3, 3, turns=True)  # with softcap, whose tanh takes registers that 128 keys leave none of


def shape_for(d, Nq, causal, capped=False):
    """The shape for a head dim, number of queries, with or without a causal mask and softcap.

    The fastest on an H200, where no softcap is.
    """
    D = next((D for D in SHAPES if d <= D), max(SHAPES))
    if capped and D == 64:
        return CAPPED
    return SHORT_CAUSAL if D == 64 and causal and Nq <= SHORT else SHAPES[D]
