"""flash-attn's packed and cached functions: sequences of different lengths in one call.

A kernel wants a batch of equal lengths, with the lengths in use beside it. So packed sequences are copied into a batch
padded to the longest, and results copied back: a change of layout that costs memory and time where lengths differ much.
A cache is such a batch already and is read in place, unless ``cache_batch_idx`` picks entries of it.
"""

from dataclasses import dataclass

import numpy as np

from flash_cuda.interface import checks as check
from flash_cuda.interface.arrays import kind_of
from flash_cuda.interface.call import Call, make_call, run


@dataclass(frozen=True)
class Packed:
    """Packed axes: the padded call, and where each packed row stands in the padded batch."""

    call: Call
    at_q: np.ndarray
    at_k: np.ndarray

    @property
    def kind(self):
        return self.call.kind

    @property
    def probabilities(self):
        return self.call.probabilities

    def padded(self, x, at, axis):
        """(rows, ...) -> (B, N, ...), 0 where there is no row."""
        B, N = self.call.sizes["B"], self.call.sizes[axis]
        return self.kind.pad(x, at, B * N).reshape((B, N, *x.shape[1:]))

    def packed(self, x, at, *axes):
        """(B, N, ...) -> (rows, ...); ``axes`` bring x into that order first."""
        x = self.kind.contiguous(x, *axes)
        return self.kind.take(x.reshape((x.shape[0] * x.shape[1], *x.shape[2:])), at)

    def padded_qkv(self, q, k, v):
        return self.padded(q, self.at_q, "Nq"), self.padded(k, self.at_k, "Nk"), self.padded(v, self.at_k, "Nk")

    def padded_rows(self, x):
        """(H, rows) -> (B, H, Nq)."""
        return self.kind.permuted(self.padded(self.kind.permuted(x, 1, 0), self.at_q, "Nq"), 0, 2, 1)

    def forward(self, q, k, v):
        """(out (rows, H, dv), softmax_lse (H, rows)), and S_dmask (B, H, Nq, Nk) if asked for."""
        out, lse, *weights = self.call.forward(*self.padded_qkv(q, k, v))
        lse = self.kind.contiguous(self.packed(lse, self.at_q, 0, 2, 1), 1, 0)
        return self.packed(out, self.at_q), lse, *weights

    def backward(self, dout, q, k, v, out, lse, dlse=None):
        """(dq, dk, dv), packed."""
        dout, out = (self.padded(x, self.at_q, "Nq") for x in (dout, out))
        lse, dlse = (None if x is None else self.padded_rows(x) for x in (lse, dlse))
        grads = self.call.backward(dout, *self.padded_qkv(q, k, v), out, lse, dlse)
        return tuple(self.packed(x, at) for x, at in zip(grads, (self.at_q, self.at_k, self.at_k), strict=True))


def _pack(name, arrays, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    """Check packed arrays, q first, and make a `Packed` of them."""
    kind = kind_of("q", arrays["q"][0])
    sizes = check.qkv(kind, arrays)
    cu_q = check.cu_seqlens("cu_seqlens_q", cu_seqlens_q, "q", sizes["rows"])
    cu_k = check.cu_seqlens("cu_seqlens_k", cu_seqlens_k, "k", sizes["keys"])
    if len(cu_q) != len(cu_k):
        raise ValueError(f"cu_seqlens_k: expected {len(cu_q) - 1} sequences like cu_seqlens_q, got {len(cu_k) - 1}")
    lengths_q, lengths_k = np.diff(cu_q), np.diff(cu_k)
    Nq, Nk = int(lengths_q.max(initial=0)), int(lengths_k.max(initial=0))
    check.whole("max_seqlen_q", max_seqlen_q, Nq)
    check.whole("max_seqlen_k", max_seqlen_k, Nk)
    sizes |= {"B": len(lengths_q), "Nq": Nq, "Nk": Nk}
    call = make_call(name, kind, sizes, lengths_q=lengths_q, lengths_k=lengths_k, **options)
    return Packed(call, _places(cu_q, Nq), _places(cu_k, Nk)), sizes


def _places(cu, N):
    """Row of the padded batch, b N + r, for each packed row."""
    lengths = np.diff(cu)
    return np.arange(cu[-1]) + np.repeat(np.arange(len(lengths)) * N - cu[:-1], lengths)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None, **extras,
):  # fmt: skip
    """`flash_attn_func` of each of several sequences, packed end to end; padded for the kernel, and unpacked.

    Parameters
    ----------
    q : (rows, H, d), k : (keys, Hk, d), v : (keys, Hk, dv)
    cu_seqlens_q, cu_seqlens_k : (B + 1,), int32
        Sequence b has rows cu_seqlens_q[b] ... cu_seqlens_q[b + 1] - 1, and likewise keys; either may be none. Read on
        the host: on a GPU that waits for them.
    max_seqlen_q, max_seqlen_k : int
        At least the longest sequence; not used but for this check.
    block_table
        Not supported yet.
    and all others
        As `flash_attn_func`, its keyword-only ones included.

    Returns
    -------
    out : (rows, H, dv), dtype of q
    softmax_lse : (H, rows), float32; with return_attn_probs
    S_dmask : (B, H, longest, longest), 0 past a sequence's end; with return_attn_probs

    Raises
    ------
    ValueError, TypeError, RuntimeError
        As `flash_attn_func`; rows past the last sequence are refused.
    """
    check.refuse(block_table=block_table)
    arrays = {"q": (q, "rows H d"), "k": (k, "keys Hk d"), "v": (v, "keys Hk dv")}
    call, _ = _pack(
        "flash_attn_varlen_func", arrays, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=dropout_p,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, deterministic=deterministic, return_attn_probs=return_attn_probs, **extras,
    )  # fmt: skip
    results = run(call, q, k, v)
    return results if call.probabilities else results[0]


def flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, *,
    rng_state=None, dlse=None, **extras,
):  # fmt: skip
    """Gradients of packed sequences, as `interface.flash_attn_backward` of each.

    Parameters
    ----------
    dout, out : (rows, H, dv), dtype of q
    softmax_lse, dlse : (H, rows), float32; dlse 0 if left out
    and all others
        As `flash_attn_varlen_func` and `interface.flash_attn_backward`.

    Returns
    -------
    dq, dk, dv : shapes and dtype of q, k, v

    Raises
    ------
    ValueError, TypeError, RuntimeError
        As `flash_attn_varlen_func`.
    """
    arrays = {"q": (q, "rows H d"), "k": (k, "keys Hk d"), "v": (v, "keys Hk dv")}
    arrays |= {"dout": (dout, "rows H dv"), "out": (out, "rows H dv")}
    check.seeded(dropout_p, rng_state)
    call, sizes = _pack(
        "flash_attn_varlen_backward", arrays, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, deterministic=deterministic, rng_state=rng_state, **extras,
    )  # fmt: skip
    check.rows(call.kind, sizes, "H rows", softmax_lse=softmax_lse, dlse=dlse)
    return call.backward(dout, q, k, v, out, softmax_lse, dlse)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False, *, on=None, tile=None,
    threads=None, explain=False,
):  # fmt: skip
    """Append new keys and values to a cache, in place, and attend to what is in it; no gradients.

    Parameters
    ----------
    q : (B, Nq, H, d)
    k_cache, v_cache : (entries, Nmax, Hk, d), (entries, Nmax, Hk, dv)
        One entry for each of the batch, unless cache_batch_idx says which.
    k, v : (B, new, Hk, d), (B, new, Hk, dv), optional
        Written to positions cache_seqlens ... cache_seqlens + new - 1 of the cache; then row i of q sees what
        `flash_attn_func` would show it of the first cache_seqlens + new keys.
    cache_seqlens : int, or (B,) of int32
        Keys in the cache, of each entry; all Nmax if left out, which needs k left out too. Not changed. Lengths are
        arguments of the kernel: a step of decoding compiles nothing new.
    cache_batch_idx : (B,) of int32, optional
        Entry of the cache for each of the batch; these are copied out.
    rotary_cos, rotary_sin, cache_leftpad, block_table
        Not supported yet.
    rotary_interleaved, num_splits
        Checked, and without effect: there is no rotary embedding, and keys are not split.
    return_softmax_lse : bool
        Also return lse.
    and all others
        As `flash_attn_func`.

    Returns
    -------
    out : (B, Nq, H, dv), dtype of q
    softmax_lse : (B, H, Nq), float32; with return_softmax_lse

    Raises
    ------
    ValueError, TypeError, RuntimeError
        As `flash_attn_func`, and the cache is unchanged; new keys beyond Nmax.
    """
    check.refuse(rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_leftpad=cache_leftpad, block_table=block_table)
    check.flag("rotary_interleaved", rotary_interleaved)
    check.whole("num_splits", num_splits, 0)
    with_lse = check.flag("return_softmax_lse", return_softmax_lse)
    kind = kind_of("q", q)
    arrays = {"q": (q, "B Nq H d")}
    arrays |= {"k_cache": (k_cache, "entries Nmax Hk d"), "v_cache": (v_cache, "entries Nmax Hk dv")}
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'}: expected k and v together, got None")
    if k is not None:
        arrays |= {"k": (k, "B new Hk d"), "v": (v, "B new Hk dv")}
    sizes = check.qkv(kind, arrays)
    for name, (x, _) in arrays.items():
        if kind.wants_gradient(x):
            raise ValueError(f"{name}: expected an array without requires_grad: there is no backward pass with a cache")
    B, Nmax, new = sizes["B"], sizes["Nmax"], sizes.get("new", 0)
    before = check.cache_seqlens(cache_seqlens, B, Nmax, new, k is not None)
    entries = check.cache_batch_idx(cache_batch_idx, B, sizes["entries"])
    lengths, longest = before + new, int((before + new).max(initial=0))
    sizes["Nk"] = longest
    call = make_call(
        "flash_attn_with_kvcache", kind, sizes, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
        softcap=softcap, alibi_slopes=alibi_slopes, on=on, tile=tile, threads=threads, explain=explain,
        lengths_k=lengths,
    )  # fmt: skip
    call.check_room()
    call.executor()  # both refuse what cannot run, before the cache is changed
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)) if new else ():
        if not getattr(getattr(cache, "flags", None), "writeable", True):
            raise ValueError(f"{name}: expected an array that can be written, to append new keys and values")
    for cache, x in ((k_cache, k), (v_cache, v)) if new else ():
        for b in range(B):
            cache[int(entries[b]), int(before[b]) : int(lengths[b])] = x[b]
    keys, values = (
        (x if cache_batch_idx is None else kind.take(x, entries))[:, :longest] for x in (k_cache, v_cache)
    )
    results = call.forward(q, keys, values)
    return results if with_lse else results[0]
