"""Close-ups: every span of a few epochs, read a second time from the bytes where they lie, as columns.

Which epochs: the first, the slowest, one of median length and the last.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from polyhop.report.traces.lines import pieces
from polyhop.report.traces.so_far import FLIGHT, IN_FLIGHT
from polyhop.report.traces.tally import RankTally

__all__ = ["Closeup", "Span", "choose_epochs", "read_closeup"]

_OWN_COLUMNS = frozenset({"kind", "name", "at", "seconds", "thread", "step", "epoch"})
_MOST_FLIGHTS = 8  # rows of what is in flight at the same time


@dataclass(frozen=True)
class Span:
    """One span, or an instant (``stop`` is ``start``); times are seconds since the attempt's origin."""

    track: str
    name: str
    start: float
    stop: float
    step: int  # -1 = none
    facts: str  # JSON of the rest
    depth: int = 0  # how many spans are around it


@dataclass
class Closeup:
    """An epoch of one rank. ``num_left_out``: spans beyond what was allowed."""

    attempt: int
    start: float
    stop: float
    spans: list[Span] = field(default_factory=list)
    num_left_out: int = 0


def choose_epochs(tally: RankTally) -> dict[int, str]:
    """Epoch numbers and why they are shown, ascending."""
    lengths = dict(zip(tally.epochs.number, tally.epochs.train_s(), strict=True))
    if not lengths:
        return {}
    ordered = sorted(lengths, key=lambda number: lengths[number])
    wanted = {
        "first": min(lengths),
        "median": ordered[len(ordered) // 2],
        "slowest": ordered[-1],
        "last": max(lengths),
    }
    chosen: dict[int, str] = {}
    for why, number in wanted.items():
        chosen[number] = f"{chosen[number]}, {why}" if number in chosen else why
    return dict(sorted(chosen.items()))


def read_closeup(tally: RankTally, number: int, most: int) -> Closeup | None:
    """Of an epoch (the last of that number), at most so many spans; None where this rank has none."""
    index = tally.epochs
    at = max((at for at, known in enumerate(index.number) if known == number), default=None)
    if at is None:
        return None
    found = Closeup(index.attempt[at], index.start[at], index.stop[at])
    reader = _Reader(found, index.first_attempt[at])
    for piece in pieces(tally.path, index.first_byte[at], index.last_byte[at]):
        for record in piece.records:
            reader.take(record)
    spans = sorted(reader.spans, key=lambda span: (span.start, -span.stop))
    found.num_left_out = max(len(spans) - most, 0)
    found.spans = _with_depths(spans[:most])
    return found


class _Reader:
    """Spans and instants that touch an epoch."""

    def __init__(self, closeup: Closeup, attempt: int) -> None:
        self._closeup, self._attempt = closeup, attempt
        self.spans: list[Span] = []
        self._leased: dict[Any, tuple[float, dict[str, Any]]] = {}

    def take(self, record: dict[str, Any]) -> None:
        try:
            if record["kind"] == "start":
                self._attempt += 1
            if max(self._attempt, 0) != self._closeup.attempt:
                return
            kind, name, start = record["kind"], record["name"], float(record["at"])
            stop = start + float(record.get("seconds", 0.0))
            is_outside = stop <= self._closeup.start or start >= self._closeup.stop
            if is_outside or kind not in ("span", "instant") or name == "epoch":
                return
            if name == "lease" and kind == "instant":
                self._leased[record["lease"]] = start, record
            elif name == "result" and kind == "instant":
                began, task = self._leased.pop(record["lease"])
                self._keep("task", FLIGHT, began, start, {**task, **record})
            else:
                track = FLIGHT if name in IN_FLIGHT or kind == "instant" else str(record["thread"])
                self._keep(str(name), track, start, stop, record)
        except (KeyError, TypeError, ValueError):
            return  # counted when it was read first

    def _keep(self, name: str, track: str, start: float, stop: float, record: dict[str, Any]) -> None:
        facts = {key: value for key, value in record.items() if key not in _OWN_COLUMNS}
        step = record.get("step", -1)
        told = json.dumps(facts, default=str) if facts else ""
        self.spans.append(Span(track, name, start, stop, step if isinstance(step, int) else -1, told))


def _with_depths(spans: Sequence[Span]) -> list[Span]:
    """In order of start, longest first: each with the number of spans of its track that are still running."""
    running: dict[str, list[float]] = {}
    found = []
    for span in spans:
        stops = running.setdefault(span.track, [])
        if span.track == FLIGHT:
            depth = _free_row(stops, span)
        else:
            while stops and stops[-1] < span.stop:
                stops.pop()
            depth = len(stops)
            stops.append(span.stop)
        found.append(Span(span.track, span.name, span.start, span.stop, span.step, span.facts, depth))
    return found


def _free_row(stops: list[float], span: Span) -> int:
    """The first row in which nothing is under way; the last one is shared."""
    for row, stop in enumerate(stops):
        if stop <= span.start:
            stops[row] = span.stop
            return row
    if len(stops) < _MOST_FLIGHTS:
        stops.append(span.stop)
        return len(stops) - 1
    return _MOST_FLIGHTS - 1
