"""Weighted sums of gathered rows on the device: one program per list and column block, long lists in pieces.

Legend: D lists, E edges, F columns, B columns of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from polyhop.kernels.triton.segments import list_of_piece, segments

__all__ = ["reordered", "spmm"]

_BYTES = 512  # of a row that a program reads: 16 for each thread of a warp
_EDGES = 8  # rows that a warp reads at a time: 14.0 ms and 15.4 scaled for 123.7 M edges on an H200; 16: 14.0 and 16.2


@triton.jit
def _sum_edges(
    begin, end, col, col_ok, indices, pool_rows, h, units, edge_weight, src_scale,
    UNIT: tl.constexpr, SUM: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """[B]: the edges begin .. end - 1, weighted, in order."""
    acc = tl.zeros([BLOCK_F], SUM)
    for start in range(begin, end, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        ok = e < end
        source = tl.load(indices + e, mask=ok, other=0).to(tl.int64)
        row = source if pool_rows is None else tl.load(pool_rows + source, mask=ok, other=0)
        at = h + row[:, None] * (units * UNIT) + col[None, :]
        tile = tl.load(at, mask=ok[:, None] & col_ok[None, :], other=0.0).to(SUM)
        if edge_weight is not None:
            tile *= tl.load(edge_weight + e, mask=ok, other=0.0)[:, None]
        if src_scale is not None:
            tile *= tl.load(src_scale + source, mask=ok, other=0.0)[:, None]
        acc += tl.sum(tile, 0)
    return acc


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
    acc, row, count, col, col_ok, pool_rows, h, units, dst_scale, self_scale, means, own_rows, out, self_begin, self_end,
    shift, UNIT: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Scale a list's sum, by one over its edges where ``means`` takes that; add its own row, or write it apart; write it."""
    if means is not None:
        inverse = _inverse(count, acc.dtype)
        acc *= inverse
        tl.store(means + row, inverse)
    if dst_scale is not None:
        acc *= tl.load(dst_scale + row)
    if self_scale is not None:
        has_own = (row >= self_begin) & (row < self_end)
        own = tl.where(has_own, row + shift, 0)
        if pool_rows is not None:
            own = tl.load(pool_rows + own, mask=has_own, other=0)
        mine = tl.load(h + own * (units * UNIT) + col, mask=col_ok & has_own, other=0.0).to(acc.dtype)
        acc += mine * tl.load(self_scale + row - self_begin, mask=has_own, other=0.0)
    if own_rows is not None:
        own = row + shift
        if pool_rows is not None:
            own = tl.load(pool_rows + own)
        mine = tl.load(h + own * (units * UNIT) + col, mask=col_ok, other=0.0)
        tl.store(own_rows + row * (units * UNIT) + col, mine, mask=col_ok)
    to = out + row * (units * UNIT) + col
    if ADDS:
        acc += tl.load(to, mask=col_ok, other=0.0).to(acc.dtype)
    tl.store(to, acc.to(out.dtype.element_ty), mask=col_ok)


