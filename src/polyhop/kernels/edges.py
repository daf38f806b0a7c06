"""Questions about in-edge lists that need one pass over every edge: repeated sources, own loops.

Legend: N nodes, E edges; indptr int64 [N + 1], indices int32 or int64 [E].
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.kernels import native

__all__ = ["first_of_each", "loop_weights", "num_repeated"]


def num_repeated(indptr: Tensor, indices: Tensor) -> int:
    """Edges whose source already stands earlier in the same list."""
    return _repeated(indptr, indices, None)


def first_of_each(indptr: Tensor, indices: Tensor) -> Tensor:
    """bool [E]: False for an edge whose source already stands earlier in the same list."""
    keep = torch.ones(indices.numel(), dtype=torch.uint8)
    _repeated(indptr, indices, keep)
    return keep.bool()


def _repeated(indptr: Tensor, indices: Tensor, keep: Tensor | None) -> int:
    nodes = indptr.numel() - 1
    if native.serves(indptr, indices, op="ph_edges_repeated"):
        return native.call(
            "ph_edges_repeated",
            indptr.contiguous(), indices.contiguous(), native.id_code(indices), nodes, keep, native.num_threads(),
        )  # fmt: skip
    by_source = torch.sort(indices, stable=True).indices
    lists = _destinations(indptr)[by_source]
    order = by_source[torch.sort(lists, stable=True).indices]  # by (destination, source, position)
    sources, lists = indices[order], _destinations(indptr)[order]
    again = (sources[1:] == sources[:-1]) & (lists[1:] == lists[:-1])
    if keep is not None:
        keep[order[1:][again]] = 0
    return int(again.sum())


def loop_weights(indptr: Tensor, indices: Tensor, edge_weight: Tensor | None = None) -> Tensor | None:
    """float32 [N]: weight of each node's own loop (1 if unweighted, the last one if several), 0 where it has none.

    None if no node has one.
    """
    nodes = indptr.numel() - 1
    out = torch.zeros(nodes, dtype=torch.float32)
    weight = None if edge_weight is None else edge_weight.to(torch.float32).contiguous()
    if native.serves(indptr, indices, op="ph_edges_loops"):
        found = native.call(
            "ph_edges_loops",
            indptr.contiguous(), indices.contiguous(), native.id_code(indices), nodes, weight, out,
            native.num_threads(),
        )  # fmt: skip
        return out if found else None
    at = (indices == _destinations(indptr)).nonzero()[:, 0]
    for edge in at.tolist():
        out[indices[edge]] = 1.0 if weight is None else weight[edge]
    return out if at.numel() else None


def _destinations(indptr: Tensor) -> Tensor:
    counts = indptr[1:] - indptr[:-1]
    return torch.repeat_interleave(torch.arange(counts.numel(), device=indptr.device), counts)
