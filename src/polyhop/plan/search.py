"""The choice: of all predictions those that keep the limits, the fastest first; where none does, the nearest.

The mathematics are never changed by it: predictions of approximate ways are looked at only where the user allows them, and
an exact one that is as fast is preferred. Of two that are as good as equal the one that needs less memory is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from polyhop.errors import ConfigError
from polyhop.plan.prediction import Prediction

__all__ = ["NEAR", "NEEDS_PRICES", "Limits", "Ranked", "duration", "money", "rank", "size"]

NEEDS_PRICES = (
    "--budget needs prices: what these hosts cost is not known; give --cluster with dollars_per_hour, or leave the budget "
    "out"
)
NEAR = 1.02  # times the best: as good

_MOST_DIGITS = 17  # that tell two numbers apart
_OPTIONS = {"memory_bytes": "--memory", "dollars": "--budget", "seconds": "--deadline"}


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
    seconds: float = math.inf  # that all epochs train
    shares_host: bool = False  # device_bytes are a host's over its ranks: fewer of them have more
    num_epochs: int = 1

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "device_bytes", "host_bytes", "dollars", "seconds", "num_epochs"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not value > 0:
                told = f"{_OPTIONS[name]} {value}" if name in _OPTIONS else f"{name}={value!r}"
                raise ConfigError(f"{told}: expected a number above 0; leave it out for no limit")

    def broken(self, given: Prediction) -> list[str]:
        """What a prediction does not keep, in words; nothing: it fits."""
        found = []
        if not given.is_exact and not self.allows_approximate:
            found.append("approximate")
        if given.memory.needed > self.memory_bytes:
            needed, here = _apart(size, given.memory.needed, self.memory_bytes)
            found.append(f"needs {needed} a rank, {here} given")
        if given.memory.needed > self.device_bytes:
            needed, here = _apart(size, given.memory.needed, self.device_bytes)
            found.append(f"needs {needed} a rank, which has {here}")
        if given.memory.host > self.host_bytes:
            needed, here = _apart(size, given.memory.host, self.host_bytes)
            found.append(f"needs {needed} of the host a rank, {here} are there")
        if given.dollars is not None and given.dollars * self.num_epochs > self.dollars:
            needed, here = _apart(_money, given.dollars * self.num_epochs, self.dollars)
            found.append(f"costs {needed}, {here} given")
        if given.epoch_s * self.num_epochs > self.seconds:
            needed, here = _apart(duration, given.epoch_s * self.num_epochs, self.seconds)
            found.append(f"takes {needed}, {here} given")
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
    """Those that fit first, each group by time. ConfigError if there are none at all, or money counts and prices lack."""
    found = [Ranked(each, tuple(limits.broken(each)), limits.has_room(each)) for each in predictions]
    if not found:
        raise ConfigError("no strategy can train this model on this graph with these options")
    if math.isfinite(limits.dollars) and any(each.prediction.dollars is None for each in found):
        raise ConfigError(NEEDS_PRICES)
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


def size(num_bytes: float, digits: int = 2) -> str:
    """``1.2 GB``; ``digits``: as many at least."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= one:
            return f"{_with(num_bytes / one, digits)} {unit}"
    return f"{num_bytes:.0f} B" if math.isfinite(num_bytes) else "no limit"


def duration(seconds: float, digits: int = 2) -> str:
    """``1.2 s``, ``35 ms``, ``2 h 10 min``; with more ``digits`` in seconds."""
    if seconds >= 5400 and digits == 2:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    if seconds >= 120 and digits == 2:
        return f"{seconds / 60:.1f} min"
    return f"{_with(seconds, digits)} s" if seconds >= 1 else f"{1000 * seconds:.{max(3, digits)}g} ms"


def _money(dollars: float, digits: int = 2) -> str:
    """``$12.30``, ``$0.0205``."""
    return f"${dollars:.{max(2, digits - math.floor(math.log10(dollars)))}f}"


def money(dollars: float) -> str:
    """``12.3000``, ``0.0000123``: four places, or as many as show three digits."""
    return f"{dollars:.{max(4, 2 - math.floor(math.log10(dollars))) if dollars > 0 else 4}f}"


def _with(value: float, digits: int) -> str:
    """Of 1 or more, with so many digits and all before the point."""
    return f"{value:.{max(0, digits - len(str(int(value))))}f}"


def _apart(shown: Callable[[float, int], str], first: float, second: float) -> tuple[str, str]:
    """Both with as many digits as show that they differ."""
    found = ((shown(first, digits), shown(second, digits)) for digits in range(2, _MOST_DIGITS))
    return next((each for each in found if each[0] != each[1]), (repr(first), repr(second)))
