"""Ranks as threads of one process: the same interface without sockets, for tests and for virtual ranks on one device.

Messages are copied when sent, as a network would. A rank that fails breaks the hub, and whoever waits is told. Whoever
measures virtual ranks hands in ``Turns``, which say who may compute when.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from polyhop.comm.collective import Collective
from polyhop.comm.traffic import Traffic
from polyhop.errors import InputError, PeerError

__all__ = ["ThreadCollective", "Turns", "run_in_threads"]

T = TypeVar("T")
_Way = tuple[int, int, int, int]  # (line, tag, source, destination)


class Turns:
    """Who computes when: here all ranks, whenever they like."""

    def waiting(self, rank: int) -> AbstractContextManager[None]:
        """Entered by the rank's thread while it waits for a message."""
        return nullcontext()

    def moving(self, rank: int) -> AbstractContextManager[None]:
        """Entered while it copies one, which a network would do."""
        return nullcontext()


class _Hub:
    """Messages under way. All fields below ``turns`` are guarded by ``changed``."""

    def __init__(self, latency_s: float, turns: Turns) -> None:
        self.latency_s, self.turns = latency_s, turns
        self.changed = threading.Condition()
        self.mail: dict[tuple[_Way, int], tuple[float, Tensor]] = {}  # by way and number
        self.sent: Counter[_Way] = Counter()
        self.expected: Counter[_Way] = Counter()
        self.broken: tuple[int, BaseException] | None = None

    def put(self, way: _Way, tensor: Tensor) -> None:
        with self.changed:
            due = time.monotonic() + self.latency_s
            self.mail[way, self.sent[way]] = (due, tensor.clone())
            self.sent[way] += 1
            self.changed.notify_all()

    def expect(self, way: _Way) -> tuple[_Way, int]:
        """Which message a receive that begins now will get, whenever it is waited for: the next one that none expects."""
        with self.changed:
            self.expected[way] += 1
            return way, self.expected[way] - 1

    def take(self, message: tuple[_Way, int]) -> Tensor:
        with self.changed:
            self.changed.wait_for(lambda: self.broken is not None or message in self.mail)
            if message not in self.mail:
                assert self.broken is not None
                raise PeerError(f"rank {self.broken[0]} failed: {self.broken[1]}")
            due, tensor = self.mail.pop(message)
        time.sleep(max(0.0, due - time.monotonic()))
        return tensor

    def fail(self, rank: int, error: BaseException) -> None:
        with self.changed:
            if self.broken is None:
                self.broken = (rank, error)
            self.changed.notify_all()


class ThreadCollective(Collective):
    """One rank of a group of threads; ``group`` makes them all."""

    def __init__(
        self,
        hub: _Hub,
        rank: int,
        num_ranks: int,
        line: tuple[int, list[int]],
        traffic: Traffic,
    ) -> None:
        self._hub, self.rank, self.num_ranks = hub, rank, num_ranks
        self._line, self._lines = line  # this line's number; how many lines this rank has opened
        self.traffic, self.device = traffic, torch.device("cpu")

    @classmethod
    def group(
        cls, num_ranks: int, *, latency_s: float = 0.0, turns: Turns | None = None
    ) -> list[ThreadCollective]:
        """The first line of each rank."""
        hub = _Hub(latency_s, turns or Turns())
        return [cls(hub, rank, num_ranks, (0, [1]), Traffic()) for rank in range(num_ranks)]

    def fork(self) -> ThreadCollective:
        line = self._lines[0]
        self._lines[0] += 1
        return ThreadCollective(self._hub, self.rank, self.num_ranks, (line, self._lines), self.traffic)

    def close(self) -> None:
        """Threads hold nothing that outlives them."""

    def fail(self, error: BaseException) -> None:
        """Wake all who wait for this rank, with PeerError."""
        self._hub.fail(self.rank, error)

    def _post(
        self, send: Sequence[Tensor | None], receive: Sequence[Tensor | None], tag: int = 0
    ) -> Callable[[], None]:
        turns = self._hub.turns
        for q, piece in enumerate(send):
            if piece is not None:
                with turns.moving(self.rank):
                    self._hub.put((self._line, tag, self.rank, q), piece)

        arriving = [
            (piece, self._hub.expect((self._line, tag, q, self.rank)))
            for q, piece in enumerate(receive)
            if piece is not None
        ]

        def finish() -> None:
            for piece, message in arriving:
                with turns.waiting(self.rank):
                    got = self._hub.take(message)
                if (got.dtype, got.numel()) != (piece.dtype, piece.numel()):  # a network would mix up bytes
                    raise InputError(
                        f"rank {message[0][2]} sent {got.dtype} {list(got.shape)}, rank {self.rank} expected "
                        f"{piece.dtype} {list(piece.shape)}"
                    )
                with turns.moving(self.rank):
                    piece.copy_(got.view_as(piece))
                    del got

        return finish


def run_in_threads(
    num_ranks: int,
    function: Callable[..., T],
    *args: Any,
    latency_s: float = 0.0,
    turns: Turns | None = None,
) -> list[T]:
    """function(collective, *args) on every rank, each a thread; the results in rank order.

    If a rank raises, the others are woken with PeerError, and the first error is raised here.
    """
    lines = ThreadCollective.group(num_ranks, latency_s=latency_s, turns=turns)
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def rank_main(line: ThreadCollective) -> None:
        try:
            results[line.rank] = function(line, *args)
        except BaseException as error:  # whatever it is belongs to the caller
            errors.append(error)
            line.fail(error)

    threads = [
        threading.Thread(target=rank_main, args=(line,), name=f"polyhop-rank-{line.rank}") for line in lines
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
