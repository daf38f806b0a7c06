"""Neighbours of every node whichever way its edges point: each once, ascending, loops left out.

Legend: N nodes, E edges, M pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.kernels import checks, native

__all__ = ["neighbours"]


def neighbours(indptr: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(indptr int64 [N + 1], neighbours [M]) of in-edge lists indptr int64 [N + 1], indices int32 or int64 [E]."""
    num_nodes = indptr.numel() - 1
    checks.csr("neighbours", indptr, indices, num_nodes)
    if not native.serves(indptr, indices, op="ph_merge_neighbours"):
        return _reference(indptr, indices)
    # A counting sort by the other endpoint leaves lists ascending: once for out-edges, twice for in-edges.
    out_indptr, out_indices, _ = _transpose(indptr, indices, num_nodes)
    in_indptr, in_indices, _ = _transpose(out_indptr, out_indices, num_nodes)
    found = torch.zeros(num_nodes + 1, dtype=torch.int64)
    given = (in_indptr, in_indices, out_indptr, out_indices, native.id_code(indices), num_nodes)
    native.call("ph_merge_neighbours", *given, found, None, native.num_threads())
    found = found.cumsum(0)
    result = torch.empty(int(found[-1]), dtype=indices.dtype)
    native.call("ph_merge_neighbours", *given, found, result, native.num_threads())
    return found, result


def _transpose(indptr: Tensor, indices: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    t_indptr = torch.empty(num_nodes + 1, dtype=torch.int64)
    t_indices, t_edge = torch.empty_like(indices), torch.empty_like(indices)
    native.call(
        "ph_transpose", indptr.contiguous(), indices.contiguous(), native.id_code(indices), num_nodes, num_nodes,
        indices.numel(), t_indptr, t_indices, t_edge, native.num_threads(),
    )  # fmt: skip
    return t_indptr, t_indices, t_edge


def _reference(indptr: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    nodes = indptr.numel() - 1
    dst = torch.repeat_interleave(torch.arange(nodes), indptr.diff())
    src = indices.long()
    keep = src != dst
    pairs = torch.cat([dst[keep] * nodes + src[keep], src[keep] * nodes + dst[keep]]).unique()
    found = torch.zeros(nodes + 1, dtype=torch.int64)
    if nodes:
        torch.cumsum(torch.bincount(pairs // nodes, minlength=nodes), 0, out=found[1:])
        pairs = pairs % nodes
    return found, pairs.to(indices.dtype)
