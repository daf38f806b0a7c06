"""One step of full-graph training over ranks: logits, loss and every gradient are those of one process (E1, E2 of the spec),
also where train nodes are few and far from the cut; and the halo's input rows cross once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.errors import UnsupportedError
from polyhop.graph import Graph, Part, Split
from polyhop.kernels.keys import Key
from polyhop.partition import Partition, partition, share
from polyhop.strategies import Team, WholeGraph, halo, place, single
from polyhop.train.loss import cross_entropy_sum
from polyhop.trainer import Trainer

MakeGraph = Callable[..., Graph]
SEEDING = threading.Lock()
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "gcn": lambda f, c: nn.GCN(f, 12, num_layers=3, out_channels=c),
    "gcn-one": lambda f, c: nn.GCN(f, 12, num_layers=1, out_channels=c),
    "gcn-batch": lambda f, c: nn.GCN(f, 12, num_layers=3, out_channels=c, norm="batch"),
    "sage": lambda f, c: nn.GraphSAGE(f, 12, num_layers=3, out_channels=c),
    "sage-max": lambda f, c: nn.GraphSAGE(f, 12, num_layers=3, out_channels=c, aggr="max"),
    "gat": lambda f, c: nn.GAT(f, 8, num_layers=3, out_channels=c, heads=2),
    "gin": lambda f, c: nn.GIN(f, 12, num_layers=3, out_channels=c),
    "gcnii": lambda f, c: nn.GCNII(f, 12, num_layers=4, out_channels=c),
    "deepgcn": lambda f, c: nn.DeepGCN(f, 12, num_layers=3, out_channels=c),
}
LINEAR = ("gcn", "sage", "gin")  # where sums of rows may cross
DTYPES = {"64-true": torch.float64, "32-true": torch.float32}


@dataclass
class Stepped:
    """Of one step: the train nodes by the user's ids, their logits, the loss, the gradient of every weight."""

    ids: Tensor
    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def model_of(name: str, graph: Graph, precision: str) -> torch.nn.Module:
    with SEEDING:
        torch.manual_seed(7)
        model = MODELS[name](graph.num_features, graph.num_classes)
    return model.to(DTYPES[precision]).train()


def stepped(step: Any, model: torch.nn.Module, ids: Tensor, rows: Tensor | None) -> Stepped:
    """``rows``: of the logits that the train nodes have; None: asked of the step."""
    seen: list[Tensor] = []
    hook = model.register_forward_hook(lambda module, given, out: seen.append(out.detach()))
    loss = step.gradients(next(iter(step.batches(0))), Key(3))
    hook.remove()
    at = step._rows if rows is None else rows
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Stepped(ids, seen[-1][at], loss, gradients)


def build(
    line: Collective, graph: Graph, owner: Tensor, model: torch.nn.Module, precision: str, **options: Any
) -> tuple[Any, Tensor]:
    """The step, and its train nodes by the user's ids."""
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    given = Trainer("halo", device="cpu", progress="none", precision=precision, **options)
    config = halo.Config(**{f.name: getattr(given, f.name) for f in fields(halo.Config)})
    team, part = Team(line), held.part
    whole = halo.hold(held, place("cpu", precision), team, config)
    assert held.split is not None
    assert isinstance(part, Part)
    assert part.y is not None
    train = held.split.train[part.y[held.split.train] >= 0]
    step = halo.build(model, held, config, train_ids=train, whole=whole, loss=cross_entropy_sum, team=team)
    return step, part.user_ids[train]


def over_ranks(
    line: Collective, graph: Graph, owner: Tensor, name: str, precision: str, options: dict[str, Any]
) -> Stepped:
    model = model_of(name, graph, precision)
    step, ids = build(line, graph, owner, model, precision, **options)
    found = stepped(step, model, ids, None)
    step.close()
    return found


def alone(graph: Graph, name: str, precision: str) -> Stepped:
    model = model_of(name, graph, precision)
    assert graph.split is not None
    assert graph.y is not None
    train = graph.split.train[graph.y[graph.split.train] >= 0]
    whole = WholeGraph(graph, place("cpu", precision))
    step = single.build(model, graph, single.Config(), train_ids=train, whole=whole, loss=cross_entropy_sum)
    return stepped(step, model, train, train)


