"""The post: who may come in, what is believed, and that nothing stops it."""

from __future__ import annotations

import json
import socket as plain
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
pytest.importorskip("cryptography")

import zmq

from polyhop.serverless import wire
from polyhop.serverless.function import Order, work
from polyhop.serverless.ledger import Terms
from polyhop.serverless.mail import Arrived, Broken, Came, Done, Left, Work
from polyhop.serverless.post import Post
from polyhop.serverless.program import Call, Program, Row
from polyhop.serverless.secrets import KeyPair, Keys
from polyhop.serverless.wire import Limits, TaskKey
from polyhop.trace import Trace

import sys  # isort: skip

sys.path.insert(0, str(Path(__file__).parent))
from faulty import dialled, entered  # type: ignore[import-not-found]

PROGRAM = Program({"x": Row((3,))}, {"b": (3,)}, (Call("bias", ("x", "b"), ("y",)),), ("y",))
WEIGHTS = {"b": np.arange(3.0)}
FUNCTIONS, SERVERS = KeyPair.draw(), KeyPair.draw()


def key(interval: int, epoch: int = 0) -> TaskKey:
    return TaskKey(epoch, 0, interval, 0, False)


def task(value: float = 1.0, version: int = 0) -> Work:
    return Work(version, {"x": np.full((2, 3), value)}, lambda: (PROGRAM.to_plain(), WEIGHTS))


@pytest.fixture
def post() -> Iterator[Post]:
    made = Post("job", Keys(KeyPair.draw(), SERVERS, FUNCTIONS.public), terms=Terms(0.3, 3.0, 1.0),
                limits=Limits(frame_bytes=1 << 20))  # fmt: skip
    yield made
    made.close()
    assert not made._thread.is_alive()


def order(post: Post, keys: KeyPair = FUNCTIONS, **given: Any) -> Order:
    told = {"job": "job", "function": "f", "idle_s": 0.3, "limit_s": 20.0, **given}
    return Order(address=post.entry.address, server_public=post.entry.public, public=keys.public,
                 secret=keys.secret, **told)  # fmt: skip


def taken(post: Post, seconds: float = 5.0) -> Any:
    return post.inbox.get(timeout=seconds)


def until(is_so: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


class Client:
    """A function that says what it is told to."""

    def __init__(self, given: Order) -> None:
        self._context = zmq.Context()
        self.channel = entered(self._context, given)

    def say(self, header: wire.Header, arrays: Any = None) -> None:
        self.channel.send(wire.pack(header, arrays))

    def hear(self, seconds: float = 5.0) -> Any:
        assert self.channel.poll(seconds), "nothing came"
        return wire.unpack(self.channel.receive())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: Any) -> None:
        self.channel.close(0)
        self._context.term()


@contextmanager
def at_the_door(given: Order) -> Iterator[zmq.Socket[bytes]]:
    """A connection with a key, of which nothing else is known."""
    context = zmq.Context()
    socket = dialled(context, given)
    try:
        yield socket
    finally:
        socket.close(linger=0)
        context.term()


def test_tasks_are_done_and_results_come_back(post: Post) -> None:
    for at in range(20):
        post.offer(key(at), task(float(at)))
    summary = work(order(post))
    assert (summary.tasks, summary.failed, summary.refused, summary.reason) == (20, 0, 0, "idle")
    found = {each.key.interval: each for each in (taken(post) for _ in range(20))}
    for at, each in found.items():
        assert isinstance(each, Done)
        assert np.array_equal(each.arrays["y"], np.full((2, 3), float(at)) + np.arange(3.0))
    assert post.sent["tasks"] == 20 * 48
    assert post.sent["weights"] <= 2 * 24  # once, or twice where two wishes were open
    assert post.received["results"] == 20 * 48
    assert post.inbox.empty()


def test_a_wish_is_met_when_work_comes(post: Post) -> None:
    thread = threading.Thread(target=work, args=(order(post, idle_s=1.0),))
    thread.start()
    until(lambda: post.messages["Pull"] >= 1)
    post.offer(key(1), task())
    assert taken(post).key == key(1)
    thread.join()


