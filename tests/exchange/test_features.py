"""Fetched rows are the rows of the whole graph, whoever owns them, and each remote one is sent once or, if kept, never."""

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
from polyhop.errors import ConfigError
from polyhop.exchange.features import Fetched, RowFetch, RowFormat
from polyhop.graph import DenseFeatures, Graph, SparseRows
from polyhop.partition import Partition, cut, save_parts
from polyhop.sample.wire import Wire

MakeGraph = Callable[..., Graph]
Run = Callable[..., list[Any]]

RANKS = 3


def graph_of(make_graph: MakeGraph, kind: str) -> Graph:
    """60 nodes; a few loops, weights where ``weighted``."""
    if kind == "sparse":
        return make_graph(60, sparse=True)
    graph = make_graph(60, weighted=kind == "weighted")
    assert isinstance(graph.x, DenseFeatures)
    values = graph.x.values
    stores = {
        "float64": DenseFeatures(values.double() / 3),
        "bfloat16": DenseFeatures(values.bfloat16()),
        "int8": DenseFeatures((values * 30).clamp(-128, 127).to(torch.int8)),
        "uint8 scaled": DenseFeatures((values.abs() * 60).clamp(0, 255).to(torch.uint8), torch.rand(8) + 0.1),
    }
    return replace(graph, x=stores.get(kind, graph.x))


KINDS = ("float32", "float64", "bfloat16", "int8", "uint8 scaled", "sparse", "weighted")


def fetch_of(
    graph: Graph, shared: Partition, rank: int, dtype: str = "auto", *, plain: bool = False
) -> RowFetch:
    part = cut(graph, shared, rank)
    wire = Wire(graph.num_nodes, is_plain=plain)
    return RowFetch(part, RowFormat.of(part, graph.num_nodes, dtype, is_plain=plain), wire)


def fetch_each(
    line: Collective, graph: Graph, owner: Tensor, wanted: list[list[Tensor]], options: dict[str, Any]
) -> tuple[list[Fetched], list[Cost], int]:
    """This rank's answers to its lists of ids (the user's), one after the other, and what it sent for each."""
    shared = Partition(owner, line.num_ranks)
    fetch = fetch_of(
        graph, shared, line.rank, options.get("dtype", "auto"), plain=options.get("plain", False)
    )
    if "keep" in options:
        kept = shared.new_ids[options["keep"]]
        is_remote = (kept < shared.bounds[line.rank]) | (kept >= shared.bounds[line.rank + 1])
        fetch.keep(line, kept[is_remote].sort().values)
    found, costs = [], []
    for ids in wanted[line.rank]:
        before = line.traffic.now()
        found.append(fetch.fetch(line, shared.new_ids[ids]))
        costs.append(line.traffic.now() - before)
    return found, costs, fetch.num_cached


def assert_rows(got: Fetched, graph: Graph, ids: Tensor, expected: Tensor) -> None:
    """The rows and the facts of the whole graph, in the order of ids, bit for bit."""
    assert torch.equal(got.facts.user_ids, ids)
    assert torch.equal(got.facts.in_degree, graph.in_degree[ids])
    for mine, whole in ((got.facts.in_weight, graph.in_weight), (got.facts.loop_weight, graph.loop_weight)):
        assert (mine is None) == (whole is None)
        assert mine is None or whole is None or (mine.dtype == whole.dtype and torch.equal(mine, whole[ids]))
    if isinstance(got.x, SparseRows):
        assert got.x.ids is not None
        assert torch.equal(got.x.ids, ids)  # random keys go by the user's ids
        assert torch.equal(got.x.dense(), expected)
    else:
        assert got.x.dtype == expected.dtype
        assert torch.equal(got.x, expected)


def whole_rows(graph: Graph, ids: Tensor) -> Tensor:
    assert graph.x is not None
    rows = graph.x.gather(ids)
    return rows.dense() if isinstance(rows, SparseRows) else rows


def some_ids(owner: Tensor) -> list[list[Tensor]]:
    """For each rank: nothing; own alone; remote alone; all nodes shuffled; a few of any."""
    rng = torch.Generator().manual_seed(2)
    nodes = owner.numel()
    lists = []
    for rank in range(RANKS):
        mine, theirs = (owner == rank).nonzero()[:, 0], (owner != rank).nonzero()[:, 0]
        few = torch.randperm(nodes, generator=rng)[: 5 * rank]
        lists.append([torch.empty(0).long(), mine.flip(0), theirs, torch.randperm(nodes, generator=rng), few])
    return lists


