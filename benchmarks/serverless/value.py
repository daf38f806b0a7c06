"""Section ``value``: whether functions are worth their money, on emulated clusters and in a race against a sampling rival.

value_vs_cpu_only_*      Dorylus's six rows of table 4 (its graphs' shapes, its servers, its mode): an epoch with as many
                         functions as the planner chooses over one without, value = 1 / (time x cost), played through with
                         rates that were measured here on one core. Beside it what the paper printed
figure10_order           1 where with rates fitted to the paper functions without overlap are slower than CPU only, and with
                         it faster, as its figure 10a has it
serverless_vs_macro_*    two ranks here, same graph, model and target (validation accuracy of exact training, less a point):
                         seconds of ``macro``, which samples, over those of ``serverless``; and dollars
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.harness import Figure, busy_cores
from benchmarks.serverless.emulated import Emulated, emulate, longest, measured_rates
from benchmarks.serverless.published import MEMORY_MB, TABLE_4, Workload
from benchmarks.serverless.rival import race
from polyhop.serverless.advice import says
from polyhop.serverless.cluster import Cluster, Mode, tasks_of
from polyhop.serverless.prices import Prices, load_prices
from polyhop.serverless.rates import PUBLISHED, Rates
from polyhop.serverless.shapes import PAPER, Shape
from polyhop.serverless.simulate import simulate

__all__ = ["cluster_of", "figure10", "mode_of", "run", "shape_of"]


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Emulated clusters, the order of figure 10a, and the race."""
    prices, load = load_prices(), busy_cores()
    rates = measured_rates(is_quick)
    print(f"  {rates.source}; load before {load:.1f} cores", flush=True)
    for row in TABLE_4:
        found = _best(row, rates, prices)
        name = row.name.lower().replace(" ", "_").replace("-", "_")
        print(f"  {row.name:17} {found.ratios.value:.2f} (paper {row.value}): {says(found.plan)}", flush=True)
        yield Figure(f"value_vs_cpu_only_{name}", found.ratios.value, "x", _told(row, found, rates, prices))
    yield figure10(prices)
    yield from race(prices, is_quick=is_quick)


def shape_of(row: Workload) -> Shape:
    return replace(PAPER[row.graph.lower()], model=row.model.lower())


def cluster_of(row: Workload, prices: Prices, memory_mb: int = MEMORY_MB) -> Cluster:
    return Cluster(prices.server(row.cpu.kind), row.cpu.count, memory_mb)


def mode_of(row: Workload) -> Mode:
    """As the paper ran it."""
    return "pipe" if row.graph == "Reddit-large" else 0


def _best(row: Workload, rates: Rates, prices: Prices) -> Emulated:
    """Of functions of the paper's size and of a whole core, those of more value."""
    sizes = (MEMORY_MB, prices.functions.mb_per_vcpu)
    made = [
        emulate(shape_of(row), cluster_of(row, prices, size), rates, prices, mode_of(row)) for size in sizes
    ]
    return max(made, key=lambda each: each.ratios.value)


def _told(row: Workload, found: Emulated, rates: Rates, prices: Prices) -> str:
    best, against = found.plan.best, found.ratios
    fitted = emulate(shape_of(row), cluster_of(row, prices), PUBLISHED, prices, mode_of(row))
    return (
        f"paper {row.value}; {best.cluster.num_servers} {best.cluster.server.name}, {best.num_functions} functions of "
        f"{best.cluster.memory_mb} MB each, {mode_of(row)}: epoch {found.functions.seconds:.3g} s against "
        f"{found.cpu.seconds:.3g} s, {against.speed:.2f} x as fast for {1 / against.saving:.2f} x the dollars; "
        f"{longest(found.loads)}; with rates fitted to the paper {fitted.ratios.value:.2f}; {says(found.plan)}"
    )


def figure10(prices: Prices) -> Figure:
    """Amazon on eight servers with 90 functions each, rates as fitted."""
    row = next(row for row in TABLE_4 if row.name == "GCN Amazon")
    cluster = replace(cluster_of(row, prices), num_intervals=120)
    tasks = tasks_of(shape_of(row), cluster, PUBLISHED)

    def epoch_s(mode: Mode, functions: int) -> float:
        return simulate(tasks, cluster, PUBLISHED, functions, mode=mode, num_epochs=2).epoch_s

    cpu, none, pipe, stale = epoch_s("pipe", 0), epoch_s("none", 90), epoch_s("pipe", 90), epoch_s(0, 90)
    is_so = none > cpu > pipe
    return Figure(
        "figure10_order", float(is_so), "",
        f"GCN Amazon, s an epoch: CPU only {cpu:.1f}, functions without overlap {none:.1f}, pipe {pipe:.1f}, staleness 0 "
        f"{stale:.1f} (paper, sums of tasks without overlap: CPU 10.3, functions 14.3)", at_least=1,
    )  # fmt: skip
