"""Fennel: neighbours in the part, less a price of its load (Tsourakakis et al., 2014), of clusters first, then of nodes."""

from __future__ import annotations

from torch import Tensor

from polyhop.graph import Graph
from polyhop.kernels.neighbours import neighbours
from polyhop.partition.levels import Level, place
from polyhop.partition.streaming import Room, is_train

__all__ = ["fennel"]


def fennel(graph: Graph, num_parts: int, *, seed: int = 0, passes: int = 4, slack: float = 0.05) -> Tensor:
    """int32 [N]: the part of each node. Nodes come in the user's order; the seed shuffles the clusters that are tried."""
    level = Level(*neighbours(graph.indptr, graph.indices), second=is_train(graph))
    return place(level, Room.of(graph, num_parts, slack), passes=passes, seed=seed)
