"""One mini-batch over all ranks gives the weights of one process; every node is drawn, loaded and computed once."""

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
from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.errors import ConfigError, UnsupportedError
from polyhop.graph import Graph
from polyhop.partition import Partition, partition, share
from polyhop.trainer import Trainer

MakeGraph = Callable[..., Graph]
Run = Callable[..., list[Any]]

SEEDING = threading.Lock()
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "gcn": lambda f, c: nn.GCN(f, 12, num_layers=3, out_channels=c, dropout=0.5),
    "sage": lambda f, c: nn.GraphSAGE(f, 8, num_layers=3, out_channels=c, dropout=0.5),
    "sage narrow": lambda f, c: nn.GraphSAGE(f, 3, num_layers=3, out_channels=c, dropout=0.5),
    "sage max": lambda f, c: nn.GraphSAGE(f, 8, num_layers=3, out_channels=c, aggr="max"),
    "gat": lambda f, c: nn.GAT(f, 8, num_layers=3, out_channels=c, heads=4, dropout=0.4),
    "gin": lambda f, c: nn.GIN(
        f, 6, num_layers=3, out_channels=c, norm="layer", norm_kwargs={"mode": "node"}, jk="cat"
    ),
    "sage sum": lambda f, c: nn.GraphSAGE(f, 6, num_layers=2, out_channels=c, aggr="sum", jk="max"),
    "sage project": lambda f, c: nn.GraphSAGE(f, 8, num_layers=2, out_channels=c, project=True),
    "gcn plain": lambda f, c: nn.GCN(f, 6, num_layers=2, out_channels=c, normalize=False),
    "gcnii": lambda f, c: nn.GCNII(f, 8, num_layers=3, out_channels=c, dropout=0.3),
    "one layer": lambda f, c: nn.GraphSAGE(f, 8, num_layers=1, out_channels=c),
    "four layers": lambda f, c: nn.GCN(f, 8, num_layers=4, out_channels=c, dropout=0.5),
}


def wrapped(num_features: int, num_classes: int) -> torch.nn.Module:
    """Layers of another library, which cannot be run in pieces."""
    conv = pytest.importorskip("torch_geometric.nn")
    layers = [conv.SAGEConv(num_features, 8), conv.GATConv(8, 8), conv.SAGEConv(8, num_classes)]
    return nn.Stack(layers, dropout=0.3)


MODELS["wrapped"] = wrapped
DEPTHS = {"one layer": 1, "four layers": 4, "sage sum": 2, "sage project": 2, "gcn plain": 2}


def model_of(name: str, graph: Graph) -> torch.nn.Module:
    with SEEDING:  # ranks may be threads, and torch's generator is one
        torch.manual_seed(7)
        return MODELS[name](graph.num_features, graph.num_classes)


