"""The kernels that can be judged: the ladder, and the NumPy implementations it is built beside."""

from dataclasses import dataclass
from importlib import import_module

import numpy as np

from verify.dtypes import DTYPES

# What a caller may ask for; a kernel lists those it takes. The words of refusals.
OPTIONS = {
    "causal": "causal masking",
    "top_left": "causal masking aligned top left",
    "gqa": "fewer key heads than query heads",
    "strides": "views that are not contiguous",
    "mask": "a boolean mask",
    "bias": "an additive bias",
    "window": "a sliding window",
    "softcap": "softcap",
    "alibi": "ALiBi",
    "dropout": "dropout",
    "varlen": "packed sequences",
    "paged": "paged keys and values",
    "backward": "a backward pass",
}
_DENSE = frozenset({"causal", "top_left", "gqa", "strides"})


@dataclass(frozen=True)
class Kernel:
    """One implementation and what it can do.

    Attributes
    ----------
    name, chapter, idea : str
        Stem, the chapter's section, and what it adds, in a few words.
    module : str
        Where its `attention` lives.
    reference : str or None
        The module in refimpl with the same data flow.
    runs : "cuda" or "numpy"
        On an executor of flash_cuda, or directly.
    dtypes : tuple of str
        Storage types.
    d_min, d_max : int
        Head dims, of Q and K and of V.
    options : frozenset of str
        Out of `OPTIONS`.
    min_cc : tuple of int
        Lowest compute capability.
    spreads : str
        What a NaN in an input may reach.
    """

    name: str
    chapter: str
    idea: str
    module: str
    reference: str | None = None
    runs: str = "cuda"
    dtypes: tuple = ("fp32", "fp16", "bf16")
    d_min: int = 1
    d_max: int = 256
    options: frozenset = _DENSE
    min_cc: tuple = (7, 5)
    spreads: str = "only the outputs that depend on it"

    def attention(self):
        """Import the kernel and return ``attention(Q, K, V, *, scale, causal, align, ...) -> (O, lse)``.

        A NumPy implementation computes in fp32, or in fp64 on fp64 inputs, and is given storage types here: its O is
        rounded to Q's type and its lse to fp32, as a kernel's would be.
        """
        fn = import_module(self.module).attention
        return fn if self.runs == "cuda" else _stored(fn)

    def refuses(self, case, dtype) -> str | None:
        """Why the kernel does not take a case in a storage type; None if it does.

        Parameters
        ----------
        case : verify.cases.Case
        dtype : str
        """
        return self.lacks(case.needs, dtype, case.full.d, case.full.dv)

    def lacks(self, needs, dtype, d, dv) -> str | None:
        """Why the kernel does not take a problem that needs these options, types and head dims; None if it does."""
        if dtype not in self.dtypes:
            return f"stores {', '.join(self.dtypes)}, not {dtype}"
        for name, n in (("head dim", d), ("head dim of V", dv)):
            if not self.d_min <= n <= self.d_max:
                return f"{name} {n} is outside {self.d_min} ... {self.d_max}"
        missing = [OPTIONS[name] for name in OPTIONS if name in needs and name not in self.options]
        return f"does not take {', '.join(missing)}" if missing else None


def _stored(fn):
    """A NumPy implementation with a kernel's interface: storage types in and out."""
    untyped = fn.__module__ == "refimpl.oracle"  # always fp64

    def attention(Q, K, V, **options):
        arithmetic = np.float64 if Q.dtype == np.float64 else np.float32
        O, lse = fn(Q, K, V, **options, **({} if untyped else {"dtype": arithmetic}))
        return O.astype(Q.dtype), lse.astype(arithmetic)

    attention.__module__ = fn.__module__
    return attention


def _step(stem, chapter, idea):
    return Kernel(stem, chapter, idea, f"flash_cuda.{stem}", f"refimpl.{stem}")


_LADDER = (
    _step("step0_standard", "18.2, 18.3.3", "three kernels; S and P live in HBM"),
    _step("step1_fused", "18.3.4", "one kernel, two passes over K: no S in HBM, but K twice"),
    _step("step2_flash_v1", "18.4", "online softmax, K/V outer loop: O, m, l go round through HBM"),
    _step("step3_flash_v2", "18.5.1", "Q outer loop, one block per Q tile: O, m, l never leave the chip"),
    _step("step4_causal", "18.5.2", "dead tiles not visited, only edge tiles masked"),
)
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in _LADDER}

# Kernels off the ladder: more options, the same tiling.
BRANCHES: dict[str, Kernel] = {
    "general": Kernel(
        "general", "18.7", "every option, as rules; gradients", "flash_cuda.general",
        options=_DENSE | {"mask", "bias", "window", "softcap", "alibi", "dropout", "varlen", "backward"},
    ),
}  # fmt: skip
CUDA = KERNELS | BRANCHES

# The oracle computes in fp64 whatever comes in. The NumPy steps compute in fp32 unless the inputs are fp64.
_ANY = frozenset({"causal", "top_left", "gqa", "strides", "mask", "backward"})
_MORE = frozenset({"bias", "window", "softcap", "alibi", "dropout", "varlen"})
REFERENCES: dict[str, Kernel] = {
    "oracle": Kernel(
        "oracle", "18.2", "fp64, untiled: the truth", "refimpl.oracle", runs="numpy", dtypes=tuple(DTYPES),
        d_max=1 << 20, options=_ANY | _MORE,
    ),
    **{
        f"refimpl.{stem}": Kernel(
            f"refimpl.{stem}", kernel.chapter, kernel.idea, f"refimpl.{stem}", runs="numpy", dtypes=tuple(DTYPES),
            d_max=1 << 20, options=_ANY,
        )
        for stem, kernel in KERNELS.items()
    },
}  # fmt: skip
ALL: dict[str, Kernel] = CUDA | REFERENCES
