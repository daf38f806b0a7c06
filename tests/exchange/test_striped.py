"""Striped rows are the rows of the whole graph, each is held once in a group, and is asked of who holds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.errors import PeerError, UnsupportedError
from polyhop.exchange.features import Fetched, RowFetch, RowFormat
from polyhop.exchange.striped import StripedFetch, Stripes
from polyhop.graph import DenseFeatures, Graph
from polyhop.graph.disk import DiskFeatures
from polyhop.partition import Partition, cut, open_parts, save_parts
from polyhop.sample.wire import Wire

MakeGraph = Callable[..., Graph]
Run = Callable[..., list[Any]]
NODES, RANKS = 60, 4
OWNERS = {"even": torch.arange(NODES) % RANKS, "one empty": torch.arange(NODES) % 3}


def graph_of(make_graph: MakeGraph, kind: str) -> Graph:
    graph = make_graph(NODES, weighted=kind == "weighted")
    assert isinstance(graph.x, DenseFeatures)
    values = graph.x.values
    stores = {
        "float64": DenseFeatures(values.double() / 3),
        "uint8 scaled": DenseFeatures((values.abs() * 60).clamp(0, 255).to(torch.uint8), torch.rand(8) + 0.1),
    }
    return replace(graph, x=stores.get(kind, graph.x))


def fetch_each(
    line: Collective, graph: Graph, owner: Tensor, wanted: list[Tensor], options: dict[str, Any]
) -> tuple[Fetched, Cost, int, int]:
    """This rank's rows, by the user's ids; what it sent for them; rows and bytes that it holds."""
    shared = Partition(owner.int(), line.num_ranks)
    part = cut(graph, shared, line.rank)
    layout = RowFormat.of(part, NODES, options.get("dtype", "auto"))
    size = options.get("size", 1)
    fetch: RowFetch = RowFetch(part, layout, Wire(NODES))
    if size > 1:
        fetch = StripedFetch(part, layout, Wire(NODES))
        fetch.stripe(line, Stripes.of(shared.new_ids[options["hot"]], line.rank // size * size, size))
    before = line.traffic.now()
    found = fetch.fetch(line, shared.new_ids[wanted[line.rank]])
    sent = line.traffic.now() - before
    return found, sent, fetch.num_cached, fetch.cached_bytes if isinstance(fetch, StripedFetch) else 0


def assert_alike(got: Fetched, plain: Fetched) -> None:
    """The same bits, rows and facts."""
    assert isinstance(got.x, Tensor)
    assert isinstance(plain.x, Tensor)
    assert got.x.dtype == plain.x.dtype
    assert torch.equal(got.x, plain.x)
    for name in ("user_ids", "in_degree", "in_weight", "loop_weight"):
        mine, theirs = getattr(got.facts, name), getattr(plain.facts, name)
        assert (mine is None) == (theirs is None)
        assert mine is None or (mine.dtype == theirs.dtype and torch.equal(mine, theirs))


def some_ids() -> list[Tensor]:
    made = torch.Generator().manual_seed(2)
    return [torch.randperm(NODES, generator=made)[:count] for count in (NODES, 0, 31, 7)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("float32", "auto"),
        ("weighted", "auto"),
        ("float64", "auto"),
        ("float32", "bfloat16"),
        ("float32", "int8"),
        ("uint8 scaled", "auto"),
    ],
)
def test_rows_are_those_of_their_owners(
    make_graph: MakeGraph, kind: str, dtype: str, owner: Tensor, size: int
) -> None:
    graph, wanted, hot = graph_of(make_graph, kind), some_ids(), torch.randperm(NODES)[:23]
    plain = run_in_threads(RANKS, fetch_each, graph, owner, wanted, {"dtype": dtype})
    options = {"dtype": dtype, "size": size, "hot": hot}
    striped = run_in_threads(RANKS, fetch_each, graph, owner, wanted, options)
    for (got, _, _, _), (expected, _, _, _) in zip(striped, plain, strict=True):
        assert_alike(got, expected)


@pytest.mark.parametrize("size", [2, 4])
def test_a_row_is_held_once_in_a_group_and_sent_by_its_holder(make_graph: MakeGraph, size: int) -> None:
    graph, owner, hot = graph_of(make_graph, "float32"), OWNERS["even"], torch.arange(0, NODES, 3)
    wanted = [torch.arange(NODES)] * RANKS
    found = run_in_threads(RANKS, fetch_each, graph, owner, wanted, {"size": size, "hot": hot})
    place = {int(node): at for at, node in enumerate(hot)}
    row_bytes = 4 * 8 + 12
    for rank, (_, sent, num_held, _) in enumerate(found):
        assert num_held == len(range(rank % size, hot.numel(), size))
        lent = 0
        for reader in range(RANKS):
            for node in range(NODES):
                if reader == rank or int(owner[node]) == reader:
                    continue
                group = reader // size * size
                holder = group + place[node] % size if node in place else int(owner[node])
                lent += holder == rank
        assert sent.bytes["features"] == lent * row_bytes


def test_what_is_held_is_what_was_said(make_graph: MakeGraph) -> None:
    """``kept_bytes`` for every row, whatever the rows: a budget is kept."""
    for kind, dtype in (("float32", "auto"), ("weighted", "int8"), ("float64", "auto")):
        graph, hot = graph_of(make_graph, kind), torch.arange(40)
        part = cut(graph, Partition(OWNERS["even"].int(), RANKS), 0)
        each = StripedFetch(part, RowFormat.of(part, NODES, dtype), Wire(NODES)).kept_bytes(4)
        options = {"dtype": dtype, "size": 4, "hot": hot}
        for _, _, num_held, held_bytes in run_in_threads(
            RANKS, fetch_each, graph, OWNERS["even"], some_ids(), options
        ):
            assert num_held == 10
            assert held_bytes == each * num_held


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_parts_any_ids_any_stripes(make_graph: MakeGraph, data: st.DataObject) -> None:
    nodes = st.integers(0, NODES - 1)
    owner = torch.tensor(data.draw(st.lists(st.integers(0, RANKS - 1), min_size=NODES, max_size=NODES)))
    wanted = [
        torch.tensor(data.draw(st.lists(nodes, unique=True, max_size=20)), dtype=torch.int64)
        for _ in range(RANKS)
    ]
    hot = torch.tensor(data.draw(st.lists(nodes, unique=True, max_size=30)), dtype=torch.int64)
    graph = graph_of(make_graph, data.draw(st.sampled_from(["float32", "weighted"])))
    options = {"size": data.draw(st.sampled_from([2, 4])), "hot": hot}
    for rank, (got, _, _, _) in enumerate(run_in_threads(RANKS, fetch_each, graph, owner, wanted, options)):
        assert graph.x is not None
        assert torch.equal(got.facts.user_ids, wanted[rank])
        assert torch.equal(got.x, graph.x.gather(wanted[rank]))


def test_over_gloo(make_graph: MakeGraph, ranks: Run) -> None:
    graph, wanted = graph_of(make_graph, "weighted"), some_ids()
    options = {"size": 4, "hot": torch.arange(5, 40)}
    threads = run_in_threads(RANKS, fetch_each, graph, OWNERS["even"], wanted, options)
    processes = ranks(RANKS, fetch_each, graph, OWNERS["even"], wanted, options)
    for (got, sent, *_), (expected, counted, *_) in zip(processes, threads, strict=True):
        assert_alike(got, expected)
        assert dict(sent.bytes) == dict(counted.bytes)


def fetch_from_disk(line: Collective, parts: str, wanted: Tensor, hot: Tensor) -> tuple[Any, int]:
    """All rows, and how many this rank reads of its file when the others fetch theirs."""
    part = open_parts(Path(parts)).share(line.rank, line.num_ranks, features="disk").part
    assert isinstance(part.x, DiskFeatures)
    fetch = StripedFetch(part, RowFormat.of(part, NODES, "auto"), Wire(NODES))
    fetch.stripe(line, Stripes.of(hot, 0, RANKS))
    before = part.x.counts.num_rows
    rows = fetch.fetch(line, wanted).x
    return rows, part.x.counts.num_rows - before


def test_hot_rows_are_read_from_disk_once(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph, shared = graph_of(make_graph, "float32"), Partition(OWNERS["even"].int(), RANKS)
    save_parts(graph, shared, tmp_path / "parts")
    everyone = torch.arange(NODES)
    found = run_in_threads(RANKS, fetch_from_disk, str(tmp_path / "parts"), everyone, everyone[3:50])
    assert graph.x is not None
    for rows, _ in found:
        assert torch.equal(rows, graph.x.gather(shared.user_ids))
    # Own rows are read at home, the 13 that are not hot by three others too.
    assert sum(read for _, read in found) == NODES + 3 * 13


def test_sparse_rows_are_refused(make_graph: MakeGraph) -> None:
    part = cut(make_graph(NODES, sparse=True), Partition(OWNERS["even"].int(), RANKS), 0)
    with pytest.raises(UnsupportedError, match="sparse features differ in length"):
        StripedFetch(part, RowFormat.of(part, NODES, "auto"), Wire(NODES))


def test_a_row_that_is_not_held_is_named(make_graph: MakeGraph) -> None:
    part = cut(make_graph(NODES), Partition(OWNERS["even"].int(), RANKS), 0)
    fetch = StripedFetch(part, RowFormat.of(part, NODES, "auto"), Wire(NODES))
    asked = Wire(NODES).request(torch.tensor([2, part.num_nodes + 7]))
    with pytest.raises(PeerError, match="rank 3 asked for the kept row 7: 0 are kept here"):
        fetch._answer(3, asked)
