"""Row scatter-add: gradients of gathered rows back into their pool, in the same order for any number of threads.

Legend: N rows of the target, n rows to add, F columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.kernels import checks, device, native, reference

__all__ = ["scatter_add_rows"]


def scatter_add_rows(out: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """out[ids[k]] += rows[k] in place, k ascending; out [N, F], ids int64 [n], rows [n, F]. Returns out."""
    checks.require(
        out.dim() == 2 and rows.dim() == 2 and rows.shape[1] == out.shape[1],
        f"scatter_add_rows: out [N, F] and rows [n, F] must share F, got {list(out.shape)} and {list(rows.shape)}",
    )
    checks.require(
        ids.dtype == torch.int64 and tuple(ids.shape) == (rows.shape[0],),
        f"scatter_add_rows: ids must be int64 [{rows.shape[0]}], got {ids.dtype} {list(ids.shape)}",
    )
    checks.require(
        out.is_floating_point() and rows.dtype == out.dtype,
        f"scatter_add_rows: out and rows must have one float dtype, got {out.dtype} and {rows.dtype}",
    )
    checks.same_device("scatter_add_rows", out=out, ids=ids, rows=rows)
    needs_grad = torch.is_grad_enabled() and (out.requires_grad or rows.requires_grad)
    is_plain = out.is_contiguous() and not needs_grad
    if is_plain and device.serves(out, ids, rows):
        from polyhop.kernels.triton.scatter import scatter_add_rows as run

        checks.bounds("scatter_add_rows", "ids", ids, out.shape[0])
        return run(out, ids, rows.contiguous())
    if not is_plain or not native.serves(out, ids, rows, op="ph_scatter_add_rows"):
        checks.bounds("scatter_add_rows", "ids", ids, out.shape[0])
        return reference.scatter_add_rows(out, ids, rows)
    bad = native.call(
        "ph_scatter_add_rows", out, native.float_code(out), out.shape[0], ids.contiguous(), ids.numel(),
        rows.contiguous(), out.shape[1], native.num_threads(),
    )  # fmt: skip
    if bad >= 0:
        checks.bounds("scatter_add_rows", "ids", ids, out.shape[0])
    return out
