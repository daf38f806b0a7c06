"""Virtual ranks that take the device in turns: one computes, alone, until it waits for a message; then another may.

Each rank has a clock that runs while it has the turn, and stops for messages. What the clock says is therefore what the rank
would take alone on its device, with links that take no time: the device is waited for whenever the clock is read and before
the turn goes on. Copies of messages, which links would make, lie in a rank's time on the device, without being waited for:
two passes over bytes that take a tenth of what the fastest links need. Memory that grows while a rank has the turn is the
rank's; messages under way are nobody's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from polyhop.comm import Turns

__all__ = ["DeviceTurns"]


class DeviceTurns(Turns):
    """For so many ranks, each of which runs inside ``taken``. Threads beside a rank's own need no turn."""

    def __init__(self, num_ranks: int, device: str) -> None:
        self.is_cuda = torch.device(device).type == "cuda"
        self._turn = threading.Lock()
        self._holder: int | None = None  # thread that has the turn
        self._since, self._before = 0.0, 0  # when it took it; bytes that there were
        self._seconds = [0.0] * num_ranks
        self._held, self._most = [0] * num_ranks, [0] * num_ranks  # bytes of each rank

    @contextmanager
    def taken(self, rank: int) -> Iterator[None]:
        """All that a rank does."""
        self._take()
        try:
            yield
        finally:
            self._leave(rank)

    @contextmanager
    def waiting(self, rank: int) -> Iterator[None]:
        if self._holder != threading.get_ident():
            yield
            return
        self._leave(rank)
        try:
            yield
        finally:
            self._take()

    @contextmanager
    def moving(self, rank: int) -> Iterator[None]:
        if self._holder != threading.get_ident() or not self.is_cuda:
            yield
            return
        self._note(rank)
        try:
            yield
        finally:
            self._begin_noting()

    def now(self, rank: int) -> float:
        """Seconds on the rank's clock, all that it asked of the device done. Its own thread asks."""
        self._wait()
        return self._seconds[rank] + time.perf_counter() - self._since

    def most_bytes(self, rank: int) -> int:
        """Of the device's memory, that the rank held at once; 0 where there is no such memory."""
        return self._most[rank]

    def _take(self) -> None:
        self._turn.acquire()
        self._holder = threading.get_ident()
        self._begin_noting()
        self._since = time.perf_counter()

    def _leave(self, rank: int) -> None:
        self._wait()
        self._seconds[rank] += time.perf_counter() - self._since
        self._note(rank)
        self._holder = None
        self._turn.release()

    def _begin_noting(self) -> None:
        if self.is_cuda:
            self._before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    def _note(self, rank: int) -> None:
        """Bytes that came and went since noting began are the rank's."""
        if self.is_cuda:
            most = torch.cuda.max_memory_allocated() - self._before
            self._most[rank] = max(self._most[rank], self._held[rank] + most)
            self._held[rank] += torch.cuda.memory_allocated() - self._before

    def _wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()
