"""The post: a server's sockets, in a thread of its own. It hands out leases, takes results, and passes rows between servers.

Servers talk to each other at the door; functions say Hello there and are given a session for the desk (``channel``).

The thread alone touches sockets (``doors``), ledger and ``roll``. Whoever trains gives it work (``offer``, ``send``) and
takes what came back from ``inbox`` (``mail``); it never waits for them. A function asks for work with a Pull; where there is
none its wish is kept, and met as soon as there is. Every message is checked before it is believed: its sender's key
(``secrets``), its seal (``sealed``), its form (``wire``), its lease (``ledger``). What is refused is counted, told in the
log, and changes nothing.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import zmq
from zmq.utils import z85

from polyhop.serverless import wire
from polyhop.serverless.doors import Doors, Socket, received, sent
from polyhop.serverless.ledger import OK, Lease, Ledger, Terms
from polyhop.serverless.mail import Arrived, Broken, Came, Done, Left, Work
from polyhop.serverless.roll import Function, Roll
from polyhop.serverless.sealed import SealError
from polyhop.serverless.secrets import FUNCTION, SERVER, Entry, Keys
from polyhop.serverless.timesheets import Timesheets
from polyhop.serverless.wire import LIMITS, Array, Limits, TaskKey, WireError
from polyhop.trace import NO_TRACE, Trace

__all__ = ["Post"]

_LOG = logging.getLogger("polyhop.serverless")
_TRIES = 5  # of a task that functions fail to compute, before the run ends


class Post:
    """Listens from the moment it is made until ``close``. Leases and results go into ``trace``."""

    def __init__(
        self,
        job: str,
        keys: Keys,
        *,
        host: str = "127.0.0.1",
        terms: Terms | None = None,
        limits: Limits = LIMITS,
        clock: Callable[[], float] = time.monotonic,
        trace: Trace = NO_TRACE,
    ) -> None:
        self.job, self.ledger, self.inbox = job, Ledger[Work](terms), queue.SimpleQueue[Any]()
        self.refused: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()  # payload bytes by kind: tasks, weights, rows, sums
        self.sent_messages: Counter[str] = Counter()
        self.received: Counter[str] = Counter()  # results, rows, sums
        self.messages: Counter[str] = Counter()
        self.sheets = Timesheets()
        self._keys, self._limits, self._clock, self._trace = keys, limits, clock, trace
        self.roll = Roll(self.ledger, clock)
        self._failures: Counter[TaskKey] = Counter()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._doors = Doors(keys, host, limits)
        self.entry, self.desk_port = self._doors.entry, self._doors.desk_port
        self._is_open, self._is_broken, self._over = True, False, ""
        self._thread = threading.Thread(target=self._run, name="post", daemon=True)
        self._thread.start()

    # For those who train

    def offer(self, key: TaskKey, work: Work) -> None:
        """A task for functions."""
        self._order(lambda: self.ledger.offer(key, work))

    def connect(self, peers: Mapping[int, Entry]) -> None:
        """Servers that rows go to, by number."""
        self._order(lambda: self._doors.connect(peers))

    def send(self, peer: int, header: wire.Rows | wire.Sums, arrays: Mapping[str, Array]) -> None:
        """Rows for another server; arrays must not change any more."""
        self._order(lambda: self._to_peer(peer, header, arrays))

    def lose(self, function: str) -> None:
        """A function is known to be gone."""
        self._order(lambda: self.roll.lose(function))

    def forget(self, before_epoch: int) -> None:
        self._order(lambda: self.ledger.forget(before_epoch))

    def dismiss(self, reason: str) -> None:
        """Functions are told to end: those that wait for work, and those that come from now on."""
        self._order(lambda: self._dismiss(reason))

    def limit(self, alive: Collection[str], wanted: int) -> None:
        """Of the functions that are alive no more than so many get tasks; others are told to end once they have none.

        Those that are stuck do not count.
        """
        self._order(lambda: self._limit(alive, wanted))

    def news(self) -> list[Came | Left]:
        """Functions that came or left since the last call, in order, for launchers that cannot see their functions.

        Who asks also has the roll called: a function whose connection is gone, or that hangs, will be among those lost.
        """
        self._order(lambda: self.roll.call(lambda function: self._reply(function, wire.Ack(0, OK))))
        return self.roll.news()

    @property
    def has_wishes(self) -> bool:
        """Whether functions ask for more than there is."""
        return self.roll.has_wishes

    @property
    def num_serving(self) -> int:
        """Functions that were there, of those that are wanted, when ``limit`` was last called."""
        return self.roll.num_serving

    @property
    def num_stuck(self) -> int:
        """Functions all of whose leases had run out then."""
        return self.roll.num_stuck

    def num_functions(self, within_s: float = 5.0) -> int:
        """Functions heard of lately, or that wait for a task."""
        return self.roll.num_heard(within_s)

    def close(self) -> None:
        """Stop listening; functions that wait are told to end."""
        if self._is_open:
            self._is_open = False
            self._order(lambda: self._dismiss("the run is over"))
            self._thread.join(timeout=10)
            for each in (self._wake, self._woken):
                each.close()

    def _order(self, action: Callable[[], None]) -> None:
        self._orders.put(action)
        self._wake.send(b"x")

    # The thread

    def _run(self) -> None:
        poller, doors = zmq.Poller(), self._doors
        for each in (doors.gate, doors.door, doors.desk, self._woken):
            poller.register(each, zmq.POLLIN)
        try:
            while self._is_open or not self._orders.empty():
                events = dict(poller.poll(self._patience_ms()))
                if doors.gate in events:
                    self._admit()
                if self._woken.fileno() in events:
                    self._obey()
                if doors.door in events:
                    self._take(doors.door)
                if doors.desk in events:
                    self._take(doors.desk)
                for lease in self.ledger.expire(self._clock()):
                    _LOG.info("lease %d of %s ran out; it is given again", lease.number, lease.key)
                self._serve()
        except Exception as error:
            _LOG.exception("the post broke")
            self.inbox.put(Broken(f"the post of this server broke: {error}"))
        finally:
            doors.close()

    def _patience_ms(self) -> int:
        deadline = self.ledger.next_deadline()
        if deadline is None:
            return 1000
        return round(1000 * max(min(deadline - self._clock(), 1.0), 0.0)) + 1

    def _admit(self) -> None:
        """An answer to a connection that shakes hands."""
        if not self._doors.admit(self._user):
            self.refused["key"] += 1
            _LOG.warning("a connection without a key of this job was refused")

    def _user(self, mechanism: bytes, credentials: list[bytes]) -> str | None:
        """At the door what a key is for, at the desk the name of a session."""
        if mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32:
            return self._keys.answered.get(z85.encode(credentials[0]).decode())
        if mechanism == b"PLAIN" and len(credentials) == 2:
            return self.roll.user(credentials[0].decode(errors="replace"), credentials[1])
        return None

    def _obey(self) -> None:
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            pass
        while not self._orders.empty():
            self._orders.get()()

    def _take(self, socket: Socket) -> None:
        """What has arrived, some at a time so that leases and orders are not kept waiting."""
        for _ in range(64):
            message = received(socket)
            if message is None:
                return
            try:
                if socket is self._doors.door:
                    self._at_the_door(*message)
                else:
                    self._at_the_desk(*message)
            except (WireError, SealError) as error:
                self.refused["message"] += 1
                _LOG.warning("a message of %s was refused: %s", message[0], error)

    def _at_the_door(self, user: str, identity: bytes, frames: list[memoryview]) -> None:
        """Rows of another server, or the first word of a function."""
        header, arrays = wire.unpack(frames, self._limits)
        self.messages[type(header).__name__] += 1
        if user == SERVER and isinstance(header, (wire.Rows, wire.Sums)):
            self.received[type(header).__name__.lower()] += wire.num_bytes(arrays)
            self.inbox.put(Arrived(header, arrays))
        elif user == FUNCTION and isinstance(header, wire.Hello):
            self._greet(identity, header)
        else:
            raise WireError(f"{type(header).__name__} from a {user}, at the door")

    def _at_the_desk(self, session: str, identity: bytes, frames: list[memoryview]) -> None:
        """Whatever a function says after Hello."""
        function = self.roll.functions.get(session)
        if function is None:
            raise WireError("its session has ended")
        header, arrays = wire.unpack(function.sealer.open(frames), self._limits)
        self.messages[type(header).__name__] += 1
        function.identity = identity
        self._from_function(function, header, arrays)

    def _greet(self, identity: bytes, hello: wire.Hello) -> None:
        if hello.job != self.job or hello.protocol != wire.PROTOCOL:
            other = wire.Stop(f"this is job {self.job}, protocol {wire.PROTOCOL}")
            sent(self._doors.door, identity, wire.pack(other))
            raise WireError(f"Hello of job {hello.job[:40]!r}, protocol {hello.protocol}")
        self.sheets.came(hello.function)
        self.roll.come(hello.function)
        if self._over:
            sent(self._doors.door, identity, wire.pack(wire.Stop(self._over)))
            self.roll.turn_away(hello.function, self._over)
            return
        session = self.roll.enter(hello.function).session
        welcome = wire.Welcome(session.name, session.password, session.key, self.desk_port)
        sent(self._doors.door, identity, wire.pack(welcome))

    def _from_function(self, function: Function, header: wire.Header, arrays: dict[str, Array]) -> None:
        function.seen = self._clock()
        if isinstance(header, wire.Pull):
            self.roll.wish(function, header.held)
            self._let_go(function)
            if self._over:
                self._reply(function, wire.Stop(self._over))
        elif isinstance(header, wire.Push):
            verdict, work = self.ledger.commit(header.key, header.lease, self._clock())
            self.received["results"] += wire.num_bytes(arrays)
            self.sheets.worked(function.name, header.busy_ms)
            self._trace.instant("result", lease=header.lease, busy_ms=header.busy_ms, verdict=verdict)
            self._reply(function, wire.Ack(header.lease, verdict))
            if verdict == OK and work is not None:
                self.inbox.put(Done(header.key, arrays, header.values))
            else:
                self.refused[verdict] += 1
                _LOG.info("a result of %s was refused: %s", function.name, verdict)
        elif isinstance(header, wire.Failed):
            self._failed(function, header)
        elif isinstance(header, wire.Bye):
            self.roll.lose(function.name, Left(function.name, False, header.reason[:200]))
        else:
            raise WireError(f"{type(header).__name__} from a function")

    def _failed(self, function: Function, header: wire.Failed) -> None:
        """A task that a function could not compute is given again; after some tries the run ends."""
        self._failures[header.key] += 1
        _LOG.warning("%s failed at %s: %s", function.name, header.key, header.reason[:500])
        if self._failures[header.key] >= _TRIES:
            tries = f"{_TRIES} functions failed at piece {header.key.piece}, interval {header.key.interval}"
            self.inbox.put(Broken(f"{tries}; the last said: {header.reason[:500]}"))
            self._is_broken = True
            self._dismiss("the run has failed")
        self.ledger.give_up(header.key, header.lease)

    def _limit(self, alive: Collection[str], wanted: int) -> None:
        for function in self.roll.limit(alive, wanted):
            self._let_go(function)

    def _let_go(self, function: Function) -> None:
        """A function that is leaving is told to end, unless it has something to do."""
        if self.roll.let_go(function):
            self._reply(function, wire.Stop("fewer functions are wanted"))

    def _serve(self) -> None:
        """Meet wishes while there are tasks."""
        while not self._is_broken and (function := self.roll.wisher()) is not None:
            found = self.ledger.lease(function.name, self._clock())
            if found is None:
                return
            self.roll.meet()
            if not self._hand_out(function, *found):
                self.roll.lose(function.name)

    def _hand_out(self, function: Function, lease: Lease, work: Work) -> bool:
        """Send a task, all blocks of its rows; False if the function is not there any more."""
        version = int(work.version)
        has = (lease.key.piece, version) in function.held
        program, weights = (None, {}) if has else work.weights()
        arrays = {**work.arrays, **{f"w:{name}": value for name, value in weights.items()}}
        lease_ms = round(1000 * (lease.deadline - lease.given))
        header = wire.Task(
            lease.key, lease.number, lease_ms, version, (), program, work.wants, dict(work.options),
            work.num_rows, len(work.more),
        )  # fmt: skip
        if not self._reply(function, header, arrays):
            return False
        self._count("tasks", work.arrays)
        key = lease.key
        self._trace.instant("lease", lease=lease.number, function=function.name, interval=key.interval,
                            place=key.piece, backward=key.is_backward, epoch=key.epoch)  # fmt: skip
        if weights:
            self._count("weights", weights)
        for block, rows in enumerate(work.more, start=1):
            if not self._reply(function, wire.More(lease.number, block, ()), rows):
                return False
            self._count("tasks", rows)
        return True

    def _reply(
        self, function: Function, header: wire.Header, arrays: Mapping[str, Array] | None = None
    ) -> bool:
        """False if the function is not at the desk, or not any more."""
        if function.identity is None:
            return False
        return sent(self._doors.desk, function.identity, function.sealer.seal(wire.pack(header, arrays)))

    def _dismiss(self, reason: str) -> None:
        """Functions are told to end, those that come later too."""
        self._over = reason
        for function in self.roll.functions.values():
            self._reply(function, wire.Stop(reason))

    def _to_peer(self, peer: int, header: wire.Rows | wire.Sums, arrays: Mapping[str, Array]) -> None:
        self._count(type(header).__name__.lower(), arrays)
        self._doors.to_peer(peer, wire.pack(header, arrays))

    def _count(self, kind: str, arrays: Mapping[str, Array]) -> None:
        self.sent[kind] += wire.num_bytes(arrays)
        self.sent_messages[kind] += 1
