"""NeighborLoader: epochs as pure functions, whole coverage, and the same batches from any number of threads."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from polyhop.errors import ConfigError, InputError
from polyhop.graph import DenseFeatures, Graph, SparseRows
from polyhop.nn import GraphSAGE
from polyhop.sample import Loaded, NeighborLoader

MakeGraph = Callable[..., Graph]


def assert_same(a: list[Loaded], b: list[Loaded]) -> None:
    assert [loaded.batch.step for loaded in a] == [loaded.batch.step for loaded in b]
    for one, two in zip(a, b, strict=True):
        assert torch.equal(one.batch.seeds, two.batch.seeds)
        for x, y in zip(one.batch.blocks, two.batch.blocks, strict=True):
            assert torch.equal(x.indptr, y.indptr)
            assert torch.equal(x.indices, y.indices)
            assert torch.equal(x.src_ids, y.src_ids)
        assert torch.equal(one.x, two.x)
        assert torch.equal(one.y, two.y)


def test_an_epoch_covers_each_input_node_once(make_graph: MakeGraph) -> None:
    graph = make_graph(200)
    loader = NeighborLoader(graph, [3, 3], batch_size=16)
    assert len(loader) == 7
    loaded = list(loader.batches(0))
    assert [item.batch.step for item in loaded] == list(range(7))
    assert [item.batch.seeds.numel() for item in loaded] == [16] * 6 + [4]
    seeds = torch.cat([item.batch.seeds for item in loaded])
    assert graph.split is not None
    assert torch.equal(seeds.sort().values, graph.split.train)
    assert not torch.equal(seeds, graph.split.train), "shuffled"


def test_rows_and_labels_belong_to_the_batch(make_graph: MakeGraph) -> None:
    graph = make_graph(200)
    assert graph.x is not None
    assert graph.y is not None
    features = graph.x.all()
    for item in NeighborLoader(graph, [4, 2], batch_size=30).batches(1):
        assert torch.equal(item.x, features[item.batch.input_ids])
        assert torch.equal(item.y, graph.y[item.batch.seeds])


def test_multilabel_and_sparse_features(make_graph: MakeGraph) -> None:
    graph = make_graph(200, kind="multi", sparse=True)
    item = next(NeighborLoader(graph, [4], batch_size=30, num_workers=0).batches(0))
    assert isinstance(item.x, SparseRows)
    assert item.x.shape == (item.batch.input_ids.numel(), graph.num_features)
    assert torch.equal(item.y, graph.y[item.batch.seeds])


def test_without_features_or_gather(make_graph: MakeGraph) -> None:
    graph = make_graph(100)
    assert next(NeighborLoader(graph, [2], gather=False, num_workers=0).batches(0)).x is None
    bare = Graph(graph.indptr, graph.indices)
    item = next(NeighborLoader(bare, [2], num_workers=0).batches(0))
    assert (item.x, item.y) == (None, None)
    assert item.batch.seeds.numel() == 100, "all nodes, where there is no split"


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_batches_do_not_depend_on_threads(make_graph: MakeGraph, num_workers: int) -> None:
    graph = make_graph(300)
    expected = list(NeighborLoader(graph, [5, 5], batch_size=10, num_workers=0).batches(4))
    given = NeighborLoader(graph, [5, 5], batch_size=10, num_workers=num_workers, prefetch=4)
    assert_same(list(given.batches(4)), expected)


def test_resuming_gives_the_tail_of_the_epoch(make_graph: MakeGraph) -> None:
    graph = make_graph(300)
    loader = NeighborLoader(graph, [5, 5], batch_size=10)
    whole = list(loader.batches(2))
    for start in (0, 1, 9, len(loader)):
        assert_same(list(loader.batches(2, start_step=start)), whole[start:])


def test_orders_differ_by_epoch_and_seed_only(make_graph: MakeGraph) -> None:
    graph = make_graph(200)
    order = NeighborLoader(graph, [2]).order(3)
    assert torch.equal(order, NeighborLoader(graph, [9, 9], batch_size=7).order(3))
    assert not torch.equal(order, NeighborLoader(graph, [2]).order(4))
    assert not torch.equal(order, NeighborLoader(graph, [2], seed=1).order(3))


def test_without_shuffle_the_given_order_holds(make_graph: MakeGraph) -> None:
    given = torch.tensor([7, 3, 150, 9], dtype=torch.int32)
    loader = NeighborLoader(make_graph(200), [2], given, batch_size=3, shuffle=False)
    assert [item.batch.seeds.tolist() for item in loader.batches(0)] == [[7, 3, 150], [9]]


def test_drop_last(make_graph: MakeGraph) -> None:
    graph = make_graph(200)
    loader = NeighborLoader(graph, [2], batch_size=16, drop_last=True)
    assert len(loader) == 6
    assert [item.batch.seeds.numel() for item in loader.batches(0)] == [16] * 6
    assert list(NeighborLoader(graph, [2], batch_size=1000, drop_last=True).batches(0)) == []


def test_a_mask_names_its_nodes(make_graph: MakeGraph) -> None:
    mask = torch.zeros(200, dtype=torch.bool)
    mask[[5, 199, 17]] = True
    loader = NeighborLoader(make_graph(200), [2], mask, shuffle=False)
    assert loader.input_nodes.tolist() == [5, 17, 199]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (torch.tensor([0, 200]), "holds 200: this graph has nodes 0 .. 199"),
        (torch.tensor([-3]), "holds -3"),
        (torch.tensor([1, 2, 1]), "twice"),
        (torch.empty(0, dtype=torch.int64), "empty"),
        (torch.tensor([0.5]), "expected ids"),
        (torch.ones(3, dtype=torch.bool), r"mask: expected \[200\]"),
    ],
)
def test_bad_input_nodes(make_graph: MakeGraph, nodes: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        NeighborLoader(make_graph(200), [2], nodes)


def test_bad_options(make_graph: MakeGraph) -> None:
    graph = make_graph(200)
    for name, value in (("batch_size", 0), ("num_workers", -1), ("prefetch", 0)):
        with pytest.raises(ConfigError, match=f"{name} = {value}"):
            NeighborLoader(graph, [2], **{name: value})
    with pytest.raises(ConfigError, match="start_step = 9"):
        NeighborLoader(graph, [2]).batches(0, start_step=9)
    with pytest.raises(ConfigError, match="num_neighbors"):
        NeighborLoader(graph, [])


def test_a_worker_s_error_reaches_the_consumer(make_graph: MakeGraph) -> None:
    """A graph spoilt after the loader was made: the sampler's own error arrives, and no thread stays."""
    graph = make_graph(200)
    loader = NeighborLoader(graph, [2], batch_size=10, num_workers=2)
    loader.input_nodes[loader.input_nodes == loader.order(0)[35]] = 200
    with pytest.raises(InputError, match="= 200: this graph has 200 nodes"):
        list(loader.batches(0))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("polyhop-ahead")]


