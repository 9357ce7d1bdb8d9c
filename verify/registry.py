"""The kernels that can be judged: the ladder, and the NumPy implementations it is built beside."""

from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module

import numpy as np

from refimpl.tiling import Tile, cdiv
from verify.dtypes import DTYPES

# What a caller may ask for; a kernel lists those it takes. The words of refusals.
OPTIONS = {
    "causal": "causal masking",
    "top_left": "causal masking aligned top left",
    "gqa": "fewer key heads than query heads",
    "strides": "views that are not contiguous",
    "nan_hidden": "NaN at keys that no row sees",
    "nan_seen": "NaN in values that not all rows of a tile see",
    "mask": "a boolean mask",
    "bias": "an additive bias",
    "window": "a sliding window",
    "softcap": "softcap",
    "alibi": "ALiBi",
    "lengths": "padding by lengths",
    "rules": "rules of one's own",
    "dropout": "dropout",
    "varlen": "packed sequences",
    "paged": "paged keys and values",
    "backward": "a backward pass",
}
_DENSE = frozenset({"causal", "top_left", "gqa", "strides", "nan_hidden", "nan_seen"})
_BACKWARD = _DENSE - {"nan_seen"} | {"backward"}  # on tensor cores
_SPREADS = "the outputs that depend on it, in V rows of the query tiles that visit it, and all gradients of its tiles"
_OPTIONS = frozenset({"mask", "bias", "window", "softcap", "alibi", "lengths", "rules", "dropout", "backward"})


