"""Sums over all in-edges: those of the whole graph, bit for bit, whatever the parts and the memory; every row sent once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.errors import PolyhopError
from polyhop.exchange import RowFormat
from polyhop.exchange.aggregate import PartRows, filled, rows_in_file, stored_rows
from polyhop.graph import DenseFeatures, Graph
from polyhop.graph.aggregated import FixedAggregate
from polyhop.nn import MLP, GCNConv, GINConv, Layer, SAGEConv
from polyhop.partition import Partition, cut
from polyhop.sample import full_block

MakeGraph = Callable[..., Graph]
Run = Callable[..., list[Any]]

NODES = 120
OWNERS = {
    "even": torch.arange(NODES, dtype=torch.int32) % 3,
    "uneven": torch.where(torch.arange(NODES) % 10 == 9, torch.arange(NODES) % 3, 0).int(),
    "first empty": torch.arange(NODES, dtype=torch.int32) % 2 + 1,
    "all on one": torch.ones(NODES, dtype=torch.int32),
}
LAYERS: dict[str, Callable[[], Layer]] = {
    "mean": lambda: SAGEConv(8, 4),
    "gcn": lambda: GCNConv(8, 4),
    "sum": lambda: GINConv(MLP([8, 4])),
}
SMALL = 5_000  # bytes: a few nodes at a time


def sums_of(
    graph: Graph, aggregate: FixedAggregate, dtype: torch.dtype, memory_bytes: int = 1 << 20
) -> Tensor:
    """Stored rows of the whole graph."""
    assert graph.x is not None

    def gather(ids: Tensor) -> Tensor:
        assert bool((ids[1:] > ids[:-1]).all()), "sources are asked for in ascending order"
        sizes.append(ids.numel())
        return graph.x.gather(ids).to(dtype)  # type: ignore[union-attr]

    sizes: list[int] = []
    out = torch.full((graph.num_nodes, aggregate.width(8)), torch.nan, dtype=dtype)
    pieces = stored_rows(full_block(graph), gather, aggregate, 8, dtype, memory_bytes=memory_bytes)
    filled(out, pieces)
    if memory_bytes == SMALL:
        in_edges = int(graph.in_degree.max()) + 1
        assert len(sizes) > 10
        assert max(sizes) <= max(in_edges, SMALL // (3 * 8 * dtype.itemsize))
    return out


def formula(graph: Graph, name: str) -> Tensor:
    """float64 [N, 8]: sums by a dense matrix."""
    assert graph.x is not None
    weight = torch.ones(graph.num_edges) if graph.edge_weight is None else graph.edge_weight
    a = torch.zeros(graph.num_nodes, graph.num_nodes, dtype=torch.float64)
    if name != "gcn":
        weight = torch.ones(graph.num_edges)
    a[graph.destinations, graph.indices.long()] = weight.double()
    if name == "gcn":
        a[torch.arange(NODES), torch.arange(NODES)] += (a.diagonal() == 0).double()
        root = a.sum(1).rsqrt()
        a = root[:, None] * a * root[None, :]
    if name == "mean":
        a = a / a.sum(1, keepdim=True).clamp(min=1)
    return a @ graph.x.all().double()  # type: ignore[union-attr]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_sums_are_those_of_the_formula(make_graph: MakeGraph, name: str, weighted: bool) -> None:
    graph = make_graph(NODES, weighted=weighted)
    assert graph.loop_weight is not None
    assert int(graph.in_degree.min()) == 0  # loops and isolated nodes are there
    aggregate = LAYERS[name]().fixed_aggregate()
    found = sums_of(graph, aggregate, torch.float64)
    torch.testing.assert_close(found[:, -8:], formula(graph, name), rtol=1e-12, atol=1e-12)
    if aggregate.has_own:
        assert graph.x is not None
        assert torch.equal(found[:, :8], graph.x.all().double())  # type: ignore[union-attr]
    single = sums_of(graph, aggregate, torch.float32)
    torch.testing.assert_close(single.double(), found, rtol=1e-5, atol=1e-6)
    assert torch.equal(sums_of(graph, aggregate, torch.float32, SMALL), single) or weighted
    torch.testing.assert_close(sums_of(graph, aggregate, torch.float64, SMALL), found, rtol=1e-13, atol=1e-13)


def part_sums(
    line: Collective,
    graph: Graph,
    owner: Tensor,
    name: str,
    memory_bytes: int,
    scratch: Path | None = None,
    needs: tuple[bool, ...] = (True,) * 4,
) -> tuple[Tensor, Tensor, Cost, int]:
    """User's ids, stored rows of the own nodes, what fetching cost, halo rows."""
    part = cut(graph, Partition(owner, line.num_ranks), line.rank)
    aggregate = LAYERS[name]().fixed_aggregate()
    before = line.traffic.now()
    sources = PartRows(
        part, graph.num_nodes, line, torch.float32,
        needs=needs[line.rank], memory_bytes=memory_bytes, scratch=scratch,
    )  # fmt: skip
    cost = line.traffic.now() - before
    out = torch.full((part.num_nodes, aggregate.width(8)), torch.nan)
    if needs[line.rank]:
        pieces = stored_rows(
            part.block(), sources.gather, aggregate, 8, torch.float32, memory_bytes=memory_bytes
        )
        filled(out, pieces)
    return part.user_ids, out, cost, part.halo.numel()


