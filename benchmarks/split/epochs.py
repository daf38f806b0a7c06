"""Section ``epochs``: seconds of an epoch of every way to train the same mini-batches, four ranks in the lab.

Feature rows lie in the memory of their owner's host. The graph has communities and one presampled partition, the same for
all sides: owners that follow the graph are what all of them are used with, and what makes ``data`` fetch least. For each
width of inputs and hidden rows the rate of the links is sought at which ``data`` waits for 70 % of its epoch (``rank.py``
says how, and what it is where there is none); then all sides take turns there, and at 1 Gbit/s. All sides train the same
weights, so their losses must agree.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.graphs import describe
from benchmarks.harness import Figure
from benchmarks.macro.launches import LAB, why_no_lab
from benchmarks.split import rank as one_rank
from benchmarks.split.graphs import blocks, with_features
from benchmarks.split.workload import FAN_OUTS, SIDES, Job
from polyhop.graph import Graph, Split
from polyhop.kernels.synth import permutation
from polyhop.partition import Partition, save_parts
from polyhop.sample.splitting import presampled

__all__ = ["run"]

NUM_RANKS = 4
WIDTHS, HIDDEN = (128, 512), (64, 256)
WAITING = 0.7  # of an epoch of data
RATE = 1000.0  # Mbit/s, beside the one that is sought
FIRST_RATE = (
    "740mbit"  # see lab.relimit: segments are as large as the smallest bucket; ranks change it at once
)
LIMIT_S = 900  # of one launch
ARENAS = {
    "MALLOC_ARENA_MAX": "4"
}  # many sides have many threads, and memory is kept by arena: 5 GB a rank without
LOSSES_APART = 2e-3  # of the loss: float32, sums in other orders, Adam's steps
Shape = tuple[int, int]  # inputs, hidden


@dataclass(frozen=True)
class _Size:
    num_nodes: int
    batch: int  # seeds of all ranks
    steps: int
    turns: int
    tries: int


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Ratios of epochs at the rate that is sought, and at 1 Gbit/s."""
    no_lab = why_no_lab()
    if no_lab:
        print(f"  skipped: {no_lab}", flush=True)
        return
    size = _Size(12_000, 100, 4, 1, 1) if is_quick else _Size(60_000, 1000, 3, 4, 3)
    graph, made = _cut(size)
    widths, hidden = (WIDTHS[1:], HIDDEN[:1]) if is_quick else (WIDTHS, HIDDEN)
    found: dict[Shape, list[Phase]] = {}
    for width in widths:
        for shape, phases in _start(with_features(graph, width), made, hidden, size).items():
            found[shape] = phases
            for phase in phases:
                _tell(shape, phase)
            _check_losses(shape, phases)
    yield from _sought(found)
    for at, end in enumerate(("", "_1gbit")):
        yield from _figures({shape: phases[at] for shape, phases in found.items()}, end)


def _cut(size: _Size) -> tuple[Graph, Partition]:
    graph = blocks(size.num_nodes)
    train = permutation(5, graph.num_nodes)[: size.steps * size.batch].long()
    graph = replace(graph, split=Split.of(graph.num_nodes, train))
    found = presampled(graph, NUM_RANKS, list(FAN_OUTS), size.batch, method="metis")
    quality = found.quality
    print(
        f"  {describe(graph)}; {size.steps} steps of {size.batch} seeds of all ranks; presampled owners: "
        f"{100 * quality.cut:.1f} % of sampled edges cut, busiest {quality.batch_balance:.2f}",
        flush=True,
    )
    return graph, found.partition


# The ranks


