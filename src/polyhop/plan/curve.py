"""How a training scales: what an epoch takes on more and more devices, every strategy by its best way there.

speed-up     seconds on one device / seconds
efficiency   speed-up / devices
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polyhop.plan.prediction import Prediction
from polyhop.plan.search import Ranked

__all__ = ["DEVICES", "Curve", "Point", "curves_of"]

DEVICES = tuple(1 << power for power in range(11))
"""1 to 1,024."""


@dataclass(frozen=True)
class Point:
    """One number of devices."""

    num_ranks: int
    name: str  # of the way
    seconds: float  # of an epoch
    speed_up: float
    efficiency: float
    dollars: float | None  # of an epoch
    fits: bool  # memory


@dataclass(frozen=True)
class Curve:
    """Of a strategy, by its best exact way on each number of devices; or of the way that was chosen, where it is none."""

    strategy: str
    is_exact: bool
    is_chosen: bool
    points: tuple[Point, ...]

    @property
    def label(self) -> str:
        return (
            self.strategy
            + ("" if self.is_exact else ", approximate")
            + (" (chosen)" if self.is_chosen else "")
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"label": self.label}


def curves_of(found: Mapping[int, Sequence[Ranked]], chosen: Prediction) -> list[Curve]:
    """``found``: of every number of devices all ways; that of one process is where all curves begin."""
    kinds = {(each.prediction.strategy, True) for ways in found.values() for each in ways}
    kinds = {kind for kind in kinds if kind[0] != "single"} | {(chosen.strategy, chosen.is_exact)}
    first = min(found)
    alone = min(each.prediction.epoch_s for each in found[first])
    curves = []
    for strategy, is_exact in sorted(
        kinds, key=lambda kind: (kind != (chosen.strategy, chosen.is_exact), kind)
    ):
        points = []
        for num_ranks in sorted(found):
            best = _best(found[num_ranks], strategy, is_exact=is_exact)
            if best is not None:
                points.append(_point(best, num_ranks, alone * first))
        is_chosen = (strategy, is_exact) == (chosen.strategy, chosen.is_exact)
        curves.append(Curve(strategy, is_exact, is_chosen, tuple(points)))
    return curves


def _best(ways: Sequence[Ranked], strategy: str, *, is_exact: bool) -> Ranked | None:
    """Those that fit the memory before those that do not; one process stands for all strategies."""
    among = [
        each
        for each in ways
        if each.prediction.strategy == "single"
        or (each.prediction.strategy == strategy and each.prediction.is_exact == is_exact)
    ]
    return min(among, key=lambda each: (not each.has_room, each.prediction.epoch_s), default=None)


def _point(best: Ranked, num_ranks: int, alone: float) -> Point:
    one = best.prediction
    speed_up = alone / max(one.epoch_s, 1e-12)
    return Point(num_ranks, one.name, one.epoch_s, speed_up, speed_up / num_ranks, one.dollars, best.has_room)