@dataclass(frozen=True)
class Gradients:
    """Where the gradients of a kernel of flash_cuda come from, and what may be asked for with them.

    Attributes
    ----------
    module : str
        Where its `attention_backward` lives.
    options : frozenset of str
        Out of `OPTIONS`.
    d_max : int
        Highest head dim.
    atomic : bool
        With ``deterministic=False`` dQ is added up atomically: both ways are judged, and this one is timed.
    borrowed : bool
        Without atomics dQ is computed by the kernel of another, where it is judged: the emulator leaves that way out.
    """

    module: str
    options: frozenset
    d_max: int = 256
    atomic: bool = False
    borrowed: bool = False


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
    d_min, d_max, d_unit : int
        Head dims, of Q and K and of V: the range, and what they are multiples of.
    options : frozenset of str
        Out of `OPTIONS`.
    min_cc : tuple of int
        Lowest compute capability.
    spreads : str
        What a NaN in an input may reach.
    tile_units : tuple of int
        What Br and Bc are multiples of.
    reciprocal : bool
        O is O_acc times 1 / l, rather than O_acc / l.
    gradients : Gradients or None
        None for NumPy implementations, which have all options backward too, and for kernels without a backward pass.
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
    d_unit: int = 1
    options: frozenset = _DENSE
    min_cc: tuple = (7, 5)
    spreads: str = "only the outputs that depend on it"
    tile_units: tuple = (1, 1)
    reciprocal: bool = False
    gradients: Gradients | None = None

    def attention(self, load=import_module):
        """Import the kernel and return ``attention(Q, K, V, *, scale, causal, align, ...) -> (O, lse)``.

        A NumPy implementation computes in fp32, or in fp64 on fp64 inputs, and is given storage types here: its O is
        rounded to Q's type and its lse to fp32, as a kernel's would be. `load` finds modules by name.
        """
        fn = load(self.module).attention
        return fn if self.runs == "cuda" else _stored(fn)

    def tile(self, tile) -> Tile:
        """The smallest tile no smaller than the one given that the kernel takes."""
        return Tile(*(unit * cdiv(n, unit) for n, unit in zip((tile.Br, tile.Bc), self.tile_units, strict=True)))

    def attention_backward(self, load=import_module):
        """Import and return ``attention_backward(Q, K, V, O, lse, dO, **options) -> (dQ, dK, dV, dbias or None)``.

        Storage types in and out, as for `attention`; dbias is fp32.
        """
        if self.runs == "cuda":
            return load(self.gradients.module).attention_backward
        if self.name == "oracle":
            return _stored_backward(_without_outputs(load(self.module).attention_backward))
        # Step 2 goes with the v1 order of loops, the others with v2.
        order = "v1" if "v1" in self.name else "v2"
        return _stored_backward(partial(_by_steps, load("refimpl.backward").attention_backward, order))

    @property
    def ways(self) -> tuple:
        """Options of `attention_backward`, one set for each way it has.

        The first is the fastest and is what is timed; the last gives the same bits every run.
        """
        both = {"deterministic": False}, {"deterministic": True}
        return both if self.gradients and self.gradients.atomic else ({},)

    def judged_ways(self, emulated) -> tuple:
        """Those of its `ways` that are judged, on a GPU or in the emulator."""
        return self.ways[:1] if emulated and self.gradients and self.gradients.borrowed else self.ways

    def refuses(self, case, dtype, small=False) -> str | None:
        """Why the kernel does not take a case in a storage type; None if it does.

        Parameters
        ----------
        case : verify.case.Case
        dtype : str
        small : bool
            In its small shape.
        """
        shape = case.shape(small)
        return self.lacks(case.needs, dtype, shape.d, shape.dv)

    def fitted(self, case):
        """The case, with head dims of its small shape that the kernel takes."""
        return replace(case, small=self.fitting(case.small))

    def fitting(self, shape):
        """A shape with head dims that the kernel takes: the next ones up."""
        d, dv = (self.d_unit * cdiv(n, self.d_unit) for n in (shape.d, shape.dv))
        return shape._replace(d=d, dv=dv)

    def lacks(self, needs, dtype, d, dv) -> str | None:
        """Why the kernel does not take a problem that needs these options, types and head dims; None if it does."""
        if dtype not in self.dtypes:
            return f"stores {', '.join(self.dtypes)}, not {dtype}"
        back = self.gradients if "backward" in needs else None
        d_max = min(self.d_max, back.d_max) if back else self.d_max
        for name, n in (("head dim", d), ("head dim of V", dv)):
            if not self.d_min <= n <= d_max:
                return f"{name} {n} is outside {self.d_min} ... {d_max}{' for gradients' if d_max < self.d_max else ''}"
            if n % self.d_unit:
                return f"{name} {n} is not a multiple of {self.d_unit}"
        takes = self.options & back.options if back else self.options
        missing = [OPTIONS[name] for name in OPTIONS if name in needs and name not in takes]
        alone = back and needs <= self.options  # what is missing is taken by the forward pass
        return f"does not take {', '.join(missing)}{' with gradients' if alone else ''}" if missing else None


def _stored(fn):
    """A NumPy implementation with a kernel's interface: storage types in and out."""
    untyped = fn.__module__.endswith("refimpl.oracle")  # always fp64

    def attention(Q, K, V, **options):
        arithmetic = np.float64 if Q.dtype == np.float64 else np.float32
        O, lse = fn(Q, K, V, **options, **({} if untyped else {"dtype": arithmetic}))
        return O.astype(Q.dtype), lse.astype(arithmetic)

    attention.__module__ = fn.__module__
    return attention


def _stored_backward(fn):
    """Gradients with a kernel's interface: storage types in and out, dbias in fp32."""

    def attention_backward(Q, K, V, O, lse, dO, **options):
        dQ, dK, dV, dbias = fn(Q, K, V, O, lse, dO, **options)
        arithmetic = np.float64 if Q.dtype == np.float64 else np.float32
        return *(x.astype(Q.dtype) for x in (dQ, dK, dV)), None if dbias is None else dbias.astype(arithmetic)

    return attention_backward


def _without_outputs(fn):
    """The oracle's gradients: it computes O and lse itself."""
    return lambda Q, K, V, O, lse, dO, **options: fn(Q, K, V, dO, **options)


