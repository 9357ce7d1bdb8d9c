"""Calls a stranger's kernel on a problem, with its arrays, layout and words for options, and reads what it returns."""

from dataclasses import dataclass, field
from inspect import signature
from time import perf_counter

import numpy as np

from verify import plain
from verify.foreign.arrays import open_arrays
from verify.foreign.imports import simulated
from verify.foreign.signature import NAMES
from verify.foreign.spec import Loaded

WANTED = {
    "numpy": "a NumPy array",
    "torch": "a PyTorch tensor",
    "cupy": "a CuPy array",
    "jax": "a JAX array",
    "numba": "a Numba device array",
}
# Options that are neutral, for parameters that have no default.
NEUTRAL = {"causal": False, "align": "bottom_right", "softcap": 0.0, "dropout_p": 0.0}


class Malformed(ValueError):
    """What came back cannot be judged. The message is one line."""


@dataclass
class Answer:
    """What a kernel returned.

    Attributes
    ----------
    outputs : dict of str to ndarray
        O, and lse and gradients if there are any; (batch, heads, ...) whatever the kernel's layout.
    inputs : tuple of ndarray
        Q, K, V as they were afterwards.
    broken : list of str
        Buffers that it wrote past.
    notes : list of str
        What was left aside.
    seconds : float
    executor, device : str
    """

    outputs: dict
    inputs: tuple = ()
    broken: list = field(default_factory=list)
    notes: list = field(default_factory=list)
    seconds: float = 0.0
    executor: str = "cpu"
    device: str = ""


class NoGradients(Malformed):
    """There is nothing to differentiate: no answer, where a wrong one would be a fault."""


def call(loaded: Loaded, problem, layout="bhsd", *, watch=True) -> Answer:
    """Run a kernel on a problem.

    Parameters
    ----------
    loaded : Loaded
    problem : verify.case.Problem
        With `problem.backward`, gradients are asked for, too.
    layout : "bhsd" or "bshd"
        Of the arrays that it is given and returns.
    watch : bool
        Put bands around the buffers it makes.

    Raises
    ------
    Malformed
        If it returns no attention: a wrong type, shape or element type.
    Exception
        Whatever the kernel raises.
    """
    arrays = open_arrays(loaded.arrays)
    stored = [_laid_out(x, layout) for x in (problem.Q, problem.K, problem.V)]
    inputs = [arrays.put(x, f"input {name}") for name, x in zip("QKV", stored, strict=True)]
    options = arguments(loaded.parameters, loaded.needed, problem, arrays)
    dO = arrays.put(_laid_out(problem.dO(), layout), "input dO") if problem.backward else None
    step = _differentiated(arrays) if problem.backward and loaded.backward is None else _forward
    start = perf_counter()
    with arrays.watch():
        returned, gradients = step(loaded, inputs, options, dO, arrays)
        if problem.backward and loaded.backward is not None:
            options = arguments(loaded.backward_parameters, loaded.backward_needed, problem, arrays)
            gradients = _backward(loaded, inputs, returned, dO, options)
        arrays.sync()
    seconds = perf_counter() - start
    outputs, notes = read(returned, problem, layout, arrays)
    if problem.backward:
        outputs |= read_gradients(gradients, problem, layout, arrays)
    left = tuple(_bhsd(arrays.get(x), layout) for x in inputs)
    executor = "simulated" if simulated() else arrays.executor
    return Answer(outputs, left, arrays.broken(), notes, seconds, executor, arrays.device)


def arguments(parameters, needed, problem, arrays) -> dict:
    """Keyword arguments for the options that a signature names, in its own words.

    Parameters
    ----------
    parameters, needed : dict, frozenset
        As `foreign.signature` reads them.
    problem : verify.case.Problem
    arrays : Arrays
        Makes those among them that are arrays.
    """
    given, s = dict(problem.options), problem.shape
    out = {}
    for meaning, name in parameters.items():
        if meaning not in NAMES:
            continue
        value = given.get(meaning)
        if value is None and meaning in needed:
            value = plain.resolve(None, s.d) if meaning == "scale" else NEUTRAL.get(meaning)
        elif value is None:
            continue
        if name == "window_size":
            value = tuple(-1 if bound is None else int(bound) for bound in value or (None, None))
        elif meaning in ("mask", "bias") and value is not None:
            value = np.broadcast_to(value, (s.B, s.Hq, s.Nq, s.Nk))
        if isinstance(value, np.ndarray):
            value = arrays.put(np.ascontiguousarray(_element(value)), f"input {name}")
        out[name] = value
    return out


