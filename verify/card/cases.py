"""Run beside the default cases: a row of growing N, and for a card a full matrix of shape x mask x input class."""

from verify.case import Case, dense

SHAPES = {  # full, small
    "whole_tiles": (dense(256, H=2, d=64), dense(48, H=2, d=8)),
    "one_tile": (dense(64, H=2, d=64), dense(16, H=2, d=8)),
    "fewer_queries": (dense(113, 203, H=2, d=64), dense(29, 45, H=2, d=8)),
    "more_queries": (dense(203, 113, H=2, d=64), dense(45, 29, H=2, d=8)),
}
MASKS = {
    "no_mask": {},
    "causal": {"causal": True},
    "window": {"having": ("window_both",)},
    "mask": {"having": ("mask_heads",)},
}
RECIPES = {
    "normal": "N(0, 1)",
    "logits_x10": "scores x10",
    "outliers": "outliers",
    "growing_max": "growing max",
    "large_values": "large V",
}
LENGTHS = (64, 128, 256, 512, 1024, 2048)  # an eighth of it where shapes are small
MATRIX, GROWTH = "matrix", "growth"


def name(shape, mask, recipe) -> str:
    """The id of a cell of the matrix."""
    return f"{shape}-{mask}-{recipe}"


def matrix(align="bottom_right") -> list[Case]:
    """Every shape with every mask and every input class.

    Parameters
    ----------
    align : str
        What the kernel does where the numbers of queries and keys differ.
    """
    return [
        Case(
            name(shape, mask, recipe), f"{mask}, {shape}, {recipe}", MATRIX, *sizes, recipe=recipe, align=align, **how
        )
        for mask, how in MASKS.items()
        for shape, sizes in SHAPES.items()
        for recipe in RECIPES
    ]


def growth() -> list[Case]:
    """N(0, 1) inputs, one head, longer and longer."""
    return [
        Case(f"growth_{k}", f"{N} queries and keys", GROWTH, dense(N, d=64), dense(N // 8, d=8))
        for k, N in enumerate(LENGTHS, 1)
    ]
