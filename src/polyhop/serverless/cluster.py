"""How long an epoch takes on servers and functions, as formulas; ``simulate`` plays the same tasks through.

With n functions on each server (M intervals on a server, K tensor tasks of an interval, B bytes/s of a server's link):

    b(n)   = min(bytes/s of a function, B / n)
    tau(n) = latency + max(in / b(n), flop / f) + out / b(n)         with streaming; the sum without
    mu(n)  = n / tau(n), never above B / (in + out) nor above the leases that a server hands out
    T      = max(graph work / cores, K M / mu(n), scatter) + fill    where nothing waits for a layer (staleness S)
    T      = the sum of that over what lies between two barriers     where every layer does ("pipe")
    T      = the sum of all                                          where nothing overlaps ("none")

Without functions (n = 0) cores do the tensor work too. Intervals are alike, and so are servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from polyhop.errors import ConfigError, InputError
from polyhop.serverless.prices import Prices, Server
from polyhop.serverless.rates import Rates
from polyhop.serverless.shapes import Shape, Step, random_ghosts, steps
from polyhop.serverless.value import Outcome

__all__ = [
    "EPOCHS_RATIO",
    "Cluster",
    "Epoch",
    "Mode",
    "Task",
    "bandwidth",
    "epoch",
    "gpu_epoch",
    "link_bytes",
    "little",
    "outcome",
    "rate_ceiling",
    "received_bytes",
    "service_s",
    "task_rate",
    "tasks_of",
]

Mode = str | int
"""``pipe``: every layer waits for all of the one before; ``none``: so does every task; a number S: epochs ahead allowed."""

EPOCHS_RATIO: dict[Mode, float] = {"none": 1.0, "pipe": 1.0, 0: 1.08, 1: 1.41}
"""Epochs to the same accuracy, per epoch of ``pipe``: means of three graphs of Dorylus's authors (the worst 1.14, 1.58)."""


@dataclass(frozen=True)
class Cluster:
    """Servers with functions of one size beside them."""

    server: Server
    num_servers: int
    memory_mb: int = 192
    num_intervals: int = 128  # of each server
    processor: str = "x86"
    weight_servers: tuple[Server, int] | None = None

    def __post_init__(self) -> None:
        if self.num_servers < 1 or self.num_intervals < 1:
            raise ConfigError(
                f"{self.num_servers} servers with {self.num_intervals} intervals each: expected one at least of both"
            )

    @property
    def cores(self) -> int:
        return self.server.vcpus


@dataclass(frozen=True)
class Task:
    """One step on one interval."""

    name: str
    is_tensor: bool
    core_s: float  # on one processor of a server
    flops: float = 0.0
    in_bytes: float = 0.0
    out_bytes: float = 0.0
    weight_bytes: float = 0.0  # come in too, once an epoch for each function
    scatter_s: float = 0.0  # of the server's link to other servers


def tasks_of(shape: Shape, cluster: Cluster, rates: Rates, ghosts: float | None = None) -> tuple[Task, ...]:
    """The tasks of an interval. ``ghosts``: other servers that read a row, on average; None = nodes lie at random."""
    if ghosts is None:
        ghosts = random_ghosts(shape.num_nodes, shape.num_edges, cluster.num_servers)
    total = cluster.num_servers * cluster.num_intervals
    rows, edges = shape.num_nodes / total, shape.num_gathered / total
    return tuple(_task(step, rows, edges, rates, ghosts) for step in steps(shape))


def _task(step: Step, rows: float, edges: float, rates: Rates, ghosts: float) -> Task:
    if not step.is_tensor:
        return Task(step.name, False, edges * step.edge_columns / rates.gather)
    return Task(
        step.name, True, rows * (step.flops - step.again_flops) / rates.server_flops, rows * step.flops,
        rows * step.in_bytes, rows * step.out_bytes + step.task_out_bytes, step.task_in_bytes,
        rows * ghosts * step.scattered_bytes / rates.scatter_bytes,
    )  # fmt: skip


def link_bytes(cluster: Cluster, rates: Rates) -> float:
    """Bytes a second between a server and its functions: the slowest of what was measured, its network and its thread."""
    return min(rates.server_bytes, rates.lease_bytes, float(cluster.server.network_gbit_s) * 1e9 / 8)


def bandwidth(num_functions: int, cluster: Cluster, rates: Rates) -> float:
    """b(n): bytes a second of one function while all of a server's functions send or receive."""
    return min(rates.function_bytes, link_bytes(cluster, rates) / max(num_functions, 1))


