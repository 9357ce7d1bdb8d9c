"""The arithmetic and traffic of attention as plain formulas, which claims about FLOPs and bytes are held to.

All counts are for one head, N queries and N keys, head dimension d, unless an argument says otherwise.
"""

from refimpl.tiling import cdiv


def forward_flops(N, d, *, causal=False):
    """Multiply-adds of QK^T and PV, two FLOP each; a causal mask leaves N (N + 1) / 2 pairs."""
    pairs = N * (N + 1) // 2 if causal else N * N
    return 4 * pairs * d


def backward_flops(N, d, *, recompute):
    """dV, dP, dQ and dK: four products; recomputing S makes it five."""
    return (10 if recompute else 8) * N * N * d


def eager_forward_elements(N, d, *, passes=0):
    """Elements between HBM and the chip when QK^T, softmax and PV are three kernels.

    `passes` counts element-wise kernels between them (scale, mask, dropout): each reads and writes N x N.
    """
    products = (2 * N * d + N * N) + (N * N + N * d + N * d)
    softmax = 2 * N * N
    return products + softmax + passes * 2 * N * N


def eager_backward_elements(N, d):
    """The same for the backward pass from a stored P: dV, dP, softmax backward, dQ, dK as five kernels.

    dV reads P, dO; dP reads dO, V and writes dP; the softmax reads P, dP, writes dS; dQ and dK each read dS.
    """
    dV = N * N + 2 * N * d
    dP = 2 * N * d + N * N
    dS = 3 * N * N
    dQ = N * N + 2 * N * d
    dK = N * N + 2 * N * d
    return dV + dP + dS + dQ + dK


def flash_forward_elements(N, d, Br):
    """Q tile resident, K and V streamed once per Q tile, O written once: tile fills, the L2 cache ignored."""
    return 2 * N * d + cdiv(N, Br) * 2 * N * d


def compulsory_elements(N, d):
    """Q, K and V must be read and O written at least once by any method."""
    return 4 * N * d


def fit_exponent(f, low, high):
    """Power of n with which f(n) grows between two sizes."""
    from math import log

    return log(f(high) / f(low)) / log(high / low)


def tflops(flops, ms):
    """Implied rate in TFLOP/s."""
    return flops / ms / 1e9
