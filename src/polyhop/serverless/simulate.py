"""An epoch on servers and functions, played through event by event: what the formulas of ``cluster`` leave out.

Each server has cores for graph operations, a pool of functions that ask for leases one after another, a link that its
functions share evenly (no function above its own limit), a thread that hands out leases in turn, and a link to the other
servers. The interval that is least advanced goes first. Barriers are global: ``pipe`` before every graph operation, ``none``
before every task; with staleness S an interval may begin epoch e once no interval anywhere is before e - S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from polyhop.errors import InputError
from polyhop.serverless.bill import FunctionTrace, ServerTrace, Trace
from polyhop.serverless.cluster import Cluster, Mode, Task, link_bytes, received_bytes
from polyhop.serverless.prices import Prices
from polyhop.serverless.rates import Rates

__all__ = ["Played", "simulate"]


@dataclass(frozen=True)
class Played:
    """Epochs that were played through."""

    seconds: float  # of all epochs
    num_epochs: int
    core_s: float  # of all cores, computing
    busy_s: tuple[float, ...]  # of each function
    cold_s: float
    num_leases: int
    num_events: int
    spread: int  # epochs between the most and the least advanced interval, at most

    @property
    def epoch_s(self) -> float:
        return self.seconds / self.num_epochs

    def traces(self, cluster: Cluster, prices: Prices) -> Iterator[Trace]:
        """What is billed: servers and functions that live to the end; a function that would live too long starts again."""
        end, limit = 1000 * self.seconds, 1000 * prices.functions.limit_s
        yield ServerTrace(cluster.server.name, 0, end, cluster.num_servers)
        if cluster.weight_servers is not None:
            kind, count = cluster.weight_servers
            yield ServerTrace(kind.name, 0, end, count, "weights")
        init = 1000 * self.cold_s
        for busy in self.busy_s:
            start, left = min(init, end), 1000 * busy
            while True:
                stop = min(end, start + limit)
                worked = min(left, stop - start)
                yield FunctionTrace(start, stop, init, cluster.memory_mb, worked, cluster.processor)
                left -= worked
                start = stop
                if start >= end:
                    break


def simulate(
    tasks: Sequence[Task], cluster: Cluster, rates: Rates, num_functions: int = 0, *, mode: Mode = "pipe",
    num_epochs: int = 1, streams: bool = True, is_cold: bool = False,
) -> Played:  # fmt: skip
    """Play epochs through. ``num_functions``: of each server, 0 = cores do tensor work; ``is_cold``: they start first."""
    if num_functions < 0 or num_epochs < 1:
        raise InputError(
            f"{num_functions} functions, {num_epochs} epochs: expected 0 or more functions, an epoch at least"
        )
    return _Run(tasks, cluster, rates, num_functions, mode, num_epochs, streams, is_cold).played()


Action = Callable[[], None]


class _Clock:
    """What happens next."""

    def __init__(self) -> None:
        self.now, self.num_events = 0.0, 0
        self._queue: list[tuple[float, int, Action]] = []

    def after(self, seconds: float, action: Action) -> None:
        self.num_events += 1
        heappush(self._queue, (self.now + seconds, self.num_events, action))

    def run(self) -> None:
        while self._queue:
            self.now, _, action = heappop(self._queue)
            action()


class _Shared:
    """A link shared evenly. Everyone has received the same since they all began: one number says who ends next."""

    def __init__(self, clock: _Clock, total: float, each: float) -> None:
        self.clock, self.total, self.each = clock, total, each
        self.given, self.at, self.version = (
            0.0,
            0.0,
            0,
        )  # bytes that one who was always there would have by now
        self.waiting: list[tuple[float, int, Action]] = []

    @property
    def rate(self) -> float:
        return min(self.each, self.total / len(self.waiting))

    def send(self, num_bytes: float, action: Action) -> None:
        if num_bytes <= 0 or (self.each == inf and self.total == inf):
            self.clock.after(0.0, action)
            return
        self._advance()
        self.version += 1
        heappush(self.waiting, (self.given + num_bytes, self.version, action))
        self._next()

    def _advance(self) -> None:
        if self.waiting:
            self.given += self.rate * (self.clock.now - self.at)
        self.at = self.clock.now

    def _next(self) -> None:
        if self.waiting:
            left, version = max(0.0, self.waiting[0][0] - self.given), self.version
            self.clock.after(left / self.rate, lambda: self._ended(version))

    def _ended(self, version: int) -> None:
        if version != self.version:
            return  # someone came since: another event is on its way
        self.at, self.given = self.clock.now, self.waiting[0][0]
        self.version += 1
        done = []
        while self.waiting and self.waiting[0][0] <= self.given:
            done.append(heappop(self.waiting)[2])
        self._next()
        for action in done:
            action()


class _Line:
    """One after another."""

    def __init__(self, clock: _Clock) -> None:
        self.clock, self.free_at = clock, 0.0

    def take(self, seconds: float, action: Action) -> None:
        self.free_at = max(self.free_at, self.clock.now) + seconds
        self.clock.after(self.free_at - self.clock.now, action)


Place = tuple[int, int, int]
"""(epoch, task, interval): the least comes first."""


class _Server:
    def __init__(self, run: _Run, number: int) -> None:
        self.run, self.number = run, number
        clock, rates = run.clock, run.rates
        self.link = _Shared(clock, link_bytes(run.cluster, rates), rates.function_bytes)
        self.leases, self.scatter = _Line(clock), _Line(clock)
        self.free_cores = run.cluster.cores
        self.idle: list[int] = []  # functions
        self.on_cores: list[Place] = []
        self.on_functions: list[Place] = []

    def offer(self, place: Place) -> None:
        is_leased = self.run.num_functions and self.run.tasks[place[1]].is_tensor
        heappush(self.on_functions if is_leased else self.on_cores, place)

    def work(self) -> None:
        """Begin whatever can begin."""
        run = self.run
        while self.free_cores and self.on_cores:
            place = heappop(self.on_cores)
            self.free_cores -= 1
            seconds = run.tasks[place[1]].core_s
            run.core_s += seconds
            run.clock.after(seconds, lambda place=place: self._computed(place))  # type: ignore[misc]
        while self.idle and self.on_functions:
            _Lease(self, self.idle.pop(), heappop(self.on_functions))

    def _computed(self, place: Place) -> None:
        self.free_cores += 1
        self.finish(place)

    def finish(self, place: Place) -> None:
        """Rows that others read leave before the task counts as done."""
        seconds = self.run.tasks[place[1]].scatter_s
        if seconds:
            self.scatter.take(seconds, lambda: self.run.done(self, place))
            self.work()
        else:
            self.run.done(self, place)


class _Lease:
    """A task on a function: asked for, received, computed, sent back."""

    def __init__(self, server: _Server, function: int, place: Place) -> None:
        self.server, self.function, self.place = server, function, place
        run = server.run
        self.task, self.began, self.missing = run.tasks[place[1]], run.clock.now, 2
        run.num_leases += 1
        server.leases.take(1 / run.rates.leases, lambda: run.clock.after(run.rates.latency_s, self._receive))

    def _receive(self) -> None:
        run = self.server.run
        self.server.link.send(received_bytes(self.task, run.num_functions, run.cluster), self._received)
        if run.streams:
            run.clock.after(self.task.flops / run.flops, self._half)

    def _received(self) -> None:
        run = self.server.run
        if run.streams:
            self._half()
        else:
            run.clock.after(self.task.flops / run.flops, self._reply)

    def _half(self) -> None:
        self.missing -= 1
        if not self.missing:
            self._reply()

    def _reply(self) -> None:
        self.server.link.send(self.task.out_bytes, self._sent)

    def _sent(self) -> None:
        run = self.server.run
        run.busy_s[self.function] += run.clock.now - self.began
        self.server.idle.append(self.function)
        self.server.finish(self.place)


class _Run:
    def __init__(
        self, tasks: Sequence[Task], cluster: Cluster, rates: Rates, num_functions: int, mode: Mode, num_epochs: int,
        streams: bool, is_cold: bool,
    ) -> None:  # fmt: skip
        self.tasks, self.cluster, self.rates, self.mode = tuple(tasks), cluster, rates, mode
        self.num_functions, self.num_epochs, self.streams = num_functions, num_epochs, streams
        self.flops = rates.flops_of(cluster.memory_mb)
        self.cold_s = rates.cold_s if is_cold and num_functions else 0.0
        self.clock = _Clock()
        self.busy_s = [0.0] * (num_functions * cluster.num_servers)
        self.core_s, self.num_leases, self.spread, self.slowest, self.fastest = 0.0, 0, 0, 0, 0
        self.total = cluster.num_servers * cluster.num_intervals
        self.num_done: dict[tuple[int, int], int] = {}
        self.held: dict[tuple[int, int], list[tuple[_Server, Place]]] = {}
        self.servers = [_Server(self, number) for number in range(cluster.num_servers)]

    def played(self) -> Played:
        for server in self.servers:
            for interval in range(self.cluster.num_intervals):
                server.offer((0, 0, interval))
            ready = list(range(server.number * self.num_functions, (server.number + 1) * self.num_functions))
            self.clock.after(self.cold_s, lambda server=server, ready=ready: self._warm(server, ready))  # type: ignore[misc]
            server.work()
        self.clock.run()
        return Played(
            self.clock.now, self.num_epochs, self.core_s, tuple(self.busy_s), self.cold_s, self.num_leases,
            self.clock.num_events, self.spread,
        )  # fmt: skip

    def _warm(self, server: _Server, functions: list[int]) -> None:
        server.idle.extend(reversed(functions))
        server.work()

    def done(self, server: _Server, place: Place) -> None:
        """A task ended: what follows it starts, or waits for the others; what waited for it starts."""
        epoch, at, interval = place
        self.num_done[epoch, at] = self.num_done.get((epoch, at), 0) + 1
        is_last = at + 1 == len(self.tasks)
        follows = (epoch + 1, 0, interval) if is_last else (epoch, at + 1, interval)
        is_all = self.num_done[epoch, at] == self.total
        if is_all and is_last:
            self.slowest = epoch + 1
        if follows[0] < self.num_epochs:
            if self._may(follows):
                self._begin(server, follows)
            else:
                self.held.setdefault(follows[:2], []).append((server, follows))
        if is_all:
            self._release()
        server.work()

    def _may(self, place: Place) -> bool:
        epoch, at, _ = place
        if isinstance(self.mode, int):
            return at > 0 or epoch <= self.slowest + self.mode
        if at == 0:
            return self.slowest >= epoch
        if self.mode == "pipe" and self.tasks[at].is_tensor:
            return True
        return self.num_done.get((epoch, at - 1), 0) == self.total

    def _begin(self, server: _Server, place: Place) -> None:
        self.fastest = max(self.fastest, place[0])
        self.spread = max(self.spread, self.fastest - self.slowest)
        server.offer(place)

    def _release(self) -> None:
        for key in [key for key, held in self.held.items() if self._may(held[0][1])]:
            touched = {}
            for server, place in self.held.pop(key):
                self._begin(server, place)
                touched[server.number] = server
            for server in touched.values():
                server.work()
