"""Makes subjects of kernels: registered ones, strangers' files, modules at hand; here, or in another process."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module

import numpy as np

from refimpl.tiling import Tile
from verify import calls, executors
from verify.case import SMALL_THREADS, SMALL_TILE
from verify.diagnose.probe import Probe
from verify.diagnose.subject import Subject, near
from verify.foreign.call import call
from verify.foreign.facts import usual
from verify.foreign.signature import NEEDS, backward_signature, signature
from verify.foreign.spec import Loaded, Spec, load
from verify.registry import ALL
from verify.worker import Worker

# What every kernel of ours takes besides what the registry lists.
ALWAYS = frozenset({"scale", "cross", "causal_cross", "bottom_right", "no_keys", "ragged", "odd_d", "wide_v"})
OURS = ALWAYS | {"nan"}
# What a stranger's signature, or a small call, has to say first.
SIGNED = frozenset(NEEDS) | {"gqa", "strides", "top_left", "backward"}
LIMIT = 120.0  # seconds for a probe
WHOLE = 128  # multiples of this suit every tile in use


def run_ours(name, probe, executor, tile=None, load=import_module, watch=True) -> dict:
    """Run a registered kernel on a probe.

    Parameters
    ----------
    name : str
    probe : Probe
    executor : "gpu", "emulated" or "numpy"
    tile : Tile, optional
        Of the emulated sizes, if not 16 x 16.
    load : callable
        As `calls.outputs`.
    watch : bool
        With the emulator's race detector.
    """
    kernel, problem = ALL[name], probe.posed
    where = {}
    if executor == "emulated":
        from flash_cuda.executors.emulator import Emulator

        where = {"on": Emulator(seed=0, watch=watch), "threads": SMALL_THREADS}
    elif executor == "gpu":
        where = {"on": executors.open_executor("gpu")}
    if executor != "gpu" and name != "oracle":
        size = tile or kernel.tile(Tile(SMALL_TILE, SMALL_TILE) if executor == "emulated" else Tile(64, 64))
        where["tile"] = load("refimpl.tiling").Tile(size.Br, size.Bc)
    # Gradients from the kernel's own O and lse, as its scores' errors and those of its lse cancel in P.
    ways = kernel.judged_ways(executor == "emulated")
    found = [{n: outputs[n] for n in probe.truth} for outputs in calls.runs(kernel, problem, where, load, ways)]
    return max(found, key=lambda outputs: _wrong(outputs, probe))


def _wrong(outputs, probe) -> float:
    """How many numbers are off: of several ways to the gradients the one that fails is looked at."""
    pairs = [(np.asarray(x).astype(np.float64), name) for name, x in outputs.items()]
    if any(x.shape != probe.truth[name].shape for x, name in pairs):
        return np.inf
    return sum((~near(x, probe.truth[name], probe.tolerance[name])).sum() for x, name in pairs)


def registered(name, executor) -> Subject:
    """A kernel of the registry; in this process.

    Parameters
    ----------
    name : str
    executor : "gpu" or "emulated"
        For kernels of flash_cuda; the NumPy ones run as they are.
    """
    kernel = ALL[name]
    executor = executor if kernel.runs == "cuda" else "numpy"
    small = executor == "emulated"
    d = 64 if executor == "gpu" else None
    lost = {"odd_d"} if kernel.d_unit > 1 else set()
    words, back = kernel.options | OURS, kernel.gradients and (kernel.gradients.options | OURS) - lost
    run = partial(run_ours, name, executor=executor)
    return Subject(name, run, words - lost, kernel.dtypes, d, small, with_gradients=back)


def of_module(module, name, function="attn") -> Subject:
    """A stranger's module that is at hand, on NumPy arrays; its own signature says what it takes."""
    fn = getattr(module, function)
    parameters, needed = signature(fn)
    backward = getattr(module, f"{function}_backward", None)
    says = getattr(module, "CAPABILITIES", {})
    back = backward_signature(backward) if backward else ({}, frozenset())
    loaded = Loaded(fn, parameters, needed, "numpy", "at hand", says, backward, *back)
    return of_loaded(loaded, name, says.get("dtypes", ("fp32",)))


