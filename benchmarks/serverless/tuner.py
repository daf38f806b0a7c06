"""Section ``tuner``: does ``--functions auto`` find the number of functions that is worth most?

Value is 1 / (time x cost) of an epoch, over whole runs, with starts and search; ``..._vs_best`` is that of the best fixed
number, found by trying them all, per that of ``auto``: 1 is as good, below 1 better.

autotuner_vs_best             real processes on this machine, whose tasks wait (a sleep, so that more functions help also
                              where there are few cores), real bills of what launchers and ledger saw; the worst workload
autotuner_vs_best_simulated   the same decisions on events, for the shapes of the paper's four graphs; the worst of them

Prices are AWS's, but a server is paid from its first second: so a run of seconds stands for a long one.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from benchmarks.graphs import skewed
from benchmarks.harness import Figure, busy_cores
from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.graph import Graph
from polyhop.kernels.keys import Key
from polyhop.partition import Partition, share
from polyhop.serverless.bill import FunctionTrace, ServerTrace, Trace, bill
from polyhop.serverless.cluster import Cluster, tasks_of
from polyhop.serverless.local import LocalLauncher
from polyhop.serverless.prices import Prices, load_prices
from polyhop.serverless.rates import PUBLISHED
from polyhop.serverless.shapes import PAPER
from polyhop.serverless.simulate import Played, simulate
from polyhop.serverless.tuner import Bounds, Look, Tuner
from polyhop.serverless.value import Outcome
from polyhop.strategies import Team, place, serverless, serverless_step
from polyhop.train.loss import cross_entropy_sum

__all__ = ["Workload", "run", "tuned"]

AIM = 1.10
CLUSTERS = {
    "reddit-small": ("c5.2xlarge", 2),
    "reddit-large": ("c5n.2xlarge", 12),
    "amazon": ("c5n.2xlarge", 8),
    "friendster": ("c5n.4xlarge", 32),
}
MEMORY_MB = 192
START, EPOCHS, INTERVALS = 16, 100, 128


@dataclass(frozen=True)
class Workload:
    """A graph, what a task waits, and what functions cost."""

    name: str
    num_nodes: int
    num_edges: int
    hidden: int
    latency_s: float
    memory_mb: int
    numbers: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12)
    intervals: int = 24
    layers: int = 2
    epochs: int = 100

    def epochs_with(self, functions: int | str) -> int:
        """Fewer where few functions would take long; value is that of one epoch."""
        return (
            self.epochs if functions == "auto" else max(self.epochs * int(functions) // max(self.numbers), 8)
        )

    @property
    def graph(self) -> Graph:
        num_train = self.num_nodes // 2
        return skewed(self.num_nodes, self.num_edges, num_features=32, num_classes=8, num_train=num_train)


WORKLOADS = (
    Workload("latency, 192 MB", 4000, 60_000, 16, 0.05, 192),
    Workload("graph work, 1769 MB", 30_000, 5_000_000, 64, 0.05, 1769, layers=3, epochs=36),
)


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Real runs of every number in turn, then simulated ones."""
    workloads, rounds = (WORKLOADS[:1], 1) if is_quick else (WORKLOADS, 3)
    worst, told = 0.0, []
    for workload in workloads:
        ratio, details = _against_best(workload, rounds, is_quick=is_quick)
        worst = max(worst, ratio)
        told.append(f"{workload.name}: {ratio:.2f} ({details})")
    yield Figure("autotuner_vs_best", worst, "x", "; ".join(told), at_most=AIM)
    prices = _by_the_second(load_prices())
    found = {name: _simulated(name, prices) for name in CLUSTERS}
    details = ", ".join(f"{name} {ratio:.3f} ({about})" for name, (ratio, about) in found.items())
    yield Figure(
        "autotuner_vs_best_simulated", max(ratio for ratio, _ in found.values()), "x",
        f"{EPOCHS} epochs, pipe, search and cold starts paid: {details}", at_most=AIM,
    )  # fmt: skip


def _by_the_second(prices: Prices) -> Prices:
    return replace(prices, least_s=0)


# Real processes


def _against_best(workload: Workload, rounds: int, *, is_quick: bool) -> tuple[float, str]:
    graph, loads = workload.graph, [busy_cores()]
    workload = replace(workload, epochs=20) if is_quick else workload
    settings: list[int | str] = [*workload.numbers, "auto"]
    values: dict[int | str, list[float]] = {each: [] for each in settings}
    chosen = []
    for turn in range(rounds):
        shift = turn * len(settings) // rounds
        for functions in settings[shift:] + settings[:shift]:
            outcome, decided = run_in_threads(1, _trained, graph, workload, functions)[0]
            values[functions].append(outcome.value)
            chosen += [decided] if functions == "auto" else []
            print(
                f"  {workload.name:20} {functions!s:>4} functions  {outcome.seconds:6.3f} s  ${outcome.dollars:.8f}  "
                f"{decided}",
                flush=True,
            )
        loads.append(os.getloadavg()[0])
    medians = {each: statistics.median(found) for each, found in values.items()}
    best = max(workload.numbers, key=medians.__getitem__)
    shown = ", ".join(f"{each} {medians[each] / medians[best]:.2f}" for each in settings)
    about = f"best {best}; auto went {' | '.join(chosen)}; values per best's: {shown}"
    return medians[best] / medians[
        "auto"
    ], f"{about}; medians of {rounds}, load {min(loads):.1f} to {max(loads):.1f}"


