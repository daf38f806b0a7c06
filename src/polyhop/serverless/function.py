"""The function: a short-lived worker that dials out to one server, asks for tasks, computes them and brings the results.

It keeps nothing that matters: weights it was sent (by version, to save bytes) and a connection. It may die, hang, or be
started twice at any moment. While it computes one task the next one is on its way (``prefetch`` wishes at a time), and so
are later rows of the one that it computes (``stream``). It asks for no more when its time is nearly up, when it is told to
stop, or when nothing came for ``idle_s``; rows that do not come by then are not waited for.

Run as ``python -m polyhop.serverless.function`` with its order (JSON, one line) on standard input; one that is ``tied``
ends as soon as its standard input does, so that it does not outlive its server, wherever it runs. On other platforms
``work`` is called with it. Imports numpy, pyzmq, msgspec and cryptography, never torch. numpy has one thread.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import zmq

from polyhop.errors import ConfigError, InputError, PolyhopError
from polyhop.serverless import wire
from polyhop.serverless.channel import Channel
from polyhop.serverless.program import Program
from polyhop.serverless.secrets import Entry, KeyPair
from polyhop.serverless.stream import Arrival, Arrivals
from polyhop.serverless.tasks import run_task
from polyhop.serverless.wire import Array, WireError

__all__ = ["Order", "Summary", "main", "work"]

_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_KEPT_WEIGHTS = 16  # pieces and versions
_LEAVING_S = 0.5  # before the end, no task is begun that takes longer
_GATHERED_MS = 2000  # how long messages that are still to be sent may hold up the end


@dataclass(frozen=True)
class Order:
    """What a function is told when it is started. Not to be logged: it holds the job's key."""

    job: str
    function: str
    address: str
    server_public: str
    public: str
    secret: str
    limit_s: float = 600.0  # it is gone by then
    idle_s: float = 10.0
    prefetch: int = 2
    memory_mb: int = 1769
    latency_s: float = 0.0  # every task waits so long before it is begun, for experiments
    tied: bool = False  # it ends when its standard input does

    def __repr__(self) -> str:
        return f"Order({self.job!r}, {self.function!r}, {self.address!r})"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: Any) -> Order:
        """ConfigError for anything but an order."""
        wanted = {field.name: field.default for field in fields(cls)}
        if not isinstance(given, dict) or not set(given) <= set(wanted):
            raise ConfigError("a function's order is a JSON object with the fields of Order")
        for name in ("job", "function", "address", "server_public", "public", "secret"):
            if not isinstance(given.get(name), str):
                raise ConfigError(f"a function's order needs {name!r}, a text")
        for name in ("limit_s", "idle_s", "prefetch", "memory_mb", "latency_s"):
            if name in given and (isinstance(given[name], bool) or not isinstance(given[name], (int, float))):
                raise ConfigError(f"a function's order: {name!r} must be a number")
        if not isinstance(given.get("tied", False), bool):
            raise ConfigError("a function's order: 'tied' must be true or false")
        return cls(**given)


