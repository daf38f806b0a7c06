"""A halo that comes rank by rank trains the weights of one process, whatever the bits, and says which layers it is for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.errors import ConfigError, UnsupportedError
from polyhop.graph import Graph
from polyhop.kernels.keys import Key
from polyhop.partition import Partition, partition, share
from polyhop.strategies import Team, halo, place
from polyhop.strategies.halo_cost import account, crossed
from polyhop.strategies.halo_memory import row_bytes
from polyhop.train.loss import cross_entropy_sum
from polyhop.trainer import Trainer

MakeGraph = Callable[..., Graph]
Run = Callable[..., list[Any]]
SEEDING = threading.Lock()
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "gcn": lambda f, c: nn.GCN(f, 12, num_layers=3, out_channels=c, dropout=0.5),
    "gcn-batch": lambda f, c: nn.GCN(f, 12, num_layers=3, out_channels=c, dropout=0.5, norm="batch"),
    "gcn-jk": lambda f, c: nn.GCN(f, 12, num_layers=3, out_channels=c, dropout=0.3, jk="cat"),
    "sage": lambda f, c: nn.GraphSAGE(f, 12, num_layers=3, out_channels=c, dropout=0.5),
    "sage-sum": lambda f, c: nn.GraphSAGE(f, 12, num_layers=2, out_channels=c, dropout=0.5, aggr="sum"),
    "sage-one": lambda f, c: nn.GraphSAGE(f, 12, num_layers=1, out_channels=c),
    "sage-project": lambda f, c: nn.GraphSAGE(f, 6, num_layers=2, out_channels=c, project=True),
    "gin": lambda f, c: nn.GIN(f, 12, num_layers=3, out_channels=c, dropout=0.2),
    "gin-batch": lambda f, c: nn.GIN(f, 12, num_layers=2, out_channels=c, norm="batch", train_eps=True),
    "gcnii": lambda f, c: nn.GCNII(f, 12, num_layers=4, out_channels=c, dropout=0.3),
    "deepgcn": lambda f, c: nn.DeepGCN(f, 12, num_layers=3, out_channels=c, dropout=0.3),
}
OTHERS: dict[str, Callable[..., torch.nn.Module]] = {
    "gat": lambda f, c: nn.GAT(f, 8, num_layers=2, out_channels=c, heads=2),
    "sage-max": lambda f, c: nn.GraphSAGE(f, 12, num_layers=2, out_channels=c, aggr="max"),
}


def model_of(name: str, graph: Graph) -> torch.nn.Module:
    with SEEDING:
        torch.manual_seed(7)
        return (MODELS | OTHERS)[name](graph.num_features, graph.num_classes)


def trainer(strategy: str, options: dict[str, Any]) -> Trainer:
    given: dict[str, Any] = {"max_epochs": 8, "eval_every": 100, "precision": "64-true", "lr": 0.005}
    return Trainer(strategy, **{**given, "device": "cpu", "progress": "none", "seed": 3, **options})


def fit(
    line: Collective, graph: Graph, owner: Tensor, name: str, options: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    model = model_of(name, graph)
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    result = trainer("halo", {"halo": "sequential", **options}).fit(model, held, line=line)
    return [record["loss"] for record in result.history], model.state_dict()


def owners(graph: Graph, num_ranks: int, kind: str) -> Tensor:
    nodes = torch.arange(graph.num_nodes)
    if kind == "skewed":
        return torch.where(nodes % 10 == 9, nodes % num_ranks, 0).int()
    if kind == "empty":
        return (nodes % max(1, num_ranks - 1)).int()
    return partition(graph, num_ranks, kind).owner


def assert_same(found: list[Any], graph: Graph, name: str) -> None:
    model = model_of(name, graph)
    trainer("single", {}).fit(model, graph)
    for _, weights in found:
        for key, value in model.state_dict().items():
            assert torch.equal(weights[key], found[0][1][key])
            assert float((weights[key] - value).abs().max()) <= 1e-9 * max(1.0, float(value.abs().max())), key


GRID = ((1, "hash"), (2, "block"), (3, "empty"), (4, "skewed"))
CORE = ("gcn", "sage", "gin")
EVERYWHERE = [
    pytest.param(name, num_ranks, kind, marks=() if name in CORE or num_ranks == 4 else pytest.mark.slow)
    for name in MODELS
    for num_ranks, kind in GRID
]


@pytest.mark.parametrize(("name", "num_ranks", "kind"), EVERYWHERE)
def test_weights_of_one_process(make_graph: MakeGraph, name: str, num_ranks: int, kind: str) -> None:
    graph = make_graph(weighted=name.startswith("gcn"))
    owner = owners(graph, num_ranks, kind)
    assert_same(run_in_threads(num_ranks, fit, graph, owner, name, {}), graph, name)


@pytest.mark.parametrize("options", [{"overlap": False}, {"recompute": True}], ids=str)
@pytest.mark.parametrize("name", ["gcn", "gin-batch"])
def test_other_ways_of_it(make_graph: MakeGraph, name: str, options: dict[str, Any]) -> None:
    graph = make_graph(weighted=name == "gcn")
    owner = owners(graph, 3, "hash")
    plain = run_in_threads(3, fit, graph, owner, name, {})
    other = run_in_threads(3, fit, graph, owner, name, options)
    assert other[0][0] == plain[0][0]
    assert all(torch.equal(value, plain[0][1][key]) for key, value in other[0][1].items())


def test_sparse_inputs_stay(make_graph: MakeGraph) -> None:
    graph = make_graph(sparse=True)
    assert_same(run_in_threads(3, fit, graph, owners(graph, 3, "hash"), "gcn", {}), graph, "gcn")


@pytest.mark.parametrize(
    "bits", [2, "adaptive", *(pytest.param(bits, marks=pytest.mark.slow) for bits in (1, 4, 8, 16, "random"))]
)
def test_few_bits_repeat_and_learn_over_threads_and_gloo(
    make_graph: MakeGraph, ranks: Run, bits: Any
) -> None:
    graph = make_graph()
    owner = owners(graph, 3, "hash")
    options = {"bits": bits, "bits_group": 4, "bits_period": 8, "max_epochs": 25, "lr": 0.01}
    options["precision"] = "32-true"
    one = run_in_threads(3, fit, graph, owner, "sage", options)
    other = ranks(3, fit, graph, owner, "sage", options)
    assert one[0][0] == other[0][0]
    for _, weights in (*one, *other):
        assert all(torch.equal(value, one[0][1][key]) for key, value in weights.items())
    assert one[0][0][-1] < 0.85 * one[0][0][0]


def held_in_steps(
    line: Collective, graph: Graph, owner: Tensor, options: dict[str, Any]
) -> list[tuple[int, int, float, float]]:
    """Of each layer: bytes of the halo held at most, the bound, bytes sent and accounted."""
    share_of = share(graph, Partition(owner, line.num_ranks), line.rank)
    model = model_of("sage", graph)
    model.train()
    chosen = trainer("halo", {"halo": "sequential", "precision": "32-true", **options})
    config = halo.Config(**{f.name: getattr(chosen, f.name) for f in fields(halo.Config)})
    team = Team(line)
    whole = halo.hold(share_of, place("cpu", "32-true"), team, config)
    assert share_of.split is not None
    step: Any = halo.build(
        model,
        share_of,
        config,
        train_ids=share_of.split.train,
        whole=whole,
        loss=cross_entropy_sum,
        team=team,
    )
    step.gradients(0, Key(3, 0))
    line.barrier()
    before = line.traffic.now()
    step.gradients(0, Key(3, 1))
    sent = (line.traffic.now() - before).bytes["hidden"]
    channels = step._channels.channels
    expected = account(
        [m for m in crossed(channels) if m.layer or m.direction == "forward"],
        [1],
        4,
        line.num_ranks,
        line.rank,
    ).bytes["hidden"]
    step.close()
    bits = int(config.bits)

    def bound(c: Any) -> int:
        """(1 + depth) shards of rows; of few bits one of rows and the codes of all."""
        row = c.num_columns * 4
        return int(
            max(c.lists.wanted) * (2 * row if bits == 32 else row + 2 * row_bytes(c.num_columns, bits, 4))
        )

    return [(c.halo_held.peak, bound(c), sent, expected) for c in channels]


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_halo_held_obeys_the_bound_and_bytes_are_accounted(
    make_graph: MakeGraph, num_ranks: int, bits: int
) -> None:
    graph = make_graph()
    owner = owners(graph, num_ranks, "hash")
    for found in run_in_threads(num_ranks, held_in_steps, graph, owner, {"bits": bits}):
        assert len(found) == 3  # the input layer's halo comes rank by rank too
        for peak, bound, sent, accounted in found:
            assert 0 < peak <= bound
            assert sent == accounted


def refused(line: Collective, graph: Graph, owner: Tensor, name: str, options: dict[str, Any]) -> str:
    try:
        fit(line, graph, owner, name, options)
    except (ConfigError, UnsupportedError) as error:
        return str(error)
    return ""


def test_layers_that_do_not_sum_are_refused(make_graph: MakeGraph) -> None:
    graph = make_graph(num_nodes=60)
    owner = owners(graph, 2, "hash")
    for name in OTHERS:
        for message in run_in_threads(2, refused, graph, owner, name, {}):
            assert "GCN, SAGE (mean or sum), GIN or GCN2" in message
    for message in run_in_threads(2, refused, graph, owner, "sage", {"naive_halo": True}):
        assert "naive_halo" in message
