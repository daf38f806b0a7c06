"""Work ahead of the consumer: results in order, a bounded number at a time, from threads that never outlive their use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["ahead"]

_LOOK_UP_S = 0.2  # how often an idle worker looks whether the interpreter is exiting

T = TypeVar("T")


def ahead(
    load: Callable[[int], T], steps: range, num_workers: int, prefetch: int, *, finish_begun: bool = False
) -> Iterator[T]:
    """load(step) for each step (consecutive numbers), in order, by ``num_workers`` threads.

    At most ``prefetch`` results exist or are being made beside the one the consumer has. What a worker raises is raised
    here, at its step. The threads end with this generator, however it ends: at once, or with ``finish_begun`` after all
    steps that the consumer's last one allows, whether or not this worker had begun them: so ranks that load together and
    stop at the same step have loaded the same.
    """
    work: _Work[T] = _Work(steps, prefetch, finish_begun)
    # Not daemons: those die inside C++ frames when the interpreter exits, which aborts the process.
    threads = [
        threading.Thread(target=_run, args=(work, load), name=f"polyhop-ahead-{i}")
        for i in range(min(num_workers, len(steps)))
    ]
    try:
        for thread in threads:
            thread.start()
        for step in steps:
            yield work.get(step)
    finally:
        work.close()
        for thread in threads:
            # Garbage collection may close this generator inside one of its own workers.
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join()


class _Failed:
    """An exception on its way from a worker to the consumer."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Work(Generic[T]):
    """Steps handed out in order, results kept until their turn. All fields are guarded by ``changed``."""

    def __init__(self, steps: range, prefetch: int, finish_begun: bool = False) -> None:
        self.changed = threading.Condition()
        self.finish_begun = finish_begun
        self.next, self.consumed, self.stop = steps.start, steps.start, steps.stop
        self.prefetch = prefetch
        self.ready: dict[int, T | _Failed] = {}
        self.is_closed = False

    def take(self) -> int | None:
        """The next step to work on, once there is room for its result; None when there is no more."""
        with self.changed:
            while not self.is_over() and self.next >= self.consumed + self.prefetch:
                self.changed.wait(_LOOK_UP_S)
            is_allowed = self.next < min(self.stop, self.consumed + self.prefetch)
            if self.is_over() and not (self.is_closed and self.finish_begun and is_allowed):
                return None
            self.next += 1
            return self.next - 1

    def is_over(self) -> bool:
        """No step is left, or nobody is: a generator may still be referenced when the interpreter exits."""
        return self.is_closed or self.next >= self.stop or not threading.main_thread().is_alive()

    def put(self, step: int, result: T | _Failed) -> None:
        with self.changed:
            if not self.is_closed:
                self.ready[step] = result
            self.changed.notify_all()

    def get(self, step: int) -> T:
        """The result of a step, when it is there; raises what its worker raised."""
        with self.changed:
            self.changed.wait_for(lambda: step in self.ready)
            result = self.ready.pop(step)
            self.consumed = step + 1
            self.changed.notify_all()
        if isinstance(result, _Failed):
            raise result.error
        return result

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.ready.clear()
            self.changed.notify_all()


def _run(work: _Work[T], load: Callable[[int], T]) -> None:
    while (step := work.take()) is not None:
        try:
            result: T | _Failed = load(step)
        except BaseException as error:  # whatever it is belongs to the consumer
            result = _Failed(error)
        work.put(step, result)
        if isinstance(result, _Failed):
            return
