"""New ids for nodes that only an array of owners is known of, and what is known of the nodes put in their order.

Legend: N nodes, E edges, P parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polyhop.graph.fingerprint import stride_of
from polyhop.kernels.bins import group_edges
from polyhop.partition.external.work import Work
from polyhop.partition.files import ArrayFile

__all__ = ["renumber", "sample_edges"]

_STEP = 1 << 20  # nodes at a time, where 64-bit copies are made


def renumber(work: Work, num_parts: int, dtype: torch.dtype, names: Sequence[str]) -> dict[str, Any]:
    """From ``owner``: ``user_ids``, ``new_ids`` (of ``dtype`` [N]) and each named array by new id, as ``new_NAME``.

    Returns the bounds int64 [P + 1] and the manifest's entry of new_ids.npy.
    """
    bounds, user_ids, _ = group_edges(work.load("owner"), None, num_parts, dtype=dtype)
    work.save("user_ids", user_ids)
    new_ids = torch.empty_like(user_ids)
    for start in range(0, user_ids.numel(), _STEP):
        ids = user_ids[start : start + _STEP].long()
        new_ids[ids] = torch.arange(start, start + ids.numel(), dtype=dtype)
    work.save("new_ids", new_ids)
    with ArrayFile(work.folder / "new_ids.npy", torch.int64, (new_ids.numel(),)) as file:
        for piece in torch.split(new_ids, _STEP):
            file.write(piece.long())
        entry = file.entry(sync=False)
    del new_ids
    for name in names:
        values = work.load(name)
        work.save(f"new_{name}", torch.cat([values[ids.long()] for ids in torch.split(user_ids, _STEP)]))
    return {"bounds": bounds.tolist(), "entry": entry}


def sample_edges(work: Work, num_edges: int) -> None:
    """Keep ``samples``, the edges that a graph is recognised by (see ``pieces.Samples``), and ``some_indptr``."""
    reached = work.load("in_degree").long().cumsum_(0)
    at = torch.arange(0, num_edges, stride_of(num_edges))
    node = torch.searchsorted(reached, at, right=True)
    first = torch.where(node > 0, reached[(node - 1).clamp(min=0)], 0) if at.numel() else at
    ends = torch.arange(0, reached.numel() + 1, stride_of(reached.numel() + 1))
    indptr = torch.zeros_like(ends)
    indptr[1:] = reached[ends[1:] - 1]
    work.save("some_indptr", indptr)
    new = work.load("new_ids")[node].long()
    order = torch.sort(new, stable=True)
    work.save("samples", torch.stack([order.values, (at - first)[order.indices], order.indices]))
