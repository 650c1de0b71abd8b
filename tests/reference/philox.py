"""The dropout mask of docs/semantics.md, in NumPy: Philox4x32-7 (Salmon et al. 2011) and the place of each score's byte."""

import numpy as np

MASK64 = 2**64 - 1


def philox4x32_7(counter, key):
    """counter: four uint64 arrays that hold 32-bit words; key: two integers. Returns the four words of each call."""
    c0, c1, c2, c3 = (np.asarray(c, dtype=np.uint64) for c in counter)
    k0, k1 = key
    low = np.uint64(0xFFFFFFFF)
    for _ in range(7):
        x, y = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (y >> np.uint64(32)) ^ c1 ^ np.uint64(k0), y & low, (x >> np.uint64(32)) ^ c3 ^ np.uint64(k1), x & low
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK64
    return x ^ (x >> 31)


def threshold(dropout):
    """An element is kept if its byte is below this; the keep rate is threshold / 256."""
    return min(max(int((1 - dropout) * 256 + 0.5), 1), 255) if dropout > 0 else 256


def random_bytes(shape, seed, offset):
    """(B, H, Sq, Sk) of bytes."""
    x = mix64((seed + 0x9E3779B97F4A7C15 * (mix64(offset) | 1)) & MASK64)
    b, h, i, j = np.ogrid[tuple(slice(n) for n in shape)]

    def group(n):
        return n // 16 * 4 + n % 8 // 2

    def slot(n):
        return n % 2 + 2 * (n // 8 % 2)

    counter = np.broadcast_arrays(group(j), group(i), h, b)
    words = np.stack(philox4x32_7(counter, (x % 2**32, x >> 32)))
    row = np.broadcast_to(slot(i), shape)
    word = np.take_along_axis(words, row[None], axis=0)[0]
    return word >> (8 * slot(j)).astype(np.uint64) & np.uint64(255)


def keep(shape, dropout, seed, offset):
    """(B, H, Sq, Sk) of bool: True = kept."""
    return random_bytes(shape, seed, offset) < threshold(dropout)
