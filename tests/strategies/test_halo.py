"""Full-graph training over ranks gives the weights of one process on the full graph, whatever the parts and the backend."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.errors import ConfigError, UnsupportedError
from polyhop.graph import Graph, Split
from polyhop.partition import Partition, partition, share
from polyhop.trainer import Trainer

MakeGraph = Callable[..., Graph]
Run = Callable[..., list[Any]]

SEEDING = threading.Lock()
BATCH = {"norm": "batch"}
LAYER = {"norm": "layer", "norm_kwargs": {"mode": "node"}}
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "gcn": lambda f, c: nn.GCN(f, 12, num_layers=3, out_channels=c, dropout=0.5),
    "gcn-batch": lambda f, c: nn.GCN(f, 12, num_layers=3, out_channels=c, dropout=0.5, **BATCH),
    "gcn-layer": lambda f, c: nn.GCN(f, 12, num_layers=2, out_channels=c, dropout=0.3, **LAYER),
    "gcn-jk": lambda f, c: nn.GCN(f, 12, num_layers=3, out_channels=c, dropout=0.3, jk="cat"),
    "sage": lambda f, c: nn.GraphSAGE(f, 12, num_layers=3, out_channels=c, dropout=0.5),
    "sage-one": lambda f, c: nn.GraphSAGE(f, 12, num_layers=1, out_channels=c),
    "sage-max": lambda f, c: nn.GraphSAGE(f, 12, num_layers=2, out_channels=c, dropout=0.5, aggr="max"),
    "sage-project": lambda f, c: nn.GraphSAGE(f, 6, num_layers=2, out_channels=c, project=True),
    "gat": lambda f, c: nn.GAT(f, 8, num_layers=3, out_channels=c, heads=2, dropout=0.4),
    "gat-wide": lambda f, c: nn.GAT(f, 6, num_layers=3, out_channels=c, heads=2, concat=False),
    "gin": lambda f, c: nn.GIN(f, 12, num_layers=3, out_channels=c, dropout=0.2),
    "gin-batch": lambda f, c: nn.GIN(f, 12, num_layers=2, out_channels=c, **BATCH, train_eps=True),
    "gcnii": lambda f, c: nn.GCNII(f, 12, num_layers=4, out_channels=c, dropout=0.3),
    "deepgcn": lambda f, c: nn.DeepGCN(f, 12, num_layers=3, out_channels=c, dropout=0.3),
    "deepgcn-batch": lambda f, c: nn.DeepGCN(f, 12, num_layers=3, out_channels=c, dropout=0.3, norm="batch"),
}


def wrapped(num_features: int, num_classes: int) -> torch.nn.Module:
    """PyG's own layers: they cannot be run in pieces."""
    pyg = pytest.importorskip("torch_geometric.nn")
    layers = [pyg.SAGEConv(num_features, 12), pyg.GATConv(12, 6, heads=2), pyg.SAGEConv(12, num_classes)]
    return nn.Stack(layers, dropout=0.3)


MODELS["wrapped"] = wrapped


def model_of(name: str, graph: Graph) -> torch.nn.Module:
    with SEEDING:  # ranks may be threads, and torch's generator is one
        torch.manual_seed(7)
        return MODELS[name](graph.num_features, graph.num_classes)


def trainer(strategy: str, **options: Any) -> Trainer:
    """Fifty epochs, each a step, of Adam in double; evaluated once at the end."""
    given: dict[str, Any] = {"max_epochs": 50, "eval_every": 100, "precision": "64-true", "lr": 0.005}
    return Trainer(strategy, **{**given, "device": "cpu", "progress": "none", "seed": 3, **options})


@dataclass
class Trained:
    weights: dict[str, Tensor]
    test: float | None
    losses: list[float]
    predictions: Tensor
    sent: Cost


def fit_share(line: Collective, graph: Graph, owner: Tensor, name: str, options: dict[str, Any]) -> Trained:
    model = model_of(name, graph)
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    chosen = trainer("halo", **options)
    result = chosen.fit(model, held, line=line)
    sent = line.traffic.now()
    predictions = chosen.predict(model, held, line=line)
    assert isinstance(predictions, Tensor)
    losses = [record["loss"] for record in result.history]
    return Trained(model.state_dict(), result.test, losses, predictions, sent)


def alone(graph: Graph, name: str, **options: Any) -> Trained:
    model = model_of(name, graph)
    chosen = trainer("single", **options)
    result = chosen.fit(model, graph)
    predictions = chosen.predict(model, graph)
    assert isinstance(predictions, Tensor)
    losses = [record["loss"] for record in result.history]
    return Trained(model.state_dict(), result.test, losses, predictions, Cost())


