"""Rows of a large task in several messages, so that a function computes the first while the others are on their way.

A message is delivered only when all of it is there. Rows, gradients of outputs and saved arrays of a task are therefore cut
into blocks at the same rows: whole tiles, so that no tile waits for two messages. ``cut`` is the server's side, ``Arrivals``
the function's. Results do not depend on it: ``tiles`` gives the same bits however rows arrive. A result is one message.

A block of sparse rows has the ends of its rows in its own values; the first block alone begins them with a 0, so that the
payload is what it is in one message.

Legend: n rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from polyhop.serverless.ragged import Ragged
from polyhop.serverless.tasks import flat
from polyhop.serverless.tiles import TILE
from polyhop.serverless.wire import LIMITS, Array, Limits, More, Task, WireError, num_bytes

__all__ = ["BLOCK_BYTES", "Arrival", "Arrivals", "Wait", "block_rows", "cut", "num_messages"]

BLOCK_BYTES = 1 << 20
"""Of the rows of a message, about; tasks of no more go in one. Of one task at a time on one function (602 or 128 columns to
128 or 64, a busy machine), 16 MB took 1.2 to 1.75 times less with blocks of 0.25 to 4 MB, best with 0.5 to 1 MB; 4 MB
1.0 to 1.5 times less; at 2 MB the two ways could not be told apart."""


def block_rows(num_rows: int, total_bytes: int, limits: Limits = LIMITS) -> int:
    """Rows in a message, of a task of so many rows and bytes: whole tiles, or all."""
    if total_bytes <= BLOCK_BYTES or num_rows <= TILE:
        return num_rows
    tiles = -(-num_rows // TILE)
    return TILE * max(BLOCK_BYTES * tiles // total_bytes, -(-tiles // limits.num_blocks), 1)


def num_messages(num_rows: int, total_bytes: int) -> int:
    """In which the rows of a task travel."""
    return max(-(-num_rows // max(block_rows(num_rows, total_bytes), 1)), 1)


def cut(rows: Mapping[str, Any]) -> list[dict[str, Array]]:
    """The arrays [n, ...] of a task as its messages carry them, at least one."""
    whole = flat(rows)
    num_rows = next((value.shape[0] for value in rows.values()), 0)
    step = block_rows(num_rows, num_bytes(whole))
    if step >= num_rows:
        return [whole]
    return [_block(rows, start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def _block(rows: Mapping[str, Any], start: int, stop: int) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for name, value in rows.items():
        if isinstance(value, Ragged):
            first, last = value.indptr[start], value.indptr[stop]
            found[f"{name}/indptr"] = value.indptr[start + (start > 0) : stop + 1] - first
            found[f"{name}/indices"] = value.indices[first:last]
            found[f"{name}/values"] = value.values[first:last]
        else:
            found[name] = value[start:stop]
    return found


Wait: TypeAlias = Callable[[Callable[[], bool]], None]
"""Takes what has arrived until what it is given says so; or raises."""


class Arrival:
    """A task whose rows may still be on their way. WireError where a block is not the one that must come next."""

    def __init__(self, task: Task, arrays: Mapping[str, Array], limits: Limits = LIMITS) -> None:
        if not 0 <= task.num_more < limits.num_blocks:
            raise WireError(f"a task of {task.num_more + 1} blocks; {limits.num_blocks} are allowed")
        rows = {name: value for name, value in arrays.items() if not name.startswith("w:")}
        self.task, self.arrays = task, arrays
        self._limits, self._names, self._num_bytes = limits, rows.keys(), num_bytes(rows)
        self._there: deque[dict[str, Array]] = deque([rows])
        self._next, self._is_dropped = 1, False

    @property
    def is_complete(self) -> bool:
        return self._next > self.task.num_more

    def put(self, more: More, arrays: dict[str, Array]) -> None:
        """The next block."""
        if more.block != self._next or self.is_complete:
            raise WireError(
                f"block {more.block} of lease {more.lease}, expected {self._next} of {self.task.num_more}"
            )
        if arrays.keys() != self._names:
            raise WireError(f"a block of {sorted(arrays)}, expected {sorted(self._names)}")
        self._num_bytes += num_bytes(arrays)
        if self._num_bytes > self._limits.task_bytes:
            raise WireError(
                f"a task of {self._num_bytes} bytes or more; {self._limits.task_bytes} are allowed"
            )
        self._next += 1
        if not self._is_dropped:
            self._there.append(arrays)

    def drop(self) -> None:
        """Nobody will read it: what is there is let go, and what comes."""
        self._is_dropped = True
        self._there.clear()

    def rows(self, wait: Wait) -> dict[str, Array] | Iterator[dict[str, Array]]:
        """Arrays of all rows; or blocks as they arrive."""
        return self._blocks(wait) if self.task.num_more else self._there.popleft()

    def _blocks(self, wait: Wait) -> Iterator[dict[str, Array]]:
        for _ in range(self.task.num_more + 1):
            wait(lambda: bool(self._there))
            yield self._there.popleft()


class Arrivals:
    """Tasks whose rows have not all arrived, by lease."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._open: dict[int, Arrival] = {}

    def begin(self, task: Task, arrays: Mapping[str, Array]) -> Arrival:
        """A task has come, with the first of its rows."""
        if task.lease in self._open:
            raise WireError(f"lease {task.lease} came twice")
        arrival = Arrival(task, arrays, self._limits)
        if not arrival.is_complete:
            self._open[task.lease] = arrival
        return arrival

    def put(self, more: More, arrays: dict[str, Array]) -> None:
        """A further block has come."""
        if more.lease not in self._open:
            raise WireError(f"block {more.block} of lease {more.lease}, of which none is expected")
        arrival = self._open[more.lease]
        arrival.put(more, arrays)
        if arrival.is_complete:
            del self._open[more.lease]
