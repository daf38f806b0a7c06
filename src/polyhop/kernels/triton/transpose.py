"""Edges regrouped by source on the device: ids are sorted, then one kernel finds where lists begin and whose edges they are.

Legend: D destinations, S sources, E edges.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["transpose"]

_ENTRIES = 1024  # of a program


@triton.jit(do_not_specialize=["num_src", "num_dst", "num_edges", "turns"])
def _turn(
    ascending, order, indptr, t_indptr, t_indices, t_edge, num_src, num_dst, num_edges, turns, BLOCK: tl.constexpr
):  # fmt: skip
    """Two searches at once: of each source, how many edges are of sources before it; of each edge, its destination."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_source, is_edge = at <= num_src, at < num_edges
    edge = tl.load(order + at, mask=is_edge, other=0)
    low, high = at * 0, at * 0 + num_edges
    dst, past = at * 0, at * 0 + num_dst
    for _ in range(turns):
        middle = (low + high) // 2
        is_before = tl.load(ascending + middle, mask=is_source & (low < high), other=0) < at
        low, high = tl.where(is_before & (low < high), middle + 1, low), tl.where(is_before, high, middle)
        middle = (dst + past) // 2
        is_before = tl.load(indptr + middle, mask=is_edge, other=0) <= edge
        dst, past = tl.where(is_before, middle, dst), tl.where(is_before, past, middle)
    tl.store(t_indptr + at, low, mask=is_source)
    tl.store(t_indices + at, dst.to(t_indices.dtype.element_ty), mask=is_edge)
    tl.store(t_edge + at, edge.to(t_edge.dtype.element_ty), mask=is_edge)


def transpose(indptr: Tensor, indices: Tensor, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    """(t_indptr int64 [S + 1], destination of each edge [E], its position in indices [E]), stable in each source."""
    num_edges, num_dst = indices.numel(), indptr.numel() - 1
    ascending, order = torch.sort(indices, stable=True)
    t_indptr = torch.empty(num_src + 1, dtype=torch.int64, device=indices.device)
    t_indices, t_edge = torch.empty_like(indices), torch.empty_like(indices)
    _turn[(triton.cdiv(max(num_src + 1, num_edges), _ENTRIES),)](
        ascending, order, indptr, t_indptr, t_indices, t_edge, num_src, num_dst, num_edges,
        max(num_edges, num_dst).bit_length() + 1, BLOCK=_ENTRIES, num_warps=4,
    )  # fmt: skip
    return t_indptr, t_indices, t_edge
