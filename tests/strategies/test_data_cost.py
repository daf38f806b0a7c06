"""What data-parallel training sends: accounted to the byte from blocks drawn elsewhere, estimated within a tenth before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.exchange import GradientSum, PartLoader, RowFetch, RowFormat, Seeds, bucket_sizes
from polyhop.exchange.striped import StripedFetch, Stripes
from polyhop.graph import Graph, SharedGraph, SparseFeatures
from polyhop.nn import GraphSAGE
from polyhop.partition import Partition, cut, partition, share
from polyhop.sample import MiniBatch, NeighborLoader, NeighbourSampler, full_block
from polyhop.sample.inclusion import inclusion
from polyhop.sample.part import PartSampler
from polyhop.sample.wire import Wire
from polyhop.strategies import part_step
from polyhop.strategies.data_cost import Facts, account, account_gradients, estimate

MakeGraph = Callable[..., Graph]
SEED, BATCH = 5, 24


def load_epoch(
    line: Collective, graph: Graph, owner: Tensor, fan_outs: list[int], options: dict[str, Any]
) -> Any:
    """The traffic of every step of an epoch, and what the cache holds."""
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    part = held.part
    assert part.split is not None
    wire = Wire(graph.num_nodes, part.edge_weight is not None, options.get("plain", False))
    sampler = PartSampler(part, fan_outs, wire, seed=SEED)
    train = part.split.train
    seeds = Seeds(part.user_ids[train], train + part.start, line, seed=SEED, batch_size=BATCH)
    fetch = RowFetch(part, layout_of(held, options), wire)
    hot: Any = torch.empty(0, dtype=torch.int64)
    if options.get("cache_ranks") and line.num_ranks > 1:
        fetch, size = (
            StripedFetch(part, layout_of(held, options), wire),
            options["cache_ranks"](line.num_ranks),
        )
        likely = part_step.part_inclusion(held, train, seeds, fan_outs, line)
        most = options["cache"] // fetch.kept_bytes(size)
        hot = part_step.stripes_of(likely, part.start, most, size, line)
        fetch.stripe(line, hot)
        assert 0 < fetch.num_cached <= most
        assert fetch.cached_bytes <= options["cache"]
    elif options.get("cache"):
        likely = part_step.part_inclusion(held, train, seeds, fan_outs, line)
        hot = part_step.hot_rows(likely, held, options["cache"], line)
        fetch.keep(line, hot)
    costs = []
    before = line.traffic.now()
    for _ in PartLoader(line, sampler, fetch, seeds, prefetch=0).batches(2):
        after = line.traffic.now()
        costs.append(after - before)
        before = after
    return costs, hot


def layout_of(held: SharedGraph, options: dict[str, Any]) -> RowFormat:
    plain = options.get("plain", False)
    dtype = options.get("dtype", "float32" if plain else "auto")
    return RowFormat.of(held.part, held.num_nodes, dtype, is_plain=plain)


def batches_of(
    graph: Graph, owner: Tensor, num_ranks: int, fan_outs: list[int], step: int
) -> list[MiniBatch]:
    """Every rank's mini-batch of a step, drawn by one process from the whole graph."""
    assert graph.split is not None
    loader = NeighborLoader(graph, fan_outs, graph.split.train, BATCH, seed=SEED)
    seeds = loader.order(2)[step * BATCH : (step + 1) * BATCH]
    sampler = NeighbourSampler(graph, fan_outs, seed=SEED)
    return [sampler.sample(seeds[owner[seeds] == rank], 2, step) for rank in range(num_ranks)]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "compact": ({}, {}),
    "weighted": ({"weighted": True}, {}),
    "sparse": ({"sparse": True}, {}),
    "bfloat16": ({}, {"dtype": "bfloat16"}),
    "int8": ({}, {"dtype": "int8"}),
    "plain": ({}, {"plain": True}),
    "cached": ({}, {"cache": 2000}),
    "striped": ({}, {"cache": 3000, "cache_ranks": lambda ranks: ranks}),
    "striped in pairs": (
        {"weighted": True},
        {"cache": 3000, "cache_ranks": lambda ranks: 2, "dtype": "int8"},
    ),
}


