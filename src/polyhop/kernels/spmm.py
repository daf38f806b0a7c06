"""Sum, mean and weighted aggregation over a Block, with the gradient by gathering along the transposed edges.

Native on the CPU, Triton on CUDA, plain torch otherwise.

Legend: D destinations, S sources, E edges, P pool rows, of which A may lie apart from the rest, F columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyhop.kernels import checks, device, native, reference

__all__ = ["TwoPlaces", "aggregate", "spmm"]

_OP = "ph_spmm"
_OP_POOLED = "ph_spmm_pooled"


class TwoPlaces(Protocol):
    """Rows in two matrices, the second following the first (``graph.PooledRows``)."""

    @property
    def first(self) -> Tensor: ...

    @property
    def second(self) -> Tensor: ...


def aggregate(
    block: Any,
    h: Tensor | TwoPlaces,
    *,
    edge_weight: Tensor | None = None,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
    self_scale: Tensor | None = None,
) -> Tensor:
    """``spmm`` over a Block: h [S, F], or the pool [P, F] when ``block.rows`` is set, gives [D, F]."""
    first, second = (h, None) if isinstance(h, Tensor) else (h.first, h.second)
    return spmm(
        block.indptr,
        block.indices,
        first,
        second=second,
        num_src=block.num_src,
        dst_start=block.dst_start,
        rows=block.rows,
        edge_weight=edge_weight,
        src_scale=src_scale,
        dst_scale=dst_scale,
        self_scale=self_scale,
        transposed=block.transposed,
    )


def spmm(
    indptr: Tensor,
    indices: Tensor,
    h: Tensor,
    *,
    num_src: int,
    second: Tensor | None = None,
    dst_start: int = 0,
    rows: Tensor | None = None,
    edge_weight: Tensor | None = None,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
    self_scale: Tensor | None = None,
    transposed: Callable[[], Any] | None = None,
) -> Tensor:
    """[D, F] in h's dtype: dst_scale[i] * sum_e edge_weight[e] src_scale[j] h[row(j)] + self_scale[i] h[row(dst_start+i)].

    Each factor is optional and then 1; without ``self_scale`` there is no self term. ``row(s)`` is ``rows[s]`` (int64 [S],
    into a pool h [P, F]) or s (h [S, F]). ``transposed`` returns the transposed edges (indptr, indices, edge), asked for
    in the backward pass only. Native gradients reach h; factors that require a gradient are served by the reference.
    With ``second`` [P - A, F] the first A rows are h's and the others its; rows in two places get no gradient.
    """
    num_dst = indptr.numel() - 1
    _check(
        indptr,
        indices,
        h,
        second,
        num_src,
        num_dst,
        dst_start,
        rows,
        edge_weight,
        src_scale,
        dst_scale,
        self_scale,
    )
    factors = {
        "edge_weight": edge_weight, "src_scale": src_scale, "dst_scale": dst_scale, "self_scale": self_scale,
    }  # fmt: skip
    learned = torch.is_grad_enabled() and any(f is not None and f.requires_grad for f in factors.values())
    op = _OP if second is None else _OP_POOLED
    given = (indptr, indices, h, second, rows, *factors.values())
    on_device = not learned and second is None and device.serves(*given)
    if learned or not (on_device or native.serves(*given, op=op)):
        return reference.spmm(indptr, indices, h, second=second, dst_start=dst_start, rows=rows, **factors)
    dtype = reference.sum_dtype(h.dtype)
    weights = [None if f is None else _plain(f).to(dtype).contiguous() for f in factors.values()]
    edges = (indptr.contiguous(), indices.contiguous(), None if rows is None else rows.contiguous())
    if second is not None:
        return _pooled(h.contiguous(), second.contiguous(), edges, weights, dst_start)
    transposed = transposed or (lambda: reference.transpose(indptr, indices, num_src))
    result: Tensor = _Spmm.apply(h.contiguous(), edges, weights, num_src, dst_start, transposed, on_device)
    return result


def _plain(factor: Tensor) -> Tensor:
    """A factor that no gradient goes through; the same object if none does anyway, by which what is made of it is kept."""
    return factor.detach() if factor.requires_grad else factor


def _pooled(
    first: Tensor,
    second: Tensor,
    edges: tuple[Tensor, Tensor, Tensor | None],
    weights: list[Tensor | None],
    dst_start: int,
) -> Tensor:
    """The native kernel over rows in two places. Forward only: such rows are fixed."""
    indptr, indices, rows = edges
    edge_weight, src_scale, dst_scale, self_scale = weights
    num_dst = indptr.numel() - 1
    out = torch.empty(num_dst, first.shape[1], dtype=first.dtype)
    native.call(
        _OP_POOLED,
        indptr, indices, native.id_code(indices), rows, first, first.shape[0], second, native.float_code(first),
        first.shape[1], num_dst, out, edge_weight, None, src_scale, dst_scale, self_scale, 0, num_dst, dst_start,
        native.num_threads(),
    )  # fmt: skip
    return out


def _check(
    indptr: Tensor,
    indices: Tensor,
    h: Tensor,
    second: Tensor | None,
    num_src: int,
    num_dst: int,
    dst_start: int,
    rows: Tensor | None,
    edge_weight: Tensor | None,
    src_scale: Tensor | None,
    dst_scale: Tensor | None,
    self_scale: Tensor | None,
) -> None:
    checks.csr("spmm", indptr, indices, num_src)
    checks.require(
        h.dim() == 2 and h.is_floating_point(),
        lambda: f"spmm: h must be a float matrix, got {h.dtype} {list(h.shape)}",
    )
    num_rows = h.shape[0]
    if second is not None:
        checks.two_places("spmm", "h", h, second)
        num_rows += second.shape[0]
    checks.vector("spmm", "rows", rows, num_src)
    if rows is None:
        checks.require(
            num_rows == num_src, lambda: f"spmm: h must have num_src = {num_src} rows, got {num_rows}"
        )
    else:
        checks.require(rows.dtype == torch.int64, lambda: f"spmm: rows must be int64, got {rows.dtype}")
        if checks.is_debug():
            checks.bounds("spmm", "rows", rows, num_rows)
    checks.require(
        self_scale is None or 0 <= dst_start <= num_src - num_dst,
        lambda: f"spmm: destinations {dst_start} .. {dst_start + num_dst} exceed the {num_src} source rows",
    )
    checks.vector("spmm", "edge_weight", edge_weight, indices.numel())
    checks.vector("spmm", "src_scale", src_scale, num_src)
    checks.vector("spmm", "dst_scale", dst_scale, num_dst)
    checks.vector("spmm", "self_scale", self_scale, num_dst)
    checks.same_device(
        "spmm", indptr=indptr, indices=indices, h=h, rows=rows, edge_weight=edge_weight, src_scale=src_scale,
        dst_scale=dst_scale, self_scale=self_scale,
    )  # fmt: skip


class _Spmm(torch.autograd.Function):
    """One kernel both ways: backward is the same sum over the transposed edges with the scales swapped."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        edges: tuple[Tensor, Tensor, Tensor | None],
        weights: list[Tensor | None],
        num_src: int,
        dst_start: int,
        transposed: Callable[[], Any],
        on_device: bool,
    ) -> Tensor:
        ctx.edges, ctx.weights, ctx.num_src, ctx.dst_start = edges, weights, num_src, dst_start
        ctx.transposed, ctx.pool, ctx.run = transposed, h.shape[0], _on_device if on_device else _native
        num_dst = edges[0].numel() - 1
        out: Tensor = ctx.run(h, edges, None, weights, num_dst, (0, num_dst, dst_start))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        edge_weight, src_scale, dst_scale, self_scale = ctx.weights
        indptr, _, rows = ctx.edges
        num_dst, begin, grad = indptr.numel() - 1, ctx.dst_start, grad.contiguous()
        turned, edge = ctx.transposed(), None
        t_indptr, t_indices = turned[:2] if isinstance(turned, tuple) else (turned.indptr, turned.indices)
        if edge_weight is not None:  # else positions of edges may never be made
            edge = turned[2] if isinstance(turned, tuple) else turned.edge
        swapped = [edge_weight, dst_scale, src_scale, self_scale]
        own = (begin, begin + num_dst, -begin)
        out = ctx.run(grad, (t_indptr, t_indices, None), edge, swapped, ctx.num_src, own)
        if rows is not None:
            out = _to_pool(out, rows, ctx.pool)
        return out, *[None] * 6


