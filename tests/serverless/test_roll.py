"""The roll: who came and who left, for launchers that cannot see their functions; who asks, who stays, who leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from polyhop.serverless import roll as roll_module
from polyhop.serverless import wire
from polyhop.serverless.channel import Channel
from polyhop.serverless.function import Order, work
from polyhop.serverless.ledger import Ledger, Terms
from polyhop.serverless.mail import Came, Left, Work
from polyhop.serverless.post import Post
from polyhop.serverless.program import Call, Program, Row
from polyhop.serverless.roll import Function, Roll
from polyhop.serverless.secrets import KeyPair, Keys
from polyhop.serverless.wire import TaskKey

PROGRAM = Program({"x": Row((3,))}, {"b": (3,)}, (Call("bias", ("x", "b"), ("y",)),), ("y",))
FUNCTIONS = KeyPair.draw()
WORK = Work(0, {"x": np.ones((2, 3))}, lambda: (PROGRAM.to_plain(), {"b": np.arange(3.0)}))


@pytest.fixture
def post(monkeypatch: pytest.MonkeyPatch) -> Iterator[Post]:
    monkeypatch.setattr(roll_module, "_CALLS_S", 0.05)
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
    monkeypatch.setattr(roll_module, "_SILENT_S", 0.3)
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


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def rolled(*names: str) -> tuple[Roll, Ledger[int], Clock, list[Function]]:
    """Functions that are at the desk; nothing is open in the ledger."""
    clock, ledger = Clock(), Ledger[int](Terms(floor_s=1.0, cold_s=10.0))
    roll = Roll(ledger, clock)
    functions = [roll.enter(name) for name in names]
    for each in functions:
        each.identity = each.name.encode()
    return roll, ledger, clock, functions


def leased(ledger: Ledger[int], function: str, interval: int, now: float = 100.0) -> int:
    ledger.offer(TaskKey(0, 0, interval, 0, False), interval)
    found = ledger.lease(function, now)
    assert found is not None
    return found[0].number


def test_wishes_are_met_in_their_order_of_those_who_are_here_and_stay() -> None:
    roll, _, _, (a, b, c) = rolled("a", "b", "c")
    assert roll.wisher() is None
    for each in (b, a, b, c):
        roll.wish(each, [(1, 2)])
    assert (b.wishes, b.held, roll.has_wishes) == (2, {(1, 2)}, True)
    assert roll.wisher() is b
    assert roll.wisher() is b  # asking meets nothing
    roll.meet()
    assert (roll.wisher(), b.wishes) == (a, 1)
    roll.lose("a")
    b.is_leaving = True
    assert roll.wisher() is c
    roll.meet()
    assert roll.wisher() is None
    assert not roll.has_wishes


def test_one_that_is_lost_gives_its_leases_up() -> None:
    roll, ledger, _, (a, _) = rolled("a", "b")
    leased(ledger, "a", 0)
    assert ledger.num_waiting == 0
    roll.lose("a")
    assert (ledger.num_waiting, roll.news()) == (1, [Left("a", True, "its connection is gone")])
    assert a.session.name not in roll.functions
    roll.lose("a")
    assert roll.news() == []  # it was told before
    roll.lose("b", Left("b", False, "idle"))
    assert roll.news() == [Left("b", False, "idle")]


def test_only_a_sessions_password_opens_it() -> None:
    roll, _, _, (a, b) = rolled("a", "b")
    word = a.session.password.encode()
    assert roll.user(a.session.name, word) == a.session.name
    assert roll.user(b.session.name, word) is None
    assert roll.user("nobody", word) is None
    roll.lose("a")
    assert roll.user(a.session.name, word) is None


def test_the_roll_is_called_now_and_then() -> None:
    """Who cannot be reached is lost, and who is silent; not who computes, nor who has not come to the desk yet."""
    roll, ledger, clock, functions = rolled("gone", "silent", "busy", "heard", "new")
    functions[4].identity = None
    called: list[str] = []

    def answers(function: Function) -> bool:
        called.append(function.name)
        return function.name != "gone"

    clock.now += 0.9
    roll.call(answers)
    assert called == []
    clock.now += 0.2
    roll.call(answers)
    assert called == ["gone", "silent", "busy", "heard"]
    assert roll.news() == [Left("gone", True, "its connection is gone")]
    clock.now = 131.0
    leased(ledger, "busy", 0, clock.now)
    functions[3].seen = functions[4].seen = clock.now
    roll.call(answers)
    assert roll.news() == [Left("silent", True, "nothing was heard of it for 30 s")]
    assert [each.name for each in roll.functions.values()] == ["busy", "heard", "new"]


def test_of_those_who_are_too_many_the_idle_ones_leave_first() -> None:
    roll, ledger, _, (a, b, c) = rolled("a", "b", "c")
    number = leased(ledger, "a", 0)
    assert roll.limit({"a", "b", "c"}, 2) == [b]
    assert (roll.num_serving, roll.num_stuck) == (2, 0)
    assert roll.limit({"a", "c"}, 1) == [c]
    assert roll.limit({"a"}, 0) == [a]
    assert [roll.let_go(each) for each in (a, b, b)] == [False, True, False]  # a has a task; b is told once
    ledger.commit(TaskKey(0, 0, 0, 0, False), number, 101.0)
    assert roll.let_go(a)


def test_one_that_was_to_leave_stays_where_more_are_wanted_again() -> None:
    """Its wishes count again, once each."""
    roll, ledger, _, (a, b) = rolled("a", "b")
    for each in (a, b, b):
        roll.wish(each, ())
    leased(ledger, "a", 0)
    assert roll.limit({"a", "b"}, 1) == [b]
    assert roll.wisher() is a
    roll.meet()
    assert roll.wisher() is None
    assert roll.limit({"a", "b"}, 2) == []
    assert (roll.wisher(), b.wishes, roll.num_serving) == (b, 2, 2)


def test_one_whose_leases_have_all_run_out_does_not_count() -> None:
    roll, ledger, clock, (a, b) = rolled("a", "b")
    leased(ledger, "a", 0)
    roll.wish(b, ())
    clock.now += 9.0
    assert roll.limit({"a", "b"}, 1) == [b]  # a is at work
    b.is_leaving = False
    clock.now += 2.0
    assert roll.limit({"a", "b"}, 1) == []
    assert (roll.num_stuck, roll.num_serving) == (1, 1)
    a.seen = clock.now
    assert roll.limit({"a", "b"}, 1) == [a]
    assert roll.num_stuck == 0


def test_who_was_heard_of_lately() -> None:
    roll, _, clock, (_, b, _) = rolled("a", "b", "c")
    clock.now += 6.0
    assert (roll.num_heard(5.0), roll.num_heard(7.0)) == (0, 3)
    roll.wish(b, ())
    assert roll.num_heard(5.0) == 1


def test_who_comes_too_late_is_turned_away() -> None:
    roll, _, _, _ = rolled()
    roll.come("late")
    roll.turn_away("late", "the run is over")
    assert roll.news() == [Came("late"), Left("late", False, "the run is over")]
    assert not roll.functions
