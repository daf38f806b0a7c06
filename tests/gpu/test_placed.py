"""Mini-batches drawn and gathered by a CUDA device: those of the CPU, wherever lists and rows lie; weights of the CPU."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyhop.graph import Graph, PlacedFeatures
from polyhop.kernels import Sampler
from polyhop.nn import GAT, GCN, GraphSAGE
from polyhop.sample import NeighborLoader
from polyhop.strategies.placed import place_graph
from polyhop.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
FAN_OUTS = [4, 3]
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "gcn": lambda f, c: GCN(f, 12, num_layers=2, out_channels=c, dropout=0.5),
    "sage": lambda f, c: GraphSAGE(f, 12, num_layers=2, out_channels=c, dropout=0.5),
    "gat": lambda f, c: GAT(f, 8, num_layers=2, out_channels=c, heads=2, dropout=0.4),
}


@pytest.mark.parametrize("cache", [None, 0, 1000])
@pytest.mark.parametrize("given", [{}, {"kind": "multi"}, {"weighted": True}], ids=str)
def test_the_same_mini_batches(
    make_graph: Callable[..., Graph], cache: int | None, given: dict[str, object]
) -> None:
    graph = make_graph(200, **given)
    assert graph.split is not None
    found = place_graph(
        graph, CUDA, 1 << 30, cache=cache, train_ids=graph.split.train, batch_size=16, num_neighbors=FAN_OUTS
    )
    assert found is not None
    assert cache is None or isinstance(found.graph.x, PlacedFeatures)
    here = NeighborLoader(graph, FAN_OUTS, batch_size=16, seed=5)
    there = NeighborLoader(found.graph, FAN_OUTS, batch_size=16, seed=5, device=CUDA)
    for epoch in range(3):
        for one, two in zip(here.batches(epoch), there.batches(epoch), strict=True):
            assert two.batch.blocks[0].device == CUDA
            assert two.x is not None
            assert one.y is not None
            assert two.y is not None
            assert torch.equal(one.x, two.x.cpu())
            assert torch.equal(one.y, two.y.cpu())
            for a, b in zip(one.batch.blocks, two.batch.blocks, strict=True):
                for name, value in vars(a).items():
                    if isinstance(value, torch.Tensor):
                        assert torch.equal(value, getattr(b, name).cpu()), name


@pytest.mark.parametrize("cache", [None, 0, 1000])
def test_threads_far_ahead_of_the_device(make_graph: Callable[..., Graph], cache: int | None) -> None:
    """What is handed over is there when the device comes to it, and not overwritten before: results are read long after."""
    graph = make_graph(200)
    assert graph.split is not None
    found = place_graph(
        graph, CUDA, 1 << 30, cache=cache, train_ids=graph.split.train, batch_size=8, num_neighbors=FAN_OUTS
    )
    assert found is not None
    ids, given = torch.arange(200), {"batch_size": 8, "seed": 5}
    here = NeighborLoader(graph, FAN_OUTS, ids, **given)  # type: ignore[arg-type]
    there = NeighborLoader(
        found.graph, FAN_OUTS, ids, device=CUDA, num_workers=2, prefetch=3, transposes=True, **given
    )  # type: ignore[arg-type]
    work, sums = torch.randn(3000, 3000, device=CUDA), []
    for epoch in range(4):
        for two in there.batches(epoch):
            work = torch.nn.functional.normalize(work @ work)  # the device is busy meanwhile
            block, turned = two.batch.blocks[1], two.batch.blocks[1].transposed()
            parts = (two.x, two.batch.input_ids, block.indices, turned.indptr, turned.indices, turned.edge)
            sums.append([part.double().sum() for part in parts if isinstance(part, torch.Tensor)])
    found_sums = torch.tensor([[float(each) for each in step] for step in sums])
    expected = []
    for epoch in range(4):
        for one in here.batches(epoch):
            block, turned = one.batch.blocks[1], one.batch.blocks[1].transposed()
            parts = (one.x, one.batch.input_ids, block.indices, turned.indptr, turned.indices, turned.edge)
            expected.append([float(part.double().sum()) for part in parts if isinstance(part, torch.Tensor)])
    torch.testing.assert_close(found_sums, torch.tensor(expected))


def _waits(work: Callable[[], Any]) -> tuple[Any, int]:
    """What work gives, and how often torch waited for the device in it."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # which warns, once, that it may miss some
        try:
            made = work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return made, sum("called a synchronizing CUDA operation" in str(each.message) for each in seen)


