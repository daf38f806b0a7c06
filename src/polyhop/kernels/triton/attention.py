"""Fused attention aggregation on the device: softmax and weighted sum in one pass over the edges, forward and backward.

Forward, per destination i and head:        out = sum_e a_e m_e x_j,   a = softmax(leaky_relu(z)),   z = a_src[j] + a_dst[i]
Backward needs one gather of rows only, along the transposed edges, because the gradient of a_dst follows from two sums that
the forward pass takes on its way: scores' gradients add up to 0 over a destination, so with slope s

    d a_dst = (1 - s) sum_{z > 0} a_e (m_e g . x_j - g . out) = (1 - s) (g . P - (g . out) Q),
    P = sum_{z > 0} a_e m_e x_j,   Q = sum_{z > 0} a_e

Long lists are summed in pieces (``segments.py``): softmaxes of pieces are joined by their maxima.

A program is a warp (more for rows of over 2 KB). Its threads hold V channels that are read at once; L of them lie beside
each other in a head's row, B heads beside each other, and A such sides take edges of their own; each thread has K times as
many channels, and T edges at a time. A thread knows the scores of its own edges and heads: nothing changes hands before a
list's end but the products of rows in the backward pass, whose L parts are added up, and what was drawn to drop weights.

Legend: D destinations, S sources, E edges, H heads, C channels per head; L, B, A, T, K, V as above.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhop.kernels.triton.philox import lane_of, philox_of_ids
from polyhop.kernels.triton.segments import list_of_piece, segments

__all__ = ["attention", "attention_backward"]

_EDGES = 16  # edges of a turn at most (counted, not timed)
_VALUES = 16  # of rows that a thread reads at a time; 32 take 149 registers backward, for a tenth fewer instructions


@triton.jit
def _keep(
    dst, src, head, src_ids, keys, dst_start, DROP: tl.constexpr, HEADS: tl.constexpr, SUM: tl.constexpr
):  # fmt: skip
    """0 or 1 / (1 - p) of edges dst -> src (int64) and heads, of shapes that broadcast."""
    zero = dst * 0 + src * 0 + head * 0
    to, of = dst + dst_start, src
    if src_ids is not None:
        to, of = tl.load(src_ids + to), tl.load(src_ids + of)
    key = tl.load(keys + tl.minimum(head, HEADS - 1) // 8)
    w0, w1, w2, w3 = philox_of_ids(
        key.to(tl.int32), (key >> 32).to(tl.int32), to + zero, of + zero
    )  # fmt: skip
    lane = lane_of(w0, w1, w2, w3, (head + zero).to(tl.int32) & 7)
    kept = tl.full(lane.shape, 65536 / (65536 - DROP), SUM)
    return tl.where(lane >= DROP, kept, 0.0)


@triton.jit
def _place(
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    L: tl.constexpr,
    B: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """(heads [B], first columns [L, B, 1, V], how far others lie [1, 1, K, 1], which there are [L, B, K, V])."""
    lane, v = tl.arange(0, L)[:, None, None, None], tl.arange(0, V)[None, None, None, :]
    more = tl.arange(0, K)[None, None, :, None] * (L * V)
    # Written so that the compiler does not see heads beside each other: it would give a thread several of them to read.
    head = tl.program_id(1) * B + (2 * tl.arange(0, B) + 1) // 2
    wide = head[None, :, None, None]
    first = wide * CHANNELS + lane * V + v
    return head, first, more, (lane * V + v + more < CHANNELS) & (wide < HEADS)


@triton.jit
def _list(indptr, ends, pid, num_lists, most, limit):
    """(list, its edges from .. to here, whether there are any): programs 0 .. most - 1 have pieces of long lists."""
    row, begin, end, is_live = pid * 0, pid * 0, pid * 0, pid < 0
    if pid < most:
        if pid < tl.load(ends + num_lists):
            row = list_of_piece(ends, pid, num_lists)
            begin = tl.load(indptr + row) + (pid - tl.load(ends + row)) * limit
            end = tl.minimum(begin + limit, tl.load(indptr + row + 1))
            is_live = pid >= 0
    else:
        row = pid - most
        begin, end = tl.load(indptr + row), tl.load(indptr + row + 1)
        is_live = end - begin <= limit
    return row, begin, end, is_live


@triton.jit
def _attend(
    begin, end, row, head, column_ok, indices, x, more, a_src, to, src_ids, keys, dst_start, m, total, q, acc, pos,
    SLOPE: tl.constexpr, DROP: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, LOOP: tl.constexpr,
    TRAINS: tl.constexpr, SUM: tl.constexpr, WHOLE: tl.constexpr, A: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Take edges begin .. end - 1 of a destination into the state of each side: maximum, sum, positive share; sums of rows.

    Sources are read a turn ahead: their reads and those of rows are under way together.
    """
    count = (end - begin).to(tl.int32)  # a piece's at most
    e = tl.arange(0, T)[None, :] * A + tl.arange(0, A)[:, None]
    source_at = indices + begin + e
    source = tl.load(source_at, mask=e < count, other=0)
    lanes = tl.zeros(
        [m.shape[0], 1, 1, 1], tl.int32
    )  # a score is read by all threads that have its edge and head
    for start in range(0, count, A * T):
        ok = e < count - start
        source_at += A * T
        ahead = tl.load(source_at, mask=e < count - start - A * T, other=0)
        if LOOP:
            ok = ok & (source != (row + dst_start).to(source.dtype))
        far = source.to(tl.int64)
        some = ok[None, None, :, :]
        if not WHOLE:
            some = some & (head < HEADS)[None, :, None, None]
        score_at = a_src + far[None, None, :, :] * HEADS + head[None, :, None, None] + lanes
        z = tl.load(score_at, mask=some, other=0.0) + to[None, :, None, None]
        at = x[:, :, None, None, :, :] + far[None, None, :, :, None, None] * (HEADS * CHANNELS)
        tile_ok = ok[None, None, :, :, None, None]
        if not WHOLE:
            tile_ok = tile_ok & column_ok[:, :, None, None, :, :]
        tile = tl.load(at + more[:, :, None, None, :, :], mask=tile_ok, other=0.0).to(SUM)
        s = tl.where(some, tl.where(z > 0, z, z * SLOPE), float("-inf"))
        new = tl.maximum(m, tl.max(s, 3))
        base = tl.where(new == float("-inf"), 0.0, new)
        p, shrink = tl.exp(s - base[:, :, :, None]), tl.exp(m - base)
        m, total = new, total * shrink + tl.sum(p, 3)
        up = p
        if TRAINS:
            up = tl.where(z > 0, p, 0.0)
            q = q * shrink + tl.sum(up, 3)
        if keys is not None:
            keep = _keep(
                row + tl.zeros([1, 1, 1, 1], tl.int64), far[None, None, :, :], head[None, :, None, None], src_ids, keys,
                dst_start, DROP, HEADS, SUM,
            )  # fmt: skip
            p, up = p * keep, up * keep
        acc = acc * shrink[:, :, :, None, None] + tl.sum(tile * p[:, :, :, :, None, None], 3)
        if TRAINS:
            pos = pos * shrink[:, :, :, None, None] + tl.sum(tile * up[:, :, :, :, None, None], 3)
        source = ahead
    return m, total, q, acc, pos


