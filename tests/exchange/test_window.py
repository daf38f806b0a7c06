"""Windows bring each row once, within their budget, and give the mini-batches of single steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.errors import ConfigError
from polyhop.exchange import Loaded, PartBatch, PartLoader, Pool, RowFetch, RowFormat, Seeds, WindowLoader
from polyhop.exchange.features import Piece
from polyhop.graph import DenseFeatures, Graph, PooledRows, SparseRows
from polyhop.partition import Partition, partition, share
from polyhop.sample import MiniBatch, NeighborLoader, NeighbourSampler
from polyhop.sample.part import PartSampler
from polyhop.sample.wire import Wire

MakeGraph = Callable[..., Graph]
Run = Callable[..., list[Any]]

BATCH, SEED, EPOCH = 10, 5, 2
FAN_OUTS = [3, 4, 2]


class Watched(RowFetch):
    """Notes what is fetched."""

    def pieces(self, line: Collective, ids: Tensor) -> list[Piece]:
        self.asked = [*getattr(self, "asked", []), ids.clone()]
        return super().pieces(line, ids)


@dataclass
class Outcome:
    batches: list[PartBatch]
    windows: list[Loaded]
    asked: list[Tensor]
    sent: list[Cost]
    capacity: int
    most_used: int
    pinned: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    paces: list[float | None] = field(
        default_factory=list
    )  # of each window, once all are trained, and of one more


def load(line: Collective, graph: Graph, owner: Tensor, options: dict[str, Any]) -> Outcome:
    """Two epochs by windows; rows are brought together at once, while their slots hold them."""
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    part = held.part
    assert part.split is not None
    wire = Wire(graph.num_nodes, part.edge_weight is not None)
    sampler = PartSampler(part, FAN_OUTS, wire, seed=SEED, method=options.get("method", "uniform"))
    train = part.split.train
    seeds = Seeds(part.user_ids[train], train + part.start, line, seed=SEED, batch_size=BATCH)
    layout = RowFormat.of(part, graph.num_nodes, options.get("dtype", "auto"))
    fetch = Watched(part, layout, wire)
    pool = Pool(fetch, options.get("capacity", 2 * graph.num_nodes), keeps=options.get("delta", True))
    pinned = torch.empty(0, dtype=torch.int64)
    if options.get("pin"):
        pinned = torch.arange(graph.num_nodes)[:: options["pin"]]
        pinned = pinned[(pinned < part.start) | (pinned >= part.start + part.num_nodes)]
        pool.pin(line, pinned)
    fetch.asked = []
    windows: list[Loaded] = []
    sent: list[Cost] = []
    before = [line.traffic.now()]

    def note(loaded: Loaded) -> None:
        windows.append(loaded)
        now = line.traffic.now()
        sent.append(now - before[0])
        before[0] = now

    in_place = part.x.values if isinstance(part.x, DenseFeatures) and "dtype" not in options else None
    loader = WindowLoader(
        line, sampler, pool, seeds, size=options["size"], in_place=in_place, num_epochs=options.get("num_epochs", EPOCH + 2),
        is_ahead=options.get("ahead", True), after_window=note,
    )  # fmt: skip
    batches = [brought(batch) for epoch in (EPOCH, EPOCH + 1) for batch in loader.batches(epoch)]
    paces = [loader.seconds_of(range(window, window + 1)) for window in range(len(windows) + 1)]
    loader.close()
    return Outcome(batches, windows, fetch.asked, sent, pool.capacity, pool.most_used, pinned, paces)


def load_steps(line: Collective, graph: Graph, owner: Tensor, options: dict[str, Any]) -> list[PartBatch]:
    """The same by single steps."""
    part = share(graph, Partition(owner, line.num_ranks), line.rank).part
    assert part.split is not None
    wire = Wire(graph.num_nodes, part.edge_weight is not None)
    sampler = PartSampler(part, FAN_OUTS, wire, seed=SEED, method=options.get("method", "uniform"))
    train = part.split.train
    seeds = Seeds(part.user_ids[train], train + part.start, line, seed=SEED, batch_size=BATCH)
    fetch = RowFetch(part, RowFormat.of(part, graph.num_nodes, options.get("dtype", "auto")), wire)
    loader = PartLoader(line, sampler, fetch, seeds, prefetch=0)
    return [batch for epoch in (EPOCH, EPOCH + 1) for batch in loader.batches(epoch)]


def brought(batch: PartBatch) -> PartBatch:
    first = batch.batch.blocks[0]
    if not isinstance(batch.x, PooledRows):
        return batch
    assert first.rows is not None
    rows = torch.cat([batch.x.first, batch.x.second])[first.rows]
    return PartBatch(batch.batch, rows, batch.y, batch.num_global)


def assert_same(got: PartBatch, want: PartBatch) -> None:
    assert got.num_global == want.num_global
    assert got.batch.step == want.batch.step
    assert torch.equal(got.y, want.y)
    assert torch.equal(got.batch.seeds, want.batch.seeds)
    if isinstance(want.x, SparseRows):
        assert isinstance(got.x, SparseRows)
        assert torch.equal(got.x.dense(), want.x.dense())
    else:
        assert isinstance(got.x, Tensor)
        assert isinstance(want.x, Tensor)
        assert torch.equal(got.x, want.x) or got.x.numel() == want.x.numel() == 0
    for mine, theirs in zip(got.batch.blocks, want.batch.blocks, strict=True):
        assert mine.num_src == theirs.num_src
        assert mine.is_sampled == theirs.is_sampled
        for name in ("indptr", "indices", "src_ids", "edge_weight", "in_degree", "in_weight", "loop_weight"):
            a, b = getattr(mine, name), getattr(theirs, name)
            assert (a is None) == (b is None), name
            assert a is None or torch.equal(a, b), name


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {}),
    "weighted": ({"weighted": True}, {}),
    "sparse": ({"sparse": True}, {}),
    "bfloat16": ({}, {"dtype": "bfloat16"}),
    "int8": ({}, {"dtype": "int8"}),
    "labor": ({}, {"method": "labor"}),
    "pinned": ({}, {"pin": 3}),
    "pinned, forgets": ({}, {"pin": 3, "delta": False}),
    "forgets": ({}, {"delta": False}),
    "forgets, sparse": ({"sparse": True}, {"delta": False}),
    "not ahead": ({}, {"ahead": False}),
    "each epoch by itself": ({}, {"num_epochs": 0}),
}


@pytest.mark.parametrize(("made", "options"), KINDS.values(), ids=KINDS)
def test_mini_batches_of_single_steps(
    make_graph: MakeGraph, made: dict[str, Any], options: dict[str, Any]
) -> None:
    graph = make_graph(**made)
    owner = partition(graph, 3, "hash").owner
    expected = run_in_threads(3, load_steps, graph, owner, options)
    for size in (1, 3, 100):
        found = run_in_threads(3, load, graph, owner, {**options, "size": size})
        for got, want in zip(found, expected, strict=True):
            assert len(got.batches) == len(want)
            for a, b in zip(got.batches, want, strict=True):
                assert_same(a, b)


def windows_of(graph: Graph, owner: Tensor, num_ranks: int, size: int) -> list[list[list[MiniBatch]]]:
    """[window][rank]: mini-batches of both epochs, drawn by one process from the whole graph."""
    assert graph.split is not None
    loader = NeighborLoader(graph, FAN_OUTS, graph.split.train, BATCH, seed=SEED)
    sampler = NeighbourSampler(graph, FAN_OUTS, seed=SEED)
    found = []
    for epoch in (EPOCH, EPOCH + 1):
        order = loader.order(epoch)
        for first in range(0, len(loader), size):
            steps = range(first, min(first + size, len(loader)))
            seeds = {step: order[step * BATCH : (step + 1) * BATCH] for step in steps}
            found.append(
                [
                    [sampler.sample(seeds[s][owner[seeds[s]] == rank], epoch, s) for s in steps]
                    for rank in range(num_ranks)
                ]
            )
    return found


def remote_union(window: list[MiniBatch], shared: Partition, rank: int) -> set[int]:
    """New ids of a window's input nodes that others own."""
    ids = torch.cat([shared.new_ids[batch.input_ids] for batch in window])
    start, stop = int(shared.bounds[rank]), int(shared.bounds[rank + 1])
    return {each for each in ids.tolist() if not start <= each < stop}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("pin", [0, 4])
