"""Whether a partitioned graph is symmetric: one edge too few is seen, whoever owns it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyhop.comm import Collective, run_in_threads
from polyhop.graph import Graph
from polyhop.partition import Partition, partition, share
from polyhop.sample import symmetry
from polyhop.sample.symmetry import is_symmetric


def symmetric_edges(num_nodes: int) -> Tensor:
    """int64 [2, E]; with loops, isolated nodes and none twice."""
    joined = torch.rand(num_nodes, num_nodes, generator=torch.Generator().manual_seed(0)) < 4 / num_nodes
    joined = joined | joined.T
    joined[num_nodes // 3 : num_nodes // 2] = False
    joined[:, num_nodes // 3 : num_nodes // 2] = False
    return torch.stack(joined.nonzero(as_tuple=True))


def asked(line: Collective, graph: Graph, owner: Tensor) -> bool:
    return is_symmetric(share(graph, Partition(owner, line.num_ranks), line.rank).part, line)


@pytest.mark.parametrize("piece", [7, 1 << 20])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_symmetric_and_not(monkeypatch: pytest.MonkeyPatch, num_ranks: int, piece: int) -> None:
    monkeypatch.setattr(symmetry, "_PIECE", piece)
    edges = symmetric_edges(60)
    whole = Graph.from_edges(edges, num_nodes=60)
    owner = partition(whole, num_ranks, "hash").owner
    assert run_in_threads(num_ranks, asked, whole, owner) == [True] * num_ranks
    (no_loops,) = (edges[0] != edges[1]).nonzero(as_tuple=True)
    for lost in no_loops[[0, 5, -1]].tolist():
        kept = torch.arange(edges.shape[1]) != lost
        graph = Graph.from_edges(edges[:, kept], num_nodes=60)
        assert run_in_threads(num_ranks, asked, graph, owner) == [False] * num_ranks


def test_as_many_out_as_in_is_not_enough() -> None:
    """A ring in one direction: every node has one in-edge and one out-edge."""
    nodes = torch.arange(30)
    ring = Graph.from_edges(torch.stack([nodes, (nodes + 1) % 30]), num_nodes=30)
    owner = partition(ring, 2, "block").owner
    assert run_in_threads(2, asked, ring, owner) == [False, False]


def test_no_edges() -> None:
    graph = Graph.from_edges(torch.empty(2, 0, dtype=torch.int64), num_nodes=4)
    assert run_in_threads(2, asked, graph, partition(graph, 2, "block").owner) == [True, True]
