"""The full neighbourhood: the whole graph as one Block."""

from __future__ import annotations

from polyhop.graph.block import Block
from polyhop.graph.graph import Graph

__all__ = ["full_block"]


def full_block(graph: Graph) -> Block:
    """Every edge of the graph; sources and destinations are all N nodes in order."""
    return Block(
        graph.indptr,
        graph.indices,
        graph.num_nodes,
        edge_weight=graph.edge_weight,
        in_degree=graph.in_degree,
        in_weight=graph.in_weight,
        loop_weight=graph.loop_weight,
    )