def trainer(strategy: str, name: str, **options: Any) -> Trainer:
    """Twenty steps of Adam in double: 4 epochs of 5 steps, evaluated once at the end."""
    given = {
        "max_epochs": 4,
        "batch_size": 20,
        "num_neighbors": [4, 3, 3, 2][: DEPTHS.get(name, 3)],
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
    sent: Cost


def fit_share(line: Collective, graph: Graph, owner: Tensor, name: str, options: dict[str, Any]) -> Trained:
    model = model_of(name, graph)
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    result = trainer("split", name, **options).fit(model, held, line=line)
    loss = result.history[-1]["loss"] if line.rank == 0 else 0.0
    return Trained(model.state_dict(), result.test, loss, result.steps, line.traffic.now())


def alone(graph: Graph, name: str, **options: Any) -> Trained:
    model = model_of(name, graph)
    result = trainer("single", name, **options).fit(model, graph)
    return Trained(model.state_dict(), result.test, result.history[-1]["loss"], result.steps, Cost())


def assert_same(found: list[Trained], expected: Trained, bound: float = 1e-10) -> None:
    for rank, each in enumerate(found):
        assert each.steps == expected.steps
        for name, value in expected.weights.items():
            assert torch.equal(each.weights[name], found[0].weights[name]), (rank, name)
            assert float((each.weights[name] - value).abs().max()) <= bound, (rank, name)
        assert each.test == expected.test
    assert found[0].loss == pytest.approx(expected.loss, abs=1e-10)


def owners(graph: Graph, num_ranks: int, kind: str) -> Tensor:
    """int32 [N]: part of each node; ``skewed`` gives rank 0 most, ``empty`` leaves the last rank without nodes."""
    nodes = torch.arange(graph.num_nodes)
    if kind == "metis":
        pytest.importorskip("pymetis")
        return partition(graph, num_ranks, "metis").owner
    if kind == "skewed":
        return torch.where(nodes % 10 == 9, nodes % num_ranks, 0).int()
    if kind == "empty":
        return (nodes % max(1, num_ranks - 1)).int()
    return partition(graph, num_ranks, kind).owner


GRID = ((1, "hash"), (2, "metis"), (3, "empty"), (4, "skewed"))
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
    graph = make_graph(weighted=name in ("gcn", "gcn plain", "four layers"))
    expected = alone(graph, name)
    assert expected.steps == 20
    found = run_in_threads(num_ranks, fit_share, graph, owners(graph, num_ranks, kind), name, {})
    assert_same(found, expected)


@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_eight_ranks(make_graph: MakeGraph, name: str) -> None:
    graph = make_graph()
    found = run_in_threads(8, fit_share, graph, owners(graph, 8, "hash"), name, {"max_epochs": 1})
    assert_same(found, alone(graph, name, max_epochs=1))


@pytest.mark.parametrize(("name", "num_ranks"), [("gcn", 2), ("sage", 4), ("gat", 3)])
def test_weights_of_one_process_over_gloo(
    make_graph: MakeGraph, ranks: Run, name: str, num_ranks: int
) -> None:
    graph = make_graph(weighted=name == "gcn")
    kind = "empty" if num_ranks == 3 else "hash"
    found = ranks(num_ranks, fit_share, graph, owners(graph, num_ranks, kind), name, {})
    assert_same(found, alone(graph, name))


OPTIONS: dict[str, dict[str, Any]] = {
    "labor": {"sampler": "labor"},
    "labor, dependent": {"sampler": "labor", "labor_dependence": 3},
    "labor, dependent, one layer split": {"sampler": "labor", "labor_dependence": 4, "split_depth": 1},
    "all neighbours": {"num_neighbors": [-1, -1, -1]},
    "wide fan-out": {"num_neighbors": [300, 2, 2]},
    "one seed": {"batch_size": 1, "max_epochs": 1},  # most ranks have none
    "one ahead": {"prefetch": 1},
    "two layers split": {"split_depth": 2},
    "one layer split": {"split_depth": 1},
    "one layer split, labor": {"split_depth": 1, "sampler": "labor"},
    "copies": {"cache": 2000},
    "copies of all": {"cache": "1MB"},
    "copies, two layers split": {"cache": 2000, "split_depth": 2},
    "no caches": {"cache": 0, "device_cache": "0"},
    "hot rows": {"device_cache": 1500},
    "hot rows, all": {"device_cache": "1MB"},
    "hot rows and copies": {"device_cache": 1500, "cache": 2000},
    "hot rows, two layers split": {"device_cache": 1500, "split_depth": 2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_change_nothing_of_it(make_graph: MakeGraph, options: dict[str, Any]) -> None:
    graph, options = make_graph(), {"max_epochs": 2, **options}
    found = run_in_threads(3, fit_share, graph, owners(graph, 3, "hash"), "sage", options)
    own = ("cache", "device_cache", "split_depth")
    shared = {name: value for name, value in options.items() if name not in own}
    assert_same(found, alone(graph, "sage", **shared))


@pytest.mark.parametrize("name", ["gcn", "gat", "gin", "gcnii", "sage narrow"])
@pytest.mark.parametrize("options", [{"split_depth": 1}, {"split_depth": 2, "cache": 1500}])
def test_models_whose_lower_layers_are_split(
    make_graph: MakeGraph, name: str, options: dict[str, Any]
) -> None:
    graph, twice = make_graph(weighted=name == "gcn"), {"max_epochs": 2}
    found = run_in_threads(4, fit_share, graph, owners(graph, 4, "skewed"), name, twice | options)
    assert_same(found, alone(graph, name, **twice))


@pytest.mark.parametrize("name", ["sage", "gcn", "gin"])
@pytest.mark.parametrize("options", [{}, {"split_depth": 2}, {"cache": 1500}, {"bits": 8}])
def test_sums_send_less(make_graph: MakeGraph, name: str, options: dict[str, Any]) -> None:
    graph, once = make_graph(weighted=name == "gcn"), {**options, "max_epochs": 1}
    found = [
        run_in_threads(3, fit_share, graph, owners(graph, 3, "hash"), name, {**once, "split_sums": with_sums})
        for with_sums in (False, True)
    ]
    sent = [[each.sent.bytes for each in side] for side in found]
    assert sum(each["hidden"] for each in sent[1]) < 0.97 * sum(each["hidden"] for each in sent[0])
    assert sum(sum(each.values()) for each in sent[1]) < sum(sum(each.values()) for each in sent[0])
    if "bits" not in options:
        assert_same(found[0], alone(graph, name, max_epochs=1))
        assert_same(found[1], alone(graph, name, max_epochs=1))


@pytest.mark.parametrize("name", ["sage max", "gat", "wrapped"])
def test_layers_that_do_more_than_sum_send_rows(make_graph: MakeGraph, name: str) -> None:
    graph = make_graph()
    sent = [
        run_in_threads(
            2, fit_share, graph, owners(graph, 2, "hash"), name, {"split_sums": with_sums, "max_epochs": 1}
        )[0].sent.bytes
        for with_sums in (False, True)
    ]
    assert sent[0] == sent[1]


def test_copies_send_fewer_rows(make_graph: MakeGraph) -> None:
    graph, owner = make_graph(), owners(make_graph(), 3, "hash")
    sent = [
        run_in_threads(3, fit_share, graph, owner, "sage", {"cache": cache})[0].sent.bytes["hidden"]
        for cache in (None, 2000, "1MB")
    ]
    assert sent[0] > sent[1] > sent[2]


@pytest.mark.parametrize("kind", ["single", "multi"])
def test_sparse_features_and_multilabel(make_graph: MakeGraph, kind: str) -> None:
    graph = make_graph(kind=kind, sparse=True)
    metric = "f1_micro" if kind == "multi" else "roc_auc"
    options = {"metric": metric, "device_cache": 2000 if kind == "multi" else None}
    found = run_in_threads(3, fit_share, graph, owners(graph, 3, "empty"), "gcn", options)
    assert_same(found, alone(graph, "gcn", metric=metric))


def test_single_precision(make_graph: MakeGraph) -> None:
    graph, options = make_graph(), {"precision": "32-true", "max_epochs": 1}
    found = run_in_threads(3, fit_share, graph, owners(graph, 3, "hash"), "sage", options)
    expected = alone(graph, "sage", **options)
    for name, value in expected.weights.items():
        assert float((found[0].weights[name] - value).norm() / value.norm()) <= 1e-5, name


def test_few_bits_are_near_and_repeat(make_graph: MakeGraph) -> None:
    graph, owner = make_graph(), owners(make_graph(), 3, "hash")
    exact = run_in_threads(3, fit_share, graph, owner, "sage", {})[0]
    small = [run_in_threads(3, fit_share, graph, owner, "sage", {"bits": 8})[0] for _ in range(2)]
    for name, value in exact.weights.items():
        assert torch.equal(small[0].weights[name], small[1].weights[name]), name
        assert float((small[0].weights[name] - value).norm() / value.norm()) < 0.1, name
    assert small[0].sent.bytes["hidden"] < 0.4 * exact.sent.bytes["hidden"]


def refused(line: Collective, graph: Graph, owner: Tensor, what: str) -> str:
    model, options = model_of("sage", graph), dict[str, Any]()
    if what == "full graph":
        options |= {"num_neighbors": None, "batch_size": None}
    if what == "fan-outs":
        options["num_neighbors"] = [3]
    if what == "batch norm":
        model = nn.GraphSAGE(graph.num_features, 8, num_layers=3, out_channels=3, norm="batch_norm")
    if what == "own module":
        model = torch.nn.Linear(graph.num_features, 3)
    if what == "bits":
        options["bits"] = "adaptive"
    if what == "depth":
        options["split_depth"] = 4
    try:
        trainer("split", "sage", **options).fit(
            model, share(graph, Partition(owner, line.num_ranks), line.rank), line=line
        )
    except (ConfigError, UnsupportedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("full graph", "ConfigError: .*mini-batches: give one fan-out per layer"),
        ("fan-outs", "ConfigError: .*1 fan-outs, the model has 3 layers"),
        ("batch norm", "UnsupportedError: .*BatchNorm.*norm='layer'"),
        ("own module", "UnsupportedError: .*begin/layer/finish"),
        ("bits", "ConfigError: .*bits.*strategy 'halo'"),
        ("depth", "ConfigError: split_depth=4: expected 1 .. 3"),
    ],
)
def test_what_cannot_be_trained_so_is_refused_everywhere(
    make_graph: MakeGraph, what: str, expected: str
) -> None:
    graph = make_graph()
    for text in run_in_threads(2, refused, graph, owners(graph, 2, "hash"), what):
        assert re.search(expected, text), text


def test_split_needs_ranks(make_graph: MakeGraph) -> None:
    graph = make_graph()
    with pytest.raises(ConfigError, match="--workers N"):
        trainer("split", "sage").fit(model_of("sage", graph), graph)
