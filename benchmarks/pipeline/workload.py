"""What the sections of bench ``pipeline`` share: deep models, a graph cut like Reddit, a step of any strategy on a rank."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.halo.graphs import Shape, make
from polyhop.comm import Collective
from polyhop.graph import Graph, SharedGraph
from polyhop.nn import GCN, GCNII, DeepGCN
from polyhop.strategies import Team, find, place
from polyhop.trace import NO_TRACE, Trace
from polyhop.train.loss import cross_entropy_sum

__all__ = [
    "MODELS",
    "NAIVE",
    "OPTIMISED",
    "OURS",
    "SIDES",
    "SWEPT",
    "build_step",
    "deep_model",
    "reddit_like",
]

NAIVE, OPTIMISED, OURS, SWEPT = "halo_naive", "halo", "pipeline", "pipeline_swept"
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    NAIVE: ("halo", {"naive_halo": True}),  # graph parallel as published
    OPTIMISED: ("halo", {}),
    OURS: ("pipeline", {"history_sweeps": 0}),
    SWEPT: (
        "pipeline",
        {"history_sweeps": 1},
    ),  # a forward pass before every epoch: what is usual where units are dropped
}
MODELS: dict[str, Any] = {"gcn": GCN, "gcnii": GCNII, "deepgcn": DeepGCN}
INSIDE = 0.9825  # share of edges inside a class: then eight parts read about 2.6 rows a node of one another, as of Reddit
_SEEDING = threading.Lock()  # ranks may be threads, and torch has one generator


def reddit_like(num_nodes: int, width: int, *, degree: int = 100, inside: float = INSIDE) -> Graph:
    """41 classes, degrees in a power law, inputs [N, width]."""
    return make(Shape(num_nodes, degree, 41, inside), width=width)


def deep_model(
    name: str,
    graph: Graph | SharedGraph,
    num_layers: int,
    hidden: int,
    *,
    dropout: float = 0.5,
    seed: int = 0,
) -> torch.nn.Module:
    """The same weights on every rank and every side."""
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: torch.nn.Module = MODELS[name](
            graph.num_features,
            hidden,
            num_layers=num_layers,
            out_channels=graph.num_classes,
            dropout=dropout,
        )
    return made.train()


def build_step(
    strategy: str,
    model: torch.nn.Module,
    held: SharedGraph,
    line: Collective,
    options: Mapping[str, Any],
    trace: Trace = NO_TRACE,
) -> Any:
    """The strategy's step, as the trainer builds it. All ranks build together."""
    assert held.split is not None
    assert held.part.y is not None
    module, team = find(strategy), Team(line)
    config = module.Config(**options)
    train = held.split.train
    return module.build(
        model,
        held,
        config,
        train_ids=train[held.part.y[train] >= 0],
        whole=module.hold(held, place("cpu", "32-true"), team, config),
        loss=cross_entropy_sum,
        trace=trace,
        team=team,
    )