def _by_steps(fn, order, Q, K, V, O, lse, dO, **options):
    """refimpl's gradients; that of a bias where the rules hold one."""
    dbias = any(rule.bias is not None for rule in options.get("rules", ()))
    arithmetic = np.float64 if Q.dtype == np.float64 else np.float32
    found = fn(Q, K, V, O, lse, dO, **options, dbias=dbias, order=order, dtype=arithmetic)
    return found if dbias else (*found, None)


def _step(stem, chapter, idea, **more):
    return Kernel(stem, chapter, idea, f"flash_cuda.{stem}", f"refimpl.{stem}", **more)


_LADDER = (
    _step("step0_standard", "18.2, 18.3.3", "three kernels; S and P live in HBM"),
    _step("step1_fused", "18.3.4", "one kernel, two passes over K: no S in HBM, but K twice"),
    _step("step2_flash_v1", "18.4", "online softmax, K/V outer loop: O, m, l go round through HBM"),
    _step("step3_flash_v2", "18.5.1", "Q outer loop, one block per Q tile: O, m, l never leave the chip"),
    _step("step4_causal", "18.5.2", "dead tiles not visited, only edge tiles masked"),
    _step(
        "step5_tensor_core", "18.4.5, 18.5", "products on tensor cores in 16 bits, copies running beside them",
        dtypes=("fp16", "bf16"), min_cc=(8, 0), tile_units=(16, 16), reciprocal=True,
        options=_DENSE - {"nan_seen"} | _OPTIONS,
        gradients=Gradients("flash_cuda.backward_tensor_core", _BACKWARD | _OPTIONS, atomic=True),
        spreads=_SPREADS,
    ),
    _step(
        "step6_flash_v3", "18.6", "Hopper: copies, products and softmax overlap",
        dtypes=("fp16", "bf16"), d_min=8, d_unit=8, min_cc=(9, 0), tile_units=(64, 16), reciprocal=True,
        options=_DENSE - {"nan_seen"} | {"window", "softcap", "backward"},
        gradients=Gradients("flash_cuda.backward_hopper", _BACKWARD, d_max=128, atomic=True, borrowed=True),
        spreads=_SPREADS,
    ),
)
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in _LADDER}

# Kernels off the ladder: more options, the same tiling.
BRANCHES: dict[str, Kernel] = {
    "general": Kernel(
        "general", "18.7", "every option, as rules; gradients", "flash_cuda.general",
        options=_DENSE | _OPTIONS | {"varlen"},
        gradients=Gradients("flash_cuda.backward", _DENSE | _OPTIONS | {"varlen"}, atomic=True),
    ),
}  # fmt: skip
# What kernels are measured against.
BASELINES: dict[str, Kernel] = {
    "standard_tensor_core": _step(
        "standard_tensor_core", "18.2, 18.3.3", "the honest baseline: step 0 on tensor cores",
        dtypes=("fp16", "bf16"), min_cc=(8, 0), tile_units=(16, 16), options=_DENSE - {"nan_seen"},
        spreads="the outputs that depend on it, and all rows in V",
    ),
}
JUDGED = KERNELS | BRANCHES  # unless others are named
CUDA = JUDGED | BASELINES

# The oracle computes in fp64 whatever comes in. The NumPy steps compute in fp32 unless the inputs are fp64.
REFERENCES: dict[str, Kernel] = {
    "oracle": Kernel(
        "oracle", "18.2", "fp64, untiled: the truth", "refimpl.oracle", runs="numpy", dtypes=tuple(DTYPES),
        d_max=1 << 20, options=_DENSE | _OPTIONS - {"rules"} | {"varlen"},
    ),
    **{
        f"refimpl.{stem}": Kernel(
            f"refimpl.{stem}", kernel.chapter, kernel.idea, f"refimpl.{stem}", runs="numpy", dtypes=tuple(DTYPES),
            d_max=1 << 20, options=_DENSE | _OPTIONS,
        )
        for stem, kernel in (KERNELS | BASELINES).items()
    },
}  # fmt: skip
ALL: dict[str, Kernel] = CUDA | REFERENCES
