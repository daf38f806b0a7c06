"""Numbers of every epoch in one size of memory, however many there are: when the rows are used up, two epochs share one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["EpochTable"]

Floats = NDArray[np.float64]
_ROWS = 1024


class EpochTable:
    """Columns by key; row r has epochs ``r * width + 1`` to ``(r + 1) * width``. ``combine``: np.add or np.maximum.

    An epoch that was trained again, after a kill, is another one in the same row: a mean is over both.
    """

    def __init__(self, combine: Callable[..., Any] = np.add, max_rows: int = _ROWS) -> None:
        self._combine, self._max_rows = combine, max_rows
        self._columns: dict[Hashable, Floats] = {}
        self._counts = np.zeros(max_rows)  # epochs in each row
        self.width, self.num_rows = 1, 0

    def add(self, epoch: int, values: Mapping[Any, float]) -> None:
        """An epoch, counted from 1, is over."""
        while (epoch - 1) // self.width >= self._max_rows:
            self._halve()
        row = (epoch - 1) // self.width
        self.num_rows = max(self.num_rows, row + 1)
        self._counts[row] += 1
        for key, value in values.items():
            if key not in self._columns:
                self._columns[key] = np.zeros(self._max_rows)
            column = self._columns[key]
            column[row] = self._combine(column[row], value)

    @property
    def keys(self) -> list[Any]:
        return list(self._columns)

    def values(self, key: Hashable) -> Floats:
        """[rows] as they were combined; 0 where there was nothing."""
        column = self._columns.get(key)
        return np.zeros(self.num_rows) if column is None else column[: self.num_rows].copy()

    def means(self, key: Hashable) -> Floats:
        """[rows], of an epoch of each row; NaN where no epoch is known."""
        counts = self._counts[: self.num_rows]
        return np.where(counts > 0, self.values(key) / np.maximum(counts, 1), np.nan)

    def mean(self, key: Hashable) -> float:
        """Over all epochs."""
        return float(self.values(key).sum() / max(self._counts.sum(), 1))

    def last_epochs(self) -> list[int]:
        """Of each row, the last epoch it can have."""
        return [(row + 1) * self.width for row in range(self.num_rows)]

    def _halve(self) -> None:
        self.width *= 2
        self._counts = _paired(self._counts, np.add)
        self._columns = {key: _paired(column, self._combine) for key, column in self._columns.items()}
        self.num_rows = (self.num_rows + 1) // 2


def _paired(column: Floats, combine: Callable[..., Any]) -> Floats:
    new = np.zeros_like(column)
    pairs = column.reshape(-1, 2)
    new[: len(pairs)] = combine(pairs[:, 0], pairs[:, 1])
    return new
