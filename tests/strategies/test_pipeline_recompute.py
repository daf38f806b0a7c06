"""Layers of strategy ``pipeline`` computed again in the backward pass: the same bits (I10), less memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.graph import Graph
from polyhop.kernels.keys import Key
from polyhop.strategies.pipeline_history import History

sys.path.insert(0, str(Path(__file__).parent))

import test_pipeline as running  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]
MODES: list[dict[str, Any]] = [
    {"chunks": 5},
    {"chunks": 5, "history_period": 3, "history_gamma": 2.0},
    {"chunks": 5, "exact_layers": True},
    {"chunks": 1},
]
FRESHER: list[dict[str, Any]] = [
    {"chunks": 5, "history_gradients": True},
    {"chunks": 5, "history_sweeps": 2},
    {"chunks": 5, "history_bound": 1e-9},
    {"chunks": 5, "history_sweeps": 1, "bits": 8},
]


def trained(
    line: Collective, graph: Graph, name: str, epochs: int, options: dict[str, Any]
) -> tuple[list[float], list[dict[str, Tensor]], list[Any], list[dict[str, int]]]:
    """Losses, gradients, meters and bytes of every epoch; weights go against their gradients, so history is really old."""
    model = running.model_of(name, graph, 0.4)
    step = running.build(line, graph, model, **options)
    losses, gradients, meters, sent = [], [], [], []
    for epoch in range(epochs):
        before = line.traffic.now()
        losses.append(running.stepped(step, model, epoch))
        sent.append(dict((line.traffic.now() - before).bytes))
        gradients.append(running.gradients_of(model))
        meters.append(step.meter)
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.add_(p.grad, alpha=-0.3)
    return losses, gradients, meters, sent


def assert_same_bits(graph: Graph, name: str, stages: int, options: dict[str, Any], epochs: int = 4) -> None:
    plain = run_in_threads(stages, trained, graph, name, epochs, options)
    again = run_in_threads(stages, trained, graph, name, epochs, {**options, "recompute": True})
    for (losses, gradients, meters, sent), (others, more, read, resent) in zip(plain, again, strict=True):
        assert losses == others
        assert [each.keys() for each in gradients] == [each.keys() for each in more]
        for epoch, each in enumerate(gradients):
            for weight, grad in each.items():
                assert torch.equal(grad, more[epoch][weight]), (epoch, weight)
        assert meters == read
        assert sent == resent


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("name", running.MODELS)
def test_gradients_have_the_same_bits(make_graph: MakeGraph, name: str, options: dict[str, Any]) -> None:
    """I10, dropout on: of every epoch, with history of the epoch before and of several before."""
    assert_same_bits(make_graph(60), name, 2, options)


@pytest.mark.parametrize("options", FRESHER, ids=str)
@pytest.mark.parametrize("name", ["gcn", "gat", "gcnii"])
def test_what_makes_history_better_keeps_the_bits(
    make_graph: MakeGraph, name: str, options: dict[str, Any]
) -> None:
    assert_same_bits(make_graph(60), name, 2, options, epochs=7)  # the bound is looked at every 5 epochs


@pytest.mark.parametrize("period", [1, 3])
def test_history_was_read_and_has_been_overwritten(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch, period: int
) -> None:
    """The test above can fail: reading the tables as they are gives other gradients."""
    graph, options = make_graph(60), {"chunks": 5, "history_period": period, "recompute": True}
    right = run_in_threads(2, trained, graph, "gcn", 2, options)[0][1]
    monkeypatch.setattr(
        History, "read", lambda self, layer, chunk: self.rows[layer][self.chunks[chunk].others]
    )
    wrong = run_in_threads(2, trained, graph, "gcn", 2, options)[0][1]
    assert any(not torch.equal(grad, wrong[1][weight]) for weight, grad in right[1].items())


def test_stages_do_not_matter(make_graph: MakeGraph) -> None:
    graph, options = make_graph(60), {"chunks": 5, "recompute": True}
    one = running.over_stages(graph, "gcnii", 1, 0.4, epochs=3, **options)
    running.assert_same(running.over_stages(graph, "gcnii", 4, 0.4, epochs=3, **options), one, 0.0)


@pytest.mark.filterwarnings("ignore:GATv2Conv drops units:UserWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_layers_of_another_library(make_graph: MakeGraph, monkeypatch: Any, dropout: float) -> None:
    """Units that they drop by torch's own generator are dropped again; what is drawn afterwards is the same."""
    pyg = pytest.importorskip("torch_geometric.nn")

    def stack(f: int, c: int, p: float) -> torch.nn.Module:
        inner = pyg.GATv2Conv(8, 8, dropout=dropout)
        return nn.Stack([pyg.SAGEConv(f, 8), inner, nn.SAGEConv(8, c)], dropout=p)

    monkeypatch.setitem(running.MODELS, "stack", stack)
    graph, found = make_graph(60), []
    for recompute in (False, True):
        torch.manual_seed(3)
        run = run_in_threads(1, trained, graph, "stack", 3, {"chunks": 4, "recompute": recompute})[0]
        found.append((run[0], run[1], torch.rand(4).tolist()))
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert all(torch.equal(grad, other[weight]) for weight, grad in one.items())
    assert found[0][2] == found[1][2]


def test_sparse_inputs(make_graph: MakeGraph) -> None:
    assert_same_bits(make_graph(60, sparse=True), "gcnii", 2, {"chunks": 4})


@pytest.mark.parametrize("name", ["gcn", "gat", "gcnii"])
def test_nothing_is_kept_until_the_way_back(make_graph: MakeGraph, name: str) -> None:
    """After the forward pass no graph is alive: what a stage holds is in its tables, or carried beside them."""
    graph = make_graph(60)

    def run(line: Collective) -> None:
        model = running.model_of(name, graph, 0.3)
        step = running.build(line, graph, model, chunks=4, recompute=True)
        running.stepped(step, model, 0)
        step.history.begin(1, range(4))
        stage = step._stage
        stage.begin(Key(3, 1))
        for task in step.schedule(1).tasks(0, "forward"):
            stage.forward(task)
        assert not stage._passed
        assert not any(stage._inputs.values())
        assert all(not value.grad_fn for value in stage._begun.values())

    run_in_threads(1, run)


def on_rank(line: Collective, *given: Any) -> Any:
    """Of this module, so that ranks, which are processes of their own, find it."""
    return running.on_rank(line, *given)


def test_over_gloo(make_graph: MakeGraph, ranks: Callable[..., list[Any]]) -> None:
    graph, options = make_graph(60), {"chunks": 5, "recompute": True}
    virtual = running.over_stages(graph, "gcnii", 3, 0.3, epochs=2, **options)
    real = running.joined(ranks(3, on_rank, graph, "gcnii", 0.3, 2, options))
    running.assert_same(real, virtual, 0.0)
    assert [cost.bytes for cost in real.costs] == [cost.bytes for cost in virtual.costs]
