"""Graphs on a device: the same mini-batches wherever lists and rows lie. The device is the CPU; ``tests/gpu`` has CUDA."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polyhop.errors import ConfigError, InputError
from polyhop.graph import DenseFeatures, Graph, PlacedFeatures, SparseRows
from polyhop.kernels import transpose
from polyhop.kernels.sample import has_device_kernel
from polyhop.nn import GraphSAGE
from polyhop.sample import Loaded, NeighborLoader, loader
from polyhop.strategies import Placement, WholeGraph, single
from polyhop.strategies.placed import Placed, place_graph
from polyhop.train.loss import cross_entropy_sum
from polyhop.trainer import Trainer

MakeGraph = Callable[..., Graph]
CPU = torch.device("cpu")
FAN_OUTS = [4, 3]


def placed(graph: Graph, *, room: int = 1 << 30, cache: int | None = None) -> Placed | None:
    assert graph.split is not None
    return place_graph(
        graph, CPU, room, cache=cache, train_ids=graph.split.train, batch_size=16, num_neighbors=FAN_OUTS
    )


def batches(graph: Graph, device: torch.device | None = None) -> list[Loaded]:
    return list(NeighborLoader(graph, FAN_OUTS, batch_size=16, seed=5, device=device).batches(2))


def values(loaded: Loaded) -> list[torch.Tensor]:
    x = loaded.x.dense() if isinstance(loaded.x, SparseRows) else loaded.x
    assert x is not None
    assert loaded.y is not None
    found = [x, loaded.y, loaded.batch.seeds]
    for block in loaded.batch.blocks:
        found += [value for value in vars(block).values() if isinstance(value, torch.Tensor)]
    return found


@pytest.mark.parametrize("cache", [None, 0, 1000, 10**6])
@pytest.mark.parametrize("given", [{}, {"kind": "multi"}, {"weighted": True}, {"sparse": True}], ids=str)
def test_the_same_mini_batches(make_graph: MakeGraph, cache: int | None, given: dict[str, object]) -> None:
    graph = make_graph(200, **given)
    found = placed(graph, cache=cache)
    if found is None:
        assert "sparse" in given
        assert cache in (0, 1000), "they fit"
        return
    for one, two in zip(batches(graph), batches(found.graph, CPU), strict=True):
        for a, b in zip(values(one), values(two), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8])
def test_rows_stay_as_they_are_stored(make_graph: MakeGraph, dtype: torch.dtype) -> None:
    graph = make_graph(200)
    assert graph.x is not None
    rows = (graph.x.all() * 10).to(dtype)
    scale = torch.rand(rows.shape[1]) if dtype == torch.int8 else None
    graph = replace(graph, x=DenseFeatures(rows, scale))
    found = placed(graph, cache=rows[:50].numel() * rows.element_size())
    assert found is not None
    assert found.num_hot == 50
    assert isinstance(found.graph.x, PlacedFeatures)
    assert found.graph.x.hot.dtype == found.graph.x.dtype == dtype
    ids = torch.tensor([3, 199, 0, 3])
    assert graph.x is not None
    assert torch.equal(found.graph.x.gather(ids), graph.x.gather(ids))
    assert torch.equal(found.graph.x.all(), graph.x.all())
    assert (found.graph.x.num_rows, found.graph.x.num_features) == tuple(rows.shape)


def test_rows_that_mini_batches_read_most_are_kept(make_graph: MakeGraph) -> None:
    graph = make_graph(200)
    assert graph.x is not None
    found = placed(graph, cache=60 * 4 * graph.num_features)
    assert found is not None
    assert isinstance(found.graph.x, PlacedFeatures)
    is_hot = found.graph.x.place < found.num_hot
    read = torch.zeros(200)
    for epoch in range(60):
        for loaded in NeighborLoader(graph, FAN_OUTS, batch_size=16, seed=7, gather=False).batches(epoch):
            read[loaded.batch.input_ids] += 1
    best = torch.sort(read, descending=True).values[:60].sum()
    assert int(is_hot.sum()) == 60
    assert read[is_hot].sum() > 0.97 * best


def test_what_a_device_cannot_hold(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = make_graph(200)
    assert placed(graph, room=100) is None, "the lists do not fit"
    assert graph.x is not None
    mapped = replace(graph, x=DenseFeatures(graph.x.all(), is_mapped=True))
    assert placed(mapped) is None
    lists = 8 * 201 + graph.indices.numel() * graph.indices.element_size() + 8 * 200
    some = placed(graph, room=lists + 20 * 200 + 50 * 4 * graph.num_features)
    assert some is not None
    assert some.num_hot == 50, "what the lists leave"
    assert "50 of 200 input rows" in some.note
    assert "others are read from the host's memory" in some.note


def test_moved_graphs_keep_what_is_derived(make_graph: MakeGraph) -> None:
    graph = make_graph(200, weighted=True)
    moved = graph.to("cpu")
    assert graph.in_weight is not None
    assert moved.in_weight is not None
    assert torch.equal(moved.in_weight, graph.in_weight)
    assert (moved.loop_weight is None) == (graph.loop_weight is None)
    assert moved.split is graph.split


def test_a_cache_of_a_device_that_is_not_there(make_graph: MakeGraph) -> None:
    graph = make_graph(200)
    model = GraphSAGE(graph.num_features, 8, num_layers=2, out_channels=graph.num_classes)
    trainer = Trainer(
        max_epochs=1, num_neighbors=FAN_OUTS, batch_size=50, device="cpu", device_cache="1MB", progress="none"
    )
    with pytest.raises(ConfigError, match="rows are read where they are; leave it out"):
        trainer.fit(model, graph)


class TestUnasked:
    """On a CUDA device that is not there: what would be placed is, in memory."""

    @pytest.fixture(autouse=True)
    def device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.asked = 1 << 30, []

        def place(graph: Graph, device: torch.device, room: int, **given: Any) -> Placed | None:
            self.asked.append((device.type, room, given["cache"]))
            return place_graph(graph, CPU, room, **given)

        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 1 << 40))
        monkeypatch.setattr(single, "place_graph", place)
        monkeypatch.setattr(single, "has_device_kernel", lambda fan_outs, sampler: sampler == "uniform")

    def place(self, graph: Graph, device: str = "cuda", **given: Any) -> tuple[Placed | None, str | None]:
        assert graph.split is not None
        options = Trainer(num_neighbors=FAN_OUTS, **given)
        config = single.Config(FAN_OUTS, sampler=options.sampler, device_room=options.device_room)
        return single._placed(graph, FAN_OUTS, graph.split.train, config, Placement(torch.device(device)))

    def test_what_fits_half_of_the_free_memory_is_there(self, make_graph: MakeGraph) -> None:
        found, note = self.place(make_graph(200))
        assert found is not None
        assert found.is_whole
        assert self.asked == [("cuda", self.free // 2, None)]
        assert note is not None
        assert note.startswith("on the device: the graph's lists and 200 of 200 input rows")
        assert "device_cache=0" in note

    def test_what_was_asked_for_is_done(self, make_graph: MakeGraph) -> None:
        graph = make_graph(200)
        assert self.place(graph, device_cache=0) == (None, None)
        assert self.place(graph, device_cache="0") == (None, None)
        assert self.place(graph, device="cpu") == (None, None)
        assert self.asked == []
        found, note = self.place(graph, device_cache=1000)
        assert found is not None
        assert note == found.note
        assert self.asked == [("cuda", self.free // 2, 1000)]

    def test_what_does_not_fit_stays_and_is_told(self, make_graph: MakeGraph) -> None:
        graph, self.free = make_graph(200), 100
        found, note = self.place(graph)
        assert found is None
        assert note is not None
        assert "mini-batches are drawn on the CPU: the graph cannot be on cuda" in note
        with pytest.raises(ConfigError, match="leave device_cache out"):
            self.place(graph, device_cache=1000)

    def test_draws_without_a_kernel_stay_unless_asked_for(self, make_graph: MakeGraph) -> None:
        graph = make_graph(200)
        found, note = self.place(graph, sampler="labor")
        assert found is None
        assert note == "mini-batches are drawn on the CPU: the device has no kernel for such draws"
        found, _ = self.place(graph, sampler="labor", device_cache="1MB")
        assert found is not None


def test_which_draws_have_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("POLYHOP_KERNELS", "auto")
    assert has_device_kernel([15, 10, 5], "uniform")
    assert not has_device_kernel([15, -1], "uniform")
    assert not has_device_kernel([15, 40], "uniform")
    assert not has_device_kernel([15], "labor")
    monkeypatch.setenv("POLYHOP_KERNELS", "reference")
    assert not has_device_kernel([15, 10, 5], "uniform")


def test_transposed_edges_come_along(make_graph: MakeGraph) -> None:
    graph = make_graph(200)
    for loaded in NeighborLoader(graph, FAN_OUTS, batch_size=16, device=CPU, transposes=True).batches(0):
        first, second = loaded.batch.blocks
        assert "t" not in first._cache
        assert torch.equal(
            second._cache["t"].indptr, transpose(second.indptr, second.indices, second.num_src)[0]
        )
        made = {tensor.data_ptr() for tensor in loader._tensors(loaded)}
        assert second._cache["t"].edge.data_ptr() in made, "memory that is handed over is known to be"


def test_rows_that_are_too_few_are_told(make_graph: MakeGraph) -> None:
    graph = make_graph(200)
    assert graph.x is not None
    short = replace(graph, x=DenseFeatures(graph.x.all()[:100]))
    with pytest.raises(InputError, match="200 nodes, ids of which are outside the 100 stored rows"):
        NeighborLoader(short, FAN_OUTS, device=CPU)


def test_a_failed_draw_is_told_where_it_is_waited_for(make_graph: MakeGraph) -> None:
    graph = make_graph(200)
    assert graph.x is not None
    short = replace(graph, x=DenseFeatures(graph.x.all()[:100]))
    with pytest.raises(Exception, match="outside the 100 stored rows"):
        batches(short, CPU)


def test_a_closed_step_keeps_no_graph(make_graph: MakeGraph) -> None:
    """Whoever still refers to it: what a device holds is not left to a collector that knows nothing of its memory."""
    graph = make_graph(200)
    assert graph.split is not None
    model = GraphSAGE(graph.num_features, 8, num_layers=2, out_channels=graph.num_classes)
    step = single.build(
        model, graph, single.Config(FAN_OUTS), train_ids=graph.split.train, whole=WholeGraph(graph, Placement(CPU)),
        loss=cross_entropy_sum,
    )  # fmt: skip
    held = weakref.ref(step._loader)
    assert step.num_steps == 1
    step.close()
    assert held() is None
    with pytest.raises(AssertionError, match="the step is closed"):
        step.batches(0)


def test_the_device_of_a_run_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    Placement(CPU).make_current()
    Placement(torch.device("cuda", 1)).make_current()
    assert asked == [torch.device("cuda", 1)]
