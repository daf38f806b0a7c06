"""Weights reach the methods: pairs cost what their edges cost, loads are balanced, and the cut goes where it is cheap."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyhop.errors import ConfigError, PartitionError
from polyhop.graph import Graph
from polyhop.partition import Partition, partition, quality
from polyhop.partition.weights import weigh, whole

METHODS = ("metis", "fennel")


def _graph(edges: list[tuple[int, int]], num_nodes: int) -> Graph:
    return Graph.from_edges(
        torch.tensor(edges).T, num_nodes=num_nodes, y=torch.zeros(num_nodes, dtype=torch.int64)
    )


def _needs(method: str) -> None:
    if method == "metis":
        pytest.importorskip("pymetis")


def _crossed(size: int) -> tuple[Graph, Tensor]:
    """A torus of size x size nodes; edges along rows cost 50, along columns 1."""
    at = torch.arange(size * size).view(size, size)
    along = torch.stack([at, at.roll(-1, 1)]).flatten(1)
    down = torch.stack([at, at.roll(-1, 0)]).flatten(1)
    edges = torch.cat([along, along.flip(0), down, down.flip(0)], 1)
    graph = Graph.from_edges(edges, num_nodes=size * size, y=torch.zeros(size * size, dtype=torch.int64))
    is_along = graph.indices.long() // size == graph.destinations // size
    return graph, torch.where(is_along, 50, 1)


def test_pairs_cost_what_their_edges_cost() -> None:
    graph = _graph([(0, 1), (1, 0), (2, 1), (3, 3), (3, 2), (0, 3)], 5)
    by_edge = {(0, 1): 2, (1, 0): 5, (2, 1): 7, (3, 3): 9, (3, 2): 0, (0, 3): 1}
    ends = zip(graph.indices.tolist(), graph.destinations.tolist(), strict=True)
    level = weigh(graph, torch.tensor([0, 4, 0, 8, 8]), torch.tensor([by_edge[end] for end in ends]))
    found = {
        (v, int(level.indices[e])): float(level.edge_weight[e])
        for v in range(5)
        for e in range(int(level.indptr[v]), int(level.indptr[v + 1]))
    }
    expected = {(0, 1): 7.0, (1, 2): 7.0, (0, 3): 1.0}  # no loop, nothing that was never drawn
    assert found == expected | {(v, u): cost for (u, v), cost in expected.items()}
    assert level.weight.tolist() == [0, 1, 0, 2, 2]
    assert level.second is None


def test_large_weights_are_scaled_and_none_is_lost() -> None:
    graph = _graph([(0, 1), (1, 0), (2, 1)], 3)
    level = weigh(graph, edge_weight=torch.tensor([2**40, 1, 2**41]))
    assert level.edge_weight.max() <= 2**23
    assert level.edge_weight.min() > 0
    matrix = {(v, int(u)): w for v in range(3) for u, w in zip(
        level.indices[level.indptr[v] : level.indptr[v + 1]], level.edge_weight[level.indptr[v] : level.indptr[v + 1]],
        strict=True)}  # fmt: skip
    assert all(matrix[v, u] == matrix[u, v] for u, v in matrix)
    given = torch.tensor([0, 1, 2**50])
    assert whole(given, 1000).tolist()[:2] == [1, 1]
    assert 990 <= int(whole(given, 1000).sum()) <= 1002
    assert whole(torch.zeros(2, dtype=torch.int64)).tolist() == [1, 1]


@pytest.mark.parametrize("method", METHODS)
def test_edge_weights_decide_where_the_cut_goes(method: str) -> None:
    _needs(method)
    graph, cost = _crossed(24)

    def mean_cost(weight: Tensor, **given: Tensor) -> float:
        owner = partition(graph, 4, method, **given).owner
        return float(weight[owner[graph.indices.long()] != owner[graph.destinations]].double().mean())

    # The same torus, once with dear rows, once with dear columns: no structure tells them apart, only weights.
    for weight in (cost, 51 - cost):
        assert mean_cost(weight, edge_weight=weight) < 5
    assert mean_cost(cost) + mean_cost(51 - cost) == pytest.approx(51)


@pytest.mark.parametrize("method", METHODS)
def test_node_weights_are_balanced_instead_of_nodes(method: str) -> None:
    _needs(method)
    graph, _ = _crossed(24)
    weight = torch.ones(24 * 24, dtype=torch.int64)
    weight[:24] = 47  # one row weighs two thirds of all
    made = partition(graph, 3, method, node_weight=weight)
    load = torch.zeros(3, dtype=torch.int64).index_add_(0, made.owner.long(), weight)
    assert int(load.max()) <= 1.06 * int(weight.sum()) / 3 + 47
    plain = partition(graph, 3, method)
    unbalanced = torch.zeros(3, dtype=torch.int64).index_add_(0, plain.owner.long(), weight)
    assert int(unbalanced.max()) > int(load.max())


@pytest.mark.parametrize("method", METHODS)
def test_odd_weights(method: str) -> None:
    _needs(method)
    graph, cost = _crossed(8)
    nothing = torch.zeros(64, dtype=torch.int64)
    for given in (
        {"node_weight": nothing},
        {"edge_weight": torch.zeros_like(cost)},
        {"node_weight": nothing, "edge_weight": torch.zeros_like(cost)},
        {"node_weight": (torch.arange(64) == 0).long()},
    ):
        owner = partition(graph, 3, method, **given).owner
        assert set(owner.tolist()) <= {0, 1, 2}
        assert torch.equal(owner, partition(graph, 3, method, **given).owner)


def test_wrong_weights_are_refused() -> None:
    graph, cost = _crossed(4)
    for given, message in (
        (
            {"node_weight": torch.ones(3, dtype=torch.int64)},
            r"node_weight: expected whole numbers \[16\].*\[3\]",
        ),
        ({"edge_weight": cost.float()}, "edge_weight: expected whole numbers .*float32"),
        ({"edge_weight": cost - 2}, r"edge_weight\[\d+\] = -1: expected 0 or more"),
    ):
        with pytest.raises(PartitionError, match=message):
            partition(graph, 2, "fennel", **given)
    with pytest.raises(ConfigError, match=r"'hash': .*node_weight"):
        partition(graph, 2, "hash", node_weight=cost)


def test_empty_parts_are_told() -> None:
    graph, _ = _crossed(4)
    found = quality(graph, Partition(torch.zeros(16, dtype=torch.int32), 3))
    assert found.num_empty == 2
    assert "2 parts are EMPTY" in dict(found.rows())["balance"]
    assert "EMPTY" not in str(quality(graph, partition(graph, 2, "block")).rows())
    with pytest.raises(PartitionError, match=r"of 5 nodes, the graph .* has 16"):
        quality(graph, Partition(torch.zeros(5, dtype=torch.int32), 3))