@pytest.mark.parametrize("keys", [KeyPair.draw(), None], ids=["other job's key", "no key"])
def test_without_the_key_nothing_is_read_and_nothing_submitted(post: Post, keys: KeyPair | None) -> None:
    post.offer(key(0), task())
    context = zmq.Context()
    if keys is None:
        socket = context.socket(zmq.DEALER)
        socket.connect(post.entry.address)
    else:
        socket = dialled(context, order(post, keys))
    socket.setsockopt(zmq.LINGER, 0)
    for header in (wire.Hello("job", "thief", wire.PROTOCOL, 1, 1), wire.Pull(), wire.Push(key(0), 1, ())):
        socket.send_multipart(
            wire.pack(header, {"y": np.ones((2, 3))} if isinstance(header, wire.Push) else None)
        )
    assert not socket.poll(500), "a stranger was answered"
    socket.close()
    context.term()
    assert post.inbox.empty()
    assert not post.roll.functions
    assert (post.refused["key"] >= 1) == (keys is not None)
    assert work(order(post)).tasks == 1  # and it goes on


def test_a_wrong_job_is_told_to_stop(post: Post) -> None:
    assert "this is job job" in work(order(post, job="another")).reason
    assert post.refused["message"] == 1
    assert not post.roll.functions


def test_at_the_door_a_function_can_only_say_hello(post: Post) -> None:
    post.offer(key(0), task())
    with at_the_door(order(post)) as socket:
        for header in (wire.Pull(), wire.Push(key(0), 1, ()), wire.Bye("x"), wire.Rows(0, 0, 0, ())):
            socket.send_multipart(wire.pack(header))
        until(lambda: post.refused["message"] == 4)
        assert not socket.poll(200)
    assert post.inbox.empty()


def test_what_is_not_a_lease_does_not_count(post: Post) -> None:
    post.offer(key(0), task())
    rows = {"y": np.ones((2, 3))}
    with Client(order(post)) as client:
        client.say(wire.Push(key(0), 77, ()), rows)
        assert client.hear()[0] == wire.Ack(77, "unknown")
        client.say(wire.Pull())
        given, _ = client.hear()
        assert isinstance(given, wire.Task)
        client.say(wire.Push(key(5), given.lease, ()), rows)
        assert client.hear()[0].verdict == "unknown"
        for verdict in ("ok", "duplicate", "duplicate"):
            client.say(wire.Push(key(0), given.lease, ()), rows)
            assert client.hear()[0].verdict == verdict
    assert isinstance(taken(post), Done)
    assert post.inbox.empty()
    assert post.refused == {"unknown": 2, "duplicate": 2}


def test_functions_cannot_pass_for_servers_nor_servers_for_functions(post: Post) -> None:
    with Client(order(post)) as client:
        client.say(wire.Rows(0, 0, 0, ()), {"h": np.ones(2)})
        until(lambda: post.refused["message"] == 1)
    with at_the_door(order(post, SERVERS)) as peer:
        peer.send_multipart(wire.pack(wire.Hello("job", "x", wire.PROTOCOL, 1, 1)))
        peer.send_multipart(wire.pack(wire.Rows(0, 3, 1, ()), {"h": np.ones(2)}))
        found = taken(post)
    assert isinstance(found, Arrived)
    assert found.header.interval == 3
    assert post.refused["message"] == 2
    assert post.inbox.empty()


def test_garbage_of_a_keyholder_is_refused_and_counted(post: Post) -> None:
    """At the door; at the desk in sealed frames, and without a seal."""
    rng = np.random.default_rng(0)
    garbage = [[rng.bytes(size), *rest] for size in (0, 1, 10, 1000) for rest in ([], [rng.bytes(5), b""])]
    garbage.append([b""] * 200)
    with at_the_door(order(post)) as socket, Client(order(post)) as client:
        for frames in garbage:
            socket.send_multipart(frames)
            client.channel.send(frames)
            client.channel.socket.send_multipart(frames)
        until(lambda: post.refused["message"] == 3 * len(garbage))
        post.offer(key(0), task())
        client.say(wire.Pull())
        assert isinstance(client.hear()[0], wire.Task)  # its session stands
    post.lose("f")
    assert work(order(post, function="honest")).tasks == 1


