"""How many functions to take, and whether to take any: an epoch's time, cost and value with each number of them.

First the break-even: functions are dearer than servers by the second of a processor, so they pay only for tensor work that
fills less than a certain share of the epoch. Then Little's law: as many as keep up with the cores. Then value: of all
numbers the one with the most. And beside it CPU only, as many servers as are as fast, and GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from polyhop.errors import ConfigError
from polyhop.serverless.cluster import (
    Cluster,
    Epoch,
    Mode,
    epoch,
    gpu_epoch,
    little,
    outcome,
    rate_ceiling,
    task_rate,
    tasks_of,
)
from polyhop.serverless.prices import Prices, Server
from polyhop.serverless.rates import Rates
from polyhop.serverless.shapes import Shape, random_ghosts, steps
from polyhop.serverless.value import Outcome, break_even_share, ratios

__all__ = ["Choice", "Plan", "make_plan", "says", "server_bytes"]

RUNTIME_MB = 96  # of a function's memory: Python, numpy, sockets
PER_FUNCTION = 3  # intervals, so that the pipeline stays full
MOST_SERVERS = 16  # times as many are looked at
GAIN = 1.02  # of value, below which two ways are alike


@dataclass(frozen=True)
class Choice:
    """A cluster with so many functions on each server."""

    num_functions: int
    cluster: Cluster
    epoch: Epoch
    outcome: Outcome


@dataclass(frozen=True)
class Plan:
    """What was compared. ``best`` has the most value of those with functions that are allowed."""

    shape: Shape
    rates: Rates
    prices: Prices
    mode: Mode
    ghosts: float
    cpu: Choice
    choices: tuple[Choice, ...]
    best: Choice
    little: int | None  # functions that keep up with the cores
    equal: Choice | None  # CPU only, with as many servers as are as fast as ``best``
    gpu: Choice | None
    break_even: float

    @property
    def tensor_share(self) -> float:
        """Of the computing of an epoch on CPU only."""
        return self.cpu.epoch.tensor_share

    @property
    def pays(self) -> bool:
        """Whether functions have more value than the same servers without."""
        return self.best.outcome.value > GAIN * self.cpu.outcome.value

    @property
    def is_link_full(self) -> bool:
        """Whether a server's link, not the functions, limits tensor work."""
        tasks = tasks_of(self.shape, self.best.cluster, self.rates, self.ghosts)
        rate = task_rate(tasks, self.best.num_functions, self.best.cluster, self.rates)
        return rate >= 0.95 * rate_ceiling(tasks, self.best.cluster, self.rates)

    def around(self) -> list[Choice]:
        """A few numbers of functions about the best one."""
        most, best = len(self.choices), self.best.num_functions
        wanted = {
            1,
            best // 4,
            best // 2,
            best * 3 // 4,
            best,
            best * 3 // 2,
            best * 2,
            best * 4,
            self.little or 0,
        }
        return [self.choices[n - 1] for n in sorted(wanted) if 1 <= n <= most]

    def to_json(self) -> dict[str, Any]:
        def told(choice: Choice | None) -> dict[str, Any] | None:
            if choice is None:
                return None
            return {
                "server": choice.cluster.server.name,
                "num_servers": choice.cluster.num_servers,
                "num_functions": choice.num_functions,
                "num_intervals": choice.cluster.num_intervals,
                "seconds": choice.outcome.seconds,
                "dollars": choice.outcome.dollars,
                "value": choice.outcome.value,
                "graph_s": choice.epoch.graph_s,
                "tensor_s": choice.epoch.tensor_s,
                "scatter_s": choice.epoch.scatter_s,
            }

        return {
            "cpu": told(self.cpu),
            "functions": told(self.best),
            "around": [told(choice) for choice in self.around()],
            "equal_servers": told(self.equal),
            "gpu": told(self.gpu),
            "little": self.little,
            "tensor_share": self.tensor_share,
            "break_even": self.break_even,
            "pays": self.pays,
            "says": says(self),
        }