def _trained(line: Collective, graph: Graph, workload: Workload, functions: int | str) -> tuple[Outcome, str]:
    """Time and cost of a run, per epoch, and the numbers of functions that it went through."""
    epochs = workload.epochs_with(functions)
    torch.manual_seed(1)
    model = nn.GCN(
        graph.num_features, workload.hidden, num_layers=workload.layers, out_channels=graph.num_classes
    )
    owner = torch.zeros(graph.num_nodes, dtype=torch.int32)
    held = share(graph, Partition(owner, 1), 0)
    config = serverless.Config(
        max_epochs=epochs,
        functions=functions,
        intervals=workload.intervals,
        function_memory=workload.memory_mb,
    )
    team = Team(line)
    whole = serverless.hold(held, place("cpu", "32-true"), team, config)
    assert held.split is not None
    launcher, serverless_step.LocalLauncher = serverless_step.LocalLauncher, _waiting(workload.latency_s)  # type: ignore[misc, assignment]
    try:
        step: Any = serverless.build(
            model, held, config, train_ids=held.split.train, whole=whole, loss=cross_entropy_sum, team=team
        )
    finally:
        serverless_step.LocalLauncher = launcher  # type: ignore[misc]
    try:
        for epoch in range(epochs):
            step.gradients(0, Key(1, epoch))
        step.summary()
        traces = list(step.books.traces().values())
        gone = (
            [] if step.tuning is None else [str(each.num_functions) for each in step.tuning.tuner.decisions]
        )
    finally:
        step.close()
    found = _outcome(traces, _by_the_second(step.books.tariff.prices))
    return Outcome("epoch", found.seconds / epochs, found.dollars / epochs), " > ".join(gone)


def _waiting(latency_s: float) -> Any:
    return lambda order: LocalLauncher(replace(order, latency_s=latency_s))


def _outcome(traces: list[Trace], prices: Prices) -> Outcome:
    """The server's time and what all of it cost."""
    (server,) = (each for each in traces if isinstance(each, ServerTrace))
    seconds = (float(server.end_ms) - float(server.start_ms)) / 1000
    return Outcome("run", seconds, float(bill(traces, prices).dollars))


# Simulated


def _simulated(name: str, prices: Prices) -> tuple[float, str]:
    """(best fixed number's value per auto's, in words)."""
    kind, count = CLUSTERS[name]
    whole = Cluster(prices.server(kind), count, MEMORY_MB, INTERVALS)
    tasks, one = (
        tasks_of(PAPER[name], whole, PUBLISHED),
        replace(whole, num_servers=1),
    )  # all servers do the same

    def played(number: int, is_cold: bool) -> Played:
        return simulate(tasks, one, PUBLISHED, number, is_cold=is_cold)

    fixed = {n: played(n, False).seconds for n in range(1, INTERVALS + 1)}
    values = {n: _life([n] * EPOCHS, [took] * EPOCHS, one, prices).value for n, took in fixed.items()}
    best = max(values, key=values.__getitem__)
    bounds = Bounds(
        START, prices.functions.concurrency // count, INTERVALS, float(whole.server.dollars_per_s),
        float(prices.functions.dollars_per_s(MEMORY_MB)), link_bytes=PUBLISHED.server_bytes,
    )  # fmt: skip
    numbers, seconds = tuned(Tuner(bounds), played, EPOCHS, one.cores)
    ratio = values[best] / _life(numbers, seconds, one, prices).value
    moves = sum(a != b for a, b in pairwise(numbers))
    return ratio, f"best {best}, auto {START} to {numbers[-1]} in {moves} moves"


def tuned(tuner: Tuner, played: Any, epochs: int, cores: int) -> tuple[list[int], list[float]]:
    """(functions, seconds) of every epoch; those that come are cold, and the epoch in which they do is not steady."""
    numbers: list[int] = []
    seconds: list[float] = []
    for _ in range(epochs):
        number = tuner.wanted
        grows = not numbers or number > numbers[-1]
        found: Played = played(number, grows)
        numbers.append(number)
        seconds.append(found.seconds)
        leases = found.num_leases
        tuner.see(
            Look(
                found.seconds, 1, number, leases, sum(found.busy_s), 0.0, found.core_s / cores,
                is_steady=len(numbers) > 1 and number == numbers[-2],
            )
        )  # fmt: skip
    return numbers, seconds


def _life(numbers: list[int], seconds: list[float], one: Cluster, prices: Prices) -> Outcome:
    """Of a server whose functions come and go between epochs."""
    ends = [1000 * sum(seconds[: at + 1]) for at in range(len(seconds))]
    traces: list[Trace] = [ServerTrace(one.server.name, 0, ends[-1])]
    for place_ in range(max(numbers)):
        since: float | None = None
        for number, start, end in zip(numbers, [0.0, *ends], ends, strict=False):
            since = start if since is None and number > place_ else since
            is_over = since is not None and (number <= place_ or end == ends[-1])
            if is_over and since is not None:
                stop = end if number > place_ else start
                traces += _starts(since, stop, one, prices)
                since = None
    return Outcome("run", ends[-1] / 1000, float(bill(traces, prices).dollars))


def _starts(since: float, stop: float, one: Cluster, prices: Prices) -> Iterator[FunctionTrace]:
    """A function that would live too long starts again."""
    limit = 1000.0 * prices.functions.limit_s - 1
    while since < stop:
        yield FunctionTrace(since, min(since + limit, stop), 1000 * PUBLISHED.cold_s, one.memory_mb)
        since += limit
