"""Which weights dropout keeps, restated from the paper: the truth shares no code with the generator it judges.

Source: Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3", section 3.3, Philox4x32-10.
"""

import numpy as np

ROUNDS = 10
BITS = 30  # of a word that are compared with p


def keep(p, seed, offset, shape):
    """Draw the mask of a call: each element by its place alone.

    The counter of element (b, h, row, col) is (col // 4, row, b, h), and of the four words that come out its own is
    number col % 4. The key is seed + 0x9E3779B97F4A7C15 offset, modulo 2^64, its low half first. An element is kept if
    the upper 30 bits of its word are at least p 2^30.

    Parameters
    ----------
    p : float
        Share that is dropped, in 0 ... 1.
    seed, offset : int
        In 0 ... 2^64 - 1.
    shape : (B, Hq, Nq, Nk)

    Returns
    -------
    ndarray of bool, of that shape
        True: kept.
    """
    b, h, row, col = np.indices(shape, dtype=np.uint64)
    words = philox4x32((col // np.uint64(4), row, b, h), (seed + 0x9E3779B97F4A7C15 * offset) % 2**64)
    word = np.choose((col % np.uint64(4)).astype(np.intp), words)
    return word >> np.uint64(32 - BITS) >= np.uint64(round(p * 2**BITS))


def philox4x32(counter, key):
    """Four words below 2^32 for each counter of four, under a 64-bit key; all as uint64 arrays, or one number."""
    low = np.uint64(0xFFFFFFFF)
    x0, x1, x2, x3 = (np.asarray(word, np.uint64) for word in counter)
    for turn in range(ROUNDS):
        k0 = np.uint64((key % 2**32 + turn * 0x9E3779B9) % 2**32)
        k1 = np.uint64((key // 2**32 + turn * 0xBB67AE85) % 2**32)
        a, b = np.uint64(0xD2511F53) * x0, np.uint64(0xCD9E8D57) * x2
        x0, x1, x2, x3 = b >> np.uint64(32) ^ x1 ^ k0, b & low, a >> np.uint64(32) ^ x3 ^ k1, a & low
    return x0, x1, x2, x3