def assert_same(found: list[Trained], expected: Trained, bound: float = 1e-9) -> None:
    for rank, each in enumerate(found):
        for name, value in expected.weights.items():
            assert torch.equal(each.weights[name], found[0].weights[name]), (rank, name)
            scale = max(1.0, float(value.abs().max())) if value.numel() else 1.0
            assert float((each.weights[name] - value).abs().max()) <= bound * scale, (rank, name)
        assert each.test == expected.test
    assert found[0].losses == pytest.approx(expected.losses, abs=bound)
    assert float((found[0].predictions - expected.predictions).abs().max()) <= 100 * bound


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
CORE = ("gcn", "sage", "gat", "gcn-batch")
EVERYWHERE = [
    pytest.param(name, num_ranks, kind, marks=() if name in CORE or num_ranks == 4 else pytest.mark.slow)
    for name in MODELS
    for num_ranks, kind in GRID
]


@pytest.mark.parametrize(("name", "num_ranks", "kind"), EVERYWHERE)
def test_weights_of_one_process(make_graph: MakeGraph, name: str, num_ranks: int, kind: str) -> None:
    graph = make_graph(weighted=name.startswith("gcn"))
    owner = owners(graph, num_ranks, kind)
    found = run_in_threads(num_ranks, fit_share, graph, owner, name, {"max_epochs": 8})
    assert_same(found, alone(graph, name, max_epochs=8))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_weights_of_one_process_after_fifty_epochs(
    make_graph: MakeGraph, ranks: Run, name: str, num_ranks: int
) -> None:
    graph = make_graph(weighted=name.startswith("gcn"))
    expected = alone(graph, name)
    owner = owners(graph, num_ranks, "metis" if num_ranks > 1 else "hash")
    assert_same(ranks(num_ranks, fit_share, graph, owner, name, {}), expected)


@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "gcn-batch"])
def test_weights_of_one_process_over_gloo(make_graph: MakeGraph, ranks: Run, name: str) -> None:
    graph = make_graph()
    expected = alone(graph, name, max_epochs=6)
    for num_ranks, kind in ((2, "hash"), (4, "empty")):
        owner = owners(graph, num_ranks, kind)
        assert_same(ranks(num_ranks, fit_share, graph, owner, name, {"max_epochs": 6}), expected)


def directed(graph: Graph) -> Graph:
    """The same nodes, every second edge only."""
    src = graph.indices.long()
    dst = torch.repeat_interleave(torch.arange(graph.num_nodes), graph.indptr.diff())
    keep = (src + 2 * dst) % 3 != 0
    indptr = torch.zeros_like(graph.indptr)
    indptr[1:] = torch.bincount(dst[keep], minlength=graph.num_nodes).cumsum(0)
    weight = None if graph.edge_weight is None else graph.edge_weight[keep]
    return replace(graph, indptr=indptr, indices=graph.indices[keep], edge_weight=weight)


@pytest.mark.parametrize("name", ["gcn", "gat", "sage", "gin", "gcnii"])
def test_directed_graphs(make_graph: MakeGraph, name: str) -> None:
    graph = directed(make_graph(weighted=name == "gcn"))
    expected = alone(graph, name, max_epochs=5)
    found = run_in_threads(3, fit_share, graph, owners(graph, 3, "hash"), name, {"max_epochs": 5})
    assert_same(found, expected)


@pytest.mark.parametrize("kind", ["single", "multi"])
@pytest.mark.parametrize("sparse", [False, True])
def test_sparse_features_and_multilabel(make_graph: MakeGraph, kind: str, sparse: bool) -> None:
    graph = make_graph(kind=kind, sparse=sparse)
    given = {"metric": "f1_micro" if kind == "multi" else "roc_auc", "max_epochs": 5}
    found = run_in_threads(3, fit_share, graph, owners(graph, 3, "empty"), "gcn", given)
    assert_same(found, alone(graph, "gcn", **given))


def where_trained(graph: Graph, owner: Tensor, rank: int) -> Graph:
    """Train nodes only in one part."""
    assert graph.split is not None
    train = graph.split.train[owner[graph.split.train] == rank]
    return replace(graph, split=Split(train, graph.split.val, graph.split.test))


@pytest.mark.parametrize("name", ["gcn", "sage", "deepgcn-batch"])
def test_parts_without_train_nodes(make_graph: MakeGraph, name: str) -> None:
    graph = make_graph()
    owner = owners(graph, 3, "hash")
    graph = where_trained(graph, owner, 1)
    found = run_in_threads(3, fit_share, graph, owner, name, {"max_epochs": 5})
    assert_same(found, alone(graph, name, max_epochs=5))


