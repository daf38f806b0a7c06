"""Scatter-add on the device, in one order: ids are sorted, and each target row sums what comes to it.

Legend: N rows of the target, n rows to add, F columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.kernels.triton.spmm import spmm

__all__ = ["scatter_add_rows"]


def scatter_add_rows(out: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """out[ids[k]] += rows[k] in place: out [N, F], ids int64 [n] in 0 .. N-1, rows [n, F]. Returns out."""
    narrow = torch.int32 if out.shape[0] < 2**31 else torch.int64  # a sort takes a pass for each byte
    ascending, order = torch.sort(ids.to(narrow), stable=True)
    lists = torch.arange(out.shape[0] + 1, dtype=narrow, device=ids.device)
    return spmm(torch.searchsorted(ascending, lists), order, rows, out, adds=True)
