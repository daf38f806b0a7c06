"""Parts hold the whole graph between them, and a layer computed part by part is the layer."""

from __future__ import annotations

import pytest
import torch

from polyhop.errors import PartitionError
from polyhop.graph import DenseFeatures, Graph, Part, SparseFeatures, SparseRows, Split
from polyhop.nn import GATConv, GCNConv, SAGEConv
from polyhop.partition import Partition, cut, partition
from polyhop.sample import full_block

NODES, EDGES, WIDTH = 60, 400, 7


def _graph(*, is_weighted: bool = False, has_loops: bool = True, is_sparse: bool = False) -> Graph:
    gen = torch.Generator().manual_seed(3)
    pairs = torch.randint(NODES, (EDGES, 2), generator=gen).unique(dim=0)
    pairs = pairs[torch.randperm(len(pairs), generator=gen)]  # in-edge lists in no order
    if not has_loops:
        pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    rows = torch.randn(NODES, WIDTH, generator=gen).double()
    x = DenseFeatures(rows)
    if is_sparse:
        kept = torch.where(rows > 0, rows, 0).float().to_sparse_csr()
        x = SparseFeatures(SparseRows(kept.crow_indices(), kept.col_indices(), kept.values(), WIDTH))
    order = torch.randperm(NODES, generator=gen)
    return Graph.from_edges(
        pairs.t().contiguous(),
        x,
        torch.randint(4, (NODES,), generator=gen),
        num_nodes=NODES,
        edge_weight=torch.rand(len(pairs), generator=gen) + 0.1 if is_weighted else None,
        train=order[:20],
        val=order[20:30],
        test=order[30:],
    )


def _partition(kind: str) -> Partition:
    gen = torch.Generator().manual_seed(5)
    owner = torch.randint(4, (NODES,), generator=gen).to(torch.int32)
    if kind == "an empty part":
        owner[owner == 2] = 1
    if kind == "one part":
        return Partition(torch.zeros(NODES, dtype=torch.int32), 1)
    return Partition(owner, 4)


KINDS = ("mixed", "an empty part", "one part")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_sparse", [False, True])
def test_parts_hold_the_graph_between_them(kind: str, is_sparse: bool) -> None:
    graph, made = _graph(is_weighted=True, is_sparse=is_sparse), _partition(kind)
    parts = [cut(graph, made, p) for p in range(made.num_parts)]
    assert torch.equal(torch.cat([part.user_ids for part in parts]), made.user_ids)
    for part in parts:
        for row, user in enumerate(part.user_ids.tolist()):
            mine = slice(int(part.indptr[row]), int(part.indptr[row + 1]))
            whole = slice(int(graph.indptr[user]), int(graph.indptr[user + 1]))
            sources = part.src_ids[part.indices[mine].long()]
            assert torch.equal(sources, graph.indices[whole].long())  # the user's order
            assert torch.equal(part.edge_weight[mine], graph.edge_weight[whole])
        assert torch.equal(part.new_ids(), made.new_ids[part.src_ids])
        assert bool((part.halo.diff() > 0).all())
        assert torch.equal(part.owners(part.new_ids()), made.owner[part.src_ids].long())
        assert torch.equal(part.y, graph.y[part.user_ids])
        given, expected = part.x.all(), graph.x.gather(part.user_ids)
        assert torch.equal(given.dense() if is_sparse else given, expected.dense() if is_sparse else expected)
    for name in ("train", "val", "test"):
        found = torch.cat([part.user_ids[getattr(part.split, name)] for part in parts])
        assert torch.equal(found.sort().values, getattr(graph.split, name))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_loops", [False, True])
@pytest.mark.parametrize(
    ("make", "is_weighted"),
    [(GCNConv, False), (GCNConv, True), (SAGEConv, False), (SAGEConv, True), (GATConv, False)],
)
def test_a_layer_part_by_part_is_the_layer(make, has_loops: bool, is_weighted: bool, kind: str) -> None:
    graph, made = _graph(is_weighted=is_weighted, has_loops=has_loops), _partition(kind)
    torch.manual_seed(0)
    layer = make(WIDTH, 5).double()
    x = graph.x.all()
    whole = layer(x, full_block(graph))
    for index in range(made.num_parts):
        part = cut(graph, made, index)
        assert torch.allclose(layer(x[part.src_ids], part.block()), whole[part.user_ids], rtol=0, atol=1e-12)


def test_a_graph_with_nothing_but_edges() -> None:
    graph = Graph.from_edges(torch.tensor([[0, 1, 2], [1, 2, 0]]), num_nodes=3)
    part = cut(graph, partition(graph, 2, "block"), 0)
    assert (part.x, part.y, part.split, part.edge_weight, part.in_weight, part.loop_weight) == (None,) * 6


def test_refused() -> None:
    graph, made = _graph(), _partition("mixed")
    with pytest.raises(PartitionError, match="partition is of 5 nodes"):
        cut(graph, Partition(torch.zeros(5, dtype=torch.int32), 1), 0)
    with pytest.raises(PartitionError, match=r"part 4 of 4: expected 0 \.\. 3"):
        cut(graph, made, 4)
    one = cut(graph, made, 0)
    with pytest.raises(PartitionError, match="src_ids has 1 entries, expected"):
        Part(0, one.bounds, one.indptr, one.indices, one.halo, one.src_ids[:1], one.in_degree, one.out_degree)


def test_splits_may_be_missing() -> None:
    graph = _graph()
    bare = Graph(graph.indptr, graph.indices, split=Split.of(NODES, torch.arange(3)))
    parts = [cut(bare, _partition("mixed"), p) for p in range(4)]
    assert sum(part.split.train.numel() for part in parts) == 3
    assert all(part.split.val.numel() == 0 for part in parts)
