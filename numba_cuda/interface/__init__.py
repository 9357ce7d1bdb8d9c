"""flash-attn's functions, on our kernels: same names, same order of arguments, same defaults, same layout.

Arrays are (B, N, H, d); `interface.varlen` has the packed and the cached functions, imported here too. What comes in -
NumPy, numba device arrays, CuPy, torch - comes back: a tensor on its device, worked on in its current stream. NumPy
arrays and CPU tensors go to the GPU and return, or run on ``on=Emulator()``.

The published semantics: causal is aligned to the bottom right; a window is closed on both sides and -1 is no bound;
ALiBi adds -slope * |i + Nk - Nq - j|; query head h reads key head h // (H // Hk); a row that sees no key is 0.
Where we differ: lse of such a row is -inf (flash-attn 2 writes +inf); fp32 is taken too, any head dim up to 256, and v
may have another than q; a negative softcap is refused.

Source: the signatures and docstrings of flash-attn 2.8, `flash_attn_interface.py`.
"""

from flash_cuda.interface import checks as check
from flash_cuda.interface.arrays import kind_of
from flash_cuda.interface.call import make_call, run
from flash_cuda.interface.varlen import (
    flash_attn_varlen_backward,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "flash_attn_backward",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_backward",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, *, rng_state=None, on=None, tile=None, threads=None, explain=False,
):  # fmt: skip
    """softmax(softmax_scale q k^T) v.

    Parameters
    ----------
    q : (B, Nq, H, d), k : (B, Nk, Hk, d), v : (B, Nk, Hk, dv)
        fp32, fp16 or bf16, any strides; H a multiple of Hk; d, dv in 1 ... 256.
    dropout_p : float in [0, 1)
        Probability of dropping a weight.
    softmax_scale : float, optional
        1/sqrt(d) if not given; may be 0 or negative.
    causal : bool
        Row i sees keys j <= i + Nk - Nq.
    window_size : (left, right)
        Row i sees keys i + Nk - Nq - left ... i + Nk - Nq + right, both included; -1 is no bound. With causal, right
        is 0.
    softcap : float
        Scores become softcap * tanh(s / softcap); 0.0 is none.
    alibi_slopes : (H,) or (B, H), float32, optional
        Copied to the host: on a GPU that waits for it.
    deterministic : bool
        Of the gradients: the same bits every run. If not, dq is added up in any order, in one pass instead of two. The
        forward pass always is.
    return_attn_probs : bool
        Also return softmax_lse and S_dmask; for testing, as S_dmask is N x N.
    rng_state : (seed, offset), optional
        Of dropout. If left out, the seed is drawn from torch's CPU generator or NumPy's global one;
        `flash_attn_backward` needs to be told it.
    on : executor, optional
        `gpu.Gpu()` for the arrays' device and stream if left out; `emulator.Emulator()` runs without a GPU.
    tile, threads : Tile, (TY, TX), optional
        As `launch.prepare`.
    explain : bool or callable
        Print one line, or call with it: which kernel runs and why.

    Returns
    -------
    out : (B, Nq, H, dv), dtype of q
    softmax_lse : (B, H, Nq), float32, natural logarithm; with return_attn_probs
    S_dmask : (B, H, Nq, Nk), dtype of q; with return_attn_probs
        The softmax, without dropout's factor; the sign bit is set where dropout drops. flash-attn gives it only with
        dropout.

    Raises
    ------
    ValueError, TypeError
        One line that names the argument and what was expected, before anything is launched.
    RuntimeError
        There is no GPU and no executor was given.
    """
    kind = kind_of("q", q)
    sizes = check.qkv(kind, {"q": (q, "B Nq H d"), "k": (k, "B Nk Hk d"), "v": (v, "B Nk Hk dv")})
    call = make_call(
        "flash_attn_func", kind, sizes, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
        return_attn_probs=return_attn_probs, rng_state=rng_state, on=on, tile=tile, threads=threads, explain=explain,
    )  # fmt: skip
    results = run(call, q, k, v)
    return results if call.probabilities else results[0]


def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, **extras,
):  # fmt: skip
    """`flash_attn_func` of q, k, v in one array, read where they are.

    Parameters
    ----------
    qkv : (B, N, 3, H, d)
    and all others
        As `flash_attn_func`, its keyword-only ones included.

    Returns
    -------
    As `flash_attn_func`.

    Raises
    ------
    ValueError, TypeError, RuntimeError
        As `flash_attn_func`.
    """
    kind = kind_of("qkv", qkv)
    check.array(kind, "qkv", qkv, "B N three H d", {"three": 3})
    return flash_attn_func(
        *(qkv[:, :, n] for n in range(3)), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, **extras,
    )  # fmt: skip


def flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
    softcap=0.0, alibi_slopes=None, deterministic=False, *, rng_state=None, dlse=None, on=None, tile=None,
    threads=None, explain=False,
):  # fmt: skip
    """Gradients of sum(dout * out) + sum(dlse * softmax_lse), for arrays without a graph.

    Parameters
    ----------
    dout, out : (B, Nq, H, dv), dtype of q
    softmax_lse, dlse : (B, H, Nq), float32; dlse 0 if left out
    rng_state : (seed, offset)
        The forward call's; required with dropout.
    and all others
        As `flash_attn_func`.

    Returns
    -------
    dq, dk, dv : shapes and dtype of q, k, v
        0 for a row that sees no key; with deterministic the same bits every run, without it dk and dv only.

    Raises
    ------
    ValueError, TypeError, RuntimeError
        As `flash_attn_func`.
    """
    kind = kind_of("q", q)
    arrays = {"q": (q, "B Nq H d"), "k": (k, "B Nk Hk d"), "v": (v, "B Nk Hk dv")}
    sizes = check.qkv(kind, arrays | {"dout": (dout, "B Nq H dv"), "out": (out, "B Nq H dv")})
    check.rows(kind, sizes, "B H Nq", softmax_lse=softmax_lse, dlse=dlse)
    check.seeded(dropout_p, rng_state)
    call = make_call(
        "flash_attn_backward", kind, sizes, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
        rng_state=rng_state, on=on, tile=tile, threads=threads, explain=explain,
    )  # fmt: skip
    return call.backward(dout, q, k, v, out, softmax_lse, dlse)
