"""The mini-batches of ranks are those of one process: the same seeds, neighbours, rows and labels, however far ahead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.comm import Collective, run_in_threads
from polyhop.errors import ConfigError
from polyhop.exchange import PartBatch, PartLoader, RowFetch, RowFormat, Seeds
from polyhop.graph import Graph, SparseRows
from polyhop.partition import Partition, cut
from polyhop.sample import NeighborLoader, NeighbourSampler
from polyhop.sample.part import PartSampler
from polyhop.sample.wire import Wire

MakeGraph = Callable[..., Graph]
Run = Callable[..., list[Any]]

SEED, BATCH, EPOCH = 6, 16, 3
OWNERS = {
    "even": lambda nodes: (torch.arange(nodes) % 3).int(),
    "skewed": lambda nodes: torch.where(torch.arange(nodes) % 10 == 9, torch.arange(nodes) % 3, 0).int(),
    "first empty": lambda nodes: (torch.arange(nodes) % 2 + 1).int(),
}


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("polyhop-ahead")]


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    assert workers() == []


@dataclass(frozen=True)
class Options:
    fan_outs: tuple[int, ...] = (4, 3)
    method: str = "uniform"
    prefetch: int = 2
    plain: bool = False
    start: int = 0
    take: int | None = None  # steps before the epoch is left
    epochs: tuple[int, ...] = (EPOCH,)


def loader_of(line: Collective, graph: Graph, owner: Tensor, options: Options) -> PartLoader:
    part = cut(graph, Partition(owner, line.num_ranks), line.rank)
    assert part.split is not None
    train = part.split.train
    wire = Wire(graph.num_nodes, part.edge_weight is not None, options.plain)
    sampler = PartSampler(part, options.fan_outs, wire, seed=SEED, method=options.method)
    seeds = Seeds(part.user_ids[train], train + part.start, line, seed=SEED, batch_size=BATCH)
    layout = RowFormat.of(part, graph.num_nodes, "auto", is_plain=options.plain)
    return PartLoader(line.fork(), sampler, RowFetch(part, layout, wire), seeds, prefetch=options.prefetch)


def load(line: Collective, graph: Graph, owner: Tensor, options: Options) -> list[PartBatch]:
    loader = loader_of(line, graph, owner, options)
    found = []
    for epoch in options.epochs:
        batches = loader.batches(epoch, options.start)
        found += list(islice(batches, options.take))
        if options.prefetch:
            batches.close()  # type: ignore[attr-defined]
            # Ranks are threads here: only the others' workers may still be there.
            line.barrier()
    return found


def expected_seeds(graph: Graph, epoch: int, step: int) -> Tensor:
    """The global batch of a step, as one process cuts it."""
    assert graph.split is not None
    order = NeighborLoader(graph, [1], graph.split.train, BATCH, seed=SEED).order(epoch)
    return order[step * BATCH : (step + 1) * BATCH]


def assert_equal(name: str, a: Tensor | None, b: Tensor | None) -> None:
    assert (a is None) == (b is None), name
    if a is not None and b is not None:
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


def assert_batch(
    got: PartBatch, graph: Graph, owner: Tensor, rank: int, epoch: int, options: Options
) -> None:
    """What one process draws for this rank's seeds, block by block; its rows and labels."""
    everyone = expected_seeds(graph, epoch, got.batch.step)
    seeds = everyone[owner[everyone] == rank]
    sampler = NeighbourSampler(graph, options.fan_outs, seed=SEED, method=options.method)
    expected = sampler.sample(seeds, epoch, got.batch.step)
    assert torch.equal(got.batch.seeds, seeds)
    assert got.num_global == everyone.numel()
    assert len(got.batch.blocks) == len(expected.blocks)
    for mine, whole in zip(got.batch.blocks, expected.blocks, strict=True):
        assert (mine.num_src, mine.num_dst, mine.is_sampled) == (
            whole.num_src,
            whole.num_dst,
            whole.is_sampled,
        )
        for name in ("indptr", "indices", "src_ids", "in_degree", "in_weight", "loop_weight", "edge_weight"):
            assert_equal(name, getattr(mine, name), getattr(whole, name))
    assert graph.x is not None
    assert graph.y is not None
    rows = graph.x.gather(expected.input_ids)
    if isinstance(rows, SparseRows):
        assert isinstance(got.x, SparseRows)
        for name in ("indptr", "values", "ids"):
            assert_equal(name, getattr(got.x, name), getattr(rows, name))
        assert torch.equal(got.x.indices.long(), rows.indices.long())
    else:
        assert isinstance(got.x, Tensor)
        assert_equal("x", got.x, rows)
    assert_equal("y", got.y, graph.y[seeds])


