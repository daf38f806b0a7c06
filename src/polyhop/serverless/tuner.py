"""How many functions a server should have, decided from what was seen: no clock, no thread, nothing started here.

What counts is value, 1 / (T x C): with n functions an epoch takes T(n) and costs T(n) (server + n x function). T was
measured for numbers that have been tried; for others it is what it was at the nearest one, changed by what the formula of
``cluster`` changes, fed with measured times:

    work(n) = tasks x max(leased x ceil(M / p n) / M, busy / min(n, cores))   M intervals, p tasks that a function has
    shape(n) = graph + work(n), or the longer of both; never below bytes / link
    T(n) = T(m) + shape(n) - shape(m)                                         m the nearest number that was tried

Beyond what was tried this is the best that may be; between two numbers that were, less. Guards: no more functions where no
task waits for one; none beyond what intervals, cores, link or the platform can use; a move must promise a gain, a larger
one after every move, so that moves end; what was measured long ago is forgotten; an epoch in which functions came, left or
died says nothing of a number, unless there are no others. Until one has been measured only queues are looked at: tasks that
pile up before functions while the server has nothing to gather ask for more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, inf
from statistics import median

__all__ = ["Bounds", "Decision", "Look", "Tuner"]

GAIN = 1.05  # of value that a move must promise
SURE = 1.3  # after a single look
DAMPING = 0.01  # more of it after every move
JUMP = 4  # times as many functions, or as few, in one move
IDLE = 0.1  # tasks that wait, on average, below which more functions have nothing to do
PILE = 2.0  # rounds of tasks that wait, before the first epoch has ended, from which on more are asked for
UNSTEADY, UNSTEADY_S = (
    3,
    10.0,
)  # looks in a row at functions that come and go, and seconds, before one is believed
FORGOTTEN = 30  # looks after which what was measured with another number does not count any more
KEPT = 5  # epochs of a number, whose median counts
MEMORY = 0.5  # weight of the newest look in rates


@dataclass(frozen=True)
class Bounds:
    """What may be, and what it costs."""

    start: int
    most: int
    intervals: int
    server_dollars_s: float
    function_dollars_s: float
    at_a_time: int = 1  # tasks that a function has: one that it computes, others on their way
    cores: float = inf  # that functions share
    link_bytes: float = inf  # a second, between the server and its functions


@dataclass(frozen=True)
class Look:
    """What was seen over some time, which is epochs from end to end, or part of the first."""

    seconds: float
    num_epochs: int
    num_functions: int
    num_tasks: int  # done
    leased_s: float  # from lease to result, of all of them
    busy_s: float  # that functions computed for them
    graph_s: float  # that the server gathered
    num_bytes: int = 0  # that crossed between the server and functions
    waiting: float | None = None  # tasks that waited for functions, on average; None: not known
    ready: float = 0.0  # graph operations that waited for the server
    is_steady: bool = True  # no function came, left or died


@dataclass(frozen=True)
class Decision:
    """A number of functions, and why."""

    num_functions: int
    reason: str


@dataclass
class _Rates:
    """Of an epoch; times of one task."""

    num_tasks: float = 0.0
    leased_s: float = 0.0
    busy_s: float = 0.0
    graph_s: float = 0.0
    num_bytes: float = 0.0
    is_known: bool = field(default=False)

    def see(self, look: Look) -> None:
        epochs, tasks = look.num_epochs, look.num_tasks
        self.num_tasks = self._mixed(self.num_tasks, tasks / epochs)
        self.leased_s = self._mixed(self.leased_s, look.leased_s / tasks)
        self.busy_s = self._mixed(self.busy_s, look.busy_s / tasks)
        self.graph_s = self._mixed(self.graph_s, look.graph_s / epochs)
        self.num_bytes = self._mixed(self.num_bytes, look.num_bytes / epochs)
        self.is_known = True

    def _mixed(self, old: float, new: float) -> float:
        return old + MEMORY * (new - old) if self.is_known else new


class Tuner:
    """``wanted`` is what was decided last; ``decisions`` are all of them."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.most = max(min(bounds.most, bounds.intervals), 1)
        self.wanted = min(max(bounds.start, 1), self.most)
        self.decisions = [Decision(self.wanted, "to begin with")]
        self._rates = _Rates()
        self._unsteady: list[float] = []  # seconds of looks in a row in which functions came and went
        self._tried: dict[int, deque[float]] = {}  # number -> seconds of epochs
        self._num_looks, self._looked = 0, dict[int, int]()

    def see(self, look: Look) -> Decision | None:
        """What follows from a look: another number, or None to stay. A look at nothing done says nothing."""
        if not look.num_tasks or look.seconds <= 0:
            return None
        is_known = look.is_steady and look.num_functions == self.wanted
        self._unsteady = [] if is_known else [*self._unsteady, look.seconds]
        is_usual = len(self._unsteady) >= UNSTEADY and sum(self._unsteady) >= UNSTEADY_S
        if not look.num_epochs or not (is_known or is_usual):
            return self._midway(look)
        self._unsteady = []
        self._rates.see(look)
        number = min(max(look.num_functions, 1), self.most)
        self._tried.setdefault(number, deque(maxlen=KEPT)).append(look.seconds / look.num_epochs)
        self._looked[number] = self._num_looks = self._num_looks + 1
        for old in [tried for tried in self._tried if self._looked[tried] <= self._num_looks - FORGOTTEN]:
            del self._tried[old]
        return self._by_value(number, look)

    def epoch_s(self, number: int) -> float:
        """T(n): measured, between what was measured, or hoped."""
        fewer = [tried for tried in self._tried if tried <= number]
        more = [tried for tried in self._tried if tried >= number]
        if not fewer or not more:
            return self._hoped(number, max(fewer) if fewer else min(more))
        low, high = max(fewer), min(more)
        below, above = median(self._tried[low]), median(self._tried[high])
        if low == high or below <= above:
            return above
        share = (1 / low - 1 / number) / (1 / low - 1 / high)
        feared, hoped = below + share * (above - below), max(self._hoped(number, low), above)
        return (feared + min(hoped, feared)) / 2

    def _hoped(self, number: int, near: int) -> float:
        """Beyond what was tried, the best that may be: the longer work hides the shorter, or neither hides the other, or
        (of fewer functions) something else takes so long that both fit into it."""
        base = median(self._tried[near])
        hopes = [base + self._shape(number, hides) - self._shape(near, hides) for hides in (True, False)]
        if number < near:
            return max(min(*hopes, self._shape(number, hides=False)), base)
        return max(min(hopes), base * min(self._work(number) / (self._work(near) or 1.0), 1.0))

    def value(self, number: int) -> float:
        """1 / (T(n) x C(n)), of an epoch."""
        seconds, bounds = self.epoch_s(number), self.bounds
        dollars_s = bounds.server_dollars_s + number * bounds.function_dollars_s
        return 1 / (seconds * seconds * (dollars_s or 1.0))  # what costs nothing is judged by its time

    def _work(self, number: int) -> float:
        """Of an epoch, seconds of so many functions."""
        rates, bounds = self._rates, self.bounds
        at_once = bounds.intervals / ceil(bounds.intervals / (bounds.at_a_time * number))
        computing = min(number, bounds.intervals, bounds.cores)
        return rates.num_tasks * max(rates.leased_s / at_once, rates.busy_s / computing)

    def _shape(self, number: int, hides: bool) -> float:
        """Of an epoch, what the number of functions matters to; ``hides``: the longer work hides the shorter."""
        graph_s, work_s = self._rates.graph_s, self._work(number)
        together = max(graph_s, work_s) if hides else graph_s + work_s
        return max(together, self._rates.num_bytes / self.bounds.link_bytes)

    def _by_value(self, now: int, look: Look) -> Decision | None:
        best = max(self._reach(now, look), key=lambda number: (self.value(number), -number))
        gain = self.value(best) / self.value(now)
        is_sure = gain >= SURE or len(self._tried[now]) > 1
        if best == now or not is_sure or gain < GAIN + DAMPING * (len(self.decisions) - 1):
            return None
        told = f"an epoch of {self.epoch_s(now):.3g} s would take {self.epoch_s(best):.3g} s"
        return self._move(best, f"{told}, worth {gain:.2f} times as much")

    def _reach(self, now: int, look: Look) -> Iterable[int]:
        """Numbers that may be chosen: more only where tasks wait."""
        has_use = look.waiting is None or look.waiting >= IDLE * now
        return range(max(now // JUMP, 1), (min(JUMP * now, self.most) if has_use else now) + 1)

    def _midway(self, look: Look) -> Decision | None:
        """Before an epoch has been measured."""
        bounds, busy_s = self.bounds, self.bounds.at_a_time * look.busy_s
        of_cores = ceil(bounds.cores * look.leased_s / busy_s) if busy_s and bounds.cores < inf else self.most
        number = min(JUMP * self.wanted, self.most, of_cores, ceil(bounds.intervals / bounds.at_a_time))
        if self._tried or look.num_functions != self.wanted or number <= self.wanted or look.waiting is None:
            return None
        if look.waiting < PILE * bounds.at_a_time * self.wanted or look.ready > look.waiting / JUMP:
            return None
        return self._move(number, f"{look.waiting:.0f} tasks wait in the first epoch")

    def _move(self, number: int, reason: str) -> Decision | None:
        if number == self.wanted:
            return None
        self.wanted = number
        self.decisions.append(Decision(number, reason))
        return self.decisions[-1]
