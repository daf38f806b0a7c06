"""Keyed dropout: which units are dropped is a function of (key, node id, column), so no mask is ever stored.

Legend: n rows, F columns, nnz stored values of sparse rows. The unit (row r, column c) is kept iff the 16-bit lane c % 8 of
philox(key, ids[r], c // 8) is at least round(p * 65536); kept values grow by the inverse of the kept share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyhop.kernels import checks, device, native, reference
from polyhop.kernels.owned import Owned

__all__ = ["dropout", "dropout_values"]


def dropout(
    h: Tensor,
    ids: Tensor | None,
    p: float,
    key: int,
    *,
    id_start: int = 0,
    relu: bool = False,
    in_place: bool = False,
) -> Tensor:
    """h [n, F] with units dropped with probability p; ids int64 [n] (None = id_start .. id_start + n - 1).

    ``relu=True`` takes max(h, 0) first, in the same pass. p = 0 drops nothing, p = 1 drops everything.
    ``in_place=True`` may write the result over h: the caller's own, no leaf, not kept by the function that made it.
    """
    checks.require(
        h.dim() == 2 and h.is_floating_point(),
        lambda: f"dropout: h must be a float matrix, got {h.dtype} {list(h.shape)}",
    )
    checks.require(0 <= p <= 1, lambda: f"dropout: p must be in 0 .. 1, got {p}")
    checks.vector("dropout", "ids", ids, h.shape[0])
    checks.require(ids is None or ids.dtype == torch.int64, "dropout: ids must be int64")
    checks.same_device("dropout", h=h, ids=ids)
    if p <= 0 and not relu:
        return h
    if p >= 1 or not (device.serves(h, ids) or native.serves(h, ids, op="ph_dropout")):
        if ids is None:
            ids = torch.arange(id_start, id_start + h.shape[0], device=h.device)
        return reference.dropout(h, ids, p, key, relu)
    if relu and torch.is_grad_enabled():
        _owned.measure(h.device)
    result: Tensor = _Dropout.apply(
        h.contiguous(), None if ids is None else ids.contiguous(), p, key, id_start, relu, in_place
    )
    return result


def _run(
    h: Tensor, ids: Tensor | None, p: float, key: int, id_start: int, relu: bool, in_place: bool = False
) -> Tensor:
    if p <= 0:
        return torch.relu_(h) if in_place else torch.relu(h)
    out = h if in_place else torch.empty_like(h)
    if device.runs_on(h):
        _on_device(h, ids, p, key, id_start, relu, out)
        return out
    native.call(
        "ph_dropout", h, native.float_code(h), h.shape[0], h.shape[1], ids, id_start, key, reference.threshold(p),
        int(relu), out, native.num_threads(),
    )  # fmt: skip
    return out


def _on_device(
    h: Tensor, ids: Tensor | None, p: float, key: int, id_start: int, relu: bool, out: Tensor
) -> Tensor | None:
    """Write the result to out; after a relu gives which units were kept, a bit each."""
    from polyhop.kernels.triton.dropout import dropout as run

    return run(h, ids, id_start, key, reference.threshold(p) if p > 0 else 0, relu, out)


class _Dropout(torch.autograd.Function):
    """Backward draws the mask again, or reads it off the output's sign after a relu: on a device, off bits of these."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        ids: Tensor | None,
        p: float,
        key: int,
        id_start: int,
        relu: bool,
        in_place: bool,
    ) -> Tensor:
        ctx.given = (ids, p, key, id_start, relu)
        if relu and device.runs_on(h):
            out = h if in_place else torch.empty_like(h)
            ctx.save_for_backward(_on_device(h, ids, p, key, id_start, relu, out))
        else:
            out = _run(h, ids, p, key, id_start, relu, in_place)
            if relu:
                ctx.save_for_backward(out)
        if in_place:
            ctx.mark_dirty(h)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ids, p, key, id_start, relu = ctx.given
        is_owned = relu and _owned(grad)
        grad = grad.contiguous()
        if not relu:
            return _run(grad, ids, p, key, id_start, False), *[None] * 6
        (kept,) = ctx.saved_tensors
        result = grad if is_owned else torch.empty_like(grad)
        threshold = reference.threshold(p) if p > 0 else 0
        if device.runs_on(grad):
            from polyhop.kernels.triton.dropout import dropout_relu_backward

            dropout_relu_backward(grad, kept, threshold, result)
        else:
            native.call(
                "ph_dropout_relu_backward", grad, kept, native.float_code(kept), kept.numel(), threshold, result,
                native.num_threads(),
            )  # fmt: skip
        return result, *[None] * 6


_owned = Owned(lambda h: _Dropout.apply(h, None, 0.0, 0, 0, True, False))


def dropout_values(
    values: Tensor, indptr: Tensor, columns: Tensor, ids: Tensor | None, p: float, key: int
) -> Tensor:
    """Stored values [nnz] of sparse rows (indptr int64 [n + 1], columns [nnz]), dropped as ``dropout`` drops dense ones."""
    checks.csr("dropout_values", indptr, columns, 1 << 62)
    checks.vector("dropout_values", "values", values, columns.numel())
    checks.vector("dropout_values", "ids", ids, indptr.numel() - 1)
    checks.require(0 <= p <= 1, lambda: f"dropout_values: p must be in 0 .. 1, got {p}")
    checks.same_device("dropout_values", values=values, indptr=indptr, columns=columns, ids=ids)
    if p <= 0:
        return values
    if p >= 1 or not native.serves(values, columns, ids, op="ph_dropout_values"):
        rows = torch.arange(indptr.numel() - 1, device=values.device) if ids is None else ids
        return reference.dropout_values(values, torch.repeat_interleave(rows, indptr.diff()), columns, p, key)
    edges = (indptr.contiguous(), columns.contiguous(), None if ids is None else ids.contiguous())
    result: Tensor = _DropoutValues.apply(values.contiguous(), edges, p, key)
    return result


class _DropoutValues(torch.autograd.Function):
    """Linear in the values: backward is the same mask again."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, edges: tuple[Tensor, Tensor, Tensor | None], p: float, key: int
    ) -> Tensor:
        ctx.given = (edges, p, key)
        indptr, columns, ids = edges
        out = torch.empty_like(values)
        native.call(
            "ph_dropout_values", values, native.float_code(values), indptr, columns, native.id_code(columns),
            indptr.numel() - 1, ids, key, reference.threshold(p), out, native.num_threads(),
        )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _DropoutValues.apply(grad.contiguous(), *ctx.given), None, None, None
