"""The agenda of a server: graph operations that can run, and which of them is the next.

The least advanced goes first. Backward takes functions three times as long as forward, and the server as long: where
intervals need not wait for each other, half of them go ahead (a wave), so that gradients of the one half are computed while
the other gathers. What would read old rows waits for newer ones, as long as nobody loses by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

__all__ = ["Agenda", "Ready"]

_PRESSED = 0.5  # share of an epoch in graph operations above which a server does not wait for newer rows


class Ready(NamedTuple):
    """A graph operation that can run. Steps count through the chain and back."""

    epoch: int
    wave: int
    step: int
    number: int  # of the interval


class Agenda:
    """Of the intervals with these numbers. ``reads`` gives the epochs of the rows that an operation would read of others."""

    def __init__(
        self, numbers: Sequence[int], has_waves: bool, reads: Callable[[int, int], Iterable[int]], now: float
    ) -> None:
        self._numbers, self._has_waves, self._reads = numbers, has_waves, reads
        self._ready: list[Ready] = []
        self._looked, self._is_pressed = (now, 0.0), False

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, number: int, epoch: int, step: int) -> None:
        """An operation of an interval can run."""
        self._ready.append(Ready(epoch, self.wave(number), step, number))

    def remove(self, ready: Ready) -> None:
        self._ready.remove(ready)

    def wave(self, number: int) -> int:
        """0: the first half of the intervals, or all of them where there are no waves; 1: the second."""
        return int(self._has_waves and 2 * (number - self._numbers[0]) >= len(self._numbers))

    def chosen(self, lacks_work: bool) -> Ready | None:
        """The operation to run now: the least advanced, of one wave before the other. A server with time to spare runs only
        what reads no older rows than it would if it waited, unless functions lack work: there is nothing to gain."""
        hurries = self._is_pressed or lacks_work
        return min((each for each in self._ready if hurries or self._is_fresh(each)), default=None)

    def look_back(self, now: float, graph_s: float) -> None:
        """Whether graph operations (``graph_s``: in all so far) took most of the time since the last call."""
        then, before_s = self._looked
        self._looked = now, graph_s
        self._is_pressed = graph_s - before_s > _PRESSED * (now - then)

    def _is_fresh(self, ready: Ready) -> bool:
        return all(tag >= ready.epoch for tag in self._reads(ready.number, ready.step))
