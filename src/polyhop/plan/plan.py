"""A plan: which way to train, with which numbers, what it is expected to take, and why. A value: printed, saved, obeyed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from pathlib import Path
from typing import Any

from polyhop.errors import ConfigError
from polyhop.plan.prediction import Prediction
from polyhop.plan.search import Limits, Ranked, duration, rank, size

__all__ = ["PLAN_FILE", "Plan", "make_plan", "read_plan"]

PLAN_FILE = "plan.json"
_VERSION = 2


@dataclass(frozen=True)
class Plan:
    """The first of ``ranked`` is taken."""

    ranked: tuple[Ranked, ...]
    num_ranks: int
    limits: Limits
    assumed: tuple[tuple[str, str], ...] = ()  # what the figures rest on
    alone: Prediction | None = None  # one process with all cores of a host
    asked: str = "auto"  # the strategy that was asked for
    partitioner: str | None = None  # that made the parts; None: whatever there is

    @property
    def chosen(self) -> Prediction:
        return self.ranked[0].prediction

    @property
    def fits(self) -> bool:
        """Whether the chosen way keeps all limits; else it is the nearest to them."""
        return self.ranked[0].fits

    @property
    def why(self) -> tuple[str, str]:
        """Two lines: what was chosen and what sets its pace; what else there was."""
        best = self.chosen
        sent = f", {size(best.sent_bytes)} sent by a rank" if best.sent_bytes else ""
        first = (
            f"{best.name}: {duration(best.epoch_s)} an epoch expected, {best.bound}; "
            f"{size(best.memory.needed)} a rank{sent}"
        )
        return first, self._others() or "nothing else can train so"

    def _others(self) -> str:
        told = [
            f"next {each.name} {duration(each.epoch_s)} ({each.epoch_s / max(self.chosen.epoch_s, 1e-12):.1f} x)"
            for each in self._next()
        ]
        if self.alone is not None and self.num_ranks > 1:
            told.append(f"one process with all cores {duration(self.alone.epoch_s)}")
        return "; ".join(told)

    def _next(self) -> list[Prediction]:
        """The best of another strategy, and where that is not the same, the second best of all."""
        fitting = [each.prediction for each in self.ranked[1:] if each.fits]
        other = next((each for each in fitting if each.strategy != self.chosen.strategy), None)
        found = fitting[:1]
        return found if other is None or other in found else [*found, other]

    @property
    def advice(self) -> list[str]:
        """What would have to change, where nothing fits; and what the user should know where something does."""
        if not self.fits:
            broken = " and ".join(self.ranked[0].why_not)
            return [f"nothing fits: the nearest is {self.chosen.name}, which {broken}", *self._changes()]
        if self.alone is not None and self.num_ranks > 1 and self.alone.epoch_s < 0.9 * self.chosen.epoch_s:
            return [
                f"one process would be faster here ({duration(self.alone.epoch_s)} an epoch): leave out --workers"
            ]
        return []

    def _changes(self) -> list[str]:
        found, best, limits = [], self.chosen, self.limits
        if best.memory.needed > limits.memory_bytes:
            found.append(f"give --memory {_rounded(best.memory.needed)}")
            least = min((each.prediction for each in self.ranked), key=lambda each: each.memory.needed)
            if least.memory.needed <= limits.memory_bytes and not least.is_exact:
                found.append(f"or --allow-approximate: {least.name} needs {size(least.memory.needed)}")
            found.append("or more ranks, a smaller --batch-size or smaller --fanout")
        if best.memory.needed > limits.device_bytes:
            found.append(
                f"devices of {_rounded(best.memory.needed)}, or more ranks, a smaller --batch-size or --fanout"
            )
        if best.memory.host > limits.host_bytes:
            found.append(f"hosts with {_rounded(best.memory.host)} for each rank, or more of them")
        if best.epoch_s * limits.num_epochs > limits.seconds:
            least_s = _up(best.epoch_s * limits.num_epochs)
            found.append(f"give --deadline {least_s} for {limits.num_epochs} epochs, or fewer epochs")
        if best.dollars is not None and best.dollars * limits.num_epochs > limits.dollars:
            found.append(f"give --budget {_up(best.dollars * limits.num_epochs)}, or fewer epochs")
        allowed = [each.prediction for each in self.ranked if each.why_not == ("approximate",)]
        if allowed and not limits.allows_approximate:
            best = min(allowed, key=lambda each: each.epoch_s)
            found.append(f"--allow-approximate: {best.name} would fit, {duration(best.epoch_s)} an epoch")
        return found

    def to_json(self) -> dict[str, Any]:
        limits = {
            "allows_approximate": self.limits.allows_approximate,
            "memory_bytes": _finite(self.limits.memory_bytes),
            "device_bytes": _finite(self.limits.device_bytes),
            "host_bytes": _finite(self.limits.host_bytes),
            "dollars": _finite(self.limits.dollars),
            "seconds": _finite(self.limits.seconds),
            "num_epochs": self.limits.num_epochs,
        }
        return {
            "version": _VERSION,
            "workers": self.num_ranks,
            "asked": self.asked,
            "partitioner": self.partitioner,
            "strategy": self.chosen.strategy,
            "options": dict(self.chosen.options),
            "fits": self.fits,
            "why": list(self.why),
            "advice": self.advice,
            "limits": limits,
            "assumed": [list(each) for each in self.assumed],
            "chosen": self.chosen.to_json(),
            "ranked": [
                each.prediction.to_json() | {"why_not": list(each.why_not), "has_room": each.has_room}
                for each in self.ranked
            ],
            "alone": None if self.alone is None else self.alone.to_json(),
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Plan:
        limits: dict[str, Any] = {
            name: math.inf if value is None else value for name, value in given["limits"].items()
        }
        return cls(
            tuple(
                Ranked(Prediction.from_json(each), tuple(each["why_not"]), each["has_room"])
                for each in given["ranked"]
            ),
            given["workers"],
            Limits(**limits),
            tuple((what, text) for what, text in given["assumed"]),
            None if given["alone"] is None else Prediction.from_json(given["alone"]),
            given["asked"],
            given["partitioner"],
        )


def make_plan(
    predictions: Iterable[Prediction],
    limits: Limits,
    num_ranks: int,
    *,
    asked: str = "auto",
    assumed: Sequence[tuple[str, str]] = (),
    alone: Prediction | None = None,
) -> Plan:
    """The plan that follows; ``asked``: a strategy, whose ways come first whatever others would take."""
    order = rank(predictions, limits)
    if asked != "auto":
        wanted = [each for each in order if each.prediction.strategy == asked]
        if not wanted:
            known = ", ".join(sorted({each.prediction.strategy for each in order}))
            raise ConfigError(
                f"strategy {asked!r} cannot train this model so on {num_ranks} ranks; these can: {known}"
            )
        order = wanted + [each for each in order if each.prediction.strategy != asked]
    return Plan(tuple(order), num_ranks, limits, tuple(assumed), alone, asked)


def read_plan(path: Path) -> Plan:
    """A plan that was saved; ConfigError if it is none."""
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        version = about["version"]
        if version == _VERSION:
            return Plan.from_json(about)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a plan of 'polyhop plan --out' ({error})") from error
    raise ConfigError(
        f"{path}: a plan of version {version}, expected {_VERSION} ('polyhop plan --out' makes one)"
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _rounded(num_bytes: float) -> str:
    """``13GB``: as the option takes it, rounded up."""
    unit, one = ("GB", 10**9) if num_bytes >= 1e9 else ("MB", 10**6)
    return f"{_up(num_bytes, one)}{unit}"


def _up(value: float, one: int = 1) -> str:
    """In units of ``one``, three digits that count, rounded up: given as an option, it is enough."""
    exact = Decimal(repr(float(value)))
    step = Decimal(1).scaleb(exact.adjusted() - 2)
    return f"{((exact / step).to_integral_value(ROUND_CEILING) * step / one).normalize():f}"
