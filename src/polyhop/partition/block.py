"""Block: contiguous ranges of the user's order, cut where nodes, edges and training nodes together are even."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.graph import Graph

__all__ = ["block"]


def block(graph: Graph, num_parts: int, *, seed: int = 0) -> Tensor:
    """int32 [N]: ascending parts. The seed is not used."""
    nodes = graph.num_nodes
    if nodes == 0:
        return torch.zeros(0, dtype=torch.int32)
    weight = torch.full((nodes,), 1.0 / nodes, dtype=torch.float64)
    if graph.num_edges:
        weight += graph.in_degree.double() / graph.num_edges
    if graph.split is not None and graph.split.train.numel():
        weight[graph.split.train] += 1.0 / graph.split.train.numel()
    middle = weight.cumsum(0) - weight / 2  # a node goes where its middle lies
    return (middle * (num_parts / float(weight.sum()))).long().clamp(0, num_parts - 1).to(torch.int32)
