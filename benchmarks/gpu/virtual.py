"""Steps of a strategy on virtual ranks that take one device in turns: seconds of each phase, bytes, memory, rank by rank.

The strategies' steps are those that real ranks run, their options as well, except that nothing is loaded ahead: a phase is
timed with nothing beside it. Phases of a rank:

    sample    drawing, and ids that it asks for and answers
    load      input rows read and put together
    quantise  rows rounded, packed and restored
    compute   all else: forward, backward, sums of gradients put together, the optimiser

Legend: P ranks.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.turns import DeviceTurns
from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.graph import Graph, SharedGraph
from polyhop.kernels import kept_memory
from polyhop.kernels.keys import Key
from polyhop.strategies import Team, find, place
from polyhop.strategies.pipeline_schedule import Schedule
from polyhop.trace import Trace
from polyhop.train.loss import cross_entropy_sum
from polyhop.train.optim import build_optimizer
from polyhop.train.quick import quick_step

__all__ = ["PHASES", "SEED", "Seen", "Staged", "Way", "measure"]

PHASES = ("sample", "load", "quantise", "compute")
SEED, LR = 3, 1e-3
_TOLD = {"dequantise": "quantise"}  # span -> phase, where it has another name


@dataclass(frozen=True)
class Way:
    """What is trained, and how it is spread."""

    name: str  # of its figures
    strategy: str
    make: Callable[[Graph | SharedGraph], nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)  # of the strategy
    foreseen: Mapping[str, Any] = field(default_factory=dict)  # those of them that forecasts know
    warm_steps: int = 3
    steps: int = 5


@dataclass(frozen=True)
class Staged:
    """What a pipeline did: enough to play its schedule through."""

    task_s: Mapping[tuple[str, int], float]  # (direction, chunk) -> seconds, the median of the steps
    schedule: Schedule  # of the last step
    chunk_rows: Sequence[int]
    row_bytes: Sequence[int]  # of a row at each boundary


@dataclass(frozen=True)
class Seen:
    """One rank, in the measured steps."""

    step_s: float  # the median of the steps, as all that follows
    phases: Mapping[str, float]  # seconds of each
    spans: Mapping[str, float]  # of the strategy's own spans, which lie in the phases
    costs: Sequence[Cost]  # of each step, as counted
    keys: Sequence[Key]  # of each step
    wall: tuple[float, float]  # when the steps began and ended, all ranks together
    num_bytes: int  # of the device's memory, at the most; 0 where there is none
    columns: Sequence[int] = ()  # that crossed at each layer, of ``split``
    staged: Staged | None = None

    @property
    def sent(self) -> dict[str, float]:
        """kind -> bytes of a step, the mean."""
        total = sum(self.costs, Cost())
        return {kind: value / len(self.costs) for kind, value in total.bytes.items()}


def measure(shares: Sequence[SharedGraph], way: Way, *, device: str, rows_on: str) -> list[Seen]:
    """Every rank's. ``rows_on``: where rows between layers and gradients arrive; all else crosses by way of the host."""
    turns = DeviceTurns(len(shares), device)
    with kept_memory():
        return run_in_threads(len(shares), _rank, turns, shares, way, (device, rows_on), turns=turns)


