"""Rows that graph operations read, and gradients that come back for them, each with the epoch that it is of.

A table belongs to one graph operation: rows of all own nodes and of the halo, an epoch for each interval's. What an interval
gives back for the rows that it read is kept by reader, and summed in the order of readers' numbers: the same bits whatever
came first. ``age`` checks what is read: rows of this epoch and of none else where ages may not differ, else rows at most
``bound`` epochs older and at most ``bound - 1`` newer. A read outside is an error, never a silent one.

Legend: S sources of a part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyhop.errors import PolyhopError
from polyhop.serverless.intervals import Interval

__all__ = ["NEVER", "Ages", "StalenessError", "Table"]

NEVER = -1


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


class Table:
    """Of one graph operation: ``widths`` of the rows by name."""

    def __init__(
        self, num_rows: int, num_intervals: int, widths: Mapping[str, int], dtype: torch.dtype
    ) -> None:
        self.rows = {name: torch.zeros(num_rows, width, dtype=dtype) for name, width in widths.items()}
        self.tags = [NEVER] * num_intervals
        self._given: dict[
            int, tuple[int, dict[str, Tensor]]
        ] = {}  # reader -> epoch, gradients of what it read

    def put(self, number: int, where: slice, epoch: int, rows: Mapping[str, Tensor]) -> None:
        """Rows of an interval."""
        for name, table in self.rows.items():
            table[where] = rows[name]
        self.tags[number] = epoch

    def give(self, reader: int, epoch: int, gradients: Mapping[str, Tensor]) -> None:
        """What a reader gives back for all rows that it read here."""
        self._given[reader] = epoch, dict(gradients)

    def given_epoch(self, reader: int) -> int:
        return self._given[reader][0] if reader in self._given else NEVER

    def collect(self, interval: Interval) -> dict[str, Tensor]:
        """Gradients of an interval's rows: all that its readers gave, in their order."""
        found = {
            name: table.new_zeros(interval.num_rows, table.shape[1]) for name, table in self.rows.items()
        }
        for reader in interval.readers:
            _, given = self._given[reader.number]
            for name, total in found.items():
                total.index_add_(0, reader.rows, given[name].index_select(0, reader.positions))
        return found

    @property
    def num_bytes(self) -> int:
        """Of the rows."""
        return sum(table.nbytes for table in self.rows.values())
