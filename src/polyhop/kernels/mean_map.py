"""A GraphSAGE layer as one function for autograd: weighed sum over a Block, one product with it and one with own rows.

On the CPU the same kernels and products, on the same tensors, as the pieces of the layer one by one, hence the same bits;
but one node to go back through instead of five. On mini-batches of a few seeds, what torch does between kernels takes most
of a step.

On a device products add to what others gave, so that no pass over the rows adds them up, and the gradient of the sums is
written over them. Values are those of the pieces; gradients may differ by the rounding of one product. Of sampled
blocks the first kernel counts the edges for itself and copies own rows out of a pool: one launch instead of six.

Legend: D destinations, S sources, P pool rows, F columns, O columns of the result.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from polyhop.kernels import checks, device, native
from polyhop.kernels.owned import is_last_pass

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
    is_plain = isinstance(h, Tensor) and h.dtype in _DTYPES
    if not is_plain or not block.is_sampled or block.num_drawn is not None:
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
    *,
    map_first: bool = False,
) -> Tensor | None:
    """[D, O]: dst_scale[i] * sum_j h[j] times weight^T + bias + h[dst_start + i] times own_weight^T; weights [O, F].

    h [S, F], or two places [P, F] that ``block.rows`` point into. ``map_first`` sums rows that were multiplied. None where
    the pieces must do it: other dtypes, autocast, a pool in one place, on the CPU products first, on a device two places. No
    scale means one over each destination's edges, where ``counts_edges``; h may be a pool in one place then.
    """
    first, second = (h, None) if isinstance(h, Tensor) else (h.first, h.second)
    rows, op = block.rows, "ph_spmm" if second is None else "ph_spmm_pooled"
    autocasts = torch.is_autocast_enabled(first.device.type)
    if dst_scale is None:
        if (
            autocasts
            or not first.dtype == weight.dtype == own_weight.dtype
            or (map_first and rows is not None)
        ):
            return None
        _check(block, first, None, None)
        counted: Tensor = _OnDevice.apply(
            first.contiguous(), weight, bias, own_weight, block, None, map_first
        )
        return counted
    if first.dtype not in _DTYPES or not weight.dtype == own_weight.dtype == dst_scale.dtype == first.dtype:
        return None
    if (rows is None) != (second is None) or dst_scale.requires_grad or autocasts:
        return None
    given = (first, weight, own_weight, block.indptr, dst_scale)
    if second is None and device.serves(*given, dtypes=_DTYPES):
        _check(block, first, second, dst_scale)
        made: Tensor = _OnDevice.apply(
            first.contiguous(), weight, bias, own_weight, block, dst_scale.contiguous(), map_first
        )
        return made
    if map_first or not native.serves(
        first, second, weight, own_weight, block.indptr, dst_scale, dtypes=_DTYPES, op=op
    ):
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
        dst_scale: Tensor,
    ) -> Tensor:
        sums, own = _sums(block, h, second, dst_scale), _own(block, h, second)
        ctx.block, ctx.dst_scale = block, dst_scale
        ctx.save_for_backward(sums, own, weight, own_weight)
        return functional.linear(sums, weight, bias).addmm_(own, own_weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sums, own, weight, own_weight = ctx.saved_tensors
        needs_h, needs_weight, needs_bias, needs_own_weight, *_ = ctx.needs_input_grad
        turned = grad.t()
        return (
            _back(ctx.block, ctx.dst_scale, grad.mm(weight), grad.mm(own_weight)) if needs_h else None,
            turned.mm(sums) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
            turned.mm(own) if needs_own_weight else None,
            None,
            None,
            None,
        )


class _OnDevice(torch.autograd.Function):
    """By the Triton kernels, in either order. Without a scale they count edges; rows of a pool get no gradient then."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        own_weight: Tensor,
        block: Any,
        dst_scale: Tensor | None,
        map_first: bool,
    ) -> Tensor:
        means = torch.empty(block.num_dst, dtype=h.dtype, device=h.device) if dst_scale is None else None
        ctx.block, ctx.dst_scale, ctx.map_first = block, means if dst_scale is None else dst_scale, map_first
        indptr, indices, scales = (
            block.indptr.contiguous(),
            block.indices.contiguous(),
            {"dst_scale": dst_scale, "means": means},
        )
        if map_first:
            ctx.save_for_backward(None, h, weight, own_weight)
            out, mapped = (
                functional.linear(_own(block, h, None), own_weight, bias),
                functional.linear(h, weight),
            )
            return _on_device(indptr, indices, mapped, out, adds=True, **scales)
        sums = torch.empty(block.num_dst, h.shape[1], dtype=h.dtype, device=h.device)
        if block.rows is None:
            _on_device(indptr, indices, h, sums, **scales)
            own, kept = _own(block, h, None), h
        else:
            own = kept = torch.empty_like(sums)
            places = {
                "rows": block.rows.contiguous(),
                "own": (0, block.num_dst, block.dst_start),
                "own_rows": own,
            }
            _on_device(indptr, indices, h, sums, **scales, **places)
        ctx.save_for_backward(sums, kept if ctx.needs_input_grad[3] else None, weight, own_weight)
        return functional.linear(sums, weight, bias).addmm_(own, own_weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sums, h, weight, own_weight = ctx.saved_tensors
        needs_h, needs_weight, needs_bias, needs_own_weight, *_ = ctx.needs_input_grad
        block, grad = ctx.block, grad.contiguous()
        weight_grad, h_grad = None, None
        if ctx.map_first:
            mapped = _turned_sums(block, grad, ctx.dst_scale) if needs_h or needs_weight else None
            weight_grad = mapped.t().mm(h) if mapped is not None and needs_weight else None
            h_grad = mapped.mm(weight) if mapped is not None and needs_h else None
        else:
            weight_grad = grad.t().mm(sums) if needs_weight else None
            if needs_h:
                given = torch.mm(grad, weight, out=sums if is_last_pass() else torch.empty_like(sums))
                h_grad = _turned_sums(block, given, ctx.dst_scale, may_overwrite=True)
        if h_grad is not None:
            h_grad.narrow(0, block.dst_start, block.num_dst).addmm_(grad, own_weight)
        return (
            h_grad,
            weight_grad,
            grad.sum(0) if needs_bias else None,
            grad.t().mm(h if block.rows is not None else _own(block, h, None)) if needs_own_weight else None,
            None,
            None,
            None,
        )


def _turned_sums(block: Any, grad: Tensor, dst_scale: Tensor, *, may_overwrite: bool = False) -> Tensor:
    """[S, F]: what the sources get from the gradient of sums [D, F], by the Triton kernel."""
    turned, out = block.transposed(), grad.new_empty(block.num_src, grad.shape[1])
    return _on_device(
        turned.indptr, turned.indices, grad, out, src_scale=dst_scale, may_overwrite=may_overwrite
    )


def _on_device(indptr: Tensor, indices: Tensor, h: Tensor, out: Tensor, **options: Any) -> Tensor:
    """``triton.spmm``, imported where it runs."""
    from polyhop.kernels.triton.spmm import spmm

    return spmm(indptr, indices, h, out, **options)


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
