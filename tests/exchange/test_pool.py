"""The pool against a book kept one row at a time: what it holds, what it fetches, what makes room."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyhop.comm import Collective, run_in_threads
from polyhop.exchange import Pool, RowFetch, RowFormat, pool_row_bytes
from polyhop.graph import Graph
from polyhop.partition import Partition, share
from polyhop.sample.wire import Wire

MakeGraph = Callable[..., Graph]
NUM_NODES = 40


def fetch_of(line: Collective, graph: Graph) -> RowFetch:
    """Even nodes on rank 0, odd ones on rank 1: new ids 20 .. 39 are rank 1's."""
    owner = (torch.arange(NUM_NODES) % line.num_ranks).int()
    part = share(graph, Partition(owner, line.num_ranks), line.rank).part
    return RowFetch(part, RowFormat.of(part, NUM_NODES, "auto"), Wire(NUM_NODES))


def values_of(graph: Graph, ids: Tensor) -> Tensor:
    user_ids = torch.cat([torch.arange(0, NUM_NODES, 2), torch.arange(1, NUM_NODES, 2)])[ids]
    assert graph.x is not None
    rows = graph.x.gather(user_ids)
    return rows if isinstance(rows, Tensor) else rows.dense()


def follow(
    line: Collective, graph: Graph, windows: list[set[int]], capacity: int, in_flight: int, keeps: bool
) -> list[str]:
    """Windows taken by rank 0 of rank 1's rows, each compared with the book. Rank 1 answers and asks nothing."""
    pool = Pool(fetch_of(line, graph), capacity, keeps=keeps)
    wrong: list[str] = []
    held: dict[int, tuple[int, int]] = {}  # id -> (last window, windows that used it)
    for number, wanted in enumerate(windows):
        ids = torch.tensor(sorted(wanted) if line.rank == 0 else [], dtype=torch.int64)
        before = pool.num_fetched
        slots = pool.take(line, ids, number, in_flight=in_flight)
        if line.rank:
            continue
        if not keeps:
            held = {}
        missing = wanted - set(held)
        room = capacity - len(held)
        old = sorted((used, each) for each, used in held.items() if each not in wanted)
        gone = {each for _, each in old[: max(0, len(missing) - room)]}
        held = {each: used for each, used in held.items() if each not in gone}
        for each in wanted:
            held[each] = (number, held.get(each, (0, 0))[1] + 1)
        if pool.num_fetched - before != len(missing):
            wrong.append(f"window {number}: {pool.num_fetched - before} fetched, expected {len(missing)}")
        if slots.unique().numel() != slots.numel():
            wrong.append(f"window {number}: a slot twice")
        got = pool.sparse(slots).dense() if pool.is_sparse else pool.values[slots]
        if not torch.equal(got, values_of(graph, ids)):
            wrong.append(f"window {number}: other rows")
        if pool.most_used > capacity:
            wrong.append(f"window {number}: {pool.most_used} of {capacity} slots")
        if len(ids) and not torch.equal(pool.facts(slots).user_ids % 2, torch.ones_like(ids)):
            wrong.append(f"window {number}: other facts")
    return wrong


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sets(st.integers(20, 39), max_size=9), max_size=8),
    st.integers(9, 20),
    st.booleans(),
    st.booleans(),
)
def test_any_windows(
    make_graph: MakeGraph, windows: list[set[int]], capacity: int, sparse: bool, keeps: bool
) -> None:
    """One window at a time: ties between rows of one window are the only freedom, and they do not change the counts."""
    graph = make_graph(NUM_NODES, sparse=sparse)
    if not keeps:
        windows = windows[:4]
    ones = [window for window in windows if window] if sparse else windows
    distinct_last = [w for i, w in enumerate(ones) if i == 0 or not (w & ones[i - 1])]
    for wrong in run_in_threads(2, follow, graph, distinct_last, capacity, 0, keeps):
        assert not wrong


def test_rows_in_flight_stay(make_graph: MakeGraph) -> None:
    """With two windows in flight at most, twice a window's rows are enough, and the one before is never touched."""
    graph = make_graph(NUM_NODES)
    windows = [set(range(20 + 5 * (i % 4), 25 + 5 * (i % 4))) for i in range(12)]

    def check(line: Collective) -> list[bool]:
        pool = Pool(fetch_of(line, graph), 10)
        before = torch.empty(0, dtype=torch.int64)
        kept = []
        for number, wanted in enumerate(windows):
            ids = torch.tensor(sorted(wanted) if line.rank == 0 else [], dtype=torch.int64)
            old = pool.values[before].clone() if before.numel() else before
            slots = pool.take(line, ids, number, in_flight=1)
            if line.rank == 0:
                kept.append(torch.equal(pool.values[before], old) if before.numel() else True)
                kept.append(not torch.isin(slots, before).any())
                before = slots
        return kept

    assert all(run_in_threads(2, check)[0])


def test_pinned_rows_are_never_fetched_again(make_graph: MakeGraph) -> None:
    graph = make_graph(NUM_NODES)

    def check(line: Collective) -> int:
        pool = Pool(fetch_of(line, graph), 8)
        pinned = torch.tensor([22, 30, 39] if line.rank == 0 else [], dtype=torch.int64)
        pool.pin(line, pinned)
        for number in range(6):
            ids = (
                torch.tensor([20 + number, 30, 39] if line.rank == 0 else [], dtype=torch.int64).sort().values
            )
            pool.take(line, ids, number, in_flight=0)
        return pool.num_fetched

    # 22 and 30 are among the pinned; 20, 21, 23, 24, 25 are fetched once each
    assert run_in_threads(2, check)[0] == 3 + 5


def test_waits_for_release(make_graph: MakeGraph) -> None:
    pool = run_in_threads(1, lambda line: Pool(fetch_of(line, make_graph(NUM_NODES)), 4))[0]
    done = threading.Event()
    waiter = threading.Thread(target=lambda: (pool.wait_released(3), done.set()))
    waiter.start()
    pool.release(2)
    assert not done.wait(0.1)
    pool.release(3)
    assert done.wait(10)
    waiter.join()


@pytest.mark.parametrize("weighted", [False, True])
def test_a_slot_is_as_large_as_it_says(make_graph: MakeGraph, weighted: bool) -> None:
    graph = make_graph(NUM_NODES, weighted=weighted)

    def held(line: Collective) -> tuple[int, int]:
        fetch = fetch_of(line, graph)
        pool = Pool(fetch, 20)
        pool.take(line, torch.arange(20, 40) if line.rank == 0 else torch.arange(0, 20), 0, in_flight=0)
        facts = [getattr(pool._facts, name) for name in ("user_ids", "in_degree", "in_weight", "loop_weight")]
        arrays = [pool.values, pool._ids, pool._slots, pool._last, pool._uses, *facts]
        size = sum(each.numel() * each.element_size() for each in arrays if each is not None)
        return size, 20 * pool_row_bytes(fetch.format, graph.num_features)

    for size, said in run_in_threads(2, held):
        assert size == said
