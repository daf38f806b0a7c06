"""The choice: of all predictions those that keep the limits, the fastest first; where none does, the nearest.

The mathematics are never changed by it: predictions of approximate ways are looked at only where the user allows them, and
an exact one that is as fast is preferred. Of two that are as good as equal the one that needs less memory is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polyhop.errors import ConfigError
from polyhop.plan.prediction import Prediction

__all__ = ["NEAR", "Limits", "Ranked", "duration", "rank", "size"]

NEAR = 1.02  # times the best: as good


@dataclass(frozen=True)
class Limits:
    """What a plan must keep."""

    allows_approximate: bool = False
    memory_bytes: float = math.inf  # of a rank
    device_bytes: float = (
        math.inf
    )  # that a rank's device has, or its share of a host without any; whatever is allowed
    host_bytes: float = math.inf  # of a host for each of its ranks, beside their devices
    dollars: float = math.inf  # of the whole run
    seconds: float = math.inf  # of the whole run
    num_epochs: int = 1

    def broken(self, given: Prediction) -> list[str]:
        """What a prediction does not keep, in words; nothing: it fits."""
        found = []
        if not given.is_exact and not self.allows_approximate:
            found.append("approximate")
        if given.memory.needed > self.memory_bytes:
            found.append(f"needs {size(given.memory.needed)} a rank, {size(self.memory_bytes)} given")
        if given.memory.needed > self.device_bytes:
            found.append(f"needs {size(given.memory.needed)} a rank, which has {size(self.device_bytes)}")
        if given.memory.host > self.host_bytes:
            found.append(
                f"needs {size(given.memory.host)} of the host a rank, {size(self.host_bytes)} are there"
            )
        if given.dollars is not None and given.dollars * self.num_epochs > self.dollars:
            found.append(f"costs ${given.dollars * self.num_epochs:.2f}, ${self.dollars:.2f} given")
        if given.epoch_s * self.num_epochs > self.seconds:
            found.append(f"takes {duration(given.epoch_s * self.num_epochs)}, {duration(self.seconds)} given")
        return found

    def has_room(self, given: Prediction) -> bool:
        most = min(self.memory_bytes, self.device_bytes)
        return given.memory.needed <= most and given.memory.host <= self.host_bytes

    def excess(self, given: Prediction) -> float:
        """How many times over the limits, at the worst; 1 or less: inside them."""
        worst = given.memory.needed / min(self.memory_bytes, self.device_bytes)
        worst = max(worst, given.memory.host / self.host_bytes)
        if given.dollars is not None:
            worst = max(worst, given.dollars * self.num_epochs / self.dollars)
        return max(worst, given.epoch_s * self.num_epochs / self.seconds)


@dataclass(frozen=True)
class Ranked:
    """A prediction and why it is not taken; nothing: it could be."""

    prediction: Prediction
    why_not: tuple[str, ...] = ()

    has_room: bool = True  # in memory, whatever else is not kept

    @property
    def fits(self) -> bool:
        return not self.why_not


def rank(predictions: Iterable[Prediction], limits: Limits) -> list[Ranked]:
    """Those that fit first, each group by time. ConfigError if there are none at all."""
    found = [Ranked(each, tuple(limits.broken(each)), limits.has_room(each)) for each in predictions]
    if not found:
        raise ConfigError("no strategy can train this model on this graph with these options")
    fitting = sorted((each for each in found if each.fits), key=lambda each: each.prediction.epoch_s)
    others = sorted((each for each in found if not each.fits), key=lambda each: _distance(each, limits))
    return _preferred(fitting) + others


def _preferred(order: Sequence[Ranked]) -> list[Ranked]:
    """The first is exact if an exact one is as good, then the one that needs least memory."""
    if not order:
        return []
    good = [each for each in order if each.prediction.epoch_s <= NEAR * order[0].prediction.epoch_s]
    first = min(good, key=lambda each: (not each.prediction.is_exact, each.prediction.memory.most))
    return [first, *(each for each in order if each is not first)]


def _distance(each: Ranked, limits: Limits) -> tuple[bool, float, float]:
    """Ways that only need to be allowed come last; of the others the one that is least over the limits first."""
    is_allowed = each.prediction.is_exact or limits.allows_approximate
    return not is_allowed, max(1.0, limits.excess(each.prediction)), each.prediction.epoch_s


def size(num_bytes: float) -> str:
    """``1.2 GB``."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= one:
            value = num_bytes / one
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{num_bytes:.0f} B" if math.isfinite(num_bytes) else "no limit"


def duration(seconds: float) -> str:
    """``1.2 s``, ``35 ms``, ``2 h 10 min``."""
    if seconds >= 5400:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    if seconds >= 1:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{1000 * seconds:.3g} ms"