def _to_pool(grad: Tensor, rows: Tensor, pool: int) -> Tensor:
    """[P, F]: gradients of sources summed where their rows lie."""
    out = grad.new_zeros(pool, grad.shape[1])
    if device.runs_on(grad):
        from polyhop.kernels.triton.scatter import scatter_add_rows

        scatter_add_rows(out, rows, grad)
        return out
    native.call(
        "ph_scatter_add_rows", out, native.float_code(out), pool, rows, rows.numel(), grad, grad.shape[1],
        native.num_threads(),
    )  # fmt: skip
    return out


def _native(
    h: Tensor,
    edges: tuple[Tensor, Tensor, Tensor | None],
    edge: Tensor | None,
    weights: list[Tensor | None],
    num_dst: int,
    own: tuple[int, int, int],
) -> Tensor:
    """[D, F] by the C++ kernel; ``own`` says which destinations have an own row: from, to, and how much further it lies."""
    indptr, indices, rows = edges
    edge_weight, src_scale, dst_scale, self_scale = weights
    out = torch.empty(num_dst, h.shape[1], dtype=h.dtype)
    native.call(
        _OP,
        indptr, indices, native.id_code(indices), rows, h, native.float_code(h), h.shape[1], num_dst, out, edge_weight,
        edge, src_scale, dst_scale, self_scale, *own, native.num_threads(),
    )  # fmt: skip
    return out


def _on_device(
    h: Tensor,
    edges: tuple[Tensor, Tensor, Tensor | None],
    edge: Tensor | None,
    weights: list[Tensor | None],
    num_dst: int,
    own: tuple[int, int, int],
) -> Tensor:
    """[D, F] by the Triton kernel."""
    from polyhop.kernels.triton.spmm import reordered, spmm

    (indptr, indices, rows), (edge_weight, src_scale, dst_scale, self_scale) = edges, weights
    if edge is not None and edge_weight is not None:
        edge_weight = reordered(edge_weight, edge)
    out = torch.empty(num_dst, h.shape[1], dtype=h.dtype, device=h.device)
    return spmm(
        indptr, indices, h, out, rows=rows, edge_weight=edge_weight, src_scale=src_scale,
        dst_scale=dst_scale, self_scale=self_scale, own=own,
    )  # fmt: skip