@dataclass
class Summary:
    """What a function did."""

    tasks: int = 0
    refused: int = 0
    failed: int = 0
    busy_ms: float = 0.0
    parked_ms: float = 0.0
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class _Weights:
    """Programs and weights by piece and version; the least recently used go first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, int], tuple[Program, dict[str, Array]]] = OrderedDict()

    @property
    def names(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._kept)

    def of(self, task: wire.Task, arrays: Mapping[str, Array]) -> tuple[Program, dict[str, Array]]:
        """Those of a task, which may bring them."""
        name = (task.key.piece, task.version)
        if task.program is not None:
            sent = {key[2:]: value for key, value in arrays.items() if key.startswith("w:")}
            self._kept[name] = Program.from_plain(task.program), sent
            while len(self._kept) > _KEPT_WEIGHTS:
                self._kept.popitem(last=False)
        if name not in self._kept:
            raise InputError(f"no weights of piece {name[0]}, version {name[1]}")
        self._kept.move_to_end(name)
        return self._kept[name]


def work(
    order: Order,
    *,
    remaining_s: Callable[[], float] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Summary:
    """Serve tasks until there is a reason to end. ``remaining_s``: what the platform says is left."""
    end = clock() + order.limit_s
    left: Callable[[], float] = (lambda: end - clock()) if remaining_s is None else remaining_s
    context = zmq.Context()
    hello = wire.Hello(order.job, order.function, wire.PROTOCOL, order.memory_mb, round(1000 * left()))
    entry, own = Entry(order.address, order.server_public), KeyPair(order.public, order.secret)
    channel = Channel(context, entry, own, hello)
    try:
        reason = channel.enter(min(order.idle_s, left() - _LEAVING_S))
        if reason is None:
            return _Worker(order, channel, left, clock).run()
        return Summary(reason="time" if left() <= _LEAVING_S else reason)
    finally:
        channel.close(_GATHERED_MS)
        context.term()


class _RowsMissingError(Exception):
    """Rows of a task will not come in time."""


class _Worker:
    def __init__(
        self, order: Order, channel: Channel, left: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        self._order, self._channel, self._left, self._clock = order, channel, left, clock
        self._weights, self._done, self._longest = _Weights(), Summary(), 0.0
        self._waiting: deque[tuple[float, Arrival]] = deque()  # (not before, task)
        self._arrivals, self._waited_s = Arrivals(), 0.0  # for rows of the task that is computed
        self._wishes = 0

    def run(self) -> Summary:
        order = self._order
        for _ in range(order.prefetch):
            self._wish()
        idle_since = self._clock()
        while not self._done.reason:
            self._receive(self._patience(idle_since))
            if self._waiting and self._waiting[0][0] <= self._clock():
                parked = self._clock() - idle_since
                self._serve(self._waiting.popleft()[1], parked)
                idle_since = self._clock()
            elif not self._waiting and self._clock() - idle_since >= order.idle_s:
                self._done.reason = "idle"
            if self._is_late():
                self._done.reason = self._done.reason or "time"
        self._send(wire.Bye(self._done.reason))
        return self._done

    def _is_late(self) -> bool:
        return self._left() < max(_LEAVING_S, 2 * self._longest)

    def _patience(self, idle_since: float) -> float:
        """Seconds to wait for a message."""
        until = self._waiting[0][0] if self._waiting else idle_since + self._order.idle_s
        return max(min(until - self._clock(), self._left() - _LEAVING_S), 0.0)

    def _receive(self, patience_s: float) -> None:
        """All messages that are there, after waiting for the first."""
        while self._channel.poll(patience_s):
            patience_s = 0.0
            header, arrays = wire.unpack(self._channel.receive())
            if isinstance(header, wire.Task):
                self._wishes -= 1
                arrival = self._arrivals.begin(header, arrays)
                self._waiting.append((self._clock() + self._order.latency_s, arrival))
            elif isinstance(header, wire.More):
                self._arrivals.put(header, arrays)
            elif isinstance(header, wire.Stop):
                self._done.reason = header.reason
            elif isinstance(header, wire.Ack):
                self._done.refused += header.verdict != "ok"
            else:
                raise WireError(f"{type(header).__name__} from a server")

    def _wait_for_rows(self, are_there: Callable[[], bool]) -> None:
        """Until rows of the task have come. Whoever is told to stop gets no more: they would have come before."""
        start = self._clock()
        while not are_there():
            patience = min(start + self._order.idle_s - self._clock(), self._left() - _LEAVING_S)
            if self._done.reason or patience <= 0:
                raise _RowsMissingError("time" if self._left() < _LEAVING_S else "idle")
            self._receive(patience)
        self._waited_s += self._clock() - start

    def _serve(self, arrival: Arrival, parked_s: float) -> None:
        task, start, self._waited_s = arrival.task, self._clock(), 0.0
        try:
            program, weights = self._weights.of(task, arrival.arrays)
            rows = arrival.rows(self._wait_for_rows)
            found, values = run_task(
                program, task.key.is_backward, rows, weights, task.wants, task.options, num_rows=task.num_rows
            )
        except _RowsMissingError as why:
            self._done.reason = self._done.reason or str(why)
            return
        except WireError:  # of what came meanwhile: the server is none of ours
            raise
        except Exception as error:  # told to the server, which decides
            self._done.failed += 1
            self._send(wire.Failed(task.key, task.lease, f"{type(error).__name__}: {error}"))
        else:
            took = self._clock() - start
            busy, parked_s = took - self._waited_s, parked_s + self._waited_s
            self._longest = max(self._longest, took)
            self._done.tasks += 1
            self._done.busy_ms += 1000 * busy
            self._done.parked_ms += 1000 * parked_s
            push = wire.Push(task.key, task.lease, (), 1000 * busy, 1000 * parked_s, values)
            self._channel.send(wire.pack(push, found))
        arrival.drop()
        self._wish()

    def _wish(self) -> None:
        if not self._is_late():
            self._wishes += 1
            self._send(wire.Pull(self._weights.names))

    def _send(self, header: wire.Header) -> None:
        self._channel.send(wire.pack(header))


def main() -> int:
    """A local process: its order comes on standard input, what it did goes to standard output."""
    try:
        order = Order.from_json(json.loads(sys.stdin.readline()))
        if order.tied:
            threading.Thread(target=_end_with_input, name="tie", daemon=True).start()
        print(json.dumps(work(order).to_json()), flush=True)
    except (PolyhopError, ValueError) as error:
        print(f"function: {error}", file=sys.stderr)
        return 2
    return 0


def _end_with_input() -> None:
    """Whoever gave the order is gone, or wants this function gone."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    if _ONE_THREAD[0] not in os.environ:  # read when numpy was imported: begin again, with it
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **dict.fromkeys(_ONE_THREAD, "1")})
    code = main()
    sys.stdout.flush()
    os._exit(code)