def test_each_remote_row_once(make_graph: MakeGraph, size: int, delta: bool, pin: int) -> None:
    """With room for all: a row that some window brought is never asked for again; without delta, once in each window."""
    graph = make_graph()
    shared = partition(graph, 4, "hash")
    windows = windows_of(graph, shared.owner, 4, size)
    found = run_in_threads(4, load, graph, shared.owner, {"size": size, "delta": delta, "pin": pin})
    for rank, got in enumerate(found):
        held = set(got.pinned.tolist())
        assert len(got.asked) == len(windows)
        for window, asked in zip(windows, got.asked, strict=True):
            expected = remote_union(window[rank], shared, rank) - held
            assert sorted(expected) == asked.tolist()  # ascending, none twice, none that is held or local
            if delta:
                held |= expected
    assert sum(asked.numel() for got in found for asked in got.asked) > 0


class Slots:
    """What the pool should do, one row at a time."""

    def __init__(self, capacity: int) -> None:
        self.ids: list[int | None] = [None] * capacity
        self.last, self.uses = [-1] * capacity, [0] * capacity

    def take(self, wanted: set[int], window: int) -> set[int]:
        at = {each: slot for slot, each in enumerate(self.ids) if each is not None}
        missing = sorted(wanted - set(at))
        for each in wanted & set(at):
            self.last[at[each]] = window
        free = [slot for slot, each in enumerate(self.ids) if each is None]
        lacking = len(missing) - len(free)
        if lacking > 0:
            old = [s for s, each in enumerate(self.ids) if each is not None and self.last[s] < window - 1]
            assert len(old) >= lacking
            for slot in sorted(old, key=lambda s: (self.last[s], self.uses[s], s))[:lacking]:
                self.ids[slot] = None
            free = [slot for slot, each in enumerate(self.ids) if each is None]
        for each, slot in zip(missing, free, strict=False):
            self.ids[slot], self.last[slot], self.uses[slot] = each, window, 0
        for each in wanted:
            self.uses[self.ids.index(each)] += 1
        return set(missing)


