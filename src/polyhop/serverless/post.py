"""The post: a server's sockets, in a thread of its own. It hands out leases, takes results, and passes rows between servers.

Servers talk to each other at the door; functions say Hello there and are given a session for the desk (``channel``).

The thread alone touches sockets and ledger. Whoever trains gives it work (``offer``, ``send``) and takes what came back
from ``inbox``; it never waits for them. A function asks for work with a Pull; where there is none its wish is kept, and
met as soon as there is. Every message is checked before it is believed: its sender's key (``secrets``), its seal
(``sealed``), its form (``wire``), its lease (``ledger``). What is refused is counted, told in the log, and changes nothing.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from hmac import compare_digest
from typing import Any, SupportsInt

import zmq
from zmq.utils import z85

from polyhop.serverless import wire
from polyhop.serverless.ledger import OK, Lease, Ledger, Terms
from polyhop.serverless.sealed import SEAL_BYTES, Sealer, SealError, Session
from polyhop.serverless.secrets import FUNCTION, SERVER, Entry, KeyPair, guarded
from polyhop.serverless.timesheets import Timesheets
from polyhop.serverless.wire import LIMITS, Array, Limits, TaskKey, WireError
from polyhop.trace import NO_TRACE, Trace

__all__ = ["Arrived", "Broken", "Came", "Done", "Keys", "Left", "Post", "Work"]

_LOG = logging.getLogger("polyhop.serverless")
_HANDSHAKE_MS = 5000
_TRIES = 5  # of a task that functions fail to compute, before the run ends
_CALLS_S = 1.0  # between calls of the roll
_SILENT_S = 30.0  # nothing heard, and no lease in time: lost, though its connection stands


@dataclass(frozen=True)
class Keys:
    """Of one server: its own pair, the pair with which it talks to others, and the keys that it answers."""

    own: KeyPair
    to_servers: KeyPair
    functions: str  # public key

    @property
    def answered(self) -> dict[str, str]:
        return {self.functions: FUNCTION, self.to_servers.public: SERVER}


@dataclass(frozen=True, eq=False)
class Work:
    """What a function needs for a task. ``weights`` gives program and weights of the piece, where it has not got them.

    ``version`` is asked for when the task is given out, not before. ``more``: further blocks of its ``num_rows`` rows, each
    of which travels in a message of its own.
    """

    version: SupportsInt
    arrays: Mapping[str, Array]
    weights: Callable[[], tuple[dict[str, Any], Mapping[str, Array]]]
    wants: tuple[str, ...] = ()
    options: Mapping[str, float] = field(default_factory=dict)
    num_rows: int = 0
    more: tuple[Mapping[str, Array], ...] = ()


@dataclass(frozen=True, eq=False)
class Done:
    """A result that counts."""

    key: TaskKey
    arrays: dict[str, Array]
    values: dict[str, float]


@dataclass(frozen=True, eq=False)
class Arrived:
    """Rows or sums from another server."""

    header: wire.Rows | wire.Sums
    arrays: dict[str, Array]


@dataclass(frozen=True)
class Broken:
    """The run cannot go on."""

    reason: str


@dataclass(frozen=True)
class Came:
    """A function has said Hello."""

    function: str


@dataclass(frozen=True)
class Left:
    """The last was heard of a function: it said Bye, or (``is_failure``) is lost."""

    function: str
    is_failure: bool
    reason: str


@dataclass
class _Function:
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
        # Functions, when ``limit`` was last called; of those that are stuck all leases have run out.
        self.num_serving = self.num_stuck = 0
        self._functions: dict[str, _Function] = {}  # by session
        self._wishing: deque[_Function] = deque()
        self._failures: Counter[TaskKey] = Counter()
        self._news: queue.SimpleQueue[Came | Left] = queue.SimpleQueue()
        self._called = clock()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._context = zmq.Context()
        self._gate = self._context.socket(zmq.REP)  # ZAP: who may come in
        self._gate.bind("inproc://zeromq.zap.01")
        self._door, self._desk = (_router(self._context, limits) for _ in range(2))
        guarded(self._door, keys.own)
        self._desk.plain_server = True
        port = self._door.bind_to_random_port(f"tcp://{host}")
        self.desk_port = self._desk.bind_to_random_port(f"tcp://{host}")
        self.entry = Entry(f"tcp://{host}:{port}", keys.own.public)
        self._peers: dict[int, zmq.Socket[bytes]] = {}
        self._is_open, self._is_broken, self._over = True, False, ""
        self._thread = threading.Thread(target=self._run, name="post", daemon=True)
        self._thread.start()

    # For those who train

    def offer(self, key: TaskKey, work: Work) -> None:
        """A task for functions."""
        self._order(lambda: self.ledger.offer(key, work))

    def connect(self, peers: Mapping[int, Entry]) -> None:
        """Servers that rows go to, by number."""
        self._order(lambda: self._connect(peers))

    def send(self, peer: int, header: wire.Rows | wire.Sums, arrays: Mapping[str, Array]) -> None:
        """Rows for another server; arrays must not change any more."""
        self._order(lambda: self._to_peer(peer, header, arrays))

    def lose(self, function: str) -> None:
        """A function is known to be gone."""
        self._order(lambda: self._lose(function))

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
        self._order(self._call_the_roll)
        found = []
        while not self._news.empty():
            found.append(self._news.get())
        return found

    @property
    def has_wishes(self) -> bool:
        """Whether functions ask for more than there is."""
        return bool(self._wishing)

    def num_functions(self, within_s: float = 5.0) -> int:
        """Functions heard of lately, or that hold a lease."""
        since = self._clock() - within_s
        return sum(each.seen >= since or each.wishes > 0 for each in list(self._functions.values()))

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
        poller = zmq.Poller()
        for each in (self._gate, self._door, self._desk, self._woken):
            poller.register(each, zmq.POLLIN)
        try:
            while self._is_open or not self._orders.empty():
                events = dict(poller.poll(self._patience_ms()))
                if self._gate in events:
                    self._admit()
                if self._woken.fileno() in events:
                    self._obey()
                if self._door in events:
                    self._take(self._door)
                if self._desk in events:
                    self._take(self._desk)
                for lease in self.ledger.expire(self._clock()):
                    _LOG.info("lease %d of %s ran out; it is given again", lease.number, lease.key)
                self._serve()
        except Exception as error:
            _LOG.exception("the post broke")
            self.inbox.put(Broken(f"the post of this server broke: {error}"))
        finally:
            for each in (self._gate, self._door, self._desk, *self._peers.values()):
                each.close(linger=200)
            self._context.term()

    def _patience_ms(self) -> int:
        deadline = self.ledger.next_deadline()
        if deadline is None:
            return 1000
        return round(1000 * max(min(deadline - self._clock(), 1.0), 0.0)) + 1

    def _admit(self) -> None:
        """ZAP (RFC 27): an answer to every connection that shakes hands."""
        version, sequence, _, _, _, mechanism, *credentials = self._gate.recv_multipart()
        user = self._user(mechanism, credentials)
        if user is None:
            self.refused["key"] += 1
            _LOG.warning("a connection without a key of this job was refused")
        answer = (b"200", b"", user.encode()) if user else (b"400", b"no key of this job", b"")
        self._gate.send_multipart([version, sequence, *answer, b""])

    def _user(self, mechanism: bytes, credentials: list[bytes]) -> str | None:
        """At the door what a key is for, at the desk the name of a session."""
        if mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32:
            return self._keys.answered.get(z85.encode(credentials[0]).decode())
        if mechanism == b"PLAIN" and len(credentials) == 2:
            function = self._functions.get(credentials[0].decode(errors="replace"))
            if function is not None and compare_digest(function.session.password.encode(), credentials[1]):
                return function.session.name
        return None

    def _obey(self) -> None:
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            pass
        while not self._orders.empty():
            self._orders.get()()

    def _take(self, socket: zmq.Socket[bytes]) -> None:
        """What has arrived, some at a time so that leases and orders are not kept waiting."""
        for _ in range(64):
            try:
                identity, *frames = socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            user, buffers = str(identity.get("User-Id")), [frame.buffer for frame in frames]
            try:
                if socket is self._door:
                    self._at_the_door(user, identity.bytes, buffers)
                else:
                    self._at_the_desk(user, identity.bytes, buffers)
            except (WireError, SealError) as error:
                self.refused["message"] += 1
                _LOG.warning("a message of %s was refused: %s", user, error)

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
        function = self._functions.get(session)
        if function is None:
            raise WireError("its session has ended")
        header, arrays = wire.unpack(function.sealer.open(frames), self._limits)
        self.messages[type(header).__name__] += 1
        function.identity = identity
        self._from_function(function, header, arrays)

    def _greet(self, identity: bytes, hello: wire.Hello) -> None:
        if hello.job != self.job or hello.protocol != wire.PROTOCOL:
            other = wire.Stop(f"this is job {self.job}, protocol {wire.PROTOCOL}")
            _sent(self._door, identity, wire.pack(other))
            raise WireError(f"Hello of job {hello.job[:40]!r}, protocol {hello.protocol}")
        self.sheets.came(hello.function)
        self._news.put(Came(hello.function))
        if self._over:
            _sent(self._door, identity, wire.pack(wire.Stop(self._over)))
            self._news.put(Left(hello.function, False, self._over))
            return
        session = Session.draw()
        self._functions[session.name] = _Function(
            hello.function, session, Sealer(session.key, is_server=True), seen=self._clock()
        )
        welcome = wire.Welcome(session.name, session.password, session.key, self.desk_port)
        _sent(self._door, identity, wire.pack(welcome))

    def _from_function(self, function: _Function, header: wire.Header, arrays: dict[str, Array]) -> None:
        function.seen = self._clock()
        if isinstance(header, wire.Pull):
            function.held = frozenset(header.held)
            function.wishes += 1
            self._wishing.append(function)
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
            self._lose(function.name, Left(function.name, False, header.reason[:200]))
        else:
            raise WireError(f"{type(header).__name__} from a function")

    def _failed(self, function: _Function, header: wire.Failed) -> None:
        """A task that a function could not compute is given again; after some tries the run ends."""
        self._failures[header.key] += 1
        _LOG.warning("%s failed at %s: %s", function.name, header.key, header.reason[:500])
        if self._failures[header.key] >= _TRIES:
            tries = f"{_TRIES} functions failed at piece {header.key.piece}, interval {header.key.interval}"
            self.inbox.put(Broken(f"{tries}; the last said: {header.reason[:500]}"))
            self._is_broken = True
            self._dismiss("the run has failed")
        self.ledger.give_up(header.key, header.lease)

    def _lose(self, name: str, why: Left | None = None) -> None:
        known = [session for session, each in self._functions.items() if each.name == name]
        for session in known:
            del self._functions[session]
        if known:
            self._news.put(why or Left(name, True, "its connection is gone"))
        self.ledger.lose(name)

    def _call_the_roll(self) -> None:
        """Functions whose connection is gone, or that are silent for too long, are lost. Told, in a word without effect."""
        now = self._clock()
        if now - self._called < _CALLS_S:
            return
        self._called = now
        at_work = self.ledger.holders(now)
        for each in list(self._functions.values()):
            if each.identity is not None and not self._reply(each, wire.Ack(0, OK)):
                self._lose(each.name)
            elif now - each.seen > _SILENT_S and each.name not in at_work:
                self._lose(each.name, Left(each.name, True, f"nothing was heard of it for {_SILENT_S:g} s"))

    def _limit(self, alive: Collection[str], wanted: int) -> None:
        now = self._clock()
        at_work = self.ledger.holders(now)
        known = [each for each in self._functions.values() if each.identity is not None]
        here = [each for each in known if each.name in alive and not each.is_dismissed]
        stuck = [
            each
            for each in here
            if not each.wishes and each.name not in at_work and now - each.seen > self.ledger.terms.floor_s
        ]
        self.num_stuck = len(stuck)
        leaving = [each for each in here if each.is_leaving]
        serving = [each for each in here if not each.is_leaving and each not in stuck]
        self.num_serving = min(len(serving) + len(leaving), wanted)
        for each in sorted(serving, key=lambda each: each.name in at_work)[: max(len(serving) - wanted, 0)]:
            each.is_leaving = True
            self._let_go(each)
        for each in leaving[: max(wanted - len(serving), 0)]:
            each.is_leaving = False
            self._wishing.extend([each] * each.wishes)

    def _let_go(self, function: _Function) -> None:
        """A function that is leaving is told to end, unless it has something to do."""
        if function.is_leaving and not function.is_dismissed and not self.ledger.has(function.name):
            function.is_dismissed = True
            self._reply(function, wire.Stop("fewer functions are wanted"))

    def _serve(self) -> None:
        """Meet wishes while there are tasks."""
        while self._wishing and not self._is_broken:
            function = self._wishing[0]
            is_here = function.session.name in self._functions
            if not is_here or function.wishes == 0 or function.is_leaving:
                self._wishing.popleft()
                continue
            found = self.ledger.lease(function.name, self._clock())
            if found is None:
                return
            self._wishing.popleft()
            function.wishes -= 1
            lease, work = found
            if not self._hand_out(function, lease, work):
                self._lose(function.name)

    def _hand_out(self, function: _Function, lease: Lease, work: Work) -> bool:
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
        self, function: _Function, header: wire.Header, arrays: Mapping[str, Array] | None = None
    ) -> bool:
        """False if the function is not at the desk, or not any more."""
        if function.identity is None:
            return False
        return _sent(self._desk, function.identity, function.sealer.seal(wire.pack(header, arrays)))

    def _dismiss(self, reason: str) -> None:
        """Functions are told to end, those that come later too."""
        self._over = reason
        for function in self._functions.values():
            self._reply(function, wire.Stop(reason))

    def _connect(self, peers: Mapping[int, Entry]) -> None:
        for number, entry in peers.items():
            made = self._context.socket(zmq.DEALER)
            guarded(made, self._keys.to_servers, entry)
            made.setsockopt(zmq.SNDHWM, 0)
            made.setsockopt(zmq.LINGER, 0)
            made.connect(entry.address)
            self._peers[number] = made

    def _to_peer(self, peer: int, header: wire.Rows | wire.Sums, arrays: Mapping[str, Array]) -> None:
        self._count(type(header).__name__.lower(), arrays)
        self._peers[peer].send_multipart(wire.pack(header, arrays), copy=False)

    def _count(self, kind: str, arrays: Mapping[str, Array]) -> None:
        self.sent[kind] += wire.num_bytes(arrays)
        self.sent_messages[kind] += 1


def _router(context: zmq.Context[Any], limits: Limits) -> zmq.Socket[bytes]:
    made: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    for option, value in (
        (zmq.ROUTER_MANDATORY, 1),
        (zmq.ROUTER_HANDOVER, 1),
        (zmq.MAXMSGSIZE, limits.frame_bytes + SEAL_BYTES),
        (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
        (zmq.SNDHWM, 0),
        (zmq.LINGER, 0),
        (zmq.HEARTBEAT_IVL, 2000),
    ):
        made.setsockopt(option, value)
    made.zap_domain = b"polyhop"
    return made


def _sent(socket: zmq.Socket[bytes], identity: bytes, frames: list[Any]) -> bool:
    """False if nobody of that identity is there any more."""
    try:
        socket.send_multipart([identity, *frames], copy=False, flags=zmq.NOBLOCK)
    except (zmq.Again, zmq.error.ZMQError):
        return False
    return True
