"""What a step asks of every rank, in all strategies over parts: bytes, messages, rounds and rows as they are counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.exchange import RowFormat
from polyhop.graph import Graph
from polyhop.kernels.keys import Key
from polyhop.nn import GAT, GCN, GCNII, GIN, GraphSAGE
from polyhop.partition import Partition, partition, share
from polyhop.sample import MiniBatch, NeighborLoader, NeighbourSampler
from polyhop.sample.wire import Wire
from polyhop.strategies import Team, find, place
from polyhop.strategies.flows import Flows, counted, gather_flows
from polyhop.strategies.shape import Shape
from polyhop.strategies.work import Variant, work_of
from polyhop.train.loss import cross_entropy_sum

MakeGraph = Callable[..., Graph]
SEED, BATCH, EPOCH = 5, 24, 2
FAN_OUTS = [4, -1, 3]
NUM_STEPS = 7  # of an epoch of the small graph
CACHE = 2000
MODELS: dict[str, Callable[[int, int], torch.nn.Module]] = {
    "sage": lambda f, c: GraphSAGE(f, 16, num_layers=3, out_channels=c),
    "narrow": lambda f, c: GCN(f, 2, num_layers=3, out_channels=c),
    "gat": lambda f, c: GAT(f, 8, num_layers=3, out_channels=c, heads=2),
    "gin": lambda f, c: GIN(f, 6, num_layers=3, out_channels=c, jk="cat"),
    "gcnii": lambda f, c: GCNII(f, 8, num_layers=3, out_channels=c),
}
VARIANTS = [
    Variant("data"),
    Variant("data", has_cache=True),
    Variant("split", 3),
    Variant("split", 2),
    Variant("split", 1),
    Variant("split", 3, has_cache=True),
    Variant("split", 1, has_cache=True),
    Variant("split", 2, bits=4),
    Variant("pushpull"),
]


@dataclass
class Ran:
    costs: list[Cost]  # of every step
    held: Tensor  # new ids of rows of others that this rank keeps or has copies of
    loaded: int | None


def run_steps(
    line: Collective, graph: Graph, owner: Tensor, name: str, variant: Variant, num_steps: int = 2
) -> Ran:
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    assert held.split is not None
    model = MODELS[name](graph.num_features, graph.num_classes).double()
    strategy, team = find(variant.strategy), Team(line)
    options = variant.options(CACHE)
    if variant.strategy == "split":
        options["split_sums"] = False  # rows are what is counted
    config = strategy.Config(num_neighbors=FAN_OUTS, batch_size=BATCH, seed=SEED, prefetch=0, **options)
    whole = strategy.hold(held, place("cpu", "64-true"), team, config)
    step: Any = strategy.build(
        model, held, config, train_ids=held.split.train, whole=whole, loss=cross_entropy_sum, team=team
    )
    found, before = [], line.traffic.now()
    batches = step.batches(EPOCH, step.num_steps - num_steps)  # the last is smaller
    for number, batch in enumerate(batches, step.num_steps - num_steps):
        model.zero_grad(set_to_none=True)
        step.gradients(batch, Key(SEED, EPOCH, number))
        after = line.traffic.now()
        found.append(after - before)
        before = after
    kept = torch.empty(0, dtype=torch.int64)
    if variant.has_cache and variant.strategy == "split":
        kept = held.part.halo[step.loader._copies.rows - held.part.num_nodes]
    elif variant.has_cache and line.num_ranks > 1:
        kept = step._loader.fetch._cache.ids
    loaded = step.loader.num_loaded if variant.strategy == "split" else None
    return Ran(found, kept, loaded)


def batches_of(graph: Graph, shared: Partition, step: int) -> tuple[MiniBatch, list[MiniBatch]]:
    """The mini-batch of a step, whole and of every rank's seeds, drawn by one process."""
    assert graph.split is not None
    order = NeighborLoader(graph, FAN_OUTS, graph.split.train, BATCH, seed=SEED).order(EPOCH)
    seeds, sampler = order[step * BATCH : (step + 1) * BATCH], NeighbourSampler(graph, FAN_OUTS, seed=SEED)
    own = [sampler.sample(seeds[shared.owner[seeds] == p], EPOCH, step) for p in range(shared.num_parts)]
    return sampler.sample(seeds, EPOCH, step), own


