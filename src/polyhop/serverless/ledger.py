"""The task ledger: what is to be done, who was given it until when, and what was done. Nothing here waits or sends.

    offered -> leased (attempt 1, 2, ...) -> done

A task is given out again when its lease runs out, ahead of all that waits. The first result counts, whoever brings it, also
after its lease has run out: inputs and weights of all attempts are the same, so are the results. Every later one is refused
(``DUPLICATE``), as is one for a lease that was never given, or was another task's (``UNKNOWN``): so each task counts exactly
once, whatever dies, hangs, repeats or comes late.

A lease lasts ``max(floor, ratio x the mean time of its kind)``; until one of a kind has been done, ``cold``. So a first wave
of functions that dies whole is noticed too. Times are given by the caller: seconds of any clock that does not go back.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from polyhop.serverless.wire import TaskKey

__all__ = ["DUPLICATE", "OK", "UNKNOWN", "Lease", "Ledger", "Terms"]

OK, DUPLICATE, UNKNOWN = "ok", "duplicate", "unknown"
W = TypeVar("W")


@dataclass(frozen=True)
class Terms:
    """How long leases last."""

    floor_s: float = 0.5
    ratio: float = 5.0  # of the mean time of the kind
    cold_s: float = 10.0  # where nothing is known of the kind yet
    memory: float = 0.05  # weight of the newest time in the mean


@dataclass(frozen=True)
class Lease:
    """A task, given to a function until a time."""

    number: int
    key: TaskKey
    function: str
    attempt: int  # 1, 2, ...
    given: float
    deadline: float


@dataclass
class _Entry(Generic[W]):
    """A task that is not done."""

    work: W
    attempts: int = 0
    leases: set[int] = field(default_factory=set)  # that have not run out
    waits: bool = True


class Ledger(Generic[W]):
    """Tasks of one server; ``W`` is what a function needs for one."""

    def __init__(self, terms: Terms | None = None) -> None:
        self.terms = terms or Terms()
        self.counts: Counter[str] = Counter()
        self.num_waiting = 0  # tasks that nobody has
        self.leased_s = 0.0  # from lease to result, of all that counted
        self._open: dict[TaskKey, _Entry[W]] = {}
        self._queue: list[tuple[int, TaskKey]] = []  # (0: again, 1: new; key)
        self._leases: dict[int, Lease] = {}  # all that may still bring a result
        self._deadlines: list[tuple[float, int]] = []
        self._means: dict[tuple[int, bool], float] = {}
        self._next = 1
        self._done_epoch: dict[int, set[TaskKey]] = {}

    def __len__(self) -> int:
        """Tasks that are not done."""
        return len(self._open)

    @property
    def num_leased(self) -> int:
        """Tasks that somebody has."""
        return len(self._open) - self.num_waiting

    def offer(self, key: TaskKey, work: W) -> None:
        """A task that can be done now. Each is offered once."""
        if key in self._open or key in self._done_epoch.get(key.epoch, ()):
            raise ValueError(f"{key} was offered before")
        self._open[key] = _Entry(work)
        heapq.heappush(self._queue, (1, key))
        self.num_waiting += 1
        self.counts["offered"] += 1

    def lease(self, function: str, now: float) -> tuple[Lease, W] | None:
        """The next task for a function: one whose lease ran out, else the least advanced; None: there is none."""
        while self._queue:
            _, key = heapq.heappop(self._queue)
            entry = self._open.get(key)
            if entry is None or not entry.waits:
                continue  # done meanwhile
            entry.waits, entry.attempts = False, entry.attempts + 1
            self.num_waiting -= 1
            made = Lease(self._next, key, function, entry.attempts, now, now + self.lease_s(key))
            self._next += 1
            entry.leases.add(made.number)
            self._leases[made.number] = made
            heapq.heappush(self._deadlines, (made.deadline, made.number))
            self.counts["leased"] += 1
            self.counts["again"] += made.attempt > 1
            return made, entry.work
        return None

    def lease_s(self, key: TaskKey) -> float:
        """How long a lease of a task lasts."""
        mean = self._means.get((key.piece, key.is_backward))
        return self.terms.cold_s if mean is None else max(self.terms.floor_s, self.terms.ratio * mean)

    def mean_s(self, key: TaskKey) -> float | None:
        """From lease to result, of a task's kind."""
        return self._means.get((key.piece, key.is_backward))

    def commit(self, key: TaskKey, number: int, now: float) -> tuple[str, W | None]:
        """(verdict, the task's work if this result counts)."""
        lease = self._leases.pop(number, None)
        if lease is None or lease.key != key:
            if lease is not None:
                self._leases[number] = lease
            verdict = DUPLICATE if self._was_done(key) else UNKNOWN
            self.counts[verdict] += 1
            return verdict, None
        entry = self._open.pop(key, None)
        if entry is None:
            self.counts[DUPLICATE] += 1
            return DUPLICATE, None
        kind, took = (key.piece, key.is_backward), now - lease.given
        self.num_waiting -= entry.waits
        self.leased_s += took
        before = self._means.get(kind)
        self._means[kind] = took if before is None else before + self.terms.memory * (took - before)
        self._done_epoch.setdefault(key.epoch, set()).add(key)
        self.counts[OK] += 1
        self.counts["late"] += now > lease.deadline
        return OK, entry.work

    def _was_done(self, key: TaskKey) -> bool:
        return key in self._done_epoch.get(key.epoch, ())

    def expire(self, now: float) -> list[Lease]:
        """Leases that have run out since the last call; their tasks wait again, ahead of others."""
        gone = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            if number in self._leases and self._run_out(self._leases[number]):
                gone.append(self._leases[number])
        return gone

    def lose(self, function: str) -> list[Lease]:
        """A function is gone: its leases run out now."""
        held = [lease for lease in self._leases.values() if lease.function == function]
        gone = [lease for lease in held if self._run_out(lease)]
        self.counts["lost"] += len(gone)
        return gone

    def holders(self, now: float) -> set[str]:
        """Functions that have a lease which has not run out."""
        return {lease.function for lease in self._leases.values() if lease.deadline > now}

    def has(self, function: str) -> bool:
        """Whether a function may still bring a result that counts."""
        return any(each.function == function and each.key in self._open for each in self._leases.values())

    def give_up(self, key: TaskKey, number: int) -> None:
        """A function says that it cannot: its lease runs out now."""
        lease = self._leases.get(number)
        if lease is not None and lease.key == key:
            self._run_out(lease)
            del self._leases[number]

    def _run_out(self, lease: Lease) -> bool:
        entry = self._open.get(lease.key)
        if entry is None or lease.number not in entry.leases:
            return False
        entry.leases.discard(lease.number)
        if not entry.leases and not entry.waits:
            entry.waits = True
            self.num_waiting += 1
            heapq.heappush(self._queue, (0, lease.key))
        self.counts["expired"] += 1
        return True

    def next_deadline(self) -> float | None:
        """When ``expire`` may have something to do."""
        while self._deadlines and self._deadlines[0][1] not in self._leases:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def forget(self, before_epoch: int) -> None:
        """Tasks of earlier epochs are not recognised any more: a result of one is unknown."""
        for epoch in [epoch for epoch in self._done_epoch if epoch < before_epoch]:
            del self._done_epoch[epoch]
        old = [
            n
            for n, lease in self._leases.items()
            if lease.key.epoch < before_epoch and lease.key not in self._open
        ]
        for number in old:
            del self._leases[number]
