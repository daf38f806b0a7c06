"""full_block: the graph itself as a Block."""

from __future__ import annotations

from collections.abc import Callable

import torch

from polyhop.graph import Graph
from polyhop.sample import NeighbourSampler, full_block


def test_full_block_is_the_graph(make_graph: Callable[..., Graph]) -> None:
    graph = make_graph(100, weighted=True)
    block = full_block(graph)
    assert (block.num_src, block.num_dst, block.num_edges) == (100, 100, graph.num_edges)
    assert not block.is_sampled
    assert torch.equal(block.in_degree, graph.in_degree)
    assert torch.equal(block.drawn, graph.in_degree.long())
    assert torch.equal(block.edge_weight, graph.edge_weight)
    assert torch.equal(block.dst_ids(), torch.arange(100))


def test_all_neighbours_of_all_nodes_are_the_full_block(make_graph: Callable[..., Graph]) -> None:
    """Sampling with fan-out -1 from every node in order gives the same edges, weights and degrees."""
    graph = make_graph(100, weighted=True)
    full = full_block(graph)
    (block,) = NeighbourSampler(graph, [-1]).sample(torch.arange(100), 0, 0).blocks
    assert block.num_src == full.num_src
    for name in ("indptr", "indices", "edge_weight", "in_degree", "in_weight", "loop_weight"):
        assert torch.equal(getattr(block, name), getattr(full, name)), name