@pytest.mark.parametrize("cache", [None, 0])
def test_a_step_waits_once_and_training_never(make_graph: Callable[..., Graph], cache: int | None) -> None:
    graph = make_graph(200)
    assert graph.split is not None
    assert graph.y is not None
    found = place_graph(
        graph, CUDA, 1 << 30, cache=cache, train_ids=graph.split.train, batch_size=16, num_neighbors=FAN_OUTS
    )
    assert found is not None
    loader = NeighborLoader(
        found.graph,
        FAN_OUTS,
        batch_size=16,
        device=CUDA,
        num_workers=0,
        in_place=cache is None,
        transposes=True,
    )
    model = GraphSAGE(graph.num_features, 12, num_layers=2, out_channels=graph.num_classes).cuda()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def train(loaded: Any) -> torch.Tensor:
        logits = model(loaded.x, list(loaded.batch.blocks))
        loss = torch.nn.functional.cross_entropy(logits, loaded.y, reduction="sum")
        loss.backward()
        optimizer.step()
        return loss.detach()

    for loaded in loader.batches(0):  # kernels are compiled, and what is kept is made
        train(loaded)
    batches = loader.batches(1)
    for _ in range(3):
        loaded, waits = _waits(lambda: next(batches))
        assert waits <= 1
        _, waits = _waits(lambda loaded=loaded: train(loaded))
        assert waits == 0


def test_placed_unasked(make_graph: Callable[..., Graph], capsys: pytest.CaptureFixture[str]) -> None:
    graph = make_graph(200)
    told = []
    for given in ({}, {"device_cache": 0}, {"sampler": "labor"}):
        model = GraphSAGE(graph.num_features, 12, num_layers=2, out_channels=graph.num_classes)
        Trainer(max_epochs=1, num_neighbors=FAN_OUTS, device="cuda", progress="plain", **given).fit(
            model, graph
        )  # type: ignore[arg-type]
        both = capsys.readouterr()
        told.append(both.out + both.err)
    assert "on the device: the graph's lists and 200 of 200 input rows" in told[0]
    assert "on the device" not in told[1]
    assert "mini-batches are drawn on the CPU: the device has no kernel for such draws" in told[2]


def test_mini_batches_of_the_host_are_brought(make_graph: Callable[..., Graph]) -> None:
    graph = make_graph(200, sparse=True)
    here = NeighborLoader(graph, FAN_OUTS, batch_size=16, seed=5)
    there = NeighborLoader(graph, FAN_OUTS, batch_size=16, seed=5, device=CUDA, num_workers=2)
    for one, two in zip(here.batches(0), there.batches(0), strict=True):
        assert two.x is not None
        assert two.x.device == CUDA
        assert torch.equal(one.x.dense(), two.x.dense().cpu())
        assert torch.equal(one.batch.blocks[1].indices, two.batch.blocks[1].indices.cpu())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lists_in_pinned_memory(make_graph: Callable[..., Graph], dtype: torch.dtype) -> None:
    graph = make_graph(200)
    seeds = torch.arange(0, 200, 7)
    indices = graph.indices.to(dtype)
    one = Sampler(graph.indptr, indices).sample(seeds, [3, -1], [7, 8])
    two = Sampler(graph.indptr.cuda(), indices.pin_memory()).sample(seeds.cuda(), [3, -1], [7, 8])
    assert torch.equal(one.src_ids, two.src_ids.cpu())
    for a, b in zip(one.layers, two.layers, strict=True):
        assert torch.equal(a.indices, b.indices.cpu())


@pytest.mark.parametrize("cache", [None, 0, 1, 1000, "1MB"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_of_the_cpu(make_graph: Callable[..., Graph], name: str, cache: int | str | None) -> None:
    graph = make_graph()
    found = []
    for given in ({"device": "cpu"}, {"device": "cuda", "device_cache": cache}):
        torch.manual_seed(7)
        model = MODELS[name](graph.num_features, graph.num_classes)
        options: dict[str, Any] = {"max_epochs": 3, "batch_size": 20, "num_neighbors": FAN_OUTS, **given}
        trainer = Trainer("single", precision="64-true", progress="none", seed=3, eval_every=100, **options)
        trainer.fit(model, graph)
        found.append({key: value.cpu() for key, value in model.state_dict().items()})
    for key, value in found[0].items():
        assert float((found[1][key] - value).abs().max()) <= 1e-9, key


def test_memory_of_the_host_is_given_back(make_graph: Callable[..., Graph]) -> None:
    graph = make_graph(200)
    assert graph.split is not None
    assert graph.x is not None
    found = place_graph(
        graph, CUDA, 1 << 30, cache=0, train_ids=graph.split.train, batch_size=16, num_neighbors=FAN_OUTS
    )
    assert found is not None
    assert isinstance(found.graph.x, PlacedFeatures)
    values = found.graph.x.rest
    assert values.is_pinned()
    assert values.data_ptr() == graph.x.all().data_ptr(), "registered where it is"
    ids = torch.tensor([5, 0, 5], device=CUDA)
    assert torch.equal(found.graph.x.gather(ids).cpu(), values[ids.cpu()])
    del found
    gc.collect()
    assert not values.is_pinned()
