"""Section ``transport``: what leases and messages cost, everything encrypted.

tasks_per_s_4mb   two functions, 4 MB each way, add a row to each row
empty_task_ms     one function that asks for a task when it has done one; tasks of one row of one column
streaming_speedup one function, one task at a time: 16 MB of rows in one message, and in several of which the first are
                  computed while the others come (602 -> 128 columns). Both ways in turn, each turn's ratio. Needs a free
                  core: where others have them all, nothing can be done at the same time, and there is nothing to gain
streaming_rate    the same with tasks enough that the next is always on its way: there is less to gain
recovery_s        from kill -9 of the only function that has a task to the result, brought by another that waits: by its
                  lease (nobody tells the server of the death), and when the launcher tells it
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np

from benchmarks.harness import Figure, busy_cores
from polyhop.serverless.function import Order
from polyhop.serverless.ledger import Terms
from polyhop.serverless.local import LocalLauncher
from polyhop.serverless.mail import Done, Work
from polyhop.serverless.post import Post
from polyhop.serverless.program import Call, Program, Row
from polyhop.serverless.secrets import KeyPair, Keys
from polyhop.serverless.stream import cut
from polyhop.serverless.tasks import flat
from polyhop.serverless.wire import TaskKey

__all__ = ["offer", "opened", "rate", "run", "until"]

COLUMNS = 256
WIDE, WIDE_ROWS = 602, 6976
LEASE_S = 1.0
LATENCY_S = 0.15  # of a task, so that a function can be killed while it has it; part of what is told
QUIET = 0.3


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Rates of two functions, the cost of a task without content, and how long a death goes unnoticed."""
    turns, tasks = (1, 30) if is_quick else (5, 200)
    others = busy_cores()
    busy = f"; other work on {others:.1f} cores" if others > QUIET else ""
    rates = [rate(2, 4096, COLUMNS, tasks) for _ in range(turns)]
    each = ", ".join(f"{one:.0f}" for one in rates)
    told = f"2 functions, 4 MB each way, AES-256-GCM; {turns} turns of {tasks}: {each}{busy}"
    yield Figure("tasks_per_s_4mb", statistics.median(rates), "tasks/s", told, at_least=45)
    alone = [1000 / rate(1, 1, 1, 10 * tasks) for _ in range(turns)]
    told = f"1 function, one value, 2 wishes open; turns: {', '.join(f'{each:.2f}' for each in alone)}{busy}"
    yield Figure("empty_task_ms", statistics.median(alone), "ms", told, at_most=1.0)
    yield from _streaming(tasks, busy)
    for name, is_told in (("recovery_by_lease_s", False), ("recovery_when_told_s", True)):
        took = [_recovery(is_told) for _ in range(turns)]
        details = f"kill -9 to result, lease of {LEASE_S:g} s; turns: {', '.join(f'{each:.2f}' for each in took)}{busy}"
        yield Figure(name, statistics.median(took), "s", details, at_most=LEASE_S + 0.3)


def _program(columns: int) -> Program:
    return Program({"x": Row((columns,))}, {"b": (columns,)}, (Call("bias", ("x", "b"), ("y",)),), ("y",))


def opened(terms: Terms, latency_s: float = 0.0) -> tuple[Post, LocalLauncher]:
    """A post, and a launcher of functions that dial it."""
    functions = KeyPair.draw()
    post = Post("bench", Keys(KeyPair.draw(), KeyPair.draw(), functions.public), terms=terms)
    order = Order(
        "bench",
        "f",
        post.entry.address,
        post.entry.public,
        functions.public,
        functions.secret,
        latency_s=latency_s,
    )
    return post, LocalLauncher(order)


def offer(post: Post, number: int, rows: int, columns: int) -> None:
    """A task of ones."""
    program = _program(columns)
    first, *more = cut({"x": np.ones((rows, columns), np.float32)})
    weights = {"b": np.ones(columns, np.float32)}
    work = Work(0, first, lambda: (program.to_plain(), weights), num_rows=rows, more=tuple(more))
    post.offer(TaskKey(0, 0, number, 0, False), work)


def _streaming(tasks: int, busy: str) -> Iterator[Figure]:
    """Rows of large tasks in one message or in several."""
    rng = np.random.default_rng(0)
    rows = {"x": rng.standard_normal((WIDE_ROWS, WIDE)).astype(np.float32)}
    weights = {"w": rng.standard_normal((128, WIDE)).astype(np.float32)}
    program = Program({"x": Row((WIDE,))}, {"w": (128, WIDE)}, (Call("linear", ("x", "w"), ("y",)),), ("y",))
    ways = {"one": [flat(rows)], "several": cut(rows)}
    numbers = count()
    post, launcher = opened(Terms())

    def took(way: str, at_once: int) -> float:
        first, *more = ways[way]
        start = time.perf_counter()
        for _ in range(at_once):
            key = TaskKey(0, 0, next(numbers), 0, False)
            post.offer(
                key,
                Work(0, first, lambda: (program.to_plain(), weights), num_rows=WIDE_ROWS, more=tuple(more)),
            )
        for _ in range(at_once):
            assert isinstance(post.inbox.get(timeout=60), Done)
        return time.perf_counter() - start

    try:
        launcher.ensure(1)
        until(lambda: post.messages["Pull"] >= 2)
        for name, at_once, turns, bound in (
            ("streaming_speedup", 1, tasks // 2, 1.1),
            ("streaming_rate", 10, max(tasks // 20, 3), 0.9),
        ):
            pairs = [(took("one", at_once), took("several", at_once)) for _ in range(turns)]
            one, several = (1000 * statistics.median(each) / at_once for each in zip(*pairs, strict=True))
            told = f"16 MB, {at_once} at a time, 1 and {len(ways['several'])} messages; {turns} turns: "
            told += f"{one:.1f} and {several:.1f} ms{busy}"
            yield Figure(name, statistics.median(a / b for a, b in pairs), "x", told, at_least=bound)
    finally:
        post.close()
        launcher.close()


def until(is_so: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for something."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise RuntimeError("functions did not come")
        time.sleep(0.002)


def rate(functions: int, rows: int, columns: int, tasks: int) -> float:
    """Tasks a second, from when all functions wait for work."""
    post, launcher = opened(Terms())
    try:
        launcher.ensure(functions)
        until(lambda: post.messages["Pull"] >= 2 * functions)
        start = time.perf_counter()
        for number in range(tasks):
            offer(post, number, rows, columns)
        for _ in range(tasks):
            assert isinstance(post.inbox.get(timeout=60), Done)
        return tasks / (time.perf_counter() - start)
    finally:
        post.close()
        launcher.close()


def _recovery(is_told: bool) -> float:
    """Seconds from a death to the result."""
    post, launcher = opened(Terms(floor_s=LEASE_S, ratio=1.0, cold_s=LEASE_S), latency_s=LATENCY_S)
    try:
        launcher.ensure(2)
        until(lambda: post.messages["Pull"] >= 4)
        offer(post, 0, 1, 1)
        until(lambda: post.sent_messages["tasks"] == 1)
        (name,) = {lease.function for lease in post.ledger._leases.values()}
        pid = launcher.pids[name]
        os.kill(pid, signal.SIGKILL)
        start = time.perf_counter()
        if is_told:
            until(launcher.ended)
            post.lose(name)
        assert isinstance(post.inbox.get(timeout=60), Done)
        return time.perf_counter() - start
    finally:
        post.close()
        launcher.close()
