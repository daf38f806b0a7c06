"""The post: a server's socket, in a thread of its own. It hands out leases, takes results, and passes rows between servers.

The thread alone touches sockets and ledger. Whoever trains gives it work (``offer``, ``send``) and takes what came back
from ``inbox``; it never waits for them. A function asks for work with a Pull; where there is none its wish is kept, and
met as soon as there is. Every message is checked before it is believed: its sender's key (``secrets``), its form
(``wire``), its lease (``ledger``). What is refused is counted, told in the log, and changes nothing.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

from polyhop.serverless import wire
from polyhop.serverless.ledger import OK, Ledger, Terms
from polyhop.serverless.secrets import FUNCTION, SERVER, Entry, KeyPair, guarded
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
    """What a function needs for a task. ``weights`` gives program and weights of the piece, where it has not got them."""

    version: int
    arrays: Mapping[str, Array]
    weights: Callable[[], tuple[dict[str, Any], Mapping[str, Array]]]
    wants: tuple[str, ...] = ()
    options: Mapping[str, float] = field(default_factory=dict)


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
    identity: bytes
    held: frozenset[tuple[int, int]] = frozenset()
    wishes: int = 0
    seen: float = 0.0


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
        self.busy_ms: Counter[str] = Counter()  # by function
        self._keys, self._limits, self._clock, self._trace = keys, limits, clock, trace
        self._functions: dict[bytes, _Function] = {}
        self._wishing: deque[bytes] = deque()
        self._failures: Counter[TaskKey] = Counter()
        self._news: queue.SimpleQueue[Came | Left] = queue.SimpleQueue()
        self._called = clock()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._context = zmq.Context()
        self._gate = self._context.socket(zmq.REP)  # ZAP: who may come in
        self._gate.bind("inproc://zeromq.zap.01")
        self._router = self._context.socket(zmq.ROUTER)
        guarded(self._router, keys.own)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.MAXMSGSIZE, limits.frame_bytes),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
            (zmq.SNDHWM, 0),
            (zmq.LINGER, 0),
            (zmq.HEARTBEAT_IVL, 2000),
        ):
            self._router.setsockopt(option, value)
        self._router.zap_domain = b"polyhop"
        port = self._router.bind_to_random_port(f"tcp://{host}")
        self.entry = Entry(f"tcp://{host}:{port}", keys.own.public)
        self._peers: dict[int, zmq.Socket[bytes]] = {}
        self._is_open, self._is_broken = True, False
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
        """Every function that waits for work is told to end."""
        self._order(lambda: self._dismiss(reason))

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
        for each in (self._gate, self._router, self._woken):
            poller.register(each, zmq.POLLIN)
        try:
            while self._is_open or not self._orders.empty():
                events = dict(poller.poll(self._patience_ms()))
                if self._gate in events:
                    self._admit()
                if self._woken.fileno() in events:
                    self._obey()
                if self._router in events:
                    self._take()
                for lease in self.ledger.expire(self._clock()):
                    _LOG.info("lease %d of %s ran out; it is given again", lease.number, lease.key)
                self._serve()
        except Exception as error:
            _LOG.exception("the post broke")
            self.inbox.put(Broken(f"the post of this server broke: {error}"))
        finally:
            for each in (self._gate, self._router, *self._peers.values()):
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
        key = z85.encode(credentials[0]).decode() if credentials and len(credentials[0]) == 32 else ""
        user = self._keys.answered.get(key) if mechanism == b"CURVE" else None
        if user is None:
            self.refused["key"] += 1
            _LOG.warning("a connection without a key of this job was refused")
        answer = (b"200", b"", user.encode()) if user else (b"400", b"no key of this job", b"")
        self._gate.send_multipart([version, sequence, *answer, b""])

    def _obey(self) -> None:
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            pass
        while not self._orders.empty():
            self._orders.get()()

    def _take(self) -> None:
        """What has arrived, some at a time so that leases and orders are not kept waiting."""
        for _ in range(64):
            try:
                identity, *frames = self._router.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            user = str(identity.get("User-Id"))
            try:
                header, arrays = wire.unpack([frame.buffer for frame in frames], self._limits)
                self._believe(user, identity.bytes, header, arrays)
            except WireError as error:
                self.refused["message"] += 1
                _LOG.warning("a message of a %s was refused: %s", user, error)

    def _believe(self, user: str, identity: bytes, header: wire.Header, arrays: dict[str, Array]) -> None:
        self.messages[type(header).__name__] += 1
        if user == SERVER:
            if not isinstance(header, (wire.Rows, wire.Sums)):
                raise WireError(f"{type(header).__name__} from a server")
            self.received[type(header).__name__.lower()] += wire.num_bytes(arrays)
            self.inbox.put(Arrived(header, arrays))
        elif isinstance(header, wire.Hello):
            self._greet(identity, header)
        elif identity not in self._functions:
            raise WireError(f"{type(header).__name__} before Hello")
        else:
            self._from_function(self._functions[identity], header, arrays)

    def _greet(self, identity: bytes, hello: wire.Hello) -> None:
        if hello.job != self.job or hello.protocol != wire.PROTOCOL:
            self._reply(identity, wire.Stop(f"this is job {self.job}, protocol {wire.PROTOCOL}"))
            raise WireError(f"Hello of job {hello.job[:40]!r}, protocol {hello.protocol}")
        self._functions[identity] = _Function(hello.function, identity, seen=self._clock())
        self._news.put(Came(hello.function))

    def _from_function(self, function: _Function, header: wire.Header, arrays: dict[str, Array]) -> None:
        function.seen = self._clock()
        if isinstance(header, wire.Pull):
            function.held = frozenset(header.held)
            function.wishes += 1
            self._wishing.append(function.identity)
        elif isinstance(header, wire.Push):
            verdict, work = self.ledger.commit(header.key, header.lease, self._clock())
            self.received["results"] += wire.num_bytes(arrays)
            self.busy_ms[function.name] += round(header.busy_ms)
            self._trace.instant("result", lease=header.lease, busy_ms=header.busy_ms, verdict=verdict)
            self._reply(function.identity, wire.Ack(header.lease, verdict))
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
        known = [i for i, each in self._functions.items() if each.name == name]
        for identity in known:
            del self._functions[identity]
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
            if not self._reply(each.identity, wire.Ack(0, OK)):
                self._lose(each.name)
            elif now - each.seen > _SILENT_S and each.name not in at_work:
                self._lose(each.name, Left(each.name, True, f"nothing was heard of it for {_SILENT_S:g} s"))

    def _serve(self) -> None:
        """Meet wishes while there are tasks."""
        while self._wishing and not self._is_broken:
            function = self._functions.get(self._wishing[0])
            if function is None or function.wishes == 0:
                self._wishing.popleft()
                continue
            found = self.ledger.lease(function.name, self._clock())
            if found is None:
                return
            self._wishing.popleft()
            function.wishes -= 1
            lease, work = found
            has = (lease.key.piece, work.version) in function.held
            program, weights = (None, {}) if has else work.weights()
            arrays = {**work.arrays, **{f"w:{name}": value for name, value in weights.items()}}
            lease_ms = round(1000 * (lease.deadline - lease.given))
            header = wire.Task(
                lease.key, lease.number, lease_ms, work.version, (), program, work.wants, dict(work.options)
            )
            if self._reply(function.identity, header, arrays):
                self._count("tasks", work.arrays)
                key = lease.key
                self._trace.instant("lease", lease=lease.number, function=function.name, interval=key.interval,
                                    place=key.piece, backward=key.is_backward, epoch=key.epoch)  # fmt: skip
                if weights:
                    self._count("weights", weights)
            else:
                self._lose(function.name)

    def _reply(self, identity: bytes, header: wire.Header, arrays: Mapping[str, Array] | None = None) -> bool:
        """False if the function is not there any more."""
        try:
            self._router.send_multipart([identity, *wire.pack(header, arrays)], copy=False, flags=zmq.NOBLOCK)
        except (zmq.Again, zmq.error.ZMQError):
            return False
        return True

    def _dismiss(self, reason: str) -> None:
        for identity in list(self._functions):
            self._reply(identity, wire.Stop(reason))

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
