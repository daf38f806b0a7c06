"""What a rank holds for evaluation: its block, own rows and halo in one numbering, completed by the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.comm import Collective, run_in_threads
from polyhop.exchange import RowFetch, RowFormat
from polyhop.graph import DenseFeatures, Graph, SparseRows
from polyhop.partition import Partition, share
from polyhop.sample.wire import Wire
from polyhop.strategies import HeldPart, WholeGraph, place

MakeGraph = Callable[..., Graph]
Run = Callable[..., list[Any]]

OWNERS = {
    "even": (torch.arange(60) % 3).int(),
    "first empty": (torch.arange(60) % 2 + 1).int(),
    "one": torch.zeros(60, dtype=torch.int32),
}


def hold(
    line: Collective, graph: Graph, owner: Tensor, dtype: str = "auto", precision: str = "32-true"
) -> HeldPart:
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    layout = RowFormat.of(held.part, graph.num_nodes, dtype)
    return HeldPart(held, place("cpu", precision), line, RowFetch(held.part, layout, Wire(graph.num_nodes)))


def dense(rows: Tensor | SparseRows) -> Tensor:
    return rows.dense() if isinstance(rows, SparseRows) else rows


@pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)
@pytest.mark.parametrize("sparse", [False, True])
def test_features_are_the_rows_of_own_nodes_and_halo(
    make_graph: MakeGraph, sparse: bool, owner: Tensor
) -> None:
    graph = make_graph(60, sparse=sparse)
    assert graph.x is not None
    whole = dense(graph.x.all())

    def check(line: Collective) -> None:
        held = hold(line, graph, owner)
        ids = held.graph.part.src_ids
        features = held.features
        assert (features.num_rows, features.num_features) == (ids.numel(), 8)
        assert torch.equal(dense(features.all()), whole[ids])
        assert torch.equal(dense(held.x), whole[ids])
        order = torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(line.rank))
        for at in (order, order[:7], order[:0], torch.cat([order[:3], order[:3]])):
            assert torch.equal(dense(features.gather(at)), whole[ids[at]])

    run_in_threads(3, check)


def test_the_halos_rows_are_fetched_once_and_only_when_asked_for(make_graph: MakeGraph) -> None:
    graph = make_graph(60)

    def fetched(line: Collective) -> list[float]:
        held = hold(line, graph, OWNERS["even"])
        sent = [line.traffic.now().bytes.get("features", 0)]
        for _ in range(2):
            held.features.all()
            line.barrier()
            sent.append(line.traffic.now().bytes["features"])
        return sent

    for first, second, third in run_in_threads(3, fetched):
        assert first == 0
        assert second == third > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_own_and_fetched_rows_are_rounded_alike(make_graph: MakeGraph, dtype: str) -> None:
    graph = make_graph(60)

    def rows(line: Collective) -> tuple[Tensor, Tensor]:
        held = hold(line, graph, OWNERS["even"][: graph.num_nodes] % line.num_ranks, dtype)
        return held.graph.part.src_ids, dense(held.features.all())

    ((every, expected),) = run_in_threads(1, rows)
    assert graph.x is not None
    assert not torch.equal(expected, dense(graph.x.all())[every])
    for ids, got in run_in_threads(3, rows):
        assert torch.equal(got, expected[ids])


def completed(line: Collective, graph: Graph, owner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of a layer, completed; the second with a trailing shape."""
    held = hold(line, graph, owner)
    own = held.graph.part.user_ids
    flat = held.complete(own.float()[:, None] * torch.tensor([1.0, -2.0]))
    deep = held.complete(own.double()[:, None, None].expand(-1, 2, 3))
    return held.graph.part.src_ids, flat, deep


def assert_completed(found: list[Any]) -> None:
    for ids, flat, deep in found:
        assert torch.equal(flat, ids.float()[:, None] * torch.tensor([1.0, -2.0]))
        assert torch.equal(deep, ids.double()[:, None, None].expand(-1, 2, 3))


@pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)
def test_complete(make_graph: MakeGraph, owner: Tensor) -> None:
    assert_completed(run_in_threads(3, completed, make_graph(60), owner))


def test_complete_over_gloo(make_graph: MakeGraph, ranks: Run) -> None:
    assert_completed(ranks(3, completed, make_graph(60), OWNERS["first empty"]))


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_blocks_have_the_degrees_and_weights_of_the_whole(make_graph: MakeGraph, precision: str) -> None:
    graph = make_graph(60, weighted=True)
    whole = WholeGraph(graph, place("cpu", precision)).block

    def check(line: Collective) -> None:
        held = hold(line, graph, OWNERS["even"], precision=precision)
        part, block = held.graph.part, held.block
        assert block is held.block
        for name in ("in_degree", "out_degree", "in_weight", "loop_weight"):
            mine, theirs = getattr(block, name), getattr(whole, name)
            if theirs is not None:
                assert mine.dtype == theirs.dtype, name
                torch.testing.assert_close(mine, theirs[part.src_ids], rtol=1e-12, atol=0)
        assert block.edge_weight is not None
        assert whole.edge_weight is not None
        assert block.edge_weight.dtype == whole.edge_weight.dtype
        for row, node in enumerate(part.user_ids.tolist()):
            mine_at, whole_at = (
                slice(b.indptr[i], b.indptr[i + 1]) for b, i in ((block, row), (whole, node))
            )
            assert torch.equal(part.src_ids[block.indices[mine_at].long()], whole.indices[whole_at].long())
            assert torch.equal(block.edge_weight[mine_at], whole.edge_weight[whole_at])

    run_in_threads(3, check)


def test_small_stored_features_arrive_as_floats(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    assert isinstance(graph.x, DenseFeatures)
    values = (graph.x.values * 20).clamp(-127, 127).to(torch.int8)
    graph = replace(graph, x=DenseFeatures(values, torch.rand(8) + 0.5))

    def check(line: Collective) -> None:
        held = hold(line, graph, OWNERS["even"])
        assert graph.x is not None
        assert torch.equal(dense(held.x), dense(graph.x.all())[held.graph.part.src_ids])

    run_in_threads(3, check)
