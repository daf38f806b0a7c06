"""The halo's rows are those of the whole graph, and what is sent back is added at the owners, in rank order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.exchange import Halo
from polyhop.graph import Graph
from polyhop.partition import Partition, cut

MakeGraph = Callable[..., Graph]
Run = Callable[..., list[Any]]

NODES = 60
OWNERS = {
    "even": torch.arange(NODES, dtype=torch.int32) % 3,
    "last empty": torch.arange(NODES, dtype=torch.int32) % 2,
    "first empty": torch.arange(NODES, dtype=torch.int32) % 2 + 1,
    "all on one": torch.ones(NODES, dtype=torch.int32),
}


def values(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (torch.randn(NODES, *shape, generator=rng, dtype=torch.float64) * 50).to(dtype)


def one_way(path: int) -> Graph:
    """A directed graph: node v reads from v - path, so the first nodes read from nobody."""
    nodes = torch.arange(path, NODES)
    return Graph.from_edges(torch.stack([nodes - path, nodes]), num_nodes=NODES)


def bring(
    line: Collective, graph: Graph, owner: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, list[int], Cost]:
    """The user's ids of the halo, its rows, how many rows go to each rank, and what bringing them cost."""
    shared = Partition(owner, line.num_ranks)
    part = cut(graph, shared, line.rank)
    halo = Halo(part, line)
    assert halo.num_halo == part.halo.numel()
    before = line.traffic.now()
    got = halo.forward(rows[part.user_ids])
    lent = [ids.numel() for ids in halo.lent]
    return part.src_ids[part.num_nodes :], got, lent, line.traffic.now() - before


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8], ids=str
)
@pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)
def test_forward_brings_the_rows_of_the_whole(
    make_graph: MakeGraph, owner: Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    graph, rows = make_graph(NODES), values(dtype, shape)
    row_bytes = rows[0].numel() * rows.element_size()
    for rank, (ids, got, lent, cost) in enumerate(run_in_threads(3, bring, graph, owner, rows)):
        assert got.dtype == dtype
        assert list(got.shape) == [ids.numel(), *shape]
        assert torch.equal(got, rows[ids])
        assert lent[rank] == 0
        assert cost.bytes.get("hidden", 0) == sum(lent) * row_bytes
        assert set(cost.bytes) <= {"hidden"}  # lists were exchanged once: a message is rows alone


def add_back(
    line: Collective, graph: Graph, owner: Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums at the owners; and what this rank began with and gave."""
    shared = Partition(owner, line.num_ranks)
    part = cut(graph, shared, line.rank)
    halo = Halo(part, line)
    begun = values(dtype, shape, seed=9)[part.user_ids]
    given = values(dtype, shape, seed=line.rank)[part.src_ids[part.num_nodes :]]
    own = begun.clone()
    assert halo.back(given, own) is own
    return part.user_ids, own, part.src_ids[part.num_nodes :], given


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)
def test_back_adds_every_rank_in_order(
    make_graph: MakeGraph, owner: Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    found = run_in_threads(3, add_back, make_graph(NODES), owner, dtype, shape)
    expected = values(dtype, shape, seed=9)
    for _, _, ids, given in found:  # each rank has a node in its halo once
        expected[ids] = expected[ids] + given
    for ids, own, _, _ in found:
        assert torch.equal(own, expected[ids])


def test_back_is_the_transpose_of_forward(make_graph: MakeGraph) -> None:
    """<halo rows, forward(x)> over all ranks = <back(halo rows), x>: what makes it the gradient."""
    graph, owner, dtype = make_graph(NODES), OWNERS["even"], torch.float64
    x, zero = values(dtype, (4,), seed=5), values(dtype, (4,), seed=9)
    left = right = 0.0
    for ids, own, halo_ids, given in run_in_threads(3, add_back, graph, owner, dtype, (4,)):
        left += float((given * x[halo_ids]).sum())
        right += float(((own - zero[ids]) * x[ids]).sum())
    assert left == pytest.approx(right, rel=1e-12)


def transposed_sums(line: Collective, graph: Graph, owner: Tensor) -> Tensor:
    part = cut(graph, Partition(owner, line.num_ranks), line.rank)
    own = torch.zeros(2, 3, part.num_nodes).permute(2, 1, 0)  # no view of it is a matrix of rows
    Halo(part, line).back(torch.ones(part.halo.numel(), 3, 2), own)
    return own.sum()


def test_back_reaches_rows_that_are_not_contiguous(make_graph: MakeGraph) -> None:
    graph, owner = make_graph(NODES), OWNERS["even"]
    sizes = [cut(graph, Partition(owner, 3), rank).halo.numel() for rank in range(3)]
    assert sum(run_in_threads(3, transposed_sums, graph, owner)) == 6 * sum(sizes)


def two_at_once(
    line: Collective, graph: Graph, owner: Tensor, rows: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Both begun before either is waited for, the second waited for first."""
    part = cut(graph, Partition(owner, line.num_ranks), line.rank)
    halo = Halo(part, line)
    mine = [each[part.user_ids] for each in rows]
    pending = [halo.start_forward(each) for each in mine]
    second = pending[1].wait()
    first = pending[0].wait()
    assert pending[0].wait() is first
    return part.src_ids[part.num_nodes :], [first, second]


@pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)
def test_two_in_flight(make_graph: MakeGraph, owner: Tensor) -> None:
    rows = [values(torch.float32, (3,)), values(torch.float64, (2,), seed=1)]
    for ids, got in run_in_threads(3, two_at_once, make_graph(NODES), owner, rows):
        assert torch.equal(got[0], rows[0][ids])
        assert torch.equal(got[1], rows[1][ids])


def test_a_part_that_reads_from_nobody_still_gives() -> None:
    graph, rows = one_way(20), values(torch.float32, (2,))
    owner = (torch.arange(NODES) // 20).int()
    found = run_in_threads(3, bring, graph, owner, rows)
    assert [lent for _, _, lent, _ in found] == [[0, 20, 0], [0, 0, 20], [0, 0, 0]]
    assert [ids.tolist() for ids, _, _, _ in found] == [[], list(range(20)), list(range(20, 40))]
    for ids, got, _, _ in found:
        assert torch.equal(got, rows[ids])


def test_over_gloo(make_graph: MakeGraph, ranks: Run) -> None:
    graph, owner = make_graph(NODES), OWNERS["last empty"]
    rows = [values(torch.float32, (3,)), values(torch.bfloat16, (2, 2), seed=1)]
    for ids, got in ranks(3, two_at_once, graph, owner, rows):
        assert torch.equal(got[0], rows[0][ids])
        assert torch.equal(got[1], rows[1][ids])
    expected = values(torch.float64, (3,), seed=9)
    found = ranks(3, add_back, graph, owner, torch.float64, (3,))
    for _, _, ids, given in found:
        expected[ids] = expected[ids] + given
    for ids, own, _, _ in found:
        assert torch.equal(own, expected[ids])
