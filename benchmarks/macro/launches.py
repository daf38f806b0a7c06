"""Starting ranks on a job, locally or in the lab, and what all of them told."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT
from benchmarks.macro import rank as one_rank
from benchmarks.macro.graphs import Fixed
from benchmarks.macro.workload import Job
from polyhop import launch
from polyhop.comm import Cost
from polyhop.partition import save_parts

__all__ = ["Ran", "save", "start", "why_no_lab"]

LAB = ROOT / "scripts" / "lab"
LIMIT_S = 600  # of one lab run


@dataclass(frozen=True)
class Ran:
    """What all ranks told of one launch. ``epochs[model][side][epoch][rank]``, timed ones only."""

    epochs: dict[str, dict[str, list[list[dict[str, Any]]]]]
    bytes_per_s: float  # of the slowest rank
    predicted: dict[str, float]  # side -> rows of a window, all ranks
    load: float  # of the machine, in the minute before

    def seconds(self, model: str, side: str) -> list[float]:
        """Of every timed epoch, until the last rank was done."""
        return [max(one["s"] for one in ranks) for ranks in self.epochs[model][side]]

    def median(self, model: str, side: str) -> float:
        return statistics.median(self.seconds(model, side))

    def per_rank(self, model: str, side: str, of: Callable[[dict[str, Any]], float]) -> float:
        """Mean over ranks and timed epochs."""
        return statistics.mean(of(one) for ranks in self.epochs[model][side] for one in ranks)

    def waiting(self, model: str, side: str) -> float:
        """The share of an epoch in which the ranks waited for their mini-batches."""
        return self.per_rank(model, side, lambda one: one["spans"].get("wait", 0.0) / one["s"])

    def sent(self, model: str, side: str, epoch: int = -1) -> list[Cost]:
        """What each rank counted in one timed epoch."""
        ranks = self.epochs[model][side][epoch]
        return [Cost(one["bytes"], one["messages"], one["rounds"]) for one in ranks]

    def feature_bytes(self, model: str, side: str) -> float:
        """Of all ranks, an epoch."""
        return sum(cost.bytes.get("features", 0) for cost in self.sent(model, side))

    def told(self, model: str, side: str) -> str:
        """Times in words."""
        seconds = self.seconds(model, side)
        spans = [
            f"{name} {self.per_rank(model, side, lambda one, name=name: one['spans'].get(name, 0.0)):.2f}"
            for name in ("compute", "wait", "sample", "load")
        ]
        cpu = self.per_rank(model, side, lambda one: one["cpu_s"])
        sent = self.feature_bytes(model, side) / len(self.sent(model, side)) / 1e6
        return (
            f"{statistics.median(seconds):.2f} s [{min(seconds):.2f} .. {max(seconds):.2f}]; {', '.join(spans)}, CPU "
            f"{cpu:.2f} s a rank; {sent:.1f} MB of rows"
        )


def why_no_lab() -> str:
    """Why hosts with limited links cannot be had here; empty if they can."""
    tried = subprocess.run([str(LAB), "1", "--", "true"], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else (tried.stderr.strip().splitlines() or ["scripts/lab failed"])[-1]


def save(fixed: Fixed, folder: Path) -> Path:
    """The graph's parts as ranks open them."""
    parts = folder / f"parts-{fixed.graph.name}-{fixed.shape.num_parts}"
    save_parts(fixed.graph, fixed.partition, parts)
    return parts


def start(job: Job, num_ranks: int, name: str, *, rate: str | None = None, latency: str | None = None) -> Ran:
    """All ranks: local processes, or with a rate (or latency) a host of the lab for each. Answers go to JOB.ANSWER/NAME."""
    folder = Path(job.answer) / name
    folder.mkdir(parents=True)
    job_file, load = folder / "job.json", os.getloadavg()[0]
    job_file.write_text(json.dumps(replace(job, answer=str(folder)).to_json()))
    if rate is None and latency is None:
        launch.run(one_rank.measure, (str(job_file),), one_rank.options(num_ranks))
    else:
        lab = [str(LAB), str(num_ranks), "--rate", rate or "unlimited", "--timeout", str(LIMIT_S)]
        lab += ["--latency", latency] if latency else []
        command = [*lab, "--", *one_rank.arguments(job_file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{num_ranks} ranks in the lab failed:\n{done.stdout}{done.stderr}")
    found = [json.loads((folder / f"rank-{k}.json").read_text()) for k in range(num_ranks)]
    epochs = {
        model: {
            side: [list(ranks) for ranks in zip(*(one["epochs"][model][side] for one in found), strict=True)]
            for side in sides
        }
        for model, sides in found[0]["epochs"].items()
    }
    return Ran(epochs, min(one["bytes_per_s"] for one in found), found[0].get("predicted", {}), load)
