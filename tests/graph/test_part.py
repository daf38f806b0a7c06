"""A part keeps its own books straight, and a shared graph shows the whole's sizes beside the part's contents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from polyhop.errors import PartitionError
from polyhop.graph import DenseFeatures, Graph, GraphFacts, Part, SharedGraph, fingerprint_graph
from polyhop.partition import Partition, share

MakeGraph = Callable[..., Graph]


def small_part() -> Part:
    """Part 1 of 3: own new ids 2, 3, 4; reads from new ids 0 and 6."""
    return Part(
        1,
        torch.tensor([0, 2, 5, 7]),
        torch.tensor([0, 2, 2, 4]),
        torch.tensor([3, 1, 4, 0], dtype=torch.int32),
        torch.tensor([0, 6]),
        torch.tensor([10, 11, 12, 20, 21]),
        torch.tensor([2, 0, 2, 1, 1], dtype=torch.int32),
        torch.tensor([1, 1, 0, 1, 1], dtype=torch.int32),
    )


def test_ids_of_a_part() -> None:
    part = small_part()
    assert (part.num_parts, part.start, part.num_nodes, part.num_edges) == (3, 2, 3, 4)
    assert part.user_ids.tolist() == [10, 11, 12]
    assert part.new_ids().tolist() == [2, 3, 4, 0, 6]
    assert part.owners(torch.tensor([0, 1, 2, 4, 5, 6])).tolist() == [0, 0, 1, 1, 2, 2]


def test_empty_parts_own_nothing() -> None:
    part = replace(small_part(), bounds=torch.tensor([0, 2, 5, 5, 7]))
    assert part.owners(torch.tensor([1, 2, 4, 5, 6])).tolist() == [0, 1, 1, 3, 3]


def test_the_block_of_a_part_has_its_own_rows_first() -> None:
    block = small_part().block()
    assert (block.num_dst, block.num_src, block.dst_start) == (3, 5, 0)
    assert block.dst_ids().tolist() == [10, 11, 12]
    assert not block.is_sampled
    assert block.in_degree is not None
    assert block.in_degree.tolist() == [2, 0, 2, 1, 1]


@pytest.mark.parametrize("name", ["indptr", "src_ids", "in_degree", "out_degree"])
def test_arrays_that_do_not_fit_are_named(name: str) -> None:
    part = small_part()
    short = getattr(part, name)[:-1]
    with pytest.raises(
        PartitionError,
        match=rf"part 1 with 3 nodes and 2 in its halo: {name} has {short.numel()} entries, expected {short.numel() + 1}",
    ):
        replace(part, **{name: short})


@pytest.mark.parametrize("kind", ["single", "multi"])
def test_a_shared_graph_has_the_sizes_of_the_whole_and_the_rows_of_its_part(
    make_graph: MakeGraph, kind: str
) -> None:
    graph = replace(make_graph(60, kind=kind), metric="f1_micro")
    shared = Partition((torch.arange(60) % 4 // 2 * 2).int(), 3)  # part 1 is empty
    for rank in range(3):
        held = share(graph, shared, rank)
        ids = shared.nodes_of(rank)
        for name in (
            "name",
            "metric",
            "num_nodes",
            "num_edges",
            "num_features",
            "num_classes",
            "is_multilabel",
        ):
            assert getattr(held, name) == getattr(graph, name), name
        assert held.x is not None
        assert held.y is not None
        assert graph.x is not None
        assert graph.y is not None
        assert torch.equal(held.x.all(), graph.x.gather(ids))
        assert torch.equal(held.y, graph.y[ids])
        for split in ("train", "val", "test"):
            whole = getattr(graph.split, split)
            assert torch.equal(ids[getattr(held.split, split)], whole[torch.isin(whole, ids)])
        assert fingerprint_graph(held) == fingerprint_graph(graph)


def test_a_shared_graph_without_labels_or_features() -> None:
    held = SharedGraph(small_part(), GraphFacts("bare", 7, 9, 0, 0))
    assert (held.x, held.y, held.split, held.is_multilabel) == (None, None, None, False)
    assert (held.metric, held.num_nodes, held.num_edges) == ("accuracy", 7, 9)


def test_the_fingerprint_of_a_shared_graph_is_a_copy(make_graph: MakeGraph) -> None:
    held = share(make_graph(20), Partition(torch.zeros(20, dtype=torch.int32), 1), 0)
    fingerprint_graph(held)["nodes"] = 5
    assert held.facts.fingerprint["nodes"] == 20


def test_two_graphs_have_two_fingerprints(make_graph: MakeGraph) -> None:
    graph = make_graph(20)
    assert isinstance(graph.x, DenseFeatures)
    other = replace(graph, x=DenseFeatures(graph.x.values + 1))
    shared = Partition(torch.zeros(20, dtype=torch.int32), 1)
    assert fingerprint_graph(share(graph, shared, 0)) != fingerprint_graph(share(other, shared, 0))
