"""Section ``overlap``: an epoch against the longer of its two halves, graph work on a server and tensor work on a function.

Server and function have a core each; functions wait 50 ms before every task. The graph has hundreds of edges a node and the
layers are wide (as with Reddit, bytes are then not what takes longest), so that both halves take about as long. The server's
core also encrypts every byte that the function sees.

epoch_vs_max_phase        staleness 0: seconds of an epoch over those of the longer half, both of the same epoch
pipe_epoch_vs_max_phase   the same where every layer waits for all rows
unpipelined_vs_sum        one thing at a time: while a task is out the server waits, and offers no other. Same intervals,
                          tasks and bytes; over the sum of both halves and of all latencies
epoch_vs_max_alone        the epoch of staleness 0 over the longer half as it took one thing at a time, when nothing else was
                          on the cores: what encryption and messages cost is then in the epoch alone
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.graphs import describe
from benchmarks.halo.graphs import Shape, make
from benchmarks.harness import Figure, busy_cores
from benchmarks.serverless.running import Running, Spent, gnn, held_alone, launcher
from polyhop.comm import Collective, run_in_threads
from polyhop.graph import Graph
from polyhop.kernels import kept_memory
from polyhop.serverless.mail import Done

__all__ = ["Epochs", "figures", "run"]

LATENCY_S, PREFETCH = 0.05, 4
AIM = 1.15
QUIET = 0.3  # cores that others may use before a side without being told


@dataclass(frozen=True)
class _Size:
    shape: Shape
    features: int
    hidden: int
    num_layers: int
    intervals: int
    timed: int


FULL = _Size(Shape(65_536, 520, 41, 0.6), 1100, 1024, 3, 20, 4)
QUICK = _Size(Shape(8_192, 300, 41, 0.6), 600, 512, 3, 16, 2)
SIDES: dict[str, int | None] = {"staleness 0": 0, "pipe": None, "one at a time": 0}
ALONE = "one at a time"


@dataclass(frozen=True)
class Epochs:
    """Timed epochs of one side."""

    spent: tuple[Spent, ...]
    ages: dict[int, int]  # of what was read
    load: float

    @property
    def vs_max(self) -> list[float]:
        return [each.seconds / max(each.graph_s, each.tensor_s) for each in self.spent]

    @property
    def vs_sum(self) -> list[float]:
        """Latencies are part of the sum."""
        return [
            each.seconds / (each.graph_s + each.tensor_s + LATENCY_S * each.num_tasks) for each in self.spent
        ]

    @property
    def longer_s(self) -> float:
        return median(max(each.graph_s, each.tensor_s) for each in self.spent)

    def __str__(self) -> str:
        seconds, graph, tensor = (
            [getattr(each, name) for each in self.spent] for name in ("seconds", "graph_s", "tensor_s")
        )
        one = self.spent[-1]
        return (
            f"epoch {median(seconds):.2f} s [{min(seconds):.2f} .. {max(seconds):.2f}], graph {median(graph):.2f}, tensor "
            f"{median(tensor):.2f}, {one.num_tasks} tasks, {one.task_bytes / 1e6:.0f} MB{_told(self.load)}"
        )


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Ratios of three sides, one after another."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        print("  skipped: server and function need a core each, and there is one", flush=True)
        return
    size = QUICK if is_quick else FULL
    graph = make(size.shape, width=size.features)
    print(
        f"  {describe(graph)}; GCN of {size.num_layers} layers, hidden {size.hidden}, {size.intervals} intervals, 1 "
        f"function, {1000 * LATENCY_S:.0f} ms before a task, {PREFETCH} on their way",
        flush=True,
    )
    os.sched_setaffinity(0, cores[:1])  # threads that are made from now on, too
    found = {}
    try:
        with kept_memory():
            for side in SIDES:
                (found[side],) = run_in_threads(1, _timed, graph, size, side, cores[1])
                print(f"  {side:14} {found[side]}", flush=True)
    finally:
        os.sched_setaffinity(0, cores)
    yield from figures(found)


def figures(found: dict[str, Epochs]) -> Iterator[Figure]:
    """Medians over the timed epochs."""
    for side, name in (("staleness 0", "epoch_vs_max_phase"), ("pipe", "pipe_epoch_vs_max_phase")):
        one = found[side]
        turns = ", ".join(f"{each:.3f}" for each in one.vs_max)
        ages = ", ".join(f"{age}: {count}" for age, count in sorted(one.ages.items()))
        aim = AIM if side == "staleness 0" else None
        yield Figure(name, median(one.vs_max), "x", f"{one}; epochs {turns}; ages read {ages}", at_most=aim)
    alone, stale = found[ALONE], found["staleness 0"]
    yield Figure(
        "unpipelined_vs_sum", median(alone.vs_sum), "x",
        f"{alone}; of the sum {LATENCY_S * alone.spent[-1].num_tasks:.1f} s are latencies",
    )  # fmt: skip
    epoch = median(each.seconds for each in stale.spent)
    yield Figure(
        "epoch_vs_max_alone", epoch / alone.longer_s, "x",
        f"epoch {epoch:.2f} s; the longer half took {alone.longer_s:.2f} s one thing at a time",
    )  # fmt: skip


def _timed(line: Collective, graph: Graph, size: _Size, side: str, core: int) -> Epochs:
    load = busy_cores()
    options = {"functions": 1, "intervals": size.intervals, "staleness": SIDES[side]}
    local = launcher(latency_s=LATENCY_S, core=core, prefetch=PREFETCH)
    model = gnn(graph, size.hidden, size.num_layers)
    running = Running(model, held_alone(graph), line, options, local)
    try:
        if side == ALONE:
            _one_at_a_time(running.step.server)
        for _ in range(2):  # the first is of pipe, whatever the staleness
            running.train()
        before = dict(running.step.server.ages.seen)
        timed = 1 if side == ALONE else size.timed
        spent = tuple(running.measured() for _ in range(timed))
        seen = running.step.server.ages.seen
        return Epochs(spent, {age: count - before.get(age, 0) for age, count in seen.items()}, load)
    finally:
        running.close()


def _one_at_a_time(server: Any) -> None:
    """Have the engine offer a task only when none is out, and begin no graph operation until all have come back."""
    passes, work = server.passes, server._gather_or_collect
    offer, came_back = passes._offer, passes.came_back
    held: deque[tuple[Any, ...]] = deque()
    out: list[bool] = []

    def release() -> None:
        if held and not out:
            out.append(True)
            offer(*held.popleft())

    def hold(*task: Any) -> None:
        held.append(task)
        release()

    def take_back(done: Done) -> None:
        out.clear()
        came_back(done)
        release()

    def work_alone(*operation: int) -> None:
        while out:
            server._take(server.post.inbox.get())
        work(*operation)

    passes._offer, passes.came_back, server._gather_or_collect = hold, take_back, work_alone


def _told(load: float) -> str:
    return f"; other work on {load:.1f} cores" if load > QUIET else ""
