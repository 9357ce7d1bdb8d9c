"""What the signature of a stranger's kernel says: which options it takes, and what it calls them."""

import inspect

# What a parameter may be called, by what it means. The first is our own name.
NAMES = {
    "scale": ("scale", "softmax_scale", "sm_scale"),
    "causal": ("causal", "is_causal"),
    "align": ("align",),
    "window": ("window", "window_size"),
    "softcap": ("softcap", "logits_soft_cap"),
    "alibi_slopes": ("alibi_slopes",),
    "mask": ("mask", "attn_mask"),
    "bias": ("bias", "attn_bias"),
    "lengths_q": ("lengths_q", "seqlens_q"),
    "lengths_k": ("lengths_k", "seqlens_k"),
    "keep": ("keep", "dropout_mask"),
    "dropout_p": ("dropout_p",),
}
MEANING = {name: meaning for meaning, names in NAMES.items() for name in names}
INPUTS = {"q": "Q", "query": "Q", "k": "K", "key": "K", "v": "V", "value": "V"}

# What a capability needs the signature to name.
NEEDS = {
    "causal": ("causal",),
    "window": ("window",),
    "softcap": ("softcap",),
    "alibi": ("alibi_slopes",),
    "mask": ("mask",),
    "bias": ("bias",),
    "lengths": ("lengths_q", "lengths_k"),
    "dropout": ("keep", "dropout_p"),
    "scale": ("scale",),
}


def signature(fn, everything=False):
    """(meaning -> parameter, meanings without a default) of a function.

    Parameters
    ----------
    fn : callable
    everything : bool
        Take a function with ``**options`` to name every option.

    Raises
    ------
    ValueError
        If a parameter that must be given means nothing here.
    """
    label = getattr(fn, "__name__", "the function")
    try:
        found = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return {}, frozenset()
    kinds = {p.kind for p in found}
    named = [p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    inputs = {INPUTS[p.name.lower()]: p.name for p in named if p.name.lower() in INPUTS}
    if len(inputs) < 3:
        if len(named) < 3 and inspect.Parameter.VAR_POSITIONAL not in kinds:
            takes = "1 argument" if len(named) == 1 else f"{len(named)} arguments"
            raise ValueError(f"{label} takes {takes}, expected q, k, v and options")
        inputs, named = {}, named[3:]  # then the first three are what they are
    parameters, needed = dict(inputs), set()
    for p in named:
        if p.name in MEANING:
            parameters[MEANING[p.name]] = p.name
            needed |= {MEANING[p.name]} if p.default is p.empty else set()
        elif p.name not in inputs.values() and p.default is p.empty:
            raise ValueError(f"{label} must be given {p.name!r}, which is none of {', '.join(NAMES)}")
    if everything and inspect.Parameter.VAR_KEYWORD in kinds:
        parameters = {name: name for name in NAMES} | parameters
    return parameters, frozenset(needed)


def backward_signature(fn, everything=False):
    """(meaning -> parameter, options without a default) of a backward function: the inputs, do, o, lse, and options.

    Raises
    ------
    ValueError
        If it neither names q, k, v and do nor takes any number of arrays.
    """
    more = {name: "dO" for name in ("do", "dout", "grad_out", "d_o")} | {"o": "O", "out": "O"}
    more |= {"lse": "lse", "softmax_lse": "lse"}
    found = inspect.signature(fn).parameters
    words = {name: (INPUTS | more).get(name.lower()) or MEANING.get(name) for name in found}
    parameters = {meaning: name for name, meaning in words.items() if meaning}
    kinds = {p.kind for p in found.values()}
    if not {"Q", "K", "V", "dO"} <= parameters.keys() and inspect.Parameter.VAR_POSITIONAL not in kinds:
        label = getattr(fn, "__name__", "backward")
        raise ValueError(f"{label}: expected parameters q, k, v, do and, if it needs them, o, lse")
    needed = {meaning for meaning, name in parameters.items() if found[name].default is inspect.Parameter.empty}
    if everything and inspect.Parameter.VAR_KEYWORD in kinds:
        parameters = {name: name for name in NAMES} | parameters
    return parameters, frozenset(needed)
