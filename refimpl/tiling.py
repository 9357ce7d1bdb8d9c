"""How a sequence is cut into tiles: sizes, counts and slices."""

from dataclasses import dataclass
from operator import index


@dataclass(frozen=True)
class Tile:
    """Br query rows against Bc keys: the shape of one tile of S.

    Raises
    ------
    TypeError
        Br or Bc is not an integer.
    ValueError
        Br or Bc is less than 1.
    """

    Br: int
    Bc: int

    def __post_init__(self):
        for name in ("Br", "Bc"):
            size = getattr(self, name)
            try:
                index(size)
            except TypeError:
                raise TypeError(f"{name} must be an integer, got {size!r}") from None
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")


DEFAULT_TILE = Tile(64, 64)


def cdiv(a, b):
    """Return a / b rounded up: the number of tiles of b that cover a. Exact for any sign of a."""
    return -(-a // b)


def spans(N, B):
    """Cut range(N) into slices of B; the last one is shorter where B does not divide N.

    Parameters
    ----------
    N, B : int
        Length, at least 0, and tile size, at least 1.

    Returns
    -------
    list of slice
        cdiv(N, B) slices whose ends never pass N.
    """
    return [slice(start, min(start + B, N)) for start in range(0, N, B)]
