"""Fennel: neighbours in the part, less a price of its load (Tsourakakis et al., 2014), of clusters first, then of nodes."""

from __future__ import annotations

from torch import Tensor

from polyhop.graph import Graph
from polyhop.partition.levels import place
from polyhop.partition.streaming import Room
from polyhop.partition.weights import weigh

__all__ = ["fennel"]


def fennel(
    graph: Graph, num_parts: int, *, seed: int = 0, passes: int = 4, slack: float = 0.05,
    node_weight: Tensor | None = None, edge_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """int32 [N]: the part of each node. Nodes come in the user's order; the seed shuffles the clusters that are tried.

    ``node_weight`` [N] and ``edge_weight`` [E], whole numbers, are the loads that are balanced and what a cut costs.
    """
    level = weigh(graph, node_weight, edge_weight)
    room = Room.of(graph, num_parts, slack)
    return place(level, room if node_weight is None else room.of_one_load(), passes=passes, seed=seed)
