"""Fennel: neighbours in the part, less a growing price of its load (Tsourakakis et al., 2014), in several passes."""

from __future__ import annotations

from torch import Tensor

from polyhop.graph import Graph
from polyhop.partition.streaming import stream_graph

__all__ = ["fennel"]


def fennel(graph: Graph, num_parts: int, *, seed: int = 0, passes: int = 10, slack: float = 0.05) -> Tensor:
    """int32 [N]: the part of each node. The seed is not used: the stream is the user's order."""
    return stream_graph(graph, num_parts, rule="fennel", passes=passes, slack=slack)
