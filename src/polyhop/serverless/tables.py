"""Rows that graph operations read, and gradients that come back for them, each with the epoch that it is of.

A table belongs to one graph operation: rows of all own nodes and of the halo, an epoch for each interval's. What an interval
gives back for the rows that it read is kept by reader, and summed in the order of readers' numbers: the same bits whatever
came first. ``Ages`` checks what is read: rows of this epoch and of none else where ages may not differ, else rows at most
``bound`` epochs older and at most ``bound - 1`` newer. A read outside is an error, never a silent one.

Old rows mislead by what they have changed since. Where a table ``extrapolates`` it keeps what it had before, and whoever
reads rows of an epoch t < e in epoch e is given where they were heading, s more steps like the last:

    r(e) = r(t) + s (r(t) - r(t')),    s = (e - t) / (t - t'), at most 2;  t' the epoch of what was there before

So it is with gradients. What is of the reader's epoch, or newer, is never changed.

Legend: S sources of a part, or of an interval.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyhop.errors import PolyhopError
from polyhop.serverless.intervals import Interval

__all__ = ["NEVER", "Ages", "Reading", "StalenessError", "Table", "steps_ahead"]

NEVER = -1
_FURTHEST = 2.0  # steps that rows are taken ahead: errors of the last one grow with them


class StalenessError(PolyhopError):
    """Rows of an epoch that may not be read any more, or not yet."""


@dataclass
class Ages:
    """What was read: epochs between reader and rows -> how often."""

    seen: Counter[int] = field(default_factory=Counter)

    @property
    def num_reads(self) -> int:
        return sum(self.seen.values())

    @property
    def oldest(self) -> int:
        return max(self.seen, default=0)

    def check(self, epoch: int, tags: Iterable[int], staleness: int | None) -> None:
        """Count a read of rows with these tags; StalenessError where one is out of bounds. None: of this epoch alone."""
        for tag in tags:
            age = epoch - tag
            is_allowed = (
                age == 0 if staleness is None else tag != NEVER and -staleness <= age <= staleness + 1
            )
            if not is_allowed:
                raise StalenessError(
                    f"rows of epoch {tag} were read in epoch {epoch}, and the bound is "
                    f"{'this epoch' if staleness is None else f'{staleness + 1} epochs'}: this is a fault of the server"
                )
            self.seen[age] += 1


def steps_ahead(epoch: int, tag: int, before: int) -> float:
    """s: how many steps like the last, from epoch ``before`` to ``tag``, rows are taken ahead to an epoch."""
    if tag >= epoch or before == NEVER or before >= tag:
        return 0.0
    return min((epoch - tag) / (tag - before), _FURTHEST)


@dataclass(frozen=True, eq=False)
class Reading:
    """Rows of a table as an interval reads them: where they lie, at ``sources``, or (None) made for it [S, columns]."""

    rows: Mapping[str, Tensor]
    sources: Tensor | None

    def copied(self, name: str) -> Tensor:
        """[S, columns]; of the reader's own."""
        return self.rows[name] if self.sources is None else self.rows[name].index_select(0, self.sources)


@dataclass(frozen=True)
class _Given:
    """What a reader gave back, and before that."""

    epoch: int
    gradients: Mapping[str, Tensor]
    before: _Given | None = None

    def of(self, name: str, positions: Tensor, epoch: int) -> Tensor:
        found = self.gradients[name].index_select(0, positions)
        steps = 0.0 if self.before is None else steps_ahead(epoch, self.epoch, self.before.epoch)
        if not steps or self.before is None:
            return found
        return found.add_(found - self.before.gradients[name].index_select(0, positions), alpha=steps)


class Table:
    """Of one graph operation: ``widths`` of the rows by name."""

    def __init__(
        self,
        num_rows: int,
        num_intervals: int,
        widths: Mapping[str, int],
        dtype: torch.dtype,
        *,
        extrapolates: bool = False,
    ) -> None:
        self.rows = {name: torch.zeros(num_rows, width, dtype=dtype) for name, width in widths.items()}
        self.tags = [NEVER] * num_intervals
        self._extrapolates, self._before_tags = extrapolates, [NEVER] * num_intervals
        self._before = {name: torch.zeros_like(table) for name, table in self.rows.items() if extrapolates}
        self._given: dict[int, _Given] = {}  # by reader

    def put(self, number: int, where: slice, epoch: int, rows: Mapping[str, Tensor]) -> None:
        """Rows of an interval."""
        for name, table in self.rows.items():
            if self._extrapolates:
                self._before[name][where] = table[where]
            table[where] = rows[name]
        self._before_tags[number], self.tags[number] = self.tags[number], epoch

    def reading(self, interval: Interval, epoch: int) -> Reading:
        """The rows of an interval's sources, as an epoch reads them."""
        steps = [0.0] * len(self.tags)
        if self._extrapolates:
            for read in interval.reads:
                steps[read] = steps_ahead(epoch, self.tags[read], self._before_tags[read])
        if not any(steps):
            return Reading(self.rows, interval.sources)
        made = {}
        for name, table in self.rows.items():
            now, then = (each.index_select(0, interval.sources) for each in (table, self._before[name]))
            of_rows = torch.tensor(steps, dtype=table.dtype).index_select(0, interval.source_intervals)
            made[name] = torch.addcmul(now, now - then, of_rows[:, None])
        return Reading(made, None)

    def give(self, reader: int, epoch: int, gradients: Mapping[str, Tensor]) -> None:
        """What a reader gives back for all rows that it read here."""
        last = self._given.get(reader)
        before = _Given(last.epoch, last.gradients) if self._extrapolates and last is not None else None
        self._given[reader] = _Given(epoch, dict(gradients), before)

    def given_epoch(self, reader: int) -> int:
        return self._given[reader].epoch if reader in self._given else NEVER

    def collect(self, interval: Interval, epoch: int) -> dict[str, Tensor]:
        """Gradients of an interval's rows: all that its readers gave, in their order."""
        found = {
            name: table.new_zeros(interval.num_rows, table.shape[1]) for name, table in self.rows.items()
        }
        for reader in interval.readers:
            given = self._given[reader.number]
            for name, total in found.items():
                total.index_add_(0, reader.rows, given.of(name, reader.positions, epoch))
        return found

    @property
    def num_bytes(self) -> int:
        """Of the rows, and of those before them."""
        return sum(table.nbytes for table in (*self.rows.values(), *self._before.values()))