def test_a_frame_that_is_too_long_ends_its_connection_alone(post: Post) -> None:
    with at_the_door(order(post)) as socket, Client(order(post)) as client:
        socket.send_multipart([b"x" * (2 << 20)])
        client.channel.send([b"x" * (2 << 20)])
        time.sleep(0.3)
    post.offer(key(0), task())
    assert work(order(post, function="honest")).tasks == 1


def plain_client(context: zmq.Context[Any], post: Post, name: str, password: str) -> zmq.Socket[bytes]:
    """At the desk."""
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    made.plain_username, made.plain_password = name.encode(), password.encode()
    made.connect(f"tcp://127.0.0.1:{post.desk_port}")
    return made


def test_without_a_sessions_password_nobody_is_at_the_desk(post: Post) -> None:
    with Client(order(post)) as client:
        client.say(wire.Pull())
        until(lambda: post.messages["Pull"] == 1)
        (function,) = post.roll.functions.values()
        session, identity, context = function.session, function.identity, zmq.Context()
        tries = ((session.name, "wrong"), ("nobody", session.password), (session.name, session.name))
        sockets = [plain_client(context, post, *each) for each in tries]
        for socket in sockets:
            socket.send_multipart([b"x" * 1000] * 5)
        until(lambda: post.refused["key"] >= len(tries))
        assert function.identity == identity
        assert post.refused["message"] == 0
        for socket in sockets:
            socket.close()
        context.term()


def test_who_has_seen_a_password_can_neither_read_nor_submit_nor_repeat(post: Post) -> None:
    """Names and passwords of the desk are not secret to who can listen; the key of a session is."""
    heard: list[list[bytes]] = []
    with Client(order(post)) as client:
        original = client.channel.socket.send_multipart

        def overheard(frames: list[Any], **options: Any) -> Any:
            heard.append([bytes(frame) for frame in frames])
            return original(frames, **options)

        client.channel.socket.send_multipart = overheard  # type: ignore[method-assign]
        client.say(wire.Pull())
        until(lambda: post.messages["Pull"] == 1)
        (function,) = post.roll.functions.values()
        identity, context = function.identity, zmq.Context()
        thief = plain_client(context, post, function.session.name, function.session.password)
        thief.send_multipart(heard[0])  # again
        thief.send_multipart(wire.pack(wire.Pull()))
        until(lambda: post.refused["message"] == 2)
        assert (function.identity, function.wishes, post.messages["Pull"]) == (identity, 1, 1)
        post.offer(key(0), task())
        assert isinstance(client.hear()[0], wire.Task)
        assert not thief.poll(100)
        thief.close()
        context.term()
        client.channel.socket.send_multipart = original  # type: ignore[method-assign]


def test_a_session_that_has_ended_is_no_session(post: Post) -> None:
    with Client(order(post, function="lost")) as client:
        client.say(wire.Pull())
        until(lambda: post.messages["Pull"] == 1)
        post.lose("lost")
        until(lambda: not post.roll.functions)
        client.say(wire.Pull())
        until(lambda: post.refused["message"] == 1)


def test_functions_that_come_late_are_told_to_end(post: Post) -> None:
    with Client(order(post)) as client:
        client.say(wire.Pull())
        until(lambda: post.messages["Pull"] == 1)
        post.dismiss("enough")
        assert client.hear()[0] == wire.Stop("enough")
        client.say(wire.Pull())
        assert client.hear()[0] == wire.Stop("enough")
    post.news()
    assert work(order(post, function="late")).reason == "enough"
    assert post.news() == [Came("late"), Left("late", False, "enough")]