def make_plan(
    shape: Shape, cluster: Cluster, rates: Rates, prices: Prices, *, mode: Mode = "pipe", ghosts: float | None = None,
    num_intervals: int | None = None, gpu: Server | None = None, deadline_s: float | None = None,
    budget: float | None = None, parks: bool = True,
) -> Plan:  # fmt: skip
    """Compare. ``num_intervals``: of each server, None = enough for each number of functions; ``deadline_s`` and ``budget``:
    of an epoch, what a number of functions must keep to be chosen: the cheapest in time, or the fastest for the money."""
    prices.functions.checked(cluster.memory_mb)
    most = prices.functions.concurrency // cluster.num_servers
    if most < 1:
        raise ConfigError(
            f"{cluster.num_servers} servers, but only {prices.functions.concurrency} functions may run at once: "
            "no server would have one"
        )
    at_random = random_ghosts(shape.num_nodes, shape.num_edges, cluster.num_servers)
    share = 1.0 if ghosts is None or not at_random else ghosts / at_random

    def choice(name: str, count: int, n: int, way: Mode) -> Choice:
        one = replace(cluster, num_servers=count)
        one = replace(one, num_intervals=num_intervals or _intervals(shape, one, n))
        tasks = tasks_of(shape, one, rates, share * random_ghosts(shape.num_nodes, shape.num_edges, count))
        found = epoch(tasks, one, rates, n, mode=way)
        return Choice(n, one, found, outcome(name, found, one, prices, n, mode=way, parks=parks))

    def alone(count: int) -> Choice:
        return max((choice("CPU only", count, 0, way) for way in {mode, "pipe"}), key=_value)

    choices = tuple(
        choice(f"{n} functions a server", cluster.num_servers, n, mode) for n in range(1, most + 1)
    )
    best = _chosen(choices, deadline_s, budget)
    tasks = tasks_of(shape, best.cluster, rates, share * at_random)
    return Plan(
        shape=shape,
        rates=rates,
        prices=prices,
        mode=mode,
        ghosts=share * at_random,
        cpu=alone(cluster.num_servers),
        choices=choices,
        best=best,
        little=little(tasks, best.cluster, rates, most),
        equal=_as_fast(alone, cluster.num_servers, best.outcome.seconds),
        gpu=_gpu(shape, replace(cluster, server=gpu), rates, prices, share * at_random)
        if gpu is not None
        else None,
        break_even=break_even_share(prices, cluster.server, cluster.processor),
    )


def _value(choice: Choice) -> float:
    return choice.outcome.value


