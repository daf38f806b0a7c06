"""A graph recognised by a few values: sizes, and contents sampled at fixed strides, so that one on disk need not be read."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyhop.graph.features import SparseRows
from polyhop.graph.graph import Graph
from polyhop.graph.part import SharedGraph

__all__ = ["Sampled", "digest", "fingerprint_graph", "row_ids", "stride_of"]

_SAMPLES = 1 << 16
_ROWS = 64


class Sampled(NamedTuple):
    """What of an array goes into its digest: every ``stride_of(size)``-th value, read in its flat order."""

    dtype: torch.dtype
    shape: list[int]
    values: Tensor


def stride_of(size: int) -> int:
    """Distance between the values that are looked at in an array of this many."""
    return max(1, size // _SAMPLES)


def digest(*given: Tensor | Sampled | None) -> str:
    """Digest of some values of each array, evenly spread; of one that was never in memory, those taken from it."""
    total = hashlib.blake2b(digest_size=8)
    for one in given:
        if one is None:
            total.update(b"none")
            continue
        if isinstance(one, Tensor):
            flat = one.reshape(-1)
            one = Sampled(one.dtype, list(one.shape), flat[:: stride_of(flat.numel())])
        total.update(f"{one.dtype}{one.shape}".encode())
        values = one.values.clone(memory_format=torch.contiguous_format)  # of one value or none, too
        total.update(values.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def row_ids(num_nodes: int) -> Tensor:
    """int64: the nodes whose feature rows are looked at."""
    return torch.arange(0, num_nodes, max(1, num_nodes // _ROWS))


def fingerprint_graph(graph: Graph | SharedGraph) -> dict[str, Any]:
    """Sizes and sampled contents of a graph; of a shared one, what was found when it was cut."""
    if isinstance(graph, SharedGraph):
        return dict(graph.facts.fingerprint)
    split = graph.split
    sets = (None,) if split is None else (split.train, split.val, split.test)
    return {
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
        "features": graph.num_features,
        "classes": graph.num_classes,
        "structure": digest(graph.indptr, graph.indices, graph.edge_weight),
        "labels": digest(graph.y),
        "split": digest(*sets),
        "feature_rows": digest(*_some_rows(graph)),
    }


def _some_rows(graph: Graph) -> tuple[Tensor | None, ...]:
    if graph.x is None or graph.num_nodes == 0:
        return (None,)
    rows = graph.x.gather(row_ids(graph.num_nodes))
    if isinstance(rows, SparseRows):
        return rows.indptr, rows.indices, rows.values
    return (rows,)