OWNERS = {"even": torch.arange(60, dtype=torch.int32) % 3, "one empty": (torch.arange(60) % 2 * 2).int()}
WAYS: dict[str, dict[str, Any]] = {
    "compact": {},
    "plain": {"plain": True},
    "kept": {"keep": torch.arange(0, 60, 2)},
    "all kept": {"keep": torch.arange(60)},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_facts_of_the_whole_graph(make_graph: MakeGraph, kind: str, owner: Tensor, way: Any) -> None:
    graph = graph_of(make_graph, kind)
    assert graph.loop_weight is not None  # the planted graph has loops
    wanted = some_ids(owner)
    for rank, (found, _, _) in enumerate(run_in_threads(RANKS, fetch_each, graph, owner, wanted, way)):
        for ids, got in zip(wanted[rank], found, strict=True):
            assert_rows(got, graph, ids, whole_rows(graph, ids))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16", "int8", "uint8 scaled"])
def test_rounded_rows_are_the_same_for_owner_reader_and_cache(
    make_graph: MakeGraph, kind: str, dtype: str
) -> None:
    graph, owner = graph_of(make_graph, kind), OWNERS["even"]
    everyone = torch.randperm(60, generator=torch.Generator().manual_seed(3))
    wanted = [[everyone]] * RANKS
    runs = [
        run_in_threads(RANKS, fetch_each, graph, owner, wanted, {"dtype": dtype, **more})
        for more in ({}, {"keep": torch.arange(0, 60, 4)})
    ]
    expected = runs[0][0][0][0].x
    exact = whole_rows(graph, everyone)
    bound = {"float32": 0.0, "bfloat16": 2.0**-8, "int8": 0.5 / 127 + 1e-6}[dtype]
    if dtype in ("bfloat16", "int8") and kind in ("int8", "uint8 scaled"):
        bound = 0.0  # as small already
    worst = exact.abs().amax(dim=1, keepdim=True).double() * bound
    assert bool(((expected.double() - exact.double()).abs() <= worst).all())
    for run in runs:
        for found, _, _ in run:
            assert_rows(found[0], graph, everyone, expected)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "weighted", "sparse"])
def test_each_remote_row_is_sent_once_and_a_kept_one_never(
    make_graph: MakeGraph, kind: str, plain: bool
) -> None:
    graph, owner = graph_of(make_graph, kind), OWNERS["even"]
    keep = torch.arange(0, 60, 5)
    wanted = [[torch.arange(60)], [torch.arange(10, 50)], [torch.arange(20)]]
    lengths = None
    if kind == "sparse":
        assert graph.x is not None
        lengths = graph.x.all().indptr.diff()
    for kept in (torch.empty(0).long(), keep):
        options = {"plain": plain, "keep": kept}
        for rank, (_, costs, num_cached) in enumerate(
            run_in_threads(RANKS, fetch_each, graph, owner, wanted, options)
        ):
            assert num_cached == int((owner[kept] != rank).sum())
            asked = [ids[0][~torch.isin(ids[0], kept)] for ids in wanted]
            lent = [ids[owner[ids] == rank] for q, ids in enumerate(asked) if q != rank]
            each = (8 if plain else 4) + 4 + 4 + (8 if kind == "weighted" else 0)  # id, degree, loop, weight
            if lengths is None:
                each += 8 * (2 if kind == "bfloat16" else 4)
                expected = sum(each * ids.numel() for ids in lent)
            else:
                expected = sum((each + 4) * ids.numel() + 8 * int(lengths[ids].sum()) for ids in lent)
            assert costs[0].bytes["features"] == expected
            assert costs[0].messages["features"] == sum(ids.numel() > 0 for ids in lent)
            if plain:
                assert costs[0].bytes["ids"] == 8 * int((owner[asked[rank]] != rank).sum())


