"""Features read from disk train, evaluate and predict as the same features in memory do, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.datasets import load, save
from polyhop.errors import ConfigError
from polyhop.graph import DenseFeatures, DiskFeatures, Graph, in_feature_store
from polyhop.partition import PartitionFolder, open_parts, partition, save_parts
from polyhop.trainer import Trainer

MakeGraph = Callable[..., Graph]
SEEDING = threading.Lock()


def trainer(strategy: str = "single", **more: Any) -> Trainer:
    given = {
        "batch_size": 20,
        "num_neighbors": [4, 3],
        "max_epochs": 2,
        "seed": 3,
        "device": "cpu",
        "progress": "none",
    }
    return Trainer(strategy, **{**given, **more})


def make_model(num_features: int, num_classes: int) -> torch.nn.Module:
    with SEEDING:
        torch.manual_seed(7)
        return nn.GraphSAGE(num_features, 8, num_layers=2, out_channels=num_classes, dropout=0.5)


def opened(graph: Graph, folder: Path) -> Graph:
    """The graph from a folder of .npy files, every node labelled."""
    assert graph.y is not None
    return load(save(replace(graph, y=graph.y.clamp(min=0)), folder / "graph"))


def fit(
    line: Collective, folder: PartitionFolder, strategy: str, features: str
) -> tuple[dict[str, Tensor], Tensor]:
    held = folder.share(line.rank, line.num_ranks, features=features)
    assert isinstance(held.x, DiskFeatures) == (features == "disk")
    model = make_model(held.num_features, held.num_classes)
    trainer(strategy, feature_store=features, memory="200kB").fit(model, held, line=line)
    predicted = trainer(strategy, feature_store=features, memory="20kB").predict(model, held, line=line)
    assert isinstance(predicted, Tensor)
    return model.state_dict(), predicted


@pytest.mark.parametrize("strategy", ["data", "macro"])
@pytest.mark.parametrize("num_parts", [2, 4])
@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_ranks_with_features_on_disk(
    make_graph: MakeGraph, tmp_path: Path, strategy: str, num_parts: int, stored: str
) -> None:
    graph = make_graph()
    if stored == "int8":
        assert isinstance(graph.x, DenseFeatures)
        small = (graph.x.values * 20).clamp(-128, 127).to(torch.int8)
        graph = replace(graph, x=DenseFeatures(small, torch.rand(graph.num_features) / 20))
    folder = save_parts(graph, partition(graph, num_parts, "hash"), tmp_path / "parts")
    runs = [run_in_threads(2, fit, folder, strategy, where) for where in ("auto", "memory", "disk")]
    for other in runs[1:]:
        for (weights, predicted), (expected, rows) in zip(other, runs[0], strict=True):
            assert all(torch.equal(weights[name], value) for name, value in expected.items())
            assert torch.equal(predicted, rows)


@pytest.mark.parametrize("fan_outs", [[4, 3], None])
def test_one_process_with_features_on_disk(
    make_graph: MakeGraph, tmp_path: Path, fan_outs: list[int] | None
) -> None:
    graph = opened(make_graph(), tmp_path)
    more: dict[str, Any] = {"num_neighbors": fan_outs, "memory": "20kB"} | (
        {} if fan_outs else {"batch_size": None}
    )
    found = []
    for where in ("auto", "memory", "mapped", "disk"):
        model = make_model(graph.num_features, graph.num_classes)
        run = trainer(feature_store=where, **more)
        run.fit(model, graph)
        found.append((model.state_dict(), run.predict(model, graph), run.evaluate(model, graph)))
    for weights, predicted, scores in found[1:]:
        assert all(torch.equal(weights[name], value) for name, value in found[0][0].items())
        assert torch.equal(torch.as_tensor(predicted), torch.as_tensor(found[0][1]))
        assert scores == found[0][2]


def test_a_run_goes_on_with_its_features_elsewhere(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = opened(make_graph(), tmp_path)
    alone = make_model(graph.num_features, graph.num_classes)
    trainer(max_epochs=4).fit(alone, graph)
    model = make_model(graph.num_features, graph.num_classes)
    trainer(feature_store="disk", run_dir=tmp_path / "run").fit(model, graph)
    trainer(max_epochs=4, run_dir=tmp_path / "run", resume="auto").fit(model, graph)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in alone.state_dict().items())


def test_rows_of_training_come_from_the_disk(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = opened(make_graph(), tmp_path)
    moved = in_feature_store(graph, "disk")
    assert isinstance(moved.x, DiskFeatures)
    model = make_model(graph.num_features, graph.num_classes)
    result = trainer(max_epochs=1, feature_store="disk").fit(model, moved)
    assert result.history[0]["pages_read"] == moved.x.pages_read
    assert moved.x.counts.num_rows > graph.num_nodes
    assert moved.x.counts.bytes_read == 4096 * moved.x.counts.pages_read


def test_features_in_memory_are_not_on_disk(make_graph: MakeGraph) -> None:
    graph = make_graph()
    with pytest.raises(ConfigError, match="feature_store='disk': the graph's features are in memory"):
        trainer(feature_store="disk").fit(make_model(graph.num_features, graph.num_classes), graph)
    with pytest.raises(ConfigError, match="unknown feature_store 'tape'"):
        trainer(feature_store="tape")


def test_opening_a_folder_reads_no_large_array(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Edges and features stay in their files: what is opened is mapped, or not touched at all."""
    graph = make_graph()
    save_parts(graph, partition(graph, 2, "hash"), tmp_path / "parts")
    monkeypatch.setattr(
        "polyhop.partition.folder._SMALL", 0
    )  # as if every file were too large to be read whole
    read: list[str] = []
    monkeypatch.setattr("polyhop.partition.folder.digest_file", lambda path: read.append(str(path)))
    part = open_parts(tmp_path / "parts").part(1, features="disk")
    assert not read
    assert isinstance(part.x, DiskFeatures)
    assert part.x.bytes_read == 0
    assert not torch.is_tensor(part.x)
