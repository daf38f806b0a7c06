"""Strategy ``serverless`` with real functions: the weights of one process, whatever is killed."""

from __future__ import annotations

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

from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.errors import ConfigError
from polyhop.graph import Graph
from polyhop.kernels.keys import Key
from polyhop.partition import Partition, share
from polyhop.strategies import Team, WholeGraph, place, serverless, serverless_step, single
from polyhop.train.loss import cross_entropy_sum

sys.path.insert(0, str(Path(__file__).parents[1] / "serverless"))

from faulty import ThreadLauncher  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]
SEEDING = threading.Lock()
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "gcn": lambda f, c, p: nn.GCN(f, 12, num_layers=2, out_channels=c, dropout=p),
    "gcn-3": lambda f, c, p: nn.GCN(f, 6, num_layers=3, out_channels=c, dropout=p, norm="layer",
                                    norm_kwargs={"mode": "node"}),
    "sage": lambda f, c, p: nn.GraphSAGE(f, 12, num_layers=2, out_channels=c, dropout=p),
    "gat": lambda f, c, p: nn.GAT(f, 8, num_layers=2, out_channels=c, dropout=p, heads=2),
    "gat-mean": lambda f, c, p: nn.GAT(f, 6, num_layers=3, out_channels=c, dropout=p, heads=3, concat=False),
    "gat-bare": lambda f, c, p: nn.GAT(f, 9, num_layers=2, out_channels=c, dropout=p, heads=9, residual=True,
                                       add_self_loops=False),
}  # fmt: skip


def model_of(name: str, graph: Graph, p: float) -> Any:
    with SEEDING:
        torch.manual_seed(7)
        return MODELS[name](graph.num_features, graph.num_classes, p).double().train()


def stepped(step: Any, model: Any, epochs: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for epoch in range(epochs):
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(step.gradients(0, Key(3, epoch))))
        optimizer.step()
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def alone(graph: Graph, name: str, p: float, epochs: int) -> Any:
    model = model_of(name, graph, p)
    assert graph.split is not None
    assert graph.y is not None
    train = graph.split.train[graph.y[graph.split.train] >= 0]
    whole = WholeGraph(graph, place("cpu", "64-true"))
    step = single.build(model, graph, single.Config(), train_ids=train, whole=whole, loss=cross_entropy_sum)
    return stepped(step, model, epochs)


def on_rank(
    line: Collective,
    graph: Graph,
    name: str,
    p: float,
    epochs: int,
    options: dict[str, Any],
    look: Callable[[Any], Any] = lambda step: None,
) -> Any:
    model = model_of(name, graph, p)
    owner = (torch.arange(graph.num_nodes) % line.num_ranks).int()
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    config, team = serverless.Config(**{"max_epochs": epochs, "seed": 3, **options}), Team(line)
    whole = serverless.hold(held, place("cpu", "64-true"), team, config)
    assert held.split is not None
    assert held.part.y is not None
    train = held.split.train[held.part.y[held.split.train] >= 0]
    step = serverless.build(
        model, held, config, train_ids=train, whole=whole, loss=cross_entropy_sum, team=team
    )
    try:
        return (*stepped(step, model, epochs), look(step))
    finally:
        step.close()


def assert_same(found: Any, expected: Any, bound: float) -> None:
    assert found[0] == pytest.approx(expected[0], rel=bound, abs=bound)
    for name, value in expected[1].items():
        assert float((found[1][name] - value).abs().max()) <= bound, name


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["gcn", "gcn-3", "sage", "gat"])
def test_weights_of_one_process(make_graph: MakeGraph, name: str, ranks: int) -> None:
    graph = make_graph(80)
    expected = alone(graph, name, 0.4, 5)
    for found in run_in_threads(ranks, on_rank, graph, name, 0.4, 5, {"intervals": 4, "functions": 1}):
        assert_same(found, expected, 1e-10)


@pytest.mark.parametrize("options", [{}, {"fuse_loss": False, "rematerialise": False}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["gat", "gat-mean", "gat-bare"])
def test_attention_weights_of_functions_are_those_of_one_process(
    make_graph: MakeGraph, monkeypatch: Any, name: str, ranks: int, options: dict[str, bool]
) -> None:
    """Units and attention weights are dropped; heads are concatenated or averaged; with and without loops of their own."""
    monkeypatch.setattr(serverless_step, "LocalLauncher", lambda order: ThreadLauncher(order))
    graph = make_graph(80)
    model = model_of(name, graph, 0.4)
    assert all(conv.dropout == 0.4 for conv in model.convs)
    expected = alone(graph, name, 0.4, 5)
    given = {"intervals": 4, "functions": 2, "edge_functions": True, **options}
    for found in run_in_threads(ranks, on_rank, graph, name, 0.4, 5, given):
        assert_same(found, expected, 1e-10)


def test_only_attention_has_weights_for_functions(make_graph: MakeGraph) -> None:
    with pytest.raises(ConfigError, match="edge_functions=True: GCN has no attention"):
        run_in_threads(1, on_rank, make_graph(40), "gcn", 0.0, 1, {"edge_functions": True})
