"""Draw what the chapter claims and what was found: one module a topic, `fig_<name>(data) -> Figure`.

`data_<name>()` beside each figure gathers its data; `python -m figures` writes all of them to figures/out.
"""

from collections.abc import Callable, Iterator
from importlib import import_module

from matplotlib.figure import Figure

TOPICS = (
    "hbm_traffic",
    "tiling",
    "masks",
    "online_softmax",
    "error_matrix",
    "roofline",
    "tile_map",
    "kill_matrix",
    "timing",
    "suite",
    "ladder",
    "tensor_core",
    "hopper",
    "overlap",
    "backward",
    "backward_rates",
    "claims",
    "error_claims",
    "mask_claims",
    "rate_claims",
)


def recipes(topic: str) -> Iterator[tuple[str, Callable, Callable]]:
    """Yield (name, fig_<name>, data_<name>) for every figure of a topic, in the order of its module."""
    module = import_module(f"figures.{topic}")
    for attribute in list(vars(module)):
        if attribute.startswith("fig_"):
            name = attribute.removeprefix("fig_")
            yield name, getattr(module, attribute), getattr(module, f"data_{name}")


def draw(topic: str) -> Iterator[tuple[str, Figure]]:
    """Yield (name, Figure) for every figure of a topic, on its own data."""
    for name, fig, data in recipes(topic):
        yield name, fig(data())