def of_loaded(loaded: Loaded, name, dtypes, small=False) -> Subject:
    """A stranger's kernel that was imported; its own signature says what it takes."""
    return Subject(name, lambda probe: foreign_outputs(loaded, probe), offered(loaded), dtypes, small=small)


def offered(loaded: Loaded) -> frozenset:
    """What a stranger's kernel takes, going by its signature and CAPABILITIES."""
    words = {word for word, needs in NEEDS.items() if set(needs) <= loaded.parameters.keys()} | ALWAYS - {"scale"}
    words |= {"gqa", "strides"}
    words -= {word for word, is_so in loaded.says.items() if is_so is False}
    if "align" in loaded.parameters:
        words.add("top_left")
    if loaded.backward is not None:
        words.add("backward")
    return frozenset(words)


class ReadOnly(RuntimeError):
    """A kernel wrote to one of its inputs. Named as the emulator's, since it means the same to a diagnosis."""


def foreign_outputs(loaded: Loaded, probe: Probe, layout="bhsd") -> dict:
    """Run a stranger's kernel on a probe; of the backward pass, the gradients.

    Raises
    ------
    ReadOnly
        The kernel has overwritten an input: of a copy, such as a GPU has, nobody else would notice.
    """
    posed = probe.posed
    before = [x.tobytes() for x in (posed.Q, posed.K, posed.V)]
    answer = call(loaded, posed, layout, watch=False)
    for name, x, was in zip("QKV", answer.inputs, before, strict=True):
        if np.asarray(x).tobytes() != was:
            raise ReadOnly(f"input {name} was modified")
    outputs = answer.outputs
    wanted = ("O", "lse") if probe.dO is None else ("dQ", "dK", "dV")
    return {name: outputs[name] for name in wanted if name in outputs}


def answer(source, probe) -> dict:
    """Run what `apart` was asked for. Runs in the worker."""
    kind, what, where = source
    if kind == "ours":
        return run_ours(what, probe, where)
    return foreign_outputs(load(what), probe, where)


@contextmanager
def apart(subject: Subject, source):
    """A subject whose kernel runs in a process of its own, with a time limit for every probe.

    Parameters
    ----------
    subject : Subject
    source : tuple
        ("ours", name, executor) or ("foreign", Spec, layout).
    """
    with Worker() as worker:

        def remote(probe):
            bare = replace(probe)  # without the truth that it may hold
            try:
                return worker.call("verify.diagnose.subjects:answer", source, bare, limit=LIMIT)
            except RuntimeError as error:
                kind, _, text = str(error).partition(": ")
                raise type(kind, (RuntimeError,), {})(text or kind) from None

        yield replace(subject, call=remote)


def foreign(spec: Spec, facts, dtypes) -> Subject:
    """A stranger's file, as `foreign_probe.probe` came to know it.

    Parameters
    ----------
    spec : Spec
    facts : verify.foreign.probe.Facts
    dtypes : sequence of str
    """
    refused = set(facts.refused)
    dims = {key[1:] for key in refused if isinstance(key, tuple) and key[0] == "head dim"}
    refused |= {word for word, is_odd in (("odd_d", _is_odd), ("wide_v", _is_wide)) if any(map(is_odd, dims))}
    words = (ALWAYS | SIGNED) - refused
    taken = tuple(dtype for dtype in dtypes if ("dtype", dtype) not in refused)
    return Subject(
        spec.name,
        lambda probe: foreign_outputs(load(spec), probe, facts.layout),
        frozenset(words),
        taken,
        facts.d or (None if facts.small else usual(small=False)),
        facts.small,
        WHOLE if "ragged" in refused else 1,
        "cross" in refused,
    )


def _is_odd(dims):
    """(d, dv) that no vector width divides."""
    return bool(dims[0] % 8)


def _is_wide(dims):
    """(d, dv) that differ."""
    return dims[0] != dims[1]
