"""Which share of every slot of time each name had, over any length of time in one size of memory: when the slots are used
up, two become one.

Legend: n intervals, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Occupancy"]

_FIRST_S = 1e-3

Floats = NDArray[np.float64]


class Occupancy:
    """``seconds[name]`` float64 [S]: seconds that the name had in each slot of ``slot_s`` seconds, from time 0 on."""

    def __init__(self, num_slots: int = 4096) -> None:
        self.num_slots, self.slot_s = num_slots, _FIRST_S
        self.seconds: dict[str, Floats] = {}

    def add(self, name: str, starts: Sequence[float], stops: Sequence[float], signs: Sequence[int]) -> None:
        """Intervals (at least one), each added or taken away."""
        begin, end, sign = np.asarray(starts), np.asarray(stops), np.asarray(signs, dtype=np.float64)
        while end.max() >= self.num_slots * self.slot_s:
            self._halve()
        known = self.seconds.setdefault(name, np.zeros(self.num_slots))
        known += self._covered(begin, end, sign)

    def at_once(self, name: str) -> Floats:
        """[S]: how many of that name there were on average; of what a thread does, its share of the slot."""
        return np.maximum(self.seconds[name] / self.slot_s, 0.0)

    def _covered(self, begin: Floats, end: Floats, sign: Floats) -> Floats:
        """Seconds in each slot: an interval is all that follows its begin less all that follows its end."""
        steps = self._following(begin, sign) - self._following(end, sign)
        return np.cumsum(steps)[: self.num_slots] * self.slot_s

    def _following(self, times: Floats, sign: Floats) -> Floats:
        """[S + 1], to be summed up: of each slot, the share that follows the times."""
        slot, part = np.divmod(times / self.slot_s, 1.0)
        at, size = slot.astype(np.int64), self.num_slots + 1
        found = np.bincount(at, sign * (1.0 - part), size) + np.bincount(at + 1, sign * part, size)[:size]
        return np.asarray(found, dtype=np.float64)

    def _halve(self) -> None:
        self.slot_s *= 2
        for old in self.seconds.values():
            old[: self.num_slots // 2] = old.reshape(-1, 2).sum(axis=1)
            old[self.num_slots // 2 :] = 0.0
