"""What push-pull sends: accounted to the byte from mini-batches drawn elsewhere, estimated within a tenth before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.exchange import RowFormat
from polyhop.exchange.columns import spread_columns
from polyhop.graph import Graph
from polyhop.kernels.keys import Key
from polyhop.nn import GAT, GCN, GIN, GraphSAGE
from polyhop.partition import Partition, partition, share
from polyhop.sample import MiniBatch, NeighborLoader, NeighbourSampler, full_block
from polyhop.sample.inclusion import inclusion
from polyhop.sample.wire import Wire
from polyhop.strategies import Team, place, pushpull
from polyhop.strategies.pushpull_cost import Facts, Shape, account, account_columns, estimate
from polyhop.train.loss import cross_entropy_sum

MakeGraph = Callable[..., Graph]
SEED, BATCH, EPOCH = 5, 24, 2
MODELS: dict[str, Callable[[int, int], torch.nn.Module]] = {
    "sage": lambda f, c: GraphSAGE(f, 16, num_layers=3, out_channels=c),
    "gcn": lambda f, c: GCN(f, 8, num_layers=3, out_channels=c, bias=False),
    "gat": lambda f, c: GAT(f, 8, num_layers=3, out_channels=c, heads=2),
    "gin": lambda f, c: GIN(f, 8, num_layers=3, out_channels=c, train_eps=True),
}


def run_epoch(line: Collective, graph: Graph, owner: Tensor, name: str, fan_outs: list[int]) -> list[Cost]:
    """Traffic of every step of an epoch."""
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    assert held.split is not None
    model = MODELS[name](graph.num_features, graph.num_classes).double()
    config = pushpull.Config(num_neighbors=fan_outs, batch_size=BATCH, seed=SEED, prefetch=0)
    team = Team(line)
    whole = pushpull.hold(held, place("cpu", "64-true"), team, config)
    step: Any = pushpull.build(
        model, held, config, train_ids=held.split.train, whole=whole, loss=cross_entropy_sum, team=team
    )
    found, before = [], line.traffic.now()
    for number, batch in enumerate(step.batches(EPOCH)):
        for parameter in model.parameters():
            parameter.grad = None
        step.gradients(batch, Key(SEED, EPOCH, number))
        after = line.traffic.now()
        found.append(after - before)
        before = after
    return found


def batches_of(graph: Graph, shared: Partition, fan_outs: list[int], step: int) -> list[MiniBatch]:
    """Every rank's mini-batch of a step, drawn by one process from the whole graph."""
    assert graph.split is not None
    order = NeighborLoader(graph, fan_outs, graph.split.train, BATCH, seed=SEED).order(EPOCH)
    seeds = order[step * BATCH : (step + 1) * BATCH]
    sampler = NeighbourSampler(graph, fan_outs, seed=SEED)
    return [sampler.sample(seeds[shared.owner[seeds] == p], EPOCH, step) for p in range(shared.num_parts)]


def shape_of(graph: Graph, name: str, num_ranks: int, fan_outs: list[int]) -> Shape:
    model = MODELS[name](graph.num_features, graph.num_classes).double()
    wire = Wire(graph.num_nodes, graph.edge_weight is not None)
    return Shape.of(model, graph.num_features, num_ranks, wire, fan_outs)


@pytest.mark.parametrize("fan_outs", [[4, -1, 3], [3, 2, -1]])
@pytest.mark.parametrize(("name", "num_features"), [("sage", 10), ("gcn", 3), ("gat", 10), ("gin", 10)])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_account_equals_the_counters(
    make_graph: MakeGraph, name: str, num_features: int, num_ranks: int, fan_outs: list[int]
) -> None:
    graph = make_graph(num_nodes=300, num_features=num_features, weighted=name == "gcn")
    shared = partition(graph, num_ranks, "hash")
    found = run_in_threads(num_ranks, run_epoch, graph, shared.owner, name, fan_outs)
    wire = Wire(graph.num_nodes, graph.edge_weight is not None)
    shape = shape_of(graph, name, num_ranks, fan_outs)
    for step in range(len(found[0])):
        batches = batches_of(graph, shared, fan_outs, step)
        for rank, costs in enumerate(found):
            expected = account(batches, shared.new_ids, shared.bounds, wire, fan_outs, shape, rank)
            assert dict(costs[step].bytes) == dict(expected.bytes), (step, rank)
            assert dict(costs[step].messages) == dict(expected.messages), (step, rank)
            assert "features" not in costs[step].bytes


@pytest.mark.parametrize("name", ["sage", "gat"])
def test_estimate_is_within_a_tenth(make_graph: MakeGraph, name: str) -> None:
    graph, fan_outs = make_graph(num_nodes=3000, seed=1), [5, 4, 3]
    shared = partition(graph, 3, "hash")
    assert graph.split is not None
    train = graph.split.train
    start = torch.zeros(graph.num_nodes, 3, dtype=torch.float64)
    start[train, shared.owner[train].long()] = BATCH / train.numel()
    hops = inclusion(full_block(graph), start, fan_outs, is_symmetric=True)
    layout = RowFormat.of(share(graph, shared, 0).part, graph.num_nodes, "auto")
    likely = [[hop[:, rank] for hop in hops] for rank in range(3)]
    wire = Wire(graph.num_nodes)
    facts = Facts(shared.owner.long(), likely, graph.in_degree, fan_outs, wire, layout, [])
    shape = shape_of(graph, name, 3, fan_outs)
    found = run_in_threads(3, run_epoch, graph, shared.owner, name, fan_outs)
    for rank, costs in enumerate(found):
        full = costs[:-1]  # the last batch is short
        measured = sum(full, Cost()) * (1 / len(full))
        predicted = estimate(facts, shape, rank)
        for kind in ("ids", "hidden", "gradients", "sizes"):
            assert predicted.bytes[kind] == pytest.approx(measured.bytes[kind], rel=0.1), (rank, kind)
            assert predicted.messages[kind] == pytest.approx(measured.messages[kind], rel=0.1), (rank, kind)


def spread(line: Collective, graph: Graph, owner: Tensor, memory_bytes: int) -> Cost:
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    before = line.traffic.now()
    spread_columns(held.part, graph.num_nodes, line, memory_bytes=memory_bytes)
    return line.traffic.now() - before


@pytest.mark.parametrize("memory_bytes", [1, 5000, 1 << 20])
@pytest.mark.parametrize("num_features", [3, 10])
def test_what_is_sent_once_is_accounted_for(
    make_graph: MakeGraph, num_features: int, memory_bytes: int
) -> None:
    graph = make_graph(num_features=num_features, weighted=True)
    owner = (torch.arange(graph.num_nodes) % 3).int()  # the fourth rank has no nodes
    shared = Partition(owner, 4)
    layout = RowFormat.of(share(graph, shared, 0).part, graph.num_nodes, "auto")
    columns = [rank * num_features // 4 for rank in range(5)]
    for rank, cost in enumerate(run_in_threads(4, spread, graph, owner, memory_bytes)):
        expected = account_columns(layout, torch.float32, columns, shared.bounds, rank, memory_bytes)
        assert dict(cost.bytes) == dict(expected.bytes), rank
        assert dict(cost.messages) == dict(expected.messages), rank