@pytest.mark.parametrize("memory_bytes", [1 << 20, SMALL], ids=["at once", "in pieces"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)
def test_parts_sum_what_the_whole_does(
    make_graph: MakeGraph, owner: Tensor, name: str, memory_bytes: int
) -> None:
    graph = make_graph(NODES)
    expected = sums_of(graph, LAYERS[name]().fixed_aggregate(), torch.float32)
    found = run_in_threads(3, part_sums, graph, owner, name, memory_bytes)
    for ids, rows, _, _ in found:
        assert torch.equal(rows, expected[ids])
    layout = RowFormat.of(cut(graph, Partition(owner, 3), 0), NODES, "auto")
    fetched = sum(halo for *_, halo in found)
    assert sum(cost.bytes.get("features", 0) for *_, cost, _ in found) == fetched * layout.row_bytes
    assert fetched > 0 or owner is OWNERS["all on one"]


def test_the_same_over_gloo(make_graph: MakeGraph, ranks: Run) -> None:
    graph, owner = make_graph(NODES, weighted=True), torch.arange(NODES, dtype=torch.int32) % 4
    expected = sums_of(graph, LAYERS["gcn"]().fixed_aggregate(), torch.float32)
    for ids, rows, _, _ in ranks(4, part_sums, graph, owner, "gcn", SMALL):
        torch.testing.assert_close(rows, expected[ids], rtol=1e-6, atol=1e-7)


def test_a_rank_that_needs_nothing_gives_and_fetches_nothing(make_graph: MakeGraph) -> None:
    graph, owner = make_graph(NODES), OWNERS["even"]
    expected = sums_of(graph, LAYERS["mean"]().fixed_aggregate(), torch.float32)
    found = run_in_threads(3, part_sums, graph, owner, "mean", SMALL, None, (True, False, False))
    ids, rows, _, halo = found[0]
    assert torch.equal(rows, expected[ids])
    assert "features" not in found[0][2].bytes  # nobody asked rank 0
    layout = RowFormat.of(cut(graph, Partition(owner, 3), 0), NODES, "auto")
    assert sum(cost.bytes["features"] for *_, cost, _ in found[1:]) == halo * layout.row_bytes


def test_halo_in_a_file_gives_the_same_and_leaves_nothing(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph, owner = make_graph(NODES), OWNERS["even"]
    expected = sums_of(graph, LAYERS["mean"]().fixed_aggregate(), torch.float32)
    for ids, rows, _, halo in run_in_threads(3, part_sums, graph, owner, "mean", 1_000, tmp_path):
        assert halo * 8 * 4 > 1_000
        assert torch.equal(rows, expected[ids])
    assert list(tmp_path.iterdir()) == []


def test_rows_stored_small_are_summed_as_floats(make_graph: MakeGraph) -> None:
    graph = make_graph(NODES)
    assert isinstance(graph.x, DenseFeatures)
    values = (graph.x.values * 20).clamp(-127, 127).to(torch.int8)
    graph = replace(graph, x=DenseFeatures(values, torch.rand(8) + 0.1))
    expected = sums_of(graph, LAYERS["mean"]().fixed_aggregate(), torch.float32)
    torch.testing.assert_close(expected[:, 8:].double(), formula(graph, "mean"), rtol=1e-5, atol=1e-6)
    for ids, rows, _, _ in run_in_threads(3, part_sums, graph, OWNERS["uneven"], "mean", SMALL):
        assert torch.equal(rows, expected[ids])


def test_a_hub_is_summed_however_small_the_memory() -> None:
    """One node with all others as sources: a chunk has at least one node."""
    nodes = torch.arange(1, 50)
    x = torch.randn(50, 8)
    graph = Graph.from_edges(torch.stack([nodes, torch.zeros_like(nodes)]), x, num_nodes=50)
    found = filled(
        torch.empty(50, 16),
        stored_rows(
            full_block(graph),
            lambda ids: x[ids],
            SAGEConv(8, 2).fixed_aggregate(),
            8,
            torch.float32,
            memory_bytes=1,
        ),
    )
    torch.testing.assert_close(found[0, 8:], x[1:].mean(0), rtol=1e-5, atol=1e-6)
    assert bool((found[1:, 8:] == 0).all())


def test_a_file_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(PolyhopError, match=r"cannot keep 96 bytes of rows in .*taken"):
        rows_in_file((3, 8), torch.float32, tmp_path / "taken")