@dataclass(frozen=True, eq=False)
class Phase:
    """Timed epochs at one rate. ``epochs[side][turn][rank]``."""

    mbit: float
    bytes_per_s: float  # of the slowest rank, all sending to all
    epochs: dict[str, list[list[dict[str, Any]]]]
    load: float  # of the machine, in the minute before
    reason: str  # of what auto chose

    def seconds(self, side: str) -> list[float]:
        """Of every timed epoch, until the last rank was done."""
        return [max(float(one["s"]) for one in ranks) for ranks in self.epochs[side]]

    def median(self, side: str) -> float:
        return statistics.median(self.seconds(side))

    def mean(self, side: str, of: Callable[[dict[str, Any]], float]) -> float:
        """Mean over ranks, median over epochs."""
        return statistics.median(statistics.mean(of(one) for one in ranks) for ranks in self.epochs[side])

    def waiting(self, side: str) -> float:
        """The share of an epoch in which ranks wait for mini-batches and for the sum of gradients."""
        return self.mean(
            side, lambda one: sum(one["spans"].get(name, 0.0) for name in one_rank.WAITS) / one["s"]
        )

    def best(self) -> str:
        """The fastest side that is given, not chosen."""
        return min((side for side in self.epochs if side in SIDES), key=self.median)

    def losses(self, side: str) -> dict[int, float]:
        """By the number of the epoch."""
        return {ranks[0]["epoch"]: float(ranks[0]["loss"]) for ranks in self.epochs[side]}


def _start(graph: Graph, made: Partition, hidden: Sequence[int], size: _Size) -> dict[Shape, list[Phase]]:
    """All sides on ranks in the lab; for each shape its phases, the rate that is sought first."""
    tenth = 4 * graph.num_features * graph.num_nodes // (10 * NUM_RANKS)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="polyhop-split-") as name:
        parts, job_file = Path(name) / "parts", Path(name) / "job.json"
        save_parts(graph, made, parts)
        job = Job(
            str(parts), name, size.batch, hidden, tenth, WAITING, size.tries, [RATE], size.turns, SIDES
        )  # fmt: skip
        job_file.write_text(json.dumps(job.to_json()))
        lab = [str(LAB), str(NUM_RANKS), "--rate", FIRST_RATE, "--timeout", str(LIMIT_S)]
        command = [*lab, "--", *one_rank.arguments(job_file)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, **ARENAS}
        )
        if done.returncode != 0:
            raise RuntimeError(f"{NUM_RANKS} ranks in the lab failed:\n{done.stdout}{done.stderr}")
        told = [json.loads((Path(name) / f"rank-{k}.json").read_text()) for k in range(NUM_RANKS)]
    return {
        (graph.num_features, width): [
            _phase(each, load) for each in zip(*(one[str(width)] for one in told), strict=True)
        ]
        for width in hidden
    }


def _phase(ranks: Sequence[dict[str, Any]], load: float) -> Phase:
    epochs = {
        side: [list(each) for each in zip(*(one["epochs"][side] for one in ranks), strict=True)]
        for side in ranks[0]["epochs"]
    }
    return Phase(ranks[0]["mbit"], min(one["bytes_per_s"] for one in ranks), epochs, load, ranks[0]["reason"])


def _tell(shape: Shape, phase: Phase) -> None:
    print(
        f"  {shape[0]} inputs, hidden {shape[1]}, {phase.mbit:.0f} Mbit/s ({8e-6 * phase.bytes_per_s:.0f} measured); load "
        f"{phase.load:.1f} before; ms of an epoch: a rank computes, waits for mini-batches, rows, sums; samples, loads:",
        flush=True,
    )
    for side in phase.epochs:
        seconds = phase.seconds(side)
        rows = phase.mean(side, lambda one: _crossed(one["spans"]))
        whole, batches, summed, sample, load = (
            phase.mean(side, lambda one, name=name: one["spans"].get(name, 0.0))  # type: ignore[misc]
            for name in ("compute", "wait", "summed", "sample", "load")
        )
        spent = (whole - rows - summed, batches, rows, summed, sample, load)
        cpu, main = (phase.mean(side, lambda one, name=name: one[name]) for name in ("cpu_s", "main_cpu_s"))  # type: ignore[misc]
        sent = {
            kind: statistics.mean(one["bytes"].get(kind, 0) for one in phase.epochs[side][-1]) / 1e6
            for kind in ("ids", "features", "hidden", "gradients")
        }
        low, middle, high = (1000 * f(seconds) for f in (min, statistics.median, max))
        times = "".join(f"{1000 * each:6.0f}" for each in spent)
        told = ", ".join(f"{kind} {mb:.1f}" for kind, mb in sent.items())
        print(
            f"    {side:9}{middle:6.0f} [{low:.0f} .. {high:.0f}]:{times}; CPU {1000 * cpu:.0f} ({1000 * main:.0f} on the "
            f"main thread); MB a rank: {told}; loss {phase.epochs[side][-1][0]['loss']:.5f}",
            flush=True,
        )
    print(f"    auto chose {phase.reason}", flush=True)


