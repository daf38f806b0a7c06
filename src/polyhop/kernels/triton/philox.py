"""Philox4x32-10 on the device: the same words as ``csrc/philox.h`` and ``reference.philox``.

Keys travel as two signed 32-bit words, so that a kernel is compiled once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["key_words", "lane_of", "lanes_of_words", "philox", "philox_of_ids"]


def key_words(key: int) -> tuple[int, int]:
    """(low, high) words of a 64-bit key, as signed 32-bit numbers."""
    low, high = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    return low - (low >> 31 << 32), high - (high >> 31 << 32)


@triton.jit
def philox(k0, k1, c0, c1, c2, c3):
    """Four words (uint32) of the counter (c0 .. c3, uint32) under the key (k0, k1, uint32)."""
    M0: tl.constexpr = 0xD2511F53
    M1: tl.constexpr = 0xCD9E8D57
    W0: tl.constexpr = 0x9E3779B9
    W1: tl.constexpr = 0xBB67AE85
    for _ in tl.static_range(10):
        p0, p1 = c0.to(tl.uint64) * M0, c2.to(tl.uint64) * M1  # one instruction each
        c0, c1 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, p1.to(tl.uint32)
        c2, c3 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1, p0.to(tl.uint32)
        k0 = tl.add(k0, W0, sanitize_overflow=False)
        k1 = tl.add(k1, W1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def philox_of_ids(k0, k1, ids, other):
    """Four words of int64 ids and others (tensors of one shape) under the key words (int32, broadcast to that shape)."""
    c0, c1 = ids.to(tl.uint32), (ids >> 32).to(tl.uint32)
    c2, c3 = other.to(tl.uint32), (other >> 32).to(tl.uint32)
    zero = c0 * 0
    return philox(
        k0.to(tl.uint32, bitcast=True) + zero, k1.to(tl.uint32, bitcast=True) + zero, c0, c1, c2, c3
    )


@triton.jit
def lane_of(w0, w1, w2, w3, lane):
    """The 16-bit lane 0 .. 7 of four words (broadcast to lane's shape), as int32."""
    word = lane >> 1
    chosen = tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))
    return (tl.where(lane & 1 == 1, chosen >> 16, chosen) & 0xFFFF).to(tl.int32)


@triton.jit
def lanes_of_words(first, second):
    """int32 [Q, 4]: the 16-bit lanes of two words [Q] each, the low half first."""
    low, high = tl.join(first & 0xFFFF, second & 0xFFFF), tl.join(first >> 16, second >> 16)
    return tl.reshape(tl.join(low, high), (first.shape[0], 4)).to(tl.int32)
