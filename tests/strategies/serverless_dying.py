"""Trainings with functions in which a graph server dies mid-epoch: a module of its own, which processes import by name."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyhop import launch, nn
from polyhop.graph import Graph
from polyhop.partition import partition, share
from polyhop.serverless.passes import Passes
from polyhop.serverless.server import Server
from polyhop.trainer import Trainer

__all__ = ["EPOCHS", "train"]

EPOCHS, STRUCK = 8, 5
_METHODS: dict[str, tuple[Any, str]] = {
    "task": (Passes, "came_back"),
    "gather": (Server, "_gather_or_collect"),
    "sum": (Server, "_summed"),
    "stop": (Passes, "came_back"),
}


def _epoch_of(given: Any) -> int:
    return int(given if isinstance(given, int) else given.key.epoch)


def _dies_at(where: str) -> None:
    """This process ends, or is stopped, at the third call of that method in an epoch: functions hold leases then."""
    owner, name = _METHODS[where]
    plain, calls = getattr(owner, name), 0

    def struck(self: Any, *given: Any) -> Any:
        nonlocal calls
        calls += _epoch_of(given[0]) == STRUCK
        if calls == (1 if where == "sum" else 3):
            os.kill(os.getpid(), signal.SIGSTOP if where == "stop" else signal.SIGKILL)
        return plain(self, *given)

    setattr(owner, name, struck)


def _fills(disk: Path) -> Any:
    """A callback that leaves no room after an epoch."""

    def after(record: dict[str, Any]) -> None:
        if record["epoch"] == STRUCK:
            with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass

    return after


def train(
    context: launch.RankContext,
    graph: Graph,
    options: dict[str, Any],
    where: str,
    rank: int,
    run_dir: str | None,
) -> dict[str, Tensor]:
    """Weights after training; in the first attempt that rank dies at: "task" | "gather" | "sum" | "stop" | "nowhere".

    "disk": rank 0's disk, on which the run folder lies, has no room left after an epoch.
    """
    line = context.comm
    if context.attempt == 0 and line.rank == rank and where in _METHODS:
        _dies_at(where)
    torch.manual_seed(1)
    model = nn.GAT(graph.num_features, 8, num_layers=2, out_channels=graph.num_classes, dropout=0.3, heads=2)
    more: dict[str, Any] = {} if run_dir is None else {"run_dir": run_dir}
    if context.attempt:
        more["resume"] = "auto"
    if where == "disk" and run_dir is not None:
        more["callbacks"] = [_fills(Path(run_dir).parent) if line.rank == 0 else lambda record: None]
    given = {"max_epochs": EPOCHS, "intervals": 4, "functions": 2, "checkpoint_every": 2, **more, **options}
    trainer = Trainer("serverless", **given, device="cpu", progress="none", seed=3)
    trainer.fit(model, share(graph, partition(graph, line.num_ranks, "hash"), line.rank), line=line)
    return model.state_dict()