def far(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    if not expected.numel():
        return 0.0
    return float((found - expected).abs().max()) / max(float(expected.abs().max()), 1e-30)


def assert_same(found: list[Stepped], expected: Stepped, bound: float) -> None:
    ids = torch.cat([each.ids for each in found])
    assert sorted(ids.tolist()) == sorted(expected.ids.tolist())
    logits = dict(zip(expected.ids.tolist(), expected.logits, strict=True))
    right = torch.stack([logits[node] for node in ids.tolist()])
    assert far(torch.cat([each.logits for each in found]), right) <= bound, "logits"
    for each in found:
        assert far(each.loss, expected.loss) <= bound, "loss"
        assert each.gradients.keys() == expected.gradients.keys()
        largest = max(float(value.abs().max()) for value in expected.gradients.values())
        for name, value in expected.gradients.items():
            if (
                float(value.abs().max()) > 1e-6 * largest
            ):  # what cancels (a bias before BatchNorm) is rounding alone
                assert far(each.gradients[name], value) <= bound, name
            assert torch.equal(each.gradients[name], found[0].gradients[name]), "ranks differ"


def directed(graph: Graph) -> Graph:
    """The same nodes, two of three edges, and not their reverse."""
    src = graph.indices.long()
    dst = torch.repeat_interleave(torch.arange(graph.num_nodes), graph.indptr.diff())
    keep = (src + 2 * dst) % 3 != 0
    indptr = torch.zeros_like(graph.indptr)
    indptr[1:] = torch.bincount(dst[keep], minlength=graph.num_nodes).cumsum(0)
    weight = None if graph.edge_weight is None else graph.edge_weight[keep]
    return replace(graph, indptr=indptr, indices=graph.indices[keep], edge_weight=weight)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_one_step_in_double(make_graph: MakeGraph, name: str, num_ranks: int) -> None:
    """E1: <= 1e-10, undirected and directed."""
    plain = make_graph(num_nodes=120, weighted=name.startswith("gcn"))
    for graph in (plain, directed(plain)):
        owner = partition(graph, num_ranks, "hash").owner
        expected = alone(graph, name, "64-true")
        found = run_in_threads(num_ranks, over_ranks, graph, owner, name, "64-true", {})
        assert_same(found, expected, 1e-10)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "gcn-batch"])
def test_one_step_in_single(make_graph: MakeGraph, name: str, num_ranks: int) -> None:
    """E1: <= 1e-5."""
    graph = make_graph(num_nodes=200)
    owner = partition(graph, num_ranks, "hash").owner
    found = run_in_threads(num_ranks, over_ranks, graph, owner, name, "32-true", {})
    assert_same(found, alone(graph, name, "32-true"), 1e-5)


@pytest.mark.parametrize("options", [{"halo_sums": False}, {"naive_halo": True}, {"overlap": False}], ids=str)
@pytest.mark.parametrize("name", LINEAR)
def test_one_step_by_other_exact_ways(make_graph: MakeGraph, name: str, options: dict[str, Any]) -> None:
    graph = directed(make_graph(num_nodes=120, weighted=name == "gcn"))
    owner = partition(graph, 3, "hash").owner
    found = run_in_threads(3, over_ranks, graph, owner, name, "64-true", options)
    assert_same(found, alone(graph, name, "64-true"), 1e-10)


def chain_of_parts(num_ranks: int, num_classes: int = 3, size: int = 12) -> tuple[Graph, Tensor]:
    """Parts in a row, each joined to the next by one edge: most pairs of ranks exchange nothing."""
    num_nodes = num_ranks * size
    rng = torch.Generator().manual_seed(2)
    edges = [(p * size + a, p * size + (a + 1) % size) for p in range(num_ranks) for a in range(size)]
    edges += [(p * size, (p + 1) * size + 5) for p in range(num_ranks - 1)]
    pairs = torch.tensor(edges).T
    graph = Graph.from_edges(
        torch.cat([pairs, pairs.flip(0)], 1),
        num_nodes=num_nodes,
        x=torch.randn(num_nodes, 6, generator=rng),
        y=torch.randint(0, num_classes, (num_nodes,), generator=rng),
    )
    nodes = torch.arange(num_nodes)
    graph = replace(graph, split=Split(nodes[::3], nodes[1::3], nodes[2::3]), num_classes=num_classes)
    return graph, (nodes // size).int()


@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
@pytest.mark.parametrize("num_ranks", [3, 8])
def test_channels_without_rows(name: str, num_ranks: int) -> None:
    graph, owner = chain_of_parts(num_ranks)
    found = run_in_threads(num_ranks, over_ranks, graph, owner, name, "64-true", {})
    assert_same(found, alone(graph, name, "64-true"), 1e-10)


@pytest.mark.parametrize("name", ["gcn", "gcn-one", "sage", "gat", "gin", "gcnii"])
@pytest.mark.parametrize("train", [[3], [7], [3, 40], [0]], ids=str)
def test_few_train_nodes_far_from_the_cut(name: str, train: list[int]) -> None:
    """Some parts compute little or nothing and need no halo; degrees are those of the whole graph all the same."""
    graph, owner = chain_of_parts(4)
    assert graph.split is not None
    graph = replace(graph, split=Split(torch.tensor(train), graph.split.val, graph.split.test))
    expected = alone(graph, name, "64-true")
    for options in ({}, {"halo_sums": False}):
        found = run_in_threads(4, over_ranks, graph, owner, name, "64-true", options)
        assert_same(found, expected, 1e-10)


def fit(line: Collective | None, graph: Graph, owner: Tensor | None, name: str) -> list[float]:
    """Losses of ten epochs of Adam in single precision."""
    model = model_of(name, graph, "32-true")
    given: dict[str, Any] = {
        "max_epochs": 10,
        "eval_every": 100,
        "device": "cpu",
        "progress": "none",
        "seed": 3,
    }
    if line is None or owner is None:
        return [record["loss"] for record in Trainer("single", **given).fit(model, graph).history]
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    return [record["loss"] for record in Trainer("halo", **given).fit(model, held, line=line).history]


@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "gin"])
def test_losses_of_ten_epochs_in_single(make_graph: MakeGraph, name: str) -> None:
    """E2: <= 1e-5 relative."""
    graph = make_graph()
    expected = fit(None, graph, None, name)
    for num_ranks in (2, 4):
        owner = partition(graph, num_ranks, "hash").owner
        found = run_in_threads(num_ranks, fit, graph, owner, name)[0]
        assert found == pytest.approx(expected, rel=1e-5)


