"""Weighted sums of gathered rows on the device: one program per list and column block, long lists in pieces.

A program is a warp. Its threads hold V columns that are read at once; L of them lie beside each other in a row, and A such
sides take edges of their own; each thread has K times as many columns, and T edges at a time. What belongs to an edge is
then known to the threads that need it, and nothing changes hands before a list's end.

Legend: D lists, E edges, F columns; T, A, K, L, V as above.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from polyhop.kernels.triton.segments import list_of_piece, segments

__all__ = ["reordered", "spmm"]

_BYTES = 512  # of a row that a program reads: 16 for each thread of a warp
_SCALED_FIRST = 24
"""Edges a row of h from which rows are scaled before they are gathered, and not again for every edge that reads them. On an
H200 such a factor takes 1.4 to 2.5 ms for 123.7 M edges and 512 bytes of their rows, 11 to 20 ps an edge; to read and write
512 bytes takes 240 ps."""
_LINE = 128  # bytes of a row that lie beside each other in a warp's read; its other threads read other edges' rows
_TURN = 4096  # bytes that a warp reads at a time: 14.0 ms and 15.4 scaled for 123.7 M edges on an H200; 8192: 14.0 and 16.2
_EDGES = 16  # edges at a time at most, of narrow rows (counted, not timed)
_SHORT = 16  # edges of a list: with fewer, adding up its sides takes more than each edge saves (counted, not timed)
_NEAR = 2**31  # values that 32 bits number: a row's place is then one multiplication
_PIECES = 8  # sums of pieces that are read at a time


@triton.jit
def _columns(width, K: tl.constexpr, L: tl.constexpr, V: tl.constexpr):
    """([L, 1, V] first columns of this program's threads, [1, K, 1] how far the others lie, [L, K, V] which there are)."""
    lane, k, v = (
        tl.arange(0, L)[:, None, None],
        tl.arange(0, K)[None, :, None],
        tl.arange(0, V)[None, None, :],
    )
    first, more = tl.program_id(1) * (K * L * V) + lane * V + v, k * (L * V)
    return first, more, first + more < width


@triton.jit
def _sum_edges(
    begin, end, first, more, col_ok, indices, pool_rows, h, width, edge_weight, src_scale,
    SUM: tl.constexpr, NEAR: tl.constexpr, WHOLE: tl.constexpr, T: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """[L, K, V]: the edges begin .. end - 1, weighted: every A-th in order, then what the A sides have.

    Sources are read a turn ahead: their reads and those of rows are under way together.
    """
    acc = tl.zeros([col_ok.shape[0], A, col_ok.shape[1], col_ok.shape[2]], SUM)
    h += first
    count = (end - begin).to(tl.int32)  # a piece's at most
    e = tl.arange(0, T)[None, :] * A + tl.arange(0, A)[:, None]
    source_at = indices + begin + e
    if edge_weight is not None:
        weight_at = edge_weight + begin + e
    source = tl.load(source_at, mask=e < count, other=0)
    for start in range(0, count, T * A):
        ok = e < count - start
        source_at += T * A
        ahead = tl.load(source_at, mask=e < count - start - T * A, other=0)
        row = source if pool_rows is None else tl.load(pool_rows + source, mask=ok, other=0)
        row = (row.to(tl.int32) if NEAR else row.to(tl.int64)) * width
        at = h[:, None, None, :, :] + row[None, :, :, None, None] + more[:, None, None, :, :]
        some = ok[None, :, :, None, None]
        if not WHOLE:
            some = some & col_ok[:, None, None, :, :]
        tile = tl.load(at, mask=some, other=0.0).to(SUM)
        if edge_weight is not None:
            tile *= tl.load(weight_at, mask=ok, other=0.0)[None, :, :, None, None]
            weight_at += T * A
        if src_scale is not None:
            tile *= tl.load(src_scale + source, mask=ok, other=0.0)[None, :, :, None, None]
        acc += tl.sum(tile, 2)
        source = ahead
    return tl.sum(acc, 1)


@triton.jit
def _side(col_ok, values, A: tl.constexpr):
    """(values [L, 1, K, V] of [L, K, V], which all A sides know; [L, A, K, V] of the columns that the first side writes)."""
    side = tl.arange(0, A)[None, :, None, None]
    return values[:, None, :, :], col_ok[:, None, :, :] & (side == 0)


@triton.jit
def _inverse(count, kind: tl.constexpr):
    """1 / count, at most 1, rounded as on the host."""
    one = tl.full([], 1.0, kind)
    if kind == tl.float64:
        inverse = one / tl.maximum(count, 1).to(kind)
    else:
        inverse = tl.div_rn(one, tl.maximum(count, 1).to(kind))
    return inverse


@triton.jit
def _finish(
    acc, row, count, first, more, col_ok, pool_rows, h, width, dst_scale, self_scale, means, own_rows, out, self_begin,
    self_end, shift, ADDS: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """Scale a list's sum, by one over its edges where ``means`` takes that; add its own row, or write it apart; write it."""
    if means is not None:
        inverse = _inverse(count, acc.dtype)
        acc *= inverse
        tl.store(means + row, inverse)
    if dst_scale is not None:
        acc *= tl.load(dst_scale + row)
    acc, ok = _side(col_ok, acc, A)
    col = (first + more)[:, None, :, :] + tl.zeros([1, A, 1, 1], tl.int32)
    if self_scale is not None:
        has_own = (row >= self_begin) & (row < self_end)
        own = tl.where(has_own, row + shift, 0)
        if pool_rows is not None:
            own = tl.load(pool_rows + own, mask=has_own, other=0)
        mine = tl.load(h + own * width + col, mask=ok & has_own, other=0.0).to(acc.dtype)
        acc += mine * tl.load(self_scale + row - self_begin, mask=has_own, other=0.0)
    if own_rows is not None:
        own = row + shift
        if pool_rows is not None:
            own = tl.load(pool_rows + own)
        tl.store(own_rows + row * width + col, tl.load(h + own * width + col, mask=ok, other=0.0), mask=ok)
    to = out + row * width + col
    if ADDS:
        acc += tl.load(to, mask=ok, other=0.0).to(acc.dtype)
    tl.store(to, acc.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["num_dst", "most", "limit", "self_begin", "self_end", "shift"])
def _lists(
    indptr, ends, indices, pool_rows, h, own_h, units, edge_weight, src_scale, dst_scale, self_scale, means, own_rows, out,
    sums, num_dst, most, limit, self_begin, self_end, shift,
    UNIT: tl.constexpr, SUM: tl.constexpr, ADDS: tl.constexpr, NEAR: tl.constexpr, WHOLE: tl.constexpr,
    T: tl.constexpr, A: tl.constexpr, K: tl.constexpr, L: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Programs 0 .. most - 1 sum the pieces of long lists, those after them short lists."""
    pid, width = tl.program_id(0).to(tl.int64), units * UNIT
    first, more, col_ok = _columns(width, K, L, V)
    if pid >= most:
        row = pid - most
        begin, end = tl.load(indptr + row), tl.load(indptr + row + 1)
        if end - begin <= limit:
            acc = _sum_edges(
                begin, end, first, more, col_ok, indices, pool_rows, h, width, edge_weight, src_scale, SUM, NEAR, WHOLE,
                T, A,
            )  # fmt: skip
            if (not ADDS) or means is not None or end > begin:
                _finish(
                    acc, row, end - begin, first, more, col_ok, pool_rows, own_h, width, dst_scale, self_scale, means,
                    own_rows, out, self_begin, self_end, shift, ADDS, A,
                )  # fmt: skip
    elif pid < tl.load(ends + num_dst):
        row = list_of_piece(ends, pid, num_dst)
        begin = tl.load(indptr + row) + (pid - tl.load(ends + row)) * limit
        end = tl.minimum(begin + limit, tl.load(indptr + row + 1))
        acc = _sum_edges(
            begin, end, first, more, col_ok, indices, pool_rows, h, width, edge_weight, src_scale, SUM, NEAR, WHOLE, T,
            A,
        )  # fmt: skip
        acc, ok = _side(col_ok, acc, A)
        col = (first + more)[:, None, :, :] + tl.zeros([1, A, 1, 1], tl.int32)
        tl.store(sums + pid * width + col, acc, mask=ok)


@triton.jit(do_not_specialize=["num_dst", "self_begin", "self_end", "shift"])
def _long_lists(
    indptr, ends, pool_rows, h, units, dst_scale, self_scale, means, own_rows, out, sums, num_dst, self_begin, self_end,
    shift, UNIT: tl.constexpr, SUM: tl.constexpr, ADDS: tl.constexpr,
    K: tl.constexpr, L: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The program of a long list's first piece sums all of its pieces."""
    pid, width = tl.program_id(0).to(tl.int64), units * UNIT
    first, more, col_ok = _columns(width, K, L, V)
    if pid < tl.load(ends + num_dst):
        row = list_of_piece(ends, pid, num_dst)
        if tl.load(ends + row) == pid:
            acc = tl.zeros([L, K, V], SUM)
            end = tl.load(ends + row + 1)
            for start in range(pid, end, BLOCK):
                piece = start + tl.arange(0, BLOCK)
                ok = (piece < end)[None, None, :, None] & col_ok[:, :, None, :]
                at = (piece * width)[None, None, :, None] + (first + more)[:, :, None, :]
                acc += tl.sum(tl.load(sums + at, mask=ok, other=0.0), 2)
            count = tl.load(indptr + row + 1) - tl.load(indptr + row)
            _finish(
                acc, row, count, first, more, col_ok, pool_rows, h, width, dst_scale, self_scale, means, own_rows, out,
                self_begin, self_end, shift, ADDS, 1,
            )  # fmt: skip


def _shape(width: int, size: int, degree: float) -> dict[str, int]:
    """How a warp lies over rows of ``width`` values of ``size`` bytes; lists have ``degree`` edges on average."""
    is_short = degree < _SHORT
    V = gcd(width, 16 // size)
    line, edges = (_BYTES, 4) if is_short else (_LINE, _EDGES)
    L = min(line // (V * size), 32, triton.next_power_of_2(triton.cdiv(width, V)))
    K = min(triton.next_power_of_2(triton.cdiv(width, L * V)), max(1, _BYTES // (L * V * size)))
    A = 32 // L
    return {"T": max(1, min(_TURN // (32 * K * V * size), edges // A, 8)), "A": A, "K": K, "L": L, "V": V}


def spmm(
    indptr: Tensor,
    indices: Tensor,
    h: Tensor,
    out: Tensor,
    *,
    rows: Tensor | None = None,
    edge_weight: Tensor | None = None,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
    self_scale: Tensor | None = None,
    own: tuple[int, int, int] = (0, 0, 0),
    adds: bool = False,
    may_overwrite: bool = False,
    means: Tensor | None = None,
    own_rows: Tensor | None = None,
) -> Tensor:
    """out [D, F] = dst_scale[i] * sum_e edge_weight[e] src_scale[j] h[row(j)] + self_scale[i - own[0]] h[row(i + own[2])].

    The self term is for own[0] <= i < own[1]. Factors are of the sums' dtype; ``adds`` adds to what out holds.
    ``may_overwrite``: h is the caller's own, and read no more. ``means`` [D] takes 1 / edges of each list, by which its sum
    is multiplied too; ``own_rows`` [D, F] takes h[row(i + own[2])].
    """
    num_dst, width = indptr.numel() - 1, h.shape[1]
    if num_dst == 0 or width == 0:
        return out
    total = torch.float64 if h.dtype == torch.float64 else torch.float32
    cut, own_h = segments(indptr, indices.numel()), h
    is_dense = indices.numel() >= _SCALED_FIRST * h.shape[0]
    if src_scale is not None and rows is None and h.dtype == total and is_dense:
        in_place = may_overwrite and self_scale is None and own_rows is None
        h = torch.mul(h, src_scale[:, None], out=h if in_place else torch.empty_like(h))
        src_scale = None
    unit = next(u for u in (16, 8, 4, 2, 1) if width % u == 0)
    shape = _shape(width, h.element_size(), indices.numel() / num_dst)
    across = shape["K"] * shape["L"] * shape["V"]
    blocks = triton.cdiv(width, across)
    sums = torch.empty(cut.most, width, dtype=total, device=h.device)
    consts = {
        "UNIT": unit,
        "SUM": tl.float64 if total == torch.float64 else tl.float32,
        "ADDS": adds,
        "num_warps": 1,
    }
    _lists[(cut.most + num_dst, blocks)](
        indptr, cut.ends_or(indptr), indices, rows, h, own_h, width // unit, edge_weight, src_scale, dst_scale, self_scale,
        means, own_rows, out, sums, num_dst, cut.most, cut.limit, *own, **consts, **shape, NEAR=h.numel() < _NEAR,
        WHOLE=width % across == 0,
    )  # fmt: skip
    if cut.most:
        lies = {name: shape[name] for name in "KLV"}
        _long_lists[(cut.most, blocks)](
            indptr, cut.ends, rows, own_h, width // unit, dst_scale, self_scale, means, own_rows, out, sums, num_dst, *own,
            **consts, **lies, BLOCK=_PIECES,
        )  # fmt: skip
    return out


def reordered(weight: Tensor, edge: Tensor) -> Tensor:
    """weight[edge], both [E]: kept as long as ``weight`` lives, for one order of edges at a time.

    A backward pass reads weights in the order of the transposed edges; one by one they would each take 32 bytes from memory.
    """
    version = None if weight.is_inference() else (weight._version, edge.data_ptr(), edge._version)
    known = _known.get(weight)
    if known is not None and version is not None and known[0] == version:
        found: Tensor = known[1]
        return found
    made = weight[edge]
    if version is not None:
        _known[weight] = (version, made)
    return made


_known = WeakTensorKeyDictionary()