def _element(x):
    """Slopes and biases as fp32, lengths as int32: the types that kernels take."""
    return x.astype({"f": np.float32, "i": np.int32, "b": np.bool_}[x.dtype.kind])


def _forward(loaded, inputs, options, dO, arrays):
    return _attend(loaded, inputs, options), None


def _attend(loaded, inputs, options):
    """The kernel's own call: inputs by name where its signature has the names, else in order."""
    if "Q" in loaded.parameters:
        named = {loaded.parameters[n]: x for n, x in zip("QKV", inputs, strict=True)}
        return _by_name(loaded.fn, named | options)
    return loaded.fn(*inputs, **options)


def _by_name(fn, given):
    """Call with arguments by name; those that its signature takes by position alone go there, or their defaults."""
    try:
        found = signature(fn).parameters.values()
    except (TypeError, ValueError):
        found = ()
    first = [given.get(p.name, p.default) for p in found if p.kind is p.POSITIONAL_ONLY]
    placed = {p.name for p in found if p.kind is p.POSITIONAL_ONLY}
    return fn(*first, **{name: x for name, x in given.items() if name not in placed})


def _differentiated(arrays):
    """Forward, and gradients by the library's own differentiation."""
    if arrays.name == "torch":
        return _autograd
    if arrays.name == "jax":
        return _vjp
    raise ValueError(f"no backward function, and {arrays.name} arrays have no autograd")


def _autograd(loaded, inputs, options, dO, arrays):
    import torch

    leaves = [x.detach().requires_grad_() for x in inputs]
    returned = _attend(loaded, leaves, options)
    O = returned[0] if isinstance(returned, tuple | list) else returned
    if not getattr(O, "requires_grad", False):
        beside = f"{getattr(loaded.fn, '__name__', 'attn')}_backward(q, k, v, do, ...) beside it"
        raise NoGradients(f"O does not require gradients: the kernel is no autograd function, and has no {beside}")
    return returned, torch.autograd.grad(O, leaves, dO)


def _vjp(loaded, inputs, options, dO, arrays):
    import jax

    kept = []

    def attend(*leaves):
        returned = _attend(loaded, leaves, options)
        several = isinstance(returned, tuple | list)
        kept.append(several)
        return (returned[0], returned[1:]) if several else (returned, ())

    O, back, rest = jax.vjp(attend, *inputs, has_aux=True)
    return ((O, *rest) if kept[0] else O), back(dO)


def _backward(loaded, inputs, returned, dO, options):
    """The backward function beside the kernel: q, k, v, do, and whichever of o, lse and the options it names."""
    O, lse = (*returned, None)[:2] if isinstance(returned, tuple | list) else (returned, None)
    given = dict(zip(("Q", "K", "V", "O", "lse", "dO"), (*inputs, O, lse, dO), strict=True))
    names = loaded.backward_parameters
    if {"Q", "K", "V", "dO"} <= names.keys():
        named = {names[meaning]: x for meaning, x in given.items() if meaning in names}
        return _by_name(loaded.backward, named | options)
    return loaded.backward(*given.values(), **options)  # it names none of them, and takes all in this order


def read(returned, problem, layout, arrays):
    """(outputs, notes) of what a kernel returned: O, or O and lse, or more.

    Raises
    ------
    Malformed
    """
    several = isinstance(returned, tuple | list)
    parts, s, notes = list(returned) if several else [returned], problem.shape, []
    if not parts:
        raise Malformed("returned nothing, expected O or (O, lse)")
    outputs = {"O": _output("O", parts[0], (s.B, s.Hq, s.Nq, s.dv), problem.Q.dtype, layout, arrays, s.d)}
    if len(parts) > 1 and parts[1] is not None:
        lse = _array("lse", parts[1], arrays)
        if lse.shape != (s.B, s.Hq, s.Nq):
            raise Malformed(f"lse has shape {lse.shape}, expected {(s.B, s.Hq, s.Nq)}")
        if lse.dtype not in (np.float32, np.float64):
            raise Malformed(f"lse has dtype {lse.dtype}, expected float32")
        outputs["lse"] = lse.astype(np.float64 if problem.dtype == "fp64" else np.float32)
    else:
        notes.append("O alone is returned: lse is not judged")
    if len(parts) > 2:
        notes.append(f"of {len(parts)} things returned, those after (O, lse) are ignored")
    return outputs, notes


