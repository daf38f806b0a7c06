"""A plan: which way to train, with which numbers, what it is expected to take, and why. A value: printed, saved, obeyed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import ROUND_CEILING, Decimal
from pathlib import Path
from typing import Any

from polyhop.errors import ConfigError
from polyhop.plan.prediction import Prediction
from polyhop.plan.search import Limits, Ranked, duration, rank, size

__all__ = ["PLAN_FILE", "Plan", "Purpose", "make_plan", "read_plan"]

PLAN_FILE = "plan.json"
_VERSION = 3
_ON_WHOLE = ("halo", "pipeline", "serverless")  # strategies that train on the full graph


@dataclass(frozen=True)
class Purpose:
    """What a plan is for: this model on this graph, in these mini-batches."""

    graph: str
    num_nodes: int
    num_edges: int
    model: str
    num_layers: int
    hidden: int | None  # None: the model does not say
    num_neighbors: tuple[int, ...] | None  # None: the full graph
    batch_size: int | None = None  # of mini-batches
    heads: int | None = None  # of attention

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Purpose:
        fan_outs = given["num_neighbors"]
        return cls(**{**given, "num_neighbors": None if fan_outs is None else tuple(fan_outs)})


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
    purpose: Purpose | None = None  # None: not said

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
        is_whole = self.purpose is not None and self.purpose.num_neighbors is None
        smaller = "" if is_whole else ", a smaller --batch-size or smaller --fanout"
        if best.memory.needed > limits.memory_bytes:
            found.append(f"give --memory {_rounded(best.memory.needed)}")
            least = min((each.prediction for each in self.ranked), key=lambda each: each.memory.needed)
            if least.memory.needed <= limits.memory_bytes and not least.is_exact:
                found.append(f"or --allow-approximate: {least.name} needs {size(least.memory.needed)}")
            found.append(f"or more ranks{smaller}")
        if best.memory.needed > limits.device_bytes:
            found.append(
                f"fewer --workers on a host, for each of which it has {_rounded(best.memory.needed)}{smaller}"
                if limits.shares_host
                else f"devices of {_rounded(best.memory.needed)}, or more ranks{smaller}"
            )
        if best.memory.host > limits.host_bytes:
            found.append(f"hosts with {_rounded(best.memory.host)} for each rank, or more of them")
        if best.epoch_s * limits.num_epochs > limits.seconds:
            least_s = _up(best.epoch_s * limits.num_epochs)
            found.append(f"give --deadline {least_s} for {limits.num_epochs} epochs, or fewer epochs")
        if best.dollars is not None and best.dollars * limits.num_epochs > limits.dollars:
            found.append(f"give --budget {_up(best.dollars * limits.num_epochs)}, or fewer epochs")
        if self.alone is not None and self.num_ranks > 1 and not limits.broken(self.alone):
            found.append(f"leave out --workers: one process takes {duration(self.alone.epoch_s)} an epoch")
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
            "shares_host": self.limits.shares_host,
            "num_epochs": self.limits.num_epochs,
        }
        return {
            "version": _VERSION,
            "workers": self.num_ranks,
            "asked": self.asked,
            "partitioner": self.partitioner,
            "purpose": None if self.purpose is None else self.purpose.to_json(),
            "fits": self.fits,
            "why": list(self.why),
            "advice": self.advice,
            "limits": limits,
            "assumed": [list(each) for each in self.assumed],
            "chosen": _told(self.ranked[0]),
            "others": [_told(each) for each in self.ranked[1:]],
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
                for each in [given["chosen"], *given["others"]]
            ),
            given["workers"],
            Limits(**limits),
            tuple((what, text) for what, text in given["assumed"]),
            None if given["alone"] is None else Prediction.from_json(given["alone"]),
            given["asked"],
            given["partitioner"],
            None if given["purpose"] is None else Purpose.from_json(given["purpose"]),
        )


def make_plan(
    predictions: Iterable[Prediction],
    limits: Limits,
    num_ranks: int,
    *,
    asked: str = "auto",
    assumed: Sequence[tuple[str, str]] = (),
    alone: Prediction | None = None,
    purpose: Purpose | None = None,
) -> Plan:
    """The plan that follows; ``asked``: a strategy, whose ways come first whatever others would take."""
    order = rank(predictions, limits)
    if asked != "auto":
        wanted = [each for each in order if each.prediction.strategy == asked]
        if not wanted:
            known = ", ".join(sorted({each.prediction.strategy for each in order}))
            how = _how(asked, num_ranks, purpose)
            raise ConfigError(
                f"strategy {asked!r} cannot train this model so on {num_ranks} rank{'s' if num_ranks > 1 else ''}{how}; "
                f"these can: {known}"
            )
        order = wanted + [each for each in order if each.prediction.strategy != asked]
    return Plan(tuple(order), num_ranks, limits, tuple(assumed), alone, asked, purpose=purpose)


def _how(asked: str, num_ranks: int, purpose: Purpose | None) -> str:
    """What a strategy would need."""
    if num_ranks == 1 and asked != "single":
        return ": give --workers 2 or more"
    if purpose is None or (asked in _ON_WHOLE) == (purpose.num_neighbors is None):
        return ""
    return (
        ": it trains on the full graph, leave --fanout out"
        if asked in _ON_WHOLE
        else ": it trains on mini-batches, give --fanout, such as 15,10"
    )


def read_plan(path: Path) -> Plan:
    """A plan that was saved; ConfigError if it is none."""
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        version = about["version"]
        if version == _VERSION:
            return _checked(Plan.from_json(about))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{path}: not a plan of 'polyhop plan --out' ({error})") from error
    raise ConfigError(
        f"{path}: a plan of version {version}, expected {_VERSION} ('polyhop plan --out' makes one)"
    )


def _checked(plan: Plan) -> Plan:
    """Raises what saying it would raise: a value of a wrong kind is found before a run begins."""
    if type(plan.num_ranks) is not int or plan.num_ranks < 1:
        raise ValueError(f"workers {plan.num_ranks!r}")
    if type(plan.partitioner) not in (str, type(None)):
        raise TypeError(f"partitioner {plan.partitioner!r}")
    _check_purpose(plan.purpose)
    for each in plan.ranked:
        if not isinstance(each.prediction.options, dict) or not isinstance(each.prediction.strategy, str):
            raise TypeError(f"a way {each.prediction.strategy!r} with options {each.prediction.options!r}")
        plan.limits.broken(each.prediction)
    json.dumps(plan.to_json())
    return plan


def _check_purpose(given: Purpose | None) -> None:
    if given is None:
        return
    numbers = (given.num_nodes, given.num_edges, given.num_layers)
    if not all(type(each) is int for each in numbers):
        raise TypeError(f"sizes {numbers!r}")
    if [type(given.graph), type(given.model)] != [str, str]:
        raise TypeError(f"a graph {given.graph!r} and a model {given.model!r}")


def _told(each: Ranked) -> dict[str, Any]:
    return each.prediction.to_json() | {"why_not": list(each.why_not), "has_room": each.has_room}


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
