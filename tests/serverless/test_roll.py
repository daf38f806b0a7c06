"""The post's news: who came and who left, for launchers that cannot see their functions."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from polyhop.serverless import post as post_module
from polyhop.serverless import wire
from polyhop.serverless.channel import Channel
from polyhop.serverless.function import Order, work
from polyhop.serverless.ledger import Ledger, Terms
from polyhop.serverless.post import Came, Keys, Left, Post, Work
from polyhop.serverless.program import Call, Program, Row
from polyhop.serverless.secrets import KeyPair
from polyhop.serverless.wire import TaskKey

PROGRAM = Program({"x": Row((3,))}, {"b": (3,)}, (Call("bias", ("x", "b"), ("y",)),), ("y",))
FUNCTIONS = KeyPair.draw()
WORK = Work(0, {"x": np.ones((2, 3))}, lambda: (PROGRAM.to_plain(), {"b": np.arange(3.0)}))


@pytest.fixture
def post(monkeypatch: pytest.MonkeyPatch) -> Iterator[Post]:
    monkeypatch.setattr(post_module, "_CALLS_S", 0.05)
    made = Post("job", Keys(KeyPair.draw(), KeyPair.draw(), FUNCTIONS.public), terms=Terms(60.0, 60.0, 60.0))
    yield made
    made.close()


def order(post: Post, name: str) -> Order:
    return Order(
        "job", name, post.entry.address, post.entry.public, FUNCTIONS.public, FUNCTIONS.secret, idle_s=0.2
    )


def silent(context: zmq.Context[Any], post: Post, name: str) -> Channel:
    """A function that says Hello, wishes for a task, and then nothing more."""
    made = Channel(context, post.entry, FUNCTIONS, wire.Hello("job", name, wire.PROTOCOL, 1, 1000))
    assert made.enter(10.0) is None
    made.send(wire.pack(wire.Pull()))
    return made


def told(post: Post, number: int, seconds: float = 20.0) -> list[Came | Left]:
    found: list[Came | Left] = []
    deadline = time.monotonic() + seconds
    while len(found) < number:
        assert time.monotonic() < deadline, found
        found += post.news()
        time.sleep(0.01)
    return found


def test_one_that_says_bye(post: Post) -> None:
    """Being called changes nothing for it."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work(order(post, "f"))))
    thread.start()
    assert told(post, 2) == [Came("f"), Left("f", False, "idle")]
    thread.join()
    assert (found[0].reason, found[0].refused, found[0].tasks) == ("idle", 0, 0)
    post.lose("f")  # nothing new
    time.sleep(0.1)
    assert post.news() == []


def test_one_whose_connection_goes_with_a_task_in_hand(post: Post) -> None:
    """Its wishes are met, so no message of ours would tell; its task is given to another at once."""
    post.offer(TaskKey(0, 0, 0, 0, False), WORK)
    context = zmq.Context()
    gone = silent(context, post, "gone")
    try:
        assert told(post, 1) == [Came("gone")]
        assert gone.poll(10.0)
    finally:
        gone.close(0)
        context.term()
    assert told(post, 1) == [Left("gone", True, "its connection is gone")]
    work(order(post, "next"))
    assert post.inbox.get(timeout=10).key.interval == 0
    assert post.ledger.counts["again"] == 1


def test_one_that_hangs_is_lost_unless_its_lease_is_in_time(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(post_module, "_SILENT_S", 0.3)
    context = zmq.Context()
    post.offer(TaskKey(0, 0, 0, 0, False), WORK)
    busy = silent(context, post, "busy")
    assert busy.poll(10.0)
    idle = silent(context, post, "idle")
    try:
        found = told(post, 3)
        assert found == [Came("busy"), Came("idle"), Left("idle", True, "nothing was heard of it for 0.3 s")]
        assert post.ledger.holders(time.monotonic()) == {"busy"}
    finally:
        for each in (busy, idle):
            each.close(0)
        context.term()


def test_holders() -> None:
    ledger = Ledger[int](Terms(cold_s=10.0))
    for interval in range(2):
        ledger.offer(TaskKey(0, 0, interval, 0, False), interval)
    ledger.lease("a", 0.0)
    ledger.lease("b", 5.0)
    assert ledger.holders(6.0) == {"a", "b"}
    assert ledger.holders(10.0) == {"b"}
    ledger.commit(TaskKey(0, 0, 1, 0, False), 2, 7.0)
    assert ledger.holders(8.0) == {"a"}
