"""A GraphSAGE layer as one function for autograd: weighed sum over a Block, one product with it and one with own rows.

The same kernels and products, on the same tensors, as the pieces of the layer one by one, hence the same bits; but one node
to go back through instead of five. On mini-batches of a few seeds, what torch does between kernels takes most of a step. On
a device the first kernel counts the edges for itself and copies own rows out of a pool: one launch instead of six.

Legend: D destinations, S sources, P pool rows, F columns, O columns of the result.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from polyhop.kernels import checks, device, native

__all__ = ["counts_edges", "mean_map"]

_DTYPES = (torch.float32, torch.float64)


class _TwoPlaces(Protocol):
    """Rows in two matrices, the second following the first (``graph.PooledRows``)."""

    @property
    def first(self) -> Tensor: ...

    @property
    def second(self) -> Tensor: ...


def counts_edges(block: Any, h: Any) -> bool:
    """Whether ``mean_map`` needs no scale: mean rows of the edges that a sampled block has, on a device."""
    if (
        not isinstance(h, Tensor)
        or h.dtype not in _DTYPES
        or not block.is_sampled
        or block.num_drawn is not None
    ):
        return False
    is_pool_learned = block.rows is not None and h.requires_grad
    return not is_pool_learned and device.serves(h, block.indptr, dtypes=_DTYPES)


def mean_map(
    block: Any,
    h: Tensor | _TwoPlaces,
    weight: Tensor,
    bias: Tensor | None,
    own_weight: Tensor,
    dst_scale: Tensor | None,
) -> Tensor | None:
    """[D, O]: dst_scale[i] * sum_j h[j] times weight^T + bias + h[dst_start + i] times own_weight^T; weights [O, F].

    h [S, F], or two places [P, F] that ``block.rows`` point into. None where the pieces must do it: other devices and
    dtypes, autocast, a pool in one place. No scale means one over each destination's edges, where ``counts_edges``; h may be
    a pool in one place then.
    """
    first, second = (h, None) if isinstance(h, Tensor) else (h.first, h.second)
    rows, op = block.rows, "ph_spmm" if second is None else "ph_spmm_pooled"
    if dst_scale is None:
        is_same = first.dtype == weight.dtype == own_weight.dtype
        if not is_same or torch.is_autocast_enabled(first.device.type):
            return None
        _check(block, first, None, None)
        made: Tensor = _MeanMap.apply(first.contiguous(), weight, bias, own_weight, None, block, None)
        return made
    if first.dtype not in _DTYPES or not weight.dtype == own_weight.dtype == dst_scale.dtype == first.dtype:
        return None
    if (rows is None) != (second is None) or dst_scale.requires_grad or torch.is_autocast_enabled("cpu"):
        return None
    if not native.serves(first, second, weight, own_weight, block.indptr, dst_scale, dtypes=_DTYPES, op=op):
        return None
    _check(block, first, second, dst_scale)
    found: Tensor = _MeanMap.apply(
        first.contiguous(),
        weight,
        bias,
        own_weight,
        None if second is None else second.contiguous(),
        block,
        dst_scale,
    )
    return found


def _check(block: Any, first: Tensor, second: Tensor | None, dst_scale: Tensor | None) -> None:
    checks.csr("mean_map", block.indptr, block.indices, block.num_src)
    checks.require(first.dim() == 2, lambda: f"mean_map: h must be a matrix, got {list(first.shape)}")
    checks.vector("mean_map", "dst_scale", dst_scale, block.num_dst)
    if second is not None:
        checks.two_places("mean_map", "h", first, second)
        checks.vector("mean_map", "rows", block.rows, block.num_src)
        checks.require(
            block.rows.dtype == torch.int64, lambda: f"mean_map: rows must be int64, got {block.rows.dtype}"
        )
        if checks.is_debug():
            checks.bounds("mean_map", "rows", block.rows, first.shape[0] + second.shape[0])
        return
    if dst_scale is None and block.rows is not None:
        checks.same_device("mean_map", indptr=block.indptr, h=first, rows=block.rows)
        return
    checks.require(
        first.shape[0] == block.num_src,
        lambda: f"mean_map: h must have num_src = {block.num_src} rows, got {first.shape[0]}",
    )


class _MeanMap(torch.autograd.Function):
    """Rows in two places get no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        own_weight: Tensor,
        second: Tensor | None,
        block: Any,
        dst_scale: Tensor | None,
    ) -> Tensor:
        ctx.on_device = dst_scale is None
        if dst_scale is None:
            sums, own, dst_scale = _counted(block, h)
        else:
            sums, own = _sums(block, h, second, dst_scale), _own(block, h, second)
        ctx.block, ctx.dst_scale = block, dst_scale
        ctx.save_for_backward(sums, own, weight, own_weight)
        return functional.linear(sums, weight, bias).addmm_(own, own_weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sums, own, weight, own_weight = ctx.saved_tensors
        needs_h, needs_weight, needs_bias, needs_own_weight, *_ = ctx.needs_input_grad
        turned, back = grad.t(), _back_on_device if ctx.on_device else _back
        return (
            back(ctx.block, ctx.dst_scale, grad.mm(weight), grad.mm(own_weight)) if needs_h else None,
            turned.mm(sums) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
            turned.mm(own) if needs_own_weight else None,
            None,
            None,
            None,
        )


def _counted(block: Any, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """By the Triton kernel: mean rows of the sources [D, F], own rows [D, F], one over the edges [D]."""
    from polyhop.kernels.triton.spmm import spmm

    start, num_dst, rows = block.dst_start, block.num_dst, block.rows
    sums = torch.empty(num_dst, h.shape[1], dtype=h.dtype, device=h.device)
    means = torch.empty(num_dst, dtype=h.dtype, device=h.device)
    own = None if rows is None else torch.empty_like(sums)
    spmm(
        block.indptr.contiguous(), block.indices.contiguous(), h, sums, rows=None if rows is None else rows.contiguous(),
        own=(0, num_dst, start), means=means, own_rows=own,
    )  # fmt: skip
    return sums, h[start : start + num_dst] if own is None else own, means


def _back_on_device(block: Any, dst_scale: Tensor, grad: Tensor, grad_own: Tensor) -> Tensor:
    """As ``_back``, by the Triton kernel."""
    from polyhop.kernels.triton.spmm import spmm

    turned, start = block.transposed(), block.dst_start
    out = torch.empty(block.num_src, grad.shape[1], dtype=grad.dtype, device=grad.device)
    spmm(turned.indptr, turned.indices, grad, out, src_scale=dst_scale)
    out.narrow(0, start, block.num_dst).add_(grad_own)
    return out


def _sums(block: Any, h: Tensor, second: Tensor | None, dst_scale: Tensor) -> Tensor:
    """[D, F]: of the sources' rows, weighed."""
    indptr, indices, num_dst, width = (
        block.indptr.contiguous(),
        block.indices.contiguous(),
        block.num_dst,
        h.shape[1],
    )
    out, ids, kind = torch.empty(num_dst, width, dtype=h.dtype), native.id_code(indices), native.float_code(h)
    rest = (
        width,
        num_dst,
        out,
        None,
        None,
        None,
        dst_scale,
        None,
        0,
        num_dst,
        block.dst_start,
        native.num_threads(),
    )
    if second is None:
        native.call("ph_spmm", indptr, indices, ids, None, h, kind, *rest)
    else:
        rows = block.rows.contiguous()
        native.call("ph_spmm_pooled", indptr, indices, ids, rows, h, h.shape[0], second, kind, *rest)
    return out


def _own(block: Any, h: Tensor, second: Tensor | None) -> Tensor:
    """[D, F]: the destinations' own rows."""
    start, count = block.dst_start, block.num_dst
    if second is None:
        return h if count == h.shape[0] else h[start : start + count]
    ids, out = block.rows[start : start + count].contiguous(), torch.empty(count, h.shape[1], dtype=h.dtype)
    bad = native.call(
        "ph_gather_pooled", h, h.shape[0], second, second.shape[0], native.float_code(h), h.shape[1], ids, count, None,
        out, native.num_threads(),
    )  # fmt: skip
    checks.require(
        bad < 0, lambda: f"mean_map: rows[{start + bad}] = {int(ids[bad])}, outside the stored rows"
    )
    return out


def _back(block: Any, dst_scale: Tensor, grad: Tensor, grad_own: Tensor) -> Tensor:
    """[S, F]: what the sources get, from the gradients of the sums and of own rows, both [D, F]."""
    turned, start, num_dst, width = block.transposed(), block.dst_start, block.num_dst, grad.shape[1]
    out = torch.empty(block.num_src, width, dtype=grad.dtype)
    native.call(
        "ph_spmm",
        turned.indptr, turned.indices, native.id_code(turned.indices), None, grad, native.float_code(grad), width,
        block.num_src, out, None, None, dst_scale, None, None, start, start + num_dst, -start, native.num_threads(),
    )  # fmt: skip
    out.narrow(0, start, num_dst).add_(grad_own)
    return out
