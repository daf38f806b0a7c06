"""What training leaves for reports: every byte between layers, widths as they were chosen, the quality of parts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.graph import Graph
from polyhop.partition import partition, share
from polyhop.report.run import RunReader
from polyhop.trainer import Trainer

MakeGraph = Callable[..., Graph]
SEEDING = threading.Lock()


def fit(
    line: Collective, graph: Graph, strategy: str, run: Path, options: dict[str, Any]
) -> dict[str, float]:
    with SEEDING:
        torch.manual_seed(7)
        model = nn.GCN(graph.num_features, 8, num_layers=4, out_channels=graph.num_classes)
    held = share(graph, partition(graph, line.num_ranks, "hash"), line.rank)
    given = {"max_epochs": 4, "progress": "none", "device": "cpu", "run_dir": run, **options}
    Trainer(strategy, **given).fit(model, held, line=line)
    return dict(line.traffic.now().bytes)


def trained(
    graph: Graph, strategy: str, run: Path, num_ranks: int = 2, **options: Any
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """(the report of a run, bytes that each rank sent)."""
    sent = run_in_threads(num_ranks, fit, graph, strategy, run, options)
    return RunReader(run).document(), sent


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "options"),
    [
        ("halo", 2, {}),
        ("halo", 3, {"bits": 4}),
        ("halo", 3, {"halo": "sequential"}),
        ("pipeline", 2, {"chunks": 3}),
        ("pipeline", 4, {"chunks": 2, "stages": 2}),
    ],
    ids=str,
)
def test_bytes_of_layers_are_all_hidden_bytes(
    make_graph: MakeGraph, tmp_path: Path, strategy: str, num_ranks: int, options: dict[str, Any]
) -> None:
    found, sent = trained(make_graph(), strategy, tmp_path / "run", num_ranks, **options)
    traffic = found["traffic"]
    training = sum(rank["training"].get("hidden", 0.0) for rank in traffic["ranks"])
    assert training > 0
    assert sum(layer["bytes"] for layer in traffic["layers"]) == pytest.approx(training, abs=num_ranks)
    for rank, bytes_ in zip(traffic["ranks"], sent, strict=True):
        every = 4 * (rank["training"]["hidden"] + rank["evaluation"].get("hidden", 0.0))
        assert every + rank["setup"].get("hidden", 0.0) == pytest.approx(bytes_["hidden"], abs=1)


def test_a_message_counts_when_it_is_there(make_graph: MakeGraph, tmp_path: Path) -> None:
    """Stale rows arrive a step later; those of the last step are not waited for."""
    found, _ = trained(make_graph(), "halo", tmp_path / "run", halo="stale")
    training = sum(rank["training"]["hidden"] for rank in found["traffic"]["ranks"])
    assert sum(layer["bytes"] for layer in found["traffic"]["layers"]) == pytest.approx(
        training * 3 / 4, abs=2
    )


def test_bubbles_of_a_pipeline_are_told(make_graph: MakeGraph, tmp_path: Path) -> None:
    found, _ = trained(make_graph(), "pipeline", tmp_path / "run", chunks=3)
    assert [rank["rank"] for rank in found["bubbles"]["ranks"]] == [0, 1]
    assert all(0 < rank["idle"] < 1 for rank in found["bubbles"]["ranks"])


def test_widths_are_told_from_the_first_step_on(make_graph: MakeGraph, tmp_path: Path) -> None:
    found, _ = trained(
        make_graph(), "halo", tmp_path / "run", bits="adaptive", bits_period=2, bits_group=1, max_epochs=6
    )
    choices = [
        choice
        for choice in found["bits"]["choices"]
        if choice["layer"] == 2 and choice["direction"] == "forward"
    ]
    assert [choice["epoch"] for choice in choices] == [1, 3, 5]
    assert choices[0]["mean"] == 8.0
    rows = [sum(choice["rows"].values()) for choice in choices]
    assert rows == [rows[0]] * 3
    assert rows[0] > 0


def test_the_quality_of_parts_is_kept(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = make_graph()
    found, _ = trained(graph, "data", tmp_path / "run", 3, num_neighbors=[3, 3, 3, 3], batch_size=20)
    assert found["partition"]["num_parts"] == 3
    assert sum(part["edges"] for part in found["partition"]["parts"]) == graph.num_edges
    assert found["about"]["num_ranks"] == 3
    assert found["about"]["graph"] == graph.name


def test_one_process_has_epochs_and_memory(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = make_graph()
    model = nn.GCN(graph.num_features, 8, num_layers=2, out_channels=graph.num_classes)
    result = Trainer(max_epochs=3, progress="none", device="cpu", run_dir=tmp_path / "run").fit(model, graph)
    found = RunReader(tmp_path / "run").document()
    assert found["lengths"]["count"] == 3
    assert found["traffic"] is None
    assert found["partition"] is None
    assert found["numbers"]["peak_bytes"] > 1e6
    spent = sum(found["phases"]["train_s"]) + 3 * found["phases"]["threads"][0]["seconds"]["evaluate"]
    assert spent == pytest.approx(result.seconds, rel=0.3, abs=0.05)


def test_a_continued_run_counts_its_epochs_on(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = make_graph()
    run = tmp_path / "run"
    trained(graph, "halo", run, max_epochs=2)
    found, _ = trained(graph, "halo", run, max_epochs=5, resume="auto")
    assert found["phases"]["epochs"] == [1, 2, 3, 4, 5]
    assert found["about"]["num_attempts"] == 2
    marks = [json.loads(line) for line in (run / "trace-rank1.jsonl").read_text().splitlines()]
    assert [mark["epoch"] for mark in marks if mark.get("name") == "epoch"] == [0, 1, 2, 2, 3, 4, 5]