def test_nothing_but_lengths_is_sent_for_nothing(make_graph: MakeGraph) -> None:
    graph, owner = graph_of(make_graph, "float32"), OWNERS["even"]
    wanted = [[(owner == rank).nonzero()[:, 0]] for rank in range(RANKS)]
    for _, costs, _ in run_in_threads(RANKS, fetch_each, graph, owner, wanted, {}):
        assert set(costs[0].bytes) == {"sizes"}


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_parts_any_ids_any_cache(make_graph: MakeGraph, data: st.DataObject) -> None:
    nodes = st.integers(0, 59)
    owner = torch.tensor(data.draw(st.lists(st.integers(0, RANKS - 1), min_size=60, max_size=60))).int()
    wanted = [
        [torch.tensor(data.draw(st.lists(nodes, unique=True, max_size=20)), dtype=torch.int64)]
        for _ in range(RANKS)
    ]
    keep = torch.tensor(data.draw(st.lists(nodes, unique=True, max_size=30)), dtype=torch.int64)
    graph = graph_of(make_graph, data.draw(st.sampled_from(["weighted", "sparse"])))
    options = {"keep": keep, "plain": data.draw(st.booleans())}
    for rank, (found, _, _) in enumerate(run_in_threads(RANKS, fetch_each, graph, owner, wanted, options)):
        assert_rows(found[0], graph, wanted[rank][0], whole_rows(graph, wanted[rank][0]))


@pytest.mark.parametrize("kind", ["weighted", "sparse"])
def test_over_gloo(make_graph: MakeGraph, ranks: Run, kind: str) -> None:
    graph, owner = graph_of(make_graph, kind), OWNERS["one empty"]
    wanted = some_ids(owner)
    for rank, (found, _, _) in enumerate(ranks(RANKS, fetch_each, graph, owner, wanted, WAYS["kept"])):
        for ids, got in zip(wanted[rank], found, strict=True):
            assert_rows(got, graph, ids, whole_rows(graph, ids))


def test_sparse_rows_are_not_rounded(make_graph: MakeGraph) -> None:
    part = cut(make_graph(60, sparse=True), Partition(OWNERS["even"], 3), 0)
    with pytest.raises(ConfigError, match="feature_dtype='int8': this graph's features are sparse"):
        RowFormat.of(part, 60, "int8")


def test_a_graph_without_features(make_graph: MakeGraph) -> None:
    part = cut(replace(make_graph(60), x=None), Partition(OWNERS["even"], 3), 0)
    with pytest.raises(ConfigError, match="has no features"):
        RowFormat.of(part, 60, "auto")


def test_ids_are_wide_only_where_they_must_be(make_graph: MakeGraph) -> None:
    part = cut(make_graph(60), Partition(OWNERS["even"], 3), 0)
    assert RowFormat.of(part, 2**31 - 1, "auto").fact_bytes == 12
    assert RowFormat.of(part, 2**31, "auto").fact_bytes == 16
    assert RowFormat.of(part, 60, "auto", is_plain=True).fact_bytes == 16


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "int8"])
@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16", "int8", "uint8 scaled"])
def test_rows_on_disk_are_sent_as_those_in_memory(
    make_graph: MakeGraph, tmp_path: Path, kind: str, dtype: str
) -> None:
    graph = graph_of(make_graph, kind)
    folder = save_parts(graph, Partition(OWNERS["even"], RANKS), tmp_path / "parts")
    rows = torch.tensor([7, 0, 3, 19])
    formats = []
    for where in ("memory", "disk"):
        part = folder.part(1, features=where)
        fetch = RowFetch(part, RowFormat.of(part, graph.num_nodes, dtype), Wire(graph.num_nodes))
        assert part.x is not None
        sent = fetch.format.encode(rows, part.x, fetch.own_facts(rows))
        arrived, _ = fetch.format.decode(sent, rows.numel(), part.x)
        own = fetch.own(rows)
        assert isinstance(arrived, Tensor)
        assert isinstance(own, Tensor)
        assert torch.equal(arrived, own)
        formats.append((fetch.format, sent, own))
    (of_memory, sent_of_memory, own_of_memory), (of_disk, sent_of_disk, own_of_disk) = formats
    assert of_memory == of_disk
    assert torch.equal(sent_of_memory, sent_of_disk)
    assert torch.equal(own_of_memory, own_of_disk)
