"""A mini-batch over all ranks: frontiers are those of one process and share no node; rows that cross are counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.comm import Collective, run_in_threads
from polyhop.errors import PeerError
from polyhop.exchange import Crossing, RowFetch, RowFormat, Seeds
from polyhop.exchange.crossing import Messages
from polyhop.exchange.hot import HotRows
from polyhop.exchange.split import SharedBatch, SharedLoader, SharedSampler
from polyhop.graph import Graph
from polyhop.kernels.keys import Key
from polyhop.partition import Partition, partition, share
from polyhop.sample import MiniBatch, NeighborLoader, NeighbourSampler
from polyhop.sample.wire import Wire

MakeGraph = Callable[..., Graph]
SEED, BATCH, EPOCH = 5, 24, 2
FAN_OUTS = [4, -1, 3]


def load_epoch(line: Collective, graph: Graph, owner: Tensor, method: str) -> list[SharedBatch]:
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    part = held.stored("a test")
    assert part.split is not None
    wire, train = Wire(graph.num_nodes), part.split.train
    seeds = Seeds(part.user_ids[train], train + part.start, line, seed=SEED, batch_size=BATCH)
    fetch = RowFetch(part, RowFormat.of(part, graph.num_nodes, "auto"), wire)
    sampler = SharedSampler(part, FAN_OUTS, wire, seed=SEED, method=method)
    return list(SharedLoader(line, sampler, fetch, seeds, prefetch=0).batches(EPOCH))


def whole_batch(graph: Graph, step: int, method: str) -> MiniBatch:
    """The mini-batch of a step, drawn by one process."""
    assert graph.split is not None
    order = NeighborLoader(graph, FAN_OUTS, graph.split.train, BATCH, seed=SEED).order(EPOCH)
    sampler = NeighbourSampler(graph, FAN_OUTS, seed=SEED, method=method)
    return sampler.sample(order[step * BATCH : (step + 1) * BATCH], EPOCH, step)


def edges_of(block: Any) -> set[tuple[int, int]]:
    """(source, destination) by the user's ids."""
    at = torch.repeat_interleave(torch.arange(block.num_dst), block.drawn)
    ids = block.src_ids
    return set(zip(ids[block.indices.long()].tolist(), ids[at].tolist(), strict=True))


@pytest.mark.parametrize("method", ["uniform", "labor"])
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_every_node_and_edge_is_at_one_rank(make_graph: MakeGraph, num_ranks: int, method: str) -> None:
    graph = make_graph(num_nodes=300)
    shared = partition(graph, num_ranks, "hash")
    found = run_in_threads(num_ranks, load_epoch, graph, shared.owner, method)
    for step, batches in enumerate(zip(*found, strict=True)):
        expected = whole_batch(graph, step, method)
        for at, block in enumerate(expected.blocks):
            own = [
                batch.layers[at].block.src_ids[: batch.layers[at].lists.num_own].tolist() for batch in batches
            ]
            assert sorted(chain(*own)) == sorted(block.src_ids.tolist())  # each once: none is at two ranks
            for rank, ids in enumerate(own):
                assert bool((shared.owner[torch.tensor(ids, dtype=torch.int64)] == rank).all())
            edges = [edges_of(batch.layers[at].block) for batch in batches]
            assert sum(map(len, edges)) == block.num_edges
            assert set().union(*edges) == edges_of(block)
        assert sum(batch.drawn.inputs.numel() for batch in batches) == expected.input_ids.numel()


def test_what_is_lent_is_what_is_wanted(make_graph: MakeGraph) -> None:
    graph = make_graph(num_nodes=300)
    shared = partition(graph, 4, "hash")
    found = run_in_threads(4, load_epoch, graph, shared.owner, "uniform")
    for batches in zip(*found, strict=True):
        for at in range(len(FAN_OUTS)):
            for reader, batch in enumerate(batches):
                layer = batch.layers[at]
                halo = layer.block.src_ids[layer.lists.num_own :].split(layer.lists.wanted)
                for lender, ids in enumerate(halo):
                    theirs = batches[lender].layers[at]
                    lent = theirs.block.src_ids[theirs.lists.lent[reader]]
                    assert lent.tolist() == ids.tolist()
                assert layer.lists.wanted[reader] == 0
                assert layer.lists.lent[reader].numel() == 0


@dataclass
class Loaded:
    """Of an epoch on one rank, with so many bytes for own rows."""

    kept: Tensor  # int64: own rows that stay
    num_bytes: int
    num_loaded: int
    num_hot: int
    inputs: list[Tensor]  # of every step
    x: list[Tensor]
    sent: dict[str, int]


