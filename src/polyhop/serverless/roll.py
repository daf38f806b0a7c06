"""The roll: the functions of a server, who is there, who asks for tasks, who is to leave. Nothing here waits or sends.

A function that says Hello is given a session; its leases are in the ledger. One whose connection is gone, or of which
nothing is heard though it has no lease in time, is lost: what it had leased is given to others. One whose leases have all
run out is stuck: it is let be, but does not count.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any

from polyhop.serverless.ledger import Ledger
from polyhop.serverless.mail import Came, Left
from polyhop.serverless.sealed import Sealer, Session

__all__ = ["Function", "Roll"]

_CALLS_S = 1.0  # between calls of the roll
_SILENT_S = 30.0  # nothing heard, and no lease in time: lost, though its connection stands


@dataclass
class Function:
    """A function as the post knows it."""

    name: str
    session: Session
    sealer: Sealer
    identity: bytes | None = None  # at the desk; None: it has not come there yet
    held: frozenset[tuple[int, int]] = frozenset()
    wishes: int = 0
    seen: float = 0.0
    is_leaving: bool = False  # it gets no more tasks
    is_dismissed: bool = False  # and has been told so


class Roll:
    """Of one server. News and whether there are wishes may be asked for by any thread; the rest is for the post's alone."""

    def __init__(self, ledger: Ledger[Any], clock: Callable[[], float]) -> None:
        self._ledger, self._clock = ledger, clock
        # Functions, when ``limit`` was last called; of those that are stuck all leases have run out.
        self.num_serving = self.num_stuck = 0
        self.functions: dict[str, Function] = {}  # by session
        self._wishing: deque[Function] = deque()
        self._news: queue.SimpleQueue[Came | Left] = queue.SimpleQueue()
        self._called = clock()

    def news(self) -> list[Came | Left]:
        """Functions that came or left since the last call, in order."""
        found = []
        while not self._news.empty():
            found.append(self._news.get())
        return found

    @property
    def has_wishes(self) -> bool:
        """Whether functions ask for more than there is."""
        return bool(self._wishing)

    def num_heard(self, within_s: float) -> int:
        """Functions heard of lately, or that wait for a task."""
        since = self._clock() - within_s
        return sum(each.seen >= since or each.wishes > 0 for each in list(self.functions.values()))

    def user(self, session: str, password: bytes) -> str | None:
        """The session, if that is its password."""
        function = self.functions.get(session)
        if function is not None and compare_digest(function.session.password.encode(), password):
            return function.session.name
        return None

    def come(self, name: str) -> None:
        """A function has said Hello."""
        self._news.put(Came(name))

    def turn_away(self, name: str, reason: str) -> None:
        """It came, but there is nothing left to do."""
        self._news.put(Left(name, False, reason))

    def enter(self, name: str) -> Function:
        """It is given a session."""
        session = Session.draw()
        made = Function(name, session, Sealer(session.key, is_server=True), seen=self._clock())
        self.functions[session.name] = made
        return made

    def wish(self, function: Function, held: Collection[tuple[int, int]]) -> None:
        """A function asks for a task; it holds the weights of these pieces and versions."""
        function.held = frozenset(held)
        function.wishes += 1
        self._wishing.append(function)

    def wisher(self) -> Function | None:
        """Whose wish is to be met next: the oldest, of functions that are here and stay."""
        while self._wishing:
            function = self._wishing[0]
            is_here = function.session.name in self.functions
            if is_here and function.wishes and not function.is_leaving:
                return function
            self._wishing.popleft()
        return None

    def meet(self) -> None:
        """The wish of the next has been met."""
        self._wishing.popleft().wishes -= 1

    def lose(self, name: str, why: Left | None = None) -> None:
        """A function is gone: its sessions end, and its leases run out."""
        known = [session for session, each in self.functions.items() if each.name == name]
        for session in known:
            del self.functions[session]
        if known:
            self._news.put(why or Left(name, True, "its connection is gone"))
        self._ledger.lose(name)

    def call(self, answers: Callable[[Function], bool]) -> None:
        """Call the roll, but not too often: functions that cannot be reached, or are silent for too long, are lost."""
        now = self._clock()
        if now - self._called < _CALLS_S:
            return
        self._called = now
        at_work = self._ledger.holders(now)
        for each in list(self.functions.values()):
            if each.identity is not None and not answers(each):
                self.lose(each.name)
            elif now - each.seen > _SILENT_S and each.name not in at_work:
                self.lose(each.name, Left(each.name, True, f"nothing was heard of it for {_SILENT_S:g} s"))

    def limit(self, alive: Collection[str], wanted: int) -> list[Function]:
        """Of the functions that are alive no more than so many stay; those that are stuck do not count.

        Returns those that are to leave from now on: idle ones first.
        """
        now = self._clock()
        at_work = self._ledger.holders(now)
        known = [each for each in self.functions.values() if each.identity is not None]
        here = [each for each in known if each.name in alive and not each.is_dismissed]
        stuck = [
            each
            for each in here
            if not each.wishes and each.name not in at_work and now - each.seen > self._ledger.terms.floor_s
        ]
        self.num_stuck = len(stuck)
        leaving = [each for each in here if each.is_leaving]
        serving = [each for each in here if not each.is_leaving and each not in stuck]
        self.num_serving = min(len(serving) + len(leaving), wanted)
        found = sorted(serving, key=lambda each: each.name in at_work)[: max(len(serving) - wanted, 0)]
        for each in found:
            each.is_leaving = True
        for each in leaving[: max(wanted - len(serving), 0)]:
            each.is_leaving = False
            self._wishing.extend([each] * each.wishes)
        return found

    def let_go(self, function: Function) -> bool:
        """Whether a function is to be told to end: once, if it is leaving and has nothing to do."""
        if not function.is_leaving or function.is_dismissed or self._ledger.has(function.name):
            return False
        function.is_dismissed = True
        return True
