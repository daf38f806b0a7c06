"""What split mini-batches send: accounted to the byte from whole mini-batches, estimated within a tenth before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.exchange import bucket_sizes
from polyhop.exchange.wanted import Price
from polyhop.graph import Graph
from polyhop.kernels.keys import Key
from polyhop.nn import GAT, GCN, GraphSAGE
from polyhop.partition import Partition, partition, share
from polyhop.sample import MiniBatch, NeighborLoader, NeighbourSampler, full_block
from polyhop.sample.inclusion import inclusion
from polyhop.sample.presample import Trial
from polyhop.sample.wire import Wire
from polyhop.strategies import Team, place, split
from polyhop.strategies.split_cost import Facts, account, asked, estimate, shares
from polyhop.train.loss import cross_entropy_sum

MakeGraph = Callable[..., Graph]
SEED, BATCH, EPOCH = 5, 24, 2
FAN_OUTS = [4, -1, 3]
MODELS: dict[str, Callable[[Graph], torch.nn.Module]] = {
    "sage": lambda graph: GraphSAGE(graph.num_features, 16, num_layers=3, out_channels=graph.num_classes),
    "narrow": lambda graph: GCN(graph.num_features, 2, num_layers=3, out_channels=graph.num_classes),
    "gat": lambda graph: GAT(graph.num_features, 8, num_layers=3, out_channels=graph.num_classes, heads=2),
}


def run_epoch(
    line: Collective, graph: Graph, owner: Tensor, name: str, bits: int, sums: bool = False
) -> tuple[list[Cost], list[int], int]:
    """(traffic of every step, columns that cross at each layer, feature rows loaded)."""
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    assert held.split is not None
    torch.manual_seed(0)
    model = MODELS[name](held).double()
    config = split.Config(
        num_neighbors=FAN_OUTS, batch_size=BATCH, seed=SEED, bits=bits, prefetch=0, split_sums=sums
    )
    team = Team(line)
    whole = split.hold(held, place("cpu", "64-true"), team, config)
    step: Any = split.build(
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
    return found, step.columns, step.loader.num_loaded


def whole_batch(graph: Graph, step: int) -> MiniBatch:
    assert graph.split is not None
    order = NeighborLoader(graph, FAN_OUTS, graph.split.train, BATCH, seed=SEED).order(EPOCH)
    return NeighbourSampler(graph, FAN_OUTS, seed=SEED).sample(
        order[step * BATCH : (step + 1) * BATCH], EPOCH, step
    )


def returns_of(graph: Graph, columns: list[int]) -> list[bool]:
    """Unmapped input rows, as wide as the inputs, send nothing back."""
    return [columns[0] != graph.num_features, *[True] * (len(columns) - 1)]


@pytest.mark.parametrize(("name", "bits"), [("sage", 32), ("narrow", 32), ("gat", 32), ("sage", 4)])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_account_equals_the_counters(make_graph: MakeGraph, name: str, bits: int, num_ranks: int) -> None:
    graph = make_graph(num_nodes=300)
    shared = partition(graph, num_ranks, "hash")
    found = run_in_threads(num_ranks, run_epoch, graph, shared.owner, name, bits)
    sizes = bucket_sizes(list(MODELS[name](graph).double().parameters()))
    columns = found[0][1]
    loaded = 0
    for step in range(len(found[0][0])):
        batch = whole_batch(graph, step)
        loaded += batch.input_ids.numel()
        crossing = asked(batch, shared.new_ids, shared.bounds)
        for rank, (costs, _, _) in enumerate(found):
            expected = account(
                crossing, columns, Wire(graph.num_nodes), sizes, rank, num_ranks,
                returns=returns_of(graph, columns), value_bytes=8, bits=bits,
            )  # fmt: skip
            assert dict(costs[step].bytes) == dict(expected.bytes), (step, rank)
            assert dict(costs[step].messages) == dict(expected.messages), (step, rank)
    assert sum(each[2] for each in found) == loaded  # every input row once, by its owner
    assert num_ranks == 1 or all(cost.bytes["hidden"] > 0 for costs, _, _ in found for cost in costs)


@pytest.mark.parametrize(
    ("name", "bits", "weighted"),
    [("sage", 32, False), ("narrow", 32, True), ("narrow", 8, True), ("gat", 32, False), ("sage", 4, False)],
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_account_of_sums_equals_the_counters(
    make_graph: MakeGraph, name: str, bits: int, weighted: bool, num_ranks: int
) -> None:
    graph = make_graph(num_nodes=300, weighted=weighted)
    shared = partition(graph, num_ranks, "hash")
    found = run_in_threads(num_ranks, run_epoch, graph, shared.owner, name, bits, True)
    plain = run_in_threads(num_ranks, run_epoch, graph, shared.owner, name, bits, False)
    sizes = bucket_sizes(list(MODELS[name](graph).double().parameters()))
    columns, wire = found[0][1], Wire(graph.num_nodes, weighted)
    assert columns == plain[0][1]
    returns = returns_of(graph, columns)
    prices = [
        None if name == "gat" else Price(width, 8, bits, back, 4 if weighted else 0)
        for width, back in zip(columns, returns, strict=True)
    ]
    for step in range(len(found[0][0])):
        crossing = asked(whole_batch(graph, step), shared.new_ids, shared.bounds, prices, wire)
        for rank, (costs, _, _) in enumerate(found):
            expected = account(
                crossing, columns, wire, sizes, rank, num_ranks, returns=returns, value_bytes=8, bits=bits
            )
            assert dict(costs[step].bytes) == dict(expected.bytes), (step, rank)
            assert dict(costs[step].messages) == dict(expected.messages), (step, rank)
        both = [sum(sum(each[0][step].bytes.values()) for each in side) for side in (found, plain)]
        assert both[0] <= both[1]
        assert (both[0] < both[1]) == any(each.num_entries for each in crossing)
    sent = [sum(cost.bytes["hidden"] for each in side for cost in each[0]) for side in (found, plain)]
    assert sent[0] == sent[1] if name == "gat" else sent[0] < 0.95 * sent[1]


def test_layers_that_narrow_send_mapped_rows(make_graph: MakeGraph) -> None:
    graph = make_graph(num_nodes=300)
    owner = partition(graph, 2, "hash").owner
    assert run_in_threads(2, run_epoch, graph, owner, "narrow", 32)[0][1] == [2, 2, 2]
    assert run_in_threads(2, run_epoch, graph, owner, "sage", 32)[0][1] == [graph.num_features, 16, 3]


def _as_blocks(trial: Trial, step: int) -> MiniBatch:
    """A mini-batch that training does not see."""
    sampler = NeighbourSampler(trial.graph, trial.num_neighbors, seed=trial.key_seed)
    return sampler.sample(trial.seeds(0)[step], 0, step)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("kind", ["hash", "metis"])
def test_estimate_is_within_a_tenth(make_graph: MakeGraph, kind: str, sums: bool) -> None:
    if kind == "metis":
        pytest.importorskip("pymetis")
    graph, num_ranks = make_graph(num_nodes=1500), 3
    assert graph.split is not None
    shared = partition(graph, num_ranks, kind)
    found = run_in_threads(num_ranks, run_epoch, graph, shared.owner, "sage", 32, sums)
    start = torch.zeros(graph.num_nodes, 1, dtype=torch.float64)
    start[graph.split.train] = BATCH / graph.split.train.numel()
    likely = [each[:, 0] for each in inclusion(full_block(graph), start, FAN_OUTS)]
    columns, wire = found[0][1], Wire(graph.num_nodes)
    returns = returns_of(graph, columns)
    seen = None
    if sums:
        prices = [Price(width, 8, returns=back) for width, back in zip(columns, returns, strict=True)]
        trial = Trial(graph, FAN_OUTS, BATCH, seed=SEED, site=1)
        batches = [_as_blocks(trial, step) for step in range(2)]
        lists = [each for one in batches for each in asked(one, shared.new_ids, shared.bounds, prices, wire)]
        seen = shares(lists, len(FAN_OUTS), num_ranks, wire)
    facts = Facts(
        graph.indptr, graph.indices, shared.owner.long(), likely[:-1], FAN_OUTS, columns, returns, wire,
        bucket_sizes(list(MODELS["sage"](graph).parameters())), num_ranks, value_bytes=8, shares=seen,
    )  # fmt: skip
    for rank, (costs, _, _) in enumerate(found):
        expected = estimate(facts, rank)
        for each in ("ids", "hidden"):
            mean = sum(cost.bytes[each] for cost in costs[:-1]) / len(costs[:-1])  # the last batch is smaller
            assert expected.bytes[each] == pytest.approx(mean, rel=0.1), (rank, each)