@pytest.mark.parametrize(("made", "options"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_account_equals_the_counters(
    make_graph: MakeGraph, made: dict[str, Any], options: dict[str, Any], num_ranks: int
) -> None:
    graph = make_graph(**made)
    fan_outs = [4, -1, 3]
    shared = partition(graph, num_ranks, "hash")
    found = run_in_threads(num_ranks, load_epoch, graph, shared.owner, fan_outs, options)
    layout = layout_of(share(graph, shared, 0), options)
    wire = Wire(graph.num_nodes, graph.edge_weight is not None, options.get("plain", False))
    lengths = graph.x.rows.indptr.diff() if isinstance(graph.x, SparseFeatures) else None
    for step in range(len(found[0][0])):
        batches = batches_of(graph, shared.owner, num_ranks, fan_outs, step)
        for rank, (costs, _) in enumerate(found):
            expected = account(
                batches, shared.new_ids, shared.bounds, wire, layout, fan_outs, rank,
                **{"stripes" if isinstance(found[0][1], Stripes) else "cached": [hot for _, hot in found]},
                row_lengths=lengths,
            )  # fmt: skip
            assert dict(costs[step].bytes) == dict(expected.bytes), (step, rank)
            assert dict(costs[step].messages) == dict(expected.messages), (step, rank)
    if num_ranks > 1 and "cache_ranks" not in options:
        assert all(cost.bytes["features"] > 0 for costs, _ in found for cost in costs)


def sum_once(line: Collective, width: int, bucket_bytes: int) -> Cost:
    model = GraphSAGE(width, 8, num_layers=2, out_channels=3)
    parameters = list(model.parameters())
    added = GradientSum(parameters, line, bucket_bytes=bucket_bytes)
    before = line.traffic.now()
    added.begin()
    if line.rank != 1:  # a rank without seeds sends zeros
        sum(parameter.sum() for parameter in parameters).backward()  # type: ignore[union-attr]
    added.end(torch.tensor(1.0))
    for parameter in parameters:
        assert parameter.grad is not None
        assert float(parameter.grad.min()) == float(parameter.grad.max()) == max(1, line.num_ranks - 1)
    return line.traffic.now() - before


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [9, 2000])  # slices for the larger, where there are more than two ranks
@pytest.mark.parametrize("bucket_bytes", [1, 1000, 1 << 22])
def test_gradients_are_accounted_for(num_ranks: int, bucket_bytes: int, width: int) -> None:
    sizes = bucket_sizes(list(GraphSAGE(width, 8, num_layers=2, out_channels=3).parameters()), bucket_bytes)
    for rank, cost in enumerate(run_in_threads(num_ranks, sum_once, width, bucket_bytes)):
        expected = account_gradients(sizes, 4, num_ranks, rank)
        assert dict(cost.bytes) == dict(expected.bytes)
        assert dict(cost.messages) == dict(expected.messages)


def _facts(
    graph: Graph,
    shared: Partition,
    fan_outs: list[int],
    cached: list[Tensor] | None,
    *,
    is_symmetric: bool,
    served: list[Tensor] | None = None,
) -> Facts:
    assert graph.split is not None
    train = graph.split.train
    start = torch.zeros(graph.num_nodes, shared.num_parts, dtype=torch.float64)
    start[train, shared.owner[train].long()] = BATCH / train.numel()
    hops = inclusion(full_block(graph), start, fan_outs, is_symmetric=is_symmetric)
    held = share(graph, shared, 0)
    return Facts(
        shared.owner.long(),
        [[hop[:, rank] for hop in hops] for rank in range(shared.num_parts)],
        graph.in_degree,
        fan_outs,
        Wire(graph.num_nodes),
        layout_of(held, {}),
        bucket_sizes(list(GraphSAGE(8, 8, num_layers=3, out_channels=3).parameters())),
        cached=cached,
        served=served,
    )


@pytest.mark.parametrize(("cache", "is_striped"), [(0, False), (20_000, False), (40_000, True)])
def test_estimate_is_within_a_tenth(make_graph: MakeGraph, cache: int, is_striped: bool) -> None:
    graph = make_graph(num_nodes=3000, seed=1)
    fan_outs = [5, 4, 3]
    shared = partition(graph, 3, "hash")
    options: dict[str, Any] = {"cache": cache} | ({"cache_ranks": lambda ranks: ranks} if is_striped else {})
    found = run_in_threads(3, load_epoch, graph, shared.owner, fan_outs, options)
    cached = served = None
    if is_striped:
        served = [shared.owner.long().clone() for _ in range(3)]
        for rank, (holder, (_, stripes)) in enumerate(zip(served, found, strict=True)):
            at, rank_of, _ = stripes.find(torch.arange(3000), *shared.bounds[rank : rank + 2])
            holder[shared.user_ids[at]] = rank_of
    elif cache:
        cached = [torch.zeros(graph.num_nodes, dtype=torch.bool) for _ in range(3)]
        for mask, (_, hot) in zip(cached, found, strict=True):
            mask[shared.user_ids[hot]] = True
    facts = _facts(graph, shared, fan_outs, cached, is_symmetric=True, served=served)
    for rank, (costs, _) in enumerate(found):
        full = costs[:-1]  # the last batch is short
        measured = sum((cost for cost in full), Cost()) * (1 / len(full))
        predicted = estimate(facts, rank)
        for kind in ("ids", "features", "sizes"):
            assert predicted.bytes[kind] == pytest.approx(measured.bytes[kind], rel=0.1), (rank, kind)
            assert predicted.messages[kind] == pytest.approx(measured.messages[kind], rel=0.1), (rank, kind)


def test_the_cache_takes_the_likeliest_rows(make_graph: MakeGraph) -> None:
    """A cache of half the rows saves more than half of the bytes, and holds remote rows alone."""
    graph = make_graph(num_nodes=600)
    shared = partition(graph, 2, "hash")
    runs = [
        run_in_threads(2, load_epoch, graph, shared.owner, [3, 2], {"cache": size}) for size in (0, 40 * 150)
    ]
    plain, kept = (sum(cost.bytes["features"] for costs, _ in run for cost in costs) for run in runs)
    assert kept < 0.5 * plain
    for rank, (_, hot) in enumerate(runs[1]):
        assert hot.numel() == 150
        assert not ((hot >= shared.bounds[rank]) & (hot < shared.bounds[rank + 1])).any()


def test_inclusion_of_parts_is_that_of_the_whole(make_graph: MakeGraph) -> None:
    graph = make_graph()
    shared = partition(graph, 3, "hash")
    facts = _facts(graph, shared, [4, -1], None, is_symmetric=True)
    for rank, likely in enumerate(run_in_threads(3, _part_inclusion, graph, shared.owner)):
        nodes = cut(graph, shared, rank).user_ids
        for seen_by in range(3):
            assert torch.allclose(likely[:, seen_by], facts.likely[seen_by][-1][nodes], atol=1e-12)


def _part_inclusion(line: Collective, graph: Graph, owner: Tensor) -> Tensor:
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    part = held.part
    assert part.split is not None
    train = part.split.train
    seeds = Seeds(part.user_ids[train], train + part.start, line, seed=SEED, batch_size=BATCH)
    return part_step.part_inclusion(held, train, seeds, [4, -1], line)


def test_striped_rows_relieve_the_busiest_sender(make_graph: MakeGraph) -> None:
    """Where one rank owns most rows, the others send them too, and none is kept twice."""
    graph = make_graph(num_nodes=600)
    owner = torch.where(torch.arange(600) % 3 == 0, torch.arange(600) % 4, 0).int()
    plain, striped = (
        run_in_threads(4, load_epoch, graph, owner, [3, 2], options)
        for options in ({}, {"cache": 15_000, "cache_ranks": lambda ranks: ranks})
    )
    busiest = [
        max(sum(cost.bytes.get("features", 0) for cost in costs) for costs, _ in run)
        for run in (plain, striped)
    ]
    assert busiest[1] < 0.7 * busiest[0]
    stripes = striped[0][1]
    assert stripes.ids.unique().numel() == stripes.ids.numel() > 400


def test_a_group_keeps_rows_of_others_alone(make_graph: MakeGraph) -> None:
    graph = make_graph(num_nodes=600)
    shared = partition(graph, 4, "hash")
    options = {"cache": 4000, "cache_ranks": lambda ranks: 2}
    for rank, (_, stripes) in enumerate(run_in_threads(4, load_epoch, graph, shared.owner, [3, 2], options)):
        first = rank // 2 * 2
        is_near = (stripes.ids >= shared.bounds[first]) & (stripes.ids < shared.bounds[first + 2])
        assert stripes.ids.numel() > 0
        assert not is_near.any()