@pytest.mark.parametrize("mechanism", ["CURVE", "PLAIN"])
def test_strangers_by_the_thousand_change_nothing(post: Post, mechanism: str) -> None:
    """Plain sockets that send garbage, a length of 10 GB, or nothing at all, to the door and to the desk."""
    host, port = post.entry.address.removeprefix("tcp://").split(":")
    port = port if mechanism == "CURVE" else str(post.desk_port)
    before = _resident()
    for at in range(1000):
        with plain.create_connection((host, int(port)), timeout=5) as stranger:
            if at % 3 == 0:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            elif at % 3 == 1:
                named = mechanism.encode() + b"\x00" * 47
                greeting = b"\xff" + struct.pack(">Q", 10 << 30) + b"\x7f\x03\x00" + named
                stranger.sendall(greeting + b"\x02" + struct.pack(">Q", 10 << 30))
    post.offer(key(0), task())
    assert work(order(post)).tasks == 1
    assert _resident() - before < 100 << 20
    assert post.inbox.qsize() == 1


def _resident() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


def test_a_task_that_nobody_can_compute_ends_the_run(post: Post) -> None:
    bad = Work(0, {"wrong": np.ones((2, 3))}, lambda: (PROGRAM.to_plain(), WEIGHTS))
    post.offer(key(4), bad)
    summary = work(order(post))
    assert summary.failed >= 5
    found = taken(post)
    assert isinstance(found, Broken)
    assert "interval 4" in found.reason
    assert "'x' is missing" in found.reason


def test_a_lost_functions_work_goes_to_another_at_once(post: Post) -> None:
    post.offer(key(0), task())
    with Client(order(post, function="lost")) as client:
        client.say(wire.Pull())
        assert isinstance(client.hear()[0], wire.Task)
        post.lose("lost")
        assert work(order(post, function="other")).tasks == 1


def test_a_lease_that_runs_out_goes_to_another(post: Post) -> None:
    post.offer(key(0), task())
    with Client(order(post, function="slow")) as client:
        client.say(wire.Pull())
        assert isinstance(client.hear()[0], wire.Task)
        assert work(order(post, function="other", idle_s=3.0)).tasks == 1
    assert post.ledger.counts["expired"] == 1


def test_functions_end_in_time_and_by_themselves(post: Post) -> None:
    assert work(order(post, idle_s=0.1)).reason == "idle"
    assert work(order(post, idle_s=30.0, limit_s=0.8)).reason == "time"
    thread = threading.Thread(target=lambda: reasons.append(work(order(post, idle_s=30.0)).reason))
    reasons: list[str] = []
    before = post.messages["Pull"]
    thread.start()
    until(lambda: post.messages["Pull"] > before)
    post.dismiss("enough")
    thread.join(timeout=5)
    assert reasons == ["enough"]


def test_keys_are_not_shown(post: Post) -> None:
    assert FUNCTIONS.secret not in repr(FUNCTIONS)
    assert FUNCTIONS.secret not in repr(order(post))


def test_leases_and_results_are_traced(tmp_path: Path) -> None:
    """A lease names function and task; a result names its lease, what it was busy for, and whether it counts."""
    trace = Trace(tmp_path / "trace.jsonl")
    post = Post(
        "job", Keys(KeyPair.draw(), SERVERS, FUNCTIONS.public), terms=Terms(0.3, 3.0, 1.0), trace=trace
    )
    try:
        for interval in range(3):
            post.offer(key(interval, epoch=4), task())
        thread = threading.Thread(target=work, args=(order(post, function="f7", latency_s=0.02),))
        thread.start()
        for _ in range(3):
            assert isinstance(taken(post), Done)
        thread.join(timeout=5)
    finally:
        post.close()
        trace.close()
    records = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    leases = {each["lease"]: each for each in records if each.get("name") == "lease"}
    results = [each for each in records if each.get("name") == "result"]
    assert [leases[each["lease"]]["interval"] for each in results] == [0, 1, 2]
    for result in results:
        lease = leases[result["lease"]]
        assert (lease["function"], lease["epoch"], lease["place"], lease["backward"]) == ("f7", 4, 0, False)
        assert result["at"] - lease["at"] >= 0.02
        assert 0 <= result["busy_ms"] < 1000 * (result["at"] - lease["at"])
        assert result["verdict"] == "ok"
