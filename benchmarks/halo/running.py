"""One side at work on one rank: a model of its own, a step of strategy ``halo``, and where the seconds of an epoch went."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.halo.workload import LR, SEED, Job, model_of
from polyhop.comm import Collective, Pending
from polyhop.comm.collective import is_summed_everywhere
from polyhop.graph import SharedGraph
from polyhop.kernels.keys import Key
from polyhop.strategies import Team, halo, place
from polyhop.trace import Trace
from polyhop.train.loss import cross_entropy_sum

__all__ = ["Running", "Spent", "build_step", "timed_sums"]


class Spent(Trace):
    """Seconds by span, layer and direction: ``wait/1/forward``. Spans without a layer go by their names alone."""

    def __init__(self) -> None:
        super().__init__()
        self._each: dict[str, float] = {}

    def record_span(self, name: str, start: float, seconds: float, facts: dict[str, Any]) -> None:
        super().record_span(name, start, seconds, facts)
        where = f"{name}/{facts['layer']}/{facts['direction']}" if "direction" in facts else name
        with self._lock:
            self._each[where] = self._each.get(where, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Since the last call."""
        with self._lock:
            found, self._each = self._each, {}
        return found


def build_step(
    model: torch.nn.Module, held: SharedGraph, line: Collective, options: Mapping[str, Any], trace: Trace
) -> Any:
    """The strategy's step, as the trainer builds it. All ranks build together."""
    assert held.split is not None
    config = halo.Config(**options)
    whole = halo.hold(held, place("cpu", "32-true"), Team(line), config)
    train = held.split.train
    assert held.part.y is not None
    return halo.build(
        model,
        held,
        config,
        train_ids=train[held.part.y[train] >= 0],
        whole=whole,
        loss=cross_entropy_sum,
        trace=trace,
        team=Team(line),
    )


class Running:
    """Trains one epoch when it is asked to."""

    def __init__(self, held: SharedGraph, line: Collective, job: Job, options: Mapping[str, Any]) -> None:
        self.model = model_of(
            job.model, held.num_features, held.num_classes, job.hidden, dropout=job.dropout, norm=job.norm
        )
        self.model.train()
        self._trace, self._line, self.num_epochs = Spent(), line, 0
        self.step = build_step(self.model, held, timed_sums(line.fork(), self._trace), options, self._trace)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=LR)

    def train(self) -> float:
        """One epoch; its loss."""
        self.model.train()
        self._optimizer.zero_grad(set_to_none=True)
        loss: Tensor = self.step.gradients(0, Key(SEED, self.num_epochs))
        self._optimizer.step()
        self.num_epochs += 1
        return float(loss)

    def measured(self) -> dict[str, Any]:
        """Seconds, CPU-seconds and spans of an epoch, and what this rank sent in it."""
        self._line.barrier()
        self._trace.take()
        before, wall, cpu = self._line.traffic.now(), time.perf_counter(), time.process_time()
        loss = self.train()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        sent = (self._line.traffic.now() - before).to_json()
        return {"s": wall, "cpu_s": cpu, "spans": self._trace.take(), "loss": loss, **sent}


def timed_sums(line: Collective, trace: Trace, name: str = "sum") -> Collective:
    """The line, its sums (the gradients of the weights) writing how long they were waited for, by that name."""
    start, expect = line.start_all_reduce, line.expect_sum

    def timed(pending: Pending[Tensor]) -> Pending[Tensor]:
        def finish() -> Tensor:
            with trace.span(name):
                return pending.wait()

        return Pending(finish)

    def start_all_reduce(tensor: Tensor, *, kind: str) -> Pending[Tensor]:
        return timed(start(tensor, kind=kind))

    def expect_sum(size: int, dtype: torch.dtype, *, kind: str) -> Callable[[Tensor], Pending[Tensor]]:
        if not is_summed_everywhere(size * dtype.itemsize, line.num_ranks):
            return lambda own: line.start_all_reduce(own, kind=kind)
        give = expect(size, dtype, kind=kind)
        return lambda own: timed(give(own))

    line.start_all_reduce = start_all_reduce  # type: ignore[method-assign]
    line.expect_sum = expect_sum  # type: ignore[method-assign]
    return line
