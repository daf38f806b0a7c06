"""Section ``money``: the published costs and ratios, computed again from clusters, prices and times.

``table4_error``: computed cost against printed cost, relative, the worst of the 18 cells of table 4. Where half a unit of
the last digit is more than 1 % (0.20, 0.19, 0.28) a cost within it counts as right; those cells are named. Costs of the six
rows with functions need how many were alive, which is not printed: it is taken from the cost itself, rounded to whole
functions, so these cells show only that the bill hangs together. Any machine will do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.harness import Figure
from benchmarks.serverless.published import (
    HEADLINES,
    MEMORY_MB,
    TABLE_4,
    TABLE_5,
    Headline,
    Run,
    System,
    Workload,
    half_unit,
)
from polyhop.serverless.prices import Prices, load_prices
from polyhop.serverless.value import Outcome, Ratios, functions_cost, ratios, servers_cost

__all__ = ["Cell", "cell", "cells", "headline", "run", "system_cell", "workload_ratios"]

AIM = 0.01


@dataclass(frozen=True)
class Cell:
    """A printed cost and what its inputs give."""

    name: str
    computed: float
    printed: str

    @property
    def relative(self) -> float:
        return abs(self.computed / float(self.printed) - 1)

    @property
    def is_coarse(self) -> bool:
        """Whether what was printed cannot be met within the aim by rounding alone."""
        return half_unit(self.printed) / float(self.printed) > AIM

    @property
    def error(self) -> float:
        """Relative; 0 where the print is coarse and rounding explains all of it."""
        if self.is_coarse and abs(self.computed - float(self.printed)) <= half_unit(self.printed):
            return 0.0
        return self.relative


def cell(name: str, run: Run, prices: Prices) -> Cell:
    """Servers for the time, and the functions that were alive."""
    computed = servers_cost(prices.server(run.kind), run.count, run.seconds)
    computed += functions_cost(prices, MEMORY_MB, run.count * run.functions, run.seconds)
    return Cell(name, computed, run.dollars)


def cells(prices: Prices) -> list[Cell]:
    """All of table 4."""
    return [
        cell(f"{row.name} {way}", one, prices)
        for row in TABLE_4
        for way, one in (("functions", row.functions), ("CPU", row.cpu), ("GPU", row.gpu))
    ]


def system_cell(system: System, prices: Prices) -> Cell | None:
    """A cost of table 5 from its cluster, where one is known."""
    if system.cluster is None:
        return None
    kind, count = system.cluster
    computed = servers_cost(prices.server(kind), count, system.seconds)
    return Cell(f"{system.graph} {system.name}", computed, system.dollars)


def workload_ratios(row: Workload) -> tuple[float, float, float, float]:
    """(speed and value against CPU only, value against GPU, CPU's value against GPU) from what was printed."""
    functions, cpu, gpu = (
        Outcome(row.name, one.seconds, float(one.dollars)) for one in (row.functions, row.cpu, row.gpu)
    )
    to_cpu: Ratios = ratios(functions, cpu)
    return to_cpu.speed, to_cpu.value, ratios(functions, gpu).value, ratios(cpu, gpu).value


def headline(quoted: Headline) -> float:
    """The ratio that a quoted one stands for."""
    found = {
        system.name: Outcome(system.name, system.seconds, float(system.dollars))
        for system in TABLE_5
        if system.graph == quoted.graph
    }
    result: float = getattr(ratios(found[quoted.one], found[quoted.other]), quoted.of)
    return result


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Errors of both tables, and of the ratios."""
    prices = load_prices()
    found = cells(prices)
    for each in found:
        told = "printed too coarsely for 1 %" if each.is_coarse else ""
        print(
            f"  {each.name:27} printed {each.printed:>6}  computed {each.computed:8.4f}  off {100 * each.relative:5.2f} %  "
            f"{told}".rstrip(),
            flush=True,
        )
    coarse = ", ".join(f"{each.name} {100 * each.relative:.1f} %" for each in found if each.is_coarse)
    worst = max(found, key=lambda each: each.error)
    yield Figure(
        "table4_error", worst.error, "off",
        f"worst of 18: {worst.name}; within half a unit of the last digit, not counted: {coarse}", at_most=AIM,
    )  # fmt: skip
    off = {
        f"{row.name} {what}": abs(made - printed)
        for row in TABLE_4
        for what, made, printed in zip(
            ("speed", "value", "value vs GPU", "CPU's value vs GPU"), workload_ratios(row),
            (row.speed, row.value, row.value_vs_gpu, row.cpu_value_vs_gpu), strict=True,
        )
    }  # fmt: skip
    most = max(off, key=off.__getitem__)
    yield Figure(
        "table4_ratio_error",
        off[most],
        "off",
        f"worst of 24 ratios, which have two digits: {most}",
        at_most=0.0051,
    )
    made_5 = [one for system in TABLE_5 if (one := system_cell(system, prices)) is not None]
    details = ", ".join(f"{one.name} {100 * one.relative:.2f} %" for one in made_5)
    yield Figure("table5_error", max(one.error for one in made_5), "off", f"clusters that fit: {details}")
    quoted = {
        f"{one.graph} {one.one} to {one.other} {one.of}": (headline(one), one.times) for one in HEADLINES
    }
    details = ", ".join(f"{name} {made:.2f} (quoted {times})" for name, (made, times) in quoted.items())
    yield Figure(
        "table5_headline_error", max(abs(made / float(times) - 1) for made, times in quoted.values()), "off", details,
        at_most=0.02,
    )  # fmt: skip