@triton.jit(do_not_specialize=["num_dst", "most", "limit", "self_begin", "self_end", "shift"])
def _lists(
    indptr, ends, indices, pool_rows, h, units, edge_weight, src_scale, dst_scale, self_scale, means, own_rows, out, sums,
    num_dst, most, limit, self_begin, self_end, shift,
    UNIT: tl.constexpr, SUM: tl.constexpr, ADDS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Programs 0 .. most - 1 sum the pieces of long lists, those after them short lists."""
    pid = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    col_ok = col < units * UNIT
    if pid >= most:
        row = pid - most
        begin, end = tl.load(indptr + row), tl.load(indptr + row + 1)
        if end - begin <= limit:
            acc = _sum_edges(
                begin, end, col, col_ok, indices, pool_rows, h, units, edge_weight, src_scale, UNIT, SUM,
                BLOCK_E, BLOCK_F,
            )  # fmt: skip
            if (not ADDS) or end > begin:
                _finish(
                    acc, row, end - begin, col, col_ok, pool_rows, h, units, dst_scale, self_scale, means, own_rows, out,
                    self_begin, self_end, shift, UNIT, ADDS,
                )  # fmt: skip
    elif pid < tl.load(ends + num_dst):
        row = list_of_piece(ends, pid, num_dst)
        begin = tl.load(indptr + row) + (pid - tl.load(ends + row)) * limit
        end = tl.minimum(begin + limit, tl.load(indptr + row + 1))
        acc = _sum_edges(
            begin, end, col, col_ok, indices, pool_rows, h, units, edge_weight, src_scale, UNIT, SUM, BLOCK_E,
            BLOCK_F,
        )  # fmt: skip
        tl.store(sums + pid * (units * UNIT) + col, acc, mask=col_ok)


@triton.jit(do_not_specialize=["num_dst", "self_begin", "self_end", "shift"])
def _long_lists(
    indptr, ends, pool_rows, h, units, dst_scale, self_scale, means, own_rows, out, sums, num_dst, self_begin, self_end,
    shift, UNIT: tl.constexpr, SUM: tl.constexpr, ADDS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """The program of a long list's first piece sums all of its pieces."""
    pid = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    col_ok = col < units * UNIT
    if pid < tl.load(ends + num_dst):
        row = list_of_piece(ends, pid, num_dst)
        if tl.load(ends + row) == pid:
            acc = tl.zeros([BLOCK_F], SUM)
            end = tl.load(ends + row + 1)
            for start in range(pid, end, BLOCK_E):
                piece = start + tl.arange(0, BLOCK_E)
                ok = (piece < end)[:, None] & col_ok[None, :]
                acc += tl.sum(
                    tl.load(sums + piece[:, None] * (units * UNIT) + col[None, :], mask=ok, other=0.0), 0
                )
            count = tl.load(indptr + row + 1) - tl.load(indptr + row)
            _finish(
                acc, row, count, col, col_ok, pool_rows, h, units, dst_scale, self_scale, means, own_rows, out,
                self_begin, self_end, shift, UNIT, ADDS,
            )  # fmt: skip


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
    means: Tensor | None = None,
    own_rows: Tensor | None = None,
) -> Tensor:
    """out [D, F] = dst_scale[i] * sum_e edge_weight[e] src_scale[j] h[row(j)] + self_scale[i - own[0]] h[row(i + own[2])].

    The self term is for own[0] <= i < own[1]. Factors are of the sums' dtype; ``adds`` adds to what out holds. ``means`` [D]
    takes 1 / edges of each list, by which its sum is multiplied too; ``own_rows`` [D, F] takes h[row(i + own[2])].
    """
    num_dst, width = indptr.numel() - 1, h.shape[1]
    if num_dst == 0 or width == 0:
        return out
    total = torch.float64 if h.dtype == torch.float64 else torch.float32
    cut = segments(indptr, indices.numel())
    unit = next(u for u in (16, 8, 4, 2, 1) if width % u == 0)
    block = min(triton.next_power_of_2(width), _BYTES // h.element_size())
    sums = torch.empty(cut.most, width, dtype=total, device=h.device)
    consts = {
        "UNIT": unit, "SUM": tl.float64 if total == torch.float64 else tl.float32, "ADDS": adds, "BLOCK_E": _EDGES,
        "BLOCK_F": block, "num_warps": 1,
    }  # fmt: skip
    blocks = triton.cdiv(width, block)
    _lists[(cut.most + num_dst, blocks)](
        indptr, cut.ends_or(indptr), indices, rows, h, width // unit, edge_weight, src_scale, dst_scale, self_scale, means,
        own_rows, out, sums, num_dst, cut.most, cut.limit, *own, **consts,
    )  # fmt: skip
    if cut.most:
        _long_lists[(cut.most, blocks)](
            indptr, cut.ends, rows, h, width // unit, dst_scale, self_scale, means, own_rows, out, sums, num_dst, *own,
            **consts,
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
