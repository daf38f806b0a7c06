"""Data parallelism gives the weights of one process on the same global batches, whatever the parts and the backend."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.errors import ConfigError, PartitionError, UnsupportedError
from polyhop.graph import DenseFeatures, Graph
from polyhop.partition import Partition, partition, share
from polyhop.trainer import Trainer

MakeGraph = Callable[..., Graph]
Run = Callable[..., list[Any]]

SEEDING = threading.Lock()
FAN_OUTS = [4, 3]
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "gcn": lambda f, c: nn.GCN(f, 8, num_layers=2, out_channels=c, dropout=0.5),
    "sage": lambda f, c: nn.GraphSAGE(f, 8, num_layers=2, out_channels=c, dropout=0.5),
    "gat": lambda f, c: nn.GAT(f, 8, num_layers=2, out_channels=c, heads=2, dropout=0.4),
}


def model_of(name: str, graph: Graph) -> torch.nn.Module:
    with SEEDING:  # ranks may be threads, and torch's generator is one
        torch.manual_seed(7)
        return MODELS[name](graph.num_features, graph.num_classes)


def trainer(strategy: str, **options: Any) -> Trainer:
    """Twenty steps of Adam in double: 4 epochs of 5 steps, evaluated once at the end."""
    given = {
        "max_epochs": 4,
        "batch_size": 20,
        "num_neighbors": FAN_OUTS,
        "eval_every": 100,
        "precision": "64-true",
    }
    return Trainer(strategy, **{**given, "device": "cpu", "progress": "none", "seed": 3, **options})


@dataclass
class Trained:
    weights: dict[str, Tensor]
    test: float | None
    loss: float
    predictions: Tensor
    steps: int
    sent: Cost


def fit_share(line: Collective, graph: Graph, owner: Tensor, name: str, options: dict[str, Any]) -> Trained:
    model = model_of(name, graph)
    if line.rank:  # all ranks must start from the weights of rank 0
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    chosen = trainer("data", **options)
    result = chosen.fit(model, held, line=line)
    sent = line.traffic.now()
    predictions = chosen.predict(model, held, line=line)
    assert isinstance(predictions, Tensor)
    loss = result.history[-1]["loss"] if line.rank == 0 else 0.0
    return Trained(model.state_dict(), result.test, loss, predictions, result.steps, sent)


def alone(graph: Graph, name: str, **options: Any) -> Trained:
    model = model_of(name, graph)
    chosen = trainer("single", **options)
    result = chosen.fit(model, graph)
    predictions = chosen.predict(model, graph)
    assert isinstance(predictions, Tensor)
    return Trained(
        model.state_dict(), result.test, result.history[-1]["loss"], predictions, result.steps, Cost()
    )


def assert_same(found: list[Trained], expected: Trained, bound: float = 1e-10) -> None:
    for rank, each in enumerate(found):
        assert each.steps == expected.steps
        for name, value in expected.weights.items():
            assert torch.equal(each.weights[name], found[0].weights[name]), (rank, name)
            assert float((each.weights[name] - value).abs().max()) <= bound, (rank, name)
        assert each.test == expected.test
    assert found[0].loss == pytest.approx(expected.loss, abs=1e-10)
    assert found[0].predictions.shape == expected.predictions.shape
    assert float((found[0].predictions - expected.predictions).abs().max()) <= 1e-8


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


FIRST = ((1, "hash"), (2, "metis"), (3, "empty"), (4, "skewed"))
REST = tuple((n, kind) for n in (2, 3, 4) for kind in ("metis", "skewed", "empty") if (n, kind) not in FIRST)


@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
@pytest.mark.parametrize("cases", [FIRST, pytest.param(REST, marks=pytest.mark.slow)], ids=["first", "rest"])
def test_weights_of_one_process_over_threads(
    make_graph: MakeGraph, name: str, cases: tuple[tuple[int, str], ...]
) -> None:
    graph = make_graph(weighted=name == "gcn")
    expected = alone(graph, name)
    assert expected.steps == 20
    for num_ranks, kind in cases:
        found = run_in_threads(num_ranks, fit_share, graph, owners(graph, num_ranks, kind), name, {})
        assert_same(found, expected)


SOON = {("gcn", 1), ("gcn", 2), ("sage", 3), ("sage", 4), ("gat", 4)}


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        pytest.param(name, num_ranks, marks=() if (name, num_ranks) in SOON else pytest.mark.slow)
        for name in ("gcn", "sage", "gat")
        for num_ranks in (1, 2, 3, 4)
    ],
)
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
    "all neighbours": {"num_neighbors": [-1, -1]},
    "wide fan-out": {"num_neighbors": [300, 2]},
    "clip and decay": {"clip": 0.1, "weight_decay": 1e-3},
    "small memory": {"memory": 20_000},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_change_nothing_of_it(make_graph: MakeGraph, options: dict[str, Any]) -> None:
    graph = make_graph()
    found = run_in_threads(3, fit_share, graph, owners(graph, 3, "hash"), "sage", options)
    assert_same(found, alone(graph, "sage", **options))


@pytest.mark.parametrize(
    "more",
    [
        {"cache": 3000},
        {"cache": "1MB"},
        {"cache": 9000, "cache_ranks": 3},
        {"cache": "1MB", "cache_ranks": 3},
        {"per_minibatch_rpc": True},
        {"prefetch": 1},
    ],
)
def test_how_rows_travel_changes_no_bit(make_graph: MakeGraph, more: dict[str, Any]) -> None:
    graph = make_graph()
    owner = owners(graph, 3, "hash")
    plain = run_in_threads(3, fit_share, graph, owner, "sage", {})
    found = run_in_threads(3, fit_share, graph, owner, "sage", more)
    for name, value in plain[0].weights.items():
        assert torch.equal(found[2].weights[name], value), name
    if "cache" in more:
        assert found[0].sent.bytes["features"] < plain[0].sent.bytes["features"]
    if "per_minibatch_rpc" in more:
        assert found[0].sent.bytes["ids"] > 1.5 * plain[0].sent.bytes["ids"]


@pytest.mark.parametrize("kind", ["single", "multi"])
@pytest.mark.parametrize("sparse", [False, True])
def test_sparse_features_and_multilabel(make_graph: MakeGraph, kind: str, sparse: bool) -> None:
    graph = make_graph(kind=kind, sparse=sparse)
    metric = "f1_micro" if kind == "multi" else "roc_auc"
    found = run_in_threads(3, fit_share, graph, owners(graph, 3, "empty"), "gcn", {"metric": metric})
    assert_same(found, alone(graph, "gcn", metric=metric))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_rounded_rows_do_not_depend_on_the_parts(make_graph: MakeGraph, dtype: str) -> None:
    graph = make_graph()
    one = run_in_threads(1, fit_share, graph, owners(graph, 1, "hash"), "sage", {"feature_dtype": dtype})[0]
    found = run_in_threads(3, fit_share, graph, owners(graph, 3, "hash"), "sage", {"feature_dtype": dtype})
    assert_same(found, one)
    exact = alone(graph, "sage")
    assert any(
        not torch.allclose(one.weights[name], value, atol=1e-9) for name, value in exact.weights.items()
    )


def test_features_stored_small_travel_as_stored(make_graph: MakeGraph) -> None:
    graph = make_graph()
    assert isinstance(graph.x, DenseFeatures)
    scale = torch.rand(8) + 0.1
    values = (graph.x.values * 10).round().clamp(-127, 127).to(torch.int8)
    graph = replace(graph, x=DenseFeatures(values, scale))
    found = run_in_threads(2, fit_share, graph, owners(graph, 2, "hash"), "sage", {})
    assert_same(found, alone(graph, "sage"))


def refused(line: Collective, graph: Graph, owner: Tensor, what: str) -> str:
    model = model_of("sage", graph)
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    options: dict[str, Any] = {}
    strategy = "data"
    if what == "full graph":
        options["num_neighbors"] = None
        options["batch_size"] = None
    if what == "fan-outs":
        options["num_neighbors"] = [3]
    if what == "batch norm":
        model = nn.GraphSAGE(graph.num_features, 8, num_layers=2, out_channels=3, norm="batch_norm")
    if what == "own module":
        model = torch.nn.Linear(graph.num_features, 3)
    if what == "no cache":
        options["cache_ranks"] = 2
    if what == "cache groups":
        options |= {"cache": "1MB", "cache_ranks": 4}
    if what == "single":
        strategy = "single"
    given: Any = graph if what == "whole graph" else held
    try:
        trainer(strategy, **options).fit(model, given, line=line)
    except (ConfigError, UnsupportedError, PartitionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("full graph", "ConfigError: .*mini-batches: give one fan-out per layer"),
        ("fan-outs", "ConfigError: .*1 fan-outs, the model has 2 layers"),
        ("batch norm", "UnsupportedError: .*BatchNorm.*norm='layer'"),
        ("own module", "UnsupportedError: .*begin/layer/finish"),
        ("no cache", "ConfigError: cache_ranks=2: there is no cache to share; give its size"),
        (
            "cache groups",
            "ConfigError: cache_ranks=4: 2 ranks cannot share caches in groups of 4; .*divides 2",
        ),
        ("single", "ConfigError: .*'single' trains on a whole graph"),
        ("whole graph", "ConfigError: .*share of a graph"),
    ],
)
def test_what_cannot_be_trained_so_is_refused_everywhere(
    make_graph: MakeGraph, what: str, expected: str
) -> None:
    graph = make_graph()
    for text in run_in_threads(2, refused, graph, owners(graph, 2, "hash"), what):
        assert re.search(expected, text), text


def anothers_part(line: Collective, graph: Graph, owner: Tensor) -> None:
    held = share(graph, Partition(owner, line.num_ranks), 0)
    trainer("data").fit(model_of("sage", graph), held, line=line)


def test_a_rank_with_anothers_part_is_refused(make_graph: MakeGraph) -> None:
    graph = make_graph()
    with pytest.raises(PartitionError, match="rank 1 of 2 was given part 0 of 2"):
        run_in_threads(2, anothers_part, graph, owners(graph, 2, "hash"))


def test_data_needs_ranks(make_graph: MakeGraph) -> None:
    graph = make_graph()
    with pytest.raises(ConfigError, match="--workers N"):
        trainer("data").fit(model_of("sage", graph), graph)