@triton.jit
def _put(to, at, values, ok, A: tl.constexpr):
    """Store values [L, B, K, V], which all A sides know, at to + at; the first side does."""
    side = tl.arange(0, A)[None, None, :, None, None]
    at = at[:, :, None, :, :] + side * 0
    tl.store(
        to + at, values[:, :, None, :, :].to(to.dtype.element_ty), mask=ok[:, :, None, :, :] & (side == 0)
    )


@triton.jit
def _put_stat(to, begin, head, values, HEADS: tl.constexpr, A: tl.constexpr):
    """Store values [L, B], which all L threads of a head and all sides know, at to + begin + head; the first does."""
    lane, side = tl.arange(0, values.shape[0])[:, None, None], tl.arange(0, A)[None, None, :]
    at = to + begin + head[None, :, None] + lane * 0 + side * 0
    tl.store(at, values[:, :, None], mask=(lane == 0) & (side == 0) & (head < HEADS)[None, :, None])


@triton.jit
def _end(
    m, total, q, acc, pos, row, head, first, more, column_ok, out, whole, top, inverse, positive, share,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, TRAINS: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """Divide a destination's sums [L, B, K, V] by its softmax's [L, B] and write them."""
    at = row * (HEADS * CHANNELS) + first + more
    inv = tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total))
    acc = acc * inv[:, :, None, None]
    _put(out, at, acc, column_ok, A)
    if TRAINS:
        if whole is not None:
            _put(whole, at, acc, column_ok, A)
        _put(positive, at, pos * inv[:, :, None, None], column_ok, A)
        _put_stat(top, row * HEADS, head, m, HEADS, A)
        _put_stat(inverse, row * HEADS, head, inv, HEADS, A)
        _put_stat(share, row * HEADS, head, q * inv, HEADS, A)