def read_gradients(returned, problem, layout, arrays) -> dict:
    """dQ, dK, dV of what a backward function returned, and dbias if there is a fourth and the problem has a bias.

    Raises
    ------
    Malformed
    """
    if not isinstance(returned, tuple | list) or len(returned) < 3:
        raise Malformed(f"what the backward function returned is {_kind(returned)}, expected (dq, dk, dv)")
    wanted = (problem.Q, problem.K, problem.V)
    outputs = {
        name: _output(name, x, like.shape, like.dtype, layout, arrays, problem.shape.d)
        for name, x, like in zip(("dQ", "dK", "dV"), returned, wanted, strict=False)
    }
    if "bias" in problem.options and len(returned) > 3 and returned[3] is not None:
        outputs["dbias"] = _of_bias(_array("dbias", returned[3], arrays), problem)
    return outputs


def _of_bias(x, problem):
    """dbias, summed over the axes along which `arguments` spread the bias where it comes as the kernel was given it."""
    s, own = problem.shape, problem.options["bias"].shape
    own = (1,) * (4 - len(own)) + own
    if x.shape != (s.B, s.Hq, s.Nq, s.Nk) or x.shape == own:
        return x
    axes = tuple(axis for axis, n in enumerate(own) if n != x.shape[axis])
    return x.sum(axis=axes, dtype=np.float64).reshape(problem.options["bias"].shape).astype(x.dtype)


def _output(name, x, shape, dtype, layout, arrays, d_q):
    """One output in (batch, heads, length, dim), its shape and element type looked at in the kernel's own layout."""
    x = _array(name, x, arrays)
    B, H, N, d = shape
    own = shape if layout == "bhsd" else (B, N, H, d)
    if x.shape != tuple(own):
        words = "" if layout == "bhsd" else " (B, N, H, d)"
        told = f" ({hint})" if (hint := _shape_hint(x.shape, tuple(own), layout, d_q)) else ""
        raise Malformed(f"{name} has shape {x.shape}, expected{words} {tuple(own)}{told}")
    if x.dtype != dtype:
        raise Malformed(f"{name} has dtype {x.dtype}, expected {dtype}")
    return _bhsd(x, layout)


def _shape_hint(got, wanted, layout, d_q):
    """What a wrong shape of an output may come from; empty if nothing is likely."""
    if len(got) != 4:
        return ""
    if (got[0], got[2], got[1], got[3]) == wanted:
        return f"it looks transposed: inputs are in layout {layout}, and so must the output be"
    if got == (*wanted[:3], d_q):
        told = "raise NotImplementedError where its head dim is not that of Q, or say 'wide_v': False in CAPABILITIES"
        return f"V has head dim {wanted[3]}; if the kernel is not for that, {told}"
    return ""


def _array(name, x, arrays):
    if isinstance(x, bool | int | float | str | tuple | list | dict | type(None)):
        raise Malformed(f"{name} is {_kind(x)}, expected {WANTED[arrays.name]}")
    try:
        return arrays.get(x)
    except TypeError:
        raise Malformed(f"{name} is {_kind(x)}, expected {WANTED[arrays.name]}") from None


def _kind(x):
    name = type(x).__name__
    return "None" if x is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _laid_out(x, layout):
    """An array as the kernel takes it. What is contiguous stays so; a view stays a view."""
    if layout == "bhsd":
        return x
    moved = x.transpose(0, 2, 1, 3)
    return np.ascontiguousarray(moved) if x.flags.c_contiguous else moved


def _bhsd(x, layout):
    return x if layout == "bhsd" else x.transpose(0, 2, 1, 3)
