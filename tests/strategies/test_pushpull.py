"""Features cut by columns, first layers made of parts: the weights of one process; no feature row crosses in training."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.errors import ConfigError, UnsupportedError
from polyhop.graph import Graph
from polyhop.partition import Partition, partition, share
from polyhop.trainer import Trainer

MakeGraph = Callable[..., Graph]
Run = Callable[..., list[Any]]

SEEDING = threading.Lock()
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "gcn": lambda f, c: nn.GCN(f, 12, num_layers=3, out_channels=c, dropout=0.5),
    "gcn narrow": lambda f, c: nn.GCN(f, 2, num_layers=2, out_channels=c),
    "sage": lambda f, c: nn.GraphSAGE(f, 8, num_layers=3, out_channels=c, dropout=0.5),
    "sage sum": lambda f, c: nn.GraphSAGE(f, 8, num_layers=2, out_channels=c, aggr="sum", root_weight=False),
    "gat": lambda f, c: nn.GAT(f, 8, num_layers=3, out_channels=c, heads=4, dropout=0.4),
    "gat residual": lambda f, c: nn.GAT(f, 8, num_layers=2, out_channels=c, heads=4, residual=True),
    "gin": lambda f, c: nn.GIN(
        f,
        6,
        num_layers=3,
        out_channels=c,
        norm="layer",
        norm_kwargs={"mode": "node"},
        jk="cat",
        train_eps=True,
    ),
    "stack": lambda f, c: nn.Stack([nn.GCNConv(f, 6), nn.SAGEConv(6, c)], dropout=0.3),
    "one sage": lambda f, c: nn.GraphSAGE(f, 8, num_layers=1, out_channels=c),
    "one gat": lambda f, c: nn.GAT(f, 8, num_layers=1, out_channels=c, heads=4),
    "one product": lambda f, c: nn.GCN(f, 8, num_layers=1, out_channels=c, bias=False),  # nothing else to sum
}
DEPTHS = {"gcn narrow": 2, "sage sum": 2, "gat residual": 2, "stack": 2}


def model_of(name: str, graph: Graph) -> torch.nn.Module:
    with SEEDING:  # ranks may be threads, and torch's generator is one
        torch.manual_seed(7)
        return MODELS[name](graph.num_features, graph.num_classes)


def trainer(strategy: str, name: str, **options: Any) -> Trainer:
    """Twenty steps of Adam in double: 4 epochs of 5 steps, evaluated once at the end."""
    depth = 1 if name.startswith("one ") else DEPTHS.get(name, 3)
    given = {
        "max_epochs": 4,
        "batch_size": 20,
        "num_neighbors": [4, 3, 3][:depth],
        "eval_every": 100,
        "precision": "64-true",
    }
    return Trainer(strategy, **{**given, "device": "cpu", "progress": "none", "seed": 3, **options})


@dataclass
class Trained:
    weights: dict[str, Tensor]
    test: float | None
    loss: float
    steps: int


def fit_share(line: Collective, graph: Graph, owner: Tensor, name: str, options: dict[str, Any]) -> Trained:
    model = model_of(name, graph)
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    result = trainer("pushpull", name, **options).fit(model, held, line=line)
    loss = result.history[-1]["loss"] if line.rank == 0 else 0.0
    return Trained(model.state_dict(), result.test, loss, result.steps)


def alone(graph: Graph, name: str, **options: Any) -> Trained:
    model = model_of(name, graph)
    result = trainer("single", name, **options).fit(model, graph)
    return Trained(model.state_dict(), result.test, result.history[-1]["loss"], result.steps)


def assert_same(found: list[Trained], expected: Trained, start: torch.nn.Module) -> None:
    for rank, each in enumerate(found):
        assert each.steps == expected.steps
        for name, value in expected.weights.items():
            assert torch.equal(each.weights[name], found[0].weights[name]), (rank, name)
            assert float((each.weights[name] - value).abs().max()) <= 1e-10, (rank, name)
        assert each.test == expected.test
    assert found[0].loss == pytest.approx(expected.loss, abs=1e-10)
    moved = [
        float((expected.weights[name] - value.detach()).abs().max())
        for name, value in start.named_parameters()
    ]
    assert min(moved) > 1e-3, "weights that do not move are equal for nothing"


def owners(graph: Graph, num_ranks: int, kind: str) -> Tensor:
    """int32 [N]: part of each node; ``skewed`` gives rank 0 most, ``empty`` leaves the last rank without nodes.

    ``seedless`` leaves the last rank without training nodes.
    """
    nodes = torch.arange(graph.num_nodes)
    if kind == "skewed":
        return torch.where(nodes % 10 == 9, nodes % num_ranks, 0).int()
    if kind == "empty":
        return (nodes % max(1, num_ranks - 1)).int()
    if kind == "seedless":
        assert graph.split is not None
        owner = nodes % num_ranks
        owner[graph.split.train] = graph.split.train % (num_ranks - 1)
        return owner.int()
    return partition(graph, num_ranks, kind).owner


GRID = ((1, "hash"), (2, "seedless"), (3, "empty"), (4, "skewed"))
CORE = ("gcn", "sage", "gat")
EVERYWHERE = [
    pytest.param(name, num_ranks, kind, marks=() if name in CORE or num_ranks == 4 else pytest.mark.slow)
    for name in MODELS
    for num_ranks, kind in GRID
]


@pytest.mark.parametrize(("name", "num_ranks", "kind"), EVERYWHERE)
def test_weights_of_one_process_over_threads(
    make_graph: MakeGraph, name: str, num_ranks: int, kind: str
) -> None:
    graph = make_graph(num_features=10, weighted=name in ("gcn", "stack"))
    expected, start = alone(graph, name), model_of(name, graph)
    assert expected.steps == 20
    found = run_in_threads(num_ranks, fit_share, graph, owners(graph, num_ranks, kind), name, {})
    assert_same(found, expected, start)


@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "gin"])
@pytest.mark.parametrize("num_features", [1, 3])
def test_fewer_columns_than_ranks(make_graph: MakeGraph, name: str, num_features: int) -> None:
    graph = make_graph(num_features=3)
    if num_features == 1:
        graph = make_graph(num_features=1, num_classes=1, kind="multi")
    options = {"metric": "f1_micro"} if num_features == 1 else {}
    found = run_in_threads(4, fit_share, graph, owners(graph, 4, "hash"), name, options)
    assert_same(found, alone(graph, name, **options), model_of(name, graph))


@pytest.mark.parametrize(("name", "num_ranks"), [("gcn", 2), ("sage", 3), ("gat", 3), ("gin", 2)])
def test_weights_of_one_process_over_gloo(
    make_graph: MakeGraph, ranks: Run, name: str, num_ranks: int
) -> None:
    graph = make_graph(num_features=10, weighted=name == "gcn")
    kind = "empty" if num_ranks == 3 else "seedless"
    found = ranks(num_ranks, fit_share, graph, owners(graph, num_ranks, kind), name, {})
    assert_same(found, alone(graph, name), model_of(name, graph))


OPTIONS: dict[str, dict[str, Any]] = {
    "labor": {"sampler": "labor"},
    "labor, dependent": {"sampler": "labor", "labor_dependence": 3},
    "all neighbours": {"num_neighbors": [-1, -1, -1]},
    "wide fan-out": {"num_neighbors": [2, 2, 300]},
    "one seed": {"batch_size": 1, "max_epochs": 1},  # most ranks have none
    "one ahead": {"prefetch": 1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", ["sage", "gat"])
def test_options_change_nothing_of_it(make_graph: MakeGraph, name: str, options: dict[str, Any]) -> None:
    graph, options = make_graph(), {"max_epochs": 2, **options}
    found = run_in_threads(3, fit_share, graph, owners(graph, 3, "hash"), name, options)
    assert_same(found, alone(graph, name, **options), model_of(name, graph))


@pytest.mark.parametrize("kind", ["single", "multi"])
def test_sparse_features_and_multilabel(make_graph: MakeGraph, kind: str) -> None:
    graph = make_graph(kind=kind, sparse=True)
    metric = "f1_micro" if kind == "multi" else "roc_auc"
    found = run_in_threads(3, fit_share, graph, owners(graph, 3, "empty"), "gcn", {"metric": metric})
    assert_same(found, alone(graph, "gcn", metric=metric), model_of("gcn", graph))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["sage", "gat"])
def test_single_precision(make_graph: MakeGraph, name: str, precision: str) -> None:
    graph, options = make_graph(), {"precision": precision, "max_epochs": 1}
    found = run_in_threads(3, fit_share, graph, owners(graph, 3, "hash"), name, options)
    bound = 1e-5 if precision == "32-true" else 0.05
    for weight, value in alone(graph, name, **options).weights.items():
        assert float((found[0].weights[weight] - value).norm() / value.norm()) <= bound, weight


def fit_frozen(line: Collective, graph: Graph, owner: Tensor, frozen: str) -> dict[str, Tensor]:
    model = model_of("sage", graph)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    trainer("pushpull", "sage").fit(model, held, line=line)
    return model.state_dict()


@pytest.mark.parametrize("frozen", ["convs.0.", "convs.0.lin_l.weight", "convs.1."])
def test_frozen_weights_stay(make_graph: MakeGraph, frozen: str) -> None:
    graph, expected = make_graph(), model_of("sage", make_graph())
    for name, parameter in expected.named_parameters():
        parameter.requires_grad_(frozen not in name)
    trainer("single", "sage").fit(expected, graph)
    for weights in run_in_threads(3, fit_frozen, graph, owners(graph, 3, "hash"), frozen):
        for name, value in expected.state_dict().items():
            assert float((weights[name] - value).abs().max()) <= 1e-10, name


def _encoded() -> torch.nn.Module:
    class Encoded(nn.GraphSAGE):
        def begin(self, x: Any, **_: Any) -> Any:
            return {"h": x * 2}

    return Encoded(8, 8, num_layers=3, out_channels=3)


def _tied() -> torch.nn.Module:
    conv = nn.SAGEConv(8, 8)
    return nn.Stack([conv, conv, nn.SAGEConv(8, 3)])


def _wrapped() -> torch.nn.Module:
    pyg = pytest.importorskip("torch_geometric.nn")
    return nn.Stack([pyg.SAGEConv(8, 8), nn.SAGEConv(8, 8), nn.SAGEConv(8, 3)])


def _gin() -> torch.nn.Module:
    first = nn.GINConv(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(8, 8)))
    first.in_channels = 8
    return nn.Stack([first, nn.SAGEConv(8, 8), nn.SAGEConv(8, 3)])


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "maximum": (
        lambda: nn.GraphSAGE(8, 8, num_layers=3, out_channels=3, aggr="max"),
        {},
        "UnsupportedError: SAGEConv: .*columns.*aggr='max' takes a maximum",
    ),
    "projection": (
        lambda: nn.GraphSAGE(8, 8, num_layers=3, out_channels=3, project=True),
        {},
        "UnsupportedError: .*project=True puts a relu",
    ),
    "gin of any network": (_gin, {}, "UnsupportedError: .*does not begin with a Linear"),
    "wrapped layer": (_wrapped, {}, "UnsupportedError: .*inside another library's layer"),
    "input dropout": (
        lambda: nn.GCNII(8, 8, num_layers=3, out_channels=3, dropout=0.3),
        {},
        "UnsupportedError: GCNII: .*drops or maps inputs before the first layer",
    ),
    "encoder": (
        lambda: nn.DeepGCN(8, 8, num_layers=3, out_channels=3),
        {},
        "UnsupportedError: DeepGCN: .*drops or maps inputs",
    ),
    "own begin": (_encoded, {}, r"UnsupportedError: .*begin\(\) of its own"),
    "shared weights": (_tied, {}, "UnsupportedError: .*shares its weights with another"),
    "own module": (lambda: torch.nn.Linear(8, 3), {}, "UnsupportedError: .*begin/layer/finish"),
    "batch norm": (
        lambda: nn.GraphSAGE(8, 8, num_layers=3, out_channels=3, norm="batch_norm"),
        {},
        "UnsupportedError: .*BatchNorm.*norm='layer'",
    ),
    "full graph": (
        lambda: nn.GraphSAGE(8, 8, num_layers=3, out_channels=3),
        {"num_neighbors": None, "batch_size": None},
        "ConfigError: .*mini-batches: give one fan-out per layer",
    ),
    "int8": (
        lambda: nn.GraphSAGE(8, 8, num_layers=3, out_channels=3),
        {"feature_dtype": "int8"},
        "ConfigError: .*int8.*slices.*bfloat16",
    ),
    "aggregated inputs": (
        lambda: nn.GraphSAGE(8, 8, num_layers=3, out_channels=3),
        {"aggregate_inputs": True},
        "UnsupportedError: aggregate_inputs does not go with strategy 'pushpull'",
    ),
}


def refused(line: Collective, graph: Graph, owner: Tensor, what: str) -> str:
    make, options, _ = REFUSED[what]
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    try:
        trainer("pushpull", "sage", **options).fit(make(), held, line=line)
    except (ConfigError, UnsupportedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_trained_so_is_refused_everywhere(make_graph: MakeGraph, what: str) -> None:
    graph = make_graph()
    for text in run_in_threads(2, refused, graph, owners(graph, 2, "hash"), what):
        assert re.search(REFUSED[what][2], text), text


def test_pushpull_needs_ranks(make_graph: MakeGraph) -> None:
    graph = make_graph()
    with pytest.raises(ConfigError, match="--workers N"):
        trainer("pushpull", "sage").fit(model_of("sage", graph), graph)
