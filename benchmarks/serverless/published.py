"""What Dorylus's authors printed (OSDI 2021, tables 1, 3, 4 and 5), as it stands there, and what follows from it.

Costs are kept as text: how many digits were printed says how close anything can come. ``functions``: how many were alive on
average on each server; not printed, but what the printed costs leave for functions of 192 MB, rounded. Clusters of table 5
are not printed either: those here are the ones whose price fits, and None where none does.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

__all__ = [
    "HEADLINES",
    "MEMORY_MB",
    "TABLE_4",
    "TABLE_5",
    "Headline",
    "Run",
    "System",
    "Workload",
    "half_unit",
]

MEMORY_MB = 192


@dataclass(frozen=True)
class Run:
    """One cell of table 4: a cluster, seconds to the target accuracy, dollars as printed."""

    kind: str
    count: int
    seconds: float
    dollars: str
    functions: int = 0  # mean, of one server


@dataclass(frozen=True)
class Workload:
    """One row of table 4, with the ratios that its figures give: functions to CPU only, both to GPU."""

    model: str
    graph: str
    functions: Run
    cpu: Run
    gpu: Run
    speed: float  # of functions against CPU only
    value: float
    value_vs_gpu: float
    cpu_value_vs_gpu: float

    @property
    def name(self) -> str:
        return f"{self.model} {self.graph}"


def _row(
    model: str, graph: str, kind: str, count: int, *runs: tuple[float, str], functions: int,
    ratios: tuple[float, float, float, float],
) -> Workload:  # fmt: skip
    with_functions, cpu, gpu = runs
    return Workload(
        model, graph, Run(kind, count, *with_functions, functions=functions), Run(kind, count, *cpu),
        Run("p3.2xlarge", count, *gpu), *ratios,
    )  # fmt: skip


# model, graph, servers, then seconds and dollars: with functions, CPU only, GPU only
TABLE_4 = (
    _row("GCN", "Reddit-small", "c5.2xlarge", 2, (860.6, "0.20"), (1005.4, "0.19"), (162.9, "0.28"),
         functions=7, ratios=(1.17, 1.11, 0.27, 0.24)),
    _row("GCN", "Reddit-large", "c5n.2xlarge", 12, (1020.1, "1.69"), (1290.5, "1.85"), (324.9, "3.31"),
         functions=6, ratios=(1.27, 1.38, 0.62, 0.45)),
    _row("GCN", "Amazon", "c5n.2xlarge", 8, (512.7, "0.79"), (710.2, "0.68"), (385.3, "2.62"),
         functions=23, ratios=(1.39, 1.19, 2.49, 2.09)),
    _row("GCN", "Friendster", "c5n.4xlarge", 32, (1133.3, "13.8"), (1990.8, "15.3"), (1490.4, "40.5"),
         functions=45, ratios=(1.76, 1.95, 3.86, 1.98)),
    _row("GAT", "Reddit-small", "c5.2xlarge", 10, (496.3, "1.15"), (1270.4, "1.20"), (130.9, "1.11"),
         functions=44, ratios=(2.56, 2.67, 0.25, 0.10)),
    _row("GAT", "Amazon", "c5n.2xlarge", 12, (853.4, "2.67"), (2092.7, "3.01"), (1039.2, "10.60"),
         functions=45, ratios=(2.45, 2.76, 4.83, 1.75)),
)  # fmt: skip


@dataclass(frozen=True)
class System:
    """One row of table 5: time and cost to the target accuracy, and the cluster that the cost fits."""

    graph: str
    name: str
    seconds: float
    dollars: str
    cluster: tuple[str, int] | None


TABLE_5 = (
    System("Reddit-small", "Dorylus", 165.77, "0.045", None),  # servers are 0.031 of it, functions the rest
    System("Reddit-small", "Dorylus GPU only", 28.06, "0.052", None),  # two p3.2xlarge would be 0.048
    System("Reddit-small", "DGL sampling", 566.33, "0.480", ("p3.2xlarge", 1)),
    System("Reddit-small", "DGL not sampling", 33.64, "0.028", ("p3.2xlarge", 1)),
    System("Amazon", "Dorylus", 415.23, "0.654", None),
    System("Amazon", "Dorylus GPU only", 308.27, "2.096", ("p3.2xlarge", 8)),
    System("Amazon", "DGL sampling", 842.49, "5.728", ("p3.2xlarge", 8)),
    System("Amazon", "AliGraph", 1560.66, "1.498", ("c5n.2xlarge", 8)),
)


@dataclass(frozen=True)
class Headline:
    """A ratio that the paper or its readers quote: ``one`` against ``other`` in speed, saving or value."""

    graph: str
    one: str
    other: str
    of: str
    times: str  # as quoted


HEADLINES = (
    Headline("Amazon", "Dorylus", "AliGraph", "speed", "3.8"),
    Headline("Reddit-small", "Dorylus", "DGL sampling", "saving", "10.7"),
    Headline("Amazon", "Dorylus", "DGL sampling", "value", "17.8"),
    Headline("Amazon", "Dorylus", "AliGraph", "value", "8.6"),
    Headline("Reddit-small", "DGL not sampling", "Dorylus", "value", "7.9"),
)


def half_unit(printed: str) -> float:
    """Half of the last digit that was printed: what rounding may have taken or added."""
    exponent = Decimal(printed).as_tuple().exponent
    assert isinstance(exponent, int)
    return float(Decimal(1).scaleb(exponent) / 2)
