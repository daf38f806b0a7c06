"""Columns of all nodes on every rank: the values of the whole graph, whatever the store, the rounds and the widths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polyhop.comm import Collective, run_in_threads
from polyhop.exchange.columns import Columns, spread_columns
from polyhop.graph import DenseFeatures, Graph, SparseFeatures
from polyhop.partition import Partition, partition, share

MakeGraph = Callable[..., Graph]


def spread(line: Collective, graph: Graph, owner: Tensor, dtype: str, memory_bytes: int) -> Columns:
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    return spread_columns(held.part, graph.num_nodes, line, dtype, memory_bytes=memory_bytes)


def dense(graph: Graph) -> Tensor:
    assert graph.x is not None
    x = graph.x.all()
    return x if isinstance(x, Tensor) else x.dense()


@pytest.mark.parametrize("memory_bytes", [1, 3000, 1 << 20])
@pytest.mark.parametrize(("num_features", "num_ranks"), [(10, 1), (10, 4), (2, 4), (8, 2)])
@pytest.mark.parametrize("sparse", [False, True])
def test_slices_are_the_columns_of_all_nodes(
    make_graph: MakeGraph, num_features: int, num_ranks: int, sparse: bool, memory_bytes: int
) -> None:
    graph = make_graph(60, num_features=num_features, num_classes=2, sparse=sparse, weighted=True)
    assert isinstance(graph.x, SparseFeatures) == sparse
    shared = partition(graph, num_ranks, "hash")
    found = run_in_threads(num_ranks, spread, graph, shared.owner, "auto", memory_bytes)
    assert torch.equal(torch.cat([each.x.all() for each in found], dim=1), dense(graph)[shared.user_ids])
    widths = [each.num_own for each in found]
    assert sum(widths) == num_features
    assert max(widths) - min(widths) <= 1
    for each in found:
        assert each.holders == [k for k, width in enumerate(widths) if width]
        assert torch.equal(each.facts.user_ids, shared.user_ids)
        assert torch.equal(each.facts.in_degree.long(), graph.in_degree[shared.user_ids].long())
        assert each.facts.in_weight is not None


def test_small_integers_stay_small(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    values = torch.randint(0, 255, (60, 7), dtype=torch.uint8)
    graph = replace(graph, x=DenseFeatures(values, torch.linspace(0.1, 2, 7)))
    shared = partition(graph, 3, "hash")
    found = run_in_threads(3, spread, graph, shared.owner, "auto", 200)
    assert all(each.x.dtype == torch.uint8 for each in found)
    assert torch.equal(torch.cat([each.x.all() for each in found], dim=1), dense(graph)[shared.user_ids])


def test_half_precision(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    shared = partition(graph, 3, "hash")
    found = run_in_threads(3, spread, graph, shared.owner, "bfloat16", 1 << 20)
    assert all(each.x.dtype == torch.bfloat16 for each in found)
    expected = dense(graph)[shared.user_ids].bfloat16().float()
    assert torch.equal(torch.cat([each.x.all() for each in found], dim=1), expected)