# Input rows cross once.


def sent_by_epoch(
    line: Collective, graph: Graph, owner: Tensor, num_epochs: int, options: dict[str, Any]
) -> tuple[list[Cost], Cost]:
    """What was sent when each epoch ended, evaluation included, and until the weights were judged once more."""
    model = model_of("sage", graph, "32-true")
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    found: list[Cost] = []

    def note(record: dict[str, Any]) -> None:
        found.append(line.traffic.now())

    trainer = Trainer(
        "halo", max_epochs=num_epochs, device="cpu", progress="none", seed=3, callbacks=[note], **options
    )
    trainer.fit(model, held, line=line)
    return found, line.traffic.now()


@pytest.mark.parametrize(
    "options", [{}, {"bits": 4}, {"bits": "adaptive", "bits_period": 2}, {"halo": "stale"}], ids=str
)
def test_input_rows_cross_once(make_graph: MakeGraph, options: dict[str, Any]) -> None:
    graph = make_graph()
    owner = partition(graph, 3, "hash").owner
    parts: list[Any] = [share(graph, Partition(owner, 3), rank).part for rank in range(3)]
    row_bytes = 4 * graph.num_features
    wanted = sum(part.halo.numel() for part in parts)
    found = run_in_threads(3, sent_by_epoch, graph, owner, 5, options)
    total = 0.0
    for epochs, end in found:
        features = {cost.bytes.get("features", 0) for cost in epochs} | {end.bytes.get("features", 0)}
        assert len(features) == 1, "nothing after the first epoch, evaluation included"
        total += features.pop()
        hidden = [cost.bytes["hidden"] for cost in epochs]
        assert all(b > a for a, b in pairwise(hidden))
    assert wanted * row_bytes <= total <= wanted * (row_bytes + 16), "each row once, with its id and degree"


def test_the_naive_way_refuses_sparse_inputs(make_graph: MakeGraph) -> None:
    graph = make_graph(sparse=True)
    with pytest.raises(UnsupportedError, match="sparse: give dense features"):
        run_in_threads(2, sent_by_epoch, graph, partition(graph, 2, "hash").owner, 1, {"naive_halo": True})


def test_input_rows_cross_in_every_step_of_the_naive_way(make_graph: MakeGraph) -> None:
    graph = make_graph()
    owner = partition(graph, 3, "hash").owner
    plain = run_in_threads(3, sent_by_epoch, graph, owner, 5, {"eval_every": 100, "halo_sums": False})
    naive = run_in_threads(3, sent_by_epoch, graph, owner, 5, {"eval_every": 100, "naive_halo": True})
    parts: list[Any] = [share(graph, Partition(owner, 3), rank).part for rank in range(3)]
    wanted = sum(part.halo.numel() for part in parts)
    each = [sum(run[0][e].bytes["hidden"] - run[0][e - 1].bytes["hidden"] for run in naive) for e in (2, 3)]
    # All rows at the width of each layer's input, there and, but for the first, back.
    assert each == [4 * wanted * (graph.num_features + 2 * 12 + 2 * 12)] * 2
    less = sum(run[0][2].bytes["hidden"] - run[0][1].bytes["hidden"] for run in plain)
    assert less < 0.7 * each[0]
