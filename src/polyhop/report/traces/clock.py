"""One axis of time for all ranks and all lives of their processes: Unix times laid end to end, without the hours between.

Clocks of different hosts are believed: what they differ by is seen as a shift between their ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

__all__ = ["Clock"]

_GAP_S = 0.5  # is left of every gap


class Clock:
    """``at(unix)`` is seconds on the axis. ``intervals``: Unix times between which something ran."""

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        self.starts: list[float] = []  # of each stretch in which something ran
        self._stops: list[float] = []
        for start, stop in sorted(intervals):
            if self._stops and start <= self._stops[-1] + _GAP_S:
                self._stops[-1] = max(self._stops[-1], stop)
            else:
                self.starts.append(start)
                self._stops.append(stop)
        self._offsets, at = list[float](), 0.0
        for start, stop in zip(self.starts, self._stops, strict=True):
            self._offsets.append(at)
            at += stop - start + _GAP_S
        self.length_s = max(at - _GAP_S, 0.0)

    def at(self, unix: float) -> float:
        """Seconds since the first stretch began; a time in a gap is the end of the stretch before it."""
        which = max(bisect_right(self.starts, unix) - 1, 0)
        if not self.starts:
            return 0.0
        start, stop = self.starts[which], self._stops[which]
        return self._offsets[which] + min(max(unix - start, 0.0), stop - start)
