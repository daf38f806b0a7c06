"""LDG: neighbours in the part, times the room that it has left (Stanton & Kliot, 2012), in several passes."""

from __future__ import annotations

from torch import Tensor

from polyhop.graph import Graph
from polyhop.partition.streaming import stream_graph

__all__ = ["ldg"]


def ldg(graph: Graph, num_parts: int, *, seed: int = 0, passes: int = 10, slack: float = 0.05) -> Tensor:
    """int32 [N]: the part of each node. The seed is not used: the stream is the user's order."""
    return stream_graph(graph, num_parts, rule="ldg", passes=passes, slack=slack)
