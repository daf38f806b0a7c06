"""Layers computed again in the backward pass give the same bits, and nothing crosses twice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.exchange.batch_norm import KeptStatistics
from polyhop.graph import Block, Graph
from polyhop.partition import Partition, partition, share
from polyhop.strategies.halo_recompute import recomputed
from polyhop.trainer import Trainer

MakeGraph = Callable[..., Graph]
Run = Callable[..., list[Any]]
SEEDING = threading.Lock()
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "gcn": lambda f, c: nn.GCN(f, 12, num_layers=3, out_channels=c, dropout=0.5),
    "gcn-batch": lambda f, c: nn.GCN(f, 12, num_layers=3, out_channels=c, dropout=0.5, norm="batch"),
    "gcn-jk": lambda f, c: nn.GCN(f, 12, num_layers=3, out_channels=c, dropout=0.3, jk="cat"),
    "sage": lambda f, c: nn.GraphSAGE(f, 12, num_layers=3, out_channels=c, dropout=0.5),
    "sage-max": lambda f, c: nn.GraphSAGE(f, 12, num_layers=2, out_channels=c, dropout=0.5, aggr="max"),
    "gat": lambda f, c: nn.GAT(f, 8, num_layers=3, out_channels=c, heads=2, dropout=0.4),
    "gin-batch": lambda f, c: nn.GIN(f, 12, num_layers=2, out_channels=c, norm="batch", train_eps=True),
    "gcnii": lambda f, c: nn.GCNII(f, 12, num_layers=4, out_channels=c, dropout=0.3),
    "deepgcn-batch": lambda f, c: nn.DeepGCN(f, 12, num_layers=3, out_channels=c, dropout=0.3, norm="batch"),
}


def fit(
    line: Collective, graph: Graph, owner: Tensor, name: str, options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, float], dict[str, float]]:
    """(weights and buffers, bytes sent, messages sent)."""
    with SEEDING:
        torch.manual_seed(7)
        model = MODELS[name](graph.num_features, graph.num_classes)
    given: dict[str, Any] = {"max_epochs": 6, "eval_every": 100, "lr": 0.005, "seed": 3, "bits_period": 4}
    before = line.traffic.now()
    chosen = Trainer("halo", device="cpu", progress="none", **{**given, **options})
    chosen.fit(model, share(graph, Partition(owner, line.num_ranks), line.rank), line=line)
    assert "layer" not in vars(model)
    sent = line.traffic.now() - before
    return model.state_dict(), dict(sent.bytes), dict(sent.messages)


def assert_same_bits(
    graph: Graph, num_ranks: int, name: str, options: dict[str, Any], run: Run = run_in_threads
) -> None:
    owner = partition(graph, num_ranks, "hash").owner
    plain = run(num_ranks, fit, graph, owner, name, options)
    again = run(num_ranks, fit, graph, owner, name, {**options, "recompute": True})
    for (weights, sent, messages), (others, resent, more) in zip(plain, again, strict=True):
        assert all(torch.equal(value, others[key]) for key, value in weights.items())
        assert sent == resent
        assert messages == more


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_same_bits(make_graph: MakeGraph, name: str, num_ranks: int) -> None:
    assert_same_bits(make_graph(weighted=name == "gcn"), num_ranks, name, {})


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 2},
        {"bits": "adaptive", "bits_group": 4},
        {"halo": "stale"},
        {"halo": "sampled", "halo_share": 0.5, "bits": 8},
        {"halo": "skipping", "halo_drift": 0.2, "halo_age": 3},
        {"halo": "sequential", "bits": 4},
        {"overlap": False},
        {"naive_halo": True},
    ],
    ids=str,
)
def test_the_same_bits_in_every_way(make_graph: MakeGraph, options: dict[str, Any]) -> None:
    assert_same_bits(make_graph(), 3, "sage", options)


def test_the_same_bits_in_bfloat16(make_graph: MakeGraph, ranks: Run) -> None:
    """In processes: torch keeps casts of weights for a whole process, so ranks that are threads disturb each other."""
    assert_same_bits(make_graph(), 2, "sage", {"precision": "bf16-mixed"}, ranks)


def test_the_model_is_as_it_was_after_an_error() -> None:
    model = nn.GCN(4, 4, num_layers=1)
    block = Block(torch.zeros(2, dtype=torch.int64), torch.empty(0, dtype=torch.int32), 1)
    with pytest.raises(IndexError), recomputed(model, {}, KeptStatistics(model)):
        model.layer(1, block, {"h": torch.zeros(1, 4)})  # there is one layer
    assert "layer" not in vars(model)
