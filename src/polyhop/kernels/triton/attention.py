"""Fused attention aggregation on the device: softmax and weighted sum in one pass over the edges, forward and backward.

Forward, per destination i and head:        out = sum_e a_e m_e x_j,   a = softmax(leaky_relu(z)),   z = a_src[j] + a_dst[i]
Backward needs one gather of rows only, along the transposed edges, because the gradient of a_dst follows from two sums that
the forward pass takes on its way: scores' gradients add up to 0 over a destination, so with slope s

    d a_dst = (1 - s) sum_{z > 0} a_e (m_e g . x_j - g . out) = (1 - s) (g . P - (g . out) Q),
    P = sum_{z > 0} a_e m_e x_j,   Q = sum_{z > 0} a_e

Long lists are summed in pieces (``segments.py``): softmaxes of pieces are joined by their maxima.

Legend: D destinations, S sources, E edges, H heads, C channels per head, BH and BC their blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhop.kernels.triton.philox import lane_of, philox_of_ids
from polyhop.kernels.triton.segments import list_of_piece, segments

__all__ = ["attention", "attention_backward"]

_VALUES = 2048  # of rows that a warp holds at a time: 64 registers of each thread


@triton.jit
def _keep(
    dst, src, head, src_ids, keys, dst_start, DROP: tl.constexpr, HEADS: tl.constexpr, SUM: tl.constexpr
):  # fmt: skip
    """0 or 1 / (1 - p) of edges dst -> src (int64, one of them [n, 1]) and heads [1, BH]."""
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
def _attend(
    begin, end, row, head, head_ok, indices, x, a_src, to, src_ids, keys, dst_start, m, total, q, acc, pos,
    SLOPE: tl.constexpr, DROP: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, LOOP: tl.constexpr,
    TRAINS: tl.constexpr, SUM: tl.constexpr,
    BE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Take edges begin .. end - 1 of a destination into its state: maximum, sum, positive share; sums of rows."""
    c = tl.arange(0, BC)
    column = head[:, None] * CHANNELS + c[None, :]
    column_ok = head_ok[:, None] & (c < CHANNELS)[None, :]
    for start in range(begin, end, BE):
        e = start + tl.arange(0, BE)
        ok = e < end
        source = tl.load(indices + e, mask=ok, other=0).to(tl.int64)
        if LOOP:
            ok = ok & (source != row + dst_start)
        some = ok[:, None] & head_ok[None, :]
        z = tl.load(a_src + source[:, None] * HEADS + head[None, :], mask=some, other=0.0) + to[None, :]
        s = tl.where(some, tl.where(z > 0, z, z * SLOPE), float("-inf"))
        new = tl.maximum(m, tl.max(s, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        p, shrink = tl.exp(s - base[None, :]), tl.exp(m - base)
        up = tl.where(z > 0, p, 0.0)
        m, total, q = new, total * shrink + tl.sum(p, 0), q * shrink + tl.sum(up, 0)
        if keys is not None:
            keep = _keep(
                row + tl.zeros([1, 1], tl.int64), source[:, None], head[None, :], src_ids, keys, dst_start, DROP,
                HEADS, SUM,
            )  # fmt: skip
            p, up = p * keep, up * keep
        at = x + source[:, None, None] * (HEADS * CHANNELS) + column[None, :, :]
        tile = tl.load(at, mask=ok[:, None, None] & column_ok[None, :, :], other=0.0).to(SUM)
        acc = acc * shrink[:, None] + tl.sum(tile * p[:, :, None], 0)
        if TRAINS:
            pos = pos * shrink[:, None] + tl.sum(tile * up[:, :, None], 0)
    return m, total, q, acc, pos


@triton.jit
def _end(
    m, total, q, acc, pos, row, head, head_ok, out, whole, top, inverse, positive, share,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, TRAINS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Divide a destination's sums by its softmax's and write them."""
    c = tl.arange(0, BC)
    at = row * (HEADS * CHANNELS) + head[:, None] * CHANNELS + c[None, :]
    ok = head_ok[:, None] & (c < CHANNELS)[None, :]
    inv = tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total))
    tl.store(out + at, (acc * inv[:, None]).to(out.dtype.element_ty), mask=ok)
    if TRAINS:
        if whole is not None:
            tl.store(whole + at, acc * inv[:, None], mask=ok)
        tl.store(positive + at, pos * inv[:, None], mask=ok)
        stat = row * HEADS + head
        tl.store(top + stat, m, mask=head_ok)
        tl.store(inverse + stat, inv, mask=head_ok)
        tl.store(share + stat, q * inv, mask=head_ok)


@triton.jit(do_not_specialize=["num_dst", "most", "limit", "dst_start"])
def _forward(
    indptr, ends, indices, x, a_src, a_dst, src_ids, keys, out, whole, top, inverse, positive, share, stats, sums,
    num_dst, most, limit, dst_start,
    SLOPE: tl.constexpr, DROP: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, LOOP: tl.constexpr,
    TRAINS: tl.constexpr, SUM: tl.constexpr,
    BE: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Programs 0 .. most - 1 take pieces of long lists, those after them short lists."""
    pid = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    head_ok = head < HEADS
    is_piece = pid < most
    row, begin, end, is_live = pid * 0, pid * 0, pid * 0, pid < 0
    if is_piece:
        if pid < tl.load(ends + num_dst):
            row = list_of_piece(ends, pid, num_dst)
            begin = tl.load(indptr + row) + (pid - tl.load(ends + row)) * limit
            end = tl.minimum(begin + limit, tl.load(indptr + row + 1))
            is_live = pid >= 0
    else:
        row = pid - most
        begin, end = tl.load(indptr + row), tl.load(indptr + row + 1)
        is_live = end - begin <= limit
    if is_live:
        to = tl.load(a_dst + row * HEADS + head, mask=head_ok, other=0.0)
        m = tl.full([BH], float("-inf"), SUM)
        total, q = tl.zeros([BH], SUM), tl.zeros([BH], SUM)
        acc, pos = tl.zeros([BH, BC], SUM), tl.zeros([BH, BC], SUM)
        if LOOP:  # noqa: SIM102 (a constant: decided when compiled)
            if (not is_piece) or begin == tl.load(indptr + row):
                source = row + dst_start
                z = tl.load(a_src + source * HEADS + head, mask=head_ok, other=0.0) + to
                m, total = tl.where(z > 0, z, z * SLOPE), tl.full([BH], 1.0, SUM)
                q = tl.where(z > 0, total, 0.0)
                p, up = total, q
                if keys is not None:
                    keep = _keep(
                        row + tl.zeros([1, 1], tl.int64), source, head[None, :], src_ids, keys, dst_start, DROP,
                        HEADS, SUM,
                    )  # fmt: skip
                    keep = tl.reshape(keep, [BH])
                    p, up = p * keep, up * keep
                c = tl.arange(0, BC)
                at = x + source * (HEADS * CHANNELS) + head[:, None] * CHANNELS + c[None, :]
                own = tl.load(at, mask=head_ok[:, None] & (c < CHANNELS)[None, :], other=0.0).to(SUM)
                acc = own * p[:, None]
                if TRAINS:
                    pos = own * up[:, None]
        m, total, q, acc, pos = _attend(
            begin, end, row, head, head_ok, indices, x, a_src, to, src_ids, keys, dst_start,
            m, total, q, acc, pos, SLOPE, DROP, HEADS, CHANNELS, LOOP, TRAINS, SUM, BE, BC,
        )  # fmt: skip
        if is_piece:
            c = tl.arange(0, BC)
            ok = head_ok[:, None] & (c < CHANNELS)[None, :]
            at = pid * (2 * HEADS * CHANNELS) + head[:, None] * CHANNELS + c[None, :]
            tl.store(sums + at, acc, mask=ok)
            tl.store(sums + at + HEADS * CHANNELS, pos, mask=ok)
            stat = pid * (3 * HEADS) + head
            tl.store(stats + stat, m, mask=head_ok)
            tl.store(stats + stat + HEADS, total, mask=head_ok)
            tl.store(stats + stat + 2 * HEADS, q, mask=head_ok)
        else:
            _end(
                m, total, q, acc, pos, row, head, head_ok, out, whole, top, inverse, positive, share, HEADS, CHANNELS,
                TRAINS, BC,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_dst"])
def _join(
    ends, out, whole, top, inverse, positive, share, stats, sums, num_dst,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, TRAINS: tl.constexpr, SUM: tl.constexpr,
    BE: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The program of a long list's first piece joins all of its pieces."""
    pid = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    head_ok = head < HEADS
    if pid < tl.load(ends + num_dst):
        row = list_of_piece(ends, pid, num_dst)
        if tl.load(ends + row) == pid:
            last = tl.load(ends + row + 1)
            m = tl.full([BH], float("-inf"), SUM)
            for start in range(pid, last, BE):
                piece = start + tl.arange(0, BE)
                ok = (piece < last)[:, None] & head_ok[None, :]
                at = stats + piece[:, None] * (3 * HEADS) + head[None, :]
                m = tl.maximum(m, tl.max(tl.load(at, mask=ok, other=float("-inf")), 0))
            base = tl.where(m == float("-inf"), 0.0, m)
            total, q = tl.zeros([BH], SUM), tl.zeros([BH], SUM)
            acc, pos = tl.zeros([BH, BC], SUM), tl.zeros([BH, BC], SUM)
            c = tl.arange(0, BC)
            for start in range(pid, last, BE):
                piece = start + tl.arange(0, BE)
                ok = (piece < last)[:, None] & head_ok[None, :]
                at = stats + piece[:, None] * (3 * HEADS) + head[None, :]
                w = tl.exp(tl.load(at, mask=ok, other=float("-inf")) - base[None, :])
                total += tl.sum(tl.load(at + HEADS, mask=ok, other=0.0) * w, 0)
                q += tl.sum(tl.load(at + 2 * HEADS, mask=ok, other=0.0) * w, 0)
                column = head[:, None] * CHANNELS + c[None, :]
                from_ = sums + piece[:, None, None] * (2 * HEADS * CHANNELS) + column[None, :, :]
                all_ok = ok[:, :, None] & (c < CHANNELS)[None, None, :]
                acc += tl.sum(tl.load(from_, mask=all_ok, other=0.0) * w[:, :, None], 0)
                if TRAINS:
                    other = tl.load(from_ + HEADS * CHANNELS, mask=all_ok, other=0.0)
                    pos += tl.sum(other * w[:, :, None], 0)
            _end(
                m, total, q, acc, pos, row, head, head_ok, out, whole, top, inverse, positive, share, HEADS, CHANNELS,
                TRAINS, BC,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_dst"])
def _facts(
    grad, out, positive, a_dst, top, inverse, share, facts, dst_grad, num_dst,
    SLOPE: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, SUM: tl.constexpr,
    BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """What the backward pass reads of each destination: a_dst, maximum, inverse sum, g . out; and a_dst's gradient."""
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
    to = facts + row * (4 * HEADS) + head
    tl.store(to, tl.load(a_dst + stat, mask=head_ok, other=0.0), mask=head_ok)
    tl.store(to + HEADS, tl.load(top + stat, mask=head_ok, other=0.0), mask=head_ok)
    tl.store(to + 2 * HEADS, tl.load(inverse + stat, mask=head_ok, other=0.0), mask=head_ok)
    tl.store(to + 3 * HEADS, whole, mask=head_ok)


@triton.jit
def _give(
    dst, ok, row, head, head_ok, grad, facts, mine, of, src_ids, keys, dst_start,
    SLOPE: tl.constexpr, DROP: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, SUM: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """What edges row -> dst [BE] add to the gradients of x[row] and of a_src[row]: ([BH, BC], [BH])."""
    c = tl.arange(0, BC)
    column = head[:, None] * CHANNELS + c[None, :]
    column_ok = head_ok[:, None] & (c < CHANNELS)[None, :]
    some = ok[:, None] & head_ok[None, :]
    fact = facts + dst[:, None] * (4 * HEADS) + head[None, :]
    z = of[None, :] + tl.load(fact, mask=some, other=0.0)
    s = tl.where(z > 0, z, z * SLOPE)
    alpha = tl.exp(s - tl.load(fact + HEADS, mask=some, other=0.0))
    alpha = tl.where(some, alpha * tl.load(fact + 2 * HEADS, mask=some, other=0.0), 0.0)
    at = grad + dst[:, None, None] * (HEADS * CHANNELS) + column[None, :, :]
    g = tl.load(at, mask=ok[:, None, None] & column_ok[None, :, :], other=0.0).to(SUM)
    dot, kept = tl.sum(g * mine[None, :, :], 2), alpha
    if keys is not None:
        keep = _keep(
            dst[:, None], row + tl.zeros([1, 1], tl.int64), head[None, :], src_ids, keys, dst_start, DROP, HEADS,
            SUM,
        )  # fmt: skip
        dot, kept = dot * keep, alpha * keep
    ds = alpha * (dot - tl.load(fact + 3 * HEADS, mask=some, other=0.0))
    return tl.sum(g * kept[:, :, None], 0), tl.sum(tl.where(z > 0, ds, ds * SLOPE), 0)


@triton.jit(do_not_specialize=["num_dst", "num_src", "most", "limit", "dst_start"])
def _backward(
    indptr, ends, indices, x, a_src, src_ids, keys, grad, facts, x_grad, src_grad, sums, src_sums,
    num_dst, num_src, most, limit, dst_start,
    SLOPE: tl.constexpr, DROP: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, LOOP: tl.constexpr,
    SUM: tl.constexpr,
    BE: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Along the transposed edges: gradients of a source's row and of its score."""
    pid = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    head_ok = head < HEADS
    is_piece = pid < most
    row, begin, end, is_live = pid * 0, pid * 0, pid * 0, pid < 0
    if is_piece:
        if pid < tl.load(ends + num_src):
            row = list_of_piece(ends, pid, num_src)
            begin = tl.load(indptr + row) + (pid - tl.load(ends + row)) * limit
            end = tl.minimum(begin + limit, tl.load(indptr + row + 1))
            is_live = pid >= 0
    else:
        row = pid - most
        begin, end = tl.load(indptr + row), tl.load(indptr + row + 1)
        is_live = end - begin <= limit
    if is_live:
        c = tl.arange(0, BC)
        at = head[:, None] * CHANNELS + c[None, :]
        at_ok = head_ok[:, None] & (c < CHANNELS)[None, :]
        mine = tl.load(x + row * (HEADS * CHANNELS) + at, mask=at_ok, other=0.0).to(SUM)
        of = tl.load(a_src + row * HEADS + head, mask=head_ok, other=0.0)
        acc, da = tl.zeros([BH, BC], SUM), tl.zeros([BH], SUM)
        for start in range(begin, end, BE):
            e = start + tl.arange(0, BE)
            ok = e < end
            dst = tl.load(indices + e, mask=ok, other=0).to(tl.int64)
            if LOOP:
                ok = ok & (dst + dst_start != row)
            rows, scores = _give(
                dst, ok, row, head, head_ok, grad, facts, mine, of, src_ids, keys, dst_start,
                SLOPE, DROP, HEADS, CHANNELS, SUM, BC,
            )  # fmt: skip
            acc += rows
            da += scores
        if LOOP:
            own = row - dst_start
            if (own >= 0) & (own < num_dst) & ((not is_piece) | (begin == tl.load(indptr + row))):
                one = own + tl.zeros([1], tl.int64)
                rows, scores = _give(
                    one, one >= 0, row, head, head_ok, grad, facts, mine, of, src_ids, keys, dst_start,
                    SLOPE, DROP, HEADS, CHANNELS, SUM, BC,
                )  # fmt: skip
                acc += rows
                da += scores
        if is_piece:
            tl.store(sums + pid * (HEADS * CHANNELS) + at, acc, mask=at_ok)
            tl.store(src_sums + pid * HEADS + head, da, mask=head_ok)
        else:
            tl.store(x_grad + row * (HEADS * CHANNELS) + at, acc.to(x_grad.dtype.element_ty), mask=at_ok)
            tl.store(src_grad + row * HEADS + head, da, mask=head_ok)


@triton.jit(do_not_specialize=["num_src"])
def _add(
    ends, x_grad, src_grad, sums, src_sums, num_src,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, SUM: tl.constexpr,
    BE: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The program of a long list's first piece adds up all of its pieces."""
    pid = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    head_ok = head < HEADS
    if pid < tl.load(ends + num_src):
        row = list_of_piece(ends, pid, num_src)
        if tl.load(ends + row) == pid:
            last = tl.load(ends + row + 1)
            c = tl.arange(0, BC)
            at = head[:, None] * CHANNELS + c[None, :]
            at_ok = head_ok[:, None] & (c < CHANNELS)[None, :]
            acc, da = tl.zeros([BH, BC], SUM), tl.zeros([BH], SUM)
            for start in range(pid, last, BE):
                piece = start + tl.arange(0, BE)
                ok = piece < last
                from_ = sums + piece[:, None, None] * (HEADS * CHANNELS) + at[None, :, :]
                acc += tl.sum(tl.load(from_, mask=ok[:, None, None] & at_ok[None, :, :], other=0.0), 0)
                from_ = src_sums + piece[:, None] * HEADS + head[None, :]
                da += tl.sum(tl.load(from_, mask=ok[:, None] & head_ok[None, :], other=0.0), 0)
            tl.store(x_grad + row * (HEADS * CHANNELS) + at, acc.to(x_grad.dtype.element_ty), mask=at_ok)
            tl.store(src_grad + row * HEADS + head, da, mask=head_ok)


def _blocks(x: Tensor) -> tuple[dict[str, Any], int]:
    """Constants of the kernels for rows x [S, H, C], and how many blocks of heads there are."""
    _, heads, channels = x.shape
    block_c = triton.next_power_of_2(channels)
    block_h = max(1, min(triton.next_power_of_2(heads), 256 // block_c))
    edges = max(1, min(_VALUES // (block_h * block_c), 16))
    consts = {
        "HEADS": heads, "CHANNELS": channels, "SUM": tl.float64 if x.dtype == torch.float64 else tl.float32, "BE": edges,
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
        TRAINS=trains, **consts,
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
    facts = a_dst.new_empty(block.num_dst, 4, heads)
    plain = {name: value for name, value in consts.items() if name != "BE"}
    if block.num_dst:
        _facts[(block.num_dst, head_blocks)](
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
        sums, src_sums, block.num_dst, block.num_src, cut.most, cut.limit, block.dst_start, SLOPE=slope, DROP=threshold,
        LOOP=loop, **consts,
    )  # fmt: skip
    if cut.most:
        _add[(cut.most, head_blocks)](cut.ends, x_grad, src_grad, sums, src_sums, block.num_src, **consts)
    return x_grad, src_grad, dst_grad
