"""Fewer functions are wanted, or some are stuck: they leave in order, and are made up for. Real sockets."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from polyhop.serverless.crew import Crew
from polyhop.serverless.function import Order, work
from polyhop.serverless.ledger import Terms
from polyhop.serverless.local import LocalLauncher
from polyhop.serverless.mail import Done, Work
from polyhop.serverless.post import Post
from polyhop.serverless.program import Call, Program, Row
from polyhop.serverless.secrets import KeyPair, Keys
from polyhop.serverless.wire import TaskKey

sys.path.insert(0, str(Path(__file__).parent))

from faulty import ThreadLauncher  # type: ignore[import-not-found]

PROGRAM = Program({"x": Row((3,))}, {"b": (3,)}, (Call("bias", ("x", "b"), ("y",)),), ("y",))
FUNCTIONS = KeyPair.draw()


@pytest.fixture
def post() -> Iterator[Post]:
    made = Post("job", Keys(KeyPair.draw(), KeyPair.draw(), FUNCTIONS.public), terms=Terms(0.3, 1.0, 0.3))
    yield made
    made.close()


def order(post: Post, **given: Any) -> Order:
    return Order(
        "job", "f", post.entry.address, post.entry.public, FUNCTIONS.public, FUNCTIONS.secret, **given
    )


def offer(post: Post, intervals: range) -> None:
    made = Work(0, {"x": np.ones((2, 3))}, lambda: (PROGRAM.to_plain(), {"b": np.arange(3.0)}))
    for interval in intervals:
        post.offer(TaskKey(0, 0, interval, 0, False), made)


def done(post: Post, count: int, seconds: float = 20.0) -> None:
    for _ in range(count):
        assert isinstance(post.inbox.get(timeout=seconds), Done)


def until(is_so: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def test_surplus_functions_end_after_what_they_have_been_given(post: Post) -> None:
    """Each has two tasks when it is told to leave; nothing is given twice, nobody fails, one stays."""
    wanted = [3]
    post.ledger.terms = Terms(60.0, 1.0, 60.0)
    crew = Crew(ThreadLauncher(order(post, latency_s=0.4)), post, lambda: wanted[0])
    try:
        offer(post, range(6))
        until(lambda: post.ledger.num_leased == 6)
        wanted[0] = 1
        done(post, 6)
        until(lambda: len(crew.gone) == 2)
        assert post.ledger.counts["again"] == 0
        assert [each.is_failure for each in crew.gone] == [False, False]
        offer(post, range(6, 8))
        done(post, 2)
        assert crew.num_alive == 1
        wanted[0] = 2
        offer(post, range(8, 20))
        until(lambda: crew.num_alive == 2)
        done(post, 12)
        assert post.ledger.counts["again"] == 0
    finally:
        post.dismiss("over")
        crew.close()


def test_a_function_that_was_to_leave_may_stay_after_all(post: Post) -> None:
    orders = [replace(order(post, latency_s=0.3), function=name) for name in ("a", "b")]
    functions = [threading.Thread(target=work, args=(each,), daemon=True) for each in orders]
    post.ledger.terms = Terms(60.0, 1.0, 60.0)
    for each in functions:
        each.start()
    until(lambda: post.messages["Pull"] == 4)
    offer(post, range(4))
    until(lambda: post.ledger.num_leased == 4)
    post.limit({"a", "b"}, 1)
    until(lambda: post.num_serving == 1)
    post.limit({"a", "b"}, 2)
    done(post, 4)
    offer(post, range(4, 8))
    done(post, 4)
    assert post.messages["Bye"] == 0
    post.dismiss("over")
    for each in functions:
        each.join(timeout=10)
        assert not each.is_alive()


def test_the_only_function_hangs_and_is_made_up_for(post: Post) -> None:
    """A process is stopped (SIGSTOP) with leases: it counts as alive, so another one must be started. It comes back."""
    launcher = LocalLauncher(order(post, latency_s=0.2))
    crew = Crew(launcher, post, lambda: 1)
    try:
        offer(post, range(2))
        until(lambda: post.ledger.num_leased == 2)
        (pid,) = launcher.pids.values()
        os.kill(pid, signal.SIGSTOP)
        offer(post, range(2, 4))
        done(post, 4)
        assert launcher.num_started >= 2
        os.kill(pid, signal.SIGCONT)
        until(lambda: crew.num_alive == 1)
        assert post.ledger.counts["ok"] == 4
        assert all(not each.is_failure for each in crew.gone)
    finally:
        post.dismiss("over")
        crew.close()