def received_bytes(task: Task, num_functions: int, cluster: Cluster) -> float:
    """What a task brings to a function, on average: weights only with the first of its kind in an epoch."""
    return task.in_bytes + task.weight_bytes * min(1.0, num_functions / cluster.num_intervals)


def service_s(
    task: Task, num_functions: int, cluster: Cluster, rates: Rates, *, streams: bool = True
) -> float:
    """tau(n): seconds that a function has a task for."""
    each = bandwidth(num_functions, cluster, rates)
    received, computed = (
        received_bytes(task, num_functions, cluster) / each,
        task.flops / rates.flops_of(cluster.memory_mb),
    )
    working = max(received, computed) if streams else received + computed
    return rates.latency_s + working + task.out_bytes / each


def rate_ceiling(tasks: Sequence[Task], cluster: Cluster, rates: Rates) -> float:
    """Tensor tasks a second of a server that no number of functions can pass."""
    tensor = _tensor(tasks)
    sent = sum(task.in_bytes + task.out_bytes for task in tensor) / len(tensor)  # weights kept from before
    return min(link_bytes(cluster, rates) / sent if sent else float("inf"), rates.leases)


def task_rate(
    tasks: Sequence[Task], num_functions: int, cluster: Cluster, rates: Rates, *, streams: bool = True
) -> float:
    """mu(n): tensor tasks a second that n functions of a server get done."""
    tensor = _tensor(tasks)
    mean = sum(service_s(task, num_functions, cluster, rates, streams=streams) for task in tensor) / len(
        tensor
    )
    return min(min(num_functions, cluster.num_intervals) / mean, rates.leases) if mean else rates.leases


def _tensor(tasks: Sequence[Task]) -> list[Task]:
    return [task for task in tasks if task.is_tensor]


@dataclass(frozen=True)
class Epoch:
    """What an epoch takes on one server; all take the same."""

    seconds: float
    graph_s: float  # of all its cores
    tensor_s: float  # of all its functions, or of all its cores
    scatter_s: float
    busy_s: float  # of its functions, each counted
    num_tasks: int  # on functions

    @property
    def tensor_share(self) -> float:
        """Of computing."""
        return self.tensor_s / (self.graph_s + self.tensor_s)


def epoch(
    tasks: Sequence[Task], cluster: Cluster, rates: Rates, num_functions: int = 0, *, mode: Mode = "pipe",
    streams: bool = True,
) -> Epoch:  # fmt: skip
    """T, and what it is made of."""
    _check_mode(mode)
    graph = tensor = scatter = seconds = most = busy = 0.0
    for part in _between_barriers(tasks):
        stages = [_stage(task, cluster, rates, num_functions, streams) for task in part]
        graph += sum(stage.work_s for stage in stages if not stage.is_tensor)
        tensor += sum(stage.work_s for stage in stages if stage.is_tensor)
        scatter += sum(stage.scatter_s for stage in stages)
        busy += sum(stage.busy_s for stage in stages)
        seconds_of, fill = _overlapped(stages, is_shared=num_functions == 0, overlaps=mode != "none")
        seconds, most = seconds + seconds_of + fill, max(most, fill)
    if isinstance(mode, int):
        longest = max(graph + tensor if num_functions == 0 else max(graph, tensor), scatter)
        seconds = min(seconds, longest + most)
    num_tasks = cluster.num_intervals * len(_tensor(tasks)) if num_functions else 0
    return Epoch(seconds, graph, tensor, scatter, busy, num_tasks)


def _check_mode(mode: Mode) -> None:
    is_known = mode >= 0 if isinstance(mode, int) else mode in ("pipe", "none")
    if not is_known:
        raise ConfigError(
            f"mode {mode!r}: expected pipe, none or the number of epochs that intervals may be ahead"
        )


def _between_barriers(tasks: Sequence[Task]) -> list[Sequence[Task]]:
    """Runs of tasks that begin with a graph operation: it waits for all intervals."""
    starts = sorted({0, *(at for at, task in enumerate(tasks) if not task.is_tensor)})
    return [tasks[a:b] for a, b in pairwise([*starts, len(tasks)])]


@dataclass(frozen=True)
class _Stage:
    is_tensor: bool
    work_s: float  # of all intervals of a server
    one_s: float  # of one interval
    scatter_s: float
    one_scatter_s: float
    busy_s: float


