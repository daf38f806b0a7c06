"""Row gather: the feature rows of a mini-batch, from memory or from a memory-mapped file; on CUDA also from pinned memory.

Legend: N stored rows, M rows stored in a second place, n wanted rows, F columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyhop.errors import InputError
from polyhop.kernels import checks, device, native, reference

__all__ = ["gather_rows"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.uint8)


def gather_rows(
    values: Tensor,
    ids: Tensor,
    *,
    second: Tensor | None = None,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    are_checked: bool = False,
) -> Tensor:
    """[n, F]: rows ``ids`` (int64 [n]) of values [N, F]; bfloat16, int8 and uint8 become float32.

    With ``second`` [M, F], of the same dtype, ids N .. N+M-1 are its rows; rows in two places get no gradient. ``scale``
    [F] multiplies each column. ``out`` receives the result if given (not differentiable then). An id outside the stored
    rows is an InputError naming its position. With ids on a CUDA device, values and second may each be there or in pinned
    host memory, from which the device reads just the wanted rows; rows on the host get no gradient. ``are_checked``: ids are
    known to be good, so that a device need not be waited for.
    """
    dtype = _check(values, ids, scale, out)
    if second is not None:
        return _from_two(values, second, ids, scale, out, dtype, are_checked)
    learned = scale is not None and scale.requires_grad and torch.is_grad_enabled() and out is None
    from_host = values.device != ids.device
    on_device = not learned and _serves_device(values, None, ids, scale, out)
    if not (on_device or native.serves(values, ids, scale, out, dtypes=_DTYPES, op="ph_gather_rows")):
        checks.require(
            not from_host,
            "gather_rows: rows in pinned memory need Triton (POLYHOP_KERNELS=auto) and a fixed scale",
        )
        _check_ids(ids, values.shape[0])
        rows = reference.gather_rows(values, ids, scale)
        return rows if out is None else out.copy_(rows)
    factor = None if scale is None else scale.detach().to(dtype).contiguous()
    if out is not None or from_host:
        if out is None:
            out = torch.empty(ids.numel(), values.shape[1], dtype=dtype, device=ids.device)
        _run(values.detach().contiguous(), ids.contiguous(), factor, out, are_checked=are_checked)
        return out
    if learned:
        _check_ids(ids, values.shape[0])
        return reference.gather_rows(values, ids, scale)
    result: Tensor = _Gather.apply(values.contiguous(), ids.contiguous(), factor, dtype, are_checked)
    return result


def _from_two(
    values: Tensor,
    second: Tensor,
    ids: Tensor,
    scale: Tensor | None,
    out: Tensor | None,
    dtype: torch.dtype,
    are_checked: bool,
) -> Tensor:
    checks.two_places("gather_rows", "values", values, second, from_host=ids.is_cuda)
    learned = scale is not None and scale.requires_grad and torch.is_grad_enabled() and out is None
    if not learned and _serves_device(values, second, ids, scale, out):
        factor = None if scale is None else scale.detach().to(dtype).contiguous()
        if out is None:
            out = torch.empty(ids.numel(), values.shape[1], dtype=dtype, device=ids.device)
        given = values.detach().contiguous(), ids.contiguous(), factor, out, second.detach().contiguous()
        _run(*given, are_checked=are_checked)
        return out
    if learned or not native.serves(values, second, ids, scale, out, dtypes=_DTYPES, op="ph_gather_pooled"):
        _check_ids(ids, values.shape[0] + second.shape[0])
        rows = reference.gather_rows(values, ids, scale, second=second)
        return rows if out is None else out.copy_(rows)
    factor = None if scale is None else scale.detach().to(dtype).contiguous()
    if out is None:
        out = torch.empty(ids.numel(), values.shape[1], dtype=dtype)
    values, second, ids = values.contiguous(), second.contiguous(), ids.contiguous()
    bad = native.call(
        "ph_gather_pooled", values, values.shape[0], second, second.shape[0], native.float_code(values),
        values.shape[1], ids, ids.numel(), factor, out, native.num_threads(),
    )  # fmt: skip
    if bad >= 0:
        raise _bad_id(ids, bad, values.shape[0] + second.shape[0])
    return out


def _check(values: Tensor, ids: Tensor, scale: Tensor | None, out: Tensor | None) -> torch.dtype:
    """The dtype of the result, or InputError."""
    checks.require(values.dim() == 2, lambda: f"gather_rows: values must be [N, F], got {list(values.shape)}")
    checks.require(
        values.dtype in _DTYPES,
        lambda: f"gather_rows: values must be one of {_names(_DTYPES)}, got {values.dtype}",
    )
    checks.require(
        ids.dim() == 1 and ids.dtype == torch.int64,
        lambda: f"gather_rows: ids must be int64 [n], got {ids.dtype} {list(ids.shape)}",
    )
    checks.vector("gather_rows", "scale", scale, values.shape[1])
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    if out is not None:
        wanted = [ids.numel(), values.shape[1]]
        checks.require(
            list(out.shape) == wanted and out.dtype == dtype and out.is_contiguous(),
            lambda: (
                f"gather_rows: out must be contiguous {dtype} {wanted}, got {out.dtype} {list(out.shape)}"
            ),
        )
    host = values.is_pinned() if ids.is_cuda and values.is_cpu else False
    checks.same_device("gather_rows", values=None if host else values, ids=ids, scale=scale, out=out)
    wants = host and values.requires_grad and torch.is_grad_enabled()
    checks.require(not wants, "gather_rows: rows in pinned memory get no gradient; .detach() them")
    return dtype


def _serves_device(
    values: Tensor, second: Tensor | None, ids: Tensor, scale: Tensor | None, out: Tensor | None
) -> bool:
    """Whether Triton serves the call: rows may be in pinned memory, all else is on the device."""
    stored = [t for t in (values, second) if t is not None and not (ids.is_cuda and t.is_cpu)]
    return device.serves(*stored, ids, scale, out, dtypes=_DTYPES)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def _check_ids(ids: Tensor, limit: int) -> None:
    bad = (ids < 0) | (ids >= limit)
    if bool(bad.any()):
        raise _bad_id(ids, int(bad.nonzero()[0]), limit)


def _bad_id(ids: Tensor, at: int, limit: int) -> InputError:
    return InputError(
        f"gather_rows: ids[{at}] = {int(ids[at])}, outside the {limit} stored rows (0 .. {limit - 1})"
    )


def _run(
    values: Tensor,
    ids: Tensor,
    scale: Tensor | None,
    out: Tensor,
    second: Tensor | None = None,
    *,
    are_checked: bool = False,
) -> None:
    if device.runs_on(ids):
        from polyhop.kernels.triton.gather import gather_rows as run

        bad = run(values, second, ids, scale, out, are_checked=are_checked and not checks.is_debug())
        if bad >= 0:
            raise _bad_id(ids, bad, values.shape[0] + (0 if second is None else second.shape[0]))
        return
    bad = native.call(
        "ph_gather_rows", values, native.float_code(values), values.shape[0], values.shape[1], ids, ids.numel(), scale,
        out, native.num_threads(),
    )  # fmt: skip
    if bad >= 0:
        raise _bad_id(ids, bad, values.shape[0])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, ids: Tensor, scale: Tensor | None, dtype: torch.dtype, are_checked: bool
    ) -> Tensor:
        ctx.ids, ctx.scale, ctx.rows, ctx.dtype = ids, scale, values.shape[0], values.dtype
        out = torch.empty(ids.numel(), values.shape[1], dtype=dtype, device=ids.device)
        _run(values, ids, scale, out, are_checked=are_checked)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = (grad if ctx.scale is None else grad * ctx.scale).contiguous()
        out = grad.new_zeros(ctx.rows, grad.shape[1])
        if device.runs_on(grad):
            from polyhop.kernels.triton.scatter import scatter_add_rows

            scatter_add_rows(out, ctx.ids, grad)
            return out.to(ctx.dtype), *[None] * 4
        native.call(
            "ph_scatter_add_rows", out, native.float_code(out), ctx.rows, ctx.ids, ctx.ids.numel(), grad,
            grad.shape[1], native.num_threads(),
        )  # fmt: skip
        return out.to(ctx.dtype), *[None] * 4
