"""What one life of a rank's process did since its last epoch ended: seconds of every thread, messages under way, bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from polyhop.report.traces.nesting import Intervals, Nesting

__all__ = ["ASIDE", "FLIGHT", "IN_FLIGHT", "SoFar"]

FLIGHT = "in flight"
"""The track of what goes on beside threads."""
IN_FLIGHT = frozenset({"communicate", "task"})
"""Spans that are not a thread's time: messages under way, and tasks that functions have."""
ASIDE = ("evaluate", "checkpoint")
"""Spans that are no training."""

_MOST_THREADS = 12  # with tracks of their own
_MOST_LEASED = 100_000
_REST = "more threads"


class SoFar:
    """Told of records one by one; ``take_epoch`` gives the sums and begins the next epoch."""

    def __init__(self) -> None:
        self._threads: dict[str, Nesting] = {}
        self._flight_s: Counter[str] = Counter()
        self._flights: dict[str, Intervals] = {}
        self._leased: dict[Any, float] = {}
        self._layers: Counter[str] = Counter()
        self._sent: dict[str, dict[str, float]] = {"traffic": {}, "evaluation": {}}
        self._sent_before: dict[str, dict[str, float]] = {}
        self.memory: dict[str, float] = {}

    def end_span(self, thread: str, name: str, start: float, stop: float) -> None:
        """A thread ended a span."""
        nesting = self._threads.get(thread)
        if nesting is None:
            nesting = self._threads.setdefault(
                thread if len(self._threads) < _MOST_THREADS else _REST, Nesting()
            )
        nesting.end(name, start, stop)

    def end_flight(self, name: str, start: float, stop: float) -> None:
        """A message has arrived, a task has its result."""
        starts, stops, signs = self._flights.setdefault(name, ([], [], []))
        starts.append(start)
        stops.append(stop)
        signs.append(1)
        self._flight_s[name] += stop - start  # type: ignore[assignment]  # seconds

    def lease(self, number: Any, at: float) -> None:
        """A function has a task."""
        self._leased[number] = at
        if len(self._leased) > _MOST_LEASED:  # leases that ran out have no result
            del self._leased[next(iter(self._leased))]

    def result(self, number: Any, at: float) -> None:
        """Its result is here."""
        began = self._leased.pop(number, None)
        if began is not None:
            self.end_flight("task", began, at)

    def count_bytes(self, layer: str, num_bytes: float) -> None:
        """They left at a layer, in a direction: "1 forward"."""
        self._layers[layer] += num_bytes  # type: ignore[assignment]

    def count_sent(self, name: str, kinds: Mapping[str, Any]) -> None:
        """All that was sent since the process began ("traffic"), and what of it evaluation sent ("evaluation")."""
        self._sent[name] = {kind: float(value) for kind, value in kinds.items()}

    def take_epoch(self) -> dict[Any, float]:
        """Sums by (own | whole, thread, name), (flight, name), (bytes | evaluation, kind) and (layer, "1 forward")."""
        values: dict[Any, float] = {("flight", name): s for name, s in self._flight_s.items()}
        for thread, nesting in self._threads.items():
            own, whole = nesting.take()
            values |= {("own", thread, name): seconds for name, seconds in own.items()}
            values |= {("whole", thread, name): seconds for name, seconds in whole.items()}
        values |= {("layer", layer): num_bytes for layer, num_bytes in self._layers.items()}
        for name, key in (("traffic", "bytes"), ("evaluation", "evaluation")):
            before = self._sent_before.get(name, {})
            values |= {(key, kind): v - before.get(kind, 0.0) for kind, v in self._sent[name].items()}
        self._sent_before = dict(self._sent)
        self._flight_s.clear()
        self._layers.clear()
        return values

    def take_intervals(self) -> dict[str, dict[str, Intervals]]:
        """Of each track and name: intervals since the last call."""
        found = {thread: nesting.take_intervals() for thread, nesting in self._threads.items()}
        found[FLIGHT], self._flights = self._flights, {}
        return found
