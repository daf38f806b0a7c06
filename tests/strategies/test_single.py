"""The single-process step: its gradient is that of the plain formula, and its batches are pure functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from polyhop.errors import ConfigError, UnsupportedError
from polyhop.graph import Graph
from polyhop.kernels.keys import Key
from polyhop.nn import GCN, GraphSAGE
from polyhop.strategies import WholeGraph, place, single
from polyhop.trace import Trace
from polyhop.train.loss import binary_cross_entropy_sum, cross_entropy_sum

MakeGraph = Callable[..., Graph]


def step_of(model: nn.Module, graph: Graph, precision: str = "64-true", **options: object) -> single.Step:
    whole = WholeGraph(graph, place("cpu", precision))
    model.to(whole.placement.dtype)
    train = graph.split.train
    kind = (
        {"loss": binary_cross_entropy_sum, "terms_per_row": graph.num_classes}
        if graph.is_multilabel
        else {"loss": cross_entropy_sum}
    )
    train = train if graph.is_multilabel else train[graph.y[train] >= 0]
    trace = options.pop("trace", Trace())
    return single.build(
        model, graph, single.Config(**options), train_ids=train, whole=whole, trace=trace, **kind
    )


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["single", "multi"])
@pytest.mark.parametrize("weighted", [False, True])
def test_full_graph_gradient_is_that_of_the_mean_loss(
    make_graph: MakeGraph, kind: str, weighted: bool
) -> None:
    graph = make_graph(kind=kind, weighted=weighted)
    model = GCN(8, 6, num_layers=2, out_channels=3).double()
    step = step_of(model, graph)
    assert step.num_steps == 1
    (batch,) = step.batches(0)
    loss = step.gradients(batch, Key(0))
    got = gradients(model)
    model.zero_grad()
    edge_weight = None if graph.edge_weight is None else graph.edge_weight.double()
    logits = model(graph.x.all().double(), graph.edge_index, edge_weight)
    ids = graph.split.train
    if kind == "single":
        expected = nn.functional.cross_entropy(logits[ids], graph.y[ids], ignore_index=-1)
    else:
        expected = nn.functional.binary_cross_entropy_with_logits(logits[ids], graph.y[ids].double())
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    assert not loss.requires_grad
    for a, b in zip(got, gradients(model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["single", "multi"])
def test_all_neighbours_of_all_seeds_is_the_full_graph(make_graph: MakeGraph, kind: str) -> None:
    graph = make_graph(kind=kind)
    model = GraphSAGE(8, 6, num_layers=2, out_channels=3).double()
    whole, mini = step_of(model, graph), step_of(model, graph, num_neighbors=(-1, -1), batch_size=10_000)
    assert mini.num_steps == 1
    losses, found = [], []
    for step in (whole, mini):
        model.zero_grad()
        (batch,) = step.batches(0)
        losses.append(step.gradients(batch, Key(0)))
        found.append(gradients(model))
    torch.testing.assert_close(losses[0], losses[1])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_mini_batches_cover_the_train_nodes_once(make_graph: MakeGraph) -> None:
    graph = make_graph()
    step = step_of(GraphSAGE(8, 6, num_layers=2, out_channels=3), graph, num_neighbors=(3, 2), batch_size=30)
    assert step.num_steps == 4
    seeds = [batch.batch.seeds for batch in step.batches(0)]
    assert sorted(torch.cat(seeds).tolist()) == graph.split.train[1:].tolist()
    assert [s.tolist() for s in seeds] != [b.batch.seeds.tolist() for b in step.batches(1)]


def test_batches_from_the_middle_are_those_of_the_whole_epoch(make_graph: MakeGraph) -> None:
    step = step_of(
        GraphSAGE(8, 6, num_layers=2, out_channels=3), make_graph(), num_neighbors=(3, 2), batch_size=30
    )
    whole, rest = list(step.batches(5)), list(step.batches(5, 2))
    assert len(rest) == 2
    for a, b in zip(whole[2:], rest, strict=True):
        assert torch.equal(a.batch.seeds, b.batch.seeds)
        assert torch.equal(a.batch.input_ids, b.batch.input_ids)
        assert torch.equal(a.x, b.x)
    assert list(step.batches(5, 4)) == []


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed"])
@pytest.mark.parametrize("fan_outs", [None, (4, 4)])
@pytest.mark.parametrize("sparse", [False, True])
def test_every_format_gives_gradients_of_the_weights_format(
    make_graph: MakeGraph, precision: str, fan_outs: tuple[int, ...] | None, sparse: bool
) -> None:
    model = GCN(8, 6, num_layers=2, out_channels=3, dropout=0.1)
    step = step_of(model, make_graph(sparse=sparse), precision, num_neighbors=fan_outs)
    loss = step.gradients(next(iter(step.batches(0))), Key(0))
    expected = torch.float64 if precision == "64-true" else torch.float32
    assert loss.dtype == expected
    assert all(p.grad.dtype == expected and bool(p.grad.abs().sum() > 0) for p in model.parameters())


def test_sampling_and_loading_are_traced(make_graph: MakeGraph) -> None:
    trace = Trace()
    model = GraphSAGE(8, 6, num_layers=2, out_channels=3)
    list(step_of(model, make_graph(), num_neighbors=(3, 2), batch_size=30, trace=trace).batches(0))
    assert trace.counts() == {"sample": 4, "load": 4}


def test_nothing_to_save(make_graph: MakeGraph) -> None:
    step = step_of(GCN(8, 6, num_layers=2, out_channels=3), make_graph())
    assert step.state() == {}
    step.restore({})


def test_what_cannot_be_obeyed(make_graph: MakeGraph) -> None:
    graph = make_graph()
    with pytest.raises(ConfigError, match=r"num_neighbors=\[5\] has 1 fan-outs, the model has 2 layers"):
        step_of(GCN(8, 6, num_layers=2, out_channels=3), graph, num_neighbors=(5,))

    class Plain(nn.Linear):
        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[:7]

    with pytest.raises(UnsupportedError, match="Plain has no begin/layer/finish"):
        step_of(Plain(8, 3), graph, num_neighbors=(5,))
    step = step_of(Plain(8, 3), graph)
    with pytest.raises(ConfigError, match=r"shape \[7, 3\]: expected one row for each of 200 nodes"):
        step.gradients(0, Key(0))