def _stage(task: Task, cluster: Cluster, rates: Rates, num_functions: int, streams: bool) -> _Stage:
    count = cluster.num_intervals
    if not task.is_tensor or num_functions == 0:
        one, busy, work = task.core_s, 0.0, count * task.core_s / min(cluster.cores, count)
    else:
        one = service_s(task, num_functions, cluster, rates, streams=streams)
        busy, work = count * one, max(count * one / min(num_functions, count), count / rates.leases)
    return _Stage(task.is_tensor, work, one, count * task.scatter_s, task.scatter_s, busy)


def _overlapped(stages: Sequence[_Stage], *, is_shared: bool, overlaps: bool) -> tuple[float, float]:
    """(seconds of what takes longest, seconds that one interval is in everything else). ``is_shared``: cores do both."""
    scatter, one_scatter = sum(s.scatter_s for s in stages), sum(s.one_scatter_s for s in stages)
    if is_shared:
        lanes = [(sum(s.work_s for s in stages), sum(s.one_s for s in stages))]
    else:
        lanes = [
            (
                sum(s.work_s for s in stages if s.is_tensor == kind),
                sum(s.one_s for s in stages if s.is_tensor == kind),
            )
            for kind in (False, True)
        ]
    lanes.append((scatter, one_scatter))
    if not overlaps:
        return sum(work for work, _ in lanes), 0.0
    longest = max(lanes)
    return longest[0], sum(one for _, one in lanes) - longest[1]


def gpu_epoch(shape: Shape, cluster: Cluster, rates: Rates, ghosts: float | None = None) -> Epoch:
    """An epoch on servers whose GPUs do all the computing, layer by layer."""
    if not (rates.gpu_gather and rates.gpu_flops and cluster.server.gpus):
        raise InputError(
            f"{cluster.server.name}: GPUs are not compared without servers that have them and their rates"
        )
    if ghosts is None:
        ghosts = random_ghosts(shape.num_nodes, shape.num_edges, cluster.num_servers)
    share = 1 / (cluster.num_servers * cluster.server.gpus)
    graph = sum(step.edge_columns for step in steps(shape)) * shape.num_gathered * share / rates.gpu_gather
    tensor = (
        sum(step.flops - step.again_flops for step in steps(shape))
        * shape.num_nodes
        * share
        / rates.gpu_flops
    )
    link = min(rates.scatter_bytes, float(cluster.server.network_gbit_s) * 1e9 / 8)
    sent = sum(step.scattered_bytes for step in steps(shape)) * shape.num_nodes * ghosts / cluster.num_servers
    return Epoch(graph + tensor + sent / link, graph, tensor, sent / link, 0.0, 0)


def outcome(
    name: str, found: Epoch, cluster: Cluster, prices: Prices, num_functions: int = 0, *, mode: Mode = "pipe",
    parks: bool = True,
) -> Outcome:  # fmt: skip
    """Time and cost of an epoch; where a mode needs more epochs, of as many as do the work of one.

    ``parks``: functions live through the epoch and are paid for waiting; otherwise each task is a start of its own.
    """
    servers = float(cluster.num_servers * cluster.server.dollars_per_s)
    if cluster.weight_servers is not None:
        kind, count = cluster.weight_servers
        servers += float(count * kind.dollars_per_s)
    dollars = found.seconds * servers
    if num_functions:
        table = prices.functions
        alive = num_functions * found.seconds if parks else found.busy_s
        requests = num_functions * found.seconds / table.limit_s if parks else found.num_tasks
        of_one = alive * float(table.dollars_per_s(cluster.memory_mb, cluster.processor))
        dollars += cluster.num_servers * (of_one + requests * float(table.dollars_per_request))
    ratio = EPOCHS_RATIO.get(mode, max(EPOCHS_RATIO.values()))
    return Outcome(name, ratio * found.seconds, ratio * dollars)


def little(
    tasks: Sequence[Task], cluster: Cluster, rates: Rates, most: int, *, streams: bool = True
) -> int | None:
    """Little's law: the fewest functions that keep up with a server's cores; None if no number up to ``most`` does."""
    graph = sum(task.core_s for task in tasks if not task.is_tensor) / cluster.cores
    wanted = len(_tensor(tasks)) / graph if graph else float("inf")
    for n in range(1, most + 1):
        if task_rate(tasks, n, cluster, rates, streams=streams) >= wanted:
            return n
    return None
