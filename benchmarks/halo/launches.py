"""Starting ranks on a job in the lab, and what all of them told."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.halo import rank as one_rank
from benchmarks.halo.graphs import Cut
from benchmarks.halo.workload import EXACT, OURS, Job
from benchmarks.harness import ROOT
from polyhop.partition import save_parts

__all__ = ["Phase", "phases", "save", "start", "why_no_lab"]

LAB = ROOT / "scripts" / "lab"
LIMIT_S = 600  # of one lab run
FIRST_RATE = "40mbit"  # see lab.relimit; ranks change it at once


@dataclass(frozen=True, eq=False)
class Phase:
    """Timed epochs at one rate. ``epochs[side][turn][rank]``."""

    share: float  # that was sought; 0: no limit
    mbit: float
    bytes_per_s: float  # of the slowest rank, all sending to all
    epochs: dict[str, list[list[dict[str, Any]]]]
    load: float  # of the machine, in the minute before

    def seconds(self, side: str) -> list[float]:
        """Of every timed epoch, until the last rank was done."""
        return [max(float(one["s"]) for one in ranks) for ranks in self.epochs[side]]

    def median(self, side: str) -> float:
        return statistics.median(self.seconds(side))

    def spent(self, side: str, *names: str) -> float:
        """Seconds in spans of these names, or in all there are of one: mean over ranks, median over epochs."""
        return self._mean(side, lambda one: _within(one, names))

    def exchanges(self, side: str, name: str) -> dict[str, float]:
        """The same of one name, by layer and direction."""
        kinds = {key for ranks in self.epochs[side] for one in ranks for key in one["spans"]}
        return {
            key.partition("/")[2]: self._mean(side, partial(_span, key))
            for key in sorted(kinds)
            if key.startswith(f"{name}/")
        }

    def waiting(self, side: str = EXACT) -> float:
        """The share of an epoch in which ranks wait for each other."""
        return self._mean(side, lambda one: _within(one, ("wait", "sum")) / one["s"])

    def sent(self, side: str, kind: str) -> float:
        """Bytes of all ranks in the last timed epoch."""
        return float(sum(one["bytes"].get(kind, 0) for one in self.epochs[side][-1]))

    def on_the_link(self, side: str = EXACT) -> float:
        """The share of an epoch that the busiest rank's bytes alone would take at the measured bandwidth."""
        busiest = max(sum(one["bytes"].values()) for one in self.epochs[side][-1])
        return float(busiest) / self.bytes_per_s / self.median(side)

    def told(self, side: str) -> str:
        seconds = self.seconds(side)
        spans = ", ".join(
            f"{name} {1000 * self.spent(side, name):.0f}"
            for name in ("quantise", "communicate", "wait", "dequantise", "sum")
        )
        sent = ", ".join(f"{kind} {self.sent(side, kind) / 1e6:.2f}" for kind in ("hidden", "gradients"))
        cpu = self._mean(side, lambda one: one["cpu_s"])
        low, middle, high = (1000 * f(seconds) for f in (min, statistics.median, max))
        return (
            f"{middle:5.0f} ms [{low:.0f} .. {high:.0f}]; ms: {spans}, CPU {1000 * cpu:.0f} a rank; MB of all: {sent}; loss "
            f"{self.epochs[side][-1][0]['loss']:.3f}"
        )

    def _mean(self, side: str, of: Callable[[dict[str, Any]], float]) -> float:
        """Mean over ranks, median over epochs."""
        return statistics.median(
            statistics.mean(float(of(one)) for one in ranks) for ranks in self.epochs[side]
        )

    def mean_seconds(self, side: str) -> float:
        """Of an epoch, as ranks see it on average."""
        return self._mean(side, lambda one: one["s"])

    def speedup(self, over: str = EXACT, ours: str = OURS) -> float:
        return self.median(over) / self.median(ours)


def _span(key: str, one: dict[str, Any]) -> float:
    return float(one["spans"].get(key, 0.0))


def _within(one: dict[str, Any], names: Sequence[str]) -> float:
    """Seconds of a rank's epoch in spans of these names."""
    return float(sum(s for name, s in one["spans"].items() if name.split("/")[0] in names))


def why_no_lab() -> str:
    """Why hosts with limited links cannot be had here; empty if they can."""
    tried = subprocess.run([str(LAB), "1", "--", "true"], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else (tried.stderr.strip().splitlines() or ["scripts/lab failed"])[-1]


def save(cut: Cut, folder: Path) -> Path:
    """The graph's parts as ranks open them."""
    parts = folder / f"parts-{cut.name}-{cut.partition.num_parts}"
    save_parts(cut.graph, cut.partition, parts)
    return parts


def start(job: Job, num_ranks: int, name: str) -> tuple[list[dict[str, Any]], float]:
    """What every rank answered, and the machine's load before. Answers go to JOB.ANSWER/NAME."""
    folder = Path(job.answer) / name
    folder.mkdir(parents=True)
    job_file, load = folder / "job.json", os.getloadavg()[0]
    job_file.write_text(json.dumps(replace(job, answer=str(folder)).to_json()))
    lab = [str(LAB), str(num_ranks), "--rate", FIRST_RATE, "--timeout", str(LIMIT_S)]
    command = [*lab, "--", *one_rank.arguments(job_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{num_ranks} ranks in the lab failed:\n{done.stdout}{done.stderr}")
    return [json.loads((folder / f"rank-{k}.json").read_text()) for k in range(num_ranks)], load


def phases(found: list[dict[str, Any]], load: float) -> list[Phase]:
    """Of all ranks, one for each rate."""
    made = []
    for each in zip(*(one["phases"] for one in found), strict=True):
        epochs = {
            side: [list(ranks) for ranks in zip(*(one["epochs"][side] for one in each), strict=True)]
            for side in each[0]["epochs"]
        }
        slowest = min(one["bytes_per_s"] for one in each)
        made.append(Phase(each[0]["share"], each[0]["mbit"], slowest, epochs, load))
    return made
