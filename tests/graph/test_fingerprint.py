"""A graph is recognised by its contents, whoever holds which part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from polyhop.graph import DenseFeatures, Graph, Split, fingerprint_graph
from polyhop.partition import partition, share
from polyhop.train.fingerprint import differences

MakeGraph = Callable[..., Graph]


@pytest.mark.parametrize("sparse", [False, True])
def test_a_graph_is_recognised_and_its_copies_told_apart(make_graph: MakeGraph, sparse: bool) -> None:
    graph = make_graph(sparse=sparse)
    same = fingerprint_graph(graph)
    assert fingerprint_graph(make_graph(sparse=sparse)) == same
    assert graph.y is not None
    assert graph.split is not None
    split = Split(graph.split.train, graph.split.test, graph.split.val)
    others = {
        "labels": replace(graph, y=graph.y.flip(0)),
        "split": replace(graph, split=split),
        "structure": replace(graph, indices=graph.indices.flip(0)),
        "feature_rows": replace(graph, x=DenseFeatures(torch.randn(200, 8))),
    }
    for name, other in others.items():
        assert [line.split(":")[0] for line in differences(same, fingerprint_graph(other))] == [name]


def test_a_shared_graph_is_known_as_the_whole(make_graph: MakeGraph) -> None:
    graph = make_graph()
    for parts in (1, 3):
        held = share(graph, partition(graph, parts, "hash"), parts - 1)
        assert fingerprint_graph(held) == fingerprint_graph(graph)
        assert (held.num_nodes, held.num_edges) == (graph.num_nodes, graph.num_edges)
