"""How the arrays of a case lie in memory: kernels may assume strides they were not given."""

import numpy as np


def contiguous(Q, K, V):
    """Each array by itself, in order."""
    return Q, K, V


def offset(Q, K, V):
    """Every second row of a longer, wider buffer, from an odd offset on. Between the rows lies NaN."""
    return tuple(_every_second(x) for x in (Q, K, V))


def fused(Q, K, V):
    """Slices of one (B, N, 3, H, d) buffer, as a fused projection leaves them: heads are interleaved."""
    B, H, N, d = Q.shape
    buffer = np.empty((B, N, 3, H, d), Q.dtype)
    for at, x in enumerate((Q, K, V)):
        buffer[:, :, at] = x.transpose(0, 2, 1, 3)
    return tuple(buffer[:, :, at].transpose(0, 2, 1, 3) for at in range(3))


def expanded(Q, K, V):
    """Stride 0: Q shared by the batch, K and V shared by the heads. The values of the first are everyone's."""
    return np.broadcast_to(Q[:1], Q.shape), np.broadcast_to(K[:, :1], K.shape), np.broadcast_to(V[:, :1], V.shape)


def reversed_rows(Q, K, V):
    """Rows stored last to first: the stride along the sequence is negative."""
    return tuple(np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1] for x in (Q, K, V))


def packed(Q, K, V):
    """Padded, as `contiguous`; who runs the case packs each batch entry's rows end to end, by its lengths."""
    return Q, K, V


def _every_second(x):
    B, H, N, d = x.shape
    buffer = np.full((B, H, 2 * N + 3, d + 5), np.nan, x.dtype)
    view = buffer[:, :, 3 : 3 + 2 * N : 2, 3 : 3 + d]
    view[...] = x
    return view


LAYOUTS = {place.__name__: place for place in (contiguous, offset, fused, expanded, reversed_rows, packed)}
