"""Time sheets of functions: when each was first heard of, and how much of its life it worked. What they are paid for is
made of them and of what launchers saw (from when to when each ran).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

from polyhop.serverless.bill import FunctionTrace

__all__ = ["Timesheet", "Timesheets", "function_trace"]


@dataclass
class Timesheet:
    """Of one function, as its server heard it."""

    came_s: float | None = None  # Unix; None: it never said Hello
    busy_ms: float = 0.0
    num_tasks: int = 0


class Timesheets:
    """By name of function. One thread writes, any may read."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._sheets: dict[str, Timesheet] = {}
        self.busy_ms = 0.0  # of all functions
        self.num_tasks = 0

    def came(self, function: str) -> None:
        """It said Hello; of one that was started twice the first time counts."""
        sheet = self._sheets.setdefault(function, Timesheet())
        sheet.came_s = self._clock() if sheet.came_s is None else sheet.came_s

    def worked(self, function: str, busy_ms: float) -> None:
        """It brought a result; what it says of its time is believed if it is a time."""
        sheet, busy = self._sheets.setdefault(function, Timesheet()), busy_ms if busy_ms >= 0 else 0.0
        busy = busy if isfinite(busy) else 0.0
        sheet.busy_ms += busy
        sheet.num_tasks += 1
        self.busy_ms += busy
        self.num_tasks += 1

    @property
    def num_at_work(self) -> int:
        """Functions that have brought a result."""
        return sum(sheet.num_tasks > 0 for sheet in list(self._sheets.values()))

    def of(self, function: str) -> Timesheet:
        """An empty one of a function that was never heard of."""
        return self._sheets.get(function) or Timesheet()


def function_trace(
    sheet: Timesheet, start_s: float, end_s: float, memory_mb: int, limit_s: float
) -> FunctionTrace:
    """What a function that ran from ``start_s`` to ``end_s`` (Unix) is paid for; nothing beyond its limit.

    It got ready until it said Hello; one that never did, all the time. Microseconds are kept.
    """
    ran_ms = max(_ms(end_s) - _ms(start_s), 0.0)
    init_ms = ran_ms if sheet.came_s is None else min(max(_ms(sheet.came_s) - _ms(start_s), 0.0), ran_ms)
    begun = round(_ms(start_s) + init_ms, 3)
    ended = max(min(round(_ms(start_s) + ran_ms, 3), begun + 1000 * limit_s), begun)
    busy = min(round(sheet.busy_ms, 3), ended - begun)
    return FunctionTrace(begun, ended, round(init_ms, 3), memory_mb, busy, num_tasks=sheet.num_tasks)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