def shape_of(graph: Graph, shared: Partition, name: str) -> Shape:
    model = MODELS[name](graph.num_features, graph.num_classes).double()
    return Shape.of(model, share(graph, shared, 0).part, graph.num_nodes, FAN_OUTS, shared.num_parts)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(
    ("name", "num_ranks"), [("sage", 2), ("narrow", 1), ("narrow", 3), ("gat", 3), ("gin", 4), ("gcnii", 2)]
)
def test_accounted_as_the_counters_have_it(
    make_graph: MakeGraph, name: str, num_ranks: int, variant: Variant
) -> None:
    graph = make_graph(num_nodes=300, weighted=name == "narrow")
    shared = partition(graph, num_ranks, "hash")
    shape = shape_of(graph, shared, name)
    if variant.strategy == "pushpull" and shape.push is None:
        pytest.skip("maps its inputs before the first layer")
    found = run_in_threads(num_ranks, run_steps, graph, shared.owner, name, variant)
    held = [each.held for each in found]
    wire, loaded = Wire(graph.num_nodes, graph.edge_weight is not None), [0.0] * num_ranks
    steps = range(NUM_STEPS - len(found[0].costs), NUM_STEPS)
    for at, step in enumerate(steps):
        whole, own = batches_of(graph, shared, step)
        flows = counted(whole, own, shared.new_ids, shared.bounds, wire, kept=held, copies=held)
        for rank, each in enumerate(found):
            work, cost = work_of(flows, shape, variant, rank), each.costs[at]
            assert dict(work.cost.bytes) == dict(cost.bytes), (step, rank)
            assert dict(work.cost.messages) == dict(cost.messages), (step, rank)
            assert work.cost.rounds == cost.rounds, (step, rank)
            assert sum(work.ahead_to) == work.ahead.total_bytes
            assert sum(work.train_to) == pytest.approx(work.train.total_bytes)
            assert sum(work.shuffled_bytes) == cost.bytes.get("hidden", 0)
            loaded[rank] += work.loaded
    if variant.strategy == "split":
        assert loaded == [each.loaded for each in found]


def expect(line: Collective, graph: Graph, owner: Tensor) -> Flows:
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    assert held.split is not None
    assert graph.split is not None
    chance = BATCH / graph.split.train.numel()
    return gather_flows(held, held.split.train, chance, FAN_OUTS, line, cache_bytes=CACHE)


@pytest.mark.parametrize("kind", ["hash", "metis"])
def test_estimated_within_a_tenth(make_graph: MakeGraph, kind: str) -> None:
    if kind == "metis":
        pytest.importorskip("pymetis")
    graph, num_ranks = make_graph(num_nodes=1500), 3
    assert graph.split is not None
    shared = partition(graph, num_ranks, kind)
    expected = run_in_threads(num_ranks, expect, graph, shared.owner)
    for other in expected[1:]:
        assert torch.equal(other.shared, expected[0].shared)
        assert all(torch.equal(a.ids, b.ids) for a, b in zip(other.own, expected[0].own, strict=True))
    shape = shape_of(graph, shared, "sage")
    steps = len(NeighborLoader(graph, FAN_OUTS, graph.split.train, BATCH)) - 1  # the last is smaller
    whole_and_own = [batches_of(graph, shared, step) for step in range(steps)]
    held = {}
    for strategy in ("data", "split"):
        variant = Variant(strategy, 3, has_cache=True)
        found = run_in_threads(num_ranks, run_steps, graph, shared.owner, "sage", variant, 0)
        held[strategy] = [each.held for each in found]
    flows = [
        counted(
            *each,
            shared.new_ids,
            shared.bounds,
            Wire(graph.num_nodes),
            kept=held["data"],
            copies=held["split"],
        )
        for each in whole_and_own
    ]
    for variant in VARIANTS:
        for rank in range(num_ranks):
            works = [work_of(each, shape, variant, rank) for each in flows]
            foreseen = work_of(expected[0], shape, variant, rank)
            for name in ("loaded", "edges", "nodes", "drawn", "loaded_bytes"):
                mean = sum(getattr(work, name) for work in works) / steps
                assert getattr(foreseen, name) == pytest.approx(mean, rel=0.1), (str(variant), rank, name)
            for name in ("values", "flops", "rows", "calls"):
                mean = sum(getattr(work.counts, name) for work in works) / steps
                found = getattr(foreseen.counts, name)
                assert found == pytest.approx(mean, rel=0.1), (str(variant), rank, name)
            for name in ("ids", "hidden", "features"):
                mean = sum(work.cost.bytes.get(name, 0) for work in works) / steps
                assert foreseen.cost.bytes.get(name, 0) == pytest.approx(mean, rel=0.1), (
                    str(variant),
                    rank,
                    name,
                )
            for layer, rows in enumerate(foreseen.shuffled):
                mean = sum(work.shuffled[layer] for work in works) / steps
                assert rows == pytest.approx(mean, rel=0.1), (str(variant), rank, layer)
            assert foreseen.cost.rounds == works[0].cost.rounds


def test_rows_of_a_reply_are_what_they_were(make_graph: MakeGraph) -> None:
    graph = make_graph(num_nodes=300, sparse=True)
    shared = partition(graph, 2, "hash")
    shape = shape_of(graph, shared, "sage")
    layout = RowFormat.of(share(graph, shared, 0).part, graph.num_nodes, "auto")
    assert layout.row_bytes is None
    assert not shape.is_dense
    assert layout.fact_bytes + 4 < shape.row_bytes < layout.fact_bytes + 4 + 8 * graph.num_features
