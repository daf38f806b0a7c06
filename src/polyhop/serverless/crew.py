"""The crew: keeps as many functions alive as are wanted while there is work, and says which have gone.

A thread looks at the launcher some times a second. What a function that is gone had leased is given to others at once;
one that ends with work left is replaced. One whose leases have all run out is stuck: it may still bring its results, so it
is let be, but another is started beside it: not even functions that all hang hold a run up. Where fewer are wanted, those
that have nothing to do are told to end. Functions that fail as soon as they are started, one after another, end the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from polyhop.serverless.local import Ended
from polyhop.serverless.mail import Broken
from polyhop.serverless.post import Post

__all__ = ["Crew", "Launcher"]

_LOOKS_S = 0.1
_STUCK = 4  # functions that are made up for, per one that is wanted
_FAILURES = 20  # in a row, with nothing done between them, or
_WAVES = 3  # that died whole, where there are many functions


class Launcher(Protocol):
    """Has about n functions alive."""

    @property
    def alive(self) -> list[str]: ...

    def ensure(self, wanted: int) -> list[str]: ...

    def ended(self) -> list[Ended]: ...

    def close(self) -> list[Ended]: ...


class Crew:
    """``wanted`` says how many functions there should be, whenever it is asked."""

    def __init__(self, launcher: Launcher, post: Post, wanted: Callable[[], int]) -> None:
        self._launcher, self._post, self._wanted = launcher, post, wanted
        self.gone: list[Ended] = []
        self.started: dict[str, float] = {}  # Unix seconds, of those that have not gone
        self.num_replaced = 0
        self._is_closed = False
        self._in_a_row, self._done_then = 0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="crew", daemon=True)
        self._thread.start()

    @property
    def num_alive(self) -> int:
        return len(self._launcher.alive)

    def _run(self) -> None:
        while not self._stop.wait(_LOOKS_S):
            try:
                self._look()
            except Exception as error:
                self._post.inbox.put(Broken(f"functions cannot be started: {error}"))
                return

    def _look(self) -> None:
        for each in self._launcher.ended():
            self._went(each)
            self._post.lose(each.function)
            self.num_replaced += each.is_failure
            done = self._post.ledger.counts["ok"]
            self._in_a_row = self._in_a_row + 1 if each.is_failure and done == self._done_then else 0
            self._done_then = done
            most = max(_FAILURES, _WAVES * self._wanted())
            if self._in_a_row >= most:
                self._post.inbox.put(
                    Broken(
                        f"{most} functions ended with a failure before any had done a task: {each.said[-500:]}"
                    )
                )
                self._in_a_row = 0
        wanted = self._wanted()
        self._post.limit(frozenset(self._launcher.alive), wanted)
        if len(self._post.ledger):
            stuck = min(self._post.num_stuck, _STUCK * wanted)
            made = self._launcher.ensure(wanted + stuck)
            self.started |= dict.fromkeys(made, time.time())

    def _went(self, function: Ended) -> None:
        self.gone.append(function)
        self.started.pop(function.function, None)

    def close(self) -> None:
        """No more functions; those that wait for work have been told to end. A second time nothing is done."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop.set()
        self._thread.join(timeout=10)
        for each in self._launcher.close():
            self._went(each)