def _crossed(spans: Mapping[str, float]) -> float:
    """Seconds that the main thread waited for rows between layers."""
    return sum(seconds for name, seconds in spans.items() if name.startswith("wait/"))


def _check_losses(shape: Shape, phases: Sequence[Phase]) -> None:
    """All sides train the same mini-batches to the same weights: RuntimeError where a loss says otherwise."""
    expected = {epoch: loss for phase in phases for epoch, loss in phase.losses("data").items()}
    for phase in phases:
        for side in phase.epochs:
            for epoch, loss in phase.losses(side).items():
                if not abs(loss / expected[epoch] - 1) <= LOSSES_APART:
                    raise RuntimeError(
                        f"{_named(shape)}, epoch {epoch}: the loss of {side} is {loss}, that of data {expected[epoch]}; "
                        "ratios of epochs would compare different work"
                    )


# Figures


def _sought(found: Mapping[Shape, Sequence[Phase]]) -> Iterator[Figure]:
    for shape, phases in found.items():
        details = f"Mbit/s at which data waits for {100 * phases[0].waiting('data'):.0f} % of its epoch, {_named(shape)}"
        yield Figure(f"rate_where_data_waits_mbit{_end(shape)}", phases[0].mbit, "Mbit/s", details)
    waits = [phases[0].waiting("data") for phases in found.values()]
    details = f"of an epoch at the rates sought: {', '.join(f'{each:.2f}' for each in waits)}"
    yield Figure("data_waits", statistics.mean(waits), "share", details)


def _figures(found: Mapping[Shape, Phase], end: str) -> Iterator[Figure]:
    for side in ("data", "cache", "striped", "pushpull"):
        yield from _ratios(f"epoch_{side}_vs_split", found, end, lambda _, side=side: side, lambda _: "split")  # type: ignore[misc]
    wide = {shape: phase for shape, phase in found.items() if shape[0] == WIDTHS[-1]}
    aim = None if end else 2.0
    *each, whole = _ratios("best_vs_data", found, end, lambda _: "data", Phase.best)
    yield from each
    if len(wide) < len(found):
        yield replace(whole, name=f"best_vs_data_all{end}")
    *_, whole = _ratios("best_vs_data", wide, end, lambda _: "data", Phase.best)
    yield replace(whole, details=f"{WIDTHS[-1]} inputs: {whole.details}", at_least=aim)
    *each, _ = _ratios("auto_vs_best", found, end, lambda _: "auto", Phase.best)
    yield from each
    worst = max(each, key=lambda figure: figure.value)
    yield replace(worst, name=f"auto_vs_best{end}", details=f"the worst: {worst.details}", at_most=1.1)


def _ratios(
    name: str,
    found: Mapping[Shape, Phase],
    end: str,
    over: Callable[[Phase], str],
    under: Callable[[Phase], str],
) -> Iterator[Figure]:
    """The epoch of one side over that of another: of each shape, then their geometric mean."""
    each = {}
    for shape, phase in found.items():
        top, bottom = over(phase), under(phase)
        each[shape] = phase.median(top) / phase.median(bottom)
        details = (
            f"{top} {phase.median(top):.2f} s over {bottom} {phase.median(bottom):.2f} s, {_named(shape)}, {phase.mbit:.0f} "
            f"Mbit/s{_crowd(phase)}"
        )
        yield Figure(f"{name}{_end(shape)}{end}", each[shape], "x", details)
    told = ", ".join(f"{shape[0]}/{shape[1]} {value:.2f}" for shape, value in each.items())
    crowd = _crowd(max(found.values(), key=lambda phase: phase.load))
    yield Figure(
        f"{name}{end}", geometric_mean(each.values()), "x", f"geometric mean of inputs/hidden {told}{crowd}"
    )


def _named(shape: Shape) -> str:
    return f"{shape[0]} inputs, hidden {shape[1]}"


def _end(shape: Shape) -> str:
    return f"_{shape[0]}_{shape[1]}"


def _crowd(phase: Phase) -> str:
    cores = len(os.sched_getaffinity(0))
    crowd = f"; {NUM_RANKS} ranks on {cores} cores" if cores < NUM_RANKS else ""
    return crowd + (f"; other work on the machine, load {phase.load:.1f}" if phase.load > cores else "")
