"""Signals to functions that are processes, at the moments that matter, and other faults of a platform; all are counted."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

__all__ = ["FAULTS", "Faults"]

FAULTS = ("before", "after", "hang", "slow", "wave", "throttle", "twice")
_SLOW_S = 2.5  # longer than a lease
_SIGNALS = {"wave": signal.SIGKILL, "before": signal.SIGKILL, "after": signal.SIGKILL, "hang": signal.SIGSTOP,
            "slow": signal.SIGSTOP}  # fmt: skip


@dataclass(frozen=True)
class _Kind:
    rate: float
    most: int


class Faults:
    """Of each kind, with a probability and at most so many:

    before, after    killed when it was given a task; when its result has come
    hang, slow       stopped when it was given a task: for good (the platform ends it at its limit), or for a while
    wave             of the first functions that are given a task, as many as asked for are killed
    throttle, twice  an invocation is refused; its event is delivered twice

    ``pids`` gives the processes of a function: two, if its event came twice. One that dies is struck no more, so what is
    counted was done.
    """

    def __init__(self, pids: Callable[[str], Sequence[int]], seed: int, **kinds: tuple[float, int]) -> None:
        assert set(kinds) <= set(FAULTS), kinds
        self._pids, self._kinds = pids, {name: _Kind(*given) for name, given in kinds.items()}
        self._rng, self._lock = random.Random(seed), threading.Lock()
        self._holders: dict[int, str] = {}
        self._struck: set[int] = set()
        self.counts: Counter[str] = Counter()

    def watch(self, post: Any) -> None:
        """Hear of leases and results; on the thread of the post."""
        ledger = post.ledger
        lease, commit = ledger.lease, ledger.commit

        def leased(function: str, now: float) -> Any:
            found = lease(function, now)
            if found is not None:
                self._holders[found[0].number] = function
                for kind in ("wave", "before", "hang", "slow"):
                    self._strike(kind, function)
            return found

        def committed(key: Any, number: int, now: float) -> Any:
            verdict = commit(key, number, now)
            self._strike("after", self._holders.get(number, ""))
            return verdict

        ledger.lease, ledger.commit = leased, committed

    def happens(self, kind: str) -> bool:
        """Whether a fault of this kind is due now; if so, it is counted."""
        given = self._kinds.get(kind)
        with self._lock:
            if given is None or self.counts[kind] >= given.most or self._rng.random() >= given.rate:
                return False
            self.counts[kind] += 1
            return True

    def _strike(self, kind: str, function: str) -> None:
        for pid in self._pids(function):
            if pid in self._struck or not self.happens(kind):
                continue
            self._struck.add(pid)
            _signal(pid, _SIGNALS[kind])
            if kind == "slow":
                going_on = threading.Timer(_SLOW_S, self._go_on, (pid,))
                going_on.daemon = True
                going_on.start()

    def _go_on(self, pid: int) -> None:
        _signal(pid, signal.SIGCONT)
        self._struck.discard(pid)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has ended by itself
        os.kill(pid, number)
