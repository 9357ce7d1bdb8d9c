"""Which kernel the flash-attn interface takes: the steps that there are, fastest first, and what each cannot do."""

import importlib
from typing import NamedTuple

import numpy as np

from flash_cuda.general import RULE_TILES
from flash_cuda.launch import TILES


class Step(NamedTuple):
    """A kernel that may be chosen: its module, the options that it can do, its tiles by head room.

    capability : what the device must be: "" any, "8" that or later, "9a" exactly that
    d_unit, d_max : what head dims are multiples of, and the highest
    boxes : arrays are read by the copy engine
    """

    module: str
    can: frozenset
    tiles: dict
    capability: str = ""
    d_unit: int = 1
    d_max: int = 256
    boxes: bool = False

    def attention(self, *args, **options):
        return importlib.import_module(f"flash_cuda.{self.module}").attention(*args, **options)

    def attention_backward(self, *args, **options):
        return importlib.import_module(f"flash_cuda.{self.module}").attention_backward(*args, **options)

    def lacks(self, needs, asked):
        """Why the step cannot be taken, in words; None if it can."""
        if missing := sorted(needs - self.can):
            return f"cannot do {', '.join(missing)}"
        if not self.capability:
            return None
        major, made_for = asked.capability[0], int(self.capability.rstrip("a"))
        if major != made_for if self.capability.endswith("a") else major < made_for:
            later = "" if self.capability.endswith("a") else " or later"
            return f"is made for compute capability {made_for}{later}"
        if asked.dtype.itemsize != 2:
            return "takes fp16 and bf16"
        if asked.d % self.d_unit or asked.dv % self.d_unit:
            return f"takes head dims that are multiples of {self.d_unit}"
        if max(asked.d, asked.dv) > self.d_max:
            return f"takes head dims up to {self.d_max}"
        if self.boxes and asked.obstacle:
            return f"cannot copy {asked.obstacle}"
        return None


class Asked(NamedTuple):
    """What the choice of a step for tensor cores depends on besides options."""

    capability: tuple
    dtype: np.dtype
    d: int
    dv: int
    obstacle: str = None  # which array the copy engine cannot read, and why


SIMT = (  # fastest first; one that can do less stands before one that can do more
    Step("step4_causal", frozenset({"causal"}), TILES),
    Step(
        "general",
        frozenset({"causal", "window_size", "softcap", "alibi_slopes", "dropout_p", "lengths"}),
        RULE_TILES,
    ),
)
STEPS = (
    Step("step6_flash_v3", frozenset({"causal", "window_size", "softcap"}), {}, "9a", d_unit=8, boxes=True),
    Step("step5_tensor_core", SIMT[-1].can, {}, "8"),
    *SIMT,
)
BACKWARD = (
    Step("backward_hopper", frozenset({"causal"}), {}, "9a", d_unit=8, d_max=128, boxes=True),
    Step("backward_tensor_core", SIMT[-1].can, {}, "8"),
    Step("backward", SIMT[-1].can, {}),
)


def choose(needs, asked=None, steps=STEPS):
    """The fastest step that can do all that is needed, and why in words; a SIMT one if no more is ``asked``."""
    passed_over = []
    for step in (step for step in steps if asked or not step.capability):
        fault = step.lacks(needs, asked)
        if fault is None:
            only = "one for all options" if step is BACKWARD[-1] else "the fastest there is"
            return step, "; ".join(passed_over) or only
        passed_over.append(f"{step.module} {fault}")
    raise AssertionError("the last step can do everything")
