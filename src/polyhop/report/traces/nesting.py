"""Spans of one thread, told as they end: how much of each was its own, and how much belonged to spans inside it.

A thread does one thing at a time, so its spans nest; the inner ones end, and are told, first.
"""

from __future__ import annotations

__all__ = ["Intervals", "Nesting"]

Intervals = tuple[list[float], list[float], list[int]]
"""Starts, stops and signs: an interval counts 1, or -1 where it is taken away."""

_MOST_OPEN = 1 << 16  # spans that wait for one around them; the oldest half is let go beyond


class Nesting:
    """Seconds per name since ``take``, and signed intervals since ``take_intervals``, whose sum is every name's own time."""

    def __init__(self) -> None:
        self._ended: list[tuple[float, float]] = []  # not inside another one so far
        self._own: dict[str, float] = {}
        self._whole: dict[str, float] = {}
        self._intervals: dict[str, Intervals] = {}

    def end(self, name: str, start: float, stop: float) -> None:
        """A span is over."""
        if name not in self._intervals:
            self._intervals[name] = [], [], []
        starts, stops, signs = self._intervals[name]
        starts.append(start)
        stops.append(stop)
        signs.append(1)
        ended, inside = self._ended, 0.0
        while ended and ended[-1][0] >= start:
            inner_start, inner_stop = ended.pop()
            inside += inner_stop - inner_start
            starts.append(inner_start)
            stops.append(inner_stop)
            signs.append(-1)
        ended.append((start, stop))
        if len(ended) > _MOST_OPEN:
            del ended[: _MOST_OPEN // 2]
        length = stop - start
        self._own[name] = self._own.get(name, 0.0) + max(length - inside, 0.0)
        self._whole[name] = self._whole.get(name, 0.0) + length

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """(own seconds, seconds with what is inside) of each name."""
        found = self._own, self._whole
        self._own, self._whole = {}, {}
        return found

    def take_intervals(self) -> dict[str, Intervals]:
        """Of each name: its spans, less the spans inside them."""
        found, self._intervals = self._intervals, {}
        return found
