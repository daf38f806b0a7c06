"""Tasks in several messages over real sockets: computed before all is there, and never on what did not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
pytest.importorskip("cryptography")

import zmq
from zmq.auth import CURVE_ALLOW_ANY
from zmq.auth.thread import ThreadAuthenticator

from polyhop.serverless import stream, wire
from polyhop.serverless.function import Order, Summary, work
from polyhop.serverless.ledger import Terms
from polyhop.serverless.mail import Done, Work
from polyhop.serverless.post import Post
from polyhop.serverless.program import Call, Program, Row
from polyhop.serverless.sealed import Sealer, Session
from polyhop.serverless.secrets import KeyPair, Keys, guarded
from polyhop.serverless.stream import cut
from polyhop.serverless.tiles import TILE
from polyhop.serverless.wire import TaskKey, WireError

import sys  # isort: skip

sys.path.insert(0, str(Path(__file__).parent))
from faulty import entered  # type: ignore[import-not-found]

PROGRAM = Program({"x": Row((3,))}, {"b": (3,)}, (Call("bias", ("x", "b"), ("y",)),), ("y",))
WEIGHTS = {"b": np.arange(3.0)}
FUNCTIONS = KeyPair.draw()
NUM_ROWS = 2 * TILE + 100
ROWS = np.random.default_rng(0).standard_normal((NUM_ROWS, 3))


def key(interval: int) -> TaskKey:
    return TaskKey(0, 0, interval, 0, False)


def order(address: str, public: str, **given: Any) -> Order:
    told = {"job": "job", "function": "f", "idle_s": 0.3, "limit_s": 20.0, **given}
    return Order(
        address=address, server_public=public, public=FUNCTIONS.public, secret=FUNCTIONS.secret, **told
    )


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BLOCK_BYTES", 1 << 14)


class Host:
    """A server that sends what it is told to, to one function that runs in a thread."""

    def __init__(self, **given: Any) -> None:
        own = KeyPair.draw()
        self._context = zmq.Context()
        session = Session.draw()
        gate = ThreadAuthenticator(self._context)
        gate.start()
        gate.configure_curve(location=CURVE_ALLOW_ANY)
        gate.configure_plain(passwords={session.name: session.password})
        door, self._socket = (self._context.socket(zmq.ROUTER) for _ in range(2))
        guarded(door, own)
        self._socket.plain_server = True
        self._socket.setsockopt(zmq.LINGER, 0)
        port, desk_port = (each.bind_to_random_port("tcp://127.0.0.1") for each in (door, self._socket))
        self._order = order(f"tcp://127.0.0.1:{port}", own.public, **given)
        self.ended: Summary | Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        identity, _hello = door.recv_multipart()
        self._sealer = Sealer(session.key, is_server=True)
        welcome = wire.Welcome(session.name, session.password, session.key, desk_port)
        door.send_multipart([identity, *wire.pack(welcome)])
        self._identity = b""
        assert isinstance(self._next(), wire.Pull)  # now the way back is known
        door.close(linger=0)
        gate.stop()

    def _run(self) -> None:
        try:
            self.ended = work(self._order)
        except Exception as error:
            self.ended = error

    def hear(self, seconds: float = 5.0) -> Any:
        """The next message but for wishes."""
        while isinstance(header := self._next(seconds), wire.Pull):
            pass
        return header

    def _next(self, seconds: float = 5.0) -> Any:
        assert self._socket.poll(round(1000 * seconds)), "nothing came"
        self._identity, *frames = self._socket.recv_multipart()
        header, self.arrays = wire.unpack(self._sealer.open(frames))
        return header

    def say(self, header: wire.Header, arrays: Any = None) -> None:
        self._socket.send_multipart([self._identity, *self._sealer.seal(wire.pack(header, arrays))])

    def task(self, lease: int, rows: Any = ROWS) -> list[dict[str, Any]]:
        """Send a task with its first rows; the further blocks."""
        first, *more = cut({"x": rows})
        weights = {"w:b": WEIGHTS["b"]}
        header = wire.Task(key(lease), lease, 1000, 0, (), PROGRAM.to_plain(), (), {}, len(rows), len(more))
        self.say(header, first | weights)
        return more

    def end(self, seconds: float = 5.0) -> Any:
        """How the function ended."""
        self._thread.join(timeout=seconds)
        assert not self._thread.is_alive(), "the function hangs"
        return self.ended

    def close(self) -> None:
        self._thread.join(timeout=25)
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.close()


def test_rows_are_computed_while_others_are_still_to_be_sent(host: Host) -> None:
    """The first block cannot be computed, and the function says so before it was sent the second."""
    more = host.task(7, ROWS[:, :2])
    failed = host.hear()
    assert isinstance(failed, wire.Failed)
    assert "expected float ['n', 3]" in failed.reason
    for at, block in enumerate(more, start=1):  # nobody reads them, and that is all
        host.say(wire.More(7, at, ()), block)
    for at, block in enumerate(host.task(8), start=1):
        host.say(wire.More(8, at, ()), block)
    assert isinstance(host.hear(), wire.Push)
    assert np.array_equal(host.arrays["y"], ROWS + WEIGHTS["b"])
    assert host.end().failed == 1


def test_waiting_for_rows_is_not_working(host: Host) -> None:
    one, two = host.task(7)
    host.say(wire.More(7, 1, ()), one)
    time.sleep(0.2)
    host.say(wire.More(7, 2, ()), two)
    push = host.hear()
    assert push.parked_ms > 150
    assert push.busy_ms < push.parked_ms
    assert host.end().parked_ms == pytest.approx(push.parked_ms)


def test_blocks_of_two_tasks_may_come_in_turn(host: Host) -> None:
    """The next task arrives while the present one waits for its rest."""
    more, others = host.task(7), host.task(8, -ROWS)
    for at, (one, other) in enumerate(zip(more, others, strict=True), start=1):
        host.say(wire.More(8, at, ()), other)
        host.say(wire.More(7, at, ()), one)
    for lease, rows in ((7, ROWS), (8, -ROWS)):
        assert host.hear().lease == lease
        assert np.array_equal(host.arrays["y"], rows + WEIGHTS["b"])


def test_who_never_gets_the_rest_ends(host: Host) -> None:
    """A word now and then, as when the roll is called, does not keep it waiting."""
    host.say(wire.More(7, 1, ()), host.task(7)[0])
    for _ in range(5):
        time.sleep(0.1)
        host.say(wire.Ack(0, "ok"))
    summary = host.end()
    assert (summary.tasks, summary.failed, summary.reason) == (0, 0, "idle")
    assert isinstance(host.hear(), wire.Bye)  # and its lease is free


def test_who_is_told_to_stop_does_not_wait_for_the_rest(host: Host) -> None:
    host.task(7)
    host.say(wire.Stop("enough"))
    assert host.end().reason == "enough"


def test_the_rest_is_not_waited_for_beyond_the_time_limit() -> None:
    host = Host(idle_s=30.0, limit_s=1.0)
    host.task(7)
    assert host.end().reason == "time"
    host.close()


def test_who_is_told_to_stop_after_the_rest_brings_the_result(host: Host) -> None:
    for at, block in enumerate(host.task(7), start=1):
        host.say(wire.More(7, at, ()), block)
    host.say(wire.Stop("enough"))
    assert isinstance(host.hear(), wire.Push)
    assert host.end().reason == "enough"


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([(7, 2)], "block 2 of lease 7, expected 1"),
        ([(7, 1), (7, 1)], "block 1 of lease 7, expected 2"),
        ([(7, 1), (7, 2), (7, 3)], "none is expected"),
        ([(9, 1)], "lease 9, of which none is expected"),
    ],
    ids=str,
)
def test_wrong_blocks_end_it_and_nothing_is_pushed(
    host: Host, blocks: list[tuple[int, int]], message: str
) -> None:
    more = host.task(7)
    for lease, number in blocks:
        host.say(wire.More(lease, number, ()), more[min(number, 2) - 1])
    error = host.end()
    assert isinstance(error, WireError)
    assert message in str(error)
    if len(blocks) < 3:
        with pytest.raises(AssertionError, match="nothing came"):
            host.hear(0.1)


@pytest.mark.parametrize("change", ["more rows", "fewer rows", "another name", "other columns"])
def test_blocks_of_wrong_rows_are_not_computed(host: Host, change: str) -> None:
    one, two = host.task(7)
    x = two["x"]
    wrong = {
        "more rows": {"x": np.concatenate([x, x])},
        "fewer rows": {"x": x[:-1]},
        "another name": {"z": x},
        "other columns": {"x": x[:, :2]},
    }[change]
    host.say(wire.More(7, 1, ()), one)
    host.say(wire.More(7, 2, ()), wrong)
    if change == "another name":
        assert isinstance(host.end(), WireError)
    else:
        assert isinstance(host.hear(), wire.Failed)


@pytest.fixture
def post() -> Iterator[Post]:
    made = Post("job", Keys(KeyPair.draw(), KeyPair.draw(), FUNCTIONS.public), terms=Terms(0.3, 3.0, 1.0))
    yield made
    made.close()


def streamed(rows: Any = ROWS) -> Work:
    first, *more = cut({"x": rows})
    return Work(0, first, lambda: (PROGRAM.to_plain(), WEIGHTS), num_rows=len(rows), more=tuple(more))


def test_the_post_sends_all_blocks_and_counts_them(post: Post) -> None:
    for at in range(6):
        post.offer(key(at), streamed(ROWS * at))
    assert work(order(post.entry.address, post.entry.public)).tasks == 6
    for _ in range(6):
        done = post.inbox.get(timeout=5)
        assert isinstance(done, Done)
        assert np.array_equal(done.arrays["y"], ROWS * done.key.interval + WEIGHTS["b"])
    assert post.sent["tasks"] == 6 * ROWS.nbytes
    assert post.sent_messages["tasks"] == 6 * 3
    assert (post.messages["Push"], post.received["results"]) == (6, 6 * ROWS.nbytes)


def test_a_lease_that_is_given_again_sends_all_blocks_again(post: Post) -> None:
    post.offer(key(0), streamed())
    context = zmq.Context()
    lost = entered(context, order(post.entry.address, post.entry.public, function="lost"))
    lost.send(wire.pack(wire.Pull()))
    for kind in (wire.Task, wire.More):  # and it goes, before the last of three
        assert lost.poll(5.0)
        assert isinstance(wire.unpack(lost.receive())[0], kind)
    lost.close(0)
    context.term()
    post.lose("lost")
    assert work(order(post.entry.address, post.entry.public, function="other")).tasks == 1
    assert np.array_equal(post.inbox.get(timeout=5).arrays["y"], ROWS + WEIGHTS["b"])
    assert post.sent["tasks"] == 2 * ROWS.nbytes
    assert post.ledger.counts["again"] == 1


def test_a_server_that_goes_away_in_the_middle_leaves_nobody_waiting() -> None:
    host = Host()
    host.task(7)
    host._socket.close(linger=0)
    assert host.end().reason == "idle"
    host.close()


def test_functions_cannot_send_blocks(post: Post) -> None:
    context = zmq.Context()
    client = entered(context, order(post.entry.address, post.entry.public))
    client.send(wire.pack(wire.More(1, 1, ()), {"x": ROWS}))
    deadline = time.monotonic() + 5
    while post.refused["message"] != 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    client.close(0)
    context.term()
