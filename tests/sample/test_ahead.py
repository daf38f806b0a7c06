"""Working ahead: order, bound, exceptions, and that no thread is left, however the consumer leaves."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from polyhop.sample.ahead import ahead


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("polyhop-ahead")]


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    assert workers() == []
    yield
    assert workers() == []


@pytest.mark.parametrize("num_workers", [1, 2, 5])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_results_come_in_order(num_workers: int, prefetch: int) -> None:
    def load(step: int) -> int:
        time.sleep(0.002 * (step % 3))  # later steps finish first
        return step * step

    assert list(ahead(load, range(4, 20), num_workers, prefetch)) == [step * step for step in range(4, 20)]


def test_no_steps() -> None:
    assert list(ahead(lambda step: step, range(3, 3), 2, 2)) == []


@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_at_most_prefetch_results_are_ahead(prefetch: int) -> None:
    started: list[int] = []
    results = ahead(lambda step: started.append(step), range(30), 3, prefetch)
    for taken in range(10):
        next(results)
        time.sleep(0.01)
        assert len(started) <= taken + 1 + prefetch
    deadline = time.monotonic() + 30
    while len(started) < 10 + prefetch:  # and all of them are used
        assert time.monotonic() < deadline
        time.sleep(0.01)
    results.close()  # type: ignore[attr-defined]


def test_an_exception_is_raised_at_its_step() -> None:
    def load(step: int) -> int:
        if step == 3:
            raise OSError("disk gone")
        return step

    results = ahead(load, range(10), 2, 4)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="disk gone"):
        next(results)
    assert workers() == []
    with pytest.raises(StopIteration):
        next(results)


def test_leaving_early_ends_the_threads() -> None:
    for step in ahead(lambda step: step, range(1000), 3, 4):
        if step == 2:
            break
    gc.collect()
    assert workers() == []


def test_an_error_of_the_consumer_ends_the_threads() -> None:
    def consume() -> None:
        for _ in ahead(lambda step: step, range(1000), 2, 4):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    gc.collect()
    assert workers() == []


def test_ctrl_c_while_waiting_ends_the_threads() -> None:
    """A real SIGINT, while the main thread waits for a slow result; the threads are gone when it has been handled."""
    code = """
import os, signal, threading, time
from polyhop.sample.ahead import ahead
def load(step):
    if step == 1:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
    return step
try:
    for step in ahead(load, range(100), 2, 2):
        pass
except KeyboardInterrupt:
    print("interrupted", threading.active_count())
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.split() == ["interrupted", "1"]


def test_an_abandoned_generator_does_not_block_exit() -> None:
    code = """
from polyhop.sample.ahead import ahead
results = ahead(lambda step: step, range(1000), 2, 2)
next(results)
print("done")
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "done"
    assert out.stderr == ""


def test_nothing_runs_before_the_first_result_is_wanted() -> None:
    ahead(lambda step: pytest.fail("ran"), range(3), 2, 2)


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("prefetch", [1, 2, 5])
@pytest.mark.parametrize("taken", [1, 3, 8, 9])
def test_with_finish_begun_the_consumer_alone_decides_what_is_loaded(
    num_workers: int, prefetch: int, taken: int
) -> None:
    """However fast a worker is: all steps that the consumer's last one allows, no other, and all done when it is closed."""
    for pause_s in (0.0, 0.01):
        loaded: list[int] = []

        def load(step: int, pause_s: float = pause_s, loaded: list[int] = loaded) -> int:
            time.sleep(pause_s)
            loaded.append(step)
            return step

        results = ahead(load, range(2, 12), num_workers, prefetch, finish_begun=True)
        assert [next(results) for _ in range(taken)] == list(range(2, 2 + taken))
        results.close()  # type: ignore[attr-defined]
        assert workers() == []
        assert sorted(loaded) == list(range(2, min(12, 2 + taken + prefetch)))


def test_without_finish_begun_what_is_not_begun_is_left() -> None:
    entered, gate = threading.Event(), threading.Event()
    loaded: list[int] = []

    def load(step: int) -> int:
        if step == 1:
            entered.set()
            gate.wait(30)
        loaded.append(step)
        return step

    results = ahead(load, range(10), 1, 5)
    next(results)
    assert entered.wait(30)
    threading.Timer(0.05, gate.set).start()  # after close began to wait for the thread
    results.close()  # type: ignore[attr-defined]
    assert loaded == [0, 1]


def test_finish_begun_of_a_generator_never_started() -> None:
    results = ahead(lambda step: pytest.fail("ran"), range(3), 1, 2, finish_begun=True)
    results.close()  # type: ignore[attr-defined]


def test_finish_begun_ends_at_a_failure() -> None:
    """A worker that failed loads no more, and closing does not wait for what it will never do."""
    loaded: list[int] = []

    def load(step: int) -> int:
        if step == 1:
            raise OSError("disk gone")
        loaded.append(step)
        return step

    results = ahead(load, range(10), 1, 4, finish_begun=True)
    assert next(results) == 0
    with pytest.raises(OSError, match="disk gone"):
        next(results)
    assert loaded == [0]
    assert workers() == []
