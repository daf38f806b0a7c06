"""Every way that section ``grid`` timed, as a table: ``results/plan-ways.csv``, of the last whole run.

python -m benchmarks.plan.ways OUT.svg      draws what was foreseen against what was measured
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS

__all__ = ["TABLE", "Timed", "draw", "read", "write"]

TABLE = RESULTS / "plan-ways.csv"
COLOURS = {
    "data": "#4878a8",
    "macro": "#e09030",
    "split": "#5fae85",
    "pushpull": "#b05a7a",
    "halo": "#7a6fb0",
    "pipeline": "#9a9a9a",
}


@dataclass(frozen=True)
class Timed:
    """One way that was foreseen and trained."""

    case: str
    num_ranks: int
    mbit: float | None
    name: str
    strategy: str
    is_exact: bool
    foreseen_s: float
    measured_s: float
    foreseen_bytes: float
    measured_bytes: float
    memory_bytes: float  # as foreseen
    load: float

    @property
    def group(self) -> tuple[str, int, float | None]:
        return self.case, self.num_ranks, self.mbit

    @property
    def ratio(self) -> float:
        return self.measured_s / self.foreseen_s


def write(found: Iterable[Timed], path: Path = TABLE) -> None:
    """In place of what was there."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [each.name for each in fields(Timed)])
        writer.writeheader()
        for each in found:
            writer.writerow({name: _short(value) for name, value in asdict(each).items()})


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def read(path: Path = TABLE) -> list[Timed]:
    with path.open(newline="") as file:
        return [_timed(row) for row in csv.DictReader(file)]


def _timed(row: Mapping[str, str]) -> Timed:
    given: dict[str, Any] = dict(row)
    for name in ("foreseen_s", "measured_s", "foreseen_bytes", "measured_bytes", "memory_bytes", "load"):
        given[name] = float(row[name])
    mbit = float(row["mbit"]) if row["mbit"] else None
    return Timed(
        **{**given, "num_ranks": int(row["num_ranks"]), "mbit": mbit, "is_exact": row["is_exact"] == "True"}
    )


def draw(found: Iterable[Timed], out: Path) -> None:
    """A point for each way, on logarithmic scales; the band is a quarter off."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "polyhop"
    from matplotlib import pyplot

    points = list(found)
    figure, axes = pyplot.subplots(figsize=(7, 5.2))
    ends = (0.8e3 * min(each.measured_s for each in points), 1.25e3 * max(each.measured_s for each in points))
    axes.fill_between(ends, [0.75 * end for end in ends], [1.25 * end for end in ends], color="#eeeeee")
    axes.plot(ends, ends, color="#888888", linewidth=0.8)
    for strategy, colour in COLOURS.items():
        for is_exact, marker in ((True, "o"), (False, "^")):
            these = [each for each in points if each.strategy == strategy and each.is_exact == is_exact]
            label = strategy if is_exact else f"{strategy}, approximate"
            if these:
                axes.scatter(
                    [1e3 * each.measured_s for each in these],
                    [1e3 * each.foreseen_s for each in these],
                    s=14, color=colour, marker=marker, label=label, linewidths=0, alpha=0.8,
                )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set_xlabel("milliseconds of an epoch, measured")
    axes.set_ylabel("foreseen")
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


if __name__ == "__main__":
    draw(read(), Path(sys.argv[1]))
