"""A part cut out of a graph that is in memory.

Legend: N nodes, n own nodes, E edges of the part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyhop.errors import PartitionError
from polyhop.graph import (
    DenseFeatures,
    FeatureStore,
    Graph,
    GraphFacts,
    MatrixFeatures,
    Part,
    SharedGraph,
    SparseFeatures,
    Split,
    fingerprint_graph,
)
from polyhop.partition.record import Partition

__all__ = ["cut", "share"]


def share(graph: Graph, partition: Partition, index: int) -> SharedGraph:
    """What the rank of part ``index`` holds and knows of a graph that is in memory."""
    facts = GraphFacts(
        graph.name,
        graph.num_nodes,
        graph.num_edges,
        graph.num_features,
        graph.num_classes,
        graph.metric,
        fingerprint_graph(graph),
    )
    return SharedGraph(cut(graph, partition, index), facts)


def cut(graph: Graph, partition: Partition, index: int) -> Part:
    """Part ``index``, with copies of its rows. In-edge lists keep the user's order."""
    if partition.num_nodes != graph.num_nodes:
        raise PartitionError(
            f"the partition is of {partition.num_nodes} nodes, the graph {graph.name!r} has {graph.num_nodes}"
        )
    if not 0 <= index < partition.num_parts:
        raise PartitionError(
            f"part {index} of {partition.num_parts}: expected 0 .. {partition.num_parts - 1}"
        )
    own = partition.nodes_of(index)
    indptr, edges = _edges_of(graph, own)
    sources = partition.new_ids[graph.indices[edges].long()]
    start, stop = int(partition.bounds[index]), int(partition.bounds[index + 1])
    is_own = (sources >= start) & (sources < stop)
    halo = torch.unique(sources[~is_own])
    rows = torch.where(is_own, sources - start, own.numel() + torch.searchsorted(halo, sources))
    src_ids = torch.cat([own, partition.user_ids[halo]])
    return Part(
        index,
        partition.bounds,
        indptr,
        rows.to(torch.int32),
        halo,
        src_ids,
        graph.in_degree[src_ids],
        graph.out_degree[src_ids],
        x=None if graph.x is None else _rows_of(graph.x, own),
        y=None if graph.y is None else graph.y[own],
        split=None if graph.split is None else _split_of(graph.split, partition, start, stop),
        edge_weight=None if graph.edge_weight is None else graph.edge_weight[edges],
        in_weight=_at(graph.in_weight, src_ids),
        loop_weight=_at(graph.loop_weight, src_ids),
    )


def _edges_of(graph: Graph, own: Tensor) -> tuple[Tensor, Tensor]:
    """(indptr int64 [n + 1], position of each edge in the graph int64 [E]) of the in-edges of the own nodes."""
    begin = graph.indptr[own]
    counts = graph.indptr[own + 1] - begin
    indptr = torch.zeros(own.numel() + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=indptr[1:])
    return indptr, torch.arange(int(indptr[-1])) + torch.repeat_interleave(begin - indptr[:-1], counts)


def _rows_of(x: FeatureStore, own: Tensor) -> FeatureStore:
    """The own nodes' rows, stored as they are stored."""
    if isinstance(x, MatrixFeatures):
        return DenseFeatures(x.stored(own), x.scale)
    rows: Any = x.gather(own)
    return DenseFeatures(rows) if isinstance(rows, Tensor) else SparseFeatures(rows)


def _split_of(split: Split, partition: Partition, start: int, stop: int) -> Split:
    def local(ids: Tensor) -> Tensor:
        new = partition.new_ids[ids]
        return new[(new >= start) & (new < stop)].sort().values - start

    return Split(local(split.train), local(split.val), local(split.test))


def _at(values: Tensor | None, ids: Tensor) -> Tensor | None:
    return None if values is None else values[ids]
