"""What layers do to rows: pick them out of a pool, multiply them (sparse ones as they are), split off the destinations' own.

A pool is one matrix, or two of which the second follows the first (PooledRows).

Legend: D destinations, S sources, P pool rows, F columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from polyhop.errors import UnsupportedError
from polyhop.graph.block import Block
from polyhop.graph.features import SparseRows
from polyhop.graph.pooled import PooledRows
from polyhop.kernels import gather_rows, spmm

__all__ = ["Messages", "Rows", "gathered", "linear", "linear_add", "own_rows"]

Rows: TypeAlias = Tensor | SparseRows | PooledRows
"""Input rows: dense, sparse, or a pool in two places."""

Messages: TypeAlias = Tensor | PooledRows
"""What an aggregation reads: a row per source, or the pool that the block's ``rows`` point into."""


def gathered(x: Rows, block: Block) -> tuple[Tensor | SparseRows, Block]:
    """The block's source rows in order, and the block without its indirection into a pool."""
    if block.rows is None:
        return (x.all() if isinstance(x, PooledRows) else x), block
    if isinstance(x, SparseRows):
        raise UnsupportedError("sparse rows cannot be a pool: gather them first (SparseFeatures.gather)")
    rows = x.gather(block.rows) if isinstance(x, PooledRows) else gather_rows(x, block.rows, are_checked=True)
    return rows, replace(block, rows=None)


def own_rows(x: Rows, block: Block) -> tuple[Rows, Rows]:
    """(x, the destinations' rows of x). Use the returned x and no other: both gradients then meet without a copy."""
    start, count = block.dst_start, block.num_dst
    if isinstance(x, SparseRows):
        return x, x.slice(start, start + count)
    if isinstance(x, PooledRows):
        wanted = torch.arange(x.num_rows, device=x.device) if block.rows is None else block.rows
        return x, x.gather(wanted[start : start + count])
    if block.rows is not None:
        return x, gather_rows(x, block.rows[start : start + count], are_checked=True)
    if count == x.shape[0]:
        return x, x
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x, x[start : start + count]
    both: tuple[Tensor, Tensor] = _OwnRows.apply(x, start, count)  # type: ignore[no-untyped-call]
    return both


class _OwnRows(torch.autograd.Function):
    """x and a slice of it. torch's own slice backward fills a zero [S, F] and adds it; this adds D rows in place.

    In place is safe because the first output only ever enters one product or aggregation, whose gradient is a fresh tensor.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
        ctx.start, ctx.count, ctx.shape = start, count, x.shape
        ctx.set_materialize_grads(False)
        return x.view_as(x), x[start : start + count]

    @staticmethod
    def backward(ctx: Any, g_all: Tensor | None, g_own: Tensor | None) -> tuple[Tensor | None, None, None]:
        if g_own is None:
            return g_all, None, None
        if g_all is None:
            g_all = g_own.new_zeros(ctx.shape)
        elif not g_all.is_contiguous():
            g_all = g_all.contiguous()
        g_all[ctx.start : ctx.start + ctx.count] += g_own
        return g_all, None, None


def linear(h: Rows, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """h [n, F] times weight^T, weight [out, F], plus bias. Sparse rows are multiplied as they are, never made dense."""
    if isinstance(h, SparseRows):
        pool = weight.t().contiguous()
        out = spmm(
            h.indptr,
            h.indices,
            pool,
            num_src=h.num_columns,
            edge_weight=h.values.to(weight.dtype),
            transposed=h.transposed,
        )
        return out if bias is None else out + bias
    h = h.all() if isinstance(h, PooledRows) else h
    return F.linear(_matched(h, weight), weight, bias)


def linear_add(out: Tensor, h: Rows, weight: Tensor) -> Tensor:
    """out + linear(h, weight), in place where torch allows it: ``out`` must be the caller's own fresh tensor."""
    if isinstance(h, SparseRows):
        return out.add_(linear(h, weight))
    h = h.all() if isinstance(h, PooledRows) else h
    if torch.is_autocast_enabled(h.device.type):
        return torch.addmm(out, h, weight.t())
    return out.addmm_(_matched(h, weight), weight.t())


def _matched(h: Tensor, weight: Tensor) -> Tensor:
    """h in the weight's dtype, unless autocast will see to it."""
    return h if h.dtype == weight.dtype or torch.is_autocast_enabled(h.device.type) else h.to(weight.dtype)
