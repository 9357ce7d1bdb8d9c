"""Tensor maps: the 128 bytes that tell Hopper's copy engine (TMA) where an array is and how large a box of it to copy.

**Source**: CUDA Driver API, "Tensor Map Object Management", cuTensorMapEncodeTiled.
"""

import numpy as np
from cuda.bindings import driver

from flash_cuda.parts.elements import STORAGE

ALIGNMENT = 16  # bytes: of the array's start and of every stride but the last, which is that of neighbours
SWIZZLE_COLUMNS = 64  # 128 bytes of 16-bit elements: the widest box that the 128-byte swizzle takes


def obstacle(shape, strides, address, itemsize):
    """Why the copy engine cannot read an array (B, H, N, d) where it lies; None if it can."""
    if shape[3] > 1 and strides[3] != itemsize:
        return "its last axis is not contiguous"
    if address % ALIGNMENT:
        return f"it does not start at a multiple of {ALIGNMENT} bytes"
    for axis, name in enumerate(("batch", "head", "row")):
        if shape[axis] > 1 and (strides[axis] % ALIGNMENT or strides[axis] <= 0):
            return f"its {name} stride of {strides[axis]} bytes is not a positive multiple of {ALIGNMENT}"
    return None


def address_of(array):
    """Where an array on a device starts."""
    return array.__cuda_array_interface__["data"][0]


def as_copied(on, name, array, sent):
    """The input as the copy engine reads it: as it was sent to the executor, or a copy of a host array."""
    host = isinstance(array, np.ndarray)
    problem = obstacle(array.shape, array.strides, 0 if host else address_of(sent), 2)
    if problem is None:
        return sent
    if not host:
        raise ValueError(f"{name}: expected an array that the copy engine can read, but {problem}; "
                         "step5_tensor_core takes any strides")  # fmt: skip
    return on.input(name, np.ascontiguousarray(array))


def encode(*tiles):
    """Tensor maps of device arrays, one after the other.

    Parameters
    ----------
    tiles : (array, rows) or (array, rows, length)
        A device array (B, H, N, d) of a 16-bit type, and the rows of its box; a box is 64 columns wide. What a box has
        beyond an end of the array is filled with zeros; likewise beyond its first ``length`` rows.

    Returns
    -------
    maps : (16 len(tiles),), uint64

    Raises
    ------
    RuntimeError
        The driver refuses; its error is named.
    """
    return np.concatenate([_encode(*tile) for tile in tiles])


def _encode(array, rows, length=None):
    kinds = driver.CUtensorMapDataType
    kind = kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    if array.dtype == STORAGE["bf16"][1]:
        kind = kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    d, N, H, B = array.shape[::-1]
    sizes = d, N if length is None else length, H, B
    # An axis of length 1 has no stride to speak of; the driver wants a multiple of 16 all the same.
    strides = [s if n > 1 else ALIGNMENT for n, s in zip(array.shape[2::-1], array.strides[2::-1], strict=True)]
    status, tensor_map = driver.cuTensorMapEncodeTiled(
        kind,
        4,
        address_of(array),
        [driver.cuuint64_t(n) for n in sizes],
        [driver.cuuint64_t(s) for s in strides],
        [driver.cuuint32_t(n) for n in (SWIZZLE_COLUMNS, rows, 1, 1)],
        [driver.cuuint32_t(1)] * 4,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"tensor map: {status.name} for shape {array.shape}, strides {array.strides}")
    return np.array([int(word) for word in tensor_map.opaque], np.uint64)
