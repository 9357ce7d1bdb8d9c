"""A kernel that is not ours: where it is, and what it says of itself."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from verify.dtypes import DTYPES
from verify.foreign import adapters
from verify.foreign.arrays import KINDS
from verify.foreign.import_file import import_file
from verify.foreign.imports import imports, simulate_without_gpu
from verify.foreign.signature import backward_signature, signature
from verify.misuse import Misuse, suggest
from verify.registry import ALL, OPTIONS

LAYOUTS = ("bhsd", "bshd")
DEFAULT_NAMES = ("attn", "attention", "flash_attention", "flash_attn")

# Further words of CAPABILITIES: what reports say a kernel does not take.
WORDS = OPTIONS | {
    "scale": "a scale of one's own",
    "negative_scale": "a negative scale",
    "unaligned": "rows that do not begin on 16-byte boundaries",
    "empty_rows": "rows that see no key",
    "bottom_right": "causal masking aligned bottom right",
    "ragged": "lengths that no tile divides",
    "cross": "numbers of queries and keys that differ",
    "causal_cross": "causal masking where the numbers of queries and keys differ",
    "no_keys": "no keys at all",
    "wide_v": "a head dim of V that is not that of Q and K",
}
SAYS = {
    "arrays": "what kind of arrays it takes, as --arrays",
    "layout": "their layout, as --layout",
    "dtypes": "a list of the storage types that it takes",
    "head_dims": "a list of the head dims that it takes",
}


@dataclass(frozen=True)
class Spec:
    """A kernel as it was asked for on the command line; it pickles.

    Attributes
    ----------
    text : str
        "path/to/file.py:attn", or an adapter's name such as "sdpa:math".
    arrays, layout : str or None
        As asked; None leaves it to the file, and then to its imports, or a probe.
    backward : bool
        Gradients are judged, too.
    """

    text: str
    arrays: str | None = None
    layout: str | None = None
    backward: bool = False

    @property
    def adapter(self) -> bool:
        """It is one of `adapters`, not a file."""
        return self.text.split(":")[0] in adapters.FAMILIES

    @property
    def path(self) -> Path:
        """The file; of an adapter, the part after the colon."""
        text = self.text.partition(":")[2] if self.adapter else self._split()[0]
        return Path(text)

    @property
    def function(self) -> str | None:
        """The function's name, if one is given."""
        return None if self.adapter else self._split()[1]

    @property
    def name(self) -> str:
        """What reports call it: the file without its folders, and the function."""
        if self.adapter:
            family, _, rest = self.text.partition(":")
            return f"{family}:{Path(rest).name}" if rest else family
        return self.path.name + (f":{self.function}" if self.function else "")

    def _split(self):
        """(path, function or None); a drive's colon is not a function's."""
        head, colon, tail = self.text.rpartition(":")
        return (head, tail) if colon and tail.isidentifier() and len(head) > 1 else (self.text, None)


@dataclass(frozen=True)
class Loaded:
    """A kernel that was imported, in the process that runs it.

    Attributes
    ----------
    fn, backward : callable, callable or None
    parameters, backward_parameters : dict of str to str
        Meaning ("Q", "scale", "causal" ...) -> the name in the signature.
    needed, backward_needed : frozenset of str
        Meanings of parameters without a default.
    arrays : str
        Kind; why_arrays: who said so.
    says : dict
        `CAPABILITIES` of the file.
    """

    fn: Callable
    parameters: dict
    needed: frozenset
    arrays: str
    why_arrays: str
    says: dict = field(default_factory=dict)
    backward: Callable | None = None
    backward_parameters: dict = field(default_factory=dict)
    backward_needed: frozenset = frozenset()


def parse(text, arrays=None, layout=None, backward=False) -> Spec:
    """Check what the command line says of a kernel, without importing it.

    Raises
    ------
    Misuse
        For a file that is not there, or an adapter that does not exist.
    """
    spec = Spec(text, arrays, layout, backward)
    if spec.adapter:
        adapters.check(text)
    elif spec.path.suffix != ".py" or not spec.path.is_file():
        if text in ALL:
            raise Misuse(f"--kernel: {text} is one of ours; did you mean --kernels {text}?")
        if spec.path.suffix == ".py":
            raise Misuse(f"--kernel: there is no file {spec.path}")
        raise Misuse(f"--kernel: expected path/to/file.py:function or one of {', '.join(adapters.NAMES)}; got {text!r}")
    return spec


@cache
def load(spec: Spec) -> Loaded:
    """Import a kernel and read its signature. What the file does wrong comes through as its own exception.

    Raises
    ------
    ValueError
        If the function is missing, or cannot be called as attention.
    """
    if spec.adapter:
        module, fn = adapters.load(spec.text)
    else:
        simulate_without_gpu(spec.path)
        module = import_file(spec.path)
        fn = _function(module, spec)
    says = _checked(getattr(module, "CAPABILITIES", {}))
    arrays, why = _arrays(spec, says)
    parameters, needed = signature(fn)
    backward = getattr(module, f"{fn.__name__}_backward", None) if hasattr(fn, "__name__") else None
    back = backward_signature(backward) if backward else ({}, frozenset())
    return Loaded(fn, parameters, needed, arrays, why, says, backward, *back)


def _function(module, spec):
    """The function by its name, or the one whose name says attention."""
    own = [n for n, x in vars(module).items() if callable(x) and not n.startswith("_") and not isinstance(x, type)]
    wanted = spec.function or next((name for name in DEFAULT_NAMES if name in own), None)
    if wanted is None:
        raise ValueError(f"{spec.path.name}: name the function, as in {spec.path.name}:{own[0] if own else 'attn'}")
    if not callable(getattr(module, wanted, None)):
        raise ValueError(
            f"{spec.path.name} has no function {wanted!r}; {suggest(wanted, own) if own else 'it has none'}"
        )
    return getattr(module, wanted)


def _checked(says):
    """CAPABILITIES, if it makes sense.

    Raises
    ------
    ValueError
    """
    if not isinstance(says, dict):
        raise ValueError(f"CAPABILITIES: expected a dict, got {type(says).__name__}")
    known = (*SAYS, *WORDS)
    for key, value in says.items():
        if key not in known:
            raise ValueError(f"CAPABILITIES: there is no {key!r}; {suggest(str(key), known)}")
        allowed = {"arrays": KINDS, "layout": LAYOUTS, "dtypes": DTYPES}.get(key)
        for item in (value if key == "dtypes" else [value]) if allowed else ():
            if item not in allowed:
                raise ValueError(f"CAPABILITIES[{key!r}]: there is no {item!r}; {suggest(str(item), allowed)}")
        if key == "head_dims" and not _whole(value):
            raise ValueError(f"CAPABILITIES['head_dims']: expected a list of positive integers, got {value!r}")
        if key in WORDS and not isinstance(value, bool):
            raise ValueError(f"CAPABILITIES[{key!r}]: expected True or False, got {value!r}")
    return says


def _whole(value):
    """Whether it is a collection of positive integers."""
    some = isinstance(value, list | tuple | set | range) and len(value)
    return bool(some) and all(type(d) is int and d > 0 for d in value)


def _arrays(spec, says):
    """(kind of arrays, who said so)."""
    if spec.arrays:
        return spec.arrays, "asked for"
    if "arrays" in says:
        return says["arrays"], "said by CAPABILITIES"
    kind = next((kind for kind in ("torch", "cupy", "jax", "numba") if kind in imports(spec.path)), "numpy")
    return kind, "what the file imports" if kind != "numpy" else "the default"
