"""Rows that intervals lend each other, of this server and of others, and gradients that are given back for them.

Rows of an interval are published here and sent to servers that read them (SC); one that waits may go on once all rows that
it reads are there, and not too old. Backward: gradients of what was read go to whoever owns it; the owner may go on once all
readers have given theirs, and sums them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyhop.serverless import wire
from polyhop.serverless.epochs import Epochs
from polyhop.serverless.intervals import Interval, Intervals
from polyhop.serverless.tables import Ages, Reading, Table

__all__ = ["Lending", "as_tensor"]


_Send = Callable[[int, wire.Rows | wire.Sums, Mapping[str, Any]], None]
"""(server, header, arrays)."""


class Lending:
    """``tables``: of each graph operation, by its place in the chain. ``send`` brings rows to another server."""

    def __init__(
        self, intervals: Intervals, tables: Mapping[int, Table], epochs: Epochs, send: _Send
    ) -> None:
        self._halo, self._tables, self._epochs, self._send = intervals.halo, dict(tables), epochs, send
        self._by_number: dict[int, Interval] = {each.number: each for each in intervals}
        self._waits: dict[int, tuple[int, int, bool]] = {}  # interval -> its epoch, place, backward?
        self.ages = Ages()

    def publish(self, number: int, place: int, epoch: int, rows: Mapping[str, Tensor]) -> None:
        """Rows of an interval, for all who read them (SC)."""
        interval = self._by_number[number]
        self._tables[place].put(number, interval.rows, epoch, rows)
        for server, lent in interval.lent.items():
            sent = {name: value.index_select(0, lent).numpy() for name, value in rows.items()}
            self._send(server, wire.Rows(place, number, epoch, ()), sent)

    def give(self, number: int, place: int, epoch: int, grads: Mapping[str, Tensor]) -> None:
        """Gradients of the rows that an interval read, for their owners."""
        for server, positions in self._by_number[number].back.items():
            sent = {name: grad.index_select(0, positions).numpy() for name, grad in grads.items()}
            self._send(server, wire.Sums(place, number, epoch, ()), sent)
        self._tables[place].give(number, epoch, grads)

    def take(self, header: wire.Rows | wire.Sums, arrays: Mapping[str, Any]) -> None:
        """What another server has sent."""
        table = self._tables[header.table]
        rows = {name: as_tensor(value) for name, value in arrays.items()}
        if isinstance(header, wire.Rows):
            table.put(header.interval, self._halo[header.interval], header.epoch, rows)
        else:
            table.give(header.interval, header.epoch, {name: value.clone() for name, value in rows.items()})

    def wait(self, number: int, place: int, epoch: int, is_backward: bool) -> None:
        """An interval needs rows that others publish; ``is_backward``: what readers of its own give back."""
        self._waits[number] = epoch, place, is_backward

    def released(self, place: int, is_backward: bool) -> list[int]:
        """Intervals that wait at a place and may go on now. They do not wait any more."""
        found = [
            number
            for number, (epoch, *where) in self._waits.items()
            if where == [place, is_backward]
            and all(self._epochs.is_readable(tag, epoch) for tag in self.tags(number, place, is_backward))
        ]
        for number in found:
            del self._waits[number]
        return found

    def tags(self, number: int, place: int, is_backward: bool) -> list[int]:
        """Epochs of the rows that an interval reads, or of what readers of its own have given."""
        interval, table = self._by_number[number], self._tables[place]
        if is_backward:
            return [table.given_epoch(reader.number) for reader in interval.readers]
        return [table.tags[read] for read in interval.reads]

    def read(self, number: int, place: int, epoch: int) -> Reading:
        """The rows that an interval reads now: checked, and counted by age."""
        self.ages.check(epoch, self.tags(number, place, False), self._epochs.bound(epoch))
        return self._tables[place].reading(self._by_number[number], epoch)

    def collected(self, number: int, place: int, epoch: int) -> dict[str, Tensor]:
        """What readers gave for an interval's rows, summed, checked and counted likewise."""
        self.ages.check(epoch, self.tags(number, place, True), self._epochs.bound(epoch))
        return self._tables[place].collect(self._by_number[number], epoch)


def as_tensor(value: Any) -> Tensor:
    """Shares memory with the message it came in; nothing writes to it."""
    array = np.asarray(value)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
