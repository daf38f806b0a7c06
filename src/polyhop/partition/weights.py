"""Weights: what a node adds to the load of its part, and what it costs to cut an edge, for methods that follow measurements.

Methods look at pairs of neighbours, whichever way edges point: a pair costs what its edges cost together. Loops cost
nothing, and edges of weight 0 are as good as none.

Legend: N nodes, E edges, M pairs of neighbours (both ways).
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.errors import PartitionError
from polyhop.graph import Graph
from polyhop.kernels.contract import contract
from polyhop.kernels.neighbours import neighbours
from polyhop.kernels.transpose import transpose
from polyhop.partition.levels import Level
from polyhop.partition.streaming import is_train

__all__ = ["weigh", "whole"]

_MOST = 1 << 22  # of one pair: sums of float32 are exact below 2^24


def weigh(graph: Graph, node_weight: Tensor | None = None, edge_weight: Tensor | None = None) -> Level:
    """The graph's pairs of neighbours and loads. ``node_weight`` [N] and ``edge_weight`` [E] are whole numbers >= 0.

    Without node weights nodes weigh 1 and training nodes are a second load; with them they are the only load, scaled to a
    mean of 1. Without edge weights every pair costs 1.
    """
    _check("node_weight", node_weight, graph.num_nodes)
    _check("edge_weight", edge_weight, graph.num_edges)
    if edge_weight is None:
        indptr, indices, cost = *neighbours(graph.indptr, graph.indices), None
    else:
        indptr, indices, cost = _pairs(graph, edge_weight)
    if node_weight is None:
        return Level(indptr, indices, cost, second=is_train(graph))
    load = node_weight.double()
    return Level(
        indptr, indices, cost, load / load.mean() if int(node_weight.sum()) else torch.ones_like(load)
    )


def whole(values: Tensor, most: int = 1 << 30) -> Tensor:
    """int64: whole numbers of at least 1 in proportion to ``values`` >= 0; they add up to ``most`` or a little more."""
    total = float(values.double().sum())
    return (values.double() * min(1.0, most / total) if total else values).long().clamp(min=1)


def _check(name: str, given: Tensor | None, count: int) -> None:
    if given is None:
        return
    if given.dim() != 1 or given.is_floating_point() or given.dtype == torch.bool or given.numel() != count:
        raise PartitionError(
            f"{name}: expected whole numbers [{count}], one for each of the graph's, got {given.dtype} {list(given.shape)}"
        )
    bad = (given < 0).nonzero()
    if bad.numel():
        raise PartitionError(f"{name}[{int(bad[0])}] = {int(given[bad[0]])}: expected 0 or more")


def _pairs(graph: Graph, edge_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(indptr int64 [N + 1], neighbours int32 [M], float32 [M]): w(u -> v) + w(v -> u) of each pair, where it is not 0."""
    nodes, keep = graph.num_nodes, edge_weight > 0
    indptr = torch.cat([graph.indptr.new_zeros(1), keep.cumsum(0)])[graph.indptr]
    sources, weight = graph.indices[keep], edge_weight[keep]
    largest = int(weight.max()) if weight.numel() else 1
    cost = weight.float() if largest <= _MOST else (weight.double() * (_MOST / largest)).ceil().float()
    out_indptr, readers, edge = transpose(indptr, sources, nodes)
    # One list for each node: its in-edges, then its out-edges.
    both = indptr + out_indptr
    into = torch.arange(sources.numel()) + torch.repeat_interleave(out_indptr[:-1], indptr.diff())
    out = torch.arange(sources.numel()) + torch.repeat_interleave(indptr[1:], out_indptr.diff())
    joined, costs = sources.new_empty(2 * sources.numel()), cost.new_empty(2 * sources.numel())
    joined[into], joined[out] = sources, readers
    costs[into], costs[out] = cost, cost[edge.long()]
    return contract(both, joined, torch.arange(nodes, dtype=torch.int32), nodes, edge_weight=costs)