@pytest.mark.parametrize("size", [1, 2])
def test_least_recent_rows_make_room(make_graph: MakeGraph, size: int) -> None:
    graph = make_graph()
    shared = partition(graph, 2, "hash")
    windows = windows_of(graph, shared.owner, 2, size)
    largest = max(
        len(remote_union(one[r], shared, r) | remote_union(other[r], shared, r))
        for one, other in pairwise(windows)
        for r in range(2)
    )
    found = run_in_threads(2, load, graph, shared.owner, {"size": size, "capacity": largest})
    for rank, got in enumerate(found):
        book = Slots(largest)
        fetched = [book.take(remote_union(of[rank], shared, rank), w) for w, of in enumerate(windows)]
        assert [sorted(each) for each in fetched] == [asked.tolist() for asked in got.asked]
        assert got.most_used <= got.capacity
    assert any(got.most_used == got.capacity for got in found)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("delta", [True, False])
def test_a_pool_that_is_too_small_cuts_windows(make_graph: MakeGraph, delta: bool, ahead: bool) -> None:
    """The budget holds, every step comes, and what is delivered is the same."""
    graph = make_graph()
    shared = partition(graph, 3, "hash")
    expected = run_in_threads(3, load_steps, graph, shared.owner, {})
    alone = windows_of(graph, shared.owner, 3, 1)
    most = max(len(remote_union(of[r], shared, r)) for of in alone for r in range(3))
    for capacity in (most, most + 5, 2 * most):
        options = {"size": 6, "capacity": capacity, "delta": delta, "ahead": ahead}
        found = run_in_threads(3, load, graph, shared.owner, options)
        for got, want in zip(found, expected, strict=True):
            assert got.most_used <= capacity
            assert [w.num_steps for w in got.windows] == [w.num_steps for w in found[0].windows]
            assert sum(w.num_steps for w in got.windows) == len(want)
            for a, b in zip(got.batches, want, strict=True):
                assert_same(a, b)
        if capacity == most:
            assert max(w.num_steps for w in found[0].windows) < 6


def load_and_fail(line: Collective, graph: Graph, owner: Tensor, options: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as raised:
        load(line, graph, owner, options)
    return str(raised.value)


def test_no_room_for_one_mini_batch_is_said_by_all(make_graph: MakeGraph) -> None:
    graph = make_graph()
    shared = partition(graph, 3, "hash")
    told = run_in_threads(3, load_and_fail, graph, shared.owner, {"size": 4, "capacity": 5})
    assert len(set(told)) == 1
    assert "rows through the pool, and there is memory for 5" in told[0]


def test_over_gloo(make_graph: MakeGraph, ranks: Run) -> None:
    graph = make_graph()
    shared = partition(graph, 3, "hash")
    expected = run_in_threads(3, load_steps, graph, shared.owner, {})
    found = ranks(3, load, graph, shared.owner, {"size": 3})
    for got, want in zip(found, expected, strict=True):
        for a, b in zip(got.batches, want, strict=True):
            assert_same(a, b)


def test_seconds_of_windows_that_trained(make_graph: MakeGraph) -> None:
    graph = make_graph()
    owner = (torch.arange(graph.num_nodes) % 2).int()
    (found, _) = run_in_threads(2, load, graph, owner, {"size": 2})
    *trained, after = found.paces
    assert len(trained) > 3
    assert all(pace is not None and pace > 0 for pace in trained)
    assert after is None