def load_with(line: Collective, graph: Graph, owner: Tensor, budget: int | None, brings: bool) -> Loaded:
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    part = held.stored("a test")
    assert part.split is not None
    wire, train = Wire(graph.num_nodes), part.split.train
    seeds = Seeds(part.user_ids[train], train + part.start, line, seed=SEED, batch_size=BATCH)
    fetch = RowFetch(part, RowFormat.of(part, graph.num_nodes, "auto"), wire)
    hot = None
    if budget is not None:
        likely = torch.arange(part.num_nodes).remainder(7).double()  # some are never read
        hot = HotRows.of(likely, graph.num_features, budget, fetch.own, torch.device("cpu"), torch.float32)
    before = line.traffic.now()
    loader = SharedLoader(
        line, SharedSampler(part, FAN_OUTS, wire, seed=SEED), fetch, seeds, prefetch=0, hot=hot,
        brings=torch.float32 if brings else None,
    )  # fmt: skip
    batches = list(loader.batches(EPOCH))
    x = [batch.x for batch in batches if isinstance(batch.x, Tensor)]
    kept = torch.empty(0, dtype=torch.int64) if hot is None else (hot.place >= 0).nonzero()[:, 0]
    sent = (line.traffic.now() - before).bytes
    return Loaded(
        kept, hot.num_bytes if hot else 0, loader.num_loaded, loader.num_hot,
        [batch.drawn.inputs for batch in batches], x, sent,
    )  # fmt: skip


@pytest.mark.parametrize("brings", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 9, 10**6])
def test_hot_rows_are_own_rows_within_their_budget(make_graph: MakeGraph, rows: int, brings: bool) -> None:
    graph = make_graph(num_nodes=300)
    shared = partition(graph, 3, "hash")
    budget = rows * 4 * graph.num_features + 3
    without = run_in_threads(3, load_with, graph, shared.owner, None, brings)
    found = run_in_threads(3, load_with, graph, shared.owner, budget, brings)
    for one, other in zip(found, without, strict=True):
        assert one.num_bytes <= budget
        here = [torch.isin(inputs, one.kept) for inputs in one.inputs]
        assert one.num_hot == sum(int(each.sum()) for each in here)
        assert one.num_loaded == other.num_loaded == sum(inputs.numel() for inputs in one.inputs)
        assert one.sent == other.sent
        for a, b in zip(one.x, other.x, strict=True):
            assert torch.equal(a, b)
    assert (sum(one.num_hot for one in found) > 0) == (rows > 0)
    assert all(one.num_hot < one.num_loaded for one in found)  # what is never likely is not kept


def cross(line: Collective, graph: Graph, owner: Tensor) -> tuple[float, float]:
    """<shuffle(a), b> and <a, its transpose(b)>, this rank's terms, in every layer of a step."""
    batch = load_epoch(line, graph, owner, "uniform")[1]
    forward = backward = 0.0
    for layer in batch.layers:
        made = torch.Generator().manual_seed(line.rank)
        channel = Crossing(Messages(layer.lists), line)
        channel.begin_step(Key(0))
        a = torch.randn(layer.lists.num_own, 3, dtype=torch.float64, generator=made, requires_grad=True)
        b = torch.randn(layer.lists.num_halo, 3, dtype=torch.float64, generator=made)
        whole, _, arrive = channel.leave(a, 0)
        halo = arrive()
        (found,) = torch.autograd.grad((halo * b).sum() + 0 * whole.sum(), a)
        forward += float((halo * b).detach().sum())
        backward += float((a.detach() * found).sum())
    return forward, backward


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_shuffle_has_its_transpose(make_graph: MakeGraph, num_ranks: int) -> None:
    graph = make_graph(num_nodes=300)
    found = run_in_threads(num_ranks, cross, graph, partition(graph, num_ranks, "hash").owner)
    one, other = (sum(each) for each in zip(*found, strict=True))
    assert abs(one) > 1
    assert one == pytest.approx(other, abs=1e-12 * max(1.0, abs(one)) * 100)


def ask_wrongly(line: Collective, graph: Graph, owner: Tensor) -> None:
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    part = held.stored("a test")
    sampler = SharedSampler(part, [2], Wire(graph.num_nodes), seed=SEED)
    if line.rank == 1:  # of another graph, or of other parts
        line.all_to_all(
            [Wire(graph.num_nodes).request(torch.tensor([10**6])), torch.empty(0, dtype=torch.uint8)],
            kind="ids",
        )
        return
    sampler.sample(line, torch.arange(2), 0, 0)


def test_rows_that_are_not_there_are_refused(make_graph: MakeGraph) -> None:
    graph = make_graph()
    with pytest.raises(PeerError, match="rank 1 asked for rows 1000000"):
        run_in_threads(2, ask_wrongly, graph, partition(graph, 2, "hash").owner)
