"""How each kind of implementation is told the options of a problem: as arguments, as rules, or packed."""

from importlib import import_module

import numpy as np

# Arguments that stand for a rule in `refimpl.options`, in the order in which they apply.
AS_RULES = {"window": "window", "softcap": "softcap", "alibi_slopes": "alibi", "bias": "bias"}
# What the public functions take of packed sequences.
PACKED = {"scale", "causal", "window", "softcap", "alibi_slopes", "lengths_q", "lengths_k"}


def outputs(kernel, problem, where, load=import_module, way=0) -> dict:
    """Run an implementation on a problem; of several ways to the gradients, one.

    Parameters
    ----------
    kernel, problem, where, load
        As `runs`.
    way : int
        Which of `Kernel.ways`.

    Returns
    -------
    dict of ndarray
        As `runs` yields them.
    """
    return next(runs(kernel, problem, where, load, (kernel.ways[way],)))


def runs(kernel, problem, where, load=import_module, ways=None):
    """Run an implementation on a problem, its backward pass each way that it has.

    Parameters
    ----------
    kernel : verify.registry.Kernel
    problem : verify.case.Problem
    where : dict
        Arguments that say where to run: on, tile, threads.
    load : callable
        Finds modules by name: whoever runs changed copies of ours has one of their own.
    ways : sequence of dict, optional
        Options of the backward pass, `Kernel.ways` if not given.

    Yields
    ------
    dict of ndarray
        O and lse; with `problem.backward` also dQ, dK and dV, and dbias where the options hold a bias.
    """
    if problem.layout == "packed" and kernel.runs == "cuda":
        yield _packed(problem, where, load)
        return
    given = options_for(kernel, problem, load)
    arrays = problem.Q, problem.K, problem.V
    O, lse = kernel.attention(load)(*arrays, **given, **where)
    found = {"O": O, "lse": lse}
    if not problem.backward:
        yield found
        return
    backward = kernel.attention_backward(load)
    for way in kernel.ways if ways is None else ways:
        gradients = backward(*arrays, O, lse, problem.dO(), **given, **where, **way)
        yield found | {n: x for n, x in zip(("dQ", "dK", "dV", "dbias"), gradients, strict=False) if x is not None}


def options_for(kernel, problem, load=import_module) -> dict:
    """The options of a problem in a kernel's words.

    Plain arguments go to the oracle, which has no rules. The others draw dropout themselves, and a kernel that takes
    rules is given those that the problem names, not the masks they amount to. The NumPy steps take as rules all but
    causal, mask, lengths and dropout.
    """
    given = dict(problem.options)
    if kernel.name == "oracle":
        return given
    if given.get("dropout_p") is not None:
        p, keep, make = given.pop("dropout_p"), given.pop("keep"), load("refimpl.philox").Dropout
        given["dropout"] = make(*problem.dropout) if problem.dropout else make(p, keep=keep)
    if problem.rules and "rules" in kernel.options:
        given.pop("bias" if "relative" in problem.rules else "mask")
        given["rules"] = [getattr(load("refimpl.options"), name)(*x) for name, x in problem.rules.items()]
    return as_rules(given, load) if kernel.runs == "numpy" else given


def as_rules(options, load=import_module) -> dict:
    """Options with window, softcap, slopes and bias said as rules, ahead of those there are."""
    given, rules = dict(options), []
    for name, rule in AS_RULES.items():
        value = given.pop(name, None)
        if value is not None:
            make = getattr(load("refimpl.options"), rule)
            rules.append(make(*value) if name == "window" else make(value))
    rules += given.pop("rules", ())
    return given | ({"rules": rules} if rules else {})


def _packed(problem, where, load):
    """Sequences packed end to end through the public functions, laid out again as the problem is.

    Rows past a sequence's end, which no packed array has, come out as attention without keys would: 0, and -inf in lse.
    """
    interface = load("flash_cuda.interface")
    lengths = problem.lengths
    starts = [np.append(0, np.cumsum(n)).astype(np.int32) for n in lengths]
    longest = [int(n.max(initial=0)) for n in lengths]
    plain = {name: x for name, x in problem.options.items() if x is not None}
    if lost := plain.keys() - PACKED - {"align"}:
        raise ValueError(f"case: {problem.case} is packed, and the interface takes no {', '.join(sorted(lost))}")
    window = plain.get("window", (None, None))
    options = {
        "softmax_scale": plain.get("scale"),
        "causal": plain.get("causal", False),
        "window_size": tuple(-1 if bound is None else bound for bound in window),
        "softcap": plain.get("softcap", 0.0),
        "alibi_slopes": plain.get("alibi_slopes"),
    }
    q, k, v = (pack(x, lengths[side]) for x, side in ((problem.Q, 0), (problem.K, 1), (problem.V, 1)))
    call = interface.flash_attn_varlen_func
    O, lse, _ = call(q, k, v, *starts, *longest, **options, return_attn_probs=True, **where)
    shape = problem.shape
    found = {
        "O": unpack(O, lengths[0], shape.Nq),
        "lse": unpack(lse.T[..., None], lengths[0], shape.Nq, -np.inf)[..., 0],
    }
    if problem.backward:
        dO = pack(problem.dO(), lengths[0])
        back = interface.flash_attn_varlen_backward
        gradients = back(dO, q, k, v, O, lse, *starts, *longest, **options, **where)
        ends = (lengths[0], shape.Nq), (lengths[1], shape.Nk), (lengths[1], shape.Nk)
        found |= {
            name: unpack(x, *end) for name, x, end in zip(("dQ", "dK", "dV"), gradients, ends, strict=True)
        }
    return found


def pack(x, lengths):
    """(batch, heads, longest, dim) to (rows, heads, dim): each entry's rows, end to end."""
    return np.concatenate([x[b, :, :n].transpose(1, 0, 2) for b, n in enumerate(lengths)])


def unpack(x, lengths, longest, fill=0.0):
    """Undo `pack`: (rows, heads, dim) to (batch, heads, longest, dim), with `fill` past each entry's end."""
    out = np.full((len(lengths), x.shape[1], longest, x.shape[2]), fill, x.dtype)
    ends = np.cumsum(lengths)
    for b, (n, end) in enumerate(zip(lengths, ends, strict=True)):
        out[b, :, :n] = x[end - n : end].transpose(1, 0, 2)
    return out
