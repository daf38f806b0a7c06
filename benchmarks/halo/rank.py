"""One rank of the bench: all sides live in it and take turns, epoch by epoch, measured alike, at one rate after another.

Run as ``python -m benchmarks.halo.rank JOB`` (a file) in each host of the lab, whose links the ranks limit themselves.

The rate for a share is sought with the exact side: an epoch takes b + w seconds, b of computing, w of waiting, and w grows
with the seconds that a byte takes: the first guess is by the bytes alone, the next ones in proportion to what was waited.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.halo.running import Running
from benchmarks.halo.workload import EXACT, Job
from benchmarks.lab.relimit import relimit
from polyhop import launch
from polyhop.comm import Collective
from polyhop.graph import SharedGraph
from polyhop.kernels import kept_memory
from polyhop.partition import open_parts
from polyhop.trainer import Trainer

__all__ = ["Trial", "arguments", "bandwidth", "free_trial", "measure", "next_guess", "options", "seek"]

PIECE_BYTES = 1 << 18  # what the link is measured with
LEAST_MBIT, MOST_MBIT = 2.0, 20_000.0
CLOSE = 0.03  # of a share


def options(num_ranks: int | None = None) -> launch.Launch:
    """One thread a rank, on any core: the lab's hosts share the machine's."""
    return launch.Launch(num_ranks=num_ranks, threads=1, pin=False)


def arguments(job_file: Path) -> list[str]:
    """The command that is one rank."""
    return [sys.executable, "-m", "benchmarks.halo.rank", str(job_file)]


def measure(context: launch.RankContext, job_file: str) -> None:
    """Write what this rank saw to ANSWER/rank-<k>.json."""
    job, line = Job.from_json(json.loads(Path(job_file).read_text())), context.comm
    held = open_parts(Path(job.parts)).share(line.rank, line.num_ranks)
    with kept_memory():
        relimit(None)
        sides = {name: Running(held, line, job, given) for name, given in job.sides.items()}
        found = _raced(sides, held, line, job) if job.epochs else _turned(sides, line, job)
        for side in sides.values():
            side.step.close()
    (Path(job.answer) / f"rank-{line.rank}.json").write_text(json.dumps(found))


def _turned(sides: Mapping[str, Running], line: Collective, job: Job) -> dict[str, Any]:
    """Timed epochs of every side without a limit, and at the rate of every share."""
    for _ in range(job.warm):
        for side in sides.values():
            side.train()
    phases = [_phase(sides, line, job, share=0.0, mbit=0.0)]
    free = free_trial(phases[0]["epochs"][EXACT], line)
    for share in job.shares:
        mbit, _ = seek(sides[EXACT], line, share, free, job.tries)
        phases.append(_phase(sides, line, job, share=share, mbit=mbit))
    return {"phases": phases}


def _phase(
    sides: Mapping[str, Running], line: Collective, job: Job, *, share: float, mbit: float
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
            epochs[name].append(sides[name].measured())
    return {"share": share, "mbit": mbit, "bytes_per_s": rate, "epochs": epochs}


# The rate


class Trial:
    """One trial: seconds a byte takes, seconds of waiting and of computing of an epoch, means over ranks."""

    def __init__(self, per_byte: float, wait: float, busy: float) -> None:
        self.per_byte, self.wait, self.busy = per_byte, wait, busy

    @property
    def share(self) -> float:
        return self.wait / (self.wait + self.busy)


def free_trial(epochs: list[dict[str, Any]], line: Collective) -> Trial:
    """Without a limit. In place of seconds a byte it has minus the bytes of the busiest rank, for the first guess."""
    wait, busy = _split(epochs, line)
    num_bytes = torch.tensor([float(sum(epochs[-1]["bytes"].values()))])
    everyone = line.all_gather(num_bytes, kind="sizes", counts=[1] * line.num_ranks)
    return Trial(-float(torch.cat(everyone).max()), wait, busy)


def _split(epochs: list[dict[str, Any]], line: Collective) -> tuple[float, float]:
    """Seconds of waiting and of computing, the same on every rank: means of all."""
    waits = [sum(s for name, s in one["spans"].items() if name.startswith(("wait", "sum"))) for one in epochs]
    own = torch.tensor([statistics.median(waits), statistics.median(one["s"] for one in epochs)])
    wait, whole = (
        torch.stack(line.all_gather(own, kind="sizes", counts=[2] * line.num_ranks)).mean(0).tolist()
    )
    return wait, max(whole - wait, 1e-6)


def next_guess(share: float, trials: list[Trial]) -> float:
    """Seconds a byte should take so that waiting has this share: by the bytes alone (the free trial), then in proportion.

    ``trials``: the free one, and those for this share. Proportion needs no second point, so noise cannot turn it around.
    """
    free, *limited = trials
    if not limited:
        return free.busy * share / (1 - share) / -free.per_byte
    last = limited[-1]
    wanted = last.busy * share / (1 - share)
    return last.per_byte * min(max(wanted / max(last.wait, 1e-9), 0.25), 4.0)


def seek(exact: Running, line: Collective, share: float, free: Trial, tries: int) -> tuple[float, Trial]:
    """Mbit/s at which the exact side waits for this share of an epoch, and the trial there; the links have it then."""
    mbit, trials = MOST_MBIT, [free]
    for _ in range(tries):
        mbit = min(max(8 / next_guess(share, trials) / 1e6, LEAST_MBIT), MOST_MBIT)
        line.barrier()
        relimit(mbit)
        line.barrier()
        exact.train()
        wait, busy = _split([exact.measured(), exact.measured()], line)
        trials = [*trials, Trial(8 / mbit / 1e6, wait, busy)]
        if abs(trials[-1].share - share) <= CLOSE:
            break
    return mbit, trials[-1]


def bandwidth(line: Collective) -> float:
    """Bytes a second that every rank sends when all send to all; median of four after the first."""
    pieces = [torch.zeros(PIECE_BYTES, dtype=torch.uint8)] * line.num_ranks
    seconds = []
    for _ in range(5):
        line.barrier()
        start = time.perf_counter()
        line.all_to_all(pieces, kind="features", counts=[PIECE_BYTES] * line.num_ranks)
        seconds.append(time.perf_counter() - start)
    return PIECE_BYTES * (line.num_ranks - 1) / statistics.median(seconds[1:])


# Time to an accuracy


def _raced(sides: Mapping[str, Running], held: SharedGraph, line: Collective, job: Job) -> dict[str, Any]:
    """Every side's epochs at the rate of the first share, and what its model scores on the way; judging is not timed."""
    probe = Running(held, line, job, {})
    for _ in range(2):
        probe.train()
    free = free_trial([probe.measured() for _ in range(3)], line)
    mbit, last = seek(probe, line, job.shares[0], free, job.tries)
    judge = Trainer("halo", device="cpu", progress="none", seed=0)
    epochs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    scores: dict[str, list[tuple[int, float, float]]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(job.epochs):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            epochs[name].append(sides[name].measured())
        if (turn + 1) % job.judged:
            continue
        line.barrier()
        relimit(None)
        for name, side in sides.items():
            side.model.eval()
            val, test = (judge.evaluate(side.model, held, split, line=line) for split in ("val", "test"))
            scores[name].append((turn + 1, _metric(val), _metric(test)))
        line.barrier()
        relimit(mbit)
    return {"mbit": mbit, "share": last.share, "epochs": epochs, "scores": scores}


def _metric(found: dict[str, float]) -> float:
    return next(value for name, value in found.items() if name != "loss")


if __name__ == "__main__":
    from benchmarks.halo.rank import measure as found_by_name

    launch.run(found_by_name, (sys.argv[1],), options())
