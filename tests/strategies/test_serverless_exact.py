"""Two hundred epochs with functions end with the weights of one process on the full graph (I1)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.datasets import load
from polyhop.graph import Graph
from polyhop.partition import partition, share
from polyhop.strategies import serverless_step
from polyhop.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "serverless"))

from faulty import ThreadLauncher  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]
EPOCHS = 200
SEEDING = threading.Lock()
MODELS: dict[str, Callable[[int, int], torch.nn.Module]] = {
    "gcn": lambda f, c: nn.GCN(f, 16, num_layers=2, out_channels=c, dropout=0.3),
    "gat": lambda f, c: nn.GAT(f, 8, num_layers=2, out_channels=c, dropout=0.3, heads=2),
}


def untrained(graph: Graph, name: str) -> torch.nn.Module:
    with SEEDING:
        torch.manual_seed(7)
        return MODELS[name](graph.num_features, graph.num_classes)


def fit(
    line: Collective | None, graph: Graph, name: str, precision: str, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Weights after the last epoch: judged once, so that no earlier ones are the best."""
    model = untrained(graph, name)
    given: dict[str, Any] = {
        "lr": 0.01,
        "precision": precision,
        "seed": 5,
        "device": "cpu",
        "progress": "none",
    }
    given |= {"max_epochs": EPOCHS, "eval_every": EPOCHS}
    if line is None:
        Trainer("single", **given).fit(model, graph)
    else:
        held = share(graph, partition(graph, line.num_ranks, "hash"), line.rank)
        Trainer("serverless", **given, **options).fit(model, held, line=line)
    return model.state_dict()


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "bound"), [("64-true", 1e-10), ("32-true", 1e-5)])
@pytest.mark.parametrize("name", MODELS)
def test_the_weights_of_one_process(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch, name: str, precision: str, bound: float
) -> None:
    monkeypatch.setattr(serverless_step, "LocalLauncher", lambda order: ThreadLauncher(order))
    graph = make_graph(80)
    expected = fit(None, graph, name, precision, {})
    assert apart(untrained(graph, name).state_dict(), expected) > 0.1  # much was learnt
    for ranks, intervals, functions in ((1, 1, 1), (1, 7, 3), (2, 2, 1), (2, 6, 4)):
        options = {"intervals": intervals, "functions": functions}
        for found in run_in_threads(ranks, fit, graph, name, precision, options):
            distance = apart(found, expected)
            print(
                f"{name} {precision}: {ranks} servers, {intervals} intervals, {functions} functions: {distance:.1e}"
            )
            assert distance <= bound


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_weights_of_one_process_on_a_real_graph(name: str, data_dir: Path) -> None:
    """Functions are processes."""
    graph = load("cora", data_dir=data_dir)
    expected = fit(None, graph, name, "64-true", {})
    for found in run_in_threads(2, fit, graph, name, "64-true", {"intervals": 4, "functions": 2}):
        print(f"{name} on cora: {apart(found, expected):.1e}")
        assert apart(found, expected) <= 1e-10
