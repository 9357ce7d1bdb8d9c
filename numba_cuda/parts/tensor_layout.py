"""How arrays lie, and what follows for kernels on tensor cores: how tiles are filled, how many heads share the L2."""

L2_BYTES = 32 << 20  # of keys and values that blocks of one time read, so that they find them there


def aligned(X):
    """Whether rows can be copied by 16 bytes: columns adjacent, rows on 16-byte boundaries, less than 2 GiB apart."""
    face = getattr(X, "__cuda_array_interface__", None) or X.__array_interface__
    steps = [stride for n, stride in zip(X.shape[:3], X.strides, strict=False) if n > 1]
    adjacent = X.shape[3] == 1 or X.strides[3] == X.dtype.itemsize
    near = X.shape[2] < 2 or abs(X.strides[2]) < 2**31
    return adjacent and near and all(step % 16 == 0 for step in (*steps, face["data"][0]))


def filling(D, dims, arrays, written=()):
    """How tiles of head room D are filled, as `tensor_ops.tensor_ops` says it.

    ``dims`` are the head dims of the arrays that are read, ``written`` of those that are written, by 16 bytes too.
    """
    if any(d % 8 for d in written) or not all(map(aligned, arrays)):
        return "single"
    return "whole" if all(d == D for d in dims) else "padded"


def side_by_side(heads, head_bytes):
    """How many heads run side by side: as many as the L2 can hold what their blocks walk over."""
    return min(max(L2_BYTES // max(head_bytes, 1), 1), heads)
