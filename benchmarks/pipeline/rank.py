"""One rank of section ``times``: all sides live in it and take turns, epoch by epoch, at one rate after another.

Run as ``python -m benchmarks.pipeline.rank JOB`` (a file) in each host of the lab, on a core of its own. Links are limited
until plain ``halo`` waits for the shares that are wanted, as in bench ``halo``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.halo.rank import bandwidth, free_trial, seek
from benchmarks.halo.running import Spent, timed_sums
from benchmarks.lab.relimit import relimit
from benchmarks.pipeline.workload import NAIVE, OURS, SIDES, build_step, deep_model
from polyhop import launch
from polyhop.comm import Collective
from polyhop.graph import SharedGraph
from polyhop.kernels import kept_memory
from polyhop.kernels.keys import Key
from polyhop.partition import open_parts

__all__ = ["Job", "arguments", "measure"]

SEED, LR = 0, 1e-3
WARM = 2


@dataclass(frozen=True)
class Job:
    """``shares``: of an epoch of plain halo in which ranks wait for each other; for each the rate of the links is sought."""

    parts: str  # folder
    answer: str  # folder
    model: str
    num_layers: int
    hidden: int
    chunks: int
    shares: tuple[float, ...]
    turns: int
    tries: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> Job:
        return cls(**{**given, "shares": tuple(given["shares"])})


def arguments(job_file: Path) -> list[str]:
    """The command that is one rank."""
    return [sys.executable, "-m", "benchmarks.pipeline.rank", str(job_file)]


class _Tasks(Spent):
    """Also the seconds of every chunk's way through the stage."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[tuple[str, int, float]] = []

    def record_span(self, name: str, start: float, seconds: float, facts: dict[str, Any]) -> None:
        super().record_span(name, start, seconds, facts)
        if "chunk" in facts:
            self.tasks.append((name, facts["chunk"], seconds))

    def take_tasks(self) -> list[tuple[str, int, float]]:
        """Since the last call."""
        found, self.tasks = self.tasks, []
        return found


class _Running:
    """Trains one epoch when it is asked to."""

    def __init__(self, held: SharedGraph, line: Collective, job: Job, side: str) -> None:
        strategy, options = SIDES[side]
        given = {**options, "chunks": job.chunks} if strategy == "pipeline" else options
        self.model = deep_model(job.model, held, job.num_layers, job.hidden)
        self._trace, self._line, self.num_epochs = _Tasks(), line, 0
        self.step = build_step(
            strategy, self.model, held, timed_sums(line.fork(), self._trace), given, self._trace
        )
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=LR)

    def train(self) -> float:
        """One epoch; its loss."""
        self._optimizer.zero_grad(set_to_none=True)
        loss: Tensor = self.step.gradients(0, Key(SEED, self.num_epochs))
        self._optimizer.step()
        self.num_epochs += 1
        return float(loss)

    def measured(self) -> dict[str, Any]:
        """Seconds, CPU-seconds, spans and tasks of an epoch, and what this rank sent in it."""
        self._line.barrier()
        self._trace.take()
        self._trace.take_tasks()
        before, wall, cpu = self._line.traffic.now(), time.perf_counter(), time.process_time()
        loss = self.train()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        sent = (self._line.traffic.now() - before).to_json()
        return {
            "s": wall,
            "cpu_s": cpu,
            "spans": self._trace.take(),
            "tasks": self._trace.take_tasks(),
            "loss": loss,
            **sent,
        }


def measure(context: launch.RankContext, job_file: str) -> None:
    """Write what this rank saw to ANSWER/rank-<k>.json."""
    job, line = Job.from_json(json.loads(Path(job_file).read_text())), context.comm
    held = open_parts(Path(job.parts)).share(line.rank, line.num_ranks)
    with kept_memory():
        relimit(None)
        sides = {name: _Running(held, line, job, name) for name in SIDES}
        for _ in range(WARM):
            for side in sides.values():
                side.train()
        phases = [_phase(sides, line, job, share=0.0, mbit=0.0)]
        free = free_trial(phases[0]["epochs"][NAIVE], line)
        for share in job.shares:
            mbit, _ = seek(sides[NAIVE], line, share, free, job.tries)  # type: ignore[arg-type]
            phases.append(_phase(sides, line, job, share=share, mbit=mbit))
        ours = sides[OURS].step
        found = {
            "phases": phases,
            "bounds": list(ours.bounds),
            "chunk_rows": ours.chunks.sizes,
            "row_bytes": [each.bytes("forward", 1) for each in ours.boundaries],
        }
        for running in sides.values():
            running.step.close()
    (Path(job.answer) / f"rank-{line.rank}.json").write_text(json.dumps(found))


def _phase(
    sides: Mapping[str, _Running], line: Collective, job: Job, *, share: float, mbit: float
) -> dict[str, Any]:
    """Timed epochs of every side, each turn beginning with another."""
    rate = bandwidth(line)
    for side in sides.values():
        side.train()  # connections find the new rate
    epochs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(job.turns):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            number = sides[name].num_epochs
            epochs[name].append({**sides[name].measured(), "epoch": number})
    return {"share": share, "mbit": mbit, "bytes_per_s": rate, "epochs": epochs}


if __name__ == "__main__":
    from benchmarks.pipeline.rank import measure as found_by_name

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    launch.run(found_by_name, (sys.argv[1],), launch.Launch(threads=1, pin=False))