def test_an_abandoned_loader_does_not_spoil_the_exit() -> None:
    """The interpreter leaves while threads are inside the library: no crash, no wait."""
    code = """
import torch
from polyhop.graph import Graph
from polyhop.sample import NeighborLoader
graph = Graph(torch.arange(50_001) * 20, torch.randint(50_000, (1_000_000,)))
batches = NeighborLoader(graph, [10, 10, 10], batch_size=5000, num_workers=2, prefetch=4).batches(0)
next(batches)
print("done")
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (out.stdout.strip(), out.stderr, out.returncode) == ("done", "", 0)


def digest() -> str:
    """One number for an epoch, computed here and in another process."""
    rng = torch.Generator().manual_seed(0)
    indices = torch.randint(500, (5000,), generator=rng)
    loader = NeighborLoader(Graph(torch.arange(501) * 10, indices), [4, 4], batch_size=64, num_workers=2)
    sha = hashlib.sha256()
    for item in loader.batches(1):
        sha.update(item.batch.input_ids.numpy().tobytes())
        sha.update(item.batch.blocks[0].indices.numpy().tobytes())
    return sha.hexdigest()


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_another_process_loads_the_same(kernels: str) -> None:
    code = f"import runpy; print(runpy.run_path({__file__!r})['digest']())"
    env = {**os.environ, "POLYHOP_KERNELS": kernels}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == digest()


def test_rows_read_in_place_give_what_gathered_rows_give(make_graph: MakeGraph) -> None:
    graph = make_graph(200)
    assert isinstance(graph.x, DenseFeatures)
    torch.manual_seed(0)
    model = GraphSAGE(graph.num_features, 8, num_layers=2, out_channels=3)
    gathered = NeighborLoader(graph, [3, 2], batch_size=16)
    in_place = NeighborLoader(graph, [3, 2], batch_size=16, in_place=True)
    for a, b in zip(gathered.batches(0), in_place.batches(0), strict=True):
        assert b.x is graph.x.values
        rows = b.batch.blocks[0].rows
        assert rows is not None
        assert torch.equal(rows, a.batch.input_ids)
        torch.testing.assert_close(model(a.x, a.batch.blocks), model(b.x, b.batch.blocks), rtol=0, atol=0)


def test_in_place_gathers_where_the_features_are_not_one_float_matrix(make_graph: MakeGraph) -> None:
    plain = make_graph(200)
    graph = replace(plain, x=DenseFeatures(plain.x.all().to(torch.bfloat16)))
    loaded = next(NeighborLoader(graph, [3], batch_size=16, in_place=True, num_workers=0).batches(0))
    assert loaded.batch.blocks[0].rows is None
    assert loaded.x.shape[0] == loaded.batch.input_ids.numel()
