"""Fused attention aggregation: edge softmax and weighted sum, multi-head; nothing of size E is kept for the backward pass.

Legend: D destinations, S sources, E edges, H heads, C channels per head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyhop.kernels import checks, device, native, reference
from polyhop.kernels.keys import fold

__all__ = ["attention"]


def attention(
    block: Any,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    *,
    negative_slope: float = 0.2,
    self_loop: bool,
    dropout_p: float = 0.0,
    dropout_key: int = 0,
) -> Tensor:
    """[D, H, C] in x's dtype: sum_e softmax_i(leaky_relu(a_src[j] + a_dst[i])) x[j] over the in-edges of each destination i.

    x [S, H, C], a_src [S, H] (both pools [P, ...] when ``block.rows`` is set), a_dst [D, H]. With ``self_loop`` every
    destination has one edge from its own source row, and stored loops are skipped. Attention weights are dropped with
    probability ``dropout_p``, keyed by (dropout_key, destination id, source id, head). A destination with no edge gives 0.
    """
    if block.rows is not None:
        x, a_src = x.index_select(0, block.rows), a_src.index_select(0, block.rows)
    _check(block, x, a_src, a_dst, dropout_p)
    options: dict[str, Any] = {
        "negative_slope": negative_slope, "self_loop": self_loop, "dropout_p": dropout_p, "dropout_key": dropout_key,
    }  # fmt: skip
    given = (block.indptr, block.indices, x, a_src, a_dst, block.src_ids)
    on_device = dropout_p < 1 and device.serves(*given)
    if dropout_p >= 1 or not (on_device or native.serves(*given, op="ph_attention")):
        return reference.attention(block, x, a_src, a_dst, **options)
    dtype = reference.sum_dtype(x.dtype)
    run = _OnDevice if on_device else _Attention
    result: Tensor = run.apply(
        x.contiguous(), a_src.to(dtype).contiguous(), a_dst.to(dtype).contiguous(), block, options
    )
    return result


def _check(block: Any, x: Tensor, a_src: Tensor, a_dst: Tensor, dropout_p: float) -> None:
    checks.csr("attention", block.indptr, block.indices, block.num_src)
    checks.require(
        x.dim() == 3 and x.shape[0] == block.num_src and x.is_floating_point(),
        f"attention: x must be float [{block.num_src}, H, C], got {x.dtype} {list(x.shape)}",
    )
    for name, given, rows in (("a_src", a_src, block.num_src), ("a_dst", a_dst, block.num_dst)):
        checks.require(
            tuple(given.shape) == (rows, x.shape[1]) and given.is_floating_point(),
            f"attention: {name} must be float [{rows}, {x.shape[1]}], got {given.dtype} {list(given.shape)}",
        )
    checks.require(0 <= dropout_p <= 1, f"attention: dropout_p must be in 0 .. 1, got {dropout_p}")
    checks.same_device("attention", indices=block.indices, x=x, a_src=a_src, a_dst=a_dst)


class _Attention(torch.autograd.Function):
    """Forward keeps the output and, per destination and head, the maximum and the sum; backward recomputes the weights."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a_src: Tensor, a_dst: Tensor, block: Any, options: dict[str, Any]
    ) -> Tensor:
        top, inverse = torch.empty_like(a_dst), torch.empty_like(a_dst)
        out = torch.empty(block.num_dst, *x.shape[1:], dtype=x.dtype)
        common = _common(block, x, a_src, a_dst, options)
        indices = block.indices.contiguous()
        native.call(
            "ph_attention",
            block.indptr.contiguous(),
            indices,
            *common,
            out,
            top,
            inverse,
            native.num_threads(),
        )
        ctx.save_for_backward(x, a_src, a_dst, out, top, inverse)
        ctx.block, ctx.options = block, options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, a_src, a_dst, out, top, inverse = ctx.saved_tensors
        block, options = ctx.block, ctx.options
        turned, indptr, heads = block.transposed(), block.indptr.contiguous(), x.shape[1]
        facts = a_dst.new_empty(block.num_dst, 4, heads)
        edge_grad, own_grad = a_dst.new_empty(block.num_edges, heads), torch.empty_like(a_dst)
        x_grad, src_grad, dst_grad = torch.empty_like(x), torch.zeros_like(a_src), torch.zeros_like(a_dst)
        common = _common(block, x, a_src, a_dst, options)
        native.call(
            "ph_attention_backward", indptr, turned.indptr, turned.indices, turned.edge, *common, out, top, inverse,
            grad.contiguous(), facts, edge_grad, own_grad, x_grad, src_grad, dst_grad, native.num_threads(),
        )  # fmt: skip
        return x_grad, src_grad, dst_grad, None, None


class _OnDevice(torch.autograd.Function):
    """The same by the Triton kernels, which also keep the sums from which a_dst's gradient follows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a_src: Tensor, a_dst: Tensor, block: Any, options: dict[str, Any]
    ) -> Tensor:
        from polyhop.kernels.triton.attention import attention as run

        ctx.block, ctx.slope, ctx.loop = block, float(options["negative_slope"]), bool(options["self_loop"])
        keys = _keys(options, x.shape[1])
        if keys is not None and x.is_cuda:  # from pinned memory, whose copies nobody waits for
            keys = keys.pin_memory().to(x.device, non_blocking=True)
        ctx.keys = keys
        ctx.threshold = reference.threshold(options["dropout_p"])
        trains = any(ctx.needs_input_grad)
        out, kept = run(block, x, a_src, a_dst, ctx.keys, ctx.threshold, ctx.slope, ctx.loop, trains)
        if kept is not None:
            ctx.save_for_backward(x, a_src, a_dst, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from polyhop.kernels.triton.attention import attention_backward

        x, a_src, a_dst, *kept = ctx.saved_tensors
        grads = attention_backward(
            ctx.block, x, a_src, a_dst, ctx.keys, ctx.threshold, ctx.slope, ctx.loop, tuple(kept), grad.contiguous()
        )  # fmt: skip
        return *grads, None, None


def _keys(options: dict[str, Any], heads: int) -> Tensor | None:
    """int64 [groups of 8 heads]: what decides which attention weights are dropped; None where none is."""
    if options["dropout_p"] <= 0:
        return None
    folded = [fold(options["dropout_key"], group) for group in range((heads + 7) // 8)]
    return torch.tensor([k - (1 << 64) if k >> 63 else k for k in folded], dtype=torch.int64)


def _common(
    block: Any, x: Tensor, a_src: Tensor, a_dst: Tensor, options: dict[str, Any]
) -> tuple[Tensor | int | float | None, ...]:
    """The arguments that both directions share, in the order of the C functions."""
    p, heads = options["dropout_p"], x.shape[1]
    keys = _keys(options, heads)
    src_ids = None if block.src_ids is None else block.src_ids.contiguous()
    return (
        native.id_code(block.indices), block.num_dst, block.num_src, block.dst_start, x, native.float_code(x), heads,
        x.shape[2], a_src, a_dst, float(options["negative_slope"]), int(options["self_loop"]), src_ids, keys,
        reference.threshold(p),
    )  # fmt: skip