def _intervals(shape: Shape, cluster: Cluster, num_functions: int) -> int:
    """Enough to keep functions and cores busy, and small enough for a function's memory."""
    most = max(step.in_bytes + step.out_bytes for step in steps(shape))
    room = max(cluster.memory_mb - RUNTIME_MB, cluster.memory_mb // 4) * 2**20 / 2
    by_memory = ceil(shape.num_nodes / cluster.num_servers * most / room)
    wanted = max(PER_FUNCTION * max(num_functions, cluster.cores), by_memory)
    return min(wanted, max(1, shape.num_nodes // cluster.num_servers))


def _chosen(choices: tuple[Choice, ...], deadline_s: float | None, budget: float | None) -> Choice:
    if deadline_s is None and budget is None:
        return max(choices, key=_value)
    fit = [
        choice
        for choice in choices
        if (deadline_s is None or choice.outcome.seconds <= deadline_s)
        and (budget is None or choice.outcome.dollars <= budget)
    ]
    if not fit:
        fastest = min(choice.outcome.seconds for choice in choices)
        cheapest = min(choice.outcome.dollars for choice in choices)
        raise ConfigError(
            f"no number of functions keeps an epoch within {_limits(deadline_s, budget)}: the fastest takes "
            f"{fastest:.3g} s, the cheapest costs ${cheapest:.3g}"
        )
    if deadline_s is not None:
        return min(fit, key=lambda choice: choice.outcome.dollars)
    return min(fit, key=lambda choice: choice.outcome.seconds)


def _limits(deadline_s: float | None, budget: float | None) -> str:
    told = [] if deadline_s is None else [f"{deadline_s:g} s"]
    return " and ".join(told if budget is None else [*told, f"${budget:g}"])


def _as_fast(alone: Callable[[int], Choice], num_servers: int, seconds: float) -> Choice | None:
    """CPU only with the fewest servers that take no longer; None if even many times as many do."""
    for count in range(num_servers, MOST_SERVERS * num_servers + 1):
        found = alone(count)
        if found.outcome.seconds <= seconds:
            return found
    return None


def _gpu(shape: Shape, cluster: Cluster, rates: Rates, prices: Prices, ghosts: float) -> Choice:
    found = gpu_epoch(shape, cluster, rates, ghosts)
    return Choice(0, cluster, found, outcome("GPU", found, cluster, prices))


def server_bytes(shape: Shape, cluster: Cluster, ghosts: float) -> float:
    """Roughly what a server holds: both directions of its edges, its rows and those it reads of others."""
    rows = shape.num_nodes / cluster.num_servers * (1 + ghosts)
    return (
        4 * rows * (shape.widths[0] + 2 * sum(shape.widths[1:])) + 16 * shape.num_edges / cluster.num_servers
    )


def says(plan: Plan) -> str:
    """Whether functions pay, in plain words, and what would be better."""
    return " ".join(_sentences(plan))


def _sentences(plan: Plan) -> Iterator[str]:
    cpu, best = plan.cpu, plan.best
    against = ratios(best.outcome, cpu.outcome)
    is_below = plan.tensor_share < plan.break_even
    yield (
        f"Tensor work is {_percent(plan.tensor_share)} of the computing; by price alone functions are the cheaper place "
        f"for it below {_percent(plan.break_even)}, {'so they may pay' if is_below else 'so they should not pay'}."
    )
    same = f"{_count(best)} with {best.num_functions} functions each"
    told = f"{_times(against.speed)} as fast as without, for {_times(1 / against.saving)} the dollars"
    if plan.pays:
        yield f"Functions pay: {same} are {told}, {_times(against.value)} the value."
    else:
        yield f"Functions do not pay here: {same} are {told}, {_times(against.value)} the value."
    if plan.is_link_full:
        yield "The link of a server is full: more functions do not help, more servers or a wider link would."
    if best.epoch.scatter_s > max(best.epoch.graph_s, best.epoch.tensor_s):
        yield "What servers send each other takes longest: a better cut would help, functions cannot."
    better = list(_better(plan))
    if better:
        yield f"Better{' still' if plan.pays else ''}: {'; '.join(better)}."
    elif plan.pays:
        yield "Nothing that was compared is better."


def _better(plan: Plan) -> Iterator[str]:
    now = plan.best if plan.pays else plan.cpu
    if not plan.pays:
        yield f"CPU only on the same {_count(plan.cpu)}"
    equal = plan.equal
    if equal is not None and equal.cluster.num_servers > plan.cpu.cluster.num_servers:
        saving = plan.best.outcome.dollars / equal.outcome.dollars
        if saving > GAIN:
            yield f"{_count(equal)} without functions, as fast for {_times(1 / saving)} the dollars"
    if plan.gpu is not None and plan.gpu.outcome.value > GAIN * now.outcome.value:
        found = ratios(plan.gpu.outcome, now.outcome)
        yield f"{_count(plan.gpu)}, {_times(found.speed)} as fast with {_times(found.value)} the value"


def _count(choice: Choice) -> str:
    return f"{choice.cluster.num_servers} {choice.cluster.server.name}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _times(ratio: float) -> str:
    return f"{ratio:.2f} x"
