"""What windows send is accounted to the byte, and foreseen within a tenth."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.exchange import Loaded, Pool, RowFetch, RowFormat, Seeds, WindowLoader, bucket_sizes
from polyhop.graph import DenseFeatures, Graph, SparseFeatures
from polyhop.nn import GraphSAGE
from polyhop.partition import Partition, partition, share
from polyhop.sample import MiniBatch, NeighborLoader, NeighbourSampler, full_block
from polyhop.sample.inclusion import inclusion
from polyhop.sample.part import PartSampler
from polyhop.sample.wire import Wire
from polyhop.strategies.data_cost import Facts
from polyhop.strategies.macro_cost import account, estimate

MakeGraph = Callable[..., Graph]
BATCH, SEED = 12, 5


def load_epochs(
    line: Collective, graph: Graph, owner: Tensor, fan_outs: list[int], options: dict[str, Any]
) -> list[Cost]:
    """The traffic of every window of two epochs."""
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    part = held.part
    assert part.split is not None
    wire = Wire(graph.num_nodes, part.edge_weight is not None)
    sampler = PartSampler(part, fan_outs, wire, seed=SEED)
    train = part.split.train
    batch = options.get("batch", BATCH)
    seeds = Seeds(part.user_ids[train], train + part.start, line, seed=SEED, batch_size=batch)
    fetch = RowFetch(part, RowFormat.of(part, graph.num_nodes, options.get("dtype", "auto")), wire)
    pool = Pool(fetch, 2 * graph.num_nodes, keeps=options.get("delta", True))
    costs, before = [], [line.traffic.now()]

    def note(_: Loaded) -> None:
        now = line.traffic.now()
        costs.append(now - before[0])
        before[0] = now

    is_plain = isinstance(part.x, DenseFeatures) and "dtype" not in options
    loader = WindowLoader(
        line, sampler, pool, seeds, size=options["size"], after_window=note, num_epochs=2,
        in_place=part.x.values if is_plain and isinstance(part.x, DenseFeatures) else None,
    )  # fmt: skip
    for epoch in (0, 1):
        for _ in loader.batches(epoch):
            pass
    loader.close()
    return costs


def windows_of(
    graph: Graph, owner: Tensor, num_ranks: int, fan_outs: list[int], size: int, epoch: int
) -> list[list[list[MiniBatch]]]:
    """[window][rank]: mini-batches drawn by one process from the whole graph."""
    assert graph.split is not None
    loader = NeighborLoader(graph, fan_outs, graph.split.train, BATCH, seed=SEED)
    order, sampler = loader.order(epoch), NeighbourSampler(graph, fan_outs, seed=SEED)

    def draw(step: int, rank: int) -> MiniBatch:
        seeds = order[step * BATCH : (step + 1) * BATCH]
        return sampler.sample(seeds[owner[seeds] == rank], epoch, step)

    steps = [range(s, min(s + size, len(loader))) for s in range(0, len(loader), size)]
    return [[[draw(step, rank) for step in of] for rank in range(num_ranks)] for of in steps]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "delta": ({}, {}),
    "forgets": ({}, {"delta": False}),
    "weighted": ({"weighted": True}, {}),
    "sparse": ({"sparse": True}, {}),
    "bfloat16": ({}, {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize(("made", "options"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("size", [1, 3, 50])
def test_account_equals_the_counters(
    make_graph: MakeGraph, made: dict[str, Any], options: dict[str, Any], size: int
) -> None:
    graph, num_ranks, fan_outs = make_graph(**made), 4, [4, -1, 3]
    shared = partition(graph, num_ranks, "hash")
    found = run_in_threads(num_ranks, load_epochs, graph, shared.owner, fan_outs, {**options, "size": size})
    part = share(graph, shared, 0).part
    layout = RowFormat.of(part, graph.num_nodes, options.get("dtype", "auto"))
    wire = Wire(graph.num_nodes, graph.edge_weight is not None)
    lengths = graph.x.rows.indptr.diff() if isinstance(graph.x, SparseFeatures) else None
    windows = [w for epoch in (0, 1) for w in windows_of(graph, shared.owner, 4, fan_outs, size, epoch)]
    assert all(len(costs) == len(windows) for costs in found)
    held = [torch.empty(0, dtype=torch.int64) for _ in range(num_ranks)]
    for at, window in enumerate(windows):
        fetched = []
        for rank, batches in enumerate(window):
            ids = torch.cat([shared.new_ids[batch.input_ids] for batch in batches]).unique()
            ids = ids[~torch.isin(ids, held[rank])]
            is_own = (ids >= shared.bounds[rank]) & (ids < shared.bounds[rank + 1])
            fetched.append(ids[~is_own])
            if options.get("delta", True):
                held[rank] = torch.cat([held[rank], ids])
        for rank in range(num_ranks):
            expected = account(
                window, fetched, shared.new_ids, shared.bounds, wire, layout, fan_outs, rank,
                row_lengths=lengths,
            )  # fmt: skip
            assert dict(found[rank][at].bytes) == dict(expected.bytes), (at, rank)
            assert dict(found[rank][at].messages) == dict(expected.messages), (at, rank)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_messages_fall_with_the_window(make_graph: MakeGraph, size: int) -> None:
    """2 L (P - 1) for each window, requests and replies; lengths and agreements apart."""
    graph, fan_outs = make_graph(600), [4, 3, 3]
    assert graph.split is not None
    shared = partition(graph, 3, "hash")
    found = run_in_threads(
        3, load_epochs, graph, shared.owner, fan_outs, {"size": size, "delta": False, "batch": 60}
    )
    num_windows = 2 * -(-5 // size)
    for costs in found:
        total = sum(costs, Cost())
        assert total.messages["ids"] + total.messages["features"] == 2 * 3 * 2 * num_windows


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("delta", [True, False])
def test_estimate_is_within_a_tenth(make_graph: MakeGraph, size: int, delta: bool) -> None:
    graph, fan_outs = make_graph(num_nodes=3000, seed=1), [5, 4, 3]
    shared = partition(graph, 3, "hash")
    assert graph.split is not None
    train = graph.split.train
    num_steps = -(-train.numel() // BATCH)
    found = run_in_threads(3, load_epochs, graph, shared.owner, fan_outs, {"size": size, "delta": delta})
    start = torch.zeros(graph.num_nodes, 3, dtype=torch.float64)
    start[train, shared.owner[train].long()] = BATCH / train.numel()
    hops = inclusion(full_block(graph), start, fan_outs, is_symmetric=True)
    facts = Facts(
        shared.owner.long(),
        [[hop[:, rank] for hop in hops] for rank in range(3)],
        graph.in_degree,
        fan_outs,
        Wire(graph.num_nodes),
        RowFormat.of(share(graph, shared, 0).part, graph.num_nodes, "auto"),
        bucket_sizes(list(GraphSAGE(8, 8, num_layers=3, out_channels=3).parameters())),
    )
    for rank, costs in enumerate(found):
        full = costs[: num_steps // size]  # of the first epoch, without its short last window
        measured = sum(full, Cost()) * (1 / len(full))
        predicted = estimate(facts, rank, size, is_delta=delta)
        for kind in ("ids", "features", "sizes") if not delta else ("sizes",):
            assert predicted.bytes[kind] == pytest.approx(measured.bytes[kind], rel=0.1), (rank, kind)
        if delta:
            windows = windows_of(graph, shared.owner, 3, fan_outs, size, 0)[: num_steps // size]
            rows = statistics.mean(_rows_lent(before, now, shared, rank) for before, now in pairwise(windows))
            assert predicted.bytes["features"] == pytest.approx(rows * facts.layout.row_bytes, rel=0.1), rank


def _rows_lent(
    before: list[list[MiniBatch]], now: list[list[MiniBatch]], shared: Partition, rank: int
) -> int:
    """Own rows that the others read in this window and did not in the one before."""
    total = 0
    for q in range(shared.num_parts):
        if q != rank:
            old, new = (torch.cat([batch.input_ids for batch in of[q]]).unique() for of in (before, now))
            total += int((~torch.isin(new, old) & (shared.owner[new] == rank)).sum())
    return total
