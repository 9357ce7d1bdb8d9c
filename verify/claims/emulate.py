"""Attention with storage types of fewer bits, emulated: tile products of rounded operands, sums in fp32."""

import ml_dtypes
import numpy as np

DTYPES = {
    "fp64": np.dtype(np.float64),
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


def rounded(x, name):
    """Round to the named type and return as fp32 (fp64 for "fp64"): the value the hardware would see.

    E4M3 has no infinity and NumPy's cast to it makes NaN of what is too large: saturate, as quantisers do.
    """
    if name == "fp64":
        return np.asarray(x, np.float64)
    x = np.asarray(x, np.float32)
    if name in ("e4m3", "e5m2"):
        top = float(ml_dtypes.finfo(DTYPES[name]).max)
        x = np.clip(x, -top, top)
    with np.errstate(over="ignore"):
        return x.astype(DTYPES[name]).astype(np.float32)


def flash_forward(Q, K, V, *, dtype="fp16", Bc=64, stats="fp32", factor="fp32", acc="fp32", p=None, out=None):
    """Online-softmax forward of one head, with each store rounded as told.

    Parameters
    ----------
    Q, K, V : (N, d) arrays
        Rounded to `dtype` first: compare with fp64 on `rounded` inputs.
    dtype : str
        Type of the operands of both products; P takes it too unless `p` says otherwise.
    stats, factor, acc : str
        Type in which m and l, the rescaling factor, and the output accumulator are kept between tiles.
    p, out : str or None
        Type of P for the second product, and of the stored output.

    Returns
    -------
    (N, d) float32 array
    """
    p, out = p or dtype, out or dtype
    Q, K, V = (rounded(x, dtype).astype(np.float32) for x in (Q, K, V))
    N, d = Q.shape
    scale = np.float32(1 / np.sqrt(d))
    m = np.full(N, -np.inf, np.float32)
    l = np.zeros(N, np.float32)
    O = np.zeros((N, V.shape[1]), np.float32)
    for j in range(0, len(K), Bc):
        S = Q @ K[j : j + Bc].T * scale
        m_new = rounded(np.maximum(m, S.max(axis=1)), stats)
        alpha = rounded(np.exp(m - m_new), factor)
        P = np.exp(S - m_new[:, None])
        l = rounded(alpha * l + P.sum(axis=1), stats)
        O = rounded(alpha[:, None] * O + rounded(P, p) @ V[j : j + Bc], acc)
        m = m_new
    return rounded(O / l[:, None], out)


def exact(Q, K, V, dtype="fp64"):
    """fp64 attention of one head on inputs rounded to `dtype`."""
    Q, K, V = (rounded(x, dtype).astype(np.float64) for x in (Q, K, V))
    S = Q @ K.T / np.sqrt(Q.shape[1])
    P = np.exp(S - S.max(axis=1, keepdims=True))
    return P @ V / P.sum(axis=1, keepdims=True)


def gradients(Q, K, V, dO, dtype="fp64"):
    """dQ, dK, dV of one head in fp64, or with operands of all products rounded to `dtype` and sums in fp32."""
    work = np.float64 if dtype == "fp64" else np.float32
    Q, K, V, dO = (rounded(x, dtype).astype(work) for x in (Q, K, V, dO))
    scale = work(1 / np.sqrt(Q.shape[1]))
    S = Q @ K.T * scale
    P = np.exp(S - S.max(axis=1, keepdims=True))
    P /= P.sum(axis=1, keepdims=True)
    P_low = rounded(P, dtype).astype(work)
    O = rounded(P_low @ V, dtype).astype(work)
    D = (dO * O).sum(axis=1, keepdims=True)
    dS = P * (dO @ V.T - D)
    dS_low = rounded(dS, dtype).astype(work)
    grads = (dS_low @ K * scale, dS_low.T @ Q * scale, P_low.T @ dO)
    return tuple(rounded(g, dtype).astype(work) for g in grads)
