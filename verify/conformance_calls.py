"""How each implementation is called with the inputs and parameters of a conformance case."""

import math
from importlib import import_module

import numpy as np

from refimpl.philox import Dropout
from verify.calls import as_rules


def call(kernel, inputs, params, on):
    """Run forward, and backward where there is one and `inputs` holds dO.

    Parameters
    ----------
    kernel : verify.registry.Kernel
    inputs : dict of ndarray
        By the file's names: q, k, v, and mask, bias, keep_mask, dO, cu_seqlens_q, cu_seqlens_k.
    params : dict
        Of the file.
    on : dict
        Arguments that say where to run.

    Returns
    -------
    dict of ndarray
        out, lse, and dq, dk, dv, dbias if computed.
    """
    if "cu_seqlens_q" in inputs:
        return _packed(kernel, inputs, params, on)
    options = options_of(inputs, params)
    if kernel.name != "oracle":
        if "dropout_p" in options:
            options["dropout"] = Dropout(options.pop("dropout_p"), keep=options.pop("keep", None))
        options = as_rules(options) if kernel.runs == "numpy" else options
    Q, K, V, dO = (inputs.get(name) for name in ("q", "k", "v", "dO"))
    O, lse = kernel.attention()(Q, K, V, **options, **on)
    outputs = {"out": O, "lse": lse}
    used = {"alibi" if name == "alibi_slopes" else name for name in options.keys() - {"scale", "align"}}
    if dO is not None and "backward" in kernel.options and (kernel.runs == "numpy" or used <= kernel.gradients.options):
        outputs |= _backward(kernel, Q, K, V, O, lse, dO, options, on)
    return outputs


def _backward(kernel, Q, K, V, O, lse, dO, options, on):
    """Gradients by the file's names, in fp64 or fp32."""
    if kernel.name == "oracle":
        gradients = import_module(kernel.module).attention_backward(Q, K, V, dO, **options)
    elif kernel.runs == "cuda":
        gradients = kernel.attention_backward()(Q, K, V, O, lse, dO, **options, **on, **kernel.ways[-1])
    else:
        # Step 2 goes with the v1 order of loops, the others with v2.
        order = "v1" if "v1" in kernel.name else "v2"
        backward = import_module("refimpl.backward").attention_backward
        arithmetic = np.float64 if Q.dtype == np.float64 else np.float32
        dbias = any(rule.bias is not None for rule in options.get("rules", ()))
        gradients = backward(Q, K, V, O, lse, dO, **options, **on, dbias=dbias, order=order, dtype=arithmetic)
    return {name: x for name, x in zip(("dq", "dk", "dv", "dbias"), gradients, strict=False) if x is not None}


def options_of(inputs, params) -> dict:
    """The file's parameters as keyword arguments of ours; only those that the case uses."""
    scale = params.get("scale")
    if isinstance(scale, str):
        scale = None if scale == "default" else 1 / math.sqrt(inputs["q"].shape[-1])
    options = {"scale": scale, "causal": bool(params.get("causal"))}
    if align := params.get("causal_align"):
        options["align"] = align
    for name, ours in (("mask", "mask"), ("bias", "bias"), ("keep_mask", "keep")):
        if name in inputs:
            options[ours] = inputs[name]
    for name in ("softcap", "alibi_slopes", "dropout_p"):
        if name in params:
            options[name] = params[name]
    if "window_left" in params or "window_right" in params:
        options["window"] = (params.get("window_left"), params.get("window_right"))
    return options


def _packed(kernel, inputs, params, on):
    """Packed sequences as a padded batch with lengths; rows of no sequence are 0, and -inf in lse.

    The padding is NaN: it must not reach anything.
    """
    starts_q, starts_k = inputs["cu_seqlens_q"], inputs["cu_seqlens_k"]
    if kernel.runs == "cuda":
        return _interface(inputs, params, on)
    lengths = {"lengths_q": np.diff(starts_q), "lengths_k": np.diff(starts_k)}
    padded = {name: _pad(inputs[name], starts_q if name in ("q", "dO") else starts_k) for name in ("q", "k", "v", "dO")}
    module, options = import_module(kernel.module), options_of({}, params)
    Q, K, V, dO = padded.values()
    O, lse = module.attention(Q, K, V, **options, **lengths, **on)
    dQ, dK, dV, _ = module.attention_backward(Q, K, V, dO, **options, **lengths, **on)
    total_q, total_k = len(inputs["q"]), len(inputs["k"])
    packed_lse = _unpack(lse[..., None], starts_q, total_q, -np.inf)[..., 0].T
    outputs = {"out": _unpack(O, starts_q, total_q), "lse": packed_lse, "dq": _unpack(dQ, starts_q, total_q)}
    return outputs | {"dk": _unpack(dK, starts_k, total_k), "dv": _unpack(dV, starts_k, total_k)}


def _interface(inputs, params, on):
    """Packed sequences through the public functions of flash_cuda."""
    from flash_cuda.interface.varlen import flash_attn_varlen_backward, flash_attn_varlen_func

    q, k, v, dO = (inputs[name] for name in ("q", "k", "v", "dO"))
    starts = [inputs[name].astype(np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    longest = [int(np.diff(s).max(initial=0)) for s in starts]
    options = {"softmax_scale": params["scale"], "causal": bool(params.get("causal"))}
    O, lse, _ = flash_attn_varlen_func(q, k, v, *starts, *longest, **options, return_attn_probs=True, **on)
    gradients = flash_attn_varlen_backward(dO, q, k, v, O, lse, *starts, *longest, **options, **on)
    return {"out": O, "lse": lse} | dict(zip(("dq", "dk", "dv"), gradients, strict=False))


def _pad(x, starts):
    """(rows, heads, dim) to (batch, heads, longest, dim)."""
    lengths = np.diff(starts)
    out = np.full((len(lengths), x.shape[1], int(lengths.max(initial=0)), x.shape[2]), np.nan, x.dtype)
    for b, n in enumerate(lengths):
        out[b, :, :n] = x[starts[b] : starts[b] + n].transpose(1, 0, 2)
    return out


def _unpack(x, starts, rows, fill=0.0):
    """(batch, heads, longest, dim) to (rows, heads, dim)."""
    out = np.full((rows, x.shape[1], x.shape[3]), fill)
    for b, n in enumerate(np.diff(starts)):
        out[starts[b] : starts[b] + n] = x[b, :, :n].transpose(1, 0, 2)
    return out
