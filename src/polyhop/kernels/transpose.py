"""Edges regrouped by source: what a backward pass gathers along instead of adding atomically.

Legend: D destinations, S sources, E edges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.kernels import checks, device, native, reference

__all__ = ["transpose"]


def transpose(indptr: Tensor, indices: Tensor, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    """(t_indptr int64 [S + 1], destination of each edge [E], its position in indices [E]), a stable counting sort.

    The last two have the dtype of ``indices`` (int32 or int64 [E]); ``indptr`` is int64 [D + 1].
    """
    checks.csr("transpose", indptr, indices, num_src)
    if device.serves(indptr, indices):
        from polyhop.kernels.triton.transpose import transpose as run

        return run(indptr.contiguous(), indices.contiguous(), num_src)
    if not native.serves(indptr, indices, op="ph_transpose"):
        return reference.transpose(indptr, indices, num_src)
    t_indptr = torch.empty(num_src + 1, dtype=torch.int64)
    t_indices, t_edge = torch.empty_like(indices), torch.empty_like(indices)
    native.call(
        "ph_transpose",
        indptr.contiguous(), indices.contiguous(), native.id_code(indices), indptr.numel() - 1, num_src,
        indices.numel(), t_indptr, t_indices, t_edge, native.num_threads(),
    )  # fmt: skip
    return t_indptr, t_indices, t_edge
