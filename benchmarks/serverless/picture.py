"""Epochs of a real run with functions as a picture, from the trace of its server.

    python -m benchmarks.serverless.picture OUT.svg

trains two models alike, one as ``pipe`` and one with staleness 0, server and functions on a core each, and draws an epoch of
both, one above the other on one scale. A bar for the server's graph work and one for each function: bars are what is
computed, by kind of task; the thin line below a function's bars is what it has leased: rows on their way, and its latency.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Bar", "Lane", "Row", "draw", "lanes_of"]

LATENCY_S, FUNCTIONS, EPOCH = 0.05, 2, 2
LEASED = "#9a9a9a"
COLOURS = {
    "gather (GA)": "#5fae85",
    "gradient of gather (∇GA)": "#bfe3cd",
    "apply (AV)": "#7fb0e0",
    "apply, loss and gradient (AV, ∇AV)": "#e0a030",
    "gradient of apply (∇AV)": "#c9a6e0",
}
GA, BACK_GA, AV, TURN, BACK_AV = COLOURS
Record = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """From ``start`` for ``seconds``; ``kind`` is one of COLOURS."""

    start: float
    seconds: float
    kind: str
    interval: int


@dataclass(frozen=True)
class Lane:
    """What one worker computed, and (start, seconds) of what it had leased."""

    name: str
    bars: tuple[Bar, ...]
    leases: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Row:
    """Lanes of one epoch; seconds count from its first event."""

    title: str
    lanes: tuple[Lane, ...]
    seconds: float


def lanes_of(trace: Path, epoch: int, title: str = "") -> Row:
    """Of a server's trace, what belongs to an epoch."""
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    mine = [each for each in records if each.get("epoch") == epoch]
    leases = {each["lease"]: each for each in mine if each["name"] == "lease"}
    results = [each for each in records if each.get("name") == "result" and each["lease"] in leases]
    graph = [each for each in mine if each["name"] == "graph"]
    if not graph or not results:
        raise SystemExit(
            f"{trace} has no epoch {epoch} with functions: it is not of strategy serverless, or is shorter"
        )
    last = max(each["place"] for each in leases.values())
    zero = min(each["at"] for each in (*graph, *leases.values()))
    bars = tuple(
        Bar(each["at"] - zero, each["seconds"], BACK_GA if each["backward"] else GA, each["interval"])
        for each in graph
    )
    lanes = [Lane("server", bars)]
    for name in sorted({each["function"] for each in leases.values()}):
        done = [each for each in results if leases[each["lease"]]["function"] == name]
        lanes.append(_function_lane(name, done, leases, last, zero))
    end = max(bar.start + bar.seconds for lane in lanes for bar in lane.bars)
    return Row(title, tuple(lanes), end)


def _function_lane(name: str, done: list[Record], leases: dict[int, Record], last: int, zero: float) -> Lane:
    """A result came right after what it was busy with; how long it was on its way is not known, and drawn as none."""
    bars, held = [], []
    for result in sorted(done, key=lambda each: each["at"]):
        lease, busy = leases[result["lease"]], result["busy_ms"] / 1000
        kind = BACK_AV if lease["backward"] else TURN if lease["place"] == last else AV
        bars.append(Bar(result["at"] - busy - zero, busy, kind, lease["interval"]))
        held.append((lease["at"] - zero, result["at"] - lease["at"]))
    return Lane(f"function {name.rsplit('-', 1)[-1]}", tuple(bars), tuple(held))


def draw(rows: list[Row], out: Path, note: str = "") -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "polyhop"
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    longest = max(row.seconds for row in rows)
    height = 1.3 + sum(0.45 + 0.42 * len(row.lanes) for row in rows)
    figure, axes = plt.subplots(
        len(rows), 1, figsize=(13, height), sharex=True, layout="constrained", squeeze=False
    )
    for axis, row in zip(axes[:, 0], rows, strict=True):
        for at, lane in enumerate(row.lanes):
            _draw_lane(axis, at, lane, longest)
        axis.axvline(row.seconds, color="#303030", linewidth=1)
        axis.set_title(f"{row.title}: {row.seconds:.2f} s", loc="left", fontsize=11)
        axis.set_ylim(len(row.lanes), 0)
        axis.set_yticks([at + 0.5 for at in range(len(row.lanes))], [lane.name for lane in row.lanes])
        axis.set_xlim(0, 1.01 * longest)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[-1, 0].set_xlabel(f"seconds of one epoch{note}", fontsize=10)
    patches = [Patch(facecolor=colour, label=kind) for kind, colour in COLOURS.items()]
    patches.append(Patch(facecolor=LEASED, label="leased: on its way, or waiting"))
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    figure.savefig(out, metadata={"Date": None})


def _draw_lane(axis: Any, at: int, lane: Lane, longest: float) -> None:
    high = 0.62 if lane.leases else 0.74
    for bar in lane.bars:
        axis.broken_barh(
            [(bar.start, bar.seconds)], (at + 0.1, high), facecolors=COLOURS[bar.kind], edgecolor="white", linewidth=0.4
        )  # fmt: skip
        if bar.seconds > 0.014 * longest:
            middle = bar.start + bar.seconds / 2, at + 0.1 + high / 2
            axis.text(*middle, str(bar.interval), ha="center", va="center", fontsize=8)
    axis.broken_barh(list(lane.leases), (at + 0.78, 0.1), facecolors=LEASED)


def traced(folder: Path) -> Iterator[Row]:
    """An epoch each way, of real runs that leave their traces in a folder."""
    from benchmarks.halo.graphs import Shape, make
    from polyhop.comm import run_in_threads
    from polyhop.kernels import kept_memory

    cores = sorted(os.sched_getaffinity(0))
    graph = make(Shape(16_384, 560, 41, 0.6), width=1100)
    os.sched_setaffinity(0, cores[:1])
    try:
        with kept_memory():
            for title, staleness in (("pipe", None), ("staleness 0", 0)):
                path = folder / f"{title}.jsonl"
                run_in_threads(1, _train, graph, staleness, cores[-1], path)
                yield lanes_of(path, EPOCH, title)
    finally:
        os.sched_setaffinity(0, cores)


def _train(line: Any, graph: Any, staleness: int | None, core: int, path: Path) -> None:
    from benchmarks.serverless.running import Running, gnn, held_alone, launcher
    from polyhop.trace import Trace

    trace = Trace(path)
    options = {"functions": FUNCTIONS, "intervals": 16, "staleness": staleness, "max_epochs": EPOCH + 1}
    running = Running(
        gnn(graph, 1024, 3),
        held_alone(graph),
        line,
        options,
        launcher(latency_s=LATENCY_S, core=core, prefetch=3),
        trace,
    )
    try:
        for _ in range(EPOCH + 1):
            running.train()
    finally:
        running.close()
        trace.close()


def main() -> None:
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="polyhop-picture-") as name:
        rows = list(traced(Path(name)))
    wait = f"functions wait {1000 * LATENCY_S:.0f} ms before a task"
    draw(rows, given.out, f"; numbers are intervals, {wait}; the server has one core, functions another")


if __name__ == "__main__":
    main()
