"""Functions for tests: in threads of this process, over real sockets, with faults of every kind."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import zmq

from polyhop.serverless import function as honest
from polyhop.serverless import wire
from polyhop.serverless.channel import Channel
from polyhop.serverless.function import Order
from polyhop.serverless.local import Ended
from polyhop.serverless.secrets import Entry, KeyPair, guarded
from polyhop.serverless.stream import Arrivals

__all__ = ["FAULTS", "FaultyLauncher", "ThreadLauncher", "dialled", "entered"]

FAULTS = ("die before", "die after", "hang", "repeat", "late", "drop", "reorder")


def dialled(context: zmq.Context[Any], order: Order) -> zmq.Socket[bytes]:
    """A socket to the door of a server."""
    made = context.socket(zmq.DEALER)
    guarded(made, KeyPair(order.public, order.secret), Entry(order.address, order.server_public))
    made.setsockopt(zmq.LINGER, 0)
    made.connect(order.address)
    return made


def entered(context: zmq.Context[Any], order: Order) -> Channel:
    """A function's way to its server, as soon as that has answered."""
    hello = wire.Hello(order.job, order.function, wire.PROTOCOL, 1, 10_000)
    entry, own = Entry(order.address, order.server_public), KeyPair(order.public, order.secret)
    made = Channel(context, entry, own, hello)
    reason = made.enter(10.0)
    if reason is not None:
        made.close(0)
        raise RuntimeError(reason)
    return made


class ThreadLauncher:
    """Has about n functions alive, each a thread that runs ``serve(order, stop)``."""

    def __init__(self, order: Order, serve: Callable[[Order, threading.Event], None] | None = None) -> None:
        self._order, self._serve = order, serve or (lambda order, stop: self._honest(order))
        self._running: dict[str, threading.Thread] = {}
        self._failed: set[str] = set()
        self._stop = threading.Event()
        self.num_started = 0

    @staticmethod
    def _honest(order: Order) -> None:
        honest.work(order)

    @property
    def alive(self) -> list[str]:
        return [name for name, thread in self._running.items() if thread.is_alive()]

    def ensure(self, wanted: int) -> list[str]:
        made = []
        for _ in range(wanted - len(self.alive)):
            name = f"{self._order.function}-{self.num_started}"
            self.num_started += 1

            def run(order: Order) -> None:
                try:
                    self._serve(order, self._stop)
                except Exception:  # as a process that exits with a failure
                    self._failed.add(order.function)

            thread = threading.Thread(target=run, args=(replace(self._order, function=name),), daemon=True)
            self._running[name] = thread
            thread.start()
            made.append(name)
        return made

    def ended(self) -> list[Ended]:
        gone = [name for name, thread in self._running.items() if not thread.is_alive()]
        for name in gone:
            del self._running[name]
        return [Ended(name, int(name in self._failed), 0.0, 0.0) for name in gone]

    def close(self) -> list[Ended]:
        self._stop.set()
        for thread in self._running.values():
            thread.join(timeout=10)
        assert not self.alive, "a function's thread is left"
        return self.ended()


class FaultyLauncher(ThreadLauncher):
    """Functions that do at most some tasks, and of each, with a probability, what they should not."""

    def __init__(
        self,
        order: Order,
        *,
        seed: int,
        rate: float,
        silent: bool = True,
        kinds: tuple[str, ...] = FAULTS,
        late_s: float = 0.3,
        slow: Callable[[Any], float] = lambda key: 0.0,
    ):
        super().__init__(order, self._misbehave)
        self._rng, self._rate, self._kinds, self._silent = random.Random(seed), rate, kinds, silent
        self._lock, self._late_s, self._slow = threading.Lock(), late_s, slow
        self.counts: Counter[str] = Counter()

    def ended(self) -> list[Ended]:
        """Nobody tells of deaths: leases have to run out."""
        gone = super().ended()
        return [] if self._silent else gone

    def _drawn(self) -> str:
        with self._lock:
            fault = self._rng.choice(self._kinds) if self._rng.random() < self._rate else "none"
            self.counts[fault] += 1
            return fault

    def _misbehave(self, order: Order, stop: threading.Event) -> None:
        context = zmq.Context()
        channel: Channel | None = None
        weights, held, arrivals = honest._Weights(), list[Any](), Arrivals()
        try:
            channel = entered(context, order)
            channel.send(wire.pack(wire.Pull()))
            while not stop.is_set():
                if not channel.poll(0.05):
                    continue
                header, arrays = wire.unpack(channel.receive())
                if isinstance(header, wire.Stop):
                    return
                if not isinstance(header, wire.Task):
                    continue
                fault = self._drawn()
                if fault == "die before":
                    return
                program, known = weights.of(header, arrays)
                arrival = arrivals.begin(header, arrays)
                while not arrival.is_complete:
                    if stop.is_set() or not channel.poll(5.0):
                        return
                    more, block = wire.unpack(channel.receive())
                    if isinstance(more, wire.More):
                        arrivals.put(more, block)
                found, values = honest.run_task(
                    program, header.key.is_backward, arrival.rows(lambda are_there: None), known, header.wants,
                    header.options, num_rows=header.num_rows,
                )  # fmt: skip
                push = wire.pack(wire.Push(header.key, header.lease, (), 0.0, 0.0, values), found)
                if fault == "hang":
                    stop.wait(0.4)
                    return
                stop.wait(self._slow(header.key))
                if fault == "late":
                    stop.wait(self._rng.random() * 2 * self._late_s)
                if fault == "reorder":
                    held.append(push)  # goes after a later one
                elif fault != "drop":
                    channel.send(push)
                    for each in held:
                        channel.send(each)
                    held.clear()
                if fault == "repeat":
                    channel.send(push)
                if fault == "die after":
                    time.sleep(0.02)  # so that it leaves
                    return
                channel.send(wire.pack(wire.Pull(weights.names)))
        finally:
            if channel is not None:
                channel.close(100)
            context.term()
