"""What sections of bench ``serverless`` share: a rank whose functions are started as they want, and what epochs took."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from polyhop.comm import Collective
from polyhop.graph import Graph, SharedGraph
from polyhop.kernels.keys import Key
from polyhop.nn import GAT, GCN
from polyhop.partition import partition, share
from polyhop.serverless.function import Order
from polyhop.serverless.local import Ended, LocalLauncher
from polyhop.strategies import Team, place, serverless
from polyhop.strategies.serverless_step import ServerlessStep
from polyhop.trace import NO_TRACE, Trace

__all__ = ["Running", "Spent", "UnevenLauncher", "gnn", "held_alone", "launcher"]

SEED, LR = 3, 1e-3
_MODELS: dict[str, Any] = {"gcn": GCN, "gat": GAT}
_SEEDING = threading.Lock()  # ranks may be threads, and torch has one generator


def gnn(
    graph: Graph | SharedGraph, hidden: int, num_layers: int, *, model: str = "gcn", dropout: float = 0.0, seed: int = 7
) -> torch.nn.Module:  # fmt: skip
    """The same weights wherever it is built."""
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: torch.nn.Module = _MODELS[model](
            graph.num_features, hidden, num_layers=num_layers, out_channels=graph.num_classes, dropout=dropout
        )
    return made.train()


def held_alone(graph: Graph) -> SharedGraph:
    """The whole graph as the only part."""
    return share(graph, partition(graph, 1, "hash"), 0)


def launcher(
    *, latency_s: float = 0.0, core: int | None = None, prefetch: int = 2
) -> Callable[[Order], LocalLauncher]:
    """Functions on this host that wait before each task, all on one core where it is given."""
    return lambda order: LocalLauncher(
        replace(order, latency_s=latency_s, prefetch=prefetch), cores=lambda number: core
    )


class UnevenLauncher:
    """Functions on this host of several kinds in turn, each kind with another latency: tasks are late at random."""

    def __init__(self, order: Order, latencies_s: Sequence[float]) -> None:
        self._kinds = [
            LocalLauncher(replace(order, function=f"{order.function}-{at}", latency_s=each))
            for at, each in enumerate(latencies_s)
        ]

    @property
    def alive(self) -> list[str]:
        return [name for kind in self._kinds for name in kind.alive]

    def ensure(self, wanted: int) -> list[str]:
        count = len(self._kinds)
        return [
            name
            for at, kind in enumerate(self._kinds)
            for name in kind.ensure((wanted + count - 1 - at) // count)
        ]

    def ended(self) -> list[Ended]:
        return [each for kind in self._kinds for each in kind.ended()]

    def close(self) -> list[Ended]:
        return [each for kind in self._kinds for each in kind.close()]


@dataclass(frozen=True)
class Spent:
    """Of one epoch on one server."""

    seconds: float
    graph_s: float  # in graph operations
    tensor_s: float  # in functions, computing
    num_tasks: int
    task_bytes: int  # both ways, without weights


class Running:
    """Trains one epoch when it is asked to."""

    def __init__(
        self, model: torch.nn.Module, held: SharedGraph, line: Collective, options: Mapping[str, Any],
        local: Callable[[Order], Any] | None = None, trace: Trace = NO_TRACE, seed: int = SEED,
    ) -> None:  # fmt: skip
        assert held.split is not None
        assert held.part.y is not None
        self.model, self.num_epochs, self._seed = model, 0, seed
        config, team = (
            serverless.Config(seed=seed, **{"max_epochs": 10**6, "pipe_epochs": 0, **options}),
            Team(line),
        )
        train = held.split.train[held.part.y[held.split.train] >= 0]
        whole = serverless.hold(held, place("cpu", "32-true"), team, config)
        self.step = ServerlessStep(model, held, whole, config, train, 1, trace, team, local)
        self._optimizer = torch.optim.Adam(model.parameters(), lr=LR)

    def train(self) -> float:
        """One epoch; its loss."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.step.gradients(0, Key(self._seed, self.num_epochs))
        self._optimizer.step()
        self.num_epochs += 1
        return float(loss)

    def set_rate(self, lr: float) -> None:
        """Of the epochs that follow."""
        self._optimizer.param_groups[0]["lr"] = lr

    def measured(self) -> Spent:
        """One epoch, and where its seconds went."""
        before, start = self._now(), time.perf_counter()
        self.train()
        seconds = time.perf_counter() - start
        graph_s, busy_ms, tasks, sent = (b - a for a, b in zip(before, self._now(), strict=True))
        return Spent(seconds, graph_s, busy_ms / 1000, int(tasks), int(sent))

    def _now(self) -> tuple[float, ...]:
        post = self.step.post
        return (
            self.step.server.graph_s,
            post.sheets.busy_ms,
            post.ledger.counts["ok"],
            post.sent["tasks"] + post.received["results"],
        )

    def close(self) -> None:
        self.step.close()
