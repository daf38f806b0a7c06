"""Trainings in which a rank dies while rows are on their way: a module of its own, which processes import by name."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import Tensor

from polyhop import launch, nn
from polyhop.exchange import assigner
from polyhop.exchange.crossing import Crossing
from polyhop.graph import Graph
from polyhop.partition import partition, share
from polyhop.trainer import Trainer

__all__ = ["train"]


def _die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dies_at(name: str, epoch: int) -> None:
    """This process ends when its channels come to that method in that epoch: rows or gradients are on their way then."""
    plain = getattr(Crossing, name)

    def struck(self: Crossing, *args: Any) -> Any:
        if self.messages.key.epoch == epoch:
            _die()
        return plain(self, *args)

    setattr(Crossing, name, struck)


def train(
    context: launch.RankContext,
    graph: Graph,
    options: dict[str, Any],
    where: str,
    rank: int,
    run_dir: str | None,
) -> dict[str, Tensor]:
    """Weights after training; in the first attempt that rank dies: "forward" | "backward" | "assigner" | "nowhere"."""
    line = context.comm
    if context.attempt == 0 and line.rank == rank:
        if where == "forward":
            _dies_at("end_forward", 5)
        elif where == "backward":
            _dies_at("end_backward", 5)
        elif where == "assigner":  # in the thread, which has told the others nothing of the second layer yet
            setattr(assigner, "solve", _die)  # noqa: B010
    torch.manual_seed(1)
    model = nn.GraphSAGE(graph.num_features, 8, num_layers=3, out_channels=graph.num_classes, dropout=0.3)
    more: dict[str, Any] = (
        {} if run_dir is None else {"run_dir": run_dir, "resume": "auto" if context.attempt else None}
    )
    given = {"strategy": "halo", "max_epochs": 14, "bits_period": 4, "bits_group": 4, **options}
    trainer = Trainer(**given, device="cpu", progress="none", seed=3, **more)
    num_parts = line.num_ranks // options.get("split_groups", 1)
    trainer.fit(model, share(graph, partition(graph, num_parts, "hash"), line.rank % num_parts), line=line)
    return model.state_dict()