@pytest.mark.parametrize("parts", OWNERS)
@pytest.mark.parametrize("shuffled", [False, True])
def test_seeds_of_all_ranks_are_the_global_batch(make_graph: MakeGraph, parts: str, shuffled: bool) -> None:
    """In the user's ids and in order, whatever order a rank gives its own in."""
    graph = make_graph(150)
    owner = OWNERS[parts](150)

    def own(line: Collective) -> tuple[list[list[Tensor]], int, int, list[int]]:
        shared = Partition(owner, line.num_ranks)
        part = cut(graph, shared, line.rank)
        assert part.split is not None
        train = part.split.train
        if shuffled:
            train = train[torch.randperm(train.numel(), generator=torch.Generator().manual_seed(line.rank))]
        seeds = Seeds(part.user_ids[train], train + part.start, line, seed=SEED, batch_size=BATCH)
        lists = [[shared.user_ids[ids] for ids in seeds.own(epoch)] for epoch in (0, 7)]
        counts = [seeds.count(step) for step in range(seeds.num_steps)]
        return lists, len(seeds), seeds.num_steps, counts

    found = run_in_threads(3, own)
    assert graph.split is not None
    size = graph.split.train.numel()
    for lists, length, steps, counts in found:
        assert (length, steps) == (size, -(-size // BATCH))
        assert counts == [expected_seeds(graph, 0, step).numel() for step in range(steps)]
        assert len(lists[0]) == len(lists[1]) == steps
    for at, epoch in enumerate((0, 7)):
        for step in range(found[0][2]):
            everyone = expected_seeds(graph, epoch, step)
            for rank, (lists, _, _, _) in enumerate(found):
                assert torch.equal(lists[at][step], everyone[owner[everyone] == rank])


GRAPHS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weighted": {"weighted": True},
    "sparse": {"sparse": True},
    "multi": {"kind": "multi"},
}
OPTIONS = {
    "uniform": Options(),
    "labor": Options(method="labor"),
    "all neighbours, three hops": Options(fan_outs=(2, -1, 3)),
    "wide": Options(fan_outs=(300, 2)),
    "one hop": Options(fan_outs=(3,)),
    "plain messages": Options(plain=True),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("made", GRAPHS.values(), ids=GRAPHS)
def test_batches_are_those_of_one_process(
    make_graph: MakeGraph, made: dict[str, Any], options: Options
) -> None:
    graph = make_graph(150, **made)
    owner = OWNERS["even"](150)
    for rank, found in enumerate(run_in_threads(3, load, graph, owner, options)):
        assert [each.batch.step for each in found] == list(range(5))
        for each in found:
            assert_batch(each, graph, owner, rank, EPOCH, options)


@pytest.mark.parametrize("parts", ["skewed", "first empty"])
@pytest.mark.parametrize("method", ["uniform", "labor"])
def test_uneven_and_empty_parts(make_graph: MakeGraph, parts: str, method: str) -> None:
    graph, options = make_graph(150, weighted=True), Options(method=method)
    owner = OWNERS[parts](150)
    for rank, found in enumerate(run_in_threads(3, load, graph, owner, options)):
        for each in found:
            assert_batch(each, graph, owner, rank, EPOCH, options)


@pytest.mark.parametrize("prefetch", [0, 1, 3, 50])
def test_how_far_ahead_changes_nothing(make_graph: MakeGraph, prefetch: int) -> None:
    graph, owner = make_graph(150), OWNERS["even"](150)
    options = Options(prefetch=prefetch, epochs=(0, 1))
    for rank, found in enumerate(run_in_threads(3, load, graph, owner, options)):
        assert len(found) == 10
        for at, each in enumerate(found):
            assert_batch(each, graph, owner, rank, at // 5, options)


@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("take", [1, 2, 4])
def test_an_epoch_left_early_on_all_ranks(make_graph: MakeGraph, prefetch: int, take: int) -> None:
    """No rank waits for a step that another never began: the next epoch is whole, on the same line."""
    graph, owner = make_graph(150), OWNERS["skewed"](150)
    options = Options(prefetch=prefetch, take=take, epochs=(0, 1, 2))
    for rank, found in enumerate(run_in_threads(3, load, graph, owner, options)):
        assert len(found) == 3 * take
        for at, each in enumerate(found):
            assert_batch(each, graph, owner, rank, at // take, options)


def leave_in_turn(line: Collective, graph: Graph, owner: Tensor) -> int:
    """Rank 1 leaves each epoch at once, before its worker can begin the next step; rank 0 when its own has begun it."""
    watchdog = threading.Timer(20, line.fail, [TimeoutError("a rank waits for a step that was never begun")])  # type: ignore[attr-defined]
    watchdog.start()
    loader = loader_of(line, graph, owner, Options())
    loader.prefetch = 1
    try:
        for epoch in range(5):
            batches = loader.batches(epoch)
            next(batches)
            if line.rank == 0:
                time.sleep(0.05)
            batches.close()  # type: ignore[attr-defined]
        return epoch
    finally:
        watchdog.cancel()


def test_a_step_that_one_rank_has_begun_is_finished_by_all(make_graph: MakeGraph) -> None:
    assert run_in_threads(2, leave_in_turn, make_graph(150), (torch.arange(150) % 2).int()) == [4, 4]


def test_from_a_later_step(make_graph: MakeGraph) -> None:
    graph, owner, options = make_graph(150), OWNERS["even"](150), Options(start=3)
    for rank, found in enumerate(run_in_threads(3, load, graph, owner, options)):
        assert [each.batch.step for each in found] == [3, 4]
        for each in found:
            assert_batch(each, graph, owner, rank, EPOCH, options)


def test_over_gloo(make_graph: MakeGraph, ranks: Run) -> None:
    graph, owner = make_graph(150, weighted=True), OWNERS["first empty"](150)
    options = Options(prefetch=3, take=3, epochs=(0, 1), method="labor")
    for rank, found in enumerate(ranks(3, load, graph, owner, options)):
        assert len(found) == 6
        for at, each in enumerate(found):
            assert_batch(each, graph, owner, rank, at // 3, options)


def fail_on_one(line: Collective, graph: Graph, owner: Tensor) -> None:
    loader = loader_of(line, graph, owner, Options())
    if line.rank == 1:
        loader.fetch.fetch = _gone  # type: ignore[method-assign]
    list(loader.batches(0))


def _gone(line: Collective, ids: Tensor) -> Any:
    error = OSError("disk gone")
    line.fail(error)  # type: ignore[attr-defined]
    raise error


def test_what_fails_while_loading_ahead_is_raised(make_graph: MakeGraph) -> None:
    with pytest.raises(Exception, match="disk gone"):
        run_in_threads(2, fail_on_one, make_graph(150), (torch.arange(150) % 2).int())


def test_a_graph_without_labels(make_graph: MakeGraph) -> None:
    with pytest.raises(ConfigError, match="has no labels"):
        run_in_threads(
            1, load, replace(make_graph(50), y=None), torch.zeros(50, dtype=torch.int32), Options()
        )