@triton.jit(do_not_specialize=["num_dst", "most", "limit", "dst_start"])
def _forward(
    indptr, ends, indices, x, a_src, a_dst, src_ids, keys, out, whole, top, inverse, positive, share, stats, sums,
    num_dst, most, limit, dst_start,
    SLOPE: tl.constexpr, DROP: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, LOOP: tl.constexpr,
    TRAINS: tl.constexpr, SUM: tl.constexpr, WHOLE: tl.constexpr,
    L: tl.constexpr, B: tl.constexpr, A: tl.constexpr, T: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Programs 0 .. most - 1 take pieces of long lists, those after them short lists."""
    pid = tl.program_id(0).to(tl.int64)
    head, first, more, column_ok = _place(HEADS, CHANNELS, L, B, K, V)
    row, begin, end, is_live = _list(indptr, ends, pid, num_dst, most, limit)
    if is_live:
        to = tl.load(a_dst + row * HEADS + head, mask=head < HEADS, other=0.0)
        m = tl.full([L, B, A], float("-inf"), SUM)
        total, q = tl.zeros([L, B, A], SUM), tl.zeros([L, B, A], SUM)
        acc, pos = tl.zeros([L, B, A, K, V], SUM), tl.zeros([L, B, A, K, V], SUM)
        if LOOP:  # noqa: SIM102 (a constant: decided when compiled)
            if (pid >= most) or begin == tl.load(indptr + row):
                source = row + dst_start
                is_side = (tl.arange(0, A) == 0)[None, None, :] & (tl.zeros([L, B, A], tl.int32) == 0)
                z = tl.load(a_src + source * HEADS + head, mask=head < HEADS, other=0.0) + to
                s = tl.where(z > 0, z, z * SLOPE)
                m = tl.where(is_side, s[None, :, None], float("-inf"))
                total = tl.where(is_side, total + 1.0, 0.0)
                q = tl.where((z > 0)[None, :, None], total, 0.0)
                p, up = total, q
                if keys is not None:
                    keep = _keep(
                        row + tl.zeros([1, 1, 1], tl.int64), source, head[None, :, None], src_ids, keys, dst_start,
                        DROP, HEADS, SUM,
                    )  # fmt: skip
                    p, up = p * keep, up * keep
                at = x + source * (HEADS * CHANNELS) + first + more
                own_ok = is_side[:, :, :, None, None] & column_ok[:, :, None, :, :]
                own = tl.load(
                    at[:, :, None, :, :] + tl.zeros([1, 1, A, 1, 1], tl.int32), mask=own_ok, other=0.0
                ).to(SUM)
                acc = own * p[:, :, :, None, None]
                if TRAINS:
                    pos = own * up[:, :, :, None, None]
        m, total, q, acc, pos = _attend(
            begin, end, row, head, column_ok, indices, x + first, more, a_src, to, src_ids, keys, dst_start,
            m, total, q, acc, pos, SLOPE, DROP, HEADS, CHANNELS, LOOP, TRAINS, SUM, WHOLE, A, T,
        )  # fmt: skip
        new = tl.max(m, 2)
        shrink = tl.exp(m - tl.where(new == float("-inf"), 0.0, new)[:, :, None])
        total, q = tl.sum(total * shrink, 2), tl.sum(q * shrink, 2)
        acc = tl.sum(acc * shrink[:, :, :, None, None], 2)
        if TRAINS:
            pos = tl.sum(pos * shrink[:, :, :, None, None], 2)
        else:
            pos = acc
        if pid < most:
            at = pid * (2 * HEADS * CHANNELS) + first + more
            _put(sums, at, acc, column_ok, A)
            _put(sums, at + HEADS * CHANNELS, pos, column_ok, A)
            _put_stat(stats, pid * (3 * HEADS), head, new, HEADS, A)
            _put_stat(stats, pid * (3 * HEADS) + HEADS, head, total, HEADS, A)
            _put_stat(stats, pid * (3 * HEADS) + 2 * HEADS, head, q, HEADS, A)
        else:
            _end(
                new, total, q, acc, pos, row, head, first, more, column_ok, out, whole, top, inverse, positive, share,
                HEADS, CHANNELS, TRAINS, A,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_dst"])
def _join(
    ends, out, whole, top, inverse, positive, share, stats, sums, num_dst,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, TRAINS: tl.constexpr, SUM: tl.constexpr,
    L: tl.constexpr, B: tl.constexpr, A: tl.constexpr, T: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The program of a long list's first piece joins all of its pieces, T at a time."""
    pid = tl.program_id(0).to(tl.int64)
    head, first, more, column_ok = _place(HEADS, CHANNELS, L, B, K, V)
    if pid < tl.load(ends + num_dst):
        row = list_of_piece(ends, pid, num_dst)
        if tl.load(ends + row) == pid:
            last = tl.load(ends + row + 1)
            # Pieces are the second dimension: sums along the last one, in a loop, are more than the compiler can do.
            stat = stats + head[None, None, :] + tl.zeros([L, 1, 1], tl.int32)
            m = tl.full([L, B], float("-inf"), SUM)
            for start in range(pid, last, T):
                piece = start + tl.arange(0, T)
                ok = (piece < last)[None, :, None] & (head < HEADS)[None, None, :]
                at = stat + piece[None, :, None] * (3 * HEADS)
                m = tl.maximum(m, tl.max(tl.load(at, mask=ok, other=float("-inf")), 1))
            base = tl.where(m == float("-inf"), 0.0, m)
            total, q = tl.zeros([L, B], SUM), tl.zeros([L, B], SUM)
            acc, pos = tl.zeros([L, B, K, V], SUM), tl.zeros([L, B, K, V], SUM)
            for start in range(pid, last, T):
                piece = start + tl.arange(0, T)
                ok = (piece < last)[None, :, None] & (head < HEADS)[None, None, :]
                at = stat + piece[None, :, None] * (3 * HEADS)
                w = tl.exp(tl.load(at, mask=ok, other=float("-inf")) - base[:, None, :])
                total += tl.sum(tl.load(at + HEADS, mask=ok, other=0.0) * w, 1)
                q += tl.sum(tl.load(at + 2 * HEADS, mask=ok, other=0.0) * w, 1)
                from_ = sums + (first + more)[:, None, :, :, :]
                from_ += piece[None, :, None, None, None] * (2 * HEADS * CHANNELS)
                all_ok = (piece < last)[None, :, None, None, None] & column_ok[:, None, :, :, :]
                acc += tl.sum(tl.load(from_, mask=all_ok, other=0.0) * w[:, :, :, None, None], 1)
                if TRAINS:
                    other = tl.load(from_ + HEADS * CHANNELS, mask=all_ok, other=0.0)
                    pos += tl.sum(other * w[:, :, :, None, None], 1)
            _end(
                m, total, q, acc, pos, row, head, first, more, column_ok, out, whole, top, inverse, positive, share,
                HEADS, CHANNELS, TRAINS, A,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_dst"])
def _facts(
    grad, out, positive, a_dst, top, inverse, share, facts, dst_grad, num_dst,
    SLOPE: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, SUM: tl.constexpr,
    BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """What the backward pass reads of each destination and head, beside each other: a_dst, maximum, inverse sum, g . out.

    And a_dst's gradient.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    head_ok = head < HEADS
    c = tl.arange(0, BC)
    at = row * (HEADS * CHANNELS) + head[:, None] * CHANNELS + c[None, :]
    ok = head_ok[:, None] & (c < CHANNELS)[None, :]
    g = tl.load(grad + at, mask=ok, other=0.0).to(SUM)
    whole = tl.sum(g * tl.load(out + at, mask=ok, other=0.0).to(SUM), 1)
    part = tl.sum(g * tl.load(positive + at, mask=ok, other=0.0), 1)
    stat = row * HEADS + head
    q = tl.load(share + stat, mask=head_ok, other=0.0)
    tl.store(dst_grad + stat, (1.0 - SLOPE) * (part - whole * q), mask=head_ok)
    to = facts + stat * 4
    tl.store(to, tl.load(a_dst + stat, mask=head_ok, other=0.0), mask=head_ok)
    tl.store(to + 1, tl.load(top + stat, mask=head_ok, other=0.0), mask=head_ok)
    tl.store(to + 2, tl.load(inverse + stat, mask=head_ok, other=0.0), mask=head_ok)
    tl.store(to + 3, whole, mask=head_ok)


@triton.jit
def _give(
    dst, ok, row, head, column_ok, grad, more, facts, mine, of, src_ids, keys, dst_start,
    SLOPE: tl.constexpr, DROP: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, SUM: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """What edges row -> dst int64 [A, T] add to the gradients of x[row] and of a_src[row]: ([L, B, A, K, V], [L, B, A])."""
    L: tl.constexpr = mine.shape[0]
    some = ok[None, None, :, :]
    tile_ok = ok[None, None, :, :, None, None]
    if not WHOLE:
        some = some & (head < HEADS)[None, :, None, None]
        tile_ok = tile_ok & column_ok[:, :, None, None, :, :]
    # All threads of a head read its four facts, at once.
    fact = (dst[None, None, :, :] * HEADS + head[None, :, None, None])[:, :, :, :, None] * 4
    fact = facts + fact + tl.arange(0, 4)[None, None, None, None, :] + tl.zeros([L, 1, 1, 1, 1], tl.int32)
    four = tl.load(fact, mask=some[:, :, :, :, None], other=0.0)
    even, odd = tl.split(tl.reshape(four, (four.shape[0], four.shape[1], four.shape[2], four.shape[3], 2, 2)))
    to, inverse = tl.split(even)
    top, whole = tl.split(odd)
    at = grad[:, :, None, None, :, :] + dst[None, None, :, :, None, None] * (HEADS * CHANNELS)
    g = tl.load(at + more[:, :, None, None, :, :], mask=tile_ok, other=0.0).to(SUM)
    z = of[None, :, None, None] + to
    alpha = tl.where(some, tl.exp(tl.where(z > 0, z, z * SLOPE) - top) * inverse, 0.0)
    dot, kept = tl.sum(tl.sum(tl.sum(g * mine[:, :, :, None, :, :], 5), 4), 0)[None, :, :, :], alpha
    if keys is not None:
        keep = _keep(
            dst[None, None, :, :], row + tl.zeros([1, 1, 1, 1], tl.int64), head[None, :, None, None], src_ids, keys,
            dst_start, DROP, HEADS, SUM,
        )  # fmt: skip
        dot, kept = dot * keep, alpha * keep
    ds = alpha * (dot - whole)
    return tl.sum(g * kept[:, :, :, :, None, None], 3), tl.sum(tl.where(z > 0, ds, ds * SLOPE), 3)


@triton.jit(do_not_specialize=["num_dst", "num_src", "most", "limit", "dst_start"])
def _backward(
    indptr, ends, indices, x, a_src, src_ids, keys, grad, facts, x_grad, src_grad, sums, src_sums,
    num_dst, num_src, most, limit, dst_start,
    SLOPE: tl.constexpr, DROP: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, LOOP: tl.constexpr,
    SUM: tl.constexpr, WHOLE: tl.constexpr,
    L: tl.constexpr, B: tl.constexpr, A: tl.constexpr, T: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Along the transposed edges: gradients of a source's row and of its score."""
    pid = tl.program_id(0).to(tl.int64)
    head, first, more, column_ok = _place(HEADS, CHANNELS, L, B, K, V)
    row, begin, end, is_live = _list(indptr, ends, pid, num_src, most, limit)
    if is_live:
        at = row * (HEADS * CHANNELS) + first + more
        sides = tl.zeros([1, 1, A, 1, 1], tl.int32)  # all of them read the row
        mine = tl.load(x + at[:, :, None, :, :] + sides, mask=column_ok[:, :, None, :, :], other=0.0).to(SUM)
        of = tl.load(a_src + row * HEADS + head, mask=head < HEADS, other=0.0)
        acc, da = tl.zeros([L, B, A, K, V], SUM), tl.zeros([L, B, A], SUM)
        count = (end - begin).to(tl.int32)  # a piece's at most
        e = tl.arange(0, T)[None, :] * A + tl.arange(0, A)[:, None]
        dst_at = indices + begin + e
        dst = tl.load(dst_at, mask=e < count, other=0)
        for start in range(0, count, A * T):
            ok = e < count - start
            dst_at += A * T
            ahead = tl.load(dst_at, mask=e < count - start - A * T, other=0)
            if LOOP:
                ok = ok & (dst != (row - dst_start).to(dst.dtype))
            rows, scores = _give(
                dst.to(tl.int64), ok, row, head, column_ok, grad + first, more, facts, mine, of, src_ids, keys,
                dst_start, SLOPE, DROP, HEADS, CHANNELS, SUM, WHOLE,
            )  # fmt: skip
            acc += rows
            da += scores
            dst = ahead
        if LOOP:
            own = row - dst_start
            if (own >= 0) & (own < num_dst) & ((pid >= most) | (begin == tl.load(indptr + row))):
                side = tl.arange(0, A)[:, None]
                rows, scores = _give(
                    own + tl.zeros([A, 1], tl.int64), side == 0, row, head, column_ok, grad + first, more, facts, mine,
                    of, src_ids, keys, dst_start, SLOPE, DROP, HEADS, CHANNELS, SUM, WHOLE,
                )  # fmt: skip
                acc += rows
                da += scores
        acc, da = tl.sum(acc, 2), tl.sum(da, 2)
        if pid < most:
            _put(sums, pid * (HEADS * CHANNELS) + first + more, acc, column_ok, A)
            _put_stat(src_sums, pid * HEADS, head, da, HEADS, A)
        else:
            _put(x_grad, at, acc, column_ok, A)
            _put_stat(src_grad, row * HEADS, head, da, HEADS, A)


@triton.jit(do_not_specialize=["num_src"])
def _add(
    ends, x_grad, src_grad, sums, src_sums, num_src,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, SUM: tl.constexpr,
    L: tl.constexpr, B: tl.constexpr, A: tl.constexpr, T: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The program of a long list's first piece adds up all of its pieces, T at a time."""
    pid = tl.program_id(0).to(tl.int64)
    head, first, more, column_ok = _place(HEADS, CHANNELS, L, B, K, V)
    if pid < tl.load(ends + num_src):
        row = list_of_piece(ends, pid, num_src)
        if tl.load(ends + row) == pid:
            last = tl.load(ends + row + 1)
            acc, da = tl.zeros([L, B, K, V], SUM), tl.zeros([L, B], SUM)
            for start in range(pid, last, T):
                piece = start + tl.arange(0, T)
                ok = piece < last
                from_ = (
                    sums
                    + (first + more)[:, None, :, :, :]
                    + piece[None, :, None, None, None] * (HEADS * CHANNELS)
                )
                all_ok = ok[None, :, None, None, None] & column_ok[:, None, :, :, :]
                acc += tl.sum(tl.load(from_, mask=all_ok, other=0.0), 1)
                stat = (
                    src_sums
                    + head[None, None, :]
                    + tl.zeros([L, 1, 1], tl.int32)
                    + piece[None, :, None] * HEADS
                )
                da += tl.sum(
                    tl.load(stat, mask=ok[None, :, None] & (head < HEADS)[None, None, :], other=0.0), 1
                )
            _put(x_grad, row * (HEADS * CHANNELS) + first + more, acc, column_ok, A)
            _put_stat(src_grad, row * HEADS, head, da, HEADS, A)


def _shape(heads: int, channels: int, size: int) -> dict[str, int]:
    """How a warp lies over heads of ``channels`` values of ``size`` bytes.

    At most 128 bytes of a head lie beside each other, and a thread has four channels at least: scores are its own work.
    """
    V = gcd(channels, 16 // size)
    many = triton.next_power_of_2(triton.cdiv(channels, V))
    L = min(max(1, many * V // 4), many, max(128 // (V * size), many // 4))
    B = min(triton.next_power_of_2(heads), max(1, 32 // L))
    A, K = max(1, 32 // (L * B)), many // L
    return {"L": L, "B": B, "A": A, "T": max(1, min(_VALUES // (K * V), _EDGES // A, 8)), "K": K, "V": V}


def _blocks(x: Tensor) -> tuple[dict[str, Any], int]:
    """Constants of the kernels for rows x [S, H, C], and how many blocks of heads there are."""
    _, heads, channels = x.shape
    shape = _shape(heads, channels, x.element_size())
    consts = {
        "HEADS": heads, "CHANNELS": channels, "SUM": tl.float64 if x.dtype == torch.float64 else tl.float32,
        "num_warps": max(1, min(shape["L"] // 32, 8)), **shape,
    }  # fmt: skip
    return consts, triton.cdiv(heads, shape["B"])


def _is_whole(consts: dict[str, Any]) -> bool:
    """Whether blocks of heads and threads of a head have nothing but heads and channels."""
    channels = consts["L"] * consts["K"] * consts["V"]
    return bool(consts["HEADS"] % consts["B"] == 0 and consts["CHANNELS"] == channels)


def _facts_blocks(x: Tensor) -> tuple[dict[str, Any], int]:
    """Those of the kernel over destinations, which has whole heads."""
    _, heads, channels = x.shape
    block_c = triton.next_power_of_2(channels)
    block_h = max(1, min(triton.next_power_of_2(heads), 256 // block_c))
    consts = {
        "HEADS": heads, "CHANNELS": channels, "SUM": tl.float64 if x.dtype == torch.float64 else tl.float32,
        "BH": block_h, "BC": block_c, "num_warps": max(1, min(block_c // 512, 8)),
    }  # fmt: skip
    return consts, triton.cdiv(heads, block_h)


def attention(
    block: Any, x: Tensor, a_src: Tensor, a_dst: Tensor, keys: Tensor | None, threshold: int, slope: float, loop: bool,
    trains: bool,
) -> tuple[Tensor, tuple[Tensor, ...] | None]:  # fmt: skip
    """(out [D, H, C]; what the backward pass needs: out and P [D, H, C], maxima, inverse sums and Q [D, H]).

    x [S, H, C]; a_src [S, H] and a_dst [D, H] are of the sums' dtype, as is what is kept. ``keys`` (int64 [groups of 8
    heads]) decides which weights are dropped: lanes below ``threshold``.
    """
    num_dst, indptr = block.num_dst, block.indptr.contiguous()
    out = torch.empty(num_dst, *x.shape[1:], dtype=x.dtype, device=x.device)
    kept: tuple[Tensor, ...] | None = None
    if trains:
        kept = (
            out if out.dtype == a_dst.dtype else torch.empty_like(out, dtype=a_dst.dtype),
            torch.empty_like(out, dtype=a_dst.dtype),
            *(torch.empty_like(a_dst) for _ in range(3)),
        )
    exact, positive, top, inverse, share = kept or (None, None, None, None, None)
    whole = None if exact is out else exact
    consts, head_blocks = _blocks(x)
    if out.numel() == 0:
        return out, kept
    cut = segments(indptr, block.num_edges)
    stats = a_dst.new_empty(cut.most, 3, x.shape[1])
    sums = a_dst.new_empty(cut.most, 2, *x.shape[1:])
    src_ids = None if block.src_ids is None else block.src_ids.contiguous()
    _forward[(cut.most + num_dst, head_blocks)](
        indptr, cut.ends_or(indptr), block.indices.contiguous(), x, a_src, a_dst, src_ids, keys, out, whole, top, inverse,
        positive, share, stats, sums, num_dst, cut.most, cut.limit, block.dst_start, SLOPE=slope, DROP=threshold, LOOP=loop,
        TRAINS=trains, WHOLE=_is_whole(consts), **consts,
    )  # fmt: skip
    if cut.most:
        _join[(cut.most, head_blocks)](
            cut.ends, out, whole, top, inverse, positive, share, stats, sums, num_dst, TRAINS=trains, **consts
        )
    return out, kept


def attention_backward(
    block: Any, x: Tensor, a_src: Tensor, a_dst: Tensor, keys: Tensor | None, threshold: int, slope: float, loop: bool,
    kept: tuple[Tensor, ...], grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, a_src and a_dst; the other arguments are those of the forward pass and what it gave."""
    exact, positive, top, inverse, share = kept
    x_grad, src_grad, dst_grad = torch.empty_like(x), torch.empty_like(a_src), torch.empty_like(a_dst)
    if x.numel() == 0:
        return x_grad, src_grad.zero_(), dst_grad.zero_()
    consts, head_blocks = _blocks(x)
    heads = x.shape[1]
    facts = a_dst.new_empty(block.num_dst, heads, 4)
    if block.num_dst:
        plain, plain_blocks = _facts_blocks(x)
        _facts[(block.num_dst, plain_blocks)](
            grad,
            exact,
            positive,
            a_dst,
            top,
            inverse,
            share,
            facts,
            dst_grad,
            block.num_dst,
            SLOPE=slope,
            **plain,
        )
    turned = block.transposed()
    cut = segments(turned.indptr, block.num_edges)
    sums, src_sums = a_dst.new_empty(cut.most, *x.shape[1:]), a_dst.new_empty(cut.most, heads)
    src_ids = None if block.src_ids is None else block.src_ids.contiguous()
    _backward[(cut.most + block.num_src, head_blocks)](
        turned.indptr, cut.ends_or(turned.indptr), turned.indices, x, a_src, src_ids, keys, grad, facts, x_grad, src_grad,
        sums, src_sums,
        block.num_dst, block.num_src, cut.most, cut.limit, block.dst_start, SLOPE=slope, DROP=threshold, LOOP=loop,
        WHOLE=_is_whole(consts), **consts,
    )  # fmt: skip
    if cut.most:
        _add[(cut.most, head_blocks)](cut.ends, x_grad, src_grad, sums, src_sums, block.num_src, **consts)
    return x_grad, src_grad, dst_grad
