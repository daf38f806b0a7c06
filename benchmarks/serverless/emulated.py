"""Clusters that are not here, from what was measured here: rates for the event simulation, and what takes longest in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from benchmarks.serverless import limits
from polyhop.serverless.advice import Plan, make_plan
from polyhop.serverless.cluster import Cluster, Mode, Task, epoch, link_bytes, outcome, tasks_of
from polyhop.serverless.prices import Prices
from polyhop.serverless.rates import Rates
from polyhop.serverless.shapes import Shape
from polyhop.serverless.simulate import simulate
from polyhop.serverless.value import Outcome, Ratios, ratios

__all__ = ["ASSUMED", "Emulated", "emulate", "loads", "longest", "measured_rates", "servers_needed"]

CORE_MB = 1769  # of memory with which a function has a whole core
FUNCTION_BYTES, LATENCY_S, COLD_S = 1e8, 0.02, 0.5
ASSUMED = "assumed: 800 Mbit/s a function, 20 ms a lease, links of servers as in the price table"


def measured_rates(is_quick: bool, leases_per_s: float | None = None) -> Rates:
    """Of a core and a post of this machine; what needs a cloud is assumed."""
    repeats, tasks = (1, 20) if is_quick else (5, 200)
    dense = limits.flops(4096, 300, 64, repeats)
    gather = limits.gathered(100_000, 20 if is_quick else 60, 64, repeats)
    moved = limits.bytes_per_s(tasks)
    leases = leases_per_s or limits.leases(200, 2_000 if is_quick else 20_000).per_s
    return Rates(
        gather=gather, server_flops=dense, function_flops={CORE_MB: dense}, function_bytes=FUNCTION_BYTES,
        server_bytes=inf, scatter_bytes=moved, leases=leases, lease_bytes=moved, latency_s=LATENCY_S, cold_s=COLD_S,
        source=f"measured here: {dense / 1e9:.0f} Gflop/s and {gather / 1e9:.1f} G edge-columns/s of a core, "
        f"{moved / 1e6:.0f} MB/s and {leases:.0f} leases/s of a post; {ASSUMED}",
    )  # fmt: skip


def loads(tasks: Sequence[Task], cluster: Cluster, rates: Rates, num_functions: int) -> dict[str, float]:
    """Seconds of an epoch that each means of a server is at work, were it the only one that takes time."""
    tensor = [task for task in tasks if task.is_tensor]
    count = cluster.num_intervals
    sent = sum(task.in_bytes + task.out_bytes for task in tensor) * count
    flops = sum(task.flops for task in tensor) * count
    return {
        "graph operations": sum(task.core_s for task in tasks if not task.is_tensor) * count / cluster.cores,
        "products of functions": flops / rates.flops_of(cluster.memory_mb) / num_functions,
        "bytes of a post": sent / link_bytes(cluster, rates),
        "leases": len(tensor) * count / rates.leases,
        "rows between servers": sum(task.scatter_s for task in tasks) * count,
    }


def longest(found: dict[str, float]) -> str:
    """The means that takes longest, in words, with all the others."""
    told = ", ".join(
        f"{name} {seconds:.3g} s" for name, seconds in sorted(found.items(), key=lambda each: -each[1])
    )
    return f"{max(found, key=found.__getitem__)} bind ({told})"


def servers_needed(found: dict[str, float], num_servers: int, what: str) -> int:
    """So many that ``what`` takes no longer than what functions compute, whose number stays."""
    return max(1, ceil(num_servers * found[what] / found["products of functions"]))


@dataclass(frozen=True)
class Emulated:
    """A shape on a cluster, played through with the functions that a plan chose, and without any."""

    plan: Plan
    functions: Outcome
    cpu: Outcome
    loads: dict[str, float]

    @property
    def ratios(self) -> Ratios:
        return ratios(self.functions, self.cpu)


def emulate(
    shape: Shape, cluster: Cluster, rates: Rates, prices: Prices, mode: Mode, num_epochs: int = 3
) -> Emulated:
    """``num_epochs`` are played: with staleness they overlap."""
    plan = make_plan(shape, cluster, rates, prices, mode=mode)

    def played(n: int, one: Cluster, name: str) -> Outcome:
        tasks = tasks_of(shape, one, rates, plan.ghosts)
        seconds = simulate(tasks, one, rates, n, mode=mode, num_epochs=num_epochs).epoch_s
        found = replace(epoch(tasks, one, rates, n, mode=mode), seconds=seconds)
        return outcome(name, found, one, prices, n, mode=mode)

    best = plan.best
    tasks = tasks_of(shape, best.cluster, rates, plan.ghosts)
    return Emulated(
        plan, played(best.num_functions, best.cluster, "functions"), played(0, plan.cpu.cluster, "CPU only"),
        loads(tasks, best.cluster, rates, best.num_functions),
    )  # fmt: skip
