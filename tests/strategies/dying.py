"""A training whose rank 1 dies inside a window: a module of its own, for processes that import it by name."""

from __future__ import annotations

import os
import signal
from typing import Any

from torch import Tensor

from polyhop import launch, nn
from polyhop.graph import Graph
from polyhop.partition import partition, share
from polyhop.trainer import Trainer

__all__ = ["train_and_die"]


class DiesAtThird(nn.GraphSAGE):
    """Rank 1's process ends in its third step."""

    rank, calls = 0, 0

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        if self.rank == 1 and self.calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        out: Tensor = super().forward(*args, **kwargs)
        return out


def train_and_die(context: launch.RankContext, graph: Graph) -> None:
    line = context.comm
    model = DiesAtThird(graph.num_features, 8, num_layers=2, out_channels=graph.num_classes)
    model.rank = line.rank
    trainer = Trainer(
        "macro", macro=5, max_epochs=3, batch_size=20, num_neighbors=[4, 3], device="cpu", progress="none"
    )
    trainer.fit(model, share(graph, partition(graph, 3, "hash"), line.rank), line=line)
