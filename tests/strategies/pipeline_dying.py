"""Trainings over a pipeline in which a stage dies mid-epoch: a module of its own, which processes import by name."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import Tensor

from polyhop import launch, nn
from polyhop.graph import Graph
from polyhop.partition import partition, share
from polyhop.strategies.pipeline_schedule import Task
from polyhop.strategies.pipeline_stage import Stage
from polyhop.trainer import Trainer

__all__ = ["train"]


def _dies_at(name: str, epoch: int) -> None:
    """This process ends at that method of its stage, in that epoch, at a chunk in the middle."""
    plain = getattr(Stage, name)

    def struck(self: Stage, task: Task) -> Any:
        if self._key is not None and self._key.epoch == epoch and task.tick == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, task)

    setattr(Stage, name, struck)


def train(
    context: launch.RankContext,
    graph: Graph,
    options: dict[str, Any],
    where: str,
    rank: int,
    run_dir: str | None,
) -> dict[str, Tensor]:
    """Weights after training; in the first attempt that rank dies: "forward" | "backward" | "nowhere"."""
    line = context.comm
    if context.attempt == 0 and line.rank == rank and where != "nowhere":
        _dies_at(where, 5)
    torch.manual_seed(1)
    model = nn.GCNII(graph.num_features, 8, num_layers=4, out_channels=graph.num_classes, dropout=0.3)
    more: dict[str, Any] = (
        {} if run_dir is None else {"run_dir": run_dir, "resume": "auto" if context.attempt else None}
    )
    given = {"max_epochs": 8, "chunks": 5, **options}
    trainer = Trainer("pipeline", **given, device="cpu", progress="none", seed=3, **more)
    trainer.fit(model, share(graph, partition(graph, line.num_ranks, "hash"), line.rank), line=line)
    return model.state_dict()