def test_parts_without_a_halo_and_nodes_with_all_neighbours_elsewhere(make_graph: MakeGraph) -> None:
    graph = make_graph(num_nodes=100)
    half = torch.arange(graph.num_nodes) % 2
    src = graph.indices.long()
    dst = torch.repeat_interleave(torch.arange(graph.num_nodes), graph.indptr.diff())
    for is_kept in (
        half[src] == half[dst],
        half[src] != half[dst],
    ):  # two graphs apart; all neighbours elsewhere
        indptr = torch.zeros_like(graph.indptr)
        indptr[1:] = torch.bincount(dst[is_kept], minlength=graph.num_nodes).cumsum(0)
        cut = replace(graph, indptr=indptr, indices=graph.indices[is_kept])
        found = run_in_threads(2, fit_share, cut, half.int(), "gcn", {"max_epochs": 5})
        assert_same(found, alone(cut, "gcn", max_epochs=5))


def test_more_ranks_than_are_useful(make_graph: MakeGraph) -> None:
    graph = make_graph(num_nodes=40)
    found = run_in_threads(8, fit_share, graph, (torch.arange(40) % 8).int(), "gat", {"max_epochs": 4})
    assert_same(found, alone(graph, "gat", max_epochs=4))


@pytest.mark.parametrize("options", [{"naive_halo": True}, {"overlap": False}, {"halo": "skipping", "halo_drift": 0.0},
                                     {"halo": "sampled", "halo_share": 1.0}], ids=str)  # fmt: skip
def test_other_ways_that_are_exact(make_graph: MakeGraph, options: dict[str, Any]) -> None:
    graph = make_graph()
    given = {"max_epochs": 6, **options}
    found = run_in_threads(3, fit_share, graph, owners(graph, 3, "hash"), "sage", given)
    assert_same(found, alone(graph, "sage", max_epochs=6))


def test_overlap_changes_no_bit(make_graph: MakeGraph) -> None:
    graph, owner = make_graph(), owners(make_graph(), 3, "hash")
    one, other = (
        run_in_threads(3, fit_share, graph, owner, "gat", {"max_epochs": 5, "overlap": overlap})[0]
        for overlap in (True, False)
    )
    assert one.losses == other.losses
    assert all(torch.equal(value, other.weights[name]) for name, value in one.weights.items())


def test_bfloat16_trains(make_graph: MakeGraph) -> None:
    graph = make_graph()
    given = {"precision": "bf16-mixed", "max_epochs": 30, "lr": 0.02}
    found = run_in_threads(2, fit_share, graph, owners(graph, 2, "hash"), "sage", given)
    assert found[0].losses[-1] < 0.5 * found[0].losses[0]


def refused(line: Collective, graph: Graph, owner: Tensor, what: str) -> str:
    model: torch.nn.Module = model_of("gat" if what == "attention" else "sage", graph)
    options: dict[str, Any] = {
        "fan-out": {"num_neighbors": [3, 3, 3]},
        "attention": {"halo": "sampled"},
        "adaptive": {"halo": "sampled", "bits": "adaptive"},
        "no train": {},
        "no layers": {},
    }[what]
    if what == "no layers":
        model = torch.nn.Sequential(nn.SAGEConv(graph.num_features, graph.num_classes))
    if what == "no train":
        assert graph.split is not None
        empty = torch.empty(0, dtype=torch.int64)
        graph = replace(graph, split=Split(empty, graph.split.val, graph.split.test))
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    try:
        trainer("halo", max_epochs=1, **options).fit(model, held, line=line)
    except (ConfigError, UnsupportedError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("fan-out", "trains on the full graph"),
        ("attention", "GATConv"),
        ("adaptive", "number of bits"),
        ("no train", "train set is empty"),
        ("no layers", "begin/layer/finish"),
    ],
)
def test_what_cannot_be_trained_is_refused(make_graph: MakeGraph, what: str, said: str) -> None:
    graph = make_graph(num_nodes=60)
    for message in run_in_threads(2, refused, graph, owners(graph, 2, "hash"), what):
        assert said in message


def test_one_process_is_told_to_use_ranks(make_graph: MakeGraph) -> None:
    graph = make_graph(num_nodes=60)
    with pytest.raises(ConfigError, match="runs on ranks"):
        trainer("halo", max_epochs=1).fit(model_of("sage", graph), graph)
