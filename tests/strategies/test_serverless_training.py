"""Strategy ``serverless`` under the trainer: runs that go on, ranks that are processes, what is refused."""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
pytest.importorskip("cryptography")

import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.errors import ConfigError, UnsupportedError
from polyhop.graph import Graph
from polyhop.partition import Partition, partition, share
from polyhop.strategies import serverless_step
from polyhop.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "serverless"))

from faulty import ThreadLauncher  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]
SEEDING = threading.Lock()


def fit(
    line: Collective | None,
    graph: Graph,
    owner: Tensor | None,
    options: dict[str, Any],
    precision: str = "64-true",
) -> Any:
    with SEEDING:
        torch.manual_seed(7)
        model = nn.GraphSAGE(
            graph.num_features, 12, num_layers=2, out_channels=graph.num_classes, dropout=0.3
        )
    given = {"lr": 0.02, "precision": precision, "seed": 5, "device": "cpu", "progress": "none", **options}
    if line is None:
        result = Trainer("single", **given).fit(model, graph)
    else:
        assert owner is not None
        held = share(graph, Partition(owner, line.num_ranks), line.rank)
        result = Trainer("serverless", intervals=3, functions=1, **given).fit(model, held, line=line)
    return model.state_dict(), [record["loss"] for record in result.history]


def owner_of(graph: Graph, ranks: int) -> Tensor:
    return partition(graph, ranks, "hash").owner


@pytest.mark.parametrize(("precision", "bound"), [("64-true", 1e-10), ("32-true", 1e-4)])
@pytest.mark.parametrize("kind", ["single", "multi"])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_trainer_gives_the_weights_of_one_process(
    make_graph: MakeGraph, monkeypatch: Any, kind: str, sparse: bool, precision: str, bound: float
) -> None:
    """Labels of one class and of several, inputs dense and sparse, weighted edges."""
    monkeypatch.setattr(serverless_step, "LocalLauncher", lambda order: ThreadLauncher(order))
    graph = make_graph(80, kind=kind, sparse=sparse, weighted=True)
    expected, losses = fit(None, graph, None, {"max_epochs": 5}, precision)
    for weights, found in run_in_threads(2, fit, graph, owner_of(graph, 2), {"max_epochs": 5}, precision):
        assert found == pytest.approx(losses, rel=bound)
        for name, value in expected.items():
            assert float((weights[name] - value).abs().max()) <= bound, name


def test_a_run_that_goes_on_gives_the_weights_of_one_that_was_not_disturbed(
    make_graph: MakeGraph, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(serverless_step, "LocalLauncher", lambda order: ThreadLauncher(order))
    graph, folder = make_graph(80), {"run_dir": str(tmp_path / "run")}
    owner = owner_of(graph, 2)
    whole = run_in_threads(2, fit, graph, owner, {"max_epochs": 6})[0]
    run_in_threads(2, fit, graph, owner, {"max_epochs": 3, **folder})
    found = run_in_threads(2, fit, graph, owner, {"max_epochs": 6, "resume": "auto", **folder})[0]
    assert all(torch.equal(found[0][name], value) for name, value in whole[0].items())


def test_ranks_are_processes_and_functions_too(make_graph: MakeGraph, ranks: Callable[..., Any]) -> None:
    graph = make_graph(80)
    expected, losses = fit(None, graph, None, {"max_epochs": 3})
    for weights, found in ranks(2, fit, graph, owner_of(graph, 2), {"max_epochs": 3}):
        assert found == pytest.approx(losses, rel=1e-10)
        for name, value in expected.items():
            assert float((weights[name] - value).abs().max()) <= 1e-10, name


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_neighbors": [5, 5]}, ConfigError, "full graph"),
        ({"precision": "bf16-mixed"}, ConfigError, "float32 or float64"),
        ({"functions": 0}, ConfigError, "functions=0"),
        ({"staleness": -1}, ConfigError, "staleness=-1"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_said(
    make_graph: MakeGraph, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    graph = make_graph(40)

    def run(line: Collective) -> None:
        model = nn.GCN(graph.num_features, 4, num_layers=2, out_channels=graph.num_classes)
        held = share(graph, partition(graph, 1, "hash"), 0)
        given = {"max_epochs": 1, "progress": "none", "device": "cpu", **options}
        Trainer("serverless", **given).fit(model, held, line=line)

    with pytest.raises(error, match=message):
        run_in_threads(1, run)


def test_without_zeromq_it_says_what_to_install(make_graph: MakeGraph, monkeypatch: Any) -> None:
    graph, real = make_graph(40), builtins.__import__

    def missing(name: str, *given: Any, **more: Any) -> Any:
        if name == "polyhop.strategies.serverless_step":
            raise ImportError("No module named 'zmq'", name="zmq")
        return real(name, *given, **more)

    def run(line: Collective) -> None:
        model = nn.GCN(graph.num_features, 4, num_layers=2, out_channels=graph.num_classes)
        held = share(graph, partition(graph, 1, "hash"), 0)
        Trainer("serverless", max_epochs=1, progress="none", device="cpu").fit(model, held, line=line)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UnsupportedError, match=r"zmq is not installed.*polyhop\[serverless\]"):
        run_in_threads(1, run)


@pytest.mark.parametrize("model", ["gcnii", "batch-norm", "jk"])
def test_models_without_numpy_pieces_are_refused(make_graph: MakeGraph, model: str) -> None:
    graph = make_graph(40)
    f, c = graph.num_features, graph.num_classes
    made: Any = {
        "gcnii": lambda: nn.GCNII(f, 4, num_layers=2, out_channels=c),
        "batch-norm": lambda: nn.GCN(f, 4, num_layers=2, out_channels=c, norm="batch"),
        "jk": lambda: nn.GCN(f, 4, num_layers=2, out_channels=c, jk="cat"),
    }[model]

    def run(line: Collective) -> None:
        held = share(graph, partition(graph, 1, "hash"), 0)
        Trainer("serverless", max_epochs=1, progress="none", device="cpu").fit(made(), held, line=line)

    with pytest.raises(UnsupportedError):
        run_in_threads(1, run)