class _Spent(Trace):
    """Seconds by name, and of every chunk's way through a stage."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock=clock)
        self.chunks: dict[tuple[str, int], list[float]] = {}

    def record_span(self, name: str, start: float, seconds: float, facts: dict[str, Any]) -> None:
        super().record_span(name, start, seconds, facts)
        if facts.get("chunk") is not None:
            self.chunks.setdefault((name, facts["chunk"]), []).append(seconds)


@dataclass(frozen=True)
class _Step:
    key: Key
    seconds: float  # on the rank's own clock
    spans: Mapping[str, float]
    cost: Cost

    def phases(self) -> dict[str, float]:
        """Together the step."""
        found = dict.fromkeys(PHASES, 0.0)
        for name, seconds in self.spans.items():
            phase = _TOLD.get(name, name)
            if phase in found and phase != "compute":
                found[phase] += seconds
        return {**found, "compute": self.seconds - sum(found.values())}


def _rank(
    line: Collective, turns: DeviceTurns, shares: Sequence[SharedGraph], way: Way, places: tuple[str, str]
) -> Seen:
    with turns.taken(line.rank):
        return _Running(line, turns, shares[line.rank], way, *places).measured()


def _lines(step: Any, line: Collective) -> list[Collective]:
    """Those that rows between layers and gradients cross."""
    channels = getattr(getattr(step, "_channels", None), "channels", [])
    own = [step._line] if hasattr(step, "_line") else []
    return [line, *own, *(channel.line for channel in channels)]


class _Running:
    """One rank."""

    def __init__(
        self, line: Collective, turns: DeviceTurns, held: SharedGraph, way: Way, device: str, rows_on: str
    ) -> None:
        self._line, self._turns, self._way = line, turns, way
        self._trace = _Spent(self._now)
        placement, team, module = place(device, "32-true"), Team(line), find(way.strategy)
        torch.manual_seed(SEED)
        model = way.make(held).to(placement.device, placement.dtype).train()
        assert held.split is not None
        assert held.part.y is not None
        train = held.split.train
        config = module.Config(**way.options)
        self.step = module.build(
            model,
            held,
            config,
            train_ids=train[held.part.y[train] >= 0],
            whole=module.hold(held, placement, team, config),
            loss=cross_entropy_sum,
            trace=self._trace,
            team=team,
        )
        for each in _lines(self.step, line):
            each.device = place(rows_on, "32-true").device
        self._optimizer = build_optimizer("adam", model, lr=LR)
        self._take_step = quick_step(self._optimizer)

    def _now(self) -> float:
        return self._turns.now(self._line.rank)

    def measured(self) -> Seen:
        batches = self._batches()
        for _ in range(self._way.warm_steps):
            self._train(batches)
        self._trace.chunks.clear()
        self._line.barrier()
        began = time.perf_counter()
        steps = [self._train(batches) for _ in range(self._way.steps)]
        self._line.barrier()
        found = Seen(
            statistics.median(each.seconds for each in steps),
            _medians([each.phases() for each in steps]),
            _medians([each.spans for each in steps]),
            [each.cost for each in steps],
            [each.key for each in steps],
            (began, time.perf_counter()),
            self._turns.most_bytes(self._line.rank),
            getattr(self.step, "columns", ()),
            self._staged(steps[-1].key) if self._way.strategy == "pipeline" else None,
        )
        getattr(self.step, "close", lambda: None)()
        return found

    def _batches(self) -> Iterator[tuple[Key, Any]]:
        """Epoch after epoch."""
        for epoch in itertools.count():
            for at, batch in enumerate(self.step.batches(epoch)):
                yield Key(SEED, epoch, at), batch

    def _train(self, batches: Iterator[tuple[Key, Any]]) -> _Step:
        spent, sent, began = self._trace.totals(), self._line.traffic.now(), self._now()
        key, batch = next(batches)
        self._optimizer.zero_grad(set_to_none=True)
        self.step.gradients(batch, key)
        self._take_step()
        seconds = self._now() - began
        spans = {name: value - spent.get(name, 0.0) for name, value in self._trace.totals().items()}
        return _Step(key, seconds, spans, self._line.traffic.now() - sent)

    def _staged(self, key: Key) -> Staged:
        typical = {at: statistics.median(each) for at, each in self._trace.chunks.items()}
        step = self.step
        rows = [each.bytes("forward", 1) for each in step.boundaries]
        return Staged(typical, step.schedule(key.epoch), step.chunks.sizes, rows)


def _medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Name by name."""
    return {name: statistics.median(each.get(name, 0.0) for each in steps) for name in steps[-1]}
