"""Curves of ``split``, ``data`` and ``pushpull`` on four ranks are those of ``single``, on real graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyhop
from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.graph import Graph
from polyhop.partition import Partition, share
from polyhop.sample import presampled
from polyhop.trainer import Trainer

FAN_OUTS = [10, 5]
WATCHED = ("loss", "val", "test")


def trainer(strategy: str, graph: Graph, num_epochs: int, precision: str) -> tuple[Trainer, torch.nn.Module]:
    made = Trainer(
        strategy, max_epochs=num_epochs, batch_size=512, num_neighbors=FAN_OUTS, precision=precision, lr=0.005,
        device="cpu", progress="none", seed=1,
    )  # fmt: skip
    model = nn.GraphSAGE(
        graph.num_features, 32, num_layers=len(FAN_OUTS), out_channels=graph.num_classes, dropout=0.5
    )
    drawn = torch.Generator().manual_seed(5)  # ranks are threads, and torch's own generator is one
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1, generator=drawn)
    return made, model


def fit_share(
    line: Collective, graph: Graph, owner: Tensor, strategy: str, num_epochs: int, precision: str
) -> Any:
    made, model = trainer(strategy, graph, num_epochs, precision)
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    return made.fit(model, held, line=line).history


def curves(
    graph: Graph, strategy: str, num_epochs: int, precision: str, owner: Tensor
) -> dict[str, list[float]]:
    if strategy == "single":
        made, model = trainer(strategy, graph, num_epochs, precision)
        history = made.fit(model, graph).history
    else:
        history = run_in_threads(4, fit_share, graph, owner, strategy, num_epochs, precision)[0]
    return {name: [record[name] for record in history] for name in WATCHED if name in history[0]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["facebook-pages", "cora"])
def test_curves_coincide_on_real_graphs(data_dir: Path, name: str) -> None:
    graph = polyhop.load(name, data_dir=data_dir)
    owner = presampled(graph, 4, FAN_OUTS, batch_size=512).partition.owner
    alone = curves(graph, "single", 4, "64-true", owner)
    assert alone["loss"][-1] < 0.9 * alone["loss"][0], "it learns"
    for strategy in ("split", "data", "pushpull"):
        found = curves(graph, strategy, 4, "64-true", owner)
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-8), strategy
        assert found["val"] == alone["val"], strategy
