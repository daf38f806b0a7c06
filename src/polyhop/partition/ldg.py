"""LDG: neighbours in the part, times the room that it has left (Stanton & Kliot, 2012), in several passes."""

from __future__ import annotations

from torch import Tensor

from polyhop.graph import Graph
from polyhop.kernels.neighbours import neighbours
from polyhop.kernels.stream import Stream, stream_parts
from polyhop.partition.streaming import Room, is_train, ldg_passes

__all__ = ["ldg"]


def ldg(graph: Graph, num_parts: int, *, seed: int = 0, passes: int = 10, slack: float = 0.05) -> Tensor:
    """int32 [N]: the part of each node. The seed is not used: the stream is the user's order."""
    lists = neighbours(graph.indptr, graph.indices)
    state, second = Stream.empty(graph.num_nodes, num_parts), is_train(graph)
    for one in ldg_passes(Room.of(graph, num_parts, slack), passes):
        stream_parts(state, *lists, second=second, **one)
    return state.owner
